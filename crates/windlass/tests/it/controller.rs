//! The controller as a process: what becomes of notifies, who is let in, what it forgets and what it does not.

mod http;

use parking_lot::Mutex;

use crate::command;
use std::collections::{BTreeSet, HashMap};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::control::{
    Controller, Light, failed, gate, id, live, loads, model, notify, set, span, stages, stop, until,
};
use crate::process::{PATIENCE, Process, answer};
use http::{conforms, next_event};
use rustix::process::Signal;
use serde_json::{Value, json};
use windlass::service::controller::openapi::DESCRIPTION;
use windlass::service::controller::status::{Status, SyncState, TrainerState};
use windlass::service::controller::wire::{
    Doing, EngineDoing, EvalDone, Gate, Lane, NotifyVersion, Outcome, Poll, Report, TakeEval, Task,
    TrainerLeft,
};
use windlass_core::barrier::{Awaited, Order, Phase};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation};

/// The set that most tests use.
const PAIR: &str = "--set=main=actor,verifier";
const MODELS: [&str; 2] = ["actor", "verifier"];

/// Announces a version of both models.
fn notify_pair(controller: &Controller, incarnation: u64, version: u64) {
    for name in MODELS {
        controller.notify(id(name, incarnation, version));
    }
}

/// Takes a version all the way at these receivers.
fn serve_pair(controller: &Controller, lights: &mut [&mut Light], version: u64) {
    notify_pair(controller, 1, version);
    for light in lights.iter_mut() {
        light.obey(&controller.client);
    }
    for light in lights.iter_mut() {
        light.obey(&controller.client);
    }
    assert_eq!(controller.served("main"), Some(version));
}

/// What a request without effect leaves as it was.
fn lasting(mut status: Status) -> Status {
    status.now = 0;
    status.receivers.iter_mut().for_each(|r| r.last_seen = 0);
    status
}

#[test]
fn a_notify_becomes_orders_and_what_is_loaded_is_served() {
    let controller = Controller::start(&[PAIR]);
    let (mut a, mut b) = (controller.light("a", 1, &MODELS), controller.light("b:0", 7, &MODELS));
    let told = controller.client.notify(
        &NotifyVersion {
            spans: vec![span(Lane::Trainer, "offload", 30.0, 10.0, None)],
            delta_ratio: Some(0.02),
            delta_sparsity: Some(0.98),
            ..notify(id("actor", 1, 3))
        },
        &stop(),
    );
    let told = told.unwrap();
    assert_eq!((told.wait, told.ahead, told.set.as_str(), &told.served), (false, 1, "main", &None));
    let tasks = a.poll(&controller.client);
    assert_eq!(stages(&tasks).iter().map(|(_, i)| i.clone()).collect::<Vec<_>>(), [id("actor", 1, 3)]);
    let Task::Stage { sender_endpoint, order, .. } = &tasks[0] else { panic!("{tasks:?}") };
    assert_eq!(sender_endpoint, "http://10.0.0.5:7000");
    let report = Report {
        spans: vec![span(Lane::Wire, "pull delta", 20.0, 5.0, Some(1000))],
        mode: Some("delta".into()),
        ..a.report(*order, &id("actor", 1, 3), Outcome::Staged)
    };
    controller.client.report(&report, &stop()).unwrap();
    assert_eq!(loads(&a.poll(&controller.client)), [], "the verifier has announced nothing");
    controller.notify(id("verifier", 1, 3));
    a.obey(&controller.client);
    assert_eq!(loads(&a.poll(&controller.client)), [], "b has staged nothing");
    assert_eq!(controller.status().sets[0].rounds[0].phase, Phase::Staging);
    b.obey(&controller.client);

    let load = loads(&a.poll(&controller.client));
    assert_eq!(load[0].1, [id("actor", 1, 3), id("verifier", 1, 3)], "one order for the whole set");
    for identity in &load[0].1 {
        let report = Report { pause_ms: Some(4.5), ..a.report(load[0].0, identity, Outcome::Loaded) };
        controller.client.report(&report, &stop()).unwrap();
    }
    assert_eq!(controller.served("main"), None, "b has loaded nothing");
    assert_eq!(live(&a.poll(&controller.client)), None);
    b.obey(&controller.client);
    assert_eq!(controller.served("main"), Some(3));
    assert_eq!(live(&a.poll(&controller.client)), Some(true));

    let status = controller.status();
    let sync = &status.sets[0].syncs[0];
    assert_eq!((sync.version, sync.state, sync.models.len()), (3, SyncState::Served, 2));
    assert_eq!((sync.staged, sync.loaded, sync.failed, sync.delta, sync.bytes), (4, 4, 0, 1, 1000));
    assert_eq!((sync.pause_ms, sync.models[0].delta_ratio), (Some(4.5), Some(0.02)));
    assert!(sync.latency_ms.unwrap() <= sync.served_ms.unwrap() && sync.loading_ms <= sync.served_ms);
    let offload = &sync.spans[0];
    assert_eq!(
        (offload.lane, offload.who.as_str(), offload.what.as_str()),
        (Lane::Trainer, "actor", "offload")
    );
    assert!((offload.from_ms, offload.to_ms) == (-30.0, -10.0), "on the controller's clock: {offload:?}");
    let pull = &sync.spans[1];
    assert_eq!((pull.lane, pull.who.as_str(), pull.bytes), (Lane::Wire, "a", Some(1000)));
    assert!((pull.to_ms - pull.from_ms - 15.0).abs() < 1e-6, "{pull:?}");
    let trainer = &status.trainers[0];
    assert_eq!(
        (trainer.version, trainer.ahead, trainer.endpoint.as_str()),
        (Some(3), 0, "http://10.0.0.5:7000")
    );
    let receiver = &status.receivers[1];
    assert_eq!((receiver.receiver.as_str(), receiver.session, receiver.host.as_str()), ("b:0", 7, "test"));
    assert!(receiver.places[0].live && receiver.models[0].loaded.unwrap().version == 3);
    assert_eq!((status.sets[0].live, status.sets[0].receivers, status.sets[0].up_to_date), (2, 2, true));
}

