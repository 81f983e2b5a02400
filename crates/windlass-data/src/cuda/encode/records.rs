//! What a pass found, on the host.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use windlass_core::delta::container::Entry;
use windlass_core::delta::{DeltaHeader, Encoded, Mode, PartBuilder, Record};
use windlass_core::digest::BlockSum;

use super::{Baseline, Which};
use crate::cuda::driver::Gpu;
use crate::cuda::error::CudaError;
use crate::cuda::kernels;
use crate::cuda::memory::HostBuffer;
use crate::publish::{self, Base, DeltaSource, PublishError};
use crate::stop::Stop;

/// The mode of this code.
pub(super) fn mode_of(code: u32) -> Option<Mode> {
    Mode::ALL.into_iter().find(|m| u32::from(m.code()) == code)
}

/// The index at the front of a buffer.
pub(super) fn entries_of(buffer: &HostBuffer, count: usize) -> &[kernels::Entry] {
    &buffer.table()[..count]
}

/// How long the steps of a pass took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    pub pass: Duration,
    /// The records' way to the host.
    pub copy: Duration,
    pub index: Duration,
}

/// The records of a pass, by ascending block, in pinned memory that goes back to its baseline when they are dropped.
pub struct Records {
    /// Entries of the index, by their blocks.
    pub(super) order: Vec<u32>,
    /// Blocks of which there was no room on the device, ascending, and where they are in the buffer.
    pub(super) lost: Vec<(u32, usize, usize)>,
    /// Where payloads begin in the buffer.
    pub(super) payload: usize,
    pub(super) bytes: u64,
    pub(super) changes: u64,
    pub(super) spent: Spent,
    pub(super) buffer: Option<HostBuffer>,
    pub(super) pool: Arc<Pool>,
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (records, bytes) = (self.len(), self.bytes);
        f.debug_struct("Records").field("records", &records).field("bytes", &bytes).finish_non_exhaustive()
    }
}

impl Records {
    /// How many blocks changed.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// How many units changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Records that found no room on the device and came as dense ones.
    pub fn lost(&self) -> usize {
        self.lost.len()
    }

    /// Bytes of all payloads.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How long it took.
    pub fn spent(&self) -> Spent {
        self.spent
    }

    /// The records, with what a container's index says of each.
    pub fn iter(&self) -> impl Iterator<Item = (Record<'_>, Encoded)> {
        let bytes = self.buffer.as_ref().map_or(&[][..], HostBuffer::bytes);
        let raw = self.buffer.as_ref().map_or(&[][..], |b| entries_of(b, self.order.len()));
        self.order.iter().filter_map(|&i| raw.get(i as usize)).map(|e| {
            let lost = self.lost.binary_search_by_key(&e.number, |l| l.0).ok().map(|n| self.lost[n]);
            // Modes were checked when the index was read.
            let mode = mode_of(e.mode).filter(|_| lost.is_none()).unwrap_or(Mode::Dense);
            let at = self.payload + if lost.is_some() { 0 } else { e.offset as usize };
            let payload = match lost {
                Some((_, at, length)) => &bytes[at..at + length],
                None => &bytes[at..at + e.length as usize],
            };
            let encoded = Encoded { mode, changes: e.changes, sum: BlockSum(e.sum) };
            (Record { block: e.number, mode, sum: encoded.sum, payload }, encoded)
        })
    }

    /// A container of these records alone, as `windlass delta make` writes it for the whole model.
    pub fn container(&self, header: &DeltaHeader) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.bytes() as usize + self.len() * 24 + 4096);
        out.extend_from_slice(&header.to_bytes());
        let mut builder = PartBuilder::new();
        for (record, encoded) in self.iter() {
            builder.push(record.block, &encoded, record.payload, &mut out);
        }
        builder.finish(&mut out);
        out
    }
}

/// Payloads of shared records, as the background work of a rank reads them.
struct Payload(Arc<Records>);

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        self.0.buffer.as_ref().map_or(&[], HostBuffer::bytes)
    }
}

/// Nothing is left to compare: the records are handed on where they are.
impl DeltaSource for Arc<Records> {
    fn records(self: Box<Self>, base: Base<'_>, _: &Stop) -> Result<publish::Records, PublishError> {
        let start = self.buffer.as_ref().map_or(0, |b| b.bytes().as_ptr().addr());
        let entry = |(record, encoded): (Record<'_>, Encoded)| Entry {
            block: record.block,
            mode: encoded.mode,
            sum: encoded.sum,
            offset: record.payload.as_ptr().addr() - start,
            len: record.payload.len() as u32,
        };
        let entries = self.iter().map(entry).collect();
        let changes = self.changes;
        publish::Records::new(entries, changes, Box::new(Payload(*self)))
            .map_err(|source| PublishError::Records { rank: base.rank, version: base.version, source })
    }
}

/// The records of a pass that are still on the device: the background work collects them.
#[derive(Debug)]
pub struct Uncollected {
    /// Whose pass it is. Held while records are collected.
    pub baseline: Arc<Mutex<Baseline>>,
    pub target: Which,
}

impl DeltaSource for Uncollected {
    fn records(self: Box<Self>, base: Base<'_>, stop: &Stop) -> Result<publish::Records, PublishError> {
        let mut baseline = self.baseline.lock();
        let records = baseline.collect(self.target).map_err(|e| {
            let kind = e.kind();
            PublishError::Encoder(e.into(), kind)
        })?;
        drop(baseline);
        Box::new(Arc::new(records)).records(base, stop)
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.put(buffer);
        }
    }
}

/// Pinned buffers that are not in use; as many as there were records at a time.
pub(super) struct Pool {
    pub(super) gpu: Gpu,
    pub(super) free: Mutex<Vec<HostBuffer>>,
}

impl Pool {
    /// A buffer of at least so many bytes: one that is there, or a longer one instead of it.
    pub(super) fn take(&self, bytes: u64) -> Result<HostBuffer, CudaError> {
        let mut free = self.free.lock();
        match free.pop() {
            Some(buffer) if buffer.bytes().len() as u64 >= bytes => Ok(buffer),
            short => {
                drop(short);
                HostBuffer::new(&self.gpu, bytes + bytes / 4, "the records of delta mode")
            }
        }
    }

    pub(super) fn put(&self, buffer: HostBuffer) {
        let mut free = self.free.lock();
        // Two are enough for one that is written while another is sent.
        if free.len() < 2 {
            free.push(buffer);
        }
    }
}
