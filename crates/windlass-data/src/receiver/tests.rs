use std::path::Path;

use windlass_core::dtype::Dtype;
use windlass_core::identity::ModelId;
use windlass_core::manifest::TensorSpec;

use super::*;
use crate::history::{Trail, TrailError};
use crate::image::ImageView;
use crate::load::{LoadPlan, PlanCopy, Target};
use crate::region::{Memfd, Region, RegionSpec, Writer};
use crate::serve::{Server, ServerConfig};

const BYTES: u64 = 300_000;

fn stop() -> Stop {
    Stop::after(Duration::from_secs(30))
}

fn model() -> ModelId {
    ModelId::new("actor").unwrap()
}

/// A publisher of one tensor.
struct Publisher {
    region: Arc<Region>,
    server: Arc<Server>,
    writer: Writer,
    next: Vec<u8>,
}

impl Publisher {
    fn new(dir: &Path, incarnation: Option<Incarnation>) -> Publisher {
        Publisher::keeping(dir, incarnation, ServerConfig::new(Host::new("127.0.0.1").unwrap()).history)
    }

    /// One that keeps so many deltas.
    fn keeping(dir: &Path, incarnation: Option<Incarnation>, history: Limits) -> Publisher {
        Publisher::of(dir, incarnation, history, BYTES)
    }

    /// One whose tensor has so many bytes.
    fn of(dir: &Path, incarnation: Option<Incarnation>, history: Limits, bytes: u64) -> Publisher {
        let tensor = TensorSpec::new("w", Dtype::U8, [bytes]);
        let region = Region::create(&RegionSpec {
            memfd: Memfd::Never,
            incarnation,
            ..RegionSpec::new(
                dir.to_owned(),
                model(),
                Arc::new(Manifest::new([tensor], BTreeMap::new()).unwrap()),
            )
        })
        .unwrap();
        let config = ServerConfig { history, ..ServerConfig::new(Host::new("127.0.0.1").unwrap()) };
        let server = Arc::new(Server::start(Arc::clone(&region), config).unwrap());
        let writer = region.writer(0).unwrap();
        Publisher { region, server, writer, next: Vec::new() }
    }

    /// Has the next version replace the bytes up to some place.
    fn fill(&mut self, seed: u64, bytes: u64) {
        let mut dice = crate::seal::testing::Dice(seed);
        self.next = (0..bytes).map(|_| dice.roll() as u8).collect();
    }

    /// Publishes a version in which a few bytes are others.
    fn publish(&mut self, version: Version) {
        let stop = stop();
        let attempt = self.writer.begin(version, &stop).unwrap();
        attempt.write(0, &std::mem::take(&mut self.next)).unwrap();
        attempt.write(version * 7, &version.to_le_bytes()).unwrap();
        attempt.done(&stop).unwrap();
        self.server.wait_version(Some((self.region.incarnation(), version - 1)), &stop);
    }

    fn receiver(&self, dir: &Path, mode: RequestMode, keep: usize) -> Receiver {
        let config = ReceiverConfig {
            slice: None,
            image: ImageSpec {
                dir: dir.to_owned(),
                model_id: model(),
                group: false,
                memfd: Memfd::Never,
                threads: 1,
            },
            name: "test".into(),
            mode,
            streams: None,
            transfer_timeout: Duration::from_secs(20),
            open_timeout: Duration::from_secs(5),
            pull: PullConfig::default(),
            allow: None,
            keep: (keep > 0).then_some(Limits { count: keep, bytes: 1 << 30 }),
            share: None,
            nixl: None,
            relaying: None,
        };
        let control = Arc::clone(&self.server) as Arc<dyn Control>;
        Receiver::open(config, control, None, &stop()).unwrap()
    }
}

/// A worker of an engine: its parameter, and the version it was last loaded at.
struct Worker {
    plan: LoadPlan,
    memory: Vec<u8>,
    live: (Incarnation, Version),
}

