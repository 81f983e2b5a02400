//! Values of flags from `windlass.toml` and from the environment.
//!
//! Owns: the location and the contents of the file, the precedence of sources, and `windlass config`, which prints each
//! value with its source. Called by [`crate::cli`] before arguments are parsed. Works on the parser's description of the
//! commands and knows by name only the flag of [`SHARED`], so that every flag of every command can be configured.
//! Must not: interpret a value; the parser does.
//!
//! # The file
//!
//! TOML with one table per command, whose keys are its long flags without the dashes in front:
//!
//! ```toml
//! [receive]
//! streams = 8
//! from = ["http://10.0.0.5:7000", "http://10.0.0.6:7000"]
//! group = true
//!
//! [bench.codec]
//! elements = "64Mi"
//! ```
//!
//! Its path is `--config-file`, else `WINDLASS_CONFIG`, else `windlass.toml` in the current directory if it exists. Every
//! command checks the whole file, including the tables of other commands: an unknown table or key and a wrong value are
//! errors that give the line and the nearest known name.
//!
//! # The environment
//!
//! `WINDLASS_<COMMAND>_<FLAG>` in capitals with underscores, such as `WINDLASS_BENCH_CODEC_ELEMENTS`. Repeatable
//! flags take values separated by spaces, switches `true` or `false`. Commands ignore variables with such a prefix that no
//! flag has, because container platforms set some; `windlass config` lists them.
//!
//! `WINDLASS_CONTROLLER`, which the Python package reads too, is the `--controller` of every command that has one. It is less
//! specific than a value for one command, so it comes after the file.
//!
//! # Precedence
//!
//! The command line, then the environment, then the file, then variables that commands share, then the default. A list comes
//! from one source as a whole. A value that excludes another (such as `--elements` and `--model-bytes`) removes it from
//! all lower sources. Positional arguments, `--json`, `--config-file` and hidden flags come from the command line only.
//!
//! Processes that Windlass starts get everything as arguments: `WINDLASS_CONFIG=none` makes a command read neither the file
//! nor the environment.

mod file;
mod show;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::{fmt, io};

use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use windlass_core::error::Kind;

use crate::error::Error;
use crate::service::program;

pub(super) use self::show::Show;

/// The default file, in the current directory.
const FILE: &str = "windlass.toml";
/// The variable that names another file.
const VARIABLE: &str = program::CONFIG;
/// The flag that has one variable for all commands that have it.
const SHARED: (&str, &str) = ("controller", "WINDLASS_CONTROLLER");
/// What every variable begins with.
const PREFIX: &str = "WINDLASS_";
/// The longest file that is read.
const MOST: u64 = 1 << 20;
/// The long flag that names the file. It and `--json` belong to no command.
const FLAG: &str = "config-file";
/// The command that prints the configuration, and takes part in none itself.
const SHOW: &str = "config";
/// Advice on a value.
const VALUES: &str = "correct the value, or remove it for the default";
/// Advice on the name of a table.
const TABLES: &str =
    "tables are named after commands, such as [receive] or [bench.codec]; see `windlass --help`";

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct ConfigError {
    kind: Kind,
    message: String,
    advice: String,
    source: Option<io::Error>,
}

impl ConfigError {
    fn new(message: String, advice: impl Into<String>) -> ConfigError {
        ConfigError { kind: Kind::Invalid, message, advice: advice.into(), source: None }
    }

    /// A value of a sort that the flag does not take.
    fn sort(at: &Source, key: &str, wanted: &str, found: &str) -> ConfigError {
        ConfigError::new(format!("{at}: {key} must be {wanted}, not {found}"), VALUES)
    }
}

impl From<ConfigError> for Error {
    fn from(e: ConfigError) -> Error {
        Error::of_module(e.kind, e.advice.clone(), e)
    }
}

/// The source of a value.
#[derive(Clone, Debug)]
struct Source {
    /// As `windlass config --json` names it.
    word: &'static str,
    /// The variable, or the line of the file.
    place: Option<String>,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.place.as_deref().unwrap_or(self.word))
    }
}

/// A suggestion of the most similar known name, if one is similar at all, as the end of a sentence.
fn nearest(name: &str, known: impl IntoIterator<Item = String>) -> String {
    let plain = |s: &str| s.to_lowercase().replace('_', "-");
    let name = plain(name);
    let scored = known.into_iter().map(|k| (strsim::osa_distance(&name, &plain(&k)), k));
    let most = (name.chars().count() / 3).max(1);
    let best = scored.min_by_key(|(distance, _)| *distance).filter(|(distance, _)| *distance <= most);
    best.map_or_else(String::new, |(_, name)| format!("; did you mean {name:?}?"))
}

/// A command's directory and environment.
#[derive(Clone, Debug, Default)]
pub(super) struct Surroundings {
    /// Directory of [`FILE`].
    directory: PathBuf,
    environment: Vec<(OsString, OsString)>,
}

impl Surroundings {
    /// Those of this process.
    pub(super) fn here() -> Surroundings {
        let ours = |(name, _): &(OsString, OsString)| name.to_str().is_some_and(|n| n.starts_with(PREFIX));
        Surroundings { directory: PathBuf::new(), environment: std::env::vars_os().filter(ours).collect() }
    }

