//! The processes of the demo other than the trainers: the controller and the receivers.
//!
//! The actor's trainer is faster than the verifier's. Receivers load a version only when both models have it, so the
//! actor gets ahead until the controller tells it to wait. The last receiver joins after the others serve, and the first
//! is killed with SIGKILL later: the controller misses its heartbeat, and the others continue. The live page shows all of
//! this; the demo prints its address first.
//!
//! One thread drives each trainer ([`training`](super::training)). The main thread polls the controller, and starts and
//! kills receivers. If one thread fails, it sets the flag that Ctrl-C sets, and the others end.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use windlass_core::StateDigest;
use windlass_core::address::Token;
use windlass_core::barrier::ReceiverId;
use windlass_core::error::Kind;
use windlass_core::manifest::Manifest;
use windlass_data::file::Checkpoint;

use super::child::Child;
use super::controller::Controller;
use super::trainer::{Spec, Trainer};
use super::training::TrainingLoop;
use super::{Demo, TIMEOUT, report};
use crate::console::Session;
use crate::error::Error;
use crate::service::controller::status::{SetStatus, Status};
use crate::service::token;
use crate::tools::gc::TOKEN;
use crate::tools::verify;
use windlass_synth::SynthConfig;

/// The models, and the duration of a step relative to the actor's.
pub(super) const MODELS: [(&str, f64); 2] = [("actor", 1.0), ("verifier", 1.8)];
/// Heartbeat timeout of the controller, in seconds.
const HEARTBEAT: f64 = 2.0;
/// How often the demo polls the controller.
pub(super) const POLL: Duration = Duration::from_millis(100);

/// A receiver that the demo started or killed.
#[derive(Clone, Debug)]
pub(super) struct Incident {
    /// The version served at that time.
    pub(super) version: u64,
    pub(super) what: String,
}

/// The digest of every version of a model in the ranks' memory.
pub(super) type Expected = Vec<StateDigest>;

/// The controller and the receivers.
struct Cluster<'a> {
    demo: &'a Demo,
    session: &'a Session,
    home: &'a Path,
    token_file: PathBuf,
    /// Dropped first, so that receivers end before the controller.
    receivers: Vec<Option<Child>>,
    controller: Controller,
    incidents: Vec<Incident>,
}

/// Runs the demo and returns the exit code.
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
    let mut cluster = Cluster::start(demo, home, session, token_file, &token)?;
    let expected: Vec<Mutex<Expected>> = MODELS.iter().map(|_| Mutex::default()).collect();
    std::thread::scope(|scope| {
        let start_loop = |((trainer, (_, pace)), expected)| {
            let (client, token) = (cluster.controller.client.clone(), token.clone());
            let pace = demo.pace.mul_f64(pace);
            let training = TrainingLoop { trainer, pace, client, token, steps: demo.steps, session };
            Some(scope.spawn(move || training.run(expected)))
        };
        let mut threads: Vec<Option<_>> =
            trainers.into_iter().zip(MODELS).zip(&expected).map(start_loop).collect();
        // A trainer that is done keeps its agent until all receivers have its last version.
        let mut done = Vec::new();
        let served = cluster.run_until_served(&mut || {
            for slot in &mut threads {
                if let Some(ended) = slot.take_if(|t| t.is_finished()) {
                    done.push(
                        ended.join().map_err(|_| Error::Bug("a trainer of the demo panicked".into()))??,
                    );
                }
            }
            Ok(done.len() == MODELS.len())
        });
        let ended = served.and_then(|status| {
            let fine = cluster.compare(&status, &manifests, &expected, start)?;
            cluster.controller.sign_off(&status, session)?;
            cluster.stay()?;
            Ok(u8::from(!fine))
        });
        if ended.is_err() {
            // After Ctrl-C the first call that it ended is not the cause.
            let interrupted = session.cancel().is_set();
            session.cancel().set();
            if interrupted {
                return Err(Error::Cancelled);
            }
        }
        ended
    })
}

fn spec(demo: &Demo, home: &Path, name: &str, index: u64, token_file: &Path) -> Spec {
    Spec {
        model_id: name.to_owned(),
        model: SynthConfig { seed: demo.model.seed.wrapping_add(index), ..demo.model },
        ranks: demo.ranks,
        streams: demo.streams,
        region: home.join(name),
        logs: home.to_owned(),
        prefix: format!("{name}-"),
        token_file: token_file.to_owned(),
    }
}

