//! Several of everything: versions during a pull, holders of parts, receivers at once.

use parking_lot::Mutex;

use crate::plane;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::plane::child::{quick_pull, quick_server};
use crate::plane::proxy::Via;
use crate::plane::{
    Noise, Publisher, digest, eventually, image_bytes, odd_manifest, receiver, receiver_config, shm, stop,
};
use windlass_core::digest::BlockSum;
use windlass_core::dtype::Dtype;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::{
    PartInfo, PartRequest, Registered, Registration, RequestMode, SharedTicket, TransferAnswer, TransferDone,
    TransferRequest, VersionInfo,
};
use windlass_data::history::Limits;
use windlass_data::receiver::{Control, ControlError, Event, Receiver, ReceiverConfig};
use windlass_data::serve::{Peer, Server, ServerConfig};
use windlass_data::stop::Stop;
use windlass_data::tcp::{PullConfig, SenderConfig};

/// Large enough for many stripes of the smallest size.
fn wide_manifest() -> Manifest {
    let tensor = |i: u64| TensorSpec::new(format!("layer.{i}"), Dtype::BF16, [257 + i, 511]);
    Manifest::new((0..16).map(tensor), std::collections::BTreeMap::new()).unwrap()
}

/// Pulls through a relay that lets a quarter of the image pass between two versions.
#[test]
fn a_joiner_converges_while_the_publisher_steps_four_times_in_a_pull() {
    let mut publisher = Publisher::with(wide_manifest(), None, quick_server());
    Noise(9).fill_fast(&mut publisher.data);
    publisher.publish(1);
    let dir = shm();
    let via = Via::new(publisher.server());
    let laps = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&laps);
    let listener = move |event: &Event| {
        if let Event::Lapped { missing, .. } = event {
            heard.lock().push(*missing);
        }
    };
    let mut config = receiver_config(dir.path().join("image"), RequestMode::Auto);
    config.pull = quick_pull();
    let control = Arc::clone(&via) as Arc<dyn Control>;
    let mut receiver = Receiver::open(config, control, Some(Arc::new(listener)), &stop()).unwrap();
    let step = publisher.data.len() as u64 / 4;
    let over = AtomicBool::new(false);
    via.line.allow(Some(step));
    let (synced, newest) = std::thread::scope(|scope| {
        let trainer = scope.spawn(|| {
            let mut version = 1;
            let mut allowed = step;
            while !over.load(Ordering::SeqCst) {
                // The relay stands still a little before the mark: the next piece would not fit.
                if via.line.passed() + (16 << 10) > allowed {
                    version += 1;
                    publisher.change(2);
                    publisher.publish(version);
                    allowed += step;
                    via.line.allow(Some(allowed));
                }
                std::thread::yield_now();
            }
            version
        });
        let synced = receiver.sync(&stop());
        over.store(true, Ordering::SeqCst);
        (synced, trainer.join().unwrap())
    });
    let synced = synced.unwrap();
    let missing = laps.lock().clone();
    assert!(synced.laps >= 1 && missing.is_sorted_by(|a, b| a > b), "{synced:?} {missing:?}");
    assert!(newest >= 4, "the publisher went on meanwhile: {newest}");
    assert_eq!(synced.mode, "fuzzy");
    // Whole and of one version: its digest was announced by the publisher; and the next sync is a delta.
    via.line.allow(None);
    let next = receiver.sync(&stop()).unwrap();
    assert!(matches!(next.mode, "delta" | "none"), "{next:?}");
    assert_eq!(image_bytes(&receiver), publisher.data);
}

