//! Stands between a receiver and an agent's data port, and holds up what the agent sends: a transfer that is in the middle
//! for as long as a test likes.
#![allow(dead_code, unreachable_pub)]

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::process::PATIENCE;

/// Where receivers find the relay, under the agent's own port: another address of this host's loopback.
pub const HOST: &str = "127.0.0.2";

struct Shared {
    /// Bytes that came from the agent and went on.
    passed: AtomicU64,
    /// No more than these, until `open`.
    most: u64,
    open: AtomicBool,
    /// How often all connections were cut.
    cuts: AtomicU64,
    ended: AtomicBool,
}

/// Passes on what both sides say; stops for the agent's bytes at some point.
pub struct Relay {
    shared: Arc<Shared>,
    port: u16,
}

impl Relay {
    /// For the agent with this data port on 127.0.0.1, whose first `most` bytes pass.
    pub fn start(port: u16, most: u64) -> Relay {
        let listener = TcpListener::bind((HOST, port)).unwrap();
        let shared = Shared {
            passed: AtomicU64::new(0),
            most,
            open: AtomicBool::new(false),
            cuts: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        };
        let shared = Arc::new(shared);
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if accepting.ended.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                thread::spawn(move || pass(near_too, far_too, |_| true));
                let shared = Arc::clone(&accepting);
                let cuts = shared.cuts.load(Ordering::SeqCst);
                thread::spawn(move || pass(far, near, |n| shared.admit(n, cuts)));
            }
        });
        Relay { shared, port }
    }

    /// Returns when the transfer is in the middle: the agent has sent what may pass, and more.
    pub fn stalled(&self) {
        let until = Instant::now() + PATIENCE;
        while self.shared.passed.load(Ordering::SeqCst) < self.shared.most {
            assert!(Instant::now() < until, "the transfer did not get so far");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends all connections, with what they still carried: their other end is dead, and systems between forget. Later ones
    /// pass everything.
    pub fn cut(&self) {
        self.shared.cuts.fetch_add(1, Ordering::SeqCst);
        self.open();
    }

    /// From now on everything passes.
    pub fn open(&self) {
        self.shared.open.store(true, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.open();
        // Wakes whoever accepts.
        let _ = TcpStream::connect((HOST, self.port));
    }
}

impl Shared {
    /// Waits until `n` more bytes of the agent may pass; whether they may at all, on a connection that was made after so many
    /// cuts.
    fn admit(&self, n: u64, cuts: u64) -> bool {
        let before = self.passed.fetch_add(n, Ordering::SeqCst);
        while before + n > self.most && !self.open.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(2));
        }
        !self.ended.load(Ordering::SeqCst) && self.cuts.load(Ordering::SeqCst) == cuts
    }
}

/// Passes on what one side says until it ends; then the other side is told so.
fn pass(mut from: TcpStream, mut to: TcpStream, admit: impl Fn(u64) -> bool) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 || !admit(n as u64) || to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
