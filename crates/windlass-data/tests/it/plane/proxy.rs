//! A relay in front of a data port that can be told to hold bytes back, or to be a bad network.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use windlass_core::address::{Host, HostPort};
use windlass_core::digest::BlockSum;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::TicketFields;
use windlass_core::wire::control::{
    Registered, Registration, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
};
use windlass_data::receiver::{Control, ControlError};
use windlass_data::stop::Stop;

use super::Noise;

/// How often relays look whether to end.
const LOOK: Duration = Duration::from_millis(20);

/// What befalls a connection after some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    None,
    /// Everything from there on is lost, and the connection is closed.
    Truncate,
    /// The connection is reset.
    Reset,
    /// Nothing comes any more, and nobody says so.
    Stall,
    /// One bit is wrong.
    Flip,
    /// A pause in the middle.
    Delay,
    /// A piece is missing in the middle.
    Drop,
}

/// What goes through all connections of a test.
#[derive(Default)]
pub(crate) struct Line {
    /// Bytes that went from publishers to receivers.
    passed: AtomicU64,
    allowed: Mutex<Option<u64>>,
    changed: Condvar,
    /// Where troubles come from, and how many connections of a hundred have one.
    dice: Mutex<Option<(Noise, u64)>>,
    troubles: AtomicU64,
    stop: AtomicBool,
}

impl Line {
    pub(crate) fn passed(&self) -> u64 {
        self.passed.load(Ordering::SeqCst)
    }

    /// Lets bytes through until `total` have passed; all of them with `None`.
    pub(crate) fn allow(&self, total: Option<u64>) {
        *self.allowed.lock() = total;
        self.changed.notify_all();
    }

    pub(crate) fn trouble(&self, seed: u64, percent: u64) {
        *self.dice.lock() = (percent > 0).then_some((Noise(seed | 1), percent));
    }

    pub(crate) fn troubles(&self) -> u64 {
        self.troubles.load(Ordering::SeqCst)
    }

    fn over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Waits until `bytes` more may pass, or the end.
    fn admit(&self, bytes: u64) -> bool {
        let mut allowed = self.allowed.lock();
        while allowed.is_some_and(|total| self.passed() + bytes > total) {
            if self.over() {
                return false;
            }
            self.changed.wait_for(&mut allowed, LOOK);
        }
        self.passed.fetch_add(bytes, Ordering::SeqCst);
        !self.over()
    }

    fn draw(&self) -> (Trouble, u64) {
        let mut dice = self.dice.lock();
        let Some((noise, percent)) = dice.as_mut() else { return (Trouble::None, 0) };
        if noise.below(100) >= *percent {
            return (Trouble::None, 0);
        }
        self.troubles.fetch_add(1, Ordering::SeqCst);
        let kinds =
            [Trouble::Truncate, Trouble::Reset, Trouble::Stall, Trouble::Flip, Trouble::Delay, Trouble::Drop];
        let kind = kinds[noise.below(6) as usize];
        // In the handshake, in a small delta, anywhere in an image.
        let reach = [300, 3_000, 30_000, 400_000][noise.below(4) as usize];
        let after = noise.below(reach);
        (kind, after)
    }
}

/// A relay to one data port. Ends with its threads when dropped.
struct Proxy {
    address: SocketAddr,
    line: Arc<Line>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    fn new(target: String, line: &Arc<Line>) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let (shared, ended) = (Arc::clone(line), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut relays: Vec<JoinHandle<()>> = Vec::new();
            while !ended.load(Ordering::SeqCst) && !shared.over() {
                let Ok((client, _)) = listener.accept() else {
                    std::thread::park_timeout(Duration::from_millis(1));
                    relays.retain(|r| !r.is_finished());
                    continue;
                };
                let Ok(server) = TcpStream::connect(&target) else { continue };
                let (line, stop) = (Arc::clone(&shared), Arc::clone(&ended));
                relays.push(std::thread::spawn(move || relay(&client, &server, &line, &stop)));
            }
            relays.into_iter().for_each(|r| drop(r.join()));
        });
        Proxy { address, line: Arc::clone(line), stop, thread: Some(thread) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.line.changed.notify_all();
        drop(self.thread.take().map(JoinHandle::join));
    }
}

fn relay(client: &TcpStream, server: &TcpStream, line: &Line, stop: &AtomicBool) {
    for socket in [client, server] {
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(LOOK)).unwrap();
        socket.set_write_timeout(Some(LOOK)).unwrap();
        let _ = socket.set_nodelay(true);
    }
    let over = AtomicBool::new(false);
    let ended = || over.load(Ordering::SeqCst) || stop.load(Ordering::SeqCst) || line.over();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            up(client, server, &ended);
            over.store(true, Ordering::SeqCst);
        });
        down(server, client, line, &ended);
        over.store(true, Ordering::SeqCst);
    });
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

