//! Receivers of a slice of a model in a store: they fetch ranges, and end with what a receiver of the same slice has from an
//! agent.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::fallback::{IMAGE, Run, by_delta, kill, turned};
use super::server::{Kind, Store};
use super::{agent, home, objects, receive, shown, stored, trainer, waiting};
use crate::process::{PATIENCE, Process};

/// One of five layers, and some rows of the embedding: a fifth of the model.
pub(super) fn selection(home: &Path) -> String {
    let file = home.join("slice.json");
    let rows = json!({"model.layers.1.*": [[]], "model.embed_tokens.weight": [[[1000, 1500]]]});
    fs::write(&file, rows.to_string()).unwrap();
    format!("--slice={}", file.display())
}

/// What a receiver on the trainer's host has of this slice of a version: from the agent.
pub(super) fn of_agent(region: &Path, dir: &Path, slice: &str, version: u64) -> Value {
    fs::create_dir_all(dir).unwrap();
    let [region, dir] = [("region", region), ("dir", dir)].map(|(n, p)| format!("--{n}={}", p.display()));
    let mut process = Process::start(["receive", &region, &dir, slice, &format!("--until={version}")]);
    let line = shown(&process, version);
    assert_eq!(process.ends_within(PATIENCE), 0);
    line
}

/// Memory that the files below a directory take.
fn memory(dir: &Path) -> u64 {
    objects(dir, "").iter().map(|file| fs::metadata(file).unwrap().blocks() * 512).sum()
}

fn sums(dir: &Path) -> PathBuf {
    dir.join(".policy.sums")
}

#[test]
fn a_slice_from_a_store_is_ranges_and_equals_that_of_an_agent() {
    for kind in Kind::ALL {
        let home = home();
        let store = Store::start(kind, home.path());
        let (url, slice) = (store.url("run"), &*selection(home.path()));
        let mut trainer = trainer(&home.path().join("region"));
        let agent = store.agent(&trainer.region, &url, &[]);
        stored(&mut trainer, &agent, 1);
        let dir = home.path().join("image");
        let mut follower = store.receive(&url, &dir, &[slice]);
        let line = shown(&follower, 1);
        let own = of_agent(&trainer.region, &home.path().join("own"), slice, 1);
        assert_eq!(line["image"]["digest"], own["image"]["digest"], "{kind:?}: {line}");
        let bytes = |line: &Value| line["wire_bytes"].as_u64().unwrap();
        println!("{kind:?}: {} bytes from the store, {} from the agent", bytes(&line), bytes(&own));
        assert!(bytes(&line) * 10 <= bytes(&own) * 11, "only the slice is fetched: {line} {own}");
        assert!(bytes(&line) < IMAGE / 4 && memory(&dir) < IMAGE / 3, "{} {line}", memory(&dir));
        for version in 2..4_u32 {
            stored(&mut trainer, &agent, version);
            let line = shown(&follower, version.into());
            let own = of_agent(&trainer.region, &home.path().join("own"), slice, version.into());
            assert_eq!((&line["image"]["digest"], &line["mode"]), (&own["image"]["digest"], &own["mode"]));
        }
        // A receiver that is started again goes on by the deltas alone: it has kept the hashes of its version.
        let of_version_3 = |file: Vec<u8>| file.get(8..16) == Some(&3_u64.to_le_bytes());
        let until = Instant::now() + PATIENCE;
        while !fs::read(sums(&dir)).is_ok_and(of_version_3) {
            assert!(Instant::now() < until, "the hashes of version 3 are not kept");
            std::thread::yield_now();
        }
        follower.signal(Signal::KILL);
        follower.ends_within(PATIENCE);
        let digest = stored(&mut trainer, &agent, 4);
        let own = of_agent(&trainer.region, &home.path().join("own"), slice, 4);
        assert_ne!(own["image"]["digest"], digest.as_str(), "a slice has a digest of its own");
        let mut again = store.receive(&url, &dir, &[slice, "--until=4"]);
        by_delta(&again, 4, own["image"]["digest"].as_str().unwrap());
        assert_eq!(again.ends_within(PATIENCE), 0);
        // Without the hashes, they come from the anchor and the deltas since.
        fs::remove_file(sums(&dir)).unwrap();
        stored(&mut trainer, &agent, 5);
        let own = of_agent(&trainer.region, &home.path().join("own"), slice, 5);
        let mut again = store.receive(&url, &dir, &[slice, "--until=5"]);
        by_delta(&again, 5, own["image"]["digest"].as_str().unwrap());
        assert_eq!(again.ends_within(PATIENCE), 0);
    }
}

