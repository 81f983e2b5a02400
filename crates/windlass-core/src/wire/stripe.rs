//! How a transfer is cut into stripes.
//!
//! [`StripePlan`] is a pure function of the ticket and the block sizes, so both sides cut alike without
//! negotiation. The rule is part of [the specification](super).

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;

use super::ticket::{Checks, MAX_SOURCES, Mode, Payload, SourceId, Ticket, TicketError};
use super::{MAX_BLOCKS_PER_STRIPE, MAX_STRIPE_BYTES, MAX_STRIPES};
use crate::ranges::BlockRanges;

/// The extent of a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// Whole blocks of the image.
    Blocks {
        first: u32,
        /// How many wanted blocks, counted from the first in ascending order.
        count: u32,
    },
    /// Bytes of a delta payload.
    Bytes {
        /// Which payload of the ticket.
        payload: u32,
        /// Where in the payload it starts.
        offset: u64,
        len: u32,
    },
}

/// The unit of claiming, acknowledging and retrying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    /// Its index in the plan.
    pub id: u32,
    pub extent: Extent,
    /// Its bytes on the wire.
    pub bytes: u32,
    /// Which set of holders, see [`StripePlan::holders`].
    group: u32,
}

/// A set of sources, by their position in the ticket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceSet([u64; MAX_SOURCES / 64]);

impl SourceSet {
    fn bit(position: usize) -> (usize, u64) {
        (position / 64, 1 << (position % 64))
    }

    /// Adds a source. Positions beyond the limit of a ticket are ignored.
    pub fn insert(&mut self, position: usize) {
        let (word, bit) = Self::bit(position);
        if let Some(w) = self.0.get_mut(word) {
            *w |= bit;
        }
    }

    /// Takes a source out.
    pub fn remove(&mut self, position: usize) {
        let (word, bit) = Self::bit(position);
        if let Some(w) = self.0.get_mut(word) {
            *w &= !bit;
        }
    }

    /// Whether a source is in the set.
    pub fn contains(&self, position: usize) -> bool {
        let (word, bit) = Self::bit(position);
        self.0.get(word).is_some_and(|w| w & bit != 0)
    }

    /// How many sources.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|w| w.count_ones()).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    /// Whether every source of this set is in `other`.
    pub fn is_subset(&self, other: &SourceSet) -> bool {
        self.0.iter().zip(other.0).all(|(a, b)| a & !b == 0)
    }
}

/// All stripes of a ticket. The same on both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripePlan {
    stripes: Vec<Stripe>,
    groups: Vec<SourceSet>,
    sources: Vec<SourceId>,
    wanted: BlockRanges,
    checks: Checks,
}

impl StripePlan {
    /// Cuts a ticket's transfer into stripes. `block_bytes` gives the size of a block, `None` for one that
    /// the manifest does not have.
    pub fn new(ticket: &Ticket, block_bytes: impl Fn(u32) -> Option<u64>) -> Result<StripePlan, TicketError> {
        let mut cutter = Cutter { target: ticket.stripe_bytes, ..Cutter::default() };
        match &ticket.mode {
            Mode::Full => cutter.blocks(ticket, block_bytes)?,
            Mode::Delta { payloads, .. } => cutter.payloads(ticket, payloads)?,
        }
        Ok(StripePlan {
            stripes: cutter.stripes,
            groups: cutter.groups,
            sources: ticket.sources.iter().map(|s| s.id).collect(),
            wanted: ticket.wanted.clone(),
            checks: ticket.checks,
        })
    }

    /// The stripes, in order of their ids.
    pub fn stripes(&self) -> &[Stripe] {
        &self.stripes
    }

    /// One stripe.
    pub fn get(&self, id: u32) -> Option<Stripe> {
        self.stripes.get(id as usize).copied()
    }

    /// Bytes of all stripes.
    pub fn bytes(&self) -> u64 {
        self.stripes.iter().map(|s| u64::from(s.bytes)).sum()
    }

    /// The sources that can serve a stripe, by position in the ticket.
    pub fn holders(&self, stripe: &Stripe) -> SourceSet {
        self.group_holders(stripe.group)
    }

    pub(super) fn group_holders(&self, group: u32) -> SourceSet {
        self.groups.get(group as usize).copied().unwrap_or_default()
    }

