//! The sender: a listening socket, its connections, and the offers that they serve.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use socket2::SockRef;
use windlass_core::error::Kind;
use windlass_core::wire::{
    DEFAULT_WINDOW, Fault, HANDSHAKE_TIMEOUT_MS, LOST_AFTER_MS, Message, PING_AFTER_MS, ProtocolVersion,
    Refusal, Stage, StreamId, TicketId, TicketKey,
};

use super::conn::wait;
use super::offer::{Offer, OfferHandle, Open, Served};
use super::{TcpError, serve};
use crate::nixl::Exporter;
use crate::stop::Stop;
use crate::tls::Certificate;

/// How a sender listens and what it puts up with.
#[derive(Clone, Debug)]
pub struct SenderConfig {
    /// The address to listen on.
    pub bind: IpAddr,
    /// The ports to try, in order. Port 0 is any free one.
    pub ports: RangeInclusive<u16>,
    /// A port to try before those.
    pub first: Option<u16>,
    /// Connections at a time, proved or not. Beyond them an unproved one is put out, or the new one refused.
    pub max_connections: usize,
    /// Connections at a time that have not proved a ticket. Beyond them the oldest is put out.
    pub max_handshakes: usize,
    /// The same for one peer address.
    pub max_handshakes_per_peer: usize,
    /// How long a handshake may take, from the first byte to the last.
    pub handshake_timeout: Duration,
    /// How long a stream may be silent before it is pinged.
    pub ping_after: Duration,
    /// How long a stream may be silent before it is lost.
    pub lost_after: Duration,
    /// How long an offer stays open while no stream of it is connected.
    pub abandoned_after: Duration,
    /// Claims that may be open on a stream.
    pub window: u16,
    /// Offers at a time.
    pub max_offers: usize,
    /// Puts every connection inside TLS.
    pub tls: Option<Certificate>,
    /// Lets receivers read images out of this process's memory. Nothing is exported inside TLS.
    pub nixl: Option<Arc<Exporter>>,
}

impl Default for SenderConfig {
    fn default() -> SenderConfig {
        SenderConfig {
            bind: Ipv4Addr::LOCALHOST.into(),
            ports: 0..=0,
            first: None,
            max_connections: 1024,
            max_handshakes: 128,
            max_handshakes_per_peer: 64,
            handshake_timeout: Duration::from_millis(HANDSHAKE_TIMEOUT_MS),
            ping_after: Duration::from_millis(PING_AFTER_MS),
            lost_after: Duration::from_millis(LOST_AFTER_MS),
            abandoned_after: Duration::from_secs(30),
            window: DEFAULT_WINDOW,
            max_offers: 4096,
            tls: None,
            nixl: None,
        }
    }
}

/// The stack of a connection's thread; its buffers are on the heap.
const STACK: usize = 256 << 10;
/// Ended tickets that are remembered, so that a late stream learns why.
const MAX_ENDED: usize = 1024;

pub(super) fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// A connection as others see it.
pub(super) struct Peer {
    pub(super) socket: Arc<TcpStream>,
    pub(super) address: SocketAddr,
    pub(super) proved: AtomicBool,
    /// The offer that admitted it.
    pub(super) serves: OnceLock<Arc<Served>>,
}

/// What a ticket id leads to.
pub(super) enum Found {
    Offer(Arc<Served>),
    Ended(TicketKey, Fault),
}

impl Found {
    pub(super) fn key(&self) -> TicketKey {
        match self {
            Found::Offer(served) => served.key(),
            Found::Ended(key, _) => key.clone(),
        }
    }
}

#[derive(Default)]
struct Offers {
    live: HashMap<TicketId, Arc<Served>>,
    ended: HashMap<TicketId, (TicketKey, Fault)>,
    order: VecDeque<TicketId>,
    closed: bool,
}

/// What all threads of a sender share.
pub(super) struct Shared {
    pub(super) config: SenderConfig,
    pub(super) stop: Stop,
    offers: Mutex<Offers>,
    /// Connections by number, so that lower ones are older.
    peers: Mutex<BTreeMap<u64, Arc<Peer>>>,
}

impl Shared {
    pub(super) fn find(&self, ticket: TicketId) -> Option<Found> {
        let offers = self.offers.lock();
        if let Some(served) = offers.live.get(&ticket) {
            return Some(match served.over().and_then(|o| o.fault) {
                Some(fault) => Found::Ended(served.key(), fault),
                None => Found::Offer(Arc::clone(served)),
            });
        }
        offers.ended.get(&ticket).map(|(key, fault)| Found::Ended(key.clone(), fault.clone()))
    }

    /// Makes a connection end soon.
    pub(super) fn put_out(&self, connection: u64) {
        if let Some(peer) = self.peers.lock().get(&connection) {
            // Already closed by the peer is as good.
            let _ = peer.socket.shutdown(Shutdown::Both);
        }
    }

