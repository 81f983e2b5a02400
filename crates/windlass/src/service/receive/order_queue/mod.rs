//! A controller's orders about one model, and the next step.
//!
//! Owns: [`OrderQueue`], which takes orders and decides what to stage, what to load, and what to report. Its caller tells it
//! what the image holds and which deltas are in memory. Called by [`super::member`], whose threads
//! do the work. Must not: know the network, files or engines; time is an argument.
//!
//! # Two places
//!
//! What engines read is the *image*, and it holds one version. Deltas are fetched into memory and wait in the *queue*,
//! each leading on from the one before, the first from the image. A load applies those up to its version. So a
//! process that reads the image while versions are staged (a restarted engine, another program) finds the version that may
//! be served.
//!
//! Image bytes cannot be staged like that: there is no room for a second image, so they go into the image itself. That is
//! needed at the start, after an incarnation change, and where the publisher's history does not reach back far enough.
//! What the image holds then is *staged*, and hidden from all readers until a load permits it, and nothing else may
//! replace it meanwhile. It is the version that was ordered, or the newest if nothing leads back to that.
//!
//! # Rules
//!
//! - ORDER-1 Stage orders are carried out one at a time, of the newest incarnation, the oldest version first.
//! - ORDER-2 What is there already, in the image or in the queue, is answered at once. If only something newer is there,
//!   the answer names that.
//! - ORDER-3 The queue takes no more memory than it may, save for one delta; further orders wait for a load.
//! - ORDER-4 What was answered as staged stays loadable until it is loaded, abandoned or passed. Image bytes wait for that,
//!   for [`STAGED_GRACE`] at most: a controller of an earlier release does not say what it has given up after it was answered.
//! - ORDER-5 A load is carried out if its very version is there, and is a failure otherwise. A load numbered below one that
//!   was taken up is ignored; a newer one takes the place of one that has not begun.
//! - ORDER-6 A new session ([`OrderQueue::rejoined`]) ends all orders, and nothing of the last one is answered any more. What waits
//!   in the queue stays, and so does a pull under way.
//! - ORDER-7 What is said to be served ([`OrderQueue::serves`]) is what the image holds, if a load permitted that. Image bytes end
//!   it as soon as they begin to come.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use windlass_core::barrier::{Order, Phase, SetName};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, Version};

use crate::service::controller::wire::{Outcome, Task};

/// How long a full image waits for a staged version to be loaded before it replaces it.
pub(super) const STAGED_GRACE: Duration = Duration::from_secs(30);

/// An answer to an order, without what it took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) order: Order,
    pub(super) identity: Identity,
    pub(super) outcome: Outcome,
}

/// The stager's next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Staging {
    /// This version, or a newer one, is already here: report it.
    Held(Answer),
    /// Fetch the delta to this version from the last one here.
    Fetch(StageOrder),
    /// Bring the image to this version, or the newest.
    Whole(StageOrder),
}

/// A stage order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StageOrder {
    pub(super) order: Order,
    pub(super) identity: Identity,
    pub(super) endpoint: String,
}

/// The loader's next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Loading {
    /// Apply so many deltas of the queue, then let the engines load.
    Load { order: Order, set: SetName, identity: Identity, apply: usize },
    /// The version is not here.
    Missing(Answer),
}

type At = (Incarnation, Version);

fn at(identity: &Identity) -> At {
    (identity.incarnation, identity.version)
}

#[derive(Debug)]
struct Open {
    identity: Identity,
    endpoint: String,
    /// Only image bytes serve.
    whole: bool,
}

/// A delta in the queue.
#[derive(Debug)]
struct Waiting<T> {
    identity: Identity,
    bytes: u64,
    /// Until it is being applied.
    delta: Option<T>,
}

/// See the module's documentation. `T` is a delta in memory.
#[derive(Debug)]
pub(super) struct OrderQueue<T> {
    /// How many bytes may wait in the queue.
    room: u64,
    stages: BTreeMap<(At, Order), Open>,
    staging: Option<Order>,
    /// The answer to the order under way is wanted.
    asked: bool,
    load: Option<(Order, SetName, Identity)>,
    loading: Option<(Order, Identity)>,
    taken: Option<Order>,
    image: Option<Identity>,
    queue: VecDeque<Waiting<T>>,
    /// What was answered as staged, to which orders, and when last.
    promised: BTreeMap<At, (BTreeSet<Order>, Instant)>,
    loaded: Option<Identity>,
}

