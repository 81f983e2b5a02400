//! Ranks and agents that are killed at each step of a version by delta; and the formats by property.

use std::sync::Arc;
use std::time::Duration;

use windlass_core::address::Host;
use windlass_core::identity::{StateDigest, Version};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::RequestMode;

use super::*;
use crate::image::ImageSpec;
use crate::receiver::{Receiver, ReceiverConfig};
use crate::region::tests::child::{Child, PATIENCE};
use crate::region::tests::spec;
use crate::region::{LeaseKind, Memfd, Region};
use crate::seal;
use crate::serve::{Server, ServerConfig};
use crate::stop::Stop;

/// What a second process has.
#[derive(Default)]
pub(crate) struct Held {
    rank: Option<Publisher>,
    server: Option<Server>,
}

/// The commands of a second process; `None` for those that are others'.
pub(crate) fn obey(region: &Arc<Region>, held: &mut Held, line: &str) -> Option<Result<String, String>> {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |i: usize| words[i].parse::<u64>().unwrap();
    let rank = |held: &mut Held| held.rank.take().unwrap();
    let result = match words[0] {
        "publisher" => {
            held.rank = Some(take(region, number(1) as u16));
            Ok(())
        }
        "publish-copy" | "publish-delta" => {
            let mut mine = rank(held);
            let version = number(1);
            let patience = words.get(2).map_or(PATIENCE, |_| Duration::from_millis(number(2)));
            let result = if words[0] == "publish-copy" {
                copy(&mut mine, version)
            } else {
                bring(&mut mine, version, patience).and_then(|()| mine.settle(&stop()))
            };
            held.rank = Some(mine);
            result
        }
        "serve" => {
            held.server = Some(serve(region));
            Ok(())
        }
        _ => return None,
    };
    Some(result.map(|()| String::new()).map_err(|e| e.to_string()))
}

fn stop() -> Stop {
    Stop::after(PATIENCE)
}

/// Every second block.
fn blocks(region: &Region, rank: u16) -> BlockRanges {
    let blocks = (0..region.manifest().cuts().blocks()).filter(|b| b % 2 == u32::from(rank));
    blocks.map(|b| b..b + 1).collect()
}

fn take(region: &Arc<Region>, rank: u16) -> Publisher {
    let mut publisher = Publisher::new(Arc::clone(region), rank).unwrap();
    publisher.use_deltas(region.manifest(), blocks(region, rank), 1).unwrap();
    publisher
}

fn serve(region: &Arc<Region>) -> Server {
    let config =
        ServerConfig { threads: 1, check_every: 1, ..ServerConfig::new(Host::new("127.0.0.1").unwrap()) };
    Server::start(Arc::clone(region), config).unwrap()
}

/// The image of a version: each changes some places of the one before.
fn data(region: &Region, version: Version) -> Vec<u8> {
    let len = region.manifest().data_bytes();
    let mut data: Vec<u8> = (0..len).map(|i| (i.wrapping_mul(31) ^ i >> 8) as u8).collect();
    for v in 1..=version {
        for k in 0..200u64 {
            let at = (v << 20 | k).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
            let at = (at % len) as usize;
            data[at] = data[at].wrapping_add(1);
        }
    }
    data
}

fn digest(region: &Region, version: Version) -> StateDigest {
    let all = BlockRanges::from(0..region.manifest().cuts().blocks());
    let data = data(region, version);
    let kernels = crate::simd::kernels();
    seal::sums(kernels, region.manifest(), &all, &data, 1, &stop()).unwrap().digest(region.manifest())
}

fn each_run(rank: &Publisher, data: &[u8], mut put: impl FnMut(u64, &[u8])) {
    let manifest = rank.region().manifest();
    for block in blocks(rank.region(), rank.rank()).iter() {
        for run in manifest.byte_runs(&manifest.cuts().block(block).unwrap()) {
            put(run.start, &data[run.start as usize..run.end as usize]);
        }
    }
}

fn copy(rank: &mut Publisher, version: Version) -> Result<(), PublishError> {
    rank.begin(version, &stop())?;
    let attempt = rank.attempt()?;
    each_run(rank, &data(rank.region(), version), |at, bytes| attempt.write(at, bytes).unwrap());
    rank.commit(None, &stop()).map(drop)
}

