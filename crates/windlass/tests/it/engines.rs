//! The receiver as a sidecar of engines: what it calls and in which order, and what is left when anybody dies.

use crate::engine;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::engine::{Engine, Fault, Kind};
use crate::process::{Agent, PATIENCE, Process, Trainer};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use windlass::service::engines::check::link;
use windlass::service::engines::http::Http;
use windlass::service::engines::order::{How, Order};
use windlass::service::engines::sglang::Sglang;
use windlass::service::engines::transaction::{Journal, Load, Outcome, run};
use windlass::service::engines::{CachePolicy, Halt};
use windlass_data::image::ImageView;
use windlass_data::region::Region;
use windlass_data::stop::Stop;

/// A publisher with version 0, and a place for images.
struct World {
    home: TempDir,
    trainer: Trainer,
    agent: Agent,
}

impl World {
    fn new() -> World {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut trainer = Trainer::start(&home.path().join("region"));
        let agent = Agent::start(&trainer.region, &[]);
        trainer.publish(0);
        agent.sealed(0);
        World { home, trainer, agent }
    }

    fn publish(&mut self, version: u32) -> String {
        self.trainer.publish(version);
        self.agent.sealed(version.into())["digest"].as_str().unwrap().to_owned()
    }

    fn images(&self) -> std::path::PathBuf {
        self.home.path().join("images")
    }

    /// The files of an engine beside the image.
    fn dir(&self, engine: &Engine) -> std::path::PathBuf {
        self.images().join("demo.engines").join(format!(
            "{}-127.0.0.1-{}",
            engine.kind.dialect(),
            engine.port
        ))
    }

    fn receive(&self, engines: &[&Engine], more: &[&str]) -> Process {
        let args = ["receive".into(), format!("--region={}", self.trainer.region.display())];
        let dir = format!("--dir={}", self.images().display());
        let more = more.iter().map(ToString::to_string);
        let engines = engines.iter().map(|e| e.arg());
        Process::start(args.into_iter().chain([dir]).chain(engines).chain(more))
    }
}

/// The next line with this event, whatever comes before it.
fn event(process: &Process, name: &str) -> Value {
    loop {
        let line = process.line();
        if line["event"] == name {
            return line;
        }
    }
}

fn loaded(process: &Process, version: u64) -> Value {
    loop {
        let line = event(process, "loaded");
        if line["version"] == version {
            return line;
        }
    }
}

/// The guard that a receiver has started.
fn guard_of(receiver: &Process) -> Pid {
    let until = Instant::now() + PATIENCE;
    loop {
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let Some((head, rest)) = stat.rsplit_once(')') else { continue };
            let parent = rest.split_whitespace().nth(1).and_then(|p| p.parse().ok());
            if parent == Some(receiver.pid()) && !rest.trim_start().starts_with('Z') {
                let pid = head.split_whitespace().next().unwrap().parse().unwrap();
                return Pid::from_raw(pid).unwrap();
            }
        }
        assert!(Instant::now() < until, "no guard");
    }
}

const KINDS: [Kind; 4] = [Kind::Native, Kind::Plugin, Kind::Sglang, Kind::Workers];

