//! A controller as a process, and receivers that move no weights.
#![allow(dead_code, unreachable_pub)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use windlass::service::controller::client::{ControllerClient, ControllerError};
use windlass::service::controller::status::Status;
use windlass::service::controller::wire::{
    Done, Gate, Join, Joined, Lane, Notified, NotifyVersion, Outcome, Poll, Report, Service, Span, Task,
};
use windlass_core::address::Token;
use windlass_core::barrier::{Order, Peer, Phase, ReceiverId, SetName};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};
use windlass_data::stop::Stop;

use crate::process::{Agent, PATIENCE, Process};

pub fn model(name: &str) -> ModelId {
    ModelId::new(name).unwrap()
}

pub fn set(name: &str) -> SetName {
    SetName::new(name).unwrap()
}

pub fn id(name: &str, incarnation: u64, version: Version) -> Identity {
    Identity { model_id: model(name), incarnation: Incarnation(incarnation), version }
}

/// Everything a test asks for ends by itself.
pub fn stop() -> Stop {
    Stop::after(PATIENCE)
}

/// Waits until something is so.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A controller in a process of its own.
pub struct Controller {
    pub http: Agent,
    pub client: ControllerClient,
    args: Vec<String>,
    home: TempDir,
}

impl Controller {
    pub fn start(args: &[&str]) -> Controller {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let http = Controller::process(home.path(), &args);
        let client = ControllerClient::new(&http.endpoint, Token::new(http.token.clone()).unwrap()).unwrap();
        Controller { http, client, args, home }
    }

    fn process(home: &Path, args: &[String]) -> Agent {
        let file = home.join("token");
        let token_file = format!("--token-file={}", file.display());
        let process = Process::start(
            ["controller", &token_file, "--settle=0.001"].into_iter().chain(args.iter().map(String::as_str)),
        );
        let listening = process.event("listening");
        assert_eq!(listening["token_file"], file.to_str().unwrap());
        let endpoint = listening["endpoint"].as_str().unwrap().to_owned();
        let token = std::fs::read_to_string(file).unwrap();
        assert!(!listening.to_string().contains(&token), "the token is told to nobody");
        Agent { process, endpoint, data_port: 0, token }
    }

    /// Killed, and started again at the same address.
    pub fn restart(&mut self) {
        self.http.process.kill();
        let port = format!("--ports={}", self.http.port());
        let args: Vec<String> = self.args.iter().cloned().chain([port]).collect();
        self.http = Controller::process(self.home.path(), &args);
        // Connections that were kept lead nowhere any more.
        let token = Token::new(self.http.token.clone()).unwrap();
        self.client = ControllerClient::new(&self.http.endpoint, token).unwrap();
    }

    pub fn status(&self) -> Status {
        self.client.status(&stop()).unwrap()
    }

    pub fn notify(&self, identity: Identity) -> Notified {
        self.try_notify(identity).unwrap()
    }

    pub fn try_notify(&self, identity: Identity) -> Result<Notified, ControllerError> {
        self.client.notify(&notify(identity), &stop())
    }

    pub fn gate(&self, set_name: &str, at_least: Version, ms: u64) -> Result<Service, ControllerError> {
        gate(&self.client, set_name, at_least, ms)
    }

    /// What a set serves.
    pub fn served(&self, name: &str) -> Option<Version> {
        let gate = Gate { set: Some(set(name)), ..Gate::default() };
        self.client.gate(&gate, &stop()).unwrap().served.map(|s| s.version)
    }

    /// Waits until so many gates and notifies wait.
    pub fn waits(&self, count: usize) {
        until(&format!("{count} waits"), || (self.status().waits == count).then_some(()));
    }

    pub fn memory(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.http.process.pid())).unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    pub fn light(&self, name: &str, session: u64, models: &[&str]) -> Light {
        let mut light = Light::new(name, session, models);
        light.join(&self.client).unwrap();
        light
    }
}

pub fn gate(
    client: &ControllerClient,
    set_name: &str,
    at_least: Version,
    ms: u64,
) -> Result<Service, ControllerError> {
    let (set, at_least) = (Some(set(set_name)), Some(at_least));
    client.gate(&Gate { set, at_least, timeout_ms: Some(ms), ..Gate::default() }, &stop())
}

