//! What happens when things go as they should: barrier, gate, joining, moving on, quorum, history.

use std::collections::BTreeSet;

use super::*;

#[test]
fn strict_barrier_loads_nothing_before_all_receivers_have_staged_both_models() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    // The actor is first: all receivers stage it, none loads it.
    assert_eq!(staged_orders(&t.notify(id("actor", 1, 7))), ["r0 actor@1.7", "r1 actor@1.7"]);
    assert_eq!(loads(&t.stage(0, id("actor", 1, 7))), [""; 0]);
    assert_eq!(loads(&t.stage(1, id("actor", 1, 7))), [""; 0]);
    assert_eq!(staged_orders(&t.notify(id("verifier", 1, 7))), ["r0 verifier@1.7", "r1 verifier@1.7"]);
    assert_eq!(loads(&t.stage(0, id("verifier", 1, 7))), [""; 0]);
    // When the last one has staged, all are ordered to load the whole set in one order.
    let actions = t.stage(1, id("verifier", 1, 7));
    assert_eq!(loads(&actions), ["r0", "r1"]);
    assert_eq!(t.loads[&receiver(0)].1, [id("actor", 1, 7), id("verifier", 1, 7)]);
}

#[test]
fn service_version_advances_and_gates_open_only_when_the_last_required_receiver_has_loaded() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.gate(1, 7, None);
    t.gate(2, 8, None);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    t.stage_pair(1, 1, 7);
    assert_eq!(opened(&t.load(0)), [0; 0]);
    assert_eq!((t.served(), t.live().len()), (None, 0));
    let actions = t.load(1);
    assert_eq!(opened(&actions), [1]);
    assert_eq!((t.served(), t.live()), (Some(7), vec!["r0", "r1"]));
    // Someone who asks later is answered at once.
    assert_eq!(opened(&t.gate(3, 6, Some(("actor", 1)))), [3]);
    // And the one who asked for more is told so at the deadline, with the reason.
    let why = GateFailure::Timeout { service: Some(7), blocked: Blocked::UpToDate };
    assert!(t.after(500).contains(&Action::FailGate { id: WaitId(2), why }));
}

#[test]
fn relaxed_set_loads_each_model_as_it_comes() {
    let mut t = Rig::new(vec![SetConfig { mode: Mode::Relaxed, ..strict("set", &PAIR) }]);
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.notify(id("actor", 1, 7));
    assert_eq!(loads(&t.stage(0, id("actor", 1, 7))), ["r0"]);
    t.load(0);
    assert_eq!(loads(&t.stage(1, id("actor", 1, 7))), ["r1"]);
    t.load(1);
    assert_eq!(t.served(), None, "the set serves what its slowest model serves");
    t.notify(id("verifier", 1, 5));
    for r in [0, 1] {
        t.stage(r, id("verifier", 1, 5));
        t.load(r);
    }
    assert_eq!(t.served(), Some(5));
}

#[test]
fn sets_are_independent_of_each_other() {
    let mut t = Rig::new(vec![strict("set", &PAIR), strict("other", &["solo"])]);
    t.join(0, &["actor", "verifier", "solo"], &[]);
    t.notify(id("actor", 1, 7));
    t.notify(id("solo", 4, 2));
    assert_eq!(loads(&t.stage(0, id("solo", 4, 2))), ["r0"]);
    t.load(0);
    assert_eq!(t.barrier.service_version(&set("other")).unwrap().unwrap().version, 2);
    assert_eq!(t.served(), None);
    // A failure in one set leaves the receiver live in the other.
    t.notify(id("verifier", 1, 7));
    t.stage_pair(0, 1, 7);
    let actions = t.fail(0, Phase::Loading, id("actor", 1, 7));
    let fenced: Vec<_> = actions.iter().filter(|a| matches!(a, Action::Fence { .. })).collect();
    assert!(matches!(fenced[..], [Action::Fence { set, .. }] if set.as_str() == "set"));
}