#[test]
fn every_version_is_loaded_by_every_engine_in_the_order_of_its_routes() {
    let mut world = World::new();
    let engines = KINDS.map(Engine::start);
    let all = engines.each_ref();
    let token = world.home.path().join("plugin-token");
    fs::write(&token, engine::TOKEN).unwrap();
    fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let token = format!("--engine-token-file={}", token.display());
    let mut receiver = world.receive(&all, &["--until=4", &token]);
    for version in 0..5 {
        let digest = world.publish_if(version);
        for engine in &engines {
            let wanted = u64::from(version);
            engine.wait("loaded", |s| s.label.ends_with(&format!(":{wanted}")));
            let state = engine.state();
            assert!(state.digest.as_deref() == Some(&digest) && !state.dirty, "{:?}: {state:?}", engine.kind);
        }
    }
    assert_eq!(receiver.ends_within(PATIENCE), 0);
    let events: Vec<Value> = receiver.rest().into_iter().filter(|l| l["event"] == "loaded").collect();
    assert_eq!(events.len(), 20, "{events:?}");
    assert!(events.iter().all(|e| e["pause_ms"].as_f64() >= e["load_ms"].as_f64()), "{events:?}");
    for engine in &engines {
        let state = engine.state();
        assert!(!state.paused && !state.served_dirty);
        let last: Vec<&str> = state.calls.iter().map(|c| c.split('?').next().unwrap()).collect();
        let cycle: &[&str] = match engine.kind {
            Kind::Native => &[
                "/pause",
                "/start_weight_update",
                "/update_weights",
                "/finish_weight_update",
                "/reset_prefix_cache",
                "/resume",
            ],
            Kind::Sglang => &["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
            Kind::Workers => &[
                "/pause_generation",
                "/begin_weight_update",
                "/update_weights_from_tensor",
                "/end_weight_update",
                "/update_weight_version",
                "/flush_cache",
                "/continue_generation",
            ],
            Kind::Plugin | Kind::Bare => &["/windlass/v1/load"],
        };
        let once: &[&str] = match engine.kind {
            Kind::Native => &["/init_weight_transfer_engine"],
            Kind::Plugin => &["/windlass/v1/prepare"],
            Kind::Sglang | Kind::Workers | Kind::Bare => &[],
        };
        let expected: Vec<&str> = once.iter().chain(cycle.repeat(5).iter()).copied().collect();
        assert_eq!(last, expected);
    }
    for engine in [&engines[0], &engines[3]] {
        let hows: Vec<Value> = engine.state().orders.iter().map(|o| o["how"].clone()).collect();
        assert_eq!(hows, ["dense", "auto", "auto", "auto", "auto"]);
    }
    // Each line says why there was no faster way, where there was one.
    for event in &events {
        let disk = event["how"] == "disk";
        assert_eq!(
            disk,
            event["why"].as_str().is_some_and(|why| why.contains("/get_server_info")),
            "{event}"
        );
    }
    assert!(!world.images().join("demo.engines").exists(), "nothing is left");
}

impl World {
    /// Publishes a version unless it is there already.
    fn publish_if(&mut self, version: u32) -> String {
        if version == 0 {
            return self.agent.sealed(0)["digest"].as_str().unwrap().to_owned();
        }
        self.publish(version)
    }
}

/// The route that writes, of engines that a guard drives.
const WRITES: [(Kind, &str); 3] = [
    (Kind::Native, "/update_weights"),
    (Kind::Sglang, "/update_weights_from_disk"),
    (Kind::Workers, "/update_weights_from_tensor"),
];

#[test]
fn an_order_that_sglang_workers_refuse_leaves_the_old_weights_serving() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Workers);
    let receiver = world.receive(&[&engine], &[]);
    loaded(&receiver, 0);
    engine.state().declines = true;
    world.publish(1);
    let failed = event(&receiver, "engine_failed");
    let text = failed["error"].as_str().unwrap();
    assert!(text.contains("old weights") && text.contains("told to refuse"), "{failed}");
    // It is tried again, whole steps: nothing is left open.
    loaded(&receiver, 1);
    let state = engine.state();
    assert!(!state.paused && !state.served_dirty && !state.dirty, "{state:?}");
    let ends = state.calls.iter().filter(|c| *c == "/end_weight_update").count();
    assert_eq!((ends, state.orders.len(), state.caches), (3, 3, 2));
}

