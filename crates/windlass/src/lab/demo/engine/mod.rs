//! `windlass demo --engine`: a tiny model learns, a real server follows, and its answers change.
//!
//! A trainer in Python (`train.py`) makes a model with random weights, teaches it one sentence, and publishes every version. A
//! server of the engine ([`server`]) starts on the first checkpoint, and `windlass receive --engine` loads every version into it.
//! The trainer asks the controller for an eval of each version. The demo is what runs it: it asks the server to go on with the
//! sentence, and its report is what the live page shows. At the end the server must name the last version and give the answer of
//! the trainer's own model; otherwise the exit code is 1.

mod server;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_core::identity::Version;

use self::server::{Question, Server};
use super::child::Child;
use super::controller::{Controller, SET};
use super::report::sync_object;
use super::{Home, TIMEOUT, event};
use crate::console::{Session, Table, bytes};
use crate::error::Error;
use crate::service::controller::status::{Status, Sync};
use crate::service::controller::wire::{EvalDone, TakeEval};
use crate::service::engines::Dialect;
use crate::service::token;
use crate::tools::gc::TOKEN;
use crate::tools::init::detect::{Interpreter, quoted};
use crate::tools::top::frame::{clean, took};

/// The trainer.
const TRAIN: &str = include_str!("train.py");
/// What the model, its set and its checkpoint are called.
const MODEL: &str = SET;
/// Heartbeat timeout of the controller, in seconds. A server that starts takes all cores.
const HEARTBEAT: f64 = 10.0;
/// How long the interpreter may take to say what it has.
const ASKED: Duration = Duration::from_secs(30);
/// How long the sidecar and the trainer may take to end.
const END: Duration = Duration::from_secs(10);
/// How long the demo waits for an eval before it looks after its processes.
const LOOK: u64 = 500;

/// The checked arguments of `demo --engine`.
#[derive(Debug)]
pub(crate) struct EngineDemo {
    pub(crate) engine: Dialect,
    pub(crate) python: Option<PathBuf>,
    /// Versions after the first, which has random weights.
    pub(crate) steps: u32,
    pub(crate) dir: PathBuf,
    /// Minimum duration of a step.
    pub(crate) pace: Duration,
    /// Keeps the live page up after the last step, until Ctrl-C.
    pub(crate) stay: bool,
}

/// Why the demo cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Absent {
    #[error("there is no python3 on the path")]
    Python,
    #[error("{} has no {}", python.display(), packages.join(", no "))]
    Packages { python: PathBuf, packages: Vec<&'static str> },
}

impl From<Absent> for Error {
    fn from(e: Absent) -> Error {
        let first = match &e {
            Absent::Python => "activate the environment of the engine".to_owned(),
            Absent::Packages { python, packages } => {
                format!("run `{} -m pip install {}`", quoted(python), packages.join(" "))
            }
        };
        let advice = format!(
            "{first}, name another interpreter with --python, or leave --engine out: the demo then runs without a server"
        );
        Error::of_module(Kind::Invalid, advice, e)
    }
}

/// What the trainer says of itself once the checkpoint is written.
#[derive(Debug, Deserialize)]
struct Ready {
    gpu: bool,
    /// The dtype of the checkpoint and of all versions.
    dtype: String,
    /// What the model is taught.
    sentence: String,
}

/// A version's answer.
#[derive(Debug)]
struct Answer {
    version: Version,
    /// The version that the server named.
    named: Option<Version>,
    question: Question,
    text: String,
}

impl Answer {
    /// Whether the server had the version, and answered as the trainer's own model.
    fn right(&self) -> bool {
        self.named == Some(self.version) && self.text == self.question.own
    }

    fn object(&self) -> Value {
        json!({
            "event": "answer", "version": self.version, "named": self.named, "prompt": self.question.prompt,
            "answer": self.text, "own": self.question.own, "loss": self.question.loss,
        })
    }

    /// Prompt and answer.
    fn sentence(&self) -> String {
        clean(&format!("{}{}", self.question.prompt, self.text))
    }
}

/// All processes. Dropped in this order: the sidecar lets go of the server first.
struct Processes {
    sidecar: Child,
    trainer: Child,
    server: Server,
    controller: Controller,
}