#[test]
fn joining_receiver_catches_up_before_it_is_live_without_delaying_others() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.serve_pair(&[0], 1, 7);
    // It joins with an old version of one model and must stage and load what is served.
    let orders = staged_orders(&t.join(1, &PAIR, &[id("actor", 1, 6)]));
    assert_eq!(orders, ["r1 actor@1.7", "r1 verifier@1.7"]);
    // Meanwhile the others go on without it.
    t.serve_pair(&[0], 1, 8);
    assert_eq!(t.live(), ["r0"]);
    // What it staged too late is of no use any more; what is served now is.
    let stale = t.try_stage(1, id("actor", 1, 7)).unwrap_err();
    assert_eq!(stale.kind(), crate::error::Kind::Stale);
    assert_eq!(loads(&t.stage_pair(1, 1, 8)), ["r1"]);
    assert_eq!(t.live(), ["r0"]);
    t.load(1);
    assert_eq!(t.live(), ["r0", "r1"]);
    // One that already has what is served is live at once.
    t.join(2, &PAIR, &[id("actor", 1, 8), id("verifier", 1, 8)]);
    assert_eq!(t.live(), ["r0", "r1", "r2"]);
}

#[test]
fn newer_announcements_skip_versions_that_no_receiver_has_staged() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.notify_pair(1, 7);
    let actions = t.notify_pair(1, 8);
    let abandoned =
        |v| actions.iter().any(|a| matches!(a, Action::Abandon { identity, .. } if identity.version == v));
    assert!(abandoned(7) && !abandoned(8));
    t.stage_pair(0, 1, 8);
    t.load(0);
    assert_eq!(t.served(), Some(8));
    // A late announcement of what was skipped, or a repetition, changes nothing.
    assert_eq!(t.notify_pair(1, 7), []);
    assert_eq!(t.notify_pair(1, 8), []);
}

#[test]
fn staged_version_is_loaded_before_newer_ones_so_that_rounds_end() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.join(1, &PAIR, &[]);
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    t.notify_pair(1, 8);
    t.notify_pair(1, 9);
    assert_eq!(loads(&t.stage_pair(1, 1, 7)), ["r0", "r1"]);
    // A load in progress finishes first, then the newest is next; 8 is skipped.
    t.notify_pair(1, 10);
    t.load(0);
    t.load(1);
    assert_eq!(t.served(), Some(7));
    let snapshot = t.barrier.snapshot();
    assert_eq!(snapshot.sets[0].groups[0].round.as_ref().unwrap().version, 10);
    // Nor does anybody wait for a receiver that runs past its deadline.
    t.stage_pair(0, 1, 10);
    t.notify_pair(1, 11);
    for _ in 0..4 {
        t.after(100);
        for r in [0, 1] {
            t.step(Event::Heartbeat { peer: t.peer(r) });
        }
    }
    assert_eq!(t.loads[&receiver(0)].1[0], id("actor", 1, 10));
}

#[test]
fn quorum_does_not_wait_and_laggards_are_out_until_they_have_loaded() {
    let mut t = Rig::new(vec![SetConfig { required: Required::AtLeast(2), ..strict("set", &PAIR) }]);
    for r in 0..3 {
        t.join(r, &PAIR, &[]);
    }
    t.serve_pair(&[0, 1], 1, 7);
    assert_eq!(t.live(), ["r0", "r1"]);
    assert_eq!(loads(&t.stage_pair(2, 1, 7)), ["r2"]);
    t.load(2);
    assert_eq!(t.live(), ["r0", "r1", "r2"]);
    // Now r0 lags: it serves 7 until the others serve 8, then it is out.
    t.notify_pair(1, 8);
    t.stage_pair(1, 1, 8);
    assert_eq!(loads(&t.stage_pair(2, 1, 8)), ["r1", "r2"]);
    t.load(1);
    assert_eq!(t.live(), ["r0", "r1", "r2"]);
    let actions = t.load(2);
    let why = FenceReason::Lagging { version: 8 };
    assert!(actions.iter().any(
        |a| matches!(a, Action::Fence { receiver, why: w, .. } if receiver.as_str() == "r0" && *w == why)
    ));
    assert_eq!(t.live(), ["r1", "r2"]);
}