#[test]
fn a_receiver_killed_before_the_first_write_leaves_no_engine_paused() {
    for (kind, pause) in
        [(Kind::Native, "/pause"), (Kind::Sglang, "/pause_generation"), (Kind::Workers, "/pause_generation")]
    {
        let mut world = World::new();
        let engine = Engine::start(kind);
        let mut receiver = world.receive(&[&engine], &[]);
        loaded(&receiver, 0);
        engine.fault(pause, Fault::HoldAnswer);
        world.publish(1);
        engine.wait("paused", |s| s.paused);
        receiver.kill();
        engine.wait("resumed", |s| !s.paused);
        assert_eq!(engine.version(), Some(0), "the old weights");
        let writes = engine.state().orders.len();
        assert_eq!(writes, 1, "nothing more was written");
        engine.heal();
        let until = Instant::now() + PATIENCE;
        while world.dir(&engine).join("journal.json").exists() {
            assert!(Instant::now() < until, "the journal is cleared");
        }
        let receiver = world.receive(&[&engine], &[]);
        loaded(&receiver, 1);
        assert!(!engine.state().served_dirty);
    }
}

#[test]
fn a_receiver_killed_after_the_first_write_leaves_the_load_to_its_guard() {
    for (kind, write) in WRITES {
        for when in [Fault::HoldRequest, Fault::HoldAnswer] {
            let mut world = World::new();
            let engine = Engine::start(kind);
            let mut receiver = world.receive(&[&engine], &[]);
            loaded(&receiver, 0);
            engine.fault(write, when);
            let digest = world.publish(1);
            let before = engine.called(write);
            engine.wait("writing", |s| {
                s.calls.iter().filter(|c| **c == write).count() > before
                    || before == 1 && s.calls.iter().filter(|c| **c == write).count() == 2
            });
            receiver.kill();
            assert!(engine.state().paused);
            engine.heal();
            engine.wait("finished", |s| !s.paused && s.label.ends_with(":1"));
            let state = engine.state();
            assert!(state.digest == Some(digest) && !state.served_dirty && !state.dirty, "{state:?}");
        }
    }
}

#[test]
fn an_engine_that_cannot_be_written_stays_fenced_and_heals() {
    for (kind, write) in WRITES {
        let mut world = World::new();
        let engine = Engine::start(kind);
        let mut receiver = world.receive(&[&engine], &[]);
        loaded(&receiver, 0);
        engine.fault(write, Fault::Fail(2));
        world.publish(1);
        let fenced = event(&receiver, "fenced");
        assert_eq!((&fenced["version"], &fenced["stage"]), (&1.into(), &"load".into()), "{fenced}");
        assert!(fenced["error"].as_str().unwrap().contains("told to fail"), "{fenced}");
        // Whoever is left finds it in the files too, and the next receiver makes it good.
        engine.fault(write, Fault::Fail(1000));
        receiver.kill();
        let word = fs::read_to_string(world.dir(&engine).join("last.json")).unwrap();
        assert!(word.contains("\"outcome\":\"fenced\""), "{word}");
        assert!(engine.state().paused, "it never serves a partial load");
        engine.heal();
        let receiver = world.receive(&[&engine], &[]);
        loaded(&receiver, 1);
        let state = engine.state();
        assert!(!state.paused && !state.served_dirty && !state.dirty, "{state:?}");
    }
}

#[test]
fn a_failed_update_is_repeated_once_while_the_engine_is_paused() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Native);
    let receiver = world.receive(&[&engine], &[]);
    loaded(&receiver, 0);
    engine.fault("/update_weights", Fault::Fail(1));
    world.publish(1);
    let event = loaded(&receiver, 1);
    assert!(event["retried"].as_str().unwrap().contains("told to fail"), "{event}");
    let state = engine.state();
    assert_eq!(state.orders.last().unwrap()["how"], "dense");
    let resumes = state.calls.iter().filter(|c| *c == "/resume").count();
    assert_eq!((resumes, state.served_dirty), (2, false), "one for each version");
}