impl Worker {
    fn new(dir: &Path) -> Worker {
        let view = ImageView::open(dir, Duration::from_secs(9), &stop()).unwrap();
        let target = Target { name: "p".into(), numel: BYTES, dtype: Dtype::U8 };
        // Two halves, the other way round.
        let copy = |source_offset| PlanCopy {
            source: "w".into(),
            source_offset,
            target: 0,
            target_offset: BYTES / 2 - source_offset,
            sizes: vec![BYTES / 2],
            source_strides: vec![1],
            target_strides: vec![1],
        };
        let manifest = Arc::clone(view.manifest());
        let plan = LoadPlan::new(manifest, vec![target], &[copy(0), copy(BYTES / 2)]).unwrap();
        Worker { plan, memory: vec![0; BYTES as usize], live: (Incarnation(0), 0) }
    }

    fn dense(&mut self, dir: &Path) {
        let view = ImageView::open(dir, Duration::from_secs(9), &stop()).unwrap();
        self.plan.dense(view.data(), &mut [&mut self.memory], None, 1, &stop()).unwrap();
        self.live = (view.known().identity.incarnation, view.known().identity.version);
    }

    /// Loads what changed; answers how many elements, or why that cannot be told.
    fn sparse(&mut self, dir: &Path) -> Result<u64, TrailError> {
        let view = ImageView::open(dir, Duration::from_secs(9), &stop()).unwrap();
        let known = view.known();
        let trail =
            Trail::find(&dir.join("deltas"), view.manifest(), self.live, (&known.identity, known.digest))?;
        let deltas = trail.deltas(1)?;
        let loaded =
            self.plan.sparse(&deltas, view.data(), &mut [&mut self.memory], None, 1, &stop()).unwrap();
        self.live = (known.identity.incarnation, known.identity.version);
        Ok(loaded.elements)
    }

    /// What a dense load would have left.
    fn expected(&self, dir: &Path) -> Vec<u8> {
        let mut other = Worker::new(dir);
        other.dense(dir);
        assert_eq!(other.live, self.live);
        other.memory
    }
}

#[test]
fn digests_of_versions_that_no_block_is_of_are_forgotten() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut publisher = Publisher::new(&home.path().join("region"), None);
    let mut receiver = publisher.receiver(&home.path().join("image"), RequestMode::Auto, 0);
    for version in 1..20 {
        publisher.publish(version);
        let known = receiver.sync(&stop()).unwrap().image.unwrap();
        assert_eq!(receiver.digests, BTreeMap::from([(version, known.digest)]));
    }
}

#[test]
fn a_worker_that_loads_what_changed_holds_what_a_whole_load_gives() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (mut publisher, dir) = (Publisher::new(&home.path().join("region"), None), home.path().join("image"));
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 4);
    publisher.publish(1);
    receiver.sync(&stop()).unwrap();
    let (mut eager, mut lazy, mut late) = (Worker::new(&dir), Worker::new(&dir), Worker::new(&dir));
    for worker in [&mut eager, &mut lazy, &mut late] {
        worker.dense(&dir);
    }
    for version in 2..9 {
        publisher.publish(version);
        assert_eq!(receiver.sync(&stop()).unwrap().mode, "delta");
        let changed = eager.sparse(&dir).unwrap();
        assert!(changed > 0 && changed < 100, "{changed}");
        assert_eq!(eager.sparse(&dir).unwrap(), 0);
        if version % 3 == 1 {
            // Three versions at once.
            lazy.sparse(&dir).unwrap();
            assert_eq!(lazy.memory, lazy.expected(&dir));
        }
    }
    assert_eq!(eager.memory, eager.expected(&dir));
    // Version 1 is more than four deltas ago.
    let before = late.memory.clone();
    let why = late.sparse(&dir).unwrap_err();
    assert_eq!((why.kind(), late.live.1), (Kind::Stale, 1));
    assert!(why.to_string().contains("4-5, 5-6, 6-7, 7-8"), "{why}");
    assert_eq!(late.memory, before);
    // The next receiver goes on where this one left off.
    drop(receiver);
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 4);
    publisher.publish(9);
    receiver.sync(&stop()).unwrap();
    lazy.sparse(&dir).unwrap();
    assert_eq!(lazy.memory, lazy.expected(&dir));
    // One that keeps nothing leaves nothing.
    drop(receiver);
    publisher.publish(10);
    publisher.receiver(&dir, RequestMode::Auto, 0).sync(&stop()).unwrap();
    assert!(lazy.sparse(&dir).unwrap_err().to_string().contains("kept none"));
    assert!(!dir.join("deltas").exists());
}

