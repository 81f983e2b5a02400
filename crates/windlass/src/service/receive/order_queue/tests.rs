use proptest::prelude::*;
use windlass_core::identity::ModelId;

use super::*;

/// A delta that is none: where it leads from and to.
type Leads = (Identity, Identity);

fn failed(kind: Kind) -> Outcome {
    Outcome::Failed { phase: Phase::Staging, kind, reason: "x".into() }
}

fn id(incarnation: u64, version: Version) -> Identity {
    let model_id = ModelId::new("actor").unwrap();
    Identity { model_id, incarnation: Incarnation(incarnation), version }
}

fn stage(order: u64, identity: &Identity) -> Task {
    let sender_endpoint = "http://a:1".into();
    Task::Stage { order: Order(order), identity: identity.clone(), sender_endpoint }
}

fn load(order: u64, identity: &Identity) -> Task {
    let set = SetName::new("rl").unwrap();
    Task::Load { order: Order(order), set, identities: vec![identity.clone()] }
}

fn abandon(order: u64, identity: &Identity) -> Task {
    Task::Abandon { order: Order(order), identity: identity.clone() }
}

fn dropped(order: u64, identity: &Identity) -> Task {
    Task::Drop { order: Order(order), identity: identity.clone() }
}

fn staged(order: u64, identity: &Identity) -> Answer {
    Answer { order: Order(order), identity: identity.clone(), outcome: Outcome::Staged }
}

fn orders(image: Option<Identity>) -> OrderQueue<Leads> {
    OrderQueue::new(image, 100)
}

/// Carries out a fetch that must be the next thing to do.
fn fetch(orders: &mut OrderQueue<Leads>, from: &Identity, to: &Identity) -> Option<Answer> {
    let now = Instant::now();
    match orders.next_stage(now) {
        Some(Staging::Fetch(stage)) if stage.identity == *to => {
            assert_eq!(orders.next_stage(now), None, "one at a time");
            orders.fetched(stage.order, from, (to, (from.clone(), to.clone()), 10), now)
        }
        other => panic!("{other:?} instead of a delta to {to}"),
    }
}

/// Carries out a load that must be the next thing to do.
fn loads(orders: &mut OrderQueue<Leads>, to: &Identity, deltas: usize) -> Answer {
    match orders.next_load() {
        Some(Loading::Load { identity, apply, .. }) => {
            assert_eq!((&identity, apply), (to, deltas));
            assert_eq!(orders.next_load(), None);
            assert_eq!(orders.take_deltas(apply).len(), apply);
            if apply > 0 {
                orders.applied(apply, Some(identity));
            }
            orders.load_ended(Ok(())).unwrap()
        }
        other => panic!("{other:?} instead of a load of {to}"),
    }
}

#[test]
fn versions_are_staged_in_order_and_queue_until_they_are_loaded() {
    let mut orders = orders(Some(id(1, 4)));
    for (order, version) in [(3, 7), (1, 5), (2, 6)] {
        assert!(!orders.take(&stage(order, &id(1, version))));
    }
    assert_eq!(orders.about(), ("waiting", Some(&id(1, 5))));
    for (order, version) in [(1, 5), (2, 6), (3, 7)] {
        let answer = fetch(&mut orders, &id(1, version - 1), &id(1, version));
        assert_eq!(answer, Some(staged(order, &id(1, version))));
    }
    assert_eq!(orders.about(), ("staged", Some(&id(1, 7))));
    assert_eq!((orders.next_stage(Instant::now()), orders.serves()), (None, Some(&id(1, 4))));
    // The first alone, then two at once.
    orders.take(&load(4, &id(1, 5)));
    assert_eq!(loads(&mut orders, &id(1, 5), 1).outcome, Outcome::Loaded);
    assert_eq!(orders.serves(), Some(&id(1, 5)));
    orders.take(&load(5, &id(1, 7)));
    assert_eq!(loads(&mut orders, &id(1, 7), 2).outcome, Outcome::Loaded);
    assert_eq!((orders.about(), orders.serves()), (("idle", Some(&id(1, 7))), Some(&id(1, 7))));
    // It is there: no work, the same answer.
    orders.take(&stage(6, &id(1, 7)));
    assert_eq!(orders.next_stage(Instant::now()), Some(Staging::Held(staged(6, &id(1, 7)))));
    orders.take(&load(7, &id(1, 7)));
    assert_eq!(loads(&mut orders, &id(1, 7), 0).outcome, Outcome::Loaded);
}

