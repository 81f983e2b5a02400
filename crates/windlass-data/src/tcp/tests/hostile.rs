//! Peers that are strangers, slow, dead or too many.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use windlass_core::error::Kind;
use windlass_core::wire::{
    Dial, Message, Nonce, PullEvent, SourceId, StreamId, Ticket, TicketKey, WireError,
};

use super::proxy::{Hand, Harm, Proxy, read_frame};
use super::world::{
    Image, Landed, Rng, eventually, offer, plain_manifest, quick, quick_pull, random, sender,
};
use crate::stop::Stop;
use crate::tcp::{Crowd, Offer, PullConfig, Sender, SenderConfig, TcpError};

const FIRST: StreamId = StreamId { index: 0, epoch: 0 };

fn is_closed(socket: &mut TcpStream) -> bool {
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut scrap = Vec::new();
    match socket.read_to_end(&mut scrap) {
        Ok(_) => true,
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    }
}

/// A transfer that must work whatever else is going on.
fn a_transfer_works(sender: &Sender) {
    let image = Image::new(plain_manifest(300_000), 1);
    let ticket = Ticket::new(image.ticket(sender.local_addr())).unwrap();
    let _offer = offer(sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
    landed.check_whole(&image);
}

#[test]
fn garbage_on_the_port_is_closed_and_harms_nobody() {
    let sender = sender();
    let mut rng = Rng(1);
    let hello = Message::Ping(1).encode(FIRST).unwrap();
    let pieces: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        rng.bytes(100_000),
        hello,
        b"WDLS".iter().copied().chain(rng.bytes(28)).collect(),
    ];
    for piece in pieces {
        let mut socket = TcpStream::connect(sender.local_addr()).unwrap();
        // The other end may close before everything is written.
        let _ = socket.write_all(&piece);
        assert!(is_closed(&mut socket));
    }
    a_transfer_works(&sender);
    eventually("connections leave", || sender.connections() == (0, 0));
}

#[test]
fn a_request_on_the_data_port_is_told_where_it_is() {
    let sender = sender();
    let mut socket = TcpStream::connect(sender.local_addr()).unwrap();
    socket.write_all(b"GET /get_version HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 421 "), "{head}");
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!(body["error"]["kind"], "unsupported");
    assert!(
        body["error"]["message"].as_str().unwrap().starts_with("this is the data port of an agent"),
        "{body}"
    );
}

#[test]
fn a_wrong_key_and_an_unknown_ticket_are_refused_in_the_same_words() {
    let image = Image::new(plain_manifest(100_000), 2);
    let sender = sender();
    let fields = image.ticket(sender.local_addr());
    let ticket = Ticket::new(fields.clone()).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let mut wrong_key = fields.clone();
    wrong_key.key = TicketKey::new(random());
    let mut unknown = fields;
    unknown.id = windlass_core::wire::TicketId(random());
    let refusals: Vec<_> = [wrong_key, unknown]
        .into_iter()
        .map(|fields| match Hand::dial(&Ticket::new(fields).unwrap(), sender.local_addr(), FIRST) {
            Err(WireError::Refused(refusal)) => refusal,
            other => panic!("{:?}", other.err()),
        })
        .collect();
    assert_eq!(refusals[0], refusals[1]);
    assert_eq!((refusals[0].kind, handle.progress().bytes_sent), (Kind::Denied, 0));
}

#[test]
fn a_pull_with_a_wrong_key_ends_soon_as_a_lost_source() {
    let image = Image::new(plain_manifest(100_000), 3);
    let sender = sender();
    let fields = image.ticket(sender.local_addr());
    let _offer = offer(&sender, &Ticket::new(fields.clone()).unwrap(), 0, image.body(Arc::new(())));
    let mut wrong = fields;
    wrong.key = TicketKey::new(random());
    let landed = Landed::new(&image.manifest);
    let began = Instant::now();
    let ticket = Ticket::new(wrong).unwrap();
    let error = landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5));
    let text = error.to_string();
    assert!(text.contains("every source") && text.contains("key was not proved"), "{text}");
}

