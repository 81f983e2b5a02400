//! The example programs, as processes of their own.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tempfile::TempDir;

/// Where cargo puts the examples: beside the directory of this test.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is not built: run `cargo build --examples -p windlass`", path.display());
    path
}

/// A process whose lines are read, and which is killed if the test fails.
struct Program {
    child: Child,
    lines: Receiver<String>,
}

impl Program {
    fn start(name: &str, arguments: &[(&str, &Path)], rest: &[&str]) -> Program {
        let mut command = Command::new(example(name));
        for (flag, path) in arguments {
            command.arg(flag).arg(path);
        }
        command.args(rest).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = read_lines(child.stdout.take().unwrap());
        Program { child, lines }
    }

    fn line(&self) -> Vec<String> {
        let line = self.lines.recv_timeout(Duration::from_secs(30)).expect("the program says nothing more");
        line.split(' ').map(ToOwned::to_owned).collect()
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_lines(out: ChildStdout) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    lines
}

struct Place {
    home: TempDir,
}

impl Place {
    fn new() -> Place {
        Place { home: tempfile::Builder::new().prefix("windlass-ex-").tempdir_in("/dev/shm").unwrap() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn trainer(&self, rest: &[&str]) -> Program {
        let paths = [("--region", &*self.at("region")), ("--sync-info", &*self.at("sync.json"))];
        Program::start("rust_trainer", &paths, rest)
    }

    fn engine(&self, rest: &[&str]) -> Program {
        let (region, info, image) = (self.at("region"), self.at("sync.json"), self.at("image"));
        let paths = [("--region", &*region), ("--sync-info", &*info), ("--image", &*image)];
        Program::start("rust_engine", &paths, rest)
    }
}

/// A trainer, an engine that is killed in the middle, and its successor: every digest that an engine reports is the
/// one that the trainer reported.
fn train_kill_and_restart(link: &str) -> Vec<Vec<String>> {
    let place = Place::new();
    let rest = ["--link", link];
    let trainer = place.trainer(&[&rest[..], &["--steps", "12", "--step-ms", "60"]].concat());
    let first = place.engine(&[&rest[..], &["--until", "1000"]].concat());
    let mut seen = vec![first.line(), first.line()];
    drop(first);
    let second = place.engine(&[&rest[..], &["--until", "12"]].concat());
    let published: BTreeMap<String, String> =
        (0..=12).map(|_| trainer.line()).map(|line| (line[0].clone(), line[1].clone())).collect();
    loop {
        seen.push(second.line());
        if seen.last().unwrap()[0] == "12" {
            break;
        }
    }
    second.end();
    for line in &seen {
        assert_eq!(published.get(&line[0]), Some(&line[1]), "{line:?} of {published:?}");
    }
    trainer.end();
    assert!(!place.at("region").exists(), "the region is removed at the end");
    seen
}

#[test]
fn a_rust_trainer_and_a_rust_engine_sync_over_tcp_with_a_token() {
    let seen = train_kill_and_restart("tcp");
    assert!(seen[1..].iter().any(|line| line[2] == "delta"), "{seen:?}");
}

#[test]
fn a_rust_trainer_and_a_rust_engine_sync_through_shared_memory() {
    let seen = train_kill_and_restart("shm");
    assert!(seen.iter().all(|line| line[2] == "mapped"), "{seen:?}");
}

#[test]
fn an_engine_in_shared_memory_follows_a_trainer_that_was_killed_and_came_back() {
    let place = Place::new();
    let first = place.trainer(&["--link", "shm", "--steps", "3", "--step-ms", "1"]);
    let engine = place.engine(&["--link", "shm", "--until", "7"]);
    while engine.line()[0] != "3" {}
    // Killed: nothing is cleaned up, and the engine still has the region open.
    drop(first);
    let second = place.trainer(&["--link", "shm", "--steps", "7", "--step-ms", "1"]);
    let published = (0..=7).fold(Vec::new(), |_, _| second.line());
    let loaded = loop {
        let line = engine.line();
        if line[0] == "7" {
            break line;
        }
    };
    assert_eq!((&loaded[0], &loaded[1]), (&published[0], &published[1]));
    engine.end();
    second.end();
}

#[test]
fn an_engine_with_a_wrong_token_is_refused() {
    let place = Place::new();
    let trainer = place.trainer(&["--steps", "0"]);
    trainer.line();
    let info = std::fs::read_to_string(place.at("sync.json")).unwrap();
    let mut info: serde_json::Value = serde_json::from_str(&info).unwrap();
    info["token"] = "somebody-else".into();
    std::fs::write(place.at("sync.json"), info.to_string()).unwrap();
    let mut engine = place.engine(&["--until", "0"]);
    let lines: Vec<_> = engine.lines.iter().collect();
    assert!(!engine.child.wait().unwrap().success() && lines.is_empty(), "{lines:?}");
    trainer.end();
}
