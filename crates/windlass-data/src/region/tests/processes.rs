//! Regions by several processes, of which one is killed or stopped at each step.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::thread;

use windlass_core::error::Kind;

use super::child::{Child, PATIENCE};
use super::*;

/// The steps of rank 0 before its commit, and of another rank before it is done.
const LEAD_STEPS: [&str; 8] =
    ["guard", "open", "joined", "barrier", "piece:1", "piece:3", "done", "committing"];
const RANK_STEPS: [&str; 4] = ["joined", "barrier", "piece:1", "piece:3"];

/// A region of two ranks: this process is one, a child the other.
struct Pair {
    region: Arc<Region>,
    mine: Option<Writer>,
    child: Option<Child>,
    rank: u16,
    version: Version,
    _home: tempfile::TempDir,
}

impl Pair {
    /// Makes the region and one version.
    fn new(rank: u16) -> Pair {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let region = Region::create(&RegionSpec { manifest: large(), ..spec(home.path(), 2) }).unwrap();
        let mine = Some(region.writer(1 - rank).unwrap());
        let mut pair = Pair { region, mine, child: None, rank, version: 0, _home: home };
        pair.restart();
        pair.publish();
        pair
    }

    fn restart(&mut self) {
        self.child = Some(Child::rank(self.region.dir(), self.rank));
    }

    fn child(&mut self) -> &mut Child {
        self.child.as_mut().unwrap()
    }

    fn shape(&self, version: Version) -> Shape {
        Shape { seed: version, ranks: self.region.ranks() }
    }

    /// Both write the next version, and it is the right one.
    fn publish(&mut self) {
        self.version += 1;
        let (version, shape) = (self.version, self.shape(self.version));
        self.child().send(&format!("write {version} {}", shape.seed));
        let stop = Stop::after(PATIENCE);
        let committed = write_share(self.mine.as_mut().unwrap(), version, shape, &stop);
        assert_eq!(self.child().done(), Ok(String::new()));
        assert_eq!(committed.unwrap().version, version);
        self.check();
    }

    /// What is active is the last version that was published, byte for byte.
    fn check(&self) {
        let active = self.region.state().active.unwrap();
        assert_eq!(active.version, self.version);
        let lease = self.region.lease(active.id, LeaseKind::Map, PATIENCE).unwrap();
        assert!(lease.data() == expected(&self.region, self.version), "version {} is damaged", self.version);
        lease.finish().unwrap();
    }

    /// This process writes the next version in a thread, while `during` does something to the child.
    fn write_while(
        &mut self,
        stop: &Stop,
        during: impl FnOnce(&mut Option<Child>),
    ) -> Result<Committed, RegionError> {
        let version = self.version + 1;
        let shape = self.shape(version);
        let mine = self.mine.as_mut().unwrap();
        thread::scope(|s| {
            let writing = s.spawn(move || write_share(mine, version, shape, stop));
            during(&mut self.child);
            writing.join().unwrap()
        })
    }
}

#[test]
fn a_killed_writer_leaves_the_old_version_whole_at_every_step() {
    for (rank, steps) in [(0, LEAD_STEPS.as_slice()), (1, RANK_STEPS.as_slice())] {
        let mut pair = Pair::new(rank);
        for &step in steps {
            let (next, stop) = (pair.version + 1, Stop::after(PATIENCE));
            let mut pid = 0;
            // Whoever has not joined may be restarted in time, so its death alone does not end the wait.
            let joined = !matches!(step, "guard" | "open");
            let e = pair.write_while(&stop, |child| {
                let mut victim = child.take().unwrap();
                victim.run_to(step, &format!("write {next} {next}"));
                pid = victim.kill();
                if !joined {
                    stop.set();
                }
            });
            let e = e.unwrap_err();
            let text = e.to_string();
            assert_eq!(e.kind(), if joined { Kind::PeerLost } else { Kind::Cancelled }, "{step}: {text}");
            assert!(text.contains(&format!("rank {rank} (pid {pid}, dead)")), "{step}: {text}");
            pair.check();
            pair.restart();
            pair.publish();
        }
        // Once the lead has committed, or another rank is done, its death costs nothing.
        let next = pair.version + 1;
        let last = if rank == 0 { "committed" } else { "done" };
        let committed = pair.write_while(&Stop::after(PATIENCE), |child| {
            let mut victim = child.take().unwrap();
            victim.run_to(last, &format!("write {next} {next}"));
            victim.kill();
        });
        assert_eq!(committed.unwrap().version, next);
        pair.version = next;
        pair.check();
        pair.restart();
        pair.publish();
    }
}

