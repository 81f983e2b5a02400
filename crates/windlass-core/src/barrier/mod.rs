//! Who may load which version when.
//!
//! DOCS

mod config;
mod error;
mod group;
mod member;
mod snapshot;
#[cfg(test)]
mod tests;
mod types;
mod waits;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;

pub use config::{Config, Limits, Mode, Required, SetConfig};
pub use error::BarrierError;
pub use snapshot::{
    GroupSnapshot, MemberSnapshot, ModelSnapshot, ReceiverSnapshot, RoundSnapshot, SetSnapshot, SlotSnapshot,
    Snapshot,
};
pub use types::{
    Action, Blocked, Event, EvictReason, FenceReason, GateFailure, LagReason, Millis, NotifyOutcome, Order,
    Peer, Phase, ReceiverId, Served, SetName, SyncNotify, WaitId,
};

use crate::identity::{Identity, Incarnation, ModelId, Version};
use group::Group;
use member::Ctx;
use waits::{NewWait, Waits};

/// The longest sender endpoint.
const MAX_ENDPOINT: usize = 1024;
/// Reasons from receivers are cut to this many characters.
const MAX_REASON: usize = 1000;

#[derive(Debug)]
struct Set {
    /// Where its groups are.
    groups: Range<usize>,
    served: Option<Served>,
    /// The sum of the groups' revisions that `served` was made from.
    revision: u64,
}

#[derive(Debug)]
struct Receiver {
    session: u64,
    seen: Millis,
    groups: Vec<usize>,
}

/// Where a model is kept track of.
#[derive(Clone, Copy, Debug)]
struct Place {
    set: usize,
    group: usize,
    model: usize,
}

/// The version barrier of all sets. See the module's documentation.
#[derive(Debug)]
pub struct Barrier {
    config: Config,
    now: Millis,
    sets: Vec<Set>,
    set_names: HashMap<SetName, usize>,
    groups: Vec<Group>,
    models: HashMap<ModelId, Place>,
    receivers: BTreeMap<ReceiverId, Receiver>,
    /// The last sessions of receivers that are gone, so that an echo of their join does not revive them.
    spent: VecDeque<(ReceiverId, u64)>,
    waits: Waits,
    last_order: u64,
    /// No deadline passes before this one.
    wake: Option<Millis>,
    /// Actions that were due when an event was refused.
    pending: Vec<Action>,
}

macro_rules! ctx {
    ($barrier:expr, $out:expr) => {
        &mut Ctx {
            now: $barrier.now,
            limits: &$barrier.config.limits,
            out: $out,
            last_order: &mut $barrier.last_order,
            wake: &mut $barrier.wake,
        }
    };
}

impl Barrier {
    /// A barrier that has heard of nobody yet.
    pub fn new(config: Config) -> Result<Barrier, BarrierError> {
        config.validate()?;
        let (mut sets, mut groups) = (Vec::new(), Vec::new());
        let (mut set_names, mut models) = (HashMap::new(), HashMap::new());
        for set in &config.sets {
            let first = groups.len();
            match set.mode {
                Mode::Strict => groups.push(Group::new(set, set.models.clone())),
                Mode::Relaxed => groups.extend(set.models.iter().map(|m| Group::new(set, vec![m.clone()]))),
            }
            for (group, g) in groups.iter().enumerate().skip(first) {
                for (model, id) in g.models.iter().enumerate() {
                    models.insert(id.clone(), Place { set: sets.len(), group, model });
                }
            }
            set_names.insert(set.name.clone(), sets.len());
            sets.push(Set { groups: first..groups.len(), served: None, revision: 0 });
        }
        Ok(Barrier {
            now: 0,
            waits: Waits::new(sets.len()),
            sets,
            set_names,
            groups,
            models,
            receivers: BTreeMap::new(),
            spent: VecDeque::new(),
            last_order: 0,
            wake: None,
            pending: Vec::new(),
            config,
        })
    }