    /// The blocks of a stripe, ascending; none for bytes of a delta.
    pub fn blocks<'p>(&'p self, stripe: &Stripe) -> impl Iterator<Item = Range<u32>> + use<'p> {
        let (first, mut left) = match stripe.extent {
            Extent::Blocks { first, count } => (first, count),
            Extent::Bytes { .. } => (0, 0),
        };
        self.wanted.ranges_from(first).map_while(move |run| {
            let take = left.min(run.end - run.start);
            left -= take;
            (take > 0).then_some(run.start..run.start + take)
        })
    }

    /// How stripes are checked.
    pub fn checks(&self) -> Checks {
        self.checks
    }

    /// The ticket's sources, in its order.
    pub fn sources(&self) -> &[SourceId] {
        &self.sources
    }

    /// The position of a source in the ticket.
    pub fn source_position(&self, id: SourceId) -> Option<usize> {
        self.sources.iter().position(|s| *s == id)
    }

    pub(super) fn group(stripe: &Stripe) -> u32 {
        stripe.group
    }
}

#[derive(Default)]
struct Cutter {
    target: u32,
    stripes: Vec<Stripe>,
    groups: Vec<SourceSet>,
    index: BTreeMap<SourceSet, u32>,
    open: Option<Stripe>,
}

impl Cutter {
    fn group(&mut self, holders: SourceSet) -> u32 {
        *self.index.entry(holders).or_insert_with(|| {
            self.groups.push(holders);
            self.groups.len() as u32 - 1
        })
    }

    fn close(&mut self) -> Result<(), TicketError> {
        if let Some(stripe) = self.open.take() {
            if self.stripes.len() >= MAX_STRIPES as usize {
                return Err(TicketError::TooManyStripes);
            }
            self.stripes.push(Stripe { id: self.stripes.len() as u32, ..stripe });
        }
        Ok(())
    }

    fn blocks(
        &mut self,
        ticket: &Ticket,
        block_bytes: impl Fn(u32) -> Option<u64>,
    ) -> Result<(), TicketError> {
        for (range, holders) in held_pieces(ticket) {
            let group = self.group(holders);
            for block in range {
                let bytes = block_bytes(block).ok_or(TicketError::UnknownBlock { block })?;
                let max = MAX_STRIPE_BYTES;
                let bytes = u32::try_from(bytes)
                    .ok()
                    .filter(|b| *b <= max)
                    .ok_or(TicketError::BlockTooLarge { block, bytes, max })?;
                self.push(block, bytes, group)?;
            }
        }
        self.close()
    }

    fn push(&mut self, block: u32, bytes: u32, group: u32) -> Result<(), TicketError> {
        if let Some(Stripe { extent: Extent::Blocks { count, .. }, bytes: have, group: g, .. }) =
            &mut self.open
            // Both are at most MAX_STRIPE_BYTES: the sum cannot overflow.
            && *g == group
            && *have + bytes <= self.target
            && *count < MAX_BLOCKS_PER_STRIPE
        {
            *count += 1;
            *have += bytes;
            return Ok(());
        }
        self.close()?;
        self.open = Some(Stripe { id: 0, extent: Extent::Blocks { first: block, count: 1 }, bytes, group });
        Ok(())
    }

    fn payloads(&mut self, ticket: &Ticket, payloads: &[Payload]) -> Result<(), TicketError> {
        for (payload, part) in payloads.iter().enumerate() {
            let mut holders = SourceSet::default();
            part.sources.iter().filter_map(|id| ticket.source_position(*id)).for_each(|p| holders.insert(p));
            let group = self.group(holders);
            let mut offset = 0;
            while offset < part.bytes {
                let len = (part.bytes - offset).min(self.target.into()) as u32;
                let extent = Extent::Bytes { payload: payload as u32, offset, len };
                self.open = Some(Stripe { id: 0, extent, bytes: len, group });
                self.close()?;
                offset += u64::from(len);
            }
        }
        Ok(())
    }
}