/// Regression: while a refresh had the image, a delta of more than 16 MiB was taken for an attack.
#[test]
fn a_joiner_is_lifted_by_a_delta_of_any_size() {
    let manifest =
        Manifest::new(vec![TensorSpec::new("w", Dtype::U8, [40 << 20])], std::collections::BTreeMap::new())
            .unwrap();
    let history = Limits { count: 8, bytes: 256 << 20 };
    // The line rests while two versions are made, which may take long on a busy machine: neither end must give the pull up.
    let patience = Duration::from_mins(5);
    let tcp = SenderConfig { lost_after: patience, ..SenderConfig::default() };
    let pull = PullConfig { lost_after: patience, stripe_timeout: patience, ..PullConfig::default() };
    let stop = || Stop::after(patience);
    let config = ServerConfig { history, stripe_bytes: 1 << 20, tcp, ..quick_server() };
    let mut publisher = Publisher::with(manifest, None, config);
    Noise(9).fill_fast(&mut publisher.data);
    publisher.publish(1);
    let dir = shm();
    let via = Via::new(publisher.server());
    let config = receiver_config(dir.path().join("image"), RequestMode::Auto);
    let config = ReceiverConfig { transfer_timeout: patience, pull, ..config };
    let mut receiver = Receiver::open(config, Arc::clone(&via) as Arc<dyn Control>, None, &stop()).unwrap();
    via.line.allow(Some(22 << 20));
    let mut published = Vec::new();
    let synced = std::thread::scope(|scope| {
        let sync = scope.spawn(|| receiver.sync(&stop()).unwrap());
        eventually("half has passed", || via.line.passed() > 21 << 20);
        for version in 2..4 {
            Noise(version).fill_fast(&mut publisher.data);
            publisher.publish(version);
            published.push((version, publisher.data.clone()));
        }
        via.line.allow(None);
        sync.join().unwrap()
    });
    assert_eq!((synced.laps, synced.mode), (1, "fuzzy"), "{synced:?}");
    assert_eq!(publisher.server().counters().tickets_delta.load(Ordering::Relaxed), 1, "{synced:?}");
    // It ends at version 2 if it asked for the rest before version 3 was there.
    let version = synced.image.as_ref().map(|i| i.identity.version);
    let (_, bytes) = published.iter().find(|(v, _)| Some(*v) == version).unwrap();
    assert!(image_bytes(&receiver) == *bytes, "{synced:?}");
    receiver.sync(&stop()).unwrap();
    assert!(image_bytes(&receiver) == publisher.data);
}

/// A holder of a part that can be away.
struct Holder(Mutex<Option<Arc<Server>>>);

impl Holder {
    fn there(&self) -> Result<Arc<Server>, ControlError> {
        let away = || ControlError::Lost {
            peer: "the second node".into(),
            what: "ask for its part",
            why: "connection refused".into(),
            kind: Kind::PeerLost,
        };
        self.0.lock().clone().ok_or_else(away)
    }
}

impl Peer for Holder {
    fn part(&self, wanted: PartRequest, stop: &Stop) -> Result<PartInfo, ControlError> {
        Peer::part(&*self.there()?, wanted, stop)
    }

    fn part_sums(&self, version: Version, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        Peer::part_sums(&*self.there()?, version, stop)
    }

    fn share(&self, ticket: &SharedTicket, stop: &Stop) -> Result<(), ControlError> {
        Peer::share(&*self.there()?, ticket, stop)
    }
}

/// Two nodes that hold the odd and the even blocks.
struct Nodes {
    lead: Publisher,
    second: Publisher,
    holder: Arc<Holder>,
}

impl Nodes {
    fn new() -> Nodes {
        let manifest = wide_manifest();
        let blocks = 0..manifest.cuts().blocks();
        let half =
            |odd| -> BlockRanges { blocks.clone().filter(|b| b % 2 == odd).map(|b| b..b + 1).collect() };
        let second = Publisher::with(manifest.clone(), Some(half(1)), quick_server());
        let holder = Arc::new(Holder(Mutex::new(Some(second.server()))));
        let peers = vec![Arc::clone(&holder) as Arc<dyn Peer>];
        let config = ServerConfig { peers, ..quick_server() };
        let life = Some(second.region.incarnation());
        let lead = Publisher::of(shm(), manifest, Some(half(0)), life, config);
        Nodes { lead, second, holder }
    }

