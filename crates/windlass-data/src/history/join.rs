//! Consecutive deltas made one, block by block, in bounded memory.
//!
//! Owns: the merge of several files. Threads take stretches of blocks, each with a cursor of its own in every file; every
//! record is decoded once, and what the records of a block come to is encoded once. Memory of a thread: a part of each
//! input, and what it has composed and not written, about 2 MiB at most.

use std::sync::Arc;

use windlass_core::delta::{Composer, DeltaError, Encoded, Tile};
use windlass_core::manifest::{BLOCK_UNITS, Manifest};
use windlass_core::ranges::BlockRanges;

use super::reader::{Fault, Parts, Records};
use super::writer::Writer;
use super::{HistoryError, Segment};
use crate::stop::{Stop, Stopped};
use crate::work::{self, Batch};

/// No reader takes a longer record: a block of the widest unit, in full.
const MAX_RECORD: usize = BLOCK_UNITS as usize * 8;
/// A stretch of blocks has about so many bytes in all inputs together.
const STRETCH: u64 = 64 << 10;
/// What is composed is written when it has so many bytes, also if the thread has not done its stretches.
const FULL: usize = 2 << 20;

/// Why deltas were not joined.
#[derive(Debug)]
pub(super) enum JoinFault {
    /// An input, by its place in the list.
    Input(usize, Fault),
    Write(HistoryError),
    TooDense(u32),
    Stopped(Stopped),
}

impl From<Stopped> for JoinFault {
    fn from(s: Stopped) -> JoinFault {
        JoinFault::Stopped(s)
    }
}

/// Writes what `inputs` do one after another, to all blocks or `only` to these. The bytes do not depend on the number of
/// threads.
pub(super) fn join(
    manifest: &Manifest,
    inputs: &[&Segment],
    only: Option<&BlockRanges>,
    writer: Writer,
    threads: usize,
    stop: &Stop,
) -> Result<Writer, JoinFault> {
    let mut parts = Vec::with_capacity(inputs.len());
    for (i, s) in inputs.iter().enumerate() {
        let found = Parts::find(&s.file, s.bytes).map_err(|e| JoinFault::Input(i, e))?;
        parts.push((&*s.file, Arc::new(found)));
    }
    let (blocks, bytes) = (u64::from(manifest.cuts().blocks()), inputs.iter().map(|s| s.bytes).sum::<u64>());
    let stretch = (blocks * STRETCH / bytes.max(1)).max(1);
    let worker = || Worker {
        sources: parts.iter().map(|(file, parts)| Records::of(file, Arc::clone(parts))).collect(),
        composer: Composer::new(),
        payload: Vec::new(),
        records: Vec::new(),
    };
    let make = |w: &mut Worker<'_>, i: u64| {
        let (from, to) = (i * stretch, blocks.min((i + 1) * stretch));
        for (n, source) in w.sources.iter_mut().enumerate() {
            source.seek(from as u32).map_err(|e| JoinFault::Input(n, e))?;
        }
        while let Some(block) = w.block().filter(|&block| u64::from(block) < to) {
            stop.check()?;
            if only.is_none_or(|only| only.contains(block)) {
                w.compose(manifest, block)?;
            }
            w.leave(block)?;
        }
        Ok(())
    };
    let put = |writer: &mut Writer, w: &mut Worker<'_>| w.put(writer).map_err(JoinFault::Write);
    let (writer, _) = work::in_order(threads, blocks.div_ceil(stretch), stop, writer, worker, make, put)?;
    Ok(writer)
}

/// A thread's place in the inputs, and what it has composed and not written.
struct Worker<'f> {
    sources: Vec<Records<'f>>,
    composer: Composer,
    payload: Vec<u8>,
    /// Each with its block and how long it is.
    records: Vec<(u32, Encoded, usize)>,
}

impl Batch for Worker<'_> {
    fn full(&self) -> bool {
        self.payload.len() >= FULL
    }
}

impl Worker<'_> {
    /// The next block that some input changes.
    fn block(&self) -> Option<u32> {
        self.sources.iter().filter_map(Records::block).min()
    }

    /// Composes what the inputs have of this block, which is their next.
    fn compose(&mut self, manifest: &Manifest, block: u32) -> Result<(), JoinFault> {
        let (mut places, mut records) = (Vec::new(), Vec::new());
        for (i, source) in self.sources.iter_mut().enumerate().filter(|(_, s)| s.block() == Some(block)) {
            if let Some(record) = source.record().map_err(|e| JoinFault::Input(i, e))? {
                places.push(i);
                records.push(record);
            }
        }
        let which =
            |at: usize, e: DeltaError| JoinFault::Input(places.get(at).copied().unwrap_or(0), e.into());
        let tile = Tile::of(manifest, block).map_err(|e| which(0, e.into()))?;
        let start = self.payload.len();
        let composed = self.composer.compose(&tile, &records, &mut self.payload);
        if let Some(encoded) = composed.map_err(|(at, e)| which(at, e))? {
            let len = self.payload.len() - start;
            if len > MAX_RECORD {
                return Err(JoinFault::TooDense(block));
            }
            self.records.push((block, encoded, len));
        }
        Ok(())
    }

    /// Leaves a block behind.
    fn leave(&mut self, block: u32) -> Result<(), JoinFault> {
        let mut at = self.sources.iter_mut().enumerate().filter(|(_, s)| s.block() == Some(block));
        at.try_for_each(|(i, s)| s.advance().map_err(|e| JoinFault::Input(i, e)))
    }

    fn put(&mut self, writer: &mut Writer) -> Result<(), HistoryError> {
        let mut rest = self.payload.as_slice();
        for (block, encoded, len) in self.records.drain(..) {
            let (payload, after) = rest.split_at(len);
            rest = after;
            writer.push(block, &encoded, payload)?;
        }
        self.payload.clear();
        Ok(())
    }
}