#[test]
fn a_stopped_writer_is_named_and_its_late_bytes_are_never_committed() {
    for (rank, steps) in [(0, LEAD_STEPS.as_slice()), (1, RANK_STEPS.as_slice())] {
        let mut pair = Pair::new(rank);
        for &step in steps {
            let next = pair.version + 1;
            let flag = Stop::never();
            let e = pair.write_while(&flag, |child| {
                let child = child.as_mut().unwrap();
                // Another seed: its late bytes differ from what will be committed.
                child.run_to(step, &format!("write {next} {}", next + 1000));
                child.stop();
                flag.set();
            });
            let text = e.unwrap_err().to_string();
            let named = format!("rank {rank} (pid {}, alive)", pair.child().pid());
            assert!(text.contains(&named), "{step}: {text}");
            pair.check();
            if rank == 1 {
                // The next attempt is open, and stays before the barrier while the late writer may write.
                let again = Stop::after(Duration::from_millis(30));
                let e = pair.write_while(&again, |_| ()).unwrap_err();
                assert_eq!(e.kind(), Kind::Timeout, "{e}");
                assert!(e.to_string().contains(&named) && e.to_string().contains("has not joined"), "{e}");
                let committed = pair.write_while(&Stop::after(PATIENCE), |child| {
                    let child = child.as_mut().unwrap();
                    child.cont();
                    child.give_up();
                    let late = child.done().unwrap_err();
                    assert!(late.contains("given up"), "{step}: {late}");
                    child.send(&format!("write {next} {next}"));
                    child.done().unwrap();
                });
                committed.unwrap();
                pair.version = next;
                pair.check();
            } else {
                pair.child().cont();
                pair.child().give_up();
                let late = pair.child().done().unwrap_err();
                assert!(late.contains("given up"), "{step}: {late}");
                pair.check();
                pair.publish();
            }
        }
    }
}

#[test]
fn a_rank_that_is_stopped_after_it_was_done_learns_of_the_commit() {
    let mut pair = Pair::new(1);
    let next = pair.version + 1;
    let committed = pair.write_while(&Stop::after(PATIENCE), |child| {
        let child = child.as_mut().unwrap();
        child.run_to("done", &format!("write {next} {next}"));
        child.stop();
    });
    committed.unwrap();
    pair.version = next;
    // The lead goes on, twice, and cannot pass the barrier.
    for _ in 0..2 {
        let e = pair.write_while(&Stop::after(Duration::from_millis(20)), |_| ()).unwrap_err();
        assert_eq!(e.kind(), Kind::Timeout, "{e}");
    }
    pair.child().cont();
    pair.child().go_on();
    assert_eq!(pair.child().done(), Ok(String::new()));
    pair.check();
    pair.publish();
}

/// A region of one rank, which is this process, with two versions; and a child that has it open.
fn alone() -> (tempfile::TempDir, Arc<Region>, Writer, Child) {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let mut writer = region.writer(0).unwrap();
    publish(&mut writer, 1);
    publish(&mut writer, 2);
    let child = Child::open(region.dir());
    (home, region, writer, child)
}

fn publish(writer: &mut Writer, version: Version) {
    let shape = Shape { seed: version, ranks: 1 };
    let committed = write_share(writer, version, shape, &Stop::after(PATIENCE)).unwrap();
    let region = writer.region();
    let lease = region.lease(committed.id, LeaseKind::Stream, PATIENCE).unwrap();
    assert!(lease.data() == expected(region, version));
}

#[test]
fn a_killed_reader_frees_its_slot_at_every_step() {
    let (_home, region, mut writer, mut child) = alone();
    for (version, step) in [(3, "leased"), (4, "reading")] {
        let inactive = region.state().inactive.unwrap();
        let lease = format!("lease {} map 3600000", inactive.id);
        if step == "leased" {
            child.run_to("leased", &lease);
        } else {
            child.ask(&lease).unwrap();
            child.ask("compare").unwrap();
        }
        let e = writer.begin(version, &Stop::after(Duration::from_millis(20))).unwrap_err();
        let text = e.to_string();
        assert_eq!(e.kind(), Kind::Timeout);
        assert!(text.contains(&format!("(pid {}, alive) reads the slot", child.pid())), "{text}");
        assert_eq!(region.state().inactive, Some(inactive), "an attempt that never opened took nothing");
        child.kill();
        publish(&mut writer, version);
        child = Child::open(region.dir());
    }
}

