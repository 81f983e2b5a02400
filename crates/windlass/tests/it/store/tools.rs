//! `windlass store` on what real agents have uploaded.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::server::{Kind, Store};
use super::{agent, home, objects, receive, shown, stored, trainer, trainer_of};
use crate::process::{PATIENCE, Process};

/// Runs a command to its end: its exit code and its object.
fn run(args: &[&str]) -> (i32, Value) {
    end(Process::start(args))
}

pub(super) fn end(mut process: Process) -> (i32, Value) {
    let lines = process.rest();
    (process.ends_within(PATIENCE), lines.last().cloned().unwrap())
}

fn digest_of(dir: &Path) -> String {
    let (code, line) = run(&["verify", dir.to_str().unwrap()]);
    assert_eq!(code, 0, "{line}");
    line["state_digest"].as_str().unwrap().to_owned()
}

/// The names of damaged objects, and the versions that cannot be had.
fn damage(line: &Value) -> (Vec<String>, Vec<u64>) {
    let text = |v: &Value| v["object"].as_str().unwrap().to_owned();
    let damaged = line["damaged"].as_array().unwrap().iter().map(text).collect();
    let lost = line["lost"].as_array().unwrap().iter().map(|v| v["version"].as_u64().unwrap()).collect();
    (damaged, lost)
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

fn delta_to(dir: &Path, version: u64) -> PathBuf {
    objects(dir, &format!("-{version:020}-"))
        .into_iter()
        .find(|p| p.extension().is_some_and(|e| e == "wdelta"))
        .unwrap()
}

#[test]
fn a_store_is_listed_verified_and_any_version_of_it_got() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = agent(&trainer.region, &url, &["--store-anchor-every=3"]);
    let digests: Vec<String> = (1..7).map(|version| stored(&mut trainer, &agent, version)).collect();
    let (code, line) = run(&["store", "ls", &url, "--top=4"]);
    let model = &line["models"][0];
    assert_eq!(
        (code, &model["model_id"], model["versions"].as_u64()),
        (0, &"policy".into(), Some(6)),
        "{line}"
    );
    let newest = model["newest"].as_array().unwrap();
    assert_eq!((newest.len(), &newest[0]["digest"]), (4, &digests[5].as_str().into()), "{line}");
    let (code, line) = run(&["store", "show", &url, "--version=4"]);
    assert_eq!((code, &line["digest"]), (0, &digests[3].as_str().into()), "{line}");
    for object in line["objects"].as_array().unwrap() {
        let file = home.path().join("run").join(object["object"].as_str().unwrap());
        assert_eq!(fs::metadata(&file).unwrap().len(), object["bytes"].as_u64().unwrap(), "{object}");
    }
    let (code, line) = run(&["store", "verify", &url]);
    assert_eq!((code, damage(&line), line["versions"].as_u64()), (0, (vec![], vec![]), Some(6)), "{line}");
    // The configuration is copied, weights of the model's directory are not.
    let model_dir = home.path().join("base");
    fs::create_dir(&model_dir).unwrap();
    fs::write(model_dir.join("config.json"), "{}").unwrap();
    fs::write(model_dir.join("model.safetensors"), "old").unwrap();
    let config = format!("--model-dir={}", model_dir.display());
    for version in [1, 3, 6] {
        let out = home.path().join(format!("v{version}"));
        let (pick, place) = (format!("--version={version}"), format!("--output={}", out.display()));
        let (code, line) = run(&["store", "get", &url, &pick, &place, &config]);
        assert_eq!((code, &line["digest"]), (0, &digests[version - 1].as_str().into()), "{line}");
        assert_eq!(digest_of(&out), digests[version - 1]);
        let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["config.json", "model.safetensors"]);
        // What is there is not replaced.
        let (code, line) = run(&["store", "get", &url, &place]);
        assert!(code == 2 && line.to_string().contains("a new directory"), "{line}");
        assert_eq!(digest_of(&out), digests[version - 1]);
    }
    let gone = home.path().join("gone");
    let (code, line) = run(&["store", "get", &url, "--version=9", &format!("--output={}", gone.display())]);
    assert!(code != 0 && line.to_string().contains("no such version") && !gone.exists(), "{line}");
}