    fn variable(&self, name: &str) -> Option<&OsStr> {
        self.environment.iter().find(|(known, _)| known == name).map(|(_, value)| &**value)
    }

    /// Whether file and environment are turned off.
    fn off(&self) -> bool {
        self.variable(VARIABLE).is_some_and(|v| v == program::NO_CONFIG)
    }

    /// Whether there is nothing to read, which is the usual case and should cost nothing.
    fn silent(&self, arguments: &[OsString]) -> bool {
        let named = |a: &OsString| {
            a.to_str().is_some_and(|a| a.strip_prefix("--").is_some_and(|a| a.starts_with(FLAG)))
        };
        let nothing = self.environment.is_empty() && !self.directory.join(FILE).exists();
        self.off() || (nothing && !arguments.iter().any(named))
    }

    /// The file to read: what was named, or the usual one if it is there.
    fn file(&self, matches: &ArgMatches) -> Option<PathBuf> {
        if self.off() {
            return None;
        }
        let flag = matches.get_raw("config_file").and_then(|mut v| v.next());
        match flag.or_else(|| self.variable(VARIABLE).filter(|v| !v.is_empty())) {
            Some(path) => Some(self.directory.join(path)),
            None => Some(self.directory.join(FILE)).filter(|p| p.exists()),
        }
    }
}

/// A value from the file or the environment, in the parser's form.
#[derive(Clone, Debug)]
struct Given<'a> {
    /// The command's names, `bench`, `codec`.
    path: Vec<String>,
    arg: &'a Arg,
    /// None for a switch that is off.
    words: Vec<String>,
    source: Source,
}

impl<'a> Given<'a> {
    /// Checks the words with the flag's own parser.
    fn new(
        path: &[String],
        arg: &'a Arg,
        words: Vec<String>,
        source: Source,
    ) -> Result<Given<'a>, ConfigError> {
        let given = Given { path: path.to_vec(), arg, words, source };
        let alone = free(arg.clone()).conflicts_with(Resettable::Reset).group(Resettable::Reset);
        let parser = Command::new("value").no_binary_name(true).arg(alone);
        match parser.try_get_matches_from(given.arguments()) {
            Ok(_) => Ok(given),
            Err(e) => {
                let message = crate::console::one_line(&e.render().to_string());
                Err(ConfigError::new(format!("{}: {message}", given.source), VALUES))
            }
        }
    }

    fn key(&self) -> &'a str {
        self.arg.get_long().unwrap_or_default()
    }

    fn arguments(&self) -> impl Iterator<Item = OsString> {
        let takes_values = self.arg.get_action().takes_values();
        let value = move |w: &String| if takes_values { format!("={w}") } else { String::new() };
        self.words.iter().map(move |w| format!("--{}{}", self.key(), value(w)).into())
    }
}

/// Arguments with the values of file and environment.
#[derive(Debug)]
pub(super) struct Completed {
    pub(super) arguments: Vec<OsString>,
    /// The added values, for the end of a message about conflicting arguments.
    pub(super) note: Option<String>,
}

/// Adds the values of file and environment for flags that are not among the arguments. Returns arguments that do not parse
/// unchanged: the parser will report them.
pub(super) fn complete(
    root: &Command,
    mut arguments: Vec<OsString>,
    around: &Surroundings,
) -> Result<Completed, ConfigError> {
    if around.silent(&arguments) {
        return Ok(Completed { arguments, note: None });
    }
    let lenient = lenient(root.clone());
    let mut note = None;
    if let Ok(matches) = lenient.clone().try_get_matches_from(&arguments)
        && let Some(asked) = Asked::of(&lenient, &matches)
        && asked.path.iter().all(|name| name != SHOW)
        && !asked.command.is_hide_set()
        && let Some(at) = end_of_names(&arguments, &asked.path)
    {
        let given = gather(&lenient, &asked, around)?;
        let added = given.iter().filter(|g| !g.words.is_empty());
        let added: Vec<String> = added.map(|g| format!("--{} from {}", g.key(), g.source)).collect();
        note = (!added.is_empty()).then(|| format!("with {}", added.join(", ")));
        arguments.splice(at..at, given.iter().flat_map(Given::arguments));
    }
    Ok(Completed { arguments, note })
}

/// The command that arguments ask for.
struct Asked<'a> {
    path: Vec<String>,
    command: &'a Command,
    matches: &'a ArgMatches,
}

impl<'a> Asked<'a> {
    fn of(root: &'a Command, matches: &'a ArgMatches) -> Option<Asked<'a>> {
        let mut asked = Asked { path: Vec::new(), command: root, matches };
        while let Some((name, matches)) = asked.matches.subcommand() {
            asked.path.push(name.to_owned());
            asked.command = asked.command.find_subcommand(name)?;
            asked.matches = matches;
        }
        (!asked.path.is_empty()).then_some(asked)
    }

    fn on_command_line(&self, arg: &Arg) -> bool {
        self.matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
    }
}