#[test]
fn a_stopped_reader_is_waited_for_until_its_deadline_and_then_told() {
    let (_home, region, mut writer, mut child) = alone();
    let inactive = region.state().inactive.unwrap();
    child.ask(&format!("lease {} map 3600000", inactive.id)).unwrap();
    child.stop();
    let e = writer.begin(3, &Stop::after(Duration::from_millis(20))).unwrap_err();
    assert!(e.to_string().contains(&format!("(pid {}, alive)", child.pid())), "{e}");
    child.cont();
    child.ask("compare").unwrap();
    child.ask("finish").unwrap();
    publish(&mut writer, 3);

    let inactive = region.state().inactive.unwrap();
    child.ask(&format!("lease {} stream 1", inactive.id)).unwrap();
    child.stop();
    publish(&mut writer, 4);
    child.cont();
    let e = child.ask("finish").unwrap_err();
    assert!(e.contains("ended at its deadline") && e.contains("throw away"), "{e}");
    publish(&mut writer, 5);
}

#[test]
fn a_killed_agent_gives_up_its_seat_and_leases_at_every_step() {
    let (_home, region, mut writer, mut child) = alone();
    let mut version = 2;
    for step in ["seated", "sealing", "sealed"] {
        if step != "seated" {
            child.ask("agent").unwrap();
        }
        match step {
            "seated" => child.run_to(step, "agent"),
            "sealing" => child.run_to(step, "seal"),
            _ => {
                child.ask("seal").unwrap();
                child.run_to(step, "sealed 7");
            }
        }
        let e = region.agent().unwrap_err();
        assert!(e.to_string().contains(&format!("pid {}", child.pid())), "{e}");
        child.kill();
        // A dead agent is in nobody's way, and the next one takes its place.
        version += 1;
        publish(&mut writer, version);
        let seat = region.agent().unwrap();
        let seal = seat.seal().unwrap().unwrap();
        assert_eq!((seal.new.version(), seal.base.as_ref().unwrap().version()), (version, version - 1));
        let sealed = (step == "sealed").then_some(StateDigest([7; 16]));
        assert_eq!(seal.base_state().unwrap().sealed, sealed, "{step}");
        assert!(seal.base.as_ref().unwrap().data() == expected(&region, version - 1));
        seal.finish(StateDigest([version as u8; 16])).unwrap();
        drop(seat);
        version += 1;
        publish(&mut writer, version);
        child = Child::open(region.dir());
    }
}

/// The guard took the slot of version 1 from an agent that had not got round to 2 yet, and 2 got no delta.
#[test]
fn a_hasty_writer_leaves_the_agent_what_it_compares_with() {
    let (_home, region, writer, mut child) = alone();
    drop(writer);
    let seat = region.agent().unwrap();
    child.ask("rank 0").unwrap();
    child.run_to("unsealed", "write 3 3");
    child.go_on();
    for version in 2..=3 {
        let seal = region.wait_for(&Stop::after(PATIENCE), || seat.seal().unwrap()).unwrap();
        assert_eq!(seal.new.version(), version);
        assert_eq!(seal.base.as_ref().map(Lease::version), Some(version - 1));
        seal.finish(StateDigest([version as u8; 16])).unwrap();
        if version == 2 {
            child.done().unwrap();
        }
    }
}

