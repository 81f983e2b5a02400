//! How this program is started again, for the processes that it needs.
//!
//! The command is its own executable. Inside another program, such as a Python interpreter, the executable is that
//! one's; a program that embeds the crate sets once how to start the command.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::error::Error;

/// The variable that names the configuration file.
pub const CONFIG: &str = "WINDLASS_CONFIG";
/// Its value where neither a file nor the environment is read.
pub const NO_CONFIG: &str = "none";

/// Variables to set, or to leave out where there is no value.
pub type Environment = Vec<(OsString, Option<OsString>)>;

static WORDS: OnceLock<(Vec<OsString>, Environment)> = OnceLock::new();

/// Says how the command is started: the program, its first arguments and its environment. The first call counts.
pub fn set(words: impl IntoIterator<Item = impl Into<OsString>>, environment: Environment) {
    let _ = WORDS.set((words.into_iter().map(Into::into).collect(), environment));
}

/// How the command is started.
pub fn words() -> Result<Vec<OsString>, Error> {
    if let Some((words, _)) = WORDS.get().filter(|(words, _)| !words.is_empty()) {
        return Ok(words.clone());
    }
    let own = std::env::current_exe().map_err(Error::io("find", Path::new("this program")))?;
    Ok(vec![own.into_os_string()])
}

/// The Python interpreter that runs the command, if it is `python -m windlass` or the script of the package.
pub fn interpreter() -> Option<PathBuf> {
    match WORDS.get()?.0.as_slice() {
        [python, module, ..] if module == "-m" && !python.is_empty() => Some(python.into()),
        _ => None,
    }
}

/// The command, without arguments.
pub fn command() -> Result<Command, Error> {
    let mut words = words()?.into_iter();
    let mut command = Command::new(words.next().unwrap_or_default());
    // It gets all it needs as arguments; a file or a variable that is meant for others must not change it.
    command.args(words).env(CONFIG, NO_CONFIG);
    for (name, value) in WORDS.get().map(|(_, environment)| environment.as_slice()).unwrap_or_default() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    Ok(command)
}
