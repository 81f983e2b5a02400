//! A group: models that move together, and the rounds that move them.
//!
//! A strict set is one group of all its models; a relaxed set is one group per model. Within a group one
//! *round* at a time takes one version from announced to served. The group owns its members, the round
//! and the service version; it never looks at other groups, at waits, or at heartbeats.

use std::collections::BTreeMap;

use crate::barrier::config::{Mode, Required, SetConfig};
use crate::barrier::error::BarrierError;
use crate::barrier::member::{Counted, Ctx, Lineage, Member, Slot, abandon, view};
use crate::barrier::name::{ReceiverId, SetName};
use crate::barrier::tally::{Round, Tally, count};
use crate::barrier::types::{Action, Blocked, FenceReason, LagReason, Millis, Order, Peer};
use crate::identity::{Identity, Incarnation, ModelId, Version};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) set: SetName,
    pub(super) models: Vec<ModelId>,
    pub(super) mode: Mode,
    pub(super) required: Required,
    pub(super) floor: usize,
    pub(super) lineages: Vec<Option<Lineage>>,
    pub(super) members: BTreeMap<ReceiverId, Member>,
    pub(super) live: usize,
    pub(super) service: Option<Version>,
    /// Receivers that outlived the previous barrier may not have joined yet: the group loads and serves nothing.
    pub(super) settling: bool,
    pub(super) round: Option<Round>,
    pub(super) tally: Tally,
    /// The newest version announced by every model that may be loaded.
    pub(super) newest_common: Option<Version>,
    pub(super) stalled: Option<Blocked>,
    pub(super) release_due: bool,
    /// Grows whenever the served version may have changed.
    pub(super) revision: u64,
}

impl Group {
    pub(super) fn new(set: &SetConfig, models: Vec<ModelId>, settling: bool) -> Group {
        Group {
            set: set.name.clone(),
            lineages: models.iter().map(|_| None).collect(),
            tally: Tally { cover: vec![0; models.len()], ..Tally::default() },
            models,
            mode: set.mode,
            required: set.required,
            floor: set.floor,
            members: BTreeMap::new(),
            live: 0,
            service: None,
            settling,
            round: None,
            newest_common: None,
            stalled: None,
            release_due: false,
            revision: 0,
        }
    }

    /// The lineage of one of the group's models.
    pub(super) fn lineage(&self, model: usize) -> Option<&Lineage> {
        self.lineages.get(model).and_then(Option::as_ref)
    }

    pub(super) fn lineage_mut(&mut self, model: usize) -> Option<&mut Lineage> {
        self.lineages.get_mut(model).and_then(Option::as_mut)
    }

    /// Refuses an identity of a superseded incarnation.
    pub(super) fn check_alive(&self, model: usize, identity: &Identity) -> Result<(), BarrierError> {
        match self.lineage(model) {
            Some(l) if l.incarnation > identity.incarnation => {
                Err(BarrierError::StaleIncarnation { identity: identity.clone(), current: l.incarnation })
            }
            Some(_) | None => Ok(()),
        }
    }

    // ---- events -----------------------------------------------------------------------------------

    /// A version was announced by an incarnation that is not superseded (see [`Group::check_alive`]).
    pub(super) fn notify(&mut self, model: usize, identity: &Identity, endpoint: &str, ctx: &mut Ctx<'_>) {
        let Identity { incarnation, version, .. } = *identity;
        if self.lineage(model).is_none_or(|l| l.incarnation < incarnation) {
            self.begin_lineage(model, incarnation, endpoint, ctx);
        }
        let Some(lineage) = self.lineage_mut(model) else { return };
        let newest = lineage.newest();
        let moved = newest.is_none_or(|n| n <= version) && lineage.endpoint() != endpoint;
        if moved {
            // The agent was restarted: orders that name its old address must be sent again.
            lineage.move_to(version, endpoint);
        }
        // Managers repeat their last announcement, which gives no reason to try again.
        let newer = newest.is_none_or(|n| n < version) || moved;
        lineage.announce(version);
        self.consider(version);
        let view = view!(self);
        for member in self.members.values_mut().filter(|m| m.slots.iter().any(|s| s.model == model)) {
            if moved {
                member.forget_asks(model, &view, ctx);
            }
            if newer {
                member.try_newer(ctx);
            }
            member.pursue(&view, ctx);
        }
        self.advance(ctx);
        // Others may be behind by this, or not behind any more.
        (0..self.models.len()).for_each(|model| self.press(model, ctx));
    }

