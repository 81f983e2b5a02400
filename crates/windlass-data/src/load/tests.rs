use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use windlass_core::delta::{Delta, DeltaError, Encoder};
use windlass_core::error::Kind;
use windlass_core::manifest::{DimCut, TensorSpec};

use super::*;
use crate::copies::MAX_DIMS;
use crate::seal::testing::{Dice, all, change, image, seal_step, table};
use crate::seal::{Base, SealJob, seal};
use crate::simd::kernels;
use crate::stop::{Stop, Stopped};

fn stop() -> Stop {
    Stop::after(Duration::from_secs(60))
}

/// One of every width of an element, with a complex and a packed one.
const DTYPES: [Dtype; 7] =
    [Dtype::BF16, Dtype::F32, Dtype::F8E4M3, Dtype::F64, Dtype::C64, Dtype::F4, Dtype::Bool];

fn width(dtype: Dtype) -> u64 {
    check::item(dtype).unwrap()
}

/// An engine: targets that are concatenated from slices of tensors, each with dimensions in an order of its own.
struct World {
    manifest: Arc<Manifest>,
    targets: Vec<Target>,
    copies: Vec<PlanCopy>,
}

/// The strides of a dense tensor whose dimensions lie in memory in the order of `order`, outermost first.
fn strides(sizes: &[u64], order: &[usize]) -> Vec<u64> {
    let mut strides = vec![1; sizes.len()];
    let mut step = 1;
    for &d in order.iter().rev() {
        strides[d] = step;
        step *= sizes[d];
    }
    strides
}

fn order(dice: &mut Dice, n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, dice.below(i as u64 + 1) as usize);
    }
    order
}

impl World {
    /// `workers` of them share each source along its first concatenated dimension when `workers` is more than one.
    fn new(dice: &mut Dice, targets: usize, largest: u64) -> World {
        let mut world = (Vec::new(), Vec::new(), Vec::new());
        let mut cuts = BTreeMap::new();
        for t in 0..targets {
            let dtype = DTYPES[dice.below(DTYPES.len() as u64) as usize];
            let rank = dice.below(3) as usize + 1;
            let mut sizes: Vec<u64> = (0..rank).map(|_| dice.below(largest) + 1).collect();
            let (along, parts) = (dice.below(rank as u64) as usize, dice.below(3) + 1);
            let lens: Vec<u64> = (0..parts).map(|_| dice.below(largest)).collect();
            sizes[along] = lens.iter().sum::<u64>() + dice.below(2);
            let to = strides(&sizes, &order(dice, rank));
            let before = dice.below(3);
            let numel = before + sizes.iter().product::<u64>() + dice.below(3);
            let mut at = 0;
            for (p, &len) in lens.iter().enumerate() {
                let name = format!("t{t}.p{p}");
                let mut part = sizes.clone();
                part[along] = len;
                // A slice of a larger tensor along any dimension.
                let skip: Vec<u64> = part.iter().map(|_| dice.below(3)).collect();
                let shape: Vec<u64> = part.iter().zip(&skip).map(|(n, s)| n + s + dice.below(2)).collect();
                let lie = order(dice, rank);
                let from = strides(&shape, &lie);
                let mut spec: Vec<u64> = lie.iter().map(|&d| shape[d]).collect();
                if dtype == Dtype::F4 {
                    *spec.last_mut().unwrap() *= 2;
                }
                if rank > 1 && spec[1] > 2 && dtype != Dtype::F4 {
                    cuts.insert(name.clone(), vec![DimCut { dim: 1, bounds: vec![spec[1] / 2] }]);
                }
                world.0.push(TensorSpec::new(&name, dtype, spec));
                world.2.push(PlanCopy {
                    source: name,
                    source_offset: skip.iter().zip(&from).map(|(a, b)| a * b).sum(),
                    target: t,
                    target_offset: before + at * to[along],
                    sizes: part,
                    source_strides: from,
                    target_strides: to.clone(),
                });
                at += len;
            }
            world.1.push(Target { name: format!("target.{t}"), numel, dtype });
        }
        // Something that no target takes, and something empty.
        world.0.push(TensorSpec::new("extra", Dtype::F32, [5]));
        world.0.push(TensorSpec::new("empty", Dtype::F32, [0]));
        let manifest = Manifest::new(world.0, BTreeMap::new()).unwrap().with_cuts(&cuts).unwrap();
        World { manifest: Arc::new(manifest), targets: world.1, copies: world.2 }
    }

