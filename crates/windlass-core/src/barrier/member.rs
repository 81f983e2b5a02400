//! One receiver in one group: the versions it holds, its open orders, and its next orders.
//!
//! A member knows nothing of the other members. It looks at the group through a [`View`] and decides for
//! itself which orders it needs next ([`Member::pursue`]).

use std::collections::{BTreeMap, BTreeSet};

use crate::backoff::{Backoff, Span};
use crate::barrier::config::Limits;
use crate::barrier::name::SetName;
use crate::barrier::types::{Action, Millis, Order, Peer, Phase};
use crate::digest::splitmix;
use crate::identity::{Identity, Incarnation, ModelId, Version};

/// The context of one call of the barrier: the time, the limits, and where its effects go.
pub(super) struct Ctx<'a> {
    pub(super) now: Millis,
    pub(super) limits: &'a Limits,
    pub(super) out: &'a mut Vec<Action>,
    pub(super) last_order: &'a mut u64,
    pub(super) wake: &'a mut Option<Millis>,
}

impl Ctx<'_> {
    /// A deadline this far from now; [`Barrier::next_deadline`](super::Barrier::next_deadline) will include it.
    pub(super) fn deadline(&mut self, span: Millis) -> Millis {
        let at = self.now.saturating_add(span);
        *self.wake = Some(self.wake.map_or(at, |w| w.min(at)));
        at
    }

    fn order(&mut self) -> Order {
        *self.last_order += 1;
        Order(*self.last_order)
    }
}

/// One incarnation of one model's publisher, and the versions it has announced.
#[derive(Debug)]
pub(super) struct Lineage {
    pub(super) incarnation: Incarnation,
    /// Where its agent is, by the version with which it was announced to be there.
    pub(super) endpoints: BTreeMap<Version, String>,
    /// Announced versions that may still be loaded; the newest [`Lineage::MAX_ANNOUNCED`] of them.
    pub(super) announced: BTreeSet<Version>,
    /// Those among them that the agent does not show.
    pub(super) absent: BTreeSet<Version>,
    /// The highest version a load of which has begun. Nothing below it is loaded any more.
    pub(super) low: Version,
    /// The trainer has been told to wait.
    pub(super) pressed: bool,
    /// The version last released.
    pub(super) released: Option<Version>,
}

impl Lineage {
    /// Bounds memory when a trainer ignores back-pressure; the oldest are forgotten first.
    const MAX_ANNOUNCED: usize = 1024;

    pub(super) fn new(incarnation: Incarnation, endpoint: String) -> Lineage {
        let (announced, absent, endpoints) = (BTreeSet::new(), BTreeSet::new(), [(0, endpoint)].into());
        Lineage { incarnation, endpoints, announced, absent, low: 0, pressed: false, released: None }
    }

    /// Its agent was announced at `endpoint` together with `version`.
    pub(super) fn move_to(&mut self, version: Version, endpoint: &str) {
        self.endpoints.insert(version, endpoint.to_owned());
        if self.endpoints.len() > Self::MAX_ANNOUNCED
            && self.endpoints.pop_first().is_some()
            && let Some((_, oldest)) = self.endpoints.pop_first()
        {
            self.endpoints.insert(0, oldest);
        }
    }

    /// Where its agent is, as far as versions that are not absent tell.
    pub(super) fn endpoint(&self) -> &str {
        self.announced_at(self.newest().unwrap_or(self.low))
    }

    /// Where to ask for `version`. An absent version may have been announced falsely, and its endpoint with it.
    pub(super) fn endpoint_of(&self, version: Version) -> &str {
        if self.absent.contains(&version) { self.announced_at(version) } else { self.endpoint() }
    }

    fn announced_at(&self, version: Version) -> &str {
        let (_, endpoint) = self.endpoints.range(..=version).next_back().unzip();
        endpoint.map_or("", String::as_str)
    }

    /// The newest announced version that is not known to be absent.
    pub(super) fn newest(&self) -> Option<Version> {
        self.announced.iter().rev().find(|v| !self.absent.contains(v)).copied()
    }

    /// A load of `version` has begun: nothing below it counts any more.
    pub(super) fn raise_low(&mut self, version: Version) {
        if self.low < version {
            self.low = version;
            let endpoint = self.announced_at(version).to_owned();
            self.announced = self.announced.split_off(&version);
            self.absent = self.absent.split_off(&version);
            self.endpoints = self.endpoints.split_off(&version);
            self.endpoints.entry(version).or_insert(endpoint);
        }
    }

    pub(super) fn announce(&mut self, version: Version) {
        self.absent.remove(&version);
        if version >= self.low
            && self.announced.insert(version)
            && self.announced.len() > Self::MAX_ANNOUNCED
            && let Some(oldest) = self.announced.pop_first()
        {
            self.absent.remove(&oldest);
        }
    }
}