    /// A receiver joins with the versions its engines hold, per model index.
    pub(super) fn join(
        &mut self,
        peer: Peer,
        has: Vec<(usize, Option<(Incarnation, Version)>)>,
        ctx: &mut Ctx<'_>,
    ) {
        for &(model, loaded) in &has {
            if let Some((incarnation, version)) = loaded {
                self.evidence(model, incarnation, version);
            }
        }
        let id = peer.receiver.clone();
        let mut member = Member::new(peer, has, ctx.now);
        let view = view!(self);
        member.excused = view.round.is_some_and(|(version, _)| member.beyond(version, &view));
        self.members.insert(id.clone(), member);
        self.settle(&id, ctx);
        self.advance(ctx);
    }

    /// A receiver is gone. The caller removes all receivers that are gone at this moment before it advances the group,
    /// so that none of them counts for the others.
    pub(super) fn remove(&mut self, id: &ReceiverId) {
        let Some(member) = self.members.remove(id) else { return };
        self.tally.change(&member, Counted::default());
        if member.live {
            self.live -= 1;
            self.retally_if_none_live();
        }
        self.release_due = true;
    }

    /// A receiver has staged something.
    pub(super) fn staged(
        &mut self,
        id: &ReceiverId,
        model: usize,
        order: Order,
        got: &Identity,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), BarrierError> {
        self.check_alive(model, got)?;
        let view = view!(self);
        let round = view.round.map(|(v, _)| v);
        let member = self.members.get_mut(id).ok_or_else(|| BarrierError::UnknownReceiver(id.clone()))?;
        let open = open_ask(&mut member.slots, model, order);
        let (slot, at) = open.ok_or_else(|| stale_order(id, order, got))?;
        let asked = slot.asked.get(at).and_then(|ask| view.identity(model, ask.version));
        let Some(asked) = asked else { return Ok(()) };
        if got.incarnation != asked.incarnation || got.version < asked.version {
            return Err(BarrierError::WrongAnswer {
                receiver: id.clone(),
                order,
                ordered: asked,
                got: got.clone(),
            });
        }
        slot.asked.swap_remove(at);
        let version = got.version;
        // The arrived version also answers another order for it; abandoning that order would drop the bytes.
        slot.asked.retain(|ask| ask.version != got.version);
        slot.staged.insert(got.version);
        member.failing.went_well(Some(model));
        if got.version > asked.version {
            slot.gone = slot.gone.max(Some(asked.version));
            member.excused |= round == Some(asked.version);
            let why = LagReason::Ahead { got: got.version };
            ctx.out.push(Action::Lagging { receiver: id.clone(), identity: asked, why });
            member.give_up_passed(&view, ctx);
        }
        let appeared = self.lineage_mut(model).is_some_and(|l| l.absent.remove(&version));
        if appeared {
            // Receivers that did not find it are asked again.
            self.members.values_mut().for_each(|member| member.try_newer(ctx));
            self.reconsider(ctx);
        }
        self.settle(id, ctx);
        self.advance(ctx);
        if appeared {
            self.pursue_all(ctx);
        }
        Ok(())
    }