    /// Ends offers whose time is over and forgets those that are free.
    fn tend(&self) {
        let now = now_unix_ms();
        let mut offers = self.offers.lock();
        let mut gone = Vec::new();
        for (id, served) in &offers.live {
            served.look(now, self.config.abandoned_after);
            if served.is_over_and_left() {
                gone.push((*id, served.key(), served.over().and_then(|o| o.fault)));
            }
        }
        for (id, key, fault) in gone {
            offers.live.remove(&id);
            let Some(fault) = fault else { continue };
            offers.ended.insert(id, (key, fault));
            offers.order.push_back(id);
            if offers.order.len() > MAX_ENDED
                && let Some(oldest) = offers.order.pop_front()
            {
                offers.ended.remove(&oldest);
            }
        }
    }

    /// Makes room for a connection from `from`: puts out the oldest unproved ones where there are too many.
    /// False if the new one cannot be taken for now. A connection that was put out counts until its thread has
    /// gone, so the bounds hold for threads and descriptors as well.
    fn make_room(&self, from: IpAddr) -> bool {
        let config = &self.config;
        let peers = self.peers.lock();
        let unproved = |only: Option<IpAddr>| {
            let counts = move |p: &Peer| {
                !p.proved.load(Ordering::Relaxed) && only.is_none_or(|ip| p.address.ip() == ip)
            };
            peers.values().filter(move |p| counts(p))
        };
        let put_out = |only, max: usize| {
            let count = unproved(only).count();
            for peer in unproved(only).take((count + 1).saturating_sub(max)) {
                let _ = peer.socket.shutdown(Shutdown::Both);
            }
            count
        };
        put_out(Some(from), config.max_handshakes_per_peer);
        let handshakes = put_out(None, config.max_handshakes);
        if peers.len() >= config.max_connections {
            put_out(None, handshakes);
        }
        peers.len() < config.max_connections && handshakes < config.max_handshakes.saturating_mul(2)
    }
}

/// Serves offers over TCP until it is shut down. Dropping it shuts it down without grace.
pub struct Sender {
    shared: Arc<Shared>,
    address: SocketAddr,
    accept: Option<JoinHandle<()>>,
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sender").field(&self.address).finish()
    }
}

