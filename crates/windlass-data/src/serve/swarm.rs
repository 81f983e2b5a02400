//! Receivers of one version that pass it on to each other: who they are, and whom each of them asks.
//!
//! Owns: [`Swarms`]. A receiver that can relay says so with its request, and where: it becomes a member of the swarm of what
//! it gets. The swarm's board has what the agent has given to any of them; see [`windlass_core::wire::Claims`] for what they
//! make of that. Called by the server under its lock. Must not: wait, or know files and sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;
use windlass_core::identity::Version;
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::{Brought, Relays};
use windlass_core::wire::{
    Mode, RELAYS, Relay, RelayOffer, SourceId, Swarm, TicketFields, TicketId, neighbours,
};

use xxhash_rust::xxh3::xxh3_128;

use super::ServeError;
use crate::tcp::Board;

/// Relays are named from here on, beyond all sources of a ticket.
const FIRST_RELAY: u32 = 1 << 16;
/// Versions whose receivers are remembered, and those that are shown.
const KEPT: usize = 8;
const SHOWN: usize = 2;

/// A version, whole or as a delta from a base.
type Way = (Version, Option<Version>);
/// What is passed on: a version, and of which blocks.
pub(super) type Cargo = (Way, SliceKey);

/// Names a set of blocks.
pub(super) type SliceKey = u128;

/// The name of these blocks.
pub(super) fn slice_key(blocks: &BlockRanges) -> SliceKey {
    let mut bytes = Vec::new();
    blocks.encode(&mut bytes);
    xxh3_128(&bytes)
}

/// What a ticket is for.
pub(super) fn cargo(ticket: &TicketFields) -> Cargo {
    let base = match &ticket.mode {
        Mode::Full => None,
        Mode::Delta { base, .. } => Some(base.identity.version),
    };
    ((ticket.identity.version, base), slice_key(&ticket.wanted))
}

/// Deltas below this size are not worth finding each other for.
pub(super) const LEAST: u64 = 256 << 10;

#[derive(Debug)]
struct Member {
    instance: String,
    name: String,
    ticket: TicketId,
    /// None when it has asked again since.
    offer: Option<RelayOffer>,
    /// The ranks of those that it was told of.
    told: BTreeSet<u32>,
    /// What it got from whom, once it has everything.
    brought: Vec<Brought>,
}

#[derive(Debug, Default)]
struct Gathering {
    board: Arc<Board>,
    /// By rank.
    members: Vec<Member>,
}

impl Gathering {
    /// Whom a member should ask and was not told of yet; counts them as told.
    fn relays(&mut self, rank: u32) -> Relays {
        let receivers = self.members.len() as u32;
        let mut near = neighbours(rank, receivers, RELAYS);
        if let Some(member) = self.members.get_mut(rank as usize) {
            near.retain(|other| member.told.insert(*other));
        }
        let relay = |other: u32| {
            let member = self.members.get(other as usize)?;
            let (id, name) = (SourceId(FIRST_RELAY + other), member.name.clone());
            Some(Relay { id, name, offer: member.offer.clone()? })
        };
        Relays { receivers, relays: near.into_iter().filter_map(relay).collect() }
    }
}

/// Who passed on what of a version, for people.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Passed {
    pub version: Version,
    /// The version that the delta starts from; none for whole images.
    pub base: Option<Version>,
    /// How many receivers there are.
    pub receivers: usize,
    /// By receiver, those that have everything.
    pub edges: Vec<Edge>,
}

/// What one receiver got from one source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Edge {
    pub to: String,
    #[serde(flatten)]
    pub brought: Brought,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Swarms {
    all: BTreeMap<Way, BTreeMap<SliceKey, Gathering>>,
    tickets: BTreeMap<TicketId, (Cargo, u32)>,
}

impl Swarms {
    fn gathering(&mut self, (way, slice): Cargo) -> &mut Gathering {
        if !self.all.contains_key(&way) {
            while self.all.len() >= KEPT {
                self.all.pop_first();
            }
            let Swarms { all, tickets } = self;
            tickets.retain(|_, ((way, _), _)| all.contains_key(way));
        }
        self.all.entry(way).or_default().entry(slice).or_default()
    }