#[test]
fn percentage_quorum_counts_all_members_rounded_up() {
    let mut t = Rig::new(vec![SetConfig { required: Required::Percent(51), ..strict("set", &["solo"]) }]);
    for r in 0..4 {
        t.join(r, &["solo"], &[]);
    }
    t.notify(id("solo", 1, 1));
    assert_eq!(loads(&t.stage(0, id("solo", 1, 1))), [""; 0]);
    assert_eq!(loads(&t.stage(1, id("solo", 1, 1))), [""; 0]);
    assert_eq!(loads(&t.stage(2, id("solo", 1, 1))), ["r0", "r1", "r2"]);
}

#[test]
fn below_the_floor_nothing_advances_and_it_is_reported() {
    let mut t = Rig::new(vec![SetConfig { floor: 2, ..strict("set", &PAIR) }]);
    t.join(0, &PAIR, &[]);
    t.notify_pair(1, 7);
    let actions = t.stage_pair(0, 1, 7);
    assert_eq!(loads(&actions), [""; 0]);
    let why = Blocked::TooFew { have: 1, need: 2 };
    assert!(actions.contains(&Action::Stalled { set: set("set"), why: why.clone() }));
    assert_eq!(t.barrier.blocked(&set("set")), Ok(why));
    t.join(1, &PAIR, &[]);
    assert_eq!(loads(&t.stage_pair(1, 1, 7)), ["r0", "r1"]);
}

#[test]
fn model_that_no_ready_receiver_serves_holds_the_set_up() {
    let mut t = Rig::pair();
    t.join(0, &["actor"], &[]);
    t.notify_pair(1, 7);
    let actions = t.stage(0, id("actor", 1, 7));
    let why = Blocked::Uncovered { model: model("verifier") };
    assert!(actions.contains(&Action::Stalled { set: set("set"), why }));
    t.join(1, &["verifier"], &[]);
    assert_eq!(loads(&t.stage(1, id("verifier", 1, 7))), ["r0", "r1"]);
}

#[test]
fn without_receivers_the_gate_waits_until_its_deadline_and_says_why() {
    let mut t = Rig::pair();
    let actions = t.notify_pair(1, 7);
    assert!(actions.contains(&Action::Stalled { set: set("set"), why: Blocked::NoReceivers }));
    t.gate(1, 7, None);
    assert_eq!(t.after(499), []);
    let why = GateFailure::Timeout { service: None, blocked: Blocked::NoReceivers };
    assert_eq!(t.after(1), [Action::FailGate { id: WaitId(1), why }]);
    assert!(Blocked::NoReceivers.to_string().contains("no receivers"));
}

#[test]
fn trainer_that_runs_ahead_is_told_to_wait_and_later_to_go_on() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    let pressure = |actions: &[Action]| {
        let find = |a: &Action| {
            if let Action::BackPressure { wait, ahead, .. } = a { Some((*wait, *ahead)) } else { None }
        };
        actions.iter().find_map(find)
    };
    assert_eq!(pressure(&t.notify(id("actor", 1, 10))), None);
    assert_eq!(pressure(&t.notify(id("actor", 1, 20))), None);
    // Two ahead are allowed; what is beyond is not even staged.
    let actions = t.notify(id("actor", 1, 30));
    assert_eq!((pressure(&actions), staged_orders(&actions).len()), (Some((true, 3)), 0));
    assert_eq!(pressure(&t.notify(id("actor", 1, 40))), None, "said once");
    t.notify(id("verifier", 1, 20));
    t.stage_pair(0, 1, 20);
    assert_eq!(pressure(&t.load(0)), Some((false, 2)));
}

