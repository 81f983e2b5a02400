use std::collections::BTreeMap;

use proptest::prelude::*;

use super::container::Piece;
use super::*;
use crate::digest::{SumTable, sum_block};
use crate::dtype::Dtype;
use crate::identity::{Incarnation, ModelId};
use crate::kernel::Portable;
use crate::manifest::{DimCut, TensorSpec};
use crate::ranges::BlockRanges;

/// A small deterministic generator; the tests want bits, not quality.
pub(super) struct Bits(pub(super) u64);

impl Bits {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ self.0 >> 33;
        x.wrapping_mul(0xff51_afd7_ed55_8ccd) ^ x >> 29
    }

    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// How a test changes a block.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Each unit with this chance in 1000, by a small step or, one time in ten, to anything.
    Some(u64),
    /// Every unit to anything.
    All,
    /// Special patterns: zeros, infinities, NaNs with payloads.
    Special,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => prop_oneof![Just(0u64), Just(3), Just(15), Just(40), Just(200), Just(500), Just(1000)].prop_map(Change::Some),
        1 => Just(Change::All),
        1 => Just(Change::Special),
    ]
}

fn changed(bits: &mut Bits, old: &[u8], unit: usize, change: Change) -> Vec<u8> {
    let mut new = old.to_vec();
    for slot in new.chunks_exact_mut(unit) {
        let value = match change {
            Change::Some(chance) if bits.next() % 1000 >= chance => continue,
            Change::Some(_) if !bits.next().is_multiple_of(10) => {
                let step = (bits.next() % 5).wrapping_sub(2);
                crate::kernel::read_unit(slot).wrapping_add(step)
            }
            Change::Some(_) | Change::All => bits.next(),
            Change::Special => {
                let top = 1u64 << (8 * unit - 1);
                [0, top, top - 1, u64::MAX, top | 1, 1, 0x7fc1, 0xff80][bits.next() as usize % 8]
            }
        };
        slot.copy_from_slice(&value.to_le_bytes()[..unit]);
    }
    new
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL)
}

fn manifest(dtype: Dtype, rows: u64, cols: u64, cut: bool) -> Manifest {
    let cuts = if cut && cols > 4 { vec![DimCut { dim: 1, bounds: vec![4] }] } else { vec![] };
    // Rows of four keep packed elements in whole bytes.
    Manifest::new([TensorSpec::new("w", dtype, [rows, cols * 4])], BTreeMap::new())
        .unwrap()
        .with_cuts(&BTreeMap::from([("w".to_owned(), cuts)]))
        .unwrap()
}

fn gather(m: &Manifest, tile: &Tile, image: &[u8]) -> Vec<u8> {
    m.byte_runs(&tile.block).flat_map(|r| &image[r.start as usize..r.end as usize]).copied().collect()
}

fn scatter(m: &Manifest, tile: &Tile, block: &[u8], image: &mut [u8]) {
    let run = tile.block.run as usize * tile.unit;
    for (r, bytes) in m.byte_runs(&tile.block).zip(block.chunks_exact(run)) {
        image[r.start as usize..r.end as usize].copy_from_slice(bytes);
    }
}

pub(super) fn table(m: &Manifest, image: &[u8]) -> SumTable {
    let sum = |b| {
        let tile = Tile::of(m, b).unwrap();
        sum_block(&Portable, &tile.block, tile.unit, &gather(m, &tile, image))
    };
    SumTable::new(m, (0..m.cuts().blocks()).map(sum).collect())
}

fn header(m: &Manifest, versions: (u64, u64), digests: (&SumTable, &SumTable)) -> DeltaHeader {
    DeltaHeader {
        model_id: ModelId::new("policy").unwrap(),
        base: (Incarnation(7), versions.0),
        target: (Incarnation(7), versions.1),
        layout_hash: m.layout_hash(),
        cuts_hash: m.cuts_hash(),
        base_digest: digests.0.digest(m),
        target_digest: digests.1.digest(m),
        blocks: m.cuts().blocks(),
    }
}

fn make(m: &Manifest, versions: (u64, u64), old: &[u8], new: &[u8], encoder: Encoder) -> Vec<u8> {
    make_parts(m, versions, old, new, encoder, &[(0..m.cuts().blocks()).into()])
}

