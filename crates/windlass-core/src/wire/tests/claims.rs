use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::super::testing::{full_ticket, source};
use super::super::*;
use crate::error::Kind;
use crate::ranges::BlockRanges;

const DEADLINE: Duration = Duration::from_mins(1);
const POLICY: ClaimPolicy = ClaimPolicy {
    deadline: DEADLINE,
    stripe_timeout: Duration::from_secs(5),
    max_bad: 2,
    stall: Duration::from_millis(500),
};

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn stream(index: u16, epoch: u16) -> StreamId {
    StreamId { index, epoch }
}

/// Blocks 0..20 with source 0 and 10..30 with source 1, one block to a stripe.
fn two_sources() -> Claims {
    let wanted = BlockRanges::from(0..30);
    let ticket = full_ticket(wanted, vec![source(0, (0..20).into()), source(1, (10..30).into())]);
    Claims::new(StripePlan::new(&ticket, |_| Some(60_000)).unwrap(), POLICY)
}

fn granted(grant: Result<Grant, WireError>) -> Option<(u32, u16)> {
    match grant.unwrap() {
        Grant::Stripe { stripe, attempt } => Some((stripe.id, attempt)),
        Grant::Wait | Grant::Finished => None,
    }
}

#[derive(Clone, Debug)]
enum Op {
    Join(u16),
    Claim(u16),
    Complete(u16),
    Bad(u16),
    Lose(u16),
}

fn any_op() -> impl Strategy<Value = Op> {
    let lane = 0u16..5;
    prop_oneof![
        2 => lane.clone().prop_map(Op::Join),
        6 => lane.clone().prop_map(Op::Claim),
        4 => lane.clone().prop_map(Op::Complete),
        1 => lane.clone().prop_map(Op::Bad),
        1 => lane.prop_map(Op::Lose),
    ]
}

/// What must be true, kept apart from the book itself.
#[derive(Default)]
struct Shadow {
    epochs: BTreeMap<u16, u16>,
    live: BTreeMap<u16, Vec<u32>>,
    acknowledged: BTreeSet<u32>,
}

impl Shadow {
    fn step(&mut self, claims: &mut Claims, op: &Op, now: Duration) -> Result<(), TestCaseError> {
        let id = |lane: u16, shadow: &Shadow| stream(lane, shadow.epochs.get(&lane).copied().unwrap_or(0));
        match *op {
            Op::Join(lane) => {
                let epoch = self.epochs.get(&lane).map_or(0, |e| e + 1);
                claims.join(stream(lane, epoch), SourceId(u32::from(lane % 2)), now).unwrap();
                self.epochs.insert(lane, epoch);
                self.live.insert(lane, Vec::new());
            }
            Op::Claim(lane) => {
                let answer = claims.claim(id(lane, self), now);
                if !self.live.contains_key(&lane) {
                    let finished = self.acknowledged.len() == claims.plan().stripes().len();
                    prop_assert_eq!(answer.is_ok(), finished);
                    return Ok(());
                }
                if let Grant::Stripe { stripe, .. } = answer.unwrap() {
                    prop_assert!(!self.acknowledged.contains(&stripe.id), "handed out after its Ack");
                    prop_assert!(self.live.values().flatten().all(|s| *s != stripe.id), "held twice");
                    prop_assert!(claims.plan().holders(&stripe).contains(usize::from(lane % 2)));
                    self.live.get_mut(&lane).unwrap().push(stripe.id);
                }
            }
            Op::Complete(lane) => {
                let held = self.live.get_mut(&lane).and_then(Vec::pop);
                if let Some(stripe) = held {
                    claims.complete(id(lane, self), stripe, now).unwrap();
                    prop_assert!(self.acknowledged.insert(stripe), "acknowledged twice");
                    prop_assert!(claims.complete(id(lane, self), stripe, now).is_err());
                }
            }
            Op::Bad(lane) => {
                if let Some(stripe) = self.live.get_mut(&lane).and_then(Vec::pop) {
                    claims.bad(id(lane, self), stripe, Verdict::BadStripe, now).unwrap();
                }
            }
            Op::Lose(lane) => {
                let held = self.live.remove(&lane).unwrap_or_default();
                prop_assert_eq!(claims.lost(id(lane, self)), held.len());
                for stripe in held {
                    prop_assert!(claims.complete(id(lane, self), stripe, now).is_err(), "heard after loss");
                }
            }
        }
        let open: usize = self.live.values().map(Vec::len).sum();
        let progress = claims.progress();
        prop_assert_eq!(progress.stripes_open as usize, open);
        prop_assert_eq!(progress.stripes_done as usize, self.acknowledged.len());
        prop_assert_eq!(progress.live as usize, self.live.len());
        Ok(())
    }
}