#[test]
fn an_order_is_given_again_until_it_is_taken() {
    let controller = Controller::start(&["--set=solo=m"]);
    let mut light = controller.light("a", 1, &["m"]);
    controller.notify(id("m", 1, 1));
    let first = stages(&light.poll(&controller.client));
    light.after = 0;
    let again = stages(&light.poll(&controller.client));
    assert_eq!(first, again, "the first answer may be lost");
    assert_eq!(light.poll(&controller.client), []);
    controller.notify(id("m", 1, 1));
    assert_eq!(light.poll(&controller.client), [], "a repeated notify becomes no order");
    light.after = 99;
    let refused = light.try_poll(&controller.client, 0).unwrap_err();
    assert_eq!((refused.status(), refused.kind()), (Some(400), Kind::Invalid), "{refused}");
    assert!(refused.to_string().contains("99"), "{refused}");
}

#[test]
fn an_open_poll_is_answered_when_an_order_comes_and_ends_with_its_time() {
    let controller = Controller::start(&["--set=solo=m", "--heartbeat=2"]);
    let mut light = controller.light("a", 1, &["m"]);
    thread::scope(|scope| {
        let client = &controller.client;
        let waiting = scope.spawn(|| light.try_poll(client, 60_000).unwrap());
        controller.notify(id("m", 1, 1));
        assert_eq!(stages(&waiting.join().unwrap()).len(), 1);
    });
    let begun = Instant::now();
    assert_eq!(light.try_poll(&controller.client, 60_000).unwrap(), []);
    assert!(begun.elapsed() < Duration::from_secs(2), "a poll ends before its receiver counts as silent");
    assert_eq!(controller.status().receivers.len(), 1);
}