    fn plan(&self) -> LoadPlan {
        LoadPlan::new(Arc::clone(&self.manifest), self.targets.clone(), &self.copies).unwrap()
    }

    fn memory(&self, fill: u8) -> Vec<Vec<u8>> {
        self.targets.iter().map(|t| vec![fill; (t.numel * width(t.dtype)) as usize]).collect()
    }

    /// What the copies should leave, element by element.
    fn expected(&self, image: &[u8], memory: &mut [Vec<u8>]) {
        for c in &self.copies {
            let tensor = &self.manifest.tensors()[self.manifest.find(&c.source).unwrap()];
            let item = width(tensor.dtype);
            for n in 0..c.sizes.iter().product::<u64>() {
                let (mut rest, mut from, mut to) = (n, c.source_offset, c.target_offset);
                for d in (0..c.sizes.len()).rev() {
                    let i = rest % c.sizes[d];
                    rest /= c.sizes[d];
                    (from, to) = (from + i * c.source_strides[d], to + i * c.target_strides[d]);
                }
                let (from, to) = ((tensor.offset + from * item) as usize, (to * item) as usize);
                let item = item as usize;
                memory[c.target][to..to + item].copy_from_slice(&image[from..from + item]);
            }
        }
    }
}

fn lent(memory: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    memory.iter_mut().map(Vec::as_mut_slice).collect()
}

fn read(memory: &[Vec<u8>]) -> Vec<&[u8]> {
    memory.iter().map(Vec::as_slice).collect()
}