/// A container with a part for each of these sets of blocks.
pub(super) fn make_parts(
    m: &Manifest,
    versions: (u64, u64),
    old: &[u8],
    new: &[u8],
    mut encoder: Encoder,
    parts: &[BlockRanges],
) -> Vec<u8> {
    let (old_table, new_table) = (table(m, old), table(m, new));
    let mut out = header(m, versions, (&old_table, &new_table)).to_bytes();
    let mut builder = PartBuilder::new();
    for blocks in parts {
        for b in blocks.iter() {
            let tile = Tile::of(m, b).unwrap();
            let (o, n) = (gather(m, &tile, old), gather(m, &tile, new));
            let mut payload = Vec::new();
            if let Some(e) = encoder.encode(&Portable, &tile, (&o, old_table.get(b)), &n, &mut payload) {
                assert_eq!(e.sum, new_table.get(b), "the sum follows the changes");
                builder.push(b, &e, &payload, &mut out);
            } else {
                assert_eq!(o, n);
            }
        }
        builder.close(&mut out);
    }
    builder.finish(&mut out);
    out
}

pub(super) fn apply_all(
    m: &Manifest,
    image: &mut [u8],
    table: &mut SumTable,
    delta: &Delta<'_>,
) -> Vec<Outcome> {
    delta.header.check(m).unwrap();
    let mut applier = Applier::new();
    let mut outcomes = Vec::new();
    for record in delta.records() {
        let tile = Tile::of(m, record.block).unwrap();
        let mut block = gather(m, &tile, image);
        let before = block.clone();
        let outcome = applier.apply(&Portable, &tile, &record, table.get(record.block), &mut block).unwrap();
        match outcome {
            Outcome::Applied => table.set(record.block, tile.block.tensor, record.sum),
            Outcome::Skipped | Outcome::Refetch => assert_eq!(block, before, "nothing is written"),
        }
        scatter(m, &tile, &block, image);
        outcomes.push(outcome);
    }
    outcomes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn deltas_are_bit_exact_for_every_dtype(
        dtype in dtype(), rows in 1u64..60, cols in 1u64..600, cut: bool, change in change(), seed: u64, context: bool,
    ) {
        let m = manifest(dtype, rows, cols, cut);
        let mut bits = Bits(seed);
        let old = bits.bytes(m.data_bytes() as usize);
        let new = changed(&mut bits, &old, dtype.unit(), change);
        let encoder = if context { Encoder::with_context() } else { Encoder::plain() };
        let bytes = make(&m, (1, 2), &old, &new, encoder);
        let delta = Delta::parse(&bytes).unwrap();
        let (mut image, mut sums) = (old.clone(), table(&m, &old));
        prop_assert_eq!(sums.digest(&m), delta.header.base_digest);
        let outcomes = apply_all(&m, &mut image, &mut sums, &delta);
        prop_assert!(outcomes.iter().all(|&o| o == Outcome::Applied));
        prop_assert!(image == new);
        prop_assert_eq!(sums.digest(&m), delta.header.target_digest);
        // Twice changes nothing.
        let again = apply_all(&m, &mut image, &mut sums, &delta);
        prop_assert!(again.iter().all(|&o| o == Outcome::Skipped));
        prop_assert!(image == new);
        // No form is longer than the block.
        for r in delta.records() {
            prop_assert!(r.payload.len() <= Tile::of(&m, r.block).unwrap().bytes());
        }
    }

    #[test]
    fn a_record_taken_back_leaves_the_bits_that_were_there(
        dtype in dtype(), rows in 1u64..60, cols in 1u64..600, cut: bool, change in change(), seed: u64,
    ) {
        let m = manifest(dtype, rows, cols, cut);
        let mut bits = Bits(seed);
        let old = bits.bytes(m.data_bytes() as usize);
        let new = changed(&mut bits, &old, dtype.unit(), change);
        let bytes = make(&m, (1, 2), &old, &new, Encoder::plain());
        let (mut image, before, mut applier) = (new.clone(), table(&m, &old), Applier::new());
        for record in Delta::parse(&bytes).unwrap().records() {
            let tile = Tile::of(&m, record.block).unwrap();
            let mut block = gather(&m, &tile, &image);
            match applier.revert(&tile, &record, &mut block) {
                Ok(sum) => prop_assert_eq!(sum, before.get(record.block)),
                Err(e) => {
                    prop_assert!(matches!(e, DeltaError::OneWay { .. }) && record.mode == Mode::Dense, "{}", e);
                    prop_assert!(block == gather(&m, &tile, &new), "a refusal changes nothing");
                    block = gather(&m, &tile, &old);
                }
            }
            scatter(&m, &tile, &block, &mut image);
        }
        prop_assert!(image == old);
    }

    #[test]
    fn the_positions_of_a_record_are_the_units_that_changed(
        dtype in dtype(), rows in 1u64..60, cols in 1u64..600, cut: bool, change in change(), seed: u64, context: bool,
    ) {
        let m = manifest(dtype, rows, cols, cut);
        let (mut bits, unit) = (Bits(seed), dtype.unit());
        let old = bits.bytes(m.data_bytes() as usize);
        let new = changed(&mut bits, &old, unit, change);
        let encoder = if context { Encoder::with_context() } else { Encoder::plain() };
        let bytes = make(&m, (1, 2), &old, &new, encoder);
        let delta = Delta::parse(&bytes).unwrap();
        let units = old.len() / unit;
        let differs = |u: usize| old[u * unit..][..unit] != new[u * unit..][..unit];
        let (mut found, mut positions) = (vec![false; units], Positions::new());
        for record in delta.records() {
            let tile = Tile::of(&m, record.block).unwrap();
            let unit_of = |p: u16| tile.block.tensor_unit(p.into()) as usize;
            let told = positions::count(&tile, &record).unwrap();
            match positions.of(&tile, &record) {
                Err(DeltaError::ContextNeedsImage { .. }) => {
                    prop_assert_eq!(record.mode, Mode::Context);
                    (0..tile.units()).for_each(|p| found[unit_of(p as u16)] |= differs(unit_of(p as u16)));
                }
                Ok(Changed::All) => {
                    prop_assert_eq!((record.mode, told), (Mode::Dense, tile.units()));
                    (0..tile.units()).for_each(|p| found[unit_of(p as u16)] |= differs(unit_of(p as u16)));
                }
                Ok(Changed::At(these)) => {
                    prop_assert!(these.is_sorted_by(|a, b| a < b) && these.len() == told);
                    these.iter().for_each(|&p| found[unit_of(p)] = true);
                }
                Err(e) => prop_assert!(false, "{}", e),
            }
        }
        prop_assert!((0..units).all(|u| found[u] == differs(u)));
    }

    #[test]
    fn damaged_records_never_name_a_position_beyond_their_block(
        dtype in dtype(), units in 1u64..600, mode in prop::sample::select(&Mode::ALL[..]),
        mut payload in prop::collection::vec(any::<u8>(), 0..200), head in prop::option::of((0u16..40, 0u8..20, 0u8..20)),
    ) {
        let m = manifest(dtype, 1, units, false);
        let tile = Tile::of(&m, 0).unwrap();
        if let Some((n, k, v)) = head {
            let [a, b] = n.to_le_bytes();
            payload.splice(..0, [a, b, k, v]);
        }
        let record = Record { block: 0, mode, sum: BlockSum([1, 1]), payload: &payload };
        let mut positions = Positions::new();
        if let Ok(Changed::At(these)) = positions.of(&tile, &record) {
            prop_assert!(these.iter().all(|&p| usize::from(p) < tile.units()));
            prop_assert!(these.is_sorted_by(|a, b| a < b));
            prop_assert_eq!(positions::count(&tile, &record).unwrap(), these.len());
        }
    }

    #[test]
    fn a_wrong_base_is_refused_and_untouched(dtype in dtype(), seed: u64, context: bool, at: prop::sample::Index) {
        let m = manifest(dtype, 7, 100, false);
        let mut bits = Bits(seed);
        let old = bits.bytes(m.data_bytes() as usize);
        let new = changed(&mut bits, &old, dtype.unit(), Change::Some(30));
        prop_assume!(old != new);
        let encoder = if context { Encoder::with_context() } else { Encoder::plain() };
        let bytes = make(&m, (1, 2), &old, &new, encoder);
        let delta = Delta::parse(&bytes).unwrap();
        // One byte of the base is another, and its table knows.
        let mut image = old.clone();
        image[at.index(old.len())] ^= 0x10;
        prop_assume!(image != new);
        let mut sums = table(&m, &image);
        let outcomes = apply_all(&m, &mut image, &mut sums, &delta);
        if delta.records().all(|r| r.mode == Mode::Dense) {
            // A dense record needs no base.
            prop_assert_eq!(outcomes, [Outcome::Applied]);
            prop_assert!(image == new);
        } else {
            prop_assert_eq!(outcomes, [Outcome::Refetch]);
        }
    }

    #[test]
    fn composition_is_the_direct_delta(
        dtype in dtype(), rows in 1u64..40, cut: bool, first in change(), second in change(), seed: u64, back: bool,
    ) {
        let m = manifest(dtype, rows, 300, cut);
        let mut bits = Bits(seed);
        let a = bits.bytes(m.data_bytes() as usize);
        let b = changed(&mut bits, &a, dtype.unit(), first);
        let c = if back { a.clone() } else { changed(&mut bits, &b, dtype.unit(), second) };
        let (ab, bc) = (make(&m, (1, 2), &a, &b, Encoder::plain()), make(&m, (2, 3), &b, &c, Encoder::plain()));
        let ac = make(&m, (1, 3), &a, &c, Encoder::plain());
        let (ab, bc) = (Delta::parse(&ab).unwrap(), Delta::parse(&bc).unwrap());
        let composed = compose(&m, &ab, &bc).unwrap();
        let (composed, direct) = (Delta::parse(&composed).unwrap(), Delta::parse(&ac).unwrap());
        prop_assert_eq!(&composed.header, &direct.header);
        let (mut image, mut sums) = (a.clone(), table(&m, &a));
        apply_all(&m, &mut image, &mut sums, &composed);
        prop_assert!(image == c);
        prop_assert_eq!(sums.digest(&m), composed.header.target_digest);
        // Without dense records on the way, it is the same to the byte.
        let modes = |d: &Delta<'_>| d.records().any(|r| r.mode == Mode::Dense);
        if !modes(&ab) && !modes(&bc) && !modes(&direct) {
            prop_assert!(composed.records().eq(direct.records()));
            prop_assert_eq!(composed.changes, direct.changes);
        }
    }

    #[test]
    fn many_records_of_a_block_compose_as_they_do_one_by_one(
        dtype in dtype(), units in 1u64..3000, changes in prop::collection::vec(change(), 1..7), seed: u64,
    ) {
        let m = manifest(dtype, 1, units, false);
        let tile = Tile::of(&m, 0).unwrap();
        let mut bits = Bits(seed);
        let mut states = vec![bits.bytes(tile.bytes())];
        for change in changes {
            let next = changed(&mut bits, states.last().unwrap(), dtype.unit(), change);
            states.push(next);
        }
        let sum = |state: &[u8]| sum_block(&Portable, &tile.block, tile.unit, state);
        let mut payloads = Vec::new();
        for pair in states.windows(2) {
            let mut payload = Vec::new();
            let old = (pair[0].as_slice(), sum(&pair[0]));
            if let Some(e) = Encoder::plain().encode(&Portable, &tile, old, &pair[1], &mut payload) {
                payloads.push((e, payload));
            }
        }
        let record = |(e, payload): &'_ (Encoded, Vec<u8>)| (e.mode, e.sum, payload.clone());
        let all: Vec<_> = payloads.iter().map(record).collect();
        let records: Vec<Record<'_>> =
            all.iter().map(|(mode, sum, payload)| Record { block: 0, mode: *mode, sum: *sum, payload }).collect();
        let mut composer = Composer::new();
        let (mut out, mut kept) = (Vec::new(), None);
        let at_once = composer.compose(&tile, &records, &mut out).unwrap();
        // One by one: what was composed so far, and the next.
        for next in &records {
            let mut made = Vec::new();
            let so_far: Option<&(Encoded, Vec<u8>)> = kept.as_ref();
            let so_far = so_far.map(|(e, p)| Record { block: 0, mode: e.mode, sum: e.sum, payload: p });
            let both: Vec<_> = so_far.into_iter().chain([*next]).collect();
            kept = composer.compose(&tile, &both, &mut made).unwrap().map(|e| (e, made));
        }
        prop_assert_eq!(at_once.map(|e| (e, out.clone())), kept);
        let mut image = states[0].clone();
        if let Some(e) = at_once {
            let record = Record { block: 0, mode: e.mode, sum: e.sum, payload: &out };
            let outcome = Applier::new().apply(&Portable, &tile, &record, sum(&states[0]), &mut image);
            prop_assert!(matches!(outcome, Ok(Outcome::Applied | Outcome::Skipped)));
        }
        prop_assert!(&image == states.last().unwrap());
    }

    #[test]
    fn records_of_any_bytes_end_in_an_outcome_or_a_named_error(
        dtype in dtype(), units in 1u64..600, seed: u64, mode in prop::sample::select(&Mode::ALL[..]),
        payload in prop::collection::vec(any::<u8>(), 0..200), head in prop::option::of((0u16..40, 0u8..20, 0u8..20)),
    ) {
        let m = manifest(dtype, 1, units, false);
        let tile = Tile::of(&m, 0).unwrap();
        let mut block = Bits(seed).bytes(tile.bytes());
        let before = block.clone();
        let mut payload = payload;
        if let Some((n, k, v)) = head {
            // A plausible head lets the noise get further.
            let mut plausible = n.to_le_bytes().to_vec();
            plausible.extend(if mode == Mode::Context { vec![120, 0xd0] } else { vec![k, v] });
            payload.splice(..0, plausible);
        }
        let sum = BlockSum([seed, 1]);
        let current = sum_block(&Portable, &tile.block, tile.unit, &block);
        let record = Record { block: 0, mode, sum, payload: &payload };
        let outcome = Applier::new().apply(&Portable, &tile, &record, current, &mut block);
        prop_assert!(!matches!(outcome, Ok(Outcome::Applied | Outcome::Skipped)));
        prop_assert!(block == before);
        let _ = Composer::new().compose(&tile, &[record, record], &mut Vec::new());
    }

    #[test]
    fn containers_of_any_bytes_end_in_a_value_or_a_named_error(
        seed: u64, cut in any::<prop::sample::Index>(), flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..4), noise in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let _ = Delta::parse(&noise);
        let _ = Piece::parse(&noise, 9);
        let m = manifest(Dtype::BF16, 3, 100, true);
        let mut bits = Bits(seed);
        let old = bits.bytes(m.data_bytes() as usize);
        let new = changed(&mut bits, &old, 2, Change::Some(40));
        let good = make(&m, (1, 2), &old, &new, Encoder::plain());
        prop_assert!(Delta::parse(&good).is_ok());
        prop_assert!(Delta::parse(&good[..cut.index(good.len())]).is_err());
        let mut bad = good.clone();
        flips.iter().for_each(|(at, x)| bad[at.index(good.len())] ^= x);
        prop_assert_eq!(Delta::parse(&bad).is_ok(), bad == good);
    }
}

