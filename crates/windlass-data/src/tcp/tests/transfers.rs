//! Transfers in which nothing goes wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use windlass_core::wire::{
    Checks, MIN_STRIPE_BYTES, Mode, SourceId, StripePlan, Swarm, Ticket, TicketFields,
};

use super::proxy::{Harm, Proxy};
use super::world::{
    Image, Landed, Rng, delta_fields, eventually, odd_manifest, offer, payload_file, plain_manifest,
    pull_payloads, quick_pull, sender, source,
};
use crate::shm::Mapping;
use crate::stop::Stop;
use crate::tcp::Body;
use crate::tcp::pull::useful_lanes;

#[test]
fn an_image_of_odd_tensors_arrives_bit_for_bit() {
    let image = Image::new(odd_manifest(), 1);
    let sender = sender();
    for checks in [Checks::BlockSums, Checks::Xxh3] {
        for (streams, stripe_bytes) in [(1, 64 << 10), (6, 100_000), (2, 64 << 20)] {
            let mut fields = image.ticket(sender.local_addr());
            (fields.streams, fields.stripe_bytes, fields.checks) = (streams, stripe_bytes, checks);
            let ticket = Ticket::new(fields).unwrap();
            let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
            let landed = Landed::new(&image.manifest);
            let pulled = landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
            landed.check_whole(&image);
            assert_eq!((pulled.bytes, pulled.bad), (image.manifest.data_bytes(), 0));
            let end = handle.wait(&Stop::after(std::time::Duration::from_secs(5))).unwrap();
            assert!(end.done && end.fault.is_none(), "{end:?}");
            assert_eq!((end.bytes_sent, end.bytes_acked), (pulled.bytes, pulled.bytes));
        }
    }
    eventually("connections leave", || sender.connections().0 == 0);
}

/// None of them may come to an end before all are there.
#[test]
fn all_streams_of_a_pull_are_open_at_the_same_time() {
    const STREAMS: u16 = 6;
    let image = Image::new(plain_manifest(8 << 20), 9);
    let sender = sender();
    let gate = Arc::new(AtomicBool::new(false));
    let harm = Harm::Gate(64 << 10, Arc::clone(&gate));
    let proxy = Proxy::start(sender.local_addr(), Box::new(move |_| (harm.clone(), Harm::None)));
    let mut fields = image.ticket(proxy.address);
    (fields.streams, fields.stripe_bytes) = (STREAMS, 256 << 10);
    let ticket = Ticket::new(fields).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    std::thread::scope(|scope| {
        let pull = scope.spawn(|| landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()));
        // Each has brought as much as it may, and is at its first stripe still.
        eventually("all streams carry bytes", || {
            handle.progress().streams == usize::from(STREAMS)
                && proxy.passed.load(Ordering::Relaxed) == u64::from(STREAMS) * (64 << 10)
        });
        gate.store(true, Ordering::Relaxed);
        pull.join().unwrap().unwrap();
    });
    landed.check_whole(&image);
}

#[test]
fn part_of_an_image_arrives_and_the_rest_is_left_alone() {
    let image = Image::new(odd_manifest(), 2);
    let sender = sender();
    let mut fields = image.ticket(sender.local_addr());
    fields.wanted = [1..3, 5..6, 9..18].into_iter().collect();
    let ticket = Ticket::new(fields).unwrap();
    let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
    landed.check_against(&image);
    assert!(landed.sums.lock().keys().copied().eq(ticket.wanted.iter()));
    let wanted: u64 = ticket
        .wanted
        .iter()
        .flat_map(|b| image.manifest.byte_runs(&image.manifest.cuts().block(b).unwrap()))
        .map(|r| r.end - r.start)
        .sum();
    let written = landed.data().iter().filter(|b| **b != 0).count() as u64;
    assert!(written <= wanted && written > wanted * 9 / 10, "{written} of {wanted}");
}