/// Versions of an image and the deltas between neighbours.
fn versions(m: &Manifest, dice: &mut Dice, count: u64, context: bool) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let home = tempfile::tempdir().unwrap();
    let (mut images, mut deltas) = (vec![image(m, dice)], Vec::new());
    for v in 1..=count {
        let old = images.last().unwrap().clone();
        let mut new = old.clone();
        change(m, dice, &mut new, &images[0]);
        let (out, sums) = (home.path().join("delta"), table(m, &old));
        if context {
            seal(SealJob {
                kernels: kernels(),
                manifest: m,
                blocks: &all(m),
                model_id: &crate::seal::testing::model(),
                incarnation: crate::seal::testing::INCARNATION,
                version: v + 1,
                new: &new,
                base: Some(Base { data: &old, sums: &sums, version: v }),
                out: Some(&out),
                encoder: Encoder::with_context,
                threads: 1,
                stop: &Stop::never(),
                progress: &|_| (),
            })
            .unwrap();
        } else {
            seal_step(m, (v, v + 1), (&old, &sums), &new, &out).unwrap();
        }
        deltas.push(std::fs::read(&out).unwrap());
        images.push(new);
    }
    (images, deltas)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_dense_load_is_what_copying_by_elements_gives(seed: u64, targets in 1usize..6, threads in 1usize..4) {
        let mut dice = Dice(seed);
        let world = World::new(&mut dice, targets, 9);
        let (plan, image) = (world.plan(), image(&world.manifest, &mut dice));
        let (mut memory, mut expected) = (world.memory(0xa5), world.memory(0xa5));
        world.expected(&image, &mut expected);
        let loaded = plan.dense(&image, &mut lent(&mut memory), None, threads, &stop()).unwrap();
        prop_assert_eq!(&memory, &expected);
        let elements: u64 = world.copies.iter().map(|c| c.sizes.iter().product::<u64>()).sum();
        prop_assert_eq!(loaded.elements, elements);
        let written: u64 = plan.coverage().targets.iter().map(|t| t.1).sum();
        let covered: u64 = plan.coverage().sources.iter().map(|t| t.1).sum();
        prop_assert_eq!((written, covered), (elements, elements));
        prop_assert!(plan.differs(&image, &read(&memory), u64::MAX, seed).unwrap().is_empty());
    }

    #[test]
    fn a_sparse_load_is_what_a_dense_one_gives(
        seed: u64, targets in 1usize..6, threads in 1usize..4, steps in 0u64..4, context in prop::bool::weighted(0.2),
    ) {
        let mut dice = Dice(seed);
        let world = World::new(&mut dice, targets, 9);
        let plan = world.plan();
        let (images, deltas) = versions(&world.manifest, &mut dice, steps, context);
        let deltas: Vec<Delta<'_>> = deltas.iter().map(|d| Delta::parse(d).unwrap()).collect();
        let (mut memory, mut expected) = (world.memory(0), world.memory(0));
        plan.dense(&images[0], &mut lent(&mut memory), None, 1, &stop()).unwrap();
        let last = images.last().unwrap();
        plan.dense(last, &mut lent(&mut expected), None, 1, &stop()).unwrap();
        let loaded = plan.sparse(&deltas, last, &mut lent(&mut memory), None, threads, &stop()).unwrap();
        prop_assert_eq!(&memory, &expected);
        prop_assert_eq!(loaded.bytes == 0, loaded.elements == 0);
        // Twice changes nothing.
        plan.sparse(&deltas, last, &mut lent(&mut memory), None, threads, &stop()).unwrap();
        prop_assert_eq!(&memory, &expected);
    }

    #[test]
    fn the_sums_of_all_workers_are_the_image_s_digest(
        seed: u64, workers in 1u64..4, at: prop::sample::Index, bit in 0u32..8, threads in 1usize..3,
    ) {
        let mut dice = Dice(seed);
        let specs = [
            TensorSpec::new("columns", Dtype::BF16, [7, 24]),
            TensorSpec::new("rows", Dtype::F32, [24, 5]),
            TensorSpec::new("turned", Dtype::BF16, [12, 24]),
            TensorSpec::new("shared", Dtype::F64, [11]),
            TensorSpec::new("bytes", Dtype::F8E4M3, [3, 24]),
            TensorSpec::new("none", Dtype::F32, [0, 24]),
        ];
        let m = Arc::new(Manifest::new(specs, BTreeMap::new()).unwrap());
        let image = image(&m, &mut dice);
        // Uneven shares of 24.
        let mut bounds: Vec<u64> = (1..workers).map(|_| dice.below(23) + 1).collect();
        bounds.extend([0, 24]);
        bounds.sort_unstable();
        let (mut proofs, mut held) = (Vec::new(), Vec::new());
        for share in bounds.windows(2).filter(|w| w[0] < w[1]) {
            let (plan, mut memory) = worker(&m, share[0], share[1] - share[0]);
            plan.dense(&image, &mut lent(&mut memory), None, threads, &stop()).unwrap();
            proofs.push(plan.digest(&read(&memory), threads, &stop()).unwrap());
            held.push((plan, memory));
        }
        // Through text, as a driver gets them.
        let text = serde_json::to_string(&proofs).unwrap();
        let told: Vec<Proof> = serde_json::from_str(&text).unwrap();
        let combined = combine(&m, &told).unwrap();
        prop_assert_eq!(combined.digest, Some(table(&m, &image).digest(&m)), "{:?}", combined);
        // A bit that is wrong anywhere is found: the digest is another, or two who hold the same differ.
        let total: usize = held.iter().flat_map(|(_, m)| m).map(Vec::len).sum();
        let mut n = at.index(total);
        for (w, (plan, memory)) in held.iter_mut().enumerate() {
            for target in 0..memory.len() {
                if let Some(byte) = memory[target].get_mut(n) {
                    *byte ^= 1 << bit;
                    proofs[w] = plan.digest(&read(memory), threads, &stop()).unwrap();
                    let wrong = combine(&m, &proofs).unwrap();
                    prop_assert_ne!(wrong.digest, combined.digest);
                    let wrong = plan.differs(&image, &read(memory), u64::MAX, seed).unwrap();
                    prop_assert_eq!(wrong.len(), 1);
                    return Ok(());
                }
                n -= memory[target].len();
            }
        }
    }

    #[test]
    fn copies_of_any_numbers_end_in_a_plan_or_a_named_error(
        at in any::<(u64, u64)>(), small: bool, sizes in prop::collection::vec(0u64..5, 0..4),
        from in prop::collection::vec(prop_oneof![0u64..12, any::<u64>()], 0..4),
        to in prop::collection::vec(prop_oneof![0u64..12, any::<u64>()], 0..4), numel in prop_oneof![0u64..99, any::<u64>()],
    ) {
        let m = Arc::new(Manifest::new([TensorSpec::new("w", Dtype::BF16, [40])], BTreeMap::new()).unwrap());
        let (source_offset, target_offset) = if small { (at.0 % 9, at.1 % 9) } else { at };
        let copy = PlanCopy {
            source: "w".into(), source_offset, target: 0, target_offset, sizes, source_strides: from, target_strides: to,
        };
        let target = Target { name: "p".into(), numel, dtype: Dtype::BF16 };
        let Ok(plan) = LoadPlan::new(Arc::clone(&m), vec![target], std::slice::from_ref(&copy)) else { return Ok(()) };
        if numel < 1 << 20 {
            let world = World { manifest: m, targets: plan.targets().to_vec(), copies: vec![copy] };
            let image: Vec<u8> = (0..80).collect();
            let (mut memory, mut expected) = (world.memory(0xee), world.memory(0xee));
            world.expected(&image, &mut expected);
            plan.dense(&image, &mut lent(&mut memory), None, 1, &stop()).unwrap();
            prop_assert_eq!(memory, expected);
        }
    }
}

