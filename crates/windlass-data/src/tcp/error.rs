//! What can go wrong on the TCP link.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use windlass_core::error::Kind;
use windlass_core::wire::{Failure, Fault, Stage, TicketError, TicketId, WireError};

use crate::stop::Stopped;
use crate::tls::TlsError;

/// What can go wrong on the TCP link. `peer` names the other end as the caller knows it, with its address.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    /// No port to listen on.
    #[error(
        "cannot listen on {bind}, ports {first} to {last}: {source}; free a port, widen the range or bind \
         another address"
    )]
    Bind {
        /// The address.
        bind: IpAddr,
        /// First port tried.
        first: u16,
        /// Last port tried.
        last: u16,
        /// What the system said.
        source: io::Error,
    },
    /// A thread or a descriptor could not be had.
    #[error("cannot set up {what}: {source}; raise the limits on descriptors and threads")]
    Setup {
        /// What for.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The sender is shutting down.
    #[error("ticket {ticket}: the sender is shutting down and takes no more offers")]
    ShuttingDown {
        /// The ticket of the offer.
        ticket: TicketId,
    },
    /// Too many offers.
    #[error("ticket {ticket}: {max} offers are open already: wait until transfers end, or raise max_offers")]
    TooManyOffers {
        /// The ticket of the offer.
        ticket: TicketId,
        /// The limit.
        max: usize,
    },
    /// The ticket is offered already.
    #[error("ticket {ticket} is offered already: mint a new id for every transfer")]
    OfferedTwice {
        /// The ticket.
        ticket: TicketId,
    },
    /// The ticket has no such source.
    #[error("ticket {ticket} has no source {source_id}: offer as one of its sources")]
    NotASource {
        /// The ticket.
        ticket: TicketId,
        /// The source.
        source_id: u32,
    },
    /// An image where the ticket is of a delta, or the other way round.
    #[error("ticket {ticket} is of mode {mode}, which {what} cannot serve or take")]
    Mode {
        /// The ticket.
        ticket: TicketId,
        /// Its mode.
        mode: &'static str,
        /// What does not fit.
        what: &'static str,
    },
    /// The ticket is of another layout or cut table.
    #[error(
        "ticket {ticket} is of {what} {theirs}, here it is {ours}: read the manifest again, then ask for a new ticket"
    )]
    Layout {
        /// The ticket.
        ticket: TicketId,
        /// `layout` or `cut table`.
        what: &'static str,
        /// The hash here.
        ours: String,
        /// The hash in the ticket.
        theirs: String,
    },
    /// A file or buffer does not have the bytes that it must serve or take, or a list the entries.
    #[error("ticket {ticket}: {what} has {have}, but {need} are needed")]
    Size {
        /// The ticket.
        ticket: TicketId,
        /// Which file, buffer or list.
        what: String,
        /// What is needed.
        need: u64,
        /// What is there.
        have: u64,
    },
    /// A source offers a payload that it does not have.
    #[error("ticket {ticket}: payload {payload} is to be served from here, but no file was given for it")]
    PayloadMissing {
        /// The ticket.
        ticket: TicketId,
        /// Which payload.
        payload: usize,
    },
    /// A malformed ticket, or one that cannot be planned.
    #[error(transparent)]
    Ticket(#[from] TicketError),
    /// The file behind an offer cannot be read.
    #[error("ticket {ticket}: cannot read what is offered: {source}")]
    Read {
        /// The ticket.
        ticket: TicketId,
        /// What the system said.
        source: io::Error,
    },

    /// An endpoint that this receiver may not contact.
    #[error(
        "the ticket leads to {endpoint}, which is not among the allowed endpoints: add it to the configuration if it is one of yours"
    )]
    Forbidden {
        /// The endpoint.
        endpoint: String,
    },
    /// A name without an address.
    #[error("{endpoint} has no address: {source}; check the advertised host of the agent")]
    Resolve {
        /// The endpoint.
        endpoint: String,
        /// What the system said.
        source: io::Error,
    },
    /// The connection broke.
    #[error("{peer}, stage {stage}: cannot {doing}: {source}; check that the peer and the network are up")]
    Io {
        /// The other end.
        peer: String,
        /// Where in the transfer.
        stage: Stage,
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The peer closed the connection.
    #[error("{peer}, stage {stage}: the peer closed the connection; see its log")]
    Closed {
        /// The other end.
        peer: String,
        /// Where in the transfer.
        stage: Stage,
    },
    /// The peer said nothing for too long.
    #[error("{peer}, stage {stage}: nothing heard for {after:?}: the peer is dead, stalled or cut off")]
    Silent {
        /// The other end.
        peer: String,
        /// Where in the transfer.
        stage: Stage,
        /// How long.
        after: Duration,
    },
    /// Something took longer than it may.
    #[error("{peer}, stage {stage}: {what} took longer than {after:?}")]
    TooSlow {
        /// The other end.
        peer: String,
        /// Where in the transfer.
        stage: Stage,
        /// What took long.
        what: &'static str,
        /// The limit.
        after: Duration,
    },
    /// The peer broke the protocol, refused or gave up.
    #[error("{peer}, stage {stage}: {source}")]
    Wire {
        /// The other end.
        peer: String,
        /// Where in the transfer.
        stage: Stage,
        /// What it was.
        source: WireError,
    },
    /// TLS failed.
    #[error("{peer}, stage {stage}: {source}")]
    Tls {
        /// The other end.
        peer: String,
        /// Where in the transfer.
        stage: Stage,
        /// What it was.
        source: Box<TlsError>,
    },
    /// A source without TLS, where it is wanted.
    #[error(
        "the ticket leads to {endpoint} without TLS, but it was given out by an https:// endpoint: a publisher that has a \
         certificate sends its data inside TLS, and nothing else is taken; start every agent of the model with --tls-cert"
    )]
    Plain {
        /// The endpoint.
        endpoint: String,
    },
    /// A source inside TLS, where nobody is trusted.
    #[error(
        "the ticket leads to {endpoint}, which is inside TLS, but was given out by an http:// endpoint: address the agent \
         with https://"
    )]
    NoTrust {
        /// The endpoint.
        endpoint: String,
    },
    /// This side put the connection out: for a newer one of the same stream, or to make room.
    #[error("{peer}: the connection was put out here: replaced by a newer one, crowded out or shutting down")]
    PutOut {
        /// The other end.
        peer: String,
    },
    /// The offer ended while stripes were unacknowledged; the connection was reset.
    #[error("{peer}: reset with unacknowledged stripes: {why}")]
    Reset {
        /// The other end.
        peer: String,
        /// Why the offer ended.
        why: String,
    },
    /// The place where a stripe belongs is in use.
    #[error("ticket {ticket}: the place of stripe {stripe} cannot be written: {why}")]
    Ground {
        /// The ticket.
        ticket: TicketId,
        /// The stripe.
        stripe: u32,
        /// Why.
        why: String,
    },
    /// The caller gave up.
    #[error("given up: {0}")]
    Stopped(#[from] Stopped),
    /// The transfer failed as a whole.
    #[error("ticket {ticket}: {}", whole(failure, cause.as_deref()))]
    Transfer {
        /// The ticket.
        ticket: TicketId,
        /// Why.
        failure: Failure,
        /// The last thing that went wrong on a stream.
        #[source]
        cause: Option<Box<TcpError>>,
    },
    /// All stripes are here, but the receiver does not accept the whole.
    #[error("ticket {ticket}: every stripe came, but the whole was refused at stage {}: {}", fault.stage, fault.message)]
    Unaccepted {
        /// The ticket.
        ticket: TicketId,
        /// Why.
        fault: Fault,
    },
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
            TcpError::Tls { source, .. } => source.kind(),
            TcpError::Resolve { .. }
            | TcpError::Io { .. }
            | TcpError::Closed { .. }
            | TcpError::Silent { .. }
            | TcpError::PutOut { .. } => Kind::PeerLost,
            TcpError::TooSlow { .. } => Kind::Timeout,
            TcpError::Wire { source, .. } => source.kind(),
            TcpError::Ground { .. } => Kind::Bug,
            TcpError::Stopped(stopped) => stopped.kind(),
            TcpError::Transfer { failure, .. } => failure.kind(),
            TcpError::Unaccepted { fault, .. } => fault.kind,
        }
    }
}
