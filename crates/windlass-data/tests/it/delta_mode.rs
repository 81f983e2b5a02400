//! Versions that are served by delta before their slot is whole: ranks, agent and receivers with real regions and
//! sockets, in one process. Processes that are killed are in the crate's own tests, which know the steps.

use crate::plane;
use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::plane::{Noise, digest, eventually, image_bytes, receiver, receiver_at, shm, stop};
use tempfile::TempDir;
use windlass_core::error::Kind;
use windlass_core::identity::{ModelId, StateDigest, Version};
use windlass_core::manifest::{DimCut, Manifest};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::RequestMode;
use windlass_data::publish::{Folder, Part, PublishError, Publisher, Staging, Way};
use windlass_data::region::{Lease, LeaseKind, Memfd, Region, RegionError, RegionSpec};
use windlass_data::serve::{Server, ServerConfig};
use windlass_data::stop::Stop;

const PATIENCE: Duration = Duration::from_secs(30);

/// A trainer of some ranks, each of which answers for every so-manieth block.
struct Trainer {
    ranks: Vec<Publisher>,
    region: Arc<Region>,
    server: Option<Arc<Server>>,
    data: Vec<u8>,
    noise: Noise,
    home: TempDir,
}

/// Tensors of all kinds, one of them cut into columns, so that blocks are not contiguous.
fn manifest() -> Manifest {
    let cuts = [("embed".to_owned(), vec![DimCut { dim: 1, bounds: vec![1, 300, 996] }])];
    plane::odd_manifest().with_cuts(&cuts.into()).unwrap()
}

fn publisher(region: &Arc<Region>, rank: u16, blocks: BlockRanges) -> Publisher {
    let mut publisher = Publisher::new(Arc::clone(region), rank).unwrap();
    publisher.use_deltas(region.manifest(), blocks, 2).unwrap();
    publisher
}

fn mine(region: &Region, rank: u16) -> BlockRanges {
    let (blocks, ranks) = (region.manifest().cuts().blocks(), region.ranks());
    (0..blocks).filter(|b| b % u32::from(ranks) == u32::from(rank)).map(|b| b..b + 1).collect()
}

fn config() -> ServerConfig {
    ServerConfig { check_every: 0, ..plane::config() }
}

impl Trainer {
    fn new(ranks: u16, config: Option<ServerConfig>) -> Trainer {
        let home = shm();
        let region = Region::create(&RegionSpec {
            ranks,
            memfd: Memfd::Never,
            ..RegionSpec::new(
                home.path().join("region"),
                ModelId::new("actor").unwrap(),
                Arc::new(manifest()),
            )
        })
        .unwrap();
        let data = vec![0; region.manifest().data_bytes() as usize];
        let mut trainer =
            Trainer { ranks: Vec::new(), region, server: None, data, noise: Noise(0x1234_5678_9abc), home };
        trainer.noise.fill_fast(&mut trainer.data);
        for rank in 0..ranks {
            trainer.ranks.push(trainer.rank(rank));
        }
        if let Some(config) = config {
            trainer.serve(config);
        }
        trainer
    }

    fn rank(&self, rank: u16) -> Publisher {
        publisher(&self.region, rank, mine(&self.region, rank))
    }

    fn serve(&mut self, config: ServerConfig) {
        self.server = Some(Arc::new(Server::start(Arc::clone(&self.region), config).unwrap()));
    }

    fn server(&self) -> &Arc<Server> {
        self.server.as_ref().unwrap()
    }

    fn change(&mut self, per_mille: u64) {
        for _ in 0..(self.data.len() as u64 * per_mille / 1000).max(1) {
            let at = self.noise.below(self.data.len() as u64) as usize;
            self.data[at] = self.data[at].wrapping_add(1 + self.noise.below(3) as u8);
        }
    }

    fn digest(&self) -> StateDigest {
        digest(self.region.manifest(), &self.data)
    }

    fn folder(&self) -> Folder {
        Folder::new(self.region.parts_dir())
    }

