//! When the memory behind an offer is given back (W-4).

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use windlass_core::error::Kind;
use windlass_core::wire::{PullEvent, StreamId, StripePlan, Ticket, Verdict, WireError};

use super::proxy::{Hand, Harm, Proxy};
use super::world::{DATA_START, Image, Landed, eventually, offer, plain_manifest, quick, quick_pull, sender};
use crate::stop::Stop;
use crate::tcp::{OfferHandle, Sender, SenderConfig, TcpError};

const FIRST: StreamId = StreamId { index: 0, epoch: 0 };

fn plan(image: &Image, ticket: &Ticket) -> StripePlan {
    StripePlan::new(ticket, |b| super::super::offer::block_bytes(&image.manifest, b)).unwrap()
}

fn one_offer(sender: &Sender, image: &Image) -> (Ticket, OfferHandle, std::sync::Weak<()>) {
    let ticket = Ticket::new(image.ticket(sender.local_addr())).unwrap();
    let hold = Arc::new(());
    let weak = Arc::downgrade(&hold);
    let handle = offer(sender, &ticket, 0, image.body(hold));
    (ticket, handle, weak)
}

#[test]
fn the_hold_outlives_sendfile_and_ends_with_the_acknowledgement() {
    let image = Image::new(plain_manifest(128 << 10), 1);
    let sender = sender();
    let (ticket, handle, hold) = one_offer(&sender, &image);
    let stripe = plan(&image, &ticket).get(0).unwrap();
    let mut hand = Hand::dial(&ticket, sender.local_addr(), FIRST).unwrap();
    hand.claim(stripe);
    eventually("the kernel has all bytes", || handle.progress().bytes_sent == u64::from(stripe.bytes));
    std::thread::scope(|scope| {
        let revoked = scope.spawn(|| handle.revoke("the slot is needed", Duration::from_mins(1)));
        // The peer has everything but has not said so: neither the kernel's word nor the revocation ends it.
        let mut payload = Vec::new();
        let event = hand.event(&mut payload).unwrap();
        assert!(matches!(event, PullEvent::StripeEnd { .. }), "{event:?}");
        eventually("the offer is over", || handle.progress().fault.is_some());
        assert!(hold.upgrade().is_some() && !revoked.is_finished() && !handle.progress().free);
        assert!(payload == image.data);
        let ack = hand.pull.ack(stripe.id, Verdict::Good).unwrap();
        std::io::Write::write_all(&mut hand.socket, &ack).unwrap();
        revoked.join().unwrap();
        assert!(hold.upgrade().is_none());
        let PullEvent::Fault(fault) = hand.event(&mut payload).unwrap() else { panic!() };
        assert_eq!((fault.kind, fault.message.as_str()), (Kind::Stale, "the slot is needed"));
    });
}

/// What the kernel has taken and nobody has read yet is still the file's own pages: a copy would not change with it.
#[test]
fn bytes_go_out_of_the_pages_of_the_file_and_not_out_of_a_copy() {
    let image = Image::new(plain_manifest(128 << 10), 1);
    let sender = sender();
    let (ticket, handle, _hold) = one_offer(&sender, &image);
    let stripe = plan(&image, &ticket).get(0).unwrap();
    let mut hand = Hand::dial(&ticket, sender.local_addr(), FIRST).unwrap();
    hand.claim(stripe);
    eventually("the kernel has all bytes", || handle.progress().bytes_sent == u64::from(stripe.bytes));
    image.file.write_all_at(&vec![0xee; image.data.len()], DATA_START).unwrap();
    let mut payload = Vec::new();
    hand.event(&mut payload).unwrap();
    let changed = payload.iter().zip(&image.data).filter(|(sent, was)| sent != was).count();
    assert!(changed > payload.len() / 2, "{changed} of {} bytes changed with the file", payload.len());
}

