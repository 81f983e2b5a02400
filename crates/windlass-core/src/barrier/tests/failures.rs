//! What happens when things go wrong: deaths, failures, deadlines, resumed trainers, stale words.

use super::*;
use crate::barrier::member::Lineage;
use crate::error::Kind;

#[test]
fn failing_one_model_of_two_fences_the_receiver_at_once_and_it_returns_by_catching_up() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.serve_pair(&[0, 1], 1, 7);
    t.notify_pair(1, 8);
    t.stage_pair(0, 1, 8);
    t.stage_pair(1, 1, 8);
    // r0 loads the actor and fails the verifier: it serves a mix unless it is taken out.
    let order = t.loads[&receiver(0)].0;
    t.step(Event::Loaded { peer: t.peer(0), order, identity: id("actor", 1, 8) });
    let actions = t.fail(0, Phase::Loading, id("verifier", 1, 8));
    assert!(
        matches!(&actions[0], Action::Fence { receiver, why: FenceReason::LoadFailed { .. }, .. } if receiver.as_str() == "r0")
    );
    assert_eq!(t.live(), ["r1"]);
    // r1 is not held up.
    t.load(1);
    assert_eq!((t.served(), t.live()), (Some(8), vec!["r1"]));
    // After a while r0 is asked again, for all that is not certain.
    assert_eq!(staged_orders(&t.after(50)), ["r0 verifier@1.8"]);
    assert_eq!(loads(&t.stage(0, id("verifier", 1, 8))), ["r0"]);
    t.load(0);
    assert_eq!(t.live(), ["r0", "r1"]);
}

#[test]
fn resumed_trainer_supersedes_its_dead_self() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.serve_pair(&[0], 1, 105);
    t.notify_pair(1, 106);
    t.gate(1, 106, Some(("actor", 1)));
    t.gate(2, 101, Some(("actor", 2)));
    // A wait that overtakes its notify is not opened by the old 105, nor is one without a lineage after it.
    let actions = t.notify(id("actor", 2, 101));
    assert!(actions.contains(&Action::Superseded {
        model: model("actor"),
        old: Incarnation(1),
        new: Incarnation(2)
    }));
    let why = GateFailure::Superseded { by: Incarnation(2) };
    assert!(actions.contains(&Action::FailGate { id: WaitId(1), why }));
    assert!(actions.contains(&Action::ServiceVersion { set: set("set"), served: None }));
    assert_eq!((t.served(), t.live().len()), (None, 0));
    assert_eq!(opened(&t.gate(3, 1, None)), [0; 0]);
    t.notify(id("verifier", 2, 101));
    // Late messages of the superseded lineage are refused and change nothing.
    for refused in [
        t.try_stage(0, id("actor", 1, 106)).unwrap_err(),
        t.try_step(Event::Notify { identity: id("actor", 1, 107), sender_endpoint: "x".into(), sync: None })
            .unwrap_err(),
    ] {
        assert!(matches!(refused, BarrierError::StaleIncarnation { .. }), "{refused}");
        assert_eq!(refused.kind(), Kind::Stale);
    }
    // The new lineage is served although its versions are lower.
    t.stage_pair(0, 2, 101);
    let actions = t.load(0);
    assert_eq!(opened(&actions), [3, 2]);
    assert_eq!(t.served(), Some(101));
    let stale = Event::GateWait {
        id: WaitId(9),
        set: set("set"),
        at_least: 1,
        lineage: Some((model("actor"), Incarnation(1))),
        timeout: 9,
    };
    assert!(matches!(t.try_step(stale), Err(BarrierError::StaleWaiter { .. })));
}

#[test]
fn load_of_a_dead_lineage_that_finishes_late_does_not_count() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    let (order, _) = t.loads[&receiver(0)].clone();
    t.notify_pair(2, 7);
    for name in PAIR {
        let late = Event::Loaded { peer: t.peer(0), order, identity: id(name, 1, 7) };
        assert_eq!(t.try_step(late).unwrap_err().kind(), Kind::Stale);
    }
    t.stage_pair(0, 2, 7);
    // Even when it claims the new lineage for the old order.
    let claim = Event::Loaded { peer: t.peer(0), order, identity: id("actor", 2, 7) };
    assert!(matches!(t.try_step(claim), Err(BarrierError::StaleOrder { .. })));
    assert_eq!(t.served(), None);
    t.load(0);
    assert_eq!(t.served(), Some(7));
}