#[test]
fn nothing_leads_over_a_full_pull_or_into_another_life() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (place, dir) = (home.path().join("region"), home.path().join("image"));
    let mut publisher = Publisher::new(&place, Some(Incarnation(7)));
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 8);
    for version in 1..4 {
        publisher.publish(version);
        receiver.sync(&stop()).unwrap();
    }
    let mut worker = Worker::new(&dir);
    worker.dense(&dir);
    drop(receiver);
    // Version 4 as a whole.
    let mut receiver = publisher.receiver(&dir, RequestMode::Full, 8);
    publisher.publish(4);
    assert_eq!(receiver.sync(&stop()).unwrap().mode, "full");
    assert_eq!(worker.sparse(&dir).unwrap_err().kind(), Kind::Stale);
    drop(receiver);
    // A new chain begins there, and leads nowhere for those who were before it.
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 8);
    publisher.publish(5);
    receiver.sync(&stop()).unwrap();
    let why = worker.sparse(&dir).unwrap_err().to_string();
    assert!(why.contains("those that were kept are 4-5"), "{why}");
    worker.dense(&dir);
    publisher.publish(6);
    receiver.sync(&stop()).unwrap();
    worker.sparse(&dir).unwrap();
    assert_eq!(worker.memory, worker.expected(&dir));
    // Another life of the publisher, whose version 7 follows on from nothing.
    drop((receiver, publisher));
    let mut publisher = Publisher::new(&place, Some(Incarnation(8)));
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 8);
    for version in 6..8 {
        publisher.publish(version);
        receiver.sync(&stop()).unwrap();
    }
    let why = worker.sparse(&dir).unwrap_err();
    assert_eq!(why.kind(), Kind::Stale);
    assert!(why.to_string().contains("another life"), "{why}");
    // The same number of the other life is another base.
    assert_eq!(worker.live, (Incarnation(7), 6));
    worker.dense(&dir);
    publisher.publish(8);
    receiver.sync(&stop()).unwrap();
    worker.sparse(&dir).unwrap();
    assert_eq!(worker.memory, worker.expected(&dir));
}

/// A delta fetched into memory.
fn fetched(receiver: &mut Receiver, after: Option<&Fetched>, to: (Incarnation, Version)) -> Fetched {
    match receiver.fetch(after.map(Fetched::known).as_ref(), to, &stop()).unwrap() {
        Start::Delta(fetch) => fetch.run(&stop()).unwrap(),
        Start::Whole { why, .. } => panic!("no delta to {to:?}: {why}"),
    }
}

fn shown(dir: &Path) -> (Version, Vec<u8>) {
    let view = ImageView::open(dir, Duration::from_secs(9), &stop()).unwrap();
    (view.known().identity.version, view.data().to_vec())
}

#[test]
fn a_sync_to_a_named_version_stops_there_and_the_next_goes_on() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (mut publisher, dir) = (Publisher::new(&home.path().join("region"), None), home.path().join("image"));
    let life = publisher.region.incarnation();
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 0);
    publisher.publish(1);
    assert_eq!(receiver.sync_to((life, 1), &stop()).unwrap().mode, "full");
    for version in 2..7 {
        publisher.publish(version);
    }
    // Versions 2 and 3 as one, then 4; the publisher is at 6.
    for version in [3, 4] {
        let synced = receiver.sync_to((life, version), &stop()).unwrap();
        assert_eq!((synced.mode, synced.image.unwrap().identity.version), ("delta", version));
        assert_eq!(shown(&dir).0, version);
    }
    // What it has, and what it is past, is nothing to do.
    for version in [4, 2] {
        let synced = receiver.sync_to((life, version), &stop()).unwrap();
        assert_eq!((synced.mode, synced.image.is_none(), shown(&dir).0), ("none", true, 4));
    }
    assert_eq!(receiver.sync(&stop()).unwrap().image.unwrap().identity.version, 6);
    let other = receiver.sync_to((Incarnation(life.0 + 1), 7), &stop()).unwrap_err();
    assert!(matches!(other, ReceiverError::OtherLife { .. }) && other.kind() == Kind::Stale, "{other}");
    // One that is not published yet is waited for, as long as there is time.
    let soon = receiver.sync_to((life, 7), &Stop::after(Duration::from_millis(50))).unwrap_err();
    assert_eq!(soon.kind(), Kind::Timeout, "{soon}");
}

