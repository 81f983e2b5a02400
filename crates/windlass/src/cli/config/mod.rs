//! Values of flags from `windlass.toml` and from the environment.
//!
//! Owns: the location and the contents of the file, the precedence of sources, and `windlass config`, which prints each
//! value with its source. Called by [`crate::cli`] before arguments are parsed. Works on the parser's description of the
//! commands and knows by name only the flags of [`SHARED`], so that every flag of every command can be configured.
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

mod error;
mod file;
mod show;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::service::program;

pub(super) use self::error::{ConfigError, Nearest, Source};
pub(super) use self::show::Show;

/// The default file, in the current directory.
pub(super) const FILE: &str = "windlass.toml";
/// The variable that names another file.
pub(super) const VARIABLE: &str = program::CONFIG;
/// Flags that have one variable for all commands that have them.
pub(super) const SHARED: [(&str, &str); 1] = [("controller", "WINDLASS_CONTROLLER")];
/// What every variable begins with.
const PREFIX: &str = "WINDLASS_";
/// The longest file that is read.
const MOST: u64 = 1 << 20;
/// The long flag that names the file. It and `--json` belong to no command.
const FLAG: &str = "config-file";
/// The command that prints the configuration, and takes part in none itself.
const SHOW: &str = "config";

/// A command's directory and environment.
#[derive(Clone, Debug, Default)]
pub(super) struct Surroundings {
    /// Directory of [`FILE`].
    pub(super) directory: PathBuf,
    /// The variables.
    pub(super) environment: Vec<(OsString, OsString)>,
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
        self.environment.is_empty() && !arguments.iter().any(named) && self.file(None).is_none()
    }

    /// The file to read: what was named, or the usual one if it is there.
    fn file(&self, flag: Option<&OsStr>) -> Option<PathBuf> {
        let named = flag.or_else(|| self.variable(VARIABLE).filter(|v| !v.is_empty()));
        match named {
            Some(path) => Some(self.directory.join(path)),
            None => Some(self.directory.join(FILE)).filter(|p| p.exists()),
        }
    }
}

/// A value from the file or the environment, in the parser's form.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Given {
    /// The command's names, `bench`, `codec`.
    command: Vec<String>,
    /// The long flag.
    key: String,
    /// None for a switch that is off.
    words: Vec<String>,
    source: Source,
}

impl Given {
    fn arguments(&self, arg: &Arg) -> Vec<OsString> {
        match arg.get_action() {
            ArgAction::SetTrue => self.words.iter().map(|_| format!("--{}", self.key).into()).collect(),
            _ => self.words.iter().map(|w| format!("--{}={w}", self.key).into()).collect(),
        }
    }
}

/// Arguments with the values of file and environment.
#[derive(Debug)]
pub(super) struct Completed {
    /// The arguments.
    pub(super) arguments: Vec<OsString>,
    /// What was added: the flag and its place.
    pub(super) added: Vec<(String, Source)>,
}

impl Completed {
    /// The added values, for the end of a message about conflicting arguments.
    pub(super) fn note(&self) -> Option<String> {
        let added = self.added.iter().map(|(key, place)| format!("--{key} from {place}"));
        (!self.added.is_empty()).then(|| format!("with {}", added.collect::<Vec<_>>().join(", ")))
    }
}

