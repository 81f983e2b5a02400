//! A store with real processes: a trainer and its agent upload, receivers follow. In a directory, and in real servers.

mod fallback;
mod faults;
mod server;
mod slice;
mod tools;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use self::server::{Kind, Proxy, Store};
use crate::process::{Agent, PATIENCE, Process, Trainer};

/// Enough for three parts of the shortest length.
const BYTES: &str = "14Mi";

fn home() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn trainer(region: &Path) -> Trainer {
    trainer_of(region, "policy", &[])
}

fn trainer_of(region: &Path, model_id: &str, more: &[&str]) -> Trainer {
    let args = ["demo-rank", "--rank=0", "--ranks=1"].iter().chain(more).map(ToString::to_string);
    let own = [
        format!("--region={}", region.display()),
        format!("--model-bytes={BYTES}"),
        format!("--model-id={model_id}"),
    ];
    let process = Process::start(args.chain(own));
    process.event("ready");
    Trainer { process, region: region.to_owned() }
}

fn agent(region: &Path, url: &str, more: &[&str]) -> Agent {
    let store = format!("--store={url}");
    let flags = [&[store.as_str(), "--store-part-bytes=5Mi"], more].concat();
    Agent::start(region, &flags)
}

/// Publishes a version and waits until it is in the store. Its digest.
fn stored(trainer: &mut Trainer, agent: &Agent, version: u32) -> String {
    trainer.publish(version);
    loop {
        let line = agent.process.event("stored");
        if line["identity"]["version"] == version {
            return line["digest"].as_str().unwrap().to_owned();
        }
    }
}

fn receive(url: &str, dir: &Path, more: &[&str]) -> Process {
    fs::create_dir_all(dir).unwrap();
    let args = ["receive".into(), format!("--from={url}"), format!("--dir={}", dir.display())];
    Process::start(args.into_iter().chain(more.iter().map(ToString::to_string)))
}

/// Waits for a version that is shown. What the receiver says of it.
fn shown(receiver: &Process, version: u64) -> Value {
    loop {
        let line = receiver.event("synced");
        if line["image"]["identity"]["version"] == version {
            return line;
        }
    }
}

/// Waits for a failure that the receiver says it retries.
fn waiting(receiver: &Process) -> Value {
    receiver.event("waiting")
}