/// A trainer that was resumed at an older step, or began at a lower one, was told to wait like the one that waited for it.
#[test]
fn a_trainer_that_its_set_waits_for_is_never_told_to_wait() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    let told = |t: &Rig, name: &str| t.barrier.ahead(&model(name)).unwrap().1;
    for version in 30..=36 {
        t.notify(id("verifier", 1, version));
    }
    assert!(told(&t, "verifier"));
    for version in 1..=36 {
        t.notify(id("actor", 1, version));
        assert!(version == 36 || !told(&t, "actor"), "{version}");
    }
    assert!(told(&t, "actor") && told(&t, "verifier"));
    // A receiver that is passed while it waits continues.
    t.notify(id("verifier", 1, 37));
    assert!(!told(&t, "actor") && told(&t, "verifier"));
}

fn released(actions: &[Action]) -> Vec<String> {
    let find =
        |a: &Action| if let Action::Release { identity } = a { Some(identity.to_string()) } else { None };
    actions.iter().filter_map(find).collect()
}

#[test]
fn history_is_released_only_when_no_receiver_has_a_claim_on_it() {
    let mut t = Rig::new(vec![SetConfig { required: Required::AtLeast(1), ..strict("set", &["solo"]) }]);
    t.join(0, &["solo"], &[]);
    t.join(1, &["solo"], &[]);
    t.notify(id("solo", 1, 1));
    for r in [0, 1] {
        t.stage(r, id("solo", 1, 1));
        t.load(r);
    }
    t.notify(id("solo", 1, 2));
    t.stage(0, id("solo", 1, 2));
    // r1 lags at 1 and still needs the delta from there.
    assert_eq!(released(&t.load(0)), [""; 0]);
    t.stage(1, id("solo", 1, 2));
    assert_eq!(released(&t.load(1)), ["solo@1.2"]);
    // A claim ends with its holder.
    t.notify(id("solo", 1, 3));
    t.stage(0, id("solo", 1, 3));
    assert_eq!(released(&t.load(0)), [""; 0]);
    assert_eq!(released(&t.step(Event::Leave { peer: t.peer(1) })), ["solo@1.3"]);
}

#[test]
fn claim_on_history_expires_when_its_holder_has_been_out_of_the_pool_for_too_long() {
    let mut t = Rig::new(vec![SetConfig { required: Required::AtLeast(1), ..strict("set", &["solo"]) }]);
    t.join(0, &["solo"], &[]);
    t.join(1, &["solo"], &[]);
    t.notify(id("solo", 1, 1));
    for r in [0, 1] {
        t.stage(r, id("solo", 1, 1));
        t.load(r);
    }
    // r1 stays alive, but never gets beyond 1, so it is fenced when 2 is served.
    t.notify(id("solo", 1, 2));
    t.stage(0, id("solo", 1, 2));
    t.load(0);
    assert_eq!(t.live(), ["r0"]);
    let mut ages = Vec::new();
    for age in 1..=3000 {
        assert!(age != 2000 || t.barrier.next_deadline() == Some(2000), "nobody would look in time");
        let actions = t.after(1);
        ages.extend(released(&actions).into_iter().map(|what| (age, what)));
        for r in [0, 1] {
            t.step(Event::Heartbeat { peer: t.peer(r) });
        }
    }
    assert_eq!(ages, [(2000, "solo@1.2".to_owned())], "once, and when `history_ms` has passed");
}

