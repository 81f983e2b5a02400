//! Syncs over a bad network, between processes that are killed.
//!
//! A publisher's rank, its agent and a receiver are child processes; between receiver and agent lies a relay that drops,
//! delays, truncates, resets, stalls and flips bits. Every sync ends with equal digests or a named error, in time, and
//! nothing is left behind. `WINDLASS_SEED` repeats a run, `WINDLASS_SOAK` says how many syncs (`make soak`: 1,000).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plane::child::{Child, Weights, in_a_process_of_its_own};
use crate::plane::proxy::Via;
use crate::plane::remote::{Desk, Remote};
use crate::plane::{Noise, digest, odd_manifest, shm};
use tempfile::TempDir;
use windlass_core::identity::ModelId;
use windlass_data::receiver::Control;
use windlass_data::region::{Memfd, Region, RegionSpec};

/// What a sync may take, in milliseconds.
const DEADLINE: u64 = 3000;
/// The same when nothing is wrong but that the machine may be busy.
const IN_PEACE: u64 = 30_000;
/// What it may take beyond that: the answer of a control connection that began just before, and a busy machine.
const SLACK: u64 = 30_000;
/// For what a process says of itself.
const PATIENCE: Duration = Duration::from_secs(60);

fn seed() -> u64 {
    match std::env::var("WINDLASS_SEED") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => std::process::id().into(),
    }
}

fn syncs() -> u64 {
    std::env::var("WINDLASS_SOAK").map_or(60, |n| n.parse().unwrap())
}

/// Says how to repeat a run that failed.
struct Repeat(u64);

impl Drop for Repeat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("repeat with WINDLASS_SEED={}", self.0);
        }
    }
}

/// What a process has open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Open {
    descriptors: usize,
    threads: usize,
}

fn open(pid: u32) -> Open {
    let count = |what| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
    Open { descriptors: count("fd"), threads: count("task") }
}

/// The world of one run.
struct World {
    noise: Noise,
    seed: u64,
    home: TempDir,
    region: Option<Arc<Region>>,
    weights: Weights,
    /// Of the present life.
    digests: BTreeMap<u64, String>,
    version: u64,
    lives: u64,
    agent: Child,
    rank: Child,
    receiver: Child,
    /// The way from the receiver to the agent.
    via: Arc<Via>,
    desk: Option<Desk>,
    tally: BTreeMap<String, u64>,
}

fn create(home: &Path) -> Arc<Region> {
    Region::create(&RegionSpec {
        memfd: Memfd::Never,
        ..RegionSpec::new(home.join("region"), ModelId::new("actor").unwrap(), Arc::new(odd_manifest()))
    })
    .unwrap()
}