    /// The agent does not show the version that a receiver was ordered to stage. That concerns all members, so it excuses
    /// none; but if another member has the version, this is a failure like any other.
    pub(super) fn absent(
        &mut self,
        id: &ReceiverId,
        model: usize,
        order: Order,
        identity: &Identity,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), BarrierError> {
        self.check_alive(model, identity)?;
        let member = self.members.get_mut(id).ok_or_else(|| BarrierError::UnknownReceiver(id.clone()))?;
        let open = open_ask(&mut member.slots, model, order);
        let (slot, at) = open.ok_or_else(|| stale_order(id, order, identity))?;
        let version = slot.asked.swap_remove(at).version;
        let view = view!(self);
        let has =
            |s: &Slot| s.model == model && (s.staged.contains(&version) || s.at(&view) >= Some(version));
        let there = self.members.values().flat_map(|m| &m.slots).any(has);
        let lineage = self.lineages.get_mut(model).and_then(Option::as_mut);
        let moved = match lineage.filter(|l| !there && l.announced.contains(&version)) {
            Some(lineage) => {
                let endpoint = lineage.endpoint_of(version).to_owned();
                let told = lineage.endpoint().to_owned();
                if lineage.absent.insert(version) {
                    let identity = Identity { version, ..identity.clone() };
                    ctx.out.push(Action::Absent { identity, endpoint, receiver: id.clone() });
                }
                let moved = lineage.endpoint() != told;
                let view = view!(self);
                if let Some(member) = self.members.get_mut(id) {
                    member.back_off(Some(model), &view, ctx);
                }
                for member in self.members.values_mut().filter(|_| moved) {
                    // They name the address of the false announcement.
                    member.forget_asks(model, &view, ctx);
                }
                self.reconsider(ctx);
                self.settle(id, ctx);
                moved
            }
            None => {
                let why = LagReason::Failed("its agent does not show it".to_owned());
                self.lag(id, model, version, why, ctx);
                false
            }
        };
        self.advance(ctx);
        if moved {
            self.pursue_all(ctx);
        }
        Ok(())
    }

    /// A receiver has loaded one model of a load order.
    pub(super) fn loaded(
        &mut self,
        id: &ReceiverId,
        model: usize,
        order: Order,
        got: &Identity,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), BarrierError> {
        self.check_alive(model, got)?;
        let incarnation = self.lineage(model).map(|l| l.incarnation);
        let member = self.members.get_mut(id).ok_or_else(|| BarrierError::UnknownReceiver(id.clone()))?;
        let slots = &mut member.slots;
        let open = member.load.as_mut().filter(|l| l.order == order).and_then(|load| {
            let at = load.left.iter().position(|&i| slots.get(i).is_some_and(|s| s.model == model))?;
            Some((load, at))
        });
        let (load, at) = open.ok_or_else(|| stale_order(id, order, got))?;
        let version_fits = match self.mode {
            Mode::Strict => got.version == load.version,
            Mode::Relaxed => got.version >= load.version,
        };
        if !version_fits || Some(got.incarnation) != incarnation {
            let reason = format!("loaded {got} where version {} was ordered", load.version);
            self.fence(id, FenceReason::LoadFailed { identity: got.clone(), reason }, ctx);
            self.advance(ctx);
            return Ok(());
        }
        let i = load.left.swap_remove(at);
        if let Some(slot) = slots.get_mut(i) {
            slot.loaded = Some((got.incarnation, got.version));
        }
        if load.left.is_empty() {
            let version = load.version;
            member.load = None;
            member.failing.went_well(None);
            for slot in slots {
                slot.staged.retain(|v| *v > version);
            }
            self.settle(id, ctx);
            self.advance(ctx);
        }
        Ok(())
    }

    /// A receiver could not stage the ordered version.
    pub(super) fn stage_failed(
        &mut self,
        id: &ReceiverId,
        model: usize,
        order: Order,
        identity: &Identity,
        reason: String,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), BarrierError> {
        self.check_alive(model, identity)?;
        let member = self.members.get_mut(id).ok_or_else(|| BarrierError::UnknownReceiver(id.clone()))?;
        let open = open_ask(&mut member.slots, model, order);
        let (slot, at) = open.ok_or_else(|| stale_order(id, order, identity))?;
        let version = slot.asked.swap_remove(at).version;
        self.lag(id, model, version, LagReason::Failed(reason), ctx);
        self.advance(ctx);
        Ok(())
    }

