//! Why a rank cannot publish as it was asked to.

use std::io;
use std::path::PathBuf;

use windlass_core::delta::DeltaError;
use windlass_core::delta::early::EarlyError as CoreError;
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
pub enum EarlyError {
    /// The region.
    #[error(transparent)]
    Region(#[from] RegionError),
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
    /// The system gives no more memory or threads.
    #[error("cannot get {what}")]
    Exhausted {
        /// What.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The background work for a version failed. It was not committed; the one before it is still served.
    #[error(
        "rank {rank}: version {version} was not committed in the background: {source}. Publish the next version as a copy"
    )]
    Background {
        /// This rank.
        rank: u16,
        /// The version.
        version: Version,
        /// Why.
        source: Box<EarlyError>,
    },
    /// The background thread panicked.
    #[error(
        "rank {rank}: the background thread of version {version} panicked; its message is on standard error"
    )]
    Panicked {
        /// This rank.
        rank: u16,
        /// The version.
        version: Version,
    },
    /// A call that does not fit where the rank stands.
    #[error("rank {rank} cannot {what} now: {why}")]
    Turn {
        /// This rank.
        rank: u16,
        /// What was asked for.
        what: &'static str,
        /// Why not.
        why: &'static str,
    },
    /// The version cannot come as a delta.
    #[error("rank {rank}: version {version} cannot be a delta: {why}; publish it as a copy")]
    NeedsCopy {
        /// This rank.
        rank: u16,
        /// The version.
        version: Version,
        /// Why.
        why: String,
    },
    /// The number was given to other bytes.
    #[error(
        "rank {rank}: version {version} cannot be published{}: version {taken} was handed out by delta before; give the next version a number above {taken}",
        if version == taken { " with other bytes" } else { "" }
    )]
    Taken {
        /// This rank.
        rank: u16,
        /// The version.
        version: Version,
        /// The newest version that was handed out.
        taken: Version,
    },
    /// A region that holds one image only.
    #[error("the region of rank {rank} has {slots} slot, and deltas need two")]
    Slots {
        /// This rank.
        rank: u16,
        /// How many there are.
        slots: usize,
    },
    /// Blocks that are not there.
    #[error("rank {rank} cannot answer for these blocks: {source}")]
    Blocks {
        /// This rank.
        rank: u16,
        /// Why not.
        source: CoreError,
    },
    /// A block that is not held here.
    #[error("rank {rank} cannot answer for block {block}, which its region does not hold")]
    NotHeld {
        /// This rank.
        rank: u16,
        /// The block.
        block: u32,
    },
    /// What an encoder gave is malformed.
    #[error("rank {rank}: the records of version {version} cannot be used: {source}")]
    Records {
        /// This rank.
        rank: u16,
        /// The version.
        version: Version,
        /// Why.
        source: RecordsFault,
    },
    /// A record that does not lead from the slot's bytes to its sum.
    #[error(
        "rank {rank}: the record of block {block} to version {version} does not fit the bytes of its base: memory changed, or the encoder is wrong"
    )]
    Misfit {
        /// This rank.
        rank: u16,
        /// The block.
        block: u32,
        /// The version.
        version: Version,
    },
    /// A malformed record.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// A block that is not there.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Summing.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// Memory of the slot.
    #[error(transparent)]
    Loan(#[from] LoanError),
    /// An encoder that is not one of this crate.
    #[error("encoding failed: {0}")]
    Encoder(Box<dyn std::error::Error + Send + Sync>, Kind),
    /// Called off or too late.
    #[error("the background work of a version: {0}")]
    Stopped(#[from] Stopped),
}

impl EarlyError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        use EarlyError as E;
        match self {
            E::Region(e) => e.kind(),
            E::Io { source, .. } => io_kind(source),
            E::Exhausted { .. } => Kind::Exhausted,
            E::Background { source, .. } => source.kind(),
            E::Panicked { .. } => Kind::Bug,
            E::Turn { .. } | E::Slots { .. } | E::NotHeld { .. } => Kind::Invalid,
            E::NeedsCopy { .. } | E::Taken { .. } => Kind::Stale,
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
