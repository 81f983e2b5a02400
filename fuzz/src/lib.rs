//! What a fuzz target does with its bytes.
//!
//! One function per target. Each feeds arbitrary bytes to a parser, which must end in a value or a named
//! error, and checks of every value what must hold of all values. The functions are called by the libFuzzer
//! targets, and by windlass-core's `fuzz_corpus` test, which includes this file and replays the committed
//! corpus on every `cargo test`, so nothing here may need more than windlass-core.

use windlass_core::manifest::{Manifest, ManifestError, SafetensorsHeader};

/// What a target does with one input; it panics if something does not hold.
pub type Target = fn(&[u8]);

/// Every target, by name; `fuzz/corpus/NAME` holds its corpus.
pub const TARGETS: &[(&str, Target)] = &[("manifest", manifest)];

/// Enough blocks to see that a cut table is sound; an image may have billions.
const BLOCKS: u32 = 1000;

/// A manifest as JSON, or a safetensors header.
pub fn manifest(data: &[u8]) {
    if let Ok(manifest) = Manifest::from_json(data) {
        check_manifest(&manifest);
    }
    // Whether the length of the file fits is not what is looked for, so let it fit.
    let header = match SafetensorsHeader::parse(data, data.len() as u64) {
        Err(ManifestError::DataLength { need, have }) => {
            let start = data.len() as u64 - have;
            SafetensorsHeader::parse(data, start.saturating_add(need))
        }
        other => other,
    };
    if let Ok(header) = header
        && let Ok(manifest) = header.manifest()
    {
        assert_eq!(manifest.data_bytes(), header.data_bytes, "canonical order has no holes either");
        check_manifest(&manifest);
    }
}

fn check_manifest(manifest: &Manifest) {
    let json = manifest.to_json();
    let again = Manifest::from_json(json.as_bytes()).expect("our own JSON parses");
    assert_eq!(&again, manifest);
    assert_eq!(again.to_json(), json, "the JSON is canonical");

    let header = manifest.to_safetensors_header();
    let file_len = header.len() as u64 + manifest.data_bytes();
    let again = SafetensorsHeader::parse(&header, file_len).expect("our own header parses");
    let again = again.manifest().expect("and has a manifest");
    assert_eq!((again.tensors(), again.aliases()), (manifest.tensors(), manifest.aliases()));
    assert_eq!(again.layout_hash(), manifest.layout_hash(), "the layout hash leaves cuts out");

    let mut at = 0;
    for (i, tensor) in manifest.tensors().iter().enumerate() {
        assert_eq!((manifest.find(&tensor.name), tensor.offset), (Some(i), at));
        at += tensor.bytes;
    }
    assert_eq!(at, manifest.data_bytes());
    for b in 0..manifest.cuts().blocks().min(BLOCKS) {
        let block = manifest.cuts().block(b).expect("a block that is counted exists");
        let units = manifest.tensors()[block.tensor as usize].units();
        assert!(block.units() > 0 && block.tensor_unit(block.units() - 1) < units, "{block:?}");
    }
}
