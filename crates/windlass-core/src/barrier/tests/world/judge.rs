//! The judge of the world: looks only at what was ordered and at what the receivers truly hold. It shares no bookkeeping with
//! the barrier.

use std::collections::BTreeSet;

use super::{Life, OpenWait, World};
use crate::barrier::*;
use crate::identity::{Identity, ModelId, Version};

impl World {
    /// BARRIER-1, BARRIER-3: every running receiver counts, whether the barrier knows of it or not.
    fn judge_astray(&self, set: usize, what: &str) {
        let missing = |id: &&ReceiverId| !self.models_in(&self.newest[*id], set).is_empty();
        let missing: Vec<_> = self.astray.iter().filter(missing).collect();
        assert!(missing.is_empty(), "C102: {what}, and {missing:?} have not joined since the restart");
    }

    /// BARRIER-14: when all orders and answers have arrived, a receiver keeps no staged version that the barrier has given up.
    pub(super) fn judge_kept(&self) {
        let sets = self.barrier.snapshot().sets;
        let members = || sets.iter().flat_map(|s| &s.groups).flat_map(|g| &g.members);
        let counts = |life: &Life, identity: &Identity| {
            let slots = members().filter(|m| m.receiver == life.peer.receiver).flat_map(|m| &m.slots);
            slots.filter(|s| s.model == identity.model_id).any(|s| s.staged.contains(&identity.version))
        };
        for life in self.newest.values().filter(|l| l.running) {
            if self.joined.get(&life.peer.receiver) != Some(&life.peer.session) {
                continue;
            }
            for identity in life.staged.keys() {
                if self.current.get(&identity.model_id) == Some(&identity.incarnation) {
                    assert!(
                        counts(life, identity),
                        "BARRIER-14: {life:#?} keeps {identity} for nothing: {sets:#?}"
                    );
                }
            }
        }
    }

    pub(super) fn judge(&mut self, actions: Vec<Action>) {
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
            Action::Abandon { to, .. } | Action::Drop { to, .. } => {
                self.edit(&to, |life| life.inbox.push(action));
            }
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
    pub(super) fn judge_pressure(&self, model: &ModelId) {
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

    pub(super) fn need(&self, set: usize) -> usize {
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
}