/// A worker that holds columns `first..first + n` of 24 of everything but what all hold.
fn worker(m: &Arc<Manifest>, first: u64, n: u64) -> (LoadPlan, Vec<Vec<u8>>) {
    let copy = |source: &str, offset, target, at, sizes: &[u64], from: &[u64], to: &[u64]| PlanCopy {
        source: source.into(),
        source_offset: offset,
        target,
        target_offset: at,
        sizes: sizes.to_vec(),
        source_strides: from.to_vec(),
        target_strides: to.to_vec(),
    };
    let target = |name: &str, numel, dtype| Target { name: name.into(), numel, dtype };
    let targets = vec![
        target("fused", 7 * n + 12 * n, Dtype::BF16),
        target("rows", n * 5, Dtype::F32),
        target("shared", 11, Dtype::F64),
        target("again", 22, Dtype::F64),
        target("bytes", 3 * n, Dtype::F8E4M3),
    ];
    let copies = [
        copy("columns", first, 0, 0, &[7, n], &[24, 1], &[n, 1]),
        copy("turned", first, 0, 7 * n, &[12, n], &[24, 1], &[1, 12]),
        copy("rows", first * 5, 1, 0, &[n, 5], &[5, 1], &[5, 1]),
        copy("shared", 0, 2, 0, &[11], &[1], &[1]),
        // Twice in one target, from a tensor that is expanded.
        copy("shared", 0, 3, 0, &[2, 11], &[0, 1], &[11, 1]),
        copy("bytes", first, 4, 0, &[3, n], &[24, 1], &[n, 1]),
    ];
    let plan = LoadPlan::new(Arc::clone(m), targets, &copies).unwrap();
    let memory = plan.target_bytes().into_iter().map(|b| vec![0; b as usize]).collect();
    (plan, memory)
}

