//! A pause for weights that another program writes, such as tensors by value from Python.
//!
//! Owns: both ends. [`Holder`] is the writer's end. [`child`] is a guard's process, which pauses the engine, journals each
//! step and resumes it. The process is kept for the next pause, because starting one takes longer than many loads. Called
//! by [`super::driver`]. Must not: write weights, or decide whether what was written is a whole version.
//!
//! # What they say
//!
//! The writer says a [`Word`], one line of JSON on the guard's standard input; the guard answers each with one line. The
//! writer may write after [`Word::Touch`] was answered, and not before: a writer that was stopped for longer than its
//! lease gets an error instead.
//!
//! | the writer is gone, or the lease is over | the engine | the journal |
//! |---|---|---|
//! | before the first write | resumed, with its old weights | cleared |
//! | after it (the lease does not end then) | stays paused | `writing`: the next load is a whole one |
//!
//! The guard takes the end of its input, and another parent process, as the writer's death: a fork of the writer keeps
//! the input open.

use std::io::{self, Write as _};
use std::process::{Child, ChildStdin};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

use super::error::EngineError;
use super::guard::{self, Failure, GRACE, Lines, Lock, Target};
use super::transaction::{ANSWER, Journal, Phase, Plain, resume};
use crate::error::Error;

/// How long a guard that was told to end may take before it is left to itself.
const FAREWELL: Duration = Duration::from_secs(2);

/// What a writer says. Times are seconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// Pause the engine, within `lease`; resume it if the first write has not begun by then. The journal says that
    /// `label` is to come. An engine that is paused already stays so, with a new lease.
    Pause { label: Option<String>, lease: f64, timeout: f64 },
    /// A write is about to begin; or, if false, the engine refused and nothing was written.
    Touch(bool),
    /// Everything is written: resume.
    Resume,
    /// The writer failed: resume with the old weights if they are whole, or stay paused.
    Fail { error: String },
}

/// What a guard answers: whether the engine needs a whole load, because an earlier one did not finish.
type Answer = Result<bool, Failure>;

/// An engine while it is paused.
struct Held {
    lock: Lock,
    label: Option<String>,
    /// An earlier load did not finish.
    dirty: bool,
    touched: bool,
    lease: Duration,
    until: Instant,
}

/// Carries out words.
struct Holding {
    target: Target,
    engine: Box<dyn Plain>,
    journal: Journal,
    held: Option<Held>,
    /// The lease that ended before the first write.
    expired: Option<Duration>,
    /// Set when the writer is gone.
    alone: Stop,
}

impl Holding {
    fn new(target: Target, alone: Stop) -> Result<Holding, EngineError> {
        let (engine, journal) = (target.plain()?, Journal::of(&target.dir));
        Ok(Holding { target, engine, journal, held: None, expired: None, alone })
    }

    /// Answers whether the engine needs a whole load.
    fn hear(&mut self, word: Word) -> Result<bool, EngineError> {
        match word {
            Word::Pause { label, lease, timeout } => self.pause(label, seconds(lease), seconds(timeout)),
            Word::Touch(touched) => self.touch(touched),
            Word::Resume => self.resume(),
            Word::Fail { error } => self.fail(&error),
        }
    }

    fn pause(
        &mut self,
        label: Option<String>,
        lease: Duration,
        timeout: Duration,
    ) -> Result<bool, EngineError> {
        let (lock, dirty) = match self.held.take() {
            Some(held) => (held.lock, held.dirty || held.touched),
            None => {
                let lock = guard::lock(&self.target, &self.alone.with_timeout(timeout))?;
                (lock, guard::left_behind(&self.target)?)
            }
        };
        let first = if dirty { Phase::Writing } else { Phase::Pausing };
        self.journal.put(first, label.as_deref().unwrap_or_default(), None)?;
        let until = Instant::now() + lease;
        self.expired = None;
        self.held = Some(Held { lock, label, dirty, touched: false, lease, until });
        match self.engine.pause(&self.alone.with_timeout(lease)) {
            Ok(()) => Ok(dirty),
            // It said no, and so is not paused.
            Err(e @ EngineError::Refused { .. }) if !dirty => {
                self.held = None;
                self.journal.clear()?;
                Err(e)
            }
            Err(e) => {
                self.fail(&e.to_string())?;
                Err(e)
            }
        }
    }

