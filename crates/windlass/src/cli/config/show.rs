//! `windlass config`: each value and its source.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command};
use serde_json::{Map, Value, json};

use super::{
    Asked, ConfigError, FILE, FLAG, Nearest, Source, Surroundings, VARIABLE, commands, complete, flags,
    gather, lenient, variable_of,
};
use crate::console::{Session, Table};
use crate::error::Error;

/// The checked arguments of `config`.
#[derive(Clone, Debug)]
pub(in crate::cli) struct Show {
    /// A command and its arguments; none for all commands.
    pub(in crate::cli) words: Vec<OsString>,
    /// The file that `--config-file` names.
    pub(in crate::cli) file: Option<PathBuf>,
}

/// One value, as `windlass config` prints it.
#[derive(Clone, Debug)]
struct Row {
    key: String,
    value: Value,
    source: Source,
}

/// What is known about one command.
struct Listing {
    path: Vec<String>,
    rows: Vec<Row>,
    /// Variables that no flag has, each with what may be meant.
    strange: Vec<(String, Nearest)>,
}

impl Show {
    /// Prints the values of a command, or what is set of all.
    pub(in crate::cli) fn run(
        &self,
        root: &Command,
        around: &Surroundings,
        session: &Session,
    ) -> Result<(), Error> {
        let mut words = vec![OsString::from("windlass")];
        words.extend(self.file.iter().flat_map(|f| [format!("--{FLAG}").into(), f.clone().into_os_string()]));
        words.extend(self.words.iter().cloned());
        let lenient = lenient(root.clone());
        let (file, listings) = if self.words.is_empty() {
            let flag = self.file.as_ref().map(|f| f.as_os_str());
            let file = around.file(flag).filter(|_| !around.off());
            let all = commands(&lenient);
            let one = |path: &[String]| {
                let words = words.iter().cloned().chain(path.iter().map(OsString::from)).collect();
                list(&lenient, words, around).map(|(_, listing)| listing)
            };
            (file, all.iter().map(|(path, _)| one(path)).collect::<Result<Vec<_>, _>>()?)
        } else {
            let (file, listing) = list(&lenient, words, around)?;
            (file, vec![listing])
        };
        let whole = !self.words.is_empty();
        session.finish(object(file.as_deref(), &listings), |out| {
            human(out, file.as_deref(), &listings, whole);
        })
    }
}

/// Every value of the command that the words name.
fn list(
    lenient: &Command,
    words: Vec<OsString>,
    around: &Surroundings,
) -> Result<(Option<PathBuf>, Listing), Error> {
    let completed = complete(lenient, words.clone(), around)?;
    let parse = |words: &[OsString]| {
        let parsed = lenient.clone().try_get_matches_from(words);
        parsed.map_err(|e| Error::Usage(crate::console::one_line(&e.render().to_string())))
    };
    let matches = parse(&completed.arguments)?;
    let said = parse(&words)?;
    let known = commands(lenient);
    let unknown = |name: String| {
        let nearest = Nearest::of(&name, known.iter().map(|(path, _)| path.join(" ")));
        ConfigError::Command { name, nearest }
    };
    let asked = Asked::of(lenient, &matches).ok_or_else(|| unknown(String::new()))?;
    let explicit = Asked::of(lenient, &said).ok_or_else(|| unknown(String::new()))?;
    if !known.iter().any(|(path, _)| *path == asked.path) {
        return Err(unknown(asked.path.join(" ")).into());
    }
    let file = around.file(matches.get_raw("config_file").and_then(|mut v| v.next()));
    let file = file.filter(|_| !around.off());
    // Switches that are off add no argument, so what was gathered says where a value stands.
    let given = if around.off() { Vec::new() } else { gather(lenient, &explicit, file.as_deref(), around)? };
    let rows = flags(asked.command).map(|(key, arg)| {
        let source = match given.iter().find(|g| g.key == key) {
            Some(given) => given.source.clone(),
            None if explicit.on_command_line(arg) => Source::CommandLine,
            None if asked.matches.value_source(arg.get_id().as_str()).is_some() => Source::Default,
            None => Source::Unset,
        };
        Row { key: key.to_owned(), value: value_of(asked.matches, arg), source }
    });
    let rows = rows.collect();
    let strange = strange(&asked.path, asked.command, around);
    Ok((file, Listing { path: asked.path, rows, strange }))
}

fn value_of(matches: &ArgMatches, arg: &Arg) -> Value {
    let id = arg.get_id().as_str();
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return Value::Bool(matches.get_flag(id));
    }
    let mut words = matches.get_raw(id).into_iter().flatten().map(|w| json!(w.to_string_lossy()));
    match arg.get_action() {
        ArgAction::Append => Value::Array(words.collect()),
        _ => words.next().unwrap_or(Value::Null),
    }
}

/// Variables that look like a flag of this command and are none.
pub(super) fn strange(path: &[String], command: &Command, around: &Surroundings) -> Vec<(String, Nearest)> {
    let prefix = variable_of(path, "");
    let known: Vec<String> = flags(command).map(|(key, _)| variable_of(path, key)).collect();
    let names = around.environment.iter().filter_map(|(name, _)| name.to_str());
    let odd = names.filter(|n| n.starts_with(&prefix) && !known.iter().any(|k| k == n));
    odd.map(|n| (n.to_owned(), Nearest::of(n, known.iter().cloned()))).collect()
}

fn object(file: Option<&Path>, listings: &[Listing]) -> Value {
    let mut commands = Map::new();
    let mut ignored = Vec::new();
    for listing in listings {
        let mut values = Map::new();
        for Row { key, value, source } in &listing.rows {
            let from =
                matches!(source, Source::File(..) | Source::Environment(_)).then(|| source.to_string());
            values.insert(key.clone(), json!({ "value": value, "source": source.word(), "from": from }));
        }
        commands.insert(listing.path.join("."), Value::Object(values));
        ignored.extend(listing.strange.iter().map(|(name, _)| name.clone()));
    }
    json!({ "file": file, "commands": commands, "ignored": ignored })
}

fn human(out: &mut String, file: Option<&Path>, listings: &[Listing], whole: bool) {
    let _ = match file {
        Some(path) => writeln!(out, "file: {}", path.display()),
        None => writeln!(out, "file: none (./{FILE}, {VARIABLE} or --{FLAG})"),
    };
    let mut nothing = true;
    for listing in listings {
        let mut table = Table::new(["", "value", "from"]);
        let set = |row: &&Row| whole || !matches!(row.source, Source::Default | Source::Unset);
        let shown: Vec<&Row> = listing.rows.iter().filter(set).collect();
        if shown.is_empty() {
            continue;
        }
        nothing = false;
        for row in shown {
            table.row([row.key.clone(), plain(&row.value), row.source.to_string()]);
        }
        let _ = writeln!(out, "\n[{}]", listing.path.join("."));
        table.write(out);
    }
    for (name, nearest) in listings.iter().flat_map(|l| &l.strange) {
        let _ = writeln!(out, "\n{name} is set and ignored: no flag is called so{nearest}");
    }
    if !whole {
        let what = if nothing { "nothing is set; " } else { "" };
        let _ = writeln!(out, "\n{what}`windlass config COMMAND` prints every value of a command");
    }
}

/// A value without the quotes of JSON.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "-".into(),
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" "),
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}
