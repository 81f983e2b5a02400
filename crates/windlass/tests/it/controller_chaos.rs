//! Everything at once, by seeds: receivers that join, leave, die, are slow and fail, trainers that repeat themselves and are
//! resumed, answers that are lost, a controller that is killed. After every event what the controller shows is held
//! against what is true.
//!
//! `WINDLASS_CHAOS_SEEDS` and `WINDLASS_CHAOS_EVENTS` ask for more: a list of seeds, and events for each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::command::Dice;
use crate::control::{Controller, Light, failed, id, model, set, stop, until};
use windlass::service::controller::client::ControllerError;
use windlass::service::controller::status::{ReceiverStatus, Status};
use windlass::service::controller::wire::{Gate, Outcome, Service, Task};
use windlass_core::barrier::{Order, Phase};
use windlass_core::identity::{Identity, ModelId, Version};

const SETS: [(&str, &[&str]); 2] = [("main", &["actor", "verifier"]), ("solo", &["judge"])];
const ARGS: [&str; 7] = [
    "--set=main=actor,verifier",
    "--set=solo=judge",
    "--heartbeat=0.5",
    "--retry=0.03",
    "--load-timeout=2",
    "--max-ahead=3",
    "--max-wait=10",
];
/// What a busy machine may add to a deadline.
const SLACK: Duration = Duration::from_secs(5);

/// One life of a receiver, as it truly is.
#[derive(Debug)]
struct Life {
    light: Light,
    running: bool,
    inbox: VecDeque<Task>,
    /// Sets whose engines do not serve: a load has begun and not ended well.
    paused: BTreeSet<&'static str>,
    /// What it said it staged, or could not, in this session.
    staged: BTreeSet<Identity>,
    failed: BTreeSet<Identity>,
    /// The last load it acted on.
    last_load: Order,
}

#[derive(Debug, Default)]
struct Trainer {
    incarnation: u64,
    version: Version,
}

/// Since when, for how long, for what, and who waits.
type OpenGate = (Instant, Duration, Version, JoinHandle<Result<Service, ControllerError>>);

struct World {
    controller: Controller,
    dice: Dice,
    lives: BTreeMap<String, Life>,
    trainers: BTreeMap<ModelId, Trainer>,
    /// What this life of the controller has heard of: the incarnation of each model, and its versions.
    current: BTreeMap<ModelId, u64>,
    announced: BTreeSet<Identity>,
    /// What receivers told this life of the controller that they loaded.
    loaded: BTreeSet<Identity>,
    last: Status,
    gates: Vec<OpenGate>,
    counts: BTreeMap<&'static str, usize>,
    log: Vec<String>,
}

fn set_of(model: &ModelId) -> &'static str {
    SETS.iter().find(|(_, models)| models.contains(&model.as_str())).unwrap().0
}

