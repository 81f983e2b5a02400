//! Images read from memory by NIXL, between real processes.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use windlass_data::conformance::{nixl, skipped};

use crate::process::{Agent, PATIENCE, Process, Trainer};

/// Where NIXL is, or nothing where it is not installed.
fn library() -> Option<PathBuf> {
    nixl(&[]).map_err(|what| skipped(&what)).ok()?.library
}

fn flags(library: &Path) -> [String; 3] {
    let library = format!("--nixl-library={}", library.display());
    ["--nixl=on".into(), library, "--nixl-param=engine_config=TLS=tcp".into()]
}

fn home() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn agent(region: &Path, more: &[String]) -> Agent {
    Agent::start(region, &more.iter().map(String::as_str).collect::<Vec<_>>())
}

fn receiver(home: &Path, region: &Path, more: &[String]) -> Process {
    let dir = format!("--dir={}", home.join("images").display());
    let args = ["receive".to_owned(), format!("--region={}", region.display()), dir];
    Process::start(args.into_iter().chain(more.iter().cloned()))
}

fn number(synced: &Value, name: &str) -> u64 {
    synced[name].as_u64().unwrap_or_else(|| panic!("no {name} in {synced}"))
}

/// The library under another name of its release.
fn as_release(home: &Path, library: &Path, release: &str) -> PathBuf {
    let packages = home.join(release);
    std::fs::create_dir(&packages).unwrap();
    for entry in std::fs::read_dir(library).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if !name.ends_with(".dist-info") {
            symlink(entry.path(), packages.join(name)).unwrap();
        }
    }
    std::fs::create_dir(packages.join(format!("nixl_cu12-{release}.dist-info"))).unwrap();
    packages
}

#[test]
fn images_are_read_from_the_memory_of_an_agent_and_of_the_one_that_follows_it() {
    let Some(library) = library() else { return };
    let home = home();
    let mut trainer = Trainer::start(&home.path().join("region"));
    let mut first = agent(&trainer.region, &flags(&library));
    trainer.publish(1);
    first.sealed(1);
    let full = [flags(&library).to_vec(), vec!["--mode=full".into()]].concat();
    let follower = receiver(home.path(), &trainer.region, &full);
    let synced = follower.event("synced");
    assert_eq!(
        (number(&synced, "read_bytes"), &synced["unread"]),
        (number(&synced, "wire_bytes"), &Value::Null)
    );
    assert!(number(&synced, "read_bytes") > 4_000_000, "{synced}");
    // Killed, so that nothing is said to the receiver's UCX.
    first.process.kill();
    let second = agent(&trainer.region, &flags(&library));
    trainer.publish(2);
    second.sealed(2);
    let synced = loop {
        let synced = follower.event("synced");
        if synced["image"]["identity"]["version"] == 2 {
            break synced;
        }
    };
    assert_eq!(number(&synced, "read_bytes"), number(&synced, "wire_bytes"), "{synced}");
    let metrics = String::from_utf8(second.get("/metrics").body).unwrap();
    assert!(metrics.contains("read_bytes_total"), "{metrics}");
    drop(follower);
    // Deltas go over TCP as ever, and one receiver takes them without NIXL.
    let delta = receiver(home.path(), &trainer.region, &flags(&library));
    trainer.publish(3);
    let synced = loop {
        let synced = delta.event("synced");
        if synced["image"]["identity"]["version"] == 3 {
            break synced;
        }
    };
    assert_eq!((synced["mode"].as_str(), number(&synced, "read_bytes")), (Some("delta"), 0), "{synced}");
}

#[test]
fn an_agent_without_nixl_or_of_another_release_serves_over_tcp_and_the_reason_is_told() {
    let Some(library) = library() else { return };
    let home = home();
    let other = as_release(home.path(), &library, "1.99.0");
    let mut trainer = Trainer::start(&home.path().join("region"));
    trainer.publish(1);
    for (ours, says) in [(Vec::new(), "--nixl on"), (flags(&other).to_vec(), "nixl_cu12 1.99.0")] {
        let agent = agent(&trainer.region, &ours);
        agent.sealed(1);
        let _ = std::fs::remove_dir_all(home.path().join("images"));
        let more = [flags(&library).to_vec(), vec!["--versions=1".into()]].concat();
        let synced = receiver(home.path(), &trainer.region, &more).event("synced");
        let why = synced["unread"].as_str().unwrap_or_else(|| panic!("no reason in {synced}"));
        assert!(why.contains(says), "{says} in {why}");
        assert_eq!(number(&synced, "read_bytes"), 0, "{synced}");
        assert!(number(&synced, "wire_bytes") > 4_000_000, "{synced}");
    }
}

#[test]
fn nixl_that_cannot_be_had_is_an_error_that_says_what_is_missing() {
    let Some(library) = library() else { return };
    let home = home();
    let trainer = Trainer::start(&home.path().join("region"));
    let absent = home.path().join("absent");
    let newer = as_release(home.path(), &library, "2.0.0");
    let empty = home.path().join("plugins");
    std::fs::create_dir(&empty).unwrap();
    let cases = [
        (&absent, None, "NIXL is not installed: looked for"),
        (&newer, None, "is NIXL 2.0.0"),
        (&library, Some(&empty), "has no plugin UCX"),
    ];
    for (library, plugins, says) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.arg("agent").arg(format!("--region={}", trainer.region.display()));
        command.args(flags(library)).arg("--json").env_remove("WINDLASS_TOKEN");
        if let Some(plugins) = plugins {
            command.env("NIXL_PLUGIN_DIR", plugins);
        }
        let mut process = Process::spawn(command);
        let lines = process.rest();
        let error = lines.iter().find_map(|l| l["error"]["message"].as_str()).unwrap_or_default();
        assert!(error.contains(says), "{says} in {lines:?}");
        assert_ne!(process.ends_within(PATIENCE), 0);
    }
    // Automatically, it is done without on a host that has no RDMA.
    if windlass_data::nixl::rdma_devices().is_empty() {
        let auto = ["--nixl=auto".to_owned(), format!("--nixl-library={}", absent.display())];
        agent(&trainer.region, &auto);
    }
}