#[test]
fn the_queue_takes_no_more_memory_than_it_may() {
    let mut orders: OrderQueue<Leads> = OrderQueue::new(Some(id(1, 1)), 15);
    for version in 2..6 {
        orders.take(&stage(version, &id(1, version)));
    }
    fetch(&mut orders, &id(1, 1), &id(1, 2)).unwrap();
    fetch(&mut orders, &id(1, 2), &id(1, 3)).unwrap();
    assert_eq!(orders.next_stage(Instant::now()), None, "twenty bytes are waiting");
    orders.take(&load(9, &id(1, 2)));
    loads(&mut orders, &id(1, 2), 1);
    fetch(&mut orders, &id(1, 3), &id(1, 4)).unwrap();
    assert_eq!(orders.next_stage(Instant::now()), None);
}

#[test]
fn image_bytes_wait_for_what_is_staged_and_end_what_is_served() {
    let mut orders = orders(Some(id(1, 1)));
    orders.take(&stage(1, &id(1, 2)));
    orders.take(&stage(2, &id(1, 5)));
    fetch(&mut orders, &id(1, 1), &id(1, 2)).unwrap();
    let now = Instant::now();
    let Some(Staging::Fetch(five)) = orders.next_stage(now) else { panic!() };
    // The history does not reach back that far.
    orders.needs_whole(five.order);
    assert_eq!(orders.next_stage(now), None, "version 2 was promised");
    assert!(orders.ripe().is_some_and(|at| at > now));
    orders.take(&load(3, &id(1, 2)));
    loads(&mut orders, &id(1, 2), 1);
    assert_eq!(orders.serves(), Some(&id(1, 2)));
    assert_eq!(orders.next_stage(now), Some(Staging::Whole(five.clone())));
    assert_eq!(orders.serves(), None, "it is being written over");
    // The newest came, which is not the one that was ordered.
    assert_eq!(orders.replaced(five.order, &id(1, 6), now), Some(staged(2, &id(1, 6))));
    assert_eq!((orders.serves(), orders.about()), (None, ("staged", Some(&id(1, 6)))));
    // What is older than that cannot be had any more, and the answer says what there is.
    orders.take(&stage(4, &id(1, 5)));
    assert_eq!(orders.next_stage(now), Some(Staging::Held(staged(4, &id(1, 6)))));
    orders.take(&load(5, &id(1, 5)));
    let Some(Loading::Missing(answer)) = orders.next_load() else { panic!() };
    assert!(matches!(answer.outcome, Outcome::Failed { phase: Phase::Loading, kind: Kind::Stale, .. }));
    orders.take(&load(6, &id(1, 6)));
    loads(&mut orders, &id(1, 6), 0);
    assert_eq!(orders.serves(), Some(&id(1, 6)));
}

#[test]
fn image_bytes_do_not_wait_for_ever_for_what_a_controller_has_given_up() {
    let mut orders = orders(None);
    let now = Instant::now();
    orders.take(&stage(1, &id(1, 1)));
    let Some(Staging::Whole(one)) = orders.next_stage(now) else { panic!() };
    orders.replaced(one.order, &id(1, 1), now);
    orders.take(&stage(2, &id(1, 9)));
    let Some(Staging::Fetch(nine)) = orders.next_stage(now) else { panic!() };
    orders.needs_whole(nine.order);
    assert_eq!(orders.next_stage(now), None);
    assert_eq!(orders.next_stage(now + STAGED_GRACE), Some(Staging::Whole(nine)));
}

#[test]
fn image_bytes_come_at_once_when_the_controller_gives_up_what_is_staged() {
    let mut orders = orders(Some(id(1, 1)));
    let now = Instant::now();
    orders.take(&stage(1, &id(1, 2)));
    orders.take(&stage(2, &id(1, 9)));
    fetch(&mut orders, &id(1, 1), &id(1, 2)).unwrap();
    let Some(Staging::Fetch(nine)) = orders.next_stage(now) else { panic!() };
    orders.needs_whole(nine.order);
    assert_eq!(orders.next_stage(now), None);
    // The order that staged it was answered; this one has a number of its own.
    assert!(!orders.take(&dropped(3, &id(1, 2))));
    assert_eq!(orders.next_stage(now), Some(Staging::Whole(nine)));
}

