//! A world for the barrier to govern: receivers that really stage and load (as far as a test can tell), a
//! network that delays, repeats and reorders, and a judge (`judge`).

mod judge;

use std::collections::{BTreeMap, BTreeSet};

use crate::barrier::*;
use crate::identity::{Identity, Incarnation, ModelId, Version};

/// One incarnation of one receiver, and the versions it truly holds.
#[derive(Clone, Debug)]
pub(super) struct Life {
    pub(super) peer: Peer,
    pub(super) models: BTreeSet<ModelId>,
    /// Runs: works on orders and sends heartbeats.
    pub(super) running: bool,
    pub(super) staged: BTreeMap<Identity, BTreeSet<Order>>,
    pub(super) engine: BTreeMap<ModelId, Identity>,
    pub(super) loading: Vec<Loading>,
    /// Models whose engines do not serve: a load is under way, or one failed and none succeeded since.
    pub(super) paused: BTreeSet<ModelId>,
    /// The greatest load order acted on, per model.
    last_load: BTreeMap<ModelId, Order>,
    pub(super) inbox: Vec<Action>,
    /// When it was first asked for what.
    asked: BTreeMap<Identity, Millis>,
    /// What it reported that it could not stage.
    failed: BTreeSet<Identity>,
    /// What it reported to have skipped for something newer.
    skipped: BTreeSet<Identity>,
    /// When each model was last ordered to load.
    told_to_load: BTreeMap<ModelId, Millis>,
    /// Models whose last load failed or took too long.
    broken: BTreeSet<ModelId>,
    /// What was called off, and by which order.
    called_off: BTreeMap<Identity, Order>,
}

/// A load under way: its order, all it covers, and what is not done.
#[derive(Clone, Debug)]
pub(super) struct Loading {
    order: Order,
    all: Vec<Identity>,
    left: Vec<Identity>,
}

#[derive(Debug)]
struct OpenWait {
    set: usize,
    at_least: Version,
    lineage: Option<(ModelId, Incarnation)>,
    until: Millis,
    gate: bool,
    evaluating: bool,
}

pub(super) struct World {
    pub(super) barrier: Barrier,
    pub(super) config: Config,
    pub(super) now: Millis,
    /// The newest incarnation of each receiver, member or not.
    pub(super) newest: BTreeMap<ReceiverId, Life>,
    /// The incarnation that the barrier knows as a member, in its last state.
    ended: BTreeMap<ReceiverId, Life>,
    pub(super) joined: BTreeMap<ReceiverId, u64>,
    /// Who is between two sessions within one answer of the barrier.
    between: BTreeSet<ReceiverId>,
    /// Messages on their way to the barrier.
    pub(super) network: Vec<Event>,
    current: BTreeMap<ModelId, Incarnation>,
    pub(super) announced: BTreeMap<(ModelId, Incarnation), BTreeSet<Version>>,
    /// What was announced and is not there.
    pub(super) absent: BTreeSet<Identity>,
    highest_load: BTreeMap<(ModelId, Incarnation), Version>,
    /// Counts actions, to tell what came first within one millisecond.
    actions: u64,
    /// Who is live, and by which action.
    live: BTreeMap<(ReceiverId, ModelId), u64>,
    /// Per set: versions whose load has begun since the last incarnation change, and by which action.
    begun: Vec<BTreeMap<Version, u64>>,
    served: Vec<Option<Served>>,
    /// Who was fenced for lagging just now, in which set, and by which action it had gone live.
    left_behind: Vec<(ReceiverId, usize, u64)>,
    /// Whose trainer has been told to wait.
    pressed: BTreeSet<ModelId>,
    waits: BTreeMap<WaitId, OpenWait>,
    /// Running receivers that have not joined again since the controller was restarted.
    pub(super) astray: BTreeSet<ReceiverId>,
    /// By when they will have.
    rejoin_by: Millis,
    /// What members said that they hold when they joined, as far as no load has changed it since.
    claims: BTreeMap<ReceiverId, Vec<Identity>>,
    restarts: u64,
    next_session: u64,
    sent: u64,
    pub(super) seen: BTreeMap<&'static str, usize>,
}