#[test]
fn a_slice_of_a_store_that_was_damaged_is_not_shown() {
    let home = home();
    let (url, slice) = (format!("file://{}/run", home.path().display()), &*selection(home.path()));
    let mut trainer = trainer(&home.path().join("region"));
    let agent = agent(&trainer.region, &url, &[]);
    stored(&mut trainer, &agent, 1);
    let follower = receive(&url, &home.path().join("image"), &[slice]);
    shown(&follower, 1);
    let part = objects(home.path(), "/anchors/")
        .into_iter()
        .find(|p| p.to_str().unwrap().contains("/000000-"))
        .unwrap();
    let good = fs::read(&part).unwrap();
    let mut bad = good.clone();
    // In the rows of the embedding, which come first.
    bad[1200 * 640] ^= 1;
    fs::write(&part, &bad).unwrap();
    let other = receive(&url, &home.path().join("other"), &[slice]);
    let line = waiting(&other);
    assert_eq!(line["kind"], "corrupt", "{line}");
    assert!(line["error"].as_str().unwrap().contains(part.file_name().unwrap().to_str().unwrap()), "{line}");
    // In rows that the slice has not.
    let mut elsewhere = good.clone();
    elsewhere[10] ^= 1;
    fs::write(&part, &elsewhere).unwrap();
    let own = of_agent(&trainer.region, &home.path().join("own"), slice, 1);
    assert_eq!(shown(&other, 1)["image"]["digest"], own["image"]["digest"]);
    fs::write(&part, &good).unwrap();
    // Hashes that do not give the digest of the whole prove no slice.
    let table = sums(&home.path().join("image"));
    let until = Instant::now() + PATIENCE;
    while !table.exists() {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    drop(follower);
    let mut bytes = fs::read(&table).unwrap();
    bytes[20] ^= 1;
    fs::write(&table, bytes).unwrap();
    stored(&mut trainer, &agent, 2);
    let own = of_agent(&trainer.region, &home.path().join("own"), slice, 2);
    let again = receive(&url, &home.path().join("image"), &[slice]);
    assert_eq!(shown(&again, 2)["image"]["digest"], own["image"]["digest"]);
}

#[test]
fn a_slice_goes_on_from_the_store_while_its_agent_is_away_and_back() {
    let home = home();
    let slice = &*selection(home.path());
    let run = Run::new(home.path(), &format!("file://{}/run", home.path().display()));
    let region = home.path().join("region");
    let mut trainer = trainer(&region);
    let mut agent = run.agent(&region);
    stored(&mut trainer, &agent, 1);
    let receiver = run.receive_with(&home.path().join("image"), &[slice]);
    shown(&receiver, 1);
    let own = |version: u64| {
        let line = of_agent(&region, &home.path().join("own"), slice, version);
        line["image"]["digest"].as_str().unwrap().to_owned()
    };
    stored(&mut trainer, &agent, 2);
    by_delta(&receiver, 2, &own(2));
    kill(&mut agent);
    let mut moved = run.moved(&region);
    turned(&receiver, "store");
    for version in 3..5 {
        stored(&mut trainer, &moved, version);
        by_delta(&receiver, version.into(), &own(version.into()));
    }
    kill(&mut moved);
    let agent = run.agent(&region);
    turned(&receiver, "agent");
    stored(&mut trainer, &agent, 5);
    by_delta(&receiver, 5, &own(5));
}
