//! What can go wrong when a region is served.

use std::path::PathBuf;

use windlass_core::error::Kind;
use windlass_core::identity::Version;
use windlass_core::wire::{TicketError, TicketId};

use crate::history::HistoryError;
use crate::nixl::NixlError;
use crate::receiver::ControlError;
use crate::region::RegionError;
use crate::seal::SealError;
use crate::seal::table::TableError;
use crate::tcp::TcpError;

/// A request that was not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error(transparent)]
    Table(#[from] TableError),
    #[error(transparent)]
    Tcp(#[from] TcpError),
    #[error("no ticket can be made for this request: {0}")]
    Ticket(#[from] TicketError),
    #[error("the holder of another part does not take part: {0}")]
    Peer(#[from] ControlError),
    #[error("no version of {model} has been published yet: wait for the first")]
    NothingYet { model: String },
    /// A version that is not in a slot any more, or not yet.
    #[error("version {version} is not held here{}: ask for the newest", newest.map_or(String::new(), |n| format!(", the newest is {n}")))]
    NoVersion { version: Version, newest: Option<Version> },
    /// A version that is served by delta and whose image is not there yet.
    #[error("version {version} is served by delta only until its slot is whole: ask again soon")]
    NotWhole { version: Version },
    /// An instance id that was never given out, or was forgotten.
    #[error(
        "instance {instance:?} is not registered here: register again (the agent may have been restarted)"
    )]
    UnknownInstance { instance: String },
    /// A ticket that is not of a swarm, or whose version is long gone.
    #[error("no receiver passes on what ticket {ticket} is for: it comes from the ticket's sources alone")]
    UnknownTicket { ticket: TicketId },
    #[error("the system gives no random bytes")]
    Random(String),
    #[error("cannot start the {name} thread")]
    Thread { name: &'static str, source: std::io::Error },
    #[error("cannot open {}", path.display())]
    Slot { path: PathBuf, source: std::io::Error },
    #[error(
        "block {block} of the slot with version {version} differs from the hash that it was sealed with: a process wrote to \
         the slot afterwards; nothing of this version is uploaded"
    )]
    Differs { version: Version, block: u32 },
    #[error("the slots cannot be read by NIXL: {source}; or run the agent with --nixl off")]
    Export { source: NixlError },
    #[error("{what} is {value}, allowed are {allowed}")]
    Bounds { what: &'static str, value: u64, allowed: String },
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
            | ServeError::UnknownTicket { .. }
            | ServeError::UnknownInstance { .. } => Kind::NotFound,
            ServeError::Random(_) | ServeError::Thread { .. } => Kind::Exhausted,
            ServeError::Slot { source, .. } => crate::file::io_kind(source),
            ServeError::Differs { .. } => Kind::Corrupt,
            ServeError::Export { source } => source.kind(),
            ServeError::Bounds { .. } => Kind::Invalid,
        }
    }
}