fn objects(dir: &Path, part_of_name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() {
            found.extend(objects(&entry.path(), part_of_name));
        } else if entry.path().to_str().unwrap().contains(part_of_name) {
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

#[test]
fn a_store_leads_to_the_same_images_as_an_agent() {
    for kind in Kind::ALL {
        let home = home();
        let store = Store::start(kind, home.path());
        let url = store.url("run");
        let mut trainer = trainer(&home.path().join("region"));
        let agent = store.agent(&trainer.region, &url, &["--store-anchor-every=3"]);
        let first = stored(&mut trainer, &agent, 1);
        let follower = store.receive(&url, &home.path().join("a"), &[]);
        let line = shown(&follower, 1);
        assert_eq!(line["image"]["digest"], first.as_str(), "{line}");
        for version in 2..8 {
            let digest = stored(&mut trainer, &agent, version);
            assert_eq!(digest, agent.sealed(version.into())["digest"].as_str().unwrap());
            let line = shown(&follower, version.into());
            assert_eq!(
                (&line["image"]["digest"], &line["mode"]),
                (&digest.as_str().into(), &"delta".into()),
                "{line}"
            );
            assert!(line["wire_bytes"].as_u64().unwrap() < 1 << 20, "a delta, and nothing else: {line}");
        }
        let (code, line) = tools::end(store.command(["store", "show", &url, "--version=7"]));
        let anchor = line["anchor"]["version"].as_u64().unwrap();
        assert!(code == 0 && anchor > 1, "an anchor every three versions: {line}");
        // A new receiver begins at the newest anchor; another gets an old version.
        let late = store.receive(&url, &home.path().join("b"), &["--until=7"]);
        let line = shown(&late, 7);
        assert_eq!(line["image"]["digest"], agent.sealed(7)["digest"], "{line}");
        let mut old = store.receive(&url, &home.path().join("c"), &["--version=2"]);
        shown(&old, 2);
        assert_eq!(old.ends_within(PATIENCE), 0);
        // An image that was left goes on by one composed delta.
        let mut again = store.receive(&url, &home.path().join("c"), &["--until=7"]);
        let line = shown(&again, 7);
        assert_eq!(line["mode"], "delta", "{line}");
        assert_eq!(again.ends_within(PATIENCE), 0);
    }
}

#[test]
fn a_follower_of_a_store_that_is_killed_goes_on_with_what_it_has() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = agent(&trainer.region, &url, &[]);
    stored(&mut trainer, &agent, 1);
    let digest = stored(&mut trainer, &agent, 2);
    // It gets all parts but the last.
    let parts = objects(home.path(), "/anchors/");
    let last = parts.iter().rfind(|p| p.file_name().unwrap().to_str().unwrap().starts_with("00000")).unwrap();
    let aside = home.path().join("aside");
    fs::rename(last, &aside).unwrap();
    let mut follower = receive(&url, &home.path().join("a"), &[]);
    let line = waiting(&follower);
    let name = last.file_name().unwrap().to_str().unwrap();
    assert!(line["error"].as_str().unwrap().contains(name), "the object is named: {line}");
    follower.signal(Signal::KILL);
    follower.ends_within(PATIENCE);
    fs::rename(&aside, last).unwrap();
    let follower = receive(&url, &home.path().join("a"), &[]);
    let line = shown(&follower, 2);
    assert_eq!(line["image"]["digest"], digest.as_str());
    assert!(line["wire_bytes"].as_u64().unwrap() < 12 << 20, "only what is missing is fetched: {line}");
}

#[test]
fn damage_in_a_store_is_named_and_nothing_wrong_is_shown() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = agent(&trainer.region, &url, &[]);
    stored(&mut trainer, &agent, 1);
    let follower = receive(&url, &home.path().join("a"), &[]);
    shown(&follower, 1);
    follower.signal(Signal::STOP);
    let digest = stored(&mut trainer, &agent, 2);
    let delta = objects(home.path(), ".wdelta").pop().unwrap();
    let good = fs::read(&delta).unwrap();
    let damage: [fn(&mut Vec<u8>); 2] = [
        |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        },
        |bytes| bytes.truncate(bytes.len() - 1),
    ];
    let mut bad = good.clone();
    damage[0](&mut bad);
    fs::write(&delta, &bad).unwrap();
    follower.signal(Signal::CONT);
    let line = waiting(&follower);
    assert_eq!(line["kind"], "corrupt", "{line}");
    assert!(line["error"].as_str().unwrap().contains(delta.file_name().unwrap().to_str().unwrap()), "{line}");
    let mut bad = good.clone();
    damage[1](&mut bad);
    fs::write(&delta, &bad).unwrap();
    // Another receiver finds the truncated one; it shows the anchor's version at most.
    let other = receive(&url, &home.path().join("b"), &[]);
    let line = waiting(&other);
    assert!(line["error"].as_str().unwrap().contains(delta.file_name().unwrap().to_str().unwrap()), "{line}");
    fs::write(&delta, &good).unwrap();
    for receiver in [&follower, &other] {
        assert_eq!(shown(receiver, 2)["image"]["digest"], digest.as_str());
    }
    // A flipped byte of an anchor.
    let part = objects(home.path(), "/anchors/")
        .into_iter()
        .find(|p| p.to_str().unwrap().contains("/000001-"))
        .unwrap();
    let good = fs::read(&part).unwrap();
    let mut bad = good.clone();
    damage[0](&mut bad);
    fs::write(&part, &bad).unwrap();
    let third = receive(&url, &home.path().join("c"), &[]);
    let line = waiting(&third);
    assert_eq!(line["kind"], "corrupt", "{line}");
    assert!(line["error"].as_str().unwrap().contains(part.file_name().unwrap().to_str().unwrap()), "{line}");
    fs::write(&part, &good).unwrap();
    assert_eq!(shown(&third, 2)["image"]["digest"], digest.as_str());
}

#[test]
fn of_two_publishers_to_one_store_the_older_is_fenced() {
    for kind in Kind::ALL {
        let home = home();
        let store = Store::start(kind, home.path());
        let url = store.url("run");
        let port = if kind == Kind::S3 { Proxy::without_quotes(store.port).port } else { store.port };
        let mut first = trainer(&home.path().join("first"));
        let one = store.agent_by(port, &first.region, &url, &[]);
        stored(&mut first, &one, 1);
        let mut second = trainer(&home.path().join("second"));
        let two = store.agent_by(port, &second.region, &url, &[]);
        let digest = stored(&mut second, &two, 1);
        first.publish(2);
        let line = one.process.event("fenced");
        assert!(line["reason"].as_str().unwrap().contains("another publisher has moved the head"), "{line}");
        assert_eq!(one.get("/status").json()["store"]["fenced"], true);
        one.sealed(2);
        let follower = store.receive(&url, &home.path().join("image"), &[]);
        assert_eq!(shown(&follower, 1)["image"]["digest"], digest.as_str());
        let digest = stored(&mut second, &two, 2);
        assert_eq!(shown(&follower, 2)["image"]["digest"], digest.as_str());
    }
}

