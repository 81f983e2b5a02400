//! What receivers that pass on what they have promise, over modelled links.

use proptest::prelude::*;

use super::round::{Costs, visible};
use super::swarm::{Broadcast, Model};

/// Equal links that take ten seconds for one version, as many stripes as real images have, and messages that wait.
fn model(receivers: u32, stripes: u32) -> Model {
    Model { receivers, trainers: 1, bytes: 1e9, stripes, rate: 1e8, latency: 1e-4, queue: 0.05 }
}

fn run(model: Model) -> Broadcast {
    let mut broadcast = Broadcast::new(model).unwrap();
    broadcast.run(f64::MAX);
    broadcast
}

#[test]
fn a_broadcast_costs_about_one_version_in_time_and_at_the_trainer() {
    for (receivers, bound) in [(1, 1.1), (2, 1.5), (4, 1.5), (16, 1.5), (64, 1.6), (200, 2.0)] {
        let done = run(model(receivers, 256));
        let (time, sent) = (done.last() / 10.0, done.sent());
        assert!(time < bound && sent < 2.0, "{receivers} receivers: {time:.2} of one, {sent:.2} versions");
    }
}

#[test]
fn trainers_that_hold_parts_send_about_one_version_together() {
    let done = run(Model { trainers: 4, ..model(32, 256) });
    let (time, sent) = (done.last() / 10.0, done.sent());
    assert!(time < 1.5 && sent < 2.0, "{time:.2} of one, {sent:.2} versions");
}

#[test]
fn a_slow_host_delays_itself_and_not_the_others() {
    let mut broadcast = Broadcast::new(model(16, 256)).unwrap();
    broadcast.set_rate(4, 1e7);
    broadcast.run(f64::MAX);
    let done = broadcast.done();
    let others = done.iter().enumerate().filter(|(i, _)| *i != 4).filter_map(|(_, t)| *t).fold(0.0, f64::max);
    assert!(others < 20.0, "the others took {others}");
    assert!(done[4].is_some_and(|t| t < 120.0), "the slow one took {:?}", done[4]);
    assert!(broadcast.sent() < 2.0, "{} versions", broadcast.sent());
}

#[test]
fn the_same_input_has_the_same_outcome() {
    let done = || {
        let mut broadcast = Broadcast::new(model(12, 64)).unwrap();
        broadcast.run_with_deaths(2, 7);
        broadcast.done()
    };
    assert_eq!(done(), done());
}

#[test]
fn a_version_is_served_when_the_last_has_staged_and_all_have_loaded() {
    let costs = Costs { latency: 1e-3, message: 1e-4, load: 0.5 };
    let served = visible(&[Some(1.0), Some(3.0), Some(2.0)], costs).unwrap();
    assert!((3.5..3.52).contains(&served), "{served}");
}

#[test]
fn a_receiver_that_dies_holds_the_gate_up_until_it_counts_as_silent() {
    let costs = Costs { latency: 1e-3, message: 1e-4, load: 0.5 };
    let served = visible(&[Some(1.0), None, Some(2.0)], costs).unwrap();
    assert!((10.0..20.0).contains(&served), "{served}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn two_relays_killed_at_any_moment_delay_the_rest_by_less_than_one_transfer(seed in any::<u64>()) {
        let mut broadcast = Broadcast::new(model(16, 128)).unwrap();
        broadcast.run_with_deaths(2, seed);
        prop_assert!(broadcast.last() < 25.0, "{}", broadcast.last());
        prop_assert!(broadcast.sent() < 2.0, "{}", broadcast.sent());
    }
}
