//! A process of the demo.
//!
//! Owns: the child process and a thread that reads its output. Dropping a [`Child`] ends and reaps the process, so that
//! none outlives the demo. Every wait has a timeout and ends on Ctrl-C.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use windlass_core::error::Kind;
use windlass_data::stop::{Stop, Stopped};

use crate::error::Error;
use crate::service::program;

/// How many lines of the log of another program an error shows.
const TAIL: usize = 20;
/// How many characters of a line.
const WIDE: usize = 400;
/// How often it is looked whether a process has ended.
const GLANCE: Duration = Duration::from_millis(20);

/// A running process that writes lines of JSON.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) name: String,
    process: std::process::Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Value>,
    log: PathBuf,
    /// How many lines of its log an error shows.
    tail: usize,
    /// How long it may take to end by itself once its standard input is closed.
    grace: Duration,
    /// Whether it leads a process group.
    leads: bool,
}

impl Child {
    /// Starts this program with other arguments. It is killed in the end.
    pub(super) fn start<S: AsRef<OsStr>>(
        name: &str,
        logs: &Path,
        args: impl IntoIterator<Item = S>,
    ) -> Result<Child, Error> {
        let mut command = program::command()?;
        command.args(args).arg("--json");
        let mut child = Child::spawn(name, logs, command)?;
        child.tail = 1;
        Ok(child)
    }

    /// Starts another program in a process group of its own, which Ctrl-C does not reach. It may take `grace` to end after its
    /// standard input is closed; then the group is killed.
    pub(super) fn group(
        name: &str,
        logs: &Path,
        mut command: Command,
        grace: Duration,
    ) -> Result<Child, Error> {
        command.process_group(0);
        let mut child = Child::spawn(name, logs, command)?.with_grace(grace);
        child.leads = true;
        Ok(child)
    }

    /// Its standard error goes to a file in `logs`.
    fn spawn(name: &str, logs: &Path, mut command: Command) -> Result<Child, Error> {
        let log = logs.join(format!("{name}.log"));
        let errors =
            File::options().create(true).append(true).open(&log).map_err(Error::io("write", &log))?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut process = command.spawn().map_err(Error::io("start", Path::new(command.get_program())))?;
        let (tell, lines) = channel();
        if let Some(out) = process.stdout.take() {
            // Ends with the process, whose end of the pipe it reads.
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
                    if tell.send(value).is_err() {
                        break;
                    }
                }
            });
        }
        let stdin = process.stdin.take();
        let (name, grace) = (name.to_owned(), Duration::ZERO);
        Ok(Child { name, process, stdin, lines, log, tail: TAIL, grace, leads: false })
    }

    /// Lets it end by itself when the demo ends.
    pub(super) fn with_grace(mut self, grace: Duration) -> Child {
        self.grace = grace;
        self
    }

    /// An error with the end of its log.
    pub(super) fn failed(&self, kind: Kind, what: impl Into<String>) -> Error {
        let mut what = what.into();
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let told = log.lines().rev().filter(|line| !line.trim().is_empty());
        let mut tail: Vec<String> =
            told.take(self.tail).map(|line| line.chars().take(WIDE).collect()).collect();
        tail.reverse();
        match tail.as_slice() {
            [] => {}
            [last] => what = format!("{what} (last log line: {last})"),
            lines => what = format!("{what}; the end of its log:\n  {}", lines.join("\n  ")),
        }
        Error::Child { who: self.name.clone(), what, kind }
    }

    /// Sends it a line.
    pub(super) fn say(&mut self, line: &str) -> Result<(), Error> {
        let said = self.stdin.as_mut().map(|s| writeln!(s, "{line}").and_then(|()| s.flush()));
        match said {
            Some(Ok(())) => Ok(()),
            Some(Err(e)) => Err(self.failed(Kind::PeerLost, format!("is gone: {e}"))),
            None => Err(self.failed(Kind::Bug, "has no standard input")),
        }
    }

    /// Waits for a line that `wanted` accepts. A line with an error ends the wait.
    pub(super) fn expect<T>(
        &mut self,
        what: &str,
        stop: &Stop,
        mut wanted: impl FnMut(&Value) -> Option<T>,
    ) -> Result<T, Error> {
        loop {
            match stop.check() {
                Ok(()) => {}
                Err(Stopped::Cancelled) => return Err(Error::Cancelled),
                Err(Stopped::Deadline) => {
                    return Err(self.failed(Kind::Timeout, format!("did not {what} in time")));
                }
            }
            let line = match self.lines.recv_timeout(stop.nap()) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => {
                    let end = self.process.try_wait().ok().flatten();
                    let how = end.map_or("ended".to_owned(), |status| format!("ended with {status}"));
                    return Err(self.failed(Kind::PeerLost, format!("{how} before it could {what}")));
                }
            };
            if let Some(message) = line.pointer("/error/message").and_then(Value::as_str) {
                let kind = line.pointer("/error/kind").and_then(|k| serde_json::from_value(k.clone()).ok());
                return Err(self.failed(kind.unwrap_or(Kind::Bug), message));
            }
            if let Some(value) = wanted(&line) {
                return Ok(value);
            }
        }
    }

    /// Fails if the process has ended by itself.
    pub(super) fn check(&mut self) -> Result<(), Error> {
        match self.process.try_wait() {
            Ok(Some(status)) => Err(self.failed(Kind::PeerLost, format!("ended with {status}"))),
            Ok(None) => Ok(()),
            Err(e) => Err(self.failed(Kind::Bug, format!("cannot be checked: {e}"))),
        }
    }

    /// Closes its standard input, waits for as long as it may take, and sends SIGKILL to what is left.
    fn end(&mut self) {
        drop(self.stdin.take());
        let until = Instant::now() + self.grace;
        while Instant::now() < until && matches!(self.process.try_wait(), Ok(None)) {
            std::thread::sleep(GLANCE);
        }
        if let Some(group) =
            i32::try_from(self.process.id()).ok().and_then(Pid::from_raw).filter(|_| self.leads)
        {
            // The number belongs to the group as long as one of its processes lives.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.end();
    }
}
