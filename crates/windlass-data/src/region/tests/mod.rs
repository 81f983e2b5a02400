//! Regions by one process ([`one`]), by several ([`processes`]), and where there is little room ([`room`]).

pub(crate) mod child;
mod one;
mod processes;
mod room;

use std::collections::BTreeMap;

use windlass_core::dtype::Dtype;
use windlass_core::manifest::TensorSpec;

use super::*;

pub(crate) use child::step;

/// Removes what is dead in a directory, and says what that was.
fn gc(dir: &Path) -> Vec<Dead> {
    let dead = sweep(dir, Sweep::SHALLOW).unwrap();
    assert!(dead.iter().all(|d| d.remove().unwrap()));
    dead
}

/// Two slots for a manifest with all odd kinds of tensor.
pub(crate) fn spec(dir: &Path, ranks: u16) -> RegionSpec {
    RegionSpec {
        ranks,
        memfd: Memfd::Never,
        ..RegionSpec::new(dir.join("model"), ModelId::new("model").unwrap(), manifest(33_333))
    }
}

/// A bf16 tensor of this many elements, one byte, nothing, and a number of bytes that nothing divides.
fn manifest(elements: u64) -> Arc<Manifest> {
    let tensors = [
        TensorSpec::new("w", Dtype::BF16, vec![elements]),
        TensorSpec::new("one", Dtype::U8, vec![1]),
        TensorSpec::new("none", Dtype::F32, vec![0, 7]),
        TensorSpec::new("odd", Dtype::U8, vec![70_001]),
    ];
    Arc::new(Manifest::new(tensors, BTreeMap::new()).unwrap())
}

/// More than two pieces of a write for each of three ranks.
fn large() -> Arc<Manifest> {
    manifest(5 << 20)
}

/// The bytes of a version.
fn expected(region: &Region, version: Version) -> Vec<u8> {
    bytes(0..region.manifest().data_bytes(), version)
}

fn bytes(range: Range<u64>, seed: u64) -> Vec<u8> {
    range.map(|i| (i.wrapping_mul(31) ^ i >> 8).wrapping_add(seed.wrapping_mul(17)) as u8).collect()
}

/// How the ranks divide an image among them, and in what writes.
#[derive(Clone, Copy)]
struct Shape {
    seed: u64,
    ranks: u16,
}

/// A little random number generator.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z >> 13) % below.max(1)
    }
}

impl Shape {
    /// A rank's share: uneven, unaligned, at least a third of an even one.
    fn share(self, rank: u16, len: u64) -> Range<u64> {
        let even = len / u64::from(self.ranks);
        let bound = |r: u16| match r {
            0 => 0,
            r if r == self.ranks => len,
            r => u64::from(r) * even + Dice(self.seed ^ u64::from(r)).roll(even / 3),
        };
        bound(rank)..bound(rank + 1)
    }
}

/// Writes this rank's share of the version: a third in one large write by a thread of its own, the rest in small
/// ones of all lengths, last first.
fn write_share(
    writer: &mut Writer,
    version: Version,
    shape: Shape,
    stop: &Stop,
) -> Result<Committed, RegionError> {
    let len = writer.region().manifest().data_bytes();
    let share = shape.share(writer.rank(), len);
    let attempt = writer.begin(version, stop)?;
    let third = share.start + (share.end - share.start) / 3;
    let mut dice = Dice(shape.seed);
    let mut cuts = vec![third];
    while *cuts.last().unwrap() < share.end {
        // Mostly small, some beyond a piece, some empty.
        let length = match dice.roll(4) {
            0 => dice.roll(3),
            1 => dice.roll(2 << 20),
            _ => dice.roll(40_000),
        };
        cuts.push((cuts.last().unwrap() + length).min(share.end));
    }
    std::thread::scope(|s| {
        let attempt = &attempt;
        let large = s.spawn(move || attempt.write(share.start, &bytes(share.start..third, shape.seed)));
        let small =
            cuts.windows(2).rev().try_for_each(|w| attempt.write(w[0], &bytes(w[0]..w[1], shape.seed)));
        large.join().unwrap().and(small)
    })?;
    attempt.done(stop)
}