#[test]
fn a_killed_guard_is_found_and_the_engine_is_finished_by_the_next() {
    for (path, when) in [("/pause", Fault::HoldAnswer), ("/update_weights", Fault::HoldRequest)] {
        let mut world = World::new();
        let engine = Engine::start(Kind::Native);
        let receiver = world.receive(&[&engine], &[]);
        loaded(&receiver, 0);
        engine.fault(path, when);
        world.publish(1);
        engine.wait("held", |s| s.calls.iter().filter(|c| c.starts_with(path)).count() == 2);
        kill_process(guard_of(&receiver), Signal::KILL).unwrap();
        let failed = event(&receiver, "engine_failed");
        assert!(failed["error"].as_str().unwrap().contains("the guard of vllm="), "{failed}");
        engine.heal();
        loaded(&receiver, 1);
        let state = engine.state();
        assert!(!state.paused && !state.served_dirty && !state.dirty, "{state:?}");
    }
}

#[test]
fn the_end_of_the_pause_lease_resumes_the_old_weights() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Native);
    let receiver = world.receive(&[&engine], &["--pause-lease=0.5"]);
    loaded(&receiver, 0);
    engine.fault("/pause", Fault::HoldAnswer);
    world.publish(1);
    let failed = event(&receiver, "engine_failed");
    assert_eq!((&failed["kind"], &failed["stage"]), (&"timeout".into(), &"pause".into()), "{failed}");
    assert!(!engine.state().paused && engine.version() == Some(0));
    engine.heal();
    loaded(&receiver, 1);
}

#[test]
fn a_stopped_receiver_writes_nothing_when_it_wakes_up() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Native);
    let receiver = world.receive(&[&engine], &["--pause-lease=1"]);
    loaded(&receiver, 0);
    engine.fault("/pause", Fault::HoldAnswer);
    world.publish(1);
    engine.wait("paused", |s| s.paused);
    receiver.signal(Signal::STOP);
    // The guard keeps the lease, whoever is stopped.
    engine.wait("resumed", |s| !s.paused);
    engine.heal();
    let calls = engine.state().calls.len();
    receiver.signal(Signal::CONT);
    let failed = event(&receiver, "engine_failed");
    assert_eq!(failed["kind"], "timeout", "{failed}");
    // What follows is a whole new load, with a pause of its own.
    loaded(&receiver, 1);
    let state = engine.state();
    assert!(state.calls[calls].starts_with("/pause?"), "{:?}", &state.calls[calls..]);
    assert!(!state.served_dirty);
}

#[test]
fn a_stopped_guard_is_replaced_and_does_nothing_more() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Native);
    let receiver = world.receive(&[&engine], &["--pause-lease=1"]);
    loaded(&receiver, 0);
    engine.fault("/pause", Fault::HoldAnswer);
    world.publish(1);
    engine.wait("paused", |s| s.paused);
    let guard = guard_of(&receiver);
    kill_process(guard, Signal::STOP).unwrap();
    let failed = event(&receiver, "engine_failed");
    assert!(failed["error"].as_str().unwrap().contains("was stopped and was killed"), "{failed}");
    engine.heal();
    loaded(&receiver, 1);
    assert!(kill_process(guard, Signal::CONT).is_err(), "it is gone");
    assert!(!engine.state().served_dirty);
}

#[test]
fn a_restarted_engine_comes_back_dense_at_the_right_version() {
    for kind in KINDS {
        let mut world = World::new();
        let mut engine = Engine::start(kind);
        let args = ["--pause=keep"];
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.arg("receive").arg(format!("--region={}", world.trainer.region.display()));
        command.arg(format!("--dir={}", world.images().display())).arg(engine.arg()).args(args).arg("--json");
        command.env("WINDLASS_TOKEN", engine::TOKEN);
        let receiver = Process::spawn(command);
        loaded(&receiver, 0);
        let digest = world.publish(1);
        loaded(&receiver, 1);
        engine.kill();
        event(&receiver, "engine_waiting");
        engine.restart();
        loaded(&receiver, 1);
        let state = engine.state();
        assert_eq!(state.digest, Some(digest));
        if kind != Kind::Sglang {
            assert_eq!(state.orders[0]["how"], "dense", "{:?}", state.orders);
        }
    }
}