proptest! {
    #[test]
    fn every_stripe_is_acknowledged_exactly_once_whatever_is_lost(
        ops in proptest::collection::vec(any_op(), 0..300)
    ) {
        let mut claims = two_sources();
        claims = Claims::new(claims.plan().clone(), ClaimPolicy { max_bad: u16::MAX, ..POLICY });
        let mut shadow = Shadow::default();
        for op in &ops {
            shadow.step(&mut claims, op, at(1))?;
        }
        // Whatever has happened, two healthy streams finish it once the others are gone.
        for lane in 0..5 {
            shadow.step(&mut claims, &Op::Lose(lane), at(2))?;
        }
        for lane in [0, 1] {
            shadow.step(&mut claims, &Op::Join(lane), at(2))?;
        }
        for _ in 0..30 {
            for lane in [0, 1] {
                shadow.step(&mut claims, &Op::Claim(lane), at(2))?;
                shadow.step(&mut claims, &Op::Complete(lane), at(2))?;
            }
        }
        prop_assert_eq!(shadow.acknowledged.len(), 30);
        prop_assert_eq!(claims.outcome(at(2)), Outcome::Finished);
        prop_assert_eq!(claims.progress().bytes_done, 30 * 60_000);
        let late = stream(0, shadow.epochs[&0]);
        prop_assert_eq!(claims.claim(late, DEADLINE + at(1)), Ok(Grant::Finished));
    }

    #[test]
    fn after_the_deadline_nothing_is_handed_out_or_acknowledged(
        ops in proptest::collection::vec(any_op(), 0..60),
        late in prop_oneof![Just(0u64), 1u64..1000],
    ) {
        let mut claims = two_sources();
        claims = Claims::new(claims.plan().clone(), ClaimPolicy { max_bad: u16::MAX, ..POLICY });
        let mut shadow = Shadow::default();
        for op in &ops {
            shadow.step(&mut claims, op, DEADLINE.checked_sub(Duration::from_nanos(1)).unwrap())?;
        }
        prop_assume!(shadow.acknowledged.len() < 30);
        let (now, before) = (DEADLINE + at(late), claims.progress());
        for lane in 0..5 {
            let id = stream(lane, shadow.epochs.get(&lane).copied().unwrap_or(0));
            let error = claims.claim(id, now).unwrap_err();
            prop_assert_eq!(error.kind(), Kind::Timeout);
            for stripe in shadow.live.get(&lane).into_iter().flatten() {
                prop_assert_eq!(claims.complete(id, *stripe, now).unwrap_err().kind(), Kind::Timeout);
            }
            let next = stream(lane, id.epoch + 1);
            prop_assert!(claims.join(next, SourceId(0), now).is_err());
        }
        prop_assert_eq!(claims.progress(), before);
        let left = 30 - shadow.acknowledged.len() as u32;
        let failed = Outcome::Failed(Failure::Deadline { left, total: 30 });
        // It stays failed, whatever time is shown to it afterwards.
        prop_assert_eq!(claims.outcome(at(0)), failed);
    }
}

#[test]
fn scarce_stripes_are_fetched_first() {
    let mut claims = two_sources();
    claims.join(stream(0, 0), SourceId(0), at(0)).unwrap();
    claims.join(stream(1, 0), SourceId(1), at(0)).unwrap();
    let first = granted(claims.claim(stream(0, 0), at(0))).unwrap();
    let second = granted(claims.claim(stream(1, 0), at(0))).unwrap();
    assert_eq!((first, second), ((0, 0), (20, 0)), "what both hold is left for later");
}