#[test]
fn a_replayed_hello_proves_nothing() {
    let image = Image::new(plain_manifest(100_000), 4);
    let sender = sender();
    let ticket = Ticket::new(image.ticket(sender.local_addr())).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    // Records a good handshake, then plays it again.
    let (id, key, source) = (ticket.id, ticket.key.clone(), SourceId(0));
    let (sent, hello) =
        Dial { ticket: id, key, source, stream: FIRST, nonce: Nonce([1; 32]) }.hello().unwrap();
    let mut socket = TcpStream::connect(sender.local_addr()).unwrap();
    socket.write_all(&hello).unwrap();
    let (header, body) = read_frame(&mut socket).unwrap();
    let (_, proof) = sent.challenge(&header, &body).unwrap();
    let mut replay = TcpStream::connect(sender.local_addr()).unwrap();
    replay.write_all(&hello).unwrap();
    let (_, other) = read_frame(&mut replay).unwrap();
    assert_ne!(body, other, "a fresh challenge each time");
    replay.write_all(&proof).unwrap();
    let (header, body) = read_frame(&mut replay).unwrap();
    assert!(matches!(Message::decode(&header, &body).unwrap(), Message::Refuse(r) if r.kind == Kind::Denied));
    assert!(is_closed(&mut replay));
    assert_eq!(handle.progress().streams, 0);
    // The one who has the key is not hindered by it.
    socket.write_all(&proof).unwrap();
    let (header, _) = read_frame(&mut socket).unwrap();
    assert_eq!(header.kind, windlass_core::wire::FrameKind::Accept);
}