    /// A receiver could not load one model of the ordered version.
    pub(super) fn load_failed(
        &mut self,
        id: &ReceiverId,
        model: usize,
        order: Order,
        identity: &Identity,
        reason: String,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), BarrierError> {
        self.check_alive(model, identity)?;
        let member = self.members.get(id).ok_or_else(|| BarrierError::UnknownReceiver(id.clone()))?;
        if member.load.as_ref().is_none_or(|l| l.order != order) {
            return Err(stale_order(id, order, identity));
        }
        self.fence(id, FenceReason::LoadFailed { identity: identity.clone(), reason }, ctx);
        self.advance(ctx);
        Ok(())
    }

    /// All running receivers have joined. The caller advances the group.
    pub(super) fn settled(&mut self, ctx: &mut Ctx<'_>) {
        self.settling = false;
        self.pursue_all(ctx);
    }

    /// Deals with every deadline that has passed.
    pub(super) fn tick(&mut self, ctx: &mut Ctx<'_>) {
        let now = ctx.now;
        let (mut lapsed, mut expired, mut due) = (Vec::new(), Vec::new(), Vec::new());
        let view = view!(self);
        for (id, member) in &mut self.members {
            if let Some(load) = member.load.as_ref().filter(|l| l.until <= now) {
                expired.push((id.clone(), load.version));
            }
            if member.retry_at.take_if(|at| *at <= now).is_some() {
                due.push(id.clone());
            }
            for slot in &mut member.slots {
                for ask in slot.asked.extract_if(.., |ask| ask.until <= now) {
                    abandon(&member.peer, ask.order, view.identity(slot.model, ask.version), ctx);
                    lapsed.push((id.clone(), slot.model, ask.version));
                }
            }
        }
        for (id, model, version) in lapsed {
            self.lag(&id, model, version, LagReason::Timeout, ctx);
        }
        for (id, version) in expired {
            self.fence(&id, FenceReason::LoadTimeout { version }, ctx);
        }
        for id in due {
            self.settle(&id, ctx);
        }
        self.release_due = true;
        self.advance(ctx);
    }

    /// The next moment after `now` at which [`Group::tick`] has something to do.
    pub(super) fn next_deadline(&self, now: Millis, history_ms: Millis) -> Option<Millis> {
        let members = self.members.values().flat_map(|m| {
            let asks = m.slots.iter().flat_map(|s| s.asked.iter().map(|a| a.until));
            let hold = (!m.live).then(|| m.out_since.saturating_add(history_ms));
            asks.chain(m.load.as_ref().map(|l| l.until)).chain(m.retry_at).chain(hold)
        });
        members.chain(self.round.as_ref().map(|r| r.deadline)).filter(|at| *at > now).min()
    }

    // ---- lineages ---------------------------------------------------------------------------------

    /// The first notify of a new incarnation. The superseded lineage is void from here on, and so is the version that
    /// the group served: members must load the new lineage before they count.
    fn begin_lineage(&mut self, model: usize, incarnation: Incarnation, endpoint: &str, ctx: &mut Ctx<'_>) {
        if let (Some(old), Some(name)) = (self.lineage(model), self.models.get(model)) {
            let (old, model_id) = (old.incarnation, name.clone());
            ctx.out.push(Action::Superseded { model: model_id.clone(), old, new: incarnation });
            let view = view!(self);
            for (id, member) in &mut self.members {
                member.forget_asks(model, &view, ctx);
                if let Some(load) = member.void_load(&view, ctx) {
                    for slot in load.left.iter().filter_map(|&i| member.slots.get(i)) {
                        abandon(&member.peer, load.order, view.identity(slot.model, load.version), ctx);
                    }
                }
                for slot in member.slots.iter_mut().filter(|s| s.model == model) {
                    slot.staged.clear();
                    slot.gone = None;
                }
                if std::mem::take(&mut member.live) {
                    member.out_since = ctx.now;
                    ctx.out.push(Action::Fence {
                        receiver: id.clone(),
                        set: self.set.clone(),
                        models: member.models(&view),
                        why: FenceReason::Superseded { model: model_id.clone(), incarnation },
                    });
                }
            }
            self.live = 0;
            self.service = None;
            self.revision += 1;
            self.round = None;
        }
        if let Some(slot) = self.lineages.get_mut(model) {
            *slot = Some(Lineage::new(incarnation, endpoint.to_owned()));
        }
        self.newest_common = None;
        self.retally();
        let held: Vec<_> =
            self.members.values().flat_map(|m| &m.slots).filter(|s| s.model == model).collect();
        let held: Vec<_> = held.iter().filter_map(|s| s.loaded).collect();
        for (incarnation, version) in held {
            self.evidence(model, incarnation, version);
        }
        let announced: Vec<_> = self.lineages.iter().flatten().flat_map(|l| l.announced.clone()).collect();
        for version in announced {
            self.consider(version);
        }
    }