#[test]
fn what_no_worker_holds_and_what_two_hold_differently_is_listed() {
    let specs = [TensorSpec::new("a", Dtype::U8, [8]), TensorSpec::new("b", Dtype::U8, [4])];
    let m = Arc::new(Manifest::new(specs, BTreeMap::new()).unwrap());
    let target = Target { name: "p".into(), numel: 4, dtype: Dtype::U8 };
    let half = PlanCopy {
        source: "a".into(),
        source_offset: 0,
        target: 0,
        target_offset: 0,
        sizes: vec![4],
        source_strides: vec![1],
        target_strides: vec![1],
    };
    let plan = LoadPlan::new(Arc::clone(&m), vec![target], &[half]).unwrap();
    let sources = &plan.coverage().sources;
    assert_eq!(sources, &[("a".to_owned(), 4, 8), ("b".to_owned(), 0, 4)]);
    let proof = |byte| plan.digest(&[&[byte; 4]], 1, &stop()).unwrap();
    let part = combine(&m, &[proof(1), proof(1)]).unwrap();
    assert_eq!(part.rest, [("a".to_owned(), 4), ("b".to_owned(), 0)]);
    assert_eq!((part.digest, part.disagree.len()), (None, 0));
    assert_eq!(combine(&m, &[proof(1), proof(2)]).unwrap().disagree, ["a"]);
    let other = Manifest::new([TensorSpec::new("a", Dtype::U8, [9])], BTreeMap::new()).unwrap();
    assert_eq!(combine(&other, &[proof(1)]), None);
}

#[test]
fn only_the_named_tensors_are_replayed() {
    let mut dice = Dice(4);
    let world = World::new(&mut dice, 3, 5);
    let plan = world.plan();
    let image = image(&world.manifest, &mut dice);
    let only = world.copies[0].source.clone();
    let few = World { copies: vec![world.copies[0].clone()], ..world };
    let (mut memory, mut expected) = (few.memory(9), few.memory(9));
    few.expected(&image, &mut expected);
    plan.dense(&image, &mut lent(&mut memory), Some(&[only]), 2, &stop()).unwrap();
    assert_eq!(memory, expected);
    let none = plan.dense(&image, &mut lent(&mut memory), Some(&["gone".into()]), 1, &stop());
    assert!(matches!(none, Err(LoadError::NoSuchTensor { .. })), "{none:?}");
    let loaded = plan.dense(&image, &mut lent(&mut memory), Some(&[]), 1, &stop()).unwrap();
    assert_eq!(loaded, Loaded::default());
    assert_eq!(memory, expected);
}

fn one(sizes: &[u64], from: &[u64], to: &[u64]) -> PlanCopy {
    PlanCopy {
        source: "w".into(),
        source_offset: 0,
        target: 0,
        target_offset: 0,
        sizes: sizes.to_vec(),
        source_strides: from.to_vec(),
        target_strides: to.to_vec(),
    }
}

fn small() -> Arc<Manifest> {
    let specs = [
        TensorSpec::new("w", Dtype::BF16, [12]),
        TensorSpec::new("six", Dtype::F6E2M3, [4]),
        TensorSpec::new("none", Dtype::BF16, [0, 3]),
    ];
    let aliases = BTreeMap::from([("tied".to_owned(), "w".to_owned())]);
    Arc::new(Manifest::new(specs, aliases).unwrap())
}

fn made(copies: &[PlanCopy]) -> Result<LoadPlan, LoadError> {
    LoadPlan::new(small(), vec![Target { name: "p".into(), numel: 10, dtype: Dtype::BF16 }], copies)
}

