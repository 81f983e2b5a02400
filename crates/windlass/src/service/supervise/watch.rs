//! The thread that watches an agent.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdout, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use windlass_core::error::Kind;
use windlass_data::file::io_kind;
use windlass_data::stop::Stop;

use super::log::Log;
use super::{Launch, Shared};
use crate::service::agent_address::AgentAddress;

/// Between two looks at an agent that is quiet.
const LOOK: Duration = Duration::from_millis(500);

/// Between two looks at one that is about to end.
const SOON: Duration = Duration::from_millis(10);

/// An agent that has listened for this long was a good one: the next pause is short again.
const GOOD: Duration = Duration::from_secs(10);

/// The pause after the first failure.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How long one that was told to end by a signal may take, and how long a killed one may.
const SIGNALLED: Duration = Duration::from_millis(500);

/// The longest line that is read. Ours are short; whatever is longer is not ours.
const MAX_LINE: usize = 1 << 20;

/// Everything that the thread has.
pub(super) struct Watch {
    shared: Arc<Shared>,
    launch: Launch,
    log: Log,
    /// The ports of the last agent that listened.
    again: Option<(u16, u16)>,
    failures: u32,
}

/// How one agent ended.
struct End {
    how: String,
    /// The error that it printed.
    error: Option<(Kind, String)>,
    listened: Option<Instant>,
}

impl Watch {
    pub(super) fn new(shared: Arc<Shared>, launch: Launch, log: Log) -> Watch {
        Watch { shared, launch, log, again: None, failures: 0 }
    }

    /// Until the supervisor ends it.
    pub(super) fn run(mut self) {
        let mut first = true;
        while self.end().is_none() {
            if !std::mem::replace(&mut first, false) {
                self.shared.change(|state| state.status.restarts += 1);
            }
            let end = self.one();
            if self.end().is_some() {
                break;
            }
            self.failed(end);
            self.pause();
        }
    }

    /// There if the supervisor ends.
    fn end(&self) -> Option<Stop> {
        self.shared.state().end.clone()
    }

    /// Starts an agent and returns when it is gone.
    fn one(&mut self) -> End {
        self.log.bound();
        self.log.mark();
        let mut child = match self.launch.spawn(&self.log, self.again) {
            Ok(child) => child,
            Err(e) => {
                let program = self.launch.words.first().map(|w| w.display().to_string()).unwrap_or_default();
                let how = format!("cannot start {program}: {e}");
                return End { error: Some((io_kind(&e), how.clone())), how, listened: None };
            }
        };
        let pid = child.id();
        self.shared.change(|state| {
            state.status.running = true;
            state.status.pid = Some(pid);
        });
        let lines = child.stdout.take().and_then(|out| Lines::new(out).ok());
        let mut agent = Running { child, lines, listened: None, error: None, started: Instant::now() };
        let how = self.follow(&mut agent);
        self.shared.change(|state| {
            state.status.running = false;
            (state.status.pid, state.status.address) = (None, None);
        });
        End { how, error: agent.error.take(), listened: agent.listened }
    }

    /// Watches an agent until it is gone. It is always gone on return, unless not even SIGKILL ends it.
    fn follow(&mut self, agent: &mut Running) -> String {
        let mut stopped_since = None;
        loop {
            if let Some(hurry) = self.end() {
                return agent.end(&hurry);
            }
            agent.wait(&self.shared, if agent.lines.is_some() { LOOK } else { SOON });
            while let Some(line) = agent.next_line() {
                self.heard(agent, &line);
            }
            match agent.child.try_wait() {
                Ok(Some(status)) => {
                    // What it said last may have come after the last look.
                    while let Some(line) = agent.next_line() {
                        self.heard(agent, &line);
                    }
                    return ended(status);
                }
                Ok(None) => {}
                Err(e) => return format!("cannot be waited for: {e}"),
            }
            self.log.bound();
            if agent.listened.is_none() && agent.started.elapsed() > self.launch.listen_within {
                agent.kill();
                return format!("did not listen within {:?} and was killed", self.launch.listen_within);
            }
            if !is_stopped(agent.child.id()) {
                stopped_since = None;
            } else if stopped_since.get_or_insert_with(Instant::now).elapsed() >= self.launch.stalled_after {
                agent.kill();
                return format!("was stopped for {:?} and was killed", self.launch.stalled_after);
            }
        }
    }

    /// A line of the agent.
    fn heard(&mut self, agent: &mut Running, line: &str) {
        let Ok(value) = serde_json::from_str::<Value>(line) else { return };
        if let Some(message) = value.pointer("/error/message").and_then(Value::as_str) {
            let kind = value.pointer("/error/kind").and_then(|k| serde_json::from_value(k.clone()).ok());
            agent.error = Some((kind.unwrap_or(Kind::Bug), message.to_owned()));
        } else if value["event"] == "listening"
            && let Some(here) = address(&value, agent.child.id())
        {
            agent.listened = Some(Instant::now());
            self.again = port(&here.endpoint).map(|port| (port, here.data_port));
            tracing::info!(endpoint = %here.endpoint, pid = here.pid, "the agent is listening");
            self.shared.change(|state| state.status.address = Some(here));
        }
    }