    fn find(&mut self, ticket: TicketId) -> Option<(&mut Gathering, u32)> {
        let ((way, slice), rank) = *self.tickets.get(&ticket)?;
        Some((self.all.get_mut(&way)?.get_mut(&slice)?, rank))
    }

    /// What has been given of `cargo`, for holders of a part that do not lead.
    pub(super) fn board(&mut self, cargo: Cargo) -> Arc<Board> {
        Arc::clone(&self.gathering(cargo).board)
    }

    /// A receiver, by its id and its name, gets `ticket` for `cargo`, and relays by `offer`. So many are expected in all.
    pub(super) fn join(
        &mut self,
        cargo: Cargo,
        expected: u32,
        (instance, name): (&str, String),
        ticket: TicketId,
        offer: RelayOffer,
    ) -> (Swarm, Arc<Board>) {
        let gathering = self.gathering(cargo);
        // A receiver that asks again has nothing to pass on from before.
        gathering.members.iter_mut().filter(|m| m.instance == instance).for_each(|m| m.offer = None);
        let rank = gathering.members.len() as u32;
        let (instance, offer) = (instance.to_owned(), Some(offer));
        gathering.members.push(Member {
            instance,
            name,
            ticket,
            offer,
            told: BTreeSet::new(),
            brought: Vec::new(),
        });
        let Relays { receivers, relays } = gathering.relays(rank);
        let receivers = receivers.max(expected);
        let joined = (Swarm { rank, receivers, relays }, Arc::clone(&gathering.board));
        self.tickets.insert(ticket, (cargo, rank));
        joined
    }

    /// Whom else the holder of a ticket asks, if there are clearly more receivers than it knows of, or any more where there is
    /// no `hurry`: not every single one is news for all.
    pub(super) fn relays(
        &mut self,
        ticket: TicketId,
        known: u32,
        hurry: bool,
    ) -> Result<Option<Relays>, ServeError> {
        let (gathering, rank) = self.find(ticket).ok_or(ServeError::UnknownTicket { ticket })?;
        let least = if hurry { known.saturating_add(known / 4) } else { known };
        Ok((gathering.members.len() as u32 > least).then(|| gathering.relays(rank)))
    }

    /// A receiver has everything. Answers how many bytes other receivers gave it.
    pub(super) fn done(&mut self, ticket: TicketId, brought: Vec<Brought>) -> u64 {
        let Some((gathering, rank)) = self.find(ticket) else { return 0 };
        let relayed = brought.iter().filter(|b| b.by.is_some()).map(|b| b.bytes).sum();
        if let Some(member) = gathering.members.get_mut(rank as usize).filter(|m| m.ticket == ticket) {
            member.brought = brought;
        }
        relayed
    }

