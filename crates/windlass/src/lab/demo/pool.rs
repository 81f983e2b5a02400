//! The demo with a controller: two models that are served together, and a pool of receivers that serve both.
//!
//! The actor's trainer is faster than the verifier's. Every version must be there of both before any receiver loads it,
//! so the actor runs ahead until it is told to wait. The last receiver joins when the others already serve, and the first
//! is killed with SIGKILL later on: the controller notices its silence, and the others go on. The controller's live page
//! shows all of it; its address is printed first. In the end the images of all receivers that are left are summed anew and
//! compared with what the ranks of both trainers had in their own memory.
//!
//! Each trainer is driven by a thread of its own, as a training loop would. The main thread watches the controller and
//! lets things happen. Whoever fails ends all others, by the flag that Ctrl-C sets, too.

mod report;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;
use windlass_core::StateDigest;
use windlass_core::address::Token;
use windlass_core::barrier::{ReceiverId, SetName};
use windlass_core::error::Kind;
use windlass_core::manifest::Manifest;
use windlass_core::wire::control::{Capabilities, VersionInfo};
use windlass_data::stop::Stop;

use super::child::Child;
use super::trainer::{Spec, Trainer};
use super::{Demo, Model, PATIENCE, event, sum_file};
use crate::console::Session;
use crate::error::Error;
use crate::service::client::{Client, Request};
use crate::service::controller::client::ControllerClient;
use crate::service::controller::status::{SetStatus, Status};
use crate::service::controller::wire::{Gate, Lane, NotifyVersion, Span, TrainerLeft};
use crate::service::token;
use crate::tools::gc::TOKEN;

/// The set.
const SET: &str = "policy";
/// The models, and how long a step of each takes over one of the first.
const MODELS: [(&str, f64); 2] = [("actor", 1.0), ("verifier", 1.8)];
/// A receiver that is silent for so long is out, in seconds.
const HEARTBEAT: f64 = 2.0;
/// A trainer that is told to wait waits until no more than this many versions before its last one are not served.
const AHEAD: u32 = 3;
/// How often the controller is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Something that was done to the pool.
#[derive(Clone, Debug)]
struct Incident {
    /// What was served then.
    version: u64,
    what: String,
}

/// A digest of what each version of a model was in the ranks' memory.
type Expected = Vec<StateDigest>;

/// All processes but the trainers'.
struct Stage<'a> {
    demo: &'a Demo,
    session: &'a Session,
    home: &'a Path,
    token_file: PathBuf,
    /// First, so that receivers end before what they follow.
    receivers: Vec<Option<Child>>,
    controller: Child,
    client: ControllerClient,
    incidents: Vec<Incident>,
}

/// Runs the play and gives the exit code.
pub(super) fn run(demo: &Demo, home: &Path, session: &Session) -> Result<u8, Error> {
    let start = Instant::now();
    let token_file = home.join(TOKEN);
    let token = token::read_or_make(&token_file)?;
    let mut trainers = Vec::new();
    for (i, (name, _)) in MODELS.iter().enumerate() {
        let spec = spec(demo, home, name, i as u64, &token_file);
        trainers.push(Trainer::start(spec, session)?);
    }
    for trainer in &mut trainers {
        trainer.start_agent()?;
    }
    let manifests: Vec<_> = trainers.iter().map(|t| t.manifest.clone()).collect();
    let mut stage = Stage::open(demo, home, session, token_file, &token)?;
    let expected: Vec<Mutex<Expected>> = MODELS.iter().map(|_| Mutex::default()).collect();
    std::thread::scope(|scope| {
        let lesson = |((trainer, (_, pace)), expected)| {
            let (client, token) = (stage.client.clone(), token.clone());
            let lesson =
                Lesson { trainer, pace: demo.pace.mul_f64(pace), client, token, steps: demo.steps, session };
            Some(scope.spawn(move || lesson.learn(expected)))
        };
        let mut threads: Vec<Option<_>> =
            trainers.into_iter().zip(MODELS).zip(&expected).map(lesson).collect();
        // Trainers that are done stay until everybody has what their agents serve.
        let mut done = Vec::new();
        let played = stage.play(&mut || {
            for slot in &mut threads {
                if let Some(ended) = slot.take_if(|t| t.is_finished()) {
                    done.push(
                        ended.join().map_err(|_| Error::Bug("a trainer of the demo panicked".into()))??,
                    );
                }
            }
            Ok(done.len() == MODELS.len())
        });
        let ended = played.and_then(|status| {
            let fine = stage.judge(&status, &manifests, &expected, start)?;
            stage.take_leave(&status)?;
            stage.stay()?;
            Ok(u8::from(!fine))
        });
        if ended.is_err() {
            session.cancel().set();
        }
        ended
    })
}

