//! Receivers that pass versions on to each other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use crate::plane::proxy::Via;
use crate::plane::{Publisher, config, eventually, image_bytes, receiver_config, shm, stop};
use windlass_core::dtype::Dtype;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::RequestMode;
use windlass_data::receiver::{Receiver, ReceiverConfig, RelayConfig, Relaying, Synced};
use windlass_data::serve::{Peer, ServerConfig};

const BYTES: u64 = 16 << 20;

fn publisher(relay_from: usize) -> Publisher {
    let tensors = vec![TensorSpec::new("w", Dtype::BF16, [BYTES / 2])];
    let manifest = Manifest::new(tensors, BTreeMap::new()).unwrap();
    Publisher::with(manifest, None, ServerConfig { relay_from, ..config() })
}

fn relaying() -> Arc<Relaying> {
    Arc::new(Relaying::new(RelayConfig { bind: Some([127, 0, 0, 1].into()), ..RelayConfig::default() }))
}

#[test]
fn full_images_and_deltas_are_passed_on_and_every_image_is_right() {
    let mut publisher = publisher(1);
    publisher.change(1000);
    publisher.publish(1);
    let homes: Vec<_> = (0..6).map(|_| shm()).collect();
    let relays: Vec<_> = homes.iter().map(|_| relaying()).collect();
    let mut receivers: Vec<Receiver> = homes
        .iter()
        .zip(&relays)
        .map(|(home, relaying)| {
            let config = ReceiverConfig {
                relaying: Some(Arc::clone(relaying)),
                ..receiver_config(home.path().join("image"), RequestMode::Auto)
            };
            Receiver::open(config, publisher.server(), None, &stop()).unwrap()
        })
        .collect();
    let mut expected_of_publisher = 0;
    for (version, expected) in [(1, "full"), (2, "delta"), (3, "delta")] {
        if version > 1 {
            publisher.change(30);
            publisher.publish(version);
        }
        let synced: Vec<Synced> = thread::scope(|scope| {
            let syncing: Vec<_> =
                receivers.iter_mut().map(|r| scope.spawn(move || r.sync(&stop()).unwrap())).collect();
            syncing.into_iter().map(|s| s.join().unwrap()).collect()
        });
        assert!(synced.iter().all(|s| s.mode == expected), "{synced:?}");
        for receiver in &receivers {
            assert_eq!(receiver.current().unwrap().identity.version, version);
            assert!(image_bytes(receiver) == publisher.data, "version {version}");
        }
        // What the receivers say of the publisher is what the publisher says of itself, once its offers are over.
        let all: u64 = synced.iter().map(|s| s.wire_bytes).sum();
        let relayed: u64 = synced.iter().map(|s| s.relayed_bytes).sum();
        expected_of_publisher += all - relayed;
        let acked = || publisher.server().counters().bytes_acked.load(Ordering::Relaxed);
        eventually("the publisher has counted what it sent", || acked() >= expected_of_publisher);
        assert_eq!(acked(), expected_of_publisher, "version {version}: {relayed} of {all} were passed on");
        assert!(relayed > 0 && relays.iter().map(|r| r.sent()).sum::<u64>() >= relayed, "{relayed} of {all}");
    }
}