pub fn notify(identity: Identity) -> NotifyVersion {
    NotifyVersion {
        model_id: identity.model_id,
        incarnation: identity.incarnation,
        version: identity.version,
        sender_endpoint: "http://10.0.0.5:7000".into(),
        sync: false,
        eval: None,
        timeout_ms: None,
        spans: Vec::new(),
        delta_sparsity: None,
        delta_ratio: None,
    }
}

pub fn span(lane: Lane, what: &str, began: f64, ended: f64, bytes: Option<u64>) -> Span {
    Span { lane, what: what.into(), began_ms_ago: began, ended_ms_ago: ended, bytes }
}

/// A receiver that moves no weights and does what it is told, when it is asked to.
#[derive(Clone, Debug)]
pub struct Light {
    pub peer: Peer,
    pub models: Vec<ModelId>,
    pub after: u64,
    /// What its engines have.
    pub engine: BTreeMap<ModelId, Identity>,
}

impl Light {
    pub fn new(name: &str, session: u64, models: &[&str]) -> Light {
        let peer = Peer { receiver: ReceiverId::new(name).unwrap(), session };
        Light { peer, models: models.iter().map(|m| model(m)).collect(), after: 0, engine: BTreeMap::new() }
    }

    pub fn join(&mut self, client: &ControllerClient) -> Result<Joined, ControllerError> {
        self.after = 0;
        let join = Join {
            peer: self.peer.clone(),
            models: self.models.clone(),
            has: self.engine.values().cloned().collect(),
            host: "test".into(),
            release: "0".into(),
        };
        client.join(&join, &stop())
    }

    pub fn try_poll(&mut self, client: &ControllerClient, ms: u64) -> Result<Vec<Task>, ControllerError> {
        let (peer, after) = (self.peer.clone(), self.after);
        let orders = client.poll(&Poll { peer, after, timeout_ms: ms, doing: Vec::new() }, &stop())?.orders;
        let numbers: Vec<u64> = orders.iter().map(|n| n.seq).collect();
        assert!(numbers.is_sorted() && numbers.iter().all(|n| *n > self.after), "{numbers:?}");
        self.after = numbers.last().copied().unwrap_or(self.after);
        Ok(orders.into_iter().map(|n| n.task).collect())
    }

    pub fn poll(&mut self, client: &ControllerClient) -> Vec<Task> {
        self.try_poll(client, 0).unwrap()
    }

    pub fn say(
        &self,
        client: &ControllerClient,
        order: Order,
        identity: &Identity,
        outcome: Outcome,
    ) -> Result<Done, ControllerError> {
        client.report(&self.report(order, identity, outcome), &stop())
    }

    pub fn report(&self, order: Order, identity: &Identity, outcome: Outcome) -> Report {
        let (peer, identity) = (self.peer.clone(), identity.clone());
        Report { peer, order, identity, outcome, spans: Vec::new(), mode: None, pause_ms: None }
    }

    /// Takes what orders there are and carries them out.
    pub fn obey(&mut self, client: &ControllerClient) -> Vec<Task> {
        let tasks = self.poll(client);
        for task in &tasks {
            match task {
                Task::Stage { order, identity, .. } => {
                    self.say(client, *order, identity, Outcome::Staged).unwrap();
                }
                Task::Load { order, identities, .. } => {
                    for identity in identities {
                        self.engine.insert(identity.model_id.clone(), identity.clone());
                        self.say(client, *order, identity, Outcome::Loaded).unwrap();
                    }
                }
                Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => {}
            }
        }
        tasks
    }
}

pub fn failed(phase: Phase, reason: &str) -> Outcome {
    Outcome::Failed { phase, kind: Kind::Corrupt, reason: reason.into() }
}

pub fn stages(tasks: &[Task]) -> Vec<(Order, Identity)> {
    let stage = |t: &Task| match t {
        Task::Stage { order, identity, .. } => Some((*order, identity.clone())),
        _ => None,
    };
    tasks.iter().filter_map(stage).collect()
}

pub fn loads(tasks: &[Task]) -> Vec<(Order, Vec<Identity>)> {
    let load = |t: &Task| match t {
        Task::Load { order, identities, .. } => Some((*order, identities.clone())),
        _ => None,
    };
    tasks.iter().filter_map(load).collect()
}

/// Whether it was told to serve, or not to, last.
pub fn live(tasks: &[Task]) -> Option<bool> {
    let live = |t: &Task| match t {
        Task::Live { live, .. } => Some(*live),
        _ => None,
    };
    tasks.iter().rev().find_map(live)
}