impl<T> OrderQueue<T> {
    /// A queue without orders. The image is what it was when this receiver last ended, and counts as loaded.
    pub(super) fn new(image: Option<Identity>, room: u64) -> OrderQueue<T> {
        OrderQueue {
            room,
            stages: BTreeMap::new(),
            staging: None,
            asked: false,
            load: None,
            loading: None,
            taken: None,
            loaded: image.clone(),
            image,
            queue: VecDeque::new(),
            promised: BTreeMap::new(),
        }
    }

    /// How many bytes may wait in the queue from now on.
    pub(super) fn set_room(&mut self, bytes: u64) {
        self.room = bytes;
    }

    /// What was last loaded.
    pub(super) fn loaded(&self) -> Option<&Identity> {
        self.loaded.as_ref()
    }

    /// The version that readers of the image may see. Engines may hold another.
    pub(super) fn serves(&self) -> Option<&Identity> {
        self.loaded.as_ref().filter(|l| self.image.as_ref() == Some(*l))
    }

    /// Whether a load is under way or waits.
    pub(super) fn is_loading(&self) -> bool {
        self.load.is_some() || self.loading.is_some()
    }

    /// The version that is being loaded, or else staged, or else waits to be, or else is staged.
    pub(super) fn about(&self) -> (&'static str, Option<&Identity>) {
        if let Some((_, identity)) = &self.loading {
            return ("loading", Some(identity));
        }
        let open = |order: &Order| self.stages.iter().find(|((_, o), _)| o == order);
        if let Some((_, open)) = self.staging.as_ref().and_then(open) {
            return ("pulling", Some(&open.identity));
        }
        if let Some((_, open)) = self.stages.first_key_value() {
            return ("waiting", Some(&open.identity));
        }
        let staged = self.queue.back().map(|w| &w.identity);
        let staged = staged.or_else(|| self.image.as_ref().filter(|i| self.promised.contains_key(&at(i))));
        match staged {
            Some(identity) => ("staged", Some(identity)),
            None => ("idle", self.loaded.as_ref().or(self.image.as_ref())),
        }
    }

    /// Takes in an order about this model. Answers whether the stage order under way is to be given up.
    pub(super) fn take(&mut self, task: &Task) -> bool {
        match task {
            Task::Stage { order, identity, sender_endpoint } => {
                let open =
                    Open { identity: identity.clone(), endpoint: sender_endpoint.clone(), whole: false };
                self.stages.insert((at(identity), *order), open);
                self.supersede(identity.incarnation)
            }
            Task::Load { order, set, identities } => {
                if self.taken.is_none_or(|taken| taken < *order)
                    && let Some(identity) = identities.first()
                {
                    self.taken = Some(*order);
                    self.load = Some((*order, set.clone(), identity.clone()));
                }
                false
            }
            Task::Abandon { order, identity } => self.abandon(*order, identity),
            Task::Drop { order, identity } => {
                let key = at(identity);
                self.release(|at, by| *at == key && by <= *order);
                false
            }
            Task::Live { .. } => false,
        }
    }

    /// Nothing of an older incarnation matters once a newer one is to be staged.
    fn supersede(&mut self, incarnation: Incarnation) -> bool {
        let staging = self.staging;
        let mut old = false;
        self.stages.retain(|(at, order), _| {
            let under_way = Some(*order) == staging;
            old |= under_way && at.0 < incarnation;
            at.0 >= incarnation || under_way
        });
        self.asked &= !old;
        old
    }

    fn abandon(&mut self, order: Order, identity: &Identity) -> bool {
        let key = at(identity);
        if self.load.as_ref().is_some_and(|(o, ..)| *o == order) {
            self.load = None;
        }
        if self.staging == Some(order) {
            self.asked = false;
            return true;
        }
        self.stages.remove(&(key, order));
        // It may have been answered with something newer than it named.
        self.release(|_, by| by == order);
        false
    }

    /// These answers do not count any more.
    fn release(&mut self, void: impl Fn(&At, Order) -> bool) {
        let mut given_up = Vec::new();
        self.promised.retain(|at, (orders, _)| {
            orders.retain(|by| !void(at, *by));
            given_up.extend(orders.is_empty().then_some(*at));
            !orders.is_empty()
        });
        given_up.into_iter().rev().for_each(|key| self.let_go(key));
    }