#[test]
fn plans_that_do_not_fit_are_refused_by_name() {
    let good = || one(&[10], &[1], &[1]);
    made(&[good()]).unwrap();
    made(&[PlanCopy { source: "tied".into(), ..good() }]).unwrap();
    let refused = |copy: PlanCopy| made(&[copy]).unwrap_err();
    assert!(matches!(refused(PlanCopy { source: "x".into(), ..good() }), LoadError::NoSource { .. }));
    assert!(matches!(
        refused(PlanCopy { target: 1, ..good() }),
        LoadError::NoTarget { target: 1, targets: 1, .. }
    ));
    assert!(matches!(refused(one(&[10], &[1, 1], &[1])), LoadError::Dims { .. }));
    assert!(matches!(
        refused(one(&[1; MAX_DIMS + 1], &[1; MAX_DIMS + 1], &[1; MAX_DIMS + 1])),
        LoadError::Dims { .. }
    ));
    assert!(matches!(refused(one(&[3, u64::MAX], &[u64::MAX, 1], &[1, 1])), LoadError::Overflow { .. }));
    assert!(matches!(refused(one(&[u64::MAX, 2], &[0, 0], &[0, 0])), LoadError::Overflow { .. }));
    let at = |source_offset, target_offset| PlanCopy { source_offset, target_offset, ..good() };
    assert!(matches!(refused(at(3, 0)), LoadError::BeyondSource { end: 13, numel: 12, .. }));
    assert!(matches!(refused(at(0, 1)), LoadError::BeyondTarget { end: 11, numel: 10, .. }));
    assert!(matches!(refused(at(u64::MAX, 0)), LoadError::Overflow { .. }));
    assert!(matches!(refused(at(0, u64::MAX)), LoadError::Overflow { .. }));
    assert!(matches!(refused(one(&[2], &[12], &[1])), LoadError::BeyondSource { end: 13, .. }));
    let with = |numel, dtype| {
        let target = Target { name: "p".into(), numel, dtype };
        LoadPlan::new(small(), vec![target], &[one(&[1], &[1], &[1])]).unwrap_err()
    };
    let cast = with(10, Dtype::F16);
    assert!(matches!(&cast, LoadError::Cast { from: Dtype::BF16, to: Dtype::F16, .. }));
    assert_eq!(cast.kind(), Kind::Unsupported);
    assert!(matches!(with(4, Dtype::F6E2M3), LoadError::Packed { .. }));
    assert!(matches!(with(u64::MAX, Dtype::BF16), LoadError::HugeTarget { .. }));
    let twice = Target { name: "p".into(), numel: 1, dtype: Dtype::BF16 };
    let twice = LoadPlan::new(small(), vec![twice.clone(), twice], &[]);
    assert!(matches!(twice, Err(LoadError::DuplicateTarget { .. })));
}

#[test]
fn an_element_that_is_written_twice_is_found() {
    let overlap = |copies: &[PlanCopy]| match made(copies) {
        Err(LoadError::Overlap { copy, element, .. }) => (copy, element),
        other => panic!("{other:?}"),
    };
    // In one copy: a target that does not move, rows that reach into each other.
    assert_eq!(overlap(&[one(&[2], &[1], &[0])]), (0, 0));
    assert_eq!(overlap(&[one(&[2, 3], &[3, 1], &[2, 1])]), (0, 2));
    // Between two, side by side, interleaved, one within the other.
    let shifted = |by| PlanCopy { target_offset: by, ..one(&[4], &[1], &[1]) };
    assert_eq!(overlap(&[shifted(0), shifted(3)]), (1, 3));
    assert_eq!(overlap(&[shifted(3), shifted(0)]), (0, 3));
    made(&[shifted(0), shifted(4)]).unwrap();
    let columns = |by| PlanCopy { target_offset: by, ..one(&[2, 2], &[2, 1], &[4, 1]) };
    made(&[columns(0), columns(2)]).unwrap();
    assert_eq!(overlap(&[columns(0), columns(1)]), (1, 1));
    let inside = PlanCopy { target_offset: 2, ..one(&[2], &[1], &[1]) };
    made(&[columns(0), inside.clone()]).unwrap();
    assert_eq!(overlap(&[columns(1), inside]), (1, 2));
    // Two places so far apart that nobody can have marked all between them.
    let far = Target { name: "p".into(), numel: 1 << 60, dtype: Dtype::BF16 };
    let wide = |by| PlanCopy { target_offset: by, ..one(&[2], &[1], &[1 << 59]) };
    let refused = LoadPlan::new(small(), vec![far], &[wide(0), wide(1)]);
    assert!(matches!(refused, Err(LoadError::TooWide { .. })), "{refused:?}");
}