#[test]
fn an_engine_that_dies_while_it_is_loaded_is_loaded_again_when_it_is_back() {
    let mut world = World::new();
    let mut engine = Engine::start(Kind::Sglang);
    let receiver = world.receive(&[&engine], &[]);
    loaded(&receiver, 0);
    engine.fault("/update_weights_from_disk", Fault::HoldRequest);
    world.publish(1);
    engine.wait("writing", |s| s.calls.iter().filter(|c| *c == "/update_weights_from_disk").count() == 2);
    engine.kill();
    event(&receiver, "engine_failed");
    engine.restart();
    loaded(&receiver, 1);
    assert!(!engine.state().paused);
}

#[test]
fn an_engine_that_waits_for_its_requests_holds_up_nobody() {
    let mut world = World::new();
    let (slow, fast) = (Engine::start(Kind::Native), Engine::start(Kind::Sglang));
    let receiver = world.receive(&[&slow, &fast], &["--pause=wait"]);
    slow.wait("loaded", |s| s.label.ends_with(":0"));
    fast.wait("loaded", |s| s.label.ends_with(":0"));
    slow.fault("/pause", Fault::HoldAnswer);
    for version in 1..4 {
        world.publish(version);
        fast.wait("loaded", |s| s.label.ends_with(&format!(":{version}")));
    }
    assert_eq!(slow.version(), Some(0));
    slow.heal();
    slow.wait("the newest", |s| s.label.ends_with(":3"));
    assert_eq!(slow.called("/update_weights"), 2, "nothing in between");
    drop(receiver);
}

#[test]
fn an_image_of_another_shape_is_refused_before_the_pause_and_the_next_good_one_heals() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Sglang);
    let receiver = world.receive(&[&engine], &[]);
    loaded(&receiver, 0);
    let pauses = engine.called("/pause_generation");
    world.start_over("6Mi");
    let failed = event(&receiver, "engine_failed");
    let text = failed["error"].as_str().unwrap();
    assert!(
        text.contains("was not touched") && text.contains("compared with what it took before"),
        "{failed}"
    );
    assert_eq!((&failed["given_up"], &failed["stage"]), (&true.into(), &"check".into()));
    assert_eq!((engine.called("/pause_generation"), engine.state().paused), (pauses, false));
    world.start_over("4Mi");
    loaded(&receiver, 0);
    assert!(!engine.state().served_dirty);
}

impl World {
    /// A trainer that begins anew, with a model of this size.
    fn start_over(&mut self, bytes: &str) {
        self.trainer.process.kill();
        self.agent.process.kill();
        let region = format!("--region={}", self.trainer.region.display());
        let bytes = format!("--model-bytes={bytes}");
        let process =
            Process::start(["demo-rank", "--rank=0", "--ranks=1", &bytes, &region, "--model-id=demo"]);
        process.event("ready");
        self.trainer.process = process;
        self.agent = Agent::start(&self.trainer.region, &[]);
        self.publish(0);
    }
}