#[test]
fn verify_names_what_is_damaged_and_the_versions_that_it_costs() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = agent(&trainer.region, &url, &[]);
    let digests: Vec<String> = (1..5).map(|version| stored(&mut trainer, &agent, version)).collect();
    drop(agent);
    let name = |path: &Path| path.strip_prefix(home.path().join("run")).unwrap().to_str().unwrap().to_owned();
    let delta = delta_to(home.path(), 3);
    flip(&delta);
    let (code, line) = run(&["store", "verify", &url]);
    assert_eq!((code, damage(&line)), (1, (vec![name(&delta)], vec![3, 4])), "{line}");
    let (code, line) = run(&["store", "verify", &url, "--version=2"]);
    assert_eq!((code, damage(&line)), (0, (vec![], vec![])), "{line}");
    let out = home.path().join("out");
    let place = format!("--output={}", out.display());
    let (code, line) = run(&["store", "get", &url, "--version=4", &place]);
    assert!(code == 5 && line.to_string().contains(&name(&delta)), "{code} {line}");
    assert!(!out.exists() && objects(home.path(), ".windlass-tmp").is_empty(), "nothing is left");
    let (code, line) = run(&["store", "get", &url, "--version=2", &place]);
    assert_eq!((code, digest_of(&out)), (0, digests[1].clone()), "{line}");
    flip(&delta);
    // A part of the anchor, and an index.
    let part = objects(home.path(), "/000001-").remove(0);
    fs::remove_file(&part).unwrap();
    let index = objects(home.path(), "/versions/").pop().unwrap();
    fs::write(&index, "{").unwrap();
    let (code, line) = run(&["store", "verify", &url]);
    assert_eq!((code, damage(&line)), (1, (vec![name(&part), name(&index)], vec![4, 1, 2, 3])), "{line}");
    let (code, line) = run(&["store", "ls", &url]);
    assert!(
        code == 0 && line["models"][0]["newest"][0]["error"].as_str().unwrap().contains("versions/"),
        "{line}"
    );
    let (code, line) = run(&["store", "prune", &url, "--keep=1", "--yes"]);
    assert!(code != 0 && line.to_string().contains(&name(&index)), "nothing is removed: {line}");
}

#[test]
fn many_versions_are_caught_up_by_a_composed_delta() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = agent(&trainer.region, &url, &["--history=32"]);
    stored(&mut trainer, &agent, 1);
    let behind = |name: &str| {
        let dir = home.path().join(name);
        let mut receiver = receive(&url, &dir, &["--version=1"]);
        shown(&receiver, 1);
        assert_eq!(receiver.ends_within(PATIENCE), 0);
        dir
    };
    let (a, b) = (behind("a"), behind("b"));
    let digest = (2..19).map(|version| stored(&mut trainer, &agent, version)).last().unwrap();
    let (_, index) = run(&["store", "show", &url]);
    let number = |delta: &Value, field: &str| delta[field].as_u64().unwrap();
    let (chain, composed) = (index["chain"].as_array().unwrap(), index["composed"].as_array().unwrap());
    let bytes = |base: u64, target: u64| -> u64 {
        let on_the_way = chain.iter().filter(|d| number(d, "base") >= base && number(d, "target") <= target);
        on_the_way.map(|d| number(d, "bytes")).sum()
    };
    assert!(!composed.is_empty(), "{index}");
    for delta in composed {
        let apart = bytes(number(delta, "base"), number(delta, "target"));
        assert!(number(delta, "bytes") * 4 <= apart * 3, "{delta} for {apart} bytes");
    }
    let caught_up = |dir: &Path| {
        let mut receiver = receive(&url, dir, &["--until=18"]);
        let line = shown(&receiver, 18);
        assert_eq!(
            (&line["image"]["digest"], &line["mode"]),
            (&digest.as_str().into(), &"delta".into()),
            "{line}"
        );
        assert_eq!(receiver.ends_within(PATIENCE), 0);
        number(&line, "wire_bytes")
    };
    let saved = composed.iter().map(|d| bytes(number(d, "base"), number(d, "target")) - number(d, "bytes"));
    assert_eq!(caught_up(&a), bytes(1, 18) - saved.sum::<u64>());
    let (code, line) = run(&["store", "verify", &url]);
    assert_eq!((code, damage(&line)), (0, (vec![], vec![])), "{line}");
    // Without it there are those of every version.
    let (base, target) = (number(&composed[0], "base"), number(&composed[0], "target"));
    let file = objects(home.path(), &format!("/{base:020}-{target:020}-")).remove(0);
    flip(&file);
    assert!(caught_up(&b) >= bytes(1, 18));
    let (code, line) = run(&["store", "verify", &url]);
    let name = file.strip_prefix(home.path().join("run")).unwrap().to_str().unwrap().to_owned();
    assert_eq!((code, damage(&line)), (1, (vec![name], vec![])), "{line}");
}

