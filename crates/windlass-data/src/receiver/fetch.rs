//! A delta on its way: fetched into memory of its own, and applied later.
//!
//! Owns: [`Puller`], what a transfer needs of a receiver, so that it can run while the receiver does something else, and
//! [`Fetch`] and [`Fetched`], a delta before and after its transfer. Called by the receiver, and by callers that stage a
//! version before it may be shown. Must not: touch an image.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use windlass_core::address::{Host, HostPort};
use windlass_core::delta::Delta;
use windlass_core::identity::{Identity, Version};
use windlass_core::wire::control::{Brought, TransferDone, VersionInfo};
use windlass_core::wire::{Mode, Ticket};

use super::relay::{Relaying, Scout};
use super::shelf::{Buffer, Shelf, check_part};
use super::status::{Event, Listener, Stage, StatusHandle};
use super::{Control, ReceiverError, Synced, millis};
use crate::image::Known;
use crate::nixl::Reader;
use crate::shm::Mapping;
use crate::stop::Stop;
use crate::tcp::{self, Board, Landing, PayloadLanding, PullConfig, Relays, TcpError, Watch};

/// How the way to a version begins.
#[derive(Debug)]
pub enum Start {
    /// With a delta, whose ticket is granted.
    Delta(Box<Fetch>),
    /// Only image bytes serve.
    Whole {
        why: String,
        /// The version that they are of now.
        newest: Version,
    },
}

/// A delta that can be fetched now.
pub struct Fetch {
    puller: Puller,
    ticket: Ticket,
    info: VersionInfo,
    synced: Synced,
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetch").field("to", &self.ticket.identity).finish_non_exhaustive()
    }
}

impl Fetch {
    /// With a status of its own: the receiver may be showing another version meanwhile.
    pub(super) fn new(puller: Puller, ticket: Ticket, info: VersionInfo, synced: Synced) -> Fetch {
        let puller = Puller { status: StatusHandle::default(), ..puller };
        Fetch { puller, ticket, info, synced }
    }

    /// How far it is; can be kept and read from other threads.
    pub fn status(&self) -> StatusHandle {
        self.puller.status.clone()
    }

    /// Fetches it.
    pub fn run(self, stop: &Stop) -> Result<Fetched, ReceiverError> {
        let Fetch { puller, ticket, info, mut synced } = self;
        let start = Instant::now();
        let mut fetched = puller.stage(ticket, info, &mut synced, stop)?;
        puller.status.set(|s| s.stage = Stage::Idle);
        synced.total_ms = synced.ask_ms + millis(start);
        fetched.synced = synced;
        Ok(fetched)
    }
}

/// A delta in memory, to be applied.
pub struct Fetched {
    ticket: Ticket,
    base: Identity,
    landed: Arc<Lent>,
    /// What the publisher said when it was asked for.
    info: VersionInfo,
    peer: String,
    synced: Synced,
}

