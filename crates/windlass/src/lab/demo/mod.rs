//! `windlass demo`: the main job on one machine, with real processes.
//!
//! Some ranks train a made-up model, each its own part ([`rank`]); they publish every step through a region in shared
//! memory. An agent seals and serves the versions, receivers keep images of their own up to date over TCP. At the end
//! every image is summed anew and compared with what the ranks had in their own memory. Any difference ends the demo with
//! exit code 1.
//!
//! There are two plays. In `pool`, the usual one, two such trainers of different speed and a pool of receivers follow a
//! controller, whose live page can be watched. In `alone` (`--no-controller`) receivers follow one agent by themselves, and
//! one of them and the agent are killed with SIGKILL and started again.

mod alone;
mod child;
mod pool;
pub mod rank;
mod trainer;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use windlass_core::StateDigest;
use windlass_data::file::Checkpoint;

use crate::console::Session;
use crate::error::Error;
use crate::lab::synth;
use crate::lab::synth::{Synth, SynthConfig, shapes_from_config};
use crate::tools::gc::HOME;

/// What the ranks train.
#[derive(Clone, Debug)]
pub struct Model {
    /// Bytes of the made-up model; ignored with a config.
    pub bytes: u64,
    /// A `config.json` whose shapes to take.
    pub config: Option<PathBuf>,
    /// Share of elements that change in a step.
    pub change: f64,
    /// Another seed makes another model.
    pub seed: u64,
}

impl Model {
    /// Makes it up.
    pub fn synth(&self) -> Result<Synth, Error> {
        Ok(match &self.config {
            Some(path) => Synth::of(shapes_from_config(path)?, self.seed, self.change)?,
            None => {
                let elements = self.bytes / 2;
                Synth::new(SynthConfig { elements, seed: self.seed, change: self.change })?
            }
        })
    }

    /// As arguments of another process.
    fn args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--model-bytes={}", self.bytes),
            format!("--change={}", self.change * 100.0),
            format!("--seed={}", self.seed),
        ];
        args.extend(self.config.iter().map(|c| format!("--config={}", c.display())));
        args
    }
}

/// The checked arguments of `demo`.
#[derive(Debug)]
pub struct Demo {
    pub model: Model,
    pub ranks: u16,
    /// Receivers kept in sync.
    pub receivers: u16,
    pub steps: u32,
    /// TCP streams of a transfer.
    pub streams: u16,
    /// Where region and images are kept.
    pub dir: PathBuf,
    /// With a controller and two models.
    pub controller: bool,
    /// The least time of the actor's training step.
    pub pace: Duration,
    /// Goes on after the last step until it is told to end, so that the page can be looked at.
    pub stay: bool,
}

/// How long any single thing may take.
const PATIENCE: Duration = Duration::from_secs(120);

impl Demo {
    /// Runs the demo and gives the exit code.
    pub fn run(&self, session: &Session) -> Result<u8, Error> {
        let home = Home::make(&self.dir)?;
        if self.controller { pool::run(self, &home.0, session) } else { alone::run(self, &home.0, session) }
    }
}

/// Where everything is kept while it runs. Removed when this is dropped, which must be after all processes are gone.
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

fn sum_file(path: &Path, threads: usize, session: &Session) -> Result<StateDigest, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let manifest = checkpoint.manifest();
    let progress = session.progress("verifying", manifest.data_bytes());
    crate::tools::verify::digest(&checkpoint, threads, session.cancel(), &progress)
}

fn event(line: &Value, name: &str) -> bool {
    line.get("event").and_then(Value::as_str) == Some(name)
}

/// The most steps a demo can have.
pub const MAX_STEPS: u32 = synth::MAX_STEPS;
