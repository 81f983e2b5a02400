//! What a sender serves: one offer for each ticket.
//!
//! The memory behind an offer is held by one `Arc` ([`Ground`]). The offer has it until it is over; a connection
//! takes its own when the first stripe is claimed and gives it back when none is unacknowledged, or after it has
//! been reset. So the caller's `hold` is dropped exactly when no connection can read the memory any more (W-4).

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use windlass_core::digest::SumTable;
use windlass_core::error::Kind;
use windlass_core::manifest::Manifest;
use windlass_core::wire::{
    Admission, Completion, Fault, Mode, Proved, Sender as Side, SourceId, Stage, StripePlan, Ticket,
    TicketKey, WireError,
};

use super::TcpError;
use super::board::{Bell, Board};
use crate::stop::{Stop, Stopped};

/// What is offered under a ticket.
#[derive(Debug)]
pub struct Offer {
    pub ticket: Ticket,
    /// Which of its sources this sender is.
    pub source: SourceId,
    /// Where the bytes are.
    pub body: Body,
    pub crowd: Crowd,
}

/// Who an offer is for.
#[derive(Clone, Debug)]
pub enum Crowd {
    /// One receiver, which gets everything from the ticket's sources.
    One,
    /// One of several receivers that pass on to each other. The board, common to the offers of all of them, has what was
    /// given to any.
    Among(Arc<Board>),
    /// Any number of receivers. This sender is a receiver itself, and the board has what it holds of the ticket's stripes. The offer
    /// lasts until it is revoked.
    Any(Arc<Board>),
}

impl Crowd {
    pub(super) fn board(&self) -> Option<&Arc<Board>> {
        match self {
            Crowd::One => None,
            Crowd::Among(board) | Crowd::Any(board) => Some(board),
        }
    }

    pub(super) fn is_relay(&self) -> bool {
        matches!(self, Crowd::Any(_))
    }
}

/// Where the bytes of an offer are.
pub enum Body {
    /// An image in a file.
    Image {
        /// Its layout and cuts.
        manifest: Arc<Manifest>,
        file: Arc<File>,
        /// Where in the file the image's data begins.
        data_start: u64,
        /// The sealed sums of its blocks.
        sums: Arc<SumTable>,
        /// Kept until no connection can read the file any more: a lease.
        hold: Arc<dyn Any + Send + Sync>,
    },
    /// Delta payloads.
    Payloads {
        /// By their position in the ticket; `None` for those that other sources hold.
        files: Vec<Option<Arc<File>>>,
        /// Kept as that of an image is.
        hold: Option<Arc<dyn Any + Send + Sync>>,
    },
}

impl Body {
    /// Delta payloads in files that stay as they are.
    pub fn payloads(files: Vec<Option<Arc<File>>>) -> Body {
        Body::Payloads { files, hold: None }
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Body::Image { data_start, .. } => write!(f, "Image at {data_start}"),
            Body::Payloads { files, .. } => write!(f, "{} payloads", files.len()),
        }
    }
}

/// What tells stripes to bytes; outlives the memory.
pub(super) enum Content {
    Image { manifest: Arc<Manifest>, data_start: u64, sums: Arc<SumTable> },
    Payloads,
}

/// The memory itself.
pub(super) struct Ground {
    files: Vec<Option<Arc<File>>>,
    _hold: Option<Arc<dyn Any + Send + Sync>>,
}

impl Ground {
    /// The file of an image, or of a payload.
    pub(super) fn file(&self, payload: u32) -> Option<&File> {
        self.files.get(payload as usize)?.as_deref()
    }
}

/// How an offer ended.
#[derive(Clone, Debug)]
pub(super) struct Over {
    /// What receivers are told; `None` if everything arrived.
    pub(super) fault: Option<Fault>,
    /// Until when stripes under way may be acknowledged.
    pub(super) until: Instant,
}

struct State {
    admission: Admission,
    ground: Option<Arc<Ground>>,
    /// Connections that have their own `Arc` of the ground.
    open: usize,
    /// The admitted connections, by the sender's numbers.
    connections: BTreeSet<u64>,
    /// The one that serves each stream now.
    streams: BTreeMap<u16, u64>,
    over: Option<Over>,
    bells: Vec<Weak<Bell>>,
    /// When the last connection left, or the offer was made.
    left: Option<Instant>,
    /// How much of the board its one receiver has been told of.
    told: usize,
}