    /// Takes in one event and says what to do about it.
    ///
    /// Deadlines that have passed by `now` are dealt with first. An event that is refused changes nothing
    /// (save that its sender is known to be alive); what was due before it comes with the next call, and
    /// [`Barrier::next_deadline`] asks for that call at once.
    pub fn step(&mut self, now: Millis, event: Event) -> Result<Vec<Action>, BarrierError> {
        let mut out = self.due(now);
        match self.apply(event, &mut out) {
            Ok(()) => Ok(out),
            Err(refused) => {
                self.pending = out;
                Err(refused)
            }
        }
    }

    /// Deals with every deadline that has passed by `now`. Calling it early or often is harmless.
    pub fn tick(&mut self, now: Millis) -> Vec<Action> {
        self.due(now)
    }

    /// When [`Barrier::tick`] must be called at the latest, if no event comes before. It may turn out that
    /// nothing was due then.
    pub fn next_deadline(&self) -> Option<Millis> {
        if self.pending.is_empty() { self.wake } else { Some(self.now) }
    }

    /// What a set serves; `None` before its first load and after an incarnation change.
    pub fn service_version(&self, set: &SetName) -> Result<Option<&Served>, BarrierError> {
        let index = self.set_names.get(set).ok_or_else(|| BarrierError::UnknownSet(set.clone()))?;
        Ok(self.sets.get(*index).and_then(|s| s.served.as_ref()))
    }

    /// Why a set does not serve a newer version.
    pub fn blocked(&self, set: &SetName) -> Result<Blocked, BarrierError> {
        let index = self.set_names.get(set).ok_or_else(|| BarrierError::UnknownSet(set.clone()))?;
        Ok(set_blocked(&self.sets, &self.groups, *index))
    }

    /// Everything there is to see.
    pub fn snapshot(&self) -> Snapshot {
        let sets = self.config.sets.iter().zip(&self.sets).map(|(config, set)| SetSnapshot {
            set: config.name.clone(),
            mode: config.mode,
            required: config.required,
            floor: config.floor,
            served: set.served.clone(),
            groups: self
                .groups
                .get(set.groups.clone())
                .unwrap_or_default()
                .iter()
                .map(GroupSnapshot::of)
                .collect(),
        });
        let receivers = self.receivers.iter().map(|(id, r)| ReceiverSnapshot {
            receiver: id.clone(),
            session: r.session,
            last_seen: r.seen,
        });
        Snapshot {
            now: self.now,
            sets: sets.collect(),
            receivers: receivers.collect(),
            waits: self.waits.len(),
        }
    }

    fn apply(&mut self, event: Event, out: &mut Vec<Action>) -> Result<(), BarrierError> {
        match event {
            Event::Notify { identity, sender_endpoint, sync } => {
                self.notify(&identity, &sender_endpoint, sync, out)
            }
            Event::Join { peer, models, has } => self.join(peer, &models, has, out),
            Event::Heartbeat { peer } => self.hear(&peer),
            Event::Staged { peer, order, identity } => self.answer(&peer, &identity, out, |g, m, ctx| {
                g.staged(&peer.receiver, m, order, &identity, ctx)
            }),
            Event::Loaded { peer, order, identity } => self.answer(&peer, &identity, out, |g, m, ctx| {
                g.loaded(&peer.receiver, m, order, &identity, ctx)
            }),
            Event::Failed { peer, order, identity, phase, reason } => {
                let reason = reason.chars().take(MAX_REASON).collect();
                self.answer(&peer, &identity, out, |g, m, ctx| match phase {
                    Phase::Staging => g.stage_failed(&peer.receiver, m, order, &identity, reason, ctx),
                    Phase::Loading => g.load_failed(&peer.receiver, m, order, &identity, reason, ctx),
                })
            }
            Event::Leave { peer } => {
                self.hear(&peer)?;
                self.evict(&peer.receiver, EvictReason::Left, out);
                self.advance_all(out);
                Ok(())
            }
            Event::GateWait { id, set, at_least, lineage, timeout } => {
                self.gate_wait(id, set, at_least, lineage, timeout, out)
            }
            Event::Cancel { id } => self.waits.cancel(id),
            Event::EvalDone { id, result } => self.waits.eval_done(id, result, out),
        }
    }

