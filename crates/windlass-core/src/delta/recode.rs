//! From plain records to context records and back, without a second image.
//!
//! A publisher that has a plain delta and either of its two images makes the smaller form for slow links. A receiver
//! turns what it got into plain records again over its own image, so that only these two know of the other form.

use super::apply::Applier;
use super::context::{self, ContextScratch};
use super::encode::{Encoded, by_unit, put_plain};
use super::line::Unit as _;
use super::{DeltaError, Mode, Record, Tile, positions};
use crate::digest::{BlockSum, sum_block};
use crate::kernel::Kernels;

/// The image of which [`Recoder::to_context`] is given a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that the delta starts from.
    Base,
    /// The one that it leads to.
    Target,
}

/// Recodes records one by one, reusing its memory.
#[derive(Debug, Default)]
pub struct Recoder {
    applier: Applier,
    context: ContextScratch,
}

impl Recoder {
    pub fn new() -> Recoder {
        Recoder::default()
    }

    /// Appends the payload of the context record with the effect of a plain one, or the plain one itself where that is
    /// not longer. `block` holds the block's bytes in the image of `side`; a block of the target is reverted in place.
    ///
    /// # Panics
    /// If `block` is not as long as the tile, or the record is for another block.
    pub fn to_context<K: Kernels + ?Sized>(
        &mut self,
        kernels: &K,
        tile: &Tile,
        record: &Record<'_>,
        (side, block): (Side, &mut [u8]),
        out: &mut Vec<u8>,
    ) -> Result<Encoded, DeltaError> {
        assert!(block.len() == tile.bytes() && tile.number == record.block, "the record's own block");
        let changes = positions::count(tile, record)?;
        let kept = Encoded { mode: record.mode, changes: changes as u32, sum: record.sum };
        let sparse = match record.mode {
            Mode::Context | Mode::Dense => false,
            Mode::Sparse | Mode::Bitmap => changes <= tile.units() / context::MOST_CHANGED,
        };
        if !sparse {
            out.extend_from_slice(record.payload);
            return Ok(kept);
        }
        if side == Side::Target {
            self.applier.revert(tile, record, block)?;
        }
        self.applier.decode(tile, record, |_| ())?;
        by_unit!(tile.unit, T => {
            let (positions, codes) = self.applier.changes::<T>();
            let changes = (positions.as_slice(), codes.as_slice());
            if context::put(kernels, &mut self.context, tile, block, changes, record.payload.len()) {
                out.extend_from_slice(self.context.payload());
                return Ok(Encoded { mode: Mode::Context, ..kept });
            }
        });
        out.extend_from_slice(record.payload);
        Ok(kept)
    }

    /// Appends the payload of the plain record with the effect of any record over `old`, the block's bytes in the image
    /// that the delta starts from. Records that are plain stay as they are.
    ///
    /// # Panics
    /// If `old` is not as long as the tile, or the record is for another block.
    pub fn to_plain<K: Kernels + ?Sized>(
        &mut self,
        kernels: &K,
        tile: &Tile,
        record: &Record<'_>,
        old: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Encoded, DeltaError> {
        assert!(old.len() == tile.bytes() && tile.number == record.block, "the record's own block");
        if record.mode != Mode::Context {
            let changes = positions::count(tile, record)? as u32;
            out.extend_from_slice(record.payload);
            return Ok(Encoded { mode: record.mode, changes, sum: record.sum });
        }
        let old_sum = sum_block(kernels, &tile.block, tile.unit, old);
        self.applier.decode_context(kernels, tile, record, old)?;
        by_unit!(tile.unit, T => {
            let (positions, codes) = self.applier.changes::<T>();
            // They come class by class.
            let mut order: Vec<(u16, T)> = positions.drain(..).zip(codes.drain(..)).collect();
            order.sort_unstable_by_key(|(position, _)| *position);
            positions.extend(order.iter().map(|(position, _)| *position));
            codes.extend(order.iter().map(|(_, code)| *code));
            let mask = T::mask(tile.line);
            let change = |i: usize| {
                let old = T::read(old, positions[i].into());
                (old, T::step(mask, old, codes[i]))
            };
            let sum: BlockSum = old_sum.plus(tile.sum_of_changes(positions, change));
            if sum != record.sum {
                return Err(record.bad("it does not lead to its sum over this image"));
            }
            let mode = put_plain(tile, positions, codes, None, out);
            Ok(Encoded { mode, changes: positions.len() as u32, sum })
        })
    }
}
