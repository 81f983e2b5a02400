//! What can go wrong when a region is served.

use std::path::PathBuf;

use windlass_core::error::Kind;
use windlass_core::identity::Version;
use windlass_core::wire::TicketError;

use crate::history::HistoryError;
use crate::receiver::ControlError;
use crate::region::RegionError;
use crate::seal::SealError;
use crate::seal::table::TableError;
use crate::tcp::TcpError;

/// A request that was not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The region.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The history of deltas.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// Sealing.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The table of sums.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The link.
    #[error(transparent)]
    Tcp(#[from] TcpError),
    /// A ticket that cannot be made.
    #[error("no ticket can be made for this request: {0}")]
    Ticket(#[from] TicketError),
    /// The holder of another part.
    #[error("the holder of another part does not take part: {0}")]
    Peer(#[from] ControlError),
    /// Nothing has been published yet.
    #[error("no version of {model} has been published yet: wait for the first")]
    NothingYet {
        /// Which model.
        model: String,
    },
    /// A version that is not in a slot any more, or not yet.
    #[error("version {version} is not held here{}: ask for the newest", newest.map_or(String::new(), |n| format!(", the newest is {n}")))]
    NoVersion {
        /// What was asked for.
        version: Version,
        /// What is there.
        newest: Option<Version>,
    },
    /// A version that is served by delta and whose image is not there yet.
    #[error("version {version} is served by delta only until its slot is whole: ask again soon")]
    NotWhole {
        /// The version.
        version: Version,
    },
    /// An instance id that was never given out, or was forgotten.
    #[error(
        "instance {instance:?} is not registered here: register again (the agent may have been restarted)"
    )]
    UnknownInstance {
        /// What it called itself.
        instance: String,
    },
    /// Random bytes.
    #[error("the system gives no random bytes")]
    Random(String),
    /// A thread.
    #[error("cannot start the {name} thread")]
    Thread {
        /// Which.
        name: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// A slot's file.
    #[error("cannot open {}", path.display())]
    Slot {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A number out of bounds.
    #[error("{what} is {value}, allowed are {allowed}")]
    Bounds {
        /// What.
        what: &'static str,
        /// The value.
        value: u64,
        /// What would be.
        allowed: String,
    },
}

impl ServeError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ServeError::Region(e) => e.kind(),
            ServeError::History(e) => e.kind(),
            ServeError::Seal(e) => e.kind(),
            ServeError::Table(e) => e.kind(),
            ServeError::Tcp(e) => e.kind(),
            ServeError::Ticket(e) => e.kind(),
            ServeError::Peer(e) => match e.kind() {
                // It is not the requester that was not found: what it asked for is gone at a holder, or not there yet.
                Kind::NotFound => Kind::Stale,
                kind => kind,
            },
            ServeError::NotWhole { .. } => Kind::Stale,
            ServeError::NothingYet { .. }
            | ServeError::NoVersion { .. }
            | ServeError::UnknownInstance { .. } => Kind::NotFound,
            ServeError::Random(_) | ServeError::Thread { .. } => Kind::Exhausted,
            ServeError::Slot { source, .. } => crate::file::io_kind(source),
            ServeError::Bounds { .. } => Kind::Invalid,
        }
    }
}