    /// A version that a receiver has loaded was announced once, perhaps to an earlier controller.
    fn evidence(&mut self, model: usize, incarnation: Incarnation, version: Version) {
        if let Some(lineage) = self.lineage_mut(model).filter(|l| l.incarnation == incarnation) {
            lineage.announce(version);
            self.consider(version);
        }
    }

    /// The set of absent versions has changed.
    fn reconsider(&mut self, ctx: &mut Ctx<'_>) {
        self.find_common();
        (0..self.models.len()).for_each(|model| self.press(model, ctx));
    }

    /// Finds the newest version that every model has announced and shows, and none is past.
    fn find_common(&mut self) {
        let Some(first) = self.lineage(0) else { return };
        let common = |v: &&Version| {
            self.lineages.iter().all(|l| l.as_ref().is_some_and(|l| l.low <= **v && l.announced.contains(*v)))
        };
        self.newest_common =
            first.announced.iter().rev().filter(common).find(|v| !self.is_absent(**v)).copied();
    }

    /// Takes note of `version` if by now every model has announced it and none is past it.
    fn consider(&mut self, version: Version) {
        if self.lineages.iter().flatten().any(|l| !l.absent.is_empty()) {
            return self.find_common();
        }
        let common = |l: &Option<Lineage>| {
            l.as_ref().is_some_and(|l| l.low <= version && l.announced.contains(&version))
        };
        if self.newest_common.is_none_or(|n| n < version) && self.lineages.iter().all(common) {
            self.newest_common = Some(version);
        }
    }

    /// How many announced versions of `model` are not served yet.
    pub(super) fn ahead(&self, model: usize) -> usize {
        let above = |v: &&Version| self.service.is_none_or(|s| **v > s);
        self.lineage(model).map_or(0, |l| {
            let above = l.announced.iter().rev().take_while(above);
            above.filter(|v| !l.absent.contains(v)).count()
        })
    }

    /// Whether another model of the set has announced something newer than `model` has. Then the others wait for it, and
    /// if it waited for them there would be no end to that.
    fn is_behind(&self, model: usize) -> bool {
        let mine = self.lineage(model).and_then(Lineage::newest);
        self.lineages.iter().flatten().any(|l| l.newest() > mine)
    }

    /// Tells the trainer of `model` to wait, or to go on, when that has changed.
    pub(super) fn press(&mut self, model: usize, ctx: &mut Ctx<'_>) {
        let (ahead, behind) = (self.ahead(model), self.is_behind(model));
        let Some(model_id) = self.models.get(model).cloned() else { return };
        let Some(lineage) = self.lineage_mut(model) else { return };
        let wait = ahead > ctx.limits.max_ahead && !behind;
        if std::mem::replace(&mut lineage.pressed, wait) != wait {
            let incarnation = lineage.incarnation;
            ctx.out.push(Action::BackPressure { model: model_id, incarnation, ahead, wait });
        }
    }

    // ---- members ----------------------------------------------------------------------------------