#[test]
fn synchronous_notify_answers_after_the_load_with_the_results_of_the_eval() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    let sync = |wait, eval| Some(SyncNotify { id: WaitId(wait), eval, timeout: 400 });
    let sender_endpoint = "trainer:9".to_owned();
    let identity = id("actor", 1, 7);
    t.step(Event::Notify { identity, sender_endpoint: sender_endpoint.clone(), sync: sync(1, true) });
    let identity = id("verifier", 1, 7);
    t.step(Event::Notify { identity, sender_endpoint, sync: sync(2, false) });
    t.stage_pair(0, 1, 7);
    let actions = t.load(0);
    let served = t.barrier.service_version(&set("set")).unwrap().unwrap().clone();
    assert!(actions.contains(&Action::RunEval { id: WaitId(1), served: served.clone() }));
    let outcome = NotifyOutcome::Loaded { served: served.clone() };
    assert!(actions.contains(&Action::NotifyReply { id: WaitId(2), outcome }));
    let result = Ok("{\"reward\": 0.5}".to_owned());
    let done = t.step(Event::EvalDone { id: WaitId(1), result: result.clone() });
    let outcome = NotifyOutcome::Evaluated { served, result: result.clone() };
    assert_eq!(done, [Action::NotifyReply { id: WaitId(1), outcome }]);
    assert_eq!(
        t.try_step(Event::EvalDone { id: WaitId(1), result }),
        Err(BarrierError::UnknownWait(WaitId(1)))
    );
}

#[test]
fn trainer_that_ran_ahead_alone_is_told_which_models_are_missing() {
    for mode in [Mode::Strict, Mode::Relaxed] {
        let mut t = Rig::new(vec![SetConfig { mode, ..strict("set", &PAIR) }]);
        t.join(0, &PAIR, &[]);
        for name in PAIR {
            t.notify(id(name, 1, 7));
            t.stage(0, id(name, 1, 7));
            if mode == Mode::Relaxed {
                t.load(0);
            }
        }
        if mode == Mode::Strict {
            t.load(0);
        }
        assert_eq!((t.served(), t.barrier.blocked(&set("set"))), (Some(7), Ok(Blocked::UpToDate)));
        let sync = Some(SyncNotify { id: WaitId(3), eval: false, timeout: 300 });
        t.step(Event::Notify { identity: id("actor", 1, 8), sender_endpoint: "trainer:9".into(), sync });
        t.stage(0, id("actor", 1, 8));
        if mode == Mode::Relaxed {
            t.load(0);
        }
        let blocked = Blocked::Unmatched { version: 8, missing: vec![model("verifier")] };
        assert!(blocked.to_string().contains("version 8 is announced, but not by verifier"));
        let outcome = NotifyOutcome::LoadTimeout { blocked };
        assert_eq!(t.after(300), [Action::NotifyReply { id: WaitId(3), outcome }], "{mode:?}");
    }
}

#[test]
fn eval_that_never_ends_is_given_up_at_its_deadline() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    let sync = Some(SyncNotify { id: WaitId(1), eval: true, timeout: 400 });
    t.step(Event::Notify { identity: id("actor", 1, 7), sender_endpoint: "trainer:9".into(), sync });
    t.notify(id("verifier", 1, 7));
    t.stage_pair(0, 1, 7);
    // The notify's own deadline ends with the load; the eval's begins there.
    t.after(200);
    let actions = t.load(0);
    let served = t.barrier.service_version(&set("set")).unwrap().unwrap().clone();
    assert!(actions.contains(&Action::RunEval { id: WaitId(1), served: served.clone() }));
    assert_eq!(t.after(499), []);
    assert_eq!(t.barrier.next_deadline(), Some(700));
    let outcome = NotifyOutcome::EvalTimeout { served };
    assert_eq!(t.after(1), [Action::NotifyReply { id: WaitId(1), outcome }]);
    let late = Event::EvalDone { id: WaitId(1), result: Ok("0.7".into()) };
    assert_eq!(t.try_step(late), Err(BarrierError::UnknownWait(WaitId(1))));
}

#[test]
fn restarted_controller_rebuilds_from_joins_and_the_next_notify() {
    let mut t = Rig::pair();
    // The receivers held 6 when the controller went down; the actor has gone on to 7.
    let has = [id("actor", 1, 6), id("verifier", 1, 6)];
    t.join(0, &PAIR, &has);
    t.notify(id("actor", 1, 7));
    assert_eq!(t.served(), None, "nothing is served on a receiver's word alone");
    // The verifier repeats its last notify: all receivers have that version, so it is served without a load.
    let actions = t.notify(id("verifier", 1, 6));
    assert_eq!((t.served(), loads(&actions).len()), (Some(6), 0));
    t.join(1, &PAIR, &has);
    assert_eq!(t.live(), ["r0", "r1"]);
}