fn bring(rank: &mut Publisher, version: Version, timeout: Duration) -> Result<(), PublishError> {
    if let Way::Copy { why } = rank.way(version, &stop())? {
        return Err(PublishError::NeedsCopy { rank: rank.rank(), version, why });
    }
    let staging = Staging::new(rank.region().manifest().data_bytes())?;
    let memory = Arc::clone(staging.memory());
    each_run(rank, &data(rank.region(), version), |at, bytes| memory.copy_in(at, bytes));
    rank.publish(version, Box::new(staging), timeout)
}

/// What is active is this version, byte for byte.
fn check(region: &Arc<Region>, version: Version) {
    let active = region.state().active.unwrap();
    assert_eq!(active.version, version);
    let lease = region.lease(active.id, LeaseKind::Map, PATIENCE).unwrap();
    assert!(lease.data() == data(region, version), "version {version} is damaged");
    lease.finish().unwrap();
}

/// Two ranks, one of them a child, an agent and a receiver.
struct World {
    region: Arc<Region>,
    mine: Publisher,
    child: Option<Child>,
    rank: u16,
    version: Version,
    follower: Receiver,
    server: Arc<Server>,
    _home: tempfile::TempDir,
}

impl World {
    fn new(rank: u16) -> World {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let region = Region::create(&spec(home.path(), 2)).unwrap();
        let mine = take(&region, 1 - rank);
        let server = Arc::new(serve(&region));
        let follower = receiver(home.path(), &server);
        let mut world = World { region, mine, child: None, rank, version: 0, follower, server, _home: home };
        world.restart();
        world.publish("copy");
        world.publish("delta");
        world
    }

    fn restart(&mut self) {
        let mut child = Child::open(self.region.dir());
        child.ask(&format!("publisher {}", self.rank)).unwrap();
        self.child = Some(child);
    }

    /// Both ranks publish the next version in the same way, and everybody gets it.
    fn publish(&mut self, way: &str) {
        self.version += 1;
        let version = self.version;
        let child = self.child.as_mut().unwrap();
        child.send(&format!("publish-{way} {version}"));
        if way == "copy" {
            copy(&mut self.mine, version).unwrap();
        } else {
            bring(&mut self.mine, version, PATIENCE).unwrap();
            self.mine.settle(&stop()).unwrap();
        }
        assert_eq!(self.child.as_ref().unwrap().done(), Ok(String::new()));
        check(&self.region, version);
        self.follow(version);
    }

    /// The receiver gets this version, and it is the right one.
    fn follow(&mut self, version: Version) {
        let seen = version.checked_sub(1).map(|v| (self.region.incarnation(), v));
        let info = self.server.wait_version(seen, &stop());
        assert_eq!(info.version, Some(version), "{:?}", self.server.failure());
        while self.follower.current().is_none_or(|k| k.identity.version < version) {
            self.follower.sync(&stop()).unwrap();
        }
        let known = self.follower.current().unwrap();
        assert_eq!((known.identity.version, known.digest), (version, digest(&self.region, version)));
    }
}

fn receiver(home: &std::path::Path, server: &Arc<Server>) -> Receiver {
    let config = ReceiverConfig {
        slice: None,
        image: ImageSpec {
            dir: home.join("image"),
            model_id: server.region().model_id().clone(),
            group: false,
            memfd: Memfd::Never,
            threads: 1,
        },
        name: "test".into(),
        mode: RequestMode::Auto,
        streams: Some(1),
        transfer_timeout: PATIENCE,
        open_timeout: PATIENCE,
        pull: crate::tcp::PullConfig::default(),
        nixl: None,
        allow: None,
        keep: None,
        share: None,
        relaying: None,
    };
    Receiver::open(config, Arc::clone(server) as _, None, &stop()).unwrap()
}

/// Before a rank has joined the attempt, and after.
const BEFORE: [&str; 3] = ["part", "part-drafted", "part-placed"];
const LEAD: [&str; 7] = ["guard", "open", "joined", "barrier", "applying:1", "done", "committing"];
const OTHER: [&str; 3] = ["joined", "barrier", "applying:1"];