/// An offer as the sender's threads see it.
pub(super) struct Served {
    pub(super) ticket: Ticket,
    pub(super) content: Content,
    pub(super) plan: StripePlan,
    state: Mutex<State>,
    changed: Condvar,
    pub(super) crowd: Crowd,
    pub(super) sent: AtomicU64,
    pub(super) acked: AtomicU64,
    pub(super) bad: AtomicU64,
    /// Bytes that the receiver was told it may read.
    pub(super) read: AtomicU64,
}

impl Served {
    /// Checks an offer.
    pub(super) fn new(offer: Offer) -> Result<Served, TcpError> {
        let Offer { ticket, source, body, crowd } = offer;
        let id = ticket.id;
        if ticket.source_position(source).is_none() && !crowd.is_relay() {
            return Err(TcpError::NotASource { ticket: id, source_id: source.0 });
        }
        let mode = ticket.mode.as_str();
        let (content, ground, plan) = match (body, &ticket.mode) {
            (Body::Image { manifest, file, data_start, sums, hold }, Mode::Full) => {
                check_layout(&ticket, &manifest)?;
                let (need, have) = (u64::from(manifest.cuts().blocks()), sums.sums().len() as u64);
                if need != have {
                    return Err(TcpError::Size { ticket: id, what: "the table of sums".into(), need, have });
                }
                let need = data_start.saturating_add(manifest.data_bytes());
                check_length(&ticket, &file, need, || "the image's file".into())?;
                let plan = StripePlan::new(&ticket, |b| block_bytes(&manifest, b))?;
                let ground = Ground { files: vec![Some(file)], _hold: Some(hold) };
                (Content::Image { manifest, data_start, sums }, ground, plan)
            }
            (Body::Payloads { files, hold }, Mode::Delta { payloads, .. }) => {
                let (need, have) = (payloads.len() as u64, files.len() as u64);
                if need != have {
                    return Err(TcpError::Size {
                        ticket: id,
                        what: "the list of payloads".into(),
                        need,
                        have,
                    });
                }
                for (payload, (wanted, file)) in payloads.iter().zip(&files).enumerate() {
                    match file {
                        Some(file) => {
                            check_length(&ticket, file, wanted.bytes, || format!("payload {payload}"))?;
                        }
                        None if wanted.sources.contains(&source) => {
                            return Err(TcpError::PayloadMissing { ticket: id, payload });
                        }
                        None => {}
                    }
                }
                let plan = StripePlan::new(&ticket, |_| None)?;
                (Content::Payloads, Ground { files, _hold: hold }, plan)
            }
            (Body::Image { .. }, Mode::Delta { .. }) => {
                return Err(TcpError::Mode { ticket: id, mode, what: "an image" });
            }
            (Body::Payloads { .. }, Mode::Full) => {
                return Err(TcpError::Mode { ticket: id, mode, what: "a list of delta payloads" });
            }
        };
        let state = State {
            admission: Admission::new(source),
            ground: Some(Arc::new(ground)),
            open: 0,
            connections: BTreeSet::new(),
            streams: BTreeMap::new(),
            over: None,
            bells: Vec::new(),
            left: Some(Instant::now()),
            told: 0,
        };
        Ok(Served {
            ticket,
            content,
            plan,
            state: Mutex::new(state),
            changed: Condvar::new(),
            crowd,
            sent: AtomicU64::new(0),
            acked: AtomicU64::new(0),
            bad: AtomicU64::new(0),
            read: AtomicU64::new(0),
        })
    }

    pub(super) fn key(&self) -> TicketKey {
        self.ticket.key.clone()
    }

    pub(super) fn completion(&self) -> Completion {
        self.ticket.completion()
    }

