//! What a fuzz target does with its bytes.
//!
//! One function per target. Each feeds arbitrary bytes to a parser, which must end in a value or a named
//! error, and checks of every value what must hold of all values. The functions are called by the libFuzzer
//! targets, and by windlass-core's `fuzz_corpus` test, which includes this file and replays the committed
//! corpus on every `cargo test`, so nothing here may need more than windlass-core and what it depends on.

use std::collections::BTreeMap;

use windlass_core::Dtype;
use windlass_core::delta::container::Piece;
use windlass_core::delta::{Applier, Composer, Delta, DeltaHeader, Encoder, Mode, Outcome, Record, Tile};
use windlass_core::delta_mode::{Roster, cover};
use windlass_core::digest::{BlockSum, sum_block};
use windlass_core::kernel::Portable;
use windlass_core::manifest::{Manifest, ManifestError, SafetensorsHeader, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::request::{WeightUpdateRequest, parse_request, parse_request_json};
use windlass_core::store::{AnchorIndex, Chain, Head, Object, VersionIndex, Way};
use windlass_core::sync_info::WeightSyncInfo;
use windlass_core::wire::{Frame, HEADER_LEN, Header, Ticket, decode_frame, decode_header};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// What a target does with one input; it panics if something does not hold.
pub type Target = fn(&[u8]);

/// Every target, by name; `fuzz/corpus/NAME` holds its corpus.
pub const TARGETS: &[(&str, Target)] = &[
    ("manifest", manifest),
    ("delta", delta),
    ("roster", roster),
    ("request", request),
    ("frame", frame),
    ("store", store),
];

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

/// The documents of a store, and the name of an object.
pub fn store(data: &[u8]) {
    if let Ok(index) = VersionIndex::from_json(data) {
        assert_eq!(VersionIndex::from_json(&index.to_json()).as_ref(), Ok(&index));
        let (chain, to) = (Chain::new(&index), index.identity.version);
        assert!(matches!(chain.way(None, to), Some(Way::Anchor { .. })), "an anchor always leads there");
        let passed = [index.anchor.start, index.anchor.version, to];
        for version in passed.into_iter().chain(index.deltas.iter().map(|d| d.target)) {
            let digest = chain.digest_of(version).expect("the chain passes it");
            assert_eq!(index.digest_of(version), Some(digest));
            let deltas = chain.between(version, to).unwrap_or_default();
            assert!(deltas.windows(2).all(|w| w[0].target == w[1].base && w[0].base < w[0].target));
            assert_eq!(deltas.is_empty(), version == to);
        }
    }
    if let Ok(anchor) = AnchorIndex::from_json(data) {
        assert_eq!(AnchorIndex::from_json(&anchor.to_json()).as_ref(), Ok(&anchor));
        let versions = anchor.block_versions().expect("its parts are in order");
        assert_eq!(versions.covered().len(), anchor.blocks);
        for part in anchor.parts.iter().take(BLOCKS as usize) {
            assert!(versions.version_of(part.first) == Some(part.version) && part.version >= anchor.start);
        }
    }
    if let Ok(head) = Head::from_json(data) {
        assert_eq!(Head::from_object(&head.to_object()), Ok(head.clone()));
        assert_eq!(Head::from_json(&head.to_json()), Ok(head));
    }
    let _ = (Head::from_object(data), VersionIndex::from_object(data));
    if let Ok(name) = std::str::from_utf8(data)
        && let Some(object) = Object::parse(name)
    {
        assert_eq!(object.to_string(), name);
    }
}

/// A delta container, and a single record behind it.
pub fn delta(data: &[u8]) {
    check_container(data);
    // Behind the sums there is more to parse than a mutation would ever reach.
    let mut mended = data.to_vec();
    mend(&mut mended);
    check_container(&mended);
    if let [dtype, mode, payload @ ..] = data {
        let dtype = Dtype::ALL[usize::from(*dtype) % Dtype::ALL.len()];
        check_record(dtype, Mode::ALL[usize::from(*mode) % 4], payload);
        check_round_trip(dtype, payload);
    }
}

fn check_container(bytes: &[u8]) {
    let Ok(delta) = Delta::parse(bytes) else { return };
    let header = delta.header.to_bytes();
    assert_eq!(header, bytes[..header.len()], "a header has one form");
    let mut last = None;
    for (entry, record) in delta.entries().iter().zip(delta.records()) {
        assert!(last < Some(entry.block) && entry.block < delta.header.blocks, "ascending, and in the table");
        assert_eq!(delta.find(entry.block), Some(record));
        check_record(Dtype::BF16, record.mode, record.payload);
        last = Some(entry.block);
    }
}

/// Sets every sum that the container's own lengths lead to.
fn mend(bytes: &mut [u8]) {
    let Some(len) = bytes.get(8..12).and_then(|b| b.first_chunk::<4>()) else { return };
    let mut at = u32::from_le_bytes(*len) as usize;
    if at < 8 || at > bytes.len() {
        return;
    }
    let sum = xxh3_64(&bytes[..at - 8]);
    bytes[at - 8..at].copy_from_slice(&sum.to_le_bytes());
    if DeltaHeader::parse(bytes).is_err() {
        return;
    }
    while let Ok(Some(len)) = Piece::len(&bytes[at..])
        && let Some(piece) = bytes.get_mut(at..at + len)
    {
        if piece.starts_with(b"PART") {
            let mut sum = Xxh3::new();
            sum.update(&piece[..16]);
            sum.update(&piece[24..]);
            piece[16..24].copy_from_slice(&sum.digest().to_le_bytes());
        } else {
            let sum = xxh3_64(&piece[..len - 8]);
            piece[len - 8..].copy_from_slice(&sum.to_le_bytes());
        }
        at += len;
    }
}

/// One block of this dtype and a state of it with small, large, special and equal units.
fn block(dtype: Dtype) -> (Tile, Vec<u8>) {
    let specs = [TensorSpec::new("w", dtype, [64])];
    let manifest = Manifest::new(specs, BTreeMap::new()).expect("a good manifest");
    let tile = Tile::of(&manifest, 0).expect("it has a block");
    let bytes = (0..tile.bytes()).map(|i| [0x00, 0x3f, 0x80, 0xff, 0x41, 0x7f][i * i % 6] ^ (i / 8) as u8);
    (tile, bytes.collect())
}

/// Whatever a record holds, it is applied whole or not at all.
fn check_record(dtype: Dtype, mode: Mode, payload: &[u8]) {
    let (tile, old) = block(dtype);
    let current = sum_block(&Portable, &tile.block, tile.unit, &old);
    let record = Record { block: 0, mode, sum: BlockSum::from_bytes([7; 16]), payload };
    let mut applier = Applier::new();
    let mut bytes = old.clone();
    let outcome = applier.apply(&Portable, &tile, &record, current, &mut bytes);
    if let Ok(Outcome::Applied) = outcome {
        assert_eq!(sum_block(&Portable, &tile.block, tile.unit, &bytes), record.sum);
    } else {
        assert_eq!(bytes, old, "nothing is written");
    }
    let mut out = Vec::new();
    if let Ok(Some(encoded)) = Composer::new().compose(&tile, &[record, record], &mut out) {
        let twice = Record { block: 0, mode: encoded.mode, sum: encoded.sum, payload: &out };
        let composed = applier.apply(&Portable, &tile, &twice, current, &mut bytes);
        assert!(encoded.mode == Mode::Dense || composed.is_ok(), "what the composer writes can be read");
    }
}

/// From any state to any state and back again.
fn check_round_trip(dtype: Dtype, noise: &[u8]) {
    let (tile, old) = block(dtype);
    let mut new = old.clone();
    new.iter_mut().zip(noise).for_each(|(n, x)| *n ^= x);
    let sum = |bytes: &[u8]| sum_block(&Portable, &tile.block, tile.unit, bytes);
    for mut encoder in [Encoder::plain(), Encoder::with_context()] {
        let mut payload = Vec::new();
        let Some(encoded) = encoder.encode(&Portable, &tile, (&old, sum(&old)), &new, &mut payload) else {
            assert_eq!(old, new);
            continue;
        };
        assert_eq!(encoded.sum, sum(&new));
        assert!(payload.len() <= tile.bytes(), "a record is never longer than its block");
        let record = Record { block: 0, mode: encoded.mode, sum: encoded.sum, payload: &payload };
        let mut bytes = old.clone();
        let apply = |current, bytes: &mut [u8]| {
            Applier::new().apply(&Portable, &tile, &record, current, bytes).expect("our own record")
        };
        assert_eq!((apply(sum(&old), &mut bytes), &bytes), (Outcome::Applied, &new));
        assert_eq!((apply(sum(&new), &mut bytes), &bytes), (Outcome::Skipped, &new));
    }
}

/// A rank's roster, and what is made of several of them.
pub fn roster(data: &[u8]) {
    check_roster(data);
    // Behind the sum, as with deltas.
    let mut mended = data.to_vec();
    let len = mended.len();
    if let Some(field) = mended.get_mut(8..12) {
        field.copy_from_slice(&(len as u32).to_le_bytes());
    }
    if let Some((body, sum)) = mended.split_last_chunk_mut::<8>() {
        *sum = xxh3_64(body).to_le_bytes();
    }
    check_roster(&mended);
}

fn check_roster(bytes: &[u8]) {
    let Ok(roster) = Roster::parse(bytes) else { return };
    assert_eq!(roster.to_bytes(), bytes, "a roster has one form");
    assert!(roster.rank < roster.ranks);
    let specs = [TensorSpec::new("w", Dtype::U8, [300_000])];
    let manifest = Manifest::new(specs, BTreeMap::new()).expect("a good manifest");
    let held = BlockRanges::from(0..manifest.cuts().blocks());
    let (layout_hash, cuts_hash) = (manifest.layout_hash(), manifest.cuts_hash());
    let alone = Roster { rank: 0, ranks: 1, layout_hash, cuts_hash, ..roster };
    let covers = cover(&manifest, alone.incarnation, &held, std::slice::from_ref(&alone)).is_ok();
    assert_eq!(covers, alone.blocks == held);
}

/// A weight update request in any of its forms, sync info, or a ticket.
pub fn request(data: &[u8]) {
    if let Ok(request) = parse_request_json(data) {
        let value = request.to_value();
        assert_eq!(WeightUpdateRequest::from_value(&value).expect("our own value"), request);
        assert_eq!(parse_request_json(request.to_json().as_bytes()).expect("our own JSON"), request);
        if let Ok(dict) = request.to_legacy_dict() {
            assert_eq!(parse_request(&dict).expect("our own dictionary"), request);
        }
    }
    if let Ok(info) = WeightSyncInfo::from_json(data) {
        assert_eq!(WeightSyncInfo::from_json(info.to_json().as_bytes()).expect("our own JSON"), info);
    }
    if let Ok(ticket) = Ticket::from_json(data) {
        let json = ticket.to_json().expect("a ticket that was read can be written");
        let again = Ticket::from_json(json.as_bytes()).expect("our own JSON");
        assert_eq!(again.to_json().ok(), Some(json));
    }
}

/// A run of frames.
pub fn frame(data: &[u8]) {
    check_frames(data);
    // As with deltas: set the header's check, so that what it guards is reached.
    let mut mended = data.to_vec();
    if let Some(header) = mended.get_mut(..HEADER_LEN) {
        let check = xxh3_64(&header[..HEADER_LEN - 4]) as u32;
        header[HEADER_LEN - 4..].copy_from_slice(&check.to_le_bytes());
        check_frames(&mended);
    }
}

fn check_frames(mut bytes: &[u8]) {
    while let Ok(Some((frame, len))) = decode_frame(bytes) {
        let Some((this, rest)) = bytes.split_at_checked(len) else {
            panic!("{len} bytes taken, fewer given")
        };
        let header: Header = match &frame {
            Frame::Message(header, message) => {
                let again = message.encode(header.stream).expect("what was decoded can be encoded");
                // Only the minor version may differ, and a refusal's text that was cut to its limit.
                let (other, taken) = decode_frame(&again).expect("and decoded").expect("whole");
                let Frame::Message(_, other) = other else { panic!("a message stays one") };
                assert_eq!((&other, taken), (message, again.len()));
                *header
            }
            Frame::Data(header, body) => {
                assert_eq!(body.len() + HEADER_LEN, len);
                *header
            }
        };
        assert_eq!(header.encode(), this[..HEADER_LEN], "a header has one form");
        assert_eq!(decode_header(&this[..HEADER_LEN]).ok().flatten(), Some(header));
        for cut in [0, HEADER_LEN - 1, len - 1] {
            assert!(matches!(decode_frame(&this[..cut]), Ok(None)), "a part of a frame asks for more");
        }
        bytes = rest;
    }
}
