//! Errors of the wire protocol.

use super::bytes::TicketId;
use super::claims::Failure;
use super::frame::{FrameKind, ProtocolVersion, StreamId};
use super::message::{Completion, Fault, Refusal};
use super::stripe::Extent;
use super::ticket::TicketError;
use crate::error::Kind;
use crate::identity::IdentityError;

/// A violation of the protocol. The stream that meets one is closed; [`super::Claims`] decides whether the transfer
/// continues.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum WireError {
    #[error(
        "the stream begins with {:?} instead of \"WDLS\": the peer does not speak the Windlass wire \
         protocol; check that the endpoint is an agent's data port",
        String::from_utf8_lossy(found)
    )]
    Magic { found: [u8; 4] },
    /// The header's check is wrong: bytes were lost, added or changed before it.
    #[error("a frame header does not match its check: the stream is out of step; reconnect it")]
    HeaderCheck,
    #[error(
        "the peer speaks wire protocol {theirs}, this side {ours}: run the same Windlass release on both"
    )]
    Version { ours: ProtocolVersion, theirs: ProtocolVersion },
    #[error("frame kind {code} does not exist in wire protocol {}", ProtocolVersion::CURRENT)]
    UnknownKind { code: u8 },
    #[error("{frame} frame: field `{field}` must be zero")]
    NotZero { frame: FrameKind, field: &'static str },
    #[error("stream index {index} is above the limit of {max}")]
    StreamIndex { index: u16, max: u16 },
    #[error("{frame} frame: a body of {len} bytes is outside the allowed {min} to {max}")]
    BodyLength { frame: FrameKind, len: u32, min: u32, max: u32 },
    #[error("{frame} frame: the header says {len} body bytes, but {given} were given to the decoder")]
    BodySlice { frame: FrameKind, len: u32, given: usize },
    #[error("{frame} frame: the body ends before its last field")]
    BodyTruncated { frame: FrameKind },
    #[error("{frame} frame: {excess} bytes follow the last field")]
    BodyExcess { frame: FrameKind, excess: usize },
    #[error("{frame} frame: its text is not UTF-8")]
    Utf8 { frame: FrameKind },
    #[error("{frame} frame: {code} is not a known {field}")]
    UnknownCode { frame: FrameKind, field: &'static str, code: u8 },
    #[error("{frame} frame: {field} {value} does not fit in 32 bits")]
    TooWide { frame: FrameKind, field: &'static str, value: u64 },
    #[error("StripeEnd frame: {count} block sums announced, {bytes} bytes given (16 each)")]
    SumCount { count: u32, bytes: usize },
    #[error("Holds frame: {count} stripes from {first} are no range")]
    StripeRange { first: u32, count: u32 },
    #[error(transparent)]
    Identity(#[from] IdentityError),

    #[error("{frame} frame while expecting {state}: the peer breaks the order of the protocol")]
    Unexpected { frame: FrameKind, state: &'static str },
    /// A frame of another stream, or of an earlier connection of this one.
    #[error("a frame of stream {theirs} arrived on stream {ours}: reconnect the stream")]
    WrongStream { ours: StreamId, theirs: StreamId },
    #[error(
        "refused by the peer (it speaks protocol {}, this side sent {}): {}", .0.ours, .0.theirs, .0.message
    )]
    Refused(Refusal),
    #[error("the peer failed at stage {} ({}): {}", .0.stage, .0.kind, .0.message)]
    Peer(Fault),
    #[error(
        "ticket {ticket}, stream {stream}: the {role} could not prove that it has the ticket's key; \
         check that both sides use the same token and that no proxy answers for the peer"
    )]
    Proof { role: &'static str, ticket: TicketId, stream: StreamId },
    /// This side has no such ticket: never issued, over, or issued before a restart.
    #[error("ticket {ticket} is unknown here: ask for a new one")]
    UnknownTicket { ticket: TicketId },
    #[error("ticket {ticket} expired: ask for a new one; if it repeats, raise the deadline of transfers")]
    Expired { ticket: TicketId },
    #[error("a window of {window} open claims is outside the allowed 1 to {max}")]
    Window { window: u16, max: u16 },

    #[error("stream {stream}: a claim beyond the window of {window}: acknowledge stripes first")]
    WindowFull { stream: StreamId, window: u16 },
    /// A claim for a stripe that the plan does not have, or that it describes otherwise.
    #[error(
        "stream {stream}: stripe {stripe} is claimed as {theirs:?}, but the plan here has {ours:?}: \
         both sides must plan from the same ticket and the same cut table"
    )]
    PlanDiffers {
        stream: StreamId,
        stripe: u32,
        /// This side's extent; `None` if the plan has no such stripe.
        ours: Option<Extent>,
        /// The extent in the claim; `None` if its header alone was refused.
        theirs: Option<Extent>,
    },
    /// A claim for a stripe that this source does not hold.
    #[error("stream {stream}: stripe {stripe} is not held by this source: claim it from one that holds it")]
    NotHeld { stream: StreamId, stripe: u32 },
    /// A frame about a stripe that is not next.
    #[error("stream {stream}: {frame} frame for stripe {stripe}, but stripe {expected:?} is next")]
    WrongStripe {
        stream: StreamId,
        frame: FrameKind,
        stripe: u32,
        /// The stripe that is next, if any.
        expected: Option<u32>,
    },
    /// Data that leaves a gap, repeats bytes or goes beyond the stripe.
    #[error(
        "stream {stream}: {len} bytes at offset {offset} of stripe {stripe}, which has {at} of {bytes} bytes"
    )]
    DataRange {
        stream: StreamId,
        stripe: u32,
        /// The offset in the frame.
        offset: u64,
        len: u32,
        at: u32,
        bytes: u32,
    },
    #[error("stream {stream}: stripe {stripe} ended after {at} of {bytes} bytes")]
    StripeShort { stream: StreamId, stripe: u32, at: u32, bytes: u32 },
    #[error("stream {stream}: stripe {stripe} is checked by {theirs}, the ticket asks for {ours}")]
    CheckDiffers { stream: StreamId, stripe: u32, ours: String, theirs: String },
    #[error(
        "completion of ticket {} ({}, digest {}) on a stream of ticket {} ({}, digest {})",
        theirs.ticket, theirs.identity, theirs.digest, ours.ticket, ours.identity, ours.digest
    )]
    Completion {
        ours: Box<Completion>,
        /// The completion that the peer stated.
        theirs: Box<Completion>,
    },
    /// The caller continued before it had taken all bytes of the last frame.
    #[error("stream {stream}: {left} bytes of the last frame have not been taken: read all of them first")]
    BytesLeft { stream: StreamId, left: u32 },
    /// The caller took or gave bytes that belong to no frame.
    #[error("stream {stream}: {given} bytes given where the frame has {left} left")]
    BytesExcess { stream: StreamId, given: usize, left: u32 },

    #[error("stream {stream} is not live in this transfer: reconnect it under a higher epoch")]
    NotLive { stream: StreamId },
    #[error("stream {stream} joins under an old epoch, its current one is {current}: raise the epoch")]
    OldEpoch { stream: StreamId, current: u16 },
    /// A stream of a source that is not in the plan or was given up.
    #[error("source {source_id} is not, or no longer, part of this transfer")]
    UnknownSource { source_id: u32 },
    /// A report about a stripe that this stream does not hold.
    #[error("stream {stream} reports on stripe {stripe}, which it has not claimed")]
    NotClaimed { stream: StreamId, stripe: u32 },
    #[error(transparent)]
    Transfer(#[from] Failure),
    #[error(transparent)]
    Ticket(#[from] TicketError),
}

impl WireError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            WireError::Magic { .. }
            | WireError::UnknownKind { .. }
            | WireError::NotZero { .. }
            | WireError::StreamIndex { .. }
            | WireError::BodyLength { .. }
            | WireError::BodyTruncated { .. }
            | WireError::BodyExcess { .. }
            | WireError::Utf8 { .. }
            | WireError::UnknownCode { .. }
            | WireError::TooWide { .. }
            | WireError::SumCount { .. }
            | WireError::StripeRange { .. }
            | WireError::Unexpected { .. }
            | WireError::Window { .. }
            | WireError::WindowFull { .. }
            | WireError::PlanDiffers { .. }
            | WireError::WrongStripe { .. }
            | WireError::DataRange { .. }
            | WireError::StripeShort { .. }
            | WireError::CheckDiffers { .. } => Kind::Invalid,
            WireError::HeaderCheck => Kind::Corrupt,
            WireError::Version { .. } => Kind::Unsupported,
            WireError::WrongStream { .. }
            | WireError::Completion { .. }
            | WireError::NotLive { .. }
            | WireError::OldEpoch { .. } => Kind::Stale,
            WireError::Expired { .. } => Kind::Timeout,
            WireError::Proof { .. } => Kind::Denied,
            WireError::NotHeld { .. } | WireError::UnknownSource { .. } | WireError::UnknownTicket { .. } => {
                Kind::NotFound
            }
            WireError::BodySlice { .. }
            | WireError::BytesLeft { .. }
            | WireError::BytesExcess { .. }
            | WireError::NotClaimed { .. } => Kind::Bug,
            WireError::Identity(e) => e.kind(),
            WireError::Refused(refusal) => refusal.kind,
            WireError::Peer(fault) => fault.kind,
            WireError::Transfer(failure) => failure.kind(),
            WireError::Ticket(e) => e.kind(),
        }
    }
}
