//! What can go wrong between a receiver and an engine.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use windlass_core::error::Kind;
use windlass_data::file::{FileError, io_kind};
use windlass_data::image::ImageError;
use windlass_data::region::RegionError;

use crate::error::Error;

/// What was being done with the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Asking what it is and which weights it has.
    Ask,
    /// Comparing the image with what it can take.
    Check,
    /// Making it ready for its first load.
    Prepare,
    Pause,
    /// Between the pause and the first write.
    Paused,
    Load,
    Cache,
    /// Letting it go on.
    Resume,
    /// Comparing what it holds with the image.
    Verify,
}

impl Stage {
    /// As a verb.
    pub const fn as_str(self) -> &'static str {
        match self {
            Stage::Ask => "ask",
            Stage::Check => "check",
            Stage::Prepare => "prepare",
            Stage::Pause | Stage::Paused => "pause",
            Stage::Load => "load",
            Stage::Cache => "clear the cache of",
            Stage::Resume => "resume",
            Stage::Verify => "verify",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An engine that could not be asked or loaded.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("cannot {stage} {engine}: {why}")]
    Lost { engine: String, stage: Stage, why: String, kind: Kind },
    #[error("{engine}: {path} ({stage}) answered {status}: {body}")]
    Refused {
        engine: String,
        stage: Stage,
        path: String,
        status: u16,
        /// The beginning of what it said.
        body: String,
        kind: Kind,
    },
    #[error("cannot {stage} {engine}: the answer of {path} makes no sense: {why}")]
    Answer { engine: String, stage: Stage, path: String, why: String },
    /// It has no route by which it could be loaded.
    #[error("{engine} cannot be loaded: {why}")]
    NoRoute {
        engine: String,
        /// What is missing, and what to start it with.
        why: String,
    },
    /// A worker says that it did not do what it was told.
    #[error("cannot {stage} {engine}: worker {rank} says: {text}")]
    Worker { engine: String, stage: Stage, rank: u64, text: String, kind: Kind },
    #[error("{engine} goes on with its old weights: worker {rank} refused the order: {text}")]
    Declined { engine: String, rank: u64, text: String, kind: Kind },
    #[error("{engine} was not touched and goes on with its old weights: tensor {tensor:?} of {image} {how}")]
    Layout {
        engine: String,
        image: String,
        /// The first tensor that does not fit.
        tensor: String,
        /// How it does not, and compared with what.
        how: String,
    },
    /// The image holds tensors that the engine does not have, and these were to be errors.
    #[error("{engine} was not touched: {image} has tensors that it does not take: {names}")]
    Extras { engine: String, image: String, names: String },
    /// A cache that could not be cleared would go on answering with the old weights.
    #[error("the prefix cache of {engine} was not flushed: {why}")]
    Cache { engine: String, why: String },
    #[error("{engine} was paused and nothing was written to it: {why}")]
    Lease { engine: String, why: String, kind: Kind },
    /// It says that it has other weights than it was given.
    #[error("{engine} was loaded with {expected}, and says that it has {found}")]
    Version { engine: String, expected: String, found: String },
    #[error("{engine}: {why}")]
    Unsupported { engine: String, why: String },
    #[error("{text}")]
    Guard {
        stage: Option<Stage>,
        kind: Kind,
        /// What it says, the engine's name included.
        text: String,
        advice: String,
    },
    #[error("the guard of {engine} {what}")]
    Process { engine: String, what: String },
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl EngineError {
    /// For `map_err` on file operations.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> EngineError {
        let path = path.to_owned();
        move |source| EngineError::Io { action, path, source }
    }

    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            EngineError::Lost { kind, .. }
            | EngineError::Refused { kind, .. }
            | EngineError::Worker { kind, .. }
            | EngineError::Declined { kind, .. }
            | EngineError::Lease { kind, .. }
            | EngineError::Guard { kind, .. } => *kind,
            EngineError::Answer { .. } => Kind::Corrupt,
            EngineError::NoRoute { .. } | EngineError::Unsupported { .. } => Kind::Unsupported,
            EngineError::Layout { .. } | EngineError::Extras { .. } => Kind::Invalid,
            EngineError::Cache { .. } | EngineError::Version { .. } => Kind::Stale,
            EngineError::Process { .. } => Kind::PeerLost,
            EngineError::Image(e) => e.kind(),
            EngineError::Region(e) => e.kind(),
            EngineError::File(e) => e.kind(),
            EngineError::Io { source, .. } => io_kind(source),
        }
    }

    /// What was being done with the engine.
    pub fn stage(&self) -> Stage {
        match self {
            EngineError::Lost { stage, .. }
            | EngineError::Refused { stage, .. }
            | EngineError::Answer { stage, .. }
            | EngineError::Worker { stage, .. } => *stage,
            EngineError::Guard { stage, .. } => stage.unwrap_or(Stage::Load),
            EngineError::NoRoute { .. } | EngineError::Unsupported { .. } => Stage::Ask,
            EngineError::Layout { .. }
            | EngineError::Extras { .. }
            | EngineError::File(_)
            | EngineError::Image(_)
            | EngineError::Region(_)
            | EngineError::Io { .. } => Stage::Check,
            EngineError::Cache { .. } => Stage::Cache,
            EngineError::Lease { .. } => Stage::Paused,
            EngineError::Version { .. } => Stage::Resume,
            EngineError::Process { .. } | EngineError::Declined { .. } => Stage::Load,
        }
    }

    /// Whether nobody answers at all.
    pub fn is_away(&self) -> bool {
        match self {
            EngineError::Lost { kind, .. } => matches!(kind, Kind::PeerLost | Kind::Timeout),
            EngineError::Refused { .. }
            | EngineError::Answer { .. }
            | EngineError::NoRoute { .. }
            | EngineError::Worker { .. }
            | EngineError::Declined { .. }
            | EngineError::Layout { .. }
            | EngineError::Extras { .. }
            | EngineError::Cache { .. }
            | EngineError::Lease { .. }
            | EngineError::Version { .. }
            | EngineError::Unsupported { .. }
            | EngineError::Guard { .. }
            | EngineError::Process { .. }
            | EngineError::Image(_)
            | EngineError::Region(_)
            | EngineError::File(_)
            | EngineError::Io { .. } => false,
        }
    }

    /// What to do next.
    pub fn advice(&self) -> &str {
        match self {
            EngineError::Guard { advice, .. } => advice,
            EngineError::Layout { .. } => {
                "publish the tensors of the model that the engine serves; the next version that fits is loaded"
            }
            EngineError::Extras { .. } => {
                "leave them out where they are published, or accept them with --extras ignore"
            }
            EngineError::Cache { .. } => {
                "the engine stays paused, because it would answer from old weights; restart it if this repeats"
            }
            EngineError::Lost { kind: Kind::PeerLost | Kind::Timeout, .. } => {
                "check that the engine runs, and that this is its address"
            }
            EngineError::Refused { status: 401 | 403, .. } => {
                "give the key that the engine was started with (its API key)"
            }
            // What the engine says of itself: its kind is a guess, and its log knows more.
            EngineError::Refused { .. } | EngineError::Answer { .. } | EngineError::Worker { .. } => {
                "see the engine's own log for the cause"
            }
            EngineError::Lost { .. }
            | EngineError::NoRoute { .. }
            | EngineError::Declined { .. }
            | EngineError::Lease { .. }
            | EngineError::Version { .. }
            | EngineError::Unsupported { .. }
            | EngineError::Process { .. } => "",
            EngineError::Image(_)
            | EngineError::Region(_)
            | EngineError::File(_)
            | EngineError::Io { .. } => self.kind().advice(),
        }
    }
}

impl From<EngineError> for Error {
    fn from(e: EngineError) -> Error {
        Error::of_module(e.kind(), e.advice().to_owned(), e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bug_in_a_worker_sends_the_reader_to_the_engines_log() {
        let error = Error::from(EngineError::Worker {
            engine: "vllm at http://a:1".into(),
            stage: Stage::Load,
            rank: 0,
            text: "AttributeError".into(),
            kind: Kind::Bug,
        });
        assert_eq!(
            (error.kind(), error.advice().as_str()),
            (Kind::Bug, "see the engine's own log for the cause")
        );
        assert!(error.chain().contains("AttributeError"), "{}", error.chain());
    }
}
