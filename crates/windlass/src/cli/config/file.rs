//! The file: its tables against the commands, its keys against their flags, its values against the flags' parsers.

use std::io::Read as _;
use std::path::Path;

use clap::{ArgAction, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{ConfigError, Given, MOST, Nearest, Source, check, commands, flag, flags};

/// Reads and checks a file, all of it.
pub(super) fn read(root: &Command, path: &Path) -> Result<Vec<Given>, ConfigError> {
    let mut text = String::new();
    let cannot = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(cannot)?;
    file.take(MOST + 1).read_to_string(&mut text).map_err(cannot)?;
    if text.len() as u64 > MOST {
        return Err(ConfigError::TooLong { path: path.to_owned() });
    }
    let reader = Reader { path, text: &text };
    let tables = DeTable::parse(&text).map_err(|e| ConfigError::Syntax {
        at: reader.source(e.span().map_or(0, |s| s.start)),
        message: e.message().replace('\n', " "),
    })?;
    let mut given = Vec::new();
    reader.tables(root, &[], tables.get_ref(), &mut given)?;
    Ok(given)
}

struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Reader<'_> {
    fn source(&self, byte: usize) -> Source {
        let line = self.text.bytes().take(byte).filter(|b| *b == b'\n').count() + 1;
        Source::File(self.path.to_owned(), line)
    }

    /// Tables of commands that are `path` below the root.
    fn tables(
        &self,
        root: &Command,
        path: &[String],
        tables: &DeTable<'_>,
        given: &mut Vec<Given>,
    ) -> Result<(), ConfigError> {
        let all = commands(root);
        for (name, value) in tables {
            let at = self.source(name.span().start);
            let below = [path, &[name.get_ref().to_string()]].concat();
            let named: Vec<_> = all.iter().filter(|(p, _)| p.starts_with(&below)).collect();
            let dotted = below.join(".");
            match (value.get_ref(), named.first()) {
                (DeValue::Table(table), Some((p, command))) if *p == below => {
                    self.keys(&all, &below, command, table, given)?;
                }
                (DeValue::Table(table), Some(_)) => self.tables(root, &below, table, given)?,
                (DeValue::Table(_), None) => {
                    let nearest = Nearest::of(&dotted, all.iter().map(|(p, _)| p.join(".")));
                    return Err(ConfigError::Table { at, name: dotted, nearest });
                }
                _ => {
                    let owners = owners(&all, name.get_ref(), &[]);
                    let nearest = Nearest((!owners.is_empty()).then(|| format!("; it is a key of {owners}")));
                    return Err(ConfigError::Loose { at, name: dotted, nearest });
                }
            }
        }
        Ok(())
    }

    fn keys(
        &self,
        all: &[(Vec<String>, &Command)],
        path: &[String],
        command: &Command,
        table: &DeTable<'_>,
        given: &mut Vec<Given>,
    ) -> Result<(), ConfigError> {
        for (key, value) in table {
            let at = self.source(key.span().start);
            let name = key.get_ref();
            let Some(arg) = flag(command, name) else {
                let mut nearest = Nearest::of(name, flags(command).map(|(long, _)| long.to_owned()));
                let owners = owners(all, name, path);
                if nearest.0.is_none() && !owners.is_empty() {
                    nearest = Nearest(Some(format!("; it is a key of {owners}")));
                }
                let (table, key) = (path.join("."), name.to_string());
                return Err(ConfigError::Key { at, table, key, nearest });
            };
            let sort = |wanted: &'static str, value: &DeValue<'_>| ConfigError::Sort {
                at: at.clone(),
                key: format!("{}.{name}", path.join(".")),
                wanted,
                found: sort_of(value),
            };
            let words = match (arg.get_action(), value.get_ref()) {
                (ArgAction::SetTrue, DeValue::Boolean(on)) => Vec::from_iter(on.then(|| "true".to_owned())),
                (ArgAction::SetTrue, other) => return Err(sort("true or false", other)),
                (ArgAction::Append, DeValue::Array(values)) => {
                    let word = |v: &Spanned<DeValue<'_>>| {
                        scalar(v.get_ref()).ok_or_else(|| sort("a list of texts and numbers", v.get_ref()))
                    };
                    values.iter().map(word).collect::<Result<_, _>>()?
                }
                (ArgAction::Append, one) => {
                    vec![scalar(one).ok_or_else(|| sort("a text, a number or a list of them", one))?]
                }
                (_, one) => vec![scalar(one).ok_or_else(|| sort("a text or a number", one))?],
            };
            let one = Given { command: path.to_vec(), key: name.to_string(), words, source: at };
            check(&one, arg)?;
            given.push(one);
        }
        Ok(())
    }
}

/// The tables that have a key, other than `not`.
fn owners(all: &[(Vec<String>, &Command)], key: &str, not: &[String]) -> String {
    let having = all.iter().filter(|(path, command)| path != not && flag(command, key).is_some());
    having.map(|(path, _)| format!("[{}]", path.join("."))).collect::<Vec<_>>().join(", ")
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
