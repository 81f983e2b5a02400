//! `windlass init`: a commented `windlass.toml`, and the scripts of a trainer and an engine.
//!
//! | module | owns |
//! |---|---|
//! | [`detect`] | which packages the interpreter has |
//! | [`plan`] | which trainer, which engine, which files |
//!
//! Owns: writing the files, and the output. Must not: import a package, start a framework, or replace a file unless it is told to.

pub(crate) mod detect;
mod plan;

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Component, Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use serde_json::{Map, Value, json};
use windlass_core::error::Kind;
use windlass_data::file::io_kind;

use self::detect::{Interpreter, quoted};
pub(crate) use self::plan::{Engine, Trainer};
use self::plan::{Plan, Template};
use super::outfile::OutFile;
use crate::console::Session;
use crate::error::Error;

/// Why nothing was written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InitError {
    #[error("cannot start the Python interpreter {}", python.display())]
    Start { python: PathBuf, source: io::Error },
    #[error("the Python interpreter {} failed ({status}): {said}", python.display())]
    Failed {
        python: PathBuf,
        status: ExitStatus,
        /// Its last words.
        said: String,
    },
    #[error("the Python interpreter {} did not answer within {} s", python.display(), timeout.as_secs_f64())]
    Silent { python: PathBuf, timeout: Duration },
    #[error("{} did not say which packages it has, as a Python interpreter would", python.display())]
    Answer { python: PathBuf },
    #[error("{} does not run with the engine {}", trainer.name(), engine.name())]
    Unfit {
        trainer: Trainer,
        engine: Engine,
        /// Those that it runs with.
        engines: &'static [Engine],
    },
    #[error("{} already there: {}", if files.len() == 1 { "a file is" } else { "files are" }, listed(files))]
    Exists { files: Vec<PathBuf> },
}

impl InitError {
    fn kind(&self) -> Kind {
        match self {
            InitError::Start { source, .. } => io_kind(source),
            InitError::Failed { .. } | InitError::Answer { .. } => Kind::Unsupported,
            InitError::Silent { .. } => Kind::Timeout,
            InitError::Unfit { .. } | InitError::Exists { .. } => Kind::Invalid,
        }
    }

    fn advice(&self) -> String {
        match self {
            InitError::Start { .. } | InitError::Failed { .. } | InitError::Answer { .. } => {
                "name the interpreter that will run the scripts with --python, Python 3.10 or later".into()
            }
            InitError::Silent { .. } => {
                "run the command again, name another interpreter with --python, or give `windlass init` longer with --timeout"
                    .into()
            }
            InitError::Unfit { engines, .. } => {
                let names: Vec<_> = engines.iter().map(|e| format!("--engine {}", e.name())).collect();
                format!("give {}, or leave --engine out", names.join(" or "))
            }
            InitError::Exists { .. } => {
                "nothing was written: give another directory, or --force to replace them".into()
            }
        }
    }
}

impl From<InitError> for Error {
    fn from(e: InitError) -> Error {
        Error::of_module(e.kind(), e.advice(), e)
    }
}

