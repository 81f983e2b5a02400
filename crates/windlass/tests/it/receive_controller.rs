//! Receivers that follow a controller, all of it real processes: trainers, agents, receivers, engines that are none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::engine::{Engine, Kind as EngineKind};
use crate::process::{Agent, PATIENCE, Process, Trainer};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use windlass::service::controller::client::{ControllerClient, ControllerError};
use windlass::service::controller::status::Status;
use windlass::service::controller::wire::{Gate, Join, Notified, NotifyVersion, Service};
use windlass_core::address::Token;
use windlass_core::barrier::{Peer, ReceiverId};
use windlass_core::identity::{Incarnation, ModelId};
use windlass_data::image::ImageView;
use windlass_data::stop::Stop;

const SECRET: &str = "a-secret-of-this-test-0123456789";

fn stop() -> Stop {
    Stop::after(PATIENCE)
}

/// A controller under a port that stays the same.
struct Controller {
    process: Process,
    port: u16,
    args: Vec<String>,
}

impl Controller {
    fn start(token_file: &Path, more: &[&str]) -> Controller {
        let token = format!("--token-file={}", token_file.display());
        let args: Vec<String> = [token.as_str()].iter().chain(more).map(ToString::to_string).collect();
        let process = Process::start(["controller".to_owned()].iter().chain(&args));
        let endpoint = process.event("listening")["endpoint"].as_str().unwrap().to_owned();
        let port = endpoint.rsplit(':').next().unwrap().parse().unwrap();
        Controller { process, port, args }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn kill(&mut self) {
        self.process.kill();
    }

    fn restart(&mut self) {
        let port = format!("--ports={}", self.port);
        self.process = Process::start(["controller".to_owned(), port].iter().chain(&self.args));
        self.process.event("listening");
    }
}

/// A trainer with its agent.
struct Publisher {
    model: &'static str,
    trainer: Trainer,
    agent: Agent,
}

struct World {
    home: TempDir,
    controller: Controller,
    client: ControllerClient,
    /// What all receivers say, in the order in which they say it.
    log: PathBuf,
}

impl World {
    fn new(more: &[&str]) -> World {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let token = home.path().join("token");
        let mut file = File::options().create_new(true).write(true).mode(0o600).open(&token).unwrap();
        std::io::Write::write_all(&mut file, SECRET.as_bytes()).unwrap();
        let controller = Controller::start(&token, more);
        let client = ControllerClient::new(&controller.url(), Token::new(SECRET).unwrap()).unwrap();
        let log = home.path().join("log");
        World { home, controller, client, log }
    }

    fn token(&self) -> PathBuf {
        self.home.path().join("token")
    }

    fn publisher(&self, model: &'static str) -> Publisher {
        let trainer = Trainer::named(&self.home.path().join(format!("region-{model}")), model);
        let token = format!("--token-file={}", self.token().display());
        let agent = Agent::start(&trainer.region, &[&token]);
        Publisher { model, trainer, agent }
    }