fn spec(demo: &Demo, home: &Path, name: &str, index: u64, token_file: &Path) -> Spec {
    Spec {
        model_id: name.to_owned(),
        // Another seed makes another model.
        model: Model { seed: demo.model.seed.wrapping_add(index), ..demo.model.clone() },
        ranks: demo.ranks,
        streams: demo.streams,
        region: home.join(name),
        logs: home.to_owned(),
        prefix: format!("{name}-"),
        token_file: Some(token_file.to_owned()),
    }
}

impl<'a> Stage<'a> {
    /// Starts the controller and the receivers that are there from the beginning.
    fn open(
        demo: &'a Demo,
        home: &'a Path,
        session: &'a Session,
        token_file: PathBuf,
        token: &Token,
    ) -> Result<Stage<'a>, Error> {
        let models: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
        let args = [
            "controller".to_owned(),
            format!("--set={SET}={}", models.join(",")),
            format!("--token-file={}", token_file.display()),
            format!("--heartbeat={HEARTBEAT}"),
            // No receiver is older than this controller.
            "--settle=0.05".to_owned(),
            "--with-parent".to_owned(),
        ];
        let mut controller = Child::start("controller", home, args)?;
        let stop = session.cancel().with_timeout(PATIENCE);
        let endpoint = controller.expect("listen", &stop, |line| {
            event(line, "listening").then(|| Some(line.get("endpoint")?.as_str()?.to_owned())).flatten()
        })?;
        // The token of this run opens nothing else and ends with it; whoever sees this terminal owns the processes.
        session.event(
            &json!({ "event": "listening", "page": format!("{endpoint}/"), "token_file": token_file }),
            || format!("live page: {endpoint}/#token={}\n", token.expose()),
        );
        let client = ControllerClient::new(&endpoint, token.clone())?;
        let (receivers, incidents) = ((0..demo.receivers).map(|_| None).collect(), Vec::new());
        let mut stage = Stage { demo, session, home, token_file, receivers, controller, client, incidents };
        for index in 0..demo.receivers {
            if stage.late().is_none_or(|(late, _)| late != index) {
                stage.start_receiver(index)?;
            }
        }
        Ok(stage)
    }

    /// Who joins late, and once what is served. With too few steps or receivers, nobody.
    fn late(&self) -> Option<(u16, u64)> {
        let enough = self.demo.steps >= 3 && self.demo.receivers >= 2;
        enough.then(|| (self.demo.receivers - 1, u64::from(self.demo.steps / 3)))
    }

    /// Who dies, and once what is served.
    fn doomed(&self) -> Option<(u16, u64)> {
        let enough = self.demo.steps >= 3 && self.demo.receivers >= 3;
        enough.then(|| (0, u64::from(self.demo.steps * 2 / 3)))
    }

    fn receiver_dir(&self, index: usize) -> PathBuf {
        self.home.join(format!("receiver-{index}"))
    }

    fn start_receiver(&mut self, index: u16) -> Result<(), Error> {
        let index = usize::from(index);
        let name = format!("receiver-{index}");
        let mut args = vec![
            "receive".to_owned(),
            format!("--controller={}", self.client.peer()),
            format!("--controller-token-file={}", self.token_file.display()),
            format!("--token-file={}", self.token_file.display()),
            format!("--dir={}", self.receiver_dir(index).display()),
            format!("--name={name}"),
            "--with-parent".to_owned(),
        ];
        args.extend(MODELS.iter().map(|(model, _)| format!("--model={model}")));
        let child = Child::start(&name, self.home, args)?;
        if let Some(slot) = self.receivers.get_mut(index) {
            *slot = Some(child);
        }
        Ok(())
    }

    /// Lets things happen until every version is served; answers the controller's last word.
    fn play(&mut self, trained: &mut dyn FnMut() -> Result<bool, Error>) -> Result<Status, Error> {
        let bar = self.session.steps(u64::from(self.demo.steps) + 1);
        bar.say("starting");
        let (mut late, mut doomed) = (self.late(), self.doomed());
        let (mut reached, mut stop) = (None, self.session.cancel().with_timeout(PATIENCE));
        loop {
            let done = trained()?;
            self.controller.check()?;
            for receiver in self.receivers.iter_mut().flatten() {
                receiver.check()?;
            }
            let status = self.client.status(&stop)?;
            let set = status.sets.first().ok_or_else(|| Error::Bug("the controller lost its set".into()))?;
            let served = set.served.as_ref().map(|s| s.version);
            if served > reached {
                bar.add(served.map_or(0, |v| v + 1) - reached.map_or(0, |v| v + 1));
                (reached, stop) = (served, self.session.cancel().with_timeout(PATIENCE));
            }
            bar.say(&saying(set));
            let version = served.unwrap_or(0);
            if let Some((index, _)) = late.take_if(|(_, at)| served >= Some(*at)) {
                self.start_receiver(index)?;
                self.incidents.push(Incident { version, what: format!("receiver-{index} joins") });
            } else if let Some((index, _)) =
                doomed.take_if(|(_, at)| served >= Some(*at) && late.is_none() && self.all_live(set))
            {
                if let Some(slot) = self.receivers.get_mut(usize::from(index)) {
                    *slot = None;
                }
                self.incidents.push(Incident { version, what: format!("receiver-{index} killed") });
            }
            let settled = set.up_to_date && self.all_live(set) && late.is_none() && doomed.is_none();
            if done && settled && served >= Some(self.demo.steps.into()) {
                return Ok(status);
            }
            stop.check().map_err(|stopped| match Error::from(stopped) {
                Error::Deadline => Error::Child {
                    who: "controller".into(),
                    what: format!("served nothing newer than {reached:?} for too long: {}", set.blocked),
                    kind: Kind::Timeout,
                },
                other => other,
            })?;
            std::thread::sleep(LOOK);
        }
    }

    /// Whether the receivers that run are those that serve.
    fn all_live(&self, set: &SetStatus) -> bool {
        let running = self.receivers.iter().flatten().count();
        set.receivers == running && set.live == running
    }

    /// Compares the images that are left with what the ranks had, and says how it all went.
    fn judge(
        &self,
        status: &Status,
        manifests: &[Manifest],
        expected: &[Mutex<Expected>],
        start: Instant,
    ) -> Result<bool, Error> {
        let images = self.sum_images()?;
        let last = |all: &Mutex<Expected>| all.lock().unwrap_or_else(PoisonError::into_inner).last().copied();
        let last: Vec<Option<StateDigest>> = expected.iter().map(last).collect();
        let equal = |digests: &[StateDigest]| digests.iter().zip(&last).all(|(d, l)| Some(*d) == *l);
        let fine = !images.is_empty() && images.iter().all(|(_, digests)| equal(digests));
        let (demo, incidents) = (self.demo, &self.incidents);
        let summary =
            report::Summary { demo, manifests, status, images: &images, last: &last, incidents, fine };
        summary.print(self.session, start.elapsed().as_secs_f64())?;
        Ok(fine)
    }

    /// Trainers that have ended as they should say so, or the controller would have to think that they died.
    fn take_leave(&self, status: &Status) -> Result<(), Error> {
        let stop = self.session.cancel().with_timeout(PATIENCE);
        for trainer in &status.trainers {
            let (model_id, incarnation) = (trainer.model_id.clone(), trainer.incarnation);
            self.client.trainer_left(&TrainerLeft { model_id, incarnation }, &stop)?;
        }
        Ok(())
    }

    /// Keeps everything as it is, if so asked, until it is told to end.
    fn stay(&mut self) -> Result<(), Error> {
        if self.demo.stay {
            let killed = self.doomed().map_or(String::new(), |(index, _)| {
                format!(" Its one error is receiver-{index}, which was killed on purpose.")
            });
            self.session.note(&format!("The live page stays until Ctrl-C.{killed}"));
        }
        while self.demo.stay && !self.session.cancel().is_set() {
            self.controller.check()?;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// The digests of the images of each receiver that is left, from their bytes.
    /// Nothing newer is announced, so nobody writes there.
    fn sum_images(&self) -> Result<Vec<(ReceiverId, Vec<StateDigest>)>, Error> {
        let left = self.receivers.iter().enumerate().filter(|(_, r)| r.is_some()).map(|(i, _)| i);
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut all = Vec::new();
        for index in left {
            let sum = |model: &str| {
                let path = self.receiver_dir(index).join(model).join("a.safetensors");
                sum_file(&path, threads, self.session)
            };
            let digests = MODELS.iter().map(|(model, _)| sum(model)).collect::<Result<_, Error>>()?;
            let id = ReceiverId::new(format!("receiver-{index}")).map_err(|e| Error::Bug(e.to_string()))?;
            all.push((id, digests));
        }
        Ok(all)
    }
}

/// What is going on, in a few words.
fn saying(set: &SetStatus) -> String {
    let served = set.served.as_ref().map_or("nothing yet".to_owned(), |s| format!("version {}", s.version));
    let flight = set.rounds.first().map_or(String::new(), |r| {
        let phase = if r.phase == windlass_core::barrier::Phase::Staging { "staging" } else { "loading" };
        format!(", {phase} {}", r.version)
    });
    format!("serving {served}{flight}; {} of {} receivers live", set.live, set.receivers)
}

/// One trainer's way through all steps.
struct Lesson<'a> {
    trainer: Trainer<'a>,
    pace: Duration,
    client: ControllerClient,
    token: Token,
    steps: u32,
    session: &'a Session,
}

