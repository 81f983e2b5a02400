//! Scenarios with readable timelines (`scenarios`, `failures`), and random ones (`machine`).

mod failures;
mod machine;
mod scenarios;
mod world;

use std::collections::BTreeMap;

use crate::barrier::*;
use crate::identity::{Identity, Incarnation, ModelId, Version};

fn model(name: &str) -> ModelId {
    ModelId::new(name).unwrap()
}

fn set(name: &str) -> SetName {
    SetName::new(name).unwrap()
}

fn receiver(n: usize) -> ReceiverId {
    ReceiverId::new(format!("r{n}")).unwrap()
}

fn id(name: &str, incarnation: u64, version: Version) -> Identity {
    Identity { model_id: model(name), incarnation: Incarnation(incarnation), version }
}

fn short_limits() -> Limits {
    Limits {
        heartbeat_ms: 1000,
        // Only where it is about that.
        settle_ms: 0,
        stage_ms: 400,
        load_ms: 300,
        retry_ms: 50,
        retry_cap_ms: 400,
        history_ms: 2000,
        max_wait_ms: 5000,
        eval_ms: 500,
        max_ahead: 2,
        max_receivers: 1000,
        max_waits: 1000,
    }
}

const PAIR: [&str; 2] = ["actor", "verifier"];

fn strict(name: &str, models: &[&str]) -> SetConfig {
    SetConfig::strict(set(name), models.iter().map(|m| model(m)).collect())
}

/// Drives one barrier by hand: remembers the latest orders so that receivers can answer by name.
struct Rig {
    barrier: Barrier,
    now: Millis,
    sessions: BTreeMap<usize, u64>,
    stages: BTreeMap<(ReceiverId, Identity), Order>,
    loads: BTreeMap<ReceiverId, (Order, Vec<Identity>)>,
    live: Vec<(String, Version)>,
}

impl Rig {
    fn new(sets: Vec<SetConfig>) -> Rig {
        Rig::with(Config { sets, limits: short_limits() })
    }

    fn with(config: Config) -> Rig {
        Rig {
            barrier: Barrier::new(config).unwrap(),
            now: 0,
            sessions: BTreeMap::new(),
            stages: BTreeMap::new(),
            loads: BTreeMap::new(),
            live: Vec::new(),
        }
    }

    /// Actor and verifier in one strict set called "set".
    fn pair() -> Rig {
        Rig::new(vec![strict("set", &PAIR)])
    }

