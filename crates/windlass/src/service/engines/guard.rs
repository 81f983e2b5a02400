//! The guard: the process that loads an engine by plain HTTP, and outlives whoever ordered that.
//!
//! Owns: both ends of a guard's life. [`Guard`] is the receiver's end: it starts the process, gives it one [`Job`], and
//! waits for what comes of it. [`child`] is the process: it takes the engine's lock, holds the image by a map lease of its
//! own, and runs the load ([`super::transaction`]). A receiver never talks to such an engine itself while a load is under
//! way, so there is nothing that one that was stopped (SIGSTOP) could do to it when it wakes up.
//!
//! # What they say
//!
//! The [`Task`] is the first line of the guard's standard input, as JSON, with the engine's key; the input then stays open for
//! as long as the receiver lives. Its end before the first write means: resume the old weights. The guard answers on its
//! standard output, a line for each step (`{"phase":"pausing"}`, `{"phase":"writing"}`, …) and one for the end
//! (`{"outcome":"loaded", …}`, `kept`, `fenced`, `lost`). If nobody is there to read that, it is in `last.json` in the
//! engine's directory, and a failure also on standard error.
//!
//! # Who watches the guard
//!
//! The receiver. A guard that is stopped for longer than the pause lease, or that takes longer than its steps may, is
//! killed and reaped; only then the journal is read and the next guard does what is left. If both are killed, whoever
//! next receives for the engine finds the journal, with its lock free.

use std::fs::{self, File};
use std::io::{self, BufRead as _, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, LayoutHash, Version};
use windlass_data::image::ImageView;
use windlass_data::private;
use windlass_data::region::{Region, RegionError};
use windlass_data::seal::draft::Draft;
use windlass_data::stop::Stop;

use super::error::{EngineError, Stage};
use super::hold;
use super::http::Http;
use super::order::{How, Label, Order};
use super::pause::{CachePolicy, Halt, PauseMode, sglang_pause};
use super::sglang::Sglang;
use super::transaction::{self, ANSWER, Done, Journal, Load, Outcome, Phase, Plain};
use super::vllm::Native;
use crate::console::Session;
use crate::error::Error;
use crate::service::program;

/// What is beyond the deadlines of the guard's own steps: a busy machine.
pub(super) const GRACE: Duration = Duration::from_secs(10);
/// The longest job or answer.
const MAX_LINE: u64 = 1 << 20;
/// How long a receiver that ends waits for what its guard says.
const FAREWELL: Duration = Duration::from_millis(700);

/// Whose routes the engine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routes {
    Vllm,
    /// SGLang's, from a directory.
    Sglang,
    /// SGLang's, by orders to this many workers.
    SglangWorkers(u64),
}

/// An engine, and how it is driven.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    pub engine: String,
    /// Whose routes it has.
    pub routes: Routes,
    pub url: String,
    /// What it wants in the `Authorization` header.
    pub key: Option<String>,
    /// Its directory: lock, journal, reports.
    pub dir: PathBuf,
    /// The directory that it loads from, if it loads from one.
    pub model: PathBuf,
    pub mode: PauseMode,
    pub cache: CachePolicy,
    /// SGLang's own mode, in place of that which `mode` and `cache` mean.
    pub halt: Option<Halt>,
}

impl Target {
    /// The engine, to be driven.
    pub fn plain(&self) -> Result<Box<dyn Plain>, EngineError> {
        let key = self.key.as_ref().map(|k| Token::new(k.clone())).transpose().map_err(|e| {
            EngineError::Unsupported { engine: self.engine.clone(), why: format!("its key: {e}") }
        })?;
        let http = Http::new(self.engine.clone(), &self.url, key);
        let halt = self.halt.or_else(|| sglang_pause(self.mode, self.cache));
        Ok(match self.routes {
            Routes::Vllm => Box::new(Native::new(http, self.mode, self.cache, reports(&self.dir))),
            Routes::Sglang => Box::new(Sglang::from_disk(http, halt, self.cache, self.model.clone())),
            Routes::SglangWorkers(count) => {
                Box::new(Sglang::by_order(http, halt, self.cache, (count, reports(&self.dir))))
            }
        })
    }
}

/// What a guard's process is started for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Task {
    /// To load a version.
    Load(Job),
    /// To pause an engine while `parent` writes its weights.
    Hold { target: Target, parent: u32 },
}