#[test]
fn the_gate_opens_exactly_when_the_version_is_served() {
    let controller = Controller::start(&[PAIR]);
    let (mut a, mut b) = (controller.light("a", 1, &MODELS), controller.light("b", 1, &MODELS));
    thread::scope(|scope| {
        let client = &controller.client;
        let gate = scope.spawn(|| gate(client, "main", 2, 20_000));
        controller.waits(1);
        serve_pair(&controller, &mut [&mut a, &mut b], 1);
        controller.waits(1);
        notify_pair(&controller, 1, 2);
        a.obey(&controller.client);
        b.obey(&controller.client);
        a.obey(&controller.client);
        assert!(!gate.is_finished() && controller.status().waits == 1, "b has not loaded");
        b.obey(&controller.client);
        let opened = gate.join().unwrap().unwrap().served.unwrap();
        assert_eq!((opened.version, opened.identities.len()), (2, 2));
    });
    controller.waits(0);
    let late = controller.gate("main", 3, 50).unwrap_err();
    assert_eq!((late.status(), late.kind()), (Some(504), Kind::Timeout));
    assert!(late.to_string().contains("serves version 2, not 3"), "{late}");
    let lineage = |incarnation| Gate {
        model_id: Some(model("actor")),
        incarnation: Some(Incarnation(incarnation)),
        at_least: Some(2),
        timeout_ms: Some(50),
        ..Gate::default()
    };
    assert_eq!(controller.client.gate(&lineage(1), &stop()).unwrap().served.unwrap().version, 2);
    let next_life = controller.client.gate(&lineage(2), &stop()).unwrap_err();
    assert_eq!(next_life.status(), Some(504), "what an earlier life published does not open it: {next_life}");
}

#[test]
fn a_gate_whose_asker_hangs_up_is_forgotten() {
    let controller = Controller::start(&[PAIR]);
    let stream = controller.http.send("GET /service_version?at_least=9", &controller.http.bearer(), b"");
    controller.waits(1);
    drop(stream);
    controller.waits(0);
}

#[test]
fn a_synchronous_notify_answers_after_the_load_with_the_results_of_its_eval() {
    let controller = Controller::start(&["--set=solo=m", "--eval-timeout=5"]);
    let mut light = controller.light("a", 1, &["m"]);
    let client = &controller.client;
    let sync = |version: u64, eval: Option<Value>, timeout_ms: u64| {
        let asked =
            NotifyVersion { sync: true, eval, timeout_ms: Some(timeout_ms), ..notify(id("m", 1, version)) };
        client.notify(&asked, &stop())
    };
    let take = || client.take_eval(&TakeEval { set: None, timeout_ms: 20_000 }, &stop()).unwrap();
    thread::scope(|scope| {
        let plain = scope.spawn(|| sync(1, None, 20_000));
        controller.waits(1);
        light.obey(client);
        assert!(!plain.is_finished());
        light.obey(client);
        assert_eq!(plain.join().unwrap().unwrap().served.unwrap().version, 1);

        let evaluated = scope.spawn(|| sync(2, Some(json!({ "tasks": ["gsm8k"] })), 20_000));
        controller.waits(1);
        light.obey(client);
        light.obey(client);
        let task = take();
        assert_eq!((task.eval, task.served.unwrap().version), (Some(json!({ "tasks": ["gsm8k"] })), 2));
        let done = |result, error| EvalDone { id: task.id.unwrap(), result, error };
        client.eval_done(&done(Some(json!({ "gsm8k": 0.5 })), None), &stop()).unwrap();
        let answer = evaluated.join().unwrap().unwrap();
        assert_eq!((answer.eval, answer.eval_error), (Some(json!({ "gsm8k": 0.5 })), None));
        let again = client.eval_done(&done(None, None), &stop()).unwrap_err();
        assert_eq!(again.status(), Some(404), "an answer counts once: {again}");

        let failing = scope.spawn(|| sync(3, Some(json!(true)), 20_000));
        controller.waits(1);
        light.obey(client);
        light.obey(client);
        let task = take();
        let done = EvalDone { id: task.id.unwrap(), result: None, error: Some("no GPU left".into()) };
        client.eval_done(&done, &stop()).unwrap();
        let answer = failing.join().unwrap().unwrap();
        assert_eq!(answer.eval_error.as_deref(), Some("no GPU left"));
        assert_eq!(answer.served.unwrap().version, 3, "it is served all the same");

        let endless = scope.spawn(|| sync(4, Some(json!(1)), 20_000));
        controller.waits(1);
        light.obey(client);
        light.obey(client);
        let refused = endless.join().unwrap().unwrap_err();
        assert!(refused.status() == Some(504) && refused.to_string().contains("eval"), "{refused}");
        let none = client.take_eval(&TakeEval { set: None, timeout_ms: 0 }, &stop()).unwrap();
        assert_eq!(none.id, None, "nobody waits for it any more");
    });
    let syncs = client.status(&stop()).unwrap().sets.remove(0).syncs;
    let evals: Vec<_> = syncs.iter().map(|s| s.eval.as_deref()).collect();
    assert_eq!(evals, [None, Some("{\"gsm8k\":0.5}"), Some("failed: no GPU left"), None]);
    let refused = sync(5, None, 50).unwrap_err();
    assert!(refused.status() == Some(504) && refused.to_string().contains("staging"), "{refused}");
}

