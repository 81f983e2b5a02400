//! What a receiver knows of its link, and the way from context records to plain ones.
//!
//! Owns: the measured rate of the link, by which the publisher decides on a codec; whether context records are asked for;
//! and their recoding over the image, so that all that follows (applying, keeping, handing to engines) has plain
//! records only. Called by the receiver's transfers. Must not: change an image.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use windlass_core::delta::{Delta, DeltaError, PartBuilder, Recoder, Tile};
use windlass_core::manifest::ManifestError;

use super::fetch::{Fetched, Puller};
use super::{ReceiverError, Synced, millis};
use crate::container;
use crate::image::ImageView;
use crate::stop::{Stop, Stopped};
use crate::work;

/// Transfers of fewer bytes measure the latency of a link, not its rate.
const MEASURABLE: u64 = 64 << 10;
/// How long recoding may take, and how long it waits for the image to be whole.
const RECODING: Duration = Duration::from_mins(5);
const WHOLE: Duration = Duration::from_secs(1);

/// A link as its receiver sees it.
#[derive(Debug, Default)]
pub(super) struct LinkState {
    /// Bytes per second; 0 before the first measurement.
    rate: AtomicU64,
    /// Context records of this publisher turned out to be malformed.
    distrusted: AtomicBool,
}

impl LinkState {
    pub(super) fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Notes a transfer. The seconds for a byte count as much as those of all transfers before it.
    pub(super) fn measure(&self, bytes: u64, ms: f64) {
        if bytes < MEASURABLE || ms <= 0.0 {
            return;
        }
        let now = (bytes as f64 / ms * 1e3).min(1e15) as u64;
        let mean = |before: u64| (2.0 / (1.0 / before as f64 + 1.0 / now.max(1) as f64)) as u64;
        self.rate.store(self.rate().map_or(now, mean).max(1), Ordering::Relaxed);
    }

    pub(super) fn is_trusted(&self) -> bool {
        !self.distrusted.load(Ordering::Relaxed)
    }

    /// The publisher is another one now.
    pub(super) fn trust(&self) {
        self.distrusted.store(false, Ordering::Relaxed);
    }
}

/// Why a part cannot be recoded.
enum Fault {
    Delta(DeltaError),
    Stopped(Stopped),
}

impl From<DeltaError> for Fault {
    fn from(e: DeltaError) -> Fault {
        Fault::Delta(e)
    }
}

impl From<ManifestError> for Fault {
    fn from(e: ManifestError) -> Fault {
        Fault::Delta(e.into())
    }
}

impl From<Stopped> for Fault {
    fn from(e: Stopped) -> Fault {
        Fault::Stopped(e)
    }
}

impl Puller {
    /// The same delta in plain records. The image must show the version that the delta starts from.
    pub(super) fn in_plain(
        &self,
        fetched: Fetched,
        synced: &mut Synced,
        stop: &Stop,
    ) -> Result<Fetched, ReceiverError> {
        let start = Instant::now();
        let recoded = self.recode(fetched, stop).inspect_err(|error| {
            if let ReceiverError::Delta { peer, source } = error {
                self.link.distrusted.store(true, Ordering::Relaxed);
                tracing::warn!(peer, error = %source, "context records are malformed; plain ones are fetched");
            }
        });
        synced.decode_ms += millis(start);
        recoded
    }

    fn recode(&self, mut fetched: Fetched, stop: &Stop) -> Result<Fetched, ReceiverError> {
        let base = fetched.base();
        let not_next = |held: String| ReceiverError::NotNext { base: base.clone(), held };
        let region = self.image.as_ref().ok_or_else(|| not_next("nothing whole".into()))?;
        let view = ImageView::take(region, RECODING, &stop.with_timeout(WHOLE))?;
        if view.known().identity != base {
            return Err(not_next(view.known().identity.to_string()));
        }
        let mut buffers = Vec::new();
        for delta in fetched.parts(self.threads)? {
            let plain = in_plain(&delta, &view, self.threads, stop).map_err(|fault| match fault {
                Fault::Delta(source) => ReceiverError::Delta { peer: self.control.peer(), source },
                Fault::Stopped(source) => {
                    let stage = super::Stage::Pulling;
                    ReceiverError::Stopped { peer: self.control.peer(), stage, source }
                }
            })?;
            let buffer = self.memory(plain.len() as u64)?;
            buffer.memory.copy_in(0, &plain);
            buffers.push((buffer, plain.len() as u64));
        }
        view.finish()?;
        for (buffer, _) in std::mem::replace(&mut fetched.buffers, buffers) {
            self.shelf.put(buffer);
        }
        Ok(fetched)
    }
}

/// A container with the effect of `delta` over the image, in plain records.
fn in_plain(delta: &Delta<'_>, view: &ImageView, threads: usize, stop: &Stop) -> Result<Vec<u8>, Fault> {
    let (manifest, kernels) = (view.manifest(), crate::simd::kernels());
    delta.header.check(manifest)?;
    let entries = delta.entries();
    let state = || (Recoder::new(), Vec::new(), Vec::new());
    let done = work::each(threads, entries.len() as u64, stop, state, |(recoder, old, made), i| {
        let record = delta.record(&entries[i as usize]);
        let tile = Tile::of(manifest, record.block)?;
        container::gather(manifest, &tile, view.data(), old)?;
        let mut payload = Vec::new();
        let encoded = recoder.to_plain(kernels, &tile, &record, old, &mut payload)?;
        made.push((record.block, encoded, payload));
        Ok::<(), Fault>(())
    })?;
    let mut made: Vec<_> = done.into_iter().flat_map(|(.., made)| made).collect();
    made.sort_unstable_by_key(|(block, ..)| *block);
    let (mut out, mut parts) = (delta.header.to_bytes(), PartBuilder::new());
    for (block, encoded, payload) in made {
        parts.push(block, &encoded, &payload, &mut out);
    }
    parts.finish(&mut out);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_a_link_is_that_of_its_transfers_and_a_slow_one_shows_at_once() {
        let link = LinkState::default();
        link.measure(MEASURABLE - 1, 1.0);
        link.measure(MEASURABLE, 0.0);
        assert_eq!(link.rate(), None);
        link.measure(1 << 30, 1000.0);
        assert_eq!(link.rate(), Some(1 << 30));
        link.measure(1_000_000, 1000.0);
        assert!(link.rate().unwrap() < 2_000_000, "{:?}", link.rate());
        for _ in 0..12 {
            link.measure(1 << 30, 1000.0);
        }
        assert!(link.rate().unwrap() > 500_000_000, "{:?}", link.rate());
    }
}