#[test]
fn a_silent_agent_is_not_waited_for_and_finds_its_seal_broken() {
    let (_home, region, mut writer, mut child) = alone();
    child.ask("agent").unwrap();
    // Stopped before it took anything: version 2 is not sealed, and 3 does not wait for that.
    child.ask("attend 200").unwrap();
    child.stop();
    publish(&mut writer, 3);
    child.cont();
    // Stopped while it seals 3 with 2 as its base, and left behind by two versions.
    child.ask("attend 200").unwrap();
    child.run_to("sealing", "seal");
    child.stop();
    publish(&mut writer, 4);
    publish(&mut writer, 5);
    child.cont();
    child.go_on();
    child.done().unwrap();
    let e = child.ask("sealed 3").unwrap_err();
    assert!(e.contains("writers went on without it"), "{e}");
    let state = region.state();
    assert_eq!([state.active, state.inactive].map(|s| s.unwrap().sealed), [None, None]);
    let e = region.agent().unwrap_err();
    assert!(e.to_string().contains(&format!("pid {}", child.pid())), "it keeps its seat: {e}");
    // At work again, it is waited for again.
    child.ask("attend 60000").unwrap();
    child.ask("seal").unwrap();
    let e = writer.begin(6, &Stop::after(Duration::from_millis(20))).unwrap_err();
    assert!(e.to_string().contains("has not sealed"), "{e}");
    assert_eq!(child.ask("sealed 5").unwrap(), "Some(4)");
    assert_eq!(region.state().active.unwrap().sealed, Some(StateDigest([5; 16])));
    publish(&mut writer, 6);
}

#[test]
fn a_region_is_made_anew_once_its_last_user_is_gone() {
    let (home, region, writer, child) = alone();
    let incarnation = region.incarnation();
    drop((region, writer));
    let spec = spec(home.path(), 1);
    let e = Region::create_when_free(&spec, &Stop::after(Duration::from_millis(20))).unwrap_err();
    assert!(e.to_string().contains(&format!("in use by pid {}:", child.pid())), "{e}");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| Region::create_when_free(&spec, &Stop::after(PATIENCE)).unwrap());
        child.kill();
        assert!(waiting.join().unwrap().incarnation() > incarnation);
    });
}

#[test]
fn a_stopped_agent_is_named_and_then_goes_on() {
    let (_home, region, mut writer, mut child) = alone();
    let mut version = 2;
    child.ask("agent").unwrap();
    for step in ["seated", "sealing"] {
        if step == "sealing" {
            child.run_to(step, "seal");
        }
        child.stop();
        let e = writer.begin(version + 1, &Stop::after(Duration::from_millis(20))).unwrap_err();
        let named = format!("(pid {}, alive) is the agent and has not sealed", child.pid());
        assert!(e.to_string().contains(&named), "{step}: {e}");
        assert_eq!(region.state().active.unwrap().version, version);
        child.cont();
        if step == "seated" {
            child.ask("seal").unwrap();
        } else {
            child.go_on();
            child.done().unwrap();
        }
        let base = child.ask(&format!("sealed {version}")).unwrap();
        assert_eq!(base, format!("Some({})", version - 1), "the base was kept for it");
        assert_eq!(region.state().active.unwrap().sealed, Some(StateDigest([version as u8; 16])));
        version += 1;
        publish(&mut writer, version);
    }
}

#[test]
fn ranks_in_parallel_commit_exactly_their_bytes() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&RegionSpec { manifest: large(), ..spec(home.path(), 3) }).unwrap();
    let mut ranks: Vec<Child> = (0..3).map(|r| Child::rank(region.dir(), r)).collect();
    // Each seed has other shares, other lengths of writes and another order of them.
    for version in 1..=8 {
        for rank in &mut ranks {
            rank.send(&format!("write {version} {version}"));
        }
        for rank in &mut ranks {
            rank.done().unwrap();
        }
        let active = region.state().active.unwrap();
        assert_eq!((active.version, active.id), (version, version));
        let lease = region.lease(active.id, LeaseKind::Map, PATIENCE).unwrap();
        let sum = |bytes: &[u8]| xxhash_rust::xxh3::xxh3_128(bytes);
        assert_eq!(sum(lease.data()), sum(&expected(&region, version)));
    }
}

#[test]
fn a_rank_that_is_alive_is_not_replaced() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 2)).unwrap();
    let child = Child::rank(region.dir(), 1);
    let e = region.writer(1).unwrap_err();
    assert!(matches!(e, RegionError::RankTaken { rank: 1, pid, .. } if pid == child.pid()), "{e}");
    assert!(matches!(region.writer(2), Err(RegionError::NoSuchRank { rank: 2, ranks: 2, .. })));
    child.kill();
    let writer = region.writer(1).unwrap();
    let e = region.writer(1).unwrap_err();
    assert!(e.to_string().contains(&format!("pid {}", std::process::id())), "{e}");
    drop(writer);
    region.writer(1).unwrap();
}