#[test]
fn a_newer_incarnation_ends_everything_of_the_older_one() {
    let mut orders = orders(Some(id(1, 8)));
    orders.take(&stage(1, &id(1, 9)));
    orders.take(&stage(2, &id(1, 10)));
    fetch(&mut orders, &id(1, 8), &id(1, 9)).unwrap();
    let Some(Staging::Fetch(ten)) = orders.next_stage(Instant::now()) else { panic!() };
    assert!(orders.take(&stage(3, &id(2, 3))), "the pull is of no use any more");
    assert_eq!(orders.stage_failed(ten.order, Some(id(1, 8)), failed(Kind::Cancelled)), None);
    // What was promised of the older one holds nothing up.
    let Some(Staging::Whole(three)) = orders.next_stage(Instant::now()) else { panic!() };
    assert_eq!(three.identity, id(2, 3));
    assert_eq!(orders.replaced(three.order, &id(2, 3), Instant::now()), Some(staged(3, &id(2, 3))));
    // A late word of the older one does nothing.
    orders.take(&stage(4, &id(1, 11)));
    orders.take(&stage(5, &id(2, 4)));
    fetch(&mut orders, &id(2, 3), &id(2, 4)).unwrap();
    assert_eq!(orders.next_stage(Instant::now()), None);
}

#[test]
fn an_abandoned_order_is_given_up_and_one_that_others_lead_on_from_is_kept() {
    let mut orders = orders(Some(id(1, 1)));
    for version in 2..5 {
        orders.take(&stage(version, &id(1, version)));
    }
    fetch(&mut orders, &id(1, 1), &id(1, 2)).unwrap();
    fetch(&mut orders, &id(1, 2), &id(1, 3)).unwrap();
    let Some(Staging::Fetch(four)) = orders.next_stage(Instant::now()) else { panic!() };
    assert!(orders.take(&abandon(4, &id(1, 4))), "the pull is to end");
    assert_eq!(orders.stage_failed(four.order, Some(id(1, 1)), failed(Kind::Cancelled)), None);
    // Version 3 leads on from 2.
    assert!(!orders.take(&abandon(2, &id(1, 2))));
    orders.take(&load(9, &id(1, 3)));
    assert_eq!(loads(&mut orders, &id(1, 3), 2).outcome, Outcome::Loaded);
    // The last one is dropped, unless a later order asked for the same.
    orders.take(&stage(10, &id(1, 5)));
    fetch(&mut orders, &id(1, 3), &id(1, 5)).unwrap();
    orders.take(&stage(11, &id(1, 5)));
    assert_eq!(orders.next_stage(Instant::now()), Some(Staging::Held(staged(11, &id(1, 5)))));
    orders.take(&abandon(10, &id(1, 5)));
    assert_eq!(orders.about(), ("staged", Some(&id(1, 5))));
    orders.take(&abandon(11, &id(1, 5)));
    assert_eq!(orders.about(), ("idle", Some(&id(1, 3))));
    // A load that was abandoned before it began is none.
    orders.take(&load(12, &id(1, 3)));
    orders.take(&abandon(12, &id(1, 3)));
    assert_eq!(orders.next_load(), None);
}

#[test]
fn an_abandoned_order_that_was_answered_with_something_newer_keeps_nothing() {
    let mut orders = orders(None);
    orders.take(&stage(1, &id(1, 2)));
    orders.take(&stage(2, &id(1, 3)));
    let Some(Staging::Whole(s)) = orders.next_stage(Instant::now()) else { panic!() };
    assert_eq!(orders.replaced(s.order, &id(1, 4), Instant::now()), Some(staged(1, &id(1, 4))));
    assert_eq!(orders.next_stage(Instant::now()), Some(Staging::Held(staged(2, &id(1, 4)))));
    // The second order counts on it still.
    orders.take(&abandon(1, &id(1, 2)));
    assert_eq!(orders.about(), ("staged", Some(&id(1, 4))));
    orders.take(&abandon(2, &id(1, 3)));
    assert_eq!(orders.about(), ("idle", Some(&id(1, 4))));
}

#[test]
fn an_older_load_is_ignored_and_a_newer_one_takes_its_place() {
    let mut orders = orders(Some(id(1, 1)));
    orders.take(&load(7, &id(1, 9)));
    orders.take(&load(8, &id(1, 1)));
    orders.take(&load(5, &id(1, 9)));
    assert_eq!(loads(&mut orders, &id(1, 1), 0).order, Order(8));
    orders.take(&load(8, &id(1, 1)));
    assert_eq!(orders.next_load(), None, "an echo");
    orders.rejoined();
    orders.take(&load(1, &id(1, 1)));
    assert_eq!(loads(&mut orders, &id(1, 1), 0).order, Order(1), "another controller counts anew");
}