    /// What wakes a connection when the offer is over, or its board has more.
    pub(super) fn bell(&self) -> Result<Arc<Bell>, TcpError> {
        let bell = Bell::new()?;
        self.lock().bells.push(Arc::downgrade(&bell));
        if let Some(board) = self.crowd.board() {
            board.subscribe(&bell);
        }
        Ok(bell)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn over(&self) -> Option<Over> {
        self.lock().over.clone()
    }

    /// Ends the offer; the first end stays, but a later one may be sooner. The memory goes as soon as no
    /// connection has it.
    pub(super) fn end(&self, fault: Option<Fault>, until: Instant) {
        let mut state = self.lock();
        let over = state.over.get_or_insert(Over { fault, until });
        over.until = over.until.min(until);
        let ground = state.ground.take();
        state.bells.iter().filter_map(Weak::upgrade).for_each(|bell| bell.ring());
        drop(state);
        // Outside the lock: dropping a lease may take its time.
        drop(ground);
        self.changed.notify_all();
    }

    /// Ends the offer if its time is over or no receiver has come (back) for `abandoned_after`.
    pub(super) fn look(&self, now_unix_ms: u64, abandoned_after: Duration) {
        let expired = now_unix_ms >= self.ticket.deadline.expires_unix_ms;
        let left = {
            let state = self.lock();
            // A relay's ends when it is revoked.
            if state.over.is_some() || self.crowd.is_relay() {
                return;
            }
            state.connections.is_empty().then_some(state.left).flatten()
        };
        let fault = |kind, message: &str| {
            Some(Fault { kind, stage: Stage::Claim, stripe: None, message: message.to_owned() })
        };
        if expired {
            self.end(fault(Kind::Timeout, "the ticket expired: ask for a new one"), Instant::now());
        } else if left.is_some_and(|left| left.elapsed() > abandoned_after) {
            let message = "no stream came for too long and the offer was withdrawn: ask for a new ticket";
            self.end(fault(Kind::Stale, message), Instant::now());
        }
    }

    /// Admits a proved connection. Gives the number of the one that it replaces: put that one out.
    pub(super) fn enter(
        &self,
        proved: &Proved<Side>,
        connection: u64,
        now_unix_ms: u64,
    ) -> Result<Option<u64>, WireError> {
        let mut state = self.lock();
        if self.crowd.is_relay() {
            // Streams of different receivers have the same numbers. None of them replaces another.
            state.connections.insert(connection);
            return Ok(None);
        }
        state.admission.admit(&self.ticket, proved, now_unix_ms)?;
        state.connections.insert(connection);
        Ok(state.streams.insert(proved.stream().index, connection))
    }

    /// What a connection should tell its peer of the board. Each connection of a relay has a receiver of its own, which has been
    /// told of what was added before `told`. All connections of an origin's offer have the same: it is told once, by one that
    /// is not busy, because news would wait behind the stripe. By a sole connection in any case.
    pub(super) fn news(&self, told: &mut usize, busy: bool) -> Vec<Range<u32>> {
        match &self.crowd {
            Crowd::One => Vec::new(),
            Crowd::Any(board) => board.news(told),
            Crowd::Among(board) => {
                let mut state = self.lock();
                if busy && state.connections.len() > 1 {
                    return Vec::new();
                }
                board.news(&mut state.told)
            }
        }
    }

    /// An admitted connection is closed, and has given its ground back.
    pub(super) fn leave(&self, connection: u64) {
        let mut state = self.lock();
        // What it told may not have arrived.
        state.told = 0;
        state.connections.remove(&connection);
        state.bells.retain(|bell| bell.strong_count() > 0);
        state.streams.retain(|_, c| *c != connection);
        state.left = Some(Instant::now());
        self.changed.notify_all();
    }

    /// Waits until a connection has left.
    pub(super) fn wait_left(&self, connection: u64, timeout: Duration) {
        let there = |s: &mut State| s.connections.contains(&connection);
        self.changed.wait_while_for(&mut self.lock(), there, timeout);
    }

    /// The memory, unless the offer is over.
    pub(super) fn open(self: &Arc<Self>) -> Option<Open> {
        let mut state = self.lock();
        let ground = Arc::clone(state.ground.as_ref()?);
        state.open += 1;
        drop(state);
        Some(Open { served: Arc::clone(self), ground: Some(ground) })
    }

    /// Whether the offer is over and no connection serves it.
    pub(super) fn is_over_and_left(&self) -> bool {
        let state = self.lock();
        Self::is_free(&state) && state.connections.is_empty()
    }

    fn is_free(state: &State) -> bool {
        state.over.is_some() && state.open == 0
    }

    /// Waits until the offer is over and nobody can read its memory.
    pub(super) fn wait_free(&self, stop: &Stop) -> Result<(), Stopped> {
        let mut state = self.lock();
        while !Self::is_free(&state) {
            stop.check()?;
            self.changed.wait_for(&mut state, stop.nap());
        }
        Ok(())
    }
}

/// A connection's share of the memory. Dropped when nothing is unacknowledged, or after the reset.
pub(super) struct Open {
    served: Arc<Served>,
    ground: Option<Arc<Ground>>,
}

impl Open {
    pub(super) fn file(&self, payload: u32) -> Option<&File> {
        self.ground.as_deref()?.file(payload)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.ground = None;
        self.served.lock().open -= 1;
        self.served.changed.notify_all();
    }
}

/// How far an offer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferProgress {
    /// Payload bytes that the kernel took.
    pub bytes_sent: u64,
    /// Bytes that the receiver read from memory, or was about to.
    pub bytes_read: u64,
    /// Payload bytes that the receiver acknowledged as good.
    pub bytes_acked: u64,
    /// Stripes that the receiver found bad.
    pub bad: u64,
    /// Connections that serve it.
    pub streams: usize,
    /// Whether it is over and no connection can read its memory.
    pub free: bool,
    /// Whether the receiver has said that it has everything.
    pub done: bool,
    /// Why it ended early.
    pub fault: Option<Fault>,
}