#[test]
fn a_handshake_byte_by_byte_ends_at_its_deadline() {
    let config = SenderConfig { handshake_timeout: Duration::from_millis(300), ..quick() };
    let sender = Sender::start(config).unwrap();
    let hello = Dial {
        ticket: windlass_core::wire::TicketId(random()),
        key: TicketKey::new(random()),
        source: SourceId(0),
        stream: FIRST,
        nonce: Nonce(random()),
    };
    let hello = hello.hello().unwrap().1;
    let mut socket = TcpStream::connect(sender.local_addr()).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let began = Instant::now();
    let mut ended = false;
    for byte in hello.iter().cycle().take(500) {
        let mut scrap = [0; 64];
        let dead = match socket.read(&mut scrap) {
            Ok(n) => n == 0,
            Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
        };
        if dead || socket.write_all(&[*byte]).is_err() {
            ended = true;
            break;
        }
    }
    assert!(ended && began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    eventually("the connection leaves", || sender.connections() == (0, 0));
}

#[test]
fn half_open_peers_crowd_out_each_other_and_not_the_work() {
    let config = SenderConfig {
        max_handshakes: 8,
        max_handshakes_per_peer: 6,
        max_connections: 32,
        handshake_timeout: Duration::from_mins(1),
        ..quick()
    };
    let sender = Sender::start(config).unwrap();
    let mut idle: Vec<TcpStream> = Vec::new();
    for _ in 0..40 {
        idle.push(TcpStream::connect(sender.local_addr()).unwrap());
        let (all, unproved) = sender.connections();
        assert!(all <= 32 && unproved <= 16, "{all} {unproved}");
    }
    a_transfer_works(&sender);
    eventually("the oldest are put out", || sender.connections().1 <= 6);
    assert!(is_closed(&mut idle[0]));
    drop(idle);
    eventually("connections leave", || sender.connections() == (0, 0));
}

#[test]
fn beyond_the_limit_connections_are_refused_and_streams_make_do() {
    let image = Image::new(plain_manifest(2 << 20), 5);
    let sender = Sender::start(SenderConfig { max_connections: 2, ..quick() }).unwrap();
    let mut fields = image.ticket(sender.local_addr());
    fields.streams = 6;
    let ticket = Ticket::new(fields).unwrap();
    let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
    landed.check_whole(&image);
}

#[test]
fn a_slow_receiver_delays_nobody() {
    let image = Image::new(plain_manifest(4 << 20), 6);
    let sender = Sender::start(SenderConfig::default()).unwrap();
    let slow = Ticket::new(image.ticket(sender.local_addr())).unwrap();
    let slow_offer = offer(&sender, &slow, 0, image.body(Arc::new(())));
    // Claims and does not read.
    let mut hand = Hand::dial(&slow, sender.local_addr(), FIRST).unwrap();
    let plan =
        windlass_core::wire::StripePlan::new(&slow, |b| super::super::offer::block_bytes(&image.manifest, b));
    hand.claim(plan.unwrap().get(0).unwrap());
    eventually("its stripe is under way", || slow_offer.progress().bytes_sent > 0);
    a_transfer_works(&sender);
    let slow = slow_offer.progress();
    assert_eq!((slow.streams, slow.bytes_acked), (1, 0), "the slow one is as it was");
}

#[test]
fn a_newer_connection_of_a_stream_puts_out_the_older() {
    let image = Image::new(plain_manifest(128 << 10), 7);
    let sender = sender();
    let ticket = Ticket::new(image.ticket(sender.local_addr())).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let mut old = Hand::dial(&ticket, sender.local_addr(), StreamId { index: 1, epoch: 4 }).unwrap();
    let _new = Hand::dial(&ticket, sender.local_addr(), StreamId { index: 1, epoch: 5 }).unwrap();
    assert!(is_closed(&mut old.socket));
    eventually("one is left", || handle.progress().streams == 1);
    for epoch in [3, 5] {
        let again = Hand::dial(&ticket, sender.local_addr(), StreamId { index: 1, epoch });
        assert!(matches!(again.err(), Some(WireError::Refused(r)) if r.kind == Kind::Stale));
    }
    assert_eq!(handle.progress().streams, 1);
}

#[test]
fn silence_is_answered_by_a_ping_and_then_by_closing() {
    let image = Image::new(plain_manifest(128 << 10), 8);
    let sender = sender();
    let ticket = Ticket::new(image.ticket(sender.local_addr())).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let mut hand = Hand::dial(&ticket, sender.local_addr(), FIRST).unwrap();
    // Answered twice, the stream stays; not answered, it goes.
    for _ in 0..2 {
        let PullEvent::Ping(number) = hand.event(&mut Vec::new()).unwrap() else { panic!() };
        hand.send(&Message::Pong(number), FIRST);
    }
    let PullEvent::Ping(_) = hand.event(&mut Vec::new()).unwrap() else { panic!() };
    assert!(hand.event(&mut Vec::new()).is_err());
    eventually("the stream is lost", || handle.progress().streams == 0);
}

#[test]
fn a_flood_of_pings_is_answered_or_ended_in_bounded_memory() {
    let image = Image::new(plain_manifest(128 << 10), 9);
    let sender = sender();
    let ticket = Ticket::new(image.ticket(sender.local_addr())).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let mut hand = Hand::dial(&ticket, sender.local_addr(), FIRST).unwrap();
    let ping = Message::Ping(1).encode(FIRST).unwrap();
    hand.socket.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let flood: Vec<u8> = ping.iter().copied().cycle().take(ping.len() * 5000).collect();
    // Never reads: the sender must stop taking them long before memory is a matter.
    let mut sent = 0;
    while sent < 256 << 20 && hand.socket.write_all(&flood).is_ok() {
        sent += flood.len();
    }
    assert!(sent < 256 << 20, "the sender took {sent} bytes of pings");
    eventually("the stream is ended", || handle.progress().streams == 0);
}

#[test]
fn endpoints_outside_the_allow_list_are_not_contacted() {
    let image = Image::new(plain_manifest(1000), 10);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let ticket = Ticket::new(image.ticket(listener.local_addr().unwrap())).unwrap();
    let landed = Landed::new(&image.manifest);
    let config = PullConfig { allow: &|_| false, ..quick_pull() };
    let error = landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap_err();
    assert!(matches!(error, TcpError::Forbidden { .. }), "{error}");
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_dead_source_is_given_up_and_the_others_serve_what_they_hold() {
    let image = Image::new(plain_manifest(2 << 20), 11);
    let sender = sender();
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let all = image.blocks();
    let sources = |first: windlass_core::ranges::BlockRanges| {
        vec![super::world::source(0, sender.local_addr(), first), super::world::source(1, dead, all.clone())]
    };
    let config = PullConfig { reconnects: 2, ..quick_pull() };
    let ticket = Ticket::new(image.ticket_of(sources(all.clone()))).unwrap();
    let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap();
    landed.check_whole(&image);

    let ticket = Ticket::new(image.ticket_of(sources((0..1).into()))).unwrap();
    let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    let error = landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap_err();
    assert_eq!(error.kind(), Kind::PeerLost, "{error}");
    assert!(error.to_string().contains(&dead.to_string()), "the peer is named: {error}");
}

#[test]
fn a_peer_that_accepts_and_says_nothing_is_given_up_in_time() {
    let image = Image::new(plain_manifest(1000), 12);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ticket = Ticket::new(image.ticket(listener.local_addr().unwrap())).unwrap();
    let landed = Landed::new(&image.manifest);
    let handshake_timeout = Duration::from_millis(200);
    let config = PullConfig { reconnects: 1, handshake_timeout, ..quick_pull() };
    let began = Instant::now();
    let error = landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(3));
    assert!(error.to_string().contains("the handshake took longer"), "{error}");
}

#[test]
fn the_callers_deadline_ends_a_pull() {
    let image = Image::new(plain_manifest(4 << 20), 13);
    let sender = sender();
    let proxy = Proxy::start(sender.local_addr(), Box::new(|_| (Harm::Stall(700_000), Harm::None)));
    let ticket = Ticket::new(image.ticket(proxy.address)).unwrap();
    let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    let began = Instant::now();
    let stop = Stop::after(Duration::from_millis(600));
    let error = landed.pull(&image.manifest, &ticket, &quick_pull(), &stop).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    landed.check_against(&image);
}

#[test]
fn a_stripe_that_trickles_is_overdue() {
    let image = Image::new(plain_manifest(1 << 20), 14);
    let sender = sender();
    let slow = |n| if n == 0 { Harm::Delay(Duration::from_millis(50)) } else { Harm::None };
    let proxy = Proxy::start(sender.local_addr(), Box::new(move |n| (slow(n), Harm::None)));
    let mut fields = image.ticket(proxy.address);
    (fields.streams, fields.stripe_bytes) = (1, 1 << 20);
    let ticket = Ticket::new(fields).unwrap();
    let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    let config = PullConfig { stripe_timeout: Duration::from_millis(300), ..quick_pull() };
    let pulled = landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap();
    assert_eq!(pulled.lost, 1);
    landed.check_whole(&image);
}

#[test]
fn offers_that_do_not_fit_their_ticket_are_refused() {
    let image = Image::new(plain_manifest(100_000), 15);
    let sender = sender();
    let at = sender.local_addr();
    let ticket = Ticket::new(image.ticket(at)).unwrap();
    let refused = |ticket: &Ticket, source, body| {
        sender
            .offer(Offer { ticket: ticket.clone(), source: SourceId(source), body, crowd: Crowd::One })
            .unwrap_err()
    };
    let body = || image.body(Arc::new(()));
    assert!(matches!(refused(&ticket, 9, body()), TcpError::NotASource { source_id: 9, .. }));
    let payloads = crate::tcp::Body::payloads(vec![None]);
    assert!(matches!(refused(&ticket, 0, payloads), TcpError::Mode { .. }));
    let mut other = image.ticket(at);
    other.layout_hash.0[0] ^= 1;
    assert!(matches!(refused(&Ticket::new(other).unwrap(), 0, body()), TcpError::Layout { .. }));
    let mut short = image.clone();
    short.file = super::world::payload_file(&[0; 100]);
    assert!(matches!(refused(&ticket, 0, short.body(Arc::new(()))), TcpError::Size { have: 100, .. }));
    let delta = Ticket::new(super::world::delta_fields(&[vec![1; 10]], at)).unwrap();
    let missing = crate::tcp::Body::payloads(vec![None]);
    assert!(matches!(refused(&delta, 0, missing), TcpError::PayloadMissing { payload: 0, .. }));
    assert!(matches!(refused(&delta, 0, body()), TcpError::Mode { .. }));
    let _offer = offer(&sender, &ticket, 0, body());
    assert!(matches!(refused(&ticket, 0, body()), TcpError::OfferedTwice { .. }));
}

#[test]
fn ports_are_tried_in_order_and_a_taken_range_is_named() {
    let first = sender();
    let port = first.local_addr().port();
    let last = port.saturating_add(50);
    let second = Sender::start(SenderConfig { ports: port..=last, ..quick() }).unwrap();
    assert!((port + 1..=last).contains(&second.local_addr().port()));
    let error = Sender::start(SenderConfig { ports: port..=port, ..quick() }).unwrap_err();
    assert!(
        matches!(error, TcpError::Bind { .. }) && error.to_string().contains(&port.to_string()),
        "{error}"
    );
}