#[test]
fn an_older_version_than_the_image_bytes_is_reached_by_a_delta_that_leads_back() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (mut publisher, dir) = (Publisher::new(&home.path().join("region"), None), home.path().join("image"));
    let life = publisher.region.incarnation();
    // One that was there at the time.
    let then = home.path().join("then");
    let mut witness = publisher.receiver(&then, RequestMode::Auto, 0);
    for version in 1..7 {
        publisher.publish(version);
        if version == 2 {
            // All of one block is replaced, so that its record is dense.
            publisher.fill(3, 131_072);
            witness.sync_to((life, 2), &stop()).unwrap();
        }
    }
    // Versions 6 and 5 are in the slots.
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 0);
    assert!(matches!(receiver.fetch(None, (life, 2), &stop()).unwrap(), Start::Whole { newest: 6, .. }));
    let synced = receiver.sync_to((life, 2), &stop()).unwrap();
    assert_eq!((synced.image.unwrap().identity.version, synced.transfers), (2, 2));
    assert_eq!(shown(&dir), shown(&then));
    // And on from there.
    assert_eq!(receiver.sync_to((life, 4), &stop()).unwrap().mode, "delta");
    assert_eq!(shown(&dir).0, 4);
}

#[test]
fn where_nothing_leads_to_a_named_version_the_newest_comes_and_says_so() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let limits = Limits { count: 2, bytes: 1 << 30 };
    let mut publisher = Publisher::keeping(&home.path().join("region"), None, limits);
    let dir = home.path().join("image");
    let life = publisher.region.incarnation();
    for version in 1..6 {
        publisher.publish(version);
    }
    // The history begins at 3.
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 0);
    let synced = receiver.sync_to((life, 2), &stop()).unwrap();
    assert_eq!((synced.mode, synced.image.unwrap().identity.version, shown(&dir).0), ("full", 5, 5));
    // A receiver that takes full images only goes back all the same: there is no other way.
    drop(receiver);
    let mut receiver = publisher.receiver(&dir, RequestMode::Full, 0);
    publisher.publish(6);
    publisher.publish(7);
    assert!(matches!(receiver.fetch(None, (life, 6), &stop()).unwrap(), Start::Whole { .. }));
    assert_eq!(receiver.sync_to((life, 6), &stop()).unwrap().image.unwrap().identity.version, 6);
}

