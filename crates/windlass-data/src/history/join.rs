//! Consecutive deltas made one, record by record, in bounded memory.
//!
//! Owns: the merge of several files by block. Memory: a part of each input, and the records of one block. The
//! records of a block are folded as a balanced tree, so that `k` inputs cost `log k` passes over their changes
//! and not `k`.

use std::io::{self, Write};

use windlass_core::delta::{Composer, DeltaError, DeltaHeader, Encoded, PartBuilder, Record, Tile};
use windlass_core::manifest::{BLOCK_UNITS, Manifest};
use windlass_core::ranges::BlockRanges;

use super::Segment;
use super::reader::{Fault, Records};
use crate::seal::draft::Draft;
use crate::stop::{Stop, Stopped};

/// No reader takes a longer record: a block of the widest unit, in full.
const MAX_RECORD: usize = BLOCK_UNITS as usize * 8;
/// Bytes that are written at a time.
const WRITE: usize = 256 << 10;

/// Why deltas were not joined.
#[derive(Debug)]
pub(super) enum JoinFault {
    /// An input, by its place in the list.
    Input(usize, Fault),
    Write(io::Error),
    TooDense(u32),
    Stopped(Stopped),
}

impl From<Stopped> for JoinFault {
    fn from(s: Stopped) -> JoinFault {
        JoinFault::Stopped(s)
    }
}

/// Writes the delta that does what `inputs` do one after another, of all blocks or `only` of these; answers its length and
/// its changes.
pub(super) fn join(
    manifest: &Manifest,
    inputs: &[&Segment],
    only: Option<&BlockRanges>,
    header: &DeltaHeader,
    draft: &Draft,
    stop: &Stop,
) -> Result<(u64, u64), JoinFault> {
    let mut sources = Vec::with_capacity(inputs.len());
    for (i, s) in inputs.iter().enumerate() {
        sources.push(Records::open(&s.file, s.bytes).map_err(|e| JoinFault::Input(i, e))?);
    }
    let wanted = |block| only.is_none_or(|only| only.contains(block));
    let (mut composer, mut parts) = (Composer::new(), PartBuilder::new());
    let (mut out, mut payload, mut written) = (header.to_bytes(), Vec::new(), 0);
    let mut flush = |out: &mut Vec<u8>, at_least: usize| {
        if out.len() >= at_least {
            draft.file().write_all(out).map_err(JoinFault::Write)?;
            written += out.len() as u64;
            out.clear();
        }
        Ok::<u64, JoinFault>(written)
    };
    while let Some(block) = sources.iter().filter_map(Records::block).min() {
        stop.check()?;
        if !wanted(block) {
            advance(&mut sources, block)?;
            continue;
        }
        let which = |e: DeltaError| JoinFault::Input(0, e.into());
        let tile = Tile::of(manifest, block).map_err(|e| which(e.into()))?;
        payload.clear();
        let records: Vec<(usize, Record<'_>)> = here(&sources, block);
        let folded = match fold(&mut composer, &tile, &records) {
            Ok(None) => None,
            Ok(Some(Step::Given(record))) => Some(composer.keep(&tile, &record, &mut payload)),
            Ok(Some(Step::Made(encoded, bytes))) => {
                payload = bytes;
                Some(Ok(encoded))
            }
            Err(e) => Some(Err(e)),
        };
        match folded.transpose() {
            Err(e) => return Err(blame(&mut composer, &tile, &records, e)),
            Ok(Some(_)) if payload.len() > MAX_RECORD => return Err(JoinFault::TooDense(block)),
            Ok(Some(encoded)) => parts.push(block, &encoded, &payload, &mut out),
            Ok(None) => {}
        }
        flush(&mut out, WRITE)?;
        advance(&mut sources, block)?;
    }
    let changes = parts.changes();
    parts.finish(&mut out);
    Ok((flush(&mut out, 0)?, changes))
}

/// Leaves a block behind.
fn advance(sources: &mut [Records<'_>], block: u32) -> Result<(), JoinFault> {
    let mut at = sources.iter_mut().enumerate().filter(|(_, s)| s.block() == Some(block));
    at.try_for_each(|(i, s)| s.advance().map_err(|e| JoinFault::Input(i, e)))
}

fn here<'s>(sources: &'s [Records<'_>], block: u32) -> Vec<(usize, Record<'s>)> {
    let record = |(i, s): (usize, &'s Records<'_>)| s.record().filter(|r| r.block == block).map(|r| (i, r));
    sources.iter().enumerate().filter_map(record).collect()
}

/// What some records of a block come to.
enum Step<'a> {
    Given(Record<'a>),
    Made(Encoded, Vec<u8>),
}

impl Step<'_> {
    fn record(&self, block: u32) -> Record<'_> {
        match self {
            Step::Given(record) => *record,
            Step::Made(e, payload) => Record { block, mode: e.mode, sum: e.sum, payload },
        }
    }
}

/// Composes the records of a block, the oldest first; `None` if they cancel.
fn fold<'a>(
    composer: &mut Composer,
    tile: &Tile,
    records: &[(usize, Record<'a>)],
) -> Result<Option<Step<'a>>, DeltaError> {
    match records {
        [] => Ok(None),
        [(_, one)] => Ok(Some(Step::Given(*one))),
        many => {
            let (older, newer) = many.split_at(many.len() / 2);
            let (a, b) = (fold(composer, tile, older)?, fold(composer, tile, newer)?);
            let (Some(a), Some(b)) = (&a, &b) else { return Ok(a.or(b)) };
            let mut payload = Vec::new();
            let n = tile.number;
            let made = composer.compose(tile, &a.record(n), &b.record(n), &mut payload)?;
            Ok(made.map(|encoded| Step::Made(encoded, payload)))
        }
    }
}

/// Finds the input whose record is at fault.
fn blame(
    composer: &mut Composer,
    tile: &Tile,
    records: &[(usize, Record<'_>)],
    error: DeltaError,
) -> JoinFault {
    let fault = records.iter().find_map(|(i, r)| {
        let e = composer.keep(tile, r, &mut Vec::new()).err()?;
        Some(JoinFault::Input(*i, e.into()))
    });
    fault.unwrap_or(JoinFault::Input(0, error.into()))
}
