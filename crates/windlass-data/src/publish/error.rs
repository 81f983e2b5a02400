//! Why a rank cannot publish as it was asked to.

use std::io;
use std::path::PathBuf;

use windlass_core::delta::DeltaError;
use windlass_core::delta_mode::DeltaModeError;
use windlass_core::error::Kind;
use windlass_core::identity::Version;
use windlass_core::manifest::ManifestError;

use super::RecordsFault;
use crate::file::io_kind;
use crate::region::RegionError;
use crate::seal::SealError;
use crate::shm::LoanError;
use crate::stop::Stopped;

/// Why a rank cannot publish as it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cannot get {what}")]
    Exhausted { what: &'static str, source: io::Error },
    /// The background work for a version failed. It was not committed; the one before it is still served.
    #[error(
        "rank {rank}: version {version} was not committed in the background: {source}. Publish the next version as a copy"
    )]
    Background { rank: u16, version: Version, source: Box<PublishError> },
    #[error(
        "rank {rank}: the background thread of version {version} panicked; its message is on standard error"
    )]
    Panicked { rank: u16, version: Version },
    /// A call in the wrong order.
    #[error("rank {rank} cannot {what} now: {why}")]
    Turn { rank: u16, what: &'static str, why: &'static str },
    #[error(
        "rank {rank} waited for rank 0 to make the region {}: {found}; see whether rank 0 publishes the same tensors \
         under the same model_id and region_dir", dir.display()
    )]
    Join {
        rank: u16,
        dir: PathBuf,
        /// The reason why the region cannot be joined yet.
        found: String,
        source: Stopped,
    },
    #[error(
        "rank {rank}: the region is cut into other blocks than this rank's layout; give all ranks the same offload_mode"
    )]
    OtherCuts { rank: u16 },
    #[error("version {version} is no longer kept here: version {newest} replaced it before it was sealed")]
    Replaced { version: Version, newest: Version },
    #[error("version {version} was not sealed in time; see whether the agent runs")]
    Unsealed { version: Version, source: Stopped },
    #[error("rank {rank}: version {version} cannot be a delta: {why}; publish it as a copy")]
    NeedsCopy { rank: u16, version: Version, why: String },
    #[error(
        "rank {rank}: version {version} cannot be published{}: version {taken} was handed out by delta before; give the next version a number above {taken}",
        if version == taken { " with other bytes" } else { "" }
    )]
    Taken {
        rank: u16,
        version: Version,
        /// The newest version that was handed out.
        taken: Version,
    },
    #[error("the region of rank {rank} has {slots} slot, and deltas need two")]
    Slots { rank: u16, slots: usize },
    #[error("rank {rank} cannot answer for these blocks: {source}")]
    Blocks { rank: u16, source: DeltaModeError },
    #[error("rank {rank} cannot answer for block {block}, which its region does not hold")]
    NotHeld { rank: u16, block: u32 },
    #[error("rank {rank}: the records of version {version} cannot be used: {source}")]
    Records { rank: u16, version: Version, source: RecordsFault },
    /// A record that does not lead from the slot's bytes to its sum.
    #[error(
        "rank {rank}: the record of block {block} to version {version} does not fit the bytes of its base: memory changed, or the encoder is wrong"
    )]
    Misfit { rank: u16, block: u32, version: Version },
    #[error(transparent)]
    Delta(#[from] DeltaError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error(transparent)]
    Loan(#[from] LoanError),
    #[error("encoding failed: {0}")]
    Encoder(Box<dyn std::error::Error + Send + Sync>, Kind),
    #[error("the background work of a version: {0}")]
    Stopped(#[from] Stopped),
}

impl PublishError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        use PublishError as E;
        match self {
            E::Region(e) => e.kind(),
            E::Io { source, .. } => io_kind(source),
            E::Exhausted { .. } => Kind::Exhausted,
            E::Background { source, .. } => source.kind(),
            E::Panicked { .. } => Kind::Bug,
            E::Turn { .. } | E::OtherCuts { .. } | E::Slots { .. } | E::NotHeld { .. } => Kind::Invalid,
            E::NeedsCopy { .. } | E::Replaced { .. } | E::Taken { .. } => Kind::Stale,
            E::Join { source, .. } | E::Unsealed { source, .. } => source.kind(),
            E::Blocks { source, .. } => source.kind(),
            E::Records { source, .. } => source.kind(),
            E::Misfit { .. } => Kind::Corrupt,
            E::Delta(e) => e.kind(),
            E::Manifest(e) => e.kind(),
            E::Seal(e) => e.kind(),
            E::Loan(e) => e.kind(),
            E::Encoder(_, kind) => *kind,
            E::Stopped(s) => s.kind(),
        }
    }
}
