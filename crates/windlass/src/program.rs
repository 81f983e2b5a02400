//! How this program is started again, for the processes that it needs.
//!
//! The command is its own executable. Inside another program, such as a Python interpreter, the executable is that
//! one's; whoever embeds the crate says once how the command is reached there.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use crate::error::Error;

static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

/// Says how the command is started: the program and its first arguments. The first call counts.
pub fn set(words: impl IntoIterator<Item = impl Into<OsString>>) {
    let _ = WORDS.set(words.into_iter().map(Into::into).collect());
}

/// The command, without arguments.
pub fn command() -> Result<Command, Error> {
    if let Some((program, arguments)) = WORDS.get().and_then(|w| w.split_first()) {
        let mut command = Command::new(program);
        command.args(arguments);
        return Ok(command);
    }
    Ok(Command::new(std::env::current_exe().map_err(Error::io("find", Path::new("this program")))?))
}