    /// No answer counts on this version any more: the last delta in the queue is dropped if it is that.
    fn let_go(&mut self, key: At) {
        // One in the middle is what the next leads on from, and so is the last while the next is being fetched.
        let again = self.stages.keys().any(|(at, _)| *at == key);
        let wanted = again || self.load.as_ref().is_some_and(|(_, _, i)| at(i) == key);
        let free = self.loading.is_none() && self.staging.is_none() && !wanted;
        if free && self.queue.back().is_some_and(|w| at(&w.identity) == key) {
            self.queue.pop_back();
        }
    }

    /// `got` is staged in answer to `order`.
    fn promise(&mut self, order: Order, got: &Identity, now: Instant) -> Answer {
        let (orders, since) = self.promised.entry(at(got)).or_insert((BTreeSet::new(), now));
        orders.insert(order);
        *since = now;
        Answer { order, identity: got.clone(), outcome: Outcome::Staged }
    }

    /// The session is another one: no order of the last one counts.
    pub(super) fn rejoined(&mut self) {
        let staging = self.staging;
        self.stages.retain(|(_, order), _| Some(*order) == staging);
        self.asked = false;
        (self.load, self.taken) = (None, None);
        self.promised.clear();
    }

    /// What to stage next; `None` while something is being staged, or nothing can be.
    pub(super) fn next_stage(&mut self, now: Instant) -> Option<Staging> {
        if self.staging.is_some() {
            return None;
        }
        let newest = self.stages.keys().map(|(at, _)| at.0).max()?;
        self.stages.retain(|(at, _), _| at.0 == newest);
        if self.queue.iter().any(|w| w.identity.incarnation < newest) && self.loading.is_none() {
            self.queue.clear();
        }
        let (&(key, order), open) = self.stages.first_key_value()?;
        let identity = open.identity.clone();
        if let Some(held) = self.held(&identity) {
            self.stages.remove(&(key, order));
            return Some(Staging::Held(self.promise(order, &held, now)));
        }
        let stage = StageOrder { order, identity, endpoint: open.endpoint.clone() };
        let last = self.queue.back().map(|w| &w.identity).or(self.image.as_ref());
        let leads_on = last.is_some_and(|i| i.incarnation == newest);
        let staging = if leads_on && !open.whole {
            let waiting: u64 = self.queue.iter().map(|w| w.bytes).sum();
            (self.queue.is_empty() || waiting < self.room).then_some(Staging::Fetch(stage))
        } else {
            self.may_replace(newest, now).then_some(Staging::Whole(stage))
        };
        if let Some(staging) = &staging {
            (self.staging, self.asked) = (Some(order), true);
            if matches!(staging, Staging::Whole(_)) {
                self.image = None;
            }
        }
        staging
    }

    /// When [`OrderQueue::next_stage`] may have another answer though nothing has happened.
    pub(super) fn ripe(&self) -> Option<Instant> {
        self.promised.values().map(|(_, since)| *since + STAGED_GRACE).max()
    }

    /// What is there of a version, or the oldest that is newer.
    fn held(&self, wanted: &Identity) -> Option<Identity> {
        let all = self.image.iter().chain(self.queue.iter().map(|w| &w.identity));
        all.filter(|i| i.incarnation == wanted.incarnation && i.version >= wanted.version)
            .min_by_key(|i| i.version)
            .cloned()
    }

    /// Whether image bytes of an incarnation may take the place of what is staged.
    fn may_replace(&mut self, incarnation: Incarnation, now: Instant) -> bool {
        if self.loading.is_some() {
            return false;
        }
        let waits = self
            .promised
            .iter()
            .any(|(at, (_, since))| at.0 == incarnation && now.duration_since(*since) < STAGED_GRACE);
        let ordered = self.load.as_ref().is_some_and(|(_, _, i)| i.incarnation == incarnation);
        if waits || ordered {
            return false;
        }
        self.queue.clear();
        self.promised.clear();
        true
    }

    /// The last delta in the queue, which the next leads on from.
    pub(super) fn last(&self) -> Option<&T> {
        self.queue.back()?.delta.as_ref()
    }

    /// The deltas that a load applies. They stay in the queue by name until [`OrderQueue::applied`].
    pub(super) fn take_deltas(&mut self, count: usize) -> Vec<T> {
        self.queue.iter_mut().take(count).filter_map(|w| w.delta.take()).collect()
    }