/// The caller's hand on an offer. Dropping it changes nothing: the offer ends by completion, revocation, expiry,
/// abandonment or the sender's shutdown.
#[derive(Clone)]
pub struct OfferHandle {
    pub(super) served: Arc<Served>,
}

impl fmt::Debug for OfferHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OfferHandle").field(&self.served.ticket.id).finish()
    }
}

impl OfferHandle {
    /// The ticket.
    pub fn ticket(&self) -> &Ticket {
        &self.served.ticket
    }

    /// How far it is.
    pub fn progress(&self) -> OfferProgress {
        let state = self.served.lock();
        OfferProgress {
            bytes_sent: self.served.sent.load(Ordering::Relaxed),
            bytes_read: self.served.read.load(Ordering::Relaxed),
            bytes_acked: self.served.acked.load(Ordering::Relaxed),
            bad: self.served.bad.load(Ordering::Relaxed),
            streams: state.connections.len(),
            free: Served::is_free(&state),
            done: state.over.as_ref().is_some_and(|o| o.fault.is_none()),
            fault: state.over.as_ref().and_then(|o| o.fault.clone()),
        }
    }

    /// Takes the memory back. Stripes that are being sent get `grace` to be acknowledged, others are not begun;
    /// then the connections are reset. Receivers learn that the ticket is stale, and `why`. Returns when no
    /// connection can read the memory any more and the offer's hold is dropped.
    pub fn revoke(&self, why: &str, grace: Duration) {
        let fault = Fault { kind: Kind::Stale, stage: Stage::Data, stripe: None, message: why.to_owned() };
        let now = Instant::now();
        self.served.end(Some(fault), now.checked_add(grace).unwrap_or(now));
        // Connections look at the clock at least every glance and never block: this ends.
        let _ = self.served.wait_free(&Stop::never());
    }

    /// Waits until the offer is over and no connection can read its memory.
    pub fn wait(&self, stop: &Stop) -> Result<OfferProgress, Stopped> {
        self.served.wait_free(stop)?;
        Ok(self.progress())
    }
}

/// The size of a block; `None` if the manifest has no such block.
pub(super) fn block_bytes(manifest: &Manifest, block: u32) -> Option<u64> {
    let block = manifest.cuts().block(block).ok()?;
    let tensor = manifest.tensors().get(block.tensor as usize)?;
    Some(block.units() * tensor.dtype.unit() as u64)
}

/// The ticket must be about this layout and these cuts.
pub(super) fn check_layout(ticket: &Ticket, manifest: &Manifest) -> Result<(), TcpError> {
    let differs =
        |what, ours: String, theirs: String| Err(TcpError::Layout { ticket: ticket.id, what, ours, theirs });
    if ticket.layout_hash != manifest.layout_hash() {
        return differs("layout", manifest.layout_hash().to_string(), ticket.layout_hash.to_string());
    }
    if ticket.cuts_hash != manifest.cuts_hash() {
        return differs("cut table", manifest.cuts_hash().to_string(), ticket.cuts_hash.to_string());
    }
    Ok(())
}

fn check_length(
    ticket: &Ticket,
    file: &File,
    need: u64,
    what: impl FnOnce() -> String,
) -> Result<(), TcpError> {
    let have = file.metadata().map_err(|source| TcpError::Read { ticket: ticket.id, source })?.len();
    if have < need {
        return Err(TcpError::Size { ticket: ticket.id, what: what(), need, have });
    }
    Ok(())
}
