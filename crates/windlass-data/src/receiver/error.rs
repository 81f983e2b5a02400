//! What can go wrong in a sync.

use windlass_core::delta::DeltaError;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation};
use windlass_core::slice::SliceError;
use windlass_core::wire::TicketError;

use super::{ControlError, Stage};
use crate::image::ImageError;
use crate::stop::Stopped;
use crate::tcp::TcpError;

/// A sync that failed. The image is whole at its old version, or hidden.
#[derive(Debug, thiserror::Error)]
pub enum ReceiverError {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Tcp(#[from] TcpError),
    #[error("the slice that is to be kept does not fit the model")]
    Slice(#[from] SliceError),
    #[error("the ticket of {peer} cannot be used")]
    Ticket { peer: String, source: TicketError },
    #[error("the ticket of {peer} is about {what}, which was not asked for: check what listens there")]
    OtherTicket { peer: String, what: String },
    /// A delta that was received whole and is not one.
    #[error("the delta from {peer} is malformed")]
    Delta { peer: String, source: DeltaError },
    #[error("{peer} does not serve the {mode} that was asked for: {reason}")]
    Refused { peer: String, mode: &'static str, reason: String, kind: Kind },
    #[error("{peer} has published no version yet: wait for the first")]
    NothingYet { peer: String },
    #[error("{peer} publishes {theirs}, this receiver is for {ours}: check the endpoint")]
    OtherModel { peer: String, theirs: String, ours: String },
    #[error("{peer} began a new life, incarnation {now} after {was}, during the sync: sync again")]
    NewLife {
        peer: String,
        /// The incarnation that the sync began with.
        was: Incarnation,
        now: Incarnation,
    },
    #[error(
        "{peer} is of incarnation {theirs}, this receiver has followed {ours} already, and {theirs} did not begin later: \
         stop the old publisher, or remove the image to follow it after all"
    )]
    OldLife { peer: String, theirs: Incarnation, ours: Incarnation },
    /// The publisher is of another incarnation than the version that was asked for.
    #[error(
        "{peer} is of incarnation {theirs}, the version that was asked for is of {wanted}: ask for one of its own"
    )]
    OtherLife {
        peer: String,
        theirs: Incarnation,
        /// The one that was asked for.
        wanted: Incarnation,
    },
    /// What was fetched does not start from what the image has.
    #[error("what was fetched leads on from {base}, and the image has {held}: fetch it again")]
    NotNext { base: Identity, held: String },
    #[error(
        "the manifest of {peer} is of layout {found}, but it announces {announced}: check what listens there"
    )]
    OtherLayout { peer: String, found: String, announced: String },
    #[error("the sync with {peer} was given up while {stage}: {source}")]
    Stopped { peer: String, stage: Stage, source: Stopped },
    #[error("no memory for a delta of {bytes} bytes")]
    Memory { bytes: u64, source: std::io::Error },
}

impl ReceiverError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ReceiverError::Control(e) => e.kind(),
            ReceiverError::Image(e) => e.kind(),
            ReceiverError::Tcp(e) => e.kind(),
            ReceiverError::Slice(e) => e.kind(),
            ReceiverError::Ticket { source, .. } => source.kind(),
            ReceiverError::OtherTicket { .. } | ReceiverError::OtherLayout { .. } => Kind::Corrupt,
            ReceiverError::NewLife { .. }
            | ReceiverError::OldLife { .. }
            | ReceiverError::OtherLife { .. }
            | ReceiverError::NotNext { .. } => Kind::Stale,
            ReceiverError::Delta { source, .. } => source.kind(),
            ReceiverError::Refused { kind, .. } => *kind,
            ReceiverError::NothingYet { .. } => Kind::NotFound,
            ReceiverError::OtherModel { .. } => Kind::Invalid,
            ReceiverError::Stopped { source, .. } => source.kind(),
            ReceiverError::Memory { .. } => Kind::Exhausted,
        }
    }
}