    // ---- trainers ---------------------------------------------------------------------------------

    fn place(&self, model: &ModelId) -> Result<Place, BarrierError> {
        self.models.get(model).copied().ok_or_else(|| BarrierError::UnknownModel(model.clone()))
    }

    fn notify(
        &mut self,
        identity: &Identity,
        endpoint: &str,
        sync: Option<SyncNotify>,
        out: &mut Vec<Action>,
    ) -> Result<(), BarrierError> {
        let place = self.place(&identity.model_id)?;
        if !(1..=MAX_ENDPOINT).contains(&endpoint.len()) {
            return Err(BarrierError::Endpoint { length: endpoint.len(), max: MAX_ENDPOINT });
        }
        if let Some(sync) = &sync {
            self.waits.check(sync.id, self.config.limits.max_waits)?;
        }
        let Some(group) = self.groups.get_mut(place.group) else { return Ok(()) };
        group.check_alive(place.model, identity)?;
        let before = group.lineage(place.model).map(|l| l.incarnation);
        group.notify(place.model, identity, endpoint, ctx!(self, out));
        if before != Some(identity.incarnation) {
            self.waits.supersede(&identity.model_id, identity.incarnation, out);
        }
        self.publish(place.set, out);
        if let Some(SyncNotify { id, eval, timeout }) = sync {
            let lineage = Some((identity.model_id.clone(), identity.incarnation));
            let (set, at_least) = (place.set, identity.version);
            self.wait(NewWait { id, set, at_least, lineage, timeout, notify: Some(eval) }, out);
        }
        Ok(())
    }

    // ---- receivers --------------------------------------------------------------------------------

    /// Checks that a message comes from the present life of a member, and notes that it is alive.
    fn hear(&mut self, peer: &Peer) -> Result<(), BarrierError> {
        let known = self.receivers.get_mut(&peer.receiver);
        let known = known.ok_or_else(|| BarrierError::UnknownReceiver(peer.receiver.clone()))?;
        if known.session != peer.session {
            return Err(stale_session(peer, known.session));
        }
        known.seen = self.now;
        Ok(())
    }

    fn join(
        &mut self,
        peer: Peer,
        models: &[ModelId],
        has: Vec<Identity>,
        out: &mut Vec<Action>,
    ) -> Result<(), BarrierError> {
        let id = peer.receiver.clone();
        match self.receivers.get(&id) {
            // An echo of the join that made it a member says no more than a heartbeat.
            Some(known) if known.session == peer.session => return self.hear(&peer),
            Some(known) if known.session > peer.session => return Err(stale_session(&peer, known.session)),
            Some(_) => {}
            None => {
                let spent = self.spent.iter().find(|(r, s)| *r == id && *s >= peer.session);
                if let Some((_, session)) = spent {
                    return Err(stale_session(&peer, *session));
                }
                let limit = self.config.limits.max_receivers;
                if self.receivers.len() >= limit {
                    return Err(BarrierError::TooManyReceivers { limit });
                }
            }
        }
        let slots = self.check_join(&id, models, has)?;
        if self.receivers.contains_key(&id) {
            self.evict(&id, EvictReason::Rejoined, out);
        }
        self.spent.retain(|(r, _)| *r != id);
        let receiver =
            Receiver { session: peer.session, seen: self.now, groups: slots.keys().copied().collect() };
        self.receivers.insert(id, receiver);
        ctx!(self, out).deadline(self.config.limits.heartbeat_ms);
        for (group, has) in slots {
            if let Some(g) = self.groups.get_mut(group) {
                g.join(peer.clone(), has, ctx!(self, out));
            }
        }
        self.advance_all(out);
        Ok(())
    }

