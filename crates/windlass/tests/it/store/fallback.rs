//! An agent with a store for the time that it is away: agents are killed and come back, and no image is fetched twice.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::Value;

use super::server::{Kind, Store};
use super::{home, objects, receive, shown, stored, trainer, trainer_of};
use crate::process::{Agent, PATIENCE, Process, Trainer};

/// The image has a little less than 14 MiB.
pub(super) const IMAGE: u64 = 13 << 20;

/// A trainer's agents, all with the same token, and a receiver of one of them.
pub(super) struct Run {
    token: PathBuf,
    /// The port that the receiver knows.
    port: u16,
    url: String,
}

impl Run {
    pub(super) fn new(home: &Path, url: &str) -> Run {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Run { token: home.join("token"), port, url: url.to_owned() }
    }

    fn flags(&self, region: &Path, port: u16, store: bool) -> Vec<String> {
        let mut flags = vec![
            "agent".to_owned(),
            format!("--region={}", region.display()),
            format!("--ports={port}"),
            format!("--token-file={}", self.token.display()),
        ];
        if store {
            flags.extend([format!("--store={}", self.url), "--store-part-bytes=5Mi".into()]);
        }
        flags
    }

    /// An agent at the port that the receiver knows.
    pub(super) fn agent(&self, region: &Path) -> Agent {
        Agent::of(Process::start(self.flags(region, self.port, true)))
    }

    /// One at another port: only the store leads to its versions.
    pub(super) fn moved(&self, region: &Path) -> Agent {
        Agent::of(Process::start(self.flags(region, 0, true)))
    }

    fn receiver_flags(&self) -> Vec<String> {
        let after = "--store-after=0.2".to_owned();
        vec![format!("--token-file={}", self.token.display()), format!("--store={}", self.url), after]
    }

    fn receive(&self, dir: &Path) -> Process {
        self.receive_with(dir, &[])
    }

    pub(super) fn receive_with(&self, dir: &Path, more: &[&str]) -> Process {
        let flags = self.receiver_flags();
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        receive(&format!("http://127.0.0.1:{}", self.port), dir, &flags)
    }
}

pub(super) fn kill(agent: &mut Agent) {
    agent.process.signal(Signal::KILL);
    agent.process.ends_within(PATIENCE);
}

/// Waits until the receiver says that versions come from there.
pub(super) fn turned(receiver: &Process, source: &str) -> Value {
    let line = receiver.event("source");
    assert_eq!(line["source"], source, "{line}");
    line
}

/// Waits for a version, which must be one delta and have this digest.
pub(super) fn by_delta(receiver: &Process, version: u64, digest: &str) {
    let line = shown(receiver, version);
    assert_eq!((&line["image"]["digest"], &line["mode"]), (&digest.into(), &"delta".into()), "{line}");
    assert!(line["wire_bytes"].as_u64().unwrap() < 1 << 20, "a delta, and nothing else: {line}");
}

/// Waits until the agent has sealed a version. Its digest.
fn sealed(trainer: &mut Trainer, agent: &Agent, version: u32) -> String {
    trainer.publish(version);
    agent.sealed(version.into())["digest"].as_str().unwrap().to_owned()
}

#[test]
fn a_receiver_goes_on_from_the_store_while_its_agent_is_away_and_back() {
    let home = home();
    let run = Run::new(home.path(), &format!("file://{}/run", home.path().display()));
    let region = home.path().join("region");
    let mut trainer = trainer(&region);
    let mut agent = run.agent(&region);
    stored(&mut trainer, &agent, 1);
    let receiver = run.receive(&home.path().join("image"));
    let line = shown(&receiver, 1);
    assert!(line["wire_bytes"].as_u64().unwrap() >= IMAGE, "{line}");
    by_delta(&receiver, 2, &stored(&mut trainer, &agent, 2));
    for round in 0..2 {
        let version = 3 + 3 * round;
        kill(&mut agent);
        let mut moved = run.moved(&region);
        let line = turned(&receiver, "store");
        assert!(line["publisher"].as_str().unwrap().contains("file://"), "{line}");
        assert!(line["reason"].as_str().unwrap().contains(&run.port.to_string()), "{line}");
        for version in version..version + 2 {
            by_delta(&receiver, version.into(), &stored(&mut trainer, &moved, version));
        }
        kill(&mut moved);
        agent = run.agent(&region);
        let line = turned(&receiver, "agent");
        assert!(line["publisher"].as_str().unwrap().contains(&run.port.to_string()), "{line}");
        by_delta(&receiver, (version + 2).into(), &stored(&mut trainer, &agent, version + 2));
    }
    assert!(objects(&home.path().join("image"), ".wdelta").is_empty(), "links of the store are gone");
}

#[test]
fn a_receiver_that_is_ahead_of_the_store_keeps_its_version_until_its_agent_is_back() {
    let home = home();
    let run = Run::new(home.path(), &format!("file://{}/run", home.path().display()));
    let region = home.path().join("region");
    let mut trainer = trainer(&region);
    let mut first = run.agent(&region);
    stored(&mut trainer, &first, 1);
    kill(&mut first);
    // This one does not upload, so the store stays at the first version.
    let mut second = Agent::of(Process::start(run.flags(&region, run.port, false)));
    let receiver = run.receive(&home.path().join("image"));
    shown(&receiver, 1);
    by_delta(&receiver, 2, &sealed(&mut trainer, &second, 2));
    kill(&mut second);
    turned(&receiver, "store");
    let third = run.agent(&region);
    loop {
        let line = receiver.line();
        assert_ne!(line["event"], "synced", "it has the newest version: {line}");
        if line["event"] == "source" {
            assert_eq!(line["source"], "agent", "{line}");
            break;
        }
    }
    by_delta(&receiver, 3, &sealed(&mut trainer, &third, 3));
}