impl EngineDemo {
    /// Runs the demo and returns the exit code.
    pub(crate) fn run(&self, session: &Session) -> Result<u8, Error> {
        let python = self.interpreter(session)?;
        let home = Home::make(&self.dir)?;
        let ran = self.run_in(&home.0, &python, session);
        // After Ctrl-C the first call that it ended is not the cause.
        if ran.is_err() && session.cancel().is_set() { Err(Error::Cancelled) } else { ran }
    }

    /// The interpreter, if it has all that the demo needs.
    fn interpreter(&self, session: &Session) -> Result<PathBuf, Error> {
        let python = Interpreter::choose(self.python.as_deref());
        let needed = [self.engine.as_str(), "torch", "transformers", "windlass"];
        let found = python.packages(&needed, ASKED, session.cancel())?.ok_or(Absent::Python)?;
        let packages: Vec<_> = needed.into_iter().filter(|name| !found.contains_key(*name)).collect();
        let python = python.path;
        if packages.is_empty() { Ok(python) } else { Err(Absent::Packages { python, packages }.into()) }
    }

    fn run_in(&self, home: &Path, python: &Path, session: &Session) -> Result<u8, Error> {
        let start = Instant::now();
        let token_file = home.join(TOKEN);
        let token = token::read_or_make(&token_file)?;
        let secret = (token_file.as_path(), &token);
        let controller = Controller::start(home, session, secret, &[MODEL], HEARTBEAT)?;
        let mut processes = self.start(home, python, secret, controller, session)?;
        let answers = self.follow(&mut processes, session)?;
        let status = processes.controller.client.status(&session.cancel().with_timeout(TIMEOUT))?;
        let fine = answers.last().is_some_and(|a| a.version == Version::from(self.steps) && a.right());
        self.report(&answers, &status, fine, start.elapsed(), session)?;
        processes.controller.sign_off(&status, session)?;
        if self.stay {
            processes.controller.stay(session, "")?;
        }
        Ok(u8::from(!fine))
    }

    /// Starts the trainer, the server when there is a checkpoint, and the sidecar when the server serves.
    fn start(
        &self,
        home: &Path,
        python: &Path,
        (token_file, token): (&Path, &Token),
        controller: Controller,
        session: &Session,
    ) -> Result<Processes, Error> {
        let bar = session.steps(1);
        bar.say("the trainer makes a model");
        let script = home.join("train.py");
        std::fs::write(&script, TRAIN).map_err(Error::io("write", &script))?;
        let options = json!({
            "checkpoint": home.join(MODEL), "region_dir": home, "controller": controller.client.peer(),
            "token_file": token_file, "steps": self.steps, "pace": self.pace.as_secs_f64(),
        });
        let mut command = Command::new(python);
        command.arg(&script).arg(options.to_string());
        let mut trainer = Child::group("trainer", home, command, Duration::ZERO)?;
        let ready =
            trainer.expect("write a checkpoint", &session.cancel().with_timeout(TIMEOUT), |line| {
                event(line, "ready").then(|| Ready::deserialize(line).ok()).flatten()
            })?;
        drop(bar);
        // From now on it has a region and an agent to end.
        let mut trainer = trainer.with_grace(END);
        let mut server = Server::start(self.engine, python, home, (token_file, token), &ready)?;
        let device = if ready.gpu { "a GPU" } else { "the CPU, which takes a minute or two" };
        session.event(
            &json!({ "event": "server", "engine": self.engine.as_str(), "url": server.url(), "gpu": ready.gpu }),
            || format!("{} starts on {device}\nthe model learns {:?}", self.engine.as_str(), ready.sentence),
        );
        server.wait_ready(session)?;
        let args = [
            "receive".to_owned(),
            format!("--controller={}", controller.client.peer()),
            format!("--controller-token-file={}", token_file.display()),
            format!("--token-file={}", token_file.display()),
            format!("--dir={}", home.join("images").display()),
            format!("--model={MODEL}"),
            format!("--engine={}", server.name()),
            "--name=sidecar".to_owned(),
            "--with-parent".to_owned(),
        ];
        let sidecar = Child::start("sidecar", home, args)?.with_grace(END);
        trainer.say("begin")?;
        Ok(Processes { sidecar, trainer, server, controller })
    }