#[test]
fn a_publisher_that_has_lost_its_store_leaves_no_version_without_its_objects() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut first = trainer(&home.path().join("first"));
    let one = agent(&first.region, &url, &[]);
    stored(&mut first, &one, 1);
    let mut second = trainer(&home.path().join("second"));
    let two = agent(&second.region, &url, &["--store-keep=1"]);
    stored(&mut second, &two, 1);
    // It removes what the first version needed after it has told of its own.
    let until = Instant::now() + PATIENCE;
    while objects(home.path(), "/manifest-").len() > 1 {
        assert!(Instant::now() < until, "{:?}", objects(home.path(), "/run/"));
        std::thread::yield_now();
    }
    first.publish(2);
    one.process.event("fenced");
    let (code, line) = tools::end(Process::start(["store", "verify", &url]));
    assert_eq!((code, line["versions"].as_u64()), (0, Some(1)), "{line}");
}

#[test]
fn a_publisher_that_is_killed_at_any_step_leaves_no_half_version() {
    for kind in Kind::SERVERS {
        let home = home();
        let store = Store::start(kind, home.path());
        let url = store.url("run");
        let proxy = Proxy::start(store.port);
        let mut trainer = trainer(&home.path().join("region"));
        let mut agent = store.agent_by(proxy.port, &trainer.region, &url, &[]);
        stored(&mut trainer, &agent, 1);
        let follower = store.receive(&url, &home.path().join("image"), &[]);
        shown(&follower, 1);
        let mut version = 1;
        for step in ["/deltas/", "/versions/", "/head.json"] {
            version += 1;
            proxy.kill_at(step, agent.process.pid());
            trainer.publish(version);
            agent.process.ends_within(PATIENCE);
            // What it left is not a version, or a whole one.
            let late = store.receive(&url, &home.path().join(format!("late{version}")), &[]);
            let line = late.event("synced");
            let seen = line["image"]["identity"]["version"].as_u64().unwrap();
            assert!(seen < u64::from(version), "the head is moved last: {line}");
            agent = store.agent_by(proxy.port, &trainer.region, &url, &[]);
            let served = agent.sealed(version.into());
            let line = shown(&follower, version.into());
            assert_eq!(line["image"]["digest"], served["digest"], "{line}");
        }
    }
}

#[test]
fn retention_keeps_a_version_whose_publisher_was_killed_before_it_moved_the_head() {
    for kind in Kind::SERVERS {
        let home = home();
        let store = Store::start(kind, home.path());
        let url = store.url("run");
        let proxy = Proxy::start(store.port);
        let mut trainer = trainer(&home.path().join("region"));
        let mut first = store.agent_by(proxy.port, &trainer.region, &url, &[]);
        stored(&mut trainer, &first, 1);
        proxy.kill_at("/head.json", first.process.pid());
        trainer.publish(2);
        first.process.ends_within(PATIENCE);
        // The index of version 2 is there, and the next publisher finds it. It ends when its round is over.
        let mut second = store.agent_by(proxy.port, &trainer.region, &url, &["--store-keep=1"]);
        second.process.event("stored");
        let digest = second.sealed(2)["digest"].clone();
        second.process.signal(Signal::TERM);
        assert_eq!(second.process.ends_within(PATIENCE), 0);
        let (code, line) = tools::end(store.command(["store", "verify", &url]));
        assert_eq!((code, line["versions"].as_u64()), (0, Some(1)), "{line}");
        let late = store.receive(&url, &home.path().join("late"), &[]);
        assert_eq!(shown(&late, 2)["image"]["digest"], digest);
    }
}

#[test]
fn retention_in_a_store_keeps_what_the_versions_that_stay_need() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = agent(&trainer.region, &url, &["--store-anchor-every=3", "--store-keep=3"]);
    let digests: Vec<String> = (1..12).map(|version| stored(&mut trainer, &agent, version)).collect();
    // It removes after it has told of the version.
    let until = Instant::now() + PATIENCE;
    while objects(home.path(), "/versions/").len() > 3 {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    assert!(objects(home.path(), "/anchor-").len() <= 3, "anchors that no version needs are gone");
    for version in 9..12_u64 {
        let dir = home.path().join(format!("v{version}"));
        let receiver = receive(&url, &dir, &[&format!("--version={version}")]);
        assert_eq!(shown(&receiver, version)["image"]["digest"], digests[version as usize - 1].as_str());
    }
    let gone = receive(&url, &home.path().join("gone"), &["--version=2"]);
    let line = waiting(&gone);
    assert!(line["error"].as_str().unwrap().contains("no such version"), "{line}");
}

