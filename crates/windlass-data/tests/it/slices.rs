//! Receivers that keep a part of the model.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::thread;

use crate::plane::{Publisher, config, image_bytes, odd_manifest, receiver_config, shm, stop};
use windlass_core::dtype::Dtype;
use windlass_core::error::Kind;
use windlass_core::manifest::{DimCut, Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::slice::Selection;
use windlass_core::wire::control::RequestMode;
use windlass_data::history::Limits;
use windlass_data::receiver::{Control, Receiver, ReceiverConfig, RelayConfig, Relaying, Synced};
use windlass_data::serve::{Peer, ServerConfig};

/// Layers of a model whose second matrix is cut between columns, as for two ranks of tensor parallelism.
fn layers() -> Manifest {
    let of_layer = |i: u64| {
        [
            TensorSpec::new(format!("layers.{i}.up"), Dtype::BF16, [2048, 1024]),
            TensorSpec::new(format!("layers.{i}.down"), Dtype::BF16, [1024, 4096]),
        ]
    };
    let cut = |i: u64| (format!("layers.{i}.down"), vec![DimCut { dim: 1, bounds: vec![2048] }]);
    let manifest = Manifest::new((0..4).flat_map(of_layer), BTreeMap::new()).unwrap();
    manifest.with_cuts(&(0..4).map(cut).collect()).unwrap()
}

fn selection(json: &str) -> Arc<Selection> {
    Arc::new(Selection::from_json(json.as_bytes()).unwrap())
}

/// What one of two ranks needs of every layer.
fn half(rank: u64) -> Arc<Selection> {
    let (rows, columns) = (rank * 1024, rank * 2048);
    selection(&format!(
        r#"{{"*.up": [[[{rows}, {}]]], "*.down": [[null, [{columns}, {}]]]}}"#,
        rows + 1024,
        columns + 2048
    ))
}

fn open(dir: &tempfile::TempDir, control: Arc<dyn Control>, slice: &Arc<Selection>) -> Receiver {
    let config = ReceiverConfig {
        slice: Some(Arc::clone(slice)),
        ..receiver_config(dir.path().join("image"), RequestMode::Auto)
    };
    Receiver::open(config, control, None, &stop()).unwrap()
}

/// The image must have the bytes of its blocks, and nothing else.
fn check(receiver: &Receiver, manifest: &Manifest, data: &[u8]) {
    let (image, slice) = (image_bytes(receiver), receiver.image().unwrap().slice().unwrap());
    for number in 0..manifest.cuts().blocks() {
        let block = manifest.cuts().block(number).unwrap();
        for run in manifest.byte_runs(&block) {
            let run = run.start as usize..run.end as usize;
            if slice.contains(number) {
                assert!(image[run.clone()] == data[run], "block {number}");
            } else {
                assert!(image[run].iter().all(|b| *b == 0), "block {number} is not kept");
            }
        }
    }
}

#[test]
fn half_of_the_ranks_cost_half_of_the_wire_and_half_of_the_memory() {
    let manifest = layers();
    let mut publisher = Publisher::new(manifest.clone());
    publisher.noise.fill_fast(&mut publisher.data);
    publisher.publish(1);
    let (home, whole_home) = (shm(), shm());
    let mut receiver = open(&home, publisher.server(), &half(1));
    let plain = receiver_config(whole_home.path().join("image"), RequestMode::Auto);
    let mut whole = Receiver::open(plain, publisher.server(), None, &stop()).unwrap();
    let bound = |all: u64| all * 55 / 100;
    for (version, expected) in [(1, "full"), (2, "delta"), (3, "delta")] {
        if version > 1 {
            publisher.change(2);
            publisher.publish(version);
        }
        let (part, all) = (receiver.sync(&stop()).unwrap(), whole.sync(&stop()).unwrap());
        assert_eq!((part.mode, all.mode), (expected, expected));
        assert!(part.wire_bytes <= bound(all.wire_bytes), "{} of {}", part.wire_bytes, all.wire_bytes);
        assert_ne!(receiver.current().unwrap().digest, whole.current().unwrap().digest);
        assert_eq!(receiver.current().unwrap().identity, whole.current().unwrap().identity);
    }
    // Before anything looks at a hole: a page of one that is read through a mapping becomes a page of zeros.
    let held = fs::metadata(receiver.image().unwrap().region().slot_path(0)).unwrap().blocks() * 512;
    assert!(held <= bound(manifest.data_bytes()), "{held} of {}", manifest.data_bytes());
    check(&receiver, &manifest, &publisher.data);
    assert!(image_bytes(&whole) == publisher.data);
}

#[test]
fn a_slice_is_resumed_and_another_slice_takes_its_place() {
    let manifest = layers();
    let mut publisher = Publisher::new(manifest.clone());
    publisher.noise.fill_fast(&mut publisher.data);
    publisher.publish(1);
    let home = shm();
    let mut receiver = open(&home, publisher.server(), &half(0));
    receiver.sync(&stop()).unwrap();
    drop(receiver);
    publisher.change(1);
    publisher.publish(2);
    // The image that was left is whole, and its delta is asked for.
    let mut receiver = open(&home, publisher.server(), &half(0));
    assert_eq!(receiver.current().unwrap().identity.version, 1);
    assert_eq!(receiver.sync(&stop()).unwrap().mode, "delta");
    check(&receiver, &manifest, &publisher.data);
    drop(receiver);
    let mut receiver = open(&home, publisher.server(), &half(1));
    assert!(receiver.current().is_none(), "the other half is not there");
    assert_eq!(receiver.sync(&stop()).unwrap().mode, "full");
    check(&receiver, &manifest, &publisher.data);
    drop(receiver);
    // And all of it, which is no slice.
    let mut receiver = open(&home, publisher.server(), &selection(r#"{"*": [[]]}"#));
    receiver.sync(&stop()).unwrap();
    assert!(receiver.image().unwrap().slice().is_none());
    assert!(image_bytes(&receiver) == publisher.data);
}

#[test]
fn a_restarted_agent_goes_on_with_deltas_of_a_slice() {
    let mut publisher = Publisher::new(layers());
    publisher.noise.fill_fast(&mut publisher.data);
    publisher.publish(1);
    let home = shm();
    let mut receiver = open(&home, publisher.server(), &half(0));
    receiver.sync(&stop()).unwrap();
    drop(receiver);
    publisher.server = None;
    let server = windlass_data::serve::Server::start(Arc::clone(&publisher.region), config()).unwrap();
    publisher.server = Some(Arc::new(server));
    publisher.change(1);
    publisher.publish(2);
    let mut receiver = open(&home, publisher.server(), &half(0));
    assert_eq!(receiver.sync(&stop()).unwrap().mode, "delta");
    check(&receiver, publisher.region.manifest(), &publisher.data);
}

#[test]
fn a_broken_pull_of_a_slice_keeps_what_landed_and_is_told_by_sums_what_it_has() {
    let mut publisher = Publisher::new(layers());
    publisher.noise.fill_fast(&mut publisher.data);
    publisher.publish(1);
    let home = shm();
    let mut receiver = open(&home, publisher.server(), &half(0));
    receiver.sync(&stop()).unwrap();
    drop(receiver);
    // A file that does not count any more: the blocks are compared with the publisher's table.
    fs::remove_file(home.path().join("image").join("state.json")).unwrap();
    let mut receiver = open(&home, publisher.server(), &half(0));
    assert!(receiver.current().is_none());
    let synced = receiver.sync(&stop()).unwrap();
    assert_eq!((synced.transfers, synced.wire_bytes), (0, 0), "{synced:?}");
    check(&receiver, publisher.region.manifest(), &publisher.data);
}

#[test]
fn receivers_of_one_slice_pass_it_on_and_those_of_another_do_not_mix_in() {
    let manifest = layers();
    let blocks = manifest.cuts().blocks();
    let odd = |odd| -> BlockRanges { (0..blocks).filter(|b| b % 2 == odd).map(|b| b..b + 1).collect() };
    let server = || ServerConfig { relay_from: 1, ..config() };
    // Two holders of parts, so that a delta has two payloads and a slice needs some of both.
    let mut second = Publisher::with(manifest.clone(), Some(odd(1)), server());
    let peers = vec![second.server() as Arc<dyn Peer>];
    let life = Some(second.region.incarnation());
    let config = ServerConfig { peers, ..server() };
    let mut lead = Publisher::of(shm(), manifest.clone(), Some(odd(0)), life, config);
    let homes: Vec<_> = (0..8).map(|_| shm()).collect();
    let relaying = |i: usize| {
        let relay = RelayConfig { bind: Some([127, 0, 0, 1].into()), ..RelayConfig::default() };
        // The last one does not relay.
        (i < 7).then(|| Arc::new(Relaying::new(relay)))
    };
    let mut receivers: Vec<Receiver> = homes
        .iter()
        .enumerate()
        .map(|(i, home)| {
            let config = ReceiverConfig {
                slice: Some(half(i as u64 % 2)),
                relaying: relaying(i),
                ..receiver_config(home.path().join("image"), RequestMode::Auto)
            };
            Receiver::open(config, lead.server(), None, &stop()).unwrap()
        })
        .collect();
    for (version, expected) in [(1, "full"), (2, "delta"), (3, "delta")] {
        if version == 1 {
            lead.noise.fill_fast(&mut lead.data);
        } else {
            lead.change(30);
        }
        second.data.clone_from(&lead.data);
        second.commit(version);
        lead.publish(version);
        let synced: Vec<Synced> = thread::scope(|scope| {
            let syncing: Vec<_> =
                receivers.iter_mut().map(|r| scope.spawn(move || r.sync(&stop()).unwrap())).collect();
            syncing.into_iter().map(|s| s.join().unwrap()).collect()
        });
        assert!(synced.iter().all(|s| s.mode == expected && s.relays_lost == 0), "{synced:?}");
        for half in 0..2 {
            let relayed: u64 = synced.iter().skip(half).step_by(2).map(|s| s.relayed_bytes).sum();
            assert!(relayed > 0, "version {version}, half {half}: {synced:?}");
        }
        receivers.iter().for_each(|receiver| check(receiver, &manifest, &lead.data));
    }
}

#[test]
fn a_slice_is_lifted_from_any_version_and_led_back() {
    let mut publisher = Publisher::new(layers());
    publisher.noise.fill_fast(&mut publisher.data);
    publisher.publish(1);
    let home = shm();
    let mut receiver = open(&home, publisher.server(), &half(1));
    receiver.sync(&stop()).unwrap();
    for version in 2..6 {
        publisher.change(1);
        publisher.publish(version);
    }
    let older = publisher.data.clone();
    // Four versions as one delta, composed and then cut.
    let synced = receiver.sync(&stop()).unwrap();
    assert_eq!((synced.mode, synced.transfers), ("delta", 1));
    check(&receiver, publisher.region.manifest(), &older);
    publisher.change(1);
    publisher.publish(6);
    receiver.sync(&stop()).unwrap();
    // A joiner that must serve an older version than the newest goes back.
    let home = shm();
    let mut joiner = open(&home, publisher.server(), &half(1));
    let life = publisher.region.incarnation();
    let synced = joiner.sync_to((life, 5), &stop()).unwrap();
    assert_eq!(synced.image.unwrap().identity.version, 5);
    check(&joiner, publisher.region.manifest(), &older);
}

#[test]
fn deltas_of_a_slice_are_kept_for_workers() {
    let mut publisher = Publisher::new(layers());
    publisher.noise.fill_fast(&mut publisher.data);
    publisher.publish(1);
    let home = shm();
    let config = ReceiverConfig {
        slice: Some(half(0)),
        keep: Some(Limits { count: 4, bytes: 64 << 20 }),
        ..receiver_config(home.path().join("image"), RequestMode::Auto)
    };
    let mut receiver = Receiver::open(config, publisher.server(), None, &stop()).unwrap();
    receiver.sync(&stop()).unwrap();
    for version in 2..5 {
        publisher.change(1);
        publisher.publish(version);
        assert_eq!(receiver.sync(&stop()).unwrap().mode, "delta");
    }
    let life = format!("{:016x}", publisher.region.incarnation().0);
    let kept = fs::read_dir(receiver.image().unwrap().region().deltas_dir().join(life)).unwrap().count();
    assert_eq!(kept, 3);
}

#[test]
fn a_slice_that_does_not_fit_the_model_is_named() {
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(1);
    let sync = |json| {
        let home = shm();
        open(&home, publisher.server(), &selection(json)).sync(&stop()).unwrap_err()
    };
    for (json, what) in [
        (r#"{"lm_head": [[]]}"#, "\"lm_head\" matches no tensor"),
        (r#"{"empty": [[]]}"#, "covers nothing"),
        (r#"{"norm": [[[0, 998]]]}"#, "expected start < end <= 997"),
    ] {
        let error = sync(json);
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains(what), "{cause}");
        assert_eq!(error.kind(), Kind::Invalid);
    }
}
