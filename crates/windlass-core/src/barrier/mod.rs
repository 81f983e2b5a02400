//! Decides which receiver may load which version, and when.
//!
//! The core of the controller as a state machine: [`Barrier::step`] takes one [`Event`] and the time and returns
//! [`Action`]s; [`Barrier::tick`] takes only the time. It owns the version barrier of every model set, the
//! pool of receivers and the versions they hold, the service version, and the open waits. The controller calls it and
//! carries out the actions. It must not know clocks, sockets or threads. Events are its only input, so a test can try every
//! interleaving.
//!
//! # Terms
//!
//! A *set* is a list of models that are served together (actor and verifier). Sets are independent. A
//! *member* is a receiver that has joined, seen from one set; it is *live* when it may serve the set. A
//! *lineage* is one incarnation of one model, with the versions it has announced. A *round* takes one
//! version from announced to served. An *order* is a numbered `Stage` or `Load` to one receiver.
//!
//! # A round
//!
//! ```text
//!  Notify(actor, 7) ─► Stage to all          Notify(verifier, 7) ─► Stage to all, round 7 opens
//!                         │ Staged …                                  │ Staged …
//!                         └───────────────► all required are ready ◄──┘
//!                                                   │ Load (all models of the set, one order each receiver)
//!                                                   ▼
//!                                       all required have loaded ─► service_version 7, GoLive, OpenGate
//! ```
//!
//! **Target.** A version can be loaded when every model of the set has announced exactly that version. A
//! round opens for the highest such version above the served one. The barrier orders receivers to stage a version as
//! soon as its own model announces it, up to `max_ahead` versions past the round, because models are seldom
//! equally fast. Staged versions queue at the receiver.
//!
//! **Newer versions.** While no member is ready for its version, a round gives way to a newer common version, at most
//! `max_ahead` times in a row. The older version is skipped and its orders are abandoned. Once a member is ready, the round
//! is carried through; otherwise trainers that are faster than the slowest receiver would move the target for ever. The
//! exception: if the ready members are too few and no other can become ready, the round gives way. A load that has begun is
//! finished first. A round that is past its deadline gives way as soon as no load is open. The newest common version is
//! next, and the versions between are skipped. Within an incarnation nothing goes back: once a load of a version has begun,
//! no lower version is loaded again.
//!
//! **Required.** With [`Required::All`] the round waits for every live member; while none is live (at the
//! start, or after an incarnation change), for every member. A member is *excused* from a round when its
//! staging fails, exceeds its deadline or brings a newer version, when its load fails or expires, and when
//! it has already passed the version. With a quorum the round waits for that many members, live or not. In any case at
//! least `floor` members must be ready, and among them one for each model. Until then nothing moves, and
//! [`Action::Stalled`] names what is missing. Without receivers nothing is served and gates time out.
//!
//! **Live.** A member is live exactly while every model it serves has loaded one and the same version of the
//! current lineages, and that version is not below the served one (a load under way does not change it).
//! So a receiver whose staging fails stays live until the others move on. A receiver whose load fails, or exceeds
//! its deadline, is fenced at once. A receiver that lags is fenced when the others have moved on. All of them, and
//! new members, return in the same way: stage, load, [`Action::GoLive`]. No round waits for them.
//!
//! **Failures.** After a failure the barrier sends the receiver no order for `retry_ms`. The delay doubles with each further
//! failure in a row, up to `retry_cap_ms`, less a share that differs by receiver ([`crate::backoff`]). Staging the same
//! model resets a failed stage, a load resets everything, and a newer announced version is tried as after a first failure.
//!
//! **Absent versions.** If the agent does not show a version that its trainer announced, or no agent answers at the announced
//! endpoint ([`Event::Absent`]), and no receiver has the version, it does not count as announced, and neither does its
//! endpoint. Its round ends, and any other version may be served, including a lower
//! one, because no load of it has begun. While the receivers have nothing else to stage they ask for it again. When the
//! trainer announces it again, or a receiver finds it, it counts again. [`Blocked::Absent`] and [`Action::Absent`] report it.
//!
//! **Relaxed** sets have one such round per model, without the first phase: each receiver loads what it has staged. The
//! set serves the lowest of its models' versions.
//!
//! # Incarnations
//!
//! The first notify of a newer incarnation voids everything of the older one: staged versions, open orders,
//! and the versions that engines have loaded. The set serves nothing (`service_version` is `None`), all its members
//! are fenced, and the set starts over, possibly at a lower version. Models of the set that were not resumed
//! keep their lineage and do not go back in it, so the resumed model must first reach the version they have loaded;
//! [`Blocked::NoCommonVersion`] reports this. Waits of the superseded incarnation fail; waits without a
//! lineage follow the new one.
//!
//! # Trust
//!
//! The barrier believes a receiver about itself, only in its present session and only about open orders. An
//! order is closed by its answer, its deadline, [`Action::Abandon`], an incarnation change or a new session.
//! A load with an unknown outcome leaves the engines' state unknown until a later order succeeds.
//! The versions that a receiver has when it joins count as announced in a lineage that a trainer has confirmed. From these
//! joins and the next notifies a restarted controller rebuilds its state.
//!
//! **A new barrier** does not know the receivers. Receivers that outlived its predecessor join again within
//! `settle_ms` of its first call ([`Limits::rejoin_ms`] bounds their delay). Until then versions are staged, but no
//! load begins, nothing is served and no gate opens, because the rules above speak of members and some members are still
//! missing. [`Blocked::Settling`] reports this.
//!
//! # Invariants
//!
//! The tests at the end of this file prove them.
//!
//! - BARRIER-1 (C72) In a strict set no load of a version begins before every required member has staged it for all
//!   its models, and every model of the set has announced it. A load order names the whole set. A new barrier waits for
//!   receivers that outlived its predecessor.
//! - BARRIER-2 (C72) No live member that serves has a mix of versions of a strict set.
//! - BARRIER-3 (C74) The served version advances only when the required members have loaded it, at least `floor` of
//!   them, and each model has one. A gate opens exactly when the version it waits for is served.
//! - BARRIER-4 (C77) No member is live before it has loaded the served version; a member that has loaded one model and
//!   failed another is fenced at once.
//! - BARRIER-5 (C95) Nothing of a superseded incarnation is staged, loaded, counted, served or waited for.
//! - BARRIER-6 Within an incarnation neither a receiver nor the served version goes back.
//! - BARRIER-7 (C83) A receiver that joins, leaves, fails, lags or dies delays the others until a deadline at most.
//! - BARRIER-8 (W-7) Every order, round, wait and silence has a deadline, and every wait exactly one answer.
//! - BARRIER-9 If receivers answer, the set eventually serves the newest common version that its agents show, and all
//!   members are live. A falsely announced version is named and blocks nothing for ever.
//! - BARRIER-10 (W-9) A stale message (session, order, incarnation) changes nothing and is refused by name.
//! - BARRIER-11 (C72) A trainer more than `max_ahead` versions ahead of the served one is told to wait, unless another model
//!   of its set is at a newer version, which only it can reach. History is released when no member has a claim on it, or
//!   the claim has expired.
//! - BARRIER-12 (C46, C71, C76) One notify becomes one order per receiver and model; a repeated or reordered one
//!   becomes none. Failures name the receiver.
//! - BARRIER-13 (C73) A synchronous notify is answered after the load, with the eval's result if one was requested.
//! - BARRIER-14 A receiver is told of every staged version that it need not keep any longer ([`Action::Drop`]), so that image
//!   bytes never wait in vain for one to be loaded.