/// A member's view of its group.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) set: &'a SetName,
    pub(super) models: &'a [ModelId],
    pub(super) lineages: &'a [Option<Lineage>],
    pub(super) service: Option<Version>,
    pub(super) settling: bool,
    pub(super) round: Option<(Version, Phase)>,
}

impl<'a> View<'a> {
    fn lineage(&self, model: usize) -> Option<&'a Lineage> {
        self.lineages.get(model).and_then(Option::as_ref)
    }

    pub(super) fn identity(&self, model: usize, version: Version) -> Option<Identity> {
        let (model_id, lineage) = (self.models.get(model)?, self.lineage(model)?);
        Some(Identity { model_id: model_id.clone(), incarnation: lineage.incarnation, version })
    }

    /// The version that every member stages first.
    fn base(&self) -> Option<Version> {
        self.round.map(|(v, _)| v).or(self.service)
    }

    /// The only version of which a load may begin.
    fn permitted(&self) -> Option<Version> {
        match self.round {
            _ if self.settling => None,
            Some((v, Phase::Loading)) => Some(v),
            // A load of something newer may have begun, and may have gone further than its receiver could say.
            Some((_, Phase::Staging)) | None => {
                self.service.filter(|v| self.lineages.iter().flatten().all(|l| l.low <= *v))
            }
        }
    }
}

/// An open `Stage` order.
#[derive(Debug)]
pub(super) struct StageOrder {
    pub(super) order: Order,
    pub(super) version: Version,
    pub(super) until: Millis,
}

/// An open `Load` order. `left` lists the slots that have not answered.
#[derive(Debug)]
pub(super) struct LoadOrder {
    pub(super) order: Order,
    pub(super) version: Version,
    pub(super) until: Millis,
    pub(super) left: Vec<usize>,
}

/// One model at one receiver.
#[derive(Debug)]
pub(super) struct Slot {
    /// Index into the group's models.
    pub(super) model: usize,
    /// The version the engines are known to hold.
    pub(super) loaded: Option<(Incarnation, Version)>,
    pub(super) staged: BTreeSet<Version>,
    pub(super) asked: Vec<StageOrder>,
    /// Versions up to this one can no longer be staged here: the sender gave something newer.
    pub(super) gone: Option<Version>,
    /// The absent version that was asked for last.
    pub(super) probed: Option<Version>,
}

impl Slot {
    /// The version the engines hold of the current lineage.
    pub(super) fn at(&self, view: &View<'_>) -> Option<Version> {
        let (incarnation, version) = self.loaded?;
        (view.lineage(self.model)?.incarnation == incarnation).then_some(version)
    }

    fn lacks(&self, version: Version, view: &View<'_>) -> bool {
        self.at(view).is_none_or(|at| at < version)
            && !self.staged.contains(&version)
            && self.gone.is_none_or(|gone| gone < version)
            && !self.asked.iter().any(|ask| ask.version == version)
    }
}

/// A member's share of its group's tally.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// Required and not done.
    pub(super) waiting: bool,
    /// Staging: could load at once. Loading: has loaded.
    pub(super) done: bool,
    /// Has an open `Load` of the round's version.
    pub(super) loading: bool,
}

/// The failures of a member since something went well.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Failing {
    backoff: Backoff,
    /// The model whose staging failed last; none if it was a load, which only a load makes up for.
    of: Option<usize>,
    /// The earliest that something newer is tried.
    newer_at: Millis,
}

impl Failing {
    /// A model was staged, or with `None` everything was loaded.
    pub(super) fn went_well(&mut self, of: Option<usize>) {
        if of.is_none() || self.of == of {
            *self = Failing::default();
        }
    }
}

/// One receiver in one group.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) peer: Peer,
    pub(super) slots: Vec<Slot>,
    pub(super) live: bool,
    pub(super) load: Option<LoadOrder>,
    /// It failed, expired or was overtaken in this round: the round does not wait for it.
    pub(super) excused: bool,
    /// Not asked for anything before then.
    pub(super) retry_at: Option<Millis>,
    /// How it has been failing.
    pub(super) failing: Failing,
    /// When it last left the pool (or joined).
    pub(super) out_since: Millis,
    pub(super) counted: Counted,
}

impl Member {
    pub(super) fn new(peer: Peer, has: Vec<(usize, Option<(Incarnation, Version)>)>, now: Millis) -> Member {
        let slots = has
            .into_iter()
            .map(|(model, loaded)| Slot {
                model,
                loaded,
                staged: BTreeSet::new(),
                asked: Vec::new(),
                gone: None,
                probed: None,
            })
            .collect();
        Member {
            peer,
            slots,
            live: false,
            load: None,
            excused: false,
            retry_at: None,
            failing: Failing::default(),
            out_since: now,
            counted: Counted::default(),
        }
    }