    /// All ranks copy `version`.
    fn copy(&mut self, version: Version) -> Vec<Result<(), PublishError>> {
        let data = &self.data;
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                self.ranks.iter_mut().map(|r| scope.spawn(move || copy(r, data, version))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    /// All ranks begin to publish `version` by delta.
    fn begin(&mut self, version: Version) {
        for rank in &mut self.ranks {
            let base = match rank.way(version, &stop()).unwrap() {
                Way::Delta { base } => base,
                Way::Copy { why } => panic!("a copy: {why}"),
            };
            assert!(base < version);
            bring(rank, &self.data, version, PATIENCE);
        }
    }

    fn settle(&mut self) -> Vec<Result<(), PublishError>> {
        self.ranks.iter_mut().map(|r| r.settle(&stop())).collect()
    }

    fn delta(&mut self, version: Version) {
        self.begin(version);
        self.settle().into_iter().for_each(Result::unwrap);
        self.check(version);
    }

    /// What is committed is what the trainer has.
    fn check(&self, version: Version) {
        let active = self.region.state().active.unwrap();
        assert_eq!(active.version, version);
        let lease = self.region.lease(active.id, LeaseKind::Map, PATIENCE).unwrap();
        assert!(lease.data() == self.data, "version {version} is damaged");
        lease.finish().unwrap();
    }

    /// Waits until the slot of `version` is sealed.
    fn sealed(&self, version: Version) -> StateDigest {
        let mut found = None;
        eventually("the version is sealed", || {
            let state = self.region.state();
            let slots = [state.active, state.inactive];
            found = slots.into_iter().flatten().find(|s| s.version == version).and_then(|s| s.sealed);
            found.is_some()
        });
        found.unwrap()
    }

    fn served(&self, version: Version) -> StateDigest {
        let seen = Some((self.region.incarnation(), version - 1));
        let info = self.server().wait_version(seen, &stop());
        assert_eq!(info.version, Some(version), "{:?}", self.server().failure());
        info.digest.unwrap()
    }

    /// Keeps the slot that lags behind from being written.
    fn hold(&self) -> Lease {
        let id = self.region.state().inactive.unwrap().id;
        self.region.lease(id, LeaseKind::Map, PATIENCE).unwrap()
    }

    fn count(&self, which: impl Fn(&windlass_data::serve::Counters) -> &std::sync::atomic::AtomicU64) -> u64 {
        which(self.server().counters()).load(Ordering::Relaxed)
    }

    /// A trainer that has published 1 (a copy), 2 and 3.
    fn third(ranks: u16, config: Option<ServerConfig>) -> Trainer {
        let mut trainer = Trainer::new(ranks, config);
        trainer.copy(1).into_iter().for_each(Result::unwrap);
        for version in 2..4 {
            trainer.change(5);
            trainer.delta(version);
        }
        trainer
    }
}

fn copy(rank: &mut Publisher, data: &[u8], version: Version) -> Result<(), PublishError> {
    let (region, blocks) = (Arc::clone(rank.region()), mine(rank.region(), rank.rank()));
    rank.copy(version, &stop(), |attempt| {
        for block in blocks.iter() {
            let block = region.manifest().cuts().block(block).unwrap();
            for run in region.manifest().byte_runs(&block) {
                // An error if another rank has given the attempt up.
                attempt.write(run.start, &data[run.start as usize..run.end as usize])?;
            }
        }
        Ok(())
    })
}

fn bring(rank: &mut Publisher, data: &[u8], version: Version, timeout: Duration) {
    let manifest = Arc::clone(rank.region().manifest());
    let staging = Staging::new(manifest.data_bytes()).unwrap();
    for block in mine(rank.region(), rank.rank()).iter() {
        for run in manifest.byte_runs(&manifest.cuts().block(block).unwrap()) {
            staging.memory().copy_in(run.start, &data[run.start as usize..run.end as usize]);
        }
    }
    rank.publish(version, Box::new(staging), timeout).unwrap();
}

#[test]
fn slots_that_follow_by_records_hold_what_a_copy_would() {
    for (ranks, agent) in [(1, false), (3, false), (1, true), (3, true)] {
        let mut trainer = Trainer::new(ranks, agent.then(config));
        trainer.copy(1).into_iter().for_each(Result::unwrap);
        trainer.check(1);
        // Little, nothing, nearly everything, and little again after numbers were left out.
        for (version, per_mille) in [(2, 5), (3, 5), (4, 0), (5, 3000), (6, 5), (9, 20), (10, 5)] {
            if per_mille > 0 {
                trainer.change(per_mille);
            }
            trainer.delta(version);
            if agent {
                assert_eq!(trainer.sealed(version), trainer.digest());
            }
        }
    }
}

#[test]
fn ranks_that_copy_and_ranks_that_bring_deltas_fill_one_slot() {
    let mut trainer = Trainer::third(3, Some(config()));
    for version in 4..8 {
        trainer.change(5);
        let data = trainer.data.clone();
        let copies = version as usize % 3;
        for (i, rank) in trainer.ranks.iter_mut().enumerate().filter(|(i, _)| *i != copies) {
            match rank.way(version, &stop()).unwrap() {
                Way::Delta { .. } => bring(rank, &data, version, PATIENCE),
                Way::Copy { why } => panic!("rank {i} after {version}: {why}"),
            }
        }
        copy(&mut trainer.ranks[copies], &data, version).unwrap();
        trainer.settle().into_iter().for_each(Result::unwrap);
        trainer.check(version);
        assert_eq!((trainer.sealed(version), trainer.served(version)), (trainer.digest(), trainer.digest()));
    }
    assert_eq!(trainer.count(|c| &c.contradictions), 0);
}

#[test]
fn a_version_is_served_by_delta_before_its_slot_is_whole() {
    for ranks in [1, 3] {
        let mut trainer = Trainer::third(ranks, Some(config()));
        let old = trainer.digest();
        assert_eq!(trainer.sealed(3), old);
        let (home, late, whole) = (shm(), shm(), shm());
        let mut follower = receiver(&home, Arc::clone(trainer.server()) as _);
        follower.sync(&stop()).unwrap();
        let held = trainer.hold();
        trainer.change(5);
        trainer.begin(4);
        let new = trainer.digest();
        assert_eq!(trainer.served(4), new);
        assert_eq!(trainer.region.state().active.unwrap().version, 3, "its slot is not written yet");

        let synced = follower.sync(&stop()).unwrap();
        let image = synced.image.unwrap();
        assert_eq!((synced.mode, image.identity.version, image.digest), ("delta", 4, new));
        assert_eq!(image_bytes(&follower), trainer.data);

        // Whoever has nothing gets the newest image, and is lifted by what it asks for next.
        let mut joiner = receiver(&late, Arc::clone(trainer.server()) as _);
        let synced = joiner.sync(&stop()).unwrap();
        let image = synced.image.unwrap();
        assert_eq!((synced.mode, image.identity.version, image.digest), ("full", 3, old));
        let synced = joiner.sync(&stop()).unwrap();
        assert_eq!((synced.mode, synced.image.unwrap().digest), ("delta", new));

        // Whoever wants images only, and has this one, waits for the slot.
        let image = whole.path().join("image");
        let mut full = receiver_at(image, Arc::clone(trainer.server()) as _, RequestMode::Full);
        assert_eq!(full.sync(&stop()).unwrap().image.unwrap().identity.version, 3);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| full.sync(&stop()).unwrap());
            held.finish().unwrap();
            trainer.settle().into_iter().for_each(Result::unwrap);
            let synced = waiting.join().unwrap();
            assert_eq!((synced.mode, synced.image.unwrap().digest), ("full", new));
        });
        trainer.check(4);
        assert_eq!(trainer.sealed(4), new);
        // 2, 3 and 4, none of which was compared.
        assert_eq!(trainer.count(|c| &c.joined), 3);
        eventually("all are sealed", || trainer.count(|c| &c.sealed_by_delta) == 3);
        assert_eq!(trainer.server().delta().unwrap().version, 4);
    }
}