#[test]
fn resumed_actor_waits_until_it_reaches_what_its_verifier_has_loaded() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.serve_pair(&[0], 1, 105);
    // Only the actor was resumed: the verifier does not go back from 105 within its incarnation.
    t.notify(id("actor", 2, 104));
    let newest = vec![(model("actor"), 104), (model("verifier"), 105)];
    assert_eq!(t.barrier.blocked(&set("set")), Ok(Blocked::NoCommonVersion { newest }));
    t.notify(id("actor", 2, 105));
    t.stage(0, id("actor", 2, 105));
    t.load(0);
    let served = t.barrier.service_version(&set("set")).unwrap().unwrap();
    assert_eq!(served.identities, [id("actor", 2, 105), id("verifier", 1, 105)]);
}

#[test]
fn silent_receiver_is_evicted_without_disturbing_others_and_may_come_back() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.serve_pair(&[0, 1], 1, 7);
    t.notify_pair(1, 8);
    t.stage_pair(0, 1, 8);
    t.after(300);
    // r1 has died. Its staging deadline passes first, so that r0 goes on alone.
    assert_eq!(loads(&t.after(100)), ["r0"]);
    t.load(0);
    assert_eq!((t.served(), t.live()), (Some(8), vec!["r0"]));
    t.step(Event::Heartbeat { peer: t.peer(0) });
    let actions = t.after(600);
    assert!(actions.contains(&Action::Evict { receiver: receiver(1), why: EvictReason::Silent }));
    // What it says now does nothing; its old join does not revive it; a new one does.
    let late = t.try_stage(1, id("actor", 1, 8)).unwrap_err();
    assert_eq!(late, BarrierError::UnknownReceiver(receiver(1)));
    let models = vec![model("actor")];
    let echo = Event::Join { peer: t.peer(1), models, has: vec![] };
    assert!(matches!(t.try_step(echo), Err(BarrierError::StaleSession { .. })));
    t.join(1, &PAIR, &[id("actor", 1, 8), id("verifier", 1, 8)]);
    assert_eq!(t.live(), ["r0", "r1"]);
}

#[test]
fn receivers_that_fall_silent_together_do_not_vouch_for_each_other() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    t.stage_pair(1, 1, 7);
    t.load(1);
    // r0 dies in the middle of its load; r1 is gone, too, by the time anybody looks.
    t.after(1000);
    assert_eq!(t.served(), None);
}

#[test]
fn messages_of_an_earlier_session_are_refused() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    let (order, _) = t.loads[&receiver(0)].clone();
    let old = t.peer(0);
    // It restarts with nothing, then the network delivers what its former self had loaded.
    let actions = t.join(0, &PAIR, &[]);
    assert!(actions.contains(&Action::Evict { receiver: receiver(0), why: EvictReason::Rejoined }));
    for name in PAIR {
        let late = Event::Loaded { peer: old.clone(), order, identity: id(name, 1, 7) };
        assert!(matches!(t.try_step(late), Err(BarrierError::StaleSession { .. })));
    }
    assert_eq!(t.served(), None);
    assert_eq!(loads(&t.stage_pair(0, 1, 7)), ["r0"]);
}

#[test]
fn load_that_runs_past_its_deadline_fences_the_receiver() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    t.stage_pair(1, 1, 7);
    t.load(0);
    let actions = t.after(300);
    assert!(
        actions
            .iter()
            .any(|a| matches!(a, Action::Fence { why: FenceReason::LoadTimeout { version: 7 }, .. }))
    );
    assert_eq!((t.served(), t.live()), (Some(7), vec!["r0"]));
    let (order, _) = t.loads[&receiver(1)].clone();
    let late = Event::Loaded { peer: t.peer(1), order, identity: id("actor", 1, 7) };
    assert!(matches!(t.try_step(late), Err(BarrierError::StaleOrder { .. })));
}

#[test]
fn answer_to_an_earlier_attempt_does_not_count_for_the_next() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    let (first, _) = t.loads[&receiver(0)].clone();
    let echo = Event::Loaded { peer: t.peer(0), order: first, identity: id("actor", 1, 7) };
    t.fail(0, Phase::Loading, id("actor", 1, 7));
    t.after(50);
    t.stage_pair(0, 1, 7);
    let (second, _) = t.loads[&receiver(0)].clone();
    assert!(second > first);
    t.step(Event::Loaded { peer: t.peer(0), order: second, identity: id("verifier", 1, 7) });
    // The actor is still being written; the network repeats what was said of the first attempt.
    assert!(matches!(t.try_step(echo), Err(BarrierError::StaleOrder { .. })));
    assert_eq!(t.served(), None);
}

