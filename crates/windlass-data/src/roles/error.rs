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
use crate::nixl::NixlError;
use crate::publish::PublishError;
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
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Publish(#[from] PublishError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Receiver(#[from] ReceiverError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Local(#[from] LocalError),
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error(transparent)]
    Table(#[from] TableError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    SyncInfo(#[from] SyncInfoError),
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    #[error(transparent)]
    Nixl(#[from] NixlError),
    #[error(transparent)]
    Loan(#[from] LoanError),
    #[error("rank {rank} extracts layout {found}, the region has {expected}: give both the same manifest")]
    OtherLayout { rank: u16, found: LayoutHash, expected: LayoutHash },
    /// A range that the tensor does not have, or that is out of order.
    #[error(
        "rank {rank} says that it has bytes {range:?} of {tensor:?}, which has {bytes}: \
         give ranges in order, apart from each other and inside the tensor"
    )]
    Range { rank: u16, tensor: String, range: Range<u64>, bytes: u64 },
    #[error(
        "bytes {range:?} of {tensor:?} are extracted by no rank: they would be left as they were two versions ago; \
         make the ranges of the extractor cover the tensor"
    )]
    Uncovered { tensor: String, range: Range<u64> },
    #[error("rank {rank} could not extract bytes {range:?} of {tensor:?} for version {version}")]
    Extract { rank: u16, tensor: String, range: Range<u64>, version: Version, source: BoxError },
    #[error(
        "the loader failed on {identity}; {}; it will be given the newest version again",
        still.as_ref().map_or_else(|| "no version is loaded".into(), |s| format!("{s} is still recorded as loaded"))
    )]
    Load { identity: Box<Identity>, still: Option<Box<Identity>>, source: BoxError },
    #[error(
        "{} holds digest {found} where {identity} should be {expected}: something wrote into the slot; \
         publish a new version", place.display()
    )]
    Digest { place: PathBuf, identity: Box<Identity>, found: StateDigest, expected: StateDigest },
    /// A receiver that gives fewer or more bytes than the manifest has.
    #[error("{identity} came with {have} bytes of data, its manifest has {need}")]
    Truncated { identity: Box<Identity>, have: u64, need: u64 },
    /// The region on this host holds only a part of the image.
    #[error("the region at {} holds only a part of {model}: use the tcp link, which asks all holders", dir.display())]
    Partial { dir: PathBuf, model: String },
    #[error("no process serves the region at {}: start its publisher", dir.display())]
    Away { dir: PathBuf, source: std::io::Error },
    #[error(
        "the {strategy} strategy needs sync info of type {expected}, this is {found}: build the strategy that the trainer has"
    )]
    OtherSyncInfo { strategy: &'static str, expected: &'static str, found: &'static str },
    #[error("the strategy {strategy} over {link} is not in this build: {remedy}")]
    Unsupported { strategy: String, link: String, remedy: &'static str },
    #[error("{what} was given up: {source}")]
    Stopped {
        /// What was waited for or done, by whom.
        what: String,
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
            RoleError::Publish(e) => e.kind(),
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
            RoleError::Nixl(e) => e.kind(),
            RoleError::Loan(e) => e.kind(),
            RoleError::OtherLayout { .. }
            | RoleError::Range { .. }
            | RoleError::Uncovered { .. }
            | RoleError::Extract { .. }
            | RoleError::Load { .. }
            | RoleError::OtherSyncInfo { .. } => Kind::Invalid,
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