mod config;
mod error;
mod group;
mod member;
mod name;
mod round;
mod snapshot;
mod tally;
#[cfg(test)]
mod tests;
mod types;
mod waits;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;

pub use config::{Config, Limits, Mode, Required, SetConfig};
pub use error::BarrierError;
pub use name::{NameError, ReceiverId, SetName};
pub use snapshot::{
    Awaited, GroupSnapshot, MemberSnapshot, ModelSnapshot, ReceiverSnapshot, RoundSnapshot, SetSnapshot,
    SlotSnapshot, Snapshot, WaitSnapshot,
};
pub use types::{
    Action, Blocked, Event, EvictReason, FenceReason, GateFailure, LagReason, Millis, NotifyOutcome, Order,
    Peer, Phase, Served, SyncNotify, WaitId,
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

/// The position of a model.
#[derive(Clone, Copy, Debug)]
struct ModelIndex {
    set: usize,
    group: usize,
    model: usize,
}

/// The version barrier of all sets.
#[derive(Debug)]
pub struct Barrier {
    config: Config,
    now: Millis,
    sets: Vec<Set>,
    set_names: HashMap<SetName, usize>,
    groups: Vec<Group>,
    models: HashMap<ModelId, ModelIndex>,
    receivers: BTreeMap<ReceiverId, Receiver>,
    /// The last sessions of receivers that are gone, so that a repeated join does not revive them.
    spent: VecDeque<(ReceiverId, u64)>,
    waits: Waits,
    /// How much of [`Limits::settle_ms`] is left, and until when it was counted.
    unsettled: Millis,
    counted: Option<Millis>,
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
    /// A barrier without members.
    pub fn new(config: Config) -> Result<Barrier, BarrierError> {
        config.validate()?;
        let mut barrier = Barrier::without_sets(config.limits)?;
        for set in config.sets {
            barrier.place_set(set);
        }
        Ok(barrier)
    }

    /// A barrier whose sets are all added later, by [`Barrier::add_set`].
    pub fn without_sets(limits: Limits) -> Result<Barrier, BarrierError> {
        limits.validate()?;
        Ok(Barrier {
            now: 0,
            sets: Vec::new(),
            set_names: HashMap::new(),
            groups: Vec::new(),
            models: HashMap::new(),
            receivers: BTreeMap::new(),
            spent: VecDeque::new(),
            waits: Waits::default(),
            unsettled: limits.settle_ms,
            counted: None,
            last_order: 0,
            wake: None,
            pending: Vec::new(),
            config: Config { sets: Vec::new(), limits },
        })
    }

    /// Adds a set of models that no other set has. Present members serve none of them until they
    /// join again. A refused set changes nothing.
    pub fn add_set(&mut self, set: SetConfig) -> Result<(), BarrierError> {
        set.validate()?;
        if self.set_names.contains_key(&set.name) {
            return Err(BarrierError::DuplicateSet(set.name));
        }
        if let Some(taken) = set.models.iter().find(|m| self.models.contains_key(*m)) {
            return Err(BarrierError::DuplicateModel(taken.clone()));
        }
        if self.sets.len() >= Config::MAX_SETS {
            return Err(BarrierError::TooManySets { limit: Config::MAX_SETS });
        }
        self.place_set(set);
        Ok(())
    }

    fn place_set(&mut self, set: SetConfig) {
        let (first, index) = (self.groups.len(), self.sets.len());
        let group = |models| Group::new(&set, models, self.unsettled > 0);
        match set.mode {
            Mode::Strict => self.groups.push(group(set.models.clone())),
            Mode::Relaxed => self.groups.extend(set.models.iter().map(|m| group(vec![m.clone()]))),
        }
        for (group, g) in self.groups.iter().enumerate().skip(first) {
            for (model, id) in g.models.iter().enumerate() {
                self.models.insert(id.clone(), ModelIndex { set: index, group, model });
            }
        }
        self.set_names.insert(set.name.clone(), index);
        self.sets.push(Set { groups: first..self.groups.len(), served: None, revision: 0 });
        self.waits.add_set();
        self.config.sets.push(set);
    }

    /// Handles one event and returns the actions to carry out.
    ///
    /// Deadlines that have passed by `now` are handled first. A refused event changes nothing, except that its sender
    /// counts as alive. Actions that were due before it come with the next call, and
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

    /// Handles every deadline that has passed by `now`. Calling it early or often is harmless.
    pub fn tick(&mut self, now: Millis) -> Vec<Action> {
        self.due(now)
    }

    /// The latest time for the next call of [`Barrier::tick`], if no event comes before. Possibly nothing is due then.
    pub fn next_deadline(&self) -> Option<Millis> {
        if self.pending.is_empty() { self.wake } else { Some(self.now) }
    }

    /// The served version of a set; `None` before its first load and after an incarnation change.
    pub fn service_version(&self, set: &SetName) -> Result<Option<&Served>, BarrierError> {
        let index = self.set_names.get(set).ok_or_else(|| self.unknown_set(set))?;
        Ok(self.sets.get(*index).and_then(|s| s.served.as_ref()))
    }

    /// The names of all sets, in the order of the configuration.
    pub fn sets(&self) -> impl Iterator<Item = &SetName> {
        self.config.sets.iter().map(|s| &s.name)
    }

    pub fn set_of(&self, model: &ModelId) -> Result<&SetName, BarrierError> {
        let set = self.place(model)?.set;
        let name = self.config.sets.get(set).map(|s| &s.name);
        name.ok_or_else(|| self.unknown_model(model))
    }

    /// How many announced versions of a model are not served yet, and whether its trainer has been told to wait.
    pub fn ahead(&self, model: &ModelId) -> Result<(usize, bool), BarrierError> {
        let place = self.place(model)?;
        let group = self.groups.get(place.group);
        Ok(group.map_or((0, false), |g| {
            (g.ahead(place.model), g.lineage(place.model).is_some_and(|l| l.pressed))
        }))
    }

    /// Why a set does not serve a newer version.
    pub fn blocked(&self, set: &SetName) -> Result<Blocked, BarrierError> {
        let index = self.set_names.get(set).ok_or_else(|| self.unknown_set(set))?;
        Ok(set_blocked(&self.sets, &self.groups, *index))
    }

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
            waiting: self
                .waits
                .snapshot(Snapshot::MAX_WAITING, |set| Some(self.config.sets.get(set)?.name.clone())),
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
            Event::Absent { peer, order, identity } => self.answer(&peer, &identity, out, |g, m, ctx| {
                g.absent(&peer.receiver, m, order, &identity, ctx)
            }),
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

    fn place(&self, model: &ModelId) -> Result<ModelIndex, BarrierError> {
        self.models.get(model).copied().ok_or_else(|| self.unknown_model(model))
    }

    fn unknown_model(&self, model: &ModelId) -> BarrierError {
        let known = self.config.sets.iter().flat_map(|s| s.models.iter().cloned()).collect();
        BarrierError::UnknownModel { model: model.clone(), known }
    }

    fn unknown_set(&self, set: &SetName) -> BarrierError {
        BarrierError::UnknownSet { set: set.clone(), known: self.sets().cloned().collect() }
    }

    fn notify(
        &mut self,
        identity: &Identity,
        endpoint: &str,
        sync: Option<SyncNotify>,
        out: &mut Vec<Action>,
    ) -> Result<(), BarrierError> {
        if !(1..=MAX_ENDPOINT).contains(&endpoint.len()) {
            return Err(BarrierError::Endpoint { length: endpoint.len(), max: MAX_ENDPOINT });
        }
        if let Some(sync) = &sync {
            self.waits.check(sync.id, self.config.limits.max_waits)?;
        }
        // Checked last: a caller that adds a set for an unknown model does not do so for a notify that is refused anyway.
        let place = self.place(&identity.model_id)?;
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

    /// Checks that a message comes from the current session of a member, and notes that the member is alive.
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
            // A repeated join of the current session counts as a heartbeat.
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

    /// Sorts the models of a join, and the versions it has, by group.
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

    /// Removes a receiver from all its groups. The caller advances the groups afterwards.
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
        let index = *self.set_names.get(&set).ok_or_else(|| self.unknown_set(&set))?;
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
        self.waits.add(new, self.now, until);
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

    /// Reports a change of the served version of a set.
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

    /// All actions due by `now`, and those left over from an earlier refusal.
    fn due(&mut self, now: Millis) -> Vec<Action> {
        self.now = self.now.max(now);
        let mut out = std::mem::take(&mut self.pending);
        let settled = self.settle();
        if !settled && self.wake.is_none_or(|wake| wake > self.now) {
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
            if settled {
                group.settled(ctx!(self, &mut out));
            }
            group.tick(ctx!(self, &mut out));
        }
        self.publish_all(&mut out);
        self.expire_waits(&mut out);
        let history_ms = self.config.limits.history_ms;
        let groups = self.groups.iter().filter_map(|g| g.next_deadline(self.now, history_ms));
        let receivers = self.receivers.values().map(|r| oldest(r, heartbeat_ms));
        let settles = (self.unsettled > 0).then(|| self.now.saturating_add(self.stride()));
        self.wake = groups.chain(receivers).chain(self.waits.next_deadline()).chain(settles).min();
        out
    }

    /// Counts down `settle_ms`. Returns whether it has just ended.
    ///
    /// One call counts for a stride at most: while the controller slept, no receiver could join.
    fn settle(&mut self) -> bool {
        let passed = self.counted.replace(self.now).map_or(0, |then| self.now - then);
        if self.unsettled == 0 {
            return false;
        }
        let stride = self.stride();
        self.unsettled = self.unsettled.saturating_sub(passed.min(stride));
        if self.unsettled == 0 {
            return true;
        }
        let at = self.now.saturating_add(stride);
        self.wake = Some(self.wake.map_or(at, |w| w.min(at)));
        false
    }

    fn stride(&self) -> Millis {
        (self.config.limits.settle_ms / 8).clamp(1, self.unsettled.max(1))
    }
}

/// A member's models in one group, and the version its engines hold of each.
type Slots = Vec<(usize, Option<(Incarnation, Version)>)>;

fn stale_session(peer: &Peer, known: u64) -> BarrierError {
    BarrierError::StaleSession { receiver: peer.receiver.clone(), got: peer.session, known }
}

/// The served version of a set: that of its slowest group.
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

/// What blocks a set: the first of its groups that is not up to date. If all are, the relaxed models that
/// serve less than another one.
fn set_blocked(sets: &[Set], groups: &[Group], set: usize) -> Blocked {
    let groups = sets.get(set).and_then(|s| groups.get(s.groups.clone())).unwrap_or_default();
    if let Some(why) = groups.iter().map(Group::blocked).find(|b| *b != Blocked::UpToDate) {
        return why;
    }
    let newest = groups.iter().filter_map(|g| g.service).max();
    let behind = groups.iter().filter(|g| g.service < newest);
    let missing: Vec<_> = behind.flat_map(|g| g.models.iter().cloned()).collect();
    match newest {
        Some(version) if !missing.is_empty() => Blocked::Unmatched { version, missing },
        Some(_) | None => Blocked::UpToDate,
    }
}

// The tests that prove the invariants, besides `no_interleaving_breaks_the_barrier`, which checks BARRIER-1 to BARRIER-11
// in random interleavings (and `random_interleavings_reach_what_they_are_meant_to_test`):
//
// BARRIER-1  strict_barrier_loads_nothing_before_all_receivers_have_staged_both_models,
//      relaxed_set_loads_each_model_as_it_comes, sets_are_independent_of_each_other,
//      new_barrier_neither_loads_nor_serves_before_its_roster_has_settled,
//      time_that_the_controller_slept_through_does_not_settle_the_roster
// BARRIER-2  failing_one_model_of_two_fences_the_receiver_at_once_and_it_returns_by_catching_up,
//      loading_another_version_than_ordered_is_a_failed_load
// BARRIER-3  service_version_advances_and_gates_open_only_when_the_last_required_receiver_has_loaded,
//      quorum_does_not_wait_and_laggards_are_out_until_they_have_loaded,
//      percentage_quorum_counts_all_members_rounded_up, below_the_floor_nothing_advances_and_it_is_reported,
//      model_that_no_ready_receiver_serves_holds_the_set_up,
//      receivers_that_fall_silent_together_do_not_vouch_for_each_other
// BARRIER-4  joining_receiver_catches_up_before_it_is_live_without_delaying_others,
//      failing_one_model_of_two_fences_the_receiver_at_once_and_it_returns_by_catching_up
// BARRIER-5  resumed_trainer_supersedes_its_dead_self, load_of_a_dead_lineage_that_finishes_late_does_not_count
// BARRIER-6  a_lost_answer_to_a_load_does_not_lead_back_to_the_version_before,
//      resumed_actor_waits_until_it_reaches_what_its_verifier_has_loaded,
//      newer_announcements_skip_versions_that_no_receiver_has_staged
// BARRIER-7  silent_receiver_is_evicted_without_disturbing_others_and_may_come_back,
//      load_that_runs_past_its_deadline_fences_the_receiver,
//      failed_staging_excuses_the_receiver_but_leaves_it_live_until_others_move_on,
//      receiver_that_got_a_newer_version_waits_for_the_others_there,
//      receiver_that_keeps_failing_is_asked_less_and_less_often_up_to_the_cap, success_resets_the_backoff,
//      staging_does_not_make_up_for_loads_that_fail
// BARRIER-8  without_receivers_the_gate_waits_until_its_deadline_and_says_why,
//      waits_are_bounded_unique_and_cancellable, refused_event_does_not_swallow_what_was_due_before_it,
//      time_that_steps_back_is_not_believed
// BARRIER-9  round_that_no_receiver_can_make_ready_gives_way_at_once,
//      staged_version_is_loaded_before_newer_ones_so_that_rounds_end,
//      restarted_controller_rebuilds_from_joins_and_the_next_notify,
//      version_that_no_agent_shows_is_named_and_gives_way_to_lower_ones,
//      false_announcement_of_another_endpoint_does_not_lead_receivers_there_for_ever,
//      a_receiver_keeps_its_orders_when_another_asks_again_for_a_false_announcement,
//      every_absent_version_is_asked_for_again_in_turn,
//      version_that_is_shown_late_is_loaded_after_all
// BARRIER-10 messages_of_an_earlier_session_are_refused, answer_to_an_earlier_attempt_does_not_count_for_the_next,
//      malformed_messages_are_refused_by_name
// BARRIER-11 trainer_that_runs_ahead_is_told_to_wait_and_later_to_go_on,
//      history_is_released_only_when_no_receiver_has_a_claim_on_it,
//      claim_on_history_expires_when_its_holder_has_been_out_of_the_pool_for_too_long
// BARRIER-12 three_hundred_receivers_of_eight_models_take_one_order_each_per_model,
//      sender_that_moved_is_asked_at_its_new_address_without_losing_what_is_staged,
//      staged_bytes_are_not_abandoned_when_another_order_for_them_is_open
// BARRIER-13 synchronous_notify_answers_after_the_load_with_the_results_of_the_eval,
//      eval_that_never_ends_is_given_up_at_its_deadline,
//      trainer_that_ran_ahead_alone_is_told_which_models_are_missing
// BARRIER-14 staged_versions_that_are_given_up_are_called_off, no_interleaving_breaks_the_barrier
//
// Sets that come later: set_added_later_is_as_good_as_one_configured, set_that_is_refused_changes_nothing