    /// Asks the server after every version, until the last.
    fn follow(&self, all: &mut Processes, session: &Session) -> Result<Vec<Answer>, Error> {
        let mut answers: Vec<Answer> = Vec::new();
        let mut stop = session.cancel().with_timeout(TIMEOUT);
        while answers.last().is_none_or(|a| a.version < Version::from(self.steps)) {
            for process in
                [&mut all.controller.process, &mut all.sidecar, &mut all.trainer, &mut all.server.process]
            {
                process.check()?;
            }
            if let Some(answer) = eval(all, session)? {
                session.event(&answer.object(), || {
                    format!("version {:<3} {}", answer.version, answer.sentence())
                });
                answers.push(answer);
                stop = session.cancel().with_timeout(TIMEOUT);
            }
            if stop.check().is_err() {
                return Err(late(all, answers.len(), session));
            }
        }
        let stop = session.cancel().with_timeout(TIMEOUT);
        all.trainer.expect("finish", &stop, |line| event(line, "trained").then_some(()))?;
        Ok(answers)
    }

    fn report(
        &self,
        answers: &[Answer],
        status: &Status,
        fine: bool,
        took_all: Duration,
        session: &Session,
    ) -> Result<(), Error> {
        let (engine, seconds) = (self.engine.as_str(), took_all.as_secs_f64());
        let syncs: Vec<&Sync> = status.sets.iter().flat_map(|set| &set.syncs).collect();
        let last = answers.last();
        let object = json!({
            "ok": fine, "engine": engine, "steps": self.steps, "served": last.and_then(|a| a.named),
            "answers": answers.iter().map(Answer::object).collect::<Vec<_>>(),
            "syncs": syncs.iter().copied().map(sync_object).collect::<Vec<_>>(),
            "errors": status.errors, "seconds": seconds,
        });
        session.finish(object, |out| {
            let mut table = Table::new(["version", "loss", "on the wire", "latency", "paused", "answer"]);
            for answer in answers {
                let sync = syncs.iter().find(|s| s.version == answer.version);
                let time = |ms: fn(&Sync) -> Option<f64>| sync.and_then(|s| ms(s)).map_or("-".into(), took);
                table.row([
                    answer.version.to_string(),
                    format!("{:.3}", answer.question.loss),
                    sync.map_or("-".into(), |s| bytes(s.bytes)),
                    time(|s| s.latency_ms),
                    time(|s| s.pause_ms),
                    if answer.right() { "the trainer's" } else { "another" }.to_owned(),
                ]);
            }
            out.push('\n');
            table.write(out);
            let _ = match last {
                Some(last) if fine => writeln!(
                    out,
                    "\n{engine} serves version {} and gives the answer of the trainer's own model, {seconds:.1} s.",
                    last.version
                ),
                Some(last) => writeln!(
                    out,
                    "\nMISMATCH: after version {} the server names version {:?} and answers {:?}; the trainer's own model answers {:?}.",
                    last.version, last.named, last.text, last.question.own
                ),
                None => Ok(()),
            };
        })
    }
}

/// Runs the next eval of the trainer, if there is one.
fn eval(all: &Processes, session: &Session) -> Result<Option<Answer>, Error> {
    let (client, stop) = (&all.controller.client, session.cancel().with_timeout(TIMEOUT));
    let task = client.take_eval(&TakeEval { set: None, timeout_ms: LOOK }, &stop)?;
    let (Some(id), Some(served), Some(words)) = (task.id, task.served, task.eval) else { return Ok(None) };
    let question =
        Question::deserialize(words).map_err(|e| Error::Bug(format!("the trainer's eval: {e}")))?;
    let text = all.server.ask(&question, &stop)?;
    let named = all.server.version(&stop)?;
    let answer = Answer { version: served.version, named, question, text };
    client.eval_done(&EvalDone { id, result: Some(answer.sentence().into()), error: None }, &stop)?;
    Ok(Some(answer))
}

/// The error if no version was served for too long.
fn late(all: &Processes, next: usize, session: &Session) -> Error {
    if session.cancel().is_set() {
        return Error::Cancelled;
    }
    let status = all.controller.client.status(&session.cancel().with_timeout(TIMEOUT));
    let why = status.map_or_else(
        |e| e.to_string(),
        |status| {
            let errors = status.errors.iter().map(|e| format!("{}: {}", e.who, e.message));
            let blocked = status.sets.iter().map(|set| set.blocked.clone());
            blocked.chain(errors).collect::<Vec<_>>().join("; ")
        },
    );
    all.server
        .process
        .failed(Kind::Timeout, format!("did not serve version {next} within {} s: {why}", TIMEOUT.as_secs()))
}