fn settling() -> Rig {
    let limits = Limits { settle_ms: 80, ..short_limits() };
    let loose = SetConfig { mode: Mode::Relaxed, ..strict("loose", &["solo"]) };
    let mut rig = Rig::with(Config { sets: vec![strict("set", &PAIR), loose], limits });
    rig.after(0);
    rig
}

/// The gate opened with most receivers missing, and loads began before they had staged.
#[test]
fn new_barrier_neither_loads_nor_serves_before_its_roster_has_settled() {
    let mut t = settling();
    // Two receivers outlived the controller before; the first one is back at once.
    let has = [id("actor", 1, 6), id("verifier", 1, 6)];
    t.join(0, &["actor", "verifier", "solo"], &has);
    t.gate(1, 6, None);
    let mut actions = t.notify_pair(1, 6);
    actions.extend(t.notify(id("solo", 1, 3)));
    assert_eq!(staged_orders(&actions), ["r0 solo@1.3"], "what can be prepared is");
    actions.extend(t.stage(0, id("solo", 1, 3)));
    for _ in 0..7 {
        actions.extend(t.after(10));
    }
    assert_eq!((t.served(), loads(&actions), opened(&actions)), (None, vec![], vec![]));
    assert_eq!(t.barrier.blocked(&set("set")), Ok(Blocked::Settling));
    // The second one has less, and is waited for from here on: no live member makes do without it.
    t.join(1, &PAIR, &[id("actor", 1, 5), id("verifier", 1, 5)]);
    let actions = t.after(10);
    assert_eq!((loads(&actions), opened(&actions)), (vec!["r0"], vec![]), "the relaxed model of the first");
    assert_eq!(t.served(), None);
    t.stage_pair(1, 1, 6);
    let actions = t.load(1);
    assert_eq!((t.served(), opened(&actions)), (Some(6), vec![1]));
    assert_eq!(t.live(), ["r0", "r1"]);
}

#[test]
fn time_that_the_controller_slept_through_does_not_settle_the_roster() {
    let mut t = settling();
    t.join(0, &PAIR, &[id("actor", 1, 6), id("verifier", 1, 6)]);
    t.notify_pair(1, 6);
    // It stood still for far longer than receivers take to come back, and none of them was heard meanwhile.
    t.after(500);
    assert_eq!((t.served(), t.barrier.next_deadline()), (None, Some(510)));
    for _ in 0..7 {
        assert_eq!(t.served(), None);
        t.after(10);
    }
    assert_eq!(t.served(), Some(6));
    // From then on time is time.
    t.notify_pair(1, 7);
    t.stage_pair(0, 1, 7);
    t.load(0);
    assert_eq!(t.served(), Some(7));
}

#[test]
fn snapshot_is_plain_data() {
    let mut t = Rig::pair();
    t.join(0, &PAIR, &[]);
    t.serve_pair(&[0], 1, 7);
    t.notify(id("actor", 1, 8));
    let json = serde_json::to_value(t.barrier.snapshot()).unwrap();
    assert_eq!(json["sets"][0]["served"]["version"], 7);
    assert_eq!(json["sets"][0]["groups"][0]["members"][0]["slots"][0]["staging"][0], 8);
    assert_eq!(json["receivers"][0]["receiver"], "r0");
}