#[test]
fn parts_that_come_while_the_agent_is_away_are_served_when_it_comes_back() {
    let mut trainer = Trainer::third(2, Some(config()));
    trainer.sealed(3);
    trainer.server = None;
    let held = trainer.hold();
    trainer.change(5);
    trainer.begin(4);
    let placed = |t: &Trainer| t.folder().complete(2, 3) == [4];
    eventually("both parts are there", || placed(&trainer));
    trainer.serve(config());
    assert_eq!(trainer.served(4), trainer.digest());
    // And again: nothing of what it knew is lost with it.
    trainer.server = None;
    trainer.serve(config());
    assert_eq!(trainer.served(4), trainer.digest());
    held.finish().unwrap();
    trainer.settle().into_iter().for_each(Result::unwrap);
    assert_eq!(trainer.sealed(4), trainer.digest());
}

/// Sets the check sums of a container's header after it was changed.
fn mend_header(bytes: &mut [u8]) {
    let len = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
    let sum = xxhash_rust::xxh3::xxh3_64(&bytes[..len - 8]);
    bytes[len - 8..len].copy_from_slice(&sum.to_le_bytes());
}

fn changed(path: &std::path::Path, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn torn_and_contradicting_parts_are_sealed_the_ordinary_way() {
    type Tamper = fn(&Trainer, &std::path::Path);
    // How a part is spoilt, and whether that contradicts what is known and so asks for a copy.
    let cases: [(&str, Tamper, bool); 8] = [
        ("torn", |_, p| changed(p, |b| b.truncate(b.len() - 40)), false),
        ("empty", |_, p| changed(p, Vec::clear), false),
        ("a byte flipped", |_, p| changed(p, |b| *b.last_mut().unwrap() ^= 1), false),
        (
            "a record flipped",
            |_, p| {
                changed(p, |b| {
                    let at = b.len() - 60;
                    b[at] ^= 1;
                });
            },
            false,
        ),
        (
            "another base",
            |_, p| {
                changed(p, |b| {
                    b[44] ^= 1;
                    mend_header(b);
                });
            },
            true,
        ),
        (
            "another target",
            |_, p| {
                changed(p, |b| {
                    b[60] ^= 1;
                    mend_header(b);
                });
            },
            true,
        ),
        (
            "the other rank's",
            |t, p| {
                fs::copy(t.folder().path(Part::Delta { version: 4, rank: 0 }), p).unwrap();
            },
            true,
        ),
        (
            "without a roster",
            |t, _| {
                fs::remove_file(t.folder().path(Part::Roster { rank: 1 })).unwrap();
            },
            false,
        ),
    ];
    for (how, tamper, contradicts) in cases {
        let mut trainer = Trainer::third(2, Some(config()));
        trainer.sealed(3);
        trainer.server = None;
        let held = trainer.hold();
        trainer.change(5);
        trainer.begin(4);
        eventually("both parts are there", || trainer.folder().complete(2, 3) == [4]);
        tamper(&trainer, &trainer.folder().path(Part::Delta { version: 4, rank: 1 }));
        trainer.serve(config());
        eventually("the parts are refused", || trainer.count(|c| &c.parts_refused) == 1);
        assert_eq!(trainer.server().version().version, Some(3), "{how}");
        held.finish().unwrap();
        trainer.settle().into_iter().for_each(Result::unwrap);
        assert_eq!((trainer.served(4), trainer.sealed(4)), (trainer.digest(), trainer.digest()), "{how}");
        assert_eq!(trainer.count(|c| &c.sealed_by_delta), 0, "{how}");
        assert_eq!(trainer.count(|c| &c.contradictions), u64::from(contradicts), "{how}");
        assert_eq!(trainer.server().contradiction().is_some(), contradicts, "{how}");
        for rank in &mut trainer.ranks {
            let way = rank.way(5, &stop()).unwrap();
            assert_eq!(
                matches!(&way, Way::Copy { why } if why.contains("doubt")),
                contradicts,
                "{how}: {way:?}"
            );
        }
        // After a copy the doubt is over.
        trainer.change(5);
        trainer.copy(5).into_iter().for_each(Result::unwrap);
        assert_eq!(trainer.sealed(5), trainer.digest());
        if how != "without a roster" {
            trainer.change(5);
            trainer.delta(6);
            assert_eq!(trainer.sealed(6), trainer.digest());
            assert_eq!(trainer.count(|c| &c.joined), 1, "{how}");
        }
    }
}

#[test]
fn a_number_that_was_handed_out_is_not_given_to_other_bytes() {
    let mut trainer = Trainer::third(2, Some(config()));
    trainer.sealed(3);
    let held = trainer.hold();
    trainer.change(5);
    for rank in &mut trainer.ranks {
        assert!(matches!(rank.way(4, &stop()).unwrap(), Way::Delta { base: 3 }));
        bring(rank, &trainer.data, 4, Duration::from_millis(300));
    }
    let new = trainer.digest();
    assert_eq!(trainer.served(4), new);
    for result in trainer.settle() {
        let error = result.unwrap_err();
        assert!(matches!(error.kind(), Kind::Timeout | Kind::Stale), "{error}");
        assert!(error.to_string().contains("version 4 was not committed"), "{error}");
    }
    held.finish().unwrap();
    for restarted in [false, true] {
        if restarted {
            trainer.ranks.clear();
            trainer.ranks = (0..2).map(|rank| trainer.rank(rank)).collect();
        }
        assert!(trainer.ranks.iter().all(|r| r.newest() == Some(4)));
        assert!(matches!(trainer.ranks[0].way(4, &stop()).unwrap(), Way::Copy { .. }));
        let kept = trainer.data.clone();
        trainer.data.iter_mut().for_each(|b| *b ^= 1);
        let errors: Vec<_> = trainer.copy(4).into_iter().map(Result::unwrap_err).collect();
        // Who is slower may hear of the other's refusal before it comes to its own.
        let is_refusal = |e: &PublishError| matches!(e, PublishError::Taken { .. });
        assert!(errors.iter().any(is_refusal), "{errors:?}");
        let is_told = |e: &PublishError| matches!(e, PublishError::Region(RegionError::Aborted { .. }));
        assert!(errors.iter().all(|e| is_refusal(e) || is_told(e)), "{errors:?}");
        trainer.data = kept;
        assert_eq!(trainer.region.state().active.unwrap().version, 3);
        assert!(trainer.ranks[0].way(3, &stop()).is_err(), "an older number is no better");
    }
    // The same bytes are fine, and so is a later number.
    trainer.copy(4).into_iter().for_each(Result::unwrap);
    trainer.check(4);
    assert_eq!((trainer.sealed(4), trainer.served(4)), (new, new));
    trainer.change(5);
    trainer.delta(5);
    assert_eq!(trainer.sealed(5), trainer.digest());
}

#[test]
fn a_version_that_was_handed_out_and_never_committed_is_overtaken() {
    let mut trainer = Trainer::third(1, Some(config()));
    trainer.sealed(3);
    let home = shm();
    let mut follower = receiver(&home, Arc::clone(trainer.server()) as _);
    let held = trainer.hold();
    trainer.change(5);
    assert!(matches!(trainer.ranks[0].way(4, &stop()).unwrap(), Way::Delta { .. }));
    bring(&mut trainer.ranks[0], &trainer.data, 4, Duration::from_millis(200));
    trainer.served(4);
    follower.sync(&stop()).unwrap();
    follower.sync(&stop()).unwrap();
    assert_eq!(follower.current().unwrap().identity.version, 4);
    assert!(trainer.settle().remove(0).is_err());
    held.finish().unwrap();
    trainer.change(5);
    trainer.copy(5).into_iter().for_each(Result::unwrap);
    trainer.served(5);
    let image = follower.sync(&stop()).unwrap().image.unwrap();
    assert_eq!((image.identity.version, image.digest), (5, trainer.digest()));
}

/// Flips bits of a byte of the slot that lags behind.
fn flip(trainer: &Trainer, at: u64, bits: u8) {
    let slot = trainer.region.state().inactive.unwrap().slot;
    let file = fs::File::options().read(true).write(true).open(trainer.region.slot_path(slot)).unwrap();
    let at = trainer.region.data_start() + at;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ bits], at).unwrap();
}

