//! Keeps one agent running for a region, exactly as long as this process runs.
//!
//! Owns: the agent's process, the pipe that tells it that this process runs, its log, and the watcher thread.
//! Called by the publisher: a trainer's first rank on a host, in Rust or through Python. Must not: touch the
//! region (the agent does), use a parent-death signal (it is sent when the *thread* that started the child ends), or
//! leave a thread, a process or a descriptor behind.
//!
//! # The pipe
//!
//! The agent's standard input is a pipe whose writing end this process alone holds. Nothing is ever written to it:
//! when the last holder of that end exits, for any reason, the agent reads end of file and exits.
//! A child of `fork` inherits the end and would keep the agent alive; it calls [`Supervisor::close_in_child`] first
//! thing (programs that are started by `exec` never see it). One pipe serves all agents of one supervisor.
//!
//! # Restarts
//!
//! ```text
//! start ── says `listening` ──► found by `address`
//!   │ dies, or is killed: not listening in time, or stopped (SIGSTOP) for too long
//!   ▼
//! pause of 50 ms, twice as long after each failure in a row up to 5 s ──► start
//! ```
//!
//! A restarted agent tries the ports of its predecessor first, because receivers know them, and then those it was
//! told. It finds everything else in the region. The supervisor retries an agent that cannot start: ports become
//! free, predecessors exit. [`Supervisor::address`] reports its last error.
//!
//! The agent runs in a process group of its own, so that Ctrl-C in a terminal reaches the trainer alone, which may
//! want to publish and clean up; in the directory and with the environment that this process had at
//! [`Supervisor::start`], so that restarts do not depend on what was changed since.
//!
//! # The log
//!
//! The agent's standard error is appended to a file of at most [`MAX_LOG`] bytes, which is not in the
//! region's directory: that belongs to the region and is emptied with it.
//!
//! # Invariants and their tests (`tests/supervise.rs`; names with `test_` are in `tests/python/test_supervise.py`)
//!
//! - SUPERVISE-1 No agent outlives its supervisor, however that ends: `a_killed_supervisor_leaves_no_agent`,
//!   `test_a_killed_trainer_leaves_no_agent_even_if_its_forked_child_lives_on`, `a_stopped_supervisor_leaves_nothing`,
//!   `an_agent_that_does_not_end_by_itself_is_ended`.
//! - SUPERVISE-2 A killed agent comes back where it was, or else in its range:
//!   `a_killed_agent_comes_back_on_its_ports_and_receivers_go_on`,
//!   `an_agent_whose_ports_were_taken_meanwhile_finds_others_of_its_range`.
//! - SUPERVISE-3 An agent that is stopped is replaced, and publishing goes on meanwhile:
//!   `a_stopped_agent_is_replaced_and_publishing_goes_on`,
//!   `a_killed_agent_does_not_hold_up_its_trainer_and_neither_does_a_stopped_one`.
//! - SUPERVISE-4 The supervisor reports why an agent cannot start, and retries:
//!   `an_agent_that_cannot_start_says_why_and_is_tried_again`.

mod error;
mod log;
mod watch;

use std::env;
use std::ffi::OsString;
use std::io::{PipeReader, PipeWriter};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::EventfdFlags;
use serde::Serialize;
use windlass_core::error::Kind;
use windlass_data::stop::{Stop, Stopped};

pub use self::error::SuperviseError;
pub use self::log::MAX_LOG;

use self::log::Log;
use crate::service::agent_address::AgentAddress;

/// How often an agent may refuse in a row, for the same reason that lies in what it was asked, before that is said
/// without waiting for the deadline.
const REFUSALS: u32 = 5;
/// The same if another process holds a resource, such as a port: the agent of a killed trainer exits soon.
const TAKEN: u32 = 7;

/// What to keep running.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The region to serve.
    pub region: PathBuf,
    /// The command: a program and its first arguments; this program itself if empty (see [`crate::service::program`]).
    pub program: Vec<OsString>,
    /// Further arguments of `windlass agent`.
    pub options: Vec<OsString>,
    /// Changes of the environment: a value, or none to leave the variable out.
    pub environment: Vec<(OsString, Option<OsString>)>,
    /// Where its log goes; a file of this process in the directory for temporary files if not given.
    pub log: Option<PathBuf>,
    /// How long an agent may take until it listens. The region may be made meanwhile.
    pub listen_within: Duration,
    /// How long an agent may be stopped (SIGSTOP) before it is replaced.
    pub stalled_after: Duration,
}

