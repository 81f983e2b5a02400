//! A world for the barrier to govern: receivers that really stage and load (as far as a test can tell), a
//! network that delays, repeats and reorders, and a judge who looks only at what was ordered and at what
//! the receivers truly hold. The judge shares no bookkeeping with the barrier.

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
    pub(super) staged: BTreeMap<Identity, Order>,
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

    /// BARRIER-1, BARRIER-3: every running receiver counts, whether the barrier knows of it or not.
    fn judge_astray(&self, set: usize, what: &str) {
        let missing = |id: &&ReceiverId| !self.models_in(&self.newest[*id], set).is_empty();
        let missing: Vec<_> = self.astray.iter().filter(missing).collect();
        assert!(missing.is_empty(), "C102: {what}, and {missing:?} have not joined since the restart");
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
                let got = Identity {
                    version: if newer { newest.max(identity.version) } else { identity.version },
                    ..identity.clone()
                };
                if got != identity {
                    life.skipped.insert(identity);
                }
                let by = life.staged.entry(got.clone()).or_insert(order);
                *by = order.max(*by);
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
            Action::Abandon { order, identity, .. }
                if life.staged.get(&identity).is_some_and(|o| *o <= order) =>
            {
                life.staged.remove(&identity);
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
                return;
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

    // ---- the judge --------------------------------------------------------------------------------

    fn judge(&mut self, actions: Vec<Action>) {
        for action in actions {
            if let Action::Stage { to, .. } | Action::Load { to, .. } = &action {
                self.between.remove(&to.receiver);
            }
            self.actions += 1;
            self.judge_action(action);
        }
        self.between.clear();
        self.judge_sets();
        self.judge_live();
        for (id, wait) in &self.waits {
            assert!(wait.until > self.now, "C74: {id} waits past its deadline {}", wait.until);
        }
        self.left_behind.clear();
    }

    fn judge_action(&mut self, action: Action) {
        match action.clone() {
            Action::Stage { to, identity, .. } => {
                assert_eq!(self.joined.get(&to.receiver), Some(&to.session), "an order to a stranger");
                assert_eq!(self.current[&identity.model_id], identity.incarnation, "C95: staging the dead");
                let now = self.now;
                self.edit(&to, |life| {
                    assert!(life.models.contains(&identity.model_id));
                    life.asked.entry(identity).or_insert(now);
                    life.inbox.push(action);
                });
            }
            Action::Load { to, identities, .. } => {
                self.judge_load(&to, &identities);
                let now = self.now;
                self.edit(&to, |life| {
                    life.inbox.push(action);
                    for identity in identities {
                        life.broken.remove(&identity.model_id);
                        life.told_to_load.insert(identity.model_id, now);
                    }
                });
            }
            Action::Abandon { to, .. } => self.edit(&to, |life| life.inbox.push(action)),
            Action::GoLive { receiver, models, version, set } => {
                let life = self.member(&receiver);
                for model in &models {
                    assert!(!life.paused.contains(model), "C77: live in the middle of a load");
                    let holds = life.engine.get(model).map(|i| (i.incarnation, i.version));
                    assert_eq!(holds, Some((self.current[model], version)), "C77: {receiver} {model}");
                }
                let index = self.config.sets.iter().position(|s| s.name == set).unwrap();
                if self.config.sets[index].mode == Mode::Strict {
                    assert_eq!(models.len(), self.models_in(life, index).len());
                }
                for model in models {
                    self.live.insert((receiver.clone(), model), self.actions);
                }
                self.note("live");
            }
            Action::Fence { receiver, models, set, why } => {
                let live_by = self.live.get(&(receiver.clone(), models[0].clone())).copied();
                for model in &models {
                    self.live.remove(&(receiver.clone(), model.clone()));
                }
                match why {
                    FenceReason::Lagging { .. } => {
                        let index = self.config.sets.iter().position(|s| s.name == set).unwrap();
                        self.left_behind.push((receiver, index, live_by.expect("was not live")));
                    }
                    FenceReason::LoadTimeout { .. } | FenceReason::LoadFailed { .. } => {
                        let (peer, load_ms) =
                            (self.member(&receiver).peer.clone(), self.config.limits.load_ms);
                        let now = self.now;
                        self.edit(&peer, |life| {
                            let overdue = life.told_to_load[&models[0]] + load_ms <= now;
                            assert!(overdue || !matches!(why, FenceReason::LoadTimeout { .. }));
                            life.broken.extend(models);
                        });
                    }
                    FenceReason::Superseded { .. } => {}
                }
                self.note("fenced");
            }
            Action::Evict { receiver, why } => {
                self.live.retain(|(r, _), _| *r != receiver);
                self.ended.remove(&receiver);
                match why {
                    EvictReason::Silent | EvictReason::Left => {
                        self.claims.remove(&receiver);
                        self.joined.remove(&receiver);
                    }
                    // The world knows the new session already; it was the old one that left.
                    EvictReason::Rejoined => {
                        self.between.insert(receiver);
                    }
                }
                self.note("evicted");
            }
            Action::OpenGate { id, served } => {
                let wait = self.waits.remove(&id).expect("answered twice");
                assert!(wait.gate && served.version >= wait.at_least);
                self.judge_wait(&wait, &served);
                self.note("opened");
            }
            Action::RunEval { id, served } => {
                let mut wait = self.waits.remove(&id).expect("answered twice");
                assert!(!wait.gate && !wait.evaluating && served.version >= wait.at_least);
                self.judge_wait(&wait, &served);
                self.note("evaluated");
                wait.evaluating = true;
                wait.until = self.now + self.config.limits.eval_ms;
                self.waits.insert(id, wait);
            }
            Action::FailGate { id, why } => {
                let wait = self.waits.remove(&id).expect("answered twice");
                match why {
                    GateFailure::Timeout { .. } => assert!(wait.gate && wait.until <= self.now),
                    GateFailure::Superseded { by } => assert!(wait.lineage.unwrap().1 < by),
                }
                self.note("gate failed");
            }
            Action::NotifyReply { id, outcome } => {
                let wait = self.waits.remove(&id).expect("answered twice");
                match outcome {
                    NotifyOutcome::Loaded { served } => self.judge_wait(&wait, &served),
                    NotifyOutcome::Evaluated { .. } => assert!(wait.evaluating),
                    NotifyOutcome::LoadTimeout { blocked } => {
                        assert!(!wait.evaluating && wait.until <= self.now);
                        assert_ne!(blocked, Blocked::UpToDate, "a version that was announced is not served");
                    }
                    NotifyOutcome::EvalTimeout { .. } => {
                        assert!(wait.evaluating && wait.until <= self.now);
                        self.note("eval timeout");
                    }
                    NotifyOutcome::Superseded { by } => assert!(wait.lineage.unwrap().1 < by),
                }
            }
            Action::Release { identity } => {
                assert_eq!(self.current[&identity.model_id], identity.incarnation);
                let set = self.set_of(&identity.model_id);
                for life in self.members(set) {
                    let key = (life.peer.receiver.clone(), identity.model_id.clone());
                    let held = life.engine.get(&identity.model_id).filter(|_| self.live.contains_key(&key));
                    assert!(
                        held.is_none_or(|h| h.version >= identity.version),
                        "released what {life:?} needs"
                    );
                }
                self.note("released");
            }
            Action::BackPressure { model, ahead, wait, .. } => {
                assert!(
                    !wait || ahead > self.config.limits.max_ahead,
                    "BARRIER-11: {model} is {ahead} ahead"
                );
                if wait {
                    self.pressed.insert(model);
                    self.note("pressed");
                } else {
                    self.pressed.remove(&model);
                }
            }
            Action::Stalled { .. } => self.note("stalled"),
            // A report that was on its way when the version was published is believed until a receiver finds the version.
            Action::Absent { .. } => self.note("absent"),
            Action::Lagging { .. }
            | Action::BackingOff { .. }
            | Action::Superseded { .. }
            | Action::ServiceVersion { .. } => {}
        }
    }

    /// BARRIER-11: after a notify its trainer has been told to wait if it is too far ahead of what is served.
    fn judge_pressure(&self, model: &ModelId) {
        let set = self.set_of(model);
        // In a relaxed set each model is ahead of its own version, which is not known while others have none.
        if self.config.sets[set].mode == Mode::Relaxed {
            return;
        }
        let key = (model.clone(), self.current[model]);
        let served = self.served[set].as_ref().map(|s| s.version);
        let passed = served.max(self.highest_load.get(&key).copied());
        let told = self.pressed.contains(model);
        let sets = self.barrier.snapshot().sets;
        let models: Vec<_> = sets.iter().flat_map(|s| &s.groups).flat_map(|g| &g.models).collect();
        let doubted = |v: &Version| models.iter().any(|s| s.model == *model && s.absent.contains(v));
        let above = |v: &&Version| passed.is_none_or(|p| **v > p) && !doubted(v);
        let ahead = self.announced[&key].iter().filter(above).count();
        let newest = |m: &ModelId| models.iter().find(|s| s.model == *m).and_then(|s| s.newest);
        let behind = self.config.sets[set].models.iter().any(|m| newest(m) > newest(model));
        assert!(!(told && behind), "BARRIER-11: {model} is told to wait, and its set waits for it");
        let far = ahead > self.config.limits.max_ahead;
        assert!(told || behind || !far, "BARRIER-11: {model} is {ahead} ahead and goes on");
    }

    fn judge_wait(&self, wait: &OpenWait, served: &Served) {
        assert_eq!(self.barrier.service_version(&self.config.sets[wait.set].name), Ok(Some(served)));
        for identity in &served.identities {
            assert_eq!(self.current[&identity.model_id], identity.incarnation, "C95: a gate of the dead");
        }
        if let Some((model, incarnation)) = &wait.lineage {
            assert_eq!(self.current[model], *incarnation, "C95: a gate opened for the dead");
        }
    }

    /// Whether no receiver had to wait for this one to stage `version`.
    fn excused(&self, life: &Life, set: usize, version: Version) -> bool {
        self.models_in(life, set).into_iter().any(|model_id| {
            let incarnation = self.current[&model_id];
            let identity = Identity { model_id: model_id.clone(), incarnation, version };
            let late = life.asked.get(&identity).is_some_and(|t| t + self.config.limits.stage_ms <= self.now);
            let beyond =
                |i: &Identity| i.model_id == model_id && i.incarnation == incarnation && i.version >= version;
            late || life.broken.contains(&model_id)
                || life.failed.contains(&identity)
                || life.skipped.iter().any(beyond)
                || life.engine.values().any(|i| beyond(i) && i.version > version)
        })
    }

    fn need(&self, set: usize) -> usize {
        let config = &self.config.sets[set];
        let quorum = match config.required {
            Required::All => 1,
            Required::AtLeast(n) => n,
            Required::Percent(p) => (self.members(set).len() * p as usize).div_ceil(100),
        };
        quorum.max(config.floor)
    }

    /// Whether the receiver could load, or has loaded, `version` of all its models of the set.
    fn has_staged(&self, life: &Life, set: usize, version: Version) -> bool {
        self.models_in(life, set).into_iter().all(|model_id| {
            let identity = Identity { incarnation: self.current[&model_id], model_id, version };
            life.staged.contains_key(&identity) || life.engine.get(&identity.model_id) == Some(&identity)
        })
    }

    fn judge_load(&mut self, to: &Peer, identities: &[Identity]) {
        assert_eq!(self.joined.get(&to.receiver), Some(&to.session), "an order to a stranger");
        let version = identities[0].version;
        let set = self.set_of(&identities[0].model_id);
        self.judge_astray(set, "a load begins");
        let life = self.member(&to.receiver);
        for identity in identities {
            assert_eq!(identity.version, version, "C72: a mixed load");
            assert_eq!(self.current[&identity.model_id], identity.incarnation, "C95: loading the dead");
            let held = life.engine.get(&identity.model_id);
            assert!(
                held == Some(identity) || life.staged.contains_key(identity),
                "C72: a load of what is not there"
            );
            let back = held.filter(|h| h.incarnation == identity.incarnation && h.version > version);
            assert_eq!(back, None, "a step back within an incarnation");
        }
        if self.config.sets[set].mode == Mode::Strict {
            assert_eq!(identities.len(), self.models_in(life, set).len(), "C72: part of a set");
            let served = self.served[set].as_ref().map(|s| s.version);
            if !self.begun[set].contains_key(&version) && served != Some(version) {
                self.judge_first_load(set, version);
            }
        }
        self.begun[set].entry(version).or_insert(self.actions);
        if let Some(claims) = self.claims.get_mut(&to.receiver) {
            claims.retain(|c| identities.iter().all(|i| i.model_id != c.model_id));
        }
        for identity in identities {
            let key = (identity.model_id.clone(), identity.incarnation);
            let highest = self.highest_load.entry(key).or_default();
            *highest = (*highest).max(version);
        }
        self.note("loads");
    }

    /// C72: the first load of a version begins only when every required receiver has staged it.
    fn judge_first_load(&self, set: usize, version: Version) {
        let members = self.members(set);
        for model in &self.config.sets[set].models {
            let key = (model.clone(), self.current[model]);
            assert!(self.announced[&key].contains(&version), "C72: {model} has not announced {version}");
        }
        let staged = members.iter().filter(|l| self.has_staged(l, set, version)).count();
        assert!(staged >= self.need(set), "C72: {staged} of {} have staged {version}", self.need(set));
        if self.config.sets[set].required == Required::All {
            let none_live = !members.iter().any(|l| self.is_live(l, set));
            for life in members.iter().filter(|l| none_live || self.is_live(l, set)) {
                assert!(
                    self.has_staged(life, set, version) || self.excused(life, set, version),
                    "C72: load of {version} begins before {life:#?} has staged it",
                );
            }
        }
    }

    fn judge_sets(&mut self) {
        for set in 0..self.config.sets.len() {
            let config = &self.config.sets[set];
            let served = self.barrier.service_version(&config.name).unwrap().cloned();
            if let Some(now) = &served {
                for identity in &now.identities {
                    assert_eq!(
                        self.current[&identity.model_id], identity.incarnation,
                        "C95: serving the dead"
                    );
                    assert!(config.mode == Mode::Relaxed || identity.version == now.version);
                }
            }
            if served != self.served[set] {
                if let (Some(old), Some(new)) = (&self.served[set], &served) {
                    let era = |s: &Served| s.identities.iter().map(|i| i.incarnation).collect::<Vec<_>>();
                    assert!(era(old) != era(new) || old.version <= new.version, "served a step back");
                }
                let old = std::mem::replace(&mut self.served[set], served.clone());
                if let Some(new) = &served {
                    self.judge_astray(set, "a version is served");
                    self.judge_advance(set, old.as_ref(), new);
                    self.note("served");
                    if self.restarts > 0 {
                        self.note("served after a restart");
                    }
                }
            }
        }
    }

    /// C74: a version is served only when the required receivers have truly loaded it.
    fn judge_advance(&self, set: usize, old: Option<&Served>, served: &Served) {
        let config = &self.config.sets[set];
        let mut covered = BTreeSet::new();
        let mut count = 0;
        for life in self.members(set).into_iter().filter(|l| self.is_live(l, set)) {
            count += 1;
            for identity in &served.identities {
                let key = (life.peer.receiver.clone(), identity.model_id.clone());
                if self.live.contains_key(&key) {
                    covered.insert(identity.model_id.clone());
                    let Some(held) = life.engine.get(&identity.model_id) else {
                        // The load of something newer has failed since, and the word of it is on its way.
                        assert!(
                            life.paused.contains(&identity.model_id),
                            "an engine serves nothing: {life:#?}"
                        );
                        continue;
                    };
                    assert!(held.incarnation == identity.incarnation && held.version >= identity.version);
                }
            }
        }
        if config.mode == Mode::Strict {
            assert!(count >= self.need(set), "C74: {count} of {} have loaded {served:?}", self.need(set));
        }
        // In a relaxed set a model that did not move may have lost its receivers meanwhile.
        let moved = served.identities.iter().filter(|i| !old.is_some_and(|o| o.identities.contains(i)));
        for identity in moved {
            let old_and_relaxed = config.mode == Mode::Relaxed && old.is_none();
            assert!(old_and_relaxed || covered.contains(&identity.model_id), "C74: nobody serves {identity}");
        }
        if config.required != Required::All || config.mode == Mode::Relaxed {
            return;
        }
        // No receiver that kept up may be left behind, unless it went live after the load had begun.
        for (id, _, live_by) in self.left_behind.iter().filter(|(_, s, _)| *s == set) {
            let life = self.member(id);
            let begun = self.begun[set].get(&served.version);
            assert!(
                self.excused(life, set, served.version) || begun.is_none_or(|b| b < live_by),
                "C74: {id} was left behind by {served:?} without a reason: {life:#?}"
            );
        }
    }

    /// No live receiver that serves has a mixed set, a dead lineage or less than what is served.
    fn judge_live(&self) {
        for (index, config) in self.config.sets.iter().enumerate() {
            for life in self.members(index).into_iter().filter(|l| self.is_live(l, index)) {
                let mut models = self.models_in(life, index);
                let live = |m: &ModelId| self.live.contains_key(&(life.peer.receiver.clone(), m.clone()));
                models.retain(|m| live(m) && !life.paused.contains(m));
                if models.is_empty() {
                    continue;
                }
                let held: Vec<_> = models.iter().map(|m| life.engine.get(m)).collect();
                for held in held.iter().copied().flatten() {
                    assert_eq!(
                        self.current[&held.model_id], held.incarnation,
                        "C95: {life:?} serves the dead"
                    );
                }
                if config.mode == Mode::Strict {
                    let first = held[0].map(|i| i.version);
                    assert!(first.is_some(), "C77: live with nothing loaded");
                    assert!(held.iter().all(|h| h.map(|i| i.version) == first), "C72: {life:?} serves a mix");
                    assert!(
                        first >= self.served[index].as_ref().map(|s| s.version),
                        "C77: {life:?} is behind"
                    );
                }
            }
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
            let stuck = members.iter().any(|l| !l.skipped.is_empty());
            let enough =
                covered.len() == self.config.sets[set].models.len() && members.len() >= self.need(set);
            let Some(target) = self.target(set).filter(|_| enough && !stuck) else { continue };
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
