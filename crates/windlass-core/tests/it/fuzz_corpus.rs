//! Replays the committed fuzz corpora through the entry points of the fuzz targets, so that what fuzzing
//! once found stays found on every `cargo test`, with the stable toolchain and without libFuzzer.
#![allow(clippy::disallowed_methods, reason = "the ban on files is for the library; corpora are files")]

use std::path::Path;

#[path = "../../../../fuzz/src/lib.rs"]
#[allow(unreachable_pub, reason = "a library over there, a module here")]
mod entry;

/// Corpora are for regressions, not for bulk.
const MAX_BYTES: usize = 200 * 1024;

#[test]
fn every_input_of_every_fuzz_corpus_ends_in_a_value_or_an_error() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (name, target) in entry::TARGETS {
        let folder = corpora.join(name);
        let (mut files, mut bytes) = (0, 0);
        for file in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = file.unwrap().path();
            let input = std::fs::read(&path).unwrap();
            (files, bytes) = (files + 1, bytes + input.len());
            let outcome = std::panic::catch_unwind(|| target(&input));
            assert!(outcome.is_ok(), "{} makes {name} panic", path.display());
        }
        assert!(files > 0, "{name} has no corpus");
        assert!(bytes <= MAX_BYTES, "{name}: {bytes} bytes of corpus, at most {MAX_BYTES}: minimise it");
    }
}

#[test]
fn every_fuzz_corpus_belongs_to_a_target() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for folder in std::fs::read_dir(corpora).unwrap() {
        let name = folder.unwrap().file_name().into_string().unwrap();
        assert!(entry::TARGETS.iter().any(|(t, _)| *t == name), "{name} is replayed by nothing");
    }
}
