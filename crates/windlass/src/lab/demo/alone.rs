//! The demo without a controller: one model, whose receivers follow its agent by themselves.
//!
//! One receiver and the agent are killed with SIGKILL on the way and started again.

mod report;

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;
use windlass_core::StateDigest;
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

use super::child::Child;
use super::trainer::{Spec, Trainer};
use super::{Demo, PATIENCE, event, sum_file};
use crate::console::{Progress, Session};
use crate::error::Error;

/// What one receiver said about one version.
#[derive(Clone, Debug)]
struct Arrival {
    mode: String,
    wire_bytes: u64,
    wire_ms: f64,
    apply_ms: f64,
    total_ms: f64,
    digest: StateDigest,
}

/// What one step came to.
#[derive(Debug)]
struct Step {
    version: u32,
    offload_ms: f64,
    /// From the start of the offload until the last receiver had the version.
    end_to_end_ms: f64,
    arrivals: Vec<Option<Arrival>>,
    expected: StateDigest,
    /// What happened to whom.
    incident: Option<String>,
}

impl Step {
    fn equal(&self) -> bool {
        self.arrivals.iter().flatten().all(|a| a.digest == self.expected)
    }
}

/// All processes, and what they need.
struct Stage<'a> {
    demo: &'a Demo,
    session: &'a Session,
    home: &'a Path,
    receivers: Vec<Option<Child>>,
    trainer: Trainer<'a>,
}

/// Runs the play and gives the exit code.
pub(super) fn run(demo: &Demo, home: &Path, session: &Session) -> Result<u8, Error> {
    let start = Instant::now();
    let bar = session.steps(u64::from(demo.steps) + 1);
    bar.say("starting the trainer");
    let spec = Spec {
        model_id: "demo".into(),
        model: demo.model.clone(),
        ranks: demo.ranks,
        streams: demo.streams,
        region: home.join("region"),
        logs: home.to_owned(),
        prefix: String::new(),
        token_file: None,
    };
    let mut trainer = Trainer::start(spec, session)?;
    trainer.start_agent()?;
    let mut stage = Stage { demo, session, home, receivers: Vec::new(), trainer };
    let steps = stage.play(&bar)?;
    drop(bar);
    let images = stage.sum_images()?;
    let last = steps.last().map(|s| s.expected);
    let fine = steps.iter().all(Step::equal) && images.iter().all(|d| Some(*d) == last);
    let manifest = &stage.trainer.manifest;
    let summary = report::Summary { demo, manifest, steps: &steps, images: &images, fine };
    summary.print(session, start.elapsed().as_secs_f64())?;
    Ok(u8::from(!fine))
}

impl Stage<'_> {
    fn stop(&self) -> Stop {
        self.session.cancel().with_timeout(PATIENCE)
    }

    fn play(&mut self, bar: &Progress) -> Result<Vec<Step>, Error> {
        let mut steps = Vec::new();
        for version in 0..=self.demo.steps {
            bar.say(&format!("step {version}: training"));
            let expected = self.trainer.train(version)?;
            let mut incident = None;
            if version == 0 {
                for i in 0..self.demo.receivers {
                    let receiver = self.start_receiver(i)?;
                    self.receivers.push(Some(receiver));
                }
            } else if version == self.receiver_dies() {
                self.receivers[0] = None;
                incident = Some("receiver 0 killed".to_owned());
            } else if version == self.receiver_dies() + 1 {
                self.receivers[0] = Some(self.start_receiver(0)?);
                incident = Some("receiver 0 back".to_owned());
            }
            bar.say(&format!("step {version}: offload, seal, pull"));
            let begun = Instant::now();
            let offload_ms = self.trainer.offload(version)?.as_secs_f64() * 1e3;
            if version == self.agent_dies() {
                // The version was just committed; the next agent finds it in the region and seals it.
                self.trainer.start_agent()?;
                incident = Some("agent killed and restarted".to_owned());
            }
            let mut arrivals = Vec::new();
            let stop = self.stop();
            for receiver in &mut self.receivers {
                let arrived = receiver.as_mut().map(|r| arrival(r, version, &stop));
                arrivals.push(arrived.transpose()?);
            }
            let end_to_end_ms = begun.elapsed().as_secs_f64() * 1e3;
            bar.add(1);
            steps.push(Step { version, offload_ms, end_to_end_ms, arrivals, expected, incident });
        }
        Ok(steps)
    }

    /// When a receiver is killed: with too few steps to come back, never.
    fn receiver_dies(&self) -> u32 {
        if self.demo.steps >= 3 { self.demo.steps / 3 } else { u32::MAX - 1 }
    }

    fn agent_dies(&self) -> u32 {
        if self.demo.steps >= 3 { self.demo.steps * 2 / 3 + 1 } else { u32::MAX }
    }

    fn receiver_dir(&self, index: u16) -> PathBuf {
        self.home.join(format!("receiver-{index}"))
    }

    fn start_receiver(&self, index: u16) -> Result<Child, Error> {
        let args = [
            "receive".to_owned(),
            format!("--region={}", self.trainer.spec.region.display()),
            format!("--dir={}", self.receiver_dir(index).display()),
            format!("--name=receiver-{index}"),
            "--with-parent".to_owned(),
        ];
        Child::start(&format!("receiver-{index}"), self.home, args)
    }

    /// The digest of every image, from its bytes.
    fn sum_images(&mut self) -> Result<Vec<StateDigest>, Error> {
        // Nobody writes there any more.
        self.receivers.clear();
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let sum = |i: u16| {
            let path = self.receiver_dir(i).join("demo").join("a.safetensors");
            sum_file(&path, threads, self.session)
        };
        (0..self.demo.receivers).map(sum).collect()
    }
}

/// Waits until a receiver has the version. One that was away may get it in one go with those it missed.
fn arrival(receiver: &mut Child, version: u32, stop: &Stop) -> Result<Arrival, Error> {
    let who = receiver.name.clone();
    receiver
        .expect("get the version", stop, |line| {
            let have = line.pointer("/image/identity/version").and_then(Value::as_u64);
            (event(line, "synced") && have == Some(version.into())).then(|| Arrival::read(line))
        })?
        .ok_or_else(|| Error::Child { who, what: "says what cannot be understood".into(), kind: Kind::Bug })
}

impl Arrival {
    fn read(line: &Value) -> Option<Arrival> {
        let number = |name: &str| line.get(name)?.as_f64();
        Some(Arrival {
            mode: line.get("mode")?.as_str()?.to_owned(),
            wire_bytes: line.get("wire_bytes")?.as_u64()?,
            wire_ms: number("wire_ms")?,
            apply_ms: number("apply_ms")?,
            total_ms: number("total_ms")?,
            digest: line.pointer("/image/digest")?.as_str()?.parse().ok()?,
        })
    }
}
