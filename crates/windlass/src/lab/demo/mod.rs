//! `windlass demo`: a whole job on one machine, with real processes.
//!
//! Two trainers, an actor and a slower verifier, each with several ranks, change their part of a synthetic model
//! ([`rank`]) and publish every step through a region in shared memory. An agent per trainer seals and serves the
//! versions. A controller coordinates receivers that serve both models ([`cluster`]). At the end, the demo re-hashes
//! every image and compares it with the hashes of the ranks' memory. Any difference ends the demo with exit code 1.
//!
//! With an engine, one small model learns and a real server of the engine follows instead ([`engine`]).

mod child;
mod cluster;
mod controller;
pub(crate) mod engine;
pub(crate) mod rank;
mod report;
mod trainer;
mod training;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::console::Session;
use crate::error::Error;
use crate::tools::gc::HOME;
use windlass_synth::{self, SynthConfig};

/// The checked arguments of `demo`.
#[derive(Debug)]
pub(crate) struct Demo {
    /// The actor; the verifier has another seed.
    pub(crate) model: SynthConfig,
    pub(crate) ranks: u16,
    pub(crate) receivers: u16,
    pub(crate) steps: u32,
    /// TCP streams per transfer.
    pub(crate) streams: u16,
    /// Directory for regions and images.
    pub(crate) dir: PathBuf,
    /// Minimum duration of an actor step.
    pub(crate) pace: Duration,
    /// Keeps the live page up after the last step, until Ctrl-C.
    pub(crate) stay: bool,
}

/// Timeout of every single wait.
const TIMEOUT: Duration = Duration::from_secs(120);

impl Demo {
    /// Runs the demo and returns the exit code.
    pub(crate) fn run(&self, session: &Session) -> Result<u8, Error> {
        let home = Home::make(&self.dir)?;
        cluster::run(self, &home.0, session)
    }
}

/// The demo's directory. Dropping it removes the directory; all processes must have ended by then.
struct Home(PathBuf);

impl Home {
    fn make(dir: &Path) -> Result<Home, Error> {
        let home = dir.join(format!("{HOME}{}", std::process::id()));
        std::fs::create_dir(&home).map_err(Error::io("create", &home))?;
        Ok(Home(home))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn event(line: &Value, name: &str) -> bool {
    line.get("event").and_then(Value::as_str) == Some(name)
}

/// The most steps a demo can have.
pub(crate) const MAX_STEPS: u32 = windlass_synth::MAX_STEPS;