    /// The version all its models have loaded, if they agree and nothing is being written.
    pub(super) fn uniform(&self, view: &View<'_>) -> Option<Version> {
        if self.load.is_some() {
            return None;
        }
        let first = self.slots.first()?.at(view)?;
        self.slots.iter().all(|s| s.at(view) == Some(first)).then_some(first)
    }

    /// Whether it could load `version` now without the network.
    pub(super) fn ready(&self, version: Version, view: &View<'_>) -> bool {
        self.load.is_none()
            && self.slots.iter().all(|s| match s.at(view) {
                Some(at) if at >= version => at == version,
                Some(_) | None => s.staged.contains(&version),
            })
    }

    /// Whether it can never load `version`: it is past it already.
    pub(super) fn beyond(&self, version: Version, view: &View<'_>) -> bool {
        self.slots.iter().any(|s| {
            s.at(view).is_some_and(|at| at > version)
                || (s.gone.is_some_and(|gone| gone >= version)
                    && s.at(view) != Some(version)
                    && !s.staged.contains(&version))
        })
    }

    /// It failed to stage `of`, or to load: the barrier backs off, longer each time, and reports a longer delay.
    pub(super) fn back_off(&mut self, of: Option<usize>, view: &View<'_>, ctx: &mut Ctx<'_>) {
        self.failing.of = of;
        // Its other open orders fail with it and do not count as further failures.
        if self.retry_at.is_some() {
            return;
        }
        let span = Span { first_ms: ctx.limits.retry_ms, cap_ms: ctx.limits.retry_cap_ms };
        let name = self.peer.receiver.as_str().bytes();
        let salt = name.fold(ctx.now, |salt, byte| splitmix(salt ^ u64::from(byte)));
        let delay = self.failing.backoff.failed(span, salt);
        self.failing.newer_at = ctx.deadline(span.first_ms.min(delay.ms));
        self.retry_at = Some(ctx.deadline(delay.ms));
        if delay.longer && delay.failures > 1 {
            ctx.out.push(Action::BackingOff {
                receiver: self.peer.receiver.clone(),
                set: view.set.clone(),
                failures: delay.failures,
                delay_ms: delay.ms,
            });
        }
    }

    /// A newer version than the failed one is there: it is tried soon, as after the first failure.
    pub(super) fn try_newer(&mut self, ctx: &mut Ctx<'_>) {
        self.failing.backoff.reset();
        if let Some(at) = self.retry_at {
            let soon = self.failing.newer_at.checked_sub(ctx.now).filter(|ms| *ms > 0);
            self.retry_at = soon.map(|ms| at.min(ctx.deadline(ms)));
        }
    }

    /// Sends every order that is due.
    pub(super) fn pursue(&mut self, view: &View<'_>, ctx: &mut Ctx<'_>) {
        if let Some(version) = view.permitted()
            && self.uniform(view) != Some(version)
            && self.ready(version, view)
        {
            self.order_load(version, view, ctx);
        }
        if self.retry_at.is_none() {
            self.order_stages(view, ctx);
        }
    }

    fn order_load(&mut self, version: Version, view: &View<'_>, ctx: &mut Ctx<'_>) {
        let identities = self.slots.iter().filter_map(|s| view.identity(s.model, version)).collect();
        let order = ctx.order();
        let left = (0..self.slots.len()).collect();
        self.load = Some(LoadOrder { order, version, until: ctx.deadline(ctx.limits.load_ms), left });
        ctx.out.push(Action::Load { to: self.peer.clone(), order, set: view.set.clone(), identities });
    }

    fn order_stages(&mut self, view: &View<'_>, ctx: &mut Ctx<'_>) {
        let base = view.base();
        for slot in &mut self.slots {
            let Some(lineage) = view.lineage(slot.model) else { continue };
            let Some(model_id) = view.models.get(slot.model) else { continue };
            let identity =
                |version| Identity { model_id: model_id.clone(), incarnation: lineage.incarnation, version };
            let from = base.map_or(lineage.low, |b| b.saturating_add(1));
            let shown = |v: &Version| !lineage.absent.contains(v);
            let ahead = lineage.announced.range(from..).copied().filter(shown).take(ctx.limits.max_ahead);
            let mut wanted: Vec<Version> = base.into_iter().chain(ahead).collect();
            let has = |v: &Version| slot.staged.contains(v) || slot.at(view) >= Some(*v);
            if wanted.iter().all(has) {
                // The agent may show by now what it lacked before: one after the other, from the newest down.
                let asked = slot.asked.iter().any(|ask| lineage.absent.contains(&ask.version));
                if !asked {
                    let below = slot.probed.and_then(|last| lineage.absent.range(..last).next_back());
                    slot.probed = below.or(lineage.absent.last()).copied();
                    wanted.extend(slot.probed);
                }
            } else {
                // A receiver that waits for an absent version cannot stage the versions that are there.
                for ask in slot.asked.extract_if(.., |ask| lineage.absent.contains(&ask.version)) {
                    abandon(&self.peer, ask.order, Some(identity(ask.version)), ctx);
                }
            }
            for version in wanted {
                if !slot.lacks(version, view) {
                    continue;
                }
                let order = ctx.order();
                slot.asked.push(StageOrder { order, version, until: ctx.deadline(ctx.limits.stage_ms) });
                ctx.out.push(Action::Stage {
                    to: self.peer.clone(),
                    order,
                    identity: identity(version),
                    sender_endpoint: lineage.endpoint_of(version).to_owned(),
                });
            }
        }
    }