#[test]
fn a_version_that_lacks_tensors_of_the_checkpoint_is_refused_and_extra_ones_are_listed_or_refused() {
    let world = World::new();
    let image = world.home.path().join("copy");
    let mut receiver = world.receive(&[], &["--versions=1"]);
    assert_eq!(receiver.ends_within(PATIENCE), 0);
    // The checkpoint of an engine that has a tensor more, and of one that has a tensor less.
    let slot = world.images().join("demo").join("a.safetensors");
    let bytes = fs::read(slot).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let all: Vec<(String, safetensors::tensor::TensorView<'_>)> = tensors.tensors();
    let mut more = all.clone();
    more.push(("another.weight".into(), all[0].1.clone()));
    let less = all[1..].to_vec();
    for (tensors, path) in [(more, "more"), (less, "less")] {
        let dir = image.join(path);
        fs::create_dir_all(&dir).unwrap();
        safetensors::serialize_to_file(tensors, None, &dir.join("model.safetensors")).unwrap();
        fs::write(dir.join("config.json"), "{}").unwrap();
    }
    for kind in [Kind::Native, Kind::Sglang] {
        let engine = Engine::start(kind);
        let config = format!("--model-dir={}", image.join("more").display());
        let mut receiver = world.receive(&[&engine], &["--until=0", &config]);
        let failed = event(&receiver, "engine_failed");
        assert!(failed["error"].as_str().unwrap().contains("\"another.weight\""), "{failed}");
        assert_ne!(receiver.ends_within(PATIENCE), 0);
        assert!(engine.state().calls.is_empty(), "it was not touched");
        let config = format!("--model-dir={}", image.join("less").display());
        let mut receiver = world.receive(&[&engine], &["--until=0", &config, "--extras=error"]);
        let failed = event(&receiver, "engine_failed");
        assert!(failed["error"].as_str().unwrap().contains(&all[0].0), "{failed}");
        assert_ne!(receiver.ends_within(PATIENCE), 0);
        assert!(engine.state().calls.is_empty(), "it was not touched");
        let mut receiver = world.receive(&[&engine], &["--until=0", &config]);
        let extras = event(&receiver, "extras");
        assert_eq!(extras["names"], serde_json::json!([all[0].0]), "{extras}");
        assert_eq!(receiver.ends_within(PATIENCE), 0);
    }
}

#[test]
fn an_engine_without_routes_or_with_another_token_is_told_what_it_needs() {
    let world = World::new();
    let (bare, plugin) = (Engine::start(Kind::Bare), Engine::start(Kind::Plugin));
    let mut receiver = world.receive(&[&bare, &plugin], &["--until=0", "--load-timeout=2"]);
    let mut errors = [event(&receiver, "engine_failed"), event(&receiver, "engine_failed")]
        .map(|e| (e["engine"].as_str().unwrap().to_owned(), e["error"].as_str().unwrap().to_owned()));
    errors.sort_by_key(|(engine, _)| !bare.arg().ends_with(engine));
    assert!(errors[0].1.contains("VLLM_SERVER_DEV_MODE=1") && errors[0].1.contains("windlass"), "{errors:?}");
    assert!(errors[1].1.contains("--engine-token-file"), "{errors:?}");
    assert_ne!(receiver.ends_within(PATIENCE), 0);
    let last = receiver.rest().pop().unwrap();
    let message = last["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("2 of 2 engines did not load version 0"), "{last}");
    let token = world.home.path().join("another");
    fs::write(&token, "another-token-that-is-long-enough").unwrap();
    fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let token = format!("--engine-token-file={}", token.display());
    let mut receiver = world.receive(&[&plugin], &["--until=0", "--load-timeout=2", &token]);
    let failed = event(&receiver, "engine_failed");
    assert!(failed["error"].as_str().unwrap().contains("another token"), "{failed}");
    assert!(failed["error"].as_str().unwrap().contains("--engine-token-file"), "{failed}");
    assert_ne!(receiver.ends_within(PATIENCE), 0);
}

#[test]
fn a_server_without_routes_is_asked_less_and_less_often_and_told_of_once() {
    let world = World::new();
    let bare = Engine::start(Kind::Bare);
    let begun = Instant::now();
    let receiver = world.receive(&[&bare], &["--versions=2"]);
    event(&receiver, "engine_failed");
    bare.wait_for_reads("/windlass/v1/status", 4);
    // The pauses are of 1 s, 2 s and 4 s; one of them ends early when the first image is there.
    assert!(begun.elapsed() >= Duration::from_secs(3), "{:?}", begun.elapsed());
    drop(bare);
    // The next thing told is that it is gone, not once more that it lacks the routes.
    let next = loop {
        let line = receiver.line();
        if line["event"].as_str().is_some_and(|e| e.starts_with("engine")) {
            break line;
        }
    };
    assert_eq!(next["event"], "engine_waiting", "{next}");
}

#[test]
fn a_server_without_the_plugin_is_not_asked_for_it_again_until_it_is_restarted() {
    let mut world = World::new();
    let mut engine = Engine::start(Kind::Native);
    let receiver = world.receive(&[&engine], &["--versions=4"]);
    loaded(&receiver, 0);
    world.publish(1);
    loaded(&receiver, 1);
    let is_not_asked_again = |engine: &Engine| {
        assert_eq!(engine.read("/windlass/v1/status"), 1);
        engine.wait_for_reads("/weight_info", engine.read("/weight_info") + 3);
        assert_eq!(engine.read("/windlass/v1/status"), 1);
    };
    is_not_asked_again(&engine);
    engine.kill();
    event(&receiver, "engine_waiting");
    engine.restart();
    loaded(&receiver, 1);
    is_not_asked_again(&engine);
}

#[test]
fn a_cache_that_cannot_be_cleared_keeps_the_engine_from_answering_with_old_weights() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Native);
    let receiver = world.receive(&[&engine], &[]);
    loaded(&receiver, 0);
    engine.state().reset_answers = Some(false);
    world.publish(1);
    let fenced = event(&receiver, "fenced");
    assert_eq!(fenced["stage"], "cache", "{fenced}");
    assert!(engine.state().paused);
    engine.state().reset_answers = None;
    loaded(&receiver, 1);
    assert!(!engine.state().paused && engine.state().caches == 2);
}

