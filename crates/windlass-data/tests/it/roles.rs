//! The four roles: extractors that are wrong, ranks, strategies, loads that take too long.
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges that have one")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use windlass_core::choose::{Link, Strategy};
use windlass_core::dtype::Dtype;
use windlass_core::error::Kind;
use windlass_core::identity::ModelId;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::request::PullMode;
use windlass_core::sync_info::{
    AgentWeightSyncInfo, EmptyWeightSyncInfo, StoreWeightSyncInfo, WeightSyncInfo,
};
use windlass_data::receiver::{Control, ControlError};
use windlass_data::region::Memfd;
use windlass_data::roles::{
    BoxError, ControlPlane, EngineConfig, Feed, PublisherConfig, Reachable, RegionSender, RoleError,
    SharedReceiver, ShmTransferStrategy, Strategies, Tensors, WeightExtractor, WeightTransferReceiver,
    WeightTransferSender, WeightTransferStrategy, Weights,
};
use windlass_data::serve::Server;
use windlass_data::stop::Stop;

fn stop() -> Stop {
    Stop::after(Duration::from_secs(20))
}

fn manifest() -> Arc<Manifest> {
    let tensors = [
        TensorSpec::new("a.weight", Dtype::BF16, [700, 1001]),
        TensorSpec::new("b.bias", Dtype::F32, [33]),
        TensorSpec::new("none", Dtype::U8, [0]),
    ];
    Arc::new(Manifest::new(tensors, BTreeMap::new()).unwrap())
}

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::Builder::new().prefix("windlass-role-").tempdir_in("/dev/shm").unwrap())
    }

    fn region(&self) -> PathBuf {
        self.0.path().join("region")
    }

    fn config(&self) -> PublisherConfig {
        let model = ModelId::new("actor").unwrap();
        let mut config = PublisherConfig::new(self.region(), model, manifest()).unwrap();
        (config.memfd, config.threads, config.server.threads) = (Memfd::Never, 2, 2);
        config.server.history.bytes = 8 << 20;
        config
    }

    fn engine(&self) -> EngineConfig {
        EngineConfig {
            memfd: Memfd::Never,
            threads: 2,
            ..EngineConfig::new("engine", self.0.path().join("image"))
        }
    }

    fn receiver(&self) -> Box<dyn WeightTransferReceiver> {
        Box::new(SharedReceiver::new(self.region(), &self.engine()))
    }
}

/// Writes `byte` everywhere in the ranges it has.
struct Share {
    manifest: Arc<Manifest>,
    byte: u8,
    ranges: fn(bytes: u64) -> Vec<Range<u64>>,
    fail: AtomicBool,
    asked: AtomicU64,
}

impl Share {
    fn new(byte: u8, ranges: fn(u64) -> Vec<Range<u64>>) -> Share {
        Share { manifest: manifest(), byte, ranges, fail: AtomicBool::new(false), asked: AtomicU64::new(0) }
    }
}

impl WeightExtractor for Share {
    fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    fn ranges(&self, tensor: usize) -> Vec<Range<u64>> {
        let bytes = self.manifest.tensors()[tensor].bytes;
        if bytes == 0 { Vec::new() } else { (self.ranges)(bytes) }
    }

    fn extract(&self, _: usize, range: Range<u64>, out: &mut [u8]) -> Result<(), BoxError> {
        assert_eq!(range.end - range.start, out.len() as u64);
        self.asked.fetch_add(range.end - range.start, Ordering::Relaxed);
        if self.fail.load(Ordering::Relaxed) {
            return Err("the device is gone".into());
        }
        out.fill(self.byte);
        Ok(())
    }
}

#[test]
fn bytes_that_no_rank_extracts_are_an_error_before_anything_is_written() {
    let place = Place::new();
    let mut sender = RegionSender::start(place.config(), None).unwrap();
    let hole = Share::new(1, |n| vec![0..n / 3, n / 2..n]);
    let error = sender.publish(&hole, 1, &stop()).unwrap_err();
    let RoleError::Uncovered { range, .. } = &error else { panic!("{error}") };
    assert!(!range.is_empty());
    assert_eq!((sender.region().state().attempt, hole.asked.into_inner()), (0, 0));
    for ranges in [
        |n| vec![n / 2..n, 0..n / 2],
        |n| vec![0..n / 2 + 1, n / 2..n],
        |n| vec![0..n + 1],
        |n| vec![0..n, n..n],
    ] {
        let error = sender.publish(&Share::new(1, ranges), 1, &stop()).unwrap_err();
        assert!(matches!(error, RoleError::Range { rank: 0, .. }), "{error}");
    }
    let tensors = [TensorSpec::new("other", Dtype::U8, [9])];
    let other = Tensors::zeroed(Arc::new(Manifest::new(tensors, BTreeMap::new()).unwrap()));
    let error = sender.publish(&other, 1, &stop()).unwrap_err();
    assert!(matches!(error, RoleError::OtherLayout { .. }), "{error}");
}

