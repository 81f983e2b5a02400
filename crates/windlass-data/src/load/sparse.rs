//! What changed since the version that the targets hold.

use parking_lot::Mutex;
use windlass_core::delta::{Changed, Delta, DeltaError, Positions, Tile, positions};

use super::piece::{Piece, put};
use super::{LoadError, LoadPlan, Loaded};
use crate::simd::kernels;
use crate::stop::Stop;
use crate::work;

/// A tensor with a change for every so many bytes, two lines of the cache, is copied whole: a run of memory costs less
/// than half of its lines one by one. The tensors of tests are too small for that.
const SPARSE_BYTES: u64 = if cfg!(test) { 4 } else { 128 };

/// How a tensor is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Nothing of it changed, or it was not chosen.
    Not,
    Changes(u64),
    Whole,
}

impl LoadPlan {
    /// Copies the elements of the tensors in `only`, or of all, that these deltas change, from `image` into
    /// `targets`. The deltas lead, one after another, from the version that the targets hold to the image's; whether
    /// they do is for the caller to know ([`crate::history::Trail`]).
    pub fn sparse(
        &self,
        deltas: &[Delta<'_>],
        image: &[u8],
        targets: &mut [&mut [u8]],
        only: Option<&[String]>,
        threads: usize,
        stop: &Stop,
    ) -> Result<Loaded, LoadError> {
        self.check_image(image)?;
        self.check_targets(targets.iter().map(|t| t.len()))?;
        let how = self.how(deltas, &self.chosen(only)?)?;
        let mut jobs = self.by_target(targets, &how);
        // The largest first, so that no thread ends with it alone.
        jobs.sort_by_key(|j| std::cmp::Reverse(j.2));
        let jobs: Vec<_> = jobs.into_iter().map(|(pieces, memory, _)| (pieces, Mutex::new(memory))).collect();
        let state = || (Positions::new(), Loaded::default());
        let done = work::each(threads.max(1), jobs.len() as u64, stop, state, |(positions, loaded), job| {
            let (pieces, memory) = &jobs[job as usize];
            let mut memory = memory.lock();
            for p in *pieces {
                stop.check()?;
                let by_positions = match how[p.tensor as usize] {
                    How::Not => continue,
                    How::Changes(_) if p.is_invertible() => {
                        self.scatter(p, deltas, positions, image, &mut memory)
                    }
                    How::Whole | How::Changes(_) => None,
                };
                let elements = by_positions.unwrap_or_else(|| {
                    p.copy(0..p.writes.outer(), image, &mut memory, 0);
                    p.bytes() / p.item
                });
                *loaded = loaded.plus(Loaded { bytes: elements * p.item, elements, copies: 1 });
            }
            Ok::<(), LoadError>(())
        })?;
        Ok(done.into_iter().fold(Loaded::default(), |sum, (_, loaded)| sum.plus(loaded)))
    }

    /// How much of every tensor changes, from the heads of all records.
    fn how(&self, deltas: &[Delta<'_>], chosen: &[bool]) -> Result<Vec<How>, LoadError> {
        let mut changes = vec![0u64; chosen.len()];
        for delta in deltas {
            delta.header.check(&self.manifest)?;
            for record in delta.records() {
                let tile = Tile::of(&self.manifest, record.block).map_err(DeltaError::from)?;
                let told = positions::count(&tile, &record)?;
                changes[tile.block.tensor as usize] += told as u64;
            }
        }
        let how = |(t, n): (usize, &u64)| match *n {
            0 => How::Not,
            _ if !chosen[t] => How::Not,
            n if n.saturating_mul(SPARSE_BYTES) >= self.manifest.tensors()[t].bytes => How::Whole,
            n => How::Changes(n),
        };
        Ok(changes.iter().enumerate().map(how).collect())
    }

    /// For each target that changes: its pieces, its memory and about how much there is to do.
    fn by_target<'p, 't>(
        &'p self,
        targets: &'t mut [&mut [u8]],
        how: &[How],
    ) -> Vec<(&'p [Piece], &'t mut [u8], u64)> {
        let mut rest = self.pieces.as_slice();
        let mut jobs = Vec::new();
        for (t, memory) in targets.iter_mut().enumerate() {
            let (these, others) = rest.split_at(rest.partition_point(|p| p.target <= t));
            rest = others;
            let cost = |p: &Piece| match how[p.tensor as usize] {
                How::Not => 0,
                How::Changes(n) => n * SPARSE_BYTES,
                How::Whole => p.bytes(),
            };
            let cost: u64 = these.iter().map(cost).sum();
            if cost > 0 {
                jobs.push((these, &mut **memory, cost));
            }
        }
        jobs
    }

    /// Copies what changed of a piece's tensor to its target; answers how many elements. `None` if a record does not
    /// tell, and all of the tensor has to be copied.
    fn scatter(
        &self,
        piece: &Piece,
        deltas: &[Delta<'_>],
        positions: &mut Positions,
        image: &[u8],
        target: &mut [u8],
    ) -> Option<u64> {
        let blocks = self.manifest.cuts().of_tensor(piece.tensor as usize);
        let tensor = self.manifest.tensors()[piece.tensor as usize].range();
        let source = &image[tensor.start as usize..tensor.end as usize];
        let reads = super::piece::span(&piece.reads);
        let mut elements = 0;
        for delta in deltas {
            let entries = delta.entries();
            let from = entries.partition_point(|e| e.block < blocks.start);
            let to = entries.partition_point(|e| e.block < blocks.end);
            for entry in &entries[from..to] {
                let tile = Tile::of(&self.manifest, entry.block).ok()?;
                let unit = tile.unit as u64;
                let (first, last) = (tile.block.start, tile.block.tensor_unit(tile.block.units() - 1));
                if last * unit < reads.start || first * unit >= reads.end {
                    continue;
                }
                let changed = match positions.of(&tile, &delta.record(entry)) {
                    Ok(changed) => changed,
                    Err(error) => {
                        tracing::warn!(block = entry.block, %error, "its whole tensor is copied instead");
                        return None;
                    }
                };
                elements += match piece.item {
                    1 => put_all::<1>(piece, &tile, changed, source, target),
                    2 => put_all::<2>(piece, &tile, changed, source, target),
                    4 => put_all::<4>(piece, &tile, changed, source, target),
                    _ => put_all::<8>(piece, &tile, changed, source, target),
                };
            }
        }
        Some(elements)
    }
}

/// Copies the changed elements of a block that the piece reads.
fn put_all<const N: usize>(
    piece: &Piece,
    tile: &Tile,
    changed: Changed<'_>,
    source: &[u8],
    target: &mut [u8],
) -> u64 {
    match changed {
        Changed::All => put_each::<N>(piece, tile, 0..tile.units() as u64, source, target),
        Changed::At(these) => {
            prefetch(piece, tile, these, source, target);
            put_each::<N>(piece, tile, these.iter().map(|&p| p.into()), source, target)
        }
    }
}

/// Asks the cache for what is about to be read and written, all of it at once instead of one after the other.
fn prefetch(piece: &Piece, tile: &Tile, positions: &[u16], source: &[u8], target: &[u8]) {
    if tile.block.is_contiguous() {
        let first = tile.block.start * tile.unit as u64;
        kernels().prefetch(&source[first as usize..], tile.unit, positions);
        if let Some((to, _)) = piece.locate(first).filter(|(_, left)| *left >= tile.bytes() as u64) {
            kernels().prefetch(&target[to as usize..], tile.unit, positions);
        }
    }
}

#[inline(always)]
fn put_each<const N: usize>(
    piece: &Piece,
    tile: &Tile,
    positions: impl Iterator<Item = u64>,
    source: &[u8],
    target: &mut [u8],
) -> u64 {
    let (unit, n) = (tile.unit as u64, N as u64);
    // The run that the last element was in: its bytes of the tensor, and where the first of them goes.
    let (mut run, mut to) = (0..0, 0);
    let mut elements = 0;
    for p in positions {
        // A unit of a complex number is half of an element.
        let byte = tile.block.tensor_unit(p) * unit / n * n;
        if !run.contains(&byte) {
            let Some((at, left)) = piece.locate(byte) else { continue };
            (run, to) = (byte..byte + left, at);
        }
        put::<N>(target, (to + (byte - run.start)) as usize, source, byte as usize);
        elements += 1;
    }
    elements
}