#[test]
fn empty_tensors_and_scalars_are_copied() {
    let m = Manifest::new(
        [TensorSpec::new("none", Dtype::BF16, [0, 3]), TensorSpec::new("one", Dtype::F32, [])],
        BTreeMap::new(),
    );
    let target = |name: &str, numel, dtype| Target { name: name.into(), numel, dtype };
    let targets = vec![target("p", 0, Dtype::BF16), target("q", 1, Dtype::F32)];
    let copies = [
        PlanCopy { source: "none".into(), ..one(&[0, 3], &[3, 1], &[u64::MAX, 1]) },
        PlanCopy { source: "one".into(), target: 1, ..one(&[], &[], &[]) },
    ];
    let plan = LoadPlan::new(Arc::new(m.unwrap()), targets, &copies).unwrap();
    let mut memory = [vec![], vec![0; 4]];
    let loaded = plan.dense(&[1, 2, 3, 4], &mut lent(&mut memory), None, 3, &stop()).unwrap();
    assert_eq!(memory[1], [1, 2, 3, 4]);
    assert_eq!(loaded, Loaded { bytes: 4, elements: 1, copies: 1 });
}

#[test]
fn memory_that_does_not_fit_the_plan_is_refused_before_a_write() {
    let plan = made(&[one(&[10], &[1], &[1])]).unwrap();
    let image = vec![7; plan.manifest().data_bytes() as usize];
    let mut memory = vec![0; 20];
    let none = plan.dense(&image, &mut [], None, 1, &stop());
    assert!(matches!(none, Err(LoadError::Targets { expected: 1, found: 0 })));
    for len in [19, 21] {
        let other = plan.dense(&image, &mut [&mut vec![0; len]], None, 1, &stop()).unwrap_err();
        assert!(matches!(other, LoadError::TargetBytes { expected: 20, .. }));
        assert_eq!(other.kind(), Kind::Stale);
        assert!(plan.digest(&[&vec![0; len]], 1, &stop()).is_err());
    }
    let short = plan.dense(&image[1..], &mut [&mut memory], None, 1, &stop());
    assert!(matches!(short, Err(LoadError::ImageBytes { .. })));
    let other = Manifest::new([TensorSpec::new("w", Dtype::BF16, [13])], BTreeMap::new()).unwrap();
    assert!(matches!(plan.check_layout(&other), Err(LoadError::Layout { .. })));
    // A delta of another layout tells nothing about this image.
    let (images, deltas) = versions(&other, &mut Dice(1), 1, false);
    assert_eq!(images.len(), 2);
    let delta = Delta::parse(&deltas[0]).unwrap();
    let foreign = plan.sparse(&[delta], &image, &mut [&mut memory], None, 1, &stop());
    assert!(matches!(foreign, Err(LoadError::Delta(DeltaError::WrongLayout { .. }))));
    let late = plan.dense(&image, &mut [&mut memory], None, 1, &Stop::after(Duration::ZERO));
    assert!(matches!(late, Err(LoadError::Stopped(Stopped::Deadline))));
    assert_eq!(memory, [0; 20]);
}