#[test]
fn a_slot_that_rots_unseen_is_found_withdrawn_and_copied_anew() {
    let mut trainer = Trainer::new(2, Some(ServerConfig { check_every: 1, ..config() }));
    trainer.copy(1).into_iter().for_each(Result::unwrap);
    for version in 2..4 {
        trainer.data[0] ^= 1;
        trainer.delta(version);
    }
    trainer.sealed(3);
    eventually("the slots were looked at", || trainer.count(|c| &c.checked) == 2);
    // Where no record ever leads: nobody but a sum of all bytes can see it.
    flip(&trainer, trainer.data.len() as u64 - 1, 0x10);
    trainer.data[0] ^= 1;
    trainer.begin(4);
    trainer.settle().into_iter().for_each(Result::unwrap);
    eventually("it is found", || trainer.count(|c| &c.contradictions) == 1);
    let said = trainer.server().contradiction().unwrap();
    assert!(said.contains("version 4") && said.contains("other bytes"), "{said}");
    // By delta it is right; from the slot it is not to be had.
    assert_eq!(trainer.served(4), trainer.digest());
    assert!(matches!(trainer.ranks[1].way(5, &stop()).unwrap(), Way::Copy { why } if why.contains("doubt")));
    trainer.copy(5).into_iter().for_each(Result::unwrap);
    trainer.served(5);
    let home = shm();
    let image = receiver(&home, Arc::clone(trainer.server()) as _).sync(&stop()).unwrap().image.unwrap();
    assert_eq!((image.identity.version, image.digest), (5, trainer.digest()));
    trainer.change(5);
    trainer.delta(6);
    assert_eq!(trainer.sealed(6), trainer.digest());
}