impl World {
    pub(super) fn new(config: Config) -> World {
        let sets = config.sets.len();
        World {
            barrier: Barrier::new(config.clone()).unwrap(),
            config,
            now: 0,
            newest: BTreeMap::new(),
            ended: BTreeMap::new(),
            joined: BTreeMap::new(),
            between: BTreeSet::new(),
            network: Vec::new(),
            current: BTreeMap::new(),
            announced: BTreeMap::new(),
            absent: BTreeSet::new(),
            highest_load: BTreeMap::new(),
            live: BTreeMap::new(),
            begun: vec![BTreeMap::new(); sets],
            served: vec![None; sets],
            left_behind: Vec::new(),
            actions: 0,
            pressed: BTreeSet::new(),
            waits: BTreeMap::new(),
            astray: BTreeSet::new(),
            rejoin_by: 0,
            claims: BTreeMap::new(),
            restarts: 0,
            next_session: 0,
            sent: 0,
            seen: BTreeMap::new(),
        }
    }

    fn set_of(&self, model: &ModelId) -> usize {
        self.config.sets.iter().position(|s| s.models.contains(model)).unwrap()
    }

    fn models_in(&self, life: &Life, set: usize) -> Vec<ModelId> {
        self.config.sets[set].models.iter().filter(|m| life.models.contains(*m)).cloned().collect()
    }

    /// The incarnation that the barrier knows as a member.
    fn member(&self, id: &ReceiverId) -> &Life {
        let session = self.joined[id];
        [self.newest.get(id), self.ended.get(id)]
            .into_iter()
            .flatten()
            .find(|l| l.peer.session == session)
            .unwrap()
    }

    fn members(&self, set: usize) -> Vec<&Life> {
        let members = self.joined.keys().filter(|id| !self.between.contains(*id)).map(|id| self.member(id));
        members.filter(|l| !self.models_in(l, set).is_empty()).collect()
    }

    fn is_live(&self, life: &Life, set: usize) -> bool {
        let id = &life.peer.receiver;
        self.models_in(life, set).iter().any(|m| self.live.contains_key(&(id.clone(), m.clone())))
    }