    /// Both write their part of the same version.
    fn commit(&mut self, version: Version) {
        self.lead.change(3);
        self.second.data.clone_from(&self.lead.data);
        self.second.commit(version);
        self.lead.commit(version);
    }

    fn publish(&mut self, version: Version) {
        self.commit(version);
        self.lead.wait(version);
    }

    fn lose_second(&mut self) {
        *self.holder.0.lock() = None;
        self.second.server = None;
    }

    fn restart_lead(&mut self) {
        self.lead.server = None;
        let peers = vec![Arc::clone(&self.holder) as Arc<dyn Peer>];
        let config = ServerConfig { peers, ..quick_server() };
        let server = Server::start(Arc::clone(&self.lead.region), config).unwrap();
        self.lead.server = Some(Arc::new(server));
        eventually("it is served again", || self.lead.server().version().version.is_some());
    }

    fn restart_second(&mut self) {
        self.lose_second();
        let server = Arc::new(Server::start(Arc::clone(&self.second.region), quick_server()).unwrap());
        self.second.server = Some(Arc::clone(&server));
        *self.holder.0.lock() = Some(server);
    }
}

#[test]
fn two_servers_that_hold_half_of_the_image_serve_one_receiver() {
    let mut nodes = Nodes::new();
    Noise(3).fill_fast(&mut nodes.lead.data);
    nodes.publish(1);
    let dir = shm();
    let mut receiver = receiver(&dir, nodes.lead.server());
    let synced = receiver.sync(&stop()).unwrap();
    let whole = digest(nodes.lead.region.manifest(), &nodes.lead.data);
    assert_eq!((synced.mode, synced.image.unwrap().digest), ("full", whole));
    assert_eq!(image_bytes(&receiver), nodes.lead.data);
    for version in 2..5 {
        nodes.publish(version);
        let synced = receiver.sync(&stop()).unwrap();
        assert_eq!((synced.mode, synced.transfers), ("delta", 1));
        assert_eq!(image_bytes(&receiver), nodes.lead.data);
    }
    // Several versions behind: both halves are composed.
    for version in 5..9 {
        nodes.publish(version);
    }
    assert_eq!(receiver.sync(&stop()).unwrap().mode, "delta");
    assert_eq!(image_bytes(&receiver), nodes.lead.data);
}

#[test]
fn holders_of_parts_lead_a_receiver_back_together_also_after_a_restart() {
    let mut nodes = Nodes::new();
    let life = nodes.lead.region.incarnation();
    Noise(3).fill_fast(&mut nodes.lead.data);
    let mut then = Vec::new();
    for version in 1..7 {
        if version == 4 {
            // Blocks of both are replaced as a whole, so that their records are dense.
            let half = nodes.lead.data.len() / 2;
            Noise(5).fill_fast(&mut nodes.lead.data[half..]);
        }
        nodes.publish(version);
        then.push(nodes.lead.data.clone());
    }
    let back_to = |nodes: &Nodes, version: Version| {
        let dir = shm();
        let mut receiver = receiver(&dir, nodes.lead.server());
        let synced = receiver.sync_to((life, version), &stop()).unwrap();
        let image = synced.image.unwrap();
        assert_eq!((image.identity.version, synced.transfers), (version, 2), "{version}: {}", synced.mode);
        let expected = &then[version as usize - 1];
        assert_eq!(image.digest, digest(nodes.lead.region.manifest(), expected));
        assert!(image_bytes(&receiver) == *expected, "version {version}");
        // And on from there, to what is newest.
        assert_eq!(receiver.sync(&stop()).unwrap().mode, "delta");
        assert!(image_bytes(&receiver) == then[5]);
    };
    for version in [2, 4, 5] {
        back_to(&nodes, version);
    }
    nodes.restart_second();
    back_to(&nodes, 3);
    // What all parts of an older version add up to is in no slot any more.
    nodes.restart_lead();
    for version in [2, 4] {
        back_to(&nodes, version);
    }
    // Without that nothing wrong is said of it: the newest comes.
    std::fs::remove_file(nodes.lead.region.dir().join("digests.json")).unwrap();
    nodes.restart_lead();
    let dir = shm();
    let mut receiver = receiver(&dir, nodes.lead.server());
    assert_eq!(receiver.sync_to((life, 2), &stop()).unwrap().image.unwrap().identity.version, 6);
    assert!(image_bytes(&receiver) == then[5]);
}