impl Spec {
    /// The defaults for a region.
    pub fn new(region: impl Into<PathBuf>) -> Spec {
        Spec {
            region: region.into(),
            program: Vec::new(),
            options: Vec::new(),
            environment: Vec::new(),
            log: None,
            // An agent waits a minute for its region.
            listen_within: Duration::from_secs(90),
            stalled_after: Duration::from_secs(10),
        }
    }
}

/// How the agent is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Whether there is a process.
    pub running: bool,
    pub pid: Option<u32>,
    /// Where it listens, once it does.
    pub address: Option<AgentAddress>,
    /// How often it was started again.
    pub restarts: u64,
    /// What the last one that failed said, or how it ended.
    pub last_error: Option<String>,
    /// Where its log is.
    pub log: PathBuf,
}

/// What the thread tells.
#[derive(Debug, Default)]
struct State {
    status: Status,
    /// The kind of the last failure, where the agent named one.
    kind: Option<Kind>,
    /// How often in a row the agent refused for the same reason.
    refusals: u32,
    /// There once the agent is told to end; set when it must be hurried.
    end: Option<Stop>,
    /// The thread is over.
    ended: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Takes the thread out of its wait.
    wake: OwnedFd,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }
}

/// One agent, kept running. Dropping it ends the agent.
#[derive(Debug)]
pub struct Supervisor {
    shared: Arc<Shared>,
    /// The process that it belongs to.
    home: u32,
    region: PathBuf,
    /// The end of the pipe that only we hold. The watching thread never takes this lock.
    pipe: Mutex<Option<PipeWriter>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Default grace period for an agent to exit by itself.
const END_WITHIN: Duration = Duration::from_secs(5);

impl Supervisor {
    /// Starts to keep an agent running, and returns at once.
    pub fn start(spec: Spec) -> Result<Supervisor, SuperviseError> {
        let setup = |what| move |source| SuperviseError::Setup { what, source };
        let region = std::path::absolute(&spec.region).map_err(setup("the path of the region"))?;
        let (reader, writer) = std::io::pipe().map_err(setup("a pipe"))?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| setup("a descriptor")(e.into()))?;
        let log = Log::open(spec.log.as_deref(), &region)?;
        let status = Status { log: log.path().to_owned(), ..Status::default() };
        let state = Mutex::new(State { status, ..State::default() });
        let shared = Arc::new(Shared { state, changed: Condvar::new(), wake });
        let agent = Launch::new(spec, region.clone(), reader)?;
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("windlass-supervisor".into())
            .spawn(move || watch::Watch::new(theirs, agent, log).run())
            .map_err(setup("a thread"))?;
        let (pipe, thread) = (Mutex::new(Some(writer)), Mutex::new(Some(thread)));
        Ok(Supervisor { shared, home: std::process::id(), region, pipe, thread })
    }

    /// Where the agent listens, as soon as one does.
    pub fn address(&self, stop: &Stop) -> Result<AgentAddress, SuperviseError> {
        self.check_home()?;
        let begun = Instant::now();
        let mut state = self.shared.state();
        loop {
            if let Some(here) = &state.status.address {
                return Ok(here.clone());
            }
            if state.ended {
                return Err(SuperviseError::Ended { region: self.region.clone() });
            }
            let (region, said) = (self.region.clone(), state.status.last_error.clone());
            if let (Some(said), Some(kind)) = (&said, state.kind)
                && state.refusals >= if kind == Kind::Exhausted { TAKEN } else { REFUSALS }
            {
                return Err(SuperviseError::Refuses { region, said: said.clone(), kind });
            }
            match stop.check() {
                Ok(()) => {}
                Err(Stopped::Cancelled) => return Err(SuperviseError::Cancelled { region }),
                Err(Stopped::Deadline) => {
                    let (kind, log) = (state.kind, state.status.log.clone());
                    let (after, starts) = (begun.elapsed(), state.status.restarts + 1);
                    return Err(SuperviseError::NotListening { region, after, starts, said, log, kind });
                }
            }
            self.shared.changed.wait_for(&mut state, stop.nap());
        }
    }

    /// How the agent is.
    pub fn status(&self) -> Result<Status, SuperviseError> {
        self.check_home()?;
        Ok(self.shared.state().status.clone())
    }

