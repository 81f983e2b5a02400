//! What can go wrong on the TCP link.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use windlass_core::error::Kind;
use windlass_core::wire::{Failure, Fault, Stage, TicketError, TicketId, WireError};

use crate::nixl::NixlError;
use crate::stop::Stopped;
use crate::tls::TlsError;

/// What can go wrong on the TCP link. `peer` names the other end as the caller knows it, with its address.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    #[error(
        "cannot listen on {bind}, ports {first} to {last}: {source}; free a port, widen the range or bind \
         another address"
    )]
    Bind { bind: IpAddr, first: u16, last: u16, source: io::Error },
    #[error("cannot set up {what}: {source}; raise the limits on descriptors and threads")]
    Setup { what: &'static str, source: io::Error },
    #[error("ticket {ticket}: the sender is shutting down and takes no more offers")]
    ShuttingDown { ticket: TicketId },
    #[error("ticket {ticket}: {max} offers are open already: wait until transfers end, or raise max_offers")]
    TooManyOffers { ticket: TicketId, max: usize },
    #[error("ticket {ticket} is offered already: mint a new id for every transfer")]
    OfferedTwice { ticket: TicketId },
    #[error("ticket {ticket} has no source {source_id}: offer as one of its sources")]
    NotASource { ticket: TicketId, source_id: u32 },
    /// An image where the ticket is of a delta, or the other way round.
    #[error("ticket {ticket} is of mode {mode}, which {what} cannot serve or take")]
    Mode { ticket: TicketId, mode: &'static str, what: &'static str },
    #[error(
        "ticket {ticket} is of {what} {theirs}, here it is {ours}: read the manifest again, then ask for a new ticket"
    )]
    Layout { ticket: TicketId, what: &'static str, ours: String, theirs: String },
    /// A file or buffer does not have the bytes that it must serve or take, or a list the entries.
    #[error("ticket {ticket}: {what} has {have}, but {need} are needed")]
    Size { ticket: TicketId, what: String, need: u64, have: u64 },
    /// A source offers a payload that it does not have.
    #[error("ticket {ticket}: payload {payload} is to be served from here, but no file was given for it")]
    PayloadMissing { ticket: TicketId, payload: usize },
    #[error(transparent)]
    Ticket(#[from] TicketError),
    #[error("ticket {ticket}: cannot read what is offered: {source}")]
    Read { ticket: TicketId, source: io::Error },

    #[error(
        "the ticket leads to {endpoint}, which is not among the allowed endpoints: add it to the configuration if it is one of yours"
    )]
    Forbidden { endpoint: String },
    #[error("{endpoint} has no address: {source}; check the advertised host of the agent")]
    Resolve { endpoint: String, source: io::Error },
    #[error("{peer}, stage {stage}: cannot {doing}: {source}; check that the peer and the network are up")]
    Io { peer: String, stage: Stage, doing: &'static str, source: io::Error },
    #[error(
        "{peer} sent stripe {stripe} with other bytes than were published: it is not asked for anything more"
    )]
    Liar { peer: String, stripe: u32 },
    #[error("{peer}, stage {stage}: the peer closed the connection; see its log")]
    Closed { peer: String, stage: Stage },
    #[error("{peer}, stage {stage}: nothing heard for {after:?}: the peer is dead, stalled or cut off")]
    Silent { peer: String, stage: Stage, after: Duration },
    #[error("{peer}, stage {stage}: {what} took longer than {after:?}")]
    TooSlow { peer: String, stage: Stage, what: &'static str, after: Duration },
    #[error("{peer}, stage {stage}: {source}")]
    Wire { peer: String, stage: Stage, source: WireError },
    #[error("{peer}, stage {stage}: {source}")]
    Nixl { peer: String, stage: Stage, source: Box<NixlError> },
    #[error("{peer}, stage {stage}: {source}")]
    Tls { peer: String, stage: Stage, source: Box<TlsError> },
    #[error(
        "the ticket leads to {endpoint} without TLS, but it was given out by an https:// endpoint: a publisher that has a \
         certificate sends its data inside TLS, and nothing else is taken; start every agent of the model with --tls-cert"
    )]
    Plain { endpoint: String },
    #[error(
        "the ticket leads to {endpoint}, which is inside TLS, but was given out by an http:// endpoint: address the agent \
         with https://"
    )]
    NoTrust { endpoint: String },
    /// This side put the connection out: for a newer one of the same stream, or to make room.
    #[error("{peer}: the connection was put out here: replaced by a newer one, crowded out or shutting down")]
    PutOut { peer: String },
    /// The offer ended while stripes were unacknowledged; the connection was reset.
    #[error("{peer}: reset with unacknowledged stripes: {why}")]
    Reset { peer: String, why: String },
    #[error("ticket {ticket}: the place of stripe {stripe} cannot be written: {why}")]
    Ground { ticket: TicketId, stripe: u32, why: String },
    /// What a store was to bring did not come, or is damaged.
    #[error("{peer}: {message}")]
    Carried { peer: String, kind: Kind, message: String },
    #[error("given up: {0}")]
    Stopped(#[from] Stopped),
    #[error("ticket {ticket}: {}", whole(failure, cause.as_deref()))]
    Transfer {
        ticket: TicketId,
        failure: Failure,
        /// The last thing that went wrong on a stream.
        #[source]
        cause: Option<Box<TcpError>>,
    },
    /// All stripes are here, but the receiver does not accept the whole.
    #[error("ticket {ticket}: every stripe came, but the whole was refused at stage {}: {}", fault.stage, fault.message)]
    Unaccepted { ticket: TicketId, fault: Fault },
}

/// A fault that a peer sent is told best by the error that names the peer.
fn whole(failure: &Failure, cause: Option<&TcpError>) -> String {
    match (failure, cause) {
        (Failure::Ended(_), Some(cause)) => cause.to_string(),
        (failure, Some(cause)) => format!("{failure} (last: {cause})"),
        (failure, None) => failure.to_string(),
    }
}

impl TcpError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            TcpError::Bind { .. } | TcpError::Setup { .. } | TcpError::TooManyOffers { .. } => {
                Kind::Exhausted
            }
            TcpError::ShuttingDown { .. } => Kind::Cancelled,
            TcpError::OfferedTwice { .. }
            | TcpError::NotASource { .. }
            | TcpError::Mode { .. }
            | TcpError::PayloadMissing { .. }
            | TcpError::Size { .. } => Kind::Invalid,
            TcpError::Layout { .. } | TcpError::Reset { .. } => Kind::Stale,
            TcpError::Ticket(e) => e.kind(),
            TcpError::Read { .. } => Kind::NotFound,
            TcpError::Forbidden { .. } | TcpError::Plain { .. } | TcpError::NoTrust { .. } => Kind::Denied,
            TcpError::Nixl { source, .. } => source.kind(),
            TcpError::Tls { source, .. } => source.kind(),
            TcpError::Resolve { .. }
            | TcpError::Io { .. }
            | TcpError::Closed { .. }
            | TcpError::Silent { .. }
            | TcpError::PutOut { .. } => Kind::PeerLost,
            TcpError::TooSlow { .. } => Kind::Timeout,
            TcpError::Wire { source, .. } => source.kind(),
            TcpError::Liar { .. } => Kind::Corrupt,
            TcpError::Carried { kind, .. } => *kind,
            TcpError::Ground { .. } => Kind::Bug,
            TcpError::Stopped(stopped) => stopped.kind(),
            TcpError::Transfer { failure, .. } => failure.kind(),
            TcpError::Unaccepted { fault, .. } => fault.kind,
        }
    }
}
