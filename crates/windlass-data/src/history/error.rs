//! Why a delta cannot be kept or had.

use std::io;
use std::path::PathBuf;

use windlass_core::delta::DeltaError;
use windlass_core::error::Kind;
use windlass_core::identity::Version;

use crate::file::io_kind;
use crate::stop::Stopped;

/// Why a delta cannot be kept or had.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The base is older than the oldest delta.
    #[error("version {base} is too old for a delta: the history begins at {oldest}; pull the full image")]
    TooOld {
        /// The base asked for.
        base: Version,
        /// The oldest base there is.
        oldest: Version,
    },
    /// A version that the chain does not have.
    #[error(
        "version {version} is not one of the history, which leads from {oldest} to {newest}; pull the full image"
    )]
    Unknown {
        /// The version asked for.
        version: Version,
        /// The oldest base there is.
        oldest: Version,
        /// The newest target there is.
        newest: Version,
    },
    /// There is no delta at all.
    #[error(
        "the history is empty, so that nothing leads from version {base} to {target}; pull the full image"
    )]
    Empty {
        /// The base asked for.
        base: Version,
        /// The target asked for.
        target: Version,
    },
    /// The target is not newer than the base.
    #[error("no delta of the chain leads from version {base} to {target}: its links lead to newer versions")]
    Backwards {
        /// The base asked for.
        base: Version,
        /// The target asked for.
        target: Version,
    },
    /// A file is not the delta that it should be. It is not, or no longer, one of the history.
    #[error("the delta {} cannot be used and was left out of the history; pull the full image", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: DeltaError,
    },
    /// A delta of another model, incarnation, place or length.
    #[error("{} does not belong in this history: its {what} is {found} instead of {expected}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What it has.
        found: String,
        /// What it should have.
        expected: String,
    },
    /// A delta that does not compose.
    #[error(
        "the delta {} has context records, which do not compose without the image; seal a plain delta for the \
         history, or pull the full image", path.display()
    )]
    Context {
        /// The file.
        path: PathBuf,
    },
    /// A composed record that no reader would take.
    #[error(
        "block {block} changed so much from version {base} to {target} that its changes are longer than the block; \
         pull the full image"
    )]
    TooDense {
        /// The base asked for.
        base: Version,
        /// The target asked for.
        target: Version,
        /// The block.
        block: u32,
    },
    /// A link that cannot be taken back.
    #[error(
        "block {block} was replaced from version {base} to {target} and its old units were not kept, so that nothing leads \
         back over it; pull the newest image"
    )]
    OneWay {
        /// Where the link begins.
        base: Version,
        /// Where it leads.
        target: Version,
        /// The block.
        block: u32,
    },
    /// The slot was wanted back.
    #[error(
        "the slot of version {version} was wanted back while the way to an older one was made; ask again"
    )]
    Overtaken {
        /// What was in the slot.
        version: Version,
    },
    /// A link that leads to an older version than the chain has.
    #[error("version {target} cannot be added to a history that leads to {newest}: versions only grow")]
    NotNewer {
        /// Where the new link leads.
        target: Version,
        /// Where the chain leads.
        newest: Version,
    },
    /// The caller gave up.
    #[error("waiting for the delta from version {base} to {target} was given up")]
    Stopped {
        /// The base asked for.
        base: Version,
        /// The target asked for.
        target: Version,
        /// Why.
        source: Stopped,
    },
}

impl HistoryError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            HistoryError::Io { source, .. } => io_kind(source),
            HistoryError::TooOld { .. }
            | HistoryError::NotNewer { .. }
            | HistoryError::OneWay { .. }
            | HistoryError::Overtaken { .. } => Kind::Stale,
            HistoryError::Unknown { .. } | HistoryError::Empty { .. } => Kind::NotFound,
            HistoryError::Backwards { .. } | HistoryError::Foreign { .. } => Kind::Invalid,
            HistoryError::Broken { source, .. } => source.kind(),
            HistoryError::Context { .. } | HistoryError::TooDense { .. } => Kind::Unsupported,
            HistoryError::Stopped { source, .. } => source.kind(),
        }
    }
}
