//! `windlass demo` with real processes: what it reports, and that nothing of it is left, however it ends.

use crate::command;
use crate::process;
use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::process::{PATIENCE, Process, processes_about};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

fn home() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// Waits until a condition holds.
fn until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn nothing_left(dir: &Path) {
    assert_eq!(command::names(dir), Vec::<String>::new());
    assert_eq!(processes_about(dir), []);
}

/// A demo that runs until the test ends it, with two of its three receivers at work.
fn long_demo(dir: &Path) -> Process {
    let dir_arg = format!("--dir={}", dir.display());
    let demo =
        Process::start(["demo", "--steps=64", "--ranks=2", "--model-bytes=4Mi", "--receivers=3", &dir_arg]);
    until("all processes at work", || {
        let running = processes_about(dir);
        let home = dir.join(format!("windlass-demo-{}", demo.pid()));
        let made = |image: &&str| home.join(image).join("header").exists();
        let images = ["receiver-0/actor", "receiver-0/verifier", "receiver-1/actor", "receiver-1/verifier"];
        (running.len() == 10 && images.iter().all(made)).then_some(())
    });
    demo
}

#[test]
fn the_demo_serves_two_models_through_a_late_join_and_a_kill_and_leaves_nothing() {
    let home = home();
    let dir = format!("--dir={}", home.path().display());
    let args = ["demo", "--model-bytes=4Mi", "--steps=6", "--pace=0.05", &dir];
    let mut demo = Process::start(args);
    let listening = demo.event("listening");
    let page = listening["page"].as_str().unwrap();
    assert!(page.starts_with("http://127.0.0.1:"), "{listening}");
    assert_eq!(demo.ends_within(Duration::from_secs(120)), 0);
    let told = demo.rest().pop().unwrap();
    assert_eq!((&told["ok"], &told["served"]), (&json!(true), &json!(6)), "{told}");
    let incidents: Vec<&Value> = told["incidents"].as_array().unwrap().iter().map(|i| &i["what"]).collect();
    assert_eq!(incidents, ["receiver-2 joins", "receiver-0 killed"]);
    let names: Vec<&Value> = told["models"].as_array().unwrap().iter().map(|m| &m["model_id"]).collect();
    assert_eq!(names, ["actor", "verifier"]);
    let digests: Vec<&Value> = told["models"].as_array().unwrap().iter().map(|m| &m["digest"]).collect();
    assert_ne!(digests[0], digests[1], "two models, not one twice");
    let images = told["images"].as_array().unwrap();
    assert_eq!(images.len(), 2, "{told}");
    for image in images {
        assert_eq!(image["digests"].as_array().unwrap().iter().collect::<Vec<_>>(), digests, "{image}");
    }
    let syncs = told["syncs"].as_array().unwrap();
    let last = syncs.last().unwrap();
    assert_eq!((&last["version"], &last["state"]), (&json!(6), &json!("served")));
    assert!(syncs.iter().all(|s| s["state"] == "served" || s["state"] == "skipped"), "{told}");
    assert!(last["delta_ratios"].as_array().unwrap().iter().all(|r| r.as_f64().unwrap() < 0.05), "{last}");
    assert!(syncs.iter().any(|s| s["delta"].as_u64().unwrap() > 0), "{told}");
    nothing_left(home.path());
}

#[test]
fn a_demo_that_stays_keeps_its_page_until_it_is_told_to_end() {
    let home = home();
    let dir = format!("--dir={}", home.path().display());
    let args = [
        "demo",
        "--stay",
        "--model-bytes=4Mi",
        "--steps=1",
        "--receivers=1",
        "--ranks=1",
        "--pace=0.05",
        &dir,
    ];
    let mut demo = Process::start(args);
    let listening = demo.event("listening");
    let page = listening["page"].as_str().unwrap().to_owned();
    let token = std::fs::read_to_string(listening["token_file"].as_str().unwrap()).unwrap();
    let told = until("the summary", || Some(demo.line()).filter(|line| line.get("ok").is_some()));
    assert_eq!(
        (&told["ok"], &told["served"], &told["incidents"]),
        (&json!(true), &json!(1), &json!([])),
        "{told}"
    );
    let port = page.trim_end_matches('/').rsplit(':').next().unwrap().parse().unwrap();
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").unwrap();
    let answer = process::answer(stream);
    assert!(
        answer.status == 200 && String::from_utf8_lossy(&answer.body).contains("<title>Windlass"),
        "{answer:?}"
    );
    // Its trainers have taken leave: nothing looks as if it had died. `top` takes the address that people are shown.
    let address = format!("{page}#token={}", token.trim());
    let seen = until("the trainers' leave", || {
        let seen = run!("top", &address, "--json").ok().json();
        let left = |t: &Value| t["state"] == "left";
        seen["trainers"].as_array().unwrap().iter().all(left).then_some(seen)
    });
    assert_eq!((&seen["errors"], seen["trainers"].as_array().unwrap().len()), (&json!([]), 2), "{seen}");
    demo.signal(Signal::INT);
    assert_eq!(demo.ends_within(PATIENCE), 0);
    nothing_left(home.path());
}