fn read(mut from: &TcpStream, into: &mut [u8], ended: &dyn Fn() -> bool) -> Option<usize> {
    while !ended() {
        match from.read(into) {
            Ok(0) => return None,
            Ok(n) => return Some(n),
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => return None,
        }
    }
    None
}

fn write(mut to: &TcpStream, mut bytes: &[u8], ended: &dyn Fn() -> bool) -> Option<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => return None,
        }
        if ended() {
            return None;
        }
    }
    Some(())
}

fn up(client: &TcpStream, server: &TcpStream, ended: &dyn Fn() -> bool) {
    let mut buffer = [0; 16 << 10];
    while let Some(n) = read(client, &mut buffer, ended) {
        if write(server, &buffer[..n], ended).is_none() {
            return;
        }
    }
}

fn down(server: &TcpStream, client: &TcpStream, line: &Line, ended: &dyn Fn() -> bool) {
    let (mut trouble, after) = line.draw();
    let mut buffer = vec![0; 16 << 10];
    let mut gone = 0u64;
    while let Some(n) = read(server, &mut buffer, ended) {
        if !line.admit(n as u64) {
            return;
        }
        let mut bytes = &mut buffer[..n];
        if trouble != Trouble::None && gone + n as u64 > after {
            let at = (after - gone) as usize;
            match std::mem::replace(&mut trouble, Trouble::None) {
                Trouble::None => {}
                Trouble::Truncate => {
                    let _ = write(client, &bytes[..at], ended);
                    return;
                }
                Trouble::Reset => {
                    let _ = write(client, &bytes[..at], ended);
                    let _ = socket2::SockRef::from(client).set_linger(Some(Duration::ZERO));
                    let _ = socket2::SockRef::from(server).set_linger(Some(Duration::ZERO));
                    return;
                }
                Trouble::Stall => {
                    while !ended() {
                        std::thread::park_timeout(LOOK);
                    }
                    return;
                }
                Trouble::Flip => bytes[at] ^= 1 << (after % 8),
                Trouble::Delay => std::thread::park_timeout(Duration::from_millis(after % 200)),
                Trouble::Drop => bytes = &mut bytes[..at],
            }
        }
        gone += n as u64;
        if write(client, bytes, ended).is_none() {
            return;
        }
    }
}

/// A control connection whose tickets lead through relays.
pub(crate) struct Via {
    control: Arc<dyn Control>,
    pub(crate) line: Arc<Line>,
    proxies: Mutex<BTreeMap<String, (Proxy, Instant)>>,
}

impl Via {
    pub(crate) fn new(control: Arc<dyn Control>) -> Arc<Via> {
        Arc::new(Via { control, line: Arc::default(), proxies: Mutex::default() })
    }

    fn rewrite(&self, ticket: &mut TicketFields) {
        let mut proxies = self.proxies.lock();
        for source in &mut ticket.sources {
            let target = source.endpoint.to_string();
            let entry = proxies.entry(target.clone()).or_insert_with(|| {
                let target = target.strip_prefix("http://").unwrap_or(&target).to_owned();
                (Proxy::new(target, &self.line), Instant::now())
            });
            entry.1 = Instant::now();
            let port = NonZeroU16::new(entry.0.address.port()).unwrap();
            source.endpoint = HostPort::new(Host::new("127.0.0.1").unwrap(), port);
        }
        // Ports of agents that were killed long ago.
        while proxies.len() > 4 {
            let oldest = proxies.iter().min_by_key(|(_, (_, used))| *used).map(|(k, _)| k.clone()).unwrap();
            proxies.remove(&oldest);
        }
    }
}

impl Drop for Via {
    fn drop(&mut self) {
        self.line.stop.store(true, Ordering::SeqCst);
        self.line.changed.notify_all();
    }
}

impl Control for Via {
    fn peer(&self) -> String {
        format!("{} by relay", self.control.peer())
    }

    fn version(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        self.control.version(newer_than, stop)
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        self.control.manifest(stop)
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        self.control.sums(identity, stop)
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError> {
        self.control.register(registration, stop)
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        let mut answer = self.control.request(request, stop)?;
        if let TransferAnswer::Granted(granted) = &mut answer {
            self.rewrite(&mut granted.ticket);
        }
        Ok(answer)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        self.control.done(done, stop)
    }
}