#[test]
fn a_slow_stream_holds_up_nothing_but_its_own_stripe() {
    let mut claims = two_sources();
    for lane in 0..3 {
        claims.join(stream(lane, 0), SourceId(u32::from(lane % 2)), at(0)).unwrap();
    }
    let (slow, _) = granted(claims.claim(stream(2, 0), at(0))).unwrap();
    let mut done = 0;
    for lane in [0, 1].into_iter().cycle().take(100) {
        if let Some((stripe, _)) = granted(claims.claim(stream(lane, 0), at(1))) {
            claims.complete(stream(lane, 0), stripe, at(1)).unwrap();
            done += 1;
        }
    }
    assert_eq!(done, 29);
    assert_eq!(claims.claim(stream(0, 0), at(1)), Ok(Grant::Wait));

    // It is overdue after its timeout, and once it is reset another stream takes over.
    assert_eq!(claims.overdue(stream(2, 0), at(5)), None);
    assert_eq!(claims.overdue(stream(2, 0), at(6)), Some(at(5)));
    assert_eq!(claims.overdue(stream(0, 0), at(6)), None);
    assert_eq!(claims.lost(stream(2, 0)), 1);
    assert_eq!(granted(claims.claim(stream(0, 0), at(6))), Some((slow, 1)));
    assert_eq!(claims.complete(stream(2, 0), slow, at(6)), Err(WireError::NotLive { stream: stream(2, 0) }));
    claims.complete(stream(0, 0), slow, at(6)).unwrap();
    assert_eq!(claims.outcome(at(6)), Outcome::Finished);
}

#[test]
fn a_bad_stripe_is_fetched_again_a_bounded_number_of_times() {
    let mut claims = two_sources();
    claims.join(stream(0, 0), SourceId(0), at(0)).unwrap();
    for attempt in 0..=POLICY.max_bad {
        assert_eq!(granted(claims.claim(stream(0, 0), at(0))), Some((0, attempt)));
        let outcome = claims.bad(stream(0, 0), 0, Verdict::BadBlock(0), at(0));
        assert_eq!(outcome.is_ok(), attempt < POLICY.max_bad, "{attempt}");
    }
    let extent = Extent::Blocks { first: 0, count: 1 };
    let failure = Failure::Bad { stripe: 0, extent, times: 3, verdict: Verdict::BadBlock(0) };
    assert_eq!(failure.kind(), Kind::Corrupt);
    assert_eq!(claims.claim(stream(0, 0), at(0)), Err(WireError::Transfer(failure.clone())));
    assert_eq!(claims.outcome(DEADLINE), Outcome::Failed(failure), "the first failure stays");
}

#[test]
fn a_stream_rejoins_under_a_higher_epoch_only() {
    let mut claims = two_sources();
    claims.join(stream(0, 3), SourceId(0), at(0)).unwrap();
    assert_eq!(granted(claims.claim(stream(0, 3), at(0))), Some((0, 0)));
    for epoch in [2, 3] {
        let error = claims.join(stream(0, epoch), SourceId(0), at(0)).unwrap_err();
        assert_eq!(error, WireError::OldEpoch { stream: stream(0, epoch), current: 3 });
    }
    claims.join(stream(0, 4), SourceId(0), at(0)).unwrap();
    assert_eq!(granted(claims.claim(stream(0, 4), at(0))), Some((0, 1)), "given back by the old epoch");
    let error = claims.complete(stream(0, 3), 0, at(0)).unwrap_err();
    assert_eq!(error, WireError::NotLive { stream: stream(0, 3) });
    assert_eq!(claims.lost(stream(0, 3)), 0, "a late report of the old epoch changes nothing");
    claims.complete(stream(0, 4), 0, at(0)).unwrap();
}

#[test]
fn a_source_given_up_fails_the_transfer_only_if_no_other_source_holds_its_blocks() {
    let wanted = BlockRanges::from(10..30);
    let ticket = full_ticket(wanted, vec![source(0, (0..20).into()), source(1, (10..30).into())]);
    let plan = StripePlan::new(&ticket, |_| Some(60_000)).unwrap();
    let mut claims = Claims::new(plan.clone(), POLICY);
    claims.join(stream(0, 0), SourceId(0), at(0)).unwrap();
    claims.abandon(SourceId(0)).unwrap();
    assert_eq!(claims.outcome(at(0)), Outcome::Running);
    let error = claims.join(stream(0, 1), SourceId(0), at(0)).unwrap_err();
    assert_eq!(error, WireError::UnknownSource { source_id: 0 });

    let mut claims = Claims::new(plan, POLICY);
    let error = claims.abandon(SourceId(1)).unwrap_err();
    assert_eq!(error.kind(), Kind::PeerLost);
    let Outcome::Failed(Failure::NoSource { extent, .. }) = claims.outcome(at(0)) else { panic!() };
    assert_eq!(extent, Extent::Blocks { first: 20, count: 1 });
}