#[test]
fn an_interrupted_demo_leaves_no_process_and_no_file() {
    let home = home();
    for signal in [Signal::INT, Signal::TERM] {
        let mut demo = long_demo(home.path());
        demo.signal(signal);
        assert_eq!(demo.ends_within(PATIENCE), 130);
        let last = demo.rest().pop().unwrap();
        assert_eq!(last["error"]["kind"], "cancelled", "{last}");
        nothing_left(home.path());
    }
}

#[test]
fn a_demo_whose_part_fails_names_it_and_leaves_nothing() {
    let home = home();
    let absent = home.path().join("absent");
    let ran = run!("demo", "--json", "--model-bytes", "4Mi", "--dir", &absent);
    assert_eq!(ran.code, 3);
    assert!(ran.stdout.contains(absent.to_str().unwrap()), "{}", ran.stdout);
    for part in ["--model-id=verifier --rank=1", "--name=receiver-1", " controller "] {
        let mut demo = long_demo(home.path());
        let all = processes_about(home.path());
        let (pid, _) = all.iter().find(|(_, line)| line.contains(part)).unwrap();
        kill_process(Pid::from_raw(*pid as i32).unwrap(), Signal::KILL).unwrap();
        let code = demo.ends_within(PATIENCE);
        let last = demo.rest().pop().unwrap();
        assert!(code > 1 && code != 70, "{code}: {last}");
        let message = last["error"]["message"].as_str().unwrap();
        let named = ["rank", "receiver-1", "controller"].iter().any(|name| message.contains(name));
        assert!(named, "{message}");
        nothing_left(home.path());
    }
}

#[test]
fn a_demo_of_an_engine_that_is_not_installed_names_what_is_missing_and_starts_nothing() {
    let (home, other) = (home(), tempfile::tempdir().unwrap());
    let bare = other.path().join("python");
    std::fs::write(&bare, "#!/bin/sh\nexec python3 -S \"$@\"\n").unwrap();
    std::fs::set_permissions(&bare, Permissions::from_mode(0o755)).unwrap();
    for engine in ["vllm", "sglang"] {
        let ran = run!("demo", "--json", "--engine", engine, "--python", &bare, "--dir", home.path());
        assert_eq!(ran.code, 2, "{}", ran.stdout);
        let error = &ran.json()["error"];
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{} has no {engine}", bare.display())), "{message}");
        let advice = error["advice"].as_str().unwrap();
        assert!(advice.contains(&format!("{} -m pip install {engine}", bare.display())), "{advice}");
        nothing_left(home.path());
    }
    let ran = run!("demo", "--engine", "vllm", "--ranks", "3");
    assert!(ran.code == 2 && ran.stderr.contains("'--ranks <N>'"), "{}", ran.stderr);
    let ran = run!("demo", "--python", &bare);
    assert!(ran.code == 2 && ran.stderr.contains("--engine <NAME>"), "{}", ran.stderr);
}

#[test]
fn a_killed_demo_leaves_no_process_and_only_what_gc_removes() {
    let home = home();
    let mut demo = long_demo(home.path());
    demo.kill();
    until("all processes gone", || processes_about(home.path()).is_empty().then_some(()));
    assert_eq!(command::names(home.path()).len(), 1);
    let told = run!("gc", "--json", "--yes", home.path()).ok().json();
    // The report also lists the demo's own directory, with its logs.
    let inside = |r: &&Value| Path::new(r["dir"].as_str().unwrap()).parent() != Some(home.path());
    let inside = told["removed"].as_array().unwrap().iter().filter(inside).count();
    // Two regions, and two images of each of two receivers.
    assert_eq!(inside, 6, "{told}");
    nothing_left(home.path());
}