    fn held(&mut self) -> Result<&mut Held, EngineError> {
        let engine = self.target.engine.clone();
        let (why, kind) = match self.expired {
            Some(lease) => (
                format!("the lease of {lease:?} is over, and it goes on with its old weights"),
                Kind::Timeout,
            ),
            None => ("it is not paused by this program: pause it first".into(), Kind::Invalid),
        };
        self.held.as_mut().ok_or(EngineError::Lease { engine, why, kind })
    }

    fn touch(&mut self, touched: bool) -> Result<bool, EngineError> {
        let held = self.held()?;
        held.touched = touched;
        let (dirty, label) = (held.dirty, held.label.clone().unwrap_or_default());
        if !dirty {
            self.journal.put(if touched { Phase::Writing } else { Phase::Pausing }, &label, None)?;
        }
        Ok(dirty)
    }

    fn resume(&mut self) -> Result<bool, EngineError> {
        let label = self.held()?.label.clone().unwrap_or_default();
        // A journal that cannot be written must not keep a loaded engine from serving.
        let _ = self.journal.put(Phase::Loaded, &label, None);
        self.go_on()
    }

    /// Answers whether the engine stays paused, because its weights are of no version.
    fn fail(&mut self, error: &str) -> Result<bool, EngineError> {
        let (mut lock, mut label) = (None, None);
        let torn = match &self.held {
            Some(held) => {
                label.clone_from(&held.label);
                held.dirty || held.touched
            }
            // Paused by another program, or by a guard that is gone.
            None => {
                lock = Some(guard::lock(&self.target, &Stop::after(ANSWER))?);
                self.journal.read()?.is_some_and(|e| e.phase.is_dirty())
            }
        };
        if !torn && lock.is_some() {
            resume(&*self.engine)?;
            return self.journal.clear().map(|()| false);
        }
        if !torn {
            return self.go_on();
        }
        let text = error.to_owned();
        let error = EngineError::Guard { stage: None, kind: Kind::Stale, text, advice: String::new() };
        let put = self.journal.put(Phase::Fenced, label.as_deref().unwrap_or_default(), Some(&error));
        let fenced = put.and_then(|()| self.engine.fence(&Stop::after(ANSWER)));
        self.held = None;
        fenced.map(|()| true)
    }

    /// Resumes an engine that this or an earlier load has paused.
    fn go_on(&mut self) -> Result<bool, EngineError> {
        if self.engine.pauses() || self.held.as_ref().is_some_and(|h| h.dirty) {
            resume(&*self.engine)?;
        }
        self.held = None;
        self.journal.clear().map(|()| false)
    }

    /// Whether the old weights are paused, and whole.
    fn can_resume(&self) -> bool {
        self.held.as_ref().is_some_and(|h| !h.touched && !h.dirty)
    }

    /// Ends a lease that is over.
    fn look(&mut self) {
        let Some(held) = self.held.as_ref().filter(|h| h.until <= Instant::now()) else { return };
        let lease = held.lease;
        // What fails now is tried again with the next look.
        if self.can_resume() && self.go_on().is_ok() {
            self.expired = Some(lease);
        }
    }

    /// The writer is gone.
    fn end(&mut self) {
        if self.held.is_none() {
            return;
        }
        let engine = self.target.engine.clone();
        let told = if !self.can_resume() {
            "stays paused, because its weights are of no whole version: load one".to_owned()
        } else if let Err(e) = self.go_on() {
            format!("may be paused still: {}", crate::error::chain(&e))
        } else {
            "goes on with the weights that it had".to_owned()
        };
        let _ = writeln!(
            io::stderr().lock(),
            "windlass guard: the process that paused {engine} is gone; it {told}"
        );
    }
}

fn seconds(given: f64) -> Duration {
    Duration::try_from_secs_f64(given).unwrap_or(GRACE)
}