#[test]
fn a_holder_of_a_part_that_dies_is_named_and_found_again_after_its_restart() {
    let mut nodes = Nodes::new();
    Noise(3).fill_fast(&mut nodes.lead.data);
    nodes.publish(1);
    let dir = shm();
    let mut config = receiver_config(dir.path().join("image"), RequestMode::Auto);
    config.pull = quick_pull();
    let via = Via::new(nodes.lead.server());
    let mut receiver = Receiver::open(config, Arc::clone(&via) as Arc<dyn Control>, None, &stop()).unwrap();
    // In the middle of a pull.
    via.line.allow(Some(1 << 20));
    let error = std::thread::scope(|scope| {
        let sync = scope.spawn(|| receiver.sync(&stop()).unwrap_err());
        eventually("the pull runs", || via.line.passed() > 900 << 10);
        nodes.lose_second();
        via.line.allow(None);
        sync.join().unwrap()
    });
    assert!(matches!(error.kind(), Kind::PeerLost | Kind::Stale), "{error}");
    // And before one.
    let error = receiver.sync(&stop()).unwrap_err();
    assert_eq!(error.kind(), Kind::PeerLost, "{error}");
    assert!(error.to_string().contains("the second node"), "{error}");
    // A version that the second node cannot seal is not served, and keeps nobody from writing.
    let start = Instant::now();
    for version in 2..5 {
        nodes.commit(version);
    }
    assert!(start.elapsed() < Duration::from_secs(2), "writers wait for no peer");
    assert_eq!(nodes.lead.server().version().version, Some(1));
    eventually("the failure is shown", || nodes.lead.server().failure().is_some());
    nodes.restart_second();
    nodes.lead.wait(4);
    receiver.sync(&stop()).unwrap();
    assert_eq!(image_bytes(&receiver), nodes.lead.data);
    eventually("the failure is forgotten", || nodes.lead.server().failure().is_none());
}