#[test]
fn a_fault_that_ends_the_ticket_ends_the_claims() {
    let mut claims = two_sources();
    claims.join(stream(0, 0), SourceId(0), at(0)).unwrap();
    let fault =
        Fault { kind: Kind::Stale, stage: Stage::Data, stripe: None, message: "overwritten".to_owned() };
    claims.end(fault.clone());
    assert_eq!(claims.claim(stream(0, 0), at(0)).unwrap_err().kind(), Kind::Stale);
    assert_eq!(claims.outcome(at(0)), Outcome::Failed(Failure::Ended(fault)));
}

const ORIGIN: StreamId = StreamId { index: 0, epoch: 0 };
const OTHER: StreamId = StreamId { index: 1, epoch: 0 };
const RELAY: SourceId = SourceId(1000);

/// One of so many receivers of 32 stripes, connected to the origin.
fn among(receivers: u32) -> Claims {
    let ticket = full_ticket((0..32).into(), vec![source(0, (0..32).into())]);
    let plan = StripePlan::new(&ticket, |_| Some(60_000)).unwrap();
    let mut claims = Claims::among(plan, POLICY, Place { rank: 0, receivers });
    claims.join(ORIGIN, SourceId(0), Duration::ZERO).unwrap();
    claims
}

/// The same, connected to a relay too.
fn near_a_relay(receivers: u32) -> Claims {
    let mut claims = among(receivers);
    claims.add_relay(RELAY).unwrap();
    claims.join(OTHER, RELAY, Duration::ZERO).unwrap();
    claims
}

/// Takes stripes from the origin one by one until it is given none. Answers how many.
fn take(claims: &mut Claims, now: Duration) -> usize {
    let next = |claims: &mut Claims| granted(claims.claim(ORIGIN, now)).map(|(stripe, _)| stripe);
    std::iter::from_fn(|| next(claims).inspect(|stripe| claims.complete(ORIGIN, *stripe, now).unwrap()))
        .count()
}

#[test]
fn among_many_receivers_few_stripes_are_open_at_an_origin() {
    for (receivers, open) in [(1, 32), (2, 6), (4, 3), (16, 1), (100, 1)] {
        let mut claims = among(receivers);
        let mut taken: Vec<u32> = Vec::new();
        while let Some((stripe, _)) = granted(claims.claim(ORIGIN, at(0))) {
            taken.push(stripe);
        }
        assert_eq!(taken.len(), open, "of {receivers} receivers");
        claims.complete(ORIGIN, taken[0], at(0)).unwrap();
        assert_eq!(granted(claims.claim(ORIGIN, at(0))).is_some(), open < 32);
    }
}

#[test]
fn an_origin_is_asked_for_what_no_receiver_was_given_however_much_that_is() {
    let mut claims = near_a_relay(16);
    assert_eq!(take(&mut claims, at(0)), 32);
    assert_eq!(claims.outcome(at(0)), Outcome::Finished);
}

#[test]
fn of_what_others_were_given_an_origin_is_asked_for_a_share_that_doubles_with_every_stall() {
    let mut claims = near_a_relay(16);
    claims.holds(ORIGIN, 0..32).unwrap();
    // A sixteenth is two stripes. An eighth more than that is not enough for a third.
    assert_eq!(take(&mut claims, at(0)), 2);
    assert_eq!(take(&mut claims, POLICY.stall / 2), 0, "it is not stalled yet");
    assert_eq!(take(&mut claims, POLICY.stall), 2, "twice the share is four and a half");
    assert_eq!(take(&mut claims, POLICY.stall * 3 / 2), 0, "something came a moment ago");
    assert_eq!(take(&mut claims, POLICY.stall * 2), 5, "four times the share is nine");
}