impl<'a> Lesson<'a> {
    fn learn(mut self, expected: &Mutex<Expected>) -> Result<Trainer<'a>, Error> {
        let agent = Client::default();
        for step in 0..=self.steps {
            let begun = Instant::now();
            let digest = self.trainer.train(step)?;
            expected.lock().unwrap_or_else(PoisonError::into_inner).push(digest);
            let stop = self.session.cancel().with_timeout(PATIENCE);
            while begun.elapsed() < self.pace {
                stop.check()?;
                std::thread::sleep(LOOK.min(self.pace.saturating_sub(begun.elapsed())));
            }
            let offload = self.trainer.offload(step)?;
            let committed = Instant::now();
            let info = self.sealed(&agent, step, &stop)?;
            let sealed = Instant::now();
            if self.announce(&agent, step, info, (offload, committed, sealed), &stop)? {
                // It is too far ahead of what is served.
                self.wait_for(step.saturating_sub(AHEAD), &stop)?;
            }
        }
        Ok(self.trainer)
    }

    fn ask<T: serde::de::DeserializeOwned>(
        &self,
        agent: &Client,
        path: &str,
        stop: &Stop,
    ) -> Result<T, Error> {
        let url = format!("{}{path}", self.trainer.endpoint);
        let bearer = Some(self.token.expose());
        let request = Request::<()> { url: &url, bearer, body: None, timeout: PATIENCE, most: 1 << 20 };
        let failed =
            |kind, what| Error::Child { who: format!("{}agent", self.trainer.spec.prefix), what, kind };
        let (status, body) = agent.send(request, stop).map_err(|(kind, why)| match kind {
            Kind::Cancelled => Error::Cancelled,
            kind => failed(kind, why),
        })?;
        let told = serde_json::from_slice(&body);
        told.map_err(|e| failed(Kind::Bug, format!("answered {status} to {path}: {e}")))
    }

    /// Waits until the agent can serve the version.
    fn sealed(&self, agent: &Client, step: u32, stop: &Stop) -> Result<VersionInfo, Error> {
        loop {
            let info: VersionInfo = self.ask(agent, "/get_version", stop)?;
            if info.version >= Some(step.into()) {
                return Ok(info);
            }
            stop.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Tells the controller; answers whether to wait.
    fn announce(
        &self,
        agent: &Client,
        step: u32,
        VersionInfo { model_id, incarnation, .. }: VersionInfo,
        (offload, committed, sealed): (Duration, Instant, Instant),
        stop: &Stop,
    ) -> Result<bool, Error> {
        let delta: Capabilities = self.ask(agent, "/get_capabilities", stop)?;
        let image = self.trainer.manifest.data_bytes();
        let there = delta.delta_version == Some(step.into());
        let delta_bytes = delta.delta_size_bytes.filter(|_| there);
        let ago = |at: Instant| at.elapsed().as_secs_f64() * 1e3;
        let span = |lane, what: &str, began: f64, ended: f64, bytes| Span {
            lane,
            what: what.into(),
            began_ms_ago: began,
            ended_ms_ago: ended,
            bytes,
        };
        let spans = vec![
            span(
                Lane::Trainer,
                "offload",
                ago(committed) + offload.as_secs_f64() * 1e3,
                ago(committed),
                Some(image),
            ),
            span(Lane::Agent, "seal", ago(committed), ago(sealed), delta_bytes),
        ];
        let notify = NotifyVersion {
            model_id,
            incarnation,
            version: step.into(),
            sender_endpoint: self.trainer.endpoint.clone(),
            sync: false,
            eval: None,
            timeout_ms: None,
            spans,
            delta_sparsity: delta.delta_sparsity.filter(|_| there),
            delta_ratio: delta_bytes.map(|b| b as f64 / image.max(1) as f64),
        };
        Ok(self.client.notify(&notify, stop)?.wait)
    }

    /// Waits until this version is served.
    fn wait_for(&self, version: u32, stop: &Stop) -> Result<(), Error> {
        let set = SetName::new(SET).map_err(|e| Error::Bug(e.to_string()))?;
        let timeout_ms = Some(PATIENCE.as_millis() as u64);
        let at_least = Some(version.into());
        let gate = Gate { set: Some(set), at_least, timeout_ms, ..Gate::default() };
        self.client.gate(&gate, stop)?;
        Ok(())
    }
}