    fn note(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    // ---- what happens -----------------------------------------------------------------------------

    /// Time passes.
    pub(super) fn pass(&mut self, span: Millis) {
        if !self.astray.is_empty() && self.now + span >= self.rejoin_by {
            let until = self.rejoin_by.saturating_sub(self.now);
            self.pass_time(until);
            let late = self.astray.iter().cloned().collect::<Vec<_>>();
            late.iter().for_each(|id| self.rejoin(id));
            return self.pass_time(span.saturating_sub(until));
        }
        self.pass_time(span);
    }

    /// A new controller, which knows nothing. Receivers are unchanged and will join it; open waits have lost
    /// their answers.
    pub(super) fn restart(&mut self) {
        self.barrier = Barrier::new(self.config.clone()).unwrap();
        let _ = self.barrier.tick(self.now);
        let sets = self.config.sets.len();
        self.astray = self.newest.values().filter(|l| l.running).map(|l| l.peer.receiver.clone()).collect();
        // The last attempt of a receiver with the longest delay between two of them, which has just missed the start.
        self.rejoin_by = self.now + 2 * self.config.limits.rejoin_ms();
        self.ended.clear();
        self.joined.clear();
        self.current.clear();
        self.announced.clear();
        self.highest_load.clear();
        self.live.clear();
        self.begun = vec![BTreeMap::new(); sets];
        self.served = vec![None; sets];
        self.pressed.clear();
        self.waits.clear();
        self.claims.clear();
        self.restarts += 1;
        self.note("restarted");
    }

    /// A receiver finds the restarted controller, with what its engines hold.
    pub(super) fn rejoin(&mut self, id: &ReceiverId) {
        if !self.astray.remove(id) {
            return;
        }
        let models = self.newest[id].models.clone();
        self.start(id, models, true);
        self.note("rejoined");
    }

    /// Half the time the controller looks at every deadline as it comes, the other half it slept.
    fn pass_time(&mut self, span: Millis) {
        let until = self.now + span;
        while span.is_multiple_of(2)
            && let Some(at) = self.barrier.next_deadline().filter(|at| (self.now + 1..until).contains(at))
        {
            self.tick_at(at);
        }
        self.tick_at(until);
    }

    fn tick_at(&mut self, now: Millis) {
        let span = now - self.now;
        self.now = now;
        let actions = self.barrier.tick(self.now);
        if !actions.is_empty() || span > 0 {
            self.judge(actions);
        }
        assert!(self.barrier.next_deadline().is_none_or(|at| at > self.now), "a tick must leave nothing due");
    }

    /// Hands one event to the barrier. Deadlines are dealt with first so that the actions are the event's.
    pub(super) fn send(&mut self, event: Event) -> Result<(), BarrierError> {
        self.pass(0);
        self.sent += 1;
        // A snapshot is large; every eighth event is enough to catch a refusal that leaves traces.
        let before = self.sent.is_multiple_of(8).then(|| self.barrier.snapshot());
        match self.barrier.step(self.now, event.clone()) {
            Ok(actions) => {
                let notified = if let Event::Notify { identity, .. } = &event {
                    Some(identity.model_id.clone())
                } else {
                    None
                };
                self.accepted(event);
                self.judge(actions);
                if let Some(model) = notified {
                    self.judge_pressure(&model);
                }
                Ok(())
            }
            Err(refused) => {
                if let Some(before) = before {
                    let mut after = self.barrier.snapshot();
                    for (a, b) in after.receivers.iter_mut().zip(&before.receivers) {
                        a.last_seen = b.last_seen;
                    }
                    assert_eq!(before, after, "a refused event must change nothing: {refused}");
                }
                Err(refused)
            }
        }
    }

    /// What the world knows once the barrier has accepted an event.
    fn accepted(&mut self, event: Event) {
        match event {
            Event::Notify { identity, sync, .. } => {
                let set = self.set_of(&identity.model_id);
                let old = self.current.insert(identity.model_id.clone(), identity.incarnation);
                assert!(old <= Some(identity.incarnation), "a dead lineage was accepted");
                if old.is_some_and(|old| old < identity.incarnation) {
                    self.begun[set].clear();
                    self.pressed.remove(&identity.model_id);
                    self.note("superseded");
                }
                let key = (identity.model_id.clone(), identity.incarnation);
                let announced = self.announced.entry(key).or_default();
                announced.insert(identity.version);
                let same =
                    |c: &&Identity| c.model_id == identity.model_id && c.incarnation == identity.incarnation;
                announced.extend(self.claims.values().flatten().filter(same).map(|c| c.version));
                if let Some(sync) = sync {
                    self.waits.insert(
                        sync.id,
                        OpenWait {
                            set,
                            at_least: identity.version,
                            lineage: Some((identity.model_id, identity.incarnation)),
                            until: self.now + sync.timeout.min(self.config.limits.max_wait_ms),
                            gate: false,
                            evaluating: false,
                        },
                    );
                }
            }
            Event::Join { peer, has, .. } => {
                for identity in &has {
                    if self.current.get(&identity.model_id) == Some(&identity.incarnation) {
                        let key = (identity.model_id.clone(), identity.incarnation);
                        self.announced.entry(key).or_default().insert(identity.version);
                    }
                }
                self.claims.insert(peer.receiver.clone(), has);
                self.astray.remove(&peer.receiver);
                self.joined.insert(peer.receiver, peer.session);
            }
            Event::Failed { peer, identity, phase: Phase::Staging, .. } => {
                self.edit(&peer, |life| {
                    life.failed.insert(identity);
                });
            }
            Event::GateWait { id, set, at_least, lineage, timeout } => {
                let set = self.config.sets.iter().position(|s| s.name == set).unwrap();
                let until = self.now + timeout.min(self.config.limits.max_wait_ms);
                let wait = OpenWait { set, at_least, lineage, until, gate: true, evaluating: false };
                self.waits.insert(id, wait);
            }
            Event::Cancel { id } => {
                self.waits.remove(&id).unwrap();
            }
            Event::Failed { phase: Phase::Loading, .. }
            | Event::Absent { .. }
            | Event::Heartbeat { .. }
            | Event::Staged { .. }
            | Event::Loaded { .. }
            | Event::Leave { .. }
            | Event::EvalDone { .. } => {}
        }
    }

    fn edit(&mut self, peer: &Peer, edit: impl FnOnce(&mut Life)) {
        let lives = [self.newest.get_mut(&peer.receiver), self.ended.get_mut(&peer.receiver)];
        if let Some(life) = lives.into_iter().flatten().find(|l| l.peer == *peer) {
            edit(life);
        }
    }

    /// A receiver starts (or starts over, with or without its engines' weights) and joins.
    pub(super) fn start(&mut self, id: &ReceiverId, models: BTreeSet<ModelId>, keep: bool) {
        self.next_session += 1;
        let peer = Peer { receiver: id.clone(), session: self.next_session };
        let mut life = Life {
            peer: peer.clone(),
            models,
            running: true,
            staged: BTreeMap::new(),
            engine: BTreeMap::new(),
            loading: Vec::new(),
            paused: BTreeSet::new(),
            last_load: BTreeMap::new(),
            inbox: Vec::new(),
            asked: BTreeMap::new(),
            failed: BTreeSet::new(),
            skipped: BTreeSet::new(),
            told_to_load: BTreeMap::new(),
            broken: BTreeSet::new(),
            called_off: BTreeMap::new(),
        };
        if let Some(old) = self.newest.remove(id) {
            if keep {
                life.models.clone_from(&old.models);
                life.engine.clone_from(&old.engine);
                // A model that was being written is not whole.
                for identity in old.loading.iter().flat_map(|l| &l.left) {
                    life.engine.remove(&identity.model_id);
                }
            }
            if self.joined.get(id) == Some(&old.peer.session) {
                self.ended.insert(id.clone(), old);
            }
        }
        let join = Event::Join {
            peer,
            models: life.models.iter().cloned().collect(),
            has: life.engine.values().cloned().collect(),
        };
        // Engines that hold nothing whole stay paused until a load; the others until they are told to serve.
        self.newest.insert(id.clone(), life);
        self.send(join).unwrap();
    }

    /// The receiver gets one piece of work done.
    pub(super) fn work(&mut self, id: &ReceiverId, pick: usize, fail: bool, newer: bool) {
        let Some(life) = self.newest.get_mut(id).filter(|l| l.running) else { return };
        let peer = life.peer.clone();
        if !life.loading.is_empty() && (pick.is_multiple_of(2) || life.inbox.is_empty()) {
            let mut load = life.loading.swap_remove(pick / 2 % life.loading.len());
            let (order, identity) = (load.order, load.left.swap_remove(pick / 4 % load.left.len()));
            if fail {
                life.engine.remove(&identity.model_id);
                let (phase, reason) = (Phase::Loading, "engine said no".to_owned());
                self.network.push(Event::Failed { peer, order, identity, phase, reason });
                return;
            }
            life.engine.insert(identity.model_id.clone(), identity.clone());
            life.staged.retain(|s, _| s.model_id != identity.model_id || *s > identity);
            if load.left.is_empty() {
                life.paused.retain(|m| load.all.iter().all(|i| i.model_id != *m));
            } else {
                life.loading.push(load);
            }
            self.network.push(Event::Loaded { peer, order, identity });
        } else if !life.inbox.is_empty() {
            let at = pick / 2 % life.inbox.len();
            let order = life.inbox.remove(at);
            self.obey(peer, order, fail, newer);
        }
    }

    fn obey(&mut self, peer: Peer, order: Action, fail: bool, newer: bool) {
        let life = self.newest.get_mut(&peer.receiver).unwrap();
        match order {
            // What overtook it here would have come later.
            Action::Stage { order, identity, .. } if life.called_off.get(&identity) >= Some(&order) => {}
            Action::Stage { order, identity, .. } => {
                let key = (identity.model_id.clone(), identity.incarnation);
                let there =
                    |v: &&Version| !self.absent.contains(&Identity { version: **v, ..identity.clone() });
                let newest =
                    self.announced.get(&key).and_then(|a| a.iter().rev().find(there).copied()).unwrap_or(0);
                if !fail && self.absent.contains(&identity) {
                    self.network.push(Event::Absent { peer, order, identity });
                    return;
                }
                if fail {
                    let (phase, reason) = (Phase::Staging, "the network said no".to_owned());
                    self.network.push(Event::Failed { peer, order, identity, phase, reason });
                    return;
                }
                // What is here already is not brought again, and something newer than that neither.
                let here = life.staged.keys().filter(|s| {
                    s.model_id == identity.model_id
                        && s.incarnation == identity.incarnation
                        && s.version >= identity.version
                });
                let newest = here.map(|s| s.version).min().unwrap_or(newest.max(identity.version));
                let got =
                    Identity { version: if newer { newest } else { identity.version }, ..identity.clone() };
                if got != identity {
                    life.skipped.insert(identity);
                }
                if life.engine.get(&got.model_id) != Some(&got) {
                    life.staged.entry(got.clone()).or_default().insert(order);
                }
                self.network.push(Event::Staged { peer, order, identity: got });
            }
            Action::Load { order, identities, .. }
                if identities.iter().all(|i| life.last_load.get(&i.model_id).is_none_or(|l| *l < order)) =>
            {
                // A load that an earlier order had begun gives way to this one.
                life.loading.retain(|l| l.all[0].model_id != identities[0].model_id);
                for identity in &identities {
                    life.last_load.insert(identity.model_id.clone(), order);
                    life.paused.insert(identity.model_id.clone());
                }
                let has =
                    |i: &Identity| life.staged.contains_key(i) || life.engine.get(&i.model_id) == Some(i);
                if let Some(bad) = identities.iter().find(|i| !has(i)) {
                    let (identity, reason) = (bad.clone(), "not staged".to_owned());
                    self.network.push(Event::Failed { peer, order, identity, phase: Phase::Loading, reason });
                    return;
                }
                life.loading.push(Loading { order, all: identities.clone(), left: identities });
            }
            Action::Abandon { order, identity, .. } => {
                life.staged.retain(|_, orders| {
                    orders.remove(&order);
                    !orders.is_empty()
                });
                let by = life.called_off.entry(identity).or_insert(order);
                *by = order.max(*by);
            }
            Action::Drop { order, identity, .. } => {
                if let Some(orders) = life.staged.get_mut(&identity) {
                    orders.retain(|by| *by > order);
                }
                life.staged.retain(|_, orders| !orders.is_empty());
            }
            _ => {}
        }
    }

    /// Every running receiver does everything at once, without failures, and all messages arrive.
    pub(super) fn promptly(&mut self) {
        for _ in 0..200 {
            let busy: Vec<_> = self
                .newest
                .values()
                .filter(|l| l.running && (!l.loading.is_empty() || !l.inbox.is_empty()))
                .map(|l| l.peer.receiver.clone())
                .collect();
            for id in &busy {
                self.work(id, 0, false, false);
            }
            let messages = std::mem::take(&mut self.network);
            if busy.is_empty() && messages.is_empty() {
                return self.judge_kept();
            }
            for message in messages {
                let _ = self.send(message);
            }
        }
        panic!("the barrier keeps its receivers busy without end");
    }

    pub(super) fn heartbeats(&mut self) {
        let running: Vec<_> = self.newest.values().filter(|l| l.running).map(|l| l.peer.clone()).collect();
        for peer in running {
            let _ = self.send(Event::Heartbeat { peer });
        }
    }

    // ---- the end ----------------------------------------------------------------------------------

    /// From here on nothing fails: every running receiver joins again if need be, answers at once, and the dead time
    /// out.
    pub(super) fn calm_down(&mut self) {
        for _ in 0..25 {
            self.heartbeats();
            let lost: Vec<_> = self
                .newest
                .values()
                .filter(|l| l.running && self.joined.get(&l.peer.receiver) != Some(&l.peer.session))
                .map(|l| (l.peer.receiver.clone(), l.models.clone()))
                .collect();
            for (id, models) in lost {
                self.start(&id, models, true);
            }
            self.promptly();
            self.pass(150);
        }
    }

    /// The highest version that everything announced so far leads to.
    fn target(&self, set: usize) -> Option<Version> {
        let there = |m: &ModelId, incarnation: Incarnation, v: Version| {
            !self.absent.contains(&Identity { model_id: m.clone(), incarnation, version: v })
        };
        if self.config.sets[set].mode == Mode::Relaxed {
            let newest = |m: &ModelId| {
                let incarnation = *self.current.get(m)?;
                let announced = self.announced[&(m.clone(), incarnation)].iter().rev();
                announced.copied().find(|v| there(m, incarnation, *v))
            };
            let newest: Option<Vec<_>> = self.config.sets[set].models.iter().map(newest).collect();
            return newest?.into_iter().min();
        }
        let mut common: Option<BTreeSet<Version>> = None;
        for model in &self.config.sets[set].models {
            let key = (model.clone(), *self.current.get(model)?);
            let low = self.highest_load.get(&key).copied().unwrap_or(0);
            let may = self.announced[&key].iter().copied().filter(|v| *v >= low && there(model, key.1, *v));
            let may: BTreeSet<_> = may.collect();
            common = Some(common.map_or(may.clone(), |c| c.intersection(&may).copied().collect()));
        }
        common?.last().copied()
    }

    /// Liveness: the version that all models have announced is served, if there are enough receivers.
    pub(super) fn assert_caught_up(&mut self) {
        for set in 0..self.config.sets.len() {
            let members = self.members(set);
            let covered: BTreeSet<_> = members.iter().flat_map(|l| self.models_in(l, set)).collect();
            let target = self.target(set);
            // A receiver that an earlier controller took past the target, or that skipped it.
            let past = |l: &Life| {
                let held = self.models_in(l, set).into_iter().filter_map(|m| l.engine.get(&m));
                let mut held = held.filter(|i| self.current.get(&i.model_id) == Some(&i.incarnation));
                held.any(|i| Some(i.version) > target)
            };
            let stuck = members.iter().any(|l| !l.skipped.is_empty() || past(l));
            let enough =
                covered.len() == self.config.sets[set].models.len() && members.len() >= self.need(set);
            let Some(target) = target.filter(|_| enough && !stuck) else { continue };
            let served = self.barrier.service_version(&self.config.sets[set].name).unwrap();
            assert_eq!(served.map(|s| s.version), Some(target), "{:#?}", self.barrier.snapshot());
            for life in &members {
                assert!(self.is_live(life, set), "{life:?} never came back: {:#?}", self.barrier.snapshot());
            }
            self.note("caught up");
        }
    }
}

impl Life {
    /// What it skipped no longer matters.
    pub(super) fn forgive(&mut self) {
        self.skipped.clear();
    }
}
