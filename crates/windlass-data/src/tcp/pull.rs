//! The receiver: streams that claim stripes and land them.
//!
//! [`pull`] opens the ticket's streams as threads and returns when the transfer is over. Each stream claims from
//! the common book, lands what comes, and dials again when its connection is lost. A source is given up when all
//! its streams are: then, and not before, no thread of it is in the destination memory.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use windlass_core::error::Kind;
use windlass_core::wire::{
    ClaimPolicy, Claims, Completion, Dial, Endpoint, Fault, HANDSHAKE_TIMEOUT_MS, LOST_AFTER_MS, MAX_STREAMS,
    Message, Nonce, Outcome, PING_AFTER_MS, Place, Progress, ProtocolVersion, PullEvent, PullStream, Reach,
    Relay, RelayOffer, Source, SourceId, Stage, StreamId, Stripe, StripePlan, Swarm, Ticket, TicketKey,
    WireError,
};

use super::TcpError;
use super::board::{Bell, Board};
use super::conn::{By, Conn, wait};
use super::landing::Landing;
use super::lane::Lane;
use super::reading::{Reading, Source as Readable};
use super::watch::Watch;
use crate::nixl::Reader;
use crate::stop::{Stop, Stopped};
use crate::tls::{self, DATA_PROTOCOL, Privacy, TlsError};

/// How a receiver pulls.
#[derive(Clone, Copy)]
pub struct PullConfig<'a> {
    /// Which endpoints of a ticket may be contacted. All of them must be, or none is.
    pub allow: &'a (dyn Fn(&Endpoint) -> bool + Sync),
    /// How long a connection may take to be made.
    pub connect_timeout: Duration,
    /// How long a handshake may take.
    pub handshake_timeout: Duration,
    /// How long a stream may be silent before it is pinged.
    pub ping_after: Duration,
    /// How long a stream may be silent before it is lost.
    pub lost_after: Duration,
    /// How long a stream may take for a MiB of a stripe before it is reset.
    pub stripe_timeout: Duration,
    /// How often the sums of one stripe may be wrong.
    pub max_bad: u16,
    /// How often in a row a stream dials again without getting a stripe.
    pub reconnects: u32,
    /// How long it waits before the first of them; twice as long before each further one.
    pub backoff: Duration,
    /// The longest wait before dialling again.
    pub max_backoff: Duration,
    /// What TLS the sources must have, and whom to trust.
    pub privacy: &'a Privacy,
    /// Whether bytes are checked. Off for measuring only: stripes are then acknowledged unseen.
    pub verify: bool,
    /// After this time without a stripe, the ticket's sources are asked for what they gave to others.
    pub stall: Duration,
    /// Where it is said which stripes are there, for those that this receiver passes them on to.
    pub board: Option<&'a Board>,
    /// Who else passes on what the ticket is for, beyond those that it names.
    pub relays: Option<&'a dyn Relays>,
    /// Reads images from the senders' memory, where they let it.
    pub nixl: Option<&'a Reader>,
}

/// Finds receivers that pass on what a ticket is for, while it is being pulled.
pub trait Relays: Sync {
    /// Waits until there are more than so many receivers, or for a while. Answers how many there are, and which of them to
    /// ask, or none if that has not changed. `None` if there is nothing more to be learned.
    fn wait(&self, receivers: u32, stop: &Stop) -> Option<(u32, Vec<Relay>)>;
}

impl Default for PullConfig<'_> {
    fn default() -> Self {
        PullConfig {
            allow: &|_| true,
            connect_timeout: Duration::from_secs(5),
            handshake_timeout: Duration::from_millis(HANDSHAKE_TIMEOUT_MS),
            ping_after: Duration::from_millis(PING_AFTER_MS),
            lost_after: Duration::from_millis(LOST_AFTER_MS),
            stripe_timeout: Duration::from_mins(1),
            max_bad: 4,
            reconnects: 6,
            backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(2),
            privacy: &tls::PLAIN,
            verify: true,
            stall: Duration::from_millis(500),
            board: None,
            relays: None,
            nixl: None,
        }
    }
}

impl std::fmt::Debug for PullConfig<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PullConfig").field("verify", &self.verify).finish_non_exhaustive()
    }
}

