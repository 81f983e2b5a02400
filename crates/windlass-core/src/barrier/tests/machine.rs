//! Random interleavings of everything that can happen, judged by [`World`].

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::world::World;
use super::{id, model, receiver, set};
use crate::barrier::*;
use crate::identity::{Identity, Incarnation, ModelId, Version};

const MODELS: [&str; 5] = ["actor", "verifier", "solo", "left", "right"];

/// What the trainers have done: all that is needed to make up what they do next.
#[derive(Clone, Debug)]
pub(super) struct Trainers {
    config: Config,
    /// Incarnation and newest version of each model.
    lives: Vec<(u64, Version)>,
    waits: u64,
}

#[derive(Clone, Debug)]
pub(super) enum Transition {
    Notify {
        identity: Identity,
        sync: Option<SyncNotify>,
        new_endpoint: bool,
        /// Nothing of the kind was published.
        falsely: bool,
    },
    Start {
        receiver: usize,
        models: u8,
        keep: bool,
    },
    Kill {
        receiver: usize,
    },
    Leave {
        receiver: usize,
    },
    Work {
        receiver: usize,
        pick: usize,
        fail: bool,
        newer: bool,
    },
    Deliver {
        pick: Index,
        again: bool,
    },
    Pass {
        span: Millis,
        heartbeats: bool,
    },
    Promptly,
    /// The controller is restarted and knows nothing.
    Restart,
    /// A receiver joins the restarted controller.
    Rejoin {
        receiver: usize,
    },
    Gate {
        id: WaitId,
        set: usize,
        at_least: Version,
        lineage: Option<(ModelId, Incarnation)>,
        timeout: Millis,
    },
    Cancel {
        id: WaitId,
    },
    EvalDone {
        id: WaitId,
    },
}

fn configs() -> impl Strategy<Value = Config> {
    let required = prop_oneof![
        3 => Just(Required::All),
        1 => (1usize..3).prop_map(Required::AtLeast),
        1 => (30u8..=100).prop_map(Required::Percent),
    ];
    (required, 1usize..3, 1usize..4).prop_map(|(required, floor, max_ahead)| {
        let models = |names: &[&str]| names.iter().map(|n| model(n)).collect();
        let pair = SetConfig { required, floor, ..SetConfig::strict(set("pair"), models(&MODELS[..2])) };
        let solo = SetConfig::strict(set("solo"), models(&MODELS[2..3]));
        let loose =
            SetConfig { mode: Mode::Relaxed, ..SetConfig::strict(set("loose"), models(&MODELS[3..])) };
        let limits = Limits { max_ahead, settle_ms: 60, ..super::short_limits() };
        Config { sets: vec![pair, solo, loose], limits }
    })
}

impl ReferenceStateMachine for Trainers {
    type State = Trainers;
    type Transition = Transition;

    fn init_state() -> BoxedStrategy<Trainers> {
        configs().prop_map(|config| Trainers { config, lives: vec![(1, 0); MODELS.len()], waits: 0 }).boxed()
    }

    fn transitions(state: &Trainers) -> BoxedStrategy<Transition> {
        let (notify, gate) = (state.clone(), state.clone());
        let waits = state.waits;
        let notify = (0usize..MODELS.len(), 0u8..20, 1u64..3, any::<[bool; 4]>(), 1u64..900).prop_map(
            move |(m, what, skip, [sync, eval, endpoint, both], timeout)| {
                let (incarnation, newest) = notify.lives[m % MODELS.len()];
                let (incarnation, version) = match what {
                    0 => (incarnation + 1, newest.saturating_sub(skip)),
                    1 => (incarnation.saturating_sub(skip), newest + 1),
                    2 | 3 => (incarnation, newest.saturating_sub(skip)),
                    4 => (incarnation, newest),
                    5 => (incarnation, newest + 1 + skip),
                    6 => (incarnation, newest + 3 + skip),
                    _ => (incarnation, newest + 1),
                };
                let id = WaitId(notify.waits);
                let sync = (sync && both).then_some(SyncNotify { id, eval, timeout });
                let identity = id_of(m, incarnation, version);
                Transition::Notify { identity, sync, new_endpoint: endpoint && what == 4, falsely: what == 6 }
            },
        );
        let receiver = 0usize..4;
        let start = (receiver.clone(), any::<u8>(), any::<bool>())
            .prop_map(|(receiver, models, keep)| Transition::Start { receiver, models, keep });
        let work =
            (receiver.clone(), 0usize..12, 0u8..12, 0u8..12).prop_map(|(receiver, pick, fail, newer)| {
                Transition::Work { receiver, pick, fail: fail == 0, newer: newer == 0 }
            });
        let deliver = (any::<Index>(), 0u8..8)
            .prop_map(|(pick, again)| Transition::Deliver { pick, again: again == 0 });
        let pass = (prop_oneof![6 => 0u64..60, 1 => 60u64..1200], 0u8..6)
            .prop_map(|(span, beat)| Transition::Pass { span, heartbeats: beat != 0 });
        let gate = (0usize..3, 0u64..4, any::<bool>(), 0u64..2, 0u64..900).prop_map(
            move |(set, ahead, lineage, newer, timeout)| {
                let m = [0, 2, 3][set];
                let (incarnation, newest) = gate.lives[m];
                let lineage = lineage.then(|| (model(MODELS[m]), Incarnation(incarnation + newer)));
                Transition::Gate { id: WaitId(gate.waits), set, at_least: newest + ahead, lineage, timeout }
            },
        );
        prop_oneof![
            16 => notify,
            6 => start,
            2 => receiver.clone().prop_map(|receiver| Transition::Kill { receiver }),
            2 => receiver.clone().prop_map(|receiver| Transition::Leave { receiver }),
            1 => Just(Transition::Restart),
            4 => receiver.prop_map(|receiver| Transition::Rejoin { receiver }),
            24 => work,
            24 => deliver,
            8 => pass,
            6 => Just(Transition::Promptly),
            4 => gate,
            2 => (0..=waits).prop_map(|id| Transition::Cancel { id: WaitId(id) }),
            2 => (0..=waits).prop_map(|id| Transition::EvalDone { id: WaitId(id) }),
        ]
        .boxed()
    }