#[test]
fn prune_removes_the_oldest_versions_while_a_publisher_and_a_follower_run() {
    let home = home();
    let url = format!("file://{}/run", home.path().display());
    let mut trainer = trainer(&home.path().join("region"));
    let agent = agent(&trainer.region, &url, &["--store-anchor-every=3"]);
    for version in 1..8 {
        stored(&mut trainer, &agent, version);
    }
    let follower = receive(&url, &home.path().join("image"), &[]);
    shown(&follower, 7);
    // The agent may upload an anchor meanwhile.
    let before = objects(&home.path().join("run"), "");
    let gone = || before.iter().filter(|object| !object.exists()).count();
    let (code, line) = run(&["store", "prune", &url, "--yes"]);
    assert!(code == 2 && line.to_string().contains("say what stays"), "{line}");
    let (code, line) = run(&["store", "prune", &url, "--keep=2"]);
    assert!(code == 2 && line.to_string().contains("--yes"), "{line}");
    let (code, dry) = run(&["store", "prune", &url, "--keep=2", "--dry-run"]);
    assert_eq!((code, dry["versions"].as_array().unwrap().len()), (0, 5), "{dry}");
    assert_eq!(gone(), 0);
    let (code, done) = run(&["store", "prune", &url, "--keep=2", "--yes"]);
    assert_eq!(
        (code, &done["versions"], &done["freed_bytes"]),
        (0, &dry["versions"], &dry["freed_bytes"]),
        "{done}"
    );
    assert_eq!(gone(), done["objects"].as_u64().unwrap() as usize);
    assert_eq!(done["left"], 2, "{done}");
    let digest = stored(&mut trainer, &agent, 8);
    assert_eq!(shown(&follower, 8)["image"]["digest"], digest.as_str());
    let (code, line) = run(&["store", "verify", &url]);
    assert_eq!((code, damage(&line), line["versions"].as_u64()), (0, (vec![], vec![]), Some(3)), "{line}");
    let late = receive(&url, &home.path().join("late"), &["--version=6"]);
    shown(&late, 6);
}

#[test]
fn runs_of_a_trainer_and_models_of_a_store_are_told_apart() {
    for kind in Kind::SERVERS {
        runs_and_models_are_told_apart(kind);
    }
}

fn runs_and_models_are_told_apart(kind: Kind) {
    let home = home();
    let server = Store::start(kind, home.path());
    let (url, policy) = (&*server.url("run"), &*server.url("run/policy"));
    let store = |args: &[&str]| end(server.command(["store"].iter().chain(args)));
    let mut first = trainer(&home.path().join("first"));
    let one = server.agent(&first.region, url, &[]);
    let old = stored(&mut first, &one, 1);
    drop(one);
    drop(first);
    // Another seed, so that its first version is another one.
    let mut second = trainer_of(&home.path().join("second"), "policy", &["--seed=7"]);
    let two = server.agent(&second.region, url, &[]);
    let new = stored(&mut second, &two, 1);
    let newest = stored(&mut second, &two, 2);
    let mut other = trainer_of(&home.path().join("other"), "critic", &[]);
    let three = server.agent(&other.region, url, &[]);
    let critic = stored(&mut other, &three, 1);
    let (code, line) = store(&["ls", url]);
    let models: Vec<(&str, u64, u64)> = line["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| {
            (
                m["model_id"].as_str().unwrap(),
                m["incarnations"].as_u64().unwrap(),
                m["versions"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!((code, models), (0, vec![("critic", 1, 1), ("policy", 2, 3)]), "{line}");
    let (code, said) = store(&["show", url]);
    assert!(code == 2 && said.to_string().contains("critic, policy"), "{said}");
    let run = line["models"][1]["newest"][2]["identity"]["incarnation"].as_u64().unwrap();
    let run = format!("--incarnation={run:x}");
    for (pick, digest) in [
        (vec![], &newest),
        (vec!["--version=1"], &new),
        (vec!["--version=1", &run], &old),
        (vec![run.as_str()], &old),
    ] {
        let (code, line) = store(&[&["show", policy], &pick[..]].concat());
        assert_eq!((code, &line["digest"]), (0, &digest.as_str().into()), "{pick:?} {line}");
    }
    let out = home.path().join("out");
    let place = format!("--output={}", out.display());
    let (code, line) = store(&["get", policy, "--version=1", &run, &place]);
    assert_eq!((code, digest_of(&out)), (0, old), "{line}");
    let (code, line) = store(&["show", &server.url("run/critic")]);
    assert_eq!((code, &line["digest"]), (0, &critic.as_str().into()), "{line}");
    let (code, line) = store(&["verify", url]);
    assert_eq!((code, damage(&line), line["versions"].as_u64()), (0, (vec![], vec![]), Some(4)), "{line}");
    // Each model is pruned by itself.
    let (code, line) = store(&["prune", url, "--keep=1", "--yes"]);
    assert_eq!(
        (code, line["versions"].as_array().unwrap().len(), line["left"].as_u64()),
        (0, 2, Some(2)),
        "{line}"
    );
    let (code, line) = store(&["ls", &server.url("nothing")]);
    assert!(code == 3 && line.to_string().contains("no version of any model"), "{code} {line}");
}