#[test]
fn words_of_an_earlier_session_order_or_incarnation_are_refused_over_http() {
    let controller = Controller::start(&["--set=solo=m"]);
    let client = &controller.client;
    let mut old = controller.light("a", 5, &["m"]);
    controller.notify(id("m", 2, 10));
    let (order, identity) = stages(&old.poll(client))[0].clone();
    let mut new = controller.light("a", 6, &["m"]);
    let refusals = [
        old.say(client, order, &identity, Outcome::Staged).map(|_| ()),
        old.try_poll(client, 0).map(|_| ()),
        old.clone().join(client).map(|_| ()),
        client.leave(&old.peer, &stop()).map(|_| ()),
        new.say(client, order, &identity, Outcome::Staged).map(|_| ()),
        controller.try_notify(id("m", 1, 99)).map(|_| ()),
    ];
    for (n, refused) in refusals.into_iter().enumerate() {
        let refused = refused.unwrap_err();
        assert_eq!((refused.status(), refused.kind()), (Some(409), Kind::Stale), "{n}: {refused}");
    }
    let dead = Gate { model_id: Some(model("m")), incarnation: Some(Incarnation(1)), ..Gate::default() };
    let dead = client.gate(&Gate { at_least: Some(1), ..dead }, &stop()).unwrap_err();
    assert_eq!(dead.status(), Some(409), "{dead}");
    let (order, identity) = stages(&new.poll(client))[0].clone();
    new.say(client, order, &identity, Outcome::Staged).unwrap();
    let again = new.say(client, order, &identity, Outcome::Staged).unwrap_err();
    assert_eq!(again.status(), Some(409), "a replay changes nothing: {again}");
    let stranger = Light::new("nobody", 1, &["m"]).try_poll(client, 0).unwrap_err();
    assert_eq!((stranger.status(), stranger.kind()), (Some(404), Kind::NotFound), "{stranger}");
    assert_eq!(controller.status().receivers.len(), 1);
    let errors = controller.status().errors;
    assert!(errors[0].kind == Kind::Stale && errors[0].who.contains('m'), "{errors:?}");
}

#[test]
fn a_resumed_trainer_supersedes_its_dead_self_over_http() {
    let controller = Controller::start(&["--set=solo=m"]);
    let client = &controller.client;
    let mut light = controller.light("a", 1, &["m"]);
    controller.notify(id("m", 1, 105));
    light.obey(client);
    light.obey(client);
    assert_eq!(controller.served("solo"), Some(105));
    controller.notify(id("m", 1, 106));
    thread::scope(|scope| {
        let on_behalf = |incarnation| Gate {
            model_id: Some(model("m")),
            incarnation: Some(Incarnation(incarnation)),
            at_least: Some(101),
            timeout_ms: Some(20_000),
            ..Gate::default()
        };
        let dead = Gate { at_least: Some(106), ..on_behalf(1) };
        let dead = scope.spawn(move || client.gate(&dead, &stop()));
        controller.waits(1);
        controller.notify(id("m", 2, 101));
        assert_eq!(dead.join().unwrap().unwrap_err().status(), Some(409));
        assert_eq!(controller.served("solo"), None, "nothing of the dead lineage is served");
        let alive = on_behalf(2);
        let alive = scope.spawn(move || client.gate(&alive, &stop()));
        controller.waits(1);
        let tasks = light.obey(client);
        assert_eq!(stages(&tasks).into_iter().map(|(_, i)| i).collect::<Vec<_>>(), [id("m", 2, 101)]);
        assert_eq!(live(&tasks), Some(false));
        light.obey(client);
        let served = alive.join().unwrap().unwrap().served.unwrap();
        assert_eq!(served.identities, [id("m", 2, 101)]);
    });
    let states: Vec<_> = controller.status().sets[0].syncs.iter().map(|s| (s.version, s.state)).collect();
    let expected = [(105, SyncState::Served), (106, SyncState::Superseded), (101, SyncState::Served)];
    assert_eq!(states, expected);
}

