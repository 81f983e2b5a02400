//! One version through the barrier: from the trainer's notify until the gate opens.
//!
//! Owns: [`visible`]. The barrier is the controller's own ([`Barrier`]); receivers and the network are modelled. A controller
//! handles one message after the other.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use windlass_core::barrier::{
    Action, Barrier, Config, Event, Limits, Order, Peer, ReceiverId, SetConfig, SetName, WaitId,
};
use windlass_core::identity::{Identity, Incarnation, ModelId};

use crate::error::Error;

/// What the controller and the engines take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// Seconds that a message takes, one way.
    pub(super) latency: f64,
    /// Seconds of the controller for one message, in or out.
    pub(super) message: f64,
    /// Seconds of an engine for a load.
    pub(super) load: f64,
}

/// Receivers send a sign of life so often, in milliseconds.
const BEAT: u64 = 3_000;
/// When the version is announced, in milliseconds. All receivers have the one before.
const BEGIN: u64 = 10_000;
const GATE: WaitId = WaitId(1);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    /// A message reaches the controller.
    Staged {
        receiver: usize,
        order: Order,
        version: u64,
    },
    Loaded {
        receiver: usize,
        order: Order,
        version: u64,
    },
    /// Time passes.
    Beat,
}

struct Round {
    barrier: Barrier,
    peers: Vec<Peer>,
    model: ModelId,
    costs: Costs,
    turns: BinaryHeap<Reverse<(u64, u64, Turn)>>,
    posted: u64,
    /// Until when the controller is busy, in seconds.
    busy: f64,
    opened: Option<f64>,
}

fn bug(what: impl ToString) -> Error {
    Error::Bug(format!("the modelled barrier: {}", what.to_string()))
}

/// Seconds from the notify until the gate opens, if each receiver takes so long to stage the version, or dies on the way
/// (none).
pub(super) fn visible(staging: &[Option<f64>], costs: Costs) -> Result<f64, Error> {
    let model = ModelId::new("modelled").map_err(bug)?;
    let set = SetName::new("modelled").map_err(bug)?;
    let mut config = Config::new(vec![SetConfig::strict(set.clone(), vec![model.clone()])]);
    // A version that takes longer than a receiver may take to stage it would be given up: that is a matter of configuration.
    let longest = staging.iter().flatten().fold(0.0, |a: f64, b| a.max(*b)).min(1e9);
    let stage_ms = Limits::default().stage_ms.max((longest * 2e3) as u64);
    let limits = Limits { settle_ms: 0, stage_ms, max_receivers: staging.len().max(1), ..Limits::default() };
    config.limits = limits;
    let barrier = Barrier::new(config).map_err(bug)?;
    let peer = |i: usize| Ok(Peer { receiver: ReceiverId::new(format!("receiver-{i}"))?, session: 1 });
    let peers = (0..staging.len()).map(peer).collect::<Result<Vec<_>, _>>();
    let peers = peers.map_err(|e: windlass_core::barrier::NameError| bug(e))?;
    let turns = BinaryHeap::new();
    let mut round = Round { barrier, peers, model, costs, turns, posted: 0, busy: 0.0, opened: None };
    // The version before: everybody has it at once.
    let quick = vec![Some(0.0); staging.len()];
    for i in 0..staging.len() {
        let (peer, models) = (round.peers[i].clone(), vec![round.model.clone()]);
        round.take(0.0, Event::Join { peer, models, has: Vec::new() }, &quick)?;
    }
    round.notify(0.0, 1, &quick)?;
    round.post(0.0, Turn::Beat);
    round.run(&quick, BEGIN)?;
    round.busy = BEGIN as f64 / 1e3;
    let (at, timeout) = (BEGIN as f64 / 1e3, 3_600_000);
    round.post(at, Turn::Beat);
    let gate = Event::GateWait { id: GATE, set, at_least: 2, lineage: None, timeout };
    round.take(at, gate, staging)?;
    round.notify(at, 2, staging)?;
    round.run(staging, u64::MAX)?;
    let opened = round.opened.ok_or_else(|| bug("the gate did not open"))?;
    Ok(opened - at)
}