#[test]
fn a_block_that_records_do_not_fit_is_copied_from_the_other_slot() {
    let mut trainer = Trainer::third(2, Some(config()));
    trainer.sealed(3);
    // The sign of a float that changes, in a contiguous block and in one of columns: the same step leads the other way.
    let embed = trainer.region.manifest().tensors()[trainer.region.manifest().find("embed").unwrap()].offset;
    for (low, sign) in [(0, 3), (embed, embed + 1)] {
        flip(&trainer, sign, 0x80);
        trainer.data[low as usize] ^= 1;
    }
    trainer.delta(4);
    assert_eq!((trainer.served(4), trainer.sealed(4)), (trainer.digest(), trainer.digest()));
}

#[test]
fn parts_of_the_dead_and_of_the_past_are_collected() {
    let mut trainer = Trainer::third(2, Some(config()));
    let deltas = |t: &Trainer| {
        let of = |part| match part {
            Part::Delta { version, .. } => Some(version),
            Part::Roster { .. } | Part::Doubt { .. } => None,
        };
        t.folder().list().into_iter().filter_map(of).collect::<Vec<_>>()
    };
    // A draft and a delta of a rank that is no more, and a doubt that is long over.
    fs::write(trainer.folder().path(Part::Delta { version: 2, rank: 7 }), b"old").unwrap();
    let draft = format!(".{}.tmp", Part::Delta { version: 3, rank: 7 }.name());
    fs::write(trainer.region.parts_dir().join(&draft), b"unfinished").unwrap();
    trainer.folder().put_doubt(0, "long ago").unwrap();
    for version in 4..9 {
        trainer.change(5);
        trainer.delta(version);
        trainer.sealed(version);
    }
    eventually("the past is gone", || deltas(&trainer).iter().all(|v| *v >= 8));
    assert!(!trainer.region.parts_dir().join(&draft).exists());
    assert_eq!(trainer.folder().doubt(), None);
    // Without an agent the ranks see to it themselves.
    trainer.server = None;
    for version in 9..15 {
        trainer.change(5);
        trainer.delta(version);
    }
    assert!(deltas(&trainer).iter().all(|v| *v >= 13), "{:?}", deltas(&trainer));
    let mine =
        trainer.region.parts_dir().join(format!(".{}.tmp", Part::Delta { version: 15, rank: 1 }.name()));
    fs::write(&mine, b"unfinished").unwrap();
    drop(trainer.ranks.pop());
    trainer.ranks.push(trainer.rank(1));
    assert!(!mine.exists(), "a rank that takes its place removes what its predecessor left");
}