#[test]
fn a_restarted_controller_rebuilds_everything_from_joins_and_the_next_notify() {
    let mut controller = Controller::start(&[PAIR]);
    let (mut a, mut b) = (controller.light("a", 1, &MODELS), controller.light("b", 1, &MODELS));
    serve_pair(&controller, &mut [&mut a, &mut b], 7);
    controller.restart();
    assert_eq!(controller.served("main"), None);
    for light in [&mut a, &mut b] {
        let refused = light.try_poll(&controller.client, 0).unwrap_err();
        assert_eq!((refused.status(), refused.kind()), (Some(404), Kind::NotFound), "{refused}");
        light.peer.session += 1;
        light.join(&controller.client).unwrap();
    }
    assert_eq!(controller.served("main"), None, "nobody has confirmed what they hold");
    controller.notify(id("actor", 1, 7));
    controller.notify(id("verifier", 1, 7));
    assert_eq!(controller.served("main"), Some(7), "both hold it: nothing has to move");
    assert_eq!(live(&a.poll(&controller.client)), Some(true));
    serve_pair(&controller, &mut [&mut a, &mut b], 8);
}

#[test]
fn who_joins_late_or_fails_is_live_only_after_it_has_caught_up() {
    let controller = Controller::start(&[PAIR, "--retry=0.05"]);
    let client = &controller.client;
    let mut a = controller.light("a", 1, &MODELS);
    serve_pair(&controller, &mut [&mut a], 1);
    let mut late = controller.light("late", 1, &MODELS);
    let of = |name: &str| {
        let status = controller.status();
        status.receivers.into_iter().find(|r| r.receiver.as_str() == name).unwrap()
    };
    assert!(!of("late").places[0].live);
    assert_eq!(controller.served("main"), Some(1), "nobody waits for it");
    let tasks = late.obey(client);
    assert_eq!((stages(&tasks).len(), live(&tasks)), (2, None));
    let (order, identities) = loads(&late.poll(client))[0].clone();
    late.say(client, order, &identities[0], Outcome::Loaded).unwrap();
    assert!(!of("late").places[0].live, "one of two models");
    late.say(client, order, &identities[1], failed(Phase::Loading, "its digest is wrong")).unwrap();
    let place = of("late").places[0].clone();
    assert!(!place.live && place.why.unwrap().contains("its digest is wrong"));
    let error = controller.status().errors[0].clone();
    assert_eq!((error.who.as_str(), error.kind), ("receiver late", Kind::Corrupt));
    assert!(error.message.contains("its digest is wrong") && !error.advice.is_empty(), "{error:?}");
    let back = until("coming back", || {
        late.obey(client);
        of("late").places[0].live.then(|| of("late"))
    });
    assert!(back.places[0].why.is_none());
    assert!(back.models.iter().all(|m| m.loaded.unwrap().version == 1));
}

#[test]
fn a_silent_receiver_is_out_and_one_that_leaves_is_gone() {
    let controller = Controller::start(&["--set=solo=m", "--heartbeat=0.3"]);
    let _silent = controller.light("silent", 1, &["m"]);
    let polite = controller.light("polite", 1, &["m"]);
    controller.client.leave(&polite.peer, &stop()).unwrap();
    until("eviction", || controller.status().receivers.is_empty().then_some(()));
    let errors = controller.status().errors;
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].who == "receiver silent" && errors[0].kind == Kind::PeerLost, "{errors:?}");
}

#[test]
fn a_trainer_that_takes_leave_has_left_and_one_that_was_killed_falls_silent() {
    let controller = Controller::start(&[PAIR, "--heartbeat=0.3"]);
    let state = |n: usize| controller.status().trainers[n].state;
    notify_pair(&controller, 5, 1);
    assert_eq!((state(0), state(1)), (TrainerState::Here, TrainerState::Here));
    let left = |incarnation| TrainerLeft { model_id: model("actor"), incarnation: Incarnation(incarnation) };
    controller.client.trainer_left(&left(5), &stop()).unwrap();
    assert_eq!(state(0), TrainerState::Left);
    // The other one is killed: it says nothing.
    until("silence", || (state(1) == TrainerState::Silent).then_some(()));
    assert_eq!(state(0), TrainerState::Left, "who has left is not missed");
    assert_eq!(controller.status().errors, [], "neither is an error");
    // It comes back, also in a newer life, for which an older one cannot speak.
    controller.notify(id("actor", 5, 2));
    assert_eq!(state(0), TrainerState::Here);
    controller.notify(id("actor", 6, 1));
    let echo = controller.client.trainer_left(&left(5), &stop()).unwrap_err();
    assert_eq!((echo.status(), echo.kind()), (Some(409), Kind::Stale), "{echo}");
    assert_eq!(state(0), TrainerState::Here);
    let nobody = TrainerLeft { model_id: model("ghost"), incarnation: Incarnation(1) };
    let nobody = controller.client.trainer_left(&nobody, &stop()).unwrap_err();
    assert_eq!(nobody.kind(), Kind::NotFound);
    assert!(nobody.to_string().contains("there are actor, verifier"), "{nobody}");
}