#[test]
fn without_a_relay_an_origin_is_asked_for_everything_at_once() {
    let mut claims = near_a_relay(16);
    claims.holds(ORIGIN, 0..32).unwrap();
    assert_eq!(take(&mut claims, at(0)), 2);
    claims.lost(OTHER);
    assert_eq!(take(&mut claims, at(0)), 30);
}

#[test]
fn a_relay_that_is_much_slower_than_the_others_is_left_when_only_its_stripe_is_missing() {
    let mut claims = near_a_relay(16);
    claims.holds(OTHER, 31..32).unwrap();
    let (slow, _) = granted(claims.claim(OTHER, at(0))).unwrap();
    let long = POLICY.stall * 3;
    assert_eq!(claims.overdue(OTHER, long), None, "others are not even asked for");
    assert_eq!(take(&mut claims, at(0)), 31);
    // It is the last one, and the others took no time: its limit is the shortest that there is.
    assert_eq!(claims.overdue(OTHER, POLICY.stall), None);
    assert_eq!(claims.overdue(OTHER, long), Some(POLICY.stall));
    claims.lost(OTHER);
    assert_eq!(granted(claims.claim(ORIGIN, long)), Some((slow, 1)));
    // An origin has the whole time.
    assert_eq!(claims.overdue(ORIGIN, long * 2), None);
    assert_eq!(claims.overdue(ORIGIN, long + at(6)), Some(POLICY.stripe_timeout));
}

#[test]
fn relays_may_come_to_hold_what_no_origin_has_any_more_but_not_for_ever() {
    let mut claims = near_a_relay(16);
    claims.abandon(SourceId(0)).unwrap();
    assert_eq!(claims.outcome(POLICY.stall), Outcome::Running);
    claims.holds(OTHER, 0..31).unwrap();
    let began = POLICY.stall * 10;
    while let Some((stripe, _)) = granted(claims.claim(OTHER, began)) {
        claims.complete(OTHER, stripe, began).unwrap();
    }
    assert_eq!(claims.outcome(began + POLICY.stall * 19), Outcome::Running, "stripes came since");
    let Outcome::Failed(failure) = claims.outcome(began + POLICY.stall * 20) else { panic!("it waits on") };
    assert!(matches!(failure, Failure::NoSource { stripe: 31, .. }), "{failure}");
    assert_eq!(failure.kind(), Kind::PeerLost);
}

/// The first stripe that each of so many receivers asks every origin for. Two origins hold so many stripes each.
fn first_claims(receivers: u32, stripes: u32) -> [Vec<Option<u32>>; 2] {
    let halves = [0..stripes, stripes..2 * stripes];
    let sources = (0..).zip(halves).map(|(id, half)| source(id, half.into())).collect();
    let ticket = full_ticket((0..2 * stripes).into(), sources);
    let plan = StripePlan::new(&ticket, |_| Some(60_000)).unwrap();
    [0, 1].map(|origin: u16| {
        let first = |rank| {
            let mut claims = Claims::among(plan.clone(), POLICY, Place { rank, receivers });
            claims.add_relay(SourceId(9)).unwrap();
            claims.join(stream(2, 0), SourceId(9), at(0)).unwrap();
            claims.join(stream(origin, 0), SourceId(origin.into()), at(0)).unwrap();
            granted(claims.claim(stream(origin, 0), at(0))).map(|(id, _)| id)
        };
        (0..receivers).map(first).collect()
    })
}

#[test]
fn receivers_begin_at_other_places_of_every_origin() {
    for (origin, first) in first_claims(16, 64).into_iter().enumerate() {
        let places: BTreeSet<u32> = first.into_iter().flatten().collect();
        assert_eq!(places.len(), 16, "of origin {origin}: {places:?}");
    }
}

#[test]
fn of_few_stripes_not_all_receivers_ask_the_origin() {
    let [one, other] = first_claims(64, 8);
    let askers = |first: &[Option<u32>]| -> BTreeSet<usize> {
        first.iter().enumerate().filter(|(_, id)| id.is_some()).map(|(rank, _)| rank).collect()
    };
    let (one, other) = (askers(&one), askers(&other));
    assert_eq!((one.len(), other.len()), (8, 8));
    assert!(one.is_disjoint(&other), "others ask the other one: {one:?}, {other:?}");
}