    /// Sorts a join's models and what it has by group.
    fn check_join(
        &self,
        id: &ReceiverId,
        models: &[ModelId],
        has: Vec<Identity>,
    ) -> Result<BTreeMap<usize, Slots>, BarrierError> {
        let bad = |problem: String| BarrierError::BadJoin { receiver: id.clone(), problem };
        if models.is_empty() {
            return Err(bad("no models".to_owned()));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = models.iter().find(|m| !seen.insert(*m)) {
            return Err(bad(format!("model {twice} listed twice")));
        }
        let mut held = HashMap::new();
        for identity in has {
            let loaded = (identity.incarnation, identity.version);
            if !seen.contains(&identity.model_id) {
                return Err(bad(format!("{identity}, of a model it does not serve")));
            }
            if held.insert(identity.model_id.clone(), loaded).is_some() {
                return Err(bad(format!("two versions of model {}", identity.model_id)));
            }
        }
        let mut slots: BTreeMap<usize, Slots> = BTreeMap::new();
        for model in models {
            let place = self.place(model)?;
            slots.entry(place.group).or_default().push((place.model, held.get(model).copied()));
        }
        Ok(slots)
    }

    /// Takes a receiver out of everything. The groups it was in are to be advanced afterwards.
    fn evict(&mut self, id: &ReceiverId, why: EvictReason, out: &mut Vec<Action>) {
        let Some(gone) = self.receivers.remove(id) else { return };
        self.spent.push_back((id.clone(), gone.session));
        if self.spent.len() > self.config.limits.max_receivers {
            self.spent.pop_front();
        }
        out.push(Action::Evict { receiver: id.clone(), why });
        for group in gone.groups {
            if let Some(g) = self.groups.get_mut(group) {
                g.remove(id);
            }
        }
    }

    fn advance_all(&mut self, out: &mut Vec<Action>) {
        for group in &mut self.groups {
            group.advance(ctx!(self, out));
        }
        self.publish_all(out);
    }

    fn answer(
        &mut self,
        peer: &Peer,
        identity: &Identity,
        out: &mut Vec<Action>,
        apply: impl FnOnce(&mut Group, usize, &mut Ctx<'_>) -> Result<(), BarrierError>,
    ) -> Result<(), BarrierError> {
        self.hear(peer)?;
        let place = self.place(&identity.model_id)?;
        let Some(group) = self.groups.get_mut(place.group) else { return Ok(()) };
        apply(group, place.model, ctx!(self, out))?;
        self.publish(place.set, out);
        Ok(())
    }

    // ---- waits ------------------------------------------------------------------------------------

    fn gate_wait(
        &mut self,
        id: WaitId,
        set: SetName,
        at_least: Version,
        lineage: Option<(ModelId, Incarnation)>,
        timeout: Millis,
        out: &mut Vec<Action>,
    ) -> Result<(), BarrierError> {
        let index = *self.set_names.get(&set).ok_or_else(|| BarrierError::UnknownSet(set.clone()))?;
        self.waits.check(id, self.config.limits.max_waits)?;
        if let Some((model, got)) = &lineage {
            let place = self.place(model)?;
            if place.set != index {
                return Err(BarrierError::NotInSet { model: model.clone(), set });
            }
            let current = self.groups.get(place.group).and_then(|g| g.lineage(place.model));
            if let Some(current) = current.map(|l| l.incarnation).filter(|c| c > got) {
                return Err(BarrierError::StaleWaiter { model: model.clone(), got: *got, current });
            }
        }
        self.wait(NewWait { id, set: index, at_least, lineage, timeout, notify: None }, out);
        Ok(())
    }

    fn wait(&mut self, new: NewWait, out: &mut Vec<Action>) {
        let (set, timeout) = (new.set, new.timeout);
        let until = ctx!(self, out).deadline(timeout.min(self.config.limits.max_wait_ms));
        self.waits.add(new, until);
        self.answer_waits(set, out);
        if timeout == 0 {
            self.expire_waits(out);
        }
    }

    fn answer_waits(&mut self, set: usize, out: &mut Vec<Action>) {
        let Some(served) = self.sets.get(set).and_then(|s| s.served.as_ref()) else { return };
        let eval_ms = self.config.limits.eval_ms;
        if self.waits.serve(set, served, self.now.saturating_add(eval_ms), out) {
            ctx!(self, out).deadline(eval_ms);
        }
    }

    fn expire_waits(&mut self, out: &mut Vec<Action>) {
        let (sets, groups) = (&self.sets, &self.groups);
        let state = |set: usize| {
            let service = sets.get(set).and_then(|s| s.served.as_ref()).map(|s| s.version);
            (service, set_blocked(sets, groups, set))
        };
        self.waits.expire(self.now, state, out);
    }

    // ---- sets and time ----------------------------------------------------------------------------

    fn publish_all(&mut self, out: &mut Vec<Action>) {
        (0..self.sets.len()).for_each(|set| self.publish(set, out));
    }

    /// Tells the world when what a set serves has changed.
    fn publish(&mut self, index: usize, out: &mut Vec<Action>) {
        let Some(set) = self.sets.get_mut(index) else { return };
        let groups = self.groups.get(set.groups.clone()).unwrap_or_default();
        let revision = groups.iter().map(|g| g.revision).sum();
        if set.revision == revision {
            return;
        }
        set.revision = revision;
        let served = served(groups);
        if served == set.served {
            return;
        }
        set.served.clone_from(&served);
        if let Some(config) = self.config.sets.get(index) {
            out.push(Action::ServiceVersion { set: config.name.clone(), served });
        }
        self.answer_waits(index, out);
    }

    /// Whatever is due by `now`, and what an earlier refusal left behind.
    fn due(&mut self, now: Millis) -> Vec<Action> {
        self.now = self.now.max(now);
        let mut out = std::mem::take(&mut self.pending);
        if self.wake.is_none_or(|wake| wake > self.now) {
            return out;
        }
        let oldest = |r: &Receiver, span: Millis| r.seen.saturating_add(span);
        let heartbeat_ms = self.config.limits.heartbeat_ms;
        let silent = self.receivers.iter().filter(|(_, r)| oldest(r, heartbeat_ms) <= self.now);
        let silent: Vec<_> = silent.map(|(id, _)| id.clone()).collect();
        for id in silent {
            self.evict(&id, EvictReason::Silent, &mut out);
        }
        for group in &mut self.groups {
            group.tick(ctx!(self, &mut out));
        }
        self.publish_all(&mut out);
        self.expire_waits(&mut out);
        let history_ms = self.config.limits.history_ms;
        let groups = self.groups.iter().filter_map(|g| g.next_deadline(self.now, history_ms));
        let receivers = self.receivers.values().map(|r| oldest(r, heartbeat_ms));
        self.wake = groups.chain(receivers).chain(self.waits.next_deadline()).min();
        out
    }
}

/// A member's models in one group, and what its engines hold of each.
type Slots = Vec<(usize, Option<(Incarnation, Version)>)>;

fn stale_session(peer: &Peer, known: u64) -> BarrierError {
    BarrierError::StaleSession { receiver: peer.receiver.clone(), got: peer.session, known }
}

/// What a set serves: as much as its slowest group.
fn served(groups: &[Group]) -> Option<Served> {
    let mut served = Served { version: Version::MAX, identities: Vec::new() };
    for group in groups {
        let version = group.service?;
        served.version = served.version.min(version);
        for (model, lineage) in group.models.iter().zip(&group.lineages) {
            let incarnation = lineage.as_ref()?.incarnation;
            served.identities.push(Identity { model_id: model.clone(), incarnation, version });
        }
    }
    Some(served)
}

/// What holds a set up: the first of its groups that is not up to date.
fn set_blocked(sets: &[Set], groups: &[Group], set: usize) -> Blocked {
    let groups = sets.get(set).and_then(|s| groups.get(s.groups.clone())).unwrap_or_default();
    groups.iter().map(Group::blocked).find(|b| *b != Blocked::UpToDate).unwrap_or(Blocked::UpToDate)
}
