//! Transfers through a network that does harm, and what is left behind afterwards.

use std::sync::Arc;
use std::time::{Duration, Instant};

use windlass_core::error::Kind;
use windlass_core::wire::{Checks, Ticket, TicketFields};

use super::authority::Authority;
use super::proxy::{Harm, Proxy};
use super::secret::{certificate, inside, trust};
use super::world::{
    Image, Landed, Rng, delta_fields, odd_manifest, offer, payload_file, plain_manifest, pull_payloads,
    quick, quick_pull, sender, source,
};
use crate::shm::Mapping;
use crate::stop::Stop;
use crate::tcp::{Body, PullConfig, Sender, SenderConfig};
use crate::tls::{Certificate, Privacy};

/// Harm somewhere in the first `bytes` of a direction; often in the handshake or the first frames.
fn harm(rng: &mut Rng, bytes: u64) -> Harm {
    let at = if rng.below(3) == 0 { rng.below(300) } else { rng.below(bytes) };
    match rng.below(7) {
        0 => Harm::Cut(at),
        1 => Harm::Reset(at),
        2 | 3 => Harm::Flip(at, rng.below(8) as u8),
        4 => Harm::Stall(at),
        5 => Harm::Delay(Duration::from_millis(rng.below(4))),
        _ => Harm::None,
    }
}

fn proxy(sender: &Sender, seed: u64, bytes: u64) -> Proxy {
    let mut rng = Rng(seed ^ 0x5eed);
    let harmful = rng.below(12);
    Proxy::start(
        sender.local_addr(),
        Box::new(move |n| {
            if n >= harmful {
                return (Harm::None, Harm::None);
            }
            let down = harm(&mut rng, bytes);
            (down, if rng.below(3) == 0 { harm(&mut rng, 2000) } else { Harm::None })
        }),
    )
}

fn impatient() -> (SenderConfig, PullConfig<'static>) {
    let (ping_after, lost_after) = (Duration::from_millis(80), Duration::from_millis(250));
    let handshake_timeout = lost_after;
    (
        SenderConfig { handshake_timeout, ping_after, lost_after, ..quick() },
        PullConfig { handshake_timeout, ping_after, lost_after, reconnects: 12, ..quick_pull() },
    )
}

/// One transfer; the text says what went wrong with it, if anything did that may not.
fn one(seed: u64, image: &Image, tls: Option<&(Certificate, Privacy)>) {
    let mut rng = Rng(seed);
    let (mut sender_config, mut pull_config) = impatient();
    if let Some((certificate, privacy)) = tls {
        sender_config.tls = Some(certificate.clone());
        // Shaking hands takes longer than without, on a busy machine.
        (sender_config.handshake_timeout, pull_config.handshake_timeout) =
            (Duration::from_secs(1), Duration::from_secs(1));
        pull_config.privacy = privacy;
    }
    let inside = |fields: TicketFields| if tls.is_some() { inside(fields) } else { fields };
    let senders = [Sender::start(sender_config.clone()).unwrap(), Sender::start(sender_config).unwrap()];
    let bytes = image.manifest.data_bytes();
    let proxies: Vec<Proxy> = (0..2).map(|i| proxy(&senders[i as usize], seed + i, bytes / 2)).collect();
    let began = Instant::now();
    let timeout = Duration::from_secs(6);
    let result = if rng.below(4) == 0 {
        let payloads = [rng.bytes(200_000), rng.bytes(3)];
        let mut fields = delta_fields(&payloads, proxies[0].address);
        fields.deadline.timeout_ms = timeout.as_millis() as u64;
        let ticket = Ticket::new(inside(fields)).unwrap();
        let files = payloads.iter().map(|p| Some(payload_file(p))).collect();
        let handle = offer(&senders[0], &ticket, 0, Body::payloads(files));
        let buffers: Vec<_> = payloads.iter().map(|p| Mapping::anonymous(p.len() as u64).unwrap()).collect();
        let result = pull_payloads(&ticket, &buffers, &pull_config);
        if result.is_ok() {
            for (buffer, payload) in buffers.iter().zip(&payloads) {
                assert!(buffer.bytes(0..payload.len() as u64) == payload, "the payload differs");
            }
        }
        handle.revoke("over", Duration::ZERO);
        result
    } else {
        // Two sources that overlap in the middle.
        let blocks = image.manifest.cuts().blocks();
        let halves = [0..blocks * 2 / 3, blocks / 3..blocks];
        let sources =
            (0..2).map(|i| source(i, proxies[i as usize].address, halves[i as usize].clone().into()));
        let mut fields = image.ticket_of(sources.collect());
        fields.streams = 1 + rng.below(4) as u16;
        fields.stripe_bytes = (64 << 10) + rng.below(300_000) as u32;
        fields.checks = if rng.below(4) == 0 { Checks::Xxh3 } else { Checks::BlockSums };
        fields.deadline.timeout_ms = timeout.as_millis() as u64;
        let ticket = Ticket::new(inside(fields)).unwrap();
        let hold = Arc::new(());
        let handles: Vec<_> =
            (0..2).map(|i| offer(&senders[i as usize], &ticket, i, image.body(hold.clone()))).collect();
        let landed = Landed::new(&image.manifest);
        let result = landed.pull(&image.manifest, &ticket, &pull_config, &Stop::never());
        match result {
            Ok(_) => landed.check_whole(image),
            Err(_) => landed.check_against(image),
        }
        handles.iter().for_each(|h| h.revoke("over", Duration::ZERO));
        assert_eq!(Arc::strong_count(&hold), 1, "the memory is free");
        result
    };
    if let Err(error) = &result {
        assert_ne!(error.kind(), Kind::Bug, "{error}");
    }
    assert!(began.elapsed() < timeout + Duration::from_secs(2), "it took {:?}", began.elapsed());
}