impl fmt::Debug for Fetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetched")
            .field("from", &self.base)
            .field("to", &self.ticket.identity)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl Fetched {
    /// The version that it leads from.
    pub fn base(&self) -> Identity {
        self.base.clone()
    }

    /// The version that it leads to.
    pub fn known(&self) -> Known {
        Known { identity: self.ticket.identity.clone(), digest: self.ticket.digest }
    }

    /// Its parts, checked by so many threads: records that lead from [`Fetched::base`] to [`Fetched::known`].
    pub fn parts(&self, threads: usize) -> Result<Vec<Delta<'_>>, ReceiverError> {
        self.containers().map(|bytes| self.part(bytes, threads)).collect()
    }

    /// The bytes of its parts, unchecked.
    pub fn containers(&self) -> impl Iterator<Item = &[u8]> {
        let payloads = match &self.ticket.mode {
            Mode::Delta { payloads, .. } => &payloads[..],
            Mode::Full => &[],
        };
        self.landed.buffers.iter().zip(payloads).map(|(buffer, p)| buffer.memory.bytes(0..p.bytes))
    }

    /// The files that its parts are in, each with the length of its part, for other processes of this host
    /// ([`Handed`](super::Handed)). None if it is in memory of this process alone.
    pub fn files(&self) -> Option<Vec<(PathBuf, u64)>> {
        let lengths = self.containers().map(|c| c.len() as u64);
        self.landed
            .buffers
            .iter()
            .zip(lengths)
            .map(|(b, bytes)| Some((b.publish()?.to_owned(), bytes)))
            .collect()
    }

    /// One of [`Fetched::containers`], checked by so many threads.
    pub fn part<'a>(&self, bytes: &'a [u8], threads: usize) -> Result<Delta<'a>, ReceiverError> {
        check_part(bytes, threads, (&self.base, &self.ticket.identity), &self.peer)
    }

    /// Its length. The memory that it is in may be longer.
    pub fn bytes(&self) -> u64 {
        let Mode::Delta { payloads, .. } = &self.ticket.mode else { return 0 };
        payloads.iter().map(|p| p.bytes).sum()
    }

    /// The memory that it is in, which later deltas of the receiver come to as well: registering it with a device is worth
    /// the time.
    pub fn memory(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        self.landed.buffers.iter().map(|b| &b.memory)
    }

    /// What it took to fetch it.
    pub fn synced(&self) -> &Synced {
        &self.synced
    }

    pub(super) fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    pub(super) fn info(&self) -> &VersionInfo {
        &self.info
    }
}

/// Where a delta landed, each at least as long as its payload. Given back when it is neither to be applied nor passed on.
struct Lent {
    buffers: Vec<Buffer>,
    shelf: Arc<Shelf>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.buffers.drain(..).for_each(|buffer| self.shelf.put(buffer));
    }
}

/// What a transfer needs of a receiver.
pub(super) struct Puller {
    pub(super) control: Arc<dyn Control>,
    pub(super) status: StatusHandle,
    pub(super) listener: Option<Listener>,
    pub(super) allow: Option<Vec<Host>>,
    pub(super) pull: PullConfig<'static>,
    /// The size of the image.
    pub(super) image_bytes: u64,
    /// What the publisher calls this receiver.
    pub(super) instance: String,
    pub(super) shelf: Arc<Shelf>,
    pub(super) relaying: Option<Arc<Relaying>>,
    pub(super) nixl: Option<Arc<Reader>>,
    /// Whether the image is a slice. Registering it would fill its holes.
    pub(super) sliced: bool,
}

impl Puller {
    fn begin_transfer(&self, ticket: &Ticket, bytes: u64, synced: &mut Synced) -> Arc<Watch> {
        let mode = ticket.mode.as_str();
        synced.transfers += 1;
        synced.mode = mode;
        let watch = Arc::new(Watch::default());
        self.status.shown().watch = Arc::clone(&watch);
        self.status.set(|s| {
            s.stage = Stage::Pulling;
            s.target = Some(ticket.identity.clone());
            s.mode = Some(mode);
            s.bytes = bytes;
        });
        if let Some(listener) = &self.listener {
            let (why, identity) = (ticket.why.clone(), ticket.identity.clone());
            listener(&Event::Transfer { mode, why, identity, bytes });
        }
        watch
    }