#[test]
fn the_sums_of_all_parts_prove_the_blocks_of_all() {
    let mut nodes = Nodes::new();
    nodes.publish(1);
    let dir = shm();
    receiver(&dir, nodes.lead.server()).sync(&stop()).unwrap();
    // One byte is wrong; the other blocks are mostly zeros, also those that the lead does not hold.
    let path = dir.path().join("image/a.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut again = receiver(&dir, nodes.lead.server());
    assert!(again.current().is_none());
    let synced = again.sync(&stop()).unwrap();
    let all = nodes.lead.data.len() as u64;
    assert!(synced.wire_bytes > 0 && synced.wire_bytes < all / 3, "{synced:?} of {all}");
    assert_eq!(image_bytes(&again), nodes.lead.data);
    // By itself, a part has no sums of blocks that it does not hold: zeros, which no bytes have, also not those of a block of
    // zeros.
    let (_, own) = nodes.lead.server().part_sums(Some(1)).unwrap();
    let held = own.sums().iter().filter(|sum| **sum != BlockSum::default()).count() as u32;
    assert_eq!(held, nodes.lead.region.part().unwrap().len());
}

#[test]
fn many_receivers_at_once_get_one_version_under_one_lease() {
    let mut publisher = Publisher::with(wide_manifest(), None, quick_server());
    Noise(5).fill_fast(&mut publisher.data);
    let expected = publisher.publish(1);
    let homes: Vec<_> = (0..12).map(|_| shm()).collect();
    let server = publisher.server();
    std::thread::scope(|scope| {
        for home in &homes {
            let server = Arc::clone(&server);
            scope.spawn(move || {
                let mut receiver = receiver(home, server);
                assert_eq!(receiver.sync(&stop()).unwrap().image.unwrap().digest, expected);
            });
        }
    });
    assert_eq!(server.instances().len(), 12);
    // More requests than a region has leases.
    let home = shm();
    let mut last = receiver(&home, publisher.server());
    for _ in 0..300 {
        let request = TransferRequest {
            instance_id: server.instances()[0].instance_id.clone(),
            mode: RequestMode::Full,
            have: None,
            version: None,
            layout_hash: None,
            wanted: None,
            keeps: None,
            streams: None,
            timeout_ms: None,
            relay: None,
        };
        Server::request(&server, &request, &stop()).unwrap();
    }
    last.sync(&stop()).unwrap();
    assert!(server.open_transfers() >= 300, "they are all open, until nobody comes for them");
    eventually("abandoned offers end", || server.open_transfers() == 0);
}

#[test]
fn a_receiver_that_stands_still_delays_neither_the_writer_nor_the_others() {
    let mut publisher = Publisher::with(wide_manifest(), None, quick_server());
    Noise(5).fill_fast(&mut publisher.data);
    publisher.publish(1);
    let (slow_home, home) = (shm(), shm());
    let via = Via::new(publisher.server());
    via.line.allow(Some(300 << 10));
    let mut slow = receiver(&slow_home, Arc::clone(&via) as Arc<dyn Control>);
    let mut quick = receiver(&home, publisher.server());
    std::thread::scope(|scope| {
        let stuck = scope.spawn(|| slow.sync(&stop()));
        eventually("the slow one has begun", || via.line.passed() > 250 << 10);
        quick.sync(&stop()).unwrap();
        // The second of these takes back the slot that the slow one reads.
        for version in 2..6 {
            publisher.change(1);
            let start = Instant::now();
            publisher.commit(version);
            assert!(start.elapsed() < Duration::from_secs(1), "{version} waited {:?}", start.elapsed());
            publisher.wait(version);
            quick.sync(&stop()).unwrap();
            assert_eq!(image_bytes(&quick), publisher.data);
        }
        assert!(publisher.server().counters().revoked.load(Ordering::Relaxed) >= 1);
        via.line.allow(None);
        stuck.join().unwrap().unwrap();
    });
    slow.sync(&stop()).unwrap();
    assert_eq!(image_bytes(&slow), publisher.data);
    eventually("nothing is held", || publisher.server().open_transfers() == 0);
}

#[test]
fn a_request_that_meets_a_slot_being_taken_back_gets_the_next_version() {
    let mut publisher = Publisher::with(odd_manifest(), None, quick_server());
    publisher.publish(1);
    let server = publisher.server();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let homes = shm();
            for sync in 0..6 {
                // Each begins from nothing, so that it asks for image bytes.
                let dir = homes.path().join(sync.to_string());
                let mut fresh = plane::receiver_at(dir, Arc::clone(&server) as _, RequestMode::Full);
                let synced = fresh.sync(&stop());
                over.store(sync == 5 || synced.is_err(), Ordering::SeqCst);
                synced.unwrap();
            }
        });
        for version in 2.. {
            publisher.change(1);
            publisher.commit(version);
            if over.load(Ordering::SeqCst) {
                break;
            }
        }
    });
}