#[test]
fn an_image_that_is_staged_is_hidden_until_it_is_revealed() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (mut publisher, dir) = (Publisher::new(&home.path().join("region"), None), home.path().join("image"));
    let life = publisher.region.incarnation();
    let hidden = |dir: &Path| {
        let e = ImageView::open(dir, Duration::from_secs(9), &Stop::after(Duration::ZERO)).unwrap_err();
        assert!(matches!(e, ImageError::NotWhole { .. }), "{e}");
    };
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 0);
    publisher.publish(1);
    let staged = receiver.stage_to((life, 1), &stop()).unwrap();
    assert_eq!((staged.mode, staged.image.unwrap().identity.version), ("full", 1));
    assert!(receiver.current().is_none() && receiver.status().get().image.is_none());
    assert_eq!(receiver.held().unwrap().identity.version, 1);
    hidden(&dir);
    // What leads on from it can be fetched.
    publisher.publish(2);
    let two = fetched(&mut receiver, None, (life, 2));
    hidden(&dir);
    receiver.reveal(&stop()).unwrap();
    assert_eq!(shown(&dir).0, 1);
    receiver.reveal(&stop()).unwrap();
    receiver.show(vec![two], &stop()).unwrap();
    assert_eq!(shown(&dir).0, 2);
    // One that is killed before leaves nothing that the next one takes for shown.
    let other = home.path().join("other");
    let mut receiver = publisher.receiver(&other, RequestMode::Auto, 0);
    receiver.stage_to((life, 2), &stop()).unwrap();
    publisher.publish(3);
    let three = fetched(&mut receiver, None, (life, 3));
    drop(receiver);
    let mut receiver = publisher.receiver(&other, RequestMode::Auto, 0);
    assert!(receiver.held().is_none());
    hidden(&other);
    assert!(matches!(receiver.show(vec![three], &stop()).unwrap_err(), ReceiverError::NotNext { .. }));
    // Its bytes are of use: only what differs is fetched.
    let staged = receiver.stage_to((life, 3), &stop()).unwrap();
    assert!(staged.wire_bytes < BYTES, "{staged:?}");
    hidden(&other);
    // A delta is shown with it, at once.
    publisher.publish(4);
    let four = fetched(&mut receiver, None, (life, 4));
    receiver.show(vec![four], &stop()).unwrap();
    assert_eq!(shown(&other).0, 4);
}

#[test]
fn fetched_deltas_queue_and_the_image_stays_until_they_are_shown() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (mut publisher, dir) = (Publisher::new(&home.path().join("region"), None), home.path().join("image"));
    let life = publisher.region.incarnation();
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 4);
    publisher.publish(1);
    receiver.sync(&stop()).unwrap();
    let before = shown(&dir);
    for version in 2..6 {
        publisher.publish(version);
    }
    let two = fetched(&mut receiver, None, (life, 2));
    let four = fetched(&mut receiver, Some(&two), (life, 4));
    let five = fetched(&mut receiver, Some(&four), (life, 5));
    assert_eq!((four.base().version, five.known().identity.version), (2, 5));
    assert!(two.bytes() > 0 && two.synced().wire_bytes == two.bytes(), "{two:?}");
    assert_eq!(shown(&dir), before, "nothing is shown");
    let synced = receiver.show(vec![two], &stop()).unwrap();
    assert_eq!((synced.mode, synced.transfers, shown(&dir).0), ("delta", 1, 2));
    // Out of turn.
    let again = fetched(&mut receiver, None, (life, 3));
    let out = receiver.show(vec![five], &stop()).unwrap_err();
    assert!(matches!(out, ReceiverError::NotNext { .. }) && out.kind() == Kind::Stale, "{out}");
    assert_eq!(shown(&dir).0, 2, "a refusal leaves the image as it was");
    // Two at once.
    let five = fetched(&mut receiver, Some(&four), (life, 5));
    let synced = receiver.show(vec![four, five], &stop()).unwrap();
    assert_eq!((synced.mode, synced.transfers, shown(&dir).0), ("delta", 2, 5));
    drop(again);
    // It is what a receiver that went there directly has.
    let straight = home.path().join("straight");
    publisher.receiver(&straight, RequestMode::Auto, 0).sync(&stop()).unwrap();
    assert_eq!(shown(&dir), shown(&straight));
    // Workers that load what changed find the way over single steps, and no way over the double one.
    publisher.publish(6);
    let mut worker = Worker::new(&dir);
    worker.dense(&dir);
    let six = fetched(&mut receiver, None, (life, 6));
    receiver.show(vec![six], &stop()).unwrap();
    worker.sparse(&dir).unwrap();
    assert_eq!(worker.memory, worker.expected(&dir));
}