    fn apply(mut state: Trainers, transition: &Transition) -> Trainers {
        match transition {
            Transition::Notify { identity, sync, falsely, .. } => {
                let m = MODELS.iter().position(|n| *n == identity.model_id.as_str()).unwrap();
                if !falsely {
                    state.lives[m] = state.lives[m].max((identity.incarnation.0, identity.version));
                }
                state.waits += u64::from(sync.is_some());
            }
            Transition::Gate { .. } => state.waits += 1,
            _ => {}
        }
        state
    }
}

fn id_of(m: usize, incarnation: u64, version: Version) -> Identity {
    id(MODELS[m % MODELS.len()], incarnation, version)
}

thread_local! {
    /// What happened in all runs on this thread, to see that the judge had something to judge.
    static SEEN: RefCell<BTreeMap<&'static str, usize>> = const { RefCell::new(BTreeMap::new()) };
}

pub(super) struct BarrierTest;

impl StateMachineTest for BarrierTest {
    type SystemUnderTest = World;
    type Reference = Trainers;

    fn init_test(state: &Trainers) -> World {
        World::new(state.config.clone())
    }

    fn apply(mut world: World, _: &Trainers, transition: Transition) -> World {
        match transition {
            Transition::Notify { identity, sync, new_endpoint, falsely } => {
                let sender_endpoint = if new_endpoint { "b:2" } else { "a:1" }.to_owned();
                if falsely {
                    world.absent.insert(identity.clone());
                } else {
                    world.absent.remove(&identity);
                }
                let _ = world.send(Event::Notify { identity, sender_endpoint, sync });
            }
            Transition::Start { receiver: r, models, keep } => {
                let names: BTreeSet<_> = (0..MODELS.len()).filter(|i| models >> i & 1 == 1).collect();
                // Half of the receivers serve everything, so that sets are often covered.
                let all = models >= 128 || names.is_empty();
                let chosen = (0..MODELS.len()).filter(|i| all || names.contains(i));
                world.start(&receiver(r), chosen.map(|i| model(MODELS[i])).collect(), keep);
            }
            Transition::Kill { receiver: r } => {
                if let Some(life) = world.newest.get_mut(&receiver(r)) {
                    life.running = false;
                    world.astray.remove(&receiver(r));
                }
            }
            Transition::Leave { receiver: r } => {
                if let Some(life) = world.newest.get_mut(&receiver(r)) {
                    life.running = false;
                    let peer = life.peer.clone();
                    world.astray.remove(&receiver(r));
                    world.network.push(Event::Leave { peer });
                }
            }
            Transition::Work { receiver: r, pick, fail, newer } => {
                for pick in [pick, pick / 2] {
                    world.work(&receiver(r), pick, fail, newer);
                }
            }
            Transition::Deliver { pick, again } => {
                if !world.network.is_empty() {
                    let at = pick.index(world.network.len());
                    let event = if again { world.network[at].clone() } else { world.network.swap_remove(at) };
                    let _ = world.send(event);
                }
            }
            Transition::Pass { span, heartbeats } => {
                world.pass(span);
                if heartbeats {
                    world.heartbeats();
                }
            }
            Transition::Promptly => world.promptly(),
            Transition::Restart => world.restart(),
            Transition::Rejoin { receiver: r } => world.rejoin(&receiver(r)),
            Transition::Gate { id, set, at_least, lineage, timeout } => {
                let set = world.config.sets[set].name.clone();
                let _ = world.send(Event::GateWait { id, set, at_least, lineage, timeout });
            }
            Transition::Cancel { id } => {
                let _ = world.send(Event::Cancel { id });
            }
            Transition::EvalDone { id } => {
                let _ = world.send(Event::EvalDone { id, result: Ok("0.7".into()) });
            }
        }
        world
    }

