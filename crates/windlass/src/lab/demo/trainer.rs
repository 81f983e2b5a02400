//! A trainer of the demo: its ranks and their agent.
//!
//! Owns: the processes of one model's publisher. [`Trainer::train`] and [`Trainer::offload`] make all ranks take a step and
//! publish it. The digest of a step is computed from the ranks' memory; every image must have the same digest.

use std::path::PathBuf;
use std::time::Duration;

use windlass_core::StateDigest;
use windlass_core::digest::StateSum;
use windlass_core::manifest::Manifest;
use windlass_core::wire::control::PartSum;
use windlass_data::stop::Stop;

use super::child::Child;
use super::{TIMEOUT, event};
use crate::console::Session;
use crate::error::Error;
use crate::lab::image;
use windlass_synth::{Synth, SynthConfig};

/// Parameters of a trainer.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) model_id: String,
    pub(super) model: SynthConfig,
    pub(super) ranks: u16,
    /// TCP streams per transfer.
    pub(super) streams: u16,
    pub(super) region: PathBuf,
    pub(super) logs: PathBuf,
    /// Prefix of its processes' names: `actor-` gives `actor-rank-0`.
    pub(super) prefix: String,
    /// The agent's token.
    pub(super) token_file: PathBuf,
}

/// The ranks, and the agent once it is started.
pub(super) struct Trainer<'a> {
    pub(super) spec: Spec,
    pub(super) manifest: Manifest,
    session: &'a Session,
    ranks: Vec<Child>,
    agent: Option<Child>,
    /// Where the agent listens.
    pub(super) endpoint: String,
}

impl<'a> Trainer<'a> {
    /// Starts the ranks and waits until all are ready.
    pub(super) fn start(spec: Spec, session: &'a Session) -> Result<Trainer<'a>, Error> {
        let manifest = image::manifest_of(&Synth::new(spec.model)?)?;
        let mut trainer =
            Trainer { spec, manifest, session, ranks: Vec::new(), agent: None, endpoint: String::new() };
        let spec = &trainer.spec;
        for rank in 0..spec.ranks {
            let mut args = vec![
                "demo-rank".to_owned(),
                format!("--region={}", spec.region.display()),
                format!("--model-id={}", spec.model_id),
                format!("--rank={rank}"),
                format!("--ranks={}", spec.ranks),
            ];
            args.extend([
                format!("--model-bytes={}", spec.model.elements * 2),
                format!("--change={}", spec.model.change * 100.0),
                format!("--seed={}", spec.model.seed),
            ]);
            trainer.ranks.push(Child::start(&format!("{}rank-{rank}", spec.prefix), &spec.logs, args)?);
        }
        let stop = trainer.stop();
        for rank in &mut trainer.ranks {
            rank.expect("get ready", &stop, |line| event(line, "ready").then_some(()))?;
        }
        Ok(trainer)
    }

    fn stop(&self) -> Stop {
        self.session.cancel().with_timeout(TIMEOUT)
    }

    /// Starts the agent.
    pub(super) fn start_agent(&mut self) -> Result<(), Error> {
        let spec = &self.spec;
        let args = [
            "agent".to_owned(),
            format!("--region={}", spec.region.display()),
            format!("--streams={}", spec.streams),
            format!("--token-file={}", spec.token_file.display()),
            "--with-parent".to_owned(),
        ];
        let mut agent = Child::start(&format!("{}agent", spec.prefix), &spec.logs, args)?;
        self.endpoint = agent.expect("listen", &self.stop(), |line| {
            event(line, "listening").then(|| Some(line.get("endpoint")?.as_str()?.to_owned())).flatten()
        })?;
        self.agent = Some(agent);
        Ok(())
    }

    /// Trains one step. Returns the digest of the weights in the ranks' memory.
    pub(super) fn train(&mut self, step: u32) -> Result<StateDigest, Error> {
        let stop = self.stop();
        for rank in &mut self.ranks {
            rank.say(&format!("train {step}"))?;
        }
        let mut sum = StateSum::default();
        for rank in &mut self.ranks {
            let part: PartSum = rank.expect("train", &stop, |line| {
                let part = line.get("sum").filter(|_| event(line, "trained"))?;
                serde_json::from_value(part.clone()).ok()
            })?;
            sum = sum.plus(StateSum::from_bytes(part.0));
        }
        Ok(sum.digest(self.manifest.layout_hash()))
    }

    /// All ranks write at once. Returns the duration of the slowest.
    pub(super) fn offload(&mut self, version: u32) -> Result<Duration, Error> {
        let stop = self.stop();
        for rank in &mut self.ranks {
            rank.say(&format!("offload {version}"))?;
        }
        let mut slowest = 0.0f64;
        for rank in &mut self.ranks {
            let ms = rank.expect("offload", &stop, |line| {
                event(line, "committed").then(|| line.get("offload_ms")?.as_f64()).flatten()
            })?;
            slowest = slowest.max(ms);
        }
        Ok(Duration::from_secs_f64(slowest / 1e3))
    }
}