/// What a guard is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Which engine to load.
    pub target: Target,
    /// The directory of the image.
    pub image: PathBuf,
    /// The layout that was found to fit.
    pub layout_hash: LayoutHash,
    /// At least this version.
    pub incarnation: u64,
    /// At least this version.
    pub version: Version,
    /// Seconds from the pause to the first write.
    pub lease: f64,
    /// Seconds from the first write to the end.
    pub timeout: f64,
    /// Whether the engine has to be prepared.
    pub prepare: bool,
    /// This version and no newer one.
    pub exact: bool,
    pub how: How,
}

impl Job {
    fn lease(&self) -> Duration {
        Duration::try_from_secs_f64(self.lease).unwrap_or(GRACE)
    }

    fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout).unwrap_or(GRACE)
    }
}

/// Where an engine's workers report.
pub(super) fn reports(dir: &Path) -> PathBuf {
    dir.join("reports")
}

/// What a guard says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Said {
    Phase { phase: Phase },
    End(End),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
enum End {
    Loaded(Done),
    Kept(Failure),
    Fenced(Failure),
    Lost(Failure),
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Failure {
    stage: Stage,
    kind: Kind,
    error: String,
    advice: String,
}

impl Failure {
    pub(super) fn of(e: &EngineError) -> Failure {
        let advice = e.advice().to_owned();
        Failure { stage: e.stage(), kind: e.kind(), error: crate::error::chain(e), advice }
    }

    pub(super) fn error(self) -> EngineError {
        let Failure { stage, kind, error, advice } = self;
        EngineError::Guard { stage: Some(stage), kind, text: error, advice }
    }
}

/// The exclusive right to load an engine.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, not read")] File);

impl Lock {
    /// Takes the lock in an engine's directory, which is made if it is missing; `None` if a guard has it.
    pub fn take(dir: &Path) -> Result<Option<Lock>, EngineError> {
        let path = dir.join("lock");
        loop {
            private::own(dir, 0o700).map_err(RegionError::from)?;
            let file = File::options().create(true).write(true).truncate(false).mode(0o600).open(&path);
            let file = match file {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(EngineError::io("open", &path))?,
            };
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(e) => return Err(EngineError::io("lock", &path)(e.into())),
            }
            // One that was removed with its directory in between keeps no other guard out.
            if file.metadata().map_err(EngineError::io("look at", &path))?.nlink() > 0 {
                return Ok(Some(Lock(file)));
            }
        }
    }
}

/// Removes the directory of an engine that serves, unless a guard is at work, and the one above it if that was the last;
/// whether it did.
pub(super) fn remove_idle(dir: &Path) -> bool {
    let lock = dir.is_dir().then(|| Lock::take(dir).ok().flatten()).flatten();
    let is_idle = lock.is_some() && matches!(Journal::of(dir).read(), Ok(None));
    let removed = is_idle && fs::remove_dir_all(dir).is_ok();
    let _ = dir.parent().filter(|_| removed).map(fs::remove_dir);
    removed
}

/// A guard at work, seen from the receiver.
#[derive(Debug)]
pub struct Guard {
    engine: String,
    child: Child,
    /// Ends when this is dropped.
    stdin: Option<ChildStdin>,
    lines: Lines,
    lease: Duration,
    timeout: Duration,
}

impl Guard {
    /// Starts a guard on a job.
    pub fn start(job: &Job) -> Result<Guard, EngineError> {
        let engine = job.target.engine.clone();
        let (child, stdin, lines) = spawn(&engine, &json!({ "load": job }))?;
        let (lease, timeout) = (job.lease(), job.timeout());
        Ok(Guard { engine, child, stdin: Some(stdin), lines, lease, timeout })
    }

