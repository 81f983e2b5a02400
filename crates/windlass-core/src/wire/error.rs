//! What can go wrong on the wire.

use super::bytes::TicketId;
use super::claims::Failure;
use super::frame::{FrameKind, ProtocolVersion, StreamId};
use super::message::{Completion, Fault, Refusal};
use super::stripe::Extent;
use super::ticket::TicketError;
use crate::error::Kind;
use crate::identity::IdentityError;

/// What can go wrong in the protocol. A stream that meets one of these is closed; whether the transfer goes
/// on is up to [`super::Claims`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum WireError {
    /// The bytes are not of this protocol at all.
    #[error(
        "the stream begins with {:?} instead of \"WDLS\": the peer does not speak the Windlass wire \
         protocol; check that the endpoint is an agent's data port",
        String::from_utf8_lossy(found)
    )]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// The header's check is wrong: bytes were lost, added or changed before it.
    #[error("a frame header does not match its check: the stream is out of step; reconnect it")]
    HeaderCheck,
    /// The peer speaks another major version.
    #[error(
        "the peer speaks wire protocol {theirs}, this side {ours}: run the same Windlass release on both"
    )]
    Version {
        /// What this side speaks.
        ours: ProtocolVersion,
        /// What the peer speaks.
        theirs: ProtocolVersion,
    },
    /// A frame of a kind that does not exist.
    #[error("frame kind {code} does not exist in wire protocol {}", ProtocolVersion::CURRENT)]
    UnknownKind {
        /// Its code.
        code: u8,
    },
    /// A field that must be zero is not.
    #[error("{frame} frame: field `{field}` must be zero")]
    NotZero {
        /// Which frame.
        frame: FrameKind,
        /// Which field.
        field: &'static str,
    },
    /// A stream index beyond the limit.
    #[error("stream index {index} is above the limit of {max}")]
    StreamIndex {
        /// The index.
        index: u16,
        /// The greatest one allowed.
        max: u16,
    },
    /// A body length that the kind does not allow.
    #[error("{frame} frame: a body of {len} bytes is outside the allowed {min} to {max}")]
    BodyLength {
        /// Which frame.
        frame: FrameKind,
        /// The length in the header.
        len: u32,
        /// The least allowed.
        min: u32,
        /// The most allowed.
        max: u32,
    },
    /// The caller gave a slice that is not the body.
    #[error("{frame} frame: the header says {len} body bytes, but {given} were given to the decoder")]
    BodySlice {
        /// Which frame.
        frame: FrameKind,
        /// The length in the header.
        len: u32,
        /// The length of the slice.
        given: usize,
    },
    /// The body ends before its last field.
    #[error("{frame} frame: the body ends before its last field")]
    BodyTruncated {
        /// Which frame.
        frame: FrameKind,
    },
    /// The body goes on after its last field.
    #[error("{frame} frame: {excess} bytes follow the last field")]
    BodyExcess {
        /// Which frame.
        frame: FrameKind,
        /// How many.
        excess: usize,
    },
    /// Text that is not UTF-8.
    #[error("{frame} frame: its text is not UTF-8")]
    Utf8 {
        /// Which frame.
        frame: FrameKind,
    },
    /// A code that stands for nothing.
    #[error("{frame} frame: {code} is not a known {field}")]
    UnknownCode {
        /// Which frame.
        frame: FrameKind,
        /// What it should have been.
        field: &'static str,
        /// The code.
        code: u8,
    },
    /// A number that does not fit where it belongs.
    #[error("{frame} frame: {field} {value} does not fit in 32 bits")]
    TooWide {
        /// Which frame.
        frame: FrameKind,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A list of sums whose count and length disagree.
    #[error("StripeEnd frame: {count} block sums announced, {bytes} bytes given (16 each)")]
    SumCount {
        /// The count.
        count: u32,
        /// The bytes after it.
        bytes: usize,
    },
    /// A malformed model id in a frame.
    #[error(transparent)]
    Identity(#[from] IdentityError),

    /// A frame that may not come in this state.
    #[error("{frame} frame while expecting {state}: the peer breaks the order of the protocol")]
    Unexpected {
        /// Which frame.
        frame: FrameKind,
        /// What the state waits for.
        state: &'static str,
    },
    /// A frame of another stream, or of an earlier connection of this one.
    #[error("a frame of stream {theirs} arrived on stream {ours}: reconnect the stream")]
    WrongStream {
        /// The stream of this connection.
        ours: StreamId,
        /// The stream in the frame.
        theirs: StreamId,
    },
    /// The peer turned the connection away.
    #[error(
        "refused by the peer (it speaks {}, was spoken to in {}): {}", .0.ours, .0.theirs, .0.message
    )]
    Refused(Refusal),
    /// The peer reported a failure.
    #[error("the peer failed at stage {} ({}): {}", .0.stage, .0.kind, .0.message)]
    Peer(Fault),
    /// The peer does not have the ticket's key.
    #[error(
        "ticket {ticket}, stream {stream}: the {role} could not prove that it has the ticket's key; \
         check that both sides use the same token and that no proxy answers for the peer"
    )]
    Proof {
        /// Whose proof is wrong.
        role: &'static str,
        /// Which ticket.
        ticket: TicketId,
        /// Which stream.
        stream: StreamId,
    },
    /// No such ticket here: never issued, over, or issued before a restart.
    #[error("ticket {ticket} is unknown here: ask for a new one")]
    UnknownTicket {
        /// Which ticket.
        ticket: TicketId,
    },
    /// The ticket's time is over.
    #[error("ticket {ticket} expired: ask for a new one; if it repeats, raise the deadline of transfers")]
    Expired {
        /// Which ticket.
        ticket: TicketId,
    },
    /// A window that allows nothing, or too much.
    #[error("a window of {window} open claims is outside the allowed 1 to {max}")]
    Window {
        /// The window.
        window: u16,
        /// The most allowed.
        max: u16,
    },

    /// More claims than the window allows.
    #[error("stream {stream}: a claim beyond the window of {window}: acknowledge stripes first")]
    WindowFull {
        /// Which stream.
        stream: StreamId,
        /// The window.
        window: u16,
    },
    /// A claim for a stripe that the plan does not have, or that it describes otherwise.
    #[error(
        "stream {stream}: stripe {stripe} is claimed as {theirs:?}, but the plan here has {ours:?}: \
         both sides must plan from the same ticket and the same cut table"
    )]
    PlanDiffers {
        /// Which stream.
        stream: StreamId,
        /// Which stripe.
        stripe: u32,
        /// This side's extent; `None` if the plan has no such stripe.
        ours: Option<Extent>,
        /// The extent in the claim; `None` if its header alone was refused.
        theirs: Option<Extent>,
    },
    /// A claim for a stripe that this source does not hold.
    #[error("stream {stream}: stripe {stripe} is not held by this source: claim it from one that holds it")]
    NotHeld {
        /// Which stream.
        stream: StreamId,
        /// Which stripe.
        stripe: u32,
    },
    /// A frame about another stripe than the one whose turn it is.
    #[error("stream {stream}: {frame} frame for stripe {stripe}, but stripe {expected:?} is next")]
    WrongStripe {
        /// Which stream.
        stream: StreamId,
        /// Which frame.
        frame: FrameKind,
        /// The stripe in the frame.
        stripe: u32,
        /// The stripe whose turn it is, if any.
        expected: Option<u32>,
    },
    /// Data that leaves a gap, repeats bytes or goes beyond the stripe.
    #[error(
        "stream {stream}: {len} bytes at offset {offset} of stripe {stripe}, which has {at} of {bytes} bytes"
    )]
    DataRange {
        /// Which stream.
        stream: StreamId,
        /// Which stripe.
        stripe: u32,
        /// Where the bytes want to go.
        offset: u64,
        /// How many.
        len: u32,
        /// Where the next byte belongs.
        at: u32,
        /// Length of the stripe.
        bytes: u32,
    },
    /// A stripe that ends before all its bytes came.
    #[error("stream {stream}: stripe {stripe} ended after {at} of {bytes} bytes")]
    StripeShort {
        /// Which stream.
        stream: StreamId,
        /// Which stripe.
        stripe: u32,
        /// Bytes so far.
        at: u32,
        /// Length of the stripe.
        bytes: u32,
    },
    /// Sums that do not fit the stripe.
    #[error("stream {stream}: the sums of stripe {stripe} are {theirs}, the ticket asks for {ours}")]
    CheckDiffers {
        /// Which stream.
        stream: StreamId,
        /// Which stripe.
        stripe: u32,
        /// What the ticket asks for.
        ours: String,
        /// What came.
        theirs: String,
    },
    /// Completion of something else than this transfer.
    #[error(
        "completion of ticket {} ({}, digest {}) on a stream of ticket {} ({}, digest {})",
        theirs.ticket, theirs.identity, theirs.digest, ours.ticket, ours.identity, ours.digest
    )]
    Completion {
        /// What this stream transfers.
        ours: Box<Completion>,
        /// What was said to be complete.
        theirs: Box<Completion>,
    },
    /// The caller went on before it had taken all bytes that belong to the last header.
    #[error("stream {stream}: {left} bytes of the last frame are not taken yet: read all of them first")]
    BytesLeft {
        /// Which stream.
        stream: StreamId,
        /// How many.
        left: u32,
    },
    /// The caller took or gave bytes that belong to no frame.
    #[error("stream {stream}: {given} bytes given where the frame has {left} left")]
    BytesExcess {
        /// Which stream.
        stream: StreamId,
        /// How many were given.
        given: usize,
        /// How many were due.
        left: u32,
    },

    /// A stream that never joined, or was given up.
    #[error("stream {stream} is not live in this transfer: reconnect it under a higher epoch")]
    NotLive {
        /// Which stream.
        stream: StreamId,
    },
    /// A stream that joins under an epoch already used.
    #[error("stream {stream} joins under an old epoch, it is at {current} already: raise the epoch")]
    OldEpoch {
        /// Which stream.
        stream: StreamId,
        /// The epoch in use.
        current: u16,
    },
    /// A stream of a source that the plan does not know or that was given up.
    #[error("source {source_id} is not, or no longer, part of this transfer")]
    UnknownSource {
        /// Which source.
        source_id: u32,
    },
    /// A report about a stripe that this stream does not hold.
    #[error("stream {stream} reports on stripe {stripe}, which it has not claimed")]
    NotClaimed {
        /// Which stream.
        stream: StreamId,
        /// Which stripe.
        stripe: u32,
    },
    /// The transfer as a whole has failed.
    #[error(transparent)]
    Transfer(#[from] Failure),
    /// A malformed ticket or plan.
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
