//! The stripes that no stream fetches, and which of them a source is asked for next.
//!
//! Two kinds of sources. Those of the ticket (*origins*) hold their blocks from the beginning. *Relays* are receivers of
//! the same version: what they hold grows while they receive it, and they say so.
//!
//! Many receivers begin at the same moment, and the origins should send each byte about once. So every receiver begins
//! at another place, goes on from there, and passes over what an origin has given to others: that comes by relays, the
//! rarest first. Only what is left, or does not come, is asked of an origin again ([`Pool::next_of_origin`]'s `again`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::stripe::{Stripe, StripePlan};
use super::swarm::Place;

/// Unclaimed stripes of one group of origins, by turn.
#[derive(Clone, Debug, Default)]
struct Queue {
    /// Those that no receiver has been given, as far as is known.
    fresh: BTreeSet<u32>,
    given: BTreeSet<u32>,
}

#[derive(Clone, Debug, Default)]
struct Relay {
    holds: BTreeSet<u32>,
    /// The unclaimed ones among them, by the number of relays that hold them and by turn.
    ready: BTreeSet<(u32, u32)>,
}

/// The stripes that have the same origins.
fn groups(plan: &StripePlan) -> BTreeMap<u32, Vec<u32>> {
    let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for stripe in plan.stripes() {
        groups.entry(StripePlan::group(stripe)).or_default().push(stripe.id);
    }
    groups
}

/// All stripes in the order in which a receiver asks for them: of each group from a place of its own on, and of all groups alike.
fn order(groups: BTreeMap<u32, Vec<u32>>, place: Place) -> Vec<u32> {
    let mut all = Vec::new();
    for (group, mut ids) in groups {
        let len = ids.len() as u64;
        ids.rotate_left(place.start(len as u32) as usize);
        // Where each lies in its group, so that none comes last.
        let parts = (0..len).map(|i| (i << 32) / len);
        all.extend(parts.zip(ids).map(|(part, id)| (part, group, id)));
    }
    all.sort_unstable();
    all.into_iter().map(|(_, _, id)| id).collect()
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    stripes: u32,
    /// When this receiver's turn comes to a stripe, and to which it comes then.
    turns: Vec<u32>,
    order: Vec<u32>,
    /// By number of holders and group: scarce ones first.
    queues: BTreeMap<(u32, u32), Queue>,
    keys: Vec<(u32, u32)>,
    unclaimed: Vec<bool>,
    given: Vec<bool>,
    /// How many relays hold each stripe.
    held: Vec<u32>,
    relays: BTreeMap<usize, Relay>,
    /// Groups of which others ask for what is fresh.
    others: BTreeSet<u32>,
}

impl Pool {
    pub(super) fn new(plan: &StripePlan, place: Place) -> Pool {
        let stripes = plan.stripes().len() as u32;
        let groups = groups(plan);
        let asks = |(group, ids): (&u32, &Vec<u32>)| place.asks(*group, ids.len() as u32);
        let others = groups.iter().filter(|group| !asks(*group)).map(|(group, _)| *group).collect();
        let order = order(groups, place);
        let mut turns = vec![0; stripes as usize];
        (0..).zip(&order).for_each(|(turn, id)| turns[*id as usize] = turn);
        let key = |s: &Stripe| (plan.holders(s).len(), StripePlan::group(s));
        let mut pool = Pool {
            stripes,
            turns,
            order,
            queues: BTreeMap::new(),
            keys: plan.stripes().iter().map(key).collect(),
            unclaimed: vec![false; stripes as usize],
            given: vec![false; stripes as usize],
            held: vec![0; stripes as usize],
            relays: BTreeMap::new(),
            others,
        };
        (0..stripes).for_each(|id| pool.put(id));
        pool
    }

    fn turn(&self, id: u32) -> u32 {
        self.turns[id as usize]
    }

    fn at(&self, turn: u32) -> u32 {
        self.order[turn as usize]
    }

    /// A stripe is to be fetched (again).
    pub(super) fn put(&mut self, id: u32) {
        let (turn, i) = (self.turn(id), id as usize);
        self.unclaimed[i] = true;
        let queue = self.queues.entry(self.keys[i]).or_default();
        let set = if self.given[i] { &mut queue.given } else { &mut queue.fresh };
        set.insert(turn);
        self.rank(id, true);
    }

