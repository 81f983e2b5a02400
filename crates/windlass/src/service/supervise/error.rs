//! What can go wrong with an agent that is kept running.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use windlass_core::error::Kind;
use windlass_data::file::io_kind;

use crate::error::Error;

/// An agent that cannot be kept running, or is not there yet.
#[derive(Debug, thiserror::Error)]
pub enum SuperviseError {
    /// The operating system refused something before there was an agent.
    #[error("cannot keep an agent running: no {what}: {source}")]
    Setup { what: &'static str, source: io::Error },
    #[error("cannot keep an agent running: how is the windlass command started?")]
    NoProgram { source: Box<Error> },
    #[error("cannot write the agent's log {}: {source}; name another file", path.display())]
    Log { path: PathBuf, source: io::Error },
    #[error(
        "no agent of region {} listens after {:.1} s and {starts} starts; {}; trying goes on, its log is {}",
        region.display(), after.as_secs_f64(), said_last(said.as_deref()), log.display()
    )]
    NotListening {
        region: PathBuf,
        after: Duration,
        starts: u64,
        /// What the last one that ended said.
        said: Option<String>,
        log: PathBuf,
        /// The kind of its failure, where it named one.
        kind: Option<Kind>,
    },
    /// The agent refuses what it was asked, again and again.
    #[error("the agent of region {} does not start: {said}", region.display())]
    Refuses { region: PathBuf, said: String, kind: Kind },
    #[error("waiting for the agent of region {} was called off", region.display())]
    Cancelled { region: PathBuf },
    #[error("the agent of region {} was ended by its supervisor: start a new one", region.display())]
    Ended { region: PathBuf },
    #[error(
        "this supervisor belongs to process {home}, and this is its forked child {here}: use it there, or start a new one here"
    )]
    Forked { home: u32, here: u32 },
}

fn said_last(said: Option<&str>) -> String {
    said.map_or("it has said nothing yet".into(), |s| format!("the last one that ended: {s}"))
}

impl SuperviseError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            SuperviseError::Setup { source, .. } | SuperviseError::Log { source, .. } => io_kind(source),
            SuperviseError::NoProgram { source } => source.kind(),
            SuperviseError::NotListening { kind, .. } => kind.unwrap_or(Kind::Timeout),
            SuperviseError::Refuses { kind, .. } => *kind,
            SuperviseError::Cancelled { .. } => Kind::Cancelled,
            SuperviseError::Ended { .. } => Kind::Stale,
            SuperviseError::Forked { .. } => Kind::Unsupported,
        }
    }
}