impl Round {
    fn identity(&self, version: u64) -> Identity {
        Identity { model_id: self.model.clone(), incarnation: Incarnation(1), version }
    }

    fn post(&mut self, at: f64, turn: Turn) {
        self.posted += 1;
        self.turns.push(Reverse(((at * 1e9) as u64, self.posted, turn)));
    }

    fn notify(&mut self, at: f64, version: u64, staging: &[Option<f64>]) -> Result<(), Error> {
        let sender_endpoint = "http://trainer.example:1".to_owned();
        let event = Event::Notify { identity: self.identity(version), sender_endpoint, sync: None };
        self.take(at, event, staging)
    }

    /// The controller takes an event and sends what follows from it.
    fn take(&mut self, at: f64, event: Event, staging: &[Option<f64>]) -> Result<(), Error> {
        let now = self.busy.max(at) + self.costs.message;
        self.busy = now;
        let actions = self.barrier.step((now * 1e3) as u64, event).map_err(bug)?;
        self.send(actions, staging);
        Ok(())
    }

    fn send(&mut self, actions: Vec<Action>, staging: &[Option<f64>]) {
        for action in actions {
            match action {
                Action::Stage { to, order, identity, .. } => {
                    let Some((receiver, taken)) = self.reached(&to, staging) else { continue };
                    let at = self.busy + 2.0 * self.costs.latency + taken;
                    self.post(at, Turn::Staged { receiver, order, version: identity.version });
                }
                Action::Load { to, order, identities, .. } => {
                    let Some((receiver, _)) = self.reached(&to, staging) else { continue };
                    let at = self.busy + 2.0 * self.costs.latency + self.costs.load;
                    let version = identities.first().map_or(0, |i| i.version);
                    self.post(at, Turn::Loaded { receiver, order, version });
                }
                Action::OpenGate { .. } => self.opened = Some(self.busy + self.costs.latency),
                _ => {}
            }
        }
    }

    /// Sends an order. Which receiver gets it, if it lives, and how long it takes to stage.
    fn reached(&mut self, to: &Peer, staging: &[Option<f64>]) -> Option<(usize, f64)> {
        self.busy += self.costs.message;
        let receiver = self.peers.iter().position(|p| p == to)?;
        Some((receiver, staging[receiver]?))
    }

    fn run(&mut self, staging: &[Option<f64>], until_ms: u64) -> Result<(), Error> {
        while self.opened.is_none() {
            let Some(Reverse((at, _, turn))) = self.turns.pop() else { return Ok(()) };
            if at / 1_000_000 > until_ms {
                return Ok(());
            }
            let at = at as f64 / 1e9;
            match turn {
                Turn::Staged { receiver, order, version } => {
                    let (peer, identity) = (self.peers[receiver].clone(), self.identity(version));
                    self.take(at, Event::Staged { peer, order, identity }, staging)?;
                }
                Turn::Loaded { receiver, order, version } => {
                    let (peer, identity) = (self.peers[receiver].clone(), self.identity(version));
                    self.take(at, Event::Loaded { peer, order, identity }, staging)?;
                }
                Turn::Beat => {
                    self.busy = self.busy.max(at);
                    for (peer, lives) in self.peers.clone().into_iter().zip(staging) {
                        if lives.is_some() {
                            let actions = self.barrier.step((at * 1e3) as u64, Event::Heartbeat { peer });
                            self.send(actions.map_err(bug)?, staging);
                        }
                    }
                    let actions = self.barrier.tick((at * 1e3) as u64);
                    self.send(actions, staging);
                    self.post(at + BEAT as f64 / 1e3, Turn::Beat);
                }
            }
        }
        Ok(())
    }
}
