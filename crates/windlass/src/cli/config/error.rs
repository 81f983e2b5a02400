//! Errors of a configuration, and sources of values.

use std::fmt;
use std::path::PathBuf;

use windlass_core::error::Kind;

use super::{FILE, FLAG, MOST, VARIABLE};
use crate::error::Error;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(in crate::cli) enum ConfigError {
    #[error("cannot read the configuration {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the configuration {} has more than {MOST} bytes", path.display())]
    TooLong { path: PathBuf },
    #[error("{at}: {message}")]
    Syntax { at: Source, message: String },
    #[error("{at}: no command {name:?} for the table [{name}]{nearest}")]
    Table { at: Source, name: String, nearest: Nearest },
    /// A value where a table of a command should be.
    #[error("{at}: {name:?} stands outside of a command's table{nearest}")]
    Loose { at: Source, name: String, nearest: Nearest },
    #[error("{at}: [{table}] has no key {key:?}{nearest}")]
    Key { at: Source, table: String, key: String, nearest: Nearest },
    /// A value of a sort that the flag does not take.
    #[error("{at}: {key} must be {wanted}, not {found}")]
    Sort { at: Source, key: String, wanted: &'static str, found: &'static str },
    #[error("{at}: {message}")]
    Value {
        at: Source,
        /// What the parser says, with the flag and the value.
        message: String,
    },
    #[error("the environment variable {variable} is not UTF-8")]
    Encoding { variable: String },
    /// `windlass config` of a command that there is none of.
    #[error("no command {name:?} has values to configure{nearest}")]
    Command { name: String, nearest: Nearest },
}

impl ConfigError {
    /// The kind of failure.
    pub(in crate::cli) fn kind(&self) -> Kind {
        match self {
            ConfigError::Read { source, .. } => windlass_data::file::io_kind(source),
            ConfigError::TooLong { .. }
            | ConfigError::Syntax { .. }
            | ConfigError::Table { .. }
            | ConfigError::Loose { .. }
            | ConfigError::Key { .. }
            | ConfigError::Sort { .. }
            | ConfigError::Value { .. }
            | ConfigError::Encoding { .. }
            | ConfigError::Command { .. } => Kind::Invalid,
        }
    }

    /// What to do next.
    pub(in crate::cli) fn advice(&self) -> String {
        match self {
            ConfigError::Read { .. } => {
                format!(
                    "check the path of --{FLAG} or {VARIABLE}; without them ./{FILE} is read if it exists"
                )
            }
            ConfigError::TooLong { path } => {
                format!("{} is no configuration; give another file", path.display())
            }
            ConfigError::Syntax { .. } => "correct it; `windlass config` lists tables and keys".into(),
            ConfigError::Table { .. } | ConfigError::Loose { .. } | ConfigError::Command { .. } => {
                "tables are named after commands, such as [receive] or [bench.codec]; see `windlass --help`"
                    .into()
            }
            ConfigError::Key { table, .. } => {
                let command = table.replace('.', " ");
                format!("keys are the long flags of the command: see `windlass config {command}`")
            }
            ConfigError::Sort { .. } | ConfigError::Value { .. } | ConfigError::Encoding { .. } => {
                "correct the value, or remove it for the default".into()
            }
        }
    }
}

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Source {
    CommandLine,
    /// In an environment variable.
    Environment(String),
    File(PathBuf, usize),
    /// The default of the command.
    Default,
    Unset,
}

impl Source {
    pub(in crate::cli) fn word(&self) -> &'static str {
        match self {
            Source::CommandLine => "command line",
            Source::Environment(_) => "environment",
            Source::File(..) => "file",
            Source::Default => "default",
            Source::Unset => "unset",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Environment(name) => f.write_str(name),
            Source::File(path, line) => write!(f, "{}:{line}", path.display()),
            Source::CommandLine | Source::Default | Source::Unset => f.write_str(self.word()),
        }
    }
}

/// A suggestion for an unknown name, as the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Nearest(pub(in crate::cli) Option<String>);

impl Nearest {
    /// The most similar of the known names, if one is similar at all.
    pub(in crate::cli) fn of(name: &str, known: impl IntoIterator<Item = String>) -> Nearest {
        let plain = |s: &str| s.to_lowercase().replace('_', "-");
        let name = plain(name);
        let scored = known.into_iter().map(|k| (strsim::osa_distance(&name, &plain(&k)), k));
        let most = (name.chars().count() / 3).max(1);
        let best = scored.min_by_key(|(distance, _)| *distance).filter(|(distance, _)| *distance <= most);
        Nearest(best.map(|(_, name)| format!("; did you mean {name:?}?")))
    }
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_deref().unwrap_or_default())
    }
}

impl From<ConfigError> for Error {
    fn from(e: ConfigError) -> Error {
        Error::of_module(e.kind(), e.advice(), e)
    }
}