    /// Waits for what comes of the job. If `stop` is set, the guard is left to itself: it resumes the engine, or
    /// finishes. A guard that does not get on is killed.
    pub fn wait(mut self, stop: &Stop, mut told: impl FnMut(Phase)) -> Result<Outcome, EngineError> {
        // Until the pause it may wait for another guard and for the image.
        let mut until = Instant::now() + self.timeout * 2 + GRACE;
        let mut stopped_since: Option<Instant> = None;
        let mut farewell: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if stop.is_set() && farewell.is_none() {
                self.stdin = None;
                farewell = Some(now + FAREWELL);
            }
            if farewell.is_some_and(|f| now > f) {
                let what = "was left to finish by itself, because the receiver ends".into();
                return Err(EngineError::Process { engine: self.engine.clone(), what });
            }
            stopped_since = if is_stopped(self.child.id()) { stopped_since.or(Some(now)) } else { None };
            if now > until || stopped_since.is_some_and(|s| s.elapsed() > self.lease) {
                let why = if now > until { "did not get on" } else { "was stopped" };
                self.end();
                let what = format!("{why} and was killed; its journal says what is left to do");
                return Err(EngineError::Process { engine: self.engine.clone(), what });
            }
            match self.lines.next::<Said>(Stop::GLANCE) {
                Ok(None) => {}
                Ok(Some(Said::Phase { phase })) => {
                    told(phase);
                    let most = match phase {
                        Phase::Pausing => self.lease,
                        Phase::Writing => self.timeout,
                        Phase::Fenced | Phase::Loaded => Duration::ZERO,
                    };
                    until = Instant::now() + most + ANSWER * 2 + GRACE;
                }
                Ok(Some(Said::End(end))) => {
                    self.stdin = None;
                    let _ = self.child.wait();
                    return Ok(match end {
                        End::Loaded(done) => Outcome::Loaded(done),
                        End::Kept(f) => Outcome::Kept(f.error()),
                        End::Fenced(f) => Outcome::Fenced(f.error()),
                        End::Lost(f) => Outcome::Lost(f.error()),
                    });
                }
                Err(e) => {
                    self.end();
                    let what = format!("ended without a result ({e}); its journal says what is left to do");
                    return Err(EngineError::Process { engine: self.engine.clone(), what });
                }
            }
        }
    }

    /// Kills and reaps it: whatever comes now, it does no more.
    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a guard's process on a [`Task`].
pub(super) fn spawn(engine: &str, task: &Value) -> Result<(Child, ChildStdin, Lines), EngineError> {
    let failed = |what: String| EngineError::Process { engine: engine.to_owned(), what };
    let cannot = |e: &dyn std::fmt::Display| failed(format!("cannot be started: {e}"));
    let mut command = program::command().map_err(|e| cannot(&e))?;
    command.args(["guard", "--json"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    // Ctrl-C is for the parent; the guard hears of its end by the pipe, and may have work left to do.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().map_err(|e| cannot(&e))?;
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(failed("has no standard input or output".into()));
    };
    let line = format!("{task}\n");
    // A guard that died already is seen by what it does not say.
    let _ = stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush());
    Ok((child, stdin, Lines { stdout, buffer: Vec::new() }))
}

/// Whether a process is stopped by a signal.
fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold anything but ends at the last parenthesis.
    stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next()) == Some('T')
}

/// Lines of a pipe, read with a timeout and without a thread.
#[derive(Debug)]
pub(super) struct Lines {
    stdout: ChildStdout,
    buffer: Vec<u8>,
}

impl Lines {
    /// The next line; `None` if there is none within `timeout`. An error if there will be none.
    pub(super) fn next<T: DeserializeOwned>(&mut self, timeout: Duration) -> io::Result<Option<T>> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            if self.buffer.len() as u64 > MAX_LINE {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut fds = [PollFd::new(&self.stdout, PollFlags::IN)];
            let wait = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
            match poll(&mut fds, Some(&wait)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
                Ok(_) => {}
                Err(e) => return Err(e.into()),
            }
            let mut some = [0; 4096];
            match self.stdout.read(&mut some)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => self.buffer.extend_from_slice(some.get(..n).unwrap_or_default()),
            }
        }
    }
}

/// The guard's process.
pub(crate) fn child(session: &Session) -> Result<(), Error> {
    let mut line = String::new();
    let read = io::stdin().lock().take(MAX_LINE).read_line(&mut line);
    read.map_err(Error::io("read", Path::new("standard input")))?;
    let task: Task = serde_json::from_str(&line).map_err(|e| {
        Error::Usage(format!(
            "a guard is started by another process of Windlass, which gives it its job: {e}"
        ))
    })?;
    let job = match task {
        Task::Load(job) => job,
        Task::Hold { target, parent } => return hold::child(target, parent, session.cancel()),
    };
    // The receiver's end and a polite signal mean the same.
    let alone = session.cancel().clone();
    Session::with_parent({
        let alone = alone.clone();
        move || alone.set()
    })?;
    let told = |phase: Phase| say(&Said::Phase { phase });
    let end = match work(&job, &alone, &told) {
        Outcome::Loaded(done) => End::Loaded(done),
        Outcome::Kept(e) => End::Kept(Failure::of(&e)),
        Outcome::Fenced(e) => End::Fenced(Failure::of(&e)),
        Outcome::Lost(e) => End::Lost(Failure::of(&e)),
    };
    leave_word(&job, &end, alone.is_set());
    say(&Said::End(end));
    Ok(())
}