impl<'a> Cluster<'a> {
    /// Starts the controller and all receivers but the late one.
    fn start(
        demo: &'a Demo,
        home: &'a Path,
        session: &'a Session,
        token_file: PathBuf,
        token: &Token,
    ) -> Result<Cluster<'a>, Error> {
        let models: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
        let controller = Controller::start(home, session, (&token_file, token), &models, HEARTBEAT)?;
        let (receivers, incidents) = ((0..demo.receivers).map(|_| None).collect(), Vec::new());
        let mut cluster = Cluster { demo, session, home, token_file, receivers, controller, incidents };
        for index in 0..demo.receivers {
            if cluster.late().is_none_or(|(late, _)| late != index) {
                cluster.start_receiver(index)?;
            }
        }
        Ok(cluster)
    }

    /// The receiver that joins late, and the version after which it does. None with too few steps or receivers.
    fn late(&self) -> Option<(u16, u64)> {
        let enough = self.demo.steps >= 3 && self.demo.receivers >= 2;
        enough.then(|| (self.demo.receivers - 1, u64::from(self.demo.steps / 3)))
    }

    /// The receiver that is killed, and the version after which it is.
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
            format!("--controller={}", self.controller.client.peer()),
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

    /// Starts and kills receivers until every version is served. Returns the controller's last status.
    fn run_until_served(
        &mut self,
        trained: &mut dyn FnMut() -> Result<bool, Error>,
    ) -> Result<Status, Error> {
        let bar = self.session.steps(u64::from(self.demo.steps) + 1);
        bar.say("starting");
        let (mut late, mut doomed) = (self.late(), self.doomed());
        let (mut reached, mut stop) = (None, self.session.cancel().with_timeout(TIMEOUT));
        loop {
            let done = trained()?;
            self.controller.process.check()?;
            for receiver in self.receivers.iter_mut().flatten() {
                receiver.check()?;
            }
            let status = self.controller.client.status(&stop)?;
            let set = status.sets.first().ok_or_else(|| Error::Bug("the controller has no set".into()))?;
            let served = set.served.as_ref().map(|s| s.version);
            if served > reached {
                bar.add(served.map_or(0, |v| v + 1) - reached.map_or(0, |v| v + 1));
                (reached, stop) = (served, self.session.cancel().with_timeout(TIMEOUT));
            }
            bar.say(&summary(set));
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
            std::thread::sleep(POLL);
        }
    }

    /// Whether all running receivers serve.
    fn all_live(&self, set: &SetStatus) -> bool {
        let running = self.receivers.iter().flatten().count();
        set.receivers == running && set.live == running
    }

    /// Compares the images of the surviving receivers with the ranks' memory, and prints the report.
    fn compare(
        &self,
        status: &Status,
        manifests: &[Manifest],
        expected: &[Mutex<Expected>],
        start: Instant,
    ) -> Result<bool, Error> {
        let images = self.hash_images()?;
        let last = |all: &Mutex<Expected>| all.lock().last().copied();
        let last: Vec<Option<StateDigest>> = expected.iter().map(last).collect();
        let equal = |digests: &[StateDigest]| digests.iter().zip(&last).all(|(d, l)| Some(*d) == *l);
        let fine = !images.is_empty() && images.iter().all(|(_, digests)| equal(digests));
        let (demo, incidents) = (self.demo, &self.incidents);
        let summary =
            report::Summary { demo, manifests, status, images: &images, last: &last, incidents, fine };
        summary.print(self.session, start.elapsed().as_secs_f64())?;
        Ok(fine)
    }

    /// With `--stay`, keeps all processes until Ctrl-C.
    fn stay(&mut self) -> Result<(), Error> {
        if !self.demo.stay {
            return Ok(());
        }
        let killed = self.doomed().map_or(String::new(), |(index, _)| {
            format!(" The error it shows is receiver-{index}, which the demo killed.")
        });
        self.controller.stay(self.session, &killed)
    }

    /// Re-hashes the images of the surviving receivers. No newer version is announced, so the images do not change.
    fn hash_images(&self) -> Result<Vec<(ReceiverId, Vec<StateDigest>)>, Error> {
        let left = self.receivers.iter().enumerate().filter(|(_, r)| r.is_some()).map(|(i, _)| i);
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut all = Vec::new();
        for index in left {
            let hash = |model: &str| {
                let checkpoint =
                    Checkpoint::open(&self.receiver_dir(index).join(model).join("a.safetensors"))?;
                let progress = self.session.progress("verifying", checkpoint.manifest().data_bytes());
                verify::digest(&checkpoint, threads, self.session.cancel(), &progress)
            };
            let digests = MODELS.iter().map(|(model, _)| hash(model)).collect::<Result<_, Error>>()?;
            let id = ReceiverId::new(format!("receiver-{index}")).map_err(|e| Error::Bug(e.to_string()))?;
            all.push((id, digests));
        }
        Ok(all)
    }
}

/// The state of the set, for the progress bar.
fn summary(set: &SetStatus) -> String {
    let served = set.served.as_ref().map_or("nothing yet".to_owned(), |s| format!("version {}", s.version));
    let flight = set.rounds.first().map_or(String::new(), |r| {
        let phase = if r.phase == windlass_core::barrier::Phase::Staging { "staging" } else { "loading" };
        format!(", {phase} {}", r.version)
    });
    format!("serving {served}{flight}; {} of {} receivers live", set.live, set.receivers)
}