#[test]
fn a_rank_killed_at_every_step_of_a_delta_leaves_nothing_wrong() {
    for (rank, after) in [(0, LEAD.as_slice()), (1, OTHER.as_slice())] {
        let mut world = World::new(rank);
        for step in BEFORE.iter().chain(after) {
            let (before, next) = (world.version, world.version + 1);
            // A rank that has not joined may be restarted in time, so its death alone does not end the wait.
            let joined = !BEFORE.contains(step) && !matches!(*step, "guard" | "open");
            let mut victim = world.child.take().unwrap();
            if joined {
                bring(&mut world.mine, next, PATIENCE).unwrap();
            }
            victim.run_to(step, &format!("publish-delta {next}"));
            if !joined {
                bring(&mut world.mine, next, Duration::from_millis(300)).unwrap();
            }
            victim.kill();
            let error = world.mine.settle(&stop()).unwrap_err();
            assert!(error.to_string().contains("was not committed"), "{step}: {error}");
            check(&world.region, before);
            // It was served if both deltas were there, and then it was the right one.
            let info = world.server.version();
            match info.version {
                Some(served) if served == next => {
                    assert!(!["part", "part-drafted"].contains(step), "{step}: one delta is missing");
                    assert_eq!(info.digest, Some(digest(&world.region, next)), "{step}");
                }
                served => assert_eq!(served, Some(before), "{step}"),
            }
            assert!(matches!(world.mine.way(next + 1, &stop()).unwrap(), Way::Copy { .. }), "{step}");
            world.version = next;
            world.restart();
            world.publish("copy");
            world.publish("delta");
        }
        // Once the lead has committed, or another rank is done, its death costs nothing.
        let next = world.version + 1;
        let mut victim = world.child.take().unwrap();
        bring(&mut world.mine, next, PATIENCE).unwrap();
        victim.run_to(if rank == 0 { "committed" } else { "done" }, &format!("publish-delta {next}"));
        victim.kill();
        world.mine.settle(&stop()).unwrap();
        check(&world.region, next);
        world.follow(next);
        assert_eq!(world.server.contradiction(), None);
    }
}

#[test]
fn a_stopped_rank_holds_up_a_delta_for_its_deadline_and_brings_nothing_into_later_ones() {
    let mut world = World::new(1);
    for step in ["part-drafted", "barrier", "applying:1"] {
        let (before, next) = (world.version, world.version + 1);
        let mut victim = world.child.take().unwrap();
        let drafted = step == "part-drafted";
        if !drafted {
            bring(&mut world.mine, next, Duration::from_millis(1500)).unwrap();
        }
        victim.run_to(step, &format!("publish-delta {next} 3000"));
        if drafted {
            bring(&mut world.mine, next, Duration::from_millis(300)).unwrap();
        }
        victim.stop();
        assert!(world.mine.settle(&stop()).is_err(), "{step}");
        check(&world.region, before);
        // It wakes up when its attempt is long over.
        victim.cont();
        victim.go_on();
        let late = victim.done();
        assert!(late.is_err(), "{step}: {late:?}");
        world.version = next;
        world.child = Some(victim);
        world.publish("copy");
        world.publish("delta");
    }
}

#[test]
fn an_agent_killed_while_it_joins_is_made_up_for() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 2)).unwrap();
    let mut ranks = [take(&region, 0), take(&region, 1)];
    let mut version = 1;
    std::thread::scope(|scope| {
        let [a, b] = &mut ranks;
        scope.spawn(move || copy(a, 1).unwrap());
        copy(b, 1).unwrap();
    });
    let wait = |what: &dyn Fn() -> bool| {
        let stop = stop();
        while !what() {
            assert!(!stop.is_set());
            std::thread::yield_now();
        }
    };
    let sealed =
        |v| region.state().active.is_some_and(|s| s.version == v && s.sealed == Some(digest(&region, v)));
    for step in ["join", "linked", "served", "sealing", "sealed"] {
        // Somebody has to have sealed what the delta begins from.
        {
            let mut agent = Child::open(region.dir());
            agent.ask("serve").unwrap();
            wait(&|| sealed(version));
            agent.kill();
        }
        let mut agent = Child::open(region.dir());
        agent.ask("serve").unwrap();
        agent.ask(&format!("stop-at {step}")).unwrap();
        version += 1;
        for rank in &mut ranks {
            bring(rank, version, PATIENCE).unwrap();
        }
        agent.arrive(step);
        agent.kill();
        for rank in &mut ranks {
            rank.settle(&stop()).unwrap();
        }
        check(&region, version);
        let server = Arc::new(serve(&region));
        let seen = Some((region.incarnation(), version - 1));
        let info = server.wait_version(seen, &stop());
        assert_eq!((info.version, info.digest), (Some(version), Some(digest(&region, version))), "{step}");
        wait(&|| sealed(version));
        let mut follower = receiver(home.path(), &server);
        while follower.current().is_none_or(|k| k.identity.version < version) {
            follower.sync(&stop()).unwrap();
        }
        assert_eq!(follower.current().unwrap().digest, digest(&region, version), "{step}");
        assert_eq!(server.contradiction(), None, "{step}");
    }
}
