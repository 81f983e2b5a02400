//! Which packages the interpreter has that will run the scripts.
//!
//! Owns: the choice of the interpreter, and one question to it (`find.py`) with a deadline. `windlass demo --engine` asks it too.
//! Must not: import a package.

use std::io::{self, Read};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Map, Value};
use windlass_data::stop::{Stop, Stopped};

use super::InitError;
use crate::error::Error;
use crate::service::program;

/// The program that looks for packages.
const FIND: &str = include_str!("find.py");
/// The most that is read of its output.
const MOST: u64 = 64 << 10;
/// How often it is looked whether the interpreter has ended.
const GLANCE: Duration = Duration::from_millis(10);
/// How long the output of an interpreter that has ended may still be on its way.
const REST: Duration = Duration::from_secs(1);

/// The interpreter that will run the scripts.
#[derive(Debug)]
pub(crate) struct Interpreter {
    pub(crate) path: PathBuf,
    /// How a command line names it.
    pub(super) word: String,
    /// Whether `python3` in a script is another one, as far as is known.
    pub(super) elsewhere: bool,
    /// Whether it was asked for, rather than looked for on the path.
    asked: bool,
}

impl Interpreter {
    /// The one that was named, else the one that runs this command, else that of the active environment, else `python3`.
    pub(crate) fn choose(named: Option<&Path>) -> Interpreter {
        let environment = std::env::var_os("VIRTUAL_ENV").filter(|dir| !dir.is_empty());
        let active = environment.map(|dir| Path::new(&dir).join("bin").join("python"));
        if let Some(path) = named.map(Path::to_owned).or_else(program::interpreter) {
            let elsewhere = active.as_ref() != Some(&path) && path != Path::new("python3");
            // The scripts run in a directory of their own. A bare name is looked for on the path.
            let bare = path.components().count() == 1;
            let path = if bare { path } else { std::path::absolute(&path).unwrap_or(path) };
            let word = if elsewhere { quoted(&path) } else { "python3".into() };
            return Interpreter { path, word, elsewhere, asked: true };
        }
        let (path, asked) = active.map_or((PathBuf::from("python3"), false), |path| (path, true));
        Interpreter { path, word: "python3".into(), elsewhere: false, asked }
    }

    /// The packages of `names` that it has, with their versions, or null for a version that is not known. None if there is no
    /// interpreter, and none was asked for.
    pub(crate) fn packages(
        &self,
        names: &[&str],
        timeout: Duration,
        cancel: &Stop,
    ) -> Result<Option<Map<String, Value>>, Error> {
        let mut command = Command::new(&self.path);
        command.args(["-c", FIND]).args(names);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A wrapper may start the interpreter as a child of its own: a deadline ends both.
        command.process_group(0);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !self.asked => return Ok(None),
            Err(source) => return Err(InitError::Start { python: self.path.clone(), source }.into()),
        };
        let (out, err) = (gather(child.stdout.take()), gather(child.stderr.take()));
        let status = match wait(&mut child, &cancel.with_timeout(timeout)) {
            Ok(status) => status.map_err(Error::io("run", &self.path))?,
            Err(Stopped::Cancelled) => return Err(Error::Cancelled),
            Err(Stopped::Deadline) => {
                return Err(InitError::Silent { python: self.path.clone(), timeout }.into());
            }
        };
        let said = |heard: Receiver<Vec<u8>>| heard.recv_timeout(REST).unwrap_or_default();
        let (out, err) = (said(out), said(err));
        if !status.success() {
            let err = String::from_utf8_lossy(&err).into_owned();
            let last = err.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            let said = last.trim().to_owned();
            return Err(InitError::Failed { python: self.path.clone(), status, said }.into());
        }
        let out = String::from_utf8_lossy(&out).into_owned();
        // What a start-up file of the interpreter prints comes before it.
        let answer = serde_json::from_str(out.lines().last().unwrap_or_default());
        answer.map(Some).map_err(|_| InitError::Answer { python: self.path.clone() }.into())
    }
}

/// Reads a pipe to its end, on a thread: the process may close it late or never.
fn gather(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (tell, heard) = mpsc::channel();
    let read = move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            // What was read before a failure is all there is to say.
            let _ = pipe.take(MOST).read_to_end(&mut bytes);
        }
        let _ = tell.send(bytes);
    };
    // Without a thread the output counts as empty, which is reported.
    let _ = std::thread::Builder::new().name("windlass-init".into()).spawn(read);
    heard
}

/// Waits for a process; ends it with its children when the deadline has passed or the command is interrupted.
fn wait(child: &mut Child, stop: &Stop) -> Result<io::Result<ExitStatus>, Stopped> {
    loop {
        match child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => return Ok(Ok(status)),
            Err(e) => return Ok(Err(e)),
        }
        if let Err(stopped) = stop.check() {
            if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                // It has not been waited for, so the number is still its own.
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = child.wait();
            return Err(stopped);
        }
        std::thread::sleep(stop.nap().min(GLANCE));
    }
}

/// A path as a word of a shell.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%,=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_words_of_a_shell() {
        for (path, word) in
            [("/a/b-1.2", "/a/b-1.2"), ("a b", "'a b'"), ("it's", r"'it'\''s'"), ("$x", "'$x'")]
        {
            assert_eq!(quoted(Path::new(path)), word);
        }
    }
}