/// `WINDLASS_FAULT_SEEDS=FIRST..LAST` runs others than the usual ones.
fn seeds() -> std::ops::Range<u64> {
    let given = std::env::var("WINDLASS_FAULT_SEEDS").ok();
    let parsed = given.as_deref().and_then(|s| s.split_once("..")).map(|(a, b)| (a.parse(), b.parse()));
    match parsed {
        Some((Ok(first), Ok(last))) => first..last,
        Some(_) | None => 0..40,
    }
}

#[test]
fn every_transfer_through_a_harmful_network_ends_with_equal_bytes_or_a_named_error() {
    all_seeds(None);
}

#[test]
fn every_transfer_inside_tls_through_a_harmful_network_ends_so_too() {
    let authority = Authority::new();
    all_seeds(Some(&(certificate(&authority.issue(&["127.0.0.1"])), trust(&authority))));
}

fn all_seeds(tls: Option<&(Certificate, Privacy)>) {
    let image = Image::new(odd_manifest(), 99);
    let next = parking_lot::Mutex::new(seeds());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(seed) = { next.lock().next() } {
                    let result =
                        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| one(seed, &image, tls)));
                    assert!(
                        result.is_ok(),
                        "seed {seed}: WINDLASS_FAULT_SEEDS={seed}..{} repeats it",
                        seed + 1
                    );
                }
            });
        }
    });
}

#[test]
fn a_flipped_payload_bit_is_fetched_again() {
    let image = Image::new(plain_manifest(1 << 20), 1);
    for checks in [Checks::BlockSums, Checks::Xxh3] {
        let sender = sender();
        let flip = |n| if n == 0 { Harm::Flip(200_000, 3) } else { Harm::None };
        let proxy = Proxy::start(sender.local_addr(), Box::new(move |n| (flip(n), Harm::None)));
        let mut fields = image.ticket(proxy.address);
        (fields.streams, fields.checks) = (1, checks);
        let ticket = Ticket::new(fields).unwrap();
        let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
        let landed = Landed::new(&image.manifest);
        let pulled = landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
        assert_eq!((pulled.bad, pulled.lost, handle.progress().bad), (1, 0, 1));
        landed.check_whole(&image);
    }
}

#[test]
fn a_lost_stream_reconnects_and_costs_only_what_was_under_way() {
    let image = Image::new(plain_manifest(4 << 20), 2);
    let sender = sender();
    let reset = |n| if n == 0 { Harm::Reset(3 << 20) } else { Harm::None };
    let proxy = Proxy::start(sender.local_addr(), Box::new(move |n| (reset(n), Harm::None)));
    let mut fields = image.ticket(proxy.address);
    (fields.streams, fields.stripe_bytes) = (1, 256 << 10);
    let ticket = Ticket::new(fields).unwrap();
    let handle = offer(&sender, &ticket, 0, image.body(Arc::new(())));
    let landed = Landed::new(&image.manifest);
    let pulled = landed.pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
    assert_eq!((pulled.lost, pulled.bad), (1, 0));
    landed.check_whole(&image);
    // The window, and what the kernel took beyond it.
    let again = handle.progress().bytes_sent - image.data.len() as u64;
    assert!(again <= 2 * (256 << 10), "{again} bytes were sent twice");
}

fn open_descriptors_and_threads() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Counts what this process has open, so it needs a process of its own: the test below starts one.
#[test]
#[ignore = "run by nothing_is_left_after_many_pulls"]
fn many_pulls_in_a_process_of_their_own() {
    let image = Image::new(odd_manifest(), 3);
    let authority = Authority::new();
    let tls = (certificate(&authority.issue(&["127.0.0.1"])), trust(&authority));
    one(1000, &image, None);
    one(1000, &image, Some(&tls));
    let before = open_descriptors_and_threads();
    for seed in 0..12 {
        one(seed, &image, (seed % 2 == 0).then_some(&tls));
    }
    let sender = sender();
    for _ in 0..20 {
        let ticket = Ticket::new(image.ticket(sender.local_addr())).unwrap();
        let _offer = offer(&sender, &ticket, 0, image.body(Arc::new(())));
        Landed::new(&image.manifest).pull(&image.manifest, &ticket, &quick_pull(), &Stop::never()).unwrap();
    }
    // A sender that lives on keeps its accepting thread and its listening socket only.
    let with_sender = (before.0 + 1, before.1 + 1);
    super::world::eventually("the sender is at rest", || open_descriptors_and_threads() == with_sender);
    drop(sender);
    assert_eq!(open_descriptors_and_threads(), before);
}

#[test]
fn nothing_is_left_after_many_pulls() {
    let inner = "tcp::tests::faults::many_pulls_in_a_process_of_their_own";
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", inner, "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && text.contains("1 passed"), "{text}");
}
