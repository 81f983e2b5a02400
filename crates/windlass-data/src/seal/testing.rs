//! Images that change, for the tests of sealing and of histories.

use std::collections::BTreeMap;
use std::path::Path;

use windlass_core::Dtype;
use windlass_core::delta::{Applier, Delta, Encoder, Outcome, Tile};
use windlass_core::digest::SumTable;
use windlass_core::identity::{Incarnation, ModelId, Version};
use windlass_core::kernel::read_unit;
use windlass_core::manifest::{DimCut, Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;

use super::{Base, SealError, SealJob, Sealed, seal, sums};
use crate::simd::kernels;
use crate::stop::Stop;

pub(crate) const INCARNATION: Incarnation = Incarnation(0x17);

/// A small deterministic generator; the tests want bits, not quality.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ self.0 >> 33;
        x.wrapping_mul(0xff51_afd7_ed55_8ccd) ^ x >> 29
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.roll() % n
    }
}

pub(crate) fn model() -> ModelId {
    ModelId::new("policy").unwrap()
}

/// A bit of everything: strided cuts, one byte, no bytes, all unit sizes, several blocks.
pub(crate) fn odd_manifest() -> Manifest {
    let t = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name, dtype, shape);
    let specs = [
        t("strided", Dtype::BF16, &[90, 70]),
        t("rows", Dtype::BF16, &[33, 8]),
        t("columns", Dtype::BF16, &[9, 150]),
        t("long", Dtype::BF16, &[70_001]),
        t("byte", Dtype::U8, &[1]),
        t("empty", Dtype::F32, &[0, 4]),
        t("scalar", Dtype::F32, &[]),
        t("wide", Dtype::F64, &[3, 50]),
        t("fp8", Dtype::F8E4M3, &[7, 11]),
    ];
    let cuts = BTreeMap::from([
        ("strided".to_owned(), vec![DimCut { dim: 1, bounds: vec![1, 32, 69] }]),
        ("rows".to_owned(), vec![DimCut { dim: 0, bounds: vec![5, 6] }, DimCut { dim: 1, bounds: vec![3] }]),
        // A block for each column: several handfuls for each thread.
        ("columns".to_owned(), vec![DimCut { dim: 1, bounds: (1..150).collect() }]),
        ("fp8".to_owned(), vec![DimCut { dim: 1, bounds: vec![10] }]),
    ]);
    Manifest::new(specs, BTreeMap::new()).unwrap().with_cuts(&cuts).unwrap()
}

pub(crate) fn all(manifest: &Manifest) -> BlockRanges {
    (0..manifest.cuts().blocks()).into()
}

pub(crate) fn image(manifest: &Manifest, dice: &mut Dice) -> Vec<u8> {
    (0..manifest.data_bytes()).map(|_| dice.roll() as u8).collect()
}

/// Changes an image block by block: not at all, a few units by small steps, half of the units, all of them, or back
/// to what they were in `before`.
pub(crate) fn change(manifest: &Manifest, dice: &mut Dice, image: &mut [u8], before: &[u8]) {
    for number in 0..manifest.cuts().blocks() {
        let tile = Tile::of(manifest, number).unwrap();
        let (way, unit) = (dice.below(6), tile.unit);
        for r in manifest.byte_runs(&tile.block) {
            for at in (r.start as usize..r.end as usize).step_by(unit) {
                let (old, chance) = (read_unit(&image[at..at + unit]), dice.below(100));
                let new = match way {
                    1 | 2 if chance < 3 => old.wrapping_add(dice.below(5)).wrapping_sub(2),
                    3 if chance < 50 => old ^ 1,
                    4 => dice.roll(),
                    5 => read_unit(&before[at..at + unit]),
                    _ => old,
                };
                image[at..at + unit].copy_from_slice(&new.to_le_bytes()[..unit]);
            }
        }
    }
}

pub(crate) fn table(manifest: &Manifest, image: &[u8]) -> SumTable {
    sums(kernels(), manifest, &all(manifest), image, 2, &Stop::never()).unwrap()
}

/// Seals `new` over `old` with versions of these numbers.
pub(crate) fn seal_step(
    manifest: &Manifest,
    (base, version): (Version, Version),
    (old, old_sums): (&[u8], &SumTable),
    new: &[u8],
    out: &Path,
) -> Result<Sealed, SealError> {
    seal(SealJob {
        kernels: kernels(),
        manifest,
        blocks: &all(manifest),
        model_id: &model(),
        incarnation: INCARNATION,
        version,
        new,
        base: Some(Base { data: old, sums: old_sums, version: base }),
        out: Some(out),
        encoder: Encoder::plain,
        threads: 2,
        stop: &Stop::never(),
        progress: &|_| (),
    })
}

/// Applies a delta as a receiver does: each block by its sum, the result by the digest.
pub(crate) fn apply(manifest: &Manifest, container: &[u8], image: &mut [u8]) -> SumTable {
    let delta = Delta::parse(container).unwrap();
    delta.header.check(manifest).unwrap();
    let mut sums = table(manifest, image);
    let mut applier = Applier::new();
    for record in delta.records() {
        let tile = Tile::of(manifest, record.block).unwrap();
        let runs = || manifest.byte_runs(&tile.block).map(|r| r.start as usize..r.end as usize);
        let mut block: Vec<u8> = runs().flat_map(|r| image[r].to_vec()).collect();
        let outcome = applier.apply(kernels(), &tile, &record, sums.get(record.block), &mut block).unwrap();
        assert_ne!(outcome, Outcome::Refetch, "block {} has another base", record.block);
        let mut rest = block.as_slice();
        for r in runs() {
            let (run, after) = rest.split_at(r.len());
            image[r].copy_from_slice(run);
            rest = after;
        }
        sums.set(record.block, tile.block.tensor, record.sum);
    }
    sums
}