#[test]
fn blocks_of_a_version_that_a_store_does_not_have_any_more_are_no_obstacle() {
    let home = home();
    let (run, old) = (home.path().join("run"), home.path().join("old"));
    let url = format!("file://{}", run.display());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = super::agent(&trainer.region, &url, &["--store-anchor-every=1"]);
    let digest = stored(&mut trainer, &agent, 1);
    copy(&run, &old);
    // Until a version leads on from another anchor.
    let mut version = 2;
    while objects(&run, "/anchor-").len() < 2 {
        stored(&mut trainer, &agent, version);
        version += 1;
    }
    stored(&mut trainer, &agent, version);
    fs::remove_file(objects(&run, "/000002-").pop().unwrap()).unwrap();
    let receiver = receive(&url, &home.path().join("image"), &[]);
    let line = super::waiting(&receiver);
    assert!(line["error"].as_str().unwrap().contains("/000002-"), "some blocks are missing: {line}");
    // The store is as it was before.
    fs::rename(&run, home.path().join("new")).unwrap();
    fs::rename(&old, &run).unwrap();
    assert_eq!(shown(&receiver, 1)["image"]["digest"], digest.as_str());
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let place = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &place);
        } else {
            fs::copy(entry.path(), place).unwrap();
        }
    }
}

#[test]
fn a_receiver_whose_agent_is_away_at_its_start_begins_with_the_store() {
    let home = home();
    let store = Store::start(Kind::S3, home.path());
    let run = Run::new(home.path(), &store.url("run"));
    let region = home.path().join("region");
    let mut trainer = trainer(&region);
    let spawn = |port| Agent::of(store.command(run.flags(&region, port, true)));
    let mut moved = spawn(0);
    stored(&mut trainer, &moved, 1);
    let digest = stored(&mut trainer, &moved, 2);
    let dir = home.path().join("image");
    fs::create_dir(&dir).unwrap();
    let start = || {
        let from = ["receive".into(), format!("--from=http://127.0.0.1:{}", run.port)];
        let more = [format!("--dir={}", dir.display())];
        store.command(from.into_iter().chain(more).chain(run.receiver_flags()))
    };
    let mut receiver = start();
    turned(&receiver, "store");
    let line = shown(&receiver, 2);
    assert_eq!(line["image"]["digest"], digest.as_str(), "{line}");
    by_delta(&receiver, 3, &stored(&mut trainer, &moved, 3));
    // A receiver that is killed goes on with its image, wherever versions come from.
    receiver.kill();
    kill(&mut moved);
    let mut agent = spawn(run.port);
    receiver = start();
    by_delta(&receiver, 4, &stored(&mut trainer, &agent, 4));
    kill(&mut agent);
    let moved = spawn(0);
    turned(&receiver, "store");
    by_delta(&receiver, 5, &stored(&mut trainer, &moved, 5));
}

#[test]
fn a_training_that_begins_anew_is_followed_from_the_store_and_an_older_one_is_not() {
    let home = home();
    let run = Run::new(home.path(), &format!("file://{}/run", home.path().display()));
    let (old, new) = (home.path().join("old"), home.path().join("new"));
    let mut trainer = trainer(&old);
    let mut agent = run.agent(&old);
    stored(&mut trainer, &agent, 1);
    let receiver = run.receive(&home.path().join("image"));
    shown(&receiver, 1);
    by_delta(&receiver, 2, &stored(&mut trainer, &agent, 2));
    kill(&mut agent);
    turned(&receiver, "store");
    // Another run of the trainer, whose agent is elsewhere.
    let mut successor = trainer_of(&new, "policy", &["--seed=7"]);
    let mut moved = run.moved(&new);
    let digest = stored(&mut successor, &moved, 1);
    let line = shown(&receiver, 1);
    assert_eq!(line["image"]["digest"], digest.as_str(), "{line}");
    // The old agent is back, and does not count.
    let mut agent = run.agent(&old);
    by_delta(&receiver, 2, &stored(&mut successor, &moved, 2));
    kill(&mut agent);
    kill(&mut moved);
    // The new one's does.
    let agent = run.agent(&new);
    turned(&receiver, "agent");
    by_delta(&receiver, 3, &stored(&mut successor, &agent, 3));
}

#[test]
fn a_store_for_the_time_that_an_agent_is_away_needs_an_agent() {
    let home = home();
    let url = format!("file://{}", home.path().display());
    let token = home.path().join("token");
    fs::write(&token, "t".repeat(32)).unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let token = format!("--token-file={}", token.display());
    let store = format!("--store={url}");
    let agent = "http://127.0.0.1:1";
    for (from, more, word) in [
        (url.as_str(), vec![store.as_str()], "--from an agent"),
        (agent, vec![&token, "--store=ftp://x/y"], "schemes"),
        (agent, vec![&token, "--store-after=5"], "--store"),
        (agent, vec![&token, &store, "--store-after=-1"], "number of seconds"),
        (agent, vec![&token, &store, "--version=3"], "--version"),
    ] {
        let mut process = receive(from, &home.path().join("image"), &more);
        let line = process.rest().pop().unwrap().to_string();
        assert!(line.contains(word), "{more:?}: {line}");
        assert_eq!(process.ends_within(PATIENCE), 2, "{more:?}");
    }
}