#[test]
fn a_rank_that_is_restarted_copies_and_then_follows_by_records_again() {
    let mut trainer = Trainer::third(2, Some(config()));
    drop(trainer.ranks.remove(0));
    let again = trainer.rank(0);
    trainer.ranks.insert(0, again);
    let way = trainer.ranks[0].way(4, &stop()).unwrap();
    assert!(matches!(&way, Way::Copy { why } if why.contains("by this process")), "{way:?}");
    trainer.change(5);
    let data = trainer.data.clone();
    assert!(matches!(trainer.ranks[1].way(4, &stop()).unwrap(), Way::Delta { .. }));
    bring(&mut trainer.ranks[1], &data, 4, PATIENCE);
    copy(&mut trainer.ranks[0], &data, 4).unwrap();
    trainer.settle().into_iter().for_each(Result::unwrap);
    assert_eq!(trainer.sealed(4), trainer.digest());
    trainer.change(5);
    trainer.delta(5);
    assert_eq!(trainer.served(5), trainer.digest());
}

#[test]
fn a_rank_that_ends_ends_its_background_work() {
    let mut trainer = Trainer::third(1, Some(config()));
    trainer.sealed(3);
    let held = trainer.hold();
    trainer.change(5);
    trainer.begin(4);
    let busy = trainer.ranks[0].settle(&Stop::after(Duration::ZERO)).unwrap_err();
    assert_eq!(busy.kind(), Kind::Timeout, "{busy}");
    let begun = std::time::Instant::now();
    assert!(trainer.ranks[0].close().is_err(), "it was not committed");
    assert!(begun.elapsed() < Duration::from_secs(5), "it waited for a slot that nobody gives back");
    trainer.ranks.clear();
    held.finish().unwrap();
    assert_eq!(trainer.region.state().active.unwrap().version, 3);
    trainer.ranks.push(trainer.rank(0));
}