    /// Drops orders and staged versions below `version`, except `keep`.
    pub(super) fn forget_below(
        &mut self,
        version: Version,
        keep: Option<Version>,
        view: &View<'_>,
        ctx: &mut Ctx<'_>,
    ) {
        for slot in &mut self.slots {
            let stale = |v: Version| v < version && Some(v) != keep;
            for ask in slot.asked.extract_if(.., |ask| stale(ask.version)) {
                abandon(&self.peer, ask.order, view.identity(slot.model, ask.version), ctx);
            }
        }
        self.give_up_staged(|v| v < version && Some(v) != keep, view, ctx);
    }

    /// Drops staged versions that it can never load, because another of its models is past them.
    pub(super) fn give_up_passed(&mut self, view: &View<'_>, ctx: &mut Ctx<'_>) {
        let staged = self.slots.iter().flat_map(|s| &s.staged);
        let passed: Vec<Version> = staged.copied().filter(|v| self.beyond(*v, view)).collect();
        self.give_up_staged(|v| passed.contains(&v), view, ctx);
    }

    /// Drops staged versions, and says so: until then the receiver keeps them, and brings no image bytes in their place.
    fn give_up_staged(&mut self, which: impl Fn(Version) -> bool, view: &View<'_>, ctx: &mut Ctx<'_>) {
        for slot in &mut self.slots {
            for version in slot.staged.extract_if(.., |v| which(*v)) {
                let order = ctx.order();
                if let Some(identity) = view.identity(slot.model, version) {
                    ctx.out.push(Action::Drop { to: self.peer.clone(), order, identity });
                }
            }
        }
    }

    /// Calls off every order to stage `version`.
    pub(super) fn forget_version(&mut self, version: Version, view: &View<'_>, ctx: &mut Ctx<'_>) {
        for slot in &mut self.slots {
            for ask in slot.asked.extract_if(.., |ask| ask.version == version) {
                abandon(&self.peer, ask.order, view.identity(slot.model, version), ctx);
            }
        }
    }

    /// Drops everything of `model` that is not loaded: its lineage is dead, or its sender has moved.
    pub(super) fn forget_asks(&mut self, model: usize, view: &View<'_>, ctx: &mut Ctx<'_>) {
        for slot in self.slots.iter_mut().filter(|s| s.model == model) {
            for ask in slot.asked.drain(..) {
                abandon(&self.peer, ask.order, view.identity(model, ask.version), ctx);
            }
        }
    }

    /// The open load no longer counts. The state of its unanswered models is unknown from here on, so only a
    /// later load, with a greater order, makes the member whole again. Returns the version it was of.
    pub(super) fn void_load(&mut self, view: &View<'_>, ctx: &mut Ctx<'_>) -> Option<LoadOrder> {
        let load = self.load.take()?;
        for &i in &load.left {
            if let Some(slot) = self.slots.get_mut(i) {
                slot.loaded = None;
            }
        }
        // Staged again before the next attempt: the failed one may have consumed it.
        self.give_up_staged(|v| v == load.version, view, ctx);
        Some(load)
    }

    pub(super) fn models(&self, view: &View<'_>) -> Vec<ModelId> {
        self.slots.iter().filter_map(|s| view.models.get(s.model).cloned()).collect()
    }
}

/// Calls off one order.
pub(super) fn abandon(peer: &Peer, order: Order, identity: Option<Identity>, ctx: &mut Ctx<'_>) {
    if let Some(identity) = identity {
        ctx.out.push(Action::Abandon { to: peer.clone(), order, identity });
    }
}

/// The view that members have of a group, borrowing only the fields that they need.
macro_rules! view {
    ($group:expr) => {
        $crate::barrier::member::View {
            set: &$group.set,
            models: &$group.models,
            lineages: &$group.lineages,
            service: $group.service,
            settling: $group.settling,
            round: $group.round.as_ref().map(|r| (r.version, r.phase)),
        }
    };
}
pub(super) use view;