#[test]
fn the_status_says_who_waits_for_what_since_when_and_until_when() {
    let controller = Controller::start(&[PAIR]);
    let mut light = controller.light("a", 1, &MODELS);
    serve_pair(&controller, &mut [&mut light], 1);
    let client = &controller.client;
    assert_eq!(controller.status().waiting, []);
    thread::scope(|scope| {
        let gate = Gate {
            at_least: Some(2),
            timeout_ms: Some(20_000),
            who: Some("loader 7:99".into()),
            ..Gate::default()
        };
        let gate = scope.spawn(move || client.gate(&gate, &stop()));
        until("the gate", || (controller.status().waits == 1).then_some(()));
        let sync = NotifyVersion { sync: true, timeout_ms: Some(10_000), ..notify(id("actor", 1, 2)) };
        let sync = scope.spawn(move || client.notify(&sync, &stop()));
        let status = until("both", || Some(controller.status()).filter(|s| s.waits == 2));
        let [first, second] = &status.waiting[..] else { panic!("{:?}", status.waiting) };
        assert_eq!((first.who.as_str(), first.what, first.at_least), ("loader-7:99", Awaited::Gate, 2));
        assert_eq!((second.who.as_str(), second.what), ("the trainer of actor", Awaited::Load));
        assert_eq!((first.set.as_str(), second.set.as_str(), second.at_least), ("main", "main", 2));
        assert!(first.since <= second.since && second.since <= status.now, "{status:?}");
        // What it took to get there is not waited for.
        assert!((15_000..=20_000).contains(&(first.until - first.since)), "{first:?}");
        assert_eq!(second.until - second.since, 10_000);
        let raw = controller.http.get("/status").json();
        conforms(&json!({ "$ref": "#/components/schemas/Status" }), &raw, "status");
        controller.notify(id("verifier", 1, 2));
        light.obey(client);
        light.obey(client);
        assert_eq!(gate.join().unwrap().unwrap().served.unwrap().version, 2);
        sync.join().unwrap().unwrap();
    });
    assert_eq!(controller.status().waiting, []);
}

#[test]
fn without_sets_each_model_becomes_one_when_it_is_first_heard_of() {
    let controller = Controller::start(&[]);
    let client = &controller.client;
    let early = controller.gate("m", 1, 50).unwrap_err();
    assert_eq!(early.status(), Some(504), "who comes early waits: {early}");
    let now = client.gate(&Gate::default(), &stop()).unwrap_err();
    assert_eq!((now.status(), now.kind()), (Some(404), Kind::NotFound), "{now}");
    thread::scope(|scope| {
        let any = Gate { at_least: Some(1), timeout_ms: Some(20_000), ..Gate::default() };
        let gate = scope.spawn(move || client.gate(&any, &stop()));
        let mut light = controller.light("a", 1, &["m"]);
        controller.notify(id("m", 1, 1));
        light.obey(client);
        light.obey(client);
        assert_eq!(gate.join().unwrap().unwrap().served.unwrap().version, 1);
    });
    controller.notify(id("other", 1, 1));
    let several = client.gate(&Gate::default(), &stop()).unwrap_err();
    assert!(several.status() == Some(400) && several.to_string().contains("m, other"), "{several}");
    let stale = client.join(
        &windlass::service::controller::wire::Join {
            peer: Light::new("a", 0, &["new"]).peer,
            models: vec![model("new")],
            has: Vec::new(),
            host: String::new(),
            release: String::new(),
        },
        &stop(),
    );
    assert_eq!(stale.unwrap_err().status(), Some(409));
    let sets: Vec<_> = controller.status().sets.into_iter().map(|s| s.set.to_string()).collect();
    assert_eq!(sets, ["m", "other"], "a join that is refused makes no set");
    for n in 2..256 {
        controller.notify(id(&format!("typo{n}"), 1, 1));
    }
    let full = controller.try_notify(id("one-more", 1, 1)).unwrap_err();
    assert_eq!((full.status(), full.kind()), (Some(507), Kind::Exhausted), "{full}");

    let configured = Controller::start(&["--set=solo=m"]);
    let unknown = configured.try_notify(id("typo", 1, 1)).unwrap_err();
    assert_eq!((unknown.status(), unknown.kind()), (Some(404), Kind::NotFound), "{unknown}");
}