#[test]
fn a_receiver_follows_ranks_that_take_any_way_at_any_time() {
    let mut trainer = Trainer::third(3, Some(ServerConfig { check_every: 2, ..config() }));
    let home = shm();
    let mut follower = receiver(&home, Arc::clone(trainer.server()) as _);
    let mut noise = Noise(77);
    for version in 4..24 {
        trainer.change(1 + noise.below(20));
        if noise.below(5) == 0 {
            // One that ends in the middle of a version takes it away from the others, which is another test.
            trainer.settle().into_iter().for_each(Result::unwrap);
            let which = noise.below(3) as usize;
            drop(trainer.ranks.remove(which));
            let again = trainer.rank(which as u16);
            trainer.ranks.insert(which, again);
        }
        if noise.below(6) == 0 {
            drop(follower);
            trainer.server = None;
            trainer.serve(ServerConfig { check_every: 2, ..config() });
            follower = receiver(&home, Arc::clone(trainer.server()) as _);
        }
        let data = &trainer.data;
        std::thread::scope(|scope| {
            let mut copies = Vec::new();
            for rank in &mut trainer.ranks {
                let way = rank.way(version, &stop()).unwrap();
                if noise.below(6) > 0 && matches!(way, Way::Delta { .. }) {
                    bring(rank, data, version, PATIENCE);
                } else {
                    copies.push(scope.spawn(move || copy(rank, data, version).unwrap()));
                }
            }
        });
        trainer.served(version);
        let mut image = follower.sync(&stop()).unwrap().image;
        while image.as_ref().unwrap().identity.version < version {
            image = follower.sync(&stop()).unwrap().image;
        }
        assert_eq!(image.unwrap().digest, trainer.digest());
        assert_eq!(image_bytes(&follower), trainer.data);
        if noise.below(2) == 0 {
            trainer.settle().into_iter().for_each(Result::unwrap);
            trainer.check(version);
        }
    }
    trainer.settle().into_iter().for_each(Result::unwrap);
    trainer.check(23);
    assert_eq!(trainer.count(|c| &c.contradictions), 0);
    let _ = &trainer.home;
}

