//! From a block and a record to the block's next state.

use super::context::{self, ContextScratch};
use super::encode::{Codes, Pick, by_unit};
use super::line::Unit;
use super::values::{self, Group};
use super::{DeltaError, Mode, Record, Tile, positions};
use crate::digest::{BlockSum, sum_block};
use crate::kernel::Kernels;

/// The outcome for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The block already has the record's sum; nothing was written.
    Skipped,
    /// The block was written and has the record's sum now.
    Applied,
    /// The block is not the record's base; nothing was written. The caller must fetch it again.
    Refetch,
}

/// Applies records one by one, reusing its memory.
#[derive(Debug, Default)]
pub struct Applier {
    ones: Vec<u32>,
    positions: Vec<u16>,
    codes: Codes,
    context: Option<Box<ContextScratch>>,
}

impl Applier {
    pub fn new() -> Applier {
        Applier::default()
    }

    /// Applies a record to its block, given the block's bytes, run after run, and their current sum.
    ///
    /// Writes all of the record's changes or nothing. An error means that the record itself is malformed.
    ///
    /// # Panics
    /// If `bytes` is not as long as the tile, or the record is for another block.
    pub fn apply<K: Kernels + ?Sized>(
        &mut self,
        kernels: &K,
        tile: &Tile,
        record: &Record<'_>,
        current: BlockSum,
        bytes: &mut [u8],
    ) -> Result<Outcome, DeltaError> {
        assert!(bytes.len() == tile.bytes() && tile.number == record.block, "the record's own block");
        if current == record.sum {
            return Ok(Outcome::Skipped);
        }
        match record.mode {
            Mode::Dense => {
                if record.payload.len() != bytes.len() {
                    return Err(record.bad("it is not as long as its block"));
                }
                if sum_block(kernels, &tile.block, tile.unit, record.payload) != record.sum {
                    return Err(record.bad("its bytes do not have its sum"));
                }
                bytes.copy_from_slice(record.payload);
                return Ok(Outcome::Applied);
            }
            Mode::Sparse | Mode::Bitmap => {
                self.decode(tile, record, |positions| kernels.prefetch(bytes, tile.unit, positions))?;
            }
            // Over another base a good record decodes to nonsense, which is not the record's fault.
            Mode::Context if self.decode_context(kernels, tile, record, bytes).is_err() => {
                return Ok(Outcome::Refetch);
            }
            Mode::Context => {}
        }
        Ok(by_unit!(tile.unit, T => {
            let values = T::of(&mut self.codes);
            if current.plus(step_values(tile, bytes, &self.positions, values)) == record.sum {
                for (&p, &value) in self.positions.iter().zip(values.iter()) {
                    value.write(bytes, p.into());
                }
                Outcome::Applied
            } else {
                Outcome::Refetch
            }
        }))
    }

    /// Reverts a record: from the block's bytes after it, whose sum is the record's, to those before it.
    /// Returns their sum. A dense record cannot be reverted, since it does not hold the units it replaced.
    ///
    /// # Panics
    /// If `bytes` is not as long as the tile, or the record is for another block.
    pub fn revert(
        &mut self,
        tile: &Tile,
        record: &Record<'_>,
        bytes: &mut [u8],
    ) -> Result<BlockSum, DeltaError> {
        assert!(bytes.len() == tile.bytes() && tile.number == record.block, "the record's own block");
        match record.mode {
            Mode::Sparse | Mode::Bitmap => self.decode(tile, record, |_| ())?,
            Mode::Dense => return Err(DeltaError::OneWay { block: record.block }),
            Mode::Context => return Err(DeltaError::ContextNeedsImage { block: record.block }),
        }
        Ok(by_unit!(tile.unit, T => {
            let values = T::of(&mut self.codes);
            values.iter_mut().for_each(|code| *code = T::turned(*code));
            let sum = record.sum.plus(step_values(tile, bytes, &self.positions, values));
            for (&p, &value) in self.positions.iter().zip(values.iter()) {
                value.write(bytes, p.into());
            }
            sum
        }))
    }

    /// Decodes a sparse or bitmap record into positions and codes.
    pub(super) fn decode(
        &mut self,
        tile: &Tile,
        record: &Record<'_>,
        found: impl Fn(&[u16]),
    ) -> Result<(), DeltaError> {
        by_unit!(tile.unit, T => {
            take_plain(tile, record.mode, record.payload, &mut self.ones, &mut self.positions, T::of(&mut self.codes), found)
                .map_err(|why| record.bad(why))
        })
    }

    /// Decodes a context record into positions, class by class, and codes. A failure may be due to the record or to `old`.
    pub(super) fn decode_context<K: Kernels + ?Sized>(
        &mut self,
        kernels: &K,
        tile: &Tile,
        record: &Record<'_>,
        old: &[u8],
    ) -> Result<(), DeltaError> {
        let scratch = self.context.get_or_insert_default();
        let to = (&mut self.ones, &mut self.positions);
        by_unit!(tile.unit, T => {
            let codes = T::of(&mut self.codes);
            context::take(kernels, scratch, tile, old, record.payload, to, codes).map_err(|why| record.bad(why))
        })
    }

    pub(super) fn changes<T: Pick>(&mut self) -> (&mut Vec<u16>, &mut Vec<T>) {
        (&mut self.positions, T::of(&mut self.codes))
    }
}

/// Turns codes into the units they lead to, and collects the step of the block's sum.
fn step_values<T: Unit>(tile: &Tile, bytes: &[u8], positions: &[u16], codes: &mut [T]) -> BlockSum {
    let mask = T::mask(tile.line);
    let codes = &mut codes[..positions.len()];
    let change = |i: usize| {
        let old = T::read(bytes, positions[i].into());
        codes[i] = T::step(mask, old, codes[i]);
        (old, codes[i])
    };
    tile.sum_of_changes(positions, change)
}

fn take_plain<T: Unit>(
    tile: &Tile,
    mode: Mode,
    payload: &[u8],
    ones: &mut Vec<u32>,
    positions: &mut Vec<u16>,
    codes: &mut Vec<T>,
    found: impl Fn(&[u16]),
) -> Result<(), &'static str> {
    let (k, mut payload) = positions::take(tile, mode, payload, ones, positions)?;
    found(positions);
    if k >= T::BITS {
        return Err("its value parameter is out of range");
    }
    values::take(codes, ones, &mut payload, &[Group { count: positions.len(), k }])?;
    if payload.is_empty() { Ok(()) } else { Err("it goes on after its end") }
}
