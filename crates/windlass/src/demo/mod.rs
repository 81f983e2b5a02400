//! `windlass demo`: the main job on one machine, with real processes.
//!
//! Some ranks train a made-up model, each its own part ([`rank`]); they publish every step through a region in shared
//! memory. An agent seals and serves the versions, receivers keep images of their own up to date over TCP. On the way
//! one receiver and the agent are killed with SIGKILL and started again. At the end every image is summed anew and
//! compared with what the ranks had in their own memory. Any difference ends the demo with exit code 1.

mod child;
pub mod rank;
mod report;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use windlass_core::StateDigest;
use windlass_core::digest::StateSum;
use windlass_core::error::Kind;
use windlass_core::manifest::Manifest;
use windlass_core::wire::control::PartSum;
use windlass_data::file::Checkpoint;
use windlass_data::stop::Stop;

use self::child::Child;
use crate::error::Error;
use crate::session::Session;
use crate::synth::{Synth, SynthConfig, shapes_from_config};
use crate::{image, synth};

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
    /// What is trained.
    pub model: Model,
    /// Trainer ranks.
    pub ranks: u16,
    /// Receivers kept in sync.
    pub receivers: u16,
    /// Training steps.
    pub steps: u32,
    /// TCP streams of a transfer.
    pub streams: u16,
    /// Where region and images are kept.
    pub dir: PathBuf,
}

/// What the directory of a demo is called, before the number of its process.
const HOME: &str = "windlass-demo-";

/// The directories in `dir` of demos that were killed before they could remove them.
pub fn abandoned(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("read", dir))? {
        let entry = entry.map_err(Error::io("read", dir))?;
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix(HOME)?.parse::<u32>().ok());
        let dead = pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists());
        if dead && entry.file_type().is_ok_and(|t| t.is_dir()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// How long any single thing may take.
const PATIENCE: Duration = Duration::from_secs(120);

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
    home: PathBuf,
    manifest: Manifest,
    ranks: Vec<Child>,
    agent: Option<Child>,
    receivers: Vec<Option<Child>>,
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        // First the processes, then their files.
        self.receivers.clear();
        self.agent = None;
        self.ranks.clear();
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

impl Demo {
    /// Runs the demo and gives the exit code.
    pub fn run(&self, session: &Session) -> Result<u8, Error> {
        let manifest = image::manifest_of(&self.model.synth()?)?;
        let home = self.dir.join(format!("{HOME}{}", std::process::id()));
        std::fs::create_dir(&home).map_err(Error::io("create", &home))?;
        let mut stage = Stage {
            demo: self,
            session,
            home,
            manifest,
            ranks: Vec::new(),
            agent: None,
            receivers: Vec::new(),
        };
        let start = Instant::now();
        let steps = stage.play()?;
        let images = stage.sum_images()?;
        let last = steps.last().map(|s| s.expected);
        let fine = steps.iter().all(Step::equal) && images.iter().all(|d| Some(*d) == last);
        let summary =
            report::Summary { demo: self, manifest: &stage.manifest, steps: &steps, images: &images, fine };
        summary.print(session, start.elapsed().as_secs_f64())?;
        Ok(u8::from(!fine))
    }
}

impl Stage<'_> {
    fn stop(&self) -> Stop {
        self.session.cancel().with_timeout(PATIENCE)
    }

    fn region(&self) -> PathBuf {
        self.home.join("region")
    }

    fn play(&mut self) -> Result<Vec<Step>, Error> {
        let bar = self.session.steps(u64::from(self.demo.steps) + 1);
        bar.say("starting the trainer");
        self.start_ranks()?;
        self.start_agent()?;
        let mut steps = Vec::new();
        for version in 0..=self.demo.steps {
            bar.say(&format!("step {version}: training"));
            let expected = self.train(version)?;
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
            let offload_ms = self.offload(version)?;
            if version == self.agent_dies() {
                // The version was just committed; the next agent finds it in the region and seals it.
                self.agent = None;
                self.start_agent()?;
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

    fn start_ranks(&mut self) -> Result<(), Error> {
        for rank in 0..self.demo.ranks {
            let mut args = vec![
                "demo-rank".to_owned(),
                format!("--region={}", self.region().display()),
                format!("--rank={rank}"),
                format!("--ranks={}", self.demo.ranks),
            ];
            args.extend(self.demo.model.args());
            self.ranks.push(Child::start(&format!("rank-{rank}"), &self.home, args)?);
        }
        let stop = self.stop();
        for rank in &mut self.ranks {
            rank.expect("get ready", &stop, |line| event(line, "ready").then_some(()))?;
        }
        Ok(())
    }

    fn start_agent(&mut self) -> Result<(), Error> {
        let args = [
            "agent".to_owned(),
            format!("--region={}", self.region().display()),
            format!("--streams={}", self.demo.streams),
            "--with-parent".to_owned(),
        ];
        // Another port after a restart: receivers find it by the region.
        let mut agent = Child::start("agent", &self.home, args)?;
        agent.expect("listen", &self.stop(), |line| event(line, "listening").then_some(()))?;
        self.agent = Some(agent);
        Ok(())
    }

    fn receiver_dir(&self, index: u16) -> PathBuf {
        self.home.join(format!("receiver-{index}"))
    }

    fn start_receiver(&self, index: u16) -> Result<Child, Error> {
        let args = [
            "receive".to_owned(),
            format!("--region={}", self.region().display()),
            format!("--dir={}", self.receiver_dir(index).display()),
            format!("--name=receiver-{index}"),
            "--with-parent".to_owned(),
        ];
        Child::start(&format!("receiver-{index}"), &self.home, args)
    }

    /// Trains one step; answers the digest of the weights in the ranks' memory.
    fn train(&mut self, step: u32) -> Result<StateDigest, Error> {
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

    /// All ranks write at once; answers how long the slowest took.
    fn offload(&mut self, version: u32) -> Result<f64, Error> {
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
        Ok(slowest)
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

fn sum_file(path: &Path, threads: usize, session: &Session) -> Result<StateDigest, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let manifest = checkpoint.manifest();
    let progress = session.progress("verifying", manifest.data_bytes());
    crate::verify::digest(&checkpoint, threads, session.cancel(), &progress)
}

fn event(line: &Value, name: &str) -> bool {
    line.get("event").and_then(Value::as_str) == Some(name)
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

/// The most steps a demo can have.
pub const MAX_STEPS: u32 = synth::MAX_STEPS;