    fn watch(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Stage { to, order, identity, .. } => {
                    self.stages.insert((to.receiver.clone(), identity.clone()), *order);
                }
                Action::Load { to, order, identities, .. } => {
                    self.loads.insert(to.receiver.clone(), (*order, identities.clone()));
                }
                Action::GoLive { receiver, version, .. } => {
                    self.live.push((receiver.to_string(), *version));
                }
                Action::Fence { receiver, .. } | Action::Evict { receiver, .. } => {
                    self.live.retain(|(r, _)| r != receiver.as_str());
                }
                _ => {}
            }
        }
    }

    fn step(&mut self, event: Event) -> Vec<Action> {
        self.try_step(event).unwrap()
    }

    fn try_step(&mut self, event: Event) -> Result<Vec<Action>, BarrierError> {
        let actions = self.barrier.step(self.now, event)?;
        self.watch(&actions);
        Ok(actions)
    }

    fn after(&mut self, span: Millis) -> Vec<Action> {
        self.now += span;
        let actions = self.barrier.tick(self.now);
        self.watch(&actions);
        actions
    }

    fn notify(&mut self, identity: Identity) -> Vec<Action> {
        self.step(Event::Notify { identity, sender_endpoint: "trainer:9".into(), sync: None })
    }

    /// Announces a version of both models.
    fn notify_pair(&mut self, incarnation: u64, version: Version) -> Vec<Action> {
        let mut actions = self.notify(id("actor", incarnation, version));
        actions.extend(self.notify(id("verifier", incarnation, version)));
        actions
    }

    fn peer(&self, r: usize) -> Peer {
        Peer { receiver: receiver(r), session: self.sessions[&r] }
    }

    fn join(&mut self, r: usize, models: &[&str], has: &[Identity]) -> Vec<Action> {
        *self.sessions.entry(r).or_default() += 1;
        let models = models.iter().map(|m| model(m)).collect();
        self.step(Event::Join { peer: self.peer(r), models, has: has.to_vec() })
    }

    fn try_stage(&mut self, r: usize, identity: Identity) -> Result<Vec<Action>, BarrierError> {
        let order = self.stages[&(receiver(r), identity.clone())];
        self.try_step(Event::Staged { peer: self.peer(r), order, identity })
    }

    fn stage(&mut self, r: usize, identity: Identity) -> Vec<Action> {
        self.try_stage(r, identity).unwrap()
    }

    /// Stages a version of both models.
    fn stage_pair(&mut self, r: usize, incarnation: u64, version: Version) -> Vec<Action> {
        let mut actions = self.stage(r, id("actor", incarnation, version));
        actions.extend(self.stage(r, id("verifier", incarnation, version)));
        actions
    }

    /// Loads everything of the last load order.
    fn load(&mut self, r: usize) -> Vec<Action> {
        let (order, identities) = self.loads[&receiver(r)].clone();
        let peer = self.peer(r);
        let loaded = |identity| Event::Loaded { peer: peer.clone(), order, identity };
        identities.into_iter().map(loaded).flat_map(|e| self.step(e)).collect()
    }

    fn fail(&mut self, r: usize, phase: Phase, identity: Identity) -> Vec<Action> {
        let order = match phase {
            Phase::Staging => self.stages[&(receiver(r), identity.clone())],
            Phase::Loading => self.loads[&receiver(r)].0,
        };
        let reason = "no".to_owned();
        self.step(Event::Failed { peer: self.peer(r), order, identity, phase, reason })
    }

    /// The agent does not show what was ordered.
    fn absent(&mut self, r: usize, identity: Identity) -> Vec<Action> {
        let order = self.stages[&(receiver(r), identity.clone())];
        self.step(Event::Absent { peer: self.peer(r), order, identity })
    }

    /// Takes a version of both models all the way at these receivers.
    fn serve_pair(&mut self, receivers: &[usize], incarnation: u64, version: Version) {
        self.notify_pair(incarnation, version);
        for r in receivers {
            self.stage_pair(*r, incarnation, version);
        }
        for r in receivers {
            self.load(*r);
        }
        assert_eq!(self.served(), Some(version));
    }

    fn served(&self) -> Option<Version> {
        self.barrier.service_version(&set("set")).unwrap().map(|s| s.version)
    }

    fn gate(&mut self, wait: u64, at_least: Version, lineage: Option<(&str, u64)>) -> Vec<Action> {
        let lineage = lineage.map(|(m, i)| (model(m), Incarnation(i)));
        self.step(Event::GateWait { id: WaitId(wait), set: set("set"), at_least, lineage, timeout: 500 })
    }

    fn live(&self) -> Vec<&str> {
        let mut live: Vec<_> = self.live.iter().map(|(r, _)| r.as_str()).collect();
        live.sort_unstable();
        live
    }
}

/// Who is ordered to load, once for each order.
fn loads(actions: &[Action]) -> Vec<&str> {
    let load = actions.iter().filter_map(|a| match a {
        Action::Load { to, .. } => Some(to.receiver.as_str()),
        _ => None,
    });
    let mut names: Vec<_> = load.collect();
    names.sort_unstable();
    names
}

fn opened(actions: &[Action]) -> Vec<u64> {
    let open = |a: &Action| if let Action::OpenGate { id, .. } = a { Some(id.0) } else { None };
    actions.iter().filter_map(open).collect()
}

fn staged_orders(actions: &[Action]) -> Vec<String> {
    let order = |a: &Action| match a {
        Action::Stage { to, identity, .. } => Some(format!("{} {identity}", to.receiver)),
        _ => None,
    };
    actions.iter().filter_map(order).collect()
}