#[test]
fn three_hundred_receivers_of_eight_models_take_one_order_each_per_model() {
    let names: Vec<String> = (0..8).map(|m| format!("m{m}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut t = Rig::new(vec![strict("set", &names)]);
    for r in 0..300 {
        t.join(r, &names, &[]);
    }
    let mut actions = Vec::new();
    for version in 1..=3 {
        for name in &names {
            actions.extend(t.notify(id(name, 1, version)));
        }
        for r in 0..300 {
            for name in &names {
                actions.extend(t.stage(r, id(name, 1, version)));
            }
        }
        for r in 0..300 {
            actions.extend(t.load(r));
        }
        assert_eq!(t.served(), Some(version));
    }
    let (staged, loaded) = (staged_orders(&actions), loads(&actions));
    let receivers: BTreeSet<_> = loaded.iter().collect();
    assert_eq!((staged.len(), loaded.len(), receivers.len()), (3 * 300 * 8, 3 * 300, 300));
    assert_eq!(t.live.len(), 300);
}

#[test]
fn set_added_later_is_as_good_as_one_configured() {
    let mut t = Rig::new(vec![strict("other", &["other"])]);
    assert_eq!(
        t.try_step(Event::Notify { identity: id("actor", 1, 1), sender_endpoint: "x".into(), sync: None }),
        Err(BarrierError::UnknownModel { model: model("actor"), known: vec![model("other")] })
    );
    t.barrier.add_set(strict("set", &PAIR)).unwrap();
    let relaxed = SetConfig { mode: Mode::Relaxed, ..strict("loose", &["a", "b"]) };
    t.barrier.add_set(relaxed).unwrap();
    assert_eq!(t.barrier.set_of(&model("verifier")), Ok(&set("set")));
    t.join(0, &["actor", "verifier", "a", "b"], &[]);
    t.gate(7, 1, None);
    t.serve_pair(&[0], 1, 1);
    assert_eq!(t.live(), ["r0"]);
    assert_eq!(t.barrier.ahead(&model("actor")), Ok((0, false)));
    t.notify(id("a", 1, 5));
    assert_eq!(t.barrier.ahead(&model("a")), Ok((1, false)));
    t.stage(0, id("a", 1, 5));
    t.load(0);
    assert_eq!(t.barrier.service_version(&set("loose")), Ok(None));
    t.notify(id("b", 1, 6));
    t.stage(0, id("b", 1, 6));
    t.load(0);
    let served = t.barrier.service_version(&set("loose")).unwrap().unwrap();
    assert_eq!((served.version, served.identities.len()), (5, 2));
    let names: Vec<_> = t.barrier.snapshot().sets.iter().map(|s| s.set.to_string()).collect();
    assert_eq!(names, ["other", "set", "loose"]);
}

#[test]
fn set_that_is_refused_changes_nothing() {
    let mut barrier = Barrier::without_sets(short_limits()).unwrap();
    barrier.add_set(strict("set", &PAIR)).unwrap();
    let before = barrier.snapshot();
    let mut refused = |set: SetConfig| barrier.add_set(set).unwrap_err();
    assert_eq!(refused(strict("set", &["x"])), BarrierError::DuplicateSet(set("set")));
    assert_eq!(refused(strict("b", &["x", "actor"])), BarrierError::DuplicateModel(model("actor")));
    assert_eq!(refused(strict("b", &["x", "x"])), BarrierError::DuplicateModel(model("x")));
    assert!(matches!(refused(strict("b", &[])), BarrierError::SetSize { .. }));
    assert!(matches!(
        refused(SetConfig { floor: 0, ..strict("b", &["x"]) }),
        BarrierError::OutOfRange { .. }
    ));
    assert_eq!(barrier.snapshot(), before);
    for n in 1..Config::MAX_SETS {
        barrier.add_set(strict(&format!("s{n}"), &[&format!("m{n}")])).unwrap();
    }
    let one_more = barrier.add_set(strict("more", &["more"])).unwrap_err();
    assert_eq!(one_more, BarrierError::TooManySets { limit: Config::MAX_SETS });
    assert!(barrier.set_of(&model("more")).is_err());
    assert!(Barrier::without_sets(Limits { load_ms: 0, ..short_limits() }).is_err());
}