#[test]
fn empty_and_scalar_tensors_have_deltas() {
    let specs = [
        TensorSpec::new("empty", Dtype::BF16, [0, 5]),
        TensorSpec::new("scalar", Dtype::F32, []),
        TensorSpec::new("one", Dtype::U8, [1]),
    ];
    let m = Manifest::new(specs, BTreeMap::new()).unwrap();
    assert_eq!(m.cuts().blocks(), 2);
    let (old, new) = (vec![0, 0, 0x80, 0x3f, 1], vec![0, 0, 0x80, 0xbf, 1]);
    let bytes = make(&m, (1, 2), &old, &new, Encoder::plain());
    let delta = Delta::parse(&bytes).unwrap();
    assert_eq!((delta.entries().len(), delta.changes), (1, 1));
    let (mut image, mut sums) = (old.clone(), table(&m, &old));
    assert_eq!(apply_all(&m, &mut image, &mut sums, &delta), [Outcome::Applied]);
    assert_eq!(image, new);
    // Nothing changed at all: a container without parts.
    let bytes = make(&m, (2, 3), &new, &new, Encoder::plain());
    assert_eq!(Delta::parse(&bytes).unwrap().entries().len(), 0);
}

#[test]
fn change_of_half_the_units_degrades_to_no_more_than_the_image() {
    let m = manifest(Dtype::BF16, 1, 32_768, false);
    let mut bits = Bits(5);
    let old = bits.bytes(m.data_bytes() as usize);
    for chance in [500, 1000] {
        let new = changed(&mut bits, &old, 2, Change::Some(chance));
        let bytes = make(&m, (1, 2), &old, &new, Encoder::plain());
        assert!(bytes.len() < old.len(), "{}", bytes.len());
    }
    let new = changed(&mut bits, &old, 2, Change::All);
    let bytes = make(&m, (1, 2), &old, &new, Encoder::plain());
    assert!(bytes.len() < old.len() + 300, "{}", bytes.len());
}