/// What a pull came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulled {
    pub bytes: u64,
    pub stripes: u32,
    /// Stripes whose sums were wrong and that were fetched again.
    pub bad: u32,
    /// Streams that were lost on the way.
    pub lost: u32,
    /// How long it took.
    pub elapsed: Duration,
}

/// How many relays are asked at a time.
const MAX_RELAYS: usize = 12;
/// The stack of a stream's thread. Its buffers are on the heap, but the landing's callbacks run on it.
const STACK: usize = 1 << 20;

/// Brings everything that the ticket is for into `landing`. Ends with everything in place, or with an error
/// before the ticket's or `stop`'s deadline; what was acknowledged until then has been kept by the landing.
///
/// Host names are resolved by the system's resolver, whose own timeouts apply.
pub fn pull(
    ticket: &Ticket,
    landing: &dyn Landing,
    config: &PullConfig<'_>,
    stop: &Stop,
    watch: &Watch,
) -> Result<Pulled, TcpError> {
    let origin = Instant::now();
    if let Some(source) = ticket.sources.iter().find(|s| !(config.allow)(&s.endpoint)) {
        return Err(TcpError::Forbidden { endpoint: source.endpoint.to_string() });
    }
    check_privacy(ticket, config.privacy)?;
    landing.check(ticket)?;
    let plan = StripePlan::new(ticket, |b| landing.block_bytes(b))?;
    let stop = stop.with_timeout(Duration::from_millis(ticket.deadline.timeout_ms));
    let deadline = stop.left().unwrap_or(Duration::MAX);
    let policy = ClaimPolicy {
        deadline,
        stripe_timeout: config.stripe_timeout,
        max_bad: config.max_bad,
        stall: config.stall,
    };
    let place = place_in(ticket);
    let streams = useful_lanes(ticket, &plan);
    let mut lanes: BTreeMap<SourceId, usize> = BTreeMap::new();
    streams.iter().for_each(|(_, source)| *lanes.entry(source.id).or_default() += 1);
    let transfer = Transfer {
        ticket,
        landing,
        config,
        stop: &stop,
        watch,
        origin,
        claims: Mutex::new(Claims::among(plan.clone(), policy, place)),
        plan,
        changed: Condvar::new(),
        ended: Bell::new()?,
        over: AtomicBool::new(false),
        lanes: Mutex::new(lanes),
        condemned: Mutex::default(),
        cause: Mutex::new(None),
        accepted: OnceLock::new(),
        scouting: Stop::after(deadline),
        reading: Reading::begin(ticket, landing, config, watch),
    };
    watch.reach(Stage::Handshake);
    watch.show(&transfer.book().progress());
    thread::scope(|scope| {
        let transfer = &transfer;
        for (index, source) in streams {
            transfer.start(scope, index, Way::origin(ticket, source));
        }
        if let Some(swarm) = &ticket.swarm {
            scope.spawn(move || transfer.scout(scope, swarm));
        }
    });
    transfer.result()
}

/// Where a stream leads, and what it proves there.
struct Way {
    source: SourceId,
    endpoint: Endpoint,
    tls: bool,
    completion: Completion,
    key: TicketKey,
    /// The name of the receiver that it leads to, unless it leads to the publisher.
    relay: Option<String>,
}

impl Way {
    fn origin(ticket: &Ticket, source: &Source) -> Way {
        let (endpoint, key) = (source.endpoint.clone(), ticket.key.clone());
        let completion = ticket.completion();
        Way { source: source.id, endpoint, tls: source.tls, completion, key, relay: None }
    }

    fn relay(ticket: &Ticket, relay: &Relay) -> Way {
        let RelayOffer { endpoint, tls, id, key } = relay.offer.clone();
        let completion = Completion { ticket: id, ..ticket.completion() };
        Way { source: relay.id, endpoint, tls, completion, key, relay: Some(relay.name.clone()) }
    }
}

