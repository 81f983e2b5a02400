//! What can go wrong between the roles.

use std::ops::Range;
use std::path::PathBuf;

use windlass_core::chunk::ChunkError;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, LayoutHash, StateDigest, Version};
use windlass_core::manifest::ManifestError;
use windlass_core::sync_info::SyncInfoError;

use crate::image::ImageError;
use crate::local::LocalError;
use crate::receiver::{ControlError, ReceiverError};
use crate::region::RegionError;
use crate::seal::SealError;
use crate::seal::table::TableError;
use crate::serve::ServeError;
use crate::shm::LoanError;
use crate::stop::Stopped;

/// An error of the trainer's or the engine's own code.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A role that could not do its part. The last version that was whole still is.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// The region.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The receiver.
    #[error(transparent)]
    Receiver(#[from] ReceiverError),
    /// The control connection.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The server.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The way into a region on this host.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// The sums.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The table of sums.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Sync info that cannot be made.
    #[error(transparent)]
    SyncInfo(#[from] SyncInfoError),
    /// Chunks that cannot be made.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// Two ranges of a rank overlap.
    #[error(transparent)]
    Loan(#[from] LoanError),
    /// The extractor is of another model than the region.
    #[error("rank {rank} extracts layout {found}, the region has {expected}: give both the same manifest")]
    OtherLayout {
        /// Which rank.
        rank: u16,
        /// What the extractor has.
        found: LayoutHash,
        /// What the region has.
        expected: LayoutHash,
    },
    /// A range that the tensor does not have, or that is out of order.
    #[error(
        "rank {rank} says that it has bytes {range:?} of {tensor:?}, which has {bytes}: \
         give ranges in order, apart from each other and inside the tensor"
    )]
    Range {
        /// Which rank.
        rank: u16,
        /// The tensor.
        tensor: String,
        /// The range.
        range: Range<u64>,
        /// Bytes of the tensor.
        bytes: u64,
    },
    /// Nobody would write these bytes.
    #[error(
        "bytes {range:?} of {tensor:?} are extracted by no rank: they would be left as they were two versions ago; \
         make the ranges of the extractor cover the tensor"
    )]
    Uncovered {
        /// The tensor.
        tensor: String,
        /// The bytes.
        range: Range<u64>,
    },
    /// The extractor failed.
    #[error("rank {rank} could not extract bytes {range:?} of {tensor:?} for version {version}")]
    Extract {
        /// Which rank.
        rank: u16,
        /// The tensor.
        tensor: String,
        /// The bytes.
        range: Range<u64>,
        /// The version.
        version: Version,
        /// Why.
        source: BoxError,
    },
    /// The loader failed.
    #[error(
        "the loader failed on {identity}; {}; it will be given the newest version again",
        still.as_ref().map_or_else(|| "no version is loaded".into(), |s| format!("{s} is still recorded as loaded"))
    )]
    Load {
        /// What was to be loaded.
        identity: Box<Identity>,
        /// What is recorded as loaded.
        still: Option<Box<Identity>>,
        /// Why.
        source: BoxError,
    },
    /// A version that is not in the region any more.
    #[error("version {version} was replaced before it was sealed, version {newest} is there: wait for that")]
    Replaced {
        /// What was waited for.
        version: Version,
        /// What is there.
        newest: Version,
    },
    /// The bytes are not those of the version.
    #[error(
        "{} holds digest {found} where {identity} should be {expected}: something wrote into the slot; \
         publish a new version", place.display()
    )]
    Digest {
        /// Where.
        place: PathBuf,
        /// Which version.
        identity: Box<Identity>,
        /// The digest of the bytes.
        found: StateDigest,
        /// The digest of the version.
        expected: StateDigest,
    },
    /// A receiver that gives fewer or more bytes than the manifest has.
    #[error("{identity} came with {have} bytes of data, its manifest has {need}")]
    Truncated {
        /// Which version.
        identity: Box<Identity>,
        /// What came.
        have: u64,
        /// What should.
        need: u64,
    },
    /// The region on this host holds only a part of the image.
    #[error("the region at {} holds only a part of {model}: use the tcp link, which asks all holders", dir.display())]
    Partial {
        /// Which region.
        dir: PathBuf,
        /// Whose.
        model: String,
    },
    /// Nobody serves the region on this host.
    #[error("nobody serves the region at {}: start its publisher", dir.display())]
    Away {
        /// Which region.
        dir: PathBuf,
        /// What was seen.
        source: std::io::Error,
    },
    /// Sync info of another strategy.
    #[error(
        "the {strategy} strategy needs sync info of type {expected}, this is {found}: build the strategy that the trainer has"
    )]
    OtherSyncInfo {
        /// Which strategy.
        strategy: &'static str,
        /// What it needs.
        expected: &'static str,
        /// What came.
        found: &'static str,
    },
    /// A strategy that this build does not have.
    #[error("the strategy {strategy} over {link} is not in this build: {remedy}")]
    Unsupported {
        /// The strategy.
        strategy: String,
        /// The link.
        link: String,
        /// What to do.
        remedy: &'static str,
    },
    /// It was called off.
    #[error("{what} was given up: {source}")]
    Stopped {
        /// What was waited for or done, by whom.
        what: String,
        /// Why.
        source: Stopped,
    },
}

/// Work on threads says only that it was stopped; who called knows what it was.
impl From<Stopped> for RoleError {
    fn from(source: Stopped) -> RoleError {
        RoleError::Stopped { what: "the work".into(), source }
    }
}

impl RoleError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            RoleError::Region(e) => e.kind(),
            RoleError::Image(e) => e.kind(),
            RoleError::Receiver(e) => e.kind(),
            RoleError::Control(e) => e.kind(),
            RoleError::Serve(e) => e.kind(),
            RoleError::Local(e) => e.kind(),
            RoleError::Seal(e) => e.kind(),
            RoleError::Table(e) => e.kind(),
            RoleError::Manifest(e) => e.kind(),
            RoleError::SyncInfo(e) => e.kind(),
            RoleError::Chunk(e) => e.kind(),
            RoleError::Loan(e) => e.kind(),
            RoleError::OtherLayout { .. }
            | RoleError::Range { .. }
            | RoleError::Uncovered { .. }
            | RoleError::Extract { .. }
            | RoleError::Load { .. }
            | RoleError::OtherSyncInfo { .. } => Kind::Invalid,
            RoleError::Replaced { .. } => Kind::Stale,
            RoleError::Digest { .. } | RoleError::Truncated { .. } => Kind::Corrupt,
            RoleError::Partial { .. } | RoleError::Unsupported { .. } => Kind::Unsupported,
            RoleError::Away { .. } => Kind::PeerLost,
            RoleError::Stopped { source, .. } => source.kind(),
        }
    }

    /// The same, saying what was stopped.
    pub(super) fn stopped(what: impl Into<String>) -> impl FnOnce(Stopped) -> RoleError {
        let what = what.into();
        move |source| RoleError::Stopped { what, source }
    }
}