#[test]
fn failed_staging_excuses_the_receiver_but_leaves_it_live_until_others_move_on() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.serve_pair(&[0, 1], 1, 7);
    t.notify_pair(1, 8);
    t.stage_pair(0, 1, 8);
    let actions = t.fail(1, Phase::Staging, id("actor", 1, 8));
    assert!(matches!(&actions[0], Action::Lagging { receiver, .. } if receiver.as_str() == "r1"));
    assert_eq!((loads(&actions), t.live()), (vec!["r0"], vec!["r0", "r1"]));
    t.load(0);
    assert_eq!(t.live(), ["r0"]);
    // It was only a hiccup: r1 is asked again and comes back.
    assert_eq!(staged_orders(&t.after(50)), ["r1 actor@1.8"]);
    assert_eq!(loads(&t.stage_pair(1, 1, 8)), ["r1"]);
    t.load(1);
    assert_eq!(t.live(), ["r0", "r1"]);
}

/// Fails what `r1` is asked to stage of the actor until `tries` have failed, and returns how long it rested before each
/// further one.
fn rests(t: &mut Rig, version: Version, tries: usize) -> (Vec<Millis>, Vec<(u32, Millis)>) {
    let (mut rests, mut said) = (Vec::new(), Vec::new());
    for _ in 0..tries {
        let actions = t.fail(1, Phase::Staging, id("actor", 1, version));
        said.extend(actions.iter().filter_map(|a| match a {
            Action::BackingOff { failures, delay_ms, .. } => Some((*failures, *delay_ms)),
            _ => None,
        }));
        let failed_at = t.now;
        while staged_orders(&t.after(1)) != [format!("r1 actor@1.{version}")] {
            t.step(Event::Heartbeat { peer: t.peer(0) });
            t.step(Event::Heartbeat { peer: t.peer(1) });
            assert!(t.now - failed_at <= t.barrier.config.limits.retry_cap_ms, "r1 is not asked again");
        }
        rests.push(t.now - failed_at);
    }
    (rests, said)
}

#[test]
fn receiver_that_keeps_failing_is_asked_less_and_less_often_up_to_the_cap() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    t.stage(1, id("verifier", 1, 7));
    let (rested, said) = rests(&mut t, 7, 7);
    for (rest, nominal) in rested.iter().zip([50, 100, 200, 400, 400, 400, 400]) {
        assert!((nominal * 3 / 4..=nominal).contains(rest), "{rest} of {rested:?} is not near {nominal}");
    }
    // The length is said once each time that it changes, and not with every failure.
    assert_eq!(said.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [2, 3, 4]);
    // What is announced again is nothing new; what is newer is tried as soon as after a first failure.
    t.fail(1, Phase::Staging, id("actor", 1, 7));
    assert_eq!(staged_orders(&t.notify(id("actor", 1, 7))), Vec::<String>::new());
    assert_eq!(staged_orders(&t.after(50)), Vec::<String>::new());
    let newer = t.notify(id("actor", 1, 8));
    let newer = if newer.is_empty() { t.after(1) } else { newer };
    assert!(staged_orders(&newer).contains(&"r1 actor@1.8".to_owned()), "{newer:?}");
}

#[test]
fn success_resets_the_backoff() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    t.stage(1, id("verifier", 1, 7));
    assert!(rests(&mut t, 7, 3).0[2] > 100);
    t.stage(1, id("actor", 1, 7));
    t.notify_pair(1, 8);
    t.stage(1, id("verifier", 1, 8));
    assert!(rests(&mut t, 8, 1).0[0] <= 50);
}

#[test]
fn staging_does_not_make_up_for_loads_that_fail() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    let mut rested = Vec::new();
    for _ in 0..4 {
        t.fail(0, Phase::Loading, id("actor", 1, 7));
        let failed_at = t.now;
        while staged_orders(&t.after(1)).is_empty() {
            t.step(Event::Heartbeat { peer: t.peer(0) });
            assert!(t.now - failed_at <= 400, "r0 is not asked again");
        }
        rested.push(t.now - failed_at);
        t.stage_pair(0, 1, 7);
    }
    assert!(rested.is_sorted() && rested[3] >= 300, "{rested:?}");
}

