//! Receivers that pass on what they have.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use windlass_core::error::Kind;
use windlass_core::wire::{
    Relay, RelayOffer, SourceId, Swarm, Ticket, TicketFields, TicketId, TicketKey, neighbours,
};

use super::world::{DATA_START, Image, Landed, eventually, plain_manifest, quick_pull, random, sender};
use crate::shm::{Access, Mapping};
use crate::stop::Stop;
use crate::tcp::offer::Served;
use crate::tcp::{Board, Crowd, Offer, OfferHandle, PullConfig, Pulled, Relays, Sender, TcpError};

/// Who relays: what an agent knows.
#[derive(Default)]
struct Office {
    relays: Mutex<Vec<(u32, Relay)>>,
    changed: Condvar,
}

impl Office {
    fn enter(&self, rank: u32, relay: Relay) {
        self.relays.lock().push((rank, relay));
        self.changed.notify_all();
    }
}

/// What one receiver learns of it.
struct Window<'a> {
    office: &'a Office,
    rank: u32,
    receivers: u32,
    seen: AtomicUsize,
}

impl Relays for Window<'_> {
    fn wait(&self, _: u32, stop: &Stop) -> Option<(u32, Vec<Relay>)> {
        let near = neighbours(self.rank, self.receivers, 8);
        let mut relays = self.office.relays.lock();
        loop {
            let found: Vec<Relay> =
                relays.iter().filter(|(rank, _)| near.contains(rank)).map(|(_, r)| r.clone()).collect();
            if found.len() > self.seen.swap(found.len(), Ordering::Relaxed) {
                return Some((self.receivers, found));
            }
            if stop.is_set() {
                return None;
            }
            self.office.changed.wait_for(&mut relays, stop.nap());
        }
    }
}

/// A publisher and its version.
struct Origin {
    image: Image,
    sender: Sender,
    given: Arc<Board>,
    office: Office,
    receivers: u32,
}

/// A receiver with an image of its own, from which it relays.
struct Peer {
    landed: Landed,
    file: Image,
    sender: Sender,
    board: Arc<Board>,
}

impl Peer {
    fn new(origin: &Origin) -> Peer {
        // Its image is a file of its own that its sender reads and its pull writes.
        let mut file = Image::new(Arc::clone(&origin.image.manifest), 0);
        file.sums = Arc::clone(&origin.image.sums);
        let len = DATA_START + file.manifest.data_bytes();
        let mapping = Mapping::map(&file.file, len, Access::Write).unwrap();
        let mut landed = Landed::new(&origin.image.manifest);
        landed.mapping = mapping;
        landed.proof = Some(Arc::clone(&origin.image.sums));
        Peer { landed, file, sender: sender(), board: Arc::default() }
    }
}

impl Origin {
    fn new(receivers: u32, bytes: u64) -> Origin {
        let image = Image::new(plain_manifest(bytes), 11);
        Origin { image, sender: sender(), given: Arc::default(), office: Office::default(), receivers }
    }

    fn ticket(&self, rank: u32) -> Ticket {
        let swarm = Swarm { rank, receivers: self.receivers, relays: Vec::new() };
        let fields = self.image.ticket(self.sender.local_addr());
        let ticket = Ticket::new(TicketFields { swarm: Some(swarm), streams: 2, ..fields }).unwrap();
        let crowd = Crowd::Among(Arc::clone(&self.given));
        let body = self.image.body(Arc::new(()));
        self.sender.offer(Offer { ticket: ticket.clone(), source: SourceId(0), body, crowd }).unwrap();
        ticket
    }

    /// Puts up what a receiver has, or will have.
    fn relay(&self, rank: u32, ticket: &Ticket, peer: &Peer) -> OfferHandle {
        let (id, key) = (TicketId(random()), TicketKey::new(random()));
        let fields = TicketFields { id, key: key.clone(), ..(**ticket).clone() };
        let crowd = Crowd::Any(Arc::clone(&peer.board));
        let body = peer.file.body(Arc::new(()));
        let (ticket, source) = (Ticket::new(fields).unwrap(), SourceId(100 + rank));
        let handle = peer.sender.offer(Offer { ticket, source, body, crowd }).unwrap();
        let endpoint = peer.sender.local_addr().to_string().parse().unwrap();
        let offer = RelayOffer { endpoint, tls: false, id, key };
        self.office.enter(rank, Relay { id: source, name: format!("host-{rank}"), offer });
        handle
    }

    fn pull(&self, rank: u32, ticket: &Ticket, peer: &Peer, stop: &Stop) -> Result<Pulled, TcpError> {
        let window =
            Window { office: &self.office, rank, receivers: self.receivers, seen: AtomicUsize::new(0) };
        let config = PullConfig { board: Some(&peer.board), relays: Some(&window), ..quick_pull() };
        peer.landed.pull(&self.image.manifest, ticket, &config, stop)
    }
}

