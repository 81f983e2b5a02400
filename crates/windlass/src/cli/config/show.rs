//! `windlass config`: each value and its source.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgAction, Command};
use serde_json::{Map, Value, json};

use super::{
    Asked, ConfigError, FILE, FLAG, Source, Surroundings, TABLES, VARIABLE, commands, complete, flags,
    gather, lenient, nearest, variable_of,
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

/// What is known about one command.
struct Listing {
    path: Vec<String>,
    file: Option<PathBuf>,
    rows: Vec<(String, Value, Source)>,
    /// Variables that no flag has, each with what may be meant.
    strange: Vec<(String, String)>,
}

impl Show {
    /// Prints the values of a command, or what is set of all.
    pub(in crate::cli) fn run(
        &self,
        root: &Command,
        around: &Surroundings,
        session: &Session,
    ) -> Result<(), Error> {
        let lenient = lenient(root.clone());
        let whole = !self.words.is_empty();
        let asked = if whole {
            vec![self.words.clone()]
        } else {
            commands(&lenient).iter().map(|(path, _)| path.iter().map(OsString::from).collect()).collect()
        };
        let mut before = vec![OsString::from("windlass")];
        before
            .extend(self.file.iter().flat_map(|f| [format!("--{FLAG}").into(), f.clone().into_os_string()]));
        let one = |words: Vec<OsString>| list(&lenient, [before.clone(), words].concat(), around);
        let listings = asked.into_iter().map(one).collect::<Result<Vec<_>, _>>()?;
        let file = listings.first().and_then(|listing| listing.file.as_deref());
        session.finish(object(file, &listings), |out| human(out, file, &listings, whole))
    }
}

/// Every value of the command that the words name.
fn list(lenient: &Command, words: Vec<OsString>, around: &Surroundings) -> Result<Listing, Error> {
    let parse = |words: &[OsString]| {
        let parsed = lenient.clone().try_get_matches_from(words);
        parsed.map_err(|e| Error::Usage(crate::console::one_line(&e.render().to_string())))
    };
    let matches = parse(&words)?;
    let known = commands(lenient);
    let asked = Asked::of(lenient, &matches);
    let Some(asked) = asked.as_ref().filter(|a| known.iter().any(|(path, _)| *path == a.path)) else {
        let name = asked.map_or_else(String::new, |a| a.path.join(" "));
        let nearest = nearest(&name, known.iter().map(|(path, _)| path.join(" ")));
        let message = format!("no command {name:?} has values to configure{nearest}");
        return Err(ConfigError::new(message, TABLES).into());
    };
    let given = gather(lenient, asked, around)?;
    // Values that clash in one place are refused here too.
    parse(&complete(lenient, words, around)?.arguments)?;
    let rows = flags(asked.command).map(|(key, arg)| {
        let id = arg.get_id().as_str();
        let raw =
            || asked.matches.get_raw(id).into_iter().flatten().map(|w| w.to_string_lossy().into_owned());
        let word = match asked.matches.value_source(id) {
            Some(ValueSource::CommandLine) => "command line",
            Some(_) => "default",
            None => "unset",
        };
        let given = given.iter().find(|g| g.key() == key);
        let (mut words, source) = match given {
            Some(given) => (given.words.clone(), given.source.clone()),
            None => (raw().collect(), Source { word, place: None }),
        };
        let value = match arg.get_action() {
            ArgAction::SetTrue if given.is_some() => json!(!words.is_empty()),
            ArgAction::SetTrue => json!(asked.matches.get_flag(id)),
            ArgAction::Append => json!(words),
            _ => words.pop().map_or(Value::Null, Value::String),
        };
        (key.to_owned(), value, source)
    });
    let rows = rows.collect();
    let strange = strange(&asked.path, asked.command, around);
    Ok(Listing { path: asked.path.clone(), file: around.file(asked.matches), rows, strange })
}

/// Variables that look like a flag of this command and are none.
pub(super) fn strange(path: &[String], command: &Command, around: &Surroundings) -> Vec<(String, String)> {
    let prefix = variable_of(path, "");
    let known: Vec<String> = flags(command).map(|(key, _)| variable_of(path, key)).collect();
    let names = around.environment.iter().filter_map(|(name, _)| name.to_str());
    let odd = names.filter(|n| n.starts_with(&prefix) && !known.iter().any(|k| k == n));
    odd.map(|n| (n.to_owned(), nearest(n, known.iter().cloned()))).collect()
}

fn object(file: Option<&Path>, listings: &[Listing]) -> Value {
    let value = |(key, value, source): &(String, Value, Source)| {
        (key.clone(), json!({ "value": value, "source": source.word, "from": source.place }))
    };
    let values = |l: &Listing| (l.path.join("."), Value::Object(l.rows.iter().map(value).collect()));
    let commands: Map<String, Value> = listings.iter().map(values).collect();
    let ignored: Vec<&String> = listings.iter().flat_map(|l| &l.strange).map(|(name, _)| name).collect();
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
        let mut shown = false;
        for (key, value, source) in &listing.rows {
            if whole || !["default", "unset"].contains(&source.word) {
                table.row([key.clone(), plain(value), source.to_string()]);
                shown = true;
            }
        }
        if shown {
            nothing = false;
            let _ = writeln!(out, "\n[{}]", listing.path.join("."));
            table.write(out);
        }
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