#[test]
fn receiver_that_got_a_newer_version_waits_for_the_others_there() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    let order = t.stages[&(receiver(1), id("actor", 1, 7))];
    let actions = t.step(Event::Staged { peer: t.peer(1), order, identity: id("actor", 1, 8) });
    assert!(matches!(&actions[0], Action::Lagging { why: LagReason::Ahead { got: 8 }, .. }));
    assert_eq!(loads(&actions), ["r0"]);
    t.load(0);
    t.notify_pair(1, 8);
    t.stage(1, id("verifier", 1, 8));
    assert_eq!(loads(&t.stage_pair(0, 1, 8)), ["r0", "r1"]);
    // Something older than what was ordered is no answer.
    t.notify(id("actor", 1, 9));
    let order = t.stages[&(receiver(1), id("actor", 1, 9))];
    let wrong = Event::Staged { peer: t.peer(1), order, identity: id("actor", 1, 8) };
    assert!(matches!(t.try_step(wrong), Err(BarrierError::WrongAnswer { .. })));
}

#[test]
fn round_that_no_receiver_can_make_ready_gives_way_at_once() {
    // More versions were announced without receivers than a round may move on by.
    let mut t = Rig::new(vec![strict("set", &["solo"])]);
    for version in 1..10 {
        t.notify(id("solo", 1, version));
    }
    t.join(0, &["solo"], &[]);
    // Image bytes are the newest, whatever was ordered.
    let order = *t.stages.values().max().unwrap();
    t.step(Event::Staged { peer: t.peer(0), order, identity: id("solo", 1, 9) });
    t.load(0);
    assert_eq!(t.served(), Some(9));
    // One is ready, the other can never be, and both are needed: nothing is waited for.
    let mut t = Rig::new(vec![SetConfig { floor: 2, ..strict("set", &["solo"]) }]);
    t.join(0, &["solo"], &[]);
    t.join(1, &["solo"], &[]);
    t.notify(id("solo", 1, 7));
    t.stage(0, id("solo", 1, 7));
    t.notify(id("solo", 1, 8));
    let order = t.stages[&(receiver(1), id("solo", 1, 7))];
    t.step(Event::Staged { peer: t.peer(1), order, identity: id("solo", 1, 8) });
    assert_eq!(loads(&t.stage(0, id("solo", 1, 8))), ["r0", "r1"]);
}

#[test]
fn loading_another_version_than_ordered_is_a_failed_load() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    let (order, _) = t.loads[&receiver(0)].clone();
    let actions = t.step(Event::Loaded { peer: t.peer(0), order, identity: id("actor", 1, 8) });
    assert!(matches!(&actions[0], Action::Fence { why: FenceReason::LoadFailed { .. }, .. }));
    assert_eq!(t.served(), None);
}

#[test]
fn sender_that_moved_is_asked_at_its_new_address_without_losing_what_is_staged() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage(0, id("verifier", 1, 7));
    let moved =
        Event::Notify { identity: id("actor", 1, 7), sender_endpoint: "elsewhere:1".into(), sync: None };
    let actions = t.step(moved);
    assert!(
        matches!(&actions[..], [Action::Abandon { .. }, Action::Stage { sender_endpoint, .. }] if sender_endpoint == "elsewhere:1")
    );
    assert_eq!(loads(&t.stage(0, id("actor", 1, 7))), ["r0"]);
}

#[test]
fn staged_bytes_are_not_abandoned_when_another_order_for_them_is_open() {
    let mut t = Rig::new(vec![strict("set", &["solo"])]);
    t.join(0, &["solo"], &[]);
    t.join(1, &["solo"], &[]);
    t.notify(id("solo", 1, 7));
    t.stage(1, id("solo", 1, 7));
    t.notify(id("solo", 1, 8));
    // Asked for 7 and 8, it answers the first order with 8; then the sender moves.
    let order = t.stages[&(receiver(0), id("solo", 1, 7))];
    t.step(Event::Staged { peer: t.peer(0), order, identity: id("solo", 1, 8) });
    let moved =
        Event::Notify { identity: id("solo", 1, 8), sender_endpoint: "elsewhere:1".into(), sync: None };
    let hit = |a: &Action| matches!(a, Action::Abandon { to, .. } if to.receiver == receiver(0));
    assert!(!t.step(moved).iter().any(hit));
}

