//! `windlass demo` with real processes: what it reports, and that nothing of it is left, however it ends.

mod command;
mod process;

use std::fs;
use std::io::Write as _;
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

/// The two plays.
#[derive(Clone, Copy, Debug)]
enum Play {
    /// One model, whose receivers follow its agent.
    Alone,
    /// Two models and a controller.
    Pool,
}

/// A demo that goes on until something happens to it, with all its processes at work.
fn long_demo(dir: &Path, play: Play) -> Process {
    let dir_arg = format!("--dir={}", dir.display());
    let common = ["demo", "--steps=64", "--ranks=2", &dir_arg];
    let (args, processes, models) = match play {
        Play::Alone => (vec!["--no-controller", "--model-bytes=16Mi", "--receivers=2"], 6, &["demo"][..]),
        // The third receiver comes later.
        Play::Pool => (vec!["--model-bytes=4Mi", "--receivers=3"], 10, &["actor", "verifier"][..]),
    };
    let demo = Process::start(common.into_iter().chain(args));
    until("all processes at work", || {
        let running = processes_about(dir);
        let mut images = (0..2).flat_map(|receiver| models.iter().map(move |model| (receiver, model)));
        let home = dir.join(format!("windlass-demo-{}", demo.pid()));
        let made = |(receiver, model)| home.join(format!("receiver-{receiver}/{model}/header")).exists();
        (running.len() == processes && images.all(made)).then_some(())
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
        "--no-controller",
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
            "--no-controller",
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
    for (signal, play) in [(Signal::INT, Play::Alone), (Signal::TERM, Play::Alone), (Signal::INT, Play::Pool)]
    {
        let mut demo = long_demo(home.path(), play);
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
    for (part, play) in [
        ("--rank=1", Play::Alone),
        ("--name=receiver-1", Play::Alone),
        ("--model-id=verifier --rank=1", Play::Pool),
        ("--name=receiver-1", Play::Pool),
        (" controller ", Play::Pool),
    ] {
        let mut demo = long_demo(home.path(), play);
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
fn a_killed_demo_leaves_no_process_and_only_what_gc_removes() {
    // A region and two images; two regions and two images of two receivers.
    for (play, left) in [(Play::Alone, 3), (Play::Pool, 6)] {
        let home = home();
        let mut demo = long_demo(home.path(), play);
        demo.kill();
        until("all processes gone", || processes_about(home.path()).is_empty().then_some(()));
        assert_eq!(command::names(home.path()).len(), 1);
        let told = run!("gc", "--json", "--yes", home.path()).ok().json();
        // The demo's own directory, with its logs, is told too.
        let inside = |r: &&Value| Path::new(r["dir"].as_str().unwrap()).parent() != Some(home.path());
        let inside = told["removed"].as_array().unwrap().iter().filter(inside).count();
        assert_eq!(inside, left, "{play:?}: {told}");
        nothing_left(home.path());
    }
}
