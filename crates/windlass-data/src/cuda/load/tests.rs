//! The tables of a plan, replayed on the host byte by byte.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use windlass_core::Dtype;
use windlass_core::delta::{DeltaHeader, Encoded, Mode, PartBuilder, Tile};
use windlass_core::digest::sum_range;
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, StateDigest};
use windlass_core::manifest::{DimCut, Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;

use super::tables::*;
use super::*;
use crate::cuda::boxes::Box2;
use crate::cuda::kernels::Unit;
use crate::load::{PlanCopy, Target};
use crate::seal;
use crate::simd::kernels;

const ROWS: u64 = 12;
const COLUMNS: u64 = 10;

/// A plan as engines have them: fused along rows, a slice of columns, transposed, twice in one target, a part only.
fn plan(kind: u8, parts: u64) -> Arc<LoadPlan> {
    let specs = [
        TensorSpec::new("a", Dtype::BF16, [ROWS, COLUMNS]),
        TensorSpec::new("b", Dtype::BF16, [ROWS, COLUMNS]),
        TensorSpec::new("c", Dtype::F32, [7]),
    ];
    let cuts = BTreeMap::from([("a".to_owned(), vec![DimCut::chunked(1, COLUMNS, parts)])]);
    let manifest = Manifest::new(specs, BTreeMap::new()).unwrap().with_cuts(&cuts).unwrap();
    let n = ROWS * COLUMNS;
    let copy =
        |source: &str, at: u64, target_offset: u64, sizes: [u64; 2], from: [u64; 2], to: [u64; 2]| PlanCopy {
            source: source.into(),
            source_offset: at,
            target: 0,
            target_offset,
            sizes: sizes.to_vec(),
            source_strides: from.to_vec(),
            target_strides: to.to_vec(),
        };
    let whole = [ROWS, COLUMNS];
    let mut copies = match kind {
        0 => vec![
            copy("a", 0, 0, whole, [COLUMNS, 1], [COLUMNS, 1]),
            copy("b", 0, n, whole, [COLUMNS, 1], [COLUMNS, 1]),
        ],
        1 => vec![
            copy("a", 2, 3, [ROWS, 5], [COLUMNS, 1], [7, 1]),
            copy("b", 4 * COLUMNS, n, [4, COLUMNS], [COLUMNS, 1], [COLUMNS, 1]),
        ],
        2 => vec![
            copy("a", 0, 0, whole, [COLUMNS, 1], [1, ROWS]),
            copy("b", 0, n, whole, [COLUMNS, 1], [COLUMNS + 3, 1]),
        ],
        3 => vec![
            copy("a", 0, 0, whole, [COLUMNS, 1], [COLUMNS, 1]),
            copy("a", 0, n, whole, [COLUMNS, 1], [COLUMNS, 1]),
            copy("b", 5, 2 * n, [3, 4], [0, 1], [4, 1]),
        ],
        // Every other column, interleaved with those of the other tensor.
        _ => vec![
            copy("a", 0, 0, [ROWS, 5], [COLUMNS, 2], [COLUMNS, 2]),
            copy("b", 1, 1, [ROWS, 5], [COLUMNS, 2], [COLUMNS, 2]),
        ],
    };
    copies.push(PlanCopy {
        source: "c".into(),
        source_offset: 0,
        target: 1,
        target_offset: 2,
        sizes: vec![7],
        source_strides: vec![1],
        target_strides: vec![1],
    });
    let targets = vec![
        Target { name: "fused".into(), numel: 3 * n, dtype: Dtype::BF16 },
        Target { name: "norm".into(), numel: 9, dtype: Dtype::F32 },
    ];
    Arc::new(LoadPlan::new(Arc::new(manifest), targets, &copies).unwrap())
}

const ADDRESSES: [u64; 2] = [1 << 20, 1 << 30];

/// For every byte of a target that is written, the byte of the image: what the plan itself does with an image whose
/// words are their own places.
fn written(plan: &LoadPlan) -> BTreeMap<u64, u64> {
    let mut all = BTreeMap::new();
    for p in plan.pieces() {
        super::super::each_run(&p.writes, |to, from| {
            for i in 0..p.writes.run {
                let before = all.insert(ADDRESSES[p.target] + to + i, p.base + p.reads.at + from + i);
                assert_eq!(before, None);
            }
        });
    }
    all
}

fn bytes(b: &Box2) -> impl Iterator<Item = (u64, u64)> + use<> {
    let b = *b;
    let rows = (0..b.count).flat_map(move |r| (0..b.run).map(move |i| (r, i)));
    rows.map(move |(r, i)| (b.to + r * b.to_pitch + i, b.from + r * b.from_pitch + i))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn boxes_of_a_plan_write_what_the_plan_does(kind in 0u8..5, size in 64u64..600) {
        let plan = plan(kind, 1);
        let boxes = replays(&plan, &ADDRESSES).unwrap();
        let found: BTreeMap<u64, u64> = boxes.iter().flat_map(|r| bytes(&r.shape)).collect();
        prop_assert_eq!(found.len() as u64, boxes.iter().map(|r| r.shape.bytes()).sum::<u64>(), "once each");
        prop_assert_eq!(&found, &written(&plan));
        // In pieces of the image, each of which has arrived when its boxes are copied.
        let pieces = chunks(&boxes, size.max(240));
        prop_assert_eq!(pieces.iter().map(|c| c.boxes.len()).sum::<usize>(), boxes.len());
        for c in &pieces {
            for r in &boxes[c.boxes.clone()] {
                let span = r.shape.source_span(1);
                prop_assert!(c.bytes.start <= span.start && span.end <= c.bytes.end);
            }
        }
    }

    #[test]
    fn pieces_of_a_block_are_where_the_plan_puts_them(kind in 0u8..5, parts in 1u64..4) {
        let plan = plan(kind, parts);
        let manifest = plan.manifest();
        let all = Places::new(&plan, &ADDRESSES).unwrap();
        prop_assert_eq!(all.blocks.len(), manifest.cuts().blocks() as usize);
        let mut expected: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for (to, from) in written(&plan) {
            expected.entry(from).or_default().insert(to);
        }
        for (number, place) in all.blocks.iter().enumerate() {
            let tile = Tile::of(manifest, number as u32).unwrap();
            let unit = tile.unit as u64;
            let base = manifest.tensors()[tile.block.tensor as usize].offset;
            let (mut held, mut units) = (0, 0);
            for n in 0..tile.units() as u64 {
                let byte = tile.block.tensor_unit(n) * unit;
                // As the kernel looks for it.
                let pieces = &all.pieces[place.first as usize..(place.first + place.pieces) as usize];
                let found: BTreeSet<u64> = pieces.iter().filter_map(|p| {
                    let rest = byte.checked_sub(p.begin)?;
                    let run = if p.count > 1 { rest / p.pitch } else { 0 };
                    let rest = rest - run * p.pitch;
                    (run < p.count && rest < p.run).then(|| p.target + run * p.target_pitch + rest)
                }).collect();
                let wanted = expected.get(&(base + byte)).cloned().unwrap_or_default();
                held += u64::from(!wanted.is_empty());
                units += 1;
                prop_assert_eq!(found, wanted, "unit {} of block {}", n, number);
            }
            prop_assert!(!all.whole[number] || held == units, "a whole block is held");
        }
        prop_assert_eq!(all.whole.iter().all(|w| *w), kind == 0 || kind == 2);
    }

    #[test]
    fn spans_of_a_digest_are_the_boxes_that_a_worker_holds(kind in 0u8..5, seed: u64) {
        let plan = plan(kind, 2);
        let mut targets: Vec<Vec<u8>> = plan.target_bytes().iter().map(|n| vec![0; *n as usize]).collect();
        for (i, byte) in targets.iter_mut().flatten().enumerate() {
            *byte = (seed.wrapping_mul(i as u64 | 1) >> 32) as u8;
        }
        let slices: Vec<&[u8]> = targets.iter().map(Vec::as_slice).collect();
        let expected = plan.digest(&slices, 1, &Stop::never()).unwrap();
        let held = plan.held_boxes();
        let mut sums = vec![BlockSum::default(); held.len()];
        for s in spans(&held, &ADDRESSES).unwrap() {
            for run in 0..u64::from(s.count) {
                let at = s.at + run * s.pitch;
                let target = ADDRESSES.iter().rposition(|a| *a <= at).unwrap();
                let from = (at - ADDRESSES[target]) as usize;
                let bytes = &targets[target][from..from + s.run as usize];
                let sum = &mut sums[s.sum as usize];
                *sum = sum.plus(sum_range(kernels(), s.start + run * s.stride, bytes));
            }
        }
        let boxes = held.iter().zip(sums).map(|((t, _, b), sum)| (*t, b.with(sum)));
        prop_assert_eq!(plan.proof(boxes), expected);
    }

    #[test]
    fn spans_of_blocks_give_the_sums_of_the_image(kind in 0u8..5, parts in 1u64..4, seed: u64) {
        let plan = plan(kind, parts);
        let manifest = plan.manifest();
        let image: Vec<u8> =
            (0..manifest.data_bytes()).map(|i| (seed.wrapping_mul(i | 1) >> 32) as u8).collect();
        let mut targets: Vec<Vec<u8>> = plan.target_bytes().iter().map(|n| vec![0; *n as usize]).collect();
        for (to, from) in written(&plan) {
            let target = ADDRESSES.iter().rposition(|a| *a <= to).unwrap();
            targets[target][(to - ADDRESSES[target]) as usize] = image[from as usize];
        }
        let all = Places::new(&plan, &ADDRESSES).unwrap();
        let mut sums = vec![BlockSum::default(); all.blocks.len()];
        for s in block_spans(manifest, &all).unwrap() {
            for run in 0..u64::from(s.count) {
                let at = s.at + run * s.pitch;
                let target = ADDRESSES.iter().rposition(|a| *a <= at).unwrap();
                let from = (at - ADDRESSES[target]) as usize;
                let bytes = &targets[target][from..from + s.run as usize];
                let sum = &mut sums[s.sum as usize];
                *sum = sum.plus(sum_range(kernels(), s.start + run * s.stride, bytes));
            }
        }
        let every = BlockRanges::from(0..manifest.cuts().blocks());
        let expected = seal::sums(kernels(), manifest, &every, &image, 1, &Stop::never()).unwrap();
        for (number, sum) in sums.iter().enumerate().filter(|(n, _)| all.whole[*n]) {
            prop_assert_eq!(*sum, expected.get(number as u32), "block {}", number);
        }
        // The same image, by its boxes.
        let slices: Vec<&[u8]> = targets.iter().map(Vec::as_slice).collect();
        let (live, still) = (plan.digest(&slices, 1, &Stop::never()), plan.image_proof(&image, 2, &Stop::never()));
        let (live, still) = (live.unwrap(), still.unwrap());
        prop_assert_eq!(live.differs(&still), Vec::<String>::new());
        let mut other = image;
        let at = manifest.tensors().iter().find(|t| t.name == "c").unwrap().offset as usize;
        other[at] ^= 1;
        let other = plan.image_proof(&other, 1, &Stop::never()).unwrap();
        prop_assert_eq!(live.differs(&other), vec!["c".to_owned()]);
    }
}

#[test]
fn several_threads_copy_what_one_does() {
    let from: Vec<u8> = (0..100_001u32).map(|i| (i * 7 % 251) as u8).collect();
    for threads in [0, 1, 3, 64] {
        let mut to = vec![0; from.len()];
        copy_by(threads, &from, &mut to);
        assert_eq!(to, from);
    }
    copy_by(2, &[], &mut []);
}

/// A delta with a record of a few bytes for every block, those of `context` in context mode.
fn delta(manifest: &Manifest, context: impl Fn(usize) -> bool) -> Vec<u8> {
    let header = DeltaHeader {
        model_id: "m".parse().unwrap(),
        base: (Incarnation(1), 1),
        target: (Incarnation(1), 2),
        layout_hash: manifest.layout_hash(),
        cuts_hash: manifest.cuts_hash(),
        base_digest: StateDigest([0; 16]),
        target_digest: StateDigest([0; 16]),
        blocks: manifest.cuts().blocks(),
    };
    let mut out = header.to_bytes();
    let mut parts = PartBuilder::new();
    for block in 0..manifest.cuts().blocks() {
        let tensor = Tile::of(manifest, block).unwrap().block.tensor as usize;
        let mode = if context(tensor) { Mode::Context } else { Mode::Sparse };
        let sum = BlockSum([block.into(), 1]);
        parts.push(block, &Encoded { mode, changes: 1, sum }, &[1, 2, 3], &mut out);
    }
    parts.finish(&mut out);
    out
}

/// What the kernels are told of a delta, and in which groups.
fn patches_of(
    delta: &Delta<'_>,
    manifest: &Manifest,
    places: &Places,
    has_sums: bool,
    chosen: &[bool],
) -> Result<(Vec<Patch>, Vec<Group>), CudaError> {
    let sorted = Sorted::new(delta, manifest, places, has_sums, chosen)?;
    let mut patches = vec![Patch::default(); sorted.count()];
    sorted.fill(delta, &mut patches);
    Ok((patches, sorted.groups))
}

#[test]
fn records_go_to_the_kernel_of_their_unit() {
    let plan = plan(0, 2);
    let manifest = plan.manifest();
    let places = Places::new(&plan, &ADDRESSES).unwrap();
    // Tensors of wider units are first: c, of fp32, then a and b.
    let names: Vec<_> = manifest.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["c", "a", "b"]);
    let raw = delta(manifest, |_| false);
    let made = Delta::parse(&raw).unwrap();
    for has_sums in [false, true] {
        let (patches, groups) = patches_of(&made, manifest, &places, has_sums, &[true; 3]).unwrap();
        let group = |kernel, first, count| Group { kernel, is_checked: has_sums, first, count };
        // Two blocks of a, one of the others.
        assert_eq!(groups, [group(Kernel::Apply(Unit::Two), 0, 3), group(Kernel::Apply(Unit::Four), 3, 1)]);
        let found: Vec<_> = patches.iter().map(|p| (p.place, p.mode)).collect();
        assert_eq!(found, [(1, 1), (2, 1), (3, 1), (0, 1)]);
        let payload = |p: &Patch| &raw[p.offset as usize..][..p.length as usize];
        assert!(patches.iter().all(|p| payload(p) == [1, 2, 3] && p.sum == [p.place.into(), 1]));
    }
    // Only some tensors.
    let (patches, _) = patches_of(&made, manifest, &places, false, &[false, false, true]).unwrap();
    assert_eq!(patches.iter().map(|p| p.place).collect::<Vec<_>>(), [3]);
    let mantissas: Vec<_> = places.blocks.iter().map(|p| (p.is_float, p.mantissa)).collect();
    assert_eq!(mantissas, [(1, 23), (1, 7), (1, 7), (1, 7)]);
}

