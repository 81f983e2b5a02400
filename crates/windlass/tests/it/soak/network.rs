//! Relays that are a bad network: each stands before one port of a service, and spoils what passes when it is told to.
//!
//! A fault is ordered by the soak and done to bytes that really pass, or it is not done and not counted.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::soak::dice::Dice;

/// Where everybody finds the relays, under the service's own port: another address of this host's loopback.
pub(crate) const HOST: &str = "127.0.0.2";
/// How often a relay looks whether to end.
const LOOK: Duration = Duration::from_millis(20);

/// What befalls a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trouble {
    /// One bit is wrong.
    Flip,
    /// A piece is missing in the middle.
    Drop,
    /// What follows is lost, and the connection is closed.
    Truncate,
    /// The connection is reset.
    Reset,
    /// Nothing passes for seconds; then it goes on, or the connection is reset.
    Stall,
    /// A pause in the middle.
    Delay,
}

impl Trouble {
    pub(crate) const ALL: [Trouble; 6] =
        [Trouble::Flip, Trouble::Drop, Trouble::Truncate, Trouble::Reset, Trouble::Stall, Trouble::Delay];
    /// Those that change no byte of what arrives.
    pub(crate) const HONEST: [Trouble; 4] =
        [Trouble::Truncate, Trouble::Reset, Trouble::Stall, Trouble::Delay];
}

struct Shared {
    name: &'static str,
    port: u16,
    orders: Mutex<(VecDeque<Trouble>, Dice)>,
    done: Mutex<BTreeMap<Trouble, u64>>,
    calm: AtomicBool,
    ended: AtomicBool,
    /// Bytes that passed, in both directions.
    passed: AtomicU64,
}

/// A relay to one port of 127.0.0.1.
pub(crate) struct Relay {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    pub(crate) fn start(name: &'static str, port: u16, dice: Dice) -> Relay {
        let listener = TcpListener::bind((HOST, port)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let shared = Arc::new(Shared {
            name,
            port,
            orders: Mutex::new((VecDeque::new(), dice)),
            done: Mutex::default(),
            calm: AtomicBool::new(true),
            ended: AtomicBool::new(false),
            passed: AtomicU64::new(0),
        });
        let accepting = Arc::clone(&shared);
        let thread = thread::spawn(move || accept(&listener, &accepting));
        Relay { shared, thread: Some(thread) }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.shared.name
    }

    /// Something that passes soon shall fare so. Orders that nothing has passed for do not pile up.
    pub(crate) fn order(&self, trouble: Trouble) {
        let mut orders = self.shared.orders.lock();
        if orders.0.len() < 3 {
            orders.0.push_back(trouble);
        }
    }

    /// Whether everything passes, and what was held up is let go.
    pub(crate) fn calm(&self, calm: bool) {
        self.shared.calm.store(calm, Ordering::SeqCst);
        self.shared.orders.lock().0.clear();
    }

    /// What was done so far.
    pub(crate) fn done(&self) -> BTreeMap<Trouble, u64> {
        self.shared.done.lock().clone()
    }

    pub(crate) fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::SeqCst)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut open: Vec<JoinHandle<()>> = Vec::new();
    while !shared.ended.load(Ordering::SeqCst) {
        open.retain(|thread| !thread.is_finished());
        let Ok((near, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(2));
            continue;
        };
        // Who comes while the service is away is refused as the service would refuse.
        let Ok(far) = TcpStream::connect(("127.0.0.1", shared.port)) else { continue };
        let shared = Arc::clone(shared);
        open.push(thread::spawn(move || connection(&near, &far, &shared)));
    }
    open.into_iter().for_each(|thread| drop(thread.join()));
}