#[test]
fn an_extractor_that_fails_leaves_the_old_version_and_can_try_again() {
    let place = Place::new();
    let mut sender = RegionSender::start(place.config(), None).unwrap();
    let mut receiver = place.receiver();
    let extractor = Share::new(7, |n| vec![0..n]);
    sender.publish(&extractor, 1, &stop()).unwrap();
    let first = sender.wait_sealed(1, &stop()).unwrap();
    extractor.fail.store(true, Ordering::Relaxed);
    let error = sender.publish(&extractor, 2, &stop()).unwrap_err();
    assert!(matches!(error, RoleError::Extract { version: 2, .. }), "{error}");
    assert_eq!(receiver.next(None, &stop()).unwrap().known(), &first);
    extractor.fail.store(false, Ordering::Relaxed);
    sender.publish(&extractor, 2, &stop()).unwrap();
    let error = sender.wait_sealed(1_000, &Stop::after(Duration::from_millis(50))).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    sender.wait_sealed(2, &stop()).unwrap();
    sender.publish(&extractor, 3, &stop()).unwrap();
    sender.publish(&extractor, 4, &stop()).unwrap();
    let error = sender.wait_sealed(2, &stop()).unwrap_err();
    assert_eq!(error.kind(), Kind::Stale, "{error}");
}

#[test]
fn ranks_extract_their_own_ranges_and_commit_together() {
    let place = Place::new();
    let config = PublisherConfig { ranks: 2, ..place.config() };
    let mut lead = RegionSender::start(config.clone(), None).unwrap();
    let mut other = RegionSender::start(PublisherConfig { rank: 1, ..config }, None).unwrap();
    let left = Share::new(1, |n| vec![0..n / 2]);
    let right = Share::new(2, |n| vec![n / 2..n]);
    let (a, b) = std::thread::scope(|scope| {
        let b = scope.spawn(|| other.publish(&right, 1, &stop()).unwrap());
        (lead.publish(&left, 1, &stop()).unwrap(), b.join().unwrap())
    });
    assert_eq!((&a.identity, a.bytes + b.bytes), (&b.identity, manifest().data_bytes()));
    assert!(other.server().is_none(), "only the first rank serves");
    let arrived = place.receiver().next(None, &stop()).unwrap();
    for t in manifest().tensors() {
        let (start, half) = (t.offset as usize, (t.bytes / 2) as usize);
        let bytes = &arrived.data()[start..start + t.bytes as usize];
        assert!(bytes[..half].iter().all(|b| *b == 1) && bytes[half..].iter().all(|b| *b == 2));
    }
}

#[test]
fn a_region_that_holds_a_part_is_not_mapped_as_a_whole() {
    let place = Place::new();
    let part = Some(BlockRanges::from(0..1));
    let mut sender = RegionSender::start(PublisherConfig { part, ..place.config() }, None).unwrap();
    let error = sender.publish(&Share::new(1, |n| vec![n - 1..n]), 1, &stop()).unwrap_err();
    assert!(matches!(error, RoleError::Uncovered { .. }), "even a part must be covered: {error}");
    let error = place.receiver().next(None, &stop()).unwrap_err();
    assert!(matches!(error, RoleError::Partial { .. }), "{error}");
}

#[test]
fn a_load_that_outlives_its_lease_does_not_count() {
    let place = Place::new();
    let mut sender = RegionSender::start(place.config(), None).unwrap();
    let config = EngineConfig { load_timeout: Duration::from_millis(1), ..place.engine() };
    let receiver = Box::new(SharedReceiver::new(place.region(), &config));
    sender.publish(&Share::new(1, |n| vec![0..n]), 1, &stop()).unwrap();
    sender.wait_sealed(1, &stop()).unwrap();
    let mut version = 1;
    let mut feed = Feed::new(receiver, |_: &Weights<'_>| -> Result<(), BoxError> {
        // The publisher takes the slot back as soon as the lease has run out.
        for _ in 0..2 {
            version += 1;
            sender.publish(&Share::new(version as u8, |n| vec![0..n]), version, &stop())?;
            sender.wait_sealed(version, &stop())?;
        }
        Ok(())
    });
    let error = feed.step(&stop()).unwrap_err();
    assert_eq!(error.kind(), Kind::Stale, "{error}");
    assert_eq!((feed.engine(), feed.failures()), (None, 1));
}

#[test]
fn a_publisher_that_was_not_closed_can_come_back_although_an_engine_has_its_region_open() {
    let place = Place::new();
    let mut receiver = place.receiver();
    let mut sender = RegionSender::start(place.config(), None).unwrap();
    let weights = Share::new(5, |n| vec![0..n]);
    sender.publish(&weights, 9, &stop()).unwrap();
    let old = receiver.next(None, &stop()).unwrap().identity().clone();
    drop(sender);
    let mut sender = RegionSender::start(place.config(), None).unwrap();
    sender.publish(&weights, 3, &stop()).unwrap();
    let new = receiver.next(Some(&old), &stop()).unwrap().identity().clone();
    assert!(new.incarnation > old.incarnation && new.version == 3);
}