    /// Ends the agent: by the end of its input, after `grace` or when `stop` is set by SIGTERM, a little later by
    /// SIGKILL. Returns when it is gone and so is the thread. Again is nothing.
    pub fn stop(&self, grace: Duration, stop: &Stop) -> Result<(), SuperviseError> {
        self.check_home()?;
        self.end(grace, stop);
        Ok(())
    }

    fn end(&self, grace: Duration, stop: &Stop) {
        let hurry = stop.with_timeout(grace);
        self.shared.change(|state| {
            state.end.get_or_insert_with(Stop::never);
        });
        *self.pipe.lock() = None;
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        let mut state = self.shared.state();
        while !state.ended {
            if let Some(end) = state.end.as_ref().filter(|_| hurry.is_set()) {
                end.set();
            }
            let nap = hurry.nap().max(Duration::from_millis(5));
            self.shared.changed.wait_for(&mut state, nap);
        }
        drop(state);
        let thread = self.thread.lock().take();
        if thread.is_some_and(|t| t.join().is_err()) {
            tracing::error!("the watcher thread of the agent panicked");
        }
    }

    /// The descriptor whose last copy keeps the agent alive; `None` after [`Supervisor::stop`].
    pub fn pipe_fd(&self) -> Option<RawFd> {
        self.pipe.lock().as_ref().map(AsRawFd::as_raw_fd)
    }

    /// In a child of `fork`: closes the child's copy of the pipe. In the process that made the supervisor: nothing.
    pub fn close_in_child(&self) {
        if self.home != std::process::id()
            // Held at the moment of the fork, it is held for ever; and then it was being closed.
            && let Some(mut pipe) = self.pipe.try_lock()
        {
            *pipe = None;
        }
    }

    fn check_home(&self) -> Result<(), SuperviseError> {
        let here = std::process::id();
        if self.home == here { Ok(()) } else { Err(SuperviseError::Forked { home: self.home, here }) }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // A child of fork has a copy of this and neither the thread nor the agent.
        if self.check_home().is_ok() {
            self.end(END_WITHIN, &Stop::never());
        }
    }
}

/// How an agent is started, the same each time.
#[derive(Debug)]
struct Launch {
    words: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    directory: Option<PathBuf>,
    /// The end of the pipe that agents read.
    input: PipeReader,
    region: PathBuf,
    listen_within: Duration,
    stalled_after: Duration,
}

impl Launch {
    fn new(spec: Spec, region: PathBuf, input: PipeReader) -> Result<Launch, SuperviseError> {
        let mut words = spec.program;
        if words.is_empty() {
            words = crate::service::program::words()
                .map_err(|e| SuperviseError::NoProgram { source: Box::new(e) })?;
        }
        words.push("agent".into());
        words.extend(["--region".into(), region.clone().into_os_string()]);
        words.extend(["--with-parent", "--json"].map(OsString::from));
        words.extend(spec.options);
        let mut environment: Vec<(OsString, OsString)> = env::vars_os().collect();
        environment.retain(|(name, _)| name != crate::service::program::CONFIG);
        // The trainer says all that its agent needs.
        environment.push((crate::service::program::CONFIG.into(), crate::service::program::NO_CONFIG.into()));
        for (name, value) in spec.environment {
            environment.retain(|(known, _)| *known != name);
            environment.extend(value.map(|v| (name, v)));
        }
        let directory = env::current_dir().ok();
        let (listen_within, stalled_after) = (spec.listen_within, spec.stalled_after);
        Ok(Launch { words, environment, directory, input, region, listen_within, stalled_after })
    }

    /// Starts one that tries these ports first.
    fn spawn(&self, log: &Log, again: Option<(u16, u16)>) -> std::io::Result<std::process::Child> {
        use std::os::unix::process::CommandExt as _;
        let (program, arguments) = self.words.split_first().ok_or(std::io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some((port, data_port)) = again {
            command.args(["--again".into(), format!("{port},{data_port}")]);
        }
        if let Some(directory) = self.directory.as_ref().filter(|d| d.is_dir()) {
            command.current_dir(directory);
        }
        command
            .env_clear()
            .envs(self.environment.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::from(self.input.try_clone()?))
            .stdout(Stdio::piped())
            .stderr(Stdio::from(log.file()?))
            .process_group(0)
            .spawn()
    }
}