/// The guard's process, until its writer `parent` is gone.
pub(super) fn child(target: Target, parent: u32, cancel: &Stop) -> Result<(), Error> {
    let (send, words) = channel();
    let gone = cancel.clone();
    let read = move || {
        for line in io::stdin().lines() {
            let Some(word) = line.ok().and_then(|l| serde_json::from_str::<Word>(&l).ok()) else { break };
            if send.send(word).is_err() {
                break;
            }
        }
        gone.set();
    };
    let thread = std::thread::Builder::new().name("windlass-parent".into()).spawn(read);
    thread.map_err(|e| Error::Bug(format!("no thread: {e}")))?;
    let mut holding = Holding::new(target, cancel.clone())?;
    let is_child =
        || rustix::process::getppid().is_some_and(|p| p.as_raw_nonzero().get().unsigned_abs() == parent);
    loop {
        match words.recv_timeout(Stop::GLANCE) {
            Ok(word) => guard::say::<Answer>(&holding.hear(word).map_err(|e| Failure::of(&e))),
            Err(RecvTimeoutError::Timeout) if is_child() && !cancel.is_set() => holding.look(),
            Err(_) => break,
        }
    }
    holding.end();
    let dir = holding.target.dir.clone();
    drop(holding);
    guard::remove_idle(&dir);
    Ok(())
}

/// The writer's end.
#[derive(Debug)]
pub struct Holder {
    target: Target,
    process: Option<Process>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines,
    owner: u32,
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        self.stdin = None;
        // An idle guard ends at once; one that has an engine to resume may take longer, and needs nobody.
        let until = Instant::now() + FAREWELL;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Holder {
    /// For an engine. Nothing is started before the first pause.
    pub fn new(target: Target) -> Holder {
        Holder { target, process: None }
    }

    /// Says a word and waits for the answer: whether an earlier load did not finish, so that this one must be whole.
    /// [`Word::Pause`] starts a guard if there is none.
    pub fn tell(&mut self, word: &Word, stop: &Stop) -> Result<bool, EngineError> {
        if matches!(word, Word::Pause { .. }) {
            self.start()?;
        }
        let told = self.ask(word, stop);
        match word {
            // There is no guard, or it is gone: the journal says what is left to do.
            Word::Fail { .. } if self.process.is_none() => {
                Holding::new(self.target.clone(), Stop::never())?.hear(word.clone())
            }
            Word::Pause { .. } | Word::Touch(_) | Word::Resume | Word::Fail { .. } => told,
        }
    }

    /// Ends the guard, which resumes the engine or leaves it fenced, by what was written.
    pub(super) fn end(&mut self) {
        self.process = None;
    }

    fn start(&mut self) -> Result<(), EngineError> {
        let lives = |p: &mut Process| matches!(p.child.try_wait(), Ok(None));
        if !self.process.as_mut().is_some_and(lives) {
            let owner = std::process::id();
            let task = json!({ "hold": { "target": self.target, "parent": owner } });
            let (child, stdin, lines) = guard::spawn(&self.target.engine, &task)?;
            self.process = Some(Process { child, stdin: Some(stdin), lines, owner });
        }
        Ok(())
    }

    fn ask(&mut self, word: &Word, stop: &Stop) -> Result<bool, EngineError> {
        let engine = self.target.engine.clone();
        let failed = |what: String| EngineError::Process { engine: engine.clone(), what };
        let Some(process) = &mut self.process else { return Err(failed("is gone".into())) };
        let most = match word {
            Word::Pause { lease, timeout, .. } => seconds(*lease) + seconds(*timeout),
            Word::Touch(_) | Word::Resume | Word::Fail { .. } => Duration::ZERO,
        };
        let until = Instant::now() + most + ANSWER * 2 + GRACE;
        let mut line = serde_json::to_vec(word).map_err(|e| failed(format!("cannot be told: {e}")))?;
        line.push(b'\n');
        // A guard that is gone is seen by what it does not say.
        let _ = process.stdin.as_mut().map(|s| s.write_all(&line).and_then(|()| s.flush()));
        let why = loop {
            match process.lines.next::<Answer>(Stop::GLANCE) {
                Ok(Some(answer)) => return answer.map_err(Failure::error),
                // It resumes the engine or leaves it fenced, by what was written.
                Ok(None) if stop.is_set() => break "was left to itself, because the call was ended".into(),
                Ok(None) if Instant::now() > until => {
                    let _ = process.child.kill();
                    break "did not get on and was killed".into();
                }
                Ok(None) => {}
                Err(e) => break format!("ended without an answer ({e})"),
            }
        };
        self.process = None;
        Err(failed(why))
    }
}