#[test]
fn a_strict_set_never_loads_a_mix_however_its_trainers_race() {
    const VERSIONS: u64 = 25;
    let controller = Controller::start(&[PAIR, "--max-ahead=3"]);
    let names = ["a", "b", "c"];
    // What each receiver has said it staged, and every load that was ordered.
    let staged: Mutex<HashMap<&str, BTreeSet<Identity>>> = Mutex::new(HashMap::new());
    let seen: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for (n, name) in names.into_iter().enumerate() {
            let (client, staged, seen, over) = (&controller.client, &staged, &seen, &over);
            let mut light = controller.light(name, 1, &MODELS);
            scope.spawn(move || {
                let mut dice = command::Dice(n as u64 + 1);
                while !over.load(Ordering::Relaxed) {
                    for task in light.try_poll(client, 50).unwrap() {
                        if dice.roll().is_multiple_of(3) {
                            thread::sleep(Duration::from_millis(dice.roll() % 4));
                        }
                        match task {
                            Task::Stage { order, identity, .. } => {
                                staged.lock().entry(name).or_default().insert(identity.clone());
                                // An order that was called off meanwhile is refused, and that is well.
                                let _ = light.say(client, order, &identity, Outcome::Staged);
                            }
                            Task::Load { order, identities, .. } => {
                                let version = identities[0].version;
                                assert_eq!(identities, MODELS.map(|m| id(m, 1, version)), "a mix");
                                let all = staged.lock();
                                for other in names {
                                    let has = |i: &Identity| all.get(other).is_some_and(|s| s.contains(i));
                                    assert!(
                                        identities.iter().all(has),
                                        "{name} loads {version} before {other} has staged it: {all:?}"
                                    );
                                }
                                drop(all);
                                seen.lock().push(version);
                                for identity in identities {
                                    light.engine.insert(identity.model_id.clone(), identity.clone());
                                    light.say(client, order, &identity, Outcome::Loaded).unwrap();
                                }
                            }
                            Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => {}
                        }
                    }
                }
            });
        }
        let trainers = MODELS.map(|name| {
            let client = &controller.client;
            scope.spawn(move || {
                for version in 1..=VERSIONS {
                    let told = client.notify(&notify(id(name, 1, version)), &stop()).unwrap();
                    if told.wait {
                        let behind = version.saturating_sub(2);
                        gate(client, "main", behind, 20_000).unwrap();
                    }
                    if name == "verifier" {
                        thread::sleep(Duration::from_millis(5));
                    }
                }
            })
        });
        for trainer in trainers {
            trainer.join().unwrap();
        }
        controller.gate("main", VERSIONS, 20_000).unwrap();
        over.store(true, Ordering::Relaxed);
    });
    let seen = seen.into_inner();
    assert!(seen.iter().filter(|v| **v == VERSIONS).count() == 3 && seen.len() >= 9, "{seen:?}");
}

// ---- what is refused ------------------------------------------------------------------------------