impl World {
    fn new(seed: u64) -> World {
        let controller = Controller::start(&ARGS);
        let last = controller.status();
        let trainers = SETS.iter().flat_map(|(_, models)| models.iter());
        World {
            controller,
            dice: Dice(seed),
            lives: BTreeMap::new(),
            trainers: trainers.map(|m| (model(m), Trainer { incarnation: 1, version: 0 })).collect(),
            current: BTreeMap::new(),
            announced: BTreeSet::new(),
            loaded: BTreeSet::new(),
            last,
            gates: Vec::new(),
            counts: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    fn note(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        let n = self.dice.roll() as usize;
        (!from.is_empty()).then(|| from[n % from.len()].clone())
    }

    fn some_life(&mut self) -> Option<String> {
        let running: Vec<_> = self.lives.iter().filter(|(_, l)| l.running).map(|(n, _)| n.clone()).collect();
        self.pick(&running)
    }

    fn event(&mut self) {
        let dice = self.dice.roll() % 1000;
        match dice {
            0..60 => self.publish_together(),
            60..85 => self.publish(),
            85..115 => self.repeat(),
            115..120 => self.resume(),
            120..145 => self.join(),
            145..153 => self.leave(),
            153..161 => self.kill(),
            161..500 => self.poll(),
            500..940 => self.work(),
            940..970 => self.gate(),
            970..996 => thread::sleep(Duration::from_millis(self.dice.roll() % 30)),
            _ => self.restart(),
        }
        self.judge();
    }

    // ---- events -----------------------------------------------------------------------------------

    fn publish(&mut self) {
        let models: Vec<_> = self.trainers.keys().cloned().collect();
        let model = self.pick(&models).unwrap();
        let trainer = self.trainers.get_mut(&model).unwrap();
        trainer.version += 1;
        let identity = id(model.as_str(), trainer.incarnation, trainer.version);
        self.announce(identity);
    }

    /// The trainers of a set come to the same version, one after the other.
    fn publish_together(&mut self) {
        let (_, models) = self.pick(&SETS).unwrap();
        let next = models.iter().map(|m| self.trainers[&model(m)].version).max().unwrap() + 1;
        for name in models {
            let trainer = self.trainers.get_mut(&model(name)).unwrap();
            trainer.version = next;
            let identity = id(name, trainer.incarnation, next);
            self.announce(identity);
            self.judge();
        }
    }

    fn announce(&mut self, identity: Identity) {
        self.log.push(format!("notify {identity}"));
        let told = self.controller.try_notify(identity.clone());
        let known = self.current.get(&identity.model_id).copied().unwrap_or(0);
        if identity.incarnation.0 < known {
            assert_eq!(told.unwrap_err().status(), Some(409), "C95: the dead may not publish");
            return self.note("refused a dead trainer");
        }
        told.unwrap();
        if identity.incarnation.0 > known && known > 0 {
            self.note("superseded");
        }
        self.current.insert(identity.model_id.clone(), identity.incarnation.0);
        self.announced.insert(identity);
        self.note("notified");
    }

    /// A notify that comes twice, or late.
    fn repeat(&mut self) {
        let known: Vec<_> = self.announced.iter().cloned().collect();
        if let Some(identity) = self.pick(&known) {
            self.announce(identity);
            self.note("repeated");
        }
    }

    /// A trainer goes on from an older checkpoint.
    fn resume(&mut self) {
        let models: Vec<_> = self.trainers.keys().cloned().collect();
        let model = self.pick(&models).unwrap();
        let back = self.dice.roll() % 4;
        let trainer = self.trainers.get_mut(&model).unwrap();
        trainer.incarnation += 1;
        trainer.version = trainer.version.saturating_sub(back);
        self.publish();
    }

    fn join(&mut self) {
        let name = format!("r{}", self.dice.roll() % 6);
        let fresh = Light::new(
            &name,
            0,
            self.pick(&[&["actor", "verifier"][..], &["actor", "verifier", "judge"]]).unwrap(),
        );
        if let Some(known) = self.lives.get(&name).filter(|l| l.running) {
            // It restarts, and its engines do not: what they are in the middle of, it does not claim to have.
            let mut light = known.light.clone();
            for set in &known.paused {
                light.engine.retain(|m, _| set_of(m) != *set);
            }
            let paused = known.paused.clone();
            return self.begin(name, light, paused);
        }
        let session = self.lives.get(&name).map_or(0, |l| l.light.peer.session);
        let mut light = fresh;
        light.peer.session = session;
        self.begin(name, light, BTreeSet::new());
    }

    fn begin(&mut self, name: String, mut light: Light, paused: BTreeSet<&'static str>) {
        light.peer.session += 1;
        self.log.push(format!("{name} joins as {} with {:?}", light.peer.session, light.engine.values()));
        light.join(&self.controller.client).unwrap();
        for identity in light.engine.values() {
            // What it holds counts as announced once its trainer has confirmed the lineage.
            self.announced.insert(identity.clone());
            self.loaded.insert(identity.clone());
        }
        let (inbox, staged, failed) = (VecDeque::new(), BTreeSet::new(), BTreeSet::new());
        let life = Life { light, running: true, inbox, paused, staged, failed, last_load: Order(0) };
        self.lives.insert(name, life);
        self.note("joined");
    }

    fn leave(&mut self) {
        let Some(name) = self.some_life() else { return };
        self.log.push(format!("{name} leaves"));
        let life = self.lives.get_mut(&name).unwrap();
        life.running = false;
        let _ = self.controller.client.leave(&life.light.peer, &stop());
        self.note("left");
    }

    fn kill(&mut self) {
        let Some(name) = self.some_life() else { return };
        self.log.push(format!("{name} dies"));
        self.lives.get_mut(&name).unwrap().running = false;
        self.note("killed");
    }

    fn poll(&mut self) {
        let Some(name) = self.some_life() else { return };
        let lost = self.dice.roll().is_multiple_of(12);
        let life = self.lives.get_mut(&name).unwrap();
        let before = life.light.after;
        match life.light.try_poll(&self.controller.client, 0) {
            Ok(_) if lost => {
                life.light.after = before;
                self.note("lost an answer");
            }
            Ok(tasks) => {
                self.log.push(format!("{name} takes {tasks:?}"));
                life.inbox.extend(tasks.iter().cloned());
                self.judge_orders(&name, &tasks);
            }
            Err(refused) => {
                // It was silent for too long, or the controller is new: it joins again.
                assert_eq!(refused.status(), Some(404), "{refused}");
                let (light, paused) = (life.light.clone(), life.paused.clone());
                let mut light = light;
                for set in &paused {
                    light.engine.retain(|m, _| set_of(m) != *set);
                }
                self.note("was out");
                self.begin(name, light, paused);
            }
        }
    }

    /// A receiver does the next thing it was told, well or badly.
    fn work(&mut self) {
        let Some(name) = self.some_life() else { return };
        let bad = self.dice.roll().is_multiple_of(14);
        let client = self.controller.client.clone();
        let life = self.lives.get_mut(&name).unwrap();
        let Some(task) = life.inbox.pop_front() else { return };
        self.log.push(format!("{name} does {task:?}{}", if bad { " badly" } else { "" }));
        match task {
            Task::Stage { order, identity, .. } => {
                let outcome = if bad { failed(Phase::Staging, "chaos") } else { Outcome::Staged };
                let told = life.light.say(&client, order, &identity, outcome);
                if accepted(&told) {
                    if bad {
                        life.failed.insert(identity)
                    } else {
                        life.staged.insert(identity)
                    };
                }
                self.note(if bad { "failed to stage" } else { "staged" });
            }
            Task::Load { order, identities, .. } if order > life.last_load => {
                life.last_load = order;
                let set = set_of(&identities[0].model_id);
                life.paused.insert(set);
                for (n, identity) in identities.iter().enumerate() {
                    if bad && n + 1 == identities.len() {
                        life.light.engine.remove(&identity.model_id);
                        let _ = life.light.say(&client, order, identity, failed(Phase::Loading, "chaos"));
                        return self.note("failed to load");
                    }
                    life.light.engine.insert(identity.model_id.clone(), identity.clone());
                    if n + 1 == identities.len() {
                        life.paused.remove(set);
                    }
                    if accepted(&life.light.say(&client, order, identity, Outcome::Loaded)) {
                        self.loaded.insert(identity.clone());
                    }
                }
                self.note("loaded");
            }
            Task::Load { .. } | Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => {}
        }
    }

    fn gate(&mut self) {
        let (name, _) = self.pick(&SETS).unwrap();
        let served = self.served(name).unwrap_or(0);
        let (at_least, span) = (served + self.dice.roll() % 3, Duration::from_millis(self.dice.roll() % 400));
        let client = self.controller.client.clone();
        let gate = Gate {
            set: Some(set(name)),
            at_least: Some(at_least),
            timeout_ms: Some(span.as_millis() as u64),
            ..Gate::default()
        };
        let waiting = thread::spawn(move || client.gate(&gate, &stop()));
        self.gates.push((Instant::now(), span, at_least, waiting));
        self.note("gates");
    }

    fn restart(&mut self) {
        self.log.push("the controller dies".into());
        self.controller.restart();
        self.current.clear();
        self.announced.clear();
        self.loaded.clear();
        self.last = self.controller.status();
        self.note("restarted");
    }

    // ---- what must hold ---------------------------------------------------------------------------

    fn served(&self, name: &str) -> Option<Version> {
        self.last.sets.iter().find(|s| s.set.as_str() == name)?.served.as_ref().map(|s| s.version)
    }

    /// C72 and C95 of orders: whole sets, one version, of the lineages that count.
    fn judge_orders(&self, name: &str, tasks: &[Task]) {
        let off: BTreeSet<_> = tasks
            .iter()
            .filter_map(|t| if let Task::Abandon { order, .. } = t { Some(*order) } else { None })
            .collect();
        for task in tasks {
            let (order, identities) = match task {
                Task::Stage { order, identity, .. } => (order, std::slice::from_ref(identity)),
                Task::Load { order, identities, .. } => (order, &identities[..]),
                Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => continue,
            };
            if off.contains(order) {
                continue;
            }
            for identity in identities {
                let current = self.current.get(&identity.model_id);
                assert_eq!(
                    current,
                    Some(&identity.incarnation.0),
                    "C95: {name} was told {task:?}\n{}",
                    self.story()
                );
            }
            if let Task::Load { set, identities, .. } = task {
                let first = identities[0].version;
                assert!(
                    identities.iter().all(|i| i.version == first),
                    "C72: a mix: {task:?}\n{}",
                    self.story()
                );
                let own = self.lives[name].light.models.iter().filter(|m| set_of(m) == set.as_str());
                let told: BTreeSet<_> = identities.iter().map(|i| &i.model_id).collect();
                assert_eq!(told, own.collect(), "C72: part of a set\n{}", self.story());
                for identity in identities {
                    assert!(
                        self.announced.contains(identity),
                        "C72: {identity} was never announced\n{}",
                        self.story()
                    );
                }
            }
        }
    }

    /// Holds what the controller shows against what is true.
    fn judge(&mut self) {
        let status = self.controller.status();
        for set in &status.sets {
            let name = set.set.as_str();
            let before = self.served(name);
            if let Some(served) = &set.served {
                for identity in &served.identities {
                    let current = self.current.get(&identity.model_id);
                    assert_eq!(
                        current,
                        Some(&identity.incarnation.0),
                        "C95: {served:?} is served\n{}",
                        self.story()
                    );
                    assert_eq!(
                        identity.version,
                        served.version,
                        "C72: {served:?} is served\n{}",
                        self.story()
                    );
                    assert!(
                        self.loaded.contains(identity),
                        "C74: nobody has loaded {identity}\n{}",
                        self.story()
                    );
                }
                if before != Some(served.version) {
                    *self.counts.entry("served").or_default() += 1;
                }
            }
            self.judge_phase(&status, name);
        }
        self.judge_live(&status);
        assert!(status.errors.len() <= 50 && status.sets.iter().all(|s| s.syncs.len() <= 50));
        self.last = status;
        self.judge_gates(false);
    }

    /// C72: when loads begin, whoever is live has staged the version, or failed to.
    fn judge_phase(&self, status: &Status, name: &str) {
        let rounds = |s: &Status| {
            let set = s.sets.iter().find(|s| s.set.as_str() == name).unwrap();
            set.rounds.first().map(|r| (r.version, r.phase))
        };
        let Some((version, Phase::Loading)) = rounds(status) else { return };
        if rounds(&self.last) == Some((version, Phase::Loading)) {
            return;
        }
        // Who was evicted and has joined again since the last look may have joined after the loads began.
        let stayed = |r: &&ReceiverStatus| {
            self.last.receivers.iter().any(|l| l.receiver == r.receiver && l.session == r.session)
        };
        for receiver in status.receivers.iter().filter(stayed) {
            let live = receiver.places.iter().any(|p| p.set.as_str() == name && p.live);
            let Some(life) = self.lives.get(receiver.receiver.as_str()).filter(|_| live) else { continue };
            if life.light.peer.session != receiver.session {
                continue;
            }
            let own: Vec<_> = life.light.models.iter().filter(|m| set_of(m) == name).collect();
            let of = |m: &ModelId| id(m.as_str(), self.current[m], version);
            let ready =
                own.iter().all(|m| life.staged.contains(&of(m)) || life.light.engine.get(*m) == Some(&of(m)));
            let excused = own.iter().any(|m| life.failed.contains(&of(m)));
            assert!(
                ready || excused,
                "C72: loads of {version} begin before {life:?} has it\n{}",
                self.story()
            );
        }
    }

    /// C77, C72 and C95 of receivers: who is live serves one version, of the lineages that count, and not less than the
    /// others.
    fn judge_live(&self, status: &Status) {
        for receiver in &status.receivers {
            let Some(life) = self.lives.get(receiver.receiver.as_str()) else { continue };
            if life.light.peer.session != receiver.session {
                continue;
            }
            for place in receiver.places.iter().filter(|p| p.live) {
                let name = set_of(&place.models[0]);
                if life.paused.contains(name) {
                    continue;
                }
                let held: Vec<_> = place.models.iter().map(|m| life.light.engine.get(m)).collect();
                let first = held[0].map(|i| i.version);
                assert!(first.is_some(), "C77: live with nothing loaded: {life:?}\n{}", self.story());
                for identity in held {
                    let identity = identity.unwrap_or_else(|| panic!("C72: {life:?}\n{}", self.story()));
                    assert_eq!(
                        Some(identity.version),
                        first,
                        "C72: a mix is live: {life:?}\n{}",
                        self.story()
                    );
                    let current = self.current.get(&identity.model_id);
                    assert_eq!(current, Some(&identity.incarnation.0), "C95: {life:?}\n{}", self.story());
                }
                let served = status.sets.iter().find(|s| s.set.as_str() == name).unwrap().served.as_ref();
                assert!(
                    first >= served.map(|s| s.version),
                    "C77: {life:?} lags and is live\n{}",
                    self.story()
                );
            }
        }
    }

    /// C74, and that nobody waits past a deadline.
    fn judge_gates(&mut self, all: bool) {
        for (begun, span, at_least, waiting) in std::mem::take(&mut self.gates) {
            if !waiting.is_finished() && !all {
                assert!(
                    begun.elapsed() < span + SLACK,
                    "a gate of {span:?} is open after {:?}",
                    begun.elapsed()
                );
                self.gates.push((begun, span, at_least, waiting));
                continue;
            }
            match waiting.join().unwrap() {
                Ok(service) => {
                    let served = service.served.unwrap();
                    assert!(served.version >= at_least, "C74: opened at {served:?} for {at_least}");
                    self.note("opened");
                }
                // Its time was over, or the controller died.
                Err(refused) => assert!(matches!(refused.status(), None | Some(503 | 504)), "{refused}"),
            }
        }
    }

    fn story(&self) -> String {
        let from = self.log.len().saturating_sub(60);
        self.log[from..].join("\n")
    }

    /// Nothing fails any more: everybody catches up with what both trainers announce, and is live.
    fn calm_down(&mut self) {
        // Whatever is left of the others, every model has one that serves it.
        let light = Light::new("last", 0, &["actor", "verifier", "judge"]);
        self.begin("last".into(), light, BTreeSet::new());
        let top = self.trainers.values().map(|t| t.version).max().unwrap() + 1;
        let last: Vec<_> = self.trainers.iter().map(|(m, t)| id(m.as_str(), t.incarnation, top)).collect();
        for identity in last {
            self.announce(identity);
        }
        let names: Vec<_> = self.lives.iter().filter(|(_, l)| l.running).map(|(n, _)| n.clone()).collect();
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            for name in &names {
                self.settle(name);
            }
            self.judge();
            let done = self.last.sets.iter().all(|s| s.served.as_ref().is_some_and(|v| v.version == top))
                && self.last.receivers.iter().all(|r| r.places.iter().all(|p| p.live))
                && self.last.receivers.len() == names.len();
            if done {
                return;
            }
            assert!(Instant::now() < end, "{:#?}\n{}", self.last, self.story());
        }
    }

    /// One receiver does all it is told, and well.
    fn settle(&mut self, name: &str) {
        let client = self.controller.client.clone();
        let life = self.lives.get_mut(name).unwrap();
        match life.light.try_poll(&client, 0) {
            Ok(tasks) => life.inbox.extend(tasks),
            Err(refused) => {
                assert_eq!(refused.status(), Some(404), "{refused}");
                let (mut light, paused) = (life.light.clone(), life.paused.clone());
                for set in &paused {
                    light.engine.retain(|m, _| set_of(m) != *set);
                }
                return self.begin(name.into(), light, paused);
            }
        }
        while let Some(task) = life.inbox.pop_front() {
            match task {
                Task::Stage { order, identity, .. } => {
                    if accepted(&life.light.say(&client, order, &identity, Outcome::Staged)) {
                        life.staged.insert(identity);
                    }
                }
                Task::Load { order, identities, .. } if order > life.last_load => {
                    life.last_load = order;
                    for identity in identities {
                        life.light.engine.insert(identity.model_id.clone(), identity.clone());
                        life.paused.remove(set_of(&identity.model_id));
                        if accepted(&life.light.say(&client, order, &identity, Outcome::Loaded)) {
                            self.loaded.insert(identity);
                        }
                    }
                }
                Task::Load { .. } | Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => {}
            }
        }
    }
}

/// Whether a report was believed. One that came too late is refused by name, and that is well.
fn accepted<T>(told: &Result<T, ControllerError>) -> bool {
    match told {
        Ok(_) => true,
        Err(refused) => {
            assert!(matches!(refused.status(), Some(404 | 409)), "{refused}");
            false
        }
    }
}

fn run(seed: u64, events: usize) -> BTreeMap<&'static str, usize> {
    let mut world = World::new(seed);
    (0..events).for_each(|_| world.event());
    world.calm_down();
    world.judge_gates(true);
    until("no waits", || (world.controller.status().waits == 0).then_some(()));
    assert!(world.controller.memory() < 100 << 20);
    world.counts
}