impl World {
    fn new(seed: u64) -> World {
        let home = shm();
        let path = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
        let region = create(home.path());
        let agent = Child::spawn("agent", &[&path("region")]);
        let rank = Child::spawn("rank", &[&path("region"), &seed.to_string()]);
        let via = Via::new(Arc::new(Remote(PathBuf::from(path("region/desk.sock")))));
        let desk = Desk::open(&home.path().join("via.sock"), Arc::clone(&via) as Arc<dyn Control>);
        let receiver = Child::spawn("receiver", &[&path("image"), &path("via.sock")]);
        let weights = Weights::new(&odd_manifest(), seed);
        World {
            noise: Noise(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
            seed,
            home,
            region: Some(region),
            weights,
            digests: BTreeMap::new(),
            version: 0,
            lives: 1,
            agent,
            rank,
            receiver,
            via,
            desk: Some(desk),
            tally: BTreeMap::new(),
        }
    }

    fn path(&self, name: &str) -> String {
        self.home.path().join(name).to_str().unwrap().to_owned()
    }

    fn count(&mut self, what: &str) {
        *self.tally.entry(what.to_owned()).or_default() += 1;
    }

    /// The digest that a version must have.
    fn expected(&mut self, version: u64) -> &str {
        while self.weights.version < version {
            let next = self.weights.version + 1;
            self.weights.go_to(next);
            let text = digest(&odd_manifest(), &self.weights.data).to_string();
            self.digests.insert(next, text);
        }
        &self.digests[&version]
    }

    fn begin_publish(&mut self) -> u64 {
        self.version += 1;
        let version = self.version;
        self.rank.say(&version.to_string());
        version
    }

    fn end_publish(&mut self, version: u64) {
        let line = self.rank.hear(PATIENCE);
        assert_eq!(line, Some(format!("published {version}")));
    }

    fn publish(&mut self) {
        let version = self.begin_publish();
        self.end_publish(version);
    }

    fn kill_agent(&mut self) {
        self.agent.kill();
        self.agent = Child::spawn("agent", &[&self.path("region")]);
        self.count("agents killed");
    }

    fn kill_rank(&mut self) {
        self.rank.kill();
        self.start_rank();
        self.count("ranks killed");
    }

    fn start_rank(&mut self) {
        let life = self.seed ^ (self.lives - 1);
        self.rank = Child::start("rank", &[&self.path("region"), &life.to_string()]);
        let line = self.rank.hear(PATIENCE).unwrap();
        // What was under way may have been committed, or not.
        self.version = line.strip_prefix("ready ").unwrap().parse().unwrap();
    }

    fn kill_receiver(&mut self) {
        self.receiver.kill();
        let mode = if self.noise.below(3) == 0 { "full" } else { "auto" };
        self.receiver = Child::spawn("receiver", &[&self.path("image"), &self.path("via.sock"), mode]);
        self.count("receivers killed");
    }

    /// The publisher dies as a whole and begins again.
    fn new_life(&mut self) {
        self.agent.kill();
        self.rank.kill();
        self.region = None;
        self.lives += 1;
        self.region = Some(create(self.home.path()));
        self.agent = Child::spawn("agent", &[&self.path("region")]);
        self.weights = Weights::new(&odd_manifest(), self.seed ^ (self.lives - 1));
        self.digests.clear();
        self.start_rank();
        self.publish();
        self.count("new lives");
    }

    /// Waits for the end of a sync that began at `start`, and judges it. Answers whether it brought a version.
    fn judge(&mut self, start: Instant, deadline: u64) -> bool {
        let patience = Duration::from_millis(deadline + SLACK).saturating_sub(start.elapsed());
        let line = self.receiver.hear(patience).expect("a sync ends within its deadline");
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        match words[..] {
            ["synced", version, rest] => {
                let version = version.parse().unwrap();
                let [known, found, mode] = rest.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
                assert_eq!(known, found, "the bytes are what the receiver says");
                assert_eq!(known, self.expected(version), "version {version} is what was published");
                self.count(&format!("synced: {mode}"));
                true
            }
            ["error", kind, why] => {
                if kind != "PeerLost" {
                    eprintln!("{line}");
                }
                assert!(kind != "Bug" && !why.is_empty(), "{line}");
                self.count(&format!("error: {kind}"));
                false
            }
            _ => panic!("{line}"),
        }
    }

    fn sync(&mut self, deadline: u64) -> bool {
        let start = Instant::now();
        self.receiver.say(&deadline.to_string());
        self.judge(start, deadline)
    }

    /// Nothing is wrong: the newest version arrives.
    fn sync_in_peace(&mut self) {
        self.via.line.trouble(0, 0);
        self.publish();
        // What was wrong a moment ago may still be on its way.
        let done = (0..3).any(|_| self.sync(IN_PEACE));
        assert!(done, "no sync succeeds in peace");
    }

    /// One sync with what chance brings.
    fn round(&mut self) {
        let percent = [0, 20, 50, 90][self.noise.below(4) as usize];
        let seed = self.noise.next();
        self.via.line.trouble(seed, percent);
        let versions = self.noise.below(4);
        for _ in 0..versions {
            self.publish();
        }
        if self.noise.below(60) == 0 {
            self.new_life();
        }
        let publishing = (self.noise.below(3) == 0).then(|| self.begin_publish());
        let start = Instant::now();
        self.receiver.say(&DEADLINE.to_string());
        // Somewhere in the middle of it; where, is up to chance and the machine.
        std::thread::park_timeout(Duration::from_micros(self.noise.below(20_000)));
        let victim = self.noise.below(8);
        match (victim, publishing) {
            (1, None) => self.kill_agent(),
            (1, Some(version)) => {
                self.kill_agent();
                self.end_publish(version);
            }
            (2, Some(_)) => self.kill_rank(),
            (3, _) => {
                self.kill_receiver();
                if let Some(version) = publishing {
                    self.end_publish(version);
                }
                return;
            }
            (_, Some(version)) => self.end_publish(version),
            (_, None) => {}
        }
        self.judge(start, DEADLINE);
    }

    /// Temporary files are gone, the rest is bounded.
    fn check_files(&self) {
        let list = |name: &str| -> Vec<String> {
            let entries = fs::read_dir(self.home.path().join(name)).unwrap();
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
        };
        let allowed = [
            "header",
            "manifest.json",
            "a.safetensors",
            "b.safetensors",
            "a.sums",
            "b.sums",
            "deltas",
            "token",
            "agent.sock",
            "desk.sock",
            "state.json",
        ];
        for dir in ["region", "image"] {
            for name in list(dir) {
                assert!(allowed.contains(&name.as_str()), "{dir}/{name} was left behind");
            }
        }
        let lives = list("region/deltas");
        assert_eq!(lives.len(), 1, "of this life only");
        // The agent may still be at work on the newest. Dense links have a way back next to them.
        let deadline = Instant::now() + PATIENCE;
        let deltas = loop {
            let deltas = list(&format!("region/deltas/{}", lives[0]));
            if deltas.iter().all(|name| matches!(name.rsplit_once('.'), Some((_, "wdelta" | "wback")))) {
                break deltas;
            }
            assert!(Instant::now() < deadline, "{deltas:?}");
            std::thread::park_timeout(Duration::from_millis(20));
        };
        assert!(deltas.len() <= 8 * 3, "history is bounded: {deltas:?}");
    }
}

fn eventually_open(pid: u32, what: &str, limit: Open) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = open(pid);
        if now.descriptors <= limit.descriptors && now.threads <= limit.threads {
            return;
        }
        assert!(Instant::now() < deadline, "{what} keeps {now:?}, at first it had {limit:?}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

#[test]
fn syncs_over_a_bad_network_between_killed_processes_end_equal_or_named() {
    in_a_process_of_its_own("faults::all_syncs");
}

#[test]
#[ignore = "run by the test above, in a process of its own: it counts what that has open"]
fn all_syncs() {
    let (seed, rounds) = (seed(), syncs());
    let _repeat = Repeat(seed);
    let before = open(std::process::id());
    let mut world = World::new(seed);
    world.sync_in_peace();
    let (agent, receiver) = (open(world.agent.id()), open(world.receiver.id()));
    let start = Instant::now();
    for round in 1..=rounds {
        world.round();
        if round % 20 == 0 {
            world.sync_in_peace();
        }
    }
    world.sync_in_peace();
    let troubles = world.via.line.troubles();
    let tally = std::mem::take(&mut world.tally);
    eprintln!(
        "{rounds} syncs in {:.1?}, {troubles} troubled connections, seed {seed}: {tally:?}",
        start.elapsed()
    );
    let good: u64 = tally.iter().filter(|(k, _)| k.starts_with("synced")).map(|(_, n)| n).sum();
    assert!(good * 2 > rounds, "most syncs succeed all the same: {tally:?}");
    // Chance decides how many there are: 15 to 68 of 60 syncs in 64 runs.
    assert!(troubles > rounds / 10, "{troubles}");
    // The history keeps some files open, and a killed agent began with none.
    let agent = Open { descriptors: agent.descriptors + 24, threads: agent.threads };
    eventually_open(world.agent.id(), "the agent", agent);
    eventually_open(world.receiver.id(), "the receiver", receiver);
    world.check_files();
    let home = world.home.path().to_owned();
    world.desk = None;
    drop(world);
    assert!(!home.exists(), "shared memory is given back");
    eventually_open(std::process::id(), "the relay", before);
}