#[test]
fn parts_may_come_in_any_order_but_not_twice() {
    let m = manifest(Dtype::F32, 4, 100_000, false);
    let mut bits = Bits(9);
    let old = bits.bytes(m.data_bytes() as usize);
    let new = changed(&mut bits, &old, 4, Change::Some(500));
    let bytes = make(&m, (1, 2), &old, &new, Encoder::plain());
    let (head, head_len) = DeltaHeader::parse(&bytes).unwrap();
    let mut pieces = Vec::new();
    let mut at = head_len;
    while let Piece::Part(_, len) = Piece::parse(&bytes[at..], head.blocks).unwrap() {
        assert_eq!(Piece::len(&bytes[at..at + 24]).unwrap(), Some(len));
        pieces.push(&bytes[at..at + len]);
        at += len;
    }
    assert!(pieces.len() > 3);
    let end = &bytes[at..];
    pieces.reverse();
    let shuffled = [&bytes[..head_len], &pieces.concat(), end].concat();
    let (a, b) = (Delta::parse(&bytes).unwrap(), Delta::parse(&shuffled).unwrap());
    assert!(a.records().eq(b.records()));
    let twice = [&bytes[..head_len], &pieces.concat(), pieces[0], end].concat();
    assert!(matches!(Delta::parse(&twice), Err(DeltaError::Malformed { .. })));
    let last = pieces.len() - 1;
    pieces[last] = pieces[0];
    let doubled = [&bytes[..head_len], &pieces.concat(), end].concat();
    let got = Delta::parse(&doubled);
    assert!(matches!(got, Err(DeltaError::Malformed { .. } | DeltaError::DuplicateBlock { .. })), "{got:?}");
}