    /// Enters a stripe into, or takes it out of, what is ready at the relays that hold it.
    fn rank(&mut self, id: u32, enter: bool) {
        let entry = (self.held[id as usize], self.turn(id));
        for relay in self.relays.values_mut().filter(|r| r.holds.contains(&id)) {
            if enter {
                relay.ready.insert(entry);
            } else {
                relay.ready.remove(&entry);
            }
        }
    }

    fn take(&mut self, id: u32) -> u32 {
        let (turn, i) = (self.turn(id), id as usize);
        self.unclaimed[i] = false;
        if let Some(queue) = self.queues.get_mut(&self.keys[i]) {
            queue.fresh.remove(&turn);
            queue.given.remove(&turn);
            if queue.fresh.is_empty() && queue.given.is_empty() {
                self.queues.remove(&self.keys[i]);
            }
        }
        self.rank(id, false);
        id
    }

    /// The next stripe for an origin that has these groups; with `again` also one that was given to others, or that is
    /// for others to ask for.
    pub(super) fn next_of_origin(&mut self, has: impl Fn(u32) -> bool, again: bool) -> Option<u32> {
        let queues = || self.queues.iter().filter(|((_, group), _)| has(*group));
        let asks = |group| again || !self.others.contains(group);
        let fresh = queues().filter(|((_, group), _)| asks(group)).find_map(|(_, q)| q.fresh.first());
        let turn = fresh.or_else(|| queues().find_map(|(_, q)| q.given.first()).filter(|_| again));
        let id = self.at(*turn?);
        Some(self.take(id))
    }

    /// The next stripe for a relay.
    pub(super) fn next_of_relay(&mut self, relay: usize) -> Option<u32> {
        let (_, turn) = self.relays.get(&relay)?.ready.first()?;
        let id = self.at(*turn);
        Some(self.take(id))
    }

    /// A relay holds these stripes. Those that do not exist are ignored.
    pub(super) fn holds(&mut self, relay: usize, stripes: Range<u32>) {
        for id in stripes.start..stripes.end.min(self.stripes) {
            if !self.relays.entry(relay).or_default().holds.contains(&id) {
                self.change(relay, id, true);
            }
        }
    }

    /// A relay is gone.
    pub(super) fn without(&mut self, relay: usize) {
        let holds = self.relays.get(&relay).map(|r| r.holds.clone()).unwrap_or_default();
        for id in holds {
            self.change(relay, id, false);
        }
        self.relays.remove(&relay);
    }

    fn change(&mut self, relay: usize, id: u32, holds: bool) {
        let unclaimed = self.unclaimed[id as usize];
        if unclaimed {
            self.rank(id, false);
        }
        let held = &mut self.held[id as usize];
        let set = &mut self.relays.entry(relay).or_default().holds;
        if holds {
            *held += 1;
            set.insert(id);
        } else {
            *held -= 1;
            set.remove(&id);
        }
        if unclaimed {
            self.rank(id, true);
        }
    }

    /// An origin has given these stripes to some receiver.
    pub(super) fn given(&mut self, stripes: Range<u32>) {
        for id in stripes.start..stripes.end.min(self.stripes) {
            let (turn, i) = (self.turn(id), id as usize);
            self.given[i] = true;
            if self.unclaimed[i]
                && let Some(queue) = self.queues.get_mut(&self.keys[i])
                && queue.fresh.remove(&turn)
            {
                queue.given.insert(turn);
            }
        }
    }

    /// An unclaimed stripe that no relay holds and of whose group `lost` is true.
    pub(super) fn orphan(&self, lost: impl Fn(u32) -> bool) -> Option<u32> {
        self.queues.iter().filter(|((_, group), _)| lost(*group)).find_map(|(_, queue)| {
            let ids = queue.fresh.iter().chain(&queue.given).map(|turn| self.at(*turn));
            ids.min_by_key(|id| (self.held[*id as usize], *id)).filter(|id| self.held[*id as usize] == 0)
        })
    }
}