#[test]
fn a_revoked_offer_is_reset_after_its_grace_and_says_why_to_whoever_comes_back() {
    let image = Image::new(plain_manifest(128 << 10), 2);
    let sender = sender();
    let (ticket, handle, hold) = one_offer(&sender, &image);
    let mut hand = Hand::dial(&ticket, sender.local_addr(), FIRST).unwrap();
    hand.claim(plan(&image, &ticket).get(0).unwrap());
    eventually("bytes are under way", || handle.progress().bytes_sent > 0);
    let (began, grace) = (Instant::now(), Duration::from_millis(100));
    handle.revoke("lapped", grace);
    assert!(began.elapsed() >= grace && began.elapsed() < Duration::from_secs(5));
    assert!(hold.upgrade().is_none(), "nobody holds the memory when revoke returns");
    // Not an orderly end: the kernel has dropped what it had.
    let error = loop {
        if let Err(e) = hand.event(&mut Vec::new()) {
            break e;
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let again = StreamId { index: 0, epoch: 1 };
    let Err(WireError::Peer(fault)) = Hand::dial(&ticket, sender.local_addr(), again) else { panic!() };
    assert_eq!((fault.kind, fault.message.as_str()), (Kind::Stale, "lapped"));
}

#[test]
fn a_slot_rewritten_behind_a_slow_reader_is_never_accepted_and_ends_as_stale() {
    let image = Image::new(plain_manifest(8 << 20), 3);
    let sender = sender();
    let gate = Arc::new(AtomicBool::new(false));
    let harm = Harm::Gate(1 << 20, Arc::clone(&gate));
    let proxy = Proxy::start(
        sender.local_addr(),
        Box::new(move |n| (if n == 0 { harm.clone() } else { Harm::None }, Harm::None)),
    );
    let mut fields = image.ticket(proxy.address);
    (fields.streams, fields.stripe_bytes) = (1, 2 << 20);
    let ticket = Ticket::new(fields).unwrap();
    let hold = Arc::new(());
    let weak = Arc::downgrade(&hold);
    let handle = offer(&sender, &ticket, 0, image.body(hold));
    let landed = Landed::new(&image.manifest);
    let error = std::thread::scope(|scope| {
        let pull = scope.spawn(|| landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()));
        eventually("the reader is stuck", || proxy.passed.load(Ordering::Relaxed) >= 1 << 20);
        eventually("more is under way", || handle.progress().bytes_sent > (1 << 20) + 1000);
        handle.revoke("lapped by the trainer", Duration::ZERO);
        assert!(weak.upgrade().is_none());
        image.file.write_all_at(&vec![0xee; image.data.len()], DATA_START).unwrap();
        gate.store(true, Ordering::Relaxed);
        pull.join().unwrap().unwrap_err()
    });
    assert_eq!(error.kind(), Kind::Stale, "{error}");
    assert!(error.to_string().contains("lapped by the trainer"), "{error}");
    landed.check_against(&image);
}

#[test]
fn what_was_acknowledged_before_a_revocation_is_kept() {
    let image = Image::new(plain_manifest(4 << 20), 4);
    let sender = sender();
    let proxy =
        Proxy::start(sender.local_addr(), Box::new(|_| (Harm::Delay(Duration::from_millis(4)), Harm::None)));
    let ticket = Ticket::new(image.ticket(proxy.address)).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    let error = std::thread::scope(|scope| {
        let pull = scope.spawn(|| landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()));
        eventually("some stripes are acknowledged", || handle.progress().bytes_acked > 500_000);
        handle.revoke("lapped", Duration::from_millis(50));
        pull.join().unwrap().unwrap_err()
    });
    assert_eq!(error.kind(), Kind::Stale, "{error}");
    assert!(landed.sums.lock().len() >= 4);
    landed.check_against(&image);
}

#[test]
fn a_dead_receiver_frees_its_offer() {
    let image = Image::new(plain_manifest(1 << 20), 5);
    let config = SenderConfig { abandoned_after: Duration::from_millis(300), ..quick() };
    let sender = Sender::start(config).unwrap();
    let (ticket, handle, hold) = one_offer(&sender, &image);
    let mut hand = Hand::dial(&ticket, sender.local_addr(), FIRST).unwrap();
    hand.claim(plan(&image, &ticket).get(0).unwrap());
    eventually("bytes are under way", || handle.progress().bytes_sent > 0);
    drop(hand);
    eventually("the memory is free", || hold.upgrade().is_none());
    assert_eq!(handle.progress().fault.map(|f| f.kind), Some(Kind::Stale));
    // One that never comes at all.
    let (_, _, hold) = one_offer(&sender, &image);
    eventually("the memory is free", || hold.upgrade().is_none());
}

#[test]
fn a_receiver_that_stops_reading_is_lost_and_frees_its_offer() {
    let image = Image::new(plain_manifest(64 << 20), 6);
    let config = SenderConfig { abandoned_after: Duration::from_millis(100), ..quick() };
    let sender = Sender::start(config).unwrap();
    let mut fields = image.ticket(sender.local_addr());
    fields.stripe_bytes = 64 << 20;
    let ticket = Ticket::new(fields).unwrap();
    let hold = Arc::new(());
    let weak = Arc::downgrade(&hold);
    let handle = offer(&sender, &ticket, 0, image.body(hold));
    let mut hand = Hand::dial(&ticket, sender.local_addr(), FIRST).unwrap();
    hand.claim(plan(&image, &ticket).get(0).unwrap());
    eventually("the memory is free", || weak.upgrade().is_none());
    let sent = handle.progress().bytes_sent;
    assert!(sent > 0 && sent < image.data.len() as u64, "{sent} bytes went though nobody read them");
}

