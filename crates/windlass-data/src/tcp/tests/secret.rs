//! Transfers inside TLS: what arrives, who is refused, and what others on the wire can see.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use windlass_core::error::Kind;
use windlass_core::wire::{Checks, Ticket, TicketFields, TicketKey};

use super::authority::{Authority, store};
use super::proxy::{Harm, Proxy};
use super::world::{
    Image, Landed, Rng, delta_fields, eventually, odd_manifest, offer, payload_file, plain_manifest,
    pull_payloads, quick, quick_pull, random,
};
use crate::shm::Mapping;
use crate::stop::Stop;
use crate::tcp::{Body, PullConfig, Sender, SenderConfig, TcpError};
use crate::tls::{Certificate, Privacy, TlsError, Trust};

/// A certificate that ends up in memory.
pub(super) fn certificate(issued: &(String, String)) -> Certificate {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let (certificate, key) = store(dir.path(), "server", issued);
    Certificate::read(&certificate, &key).unwrap()
}

pub(super) fn trust(authority: &Authority) -> Privacy {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let trust = Trust::of_file(&authority.file(dir.path(), "ca.pem")).unwrap();
    Privacy { trust: Some(trust), required: true }
}

/// A sender with a certificate for this host, and how to trust it.
fn secret() -> (Sender, Privacy) {
    let authority = Authority::new();
    let tls = Some(certificate(&authority.issue(&["127.0.0.1"])));
    (Sender::start(SenderConfig { tls, ..quick() }).unwrap(), trust(&authority))
}

/// Says of every source that it is inside TLS.
pub(super) fn inside(mut fields: TicketFields) -> TicketFields {
    fields.sources.iter_mut().for_each(|s| s.tls = true);
    fields
}

/// What a pull of a small image comes to.
fn attempt(sender: &Sender, privacy: &Privacy, change: impl Fn(TicketFields) -> TicketFields) -> TcpError {
    let image = Image::new(plain_manifest(200_000), 7);
    let offered = Ticket::new(inside(image.ticket(sender.local_addr()))).unwrap();
    let handle = offer(sender, &offered, 0, image.body(Arc::new(())));
    let mut fields = inside(image.ticket(sender.local_addr()));
    (fields.id, fields.key) = (offered.id, offered.key.clone());
    let landed = Landed::new(&image.manifest);
    let config = PullConfig { privacy, reconnects: 2, ..quick_pull() };
    let ticket = Ticket::new(change(fields)).unwrap();
    let began = Instant::now();
    let error = landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!((handle.progress().bytes_sent, landed.sums.lock().len()), (0, 0));
    error
}

#[test]
fn images_and_deltas_arrive_inside_tls_bit_for_bit() {
    let image = Image::new(odd_manifest(), 1);
    let (sender, privacy) = secret();
    let config = PullConfig { privacy: &privacy, ..quick_pull() };
    for (checks, streams, stripe_bytes) in
        [(Checks::BlockSums, 1, 64 << 10), (Checks::Xxh3, 4, 100_000), (Checks::BlockSums, 2, 64 << 20)]
    {
        let mut fields = inside(image.ticket(sender.local_addr()));
        (fields.streams, fields.stripe_bytes, fields.checks) = (streams, stripe_bytes, checks);
        let ticket = Ticket::new(fields).unwrap();
        let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
        let landed = Landed::new(&image.manifest);
        let pulled = landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap();
        landed.check_whole(&image);
        let end = handle.wait(&Stop::after(Duration::from_secs(5))).unwrap();
        assert!(end.done && end.fault.is_none(), "{end:?}");
        assert_eq!((end.bytes_sent, end.bytes_acked), (pulled.bytes, pulled.bytes));
    }
    let payloads = [Rng(4).bytes(1), Rng(5).bytes(700_001)];
    let ticket = Ticket::new(inside(delta_fields(&payloads, sender.local_addr()))).unwrap();
    let files = payloads.iter().map(|p| Some(payload_file(p))).collect();
    let _offer = offer(&sender, &ticket, 0, Body::payloads(files));
    let buffers: Vec<_> = payloads.iter().map(|p| Mapping::anonymous(p.len() as u64).unwrap()).collect();
    pull_payloads(&ticket, &buffers, &config).unwrap();
    for (buffer, payload) in buffers.iter().zip(&payloads) {
        assert!(buffer.bytes(0..payload.len() as u64) == payload);
    }
    eventually("connections leave", || sender.connections().0 == 0);
}