#[test]
fn context_records_are_refused() {
    let plan = plan(0, 1);
    let manifest = plan.manifest();
    let places = Places::new(&plan, &ADDRESSES).unwrap();
    let raw = delta(manifest, |tensor| tensor == 1);
    let made = Delta::parse(&raw).unwrap();
    let error = patches_of(&made, manifest, &places, true, &[true; 3]).unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert!(error.to_string().contains("of \"a\" has a context record"), "{error}");
    // Those of tensors that the worker does not have are none of its business.
    assert!(patches_of(&made, manifest, &places, true, &[true, false, true]).is_ok());
}

#[test]
fn the_pieces_of_a_transposed_tensor_are_its_rows_and_apart() {
    let places = |kind| {
        let plan = plan(kind, 1);
        let places = Places::new(&plan, &ADDRESSES).unwrap();
        // Blocks of c, a and b.
        places.blocks.iter().map(|p| (p.pieces, p.is_apart)).collect::<Vec<_>>()
    };
    assert_eq!(places(0), [(1, 1), (1, 1), (1, 1)]);
    assert_eq!(places(2)[1], (ROWS as u32, 1));
    // Held twice: whoever looks for a unit must look at all.
    assert_eq!(places(3)[1], (2, 0));
}

#[test]
fn a_block_that_one_piece_holds_is_whole_where_its_tensor_is_not() {
    let specs = [TensorSpec::new("rows", Dtype::BF16, [4, 65_536])];
    let manifest = Arc::new(Manifest::new(specs, BTreeMap::new()).unwrap());
    let rows = PlanCopy {
        source: "rows".into(),
        source_offset: 65_536,
        target: 0,
        target_offset: 0,
        sizes: vec![150_000],
        source_strides: vec![1],
        target_strides: vec![1],
    };
    let targets = vec![Target { name: "half".into(), numel: 150_000, dtype: Dtype::BF16 }];
    let plan = LoadPlan::new(manifest, targets, &[rows]).unwrap();
    let places = Places::new(&plan, &ADDRESSES[..1]).unwrap();
    assert_eq!(places.whole, [false, true, true, false]);
}
