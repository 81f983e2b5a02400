//! The agent, the receiver and `gc` as processes.

mod agent;
mod files;
mod receiver;
mod succession;

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;

use crate::process::{Agent, Process, Trainer};

/// Within what time a service that was told to end must be gone: a second, and what a busy machine takes.
const END: Duration = Duration::from_millis(1500);

fn home() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// A trainer with one version and its agent.
fn publisher(dir: &Path) -> (Trainer, Agent) {
    let mut trainer = Trainer::start(&dir.join("region"));
    let agent = Agent::start(&trainer.region, &[]);
    trainer.publish(0);
    agent.sealed(0);
    (trainer, agent)
}

fn register(agent: &Agent) -> String {
    let answer = agent.post("/register_receiver", &json!({ "name": "r" }));
    assert_eq!(answer.status, 200);
    answer.json()["instance_id"].as_str().unwrap().to_owned()
}

fn receiver(dir: &Path, region: &Path, more: &[&str]) -> Process {
    let args =
        ["receive".into(), format!("--region={}", region.display()), format!("--dir={}", dir.display())];
    Process::start(args.into_iter().chain(more.iter().map(ToString::to_string)))
}