/// `cargo test --release -p windlass-data --test it -- delta_mode:: --ignored --nocapture` prints how long a trainer waits and when
/// receivers can have a version, both ways, on this machine. Figures of a CPU: the diff that a GPU makes in milliseconds
/// is part of "visible" here.
#[test]
#[ignore = "prints figures, and takes a while"]
fn figures_of_blocked_time_and_of_step_to_visible() {
    use std::time::Instant;
    use windlass_core::dtype::Dtype;
    use windlass_core::manifest::TensorSpec;
    const ELEMENTS: u64 = 128 << 20;
    let home = shm();
    let manifest =
        Manifest::new([TensorSpec::new("w", Dtype::BF16, [ELEMENTS])], std::collections::BTreeMap::new());
    let region = Region::create(&RegionSpec {
        memfd: Memfd::Never,
        ..RegionSpec::new(
            home.path().join("region"),
            ModelId::new("actor").unwrap(),
            Arc::new(manifest.unwrap()),
        )
    })
    .unwrap();
    let server = Server::start(Arc::clone(&region), plane::config()).unwrap();
    let blocks = BlockRanges::from(0..region.manifest().cuts().blocks());
    let mut rank = publisher(&region, 0, blocks);
    let mut noise = Noise(5);
    let mut data = vec![0; region.manifest().data_bytes() as usize];
    noise.fill_fast(&mut data);
    let staging = Staging::new(data.len() as u64).unwrap();
    let mut version = 0;
    for delta in [false, true] {
        let mut figures = Vec::new();
        for round in 0..7 {
            for _ in 0..data.len() / 200 {
                let at = noise.below(data.len() as u64 / 2) as usize * 2;
                data[at] = data[at].wrapping_add(1);
            }
            version += 1;
            rank.settle(&stop()).unwrap();
            let begun = Instant::now();
            let seen = (version > 1).then(|| (region.incarnation(), version - 1));
            if delta && round > 0 {
                assert!(matches!(rank.way(version, &stop()).unwrap(), Way::Delta { .. }));
                staging.memory().copy_in(0, &data);
                rank.publish(version, Box::new(staging.clone()), PATIENCE).unwrap();
            } else {
                copy(&mut rank, &data, version).unwrap();
            }
            let blocked = begun.elapsed();
            assert_eq!(server.wait_version(seen, &stop()).version, Some(version));
            let visible = begun.elapsed();
            rank.settle(&stop()).unwrap();
            if round > 1 {
                figures.push((blocked, visible, begun.elapsed()));
            }
        }
        figures.sort_unstable();
        let (blocked, visible, whole) = figures[figures.len() / 2];
        let mib = data.len() >> 20;
        let mode = if delta { "delta" } else { "copy" };
        println!(
            "{mode}: {mib} MiB, 1 % changed: blocked {blocked:?}, visible {visible:?}, slot done {whole:?}"
        );
    }
}
