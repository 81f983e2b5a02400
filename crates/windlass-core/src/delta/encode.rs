//! From two states of a block to its record.

use super::bits::{BitWriter, UnaryWriter, section};
use super::context::{self, ContextScratch};
use super::line::Unit;
use super::values::{self, Group};
use super::{Mode, Tile, gaps};
use crate::digest::BlockSum;
use crate::kernel::Kernels;

/// Codes of any unit size; each encoder or decoder uses the one for its block.
#[derive(Debug, Default)]
pub struct Codes {
    b1: Vec<u8>,
    b2: Vec<u16>,
    b4: Vec<u32>,
    b8: Vec<u64>,
}

/// Finds the buffer for a unit.
pub(super) trait Pick: Unit {
    fn of(codes: &mut Codes) -> &mut Vec<Self>;
}

impl Pick for u8 {
    fn of(codes: &mut Codes) -> &mut Vec<u8> {
        &mut codes.b1
    }
}
impl Pick for u16 {
    fn of(codes: &mut Codes) -> &mut Vec<u16> {
        &mut codes.b2
    }
}
impl Pick for u32 {
    fn of(codes: &mut Codes) -> &mut Vec<u32> {
        &mut codes.b4
    }
}
impl Pick for u64 {
    fn of(codes: &mut Codes) -> &mut Vec<u64> {
        &mut codes.b8
    }
}

/// Runs an expression with the unit type of this many bytes.
macro_rules! by_unit {
    ($unit:expr, $T:ident => $body:expr) => {
        match $unit {
            1 => {
                type $T = u8;
                $body
            }
            2 => {
                type $T = u16;
                $body
            }
            4 => {
                type $T = u32;
                $body
            }
            8 => {
                type $T = u64;
                $body
            }
            other => unreachable!("a unit has 1, 2, 4 or 8 bytes, not {other}"),
        }
    };
}
pub(super) use by_unit;

/// The result of encoding a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// The form of the payload.
    pub mode: Mode,
    /// How many units changed.
    pub changes: u32,
    /// The block's sum after the change.
    pub sum: BlockSum,
}

/// Encodes blocks one by one, reusing its memory: two blocks' worth while at most an eighth of the units changes,
/// up to four where all of them do.
#[derive(Debug, Default)]
pub struct Encoder {
    positions: Vec<u16>,
    codes: Codes,
    context: Option<Box<ContextScratch>>,
}

impl Encoder {
    /// An encoder of plain records (sparse, bitmap, dense).
    pub fn plain() -> Encoder {
        Encoder::default()
    }

    /// An encoder that also tries context records.
    pub fn with_context() -> Encoder {
        Encoder { context: Some(Box::default()), ..Encoder::default() }
    }

    /// Appends the payload of the record that leads from `old` to `new`; returns `None` if they are equal.
    ///
    /// Both slices hold the block's bytes, run after run; `old_sum` is the sum of `old`.
    ///
    /// # Panics
    /// If a slice is not as long as the tile.
    pub fn encode<K: Kernels + ?Sized>(
        &mut self,
        kernels: &K,
        tile: &Tile,
        (old, old_sum): (&[u8], BlockSum),
        new: &[u8],
        out: &mut Vec<u8>,
    ) -> Option<Encoded> {
        assert!(old.len() == tile.bytes() && new.len() == tile.bytes(), "both states fill the block");
        self.positions.clear();
        kernels.changed(old, new, tile.unit, &mut self.positions);
        if self.positions.is_empty() {
            return None;
        }
        by_unit!(tile.unit, T => {
            let codes = T::of(&mut self.codes);
            let step = step_codes(tile, old, new, &self.positions, codes);
            let start = out.len();
            let mut mode = put_plain(tile, &self.positions, codes, Some(new), out);
            if let Some(scratch) = &mut self.context
                && self.positions.len() <= tile.units() / context::MOST_CHANGED
                && context::put(kernels, scratch, tile, old, (&self.positions, codes), out.len() - start)
            {
                out.truncate(start);
                out.extend_from_slice(scratch.payload());
                mode = Mode::Context;
            }
            let sum = old_sum.plus(step);
            Some(Encoded { mode, changes: self.positions.len() as u32, sum })
        })
    }
}

/// The codes of the changes at these positions, and the step of the block's sum.
fn step_codes<T: Unit>(
    tile: &Tile,
    old: &[u8],
    new: &[u8],
    positions: &[u16],
    codes: &mut Vec<T>,
) -> BlockSum {
    let mask = T::mask(tile.line);
    codes.clear();
    codes.resize(positions.len(), T::default());
    let codes = &mut codes[..positions.len()];
    let change = |i: usize| {
        let p = usize::from(positions[i]);
        let (a, b) = (T::read(old, p), T::read(new, p));
        codes[i] = T::code(mask, a, b);
        (a, b)
    };
    tile.sum_of_changes(positions, change)
}

/// Appends the shortest plain payload. Without the new units, dense is not among the choices.
pub(super) fn put_plain<T: Unit>(
    tile: &Tile,
    positions: &[u16],
    codes: &[T],
    new: Option<&[u8]>,
    out: &mut Vec<u8>,
) -> Mode {
    let (n, units) = (positions.len(), tile.units());
    let (k, gap_bits) = gaps::parameter(positions, units);
    let values_k = values::parameter(codes);
    let values = values::size(codes, values_k);
    let low = n * k as usize;
    let sparse = 4 + section(low) + section(gap_bits as usize - low) + values;
    let bitmap = 3 + section(units) + values;
    if let Some(new) = new
        && new.len() < sparse.min(bitmap)
    {
        out.extend_from_slice(new);
        return Mode::Dense;
    }
    out.reserve(sparse.min(bitmap));
    let start = out.len();
    out.extend_from_slice(&((n - 1) as u16).to_le_bytes());
    let mode = if sparse <= bitmap {
        out.extend_from_slice(&[k as u8, values_k as u8]);
        gaps::put_low(BitWriter::new(out), positions, k).finish();
        gaps::put_high(UnaryWriter::new(out), positions, k).finish();
        Mode::Sparse
    } else {
        out.push(values_k as u8);
        let at = out.len();
        out.resize(at + section(units), 0);
        positions.iter().for_each(|&p| out[at + usize::from(p) / 8] |= 1 << (p % 8));
        Mode::Bitmap
    };
    values::put(out, codes, &[Group { count: n, k: values_k }]);
    debug_assert_eq!(out.len() - start, if mode == Mode::Sparse { sparse } else { bitmap });
    mode
}