#[test]
fn a_member_of_the_group_reads_and_cannot_write() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    // Another user must be able to come by the directory.
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let region = Region::create(&RegionSpec { group: true, ..spec(home.path(), 1) }).unwrap();
    let own = RegionSpec { dir: home.path().join("own"), ..spec(home.path(), 1) };
    let own = Region::create(&own).unwrap();
    let group = region.dir().metadata().unwrap().gid().to_string();
    let as_member = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid", &group, "--clear-groups"]);
        command.arg(std::env::current_exe().unwrap());
        command
    };
    let probe = as_member().arg("--list").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|s| s.success()) {
        eprintln!("SKIPPED a member of the group: this user cannot become another one here");
        return;
    }
    let mut child = Child::spawn_by(as_member(), region.dir());
    assert_eq!(child.line(), "open");
    let e = child.ask("rank 0").unwrap_err();
    assert!(e.contains("belongs to the user with id 0") && e.contains("65534"), "{e}");
    let mut writer = region.writer(0).unwrap();
    publish(&mut writer, 1);
    child.ask("lease 1 map 60000").unwrap();
    child.ask("compare").unwrap();
    publish(&mut writer, 2);
    let e = writer.begin(3, &Stop::after(Duration::from_millis(20))).unwrap_err();
    assert!(e.to_string().contains(&format!("(pid {}, alive)", child.pid())), "{e}");
    child.ask("finish").unwrap();
    publish(&mut writer, 3);
    let stranger = Child::spawn_by(as_member(), own.dir());
    assert!(stranger.done().unwrap_err().contains("denied"), "an owner's region is the owner's");
}

#[test]
fn a_region_of_another_member_of_the_group_is_read_and_by_root_it_is_not() {
    const ALICE: u32 = 4321;
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let made = RegionSpec { group: true, ..spec(home.path(), 1) };
    drop(Region::create(&made).unwrap());
    // Hers, in a directory of hers.
    let hers = home.path().join("alice");
    std::fs::create_dir(&hers).unwrap();
    std::fs::rename(&made.dir, hers.join("model")).unwrap();
    let mut all = vec![hers.clone(), hers.join("model")];
    all.extend(std::fs::read_dir(hers.join("model")).unwrap().map(|e| e.unwrap().path()));
    if all.iter().any(|path| std::os::unix::fs::lchown(path, Some(ALICE), Some(ALICE)).is_err()) {
        eprintln!("SKIPPED a region of another user: this test must run as root to give files away");
        return;
    }
    let e = Region::open(&hers.join("model")).unwrap_err();
    assert!(e.to_string().contains("belongs to the user with id 4321"), "{e}");
    let by = |group: u32| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", &format!("--regid={group}"), "--clear-groups"]);
        command.arg(std::env::current_exe().unwrap());
        Child::spawn_by(command, &hers.join("model"))
    };
    assert_eq!(by(ALICE).line(), "open");
    assert!(by(65_534).done().unwrap_err().contains("denied"), "it is for the group");
}

#[test]
fn gc_removes_the_dead_and_leaves_the_living() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let at = |name: &str| RegionSpec { dir: home.path().join(name), ..spec(home.path(), 1) };
    drop(Region::create(&at("dead")).unwrap());
    drop(Region::create(&at("served")).unwrap());
    let mine = Region::create(&at("mine")).unwrap();
    let child = Child::open(&home.path().join("served"));
    // What a creator leaves that was killed before the last step.
    drop(Region::create(&at("half")).unwrap());
    let half = home.path().join("half");
    std::fs::rename(half.join(HEADER), half.join(HEADER_TMP)).unwrap();
    assert!(matches!(Region::open(&half), Err(RegionError::Absent { .. })));
    std::fs::create_dir(home.path().join("foreign")).unwrap();
    std::fs::write(home.path().join("foreign/header"), b"somebody else's file").unwrap();
    std::os::unix::fs::symlink(home.path().join("dead"), home.path().join("link")).unwrap();

    let names = |removed: Vec<Dead>| {
        let mut names: Vec<_> =
            removed.iter().map(|r| r.dir.file_name().unwrap().to_str().unwrap().to_owned()).collect();
        names.sort();
        assert!(removed.iter().all(|r| r.bytes > 100_000 && r.model_id.is_some()), "{removed:?}");
        names
    };
    let dry = sweep(home.path(), Sweep::DEEP).unwrap();
    assert_eq!(names(dry), ["dead", "half"], "said, and not done");
    assert_eq!(names(gc(home.path())), ["dead", "half"]);
    child.stop();
    assert_eq!(names(gc(home.path())), [""; 0], "a stopped process has it open");
    child.kill();
    assert_eq!(names(gc(home.path())), ["served"]);
    assert!(
        home.path().join("foreign/header").exists() && home.path().join("link").symlink_metadata().is_ok()
    );
    assert!(mine.discard().unwrap());
    assert!(!home.path().join("mine").exists());
    assert_eq!(gc(&home.path().join("not there")), []);
}