    /// Notes a failure.
    fn failed(&mut self, end: End) {
        let good = end.listened.is_some_and(|since| since.elapsed() >= GOOD);
        self.failures = if good { 1 } else { self.failures.saturating_add(1) };
        let said = match (&end.error, self.log.said()) {
            (Some((_, message)), _) => Some(message.clone()),
            (None, said) => said,
        };
        let what = match said {
            Some(said) if said != end.how => format!("{} ({said})", end.how),
            Some(_) | None => end.how,
        };
        let region = self.launch.region.display();
        let kind = end.error.map(|(kind, _)| kind);
        self.shared.change(|state| {
            let same = state.status.last_error.as_ref() == Some(&what);
            // The same again and again is said once.
            if same {
                tracing::debug!(%region, "the agent {what}; restarting it");
            } else {
                tracing::warn!(%region, "the agent {what}; restarting it until it listens");
            }
            // The arguments are wrong, or another process holds the resource.
            let refused = matches!(kind, Some(Kind::Invalid | Kind::Exhausted));
            state.refusals = if refused { 1 + if same { state.refusals } else { 0 } } else { 0 };
            state.kind = kind;
            state.status.last_error = Some(what);
        });
    }

    /// Waits before the next start.
    fn pause(&self) {
        let doubled = FIRST_PAUSE.saturating_mul(1 << self.failures.saturating_sub(1).min(10));
        let until = Instant::now() + doubled.min(LONGEST_PAUSE);
        while let Some(left) = until.checked_duration_since(Instant::now())
            && self.end().is_none()
        {
            wait_readable(&self.shared, None, left);
        }
    }
}

/// Wakes all waiters, even after a panic.
impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.change(|state| {
            state.ended = true;
            state.status.running = false;
            (state.status.pid, state.status.address) = (None, None);
        });
    }
}

/// A process and what it said.
struct Running {
    child: Child,
    /// `None` once it has closed its standard output.
    lines: Option<Lines>,
    started: Instant,
    listened: Option<Instant>,
    error: Option<(Kind, String)>,
}

impl Running {
    fn wait(&self, shared: &Shared, most: Duration) {
        wait_readable(shared, self.lines.as_ref().map(|l| &l.out), most);
    }

    fn next_line(&mut self) -> Option<String> {
        match self.lines.as_mut()?.next() {
            Ok(line) => line,
            // The end, or something that is no agent of ours.
            Err(_) => {
                self.lines = None;
                None
            }
        }
    }

    /// Its input has ended. Waits until it has to be hurried.
    fn end(&mut self, hurry: &Stop) -> String {
        if let Some(how) = self.gone(hurry) {
            return how;
        }
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        if let Some(how) = self.gone(&Stop::after(SIGNALLED)) {
            return how;
        }
        self.kill();
        "was killed".into()
    }

    /// How it ended, if it does before `stop`.
    fn gone(&mut self, stop: &Stop) -> Option<String> {
        loop {
            // The lines are not needed any more, but a full pipe would block the agent.
            while self.next_line().is_some() {}
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(ended(status)),
                Ok(None) if !stop.is_set() => std::thread::sleep(SOON),
                Ok(None) | Err(_) => return None,
            }
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        // A process that hangs in the kernel dies when that lets it go; it is not waited for.
        if self.gone(&Stop::after(SIGNALLED * 4)).is_none() {
            tracing::error!(pid = self.child.id(), "a killed agent is still running");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Only after a panic is it still there.
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            self.kill();
        }
    }
}

/// Waits until there is something to read, or the supervisor wants something.
fn wait_readable(shared: &Shared, out: Option<&ChildStdout>, most: Duration) {
    let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN)];
    fds.extend(out.map(|out| PollFd::from_borrowed_fd(out.as_fd(), PollFlags::IN)));
    let timeout = Timespec { tv_sec: most.as_secs().cast_signed(), tv_nsec: most.subsec_nanos().into() };
    // Whatever it says: all there is is looked at afterwards.
    let _ = poll(&mut fds, Some(&timeout));
}

/// Lines from a pipe that never blocks.
struct Lines {
    out: ChildStdout,
    bytes: Vec<u8>,
}

impl Lines {
    fn new(out: ChildStdout) -> io::Result<Lines> {
        let flags = rustix::fs::fcntl_getfl(&out)?;
        rustix::fs::fcntl_setfl(&out, flags | OFlags::NONBLOCK)?;
        Ok(Lines { out, bytes: Vec::new() })
    }

    /// The next line, if all of it is there; an error at the end.
    fn next(&mut self) -> io::Result<Option<String>> {
        use std::io::Read as _;
        loop {
            if let Some(end) = self.bytes.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.bytes.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            if self.bytes.len() > MAX_LINE {
                return Err(ErrorKind::InvalidData.into());
            }
            let mut buffer = [0; 4096];
            match self.out.read(&mut buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.bytes.extend_from_slice(buffer.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

fn ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, code) => format!("ended with exit code {}", code.unwrap_or(-1)),
    }
}

/// Whether a process is stopped by a signal (not by a debugger, whose user knows what to do).
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

fn address(value: &Value, pid: u32) -> Option<AgentAddress> {
    Some(AgentAddress {
        endpoint: value["endpoint"].as_str()?.to_owned(),
        data_port: u16::try_from(value["data_port"].as_u64()?).ok()?,
        token_file: value["token_file"].as_str().map(Into::into),
        pid,
    })
}

fn port(endpoint: &str) -> Option<u16> {
    endpoint.rsplit_once(':')?.1.trim_end_matches('/').parse().ok()
}