    /// Who passed on what of the newest versions, the newest first.
    pub(super) fn passed(&self) -> Vec<Passed> {
        let passed = |(&(version, base), slices): (&Way, &BTreeMap<SliceKey, Gathering>)| {
            let members = || slices.values().flat_map(|g| &g.members);
            let edge = |m: &Member, brought: &Brought| Edge { to: m.name.clone(), brought: brought.clone() };
            let edges = members().flat_map(|m| m.brought.iter().map(move |b| edge(m, b))).collect();
            Passed { version, base, receivers: members().count(), edges }
        };
        self.all.iter().rev().map(passed).filter(|p| p.receivers > 0).take(SHOWN).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_core::wire::TicketKey;

    fn offer(n: u8) -> RelayOffer {
        RelayOffer {
            endpoint: format!("host-{n}.example:7").parse().unwrap(),
            tls: false,
            id: TicketId([n; 16]),
            key: TicketKey::new([n; 32]),
        }
    }

    fn join(
        swarms: &mut Swarms,
        cargo: Way,
        name: &str,
        ticket: TicketId,
        offer: RelayOffer,
    ) -> (Swarm, Arc<Board>) {
        swarms.join((cargo, 0), 0, (name, format!("host-{name}")), ticket, offer)
    }

    #[test]
    fn a_receiver_is_told_of_those_before_it_and_then_of_those_after_it() {
        let mut swarms = Swarms::default();
        let ticket = |n: u8| TicketId([100 + n; 16]);
        let (alone, board) = join(&mut swarms, (7, None), "a", ticket(0), offer(0));
        assert_eq!((alone.rank, alone.receivers, alone.relays.len()), (0, 1, 0));
        let (second, same) = join(&mut swarms, (7, None), "b", ticket(1), offer(1));
        assert_eq!((second.rank, second.receivers), (1, 2));
        assert_eq!(second.relays[0].offer, offer(0));
        assert!(Arc::ptr_eq(&board, &same));
        let found = swarms.relays(ticket(0), 1, true).unwrap().unwrap();
        assert_eq!((found.receivers, &found.relays[0].offer), (2, &offer(1)));
        assert_eq!(swarms.relays(ticket(0), 2, true).unwrap(), None, "no new one");
        assert!(swarms.relays(ticket(9), 0, true).is_err());
        // A delta to the same version is something else, and what a restarted receiver had is gone.
        let (other, _) = join(&mut swarms, (7, Some(6)), "b", ticket(2), offer(2));
        assert_eq!(other.rank, 0);
        join(&mut swarms, (7, None), "a", ticket(3), offer(3));
        let found = swarms.relays(ticket(1), 2, true).unwrap().unwrap();
        assert_eq!(found.relays.iter().map(|r| &r.offer).collect::<Vec<_>>(), [&offer(3)]);
    }

    #[test]
    fn receivers_of_other_blocks_are_others_and_are_shown_together() {
        let mut swarms = Swarms::default();
        let (_, whole) = join(&mut swarms, (7, None), "a", TicketId([1; 16]), offer(1));
        let slice = ((7, None), slice_key(&(0..5).into()));
        let (swarm, board) = swarms.join(slice, 0, ("b", "b".into()), TicketId([2; 16]), offer(2));
        assert_eq!((swarm.rank, swarm.relays.len()), (0, 0));
        assert!(!Arc::ptr_eq(&whole, &board));
        let [passed] = &swarms.passed()[..] else { panic!("{:?}", swarms.passed()) };
        assert_eq!(passed.receivers, 2);
    }

    #[test]
    fn who_passed_on_what_is_told_once_a_receiver_has_everything() {
        let mut swarms = Swarms::default();
        join(&mut swarms, (7, Some(6)), "a", TicketId([1; 16]), offer(1));
        let brought = |by: Option<&str>, bytes| Brought { by: by.map(str::to_owned), bytes, rate: 1.0 };
        let both = vec![brought(None, 10), brought(Some("host-b"), 20)];
        assert_eq!(swarms.done(TicketId([1; 16]), both.clone()), 20);
        assert_eq!(swarms.done(TicketId([2; 16]), both.clone()), 0, "an unknown ticket");
        let edges = both.into_iter().map(|brought| Edge { to: "host-a".into(), brought }).collect();
        assert_eq!(swarms.passed(), [Passed { version: 7, base: Some(6), receivers: 1, edges }]);
    }

    #[test]
    fn among_many_not_every_single_one_is_news() {
        let mut swarms = Swarms::default();
        for n in 0..40 {
            join(&mut swarms, (7, None), &n.to_string(), TicketId([n; 16]), offer(n));
        }
        assert_eq!(swarms.relays(TicketId([0; 16]), 35, true).unwrap(), None);
        assert!(swarms.relays(TicketId([0; 16]), 38, false).unwrap().is_some());
        assert!(swarms.relays(TicketId([0; 16]), 20, true).unwrap().is_some());
    }

    #[test]
    fn only_the_newest_versions_are_remembered() {
        let mut swarms = Swarms::default();
        for version in 0..100 {
            join(&mut swarms, (version, None), "a", TicketId([version as u8; 16]), offer(0));
        }
        assert_eq!(swarms.all.len(), KEPT);
        assert!(swarms.relays(TicketId([3; 16]), 0, true).is_err());
        assert!(swarms.relays(TicketId([99; 16]), 0, true).is_ok());
    }
}
