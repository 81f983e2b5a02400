//! Who may stay connected.
//!
//! Owns: the places of a service's connections. A connection is a stranger's until a request with the token was accepted on
//! it. When all places are taken, a new connection gets that of a stranger: the oldest one of the address that has the most
//! of them, so that no address can push out another. Only if everybody who is connected has the token, the new connection is
//! closed. Must not: know what is said on a connection.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// How often it is said that connections were closed.
const SAY_AGAIN: Duration = Duration::from_secs(10);

/// The places of a service.
#[derive(Debug)]
pub(super) struct Places {
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    known: usize,
    /// By address, oldest first.
    strangers: HashMap<IpAddr, BTreeMap<u64, Arc<Notify>>>,
    /// Closed since it was said, and when that was.
    closed: u64,
    said: Option<Instant>,
}

impl State {
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

impl Places {
    pub(super) fn new(most: usize) -> Arc<Places> {
        Arc::new(Places { most, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes a connection of a stranger, if there is one.
    pub(super) fn shed(&self) {
        self.state().shed();
    }

    /// A place for a connection from `address`; `None` if everybody who is here has the token.
    pub(super) fn take(self: &Arc<Places>, address: IpAddr) -> Option<Place> {
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
        Some(Place { places: Arc::clone(self), home, number, shed, known: AtomicBool::new(false) })
    }
}

/// Whose an address is: hosts have whole networks of IPv6.
fn home(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// The place of one connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    home: IpAddr,
    number: u64,
    shed: Arc<Notify>,
    known: AtomicBool,
}

impl Place {
    /// A request with the token was accepted here.
    pub(super) fn accept(&self) {
        let mut state = self.places.state();
        // One that is being closed, or known already, is not there.
        if state.remove(self.home, self.number) {
            state.known += 1;
            self.known.store(true, Ordering::Relaxed);
        }
    }

    /// Returns when the place is wanted for somebody else.
    pub(super) async fn shed(&self) {
        self.shed.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.places.state();
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

    fn is_shed(place: &Place) -> bool {
        place.places.state().strangers.get(&place.home).is_none_or(|of| !of.contains_key(&place.number))
    }

    #[test]
    fn the_oldest_stranger_of_the_address_with_the_most_makes_room() {
        let places = Places::new(5);
        let [loud, quiet]: [IpAddr; 2] = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        let first = places.take(quiet).unwrap();
        let crowd: Vec<Place> = (0..4).map(|_| places.take(loud).unwrap()).collect();
        let next = places.take(quiet).unwrap();
        assert!(is_shed(&crowd[0]) && !is_shed(&crowd[1]) && !is_shed(&first) && !is_shed(&next));
        let more = places.take(loud).unwrap();
        assert!(is_shed(&crowd[1]) && !is_shed(&first));
        // Accepted too late, it is closed all the same.
        crowd[0].accept();
        assert_eq!(places.state().known, 0);
        drop((first, crowd, next, more));
        assert_eq!(places.state().taken(), 0);
    }

    #[test]
    fn whoever_has_the_token_keeps_its_place() {
        let places = Places::new(3);
        let address = IpAddr::from([127, 0, 0, 1]);
        let known: Vec<Place> = (0..2).map(|_| places.take(address).unwrap()).collect();
        known.iter().for_each(Place::accept);
        known.iter().for_each(Place::accept);
        for _ in 0..10 {
            std::mem::forget(places.take(address).unwrap());
        }
        let (known_now, taken) = {
            let state = places.state();
            (state.known, state.taken())
        };
        assert_eq!((known_now, taken), (2, 3));
        let last = places.take(address).unwrap();
        last.accept();
        assert!(places.take(address).is_none(), "all of them have the token");
        drop(last);
        assert!(places.take(address).is_some());
        drop(known);
        assert_eq!(places.state().taken(), 0);
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let parse = |text: &str| home(text.parse().unwrap());
        assert_eq!(parse("2001:db8::1"), parse("2001:db8::ffff:2"));
        assert_ne!(parse("2001:db8::1"), parse("2001:db8:0:1::1"));
        assert_eq!(parse("::ffff:10.0.0.1"), parse("10.0.0.1"));
    }
}
