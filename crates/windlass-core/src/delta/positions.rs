//! The positions of the units that a record changes, without their values.
//!
//! Owns: [`Positions`], which tells a holder of the new image which units are new in it. A load plan takes the
//! values from the image, so that a record need not be decoded over an engine's memory. Called for every record of a
//! delta, so it reuses its memory. Must not: need the old block; a context record, which does, is refused.
//!
//! It does not read values: the applier of the record has checked that they are well-formed.
//!
//! | | must hold | test |
//! |---|---|---|
//! | POSITIONS-1 | Every unit that differs is visited, once and in ascending order. | `the_positions_of_a_record_are_the_units_that_changed` |
//! | POSITIONS-2 | No bytes make it visit a unit beyond the block, panic, or allocate more than the block. | `damaged_records_never_name_a_position_beyond_their_block` |

use super::bits::{section, take_ones, take_section};
use super::{DeltaError, Mode, Record, Tile, gaps};

/// The units of a block that a record changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed<'a> {
    /// All of them may differ.
    All,
    /// These, ascending, as numbers within the block; see [`crate::manifest::Block::tensor_unit`].
    At(&'a [u16]),
}

/// Finds the positions of records one by one, reusing its memory.
#[derive(Debug, Default)]
pub struct Positions {
    ones: Vec<u32>,
    positions: Vec<u16>,
}

impl Positions {
    pub fn new() -> Positions {
        Positions::default()
    }

    /// The positions that a record changes. An error means that it is malformed, or that they depend on its old block.
    ///
    /// # Panics
    /// If the record is for another block.
    pub fn of(&mut self, tile: &Tile, record: &Record<'_>) -> Result<Changed<'_>, DeltaError> {
        assert_eq!(tile.number, record.block, "the record's own block");
        match record.mode {
            Mode::Context => Err(DeltaError::ContextNeedsImage { block: record.block }),
            Mode::Dense if record.payload.len() != tile.bytes() => {
                Err(record.bad("it is not as long as its block"))
            }
            Mode::Dense => Ok(Changed::All),
            Mode::Sparse | Mode::Bitmap => {
                take(tile, record.mode, record.payload, &mut self.ones, &mut self.positions)
                    .map_err(|why| record.bad(why))?;
                Ok(Changed::At(&self.positions))
            }
        }
    }
}

/// How many units a record says that it changes, from its head alone; all of the block's for a dense one.
pub fn count(tile: &Tile, record: &Record<'_>) -> Result<usize, DeltaError> {
    match record.mode {
        Mode::Dense => Ok(tile.units()),
        Mode::Sparse | Mode::Bitmap | Mode::Context => match record.payload.first_chunk::<2>() {
            Some(&n) => Ok(usize::from(u16::from_le_bytes(n)) + 1),
            None => Err(record.bad("it ends within its head")),
        },
    }
}

/// Replaces `positions` by those of a sparse or bitmap payload; returns the parameter of its values and their bytes.
pub(super) fn take<'p>(
    tile: &Tile,
    mode: Mode,
    mut payload: &'p [u8],
    ones: &mut Vec<u32>,
    positions: &mut Vec<u16>,
) -> Result<(u32, &'p [u8]), &'static str> {
    let units = tile.units();
    let Some((&[a, b, k], rest)) = payload.split_first_chunk::<3>() else {
        return Err("it ends within its head");
    };
    payload = rest;
    let n = usize::from(u16::from_le_bytes([a, b])) + 1;
    if n > units {
        return Err("it has more changes than its block has units");
    }
    positions.clear();
    if mode == Mode::Sparse {
        let (&values_k, rest) = payload.split_first().ok_or("it ends within its head")?;
        payload = rest;
        let k = u32::from(k);
        if k > gaps::MAX_K {
            return Err("its gap parameter is out of range");
        }
        let low = take_section(&mut payload, n * k as usize)?;
        take_ones(&mut payload, n, ones)?;
        positions.resize(n, 0);
        gaps::take(positions, k, (low, 0), ones, 0, units)?;
        Ok((u32::from(values_k), payload))
    } else {
        let (map, rest) = payload.split_at_checked(section(units)).ok_or("it ends within its bitmap")?;
        take_ones(&mut { map }, n, ones)?;
        if map.iter().map(|b| b.count_ones() as usize).sum::<usize>() != n || ones[n - 1] as usize >= units {
            return Err("its bitmap does not have as many changes as it says");
        }
        positions.extend(ones.iter().map(|&p| p as u16));
        Ok((u32::from(k), rest))
    }
}
