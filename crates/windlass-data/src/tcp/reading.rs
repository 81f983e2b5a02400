//! Whether a transfer reads its senders' memory, and how.
//!
//! Owns: [`Reading`], which all streams of one transfer share: the agent, the senders that it has met, and why nothing is read
//! where that was wanted. Called by the streams. Must not: touch a socket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use windlass_core::wire::{Memory, Message, Mode, Reach, Stripe, StripePlan, Ticket};

use super::landing::{ImageLanding, Landing};
use super::pull::PullConfig;
use super::watch::Watch;
use crate::nixl::{Agent, NixlError, Read, Reader, Remote};

/// A sender whose memory can be read.
#[derive(Clone)]
pub(super) struct Source {
    remote: Arc<Remote>,
    /// Where the image's data is.
    address: u64,
}

/// See the module's documentation.
pub(super) struct Reading<'a> {
    way: Option<(&'a Reader, Arc<Agent>, &'a ImageLanding<'a>)>,
    watch: &'a Watch,
    /// By their metadata.
    met: Mutex<BTreeMap<Vec<u8>, Arc<Remote>>>,
    over: AtomicBool,
}

impl<'a> Reading<'a> {
    /// Nothing is read of deltas, and where no reader is configured.
    pub(super) fn begin(
        ticket: &Ticket,
        landing: &'a dyn Landing,
        config: &PullConfig<'a>,
        watch: &'a Watch,
    ) -> Reading<'a> {
        let mut reading = Reading { way: None, watch, met: Mutex::default(), over: AtomicBool::new(false) };
        let (Mode::Full, Some(reader), Some(image)) = (&ticket.mode, config.nixl, landing.image()) else {
            return reading;
        };
        let agent = reader.agent().and_then(|agent| agent.register(image.mapping).map(|()| agent));
        match agent {
            Ok(agent) => reading.way = Some((reader, agent, image)),
            Err(error) => reading.end(&error.to_string()),
        }
        reading
    }

    /// Whether senders are asked.
    pub(super) fn is_on(&self) -> bool {
        self.way.is_some() && !self.is_over()
    }

    /// Whether it was ended on the way.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// From here on everything comes over TCP. Said once for each transfer.
    pub(super) fn end(&self, why: &str) {
        if !self.over.swap(true, Ordering::Relaxed) {
            tracing::warn!(why, "the image comes over TCP instead of NIXL");
            self.watch.cannot_read(why);
        }
    }

    /// A read failed: its agent is gone, and the next one waits a little.
    pub(super) fn fail(&self, peer: &str, error: &NixlError) {
        let why = format!("{peer}: {error}");
        // What the others find then is a consequence.
        if !matches!(error, NixlError::Closed)
            && let Some((reader, ..)) = &self.way
        {
            reader.failed(&why);
        }
        self.end(&why);
    }

    /// The question for a sender.
    pub(super) fn ask(&self) -> Message {
        let library = self.way.as_ref().map_or_else(String::new, |(_, agent, _)| agent.release().to_owned());
        Message::Reach(Reach::Able { library, metadata: Vec::new() })
    }

    /// A sender said how it is reached.
    pub(super) fn meet(&self, peer: &str, library: &str, metadata: &[u8], memory: Memory) -> Option<Source> {
        let (_, agent, image) = self.way.as_ref()?;
        let (need, ours) = (image.manifest.data_bytes(), agent.release());
        if library != ours {
            self.end(&format!("{peer} has {library}, and this host {ours}: install the same release"));
            return None;
        }
        if memory.bytes < need || memory.address.checked_add(memory.bytes).is_none() {
            let Memory { address, bytes } = memory;
            self.end(&format!("{peer} offers {bytes} bytes at {address:#x}, and the image has {need}"));
            return None;
        }
        let mut met = self.met.lock();
        let remote = match met.get(metadata) {
            Some(remote) => Arc::clone(remote),
            None => match agent.meet(metadata) {
                Ok(remote) => Arc::clone(met.entry(metadata.to_vec()).or_insert(Arc::new(remote))),
                Err(error) => {
                    self.end(&format!("{peer}: {error}"));
                    return None;
                }
            },
        };
        Some(Source { remote, address: memory.address })
    }

    /// Whether a stripe can be read: blocks that are strided come over the stream, and so does everything once it is over.
    pub(super) fn can_read(&self, plan: &StripePlan, stripe: &Stripe) -> bool {
        let image = self.way.as_ref().map(|(_, _, image)| image).filter(|_| !self.is_over());
        stripe.bytes > 0 && image.is_some_and(|image| image.runs(plan, stripe).is_some())
    }

    /// Begins to read a stripe into the image.
    pub(super) fn read(
        &self,
        plan: &StripePlan,
        stripe: &Stripe,
        source: &Source,
    ) -> Result<Read<'a>, NixlError> {
        let (_, _, image) = self.way.as_ref().ok_or(NixlError::Closed)?;
        let place = |run: std::ops::Range<u64>| {
            let at = image.data_start + run.start..image.data_start + run.end;
            let loan =
                image.mapping.lend(at).map_err(|e| NixlError::Map { source: std::io::Error::other(e) })?;
            // The sum was checked when the sender was met.
            Ok((loan, source.address + run.start))
        };
        let runs = image.runs(plan, stripe).ok_or(NixlError::Closed)?;
        source.remote.read(runs.into_iter().map(place).collect::<Result<_, NixlError>>()?)
    }
}