#[test]
fn pause_modes_and_cache_policies_are_the_exact_calls_of_the_table() {
    let world = World::new();
    for (mode, cache, vllm, reset, sglang) in [
        ("keep", "reset", "/pause?mode=keep&clear_cache=true", Some(true), Some("retract")),
        ("keep", "keep", "/pause?mode=keep&clear_cache=false", None, Some("in_place")),
        ("wait", "reset", "/pause?mode=wait&clear_cache=true", Some(false), None),
        ("abort", "keep", "/pause?mode=abort&clear_cache=false", None, Some("abort")),
    ] {
        let (native, other) = (Engine::start(Kind::Native), Engine::start(Kind::Sglang));
        native.state().running = u32::from(mode == "keep");
        let (pause, prefix) = (format!("--pause={mode}"), format!("--prefix-cache={cache}"));
        let mut receiver = world.receive(&[&native, &other], &["--until=0", &pause, &prefix]);
        assert_eq!(receiver.ends_within(PATIENCE), 0);
        let calls = native.state().calls.clone();
        assert!(calls.iter().any(|c| c == vllm), "{calls:?}");
        let resets: Vec<&String> = calls.iter().filter(|c| c.starts_with("/reset")).collect();
        let expected = reset.map(|r| format!("/reset_prefix_cache?reset_running_requests={r}"));
        assert_eq!(resets, expected.iter().collect::<Vec<_>>());
        assert_eq!(other.called("/pause_generation"), usize::from(sglang.is_some()));
        assert_eq!(other.state().orders[0]["flush_cache"], cache == "reset");
    }
}

#[test]
fn an_engine_that_was_only_waited_for_is_paused_after_a_load_that_failed() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Sglang);
    let receiver = world.receive(&[&engine], &["--pause=wait"]);
    loaded(&receiver, 0);
    assert_eq!((engine.called("/pause_generation"), engine.called("/continue_generation")), (0, 0));
    engine.fault("/update_weights_from_disk", Fault::Fail(2));
    world.publish(1);
    event(&receiver, "fenced");
    assert_eq!(engine.called("/pause_generation"), 1);
    loaded(&receiver, 1);
    let state = engine.state();
    assert!(!state.paused && !state.dirty && !state.served_dirty, "{state:?}");
}

#[test]
fn an_update_from_disk_whose_cache_was_in_use_is_flushed_and_named_afterwards() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Sglang);
    let receiver = world.receive(&[&engine], &["--pause=wait"]);
    loaded(&receiver, 0);
    engine.state().unflushed = true;
    world.publish(1);
    loaded(&receiver, 1);
    assert_eq!((engine.version(), engine.state().caches), (Some(1), 2));
    assert_eq!((engine.called("/update_weights_from_disk"), engine.called("/flush_cache")), (2, 1));
}

