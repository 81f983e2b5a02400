//! A transfer as seen from outside, at any time.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use windlass_core::wire::control::Brought;
use windlass_core::wire::{Progress, Stage};

/// Counters of one pull. The threads that pull write them, anybody may read them.
#[derive(Debug, Default)]
pub struct Watch {
    stage: AtomicU8,
    bytes: AtomicU64,
    bytes_done: AtomicU64,
    bytes_total: AtomicU64,
    stripes_done: AtomicU32,
    stripes_total: AtomicU32,
    streams: AtomicU32,
    bad: AtomicU32,
    lost: AtomicU32,
    relays_lost: AtomicU32,
    read: AtomicU64,
    unread: Mutex<Option<String>>,
    sources: Mutex<Vec<Supply>>,
}

/// What came from one source.
#[derive(Debug)]
struct Supply {
    by: Option<String>,
    bytes: u64,
    first: Instant,
    last: Instant,
}

/// What a [`Watch`] says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// How far the transfer is; `None` before it begins.
    pub stage: Option<Stage>,
    /// Payload bytes received, those of bad and lost stripes included.
    pub bytes: u64,
    pub bytes_done: u64,
    /// Payload bytes in all.
    pub bytes_total: u64,
    pub stripes_done: u32,
    pub stripes_total: u32,
    pub streams: u32,
    /// Stripes whose sums were wrong.
    pub bad: u32,
    pub lost: u32,
    /// Relays that could not be reached, failed or lied.
    pub relays_lost: u32,
    /// Those of the bytes received that were read from the sender's memory.
    pub bytes_read: u64,
}

impl Watch {
    /// What it says now. The numbers are each right, and may be of slightly different moments.
    pub fn see(&self) -> Seen {
        let stage = self.stage.load(Ordering::Relaxed);
        Seen {
            stage: Stage::ALL.into_iter().find(|s| *s as u8 == stage),
            bytes: self.bytes.load(Ordering::Relaxed),
            bytes_done: self.bytes_done.load(Ordering::Relaxed),
            bytes_total: self.bytes_total.load(Ordering::Relaxed),
            stripes_done: self.stripes_done.load(Ordering::Relaxed),
            stripes_total: self.stripes_total.load(Ordering::Relaxed),
            streams: self.streams.load(Ordering::Relaxed),
            bad: self.bad.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            relays_lost: self.relays_lost.load(Ordering::Relaxed),
            bytes_read: self.read.load(Ordering::Relaxed),
        }
    }

    /// Who brought how much so far.
    pub fn brought(&self) -> Vec<Brought> {
        let sources = self.sources.lock();
        let told = |s: &Supply| {
            // A single stripe comes in no time.
            let time = s.last.duration_since(s.first).max(Duration::from_millis(1));
            Brought { by: s.by.clone(), bytes: s.bytes, rate: s.bytes as f64 / time.as_secs_f64() }
        };
        sources.iter().map(told).collect()
    }

    /// Why the sender's memory is not read, although it was to be.
    pub fn unread(&self) -> Option<String> {
        self.unread.lock().clone()
    }

    pub(super) fn cannot_read(&self, why: &str) {
        self.unread.lock().get_or_insert_with(|| why.to_owned());
    }

    pub(super) fn read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Ordering::Relaxed);
        self.received(bytes);
    }

    pub(super) fn relay_lost(&self) {
        self.relays_lost.fetch_add(1, Ordering::Relaxed);
    }

    /// A stripe that was asked for at `since` has come, from a relay of this name or from the publisher.
    pub(super) fn supplied(&self, by: Option<&str>, bytes: u64, since: Instant) {
        let mut sources = self.sources.lock();
        let last = Instant::now();
        match sources.iter_mut().find(|s| s.by.as_deref() == by) {
            Some(source) => {
                source.bytes += bytes;
                source.last = last;
            }
            None => sources.push(Supply { by: by.map(str::to_owned), bytes, first: since, last }),
        }
    }

    /// The transfer has come this far; it never goes back.
    pub(super) fn reach(&self, stage: Stage) {
        self.stage.fetch_max(stage as u8, Ordering::Relaxed);
    }

    /// Counts payload bytes that have come.
    pub fn received(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes over how far the transfer is.
    pub fn show(&self, progress: &Progress) {
        self.bytes_done.store(progress.bytes_done, Ordering::Relaxed);
        self.bytes_total.store(progress.bytes, Ordering::Relaxed);
        self.stripes_done.store(progress.stripes_done, Ordering::Relaxed);
        self.stripes_total.store(progress.stripes, Ordering::Relaxed);
        self.streams.store(progress.live, Ordering::Relaxed);
        self.bad.store(progress.bad, Ordering::Relaxed);
        self.lost.store(progress.lost, Ordering::Relaxed);
    }
}
