//! The whole system under faults of every kind, by one seed.
//!
//! Two trainers with their agents, a controller and four receivers are real processes. Everything that receivers say to
//! agents and the controller, and all data, passes relays that flip bits, lose, cut, reset, stall and delay. Meanwhile
//! processes are killed, stopped, restarted and get other clocks, and trainers keep publishing. What is looked at all the
//! time: each image that a receiver shows has the digest, over all its bytes, of what was published as this version of
//! this life; what is served never goes back; a gate opens only when those who are live have the version; no service ends
//! unless it is killed; every wait ends within its deadline. Between storms everything must come to rest at the newest
//! version, and at the end nothing may be left behind.
//!
//! A fault counts if it hit: a bit of bytes that were being sent, a process that was there. `WINDLASS_SEED` repeats the
//! draws of a run, `WINDLASS_FAULTS` says how many faults (`make soak`: 10,000).
//!
//! | module | what it owns |
//! |---|---|
//! | `world` | all processes; `storm` is the faults, `lives` what is published, `beat` what is looked at, `rest` the pauses and the end |
//! | `judge` | what must hold, and the counts of it |
//! | `network` | the relays |
//! | `service` | one process in all its lives |
//! | `trainer` | the trainer's process, and what its weights are |
//! | `dice` | random numbers by a seed |

pub(crate) mod dice;
mod judge;
mod network;
mod service;
mod trainer;
pub(crate) mod world;

use std::time::{Duration, Instant};

use service::Taken;
use world::World;

#[test]
#[ignore = "a child process of the other tests"]
fn soak_trainer() {
    trainer::run();
}

#[test]
fn no_fault_makes_a_version_wrong_ends_a_service_or_keeps_anyone_waiting() {
    crate::process::in_a_process_of_its_own("soak::all_faults");
}

#[test]
#[ignore = "run by the test above, in a process of its own: it counts what that has open"]
fn all_faults() {
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().unwrap());
    let seed = number("WINDLASS_SEED").unwrap_or_else(|| std::process::id().into());
    let faults = number("WINDLASS_FAULTS").unwrap_or(100);
    let before = Taken::of(std::process::id());
    let start = Instant::now();
    let mut world = World::new(seed);
    world.calm_down("the beginning");
    world.measure();
    let mut storms = 0;
    while world.faults() < faults {
        storms += 1;
        // Where a bit of the controller's connections may be wrong, it may believe what is not so. Every second storm
        // leaves them their bits, and what it orders is held against the truth.
        let flips = storms % 2 == 1;
        let most = (faults / 2).clamp(1, 500);
        world.storm((world.faults() + most).min(faults), flips);
        world.calm_down(&format!("storm {storms}"));
    }
    world.check_leaks();
    let table = world.table(start.elapsed(), storms);
    let home = world.end();
    assert!(!home.exists(), "shared memory is given back");
    let left = crate::process::processes_about(&home);
    assert!(left.is_empty(), "processes are left: {left:?}");
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let now = Taken::of(std::process::id());
        if now.descriptors <= before.descriptors && now.threads <= before.threads {
            break;
        }
        assert!(Instant::now() < until, "the soak keeps {now:?}, at first it had {before:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    eprintln!("{table}");
}