#[test]
fn a_new_session_answers_nothing_of_the_last_and_keeps_what_was_fetched() {
    let mut orders = orders(Some(id(1, 1)));
    orders.take(&stage(1, &id(1, 2)));
    orders.take(&stage(2, &id(1, 3)));
    fetch(&mut orders, &id(1, 1), &id(1, 2)).unwrap();
    let Some(Staging::Fetch(three)) = orders.next_stage(Instant::now()) else { panic!() };
    orders.rejoined();
    let delta = (id(1, 2), id(1, 3));
    let answer = orders.fetched(three.order, &id(1, 2), (&id(1, 3), delta, 10), Instant::now());
    assert_eq!(answer, None);
    for version in [2, 3] {
        orders.take(&stage(version + 5, &id(1, version)));
        let held = Staging::Held(staged(version + 5, &id(1, version)));
        assert_eq!(orders.next_stage(Instant::now()), Some(held));
    }
}

#[test]
fn a_delta_whose_base_is_gone_is_fetched_again() {
    let mut orders = orders(Some(id(1, 1)));
    orders.take(&stage(1, &id(1, 2)));
    fetch(&mut orders, &id(1, 1), &id(1, 2)).unwrap();
    orders.take(&stage(2, &id(1, 3)));
    orders.take(&load(3, &id(1, 2)));
    let Some(Staging::Fetch(three)) = orders.next_stage(Instant::now()) else { panic!() };
    let Some(Loading::Load { apply, .. }) = orders.next_load() else { panic!() };
    orders.take_deltas(apply);
    // It could not be applied, and the image is not whole any more.
    orders.applied(apply, None);
    let failed = orders.load_ended(Err((Kind::Corrupt, "a block".into()))).unwrap();
    assert!(matches!(failed.outcome, Outcome::Failed { phase: Phase::Loading, .. }));
    let delta = (id(1, 2), id(1, 3));
    assert_eq!(orders.fetched(three.order, &id(1, 2), (&id(1, 3), delta, 10), Instant::now()), None);
    assert_eq!(orders.next_stage(Instant::now()), Some(Staging::Whole(three)));
    assert_eq!(orders.serves(), None);
}

/// What a controller, a publisher and the threads of a receiver may do to a orders.
#[derive(Clone, Debug)]
enum Act {
    Stage(Version),
    StageNewLife(Version),
    LoadStaged,
    LoadAny(Version),
    Abandon(usize),
    Rejoin,
    BeginStage,
    EndStage { newest: Version, fails: bool, whole: bool },
    BeginLoad,
    EndLoad { fails: bool, broken: bool },
    Grace,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => (1..12u64).prop_map(Act::Stage),
        1 => (1..12u64).prop_map(Act::StageNewLife),
        4 => Just(Act::LoadStaged),
        1 => (1..12u64).prop_map(Act::LoadAny),
        1 => (0..8usize).prop_map(Act::Abandon),
        1 => Just(Act::Rejoin),
        6 => Just(Act::BeginStage),
        6 => (0..4u64, prop::bool::weighted(0.2), prop::bool::weighted(0.2))
            .prop_map(|(newest, fails, whole)| Act::EndStage { newest, fails, whole }),
        4 => Just(Act::BeginLoad),
        4 => (prop::bool::weighted(0.2), prop::bool::weighted(0.3))
            .prop_map(|(fails, broken)| Act::EndLoad { fails, broken }),
        1 => Just(Act::Grace),
    ];
    prop::collection::vec(act, 1..120)
}