    fn teardown(mut world: World, trainers: Trainers) {
        world.calm_down();
        world.assert_caught_up();
        // One more version of everything, so that receivers that had skipped ahead meet the others again.
        for set in world.config.sets.clone() {
            let places: Vec<_> =
                set.models.iter().map(|m| MODELS.iter().position(|n| *n == m.as_str()).unwrap()).collect();
            let version = places.iter().map(|p| trainers.lives[*p].1).max().unwrap() + 1;
            for p in places {
                let identity = id_of(p, trainers.lives[p].0, version);
                world.absent.remove(&identity);
                let event = Event::Notify { identity, sender_endpoint: "a:1".into(), sync: None };
                world.send(event).unwrap();
            }
        }
        for life in world.newest.values_mut() {
            life.forgive();
        }
        world.calm_down();
        world.assert_caught_up();
        lose_everybody_while_one_model_is_ahead(&mut world, &trainers);
        world.pass(world.config.limits.max_wait_ms);
        SEEN.with_borrow_mut(|seen| {
            for (what, n) in &world.seen {
                *seen.entry(what).or_default() += n;
            }
        });
    }
}

/// C101: no receiver is left, and one model of the strict pair is ahead. A receiver that joins then, alone if one is enough, is
/// live at the served version: the other model's trainer may wait for a version that only it can publish.
fn lose_everybody_while_one_model_is_ahead(world: &mut World, trainers: &Trainers) {
    let pair = world.config.sets[0].clone();
    let version = (0..2).map(|p| trainers.lives[p].1).max().unwrap() + 1;
    let was = world.barrier.service_version(&pair.name).unwrap().map(|s| s.version);
    for id in world.newest.keys().cloned().collect::<Vec<_>>() {
        let life = world.newest.get_mut(&id).unwrap();
        life.running = false;
        let leave = Event::Leave { peer: life.peer.clone() };
        let _ = world.send(leave);
    }
    for ahead in 1..=world.config.limits.max_ahead as u64 {
        let identity = id_of(0, trainers.lives[0].0, version + ahead);
        world.absent.remove(&identity);
        world.send(Event::Notify { identity, sender_endpoint: "a:1".into(), sync: None }).unwrap();
    }
    let need = match pair.required {
        // However many come, all of them are there.
        Required::All | Required::Percent(_) => 1,
        Required::AtLeast(n) => n,
    };
    let models: BTreeSet<_> = MODELS.iter().map(|m| model(m)).collect();
    for r in 0..need.max(pair.floor) {
        world.start(&receiver(r), models.clone(), false);
    }
    world.calm_down();
    world.assert_caught_up();
    let served = world.barrier.service_version(&pair.name).unwrap().map(|s| s.version);
    assert_eq!(served, Some(was.map_or(version, |was| was.max(version))), "{:#?}", world.barrier.snapshot());
}

prop_state_machine! {
    #![proptest_config(ProptestConfig {
        max_shrink_iters: 20_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_interleaving_breaks_the_barrier(sequential 1..120 => BarrierTest);
}

#[test]
fn random_interleavings_reach_what_they_are_meant_to_test() {
    let mut runner = TestRunner::deterministic();
    let strategy = Trainers::sequential_strategy(60..120);
    for _ in 0..250 {
        let (state, transitions, counter) = strategy.new_tree(&mut runner).unwrap().current();
        BarrierTest::test_sequential(ProptestConfig::default(), state, transitions, counter);
    }
    let seen = SEEN.take();
    for what in [
        "loads",
        "served",
        "live",
        "fenced",
        "evicted",
        "superseded",
        "opened",
        "gate failed",
        "pressed",
        "caught up",
        "evaluated",
        "released",
        "stalled",
        "restarted",
        "rejoined",
        "served after a restart",
        "absent",
    ] {
        assert!(seen.get(what).is_some_and(|n| *n >= 40), "{what} is too rare in {seen:?}");
    }
}

/// The judge would see it: without a time to settle, restarted controllers load and serve before all are back.
#[test]
fn judge_sees_a_restarted_barrier_that_does_not_wait_for_running_receivers() {
    let mut runner = TestRunner::deterministic();
    let strategy = Trainers::sequential_strategy(60..120);
    let caught = (0..250).any(|_| {
        let (mut state, transitions, counter) = strategy.new_tree(&mut runner).unwrap().current();
        state.config.limits.settle_ms = 0;
        let run = || BarrierTest::test_sequential(ProptestConfig::default(), state, transitions, counter);
        let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) else { return false };
        let why = panic.downcast_ref::<String>().expect("a judgement");
        assert!(why.starts_with("C102"), "{why}");
        true
    });
    assert!(caught);
}