#[test]
fn an_expired_ticket_is_not_served() {
    let image = Image::new(plain_manifest(128 << 10), 7);
    let sender = sender();
    let mut fields = image.ticket(sender.local_addr());
    (fields.deadline.timeout_ms, fields.deadline.expires_unix_ms) = (5_000, super::world::unix_ms() + 50);
    let ticket = Ticket::new(fields).unwrap();
    let hold = Arc::new(());
    let weak = Arc::downgrade(&hold);
    let handle = offer(&sender, &ticket, 0, image.body(hold));
    eventually("the memory is free", || weak.upgrade().is_none());
    assert_eq!(handle.progress().fault.map(|f| f.kind), Some(Kind::Timeout));
    let landed = Landed::new(&image.manifest);
    let config = crate::tcp::PullConfig { reconnects: 1, ..quick_pull() };
    let error = landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap_err();
    assert!(matches!(error, TcpError::Transfer { .. }) && error.to_string().contains("expired"), "{error}");
    assert!(landed.sums.lock().is_empty());
}

#[test]
fn a_receiver_that_gives_up_ends_the_offer_at_once() {
    let image = Image::new(plain_manifest(8 << 20), 8);
    let sender = sender();
    let proxy =
        Proxy::start(sender.local_addr(), Box::new(|_| (Harm::Delay(Duration::from_millis(5)), Harm::None)));
    let ticket = Ticket::new(image.ticket(proxy.address)).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    let stop = Stop::never();
    std::thread::scope(|scope| {
        let pull = scope.spawn(|| landed.pull(&image.manifest, &ticket, &quick_pull(), &stop));
        eventually("the transfer runs", || handle.progress().bytes_acked > 0);
        stop.set();
        let error = pull.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), Kind::Cancelled, "{error}");
    });
    eventually("the offer is free", || handle.progress().free);
    assert_eq!(handle.progress().fault.map(|f| f.kind), Some(Kind::Cancelled));
}

#[test]
fn shutdown_tells_receivers_and_leaves_no_connection() {
    let image = Image::new(plain_manifest(1 << 20), 9);
    let sender = sender();
    let (ticket, handle, hold) = one_offer(&sender, &image);
    let mut hand = Hand::dial(&ticket, sender.local_addr(), FIRST).unwrap();
    hand.ping(5);
    sender.shutdown(Duration::from_secs(5));
    assert!(hold.upgrade().is_none());
    assert_eq!(handle.progress().fault.map(|f| f.kind), Some(Kind::PeerLost));
    let mut event = hand.event(&mut Vec::new()).unwrap();
    // The ping may have been answered before, or not at all.
    if matches!(event, PullEvent::Pong) {
        event = hand.event(&mut Vec::new()).unwrap();
    }
    assert!(matches!(event, PullEvent::Fault(ref f) if f.kind == Kind::PeerLost), "{event:?}");
    assert!(hand.event(&mut Vec::new()).is_err());
}

#[test]
fn bytes_rewritten_in_flight_fail_their_sums() {
    // Somebody breaks the rule and writes under a live offer: the sums are of what was sealed.
    let image = Image::new(plain_manifest(8 << 20), 10);
    let sender = sender();
    let gate = Arc::new(AtomicBool::new(false));
    let harm = Harm::Gate(1 << 20, Arc::clone(&gate));
    let proxy = Proxy::start(sender.local_addr(), Box::new(move |_| (harm.clone(), Harm::None)));
    let mut fields = image.ticket(proxy.address);
    (fields.streams, fields.stripe_bytes) = (1, 2 << 20);
    let ticket = Ticket::new(fields).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    let error = std::thread::scope(|scope| {
        let pull = scope.spawn(|| landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()));
        eventually("more is under way than has passed", || handle.progress().bytes_sent > (1 << 20) + 1000);
        image.file.write_all_at(&vec![0xee; image.data.len()], DATA_START).unwrap();
        gate.store(true, Ordering::Relaxed);
        pull.join().unwrap().unwrap_err()
    });
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
    assert!(handle.progress().bad > 0, "the sender was told");
    assert!(landed.sums.lock().is_empty());
}