proptest! {
    /// However orders, answers and failures come: a delta is applied only to what it leads on from; a load ends with its
    /// very version; nothing of an older incarnation is staged after a newer one was; an open order gets one answer.
    #[test]
    fn whatever_comes_in_whatever_order_a_load_ends_with_its_very_version(acts in acts()) {
        let mut orders = orders(None);
        let (mut now, mut order, mut life) = (Instant::now(), 0u64, 1u64);
        let mut image: Option<Identity> = None;
        let mut under_way: Option<(Staging, Option<Identity>)> = None;
        let mut loading: Option<(Identity, usize)> = None;
        let mut open: BTreeMap<u64, Identity> = BTreeMap::new();
        let mut promised: Vec<Identity> = Vec::new();
        let answered = |answer: Option<Answer>, open: &mut BTreeMap<u64, Identity>, promised: &mut Vec<Identity>| {
            let Some(answer) = answer else { return };
            if let Outcome::Staged = answer.outcome {
                let asked = open.remove(&answer.order.0).expect("an open order");
                assert_eq!(asked.incarnation, answer.identity.incarnation);
                assert!(answer.identity.version >= asked.version);
                promised.push(answer.identity);
            } else {
                open.remove(&answer.order.0);
            }
        };
        for act in acts {
            order += 1;
            match act {
                Act::Stage(version) => {
                    open.insert(order, id(life, version));
                    orders.take(&stage(order, &id(life, version)));
                }
                Act::StageNewLife(version) => {
                    life += 1;
                    open.clear();
                    promised.clear();
                    open.insert(order, id(life, version));
                    orders.take(&stage(order, &id(life, version)));
                }
                Act::LoadStaged => {
                    if let Some(identity) = promised.last() {
                        orders.take(&load(order, identity));
                    }
                }
                Act::LoadAny(version) => { orders.take(&load(order, &id(life, version))); }
                Act::Abandon(nth) => {
                    if let Some((number, identity)) = open.clone().iter().nth(nth) {
                        open.remove(number);
                        orders.take(&abandon(*number, identity));
                    }
                }
                Act::Rejoin => {
                    open.clear();
                    promised.clear();
                    orders.rejoined();
                }
                Act::BeginStage => match orders.next_stage(now) {
                    None => {}
                    Some(Staging::Held(answer)) => answered(Some(answer), &mut open, &mut promised),
                    Some(staging) => {
                        assert!(under_way.is_none());
                        let base = orders.last().map(|(_, to)| to.clone()).or_else(|| {
                            orders.queue.back().map(|w| w.identity.clone()).or_else(|| image.clone())
                        });
                        under_way = Some((staging, base));
                    }
                },
                Act::EndStage { newest, fails, whole } => match under_way.take() {
                    None => {}
                    Some((Staging::Fetch(s), _)) if whole => orders.needs_whole(s.order),
                    Some((Staging::Fetch(s), Some(base))) if !fails => {
                        assert!(base.incarnation == s.identity.incarnation && base < s.identity);
                        let delta = (base.clone(), s.identity.clone());
                        let answer = orders.fetched(s.order, &base, (&s.identity, delta, 10), now);
                        answered(answer, &mut open, &mut promised);
                    }
                    Some((Staging::Whole(s), _)) if !fails => {
                        let got = id(s.identity.incarnation.0, s.identity.version + newest);
                        image = Some(got.clone());
                        answered(orders.replaced(s.order, &got, now), &mut open, &mut promised);
                    }
                    Some((Staging::Fetch(s) | Staging::Whole(s), _)) => {
                        let failed = orders.stage_failed(s.order, image.clone(), failed(Kind::PeerLost));
                        answered(failed, &mut open, &mut promised);
                    }
                    Some((Staging::Held(_), _)) => unreachable!(),
                },
                Act::BeginLoad => match orders.next_load() {
                    Some(Loading::Load { identity, apply, .. }) => {
                        assert!(loading.is_none());
                        loading = Some((identity, apply));
                    }
                    Some(Loading::Missing(_)) | None => {}
                },
                Act::EndLoad { fails, broken } => {
                    let Some((identity, apply)) = loading.take() else { continue };
                    let deltas = orders.take_deltas(apply);
                    assert_eq!(deltas.len(), apply);
                    for (from, to) in deltas {
                        assert_eq!(image.as_ref(), Some(&from), "it leads on from the image");
                        image = Some(to);
                    }
                    assert_eq!(image.as_ref(), Some(&identity));
                    if fails && broken && apply > 0 {
                        image = None;
                    }
                    if apply > 0 {
                        orders.applied(apply, image.clone());
                    }
                    let result = if fails { Err((Kind::Timeout, "x".into())) } else { Ok(()) };
                    let answer = orders.load_ended(result).unwrap();
                    assert_eq!(answer.identity, identity);
                    if !fails {
                        assert_eq!(orders.serves(), Some(&identity));
                        promised.retain(|p| (p.incarnation, p.version) > (identity.incarnation, identity.version));
                    }
                }
                Act::Grace => now += STAGED_GRACE,
            }
            if let Some(serves) = orders.serves() {
                assert_eq!(image.as_ref(), Some(serves), "what is said to be served is what the image holds");
            }
        }
    }
}
