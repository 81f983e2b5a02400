//! A process of the demo.
//!
//! Owns: the child process and a thread that reads its output. Dropping a [`Child`] kills and reaps the process, so that
//! none outlives the demo. Every wait has a timeout and ends on Ctrl-C.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use serde_json::Value;
use windlass_core::error::Kind;
use windlass_data::stop::{Stop, Stopped};

use crate::error::Error;
use crate::service::program;

/// A running process that writes lines of JSON.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) name: String,
    process: std::process::Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Value>,
    log: PathBuf,
}

impl Child {
    /// Starts this program with other arguments. Its standard error goes to a file in `logs`.
    pub(super) fn start<S: AsRef<OsStr>>(
        name: &str,
        logs: &Path,
        args: impl IntoIterator<Item = S>,
    ) -> Result<Child, Error> {
        let log = logs.join(format!("{name}.log"));
        let errors =
            File::options().create(true).append(true).open(&log).map_err(Error::io("write", &log))?;
        let mut process = program::command()?
            .args(args)
            .arg("--json")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .map_err(Error::io("start", Path::new("this program again")))?;
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
        Ok(Child { name: name.to_owned(), process, stdin, lines, log })
    }

    fn failed(&self, kind: Kind, what: impl Into<String>) -> Error {
        let mut what = what.into();
        if let Ok(log) = std::fs::read_to_string(&self.log)
            && let Some(last) = log.lines().rfind(|l| !l.trim().is_empty())
        {
            what = format!("{what} (last log line: {last})");
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

    /// Sends SIGKILL.
    pub(super) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}