    /// Pulls what the ticket is for, and notes what it took. Answers who brought it, where others took part.
    pub(super) fn pull(
        &self,
        ticket: &Ticket,
        landing: &dyn Landing,
        bytes: u64,
        board: Option<&Board>,
        synced: &mut Synced,
        stop: &Stop,
    ) -> Result<Vec<Brought>, TcpError> {
        let watch = self.begin_transfer(ticket, bytes, synced);
        let start = Instant::now();
        let allow = |e: &HostPort| self.allow.as_ref().is_none_or(|hosts| hosts.contains(e.host()));
        let privacy = &self.control.privacy();
        let scout = Scout { control: &*self.control, ticket: ticket.id };
        let relays = board.map(|_| &scout as &dyn Relays);
        let nixl = self.nixl.as_deref();
        if nixl.is_some() && self.sliced && matches!(ticket.mode, Mode::Full) {
            synced.unread = Some("the image is a slice, whose holes NIXL would fill".to_owned());
        }
        let nixl = nixl.filter(|_| !self.sliced);
        let config = PullConfig { allow: &allow, privacy, board, relays, nixl, ..self.pull };
        let pulled = match self.control.carrier() {
            Some(carrier) => carrier.carry(ticket, landing, &watch, stop),
            None => tcp::pull(ticket, landing, &config, stop, &watch).map(drop),
        };
        synced.wire_ms += millis(start);
        let (seen, brought) = (watch.see(), watch.brought());
        synced.wire_bytes += seen.bytes;
        synced.read_bytes += seen.bytes_read;
        synced.unread = synced.unread.take().or_else(|| watch.unread());
        synced.relays_lost += seen.relays_lost;
        synced.relayed_bytes += brought.iter().filter(|b| b.by.is_some()).map(|b| b.bytes).sum::<u64>();
        if board.is_some() {
            synced.brought.clone_from(&brought);
        }
        pulled.map(|()| if board.is_some() { brought } else { Vec::new() })
    }

    /// Fetches a delta into memory of its own.
    pub(super) fn stage(
        &self,
        ticket: Ticket,
        info: VersionInfo,
        synced: &mut Synced,
        stop: &Stop,
    ) -> Result<Fetched, ReceiverError> {
        let peer = || self.control.peer();
        let Mode::Delta { base, payloads } = &ticket.mode else {
            return Err(ReceiverError::OtherTicket { peer: peer(), what: "a full image".into() });
        };
        let image = self.image_bytes;
        let bytes = payloads.iter().map(|p| p.bytes).fold(0, u64::saturating_add);
        // The densest delta is the image with its records; anything beyond that is not one of ours.
        if bytes > image.saturating_add(image / 8).saturating_add(16 << 20) {
            let what = format!("a delta of {bytes} bytes to an image of {image}");
            return Err(ReceiverError::OtherTicket { peer: peer(), what });
        }
        let memory = |bytes| self.shelf.take(bytes).map_err(|source| ReceiverError::Memory { bytes, source });
        let buffers: Vec<_> = payloads.iter().map(|p| memory(p.bytes)).collect::<Result<_, _>>()?;
        let base = base.identity.clone();
        let landed = Arc::new(Lent { buffers, shelf: Arc::clone(&self.shelf) });
        let board = self.pass_on(&ticket, &landed);
        let ticket = if board.is_some() { ticket } else { ticket.alone() };
        let fetched = Fetched { ticket, base, landed, info, peer: peer(), synced: Synced::default() };
        let Fetched { ticket, .. } = &fetched;
        let buffers: Vec<_> = fetched.memory().cloned().collect();
        let landing = PayloadLanding { buffers: &buffers };
        let brought = self.pull(ticket, &landing, bytes, board.as_deref(), synced, stop)?;
        self.report_done(ticket, brought, stop);
        Ok(fetched)
    }

    /// Puts up a delta for others while it comes. Without that, it comes from the ticket's sources alone.
    fn pass_on(&self, ticket: &Ticket, landed: &Arc<Lent>) -> Option<Arc<Board>> {
        let relaying = self.relaying.as_ref().filter(|_| ticket.swarm.is_some())?;
        let files = landed.buffers.iter().map(|b| b.descriptor().map(Some)).collect::<Option<Vec<_>>>()?;
        match relaying.put_up_delta(ticket, files, Arc::clone(landed) as Arc<_>) {
            Ok(board) => board,
            Err(error) => {
                tracing::warn!(%error, "this delta is not passed on to other receivers");
                None
            }
        }
    }

    /// Completion is also said on the control connection. The transfer is over either way.
    pub(super) fn report_done(&self, ticket: &Ticket, brought: Vec<Brought>, stop: &Stop) {
        let (instance_id, completion) = (self.instance.clone(), ticket.completion());
        let done = TransferDone { instance_id, completion, brought };
        if let Err(error) = self.control.done(&done, stop) {
            tracing::debug!(peer = self.control.peer(), %error, "the completion could not be reported");
        }
    }
}