/// The wanted blocks, ascending, in pieces that have one set of holders each.
fn held_pieces(ticket: &Ticket) -> Vec<(Range<u32>, SourceSet)> {
    let mut edges: Vec<(u32, usize, bool)> = Vec::new();
    for (position, source) in ticket.sources.iter().enumerate() {
        for range in source.blocks.ranges() {
            edges.push((range.start, position, true));
            edges.push((range.end, position, false));
        }
    }
    edges.sort_unstable();
    let mut pieces = Vec::new();
    let (mut holders, mut at) = (SourceSet::default(), 0);
    for (block, position, opens) in edges {
        if block > at && !holders.is_empty() {
            for run in ticket.wanted.ranges_from(at).take_while(|run| run.start < block) {
                pieces.push((run.start..run.end.min(block), holders));
            }
        }
        at = block;
        if opens {
            holders.insert(position);
        } else {
            holders.remove(position);
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::super::testing::{full_ticket, source};
    use super::*;
    use crate::wire::Ticket;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const BLOCK: u64 = 30_000;

    fn plan(ticket: &Ticket) -> StripePlan {
        StripePlan::new(ticket, |b| Some(BLOCK + u64::from(b % 3))).unwrap()
    }

    fn set(ranges: &[Range<u32>]) -> BlockRanges {
        ranges.iter().cloned().collect()
    }

    proptest! {
        #[test]
        fn stripes_hold_every_wanted_block_once_and_fit_their_sources(
            a in proptest::collection::vec((0u32..200, 1u32..40), 1..6),
            b in proptest::collection::vec((0u32..200, 1u32..40), 1..6),
            drop in proptest::collection::vec((0u32..200, 1u32..20), 0..4),
        ) {
            let of = |v: &[(u32, u32)]| v.iter().map(|&(s, n)| s..s + n).collect::<BlockRanges>();
            let (a, b) = (of(&a), of(&b));
            let wanted = a.union(&b).difference(&of(&drop));
            prop_assume!(!wanted.is_empty());
            let ticket = full_ticket(wanted.clone(), vec![source(7, a.clone()), source(3, b.clone())]);
            let plan = plan(&ticket);
            let mut next = wanted.iter();
            for stripe in plan.stripes() {
                let Extent::Blocks { first, count } = stripe.extent else { panic!("bytes") };
                let blocks: Vec<u32> = plan.blocks(stripe).flatten().collect();
                prop_assert_eq!((blocks[0], blocks.len() as u32), (first, count));
                let bytes: u64 = blocks.iter().map(|b| BLOCK + u64::from(b % 3)).sum();
                prop_assert_eq!(u64::from(stripe.bytes), bytes);
                prop_assert!(stripe.bytes <= ticket.stripe_bytes || count == 1);
                let holders = plan.holders(stripe);
                for block in blocks {
                    prop_assert_eq!(next.next(), Some(block));
                    prop_assert_eq!(holders.contains(0), a.contains(block));
                    prop_assert_eq!(holders.contains(1), b.contains(block));
                }
            }
            prop_assert_eq!(next.next(), None);
            let ids: BTreeSet<u32> = plan.stripes().iter().map(|s| s.id).collect();
            prop_assert_eq!(ids.len(), plan.stripes().len());
        }
    }

    #[test]
    fn stripes_step_over_unwanted_blocks_and_are_cut_at_the_target() {
        // 64 KiB take two blocks of 30 000 bytes.
        let ticket = full_ticket(set(&[0..1, 5..8, 100..102]), vec![source(0, (0..200).into())]);
        let extents: Vec<_> = plan(&ticket).stripes().iter().map(|s| s.extent).collect();
        let blocks = |first, count| Extent::Blocks { first, count };
        assert_eq!(extents, [blocks(0, 2), blocks(6, 2), blocks(100, 2)]);
    }

    #[test]
    fn tiny_blocks_are_cut_at_the_count_that_one_list_of_sums_can_hold() {
        let n = 2 * MAX_BLOCKS_PER_STRIPE + 1;
        let ticket = full_ticket((0..n).into(), vec![source(0, (0..n).into())]);
        let plan = StripePlan::new(&ticket, |_| Some(1)).unwrap();
        let counts: Vec<_> = plan.stripes().iter().map(|s| s.bytes).collect();
        assert_eq!(counts, [MAX_BLOCKS_PER_STRIPE, MAX_BLOCKS_PER_STRIPE, 1]);
    }

    #[test]
    fn a_delta_is_cut_by_bytes_per_payload() {
        let ticket = super::super::testing::delta_ticket(&[150_000, 10]);
        let plan = StripePlan::new(&ticket, |_| None).unwrap();
        let step: u32 = 64 << 10;
        let bytes = |payload, offset: u32, len| Extent::Bytes { payload, offset: offset.into(), len };
        let extents: Vec<_> = plan.stripes().iter().map(|s| s.extent).collect();
        let expected = [
            bytes(0, 0, step),
            bytes(0, step, step),
            bytes(0, 2 * step, 150_000 - 2 * step),
            bytes(1, 0, 10),
        ];
        assert_eq!(extents, expected);
        assert_eq!(plan.bytes(), 150_010);
    }

    #[test]
    fn blocks_that_the_manifest_lacks_or_no_stripe_can_carry_are_named() {
        let ticket = full_ticket((0..9).into(), vec![source(0, (0..9).into())]);
        let unknown = StripePlan::new(&ticket, |b| (b < 4).then_some(1));
        assert_eq!(unknown, Err(TicketError::UnknownBlock { block: 4 }));
        let large = StripePlan::new(&ticket, |b| Some(if b == 2 { u64::MAX } else { 1 }));
        assert!(matches!(large, Err(TicketError::BlockTooLarge { block: 2, .. })));
        let huge = super::super::testing::delta_ticket(&[u64::MAX]);
        assert_eq!(StripePlan::new(&huge, |_| None), Err(TicketError::TooManyStripes));
    }
}