    /// A member did not stage `version`: this round does not wait for it, and it is asked again later.
    fn lag(&mut self, id: &ReceiverId, model: usize, version: Version, why: LagReason, ctx: &mut Ctx<'_>) {
        let view = view!(self);
        let identity = view.identity(model, version);
        let round = view.round.map(|(v, _)| v);
        let Some(member) = self.members.get_mut(id) else { return };
        member.excused |= round == Some(version);
        if let Some(identity) = identity {
            ctx.out.push(Action::Lagging { receiver: id.clone(), identity, why });
        }
        member.back_off(Some(model), &view, ctx);
        self.settle(id, ctx);
    }

    /// A load failed: the member leaves the pool at once and starts over after a while.
    fn fence(&mut self, id: &ReceiverId, why: FenceReason, ctx: &mut Ctx<'_>) {
        let view = view!(self);
        let Some(member) = self.members.get_mut(id) else { return };
        if let (FenceReason::LoadFailed { identity, .. }, Some(load)) = (&why, &mut member.load) {
            // The model that failed is unknown even if it was reported loaded before.
            let named = |s: &Slot| view.models.get(s.model) == Some(&identity.model_id);
            if let Some(i) = member.slots.iter().position(named)
                && !load.left.contains(&i)
            {
                load.left.push(i);
            }
        }
        let models = member.models(&view);
        ctx.out.push(Action::Fence { receiver: id.clone(), set: self.set.clone(), models, why });
        member.void_load(&view, ctx);
        member.excused = true;
        member.back_off(None, &view, ctx);
        if std::mem::take(&mut member.live) {
            member.out_since = ctx.now;
            self.live -= 1;
            self.retally_if_none_live();
        }
        self.settle(id, ctx);
    }

    /// Sends every member the orders that are due: something other than the round has changed for all of them.
    pub(super) fn pursue_all(&mut self, ctx: &mut Ctx<'_>) {
        let view = view!(self);
        self.members.values_mut().for_each(|member| member.pursue(&view, ctx));
        self.retally();
    }

    /// Brings one member's orders, liveness and count up to date after a change to it.
    fn settle(&mut self, id: &ReceiverId, ctx: &mut Ctx<'_>) {
        let view = view!(self);
        let Some(member) = self.members.get_mut(id) else { return };
        member.pursue(&view, ctx);
        let at = member.uniform(&view).filter(|at| view.service.is_some_and(|s| *at >= s));
        if let Some(version) = at.filter(|_| !member.live) {
            member.live = true;
            self.live += 1;
            self.release_due = true;
            let models = member.models(&view);
            ctx.out.push(Action::GoLive { receiver: id.clone(), set: self.set.clone(), models, version });
            if self.live == 1 {
                return self.retally();
            }
        }
        let counted = count(member, &view, self.mode, self.live == 0);
        self.tally.change(member, counted);
        member.counted = counted;
    }

    /// While no member is live all are required, so the departure of the last live one concerns all.
    fn retally_if_none_live(&mut self) {
        if self.live == 0 {
            self.retally();
        }
    }

    pub(super) fn retally(&mut self) {
        self.tally = Tally { cover: vec![0; self.models.len()], ..Tally::default() };
        let view = view!(self);
        for member in self.members.values_mut() {
            let counted = count(member, &view, self.mode, self.live == 0);
            member.counted = Counted::default();
            self.tally.change(member, counted);
            member.counted = counted;
        }
    }
}

/// Finds the open `Stage` order of that number for `model`: its slot, and its index in `asked`.
fn open_ask(slots: &mut [Slot], model: usize, order: Order) -> Option<(&mut Slot, usize)> {
    let slot = slots.iter_mut().find(|s| s.model == model)?;
    let at = slot.asked.iter().position(|a| a.order == order)?;
    Some((slot, at))
}

fn stale_order(id: &ReceiverId, order: Order, identity: &Identity) -> BarrierError {
    BarrierError::StaleOrder { receiver: id.clone(), order, identity: identity.clone() }
}
