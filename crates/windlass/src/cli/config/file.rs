//! The file: its tables against the commands, its keys against their flags, its values against the flags' parsers.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use clap::{ArgAction, Command};
use toml::de::{DeTable, DeValue};

use super::{ConfigError, FILE, FLAG, Given, MOST, Source, TABLES, VARIABLE, commands, flag, flags, nearest};

/// Reads and checks a file, all of it.
pub(super) fn read<'a>(root: &'a Command, path: &Path) -> Result<Vec<Given<'a>>, ConfigError> {
    let cannot = |source: io::Error| ConfigError {
        kind: windlass_data::file::io_kind(&source),
        message: format!("cannot read the configuration {}", path.display()),
        advice: format!(
            "check the path of --{FLAG} or {VARIABLE}; without them ./{FILE} is read if it exists"
        ),
        source: Some(source),
    };
    let mut text = String::new();
    File::open(path).and_then(|file| file.take(MOST + 1).read_to_string(&mut text)).map_err(cannot)?;
    if text.len() as u64 > MOST {
        let message = format!("the configuration {} has more than {MOST} bytes", path.display());
        return Err(ConfigError::new(message, "it is no configuration; give another file"));
    }
    let mut reader = Reader { path, text: &text, commands: commands(root), given: Vec::new() };
    let tables = DeTable::parse(&text).map_err(|e| {
        let at = reader.source(e.span().map_or(0, |s| s.start));
        let message = format!("{at}: {}", e.message().replace('\n', " "));
        ConfigError::new(message, "correct it; `windlass config` lists tables and keys")
    })?;
    reader.tables(&[], tables.get_ref())?;
    Ok(reader.given)
}

struct Reader<'a, 't> {
    path: &'t Path,
    text: &'t str,
    commands: Vec<(Vec<String>, &'a Command)>,
    given: Vec<Given<'a>>,
}

impl<'a> Reader<'a, '_> {
    fn source(&self, byte: usize) -> Source {
        let line = self.text.bytes().take(byte).filter(|b| *b == b'\n').count() + 1;
        Source { word: "file", place: Some(format!("{}:{line}", self.path.display())) }
    }

    /// Tables of commands that are `path` below the root.
    fn tables(&mut self, path: &[String], tables: &DeTable<'_>) -> Result<(), ConfigError> {
        for (name, value) in tables {
            let at = self.source(name.span().start);
            let below = [path, &[name.get_ref().to_string()]].concat();
            let dotted = below.join(".");
            let DeValue::Table(table) = value.get_ref() else {
                let owners = self.owners(name.get_ref());
                let message = format!("{at}: {dotted:?} stands outside of a command's table{owners}");
                return Err(ConfigError::new(message, TABLES));
            };
            match self.commands.iter().find(|(p, _)| p.starts_with(&below)) {
                Some(&(ref p, command)) if *p == below => self.keys(&below, command, table)?,
                Some(_) => self.tables(&below, table)?,
                None => {
                    let nearest = nearest(&dotted, self.commands.iter().map(|(p, _)| p.join(".")));
                    let message = format!("{at}: no command {dotted:?} for the table [{dotted}]{nearest}");
                    return Err(ConfigError::new(message, TABLES));
                }
            }
        }
        Ok(())
    }

    fn keys(
        &mut self,
        path: &[String],
        command: &'a Command,
        table: &DeTable<'_>,
    ) -> Result<(), ConfigError> {
        let dotted = path.join(".");
        for (key, value) in table {
            let (at, key, value) = (self.source(key.span().start), key.get_ref(), value.get_ref());
            let Some(arg) = flag(command, key) else {
                let nearest = nearest(key, flags(command).map(|(long, _)| long.to_owned()));
                let hint = if nearest.is_empty() { self.owners(key) } else { nearest };
                let advice = format!(
                    "keys are the long flags of the command: see `windlass config {}`",
                    path.join(" ")
                );
                return Err(ConfigError::new(format!("{at}: [{dotted}] has no key {key:?}{hint}"), advice));
            };
            let values: Vec<&DeValue<'_>> = match (arg.get_action(), value) {
                (ArgAction::Append, DeValue::Array(values)) => {
                    values.iter().map(toml::Spanned::get_ref).collect()
                }
                (_, one) => vec![one],
            };
            let wanted = match (arg.get_action(), value) {
                (ArgAction::SetTrue, _) => "true or false",
                (ArgAction::Append, DeValue::Array(_)) => "a list of texts and numbers",
                (ArgAction::Append, _) => "a text, a number or a list of them",
                (_, _) => "a text or a number",
            };
            let mut words = Vec::new();
            for value in values {
                match (arg.get_action(), value, scalar(value)) {
                    (ArgAction::SetTrue, DeValue::Boolean(on), _) => words.extend(on.then(|| "true".into())),
                    (action, _, Some(word)) if action.takes_values() => words.push(word),
                    _ => {
                        let key = format!("{dotted}.{key}");
                        return Err(ConfigError::sort(&at, &key, wanted, sort_of(value)));
                    }
                }
            }
            self.given.push(Given::new(path, arg, words, at)?);
        }
        Ok(())
    }

    /// The tables that have a key, as the end of a sentence.
    fn owners(&self, key: &str) -> String {
        let having = self.commands.iter().filter(|(_, command)| flag(command, key).is_some());
        let names: Vec<_> = having.map(|(path, _)| format!("[{}]", path.join("."))).collect();
        if names.is_empty() { String::new() } else { format!("; it is a key of {}", names.join(", ")) }
    }
}

fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(n) => i128::from_str_radix(n.as_str(), n.radix()).ok().map(|n| n.to_string()),
        DeValue::Float(x) => x.as_str().parse::<f64>().ok().map(|x| x.to_string()),
        DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

fn sort_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