/// To the process that started this one, if it is still there.
pub(super) fn say<T: Serialize>(said: &T) {
    if let Ok(mut line) = serde_json::to_vec(said) {
        line.push(b'\n');
        let mut out = io::stdout().lock();
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }
}

/// For whoever comes when the receiver is gone.
fn leave_word(job: &Job, end: &End, alone: bool) {
    if let Ok(text) = serde_json::to_vec(end) {
        let _ = Draft::write(&job.target.dir.join("last.json"), &text);
    }
    let (how, failure) = match end {
        End::Loaded(_) => return,
        End::Kept(f) => ("serves its old weights", f),
        End::Fenced(f) => ("stays paused, because its weights are not whole", f),
        End::Lost(f) => ("does not answer", f),
    };
    if alone {
        let (engine, error) = (&job.target.engine, &failure.error);
        let _ = writeln!(io::stderr().lock(), "windlass guard: {engine} {how}: {error}");
    }
}

fn work(job: &Job, alone: &Stop, told: &dyn Fn(Phase)) -> Outcome {
    let engine = match job.target.plain() {
        Ok(engine) => engine,
        Err(e) => return Outcome::Kept(e),
    };
    let journal = Journal::of(&job.target.dir);
    let _lock = match lock(&job.target, &alone.with_timeout(job.timeout())) {
        Ok(lock) => lock,
        Err(e) => return Outcome::Kept(e),
    };
    let dirty = match left_behind(&job.target) {
        Ok(dirty) => dirty,
        Err(e) => return Outcome::Kept(e),
    };
    let take = |stop: &Stop| take(job, dirty, stop);
    transaction::run(&Load {
        engine: &*engine,
        name: &job.target.engine,
        journal: &journal,
        take: &take,
        prepare: job.prepare,
        dirty,
        lease: job.lease(),
        timeout: job.timeout(),
        alone,
        told,
    })
}

/// Waits for another guard to finish.
pub(super) fn lock(target: &Target, stop: &Stop) -> Result<Lock, EngineError> {
    loop {
        if let Some(lock) = Lock::take(&target.dir)? {
            return Ok(lock);
        }
        if stop.is_set() {
            return Err(EngineError::Guard {
                stage: Some(Stage::Check),
                kind: Kind::Denied,
                text: format!("{}: another guard is loading it", target.engine),
                advice: "wait for that load to end, or end the process that it belongs to".into(),
            });
        }
        std::thread::sleep(stop.nap());
    }
}

/// With the lock: makes good what a guard left that was killed. Resumes an engine that was only paused, or is loaded.
/// Answers whether the engine must be loaded before it is resumed.
pub(super) fn left_behind(target: &Target) -> Result<bool, EngineError> {
    let journal = Journal::of(&target.dir);
    let Some(entry) = journal.read()? else { return Ok(false) };
    if entry.phase.is_dirty() {
        return Ok(true);
    }
    transaction::resume(&*target.plain()?)?;
    journal.clear()?;
    Ok(false)
}

/// Holds the image, and says what is to be loaded from it: what was ordered, or something newer of the same layout.
fn take(job: &Job, dirty: bool, stop: &Stop) -> Result<(ImageView, Order), EngineError> {
    let region = Region::open(&job.image)?;
    if region.manifest().layout_hash() != job.layout_hash {
        let why = "the image has another layout than the one that was compared with the engine".into();
        return Err(transaction::stale(&job.target.engine, why));
    }
    let view = ImageView::take(&region, job.lease() + job.timeout() + GRACE, stop)?;
    let wanted = Label { incarnation: Incarnation(job.incarnation), version: job.version };
    if Label::from(view.known()) < wanted {
        let why = format!("the image holds {}, which is older than {wanted}", view.known().identity);
        return Err(transaction::stale(&job.target.engine, why));
    }
    if job.exact && Label::from(view.known()) > wanted {
        let why = format!("the image holds {}, and only {wanted} may be loaded", view.known().identity);
        return Err(transaction::stale(&job.target.engine, why));
    }
    let how = if dirty { How::Dense } else { job.how };
    let reports = match job.target.routes {
        Routes::Vllm | Routes::SglangWorkers(_) => Some(reports(&job.target.dir)),
        Routes::Sglang => None,
    };
    let order = Order::new(&job.image, view.known(), how, reports, job.timeout);
    Ok((view, order))
}