/// Before any of them is contacted, every source must be as secret as is wanted here.
fn check_privacy(ticket: &Ticket, privacy: &Privacy) -> Result<(), TcpError> {
    for source in &ticket.sources {
        let endpoint = || source.endpoint.to_string();
        match (source.tls, &privacy.trust) {
            (true, None) => return Err(TcpError::NoTrust { endpoint: endpoint() }),
            (false, _) if privacy.required => return Err(TcpError::Plain { endpoint: endpoint() }),
            (true, Some(_)) | (false, _) => {}
        }
    }
    Ok(())
}

/// The receiver's place among those of the same version.
fn place_in(ticket: &Ticket) -> Place {
    ticket.swarm.as_ref().map_or(Place::ALONE, |s| Place { rank: s.rank, receivers: s.receivers })
}

/// The ticket's streams, but for each source no more than it has stripes, or than a receiver among others has a use for: a
/// delta of a megabyte is not worth six connections. Every source keeps one, over which it learns that the transfer is done.
pub(super) fn useful_lanes<'t>(ticket: &'t Ticket, plan: &StripePlan) -> Vec<(u16, &'t Source)> {
    let most = place_in(ticket).streams().min(ticket.streams.into());
    let stripes_of = |source: &Source| {
        let position = plan.source_position(source.id);
        let held = |s: &&Stripe| position.is_some_and(|p| plan.holders(s).contains(p));
        plan.stripes().iter().filter(held).take(most).count().max(1)
    };
    let mut left: BTreeMap<SourceId, usize> = ticket.sources.iter().map(|s| (s.id, stripes_of(s))).collect();
    let mut useful = |(_, source): &(u16, &Source)| {
        left.get_mut(&source.id).is_some_and(|left| {
            let some = *left > 0;
            *left = left.saturating_sub(1);
            some
        })
    };
    ticket.lanes().filter(|lane| useful(lane)).collect()
}

/// Why a stream ends.
enum End {
    /// Nothing more to do: the transfer is over, one way or the other.
    Over,
    /// The connection is lost; another may work.
    Lost(TcpError),
    /// This source will not serve this ticket.
    Gone(TcpError),
    /// The transfer cannot go on.
    Fatal(TcpError, Fault),
}

/// Whether a refusal of this kind is worth no further attempt.
const fn is_final(kind: Kind) -> bool {
    match kind {
        Kind::Denied | Kind::NotFound | Kind::Unsupported | Kind::Invalid | Kind::Bug => true,
        Kind::Stale | Kind::Corrupt | Kind::Timeout | Kind::PeerLost | Kind::Exhausted | Kind::Cancelled => {
            false
        }
    }
}

/// What the streams of one pull share.
pub(super) struct Transfer<'a> {
    pub(super) ticket: &'a Ticket,
    pub(super) landing: &'a dyn Landing,
    pub(super) config: &'a PullConfig<'a>,
    pub(super) stop: &'a Stop,
    pub(super) watch: &'a Watch,
    origin: Instant,
    pub(super) plan: StripePlan,
    claims: Mutex<Claims>,
    /// The book has changed in a way that a waiting stream may care about.
    pub(super) changed: Condvar,
    /// Rung when the transfer is over, one way or the other.
    pub(super) ended: Arc<Bell>,
    /// The transfer has failed: streams leave.
    pub(super) over: AtomicBool,
    /// Streams of each source that have not retired.
    lanes: Mutex<BTreeMap<SourceId, usize>>,
    /// Sources whose streams shall leave.
    pub(super) condemned: Mutex<Vec<SourceId>>,
    cause: Mutex<Option<TcpError>>,
    accepted: OnceLock<Result<(), Fault>>,
    /// Set when no further relay is of use.
    scouting: Stop,
    pub(super) reading: Reading<'a>,
}