#[test]
fn refused_event_does_not_swallow_what_was_due_before_it() {
    let mut t = Rig::pair();
    t.gate(1, 7, None);
    t.now = 600;
    let refused = t.try_step(Event::Cancel { id: WaitId(5) });
    assert_eq!(refused, Err(BarrierError::UnknownWait(WaitId(5))));
    assert_eq!(t.barrier.next_deadline(), Some(600));
    assert!(matches!(t.after(0)[..], [Action::FailGate { id: WaitId(1), .. }]));
    assert_eq!(t.barrier.next_deadline(), None);
}

#[test]
fn time_that_steps_back_is_not_believed() {
    let mut t = Rig::pair();
    t.after(1000);
    t.gate(1, 7, None);
    assert_eq!(t.barrier.tick(3), []);
    assert_eq!(t.barrier.next_deadline(), Some(1500));
}

#[test]
fn waits_are_bounded_unique_and_cancellable() {
    let mut config = Config::new(vec![strict("set", &PAIR)]);
    config.limits.max_waits = 1;
    let mut barrier = Barrier::new(config).unwrap();
    let gate = |id, timeout| Event::GateWait {
        id: WaitId(id),
        set: set("set"),
        at_least: 1,
        lineage: None,
        timeout,
    };
    assert_eq!(barrier.step(0, gate(1, 10)), Ok(vec![]));
    assert_eq!(barrier.step(0, gate(1, 10)), Err(BarrierError::DuplicateWait(WaitId(1))));
    let full = barrier.step(0, gate(2, 10)).unwrap_err();
    assert_eq!(full.kind(), Kind::Exhausted);
    assert_eq!(barrier.step(0, Event::Cancel { id: WaitId(1) }), Ok(vec![]));
    assert_eq!(barrier.tick(20), []);
    // No patience at all: the answer comes at once.
    assert!(matches!(barrier.step(20, gate(3, 0)).unwrap()[..], [Action::FailGate { .. }]));
}

#[test]
fn malformed_messages_are_refused_by_name() {
    let mut t = Rig::pair();
    let refused = |t: &mut Rig, event| t.try_step(event).unwrap_err();
    let join = |models: &[&str], has: Vec<Identity>| Event::Join {
        peer: Peer { receiver: receiver(0), session: 1 },
        models: models.iter().map(|m| model(m)).collect(),
        has,
    };
    let notify =
        |identity, endpoint: &str| Event::Notify { identity, sender_endpoint: endpoint.into(), sync: None };
    assert!(matches!(refused(&mut t, join(&[], vec![])), BarrierError::BadJoin { .. }));
    assert!(matches!(refused(&mut t, join(&["actor", "actor"], vec![])), BarrierError::BadJoin { .. }));
    assert!(matches!(
        refused(&mut t, join(&["actor"], vec![id("verifier", 1, 1)])),
        BarrierError::BadJoin { .. }
    ));
    let twice = vec![id("actor", 1, 1), id("actor", 1, 2)];
    assert!(matches!(refused(&mut t, join(&["actor"], twice)), BarrierError::BadJoin { .. }));
    let ghost = refused(&mut t, join(&["ghost"], vec![]));
    assert_eq!(ghost, BarrierError::UnknownModel { model: model("ghost"), known: PAIR.map(model).to_vec() });
    assert!(ghost.to_string().ends_with("there are actor, verifier"), "{ghost}");
    assert!(matches!(refused(&mut t, notify(id("ghost", 1, 1), "x")), BarrierError::UnknownModel { .. }));
    assert!(matches!(refused(&mut t, notify(id("actor", 1, 1), "")), BarrierError::Endpoint { .. }));
    assert!(matches!(
        refused(&mut t, notify(id("actor", 1, 1), &"x".repeat(1025))),
        BarrierError::Endpoint { .. }
    ));
    let elsewhere =
        Event::GateWait { id: WaitId(1), set: set("ghost"), at_least: 1, lineage: None, timeout: 1 };
    assert!(matches!(refused(&mut t, elsewhere), BarrierError::UnknownSet { .. }));
    for bad in ["", ".x", "a b", "a/b", &"x".repeat(129)] {
        assert!(ReceiverId::new(bad).is_err() && SetName::new(bad).is_err(), "{bad}");
    }
    assert_eq!(t.barrier.snapshot().receivers, []);
}