#[test]
fn two_senders_with_half_of_the_image_each_serve_one_receiver() {
    let image = Image::new(odd_manifest(), 3);
    let senders = [sender(), sender()];
    let blocks = image.manifest.cuts().blocks();
    let halves = [0..blocks / 2, blocks / 2..blocks];
    let sources =
        (0..2).map(|i| source(i, senders[i as usize].local_addr(), halves[i as usize].clone().into()));
    let ticket = Ticket::new(image.ticket_of(sources.collect())).unwrap();
    let handles: Vec<_> =
        (0..2).map(|i| offer(&senders[i as usize], &ticket, i, image.body(Arc::new(())))).collect();
    let landed = Landed::new(&image.manifest);
    landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
    landed.check_whole(&image);
    for handle in handles {
        assert!(handle.progress().bytes_acked > 0, "each sender served its half");
    }
}

#[test]
fn delta_payloads_arrive_in_their_buffers() {
    let sender = sender();
    let mut rng = Rng(4);
    let payloads = [rng.bytes(1), rng.bytes(300_001), rng.bytes(64 << 10)];
    let ticket = Ticket::new(delta_fields(&payloads, sender.local_addr())).unwrap();
    let files = payloads.iter().map(|p| Some(payload_file(p))).collect();
    let _offer = offer(&sender, &ticket, 0, Body::payloads(files));
    let buffers: Vec<_> = payloads.iter().map(|p| Mapping::anonymous(p.len() as u64).unwrap()).collect();
    let pulled = pull_payloads(&ticket, &buffers, &quick_pull()).unwrap();
    for (buffer, payload) in buffers.iter().zip(&payloads) {
        assert!(buffer.bytes(0..payload.len() as u64) == payload);
    }
    assert_eq!(pulled.bytes, payloads.iter().map(|p| p.len() as u64).sum::<u64>());
}

#[test]
fn many_receivers_pull_at_once() {
    let image = Image::new(plain_manifest(2 << 20), 5);
    let sender = sender();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let ticket = Ticket::new(image.ticket(sender.local_addr())).unwrap();
                let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
                let landed = Landed::new(&image.manifest);
                landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
                landed.check_whole(&image);
            });
        }
    });
}

#[test]
fn no_more_streams_are_opened_than_a_source_has_stripes() {
    let at = "127.0.0.1:9".parse().unwrap();
    let lanes = |fields: TicketFields| {
        let ticket = Ticket::new(TicketFields { streams: 4, ..fields }).unwrap();
        let plan = StripePlan::new(&ticket, |_| None).unwrap();
        let lanes = useful_lanes(&ticket, &plan);
        lanes.iter().map(|(index, source)| (*index, source.id.0)).collect::<Vec<_>>()
    };
    let stripe = 4 * MIN_STRIPE_BYTES as usize;
    assert_eq!(lanes(delta_fields(&[vec![1; 100]], at)), [(0, 0)]);
    assert_eq!(lanes(delta_fields(&[vec![1; 2 * stripe]], at)), [(0, 0), (1, 0)]);
    assert_eq!(lanes(delta_fields(&[vec![1; 9 * stripe]], at)).len(), 4);
    // Receivers that pass it on ask a source for little at a time.
    for (receivers, streams) in [(1, 4), (3, 4), (6, 3), (16, 2), (1000, 2)] {
        let swarm = Some(Swarm { rank: 0, receivers, relays: Vec::new() });
        let fields = TicketFields { swarm, ..delta_fields(&[vec![1; 9 * stripe]], at) };
        assert_eq!(lanes(fields).len(), streams, "of {receivers} receivers");
    }
    // One source has one stripe, the other three: streams take turns between sources.
    let mut two = delta_fields(&[vec![1; 10], vec![1; 3 * stripe]], at);
    two.sources.push(source(1, at, (0..10).into()));
    if let Mode::Delta { payloads, .. } = &mut two.mode {
        payloads[1].sources = vec![SourceId(1)];
    }
    assert_eq!(lanes(two), [(0, 0), (1, 1), (3, 1)]);
}