    /// The stage order under way cannot be carried out by a delta.
    pub(super) fn needs_whole(&mut self, order: Order) {
        self.staging = None;
        let asked = std::mem::take(&mut self.asked);
        self.stages.retain(|(_, o), _| asked || *o != order);
        if let Some((_, open)) = self.stages.iter_mut().find(|((_, o), _)| *o == order) {
            open.whole = true;
        }
    }

    /// A delta from `base` was fetched. Returns the report, unless the controller no longer wants one. It is of no use if
    /// something else has become of its base, and then it is fetched again.
    pub(super) fn fetched(
        &mut self,
        order: Order,
        base: &Identity,
        (got, delta, bytes): (&Identity, T, u64),
        now: Instant,
    ) -> Option<Answer> {
        let last = self.queue.back().map(|w| &w.identity).or(self.image.as_ref());
        if last != Some(base) {
            self.staging = None;
            let asked = std::mem::take(&mut self.asked);
            self.stages.retain(|(_, o), _| asked || *o != order);
            return None;
        }
        self.queue.push_back(Waiting { identity: got.clone(), bytes, delta: Some(delta) });
        self.staged(order, got, now)
    }

    /// The image was brought to a version. Returns the report, unless the controller no longer wants one.
    pub(super) fn replaced(&mut self, order: Order, got: &Identity, now: Instant) -> Option<Answer> {
        self.image = Some(got.clone());
        self.staged(order, got, now)
    }

    fn staged(&mut self, order: Order, got: &Identity, now: Instant) -> Option<Answer> {
        self.end_stage(order)?;
        Some(self.promise(order, got, now))
    }

    /// The stage order under way failed; `image` is what the image holds now. Answers what to report.
    pub(super) fn stage_failed(
        &mut self,
        order: Order,
        image: Option<Identity>,
        outcome: Outcome,
    ) -> Option<Answer> {
        self.image = image;
        let identity = self.end_stage(order)?;
        Some(Answer { order, identity, outcome })
    }

    /// What the order was about; `None` if it was abandoned.
    fn end_stage(&mut self, order: Order) -> Option<Identity> {
        self.staging = None;
        let asked = std::mem::take(&mut self.asked);
        let key = self.stages.keys().find(|(_, o)| *o == order).copied()?;
        let open = self.stages.remove(&key)?;
        asked.then_some(open.identity)
    }

    /// What to load next; `None` while something is being loaded, or nothing is to be.
    pub(super) fn next_load(&mut self) -> Option<Loading> {
        if self.loading.is_some() {
            return None;
        }
        let (order, set, identity) = self.load.take()?;
        let apply = if self.image.as_ref() == Some(&identity) {
            0
        } else if let Some(place) = self.queue.iter().position(|w| w.identity == identity) {
            place + 1
        } else {
            let held = self.image.as_ref().map_or_else(|| "nothing".into(), ToString::to_string);
            let reason = format!("{identity} is not staged here; the image holds {held}");
            let outcome = Outcome::Failed { phase: Phase::Loading, kind: Kind::Stale, reason };
            return Some(Loading::Missing(Answer { order, identity, outcome }));
        };
        self.loading = Some((order, identity.clone()));
        Some(Loading::Load { order, set, identity, apply })
    }

    /// So many deltas of the queue were applied, or should have been; `image` is what the image holds now.
    pub(super) fn applied(&mut self, count: usize, image: Option<Identity>) {
        let last = count.checked_sub(1).and_then(|i| self.queue.get(i)).map(|w| w.identity.clone());
        self.queue.drain(..count.min(self.queue.len()));
        if last != image {
            // What leads on from a version that did not come about leads nowhere.
            self.queue.clear();
        }
        self.image = image;
    }

    /// The load under way ended. Answers what to report.
    pub(super) fn load_ended(&mut self, result: Result<(), (Kind, String)>) -> Option<Answer> {
        let (order, identity) = self.loading.take()?;
        let outcome = match result {
            Ok(()) => {
                self.promised.retain(|key, _| *key > at(&identity));
                self.loaded = Some(identity.clone());
                Outcome::Loaded
            }
            Err((kind, reason)) => {
                // It must be staged again, says the controller; it is there still, if the image is whole.
                self.promised.remove(&at(&identity));
                self.loaded = None;
                Outcome::Failed { phase: Phase::Loading, kind, reason }
            }
        };
        Some(Answer { order, identity, outcome })
    }
}

#[cfg(test)]
mod tests;