impl Transfer<'_> {
    pub(super) fn book(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock()
    }

    pub(super) fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    /// Changes the book and tells everybody.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut Claims, Duration) -> T) -> T {
        let now = self.now();
        let mut claims = self.book();
        let result = change(&mut claims, now);
        self.watch.show(&claims.progress());
        match claims.outcome(now) {
            Outcome::Failed(_) => {
                self.over.store(true, Ordering::Relaxed);
                self.scouting.set();
                self.ended.ring();
            }
            Outcome::Finished => {
                self.scouting.set();
                self.ended.ring();
            }
            Outcome::Running => {}
        }
        drop(claims);
        self.changed.notify_all();
        result
    }

    /// Starts the thread of a stream.
    fn start<'scope>(&'scope self, scope: &'scope thread::Scope<'scope, '_>, index: u16, way: Way) {
        let source = way.source;
        let thread = thread::Builder::new()
            .name(format!("windlass-pull-{index}"))
            .stack_size(STACK)
            .spawn_scoped(scope, move || self.lane(index, &way));
        if let Err(e) = thread {
            self.note(TcpError::Setup { what: "the thread of a stream", source: e });
            self.retire(source);
        }
    }

    /// Looks for relays while the transfer runs, and opens a stream to each.
    fn scout<'scope>(&'scope self, scope: &'scope thread::Scope<'scope, '_>, swarm: &Swarm) {
        // At the time of the ticket, this receiver was the last.
        let (mut found, mut receivers) = (swarm.relays.clone(), swarm.rank.saturating_add(1));
        let mut asked: BTreeSet<SourceId> = BTreeSet::new();
        let mut index = self.ticket.lanes().len() as u16;
        loop {
            for relay in found.iter().filter(|r| (self.config.allow)(&r.offer.endpoint)) {
                let open = self.lanes.lock().iter().filter(|(s, n)| asked.contains(s) && **n > 0).count();
                let secret = relay.offer.tls || !self.config.privacy.required;
                if index >= MAX_STREAMS || open >= MAX_RELAYS || !secret || !asked.insert(relay.id) {
                    continue;
                }
                self.lanes.lock().insert(relay.id, 1);
                if self.update(|claims, _| claims.add_relay(relay.id)).is_ok() {
                    self.start(scope, index, Way::relay(self.ticket, relay));
                    index += 1;
                }
            }
            let Some(relays) = self.config.relays.filter(|_| !self.scouting.is_set()) else { return };
            let Some((now, all)) = relays.wait(receivers, &self.scouting) else { return };
            (found, receivers) = (all, now);
            self.update(|claims, _| claims.crowd(receivers.max(swarm.receivers)));
        }
    }

    fn note(&self, error: TcpError) {
        tracing::debug!(ticket = %self.ticket.id, %error, "a stream ended");
        self.cause.lock().replace(error);
    }

    /// A stream will not come back. With the last one of its source goes the source.
    fn retire(&self, source: SourceId) {
        let mut lanes = self.lanes.lock();
        let left = lanes.entry(source).or_default();
        *left = left.saturating_sub(1);
        if *left == 0 {
            // What it means for the transfer is in the book.
            let _ = self.update(|claims, _| claims.abandon(source));
        }
    }

    fn end(&self, fault: Fault) {
        self.update(|claims, _| claims.end(fault));
    }

    /// The life of one stream, over all its connections.
    fn lane(&self, index: u16, way: &Way) {
        let source = way.source;
        let (mut failures, mut denials) = (0u32, 0u32);
        for epoch in 0..=u16::MAX {
            let stream = StreamId { index, epoch };
            let mut progress = false;
            let end = self.connection(stream, way, &mut progress);
            if matches!(end, End::Over) {
                return;
            }
            // The connection is closed and the thread has left the memory: others may have its stripes.
            self.update(|claims, _| claims.lost(stream));
            if let Some(relay) = &way.relay
                && let End::Fatal(error, _) | End::Gone(error) | End::Lost(error) = &end
                && !matches!(error, TcpError::Ground { .. })
            {
                failures += 1;
                // Others have what it has. Only one that was lost, or has not put up its offer yet, is asked again.
                let again = error.kind() == Kind::PeerLost
                    || matches!(error, TcpError::Wire { source: WireError::Refused(_), .. });
                if again && failures <= self.config.reconnects && self.back_off(failures, source) {
                    continue;
                }
                // One that ends its offer has something newer.
                if error.kind() == Kind::Stale || self.scouting.is_set() {
                    tracing::debug!(relay, at = %way.endpoint, %error, "a relay is done");
                } else {
                    tracing::warn!(relay, at = %way.endpoint, %error, "a relay is not asked any more");
                    self.watch.relay_lost();
                }
                return self.retire(source);
            }
            match end {
                End::Over => return,
                End::Fatal(error, fault) => {
                    self.note(error);
                    return self.end(fault);
                }
                End::Gone(error) => {
                    self.note(error);
                    denials += 1;
                    // Once may be a damaged frame; twice is an answer.
                    if denials > 1 {
                        self.condemned.lock().push(source);
                        return self.retire(source);
                    }
                }
                End::Lost(error) => {
                    self.note(error);
                    denials = 0;
                }
            }
            failures = if progress { 1 } else { failures + 1 };
            if failures > self.config.reconnects || !self.back_off(failures, source) {
                break;
            }
        }
        self.retire(source);
    }

    /// Waits before dialling again; false if there is no point in it.
    fn back_off(&self, failures: u32, source: SourceId) -> bool {
        let times = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        let until = Instant::now() + self.config.backoff.saturating_mul(times).min(self.config.max_backoff);
        loop {
            if self.condemned.lock().contains(&source) {
                return false;
            }
            let mut claims = self.book();
            match claims.outcome(self.now()) {
                Outcome::Running => {}
                Outcome::Finished | Outcome::Failed(_) => return false,
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            self.changed.wait_for(&mut claims, left.min(Stop::GLANCE));
            drop(claims);
            if let Err(stopped) = self.stop.check() {
                self.stopped(stopped);
                return false;
            }
        }
    }

    /// The caller has given up, or the deadline has passed.
    fn stopped(&self, stopped: Stopped) {
        match stopped {
            Stopped::Cancelled => self.end(Fault {
                kind: Kind::Cancelled,
                stage: Stage::Data,
                stripe: None,
                message: "the receiver called the transfer off".to_owned(),
            }),
            // The book finds out by itself.
            Stopped::Deadline => self.update(|_, _| ()),
        }
    }

    /// One connection of a stream.
    fn connection(&self, stream: StreamId, way: &Way, progress: &mut bool) -> End {
        match self.try_connection(stream, way, progress) {
            Ok(()) => End::Over,
            Err(error) => self.sort(error),
        }
    }

    fn try_connection(&self, stream: StreamId, way: &Way, progress: &mut bool) -> Result<(), TcpError> {
        // Whether a relay answers does not matter any more once everything is there.
        let stop = if way.relay.is_some() { &self.scouting } else { self.stop };
        let mut conn = self.dial(&way.endpoint, stop)?;
        let (mut pull, minor) = self.shake(&mut conn, stream, way, stop)?;
        self.update(|claims, now| claims.join(stream, way.source, now)).map_err(|e| conn.wire(e))?;
        let readable = self.reach(&mut conn, &mut pull, stream, way, minor, stop)?;
        self.watch.reach(Stage::Claim);
        let lander = self.landing.lander(self.ticket, &self.plan, self.config.verify);
        let mut lane = Lane::new(self, (way.source, way.relay.as_deref()), stream, conn, pull, progress);
        lane.read_from(readable);
        let result = lane.run(lander);
        if let Err(error) = &result {
            lane.give_up(error);
        }
        result
    }

    /// What an error on a connection means.
    fn sort(&self, error: TcpError) -> End {
        if self.over.load(Ordering::Relaxed) {
            return End::Over;
        }
        if let TcpError::Stopped(stopped) = error {
            self.stopped(stopped);
            return End::Over;
        }
        if let TcpError::Liar { .. } = error {
            return End::Gone(error);
        }
        if let TcpError::Ground { stripe, .. } = error {
            let (kind, stage) = (Kind::Bug, Stage::Data);
            let fault = Fault { kind, stage, stripe: Some(stripe), message: error.to_string() };
            return End::Fatal(error, fault);
        }
        if let TcpError::Tls { source, stage, .. } = &error
            && matches!(**source, TlsError::Untrusted { .. })
        {
            // Asking again does not make it the right one.
            let (kind, message) = (Kind::Denied, error.to_string());
            let fault = Fault { kind, stage: *stage, stripe: None, message };
            return End::Fatal(error, fault);
        }
        if let TcpError::Wire { source, .. } = &error {
            if matches!(source, WireError::Transfer(_)) {
                return End::Over;
            }
            if let WireError::Peer(fault) = source
                && fault.ends_ticket()
            {
                let fault = fault.clone();
                return End::Fatal(error, fault);
            }
            if let WireError::Refused(refusal) = source
                && is_final(refusal.kind)
            {
                return End::Gone(error);
            }
            if matches!(
                source,
                WireError::Version { .. } | WireError::UnknownSource { .. } | WireError::Proof { .. }
            ) {
                return End::Gone(error);
            }
        }
        // Whatever else breaks the protocol may be damage on the way.
        End::Lost(error)
    }

    fn dial(&self, endpoint: &Endpoint, stop: &Stop) -> Result<Conn, TcpError> {
        let resolve = |e| TcpError::Resolve { endpoint: endpoint.to_string(), source: e };
        let addresses = (endpoint.host().as_str(), endpoint.port()).to_socket_addrs().map_err(resolve)?;
        let mut last = resolve(std::io::ErrorKind::NotFound.into());
        for address in addresses {
            match self.connect(address, endpoint, stop) {
                Ok(conn) => return Ok(conn),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Connects without blocking, so that giving up is noticed meanwhile.
    fn connect(&self, address: SocketAddr, endpoint: &Endpoint, stop: &Stop) -> Result<Conn, TcpError> {
        let name = format!("{endpoint} ({address})");
        let failed =
            |source| TcpError::Io { peer: name.clone(), stage: Stage::Handshake, doing: "connect", source };
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP));
        let socket = socket.map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let pending = match socket.connect(&SockAddr::from(address)) {
            Ok(()) => false,
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => true,
            Err(e) => return Err(failed(e)),
        };
        let stream: TcpStream = socket.into();
        let conn = Conn::new(Arc::new(stream), name.clone());
        let limit = self.config.connect_timeout;
        let by = By { until: Instant::now() + limit, limit, what: "the connection", stop };
        let mut made = !pending;
        while !made {
            if wait(conn.fd(), true, None, by.nap(&conn)?).map_err(failed)?.writable {
                conn.socket().take_error().map_err(failed)?.map_or(Ok(()), |e| Err(failed(e)))?;
                made = true;
            }
        }
        let socket = conn.socket();
        socket.set_nodelay(true).map_err(failed)?;
        // From here on reads of payload block, for as long as nobody needs to look around.
        socket.set_nonblocking(false).map_err(failed)?;
        socket.set_read_timeout(Some(Stop::GLANCE)).map_err(failed)?;
        Ok(conn)
    }

    fn shake(
        &self,
        conn: &mut Conn,
        stream: StreamId,
        way: &Way,
        stop: &Stop,
    ) -> Result<(PullStream, u8), TcpError> {
        let limit = self.config.handshake_timeout;
        let by = By { until: Instant::now() + limit, limit, what: "the handshake", stop };
        if way.tls {
            self.secure(conn, &way.endpoint, &by)?;
        }
        let source = way.source;
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce)
            .map_err(|e| TcpError::Setup { what: "a nonce", source: std::io::Error::other(e) })?;
        let (ticket, key, nonce) = (way.completion.ticket, way.key.clone(), Nonce(nonce));
        let (sent, hello) = Dial { ticket, key, source, stream, nonce }.hello().map_err(|e| conn.wire(e))?;
        conn.send_by(&hello, &by)?;
        let (header, body) = conn.frame_by(&by)?;
        let (sent, proof) = sent.challenge(&header, &body).map_err(|e| conn.wire(e))?;
        conn.send_by(&proof, &by)?;
        let (header, body) = conn.frame_by(&by)?;
        let proved = sent.accept(&header, &body).map_err(|e| conn.wire(e))?;
        let minor = proved.minor();
        Ok((PullStream::new(proved, way.completion.clone(), self.ticket.checks), minor))
    }

    /// Asks a source whether its memory can be read, if that is wanted here.
    fn reach(
        &self,
        conn: &mut Conn,
        pull: &mut PullStream,
        stream: StreamId,
        way: &Way,
        minor: u8,
        stop: &Stop,
    ) -> Result<Option<Readable>, TcpError> {
        if way.relay.is_some() || !self.reading.is_on() {
            return Ok(None);
        }
        if minor < ProtocolVersion::ONE_SIDED || way.tls {
            let why =
                if way.tls { "it is inside TLS, and NIXL does not encrypt" } else { "its agent is older" };
            self.reading.end(&format!("{}: {why}", way.endpoint));
            return Ok(None);
        }
        let limit = self.config.handshake_timeout;
        let by = By { until: Instant::now() + limit, limit, what: "the answer to Reach", stop };
        let ask = self.reading.ask().encode(stream).map_err(|e| conn.wire(e))?;
        conn.send_by(&ask, &by)?;
        let mut able = None;
        loop {
            let (header, body) = conn.frame_by(&by)?;
            pull.header(&header).map_err(|e| conn.wire(e))?;
            match pull.body(&body).map_err(|e| conn.wire(e))? {
                PullEvent::Reach(Reach::Able { library, metadata }) => able = Some((library, metadata)),
                PullEvent::Reach(Reach::Unable { why }) => {
                    self.reading.end(&format!("{}: {why}", way.endpoint));
                    return Ok(None);
                }
                PullEvent::Memory(memory) => {
                    let Some((library, metadata)) = able else {
                        let state = "a Reach";
                        return Err(conn.wire(WireError::Unexpected { frame: header.kind, state }));
                    };
                    return Ok(self.reading.meet(&way.endpoint.to_string(), &library, &metadata, memory));
                }
                PullEvent::Holds(stripes) => {
                    let told = self.update(|claims, _| {
                        stripes.into_iter().try_for_each(|range| claims.holds(stream, range))
                    });
                    told.map_err(|e| conn.wire(e))?;
                }
                PullEvent::Fault(fault) => return Err(conn.wire(WireError::Peer(fault))),
                PullEvent::Ping(number) => {
                    let pong = Message::Pong(number).encode(stream).map_err(|e| conn.wire(e))?;
                    conn.send_by(&pong, &by)?;
                }
                PullEvent::StripeEnd { .. } | PullEvent::Done | PullEvent::Pong => {
                    let state = "the answer to Reach";
                    return Err(conn.wire(WireError::Unexpected { frame: header.kind, state }));
                }
            }
        }
    }

    /// Puts the connection inside TLS with a peer that has a certificate for the source's host.
    fn secure(&self, conn: &mut Conn, at: &Endpoint, by: &By<'_>) -> Result<(), TcpError> {
        let endpoint = || at.to_string();
        let Some(trust) = &self.config.privacy.trust else {
            return Err(TcpError::NoTrust { endpoint: endpoint() });
        };
        let host = at.host().as_str();
        let name = tls::server_name(host).ok_or_else(|| {
            let why = format!("no certificate can be for {host}");
            let source = Box::new(TlsError::Untrusted { peer: endpoint(), why });
            TcpError::Tls { peer: endpoint(), stage: Stage::Handshake, source }
        })?;
        let tls = rustls::ClientConnection::new(trust.data(), name).map_err(|e| conn.tls(e))?;
        conn.secure_by(tls, DATA_PROTOCOL, by)
    }

    /// Whether the landing finds the whole right; asked once.
    pub(super) fn accept(&self) -> Result<(), Fault> {
        self.accepted.get_or_init(|| self.landing.finish()).clone()
    }

    fn result(self) -> Result<Pulled, TcpError> {
        let ticket = self.ticket.id;
        let mut claims = self.claims.into_inner();
        self.watch.show(&Progress { live: 0, ..claims.progress() });
        match claims.outcome(self.origin.elapsed()) {
            Outcome::Finished => {}
            Outcome::Failed(failure) => {
                let cause = self.cause.into_inner().map(Box::new);
                return Err(TcpError::Transfer { ticket, failure, cause });
            }
            Outcome::Running => {
                let why = "every stream ended before the transfer did".to_owned();
                return Err(TcpError::Ground { ticket, stripe: 0, why });
            }
        }
        self.watch.reach(Stage::Complete);
        // The streams asked already, unless the last one was lost in between.
        self.accepted
            .into_inner()
            .unwrap_or_else(|| self.landing.finish())
            .map_err(|fault| TcpError::Unaccepted { ticket, fault })?;
        let Progress { stripes, bytes, bad, lost, .. } = claims.progress();
        Ok(Pulled { bytes, stripes, bad, lost, elapsed: self.origin.elapsed() })
    }
}