/// A plane that reaches nobody.
struct Nowhere;

impl ControlPlane for Nowhere {
    fn serve(&self, _: &Arc<Server>) -> Result<Reachable, ControlError> {
        let (peer, why) = ("nowhere".into(), "there is no network".into());
        Err(ControlError::Lost { peer, what: "listen", why, kind: Kind::Unsupported })
    }

    fn connect(&self, _: &AgentWeightSyncInfo) -> Result<Arc<dyn Control>, ControlError> {
        let (peer, why) = ("nowhere".into(), "there is no network".into());
        Err(ControlError::Lost { peer, what: "connect", why, kind: Kind::Unsupported })
    }
}

#[test]
fn a_strategy_that_is_not_in_this_build_says_what_to_use_instead() {
    let strategies = Strategies::ours(Arc::new(Nowhere), "/dev/shm/none");
    for strategy in Strategy::ALL {
        for link in strategy.links() {
            let chosen = strategies.chosen(*strategy, *link);
            match (strategy, link) {
                (Strategy::Tcp, Link::Shm) => assert_eq!(chosen.unwrap().name(), "shm"),
                (Strategy::Tcp, _) => assert_eq!(chosen.unwrap().name(), "tcp"),
                _ => {
                    let Err(error) = chosen else { panic!("{strategy} over {link}") };
                    assert_eq!(error.kind(), Kind::Unsupported);
                    let text = error.to_string();
                    assert!(text.contains(strategy.as_str()) && text.contains("use tcp"), "{text}");
                }
            }
        }
    }
    assert!(strategies.named("carrier pigeon").is_err());
}

#[test]
fn sync_info_of_another_strategy_is_refused_by_name() {
    let place = Place::new();
    let strategies = Strategies::ours(Arc::new(Nowhere), place.region());
    let store = WeightSyncInfo::Store(StoreWeightSyncInfo { url: "s3://bucket/run".parse().unwrap() });
    for name in ["tcp", "shm"] {
        let strategy = strategies.named(name).unwrap();
        assert_eq!(strategy.request_type(), "pull");
        let Err(error) = strategy.create_receiver(&store, place.engine(), &stop()) else { panic!("{name}") };
        assert!(matches!(error, RoleError::OtherSyncInfo { found: "store", .. }), "{error}");
    }
    let empty = WeightSyncInfo::Empty(EmptyWeightSyncInfo);
    assert!(strategies.named("tcp").unwrap().create_receiver(&empty, place.engine(), &stop()).is_err());
    let Err(error) = strategies.named("tcp").unwrap().create_sender(place.config()) else { panic!() };
    assert_eq!(error.kind(), Kind::Unsupported, "{error}");
    assert!(!place.region().join("header").exists(), "what was begun is taken back");
}

/// Somebody's own strategy, made of ours.
struct Own(ShmTransferStrategy);

impl WeightTransferStrategy for Own {
    fn name(&self) -> &'static str {
        "own"
    }

    fn request_type(&self) -> &'static str {
        "pull"
    }

    fn create_sender(&self, config: PublisherConfig) -> Result<Box<dyn WeightTransferSender>, RoleError> {
        self.0.create_sender(config)
    }

    fn create_receiver(
        &self,
        info: &WeightSyncInfo,
        config: EngineConfig,
        stop: &Stop,
    ) -> Result<Box<dyn WeightTransferReceiver>, RoleError> {
        self.0.create_receiver(info, config, stop)
    }
}

#[test]
fn a_strategy_from_outside_is_found_by_its_name_and_syncs() {
    let place = Place::new();
    let strategies = Strategies::new().with(Arc::new(Own(ShmTransferStrategy::new(place.region()))));
    let strategy = strategies.named("own").unwrap();
    let mut sender = strategy.create_sender(place.config()).unwrap();
    // What crosses a process is plain data.
    let info = WeightSyncInfo::from_json(sender.sync_info().to_json().as_bytes()).unwrap();
    let receiver = strategy.create_receiver(&info, place.engine(), &stop()).unwrap();
    let published = sender.publish(&Share::new(3, |n| vec![0..n]), 1, &stop()).unwrap();
    assert!(published.request(&info, PullMode::Auto).is_none(), "there is no agent to pull from");
    let mut sum = 0u64;
    let mut feed = Feed::new(receiver, |weights: &Weights<'_>| -> Result<(), BoxError> {
        sum = weights.data().iter().map(|b| u64::from(*b)).sum();
        Ok(())
    });
    assert_eq!(feed.step(&stop()).unwrap().known.identity, published.identity);
    drop(feed);
    assert_eq!(sum, manifest().data_bytes() * 3);
    drop(sender);
    assert!(!place.region().exists(), "closing removes the shared memory");
}
