//! Scenarios with readable timelines, and (in `machine`) random ones.

mod machine;
mod world;

use crate::barrier::*;
use crate::identity::{Identity, Incarnation, ModelId, Version};

fn model(name: &str) -> ModelId {
    ModelId::new(name).unwrap()
}

fn set(name: &str) -> SetName {
    SetName::new(name).unwrap()
}

fn receiver(n: usize) -> ReceiverId {
    ReceiverId::new(format!("r{n}")).unwrap()
}

fn id(name: &str, incarnation: u64, version: Version) -> Identity {
    Identity { model_id: model(name), incarnation: Incarnation(incarnation), version }
}

fn short_limits() -> Limits {
    Limits {
        heartbeat_ms: 1000,
        stage_ms: 400,
        load_ms: 300,
        retry_ms: 50,
        history_ms: 2000,
        max_wait_ms: 5000,
        eval_ms: 500,
        max_ahead: 2,
        max_receivers: 1000,
        max_waits: 1000,
    }
}