    fn images(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn receiver(&self, name: &str, models: &[&str], more: &[&str]) -> Member {
        self.receiver_in(&self.images(name), name, models, more)
    }

    fn receiver_in(&self, dir: &Path, name: &str, models: &[&str], more: &[&str]) -> Member {
        let out = File::options().create(true).append(true).open(&self.log).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.args([
            "receive",
            "--json",
            "--with-parent",
            &format!("--controller={}", self.controller.url()),
        ]);
        command.arg(format!("--token-file={}", self.token().display()));
        command.arg(format!("--dir={}", dir.display())).arg(format!("--name={name}"));
        command.args(models.iter().map(|m| format!("--model={m}"))).args(more);
        command.env_remove("WINDLASS_TOKEN").stdin(Stdio::piped()).stdout(out);
        Member { child: command.spawn().unwrap(), name: name.to_owned() }
    }

    fn notify(&self, publisher: &Publisher, version: u64) -> Result<Notified, ControllerError> {
        let served = publisher.agent.sealed(version);
        self.announce(publisher, served["incarnation"].as_u64().unwrap(), version)
    }

    fn announce(
        &self,
        publisher: &Publisher,
        incarnation: u64,
        version: u64,
    ) -> Result<Notified, ControllerError> {
        self.announce_at(publisher, incarnation, version, &publisher.agent.endpoint)
    }

    fn announce_at(
        &self,
        publisher: &Publisher,
        incarnation: u64,
        version: u64,
        endpoint: &str,
    ) -> Result<Notified, ControllerError> {
        let notify = NotifyVersion {
            model_id: ModelId::new(publisher.model).unwrap(),
            incarnation: Incarnation(incarnation),
            version,
            sender_endpoint: endpoint.to_owned(),
            sync: false,
            eval: None,
            timeout_ms: None,
            spans: Vec::new(),
            delta_sparsity: None,
            delta_ratio: None,
        };
        self.client.notify(&notify, &stop())
    }

    /// Publishes and announces a version.
    fn publish(&self, publisher: &mut Publisher, version: u32) {
        publisher.trainer.publish(version);
        self.notify(publisher, version.into()).unwrap();
    }

    /// Waits until a version is served.
    fn gate(&self, version: u64) -> Service {
        let timeout_ms = Some(PATIENCE.as_millis() as u64);
        let gate = Gate { at_least: Some(version), timeout_ms, ..Gate::default() };
        match self.client.gate(&gate, &stop()) {
            Ok(service) => service,
            Err(e) => panic!("version {version} is not served: {e}\n{}", self.said()),
        }
    }

    fn status(&self) -> Status {
        self.client.status(&stop()).unwrap()
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// What was said so far.
    fn lines(&self) -> Vec<Value> {
        let said = self.said();
        // The last line may be on its way.
        let whole = said.rfind('\n').map_or(0, |at| at + 1);
        said[..whole]
            .lines()
            .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}")))
            .collect()
    }

    /// The first line after `from` for which `wanted` holds, and where the next one is.
    fn line(&self, from: usize, what: &str, wanted: impl Fn(&Value) -> bool) -> (usize, Value) {
        let until = Instant::now() + PATIENCE;
        loop {
            let lines = self.lines();
            if let Some(at) = lines.iter().skip(from).position(&wanted) {
                return (from + at + 1, lines[from + at].clone());
            }
            assert!(Instant::now() < until, "{what}:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The first line of a receiver with an event.
    fn event(&self, from: usize, name: &str, event: &str) -> (usize, Value) {
        self.line(from, &format!("{name} {event}"), |l| l["receiver"] == name && l["event"] == event)
    }

    /// The version in an image.
    fn shown(&self, name: &str, model: &str) -> Option<u64> {
        let view = ImageView::open(&self.images(name).join(model), PATIENCE, &Stop::after(PATIENCE)).ok()?;
        Some(view.known().identity.version)
    }

    fn digest(&self, name: &str, model: &str) -> String {
        let dir = self.images(name).join(model);
        ImageView::open(&dir, PATIENCE, &stop()).unwrap().known().digest.to_string()
    }
}

/// A receiver. It ends with this process, whatever happens to that.
struct Member {
    child: Child,
    name: String,
}

impl Member {
    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn ends(&mut self) -> i32 {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < until, "{} is still there", self.name);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

fn of(line: &Value) -> (String, String, (u64, u64)) {
    let identity = &line["identity"];
    let at = (identity["incarnation"].as_u64().unwrap(), identity["version"].as_u64().unwrap());
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    (text(&line["receiver"]), text(&identity["model_id"]), at)
}

/// Goes through everything that receivers said: nobody loads a version of a strict set before every receiver has it for
/// all models, and no receiver has versions of two steps but while an order is being carried out. Answers the versions
/// that each receiver has loaded.
fn watch_loads(lines: &[Value], receivers: &[&str], models: &[&str]) -> BTreeMap<String, Vec<u64>> {
    let mut staged: BTreeSet<(String, String, u64)> = BTreeSet::new();
    let mut has: BTreeMap<(String, String), u64> = BTreeMap::new();
    let mut open: BTreeMap<(String, u64), BTreeSet<String>> = BTreeMap::new();
    let mut served: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for line in lines {
        match line["event"].as_str().unwrap() {
            "staged" => {
                let (receiver, model, (_, version)) = of(line);
                staged.insert((receiver, model, version));
            }
            "loading" => {
                let (receiver, model, (_, version)) = of(line);
                for other in receivers {
                    for model in models {
                        let is = staged.contains(&((*other).to_owned(), (*model).to_owned(), version));
                        assert!(is, "{receiver} loads {model} {version}, and {other} has not staged it");
                    }
                }
                open.entry((receiver, line["order"].as_u64().unwrap())).or_default().insert(model);
            }
            "loaded" if line.get("engine").is_none() => {
                let (receiver, model, (_, version)) = of(line);
                has.insert((receiver.clone(), model.clone()), version);
                let order = (receiver.clone(), line["order"].as_u64().unwrap());
                let left = open.get_mut(&order).expect("a load that began");
                assert!(left.remove(&model), "{line}");
                let all: Vec<_> =
                    models.iter().map(|m| has.get(&(receiver.clone(), (*m).to_owned()))).collect();
                let same = all.windows(2).all(|w| w[0] == w[1]);
                if same {
                    served.entry(receiver).or_default().push(version);
                } else {
                    // The other model is at it, or about to be: it has not begun anything else.
                    let busy =
                        open.iter().filter(|((r, _), left)| *r == receiver && !left.is_empty()).count();
                    assert!(busy <= 1, "{line}");
                }
            }
            "order_failed" => panic!("{line}"),
            _ => {}
        }
    }
    served
}

#[test]
fn two_models_are_loaded_together_however_fast_their_trainers_are() {
    let world = World::new(&["--set=main=actor,verifier", "--floor=2"]);
    let (mut actor, mut verifier) = (world.publisher("actor"), world.publisher("verifier"));
    let names = ["r1", "r2"];
    let mut members = names.map(|n| world.receiver(n, &["actor", "verifier"], &[]));
    for name in names {
        world.event(0, name, "joined");
    }
    world.publish(&mut actor, 1);
    world.publish(&mut verifier, 1);
    assert_eq!(world.gate(1).served.unwrap().identities.len(), 2);
    // The actor runs ahead. What it publishes is brought here and not shown.
    for version in 2..5 {
        world.publish(&mut actor, version);
    }
    for name in names {
        world.line(0, "staged ahead", |l| {
            l["event"] == "staged" && l["receiver"] == name && l["identity"]["version"] == 4
        });
        assert_eq!((world.shown(name, "actor"), world.shown(name, "verifier")), (Some(1), Some(1)));
    }
    world.publish(&mut verifier, 2);
    world.gate(2);
    for version in 3..6 {
        world.publish(&mut verifier, version);
    }
    world.gate(4);
    world.publish(&mut actor, 5);
    let served = world.gate(5).served.unwrap();
    assert_eq!(served.identities.iter().map(|i| i.version).collect::<Vec<_>>(), [5, 5]);
    for name in names {
        assert_eq!(world.digest(name, "actor"), actor.agent.sealed(5)["digest"].as_str().unwrap());
        assert_eq!(world.digest(name, "verifier"), verifier.agent.sealed(5)["digest"].as_str().unwrap());
    }
    for member in &mut members {
        assert_eq!(member.ends(), 0, "being told to end is its regular end");
    }
    let loads = watch_loads(&world.lines(), &names, &["actor", "verifier"]);
    for name in names {
        assert_eq!((loads[name].first(), loads[name].last()), (Some(&1), Some(&5)), "{loads:?}");
        assert!(loads[name].windows(2).all(|w| w[0] < w[1]), "{loads:?}");
    }
    // Both took their leave.
    assert!(world.status().receivers.is_empty());
}

/// Whether a program that reads the image finds a version there.
fn is_shown(world: &World, name: &str, model: &str) -> bool {
    let dir = world.images(name).join(model);
    ImageView::open(&dir, PATIENCE, &Stop::after(Duration::ZERO)).is_ok()
}

#[test]
fn a_receiver_that_comes_alone_while_one_model_is_ahead_gets_what_is_served() {
    let world = World::new(&["--set=main=actor,verifier", "--heartbeat=1"]);
    let (mut actor, mut verifier) = (world.publisher("actor"), world.publisher("verifier"));
    // Nobody was there while the actor went on. Its slots hold 3 and 4.
    for version in 1..5 {
        world.publish(&mut actor, version);
    }
    world.publish(&mut verifier, 1);
    let mut first = world.receiver("first", &["actor", "verifier"], &[]);
    assert_eq!(world.gate(1).served.unwrap().version, 1);
    world.event(0, "first", "live");
    assert_eq!((world.shown("first", "actor"), world.shown("first", "verifier")), (Some(1), Some(1)));
    world.publish(&mut verifier, 2);
    world.gate(2);
    // All of them are lost, and so are their images. One that comes then is live at what is served.
    first.kill();
    let _second = world.receiver("second", &["actor", "verifier"], &[]);
    let (at, _) = world.event(0, "second", "joined");
    let (_, live) = world.event(at, "second", "live");
    assert_eq!(live["live"], true, "{live}");
    for model in ["actor", "verifier"] {
        assert_eq!(world.digest("first", model), world.digest("second", model));
    }
    // The verifier's trainer had waited for that, and goes on.
    world.publish(&mut verifier, 3);
    world.publish(&mut verifier, 4);
    world.gate(4);
    assert_eq!(world.digest("second", "actor"), actor.agent.sealed(4)["digest"].as_str().unwrap());
    for line in world.lines() {
        assert_ne!(line["event"], "order_failed", "{line}");
    }
}

#[test]
fn an_image_that_was_fetched_whole_is_shown_to_nobody_before_its_load() {
    let world = World::new(&["--set=main=actor,verifier"]);
    let (mut actor, mut verifier) = (world.publisher("actor"), world.publisher("verifier"));
    let _member = world.receiver("r", &["actor", "verifier"], &[]);
    world.event(0, "r", "joined");
    world.publish(&mut actor, 1);
    let staged = |l: &Value| l["event"] == "staged" && l["identity"]["model_id"] == "actor";
    let (_, staged) = world.line(0, "staged", staged);
    assert_eq!(staged["mode"], "full", "{staged}");
    assert!(!is_shown(&world, "r", "actor"), "the verifier has not announced it");
    world.publish(&mut verifier, 1);
    world.gate(1);
    assert!(is_shown(&world, "r", "actor") && is_shown(&world, "r", "verifier"));
}

#[test]
fn a_receiver_whose_clock_went_back_by_years_joins_all_the_same() {
    let world = World::new(&[]);
    // Its last life, which the controller remembers.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let session = (now + Duration::from_hours(24 * 3650)).as_nanos() as u64;
    let join = Join {
        peer: Peer { receiver: ReceiverId::new("r").unwrap(), session },
        models: vec![ModelId::new("policy").unwrap()],
        has: Vec::new(),
        host: "test".into(),
        release: "0".into(),
    };
    world.client.join(&join, &stop()).unwrap();
    let _member = world.receiver("r", &["policy"], &[]);
    let (_, joined) = world.event(0, "r", "joined");
    assert!(joined["session"].as_u64() > Some(session), "{joined}");
}

#[test]
fn a_receiver_that_comes_late_is_live_only_with_what_is_served() {
    let world = World::new(&[]);
    let mut policy = world.publisher("policy");
    let _first = world.receiver("first", &["policy"], &[]);
    world.event(0, "first", "joined");
    for version in 1..4 {
        world.publish(&mut policy, version);
    }
    world.gate(3);
    let _late = world.receiver("late", &["policy"], &[]);
    let (at, joined) = world.event(0, "late", "joined");
    assert_eq!(joined["has"].as_array().unwrap().len(), 0);
    let (at, live) = world.event(at, "late", "live");
    assert_eq!(live["live"], true);
    let before: Vec<Value> = world
        .lines()
        .into_iter()
        .take(at)
        .filter(|l| l["receiver"] == "late" && l["event"] == "loaded")
        .collect();
    assert_eq!(before.last().unwrap()["identity"]["version"], 3, "{before:?}");
    // From then on it is waited for like the other.
    world.publish(&mut policy, 4);
    world.gate(4);
    assert_eq!((world.shown("first", "policy"), world.shown("late", "policy")), (Some(4), Some(4)));
}

#[test]
fn a_killed_receiver_holds_nobody_up_for_long_and_comes_back_with_what_it_has() {
    let world = World::new(&["--heartbeat=1", "--set=main=policy"]);
    let mut policy = world.publisher("policy");
    let names = ["r1", "r2"];
    let mut members = names.map(|n| world.receiver(n, &["policy"], &[]));
    for name in names {
        world.event(0, name, "joined");
    }
    world.publish(&mut policy, 1);
    world.gate(1);
    for name in names {
        world.event(0, name, "live");
    }
    members[0].kill();
    world.publish(&mut policy, 2);
    world.gate(2);
    assert_eq!((world.shown("r2", "policy"), world.shown("r1", "policy")), (Some(2), Some(1)));
    let from = world.lines().len();
    members[0] = world.receiver("r1", &["policy"], &[]);
    let (at, joined) = world.event(from, "r1", "joined");
    assert_eq!(joined["has"][0]["version"], 1, "{joined}");
    let (at, staged) = world.event(at, "r1", "staged");
    assert_eq!((&staged["mode"], &staged["identity"]["version"]), (&"delta".into(), &2.into()));
    world.event(at, "r1", "live");
    assert_eq!(world.shown("r1", "policy"), Some(2));
}

#[test]
fn a_controller_that_was_killed_finds_its_way_back_from_those_who_join() {
    let mut world = World::new(&["--set=main=policy"]);
    let mut policy = world.publisher("policy");
    let names = ["r1", "r2"];
    let _members = names.map(|n| world.receiver(n, &["policy"], &[]));
    for name in names {
        world.event(0, name, "joined");
    }
    world.publish(&mut policy, 1);
    world.gate(1);
    let from = world.lines().len();
    world.controller.kill();
    for name in names {
        world.event(from, name, "controller_away");
        assert_eq!(world.shown(name, "policy"), Some(1), "what is served stays");
    }
    policy.trainer.publish(2);
    world.controller.restart();
    for name in names {
        let (_, joined) = world.event(from, name, "joined");
        assert_eq!(joined["has"][0]["version"], 1, "{joined}");
    }
    // What it serves is known again with the next word of the trainer.
    world.notify(&policy, 2).unwrap();
    world.gate(2);
    let away = |name: &str| {
        let lines = world.lines();
        lines.iter().skip(from).filter(|l| l["receiver"] == name && l["event"] == "controller_away").count()
    };
    assert_eq!(names.map(away), [1, 1], "it is said once");
    for name in names {
        assert_eq!(world.shown(name, "policy"), Some(2));
    }
}

/// The trainers repeat what they announced last, 4 and 1: nobody knew of a version in common any more, and the verifier waited for
/// ever for what only receivers at 1 can make.
#[test]
fn a_controller_that_lost_all_receivers_with_its_memory_finds_what_the_agents_still_have() {
    for first_word in ["actor", "verifier"] {
        comes_back_at_what_is_left(first_word);
    }
}

fn comes_back_at_what_is_left(first_word: &str) {
    let mut world = World::new(&["--set=main=actor,verifier", "--heartbeat=1"]);
    let (mut actor, mut verifier) = (world.publisher("actor"), world.publisher("verifier"));
    for version in 1..5 {
        world.publish(&mut actor, version);
    }
    world.publish(&mut verifier, 1);
    let mut first = world.receiver("first", &["actor", "verifier"], &[]);
    world.gate(1);
    world.event(0, "first", "live");
    let digest = world.digest("first", "actor");
    first.kill();
    world.controller.kill();
    world.controller.restart();
    let _second = world.receiver("second", &["actor", "verifier"], &[]);
    // The first word comes to a receiver that is there, long before the second.
    let joined = world.event(0, "second", "joined").0;
    if first_word == "actor" {
        world.notify(&actor, 4).unwrap();
        world.event(joined, "second", "staged");
    }
    world.notify(&verifier, 1).unwrap();
    world.notify(&actor, 4).unwrap();
    assert_eq!(world.gate(1).served.unwrap().version, 1);
    world.event(0, "second", "live");
    assert_eq!(world.digest("second", "actor"), digest);
    // One after the other, as it was before: whoever waits at the gate for 2 is let through.
    for version in 2..5 {
        world.publish(&mut verifier, version);
        assert_eq!(world.gate(version.into()).served.unwrap().version, u64::from(version));
    }
}

/// The gate opened with most of the receivers missing, and loads began before they had staged.
#[test]
fn a_restarted_controller_loads_and_serves_nothing_before_all_receivers_are_back() {
    let mut world = World::new(&["--set=main=policy", "--settle=5"]);
    let mut policy = world.publisher("policy");
    let names = ["r1", "r2", "r3", "r4"];
    let members = names.map(|n| world.receiver(n, &["policy"], &[]));
    for name in names {
        world.event(0, name, "joined");
    }
    world.publish(&mut policy, 1);
    world.gate(1);
    for name in names {
        world.event(0, name, "live");
    }
    for round in 2..4 {
        // Each of them finds the controller again at another moment: it rests between two attempts, and for longer each time.
        let from = world.lines().len();
        world.controller.kill();
        for name in names {
            world.event(from, name, "controller_away");
        }
        policy.trainer.publish(round);
        // The last one is held back, but by less than a receiver may take to come back.
        let last = &members[round as usize - 1];
        kill_process(Pid::from_child(&last.child), Signal::STOP).unwrap();
        world.controller.restart();
        // The trainer is there first of all.
        world.notify(&policy, round.into()).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        kill_process(Pid::from_child(&last.child), Signal::CONT).unwrap();
        world.gate(round.into());
        let lines = world.lines();
        for (line, at) in lines.iter().skip(from).zip(from..).filter(|(l, _)| l["event"] == "loading") {
            for name in names {
                let staged = |l: &Value| {
                    l["receiver"] == name && l["event"] == "staged" && l["identity"]["version"] == round
                };
                assert!(lines[from..at].iter().any(staged), "{line} before {name} has staged it");
            }
        }
        for name in names {
            assert_eq!(
                world.shown(name, "policy"),
                Some(round.into()),
                "served, and {name} has not loaded it"
            );
        }
    }
}

#[test]
fn receivers_follow_a_trainer_that_was_resumed_from_an_older_step() {
    let world = World::new(&["--set=main=policy", "--retry=0.2"]);
    let mut policy = world.publisher("policy");
    let names = ["r1", "r2"];
    let _members = names.map(|n| world.receiver(n, &["policy"], &[]));
    for name in names {
        world.event(0, name, "joined");
    }
    for version in 5..8 {
        world.publish(&mut policy, version);
    }
    world.gate(7);
    let old = policy.agent.sealed(7)["incarnation"].as_u64().unwrap();
    let from = world.lines().len();
    // The trainer dies, and its successor begins at an older step.
    policy.trainer.process.kill();
    policy.agent.process.kill();
    let mut policy = world.publisher("policy");
    world.publish(&mut policy, 3);
    let new = policy.agent.sealed(3)["incarnation"].as_u64().unwrap();
    assert!(new > old);
    let until = Instant::now() + PATIENCE;
    let served = loop {
        let service = world.client.gate(&Gate::default(), &stop()).unwrap();
        if let Some(served) = service.served.filter(|s| s.identities[0].incarnation.0 == new) {
            break served;
        }
        assert!(Instant::now() < until, "{}\n{}", service.blocked, world.said());
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(served.version, 3);
    for name in names {
        assert_eq!(world.digest(name, "policy"), policy.agent.sealed(3)["digest"].as_str().unwrap());
    }
    // A late word of the dead one is refused, and changes nothing.
    let late = world.announce(&policy, old, 8).unwrap_err();
    assert_eq!(late.status(), Some(409), "{late}");
    world.publish(&mut policy, 4);
    world.gate(4);
    // Nothing of the dead lineage was staged or loaded since.
    for line in world.lines().iter().skip(from) {
        if matches!(line["event"].as_str(), Some("staged" | "loading" | "loaded")) {
            assert_eq!(line["identity"]["incarnation"], new, "{line}");
        }
    }
}

#[test]
fn engines_of_two_models_load_what_is_permitted_and_a_restarted_one_is_told_of() {
    let world = World::new(&["--set=main=actor,verifier", "--retry=0.2"]);
    let (mut actor, mut verifier) = (world.publisher("actor"), world.publisher("verifier"));
    let (mut e1, e2) = (Engine::start(EngineKind::Native), Engine::start(EngineKind::Native));
    let arg = |model: &str, engine: &Engine| engine.arg().replace("--engine=", &format!("--engine={model}:"));
    let engines = [arg("actor", &e1), arg("verifier", &e2)];
    let more: Vec<&str> = engines.iter().map(String::as_str).collect();
    let _member = world.receiver("r", &["actor", "verifier"], &more);
    world.event(0, "r", "joined");
    for version in 1..3 {
        world.publish(&mut actor, version);
        world.publish(&mut verifier, version);
        world.gate(version.into());
        assert_eq!((e1.version(), e2.version()), (Some(version.into()), Some(version.into())));
    }
    let until = Instant::now() + PATIENCE;
    loop {
        let status = world.status();
        let doing: Vec<_> = status.receivers[0].models.iter().filter_map(|m| m.doing.as_ref()).collect();
        let engine = |d: &&windlass::service::controller::wire::Doing| {
            d.engines.len() == 1 && d.engines[0].version == Some(2) && d.engines[0].condition == "serving"
        };
        if doing.len() == 2 && doing.iter().all(engine) {
            break;
        }
        assert!(Instant::now() < until, "{doing:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pause = world.lines().into_iter().rev().find(|l| l["event"] == "loaded" && l.get("engine").is_none());
    assert!(pause.unwrap()["pause_ms"].as_f64().unwrap() > 0.0);
    // Version 3 of the actor is staged, and the verifier's is not there.
    world.publish(&mut actor, 3);
    let staged = |l: &Value| l["event"] == "staged" && l["identity"]["version"] == 3;
    world.line(0, "staged", staged);
    // An engine that dies now takes its receiver out of the pool, and gets version 2 again when it is back.
    let from = world.lines().len();
    e1.kill();
    let (at, again) = world.event(from, "r", "rejoining");
    assert!(again["why"].as_str().unwrap().contains("actor"), "{again}");
    let (at, joined) = world.event(at, "r", "joined");
    assert_eq!(joined["has"].as_array().unwrap().len(), 1, "{joined}");
    e1.restart();
    world.line(at, "live again", |l| l["event"] == "live" && l["live"] == true);
    assert_eq!((e1.version(), e2.version()), (Some(2), Some(2)));
    world.publish(&mut verifier, 3);
    world.gate(3);
    assert_eq!((e1.version(), e2.version()), (Some(3), Some(3)));
    assert!(!e1.state().served_dirty && !e2.state().served_dirty);
}

#[test]
fn a_receiver_says_what_keeps_it_from_following_a_controller() {
    let world = World::new(&["--set=main=policy"]);
    let url = format!("--controller={}", world.controller.url());
    let token = format!("--token-file={}", world.token().display());
    let dir = format!("--dir={}", world.images("x").display());
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.args(["receive", "--json", &url, &dir]).args(args).env_remove("WINDLASS_TOKEN");
        let output = command.stdin(Stdio::null()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, said) = run(&["--model=other", &token]);
    assert!(code != 0 && said.contains("other") && said.contains("no configured set"), "{said}");
    assert!(said.contains("there are policy"), "{said}");
    let wrong = world.home.path().join("wrong");
    let mut file = File::options().create_new(true).write(true).mode(0o600).open(&wrong).unwrap();
    std::io::Write::write_all(&mut file, b"another-secret-0123456789").unwrap();
    let (code, said) =
        run(&["--model=policy", &token, &format!("--controller-token-file={}", wrong.display())]);
    assert!(code != 0 && said.contains("\"kind\":\"denied\""), "{said}");
    let used = format!("that of the file {}", wrong.display());
    assert!(said.contains(&used) && said.contains("the controller's is in the file"), "{said}");
    let (code, said) = run(&["--model=policy"]);
    assert!(code != 0 && said.contains("--token-file"), "{said}");
    let (code, said) = run(&["--model=policy", "--model=policy", &token]);
    assert!(code != 0 && said.contains("twice"), "{said}");
    let (code, said) = run(&["--model=a", "--model=b", "--engine=vllm=http://127.0.0.1:1", &token]);
    assert!(code != 0 && said.contains("--engine a:vllm=http://127.0.0.1:1"), "{said}");
    let (code, said) = run(&["--model=a", "--engine=b:vllm=http://127.0.0.1:1", &token]);
    assert!(code != 0 && said.contains("is for model b, but no --model names it"), "{said}");
}

#[test]
fn a_notify_without_an_incarnation_means_the_life_that_the_agent_shows() {
    let world = World::new(&[]);
    let (mut policy, other) = (world.publisher("policy"), world.publisher("other"));
    let _member = world.receiver("r", &["policy"], &[]);
    world.event(0, "r", "joined");
    policy.trainer.publish(1);
    let incarnation = policy.agent.sealed(1)["incarnation"].as_u64().unwrap();
    let notify = |agent: &str| {
        let body = serde_json::json!({ "model_id": "policy", "version": 1, "sender_endpoint": agent });
        let (body, port) = (body.to_string(), world.controller.port);
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let head = format!(
            "POST /notify_version HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer {SECRET}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        std::io::Write::write_all(&mut stream, format!("{head}{body}").as_bytes()).unwrap();
        let mut answer = String::new();
        std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
        answer
    };
    let answer = notify(&policy.agent.endpoint);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let served = world.gate(1).served.unwrap();
    assert_eq!(served.identities[0].incarnation.0, incarnation);
    let answer = notify(&other.agent.endpoint);
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("publishes other, not policy"), "{answer}");
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let answer = notify(&format!("http://{nobody}"));
    assert!(answer.starts_with("HTTP/1.1 504") && answer.contains("name the incarnation"), "{answer}");
}

/// Nothing above 3 was ever served after somebody had announced 42, and nobody was told why.
#[test]
fn a_version_that_no_agent_shows_is_named_and_lower_ones_are_served() {
    let world = World::new(&["--retry=0.2"]);
    let mut policy = world.publisher("policy");
    let _members = ["a", "b"].map(|name| world.receiver(name, &["policy"], &[]));
    for name in ["a", "b"] {
        world.event(0, name, "joined");
    }
    world.publish(&mut policy, 3);
    world.gate(3);
    let incarnation = policy.agent.sealed(3)["incarnation"].as_u64().unwrap();
    world.announce(&policy, incarnation, 42).unwrap();
    // Before anybody has found out, and after.
    for version in 4..7 {
        world.publish(&mut policy, version);
        assert_eq!(world.gate(version.into()).served.unwrap().version, u64::from(version));
    }
    for name in ["a", "b"] {
        let there =
            |l: &Value| l["receiver"] == name && l["event"] == "loaded" && l["identity"]["version"] == 6;
        world.line(0, "6 is loaded", there);
        assert_eq!(world.digest(name, "policy"), policy.agent.sealed(6)["digest"].as_str().unwrap());
    }
    let status = world.status();
    let blocked = &status.sets[0].blocked;
    assert!(
        blocked.contains("version 42 of policy was announced, but its agent does not show it"),
        "{blocked}"
    );
    let told: Vec<_> = status.errors.iter().filter(|e| e.who == "trainer of policy").collect();
    assert!(matches!(&told[..], [e] if e.message.contains(&policy.agent.endpoint)), "{:?}", status.errors);
    // And when it comes to be, it is served as any other.
    world.publish(&mut policy, 42);
    world.gate(42);
    assert!(world.status().sets[0].up_to_date);
}

/// Receivers were sent to the false address for every later version, too, and the set waited for ever.
#[test]
fn a_version_announced_where_no_agent_of_its_model_answers_holds_nothing_up() {
    let world = World::new(&["--retry=0.2"]);
    let (mut policy, other) = (world.publisher("policy"), world.publisher("other"));
    let _member = world.receiver("a", &["policy"], &[]);
    world.event(0, "a", "joined");
    world.publish(&mut policy, 3);
    world.gate(3);
    let incarnation = policy.agent.sealed(3)["incarnation"].as_u64().unwrap();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoints = [format!("http://{nobody}"), world.controller.url(), other.agent.endpoint.clone()];
    for (endpoint, version) in endpoints.iter().zip(4..) {
        let falsely = 42 + u64::from(version);
        world.announce_at(&policy, incarnation, falsely, endpoint).unwrap();
        world.publish(&mut policy, version);
        assert_eq!(world.gate(version.into()).served.unwrap().version, u64::from(version));
        let status = world.status();
        let blocked = &status.sets[0].blocked;
        assert!(
            blocked.contains(&format!("version {falsely} of policy was announced"))
                && blocked.contains("or none answers at the announced endpoint"),
            "{blocked}"
        );
        let told = |e: &str| e.contains(&format!("no agent at {endpoint} shows it"));
        assert!(status.errors.iter().any(|e| told(&e.message)), "{:?}", status.errors);
    }
}

/// Both joined again and again, thousands of times a second.
#[test]
fn of_two_receivers_with_one_name_the_earlier_ends_and_says_why() {
    let world = World::new(&["--set=main=policy", "--heartbeat=1"]);
    let elsewhere = world.images("elsewhere");
    let mut first = world.receiver("r1", &["policy"], &[]);
    let (at, _) = world.event(0, "r1", "joined");
    let _second = world.receiver_in(&elsewhere, "r1", &["policy"], &[]);
    world.event(at, "r1", "joined");
    let (_, error) = world.line(at, "the error of the first", |l| l["error"].is_object());
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("another receiver has joined as r1") && message.contains("--name"), "{error}");
    assert_ne!(first.child.wait().unwrap().code(), Some(0));
    let joins = world.lines().iter().filter(|l| l["event"] == "joined").count();
    assert_eq!(joins, 2, "{}", world.said());
}