#[test]
fn a_publisher_of_a_dead_lineage_is_not_followed() {
    let mut old = Publisher::new(odd_manifest());
    old.publish(7);
    let mut new = Publisher::new(odd_manifest());
    new.change(5);
    new.publish(3);
    assert!(new.region.incarnation() > old.region.incarnation());
    let dir = shm();
    let image = dir.path().join("image");
    receiver(&dir, new.server()).sync(&stop()).unwrap();
    let mut back = plane::receiver_at(image, old.server(), RequestMode::Auto);
    let error = back.sync(&stop()).unwrap_err();
    assert_eq!(error.kind(), Kind::Stale);
    assert!(error.to_string().contains("stop the old publisher"), "{error}");
    assert_eq!(image_bytes(&back), new.data, "the version of the living lineage stands");
}

/// Answers about versions for one server and everything else for another, as when the publisher is replaced between
/// two questions.
struct Replaced {
    old: Arc<Server>,
    new: Arc<Server>,
    asked: AtomicBool,
}

impl Control for Replaced {
    fn peer(&self) -> String {
        "the publisher".into()
    }

    fn version(
        &self,
        seen: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        let server = if self.asked.load(Ordering::SeqCst) { &self.new } else { &self.old };
        Control::version(&**server, seen, stop)
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        Control::manifest(&*self.new, stop)
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        Control::sums(&*self.new, identity, stop)
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError> {
        Control::register(&*self.new, registration, stop)
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        self.asked.store(true, Ordering::SeqCst);
        Control::request(&*self.new, request, stop)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        Control::done(&*self.new, done, stop)
    }
}

#[test]
fn a_publisher_that_begins_a_new_life_during_a_sync_is_followed() {
    let mut old = Publisher::new(odd_manifest());
    old.publish(105);
    let dir = shm();
    let image = dir.path().join("image");
    receiver(&dir, old.server()).sync(&stop()).unwrap();
    old.change(3);
    old.publish(106);
    let mut new = Publisher::new(odd_manifest());
    new.change(9);
    let digest = new.publish(101);
    let control = Replaced { old: old.server(), new: new.server(), asked: AtomicBool::new(false) };
    let mut receiver = plane::receiver_at(image, Arc::new(control), RequestMode::Auto);
    let image = receiver.sync(&stop()).unwrap().image.unwrap();
    assert_eq!((image.identity.incarnation, image.digest), (new.region.incarnation(), digest));
    assert_eq!(image_bytes(&receiver), new.data);
}

#[test]
fn a_lost_table_of_sums_is_made_again_and_a_changed_slot_is_not_served() {
    let mut publisher = Publisher::new(odd_manifest());
    Noise(5).fill(&mut publisher.data);
    publisher.publish(1);
    publisher.change(3);
    let digest = publisher.publish(2);
    publisher.server = None;
    for slot in 0..2 {
        std::fs::remove_file(publisher.region.sums_path(slot)).unwrap();
    }
    let server = Server::start(Arc::clone(&publisher.region), quick_server()).unwrap();
    assert_eq!((server.version().version, server.version().digest), (Some(2), Some(digest)));
    assert!((0..2).all(|slot| publisher.region.sums_path(slot).exists()));
    drop(server);
    // Somebody wrote into the newest version, and the table is lost: what is left to serve is the one before.
    let slot = publisher.region.state().active.unwrap().slot;
    std::fs::remove_file(publisher.region.sums_path(slot)).unwrap();
    let path = publisher.region.slot_path(slot);
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", publisher.region.data_start() + 11).unwrap();
    let server = Server::start(Arc::clone(&publisher.region), quick_server()).unwrap();
    assert_eq!(server.version().version, Some(1));
}

#[test]
fn a_receiver_without_a_version_waits_for_the_first() {
    let mut publisher = Publisher::new(odd_manifest());
    let dir = shm();
    let receiver = receiver(&dir, publisher.server());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| receiver.wait_newer(&stop()).unwrap());
        publisher.publish(1);
        assert_eq!(waiter.join().unwrap().version, Some(1), "not before there is one");
    });
}