#[test]
fn configurations_that_cannot_work_are_refused() {
    let refused = |config: Config| Barrier::new(config).map(|_| ()).unwrap_err();
    let one = || strict("set", &PAIR);
    assert_eq!(refused(Config::new(vec![])), BarrierError::NoSets);
    assert!(matches!(refused(Config::new(vec![one(), one()])), BarrierError::DuplicateSet(_)));
    assert!(matches!(
        refused(Config::new(vec![one(), strict("b", &["actor"])])),
        BarrierError::DuplicateModel(_)
    ));
    assert!(matches!(refused(Config::new(vec![strict("set", &[])])), BarrierError::SetSize { .. }));
    for bad in [
        SetConfig { floor: 0, ..one() },
        SetConfig { required: Required::AtLeast(0), ..one() },
        SetConfig { required: Required::Percent(101), ..one() },
    ] {
        assert!(matches!(refused(Config::new(vec![bad])), BarrierError::OutOfRange { .. }));
    }
    let mut config = Config::new(vec![one()]);
    config.limits.load_ms = 0;
    assert!(matches!(refused(config), BarrierError::OutOfRange { field: "load_ms", .. }));
    let json = r#"{"sets": [{"name": "set", "models": ["actor"]}], "limits": {"max_ahead": 9}}"#;
    let config: Config = serde_json::from_str(json).unwrap();
    assert_eq!((config.limits.max_ahead, config.sets[0].floor), (9, 1));
    assert!(serde_json::from_str::<Config>(r#"{"sets": [], "speed": 1}"#).is_err());
}

fn told_absent(actions: &[Action]) -> Vec<Version> {
    let absent =
        |a: &Action| if let Action::Absent { identity, .. } = a { Some(identity.version) } else { None };
    actions.iter().filter_map(absent).collect()
}

#[test]
fn version_that_no_agent_shows_is_named_and_gives_way_to_lower_ones() {
    let relaxed = SetConfig { mode: Mode::Relaxed, ..strict("set", &["solo"]) };
    for config in [strict("set", &["solo"]), relaxed] {
        let solo = |version| id("solo", 1, version);
        let mut t = Rig::new(vec![config]);
        let served = |t: &Rig| t.barrier.service_version(&set("set")).unwrap().map(|s| s.version);
        t.join(0, &["solo"], &[]);
        t.join(1, &["solo"], &[]);
        t.notify(solo(3));
        t.stage(0, solo(3));
        t.stage(1, solo(3));
        t.load(0);
        t.load(1);
        t.notify(solo(42));
        assert_eq!(told_absent(&t.absent(0, solo(42))), [42]);
        let why = Blocked::Absent { model: model("solo"), version: 42 };
        assert_eq!(t.barrier.blocked(&set("set")), Ok(why.clone()));
        assert!(told_absent(&t.absent(1, solo(42))).is_empty(), "it is said once");
        // It may yet be published: it is asked for again while there is nothing else.
        t.after(60);
        assert!(told_absent(&t.absent(0, solo(42))).is_empty());
        for version in 4..7 {
            let actions = t.notify(solo(version));
            let called_off =
                |a: &Action| matches!(a, Action::Abandon { identity, .. } if identity.version == 42);
            assert!(actions.iter().any(called_off), "whoever waits for it is free: {actions:?}");
            t.after(60);
            t.stage(0, solo(version));
            t.stage(1, solo(version));
            t.load(0);
            t.load(1);
            assert_eq!(served(&t), Some(version));
            assert_eq!(t.live.len(), 2, "{:?}", t.live);
            assert_eq!(t.barrier.blocked(&set("set")), Ok(why.clone()), "and it is still said");
            assert_eq!(t.barrier.ahead(&model("solo")), Ok((0, false)));
        }
    }
}

#[test]
fn version_that_is_shown_late_is_loaded_after_all() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    t.stage(1, id("verifier", 1, 7));
    // If one receiver has the version, another one that reports it absent has failed, and the round does not wait for it.
    let actions = t.absent(1, id("actor", 1, 7));
    assert!(told_absent(&actions).is_empty());
    assert_eq!(loads(&actions), ["r0"]);
    t.load(0);

    t.after(60);
    t.stage(1, id("actor", 1, 7));
    t.load(1);
    t.notify_pair(1, 9);
    for r in 0..2 {
        t.stage(r, id("verifier", 1, 9));
    }
    assert_eq!(told_absent(&t.absent(0, id("actor", 1, 9))), [9]);
    t.absent(1, id("actor", 1, 9));
    t.after(60);
    // No member is excused meanwhile: both load together.
    assert!(loads(&t.stage(0, id("actor", 1, 9))).is_empty());
    assert_eq!(loads(&t.stage(1, id("actor", 1, 9))), ["r0", "r1"]);
    t.load(0);
    t.load(1);
    assert_eq!(t.barrier.blocked(&set("set")), Ok(Blocked::UpToDate));
    // Announced again, it is doubted anew.
    t.notify_pair(1, 42);
    assert_eq!(told_absent(&t.absent(0, id("verifier", 1, 42))), [42]);
    t.notify(id("verifier", 1, 42));
    t.after(60);
    assert_eq!(told_absent(&t.absent(1, id("verifier", 1, 42))), [42]);
}

/// An announcement of the only model by an agent at `endpoint`.
fn solo_at(version: Version, endpoint: &str) -> Event {
    Event::Notify { identity: id("solo", 1, version), sender_endpoint: endpoint.to_owned(), sync: None }
}

#[test]
fn false_announcement_of_another_endpoint_does_not_lead_receivers_there_for_ever() {
    let mut t = Rig::new(vec![strict("set", &["solo"])]);
    let solo = |version| id("solo", 1, version);
    let asked = |actions: &[Action]| -> Vec<(Version, String)> {
        let stage = |a: &Action| match a {
            Action::Stage { identity, sender_endpoint, .. } => {
                Some((identity.version, sender_endpoint.clone()))
            }
            _ => None,
        };
        actions.iter().filter_map(stage).collect()
    };
    t.join(0, &["solo"], &[]);
    t.step(solo_at(3, "agent:1"));
    t.stage(0, solo(3));
    t.load(0);
    assert_eq!(asked(&t.step(solo_at(42, "nobody:1"))), [(42, "nobody:1".to_owned())]);
    // The trainer goes on meanwhile, and repeats what it said.
    t.step(solo_at(3, "agent:1"));
    let actions = t.step(solo_at(4, "agent:1"));
    assert!(asked(&actions).iter().all(|(version, _)| *version != 42), "{actions:?}");
    assert_eq!(told_absent(&t.absent(0, solo(42))), [42]);
    assert_eq!(
        t.barrier.blocked(&set("set")),
        Ok(Blocked::Waiting { version: 4, phase: Phase::Staging, receivers: 1 })
    );
    assert_eq!(asked(&t.after(60)), [(4, "agent:1".to_owned())]);
    t.stage(0, solo(4));
    t.load(0);
    assert_eq!(t.served(), Some(4));
    let why = Blocked::Absent { model: model("solo"), version: 42 };
    assert_eq!(t.barrier.blocked(&set("set")), Ok(why));
    // It is asked for again where it was announced, and the next version where the agent is.
    let again = t.stages[&(receiver(0), solo(42))];
    t.step(Event::Absent { peer: t.peer(0), order: again, identity: solo(42) });
    t.step(solo_at(5, "agent:1"));
    t.after(60);
    t.stage(0, solo(5));
    t.load(0);
    assert_eq!(t.served(), Some(5));
    assert_eq!(t.barrier.snapshot().sets[0].groups[0].models[0].endpoint.as_deref(), Some("agent:1"));
}

#[test]
fn a_receiver_keeps_its_orders_when_another_asks_again_for_a_false_announcement() {
    let mut t = Rig::new(vec![strict("set", &["solo"])]);
    let solo = |version| id("solo", 1, version);
    let staging =
        |t: &Rig, r: usize| t.barrier.snapshot().sets[0].groups[0].members[r].slots[0].staging.clone();
    t.join(0, &["solo"], &[]);
    t.join(1, &["solo"], &[]);
    t.step(solo_at(3, "agent:1"));
    t.step(solo_at(42, "nobody:1"));
    t.absent(0, solo(42));
    // Orders that named the false address are given anew.
    assert_eq!(staging(&t, 1), [3]);
    t.after(60);
    t.stage(0, solo(3));
    assert!(staging(&t, 0).contains(&42), "a receiver that has the rest asks again");
    let again = t.stages[&(receiver(0), solo(42))];
    t.step(Event::Absent { peer: t.peer(0), order: again, identity: solo(42) });
    assert_eq!(staging(&t, 1), [3]);
    t.stage(1, solo(3));
    t.load(0);
    t.load(1);
    assert_eq!(t.served(), Some(3));
}

#[test]
fn every_absent_version_is_asked_for_again_in_turn() {
    let mut t = Rig::new(vec![strict("set", &["solo"])]);
    let solo = |version| id("solo", 1, version);
    t.join(0, &["solo"], &[]);
    t.notify(solo(4));
    t.absent(0, solo(4));
    t.notify(solo(8));
    t.after(60);
    t.absent(0, solo(8));
    // Both are asked for by turns, so that the one that appears is found whichever it is.
    let asked = (0..5).map(|_| {
        let staging = t.after(450).iter().find_map(|a| match a {
            Action::Stage { identity, .. } => Some(identity.clone()),
            _ => None,
        });
        let identity = staging.expect("it is asked again");
        t.absent(0, identity.clone());
        identity.version
    });
    assert_eq!(asked.collect::<Vec<_>>(), [8, 4, 8, 4, 8]);
    t.after(450);
    t.stage(0, solo(4));
    t.load(0);
    assert_eq!(t.served(), Some(4));
}

#[test]
fn a_lost_answer_to_a_load_does_not_lead_back_to_the_version_before() {
    let mut t = Rig::new(vec![strict("set", &["solo"])]);
    let solo = |version| id("solo", 1, version);
    let both = [0, 1];
    for r in both {
        t.join(r, &["solo"], &[]);
    }
    t.notify(solo(1));
    for r in both {
        t.stage(r, solo(1));
    }
    for r in both {
        t.load(r);
    }
    t.notify(solo(2));
    for r in both {
        t.stage(r, solo(2));
    }
    // The engines may have loaded version 2 by now, but the answers do not come in time.
    let actions = t.after(350);
    assert!(actions.iter().any(|a| matches!(a, Action::Fence { .. })), "{actions:?}");
    // A false announcement takes the round's place, and is given up.
    t.notify(solo(42));
    t.after(60);
    t.absent(0, solo(42));
    let actions = t.stage(1, solo(1));
    assert!(!actions.iter().any(|a| matches!(a, Action::Load { .. })), "{actions:?}");
    t.after(150);
    for r in both {
        t.stage(r, solo(2));
    }
    for r in both {
        t.load(r);
    }
    assert_eq!(t.served(), Some(2));
}

fn called_off(actions: &[Action], r: usize) -> Vec<Identity> {
    let of = |a: &Action| match a {
        Action::Abandon { to, identity, .. } | Action::Drop { to, identity, .. }
            if to.receiver == receiver(r) =>
        {
            Some(identity.clone())
        }
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

#[test]
fn staged_versions_that_are_given_up_are_called_off() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.serve_pair(&[0], 1, 7);
    t.join(1, &PAIR, &[]);
    t.notify_pair(1, 8);
    // r1 has staged the actor, and the others go on without it.
    t.stage(1, id("actor", 1, 8));
    t.stage_pair(0, 1, 8);
    t.load(0);
    assert_eq!(t.served(), Some(8));
    t.notify_pair(1, 9);
    let mut actions = t.stage_pair(0, 1, 9);
    actions.extend(t.load(0));
    assert_eq!(t.served(), Some(9));
    assert!(called_off(&actions, 1).contains(&id("actor", 1, 8)), "{actions:?}");
    // A verifier that is past a version lets go of the actor's.
    t.notify_pair(1, 10);
    t.stage(1, id("actor", 1, 9));
    let order = t.stages[&(receiver(1), id("verifier", 1, 9))];
    let actions = t.step(Event::Staged { peer: t.peer(1), order, identity: id("verifier", 1, 10) });
    assert!(called_off(&actions, 1).contains(&id("actor", 1, 9)), "{actions:?}");
    // A load that fails has used up what was staged for it.
    t.stage_pair(0, 1, 10);
    t.stage(1, id("actor", 1, 10));
    t.load(0);
    let actions = t.fail(1, Phase::Loading, id("actor", 1, 10));
    assert_eq!(called_off(&actions, 1), [id("actor", 1, 10), id("verifier", 1, 10)]);
}

#[test]
fn endpoints_of_a_trainer_that_moves_with_every_version_are_bounded() {
    let mut lineage = Lineage::new(Incarnation(1), "agent:0".to_owned());
    for version in 1..5000 {
        lineage.move_to(version, &format!("agent:{version}"));
        lineage.announce(version);
        assert!(lineage.endpoints.len() <= 1024);
        assert_eq!(lineage.endpoint(), format!("agent:{version}"));
    }
    // What is forgotten is asked for at the oldest that is known.
    assert_eq!(lineage.endpoints.get(&0).map(String::as_str), Some("agent:3976"));
}