fn listed(files: &[PathBuf]) -> String {
    files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// The checked arguments of `init`.
#[derive(Debug)]
pub(crate) struct Init {
    pub(crate) dir: PathBuf,
    pub(crate) trainer: Option<Trainer>,
    pub(crate) engine: Option<Engine>,
    pub(crate) python: Option<PathBuf>,
    /// Replace files that are there.
    pub(crate) force: bool,
    /// How long the interpreter may take.
    pub(crate) timeout: Duration,
}

impl Init {
    /// Asks the interpreter, writes the files, and says what to type next.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let python = Interpreter::choose(self.python.as_deref());
        let answer = python.packages(&plan::packages(), self.timeout, session.cancel())?;
        let there = |name: &str| answer.as_ref().is_some_and(|found| found.contains_key(name));
        let plan = Plan::choose(self.trainer, self.engine, there)?;
        let files = plan.files();
        let paths: Vec<PathBuf> = files.iter().map(|f| self.path(f.name)).collect();
        self.write(&files, &paths)?;
        let notes = match &answer {
            Some(_) => notes(plan, &python, there),
            None => vec!["there is no python3 on the path: nothing is known of what is installed".into()],
        };
        let next = self.commands(plan, &python);
        let object = json!({
            "dir": self.dir,
            "files": paths,
            "trainer": plan.trainer.name(),
            "engine": plan.engine.name(),
            "python": answer.as_ref().map(|_| &python.path),
            "found": answer,
            "notes": notes,
            "next": next,
        });
        session.finish(object, |out| {
            if let Some(found) = &answer {
                let _ = writeln!(out, "{} has {}", python.path.display(), packages(found));
            }
            let _ = writeln!(out, "trainer {}, engine {}", plan.trainer.name(), plan.engine.name());
            for note in &notes {
                let _ = writeln!(out, "note: {note}");
            }
            let _ = writeln!(out, "wrote {}", listed(&paths));
            let where_to = if next.len() > 1 { "next, each in a terminal of its own:" } else { "next:" };
            let _ = writeln!(out, "{where_to}");
            for command in &next {
                let _ = writeln!(out, "  {command}");
            }
        })
    }

    /// The commands to type from the current directory.
    fn commands(&self, plan: Plan, python: &Interpreter) -> Vec<String> {
        let enter = if self.here() { String::new() } else { format!("cd {} && ", quoted(&self.dir)) };
        let commands = plan.commands(&python.word, python.elsewhere).into_iter();
        commands.map(|command| format!("{enter}{command}")).collect()
    }

    /// Whether the files go to the current directory.
    fn here(&self) -> bool {
        self.dir.components().all(|c| c == Component::CurDir)
    }

    fn path(&self, name: &str) -> PathBuf {
        if self.here() { name.into() } else { self.dir.join(name) }
    }

    /// Puts all files in their places, or none.
    fn write(&self, files: &[Template], paths: &[PathBuf]) -> Result<(), Error> {
        // A link counts as what is there, wherever it leads.
        let there = |path: &&PathBuf| fs::symlink_metadata(path).is_ok();
        let existing: Vec<PathBuf> = paths.iter().filter(there).cloned().collect();
        if !self.force && !existing.is_empty() {
            return Err(InitError::Exists { files: existing }.into());
        }
        for path in &existing {
            let kind = fs::symlink_metadata(path).map_err(Error::io("read", path))?.file_type();
            if !kind.is_file() && !kind.is_symlink() {
                let found = if kind.is_dir() { "a directory" } else { "a device or pipe" };
                return Err(Error::InTheWay { path: path.clone(), found, wanted: "a file" });
            }
        }
        fs::create_dir_all(&self.dir).map_err(Error::io("create", &self.dir))?;
        let mut drafts = Vec::new();
        for (file, path) in files.iter().zip(paths) {
            let draft = OutFile::create_here(path, file.mode)?;
            draft.file().write_all(file.text.as_bytes()).map_err(Error::io("write", path))?;
            drafts.push(draft);
        }
        let mut placed: Vec<&Path> = Vec::new();
        for (draft, path) in drafts.into_iter().zip(paths) {
            let put = if self.force { draft.commit() } else { draft.commit_new() };
            if let Err(e) = put {
                if !self.force {
                    // All of them are new.
                    for path in placed {
                        let _ = fs::remove_file(path);
                    }
                }
                return Err(raced(e, path));
            }
            placed.push(path);
        }
        Ok(())
    }
}

/// The error of a file that came meanwhile is that of one that was there.
fn raced(e: Error, path: &Path) -> Error {
    match e {
        Error::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
            InitError::Exists { files: vec![path.to_owned()] }.into()
        }
        other => other,
    }
}

/// The packages and their versions, for people.
fn packages(found: &Map<String, Value>) -> String {
    let named = found.iter().map(|(name, version)| match version.as_str() {
        Some(version) => format!("{name} {version}"),
        None => name.clone(),
    });
    let text = named.collect::<Vec<_>>().join(", ");
    if text.is_empty() { "none of the packages that were looked for".into() } else { text }
}

/// What is missing for the scripts, and what else could be chosen.
fn notes(plan: Plan, python: &Interpreter, there: impl Fn(&str) -> bool) -> Vec<String> {
    let mut notes = Vec::new();
    let missing: Vec<_> = plan.needs().into_iter().filter(|name| !there(name)).collect();
    if !missing.is_empty() {
        let python = python.path.display();
        notes.push(format!("missing in {python} for the trainer: {}", missing.join(", ")));
    }
    let server = plan.engine != Engine::Python && !plan.starts_engines();
    if server && !there(plan.engine.name()) {
        let name = plan.engine.name();
        notes.push(format!("run serve.sh in an environment that has {name}, with Windlass installed there"));
    }
    if plan.starts_engines() {
        notes.push(format!("{} starts its engines itself, as its own settings say", plan.trainer.name()));
    }
    let (trainers, engines) = plan.others(there);
    for (flag, others) in [("--trainer", trainers), ("--engine", engines)] {
        if !others.is_empty() {
            notes.push(format!("{flag} could also be {}", others.join(", ")));
        }
    }
    notes
}