#[test]
#[expect(clippy::result_large_err, reason = "a load is given its image by such a function")]
fn an_image_taken_back_during_a_load_from_disk_leaves_the_engine_fenced() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Sglang);
    let receiver = world.receive(&[], &[]);
    event(&receiver, "synced");
    let (image, home) = (world.images().join("demo"), world.home.path().join("engine"));
    let (model, journal) = (home.join("model"), Journal::of(&home));
    let url = format!("http://127.0.0.1:{}", engine.port);
    let http = Http::new("sglang".into(), &url, None);
    let sglang = Sglang::from_disk(http, Some(Halt::Retract), CachePolicy::Reset, model.clone());
    let load = |held: Duration, dirty: bool| {
        let take = |stop: &Stop| {
            let view = ImageView::take(&Region::open(&image).unwrap(), held, stop)?;
            link(&model, &view.path(), None)?;
            let order = Order::new(&image, view.known(), How::Auto, None, 60.0);
            Ok((view, order))
        };
        let (name, alone, told) = ("sglang", &Stop::never(), &|_| ());
        let (take, journal, lease, timeout) = (&take, &journal, PATIENCE, PATIENCE);
        let (engine, prepare) = (&sglang, false);
        run(&Load { engine, name, journal, take, prepare, dirty, lease, timeout, alone, told })
    };
    fs::create_dir(&home).unwrap();
    engine.fault("/update_weights_from_disk", Fault::HoldAnswer);
    let outcome = std::thread::scope(|scope| {
        let loading = scope.spawn(|| load(Duration::from_millis(1), false));
        engine.wait("writing", |s| s.digest.is_some());
        world.trainer.publish(1);
        event(&receiver, "synced");
        engine.heal();
        loading.join().unwrap()
    });
    let Outcome::Fenced(e) = outcome else { panic!("{outcome:?}") };
    assert!(e.to_string().contains("lease"), "{e}");
    assert!(engine.state().paused && engine.called("/continue_generation") == 0);
    assert!(journal.read().unwrap().unwrap().phase.is_dirty());
    let outcome = load(PATIENCE, true);
    assert!(matches!(outcome, Outcome::Loaded(_)), "{outcome:?}");
    assert!(!engine.state().paused && engine.version() == Some(1) && journal.read().unwrap().is_none());
}

#[test]
fn a_receiver_that_is_told_to_end_leaves_its_engines_serving_and_goes_at_once() {
    let mut world = World::new();
    let engine = Engine::start(Kind::Native);
    let mut receiver = world.receive(&[&engine], &[]);
    loaded(&receiver, 0);
    engine.fault("/pause", Fault::HoldAnswer);
    world.publish(1);
    engine.wait("paused", |s| s.paused);
    receiver.signal(Signal::TERM);
    assert_eq!(receiver.ends_within(Duration::from_secs(3)), 0);
    engine.wait("resumed", |s| !s.paused);
    assert_eq!(engine.version(), Some(0));
}

#[test]
fn engines_and_several_models_do_not_go_together() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let refused = |args: &[&str]| {
        let all = ["receive", "--engine=vllm=http://127.0.0.1:1"].iter().chain(args);
        let mut process = Process::start(all);
        assert_eq!(process.ends_within(PATIENCE), 2, "{args:?}");
        process.line()["error"]["message"].as_str().unwrap().to_owned()
    };
    let region = format!("--region={}", home.path().display());
    let in_place = format!("--in-place={}", home.path().display());
    assert!(refused(&[&region, &region]).contains("one --from or --region"));
    assert!(refused(&[&in_place]).contains("one --from or --region"));
    assert!(refused(&[&region, "--engine=vllm=http://127.0.0.1:1"]).contains("is given twice"));
    let text = refused(&[&region, "--engine=tgi=http://127.0.0.1:1"]);
    assert!(text.contains("expected vllm=http://HOST:PORT or sglang=http://HOST:PORT"), "{text}");
    assert!(!Path::new(home.path()).join("demo").exists());
}
