//! A proxy that does harm, and a receiver that does one thing at a time.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::SockRef;
use windlass_core::wire::{
    Dial, HEADER_LEN, Header, Message, Next, Nonce, PullEvent, PullStream, SourceId, StreamId, Stripe,
    Ticket, WireError, decode_header,
};

use super::world::random;

/// What happens to one direction of a connection, at a byte counted from its beginning.
#[derive(Clone, Debug)]
pub(super) enum Harm {
    None,
    /// Both directions are closed.
    Cut(u64),
    /// Both directions are reset.
    Reset(u64),
    /// One bit is changed.
    Flip(u64, u8),
    /// Nothing more passes, but nothing is closed.
    Stall(u64),
    /// Nothing more passes until the gate opens.
    Gate(u64, Arc<AtomicBool>),
    Delay(Duration),
}

/// The harm to the n-th connection: to the receiver, to the sender.
type Choose = Box<dyn FnMut(u64) -> (Harm, Harm) + Send>;

pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    /// Bytes that have passed towards the receiver.
    pub(super) passed: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    pub(super) fn start(target: SocketAddr, mut choose: Choose) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let (over, passed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over2, passed2) = (Arc::clone(&over), Arc::clone(&passed));
        let thread = std::thread::spawn(move || {
            let mut pumps = Vec::new();
            let mut number = 0;
            while !over2.load(Ordering::Relaxed) {
                let Ok((near, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let Ok(far) = TcpStream::connect(target) else { continue };
                let (to_receiver, to_sender) = choose(number);
                number += 1;
                let pairs =
                    [(far.try_clone(), near.try_clone(), to_receiver), (Ok(near), Ok(far), to_sender)];
                for (i, (from, to, harm)) in pairs.into_iter().enumerate() {
                    let (from, to, over) = (from.unwrap(), to.unwrap(), Arc::clone(&over2));
                    let passed = if i == 0 { Arc::clone(&passed2) } else { Arc::default() };
                    pumps.push(std::thread::spawn(move || pump(from, to, &harm, &over, &passed)));
                }
            }
            pumps.into_iter().for_each(|p| p.join().unwrap());
        });
        Proxy { address, passed, over, thread: Some(thread) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn pump(from: TcpStream, to: TcpStream, harm: &Harm, over: &AtomicBool, passed: &AtomicU64) {
    from.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    to.set_write_timeout(Some(Duration::from_millis(5))).unwrap();
    let mut buffer = vec![0; 32 << 10];
    let mut at = 0u64;
    let close = || {
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    };
    while !over.load(Ordering::Relaxed) {
        let limit = match harm {
            Harm::Cut(n) | Harm::Reset(n) | Harm::Stall(n) => n - at,
            Harm::Gate(n, gate) if !gate.load(Ordering::Relaxed) => n.saturating_sub(at),
            Harm::Gate(..) | Harm::None | Harm::Flip(..) | Harm::Delay(_) => u64::MAX,
        };
        if limit == 0 {
            match harm {
                Harm::Cut(_) => return close(),
                Harm::Reset(_) => {
                    let _ = SockRef::from(&from).set_linger(Some(Duration::ZERO));
                    let _ = SockRef::from(&to).set_linger(Some(Duration::ZERO));
                    return close();
                }
                Harm::Stall(_) | Harm::Gate(..) => std::thread::sleep(Duration::from_millis(1)),
                Harm::None | Harm::Flip(..) | Harm::Delay(_) => {}
            }
            continue;
        }
        if let Harm::Delay(delay) = harm {
            std::thread::sleep(*delay);
        }
        let take = limit.min(buffer.len() as u64) as usize;
        let read = match (&from).read(&mut buffer[..take]) {
            Ok(0) => return close(),
            Ok(read) => read,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(_) => return close(),
        };
        if let Harm::Flip(n, bit) = harm
            && (at..at + read as u64).contains(n)
        {
            buffer[(n - at) as usize] ^= 1 << bit;
        }
        at += read as u64;
        let mut rest = &buffer[..read];
        while !rest.is_empty() {
            match (&to).write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock && !over.load(Ordering::Relaxed) => {}
                Err(_) => return close(),
            }
        }
        passed.fetch_add(read as u64, Ordering::Relaxed);
    }
    close();
}

/// A receiver that does what the test says and nothing else.
pub(super) struct Hand {
    pub(super) socket: TcpStream,
    pub(super) pull: PullStream,
}

pub(super) fn read_frame(socket: &mut TcpStream) -> std::io::Result<(Header, Vec<u8>)> {
    let mut header = [0; HEADER_LEN];
    socket.read_exact(&mut header)?;
    let header = decode_header(&header).unwrap().unwrap();
    let mut body = vec![0; header.body_len as usize];
    socket.read_exact(&mut body)?;
    Ok((header, body))
}

impl Hand {
    pub(super) fn dial(ticket: &Ticket, at: SocketAddr, stream: StreamId) -> Result<Hand, WireError> {
        let mut socket = TcpStream::connect(at).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let (id, key, source) = (ticket.id, ticket.key.clone(), SourceId(0));
        let (sent, hello) = Dial { ticket: id, key, source, stream, nonce: Nonce(random()) }.hello().unwrap();
        socket.write_all(&hello).unwrap();
        let (header, body) = read_frame(&mut socket).unwrap();
        let (sent, proof) = sent.challenge(&header, &body)?;
        socket.write_all(&proof).unwrap();
        let (header, body) = read_frame(&mut socket).unwrap();
        let proved = sent.accept(&header, &body)?;
        Ok(Hand { socket, pull: PullStream::new(proved, ticket.completion(), ticket.checks) })
    }

    pub(super) fn claim(&mut self, stripe: Stripe) {
        let frame = self.pull.claim(stripe, 0).unwrap();
        self.socket.write_all(&frame).unwrap();
    }

    pub(super) fn send(&mut self, message: &Message, stream: StreamId) {
        self.socket.write_all(&message.encode(stream).unwrap()).unwrap();
    }

    pub(super) fn ping(&mut self, number: u64) {
        let frame = self.pull.ping(number).unwrap();
        self.socket.write_all(&frame).unwrap();
    }

    /// The next frame that is not payload; payload goes to `payload`.
    pub(super) fn event(&mut self, payload: &mut Vec<u8>) -> std::io::Result<PullEvent> {
        loop {
            let (header, body) = read_frame(&mut self.socket)?;
            match self.pull.header(&header).unwrap() {
                Next::Payload { len, .. } => {
                    self.pull.taken(len as usize).unwrap();
                    payload.extend(body);
                }
                Next::Body(_) => return Ok(self.pull.body(&body).unwrap()),
            }
        }
    }
}