#[test]
fn gc_of_a_store_removes_only_what_no_version_needs() {
    for kind in Kind::ALL {
        let home = home();
        let store = Store::start(kind, home.path());
        let url = store.url("run");
        let mut trainer = trainer(&home.path().join("region"));
        let agent = store.agent(&trainer.region, &url, &[]);
        stored(&mut trainer, &agent, 1);
        stored(&mut trainer, &agent, 2);
        drop(agent);
        let (_, shows) = tools::end(store.command(["store", "show", &url]));
        let objects = shows["objects"].as_array().unwrap().iter().map(|o| o["object"].as_str().unwrap());
        let part = objects.into_iter().find(|name| name.contains("/000000-")).unwrap();
        store.put(&format!("run/{}/000009-{}", part.rsplit_once('/').unwrap().0, "ab".repeat(16)), b"left");
        store.put("run/policy/notes.txt", b"mine");
        let gc = |more: &[&str]| tools::end(store.command(["gc", &url].iter().chain(more)));
        assert_ne!(gc(&[]).0, 0, "it does not remove unasked");
        let (_, young) = gc(&["--yes"]);
        assert_eq!(young["freed_bytes"], 0, "what was written lately may be under way: {young}");
        // Bytes that it freed, and objects that are none of its own.
        let figures =
            |line: &Value| (line["freed_bytes"].as_u64().unwrap(), line["unknown"].as_u64().unwrap());
        let (code, dry) = gc(&["--dry-run", "--older-than=0"]);
        assert_eq!((code, figures(&dry)), (0, (4, 1)), "{dry}");
        let (code, done) = gc(&["--yes", "--older-than=0"]);
        assert_eq!((code, figures(&done)), (0, (4, 1)), "a dry run removes nothing: {done}");
        let (code, again) = gc(&["--yes", "--older-than=0"]);
        assert_eq!((code, figures(&again)), (0, (0, 1)), "what it does not know stays: {again}");
        let (code, line) = tools::end(store.command(["store", "verify", &url]));
        assert_eq!((code, line["versions"].as_u64()), (0, Some(2)), "{line}");
        let receiver = store.receive(&url, &home.path().join("image"), &[]);
        shown(&receiver, 2);
    }
}

#[test]
fn a_store_that_cannot_be_used_says_why_and_never_a_secret() {
    let home = home();
    let absent = format!("file://{}/absent", home.path().display());
    let receiver = receive(&absent, &home.path().join("a"), &[]);
    let line = waiting(&receiver);
    assert!(line["error"].as_str().unwrap().contains("check the path"), "{line}");
    for kind in Kind::SERVERS {
        let store = Store::start(kind, home.path());
        let missing = store.url("run").replace("bucket", "no-such-bucket");
        let receiver = store.receive(&missing, &home.path().join("b"), &[]);
        let line = waiting(&receiver);
        let text = line.to_string();
        assert!(text.contains("no such bucket or container"), "{text}");
        for secret in [server::SECRET, server::KEY, server::ACCOUNT_KEY] {
            assert!(!text.contains(secret), "{text}");
        }
    }
    for (url, word) in [
        ("s3://u:hunter2@bucket/run", "credentials"),
        ("ftp://x/y", "schemes"),
        ("s3://b/r?sig=abc", "credentials"),
    ] {
        let mut process = receive(url, &home.path().join("c"), &[]);
        let line = process.rest().pop().unwrap().to_string();
        assert!(line.contains(word) && !line.contains("hunter2") && !line.contains("sig=abc"), "{line}");
        assert_eq!(process.ends_within(Duration::from_secs(5)), 2);
    }
}