#[test]
fn sweep_goes_as_deep_as_it_is_told_and_not_through_links() {
    let (home, elsewhere) =
        (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let make = |dir: &Path| {
        std::fs::create_dir_all(dir.parent().unwrap()).unwrap();
        drop(Region::create(&RegionSpec { dir: dir.to_owned(), ..spec(home.path(), 1) }).unwrap());
    };
    let (near, far) = (home.path().join("a/near"), home.path().join("a/b/c/far"));
    make(&near);
    make(&far);
    make(&elsewhere.path().join("other"));
    std::os::unix::fs::symlink(elsewhere.path(), home.path().join("a/link")).unwrap();
    let dirs = |how| -> Vec<_> { sweep(home.path(), how).unwrap().into_iter().map(|r| r.dir).collect() };
    assert_eq!(dirs(Sweep::SHALLOW), [""; 0].map(PathBuf::from));
    assert_eq!(dirs(Sweep::DEEP), [near.clone(), far.clone()]);
    let few = sweep(home.path(), Sweep { most: 2, ..Sweep::DEEP });
    assert!(matches!(few, Err(RegionError::TooWide { most: 2, .. })), "{few:?}");
    assert_eq!(dirs(Sweep { depth: 2, ..Sweep::DEEP }), std::slice::from_ref(&near));
    // Who names a region means that one.
    let [one] = &sweep(&near, Sweep::DEEP).unwrap()[..] else { panic!("{near:?} is one region") };
    assert!(one.dir == near && one.what == Left::Region && one.remove().unwrap() && !one.remove().unwrap());
    let image = RegionSpec { dir: near.clone(), slots: Slots::One, ..spec(home.path(), 1) };
    drop(Region::create(&image).unwrap());
    assert_eq!(sweep(&near, Sweep::DEEP).unwrap()[0].what, Left::Image);
    assert_eq!(dirs(Sweep::DEEP), [near, far]);
    assert!(elsewhere.path().join("other").join(HEADER).exists(), "what a link leads to is not below");
}

#[test]
fn a_live_region_is_not_replaced_and_a_dead_one_is() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let spec = spec(home.path(), 1);
    let first = Region::create(&spec).unwrap();
    let old = first.incarnation();
    drop(first);
    let mut child = Child::rank(&spec.dir, 0);
    child.ask("write 1 1").unwrap();
    let e = Region::create(&spec).unwrap_err();
    assert!(matches!(&e, RegionError::Live { owners, .. } if owners.contains(&child.pid())), "{e}");
    let region = Region::open(&spec.dir).unwrap();
    assert_eq!(region.state().active.unwrap().version, 1, "and it was left alone");
    assert!(!region.discard().unwrap());
    drop(region);
    child.kill();
    let token = spec.dir.join("token");
    fs::write(&token, "secret").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let region = Region::create(&spec).unwrap();
    assert!(region.incarnation() > old && region.state().active.is_none());
    // Receivers of the life before still have the key.
    assert_eq!(fs::read_to_string(&token).unwrap(), "secret");
    assert_eq!(fs::metadata(&token).unwrap().permissions().mode() & 0o777, 0o600);
    let future = RegionSpec { incarnation: Some(Incarnation(u64::MAX - 9)), ..spec };
    drop(region);
    assert_eq!(Region::create(&future).unwrap().incarnation(), Incarnation(u64::MAX - 9));
    let next = Region::create(&RegionSpec { incarnation: None, ..future }).unwrap();
    assert_eq!(
        next.incarnation(),
        Incarnation(u64::MAX - 8),
        "beyond its predecessor, whatever the clock says"
    );
}
