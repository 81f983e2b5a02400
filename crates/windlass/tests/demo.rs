//! `windlass demo` with real processes: what it reports, and that nothing of it is left, however it ends.

mod command;
mod process;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use process::{PATIENCE, Process, processes_about};
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

/// A demo that goes on until something happens to it, with all its processes at work.
fn long_demo(dir: &Path) -> Process {
    let dir_arg = format!("--dir={}", dir.display());
    let args = ["demo", "--model-bytes=16Mi", "--steps=64", "--receivers=2", "--ranks=2", &dir_arg];
    let demo = Process::start(args);
    until("all processes at work", || {
        let running = processes_about(dir);
        let images = format!("windlass-demo-{}/receiver-1/demo/header", demo.pid());
        (running.len() == 6 && dir.join(images).exists()).then_some(())
    });
    demo
}

fn check_steps(told: &Value, steps: usize) {
    assert_eq!((&told["ok"], told["steps"].as_array().map(Vec::len)), (&json!(true), Some(steps + 1)));
    let last = &told["steps"][steps]["digest"];
    let images = told["image_digests"].as_array().unwrap();
    assert!(!images.is_empty() && images.iter().all(|d| d == last), "{told}");
    for step in told["steps"].as_array().unwrap() {
        assert_eq!(step["equal"], true, "{step}");
        for name in ["offload_ms", "pull_ms", "apply_ms", "sync_ms", "end_to_end_ms", "ratio"] {
            assert!(step[name].as_f64().unwrap() >= 0.0, "{name} in {step}");
        }
    }
}

#[test]
fn the_demo_keeps_every_receiver_equal_through_two_kills_and_leaves_nothing() {
    let home = home();
    let ran = run!(
        "demo",
        "--json",
        "--model-bytes",
        "4Mi",
        "--steps",
        "4",
        "--receivers",
        "2",
        "--ranks",
        "3",
        "--dir",
        home.path(),
    );
    let told = ran.ok().json();
    check_steps(&told, 4);
    assert_eq!((&told["ranks"], &told["receivers"], &told["streams"]), (&json!(3), &json!(2), &json!(6)));
    let of = |name: &str| -> Vec<Value> {
        told["steps"].as_array().unwrap().iter().map(|s| s[name].clone()).collect()
    };
    assert_eq!(of("mode"), ["full", "delta", "delta", "delta", "delta"]);
    assert_eq!(of("receivers"), [2, 1, 2, 2, 2]);
    let incidents: Vec<Value> = of("incident").into_iter().filter(|i| !i.is_null()).collect();
    assert_eq!(incidents, ["receiver 0 killed", "receiver 0 back", "agent killed and restarted"]);
    let digests: std::collections::BTreeSet<String> = of("digest").iter().map(ToString::to_string).collect();
    assert_eq!(digests.len(), 5, "every step changes the weights");
    let image = told["model_bytes"].as_u64().unwrap();
    assert!(told["steps"][1]["bytes"].as_u64().unwrap() < image / 20, "{told}");
    nothing_left(home.path());
}

#[test]
fn the_demo_takes_its_shapes_from_a_config() {
    let home = home();
    let config = home.path().join("config.json");
    let text = json!({
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 256,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    });
    fs::write(&config, text.to_string()).unwrap();
    let dir = home.path().join("shm");
    fs::create_dir(&dir).unwrap();
    let demo = |config: &Path| {
        run!(
            "demo",
            "--json",
            "--config",
            config,
            "--steps",
            "1",
            "--receivers",
            "1",
            "--ranks",
            "1",
            "--dir",
            &dir
        )
    };
    let told = demo(&config).ok().json();
    check_steps(&told, 1);
    // Embedding, final norm, and eleven tensors in each layer.
    assert_eq!(told["tensors"], 2 + 2 * 11, "{told}");
    nothing_left(&dir);
    fs::write(&config, "{}").unwrap();
    let bad = demo(&config);
    assert!(bad.code == 2 && bad.stdout.contains("config.json"), "{} {}", bad.code, bad.stdout);
    nothing_left(&dir);
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
    for part in ["--rank=1", "--name=receiver-1"] {
        let mut demo = long_demo(home.path());
        let all = processes_about(home.path());
        let (pid, _) = all.iter().find(|(_, line)| line.contains(part)).unwrap();
        kill_process(Pid::from_raw(*pid as i32).unwrap(), Signal::KILL).unwrap();
        let code = demo.ends_within(PATIENCE);
        let last = demo.rest().pop().unwrap();
        assert!(code > 1 && code != 70, "{code}: {last}");
        let message = last["error"]["message"].as_str().unwrap();
        assert!(message.contains("rank") || message.contains("receiver-1"), "{message}");
        nothing_left(home.path());
    }
}

#[test]
fn a_killed_demo_leaves_no_process_and_only_what_gc_removes() {
    let home = home();
    let mut demo = long_demo(home.path());
    demo.kill();
    until("all processes gone", || processes_about(home.path()).is_empty().then_some(()));
    assert_eq!(command::names(home.path()).len(), 1);
    let told = run!("gc", "--json", home.path()).ok().json();
    assert_eq!(told["removed"].as_array().unwrap().len(), 3, "a region and two images: {told}");
    nothing_left(home.path());
}