/// Passes bytes on in both directions, and keeps them.
fn listen_in(upstream: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, heard) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let keep = Arc::clone(&heard);
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = TcpStream::connect(upstream) else { return };
            for (mut from, mut to) in
                [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)]
            {
                let keep = Arc::clone(&keep);
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 1 << 16];
                    while let Ok(n @ 1..) = from.read(&mut buffer) {
                        keep.lock().extend(&buffer[..n]);
                        if to.write_all(&buffer[..n]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    (address, heard)
}

#[test]
fn nobody_on_the_wire_can_read_weights_or_tickets_inside_tls() {
    let image = Image::new(plain_manifest(300_000), 2);
    let (sender, privacy) = secret();
    let plain = super::world::sender();
    let seen = |sender: &Sender, tls: bool| {
        let (address, heard) = listen_in(sender.local_addr());
        let fields = image.ticket(address);
        let ticket = Ticket::new(if tls { inside(fields) } else { fields }).unwrap();
        let _offer = offer(sender, &ticket, 0, image.body(Arc::new(())));
        let landed = Landed::new(&image.manifest);
        let config = if tls { PullConfig { privacy: &privacy, ..quick_pull() } } else { quick_pull() };
        landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap();
        landed.check_whole(&image);
        let heard = heard.lock();
        let has = |bytes: &[u8]| heard.windows(bytes.len()).any(|w| w == bytes);
        (has(&image.data[1000..1032]), has(&ticket.id.0))
    };
    // That the ear is a good one is shown by what it hears without TLS.
    assert_eq!(seen(&plain, false), (true, true));
    assert_eq!(seen(&sender, true), (false, false));
}

#[test]
fn certificates_that_are_not_right_end_the_transfer_at_once_and_say_why() {
    let authority = Authority::new();
    let cases = [
        (authority.issue(&["127.0.0.1"]), trust(&Authority::new()), "not issued by anybody who is trusted"),
        (authority.issue(&["other.example"]), trust(&authority), "it is for other hosts"),
        (authority.issue_expired(&["127.0.0.1"]), trust(&authority), "it has expired"),
    ];
    for (issued, privacy, why) in cases {
        let sender = Sender::start(SenderConfig { tls: Some(certificate(&issued)), ..quick() }).unwrap();
        let error = attempt(&sender, &privacy, |fields| fields);
        let text = error.to_string();
        assert!(text.contains(why) && text.contains("127.0.0.1"), "{text}");
        assert_eq!(error.kind(), Kind::Denied, "{text}");
    }
}

#[test]
fn a_chain_is_sent_with_the_certificate() {
    let root = Authority::new();
    let middle = root.subordinate();
    let (leaf, key) = middle.issue(&["127.0.0.1"]);
    let alone = certificate(&(leaf.clone(), key.clone()));
    let chain = certificate(&(format!("{leaf}{}", middle.pem()), key));
    let privacy = trust(&root);
    let image = Image::new(plain_manifest(100_000), 3);
    let pull = |tls| {
        let sender = Sender::start(SenderConfig { tls: Some(tls), ..quick() }).unwrap();
        let ticket = Ticket::new(inside(image.ticket(sender.local_addr()))).unwrap();
        let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
        let config = PullConfig { privacy: &privacy, ..quick_pull() };
        Landed::new(&image.manifest).pull(&image.manifest, &ticket, &config, &Stop::never()).map(drop)
    };
    assert_eq!(pull(alone).unwrap_err().kind(), Kind::Denied);
    pull(chain).unwrap();
}

#[test]
fn tls_is_neither_given_up_nor_taken_up_by_what_a_ticket_says() {
    let (sender, privacy) = secret();
    let plain = |mut fields: TicketFields| {
        fields.sources.iter_mut().for_each(|s| s.tls = false);
        fields
    };
    let error = attempt(&sender, &privacy, plain);
    assert!(matches!(error, TcpError::Plain { .. }), "{error}");
    assert_eq!(error.kind(), Kind::Denied);
    assert!(error.to_string().contains("--tls-cert"), "{error}");
    let error = attempt(&sender, &Privacy::default(), |fields| fields);
    assert!(matches!(error, TcpError::NoTrust { .. }) && error.kind() == Kind::Denied, "{error}");
    // A ticket that says TLS is not served without it either.
    let without = super::world::sender();
    let error = attempt(&without, &privacy, |fields| fields);
    let TcpError::Transfer { cause: Some(cause), .. } = &error else { panic!("{error}") };
    let TcpError::Tls { source, .. } = &**cause else { panic!("{cause}") };
    assert!(matches!(**source, TlsError::NotTls { .. }), "{cause}");
}

#[test]
fn a_ticket_is_proved_inside_tls_as_without() {
    let (sender, privacy) = secret();
    let error = attempt(&sender, &privacy, |mut fields| {
        fields.key = TicketKey::new(random());
        fields
    });
    assert!(error.to_string().contains("key was not proved"), "{error}");
}

#[test]
fn strangers_at_the_tls_port_are_closed_in_time_and_harm_nobody() {
    let authority = Authority::new();
    let tls = Some(certificate(&authority.issue(&["127.0.0.1"])));
    let handshake_timeout = Duration::from_millis(300);
    let sender = Sender::start(SenderConfig { handshake_timeout, tls, ..quick() }).unwrap();
    let closed = |mut socket: TcpStream| {
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut scrap = Vec::new();
        !matches!(socket.read_to_end(&mut scrap), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
    };
    let record = [&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3][..], &Rng(9).bytes(600)].concat();
    for piece in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), Rng(8).bytes(100_000), record.clone(), Vec::new()] {
        let mut socket = TcpStream::connect(sender.local_addr()).unwrap();
        let _ = socket.write_all(&piece);
        assert!(closed(socket));
    }
    // One that takes its time is cut off, however it spreads its bytes.
    let mut socket = TcpStream::connect(sender.local_addr()).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let began = Instant::now();
    let cut = record.iter().cycle().take(500).any(|byte| {
        let dead = match socket.read(&mut [0; 64]) {
            Ok(n) => n == 0,
            Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
        };
        dead || socket.write_all(&[*byte]).is_err()
    });
    assert!(cut && began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    let image = Image::new(plain_manifest(100_000), 3);
    let ticket = Ticket::new(inside(image.ticket(sender.local_addr()))).unwrap();
    let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let (privacy, landed) = (trust(&authority), Landed::new(&image.manifest));
    let config = PullConfig { privacy: &privacy, ..quick_pull() };
    landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap();
    landed.check_whole(&image);
    eventually("connections leave", || sender.connections() == (0, 0));
}

#[test]
fn a_flipped_bit_inside_tls_costs_a_connection_and_nothing_else() {
    let image = Image::new(plain_manifest(1 << 20), 4);
    let (sender, privacy) = secret();
    let flip = |n| if n == 0 { Harm::Flip(200_000, 3) } else { Harm::None };
    let proxy = Proxy::start(sender.local_addr(), Box::new(move |n| (flip(n), Harm::None)));
    let mut fields = inside(image.ticket(proxy.address));
    fields.streams = 1;
    let ticket = Ticket::new(fields).unwrap();
    let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    let config = PullConfig { privacy: &privacy, ..quick_pull() };
    let pulled = landed.pull(&image.manifest, &ticket, &config, &Stop::never()).unwrap();
    // Nothing that was changed on the way comes out of TLS: no sum was wrong.
    assert_eq!((pulled.bad, pulled.lost), (0, 1));
    landed.check_whole(&image);
}