#[test]
fn the_controller_says_where_it_is_and_ends_at_once_with_everybody_connected() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let text = command::windlass()
        .args(["controller", "--bind=0.0.0.0"])
        .current_dir(home.path())
        .env_remove("WINDLASS_TOKEN")
        .output()
        .unwrap();
    assert_eq!(text.status.code(), Some(i32::from(Kind::Invalid.row().exit)));
    assert!(String::from_utf8_lossy(&text.stderr).contains("--advertise-host"));

    let mut plain = command::windlass();
    plain.args(["controller", "--with-parent"]).current_dir(home.path()).env_remove("WINDLASS_TOKEN");
    let mut plain = Process::spawn(plain);
    let said = plain.any_line();
    let token = home.path().join("windlass-controller.token");
    let said = said.as_str().unwrap().to_owned();
    assert!(
        said.starts_with("controller at http://127.0.0.1:") && said.contains("windlass-controller.token"),
        "{said}"
    );
    assert_eq!(std::fs::metadata(&token).unwrap().mode() & 0o777, 0o600);
    plain.stdin = None;
    assert_eq!(plain.ends_within(PATIENCE), 0, "its parent is gone");

    let mut controller = Controller::start(&["--set=solo=m"]);
    let light = controller.light("a", 1, &["m"]);
    let http = &controller.http;
    let bearer = http.bearer();
    let gate = http.send("GET /service_version?at_least=1", &bearer, b"");
    let mut events = http.send("GET /events", &bearer, b"");
    next_event(&mut events, |s| s.waits == 1);
    let json = "content-type: application/json\r\n";
    let poll = json!({ "peer": light.peer, "timeout_ms": 60_000 }).to_string();
    let poll = http.send("POST /poll_orders", &format!("{bearer}{json}"), poll.as_bytes());
    next_event(&mut events, |s| s.receivers.len() == 1);
    controller.http.process.signal(Signal::TERM);
    answer(gate).error(503, "peer_lost");
    assert!(matches!(answer(poll).status, 200 | 503));
    assert_eq!(controller.http.process.ends_within(Duration::from_millis(1500)), 0);
}

#[test]
fn arguments_of_the_controller_that_make_no_sense_are_refused() {
    for (args, about) in [
        (vec!["--set=main"], "NAME=MODEL"),
        (vec!["--set=a=m", "--set=b=m"], "listed twice"),
        (vec!["--set=a=m", "--set=a=n"], "configured twice"),
        (vec!["--relaxed=a"], "no --set"),
        (vec!["--required=0"], "all, a number"),
        (vec!["--floor=0"], "0"),
        (vec!["--heartbeat=0"], "seconds"),
    ] {
        let ran = command::run(&[&["controller"], args.as_slice()].concat());
        assert_eq!(ran.code, i32::from(Kind::Invalid.row().exit), "{args:?} {}", ran.stderr);
        assert!(ran.stderr.contains(about), "{about} in {}", ran.stderr);
    }
}

#[test]
fn a_quorum_and_a_relaxed_set_are_what_was_asked_for() {
    let args =
        ["--set=main=actor,verifier", "--set=loose=x,y", "--relaxed=loose", "--required=50%", "--floor=1"];
    let controller = Controller::start(&args);
    let client = &controller.client;
    let (mut a, mut b) = (controller.light("a", 1, &MODELS), controller.light("b", 1, &MODELS));
    notify_pair(&controller, 1, 1);
    a.obey(client);
    a.obey(client);
    assert_eq!(controller.served("main"), Some(1), "half of them will do");
    assert_eq!(live(&a.poll(client)), Some(true));
    b.obey(client);
    b.obey(client);
    let status = controller.status();
    assert_eq!((status.sets[0].required.as_str(), status.sets[0].live), ("50%", 2));
    let mut loose = controller.light("l", 1, &["x", "y"]);
    controller.notify(id("x", 1, 5));
    loose.obey(client);
    loose.obey(client);
    let tasks = loose.poll(client);
    let of_x = matches!(&tasks[..], [Task::Live { models, live: true, set: of, .. }] if *models == [model("x")] && *of == set("loose"));
    assert!(of_x, "each model on its own: {tasks:?}");
}

#[test]
fn three_hundred_receivers_of_eight_models_are_notified_over_http() {
    let ran = command::run(&["bench", "controller", "--repeats", "1", "--json"]).ok();
    let json = ran.json();
    let rows = json["rows"].as_array().unwrap();
    let receivers: Vec<_> = rows.iter().filter_map(|r| r["receivers"].as_u64()).collect();
    assert_eq!(receivers, [3, 30, 300]);
    for row in rows {
        // Printed for whoever reads the log; the figure itself depends on what else the machine does.
        println!("{row}");
        assert_eq!(row["orders"].as_u64(), row["receivers"].as_u64().map(|r| r * 8));
        assert!(
            row["notified_ms"].as_f64() > Some(0.0)
                && row["served_ms"].as_f64() >= row["notified_ms"].as_f64()
        );
        assert!(row["memory_bytes"].as_u64().is_some_and(|b| b > 0 && b < 200_000_000), "{row}");
    }
}