#[test]
fn receivers_that_relay_get_the_image_while_its_publisher_sends_it_about_once() {
    let origin = Origin::new(6, 8 << 20);
    let together = Barrier::new(6);
    let mut handles = Vec::new();
    thread::scope(|scope| {
        let (origin, together) = (&origin, &together);
        let receivers: Vec<_> = (0..6)
            .map(|rank| {
                scope.spawn(move || {
                    let (peer, ticket) = (Peer::new(origin), origin.ticket(rank));
                    let handle = origin.relay(rank, &ticket, &peer);
                    together.wait();
                    let pulled = origin.pull(rank, &ticket, &peer, &Stop::never()).unwrap();
                    assert_eq!(pulled.bytes, origin.image.data.len() as u64);
                    peer.landed.check_whole(&origin.image);
                    // Everybody may still be asking it.
                    together.wait();
                    handle.progress().bytes_sent
                })
            })
            .collect();
        handles.extend(receivers.into_iter().map(|r| r.join().unwrap()));
    });
    let relayed: u64 = handles.iter().sum();
    let all = 6 * origin.image.data.len() as u64;
    assert!(relayed * 4 > all, "{relayed} of {all} bytes came from relays");
}

#[test]
fn a_relay_that_lies_is_left_and_nothing_wrong_is_kept() {
    let origin = Origin::new(2, 4 << 20);
    let liar = Peer::new(&origin);
    let ticket = origin.ticket(0);
    // It says that it has everything, with the right sums, and sends zeros.
    liar.file.file.write_all_at(&vec![0; origin.image.data.len()], DATA_START).unwrap();
    (0..64).for_each(|stripe| liar.board.add(stripe));
    let handle = origin.relay(0, &ticket, &liar);
    let (mut peer, ticket) = (Peer::new(&origin), origin.ticket(1));
    // The publisher is not to be done before the liar is asked.
    let asked = handle.clone();
    peer.landed.gate =
        Some(Box::new(move || eventually("the liar is asked", || asked.progress().bytes_sent > 0)));
    let pulled = origin.pull(1, &ticket, &peer, &Stop::never()).unwrap();
    peer.landed.check_whole(&origin.image);
    assert!((1..=2).contains(&pulled.bad), "it was believed {} times", pulled.bad);
    assert!(handle.progress().bytes_sent > 0);
}

#[test]
fn a_relay_that_ends_costs_what_was_under_way_and_the_publisher_gives_the_rest() {
    let origin = Origin::new(2, 8 << 20);
    let (first, ticket) = (Peer::new(&origin), origin.ticket(0));
    let handle = origin.relay(0, &ticket, &first);
    origin.pull(0, &ticket, &first, &Stop::never()).unwrap();
    let (second, ticket) = (Peer::new(&origin), origin.ticket(1));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while handle.progress().bytes_acked == 0 && !over.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            handle.revoke("the image is about to change", Duration::ZERO);
        });
        origin.pull(1, &ticket, &second, &Stop::never()).unwrap();
        over.store(true, Ordering::Relaxed);
    });
    second.landed.check_whole(&origin.image);
    assert!(handle.progress().free);
    assert_eq!(handle.progress().fault.unwrap().kind, Kind::Stale);
}

#[test]
fn what_a_relay_does_not_hold_it_does_not_send() {
    let origin = Origin::new(2, 2 << 20);
    let empty = Peer::new(&origin);
    let ticket = origin.ticket(0);
    let handle = origin.relay(0, &ticket, &empty);
    let (peer, ticket) = (Peer::new(&origin), origin.ticket(1));
    origin.pull(1, &ticket, &peer, &Stop::never()).unwrap();
    peer.landed.check_whole(&origin.image);
    assert_eq!(handle.progress().bytes_sent, 0);
}

#[test]
fn an_origin_tells_its_news_once_and_again_after_a_connection_was_lost() {
    let image = Image::new(plain_manifest(1 << 20), 3);
    let ticket = Ticket::new(image.ticket("127.0.0.1:1".parse().unwrap())).unwrap();
    let served = |crowd| {
        let (ticket, body) = (ticket.clone(), image.body(Arc::new(())));
        Served::new(Offer { ticket, source: SourceId(0), body, crowd }).unwrap()
    };
    let board = Arc::new(Board::default());
    let origin = served(Crowd::Among(Arc::clone(&board)));
    let relay = served(Crowd::Any(Arc::clone(&board)));
    [0, 1, 5].into_iter().for_each(|stripe| board.add(stripe));
    let (mut one, mut other) = (0, 0);
    assert_eq!(origin.news(&mut one, false), [0..2, 5..6]);
    assert!(origin.news(&mut other, false).is_empty(), "the same receiver, by another stream");
    origin.leave(1);
    assert_eq!(
        origin.news(&mut other, false),
        [0..2, 5..6],
        "what the lost connection told may not have arrived"
    );
    // Every connection of a relay leads to another receiver.
    assert_eq!(relay.news(&mut one, true), [0..2, 5..6]);
    assert_eq!(relay.news(&mut other, true), [0..2, 5..6]);
    assert!(relay.news(&mut other, true).is_empty());
}
