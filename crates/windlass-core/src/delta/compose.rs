//! Composes deltas into one, without an image.

use super::apply::Applier;
use super::container::{Delta, DeltaHeader, PartBuilder};
use super::encode::{Codes, Encoded, Pick, by_unit, put_plain};
use super::line::Unit;
use super::{DeltaError, Mode, Record, Tile};
use crate::manifest::Manifest;

/// Composes the records of a block, one block after another, reusing its memory: up to three blocks' worth.
#[derive(Debug, Default)]
pub struct Composer {
    applier: Applier,
    /// Which units the composition changes, a bit for each, and by which steps.
    changed: Vec<u64>,
    steps: Codes,
    positions: Vec<u16>,
    codes: Codes,
}

impl Composer {
    pub fn new() -> Composer {
        Composer::default()
    }

    /// Appends the payload of the record that has the effect of `records`, the oldest first; returns `None` if they
    /// cancel. A single record is taken over as it is. An error comes with the place of the record at fault; `out` then
    /// holds what must not be used.
    ///
    /// # Panics
    /// If a record is for another block than the tile's.
    pub fn compose(
        &mut self,
        tile: &Tile,
        records: &[Record<'_>],
        out: &mut Vec<u8>,
    ) -> Result<Option<Encoded>, (usize, DeltaError)> {
        for (i, record) in records.iter().enumerate() {
            assert!(record.block == tile.number, "records of the tile's block");
            match record.mode {
                Mode::Context => return Err((i, DeltaError::ContextNeedsImage { block: record.block })),
                Mode::Dense if record.payload.len() != tile.bytes() => {
                    return Err((i, record.bad("it is not as long as its block")));
                }
                _ => {}
            }
        }
        let Some(last) = records.last() else { return Ok(None) };
        // Nothing is left of what was before a dense record.
        if let Some(dense) = records.iter().rposition(|r| r.mode == Mode::Dense) {
            let start = out.len();
            out.extend_from_slice(records[dense].payload);
            for (i, record) in records.iter().enumerate().skip(dense + 1) {
                self.applier.decode(tile, record, |_| ()).map_err(|e| (i, e))?;
                by_unit!(tile.unit, T => {
                    let mask = T::mask(tile.line);
                    let (positions, codes) = self.applier.changes::<T>();
                    for (&p, &code) in positions.iter().zip(codes.iter()) {
                        let p = usize::from(p);
                        T::step(mask, T::read(&out[start..], p), code).write(&mut out[start..], p);
                    }
                });
            }
            return Ok(Some(Encoded { mode: Mode::Dense, changes: tile.units() as u32, sum: last.sum }));
        }
        if let [one] = records {
            self.applier.decode(tile, one, |_| ()).map_err(|e| (0, e))?;
            let changes = by_unit!(tile.unit, T => self.applier.changes::<T>().0.len() as u32);
            out.extend_from_slice(one.payload);
            return Ok(Some(Encoded { mode: one.mode, changes, sum: one.sum }));
        }
        by_unit!(tile.unit, T => self.add_up::<T>(tile, records)?);
        if self.positions.is_empty() {
            return Ok(None);
        }
        let mode =
            by_unit!(tile.unit, T => put_plain(tile, &self.positions, T::of(&mut self.codes), None, out));
        Ok(Some(Encoded { mode, changes: self.positions.len() as u32, sum: last.sum }))
    }

    /// Adds the steps of records up, unit by unit, and collects those that do not cancel.
    fn add_up<T: Pick>(&mut self, tile: &Tile, records: &[Record<'_>]) -> Result<(), (usize, DeltaError)> {
        let Composer { applier, changed, steps, positions, codes } = self;
        let (steps, codes) = (T::of(steps), T::of(codes));
        // A step counts where its bit is set, so that what an earlier block left needs no clearing.
        steps.resize(steps.len().max(tile.units()), T::default());
        changed.clear();
        changed.resize(tile.units().div_ceil(64), 0);
        for (i, record) in records.iter().enumerate() {
            applier.decode(tile, record, |_| ()).map_err(|e| (i, e))?;
            let (at, by) = applier.changes::<T>();
            for (&p, &code) in at.iter().zip(by.iter()) {
                let p = usize::from(p);
                let (word, bit) = (&mut changed[p / 64], 1 << (p % 64));
                let sum = if *word & bit == 0 { Some(code) } else { T::add_codes(steps[p], code) };
                match sum {
                    Some(sum) => {
                        *word |= bit;
                        steps[p] = sum;
                    }
                    None => *word &= !bit,
                }
            }
        }
        positions.clear();
        codes.clear();
        for (i, &word) in changed.iter().enumerate() {
            let mut left = word;
            while left != 0 {
                let p = i * 64 + left.trailing_zeros() as usize;
                positions.push(p as u16);
                codes.push(steps[p]);
                left &= left - 1;
            }
        }
        Ok(())
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
        let here = |r: &Record<'_>| r.block == block;
        let records: Vec<_> = [firsts.next_if(here), seconds.next_if(here)].into_iter().flatten().collect();
        payload.clear();
        if let Some(encoded) = composer.compose(&tile, &records, &mut payload).map_err(|(_, e)| e)? {
            parts.push(block, &encoded, &payload, &mut out);
        }
    }
    parts.finish(&mut out);
    Ok(out)
}
