//! One agent, several regions in one place: the next trainer's, or the next incarnation of the same trainer.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use rustix::process::Signal;
use serde_json::{Value, json};
use windlass_core::dtype::Dtype;
use windlass_core::identity::ModelId;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_data::publish::{PublishError, Publisher};
use windlass_data::region::{Memfd, RegionSpec};
use windlass_data::stop::Stop;

use super::{home, publisher, receiver};
use crate::process::{Agent, PATIENCE, Trainer};

/// This process as the trainer of a model whose only tensor has this many bytes.
fn train(region: &Path, bytes: u64) -> Publisher {
    let manifest = Manifest::new([TensorSpec::new("w", Dtype::U8, [bytes])], BTreeMap::new()).unwrap();
    let model = ModelId::new("demo").unwrap();
    let spec = RegionSpec { memfd: Memfd::Never, ..RegionSpec::new(region, model, Arc::new(manifest)) };
    Publisher::create(&spec, &Stop::after(PATIENCE)).unwrap()
}

fn publish(publisher: &mut Publisher, version: u64) {
    let stop = Stop::after(PATIENCE);
    let bytes = vec![version as u8 + 1; publisher.region().manifest().data_bytes() as usize];
    publisher.copy(version, &stop, |slot| slot.write(0, &bytes).map_err(PublishError::from)).unwrap();
}

/// The agent says that it let go of the region, and serves the one that is there now, where receivers look for it.
fn goes_over(agent: &Agent, trainer: &Publisher, reason: &str) {
    let let_go = agent.process.event("let_go");
    assert_eq!(let_go["region"], json!(trainer.region().dir()));
    assert!(let_go["reason"].as_str().unwrap().contains(reason), "{let_go}");
    let listening = agent.process.event("listening");
    assert_eq!(listening["endpoint"], agent.endpoint, "receivers know the port");
    assert_eq!(listening["incarnation"], json!(trainer.region().incarnation()));
}

#[test]
fn an_agent_lets_go_of_a_dead_trainers_region_and_serves_the_next_one() {
    let home = home();
    let (mut trainer, agent) = publisher(home.path());
    let receiver = receiver(&home.path().join("images"), &trainer.region, &[]);
    let first = receiver.event("synced")["image"]["identity"].clone();
    trainer.process.kill();
    assert_eq!(
        agent.get("/get_version").json()["version"],
        0,
        "what is left is served as long as nobody wants the place"
    );

    let mut next = Trainer::start(&trainer.region);
    assert_eq!(agent.process.event("let_go")["region"], json!(next.region));
    let listening = agent.process.event("listening");
    assert_eq!(listening["endpoint"], agent.endpoint, "receivers know the port");
    assert!(listening["incarnation"] != first["incarnation"], "{listening}");
    next.publish(0);
    assert_eq!(agent.sealed(0)["incarnation"], listening["incarnation"]);
    let then = receiver.event("synced")["image"]["identity"].clone();
    assert_eq!((&then["incarnation"], &then["version"]), (&listening["incarnation"], &json!(0)));
    agent.process.signal(Signal::TERM);
    let mut process = agent.process;
    assert_eq!(process.ends_within(PATIENCE), 0);
}

#[test]
fn a_living_trainer_makes_its_region_anew_while_an_agent_serves_it() {
    let home = home();
    let dir = home.path().join("region");
    let mut trainer = train(&dir, 300_000);
    let agent = Agent::start(&dir, &[]);
    publish(&mut trainer, 7);
    let receiver = receiver(&home.path().join("images"), &dir, &[]);
    let held = |of: &Publisher, version: u64, synced: &Value| {
        let image = &synced["image"]["identity"];
        let is = (&image["incarnation"], &image["version"]);
        assert_eq!(is, (&json!(of.region().incarnation()), &json!(version)), "{synced}");
    };
    held(&trainer, 7, &receiver.event("synced"));

    // The place of a trainer that only says that it ends is served on; it is given up when the trainer wants it.
    let first = trainer.region().incarnation();
    trainer.close().unwrap();
    assert!(!trainer.discard().unwrap(), "the agent has it open");
    assert_eq!(agent.get("/get_version").json()["version"], 7);
    drop(trainer);
    let mut next = train(&dir, 500_000);
    assert!(next.region().incarnation() > first);
    goes_over(&agent, &next, "a trainer waits for the place");
    publish(&mut next, 0);
    held(&next, 0, &receiver.event("synced"));

    // One that was removed behind the agent's back.
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(
        agent.get("/get_version").json()["version"],
        0,
        "what was removed is served until another is there"
    );
    let mut last = train(&dir, 300_000);
    goes_over(&agent, &last, "another region was made in its place");
    publish(&mut last, 1);
    held(&last, 1, &receiver.event("synced"));
}
