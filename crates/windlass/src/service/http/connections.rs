//! Which connections a service keeps.
//!
//! Owns: the slots of a service's connections. A connection is a stranger until a request with the token was accepted on it.
//! If all slots are taken, a new connection replaces a stranger: the oldest of the address with the most strangers, so that
//! no address can push out another. If all connections have the token, the new one is closed. Must not: know what is sent on
//! a connection.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// Minimum interval between log lines on closed connections.
const SAY_AGAIN: Duration = Duration::from_secs(10);

/// The connections of a service.
#[derive(Debug)]
pub(super) struct Connections {
    most: usize,
    state: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    next: u64,
    known: usize,
    /// By address, oldest first.
    strangers: HashMap<IpAddr, BTreeMap<u64, Arc<Notify>>>,
    /// Connections closed since the last log line, and its time.
    closed: u64,
    said: Option<Instant>,
}

impl Counts {
    fn taken(&self) -> usize {
        self.known + self.strangers.values().map(BTreeMap::len).sum::<usize>()
    }

    /// Takes a stranger out of the list; false if it is not there any more.
    fn remove(&mut self, home: IpAddr, number: u64) -> bool {
        let Some(of_home) = self.strangers.get_mut(&home) else { return false };
        let was_there = of_home.remove(&number).is_some();
        if of_home.is_empty() {
            self.strangers.remove(&home);
        }
        was_there
    }

    /// Closes the oldest connection of the address with the most strangers; false if there is none.
    fn shed(&mut self) -> bool {
        let Some(most) = self.strangers.values_mut().max_by_key(|of_home| of_home.len()) else {
            return false;
        };
        let Some((_, stranger)) = most.pop_first() else { return false };
        stranger.notify_one();
        self.strangers.retain(|_, of_home| !of_home.is_empty());
        true
    }
}

impl Connections {
    pub(super) fn new(most: usize) -> Arc<Connections> {
        Arc::new(Connections { most, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, Counts> {
        self.state.lock()
    }

    /// Closes a connection of a stranger, if there is one.
    pub(super) fn shed(&self) {
        self.state().shed();
    }

    /// A slot for a connection from `address`; `None` if all connections have the token.
    pub(super) fn take(self: &Arc<Connections>, address: IpAddr) -> Option<Slot> {
        let mut state = self.state();
        let mut is_free = true;
        if state.taken() >= self.most {
            is_free = state.shed();
            state.closed += 1;
            if state.said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
                let closed = std::mem::take(&mut state.closed);
                state.said = Some(Instant::now());
                let (limit, known) = (self.most, state.known);
                tracing::warn!(
                    limit,
                    known,
                    closed,
                    "too many connections; those without a token are closed first"
                );
            }
        }
        if !is_free {
            return None;
        }
        let (home, number, shed) = (home(address), state.next, Arc::new(Notify::new()));
        state.next += 1;
        state.strangers.entry(home).or_default().insert(number, Arc::clone(&shed));
        Some(Slot { connections: Arc::clone(self), home, number, shed, known: AtomicBool::new(false) })
    }
}

/// The network of an address: an IPv6 host has a whole /64.
fn home(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// The slot of one connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    connections: Arc<Connections>,
    home: IpAddr,
    number: u64,
    shed: Arc<Notify>,
    known: AtomicBool,
}

impl Slot {
    /// A request with the token was accepted here.
    pub(super) fn accept(&self) {
        let mut state = self.connections.state();
        // One that is being closed, or known already, is not there.
        if state.remove(self.home, self.number) {
            state.known += 1;
            self.known.store(true, Ordering::Relaxed);
        }
    }

    /// Returns when another connection takes the slot.
    pub(super) async fn shed(&self) {
        self.shed.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.connections.state();
        if self.known.load(Ordering::Relaxed) {
            state.known -= 1;
        } else {
            state.remove(self.home, self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_shed(place: &Slot) -> bool {
        place.connections.state().strangers.get(&place.home).is_none_or(|of| !of.contains_key(&place.number))
    }

    #[test]
    fn the_oldest_stranger_of_the_address_with_the_most_makes_room() {
        let connections = Connections::new(5);
        let [loud, quiet]: [IpAddr; 2] = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        let first = connections.take(quiet).unwrap();
        let crowd: Vec<Slot> = (0..4).map(|_| connections.take(loud).unwrap()).collect();
        let next = connections.take(quiet).unwrap();
        assert!(is_shed(&crowd[0]) && !is_shed(&crowd[1]) && !is_shed(&first) && !is_shed(&next));
        let more = connections.take(loud).unwrap();
        assert!(is_shed(&crowd[1]) && !is_shed(&first));
        // Accepted too late, it is closed all the same.
        crowd[0].accept();
        assert_eq!(connections.state().known, 0);
        drop((first, crowd, next, more));
        assert_eq!(connections.state().taken(), 0);
    }

    #[test]
    fn whoever_has_the_token_keeps_its_place() {
        let connections = Connections::new(3);
        let address = IpAddr::from([127, 0, 0, 1]);
        let known: Vec<Slot> = (0..2).map(|_| connections.take(address).unwrap()).collect();
        known.iter().for_each(Slot::accept);
        known.iter().for_each(Slot::accept);
        for _ in 0..10 {
            std::mem::forget(connections.take(address).unwrap());
        }
        let (known_now, taken) = {
            let state = connections.state();
            (state.known, state.taken())
        };
        assert_eq!((known_now, taken), (2, 3));
        let last = connections.take(address).unwrap();
        last.accept();
        assert!(connections.take(address).is_none(), "all of them have the token");
        drop(last);
        assert!(connections.take(address).is_some());
        drop(known);
        assert_eq!(connections.state().taken(), 0);
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let parse = |text: &str| home(text.parse().unwrap());
        assert_eq!(parse("2001:db8::1"), parse("2001:db8::ffff:2"));
        assert_ne!(parse("2001:db8::1"), parse("2001:db8:0:1::1"));
        assert_eq!(parse("::ffff:10.0.0.1"), parse("10.0.0.1"));
    }
}