/// The same parser without required arguments: file and environment may still supply them.
fn lenient(command: Command) -> Command {
    let groups: Vec<String> = command.get_groups().map(|g| g.get_id().to_string()).collect();
    let command = groups.into_iter().fold(command, |c, id| c.mut_group(id, |g| g.required(false)));
    command.disable_help_flag(true).mut_args(free).mut_subcommands(lenient)
}

/// The same flag, needing nothing else.
fn free(arg: Arg) -> Arg {
    arg.required(false).requires(Resettable::Reset).required_unless_present(Resettable::Reset)
}

/// Flags that can be configured.
fn flags(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    command.get_arguments().filter_map(|arg| {
        let own = !arg.is_global_set() && !arg.is_hide_set();
        let long = arg.get_long().filter(|long| own && !["help", "version"].contains(long))?;
        Some((long, arg))
    })
}

fn flag<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    flags(command).find(|(long, _)| *long == key).map(|(_, arg)| arg)
}

/// Commands that can be configured, each with its names.
fn commands(root: &Command) -> Vec<(Vec<String>, &Command)> {
    let mut found = Vec::new();
    for command in
        root.get_subcommands().filter(|c| !c.is_hide_set() && ![SHOW, "help"].contains(&c.get_name()))
    {
        let name = command.get_name().to_owned();
        let below = commands(command);
        if below.is_empty() {
            found.push((vec![name], command));
        } else {
            found.extend(below.into_iter().map(|(path, c)| ([vec![name.clone()], path].concat(), c)));
        }
    }
    found
}

fn variable_of(path: &[String], key: &str) -> String {
    let words: Vec<&str> = path.iter().map(String::as_str).chain([key]).collect();
    format!("{PREFIX}{}", words.join("_").to_uppercase().replace('-', "_"))
}

/// The values for one command from all sources below the command line, without those that a higher source excludes.
fn gather<'a>(
    root: &'a Command,
    asked: &Asked<'a>,
    around: &Surroundings,
) -> Result<Vec<Given<'a>>, ConfigError> {
    if around.off() {
        return Ok(Vec::new());
    }
    let in_file = around.file(asked.matches).map(|f| file::read(root, &f)).transpose()?.unwrap_or_default();
    let own = environment(asked, |key| Some(variable_of(&asked.path, key)), around)?;
    let shared = environment(asked, |key| (key == SHARED.0).then(|| SHARED.1.to_owned()), around)?;
    let mut kept = Vec::new();
    let mut above: Vec<&Arg> = asked.command.get_arguments().filter(|a| asked.on_command_line(a)).collect();
    for layer in [own, in_file, shared] {
        let higher = above.len();
        for given in layer.into_iter().filter(|g| g.path == asked.path) {
            let arg = given.arg;
            let excludes = |a: &&Arg| a.get_id() == arg.get_id() || exclusive(asked.command, a, arg);
            if !above.iter().take(higher).any(excludes) {
                above.push(arg);
                kept.push(given);
            }
        }
    }
    Ok(kept)
}

/// Whether two flags may not stand together.
fn exclusive(command: &Command, a: &Arg, b: &Arg) -> bool {
    let names = |x: &Arg, y: &Arg| command.get_arg_conflicts_with(x).iter().any(|c| c.get_id() == y.get_id());
    let grouped = command.get_groups().any(|group| {
        let has = |x: &Arg| group.get_args().any(|id| id == x.get_id());
        !group.clone().is_multiple() && has(a) && has(b)
    });
    names(a, b) || names(b, a) || grouped
}

/// The place in the arguments after the names of the command. `--config-file FILE` may stand before them.
fn end_of_names(arguments: &[OsString], path: &[String]) -> Option<usize> {
    let mut at = 1;
    for name in path {
        while let word = arguments.get(at)?.to_str()?
            && word != name
        {
            at += if word.strip_prefix("--") == Some(FLAG) { 2 } else { 1 };
        }
        at += 1;
    }
    Some(at)
}

/// The values for a command from the variables of its flags.
fn environment<'a>(
    asked: &Asked<'a>,
    variable: impl Fn(&str) -> Option<String>,
    around: &Surroundings,
) -> Result<Vec<Given<'a>>, ConfigError> {
    let mut found = Vec::new();
    for (key, arg) in flags(asked.command) {
        let Some(variable) = variable(key) else { continue };
        let Some(text) = around.variable(&variable) else { continue };
        let encoding =
            || ConfigError::new(format!("the environment variable {variable} is not UTF-8"), VALUES);
        let text = text.to_str().ok_or_else(encoding)?;
        let source = Source { word: "environment", place: Some(variable) };
        let words = match (arg.get_action(), text) {
            (ArgAction::SetTrue, "false" | "0" | "") => Vec::new(),
            (ArgAction::SetTrue, word) if !["true", "1"].contains(&word) => {
                return Err(ConfigError::sort(&source, key, "true or false", "another word"));
            }
            (ArgAction::Append, text) => text.split_whitespace().map(str::to_owned).collect(),
            (_, text) => vec![text.to_owned()],
        };
        found.push(Given::new(&asked.path, arg, words, source)?);
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