#[test]
fn azure_takes_each_kind_of_credentials_and_names_those_that_are_wrong() {
    let home = home();
    let store = Store::start(Kind::Azure, home.path());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = store.agent(&trainer.region, &store.url("run"), &[]);
    let digest = stored(&mut trainer, &agent, 1);
    let show = |url: &str, change: &[(&str, Option<&str>)]| {
        let mut command = store.prepared(store.port, ["store", "show", url]);
        for (name, value) in change {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        tools::end(Process::spawn(command))
    };
    let (name, key, sas) =
        ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN");
    // The URL may name the account.
    let abfs = format!("abfss://bucket@{}.dfs.core.windows.net/run", server::ACCOUNT);
    for (url, change) in
        [(&*abfs, vec![(name, None)]), ("abfs://bucket/run", vec![(key, None), (sas, Some(server::SAS))])]
    {
        let (code, line) = show(url, &change);
        assert_eq!((code, line["digest"].as_str()), (0, Some(digest.as_str())), "{line}");
    }
    let (denied, url) = ("denies access (AuthorizationFailure)", store.url("run"));
    let other = server::SAS.replace("rwdlac", "rl");
    // Allows reading, and no list.
    let weak = "sv=2019-12-12&ss=b&srt=o&sp=r&se=2100-01-01T00:00:00Z&sig=I1ZnFW4LPA8I6aR4m7i41jGdGn9DEUZx4rzTl%2BUKiUE%3D";
    for (change, words) in [
        (vec![(key, Some("bm90IHRoZSBrZXk="))], [denied, key]),
        (vec![(key, None), (sas, Some(&other))], [denied, sas]),
        (vec![(key, None), (sas, Some(weak))], ["denies access (Authorization", sas]),
        (vec![(key, Some("no base64"))], ["Invalid Access Key", key]),
        (vec![(name, None)], ["Account must be specified", name]),
    ] {
        let (code, line) = show(&url, &change);
        let text = line.to_string();
        assert!(code != 0 && words.iter().all(|word| text.contains(word)), "{code} {text}");
        for secret in ["bm90IHRoZSBrZXk", "no base64", "sig=", server::ACCOUNT_KEY] {
            assert!(!text.contains(secret), "{text}");
        }
    }
}

#[test]
fn a_fuzzy_anchor_is_lifted_to_one_version() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    // A part a second: the trainer laps the upload.
    let slow = ["--store-streams=1", "--store-bandwidth=5Mi"];
    let agent = agent(&trainer.region, &url, &slow);
    trainer.publish(1);
    let part = |number: u32| {
        let until = Instant::now() + PATIENCE;
        while objects(home.path(), &format!("/{number:06}-")).is_empty() {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
    };
    part(0);
    trainer.publish(2);
    part(1);
    trainer.publish(3);
    agent.process.event("stored");
    let anchor = objects(home.path(), "/anchor-").remove(0);
    let anchor: Value = serde_json::from_slice(&fs::read(anchor).unwrap()).unwrap();
    let versions: Vec<u64> =
        anchor["parts"].as_array().unwrap().iter().map(|p| p["version"].as_u64().unwrap()).collect();
    assert_eq!((versions[0], versions.windows(2).all(|w| w[0] <= w[1])), (1, true), "{anchor}");
    assert!(versions.last() > versions.first(), "parts of several versions: {anchor}");
    let receiver = receive(&url, &home.path().join("image"), &["--until=3"]);
    let digest = agent.sealed(3)["digest"].clone();
    assert_eq!(shown(&receiver, 3)["image"]["digest"], digest);
    // A slice has blocks of each of these versions, which are all proved by the digest of the whole.
    let slice = &*slice::selection(home.path());
    let sliced = receive(&url, &home.path().join("slice"), &[slice, "--until=3"]);
    let own = slice::of_agent(&trainer.region, &home.path().join("own"), slice, 3);
    assert_eq!(shown(&sliced, 3)["image"]["digest"], own["image"]["digest"]);
    // A receiver that was killed with blocks of several versions in place has them compared with each.
    let part = objects(home.path(), "/000002-").remove(0);
    let aside = home.path().join("aside");
    fs::rename(&part, &aside).unwrap();
    let mut other = receive(&url, &home.path().join("other"), &[]);
    waiting(&other);
    other.kill();
    fs::rename(&aside, &part).unwrap();
    let other = receive(&url, &home.path().join("other"), &[]);
    let line = shown(&other, 3);
    assert_eq!(line["image"]["digest"], digest);
    assert!(line["wire_bytes"].as_u64().unwrap() < 12 << 20, "only what is missing is fetched: {line}");
}

#[test]
fn a_publisher_that_finds_its_newest_index_damaged_begins_with_an_anchor() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    let first = agent(&trainer.region, &url, &[]);
    stored(&mut trainer, &first, 1);
    drop(first);
    let index = objects(home.path(), "/versions/").remove(0);
    fs::write(&index, b"{").unwrap();
    let second = agent(&trainer.region, &url, &[]);
    let digest = stored(&mut trainer, &second, 2);
    let receiver = receive(&url, &home.path().join("image"), &[]);
    assert_eq!(shown(&receiver, 2)["image"]["digest"], digest.as_str());
    let mut process = Process::start(["gc", &url, "--yes", "--older-than=0"]);
    let line = process.rest().pop().unwrap().to_string();
    assert!(line.contains("versions/") && process.ends_within(PATIENCE) != 0, "nothing is removed: {line}");
}