#[test]
fn receivers_of_several_holders_pass_both_parts_on() {
    let tensors = vec![TensorSpec::new("w", Dtype::BF16, [BYTES / 2])];
    let manifest = Manifest::new(tensors, BTreeMap::new()).unwrap();
    let blocks = 0..manifest.cuts().blocks();
    let half = |odd| -> BlockRanges { blocks.clone().filter(|b| b % 2 == odd).map(|b| b..b + 1).collect() };
    let server = || ServerConfig { relay_from: 1, ..config() };
    let mut second = Publisher::with(manifest.clone(), Some(half(1)), server());
    let peers = vec![second.server() as Arc<dyn Peer>];
    let life = Some(second.region.incarnation());
    let mut lead = Publisher::of(shm(), manifest, Some(half(0)), life, ServerConfig { peers, ..server() });
    let homes: Vec<_> = (0..5).map(|_| shm()).collect();
    let relays: Vec<_> = homes.iter().map(|_| relaying()).collect();
    let open = |(home, relaying): (&tempfile::TempDir, &Arc<Relaying>)| {
        let config = ReceiverConfig {
            relaying: Some(Arc::clone(relaying)),
            ..receiver_config(home.path().join("image"), RequestMode::Auto)
        };
        Receiver::open(config, lead.server(), None, &stop()).unwrap()
    };
    let mut receivers: Vec<Receiver> = homes.iter().zip(&relays).map(open).collect();
    for (version, expected) in [(1, "full"), (2, "delta")] {
        lead.change(if version == 1 { 1000 } else { 60 });
        second.data.clone_from(&lead.data);
        second.commit(version);
        lead.publish(version);
        let relayed: Vec<u64> = thread::scope(|scope| {
            let syncing: Vec<_> =
                receivers.iter_mut().map(|r| scope.spawn(move || r.sync(&stop()).unwrap())).collect();
            let synced = syncing.into_iter().map(|s| s.join().unwrap());
            synced.inspect(|s| assert_eq!(s.mode, expected)).map(|s| s.relayed_bytes).collect()
        });
        assert!(receivers.iter().all(|receiver| image_bytes(receiver) == lead.data), "version {version}");
        assert!(relayed.iter().sum::<u64>() > 0, "version {version}: {relayed:?}");
    }
    let passed = lead.server().passed();
    assert_eq!((passed[0].version, passed[0].base, passed[0].receivers), (2, Some(1), 5));
    assert!(passed[0].edges.iter().any(|e| e.brought.by.is_some()), "{passed:?}");
    let counted = lead.server().counters().bytes_relayed.load(Ordering::Relaxed);
    let told: u64 = passed
        .iter()
        .flat_map(|p| &p.edges)
        .filter(|e| e.brought.by.is_some())
        .map(|e| e.brought.bytes)
        .sum();
    assert_eq!(counted, told);
}

#[test]
fn below_the_number_of_receivers_that_are_worth_it_everything_comes_from_the_publisher() {
    let mut publisher = publisher(3);
    publisher.change(1000);
    publisher.publish(1);
    let home = shm();
    let relaying = relaying();
    let config = ReceiverConfig {
        relaying: Some(Arc::clone(&relaying)),
        ..receiver_config(home.path().join("image"), RequestMode::Auto)
    };
    let mut receiver = Receiver::open(config, publisher.server(), None, &stop()).unwrap();
    let synced = receiver.sync(&stop()).unwrap();
    assert!(image_bytes(&receiver) == publisher.data);
    assert_eq!((relaying.sent(), synced.relayed_bytes, synced.wire_bytes), (0, 0, BYTES));
}

#[test]
fn a_receiver_that_joins_late_gets_it_from_those_that_have_it() {
    let mut publisher = publisher(1);
    publisher.change(1000);
    publisher.publish(1);
    let homes: Vec<_> = (0..3).map(|_| shm()).collect();
    let relays: Vec<_> = homes.iter().map(|_| relaying()).collect();
    let passed_on = || relays.iter().map(|r| r.sent()).sum::<u64>();
    let mut receivers = Vec::new();
    for (home, relaying) in homes.iter().zip(&relays) {
        let config = ReceiverConfig {
            relaying: Some(Arc::clone(relaying)),
            ..receiver_config(home.path().join("image"), RequestMode::Auto)
        };
        let via = Via::new(publisher.server());
        let mut receiver = Receiver::open(config, Arc::clone(&via) as Arc<_>, None, &stop()).unwrap();
        let before = passed_on();
        let synced = thread::scope(|scope| {
            // The first has no relay to ask. To the others the publisher sends little until a relay has been asked.
            if !receivers.is_empty() {
                via.line.allow(Some(via.line.passed() + (256 << 10)));
                scope.spawn(|| {
                    eventually("a relay is asked", || passed_on() > before);
                    via.line.allow(None);
                });
            }
            receiver.sync(&stop()).unwrap()
        });
        assert!(image_bytes(&receiver) == publisher.data);
        assert_eq!(synced.relayed_bytes > 0, !receivers.is_empty(), "{synced:?}");
        receivers.push(receiver);
    }
}