#[test]
fn deltas_for_another_image_are_refused() {
    let m = manifest(Dtype::BF16, 4, 100, false);
    let mut bits = Bits(1);
    let old = bits.bytes(m.data_bytes() as usize);
    let new = changed(&mut bits, &old, 2, Change::Some(10));
    let bytes = make(&m, (1, 2), &old, &new, Encoder::plain());
    let delta = Delta::parse(&bytes).unwrap();
    let cut = manifest(Dtype::BF16, 4, 100, true);
    assert!(matches!(delta.header.check(&cut), Err(DeltaError::WrongLayout { what: "cut table", .. })));
    let other = manifest(Dtype::F16, 4, 100, false);
    assert!(matches!(delta.header.check(&other), Err(DeltaError::WrongLayout { what: "layout", .. })));
    assert!(matches!(compose(&m, &delta, &delta), Err(DeltaError::NotConsecutive { .. })));
}

#[test]
fn context_records_are_shorter_where_small_weights_change_more() {
    let m = manifest(Dtype::BF16, 1, 16_384, false);
    let mut bits = Bits(3);
    // Octaves halve in size, chances double: the shape that weights have.
    let mut old = Vec::new();
    let mut new = Vec::new();
    for _ in 0..65_536 {
        let octave = (bits.next().trailing_zeros()).min(12) as u16;
        let value = (123 - octave) << 7 | (bits.next() % 128) as u16 | (bits.next() as u16) << 15;
        old.extend_from_slice(&value.to_le_bytes());
        let moved = bits.next() % 2048 < 4 << octave;
        new.extend_from_slice(&(value + u16::from(moved && value & 0x7f != 0x7f)).to_le_bytes());
    }
    let plain = make(&m, (1, 2), &old, &new, Encoder::plain());
    let context = make(&m, (1, 2), &old, &new, Encoder::with_context());
    assert!(context.len() * 10 < plain.len() * 9, "{} and {}", context.len(), plain.len());
    let delta = Delta::parse(&context).unwrap();
    assert!(delta.records().all(|r| r.mode == Mode::Context));
    assert!(matches!(
        compose(&m, &delta, &Delta::parse(&make(&m, (2, 3), &new, &old, Encoder::plain())).unwrap()),
        Err(DeltaError::ContextNeedsImage { block: 0 })
    ));
    let (mut image, mut sums) = (old.clone(), table(&m, &old));
    assert_eq!(apply_all(&m, &mut image, &mut sums, &delta), [Outcome::Applied]);
    assert!(image == new);
}