#[test]
fn no_chaos_makes_the_controller_break_its_word() {
    let seeds = std::env::var("WINDLASS_CHAOS_SEEDS").unwrap_or_else(|_| "1,2,3,4".into());
    let seeds: Vec<u64> = seeds.split(',').map(|s| s.parse().unwrap()).collect();
    let events = std::env::var("WINDLASS_CHAOS_EVENTS").ok().map_or(1500, |n| n.parse().unwrap());
    let worlds: Vec<_> = seeds.iter().map(|&seed| thread::spawn(move || run(seed, events))).collect();
    let mut total: BTreeMap<&'static str, usize> = BTreeMap::new();
    for (world, seed) in worlds.into_iter().zip(&seeds) {
        let counts = world.join().unwrap_or_else(|_| panic!("seed {seed}: WINDLASS_CHAOS_SEEDS={seed}"));
        println!("seed {seed}: {counts:?}");
        for (what, n) in counts {
            *total.entry(what).or_default() += n;
        }
    }
    // A run in which nothing happens proves nothing.
    for (what, least) in [
        ("served", 40),
        ("loaded", 50),
        ("staged", 200),
        ("superseded", 4),
        ("restarted", 4),
        ("killed", 8),
        ("left", 8),
        ("was out", 4),
        ("joined", 50),
        ("repeated", 20),
        ("lost an answer", 20),
        ("failed to load", 2),
        ("failed to stage", 10),
        ("opened", 8),
    ] {
        let n = total.get(what).copied().unwrap_or(0);
        assert!(n >= least || events < 1500 || seeds.len() < 4, "{what} happened {n} times: {total:?}");
    }
}