/// Both ends are closed when it returns, as `pass` has left them.
fn connection(near: &TcpStream, far: &TcpStream, shared: &Shared) {
    for socket in [near, far] {
        let set = || -> io::Result<()> {
            socket.set_nonblocking(false)?;
            socket.set_read_timeout(Some(LOOK))?;
            socket.set_write_timeout(Some(LOOK))?;
            socket.set_nodelay(true)
        };
        if set().is_err() {
            return;
        }
    }
    let over = AtomicBool::new(false);
    let ended = || over.load(Ordering::SeqCst) || shared.ended.load(Ordering::SeqCst);
    let there = || {
        pass(near, far, shared, &ended);
        over.store(true, Ordering::SeqCst);
    };
    thread::scope(|scope| {
        scope.spawn(there);
        pass(far, near, shared, &ended);
        over.store(true, Ordering::SeqCst);
    });
}

fn is_slow(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

fn write(mut to: &TcpStream, mut bytes: &[u8], ended: &dyn Fn() -> bool) -> bool {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if is_slow(&e) => {}
            Err(_) => return false,
        }
        if ended() {
            return false;
        }
    }
    true
}

/// Passes on what one side says until it ends, or the connection is spoilt.
fn pass(mut from: &TcpStream, to: &TcpStream, shared: &Shared, ended: &dyn Fn() -> bool) {
    let mut buffer = vec![0; 16 << 10];
    while !ended() {
        let n = match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => n,
            Err(e) if is_slow(&e) => continue,
            Err(_) => return,
        };
        shared.passed.fetch_add(n as u64, Ordering::SeqCst);
        let Some((trouble, dice)) = shared.draw() else {
            if write(to, &buffer[..n], ended) {
                continue;
            }
            return;
        };
        if !shared.spoil(trouble, dice, &mut buffer[..n], (from, to), ended) {
            return;
        }
    }
}

/// Gives up a connection so that the other side is told at once, with a reset.
fn reset((from, to): (&TcpStream, &TcpStream)) {
    for socket in [from, to] {
        let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
    }
}

impl Shared {
    /// What happens to the bytes that pass now.
    fn draw(&self) -> Option<(Trouble, Dice)> {
        if self.calm.load(Ordering::SeqCst) {
            return None;
        }
        let mut orders = self.orders.lock();
        let (queue, dice) = &mut *orders;
        // Not the very next bytes, but some that come soon.
        if queue.is_empty() || dice.below(3) > 0 {
            return None;
        }
        let own = Dice::new(dice.roll(), 0);
        queue.pop_front().map(|trouble| (trouble, own))
    }

    /// Whether the connection goes on.
    fn spoil(
        &self,
        trouble: Trouble,
        mut dice: Dice,
        bytes: &mut [u8],
        sockets: (&TcpStream, &TcpStream),
        ended: &dyn Fn() -> bool,
    ) -> bool {
        let at = dice.below(bytes.len() as u64) as usize;
        let to = sockets.1;
        *self.done.lock().entry(trouble).or_default() += 1;
        let hold = |span: Duration| {
            let until = Instant::now() + span;
            while Instant::now() < until && !ended() && !self.calm.load(Ordering::SeqCst) {
                thread::sleep(LOOK.min(span));
            }
        };
        match trouble {
            Trouble::Flip => {
                bytes[at] ^= 1 << dice.below(8);
                write(to, bytes, ended)
            }
            Trouble::Drop => {
                let missing = 1 + dice.below((bytes.len() - at) as u64) as usize;
                write(to, &bytes[..at], ended) && write(to, &bytes[at + missing..], ended)
            }
            Trouble::Truncate => {
                write(to, &bytes[..at], ended);
                false
            }
            Trouble::Reset => {
                write(to, &bytes[..at], ended);
                reset(sockets);
                false
            }
            Trouble::Stall => {
                hold(Duration::from_millis(200 + dice.below(4000)));
                if dice.below(2) == 0 {
                    reset(sockets);
                    return false;
                }
                write(to, bytes, ended)
            }
            Trouble::Delay => {
                hold(Duration::from_millis(5 + dice.below(300)));
                write(to, bytes, ended)
            }
        }
    }
}