/// Adds the values of file and environment for flags that are not among the arguments. Returns arguments that do not parse
/// unchanged: the parser will report them.
pub(super) fn complete(
    root: &Command,
    arguments: Vec<OsString>,
    around: &Surroundings,
) -> Result<Completed, ConfigError> {
    let as_is = |arguments| Ok(Completed { arguments, added: Vec::new() });
    if around.off() || around.silent(&arguments) {
        return as_is(arguments);
    }
    let lenient = lenient(root.clone());
    let Ok(matches) = lenient.clone().try_get_matches_from(&arguments) else { return as_is(arguments) };
    let Some(asked) = Asked::of(&lenient, &matches) else { return as_is(arguments) };
    if asked.path.iter().any(|p| p == SHOW) || asked.command.is_hide_set() {
        return as_is(arguments);
    }
    let file = around.file(matches.get_raw("config_file").and_then(|mut v| v.next()));
    let given = gather(&lenient, &asked, file.as_deref(), around)?;
    let Some(at) = end_of_names(&lenient, &arguments, &asked.path) else { return as_is(arguments) };
    let mut completed = Completed { arguments, added: Vec::new() };
    for given in given.iter().rev() {
        let Some(arg) = flag(asked.command, &given.key) else { continue };
        let words = given.arguments(arg);
        if !words.is_empty() {
            completed.added.insert(0, (given.key.clone(), given.source.clone()));
        }
        completed.arguments.splice(at..at, words);
    }
    Ok(completed)
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
fn gather(
    root: &Command,
    asked: &Asked<'_>,
    file: Option<&Path>,
    around: &Surroundings,
) -> Result<Vec<Given>, ConfigError> {
    let in_file = file.map(|f| file::read(root, f)).transpose()?.unwrap_or_default();
    let own = |key: &str| Some(variable_of(&asked.path, key));
    let in_environment = environment(&asked.path, asked.command, own, around)?;
    let shared =
        |key: &str| SHARED.iter().find(|(flag, _)| *flag == key).map(|(_, variable)| (*variable).to_owned());
    let shared = environment(&asked.path, asked.command, shared, around)?;
    let mut kept: Vec<Given> = Vec::new();
    let mut above: Vec<&Arg> =
        flags(asked.command).map(|(_, a)| a).filter(|a| asked.on_command_line(a)).collect();
    above.extend(asked.command.get_positionals().filter(|a| asked.on_command_line(a)));
    for layer in [in_environment, in_file, shared] {
        let of_layer: Vec<Given> = layer.into_iter().filter(|g| g.command == asked.path).collect();
        let mut won = Vec::new();
        for given in of_layer {
            let Some(arg) = flag(asked.command, &given.key) else { continue };
            if above.iter().all(|a| a.get_id() != arg.get_id() && !exclusive(asked.command, a, arg)) {
                won.push(arg);
                kept.push(given);
            }
        }
        above.extend(won);
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

/// The place in the arguments after the names of the command.
fn end_of_names(root: &Command, arguments: &[OsString], path: &[String]) -> Option<usize> {
    let takes_value = |word: &str| {
        let long = word.strip_prefix("--")?;
        let arg = root.get_arguments().find(|a| a.get_long() == Some(long))?;
        arg.get_action().takes_values().then_some(())
    };
    let mut names = path.iter();
    let mut next = names.next()?;
    let mut words = arguments.iter().enumerate().skip(1);
    while let Some((at, word)) = words.next() {
        let word = word.to_str()?;
        if takes_value(word).is_some() {
            words.next();
        } else if word == next {
            match names.next() {
                Some(name) => next = name,
                None => return Some(at + 1),
            }
        }
    }
    None
}

/// The values for a command from the environment.
fn environment(
    path: &[String],
    command: &Command,
    variable: impl Fn(&str) -> Option<String>,
    around: &Surroundings,
) -> Result<Vec<Given>, ConfigError> {
    let mut found = Vec::new();
    for (key, arg) in flags(command) {
        let Some(variable) = variable(key) else { continue };
        let Some(text) = around.variable(&variable) else { continue };
        let text = text.to_str().ok_or_else(|| ConfigError::Encoding { variable: variable.clone() })?;
        let source = Source::Environment(variable);
        let words = match arg.get_action() {
            ArgAction::SetTrue => match text {
                "true" | "1" => vec![text.to_owned()],
                "false" | "0" | "" => Vec::new(),
                _ => {
                    let (wanted, found) = ("true or false", "another word");
                    return Err(ConfigError::Sort { at: source, key: key.to_owned(), wanted, found });
                }
            },
            ArgAction::Append => text.split_whitespace().map(str::to_owned).collect(),
            _ => vec![text.to_owned()],
        };
        let given = Given { command: path.to_vec(), key: key.to_owned(), words, source };
        check(&given, arg)?;
        found.push(given);
    }
    Ok(found)
}

/// Checks each value with the flag's own parser.
fn check(given: &Given, arg: &Arg) -> Result<(), ConfigError> {
    if !arg.get_action().takes_values() {
        return Ok(());
    }
    let alone = free(arg.clone()).conflicts_with(Resettable::Reset).group(Resettable::Reset);
    let parser = Command::new("value").no_binary_name(true).arg(alone);
    let parsed = parser.try_get_matches_from(given.arguments(arg));
    parsed.map(drop).map_err(|e| ConfigError::Value {
        at: given.source.clone(),
        message: crate::console::one_line(&e.render().to_string()),
    })
}

#[cfg(test)]
mod tests;