impl Sender {
    /// Listens on the first free port of the range.
    pub fn start(config: SenderConfig) -> Result<Sender, TcpError> {
        let (first, last) = (*config.ports.start(), *config.ports.end());
        let mut source = io::Error::from(io::ErrorKind::InvalidInput);
        let listener = config
            .first
            .into_iter()
            .chain(config.ports.clone())
            .find_map(|port| TcpListener::bind((config.bind, port)).map_err(|e| source = e).ok());
        let bind = config.bind;
        let listener = listener.ok_or(TcpError::Bind { bind, first, last, source })?;
        let setup = |what| move |source| TcpError::Setup { what, source };
        let address = listener.local_addr().map_err(setup("the listening socket"))?;
        listener.set_nonblocking(true).map_err(setup("the listening socket"))?;
        let shared = Arc::new(Shared {
            config,
            stop: Stop::never(),
            offers: Mutex::default(),
            peers: Mutex::default(),
        });
        let for_thread = Arc::clone(&shared);
        let accept = thread::Builder::new()
            .name("windlass-accept".into())
            .stack_size(STACK)
            .spawn(move || accept(&for_thread, &listener))
            .map_err(setup("the accepting thread"))?;
        Ok(Sender { shared, address, accept: Some(accept) })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves the bytes of an offer to whoever proves its ticket.
    pub fn offer(&self, offer: Offer) -> Result<OfferHandle, TcpError> {
        let ticket = offer.ticket.id;
        let served = Arc::new(Served::new(offer)?);
        let mut offers = self.shared.offers.lock();
        if offers.closed {
            return Err(TcpError::ShuttingDown { ticket });
        }
        if offers.live.len() >= self.shared.config.max_offers {
            return Err(TcpError::TooManyOffers { ticket, max: self.shared.config.max_offers });
        }
        if offers.live.contains_key(&ticket) || offers.ended.contains_key(&ticket) {
            return Err(TcpError::OfferedTwice { ticket });
        }
        offers.live.insert(ticket, Arc::clone(&served));
        Ok(OfferHandle { served })
    }

    /// Connections at this moment: all, and those that have not proved a ticket.
    pub fn connections(&self) -> (usize, usize) {
        let peers = self.shared.peers.lock();
        (peers.len(), peers.values().filter(|p| !p.proved.load(Ordering::Relaxed)).count())
    }

    /// Ends every offer, gives stripes under way `grace` to be acknowledged, and joins all threads.
    pub fn shutdown(mut self, grace: Duration) {
        self.close(grace);
    }

    fn close(&mut self, grace: Duration) {
        let Some(accept) = self.accept.take() else { return };
        let live: Vec<Arc<Served>> = {
            let mut offers = self.shared.offers.lock();
            offers.closed = true;
            offers.live.values().cloned().collect()
        };
        let message = "the sender shuts down: connect to another source, or wait for it to come back";
        let fault =
            Fault { kind: Kind::PeerLost, stage: Stage::Data, stripe: None, message: message.to_owned() };
        let now = Instant::now();
        for served in &live {
            served.end(Some(fault.clone()), now.checked_add(grace).unwrap_or(now));
        }
        for served in &live {
            // Ends by itself: see `OfferHandle::revoke`.
            let _ = served.wait_free(&Stop::never());
        }
        self.shared.stop.set();
        if accept.join().is_err() {
            tracing::error!("the accepting thread panicked");
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

/// The accepting thread. Looks after the offers as well, and joins the connections' threads.
fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    let mut number = 0u64;
    let mut tended = Instant::now();
    while !shared.stop.is_set() {
        if tended.elapsed() >= Stop::GLANCE {
            tended = Instant::now();
            shared.tend();
            threads = reap(threads);
        }
        match listener.accept() {
            Ok((socket, address)) => {
                number += 1;
                threads.extend(admit(shared, number, socket, address));
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let _ = wait(listener.as_fd(), false, None, Stop::GLANCE);
            }
            Err(e) => {
                // A connection that was gone before it was accepted, or no descriptor left: neither may end this
                // thread, nor keep it busy.
                tracing::warn!(error = %e, "cannot accept a connection");
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
    for peer in shared.peers.lock().values() {
        let _ = peer.socket.shutdown(Shutdown::Both);
    }
    threads.into_iter().for_each(join);
}

fn reap(threads: Vec<JoinHandle<()>>) -> Vec<JoinHandle<()>> {
    let (over, running): (Vec<_>, Vec<_>) = threads.into_iter().partition(JoinHandle::is_finished);
    over.into_iter().for_each(join);
    running
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a connection's thread panicked");
    }
}

/// Starts the thread of a connection, if there is room for it.
fn admit(
    shared: &Arc<Shared>,
    number: u64,
    socket: TcpStream,
    address: SocketAddr,
) -> Option<JoinHandle<()>> {
    if !shared.make_room(address.ip()) {
        refuse_full(shared, &socket);
        return None;
    }
    if socket.set_nonblocking(true).is_err() || socket.set_nodelay(true).is_err() {
        return None;
    }
    let peer = Arc::new(Peer {
        socket: Arc::new(socket),
        address,
        proved: AtomicBool::new(false),
        serves: OnceLock::new(),
    });
    shared.peers.lock().insert(number, Arc::clone(&peer));
    let for_thread = Arc::clone(shared);
    let thread = thread::Builder::new()
        .name(format!("windlass-send-{number}"))
        .stack_size(STACK)
        .spawn(move || connection(&for_thread, number, peer));
    if let Err(e) = &thread {
        tracing::warn!(error = %e, peer = %address, "cannot start a thread for a connection");
        shared.peers.lock().remove(&number);
    }
    thread.ok()
}

fn refuse_full(shared: &Shared, socket: &TcpStream) {
    let version = ProtocolVersion::CURRENT;
    let message = format!(
        "all {} connections are in use: try again, or raise max_connections",
        shared.config.max_connections
    );
    let refusal = Refusal { kind: Kind::Exhausted, ours: version, theirs: version, message };
    if let Ok(frame) = Message::Refuse(refusal).encode(StreamId { index: 0, epoch: 0 }) {
        // A fresh socket's buffer takes it whole, or it is lost: the peer tries again either way.
        let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
        let _ = rustix::net::send(socket, &frame, flags);
        let _ = socket.shutdown(Shutdown::Write);
    }
}

/// The thread of a connection.
fn connection(shared: &Arc<Shared>, number: u64, peer: Arc<Peer>) {
    let mut open: Option<Open> = None;
    let result = serve::converse(shared, number, &peer, &mut open);
    match result {
        Ok(()) => tracing::debug!(peer = %peer.address, "connection complete"),
        Err(error) => tracing::debug!(peer = %peer.address, %error, "connection ended"),
    }
    if open.is_some() {
        // Stripes are unacknowledged: what the kernel still has of them must not be sent.
        let _ = SockRef::from(&*peer.socket).set_linger(Some(Duration::ZERO));
    }
    let serves = peer.serves.get().cloned();
    shared.peers.lock().remove(&number);
    // The last reference: the socket is closed, or reset, here. Only then does the memory go.
    drop(peer);
    drop(open);
    if let Some(served) = serves {
        served.leave(number);
    }
}