#[test]
fn large_targets_are_cut_into_windows_that_leave_nothing_out() {
    // More than a job each: one run, rows, columns side by side, and a transposed matrix.
    let (rows, cols) = (1500u64, 1100u64);
    let specs = ["run", "left", "right", "turned"].map(|n| TensorSpec::new(n, Dtype::F32, [rows, cols]));
    let m = Arc::new(Manifest::new(specs, BTreeMap::new()).unwrap());
    let target = |name: &str, numel| Target { name: name.into(), numel, dtype: Dtype::F32 };
    let targets =
        vec![target("run", rows * cols), target("pair", 2 * rows * cols), target("turned", rows * cols)];
    let copy = |source: &str, target, at, to: [u64; 2]| PlanCopy {
        source: source.into(),
        target,
        target_offset: at,
        ..one(&[rows, cols], &[cols, 1], &to)
    };
    let copies = [
        copy("run", 0, 0, [cols, 1]),
        copy("left", 1, 0, [2 * cols, 1]),
        copy("right", 1, cols, [2 * cols, 1]),
        copy("turned", 2, 0, [1, rows]),
    ];
    let world = World { manifest: m, targets, copies: copies.to_vec() };
    let plan = world.plan();
    let mut dice = Dice(3);
    let image: Vec<u8> =
        (0..world.manifest.data_bytes() / 8).flat_map(|_| dice.roll().to_le_bytes()).collect();
    let (mut memory, mut expected) = (world.memory(0), world.memory(0));
    world.expected(&image, &mut expected);
    plan.dense(&image, &mut lent(&mut memory), None, 3, &stop()).unwrap();
    assert!(memory == expected);
    let proof = plan.digest(&read(&memory), 2, &stop()).unwrap();
    assert_eq!(
        combine(&world.manifest, &[proof]).unwrap().digest,
        Some(table(&world.manifest, &image).digest(&world.manifest))
    );
    // A few changes by position, in rows that are cut and turned.
    let mut next = image.clone();
    for at in (0..next.len()).step_by(4001) {
        next[at] ^= 0x55;
    }
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("delta");
    seal_step(&world.manifest, (1, 2), (&image, &table(&world.manifest, &image)), &next, &out).unwrap();
    let bytes = std::fs::read(&out).unwrap();
    let delta = Delta::parse(&bytes).unwrap();
    let changes = delta.changes;
    world.expected(&next, &mut expected);
    let loaded = plan.sparse(&[delta], &next, &mut lent(&mut memory), None, 3, &stop()).unwrap();
    assert!(memory == expected);
    assert_eq!(loaded.elements, changes);
}

#[test]
fn samples_find_a_target_that_was_loaded_by_others() {
    let mut dice = Dice(8);
    let world = World::new(&mut dice, 4, 9);
    let (plan, image) = (world.plan(), image(&world.manifest, &mut dice));
    let mut memory = world.memory(0);
    plan.dense(&image, &mut lent(&mut memory), None, 1, &stop()).unwrap();
    assert!(plan.differs(&image, &read(&memory), 50, 1).unwrap().is_empty());
    // All of one target is of another version.
    let target = world.copies.iter().find(|c| c.sizes.iter().product::<u64>() > 0).unwrap().target;
    memory[target].iter_mut().for_each(|b| *b ^= 0xff);
    let expected: BTreeSet<&str> = world
        .copies
        .iter()
        .filter(|c| c.target == target && c.sizes.iter().product::<u64>() > 0)
        .map(|c| c.source.as_str())
        .collect();
    let found = plan.differs(&image, &read(&memory), u64::MAX, 7).unwrap();
    assert_eq!(found.iter().map(String::as_str).collect::<BTreeSet<_>>(), expected);
    assert!(!plan.differs(&image, &read(&memory), 200, 7).unwrap().is_empty());
    assert!(plan.differs(&image, &read(&memory), 0, 7).unwrap().is_empty());
}
