//! Composes two deltas into one, without an image.

use super::apply::Applier;
use super::container::{Delta, DeltaHeader, PartBuilder};
use super::encode::{Codes, Encoded, Pick, by_unit, put_plain};
use super::line::Unit;
use super::{DeltaError, Mode, Record, Tile};
use crate::manifest::Manifest;

/// Composes records one by one, reusing its memory.
#[derive(Debug, Default)]
pub struct Composer {
    first: Applier,
    second: Applier,
    positions: Vec<u16>,
    codes: Codes,
}

impl Composer {
    pub fn new() -> Composer {
        Composer::default()
    }

    /// Appends the payload of the record that has the effect of `first` and then `second`;
    /// returns `None` if they cancel.
    ///
    /// # Panics
    /// If a record is for another block than the tile's.
    pub fn compose(
        &mut self,
        tile: &Tile,
        first: &Record<'_>,
        second: &Record<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Encoded>, DeltaError> {
        assert!(first.block == tile.number && second.block == tile.number, "records of the tile's block");
        for record in [first, second] {
            if record.mode == Mode::Context {
                return Err(DeltaError::ContextNeedsImage { block: record.block });
            }
            if record.mode == Mode::Dense && record.payload.len() != tile.bytes() {
                return Err(record.bad("it is not as long as its block"));
            }
        }
        let units = tile.units() as u32;
        if second.mode == Mode::Dense {
            out.extend_from_slice(second.payload);
            return Ok(Some(Encoded { mode: Mode::Dense, changes: units, sum: second.sum }));
        }
        self.second.decode(tile, second, |_| ())?;
        by_unit!(tile.unit, T => {
            let (positions, codes) = self.second.changes::<T>();
            if first.mode == Mode::Dense {
                let start = out.len();
                out.extend_from_slice(first.payload);
                let mask = T::mask(tile.line);
                for (&p, &code) in positions.iter().zip(codes.iter()) {
                    let p = usize::from(p);
                    T::step(mask, T::read(&out[start..], p), code).write(&mut out[start..], p);
                }
                return Ok(Some(Encoded { mode: Mode::Dense, changes: units, sum: second.sum }));
            }
            self.first.decode(tile, first, |_| ())?;
            let (a_positions, a_codes) = self.first.changes::<T>();
            let merged = T::of(&mut self.codes);
            merge((a_positions, a_codes), (positions, codes), &mut self.positions, merged);
            if self.positions.is_empty() {
                return Ok(None);
            }
            let mode = put_plain(tile, &self.positions, merged, None, out);
            Ok(Some(Encoded { mode, changes: self.positions.len() as u32, sum: second.sum }))
        })
    }

    /// Appends the payload of a record that is taken over as it is, and counts its changes.
    pub fn keep(
        &mut self,
        tile: &Tile,
        record: &Record<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Encoded, DeltaError> {
        let changes = match record.mode {
            Mode::Context => return Err(DeltaError::ContextNeedsImage { block: record.block }),
            Mode::Dense if record.payload.len() != tile.bytes() => {
                return Err(record.bad("it is not as long as its block"));
            }
            Mode::Dense => tile.units() as u32,
            Mode::Sparse | Mode::Bitmap => {
                self.first.decode(tile, record, |_| ())?;
                by_unit!(tile.unit, T => self.first.changes::<T>().0.len() as u32)
            }
        };
        out.extend_from_slice(record.payload);
        Ok(Encoded { mode: record.mode, changes, sum: record.sum })
    }
}

/// Merges two lists of changes by position; steps at one position add up or cancel.
fn merge<T: Pick>(a: (&[u16], &[T]), b: (&[u16], &[T]), positions: &mut Vec<u16>, codes: &mut Vec<T>) {
    positions.clear();
    codes.clear();
    let mut a = a.0.iter().copied().zip(a.1.iter().copied()).peekable();
    let mut b = b.0.iter().copied().zip(b.1.iter().copied()).peekable();
    loop {
        let next = match (a.peek(), b.peek()) {
            (None, None) => return,
            (Some(&(p, code)), Some(&(q, _))) if p < q => {
                a.next();
                Some((p, code))
            }
            (Some(&(p, x)), Some(&(q, y))) if p == q => {
                a.next();
                b.next();
                T::add_codes(x, y).map(|sum| (p, sum))
            }
            (Some(_), None) => a.next(),
            (None | Some(_), Some(_)) => b.next(),
        };
        if let Some((p, code)) = next {
            positions.push(p);
            codes.push(code);
        }
    }
}

/// The container that has the effect of `first` and then `second`.
///
/// Both must be plain, of this manifest, and follow one another. Blocks whose changes cancel have no record.
/// Where the shortest record for the composition would be dense, the result may hold a longer one, since the
/// composer does not have the units themselves.
pub fn compose(manifest: &Manifest, first: &Delta<'_>, second: &Delta<'_>) -> Result<Vec<u8>, DeltaError> {
    first.header.check(manifest)?;
    second.header.check(manifest)?;
    let (a, b) = (&first.header, &second.header);
    if a.target_identity() != b.base_identity() || a.target_digest != b.base_digest {
        return Err(DeltaError::NotConsecutive {
            first: format!("{} ({})", a.target_identity(), a.target_digest),
            second: format!("{} ({})", b.base_identity(), b.base_digest),
        });
    }
    let header = DeltaHeader { base: a.base, base_digest: a.base_digest, ..b.clone() };
    let mut out = header.to_bytes();
    let mut parts = PartBuilder::new();
    let mut composer = Composer::new();
    let mut payload = Vec::new();
    let (mut firsts, mut seconds) = (first.records().peekable(), second.records().peekable());
    loop {
        let block = match (firsts.peek(), seconds.peek()) {
            (None, None) => break,
            (Some(r), None) | (None, Some(r)) => r.block,
            (Some(r), Some(s)) => r.block.min(s.block),
        };
        let tile = Tile::of(manifest, block)?;
        let one = firsts.next_if(|r| r.block == block);
        let two = seconds.next_if(|r| r.block == block);
        payload.clear();
        let encoded = match (&one, &two) {
            (Some(r), Some(s)) => composer.compose(&tile, r, s, &mut payload)?,
            (Some(r), None) | (None, Some(r)) => Some(composer.keep(&tile, r, &mut payload)?),
            (None, None) => None,
        };
        if let Some(encoded) = encoded {
            parts.push(block, &encoded, &payload, &mut out);
        }
    }
    parts.finish(&mut out);
    Ok(out)
}