#[test]
fn a_version_is_shown_while_the_next_is_being_fetched() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (mut publisher, dir) = (Publisher::new(&home.path().join("region"), None), home.path().join("image"));
    let life = publisher.region.incarnation();
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 0);
    for version in 1..3 {
        publisher.publish(version);
        receiver.sync(&stop()).unwrap();
    }
    publisher.publish(3);
    publisher.publish(4);
    let three = fetched(&mut receiver, None, (life, 3));
    let Start::Delta(fetch) = receiver.fetch(Some(&three.known()), (life, 4), &stop()).unwrap() else {
        panic!()
    };
    let status = fetch.status();
    // The receiver is free while the transfer has not even begun.
    receiver.show(vec![three], &stop()).unwrap();
    assert_eq!((shown(&dir).0, status.get().stage), (3, Stage::Idle));
    let four = fetch.run(&stop()).unwrap();
    assert_eq!((status.get().bytes, status.get().bytes_done), (four.bytes(), four.bytes()));
    receiver.show(vec![four], &stop()).unwrap();
    assert_eq!(shown(&dir).0, 4);
}

#[test]
fn a_receiver_turns_to_the_agent_that_took_over() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = home.path().join("image");
    let mut publisher = Publisher::new(&home.path().join("old"), Some(Incarnation(3)));
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 0);
    publisher.publish(8);
    receiver.sync_to((Incarnation(3), 8), &stop()).unwrap();
    let mut publisher = Publisher::new(&home.path().join("new"), Some(Incarnation(5)));
    publisher.publish(4);
    receiver.turn_to(Arc::clone(&publisher.server) as Arc<dyn Control>);
    // Nothing of the old life leads into the new one, however the versions compare.
    assert!(matches!(receiver.fetch(None, (Incarnation(5), 4), &stop()).unwrap(), Start::Whole { .. }));
    assert_eq!(shown(&dir).0, 8);
    let known = receiver.sync_to((Incarnation(5), 4), &stop()).unwrap().image.unwrap();
    assert_eq!((known.identity.incarnation, known.identity.version), (Incarnation(5), 4));
    assert_eq!(shown(&dir).0, 4);
}

#[test]
fn a_new_life_of_another_layout_takes_the_place_of_an_image_that_others_have_open() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = home.path().join("image");
    let mut publisher = Publisher::new(&home.path().join("old"), Some(Incarnation(3)));
    let mut receiver = publisher.receiver(&dir, RequestMode::Auto, 0);
    publisher.publish(8);
    receiver.sync(&stop()).unwrap();
    // A process that has read it keeps it mapped.
    let region = Region::open(&dir).unwrap();
    let view = ImageView::take(&region, Duration::from_secs(9), &stop()).unwrap();
    let before = view.data().to_vec();
    let limits = Limits { count: 4, bytes: 1 << 30 };
    let mut publisher = Publisher::of(&home.path().join("new"), Some(Incarnation(5)), limits, BYTES / 2);
    publisher.publish(1);
    receiver.turn_to(Arc::clone(&publisher.server) as Arc<dyn Control>);
    // As long as it is being read, its place is not taken.
    receiver.config.open_timeout = Duration::from_millis(20);
    let busy = receiver.sync(&stop()).unwrap_err();
    assert!(matches!(busy, ReceiverError::Image(ImageError::Region(_))), "{busy}");
    assert_eq!(view.data(), before);
    view.finish().unwrap();
    receiver.config.open_timeout = Duration::from_secs(20);
    std::thread::scope(|scope| {
        // One that waits for a whole version holds nothing up, and finds the new image.
        let waiting = scope.spawn(|| {
            let deadline = stop();
            while shown(&dir).0 != 1 {
                assert!(!deadline.is_set());
                std::thread::yield_now();
            }
        });
        assert_eq!(receiver.sync(&stop()).unwrap().image.unwrap().identity.version, 1);
        waiting.join().unwrap();
    });
    assert_eq!(shown(&dir).1.len() as u64, BYTES / 2);
    // The old one is out of its place, with its bytes, and cannot be leased any more.
    let gone = ImageView::take(&region, Duration::from_secs(9), &Stop::after(Duration::ZERO)).unwrap_err();
    assert!(matches!(gone, ImageError::NotWhole { .. }), "{gone}");
    let left: Vec<_> = std::fs::read_dir(home.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
    assert_eq!(region.manifest().data_bytes(), BYTES);
}
