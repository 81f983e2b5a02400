//! Records into the slot that lags behind.
//!
//! Owns: how a rank's blocks of the slot that is being written come to the new version. Every block is changed under its
//! sums: the records of the last two versions lead from the sum that the block had to the one that it must have. A block
//! for which they do not is copied from the slot of the base, whose record must then fit; if that does not fit either, the
//! attempt is given up.

use windlass_core::delta::{Applier, Outcome, Record, Tile};
use windlass_core::digest::{BlockSum, SumTable};
use windlass_core::identity::Version;
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;

use super::{PublishError, Records};
use crate::region::{Attempt, Region, step};
use crate::seal::pass::gather;
use crate::shm::Mapping;
use crate::stop::Stop;
use crate::work;

/// What the target slot holds of this rank's blocks.
pub(super) enum Lag<'a> {
    /// The version before the base: its sums, and what leads from there to the base.
    Known(&'a SumTable, &'a Records),
    Unknown,
}

/// What is to be done to a slot.
pub(super) struct Work<'a> {
    pub(super) region: &'a Region,
    pub(super) rank: u16,
    pub(super) blocks: &'a BlockRanges,
    pub(super) lag: Lag<'a>,
    /// The data of the slot of the base, and its sums.
    pub(super) base: (&'a [u8], &'a SumTable),
    pub(super) version: Version,
    pub(super) records: &'a Records,
    pub(super) threads: usize,
}

/// How many blocks were changed, and how many were copied from the base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) changed: u64,
    pub(super) copied: u64,
}

#[derive(Default)]
struct Hand {
    applier: Applier,
    scratch: Vec<u8>,
    gathered: Vec<u8>,
    done: Done,
}

impl Work<'_> {
    /// Brings this rank's blocks of the attempt's slot to the version.
    pub(super) fn run(&self, attempt: &Attempt<'_>, stop: &Stop) -> Result<Done, PublishError> {
        let numbers: Vec<u32> = match &self.lag {
            Lag::Known(_, last) => {
                let mut all: Vec<u32> =
                    last.entries().iter().chain(self.records.entries()).map(|e| e.block).collect();
                all.sort_unstable();
                all.dedup();
                all
            }
            Lag::Unknown => self.blocks.iter().collect(),
        };
        let hands = work::each(self.threads.max(1), numbers.len() as u64, stop, Hand::default, |hand, i| {
            attempt.check()?;
            step("applying");
            self.block(attempt, hand, numbers[i as usize])
        })?;
        Ok(hands.iter().fold(Done::default(), |a, h| Done {
            changed: a.changed + h.done.changed,
            copied: a.copied + h.done.copied,
        }))
    }

    fn block(&self, attempt: &Attempt<'_>, hand: &mut Hand, number: u32) -> Result<(), PublishError> {
        let manifest = self.region.manifest();
        let tile = Tile::of(manifest, number)?;
        let newest = self.records.find(number);
        if let Lag::Known(sums, last) = &self.lag {
            let steps = [last.find(number), newest];
            if self.change(attempt, hand, &tile, sums.get(number), &steps)? {
                hand.done.changed += 1;
                return Ok(());
            }
            tracing::warn!(
                block = number,
                version = self.version,
                "a block of the slot is not what it should be; it is copied from the other slot"
            );
        }
        self.copy(attempt, hand, &tile)?;
        hand.done.copied += 1;
        if self.change(attempt, hand, &tile, self.base.1.get(number), &[newest])? {
            Ok(())
        } else {
            Err(PublishError::Misfit { rank: self.rank, block: number, version: self.version })
        }
    }

    /// Applies records one after the other; false if one does not fit.
    fn change(
        &self,
        attempt: &Attempt<'_>,
        hand: &mut Hand,
        tile: &Tile,
        mut sum: BlockSum,
        steps: &[Option<Record<'_>>],
    ) -> Result<bool, PublishError> {
        if steps.iter().all(Option::is_none) {
            return Ok(true);
        }
        let Hand { applier, scratch, .. } = hand;
        let kernels = crate::simd::kernels();
        let (mapping, start) = (attempt.mapping(), self.region.data_start());
        change_block(mapping, start, self.region.manifest(), tile, scratch, |bytes| {
            for record in steps.iter().flatten() {
                match applier.apply(kernels, tile, record, sum, bytes)? {
                    Outcome::Applied | Outcome::Skipped => sum = record.sum,
                    Outcome::Refetch => return Ok(false),
                }
            }
            Ok(true)
        })
    }

    /// Copies a block from the slot of the base.
    fn copy(&self, attempt: &Attempt<'_>, hand: &mut Hand, tile: &Tile) -> Result<(), PublishError> {
        let manifest = self.region.manifest();
        let Some(tensor) = manifest.tensors().get(tile.block.tensor as usize) else { return Ok(()) };
        let range = tensor.range();
        let all = self.base.0.get(range.start as usize..range.end as usize).unwrap_or_default();
        let mut bytes = gather(all, tile, &mut hand.gathered)?;
        for run in manifest.byte_runs(&tile.block) {
            let (now, rest) = bytes.split_at((run.end - run.start) as usize);
            attempt.write(run.start, now)?;
            bytes = rest;
        }
        Ok(())
    }
}

/// Gives the bytes of a block to `change`: in place where they lie together, else gathered and put back.
fn change_block<T>(
    mapping: &Mapping,
    start: u64,
    manifest: &Manifest,
    tile: &Tile,
    scratch: &mut Vec<u8>,
    change: impl FnOnce(&mut [u8]) -> Result<T, PublishError>,
) -> Result<T, PublishError> {
    let mut runs = manifest.byte_runs(&tile.block);
    if tile.block.is_contiguous() {
        let Some(run) = runs.next() else { return change(&mut []) };
        let mut loan = mapping.lend(start + run.start..start + run.end)?;
        return change(&mut loan);
    }
    scratch.clear();
    for run in runs {
        let at = scratch.len();
        scratch.resize(at + (run.end - run.start) as usize, 0);
        mapping.copy_out(start + run.start, &mut scratch[at..]);
    }
    let result = change(scratch)?;
    let mut rest = scratch.as_slice();
    for run in manifest.byte_runs(&tile.block) {
        let (bytes, after) = rest.split_at((run.end - run.start) as usize);
        mapping.copy_in(start + run.start, bytes);
        rest = after;
    }
    Ok(result)
}
