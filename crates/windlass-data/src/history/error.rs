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
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("version {base} is too old for a delta: the history begins at {oldest}; pull the full image")]
    TooOld { base: Version, oldest: Version },
    #[error(
        "version {version} is not one of the history, which leads from {oldest} to {newest}; pull the full image"
    )]
    Unknown { version: Version, oldest: Version, newest: Version },
    #[error(
        "the history is empty, so that nothing leads from version {base} to {target}; pull the full image"
    )]
    Empty { base: Version, target: Version },
    #[error("no delta of the chain leads from version {base} to {target}: its links lead to newer versions")]
    Backwards { base: Version, target: Version },
    /// A file is not the delta that it should be. It is not, or no longer, one of the history.
    #[error("the delta {} cannot be used and was left out of the history; pull the full image", path.display())]
    Broken { path: PathBuf, source: DeltaError },
    #[error("{} does not belong in this history: its {what} is {found} instead of {expected}", path.display())]
    Foreign { path: PathBuf, what: &'static str, found: String, expected: String },
    #[error(
        "the delta {} has context records, which do not compose without the image; seal a plain delta for the \
         history, or pull the full image", path.display()
    )]
    Context { path: PathBuf },
    #[error(
        "block {block} changed so much from version {base} to {target} that its changes are longer than the block; \
         pull the full image"
    )]
    TooDense { base: Version, target: Version, block: u32 },
    #[error(
        "block {block} was replaced from version {base} to {target} and its old units were not kept, so that nothing leads \
         back over it; pull the newest image"
    )]
    OneWay { base: Version, target: Version, block: u32 },
    #[error(
        "the slot of version {version} was wanted back while the way to an older one was made; ask again"
    )]
    Overtaken { version: Version },
    /// A link that leads to an older version than the chain has.
    #[error("version {target} cannot be added to a history that leads to {newest}: versions only grow")]
    NotNewer { target: Version, newest: Version },
    #[error("waiting for the delta from version {base} to {target} was given up")]
    Stopped { base: Version, target: Version, source: Stopped },
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
