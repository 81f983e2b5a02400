//! What can go wrong in a sync.

use windlass_core::delta::DeltaError;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation};
use windlass_core::wire::TicketError;

use super::{ControlError, Stage};
use crate::image::ImageError;
use crate::stop::Stopped;
use crate::tcp::TcpError;

/// A sync that failed. The image is whole at its old version, or hidden.
#[derive(Debug, thiserror::Error)]
pub enum ReceiverError {
    /// The control connection.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The data connections.
    #[error(transparent)]
    Tcp(#[from] TcpError),
    /// The ticket.
    #[error("the ticket of {peer} cannot be used")]
    Ticket {
        /// Who made it.
        peer: String,
        /// What is wrong with it.
        source: TicketError,
    },
    /// A ticket about something else.
    #[error("the ticket of {peer} is about {what}, which was not asked for: check what listens there")]
    OtherTicket {
        /// Who made it.
        peer: String,
        /// What it is about.
        what: String,
    },
    /// A delta that was received whole and is not one.
    #[error("the delta from {peer} is malformed")]
    Delta {
        /// Who sent it.
        peer: String,
        /// What is wrong with it.
        source: DeltaError,
    },
    /// The publisher will not serve it like this.
    #[error("{peer} does not serve the {mode} that was asked for: {reason}")]
    Refused {
        /// Who refused.
        peer: String,
        /// `full` or `delta`.
        mode: &'static str,
        /// Why, in its words.
        reason: String,
        /// What sort of refusal.
        kind: Kind,
    },
    /// Nothing has been published yet.
    #[error("{peer} has published no version yet: wait for the first")]
    NothingYet {
        /// Who was asked.
        peer: String,
    },
    /// The publisher is of another model.
    #[error("{peer} publishes {theirs}, this receiver is for {ours}: check the endpoint")]
    OtherModel {
        /// Who was asked.
        peer: String,
        /// What it publishes.
        theirs: String,
        /// What is wanted.
        ours: String,
    },
    /// The publisher was replaced between two steps.
    #[error("{peer} began a new life, incarnation {now} after {was}, during the sync: sync again")]
    NewLife {
        /// Who.
        peer: String,
        /// The incarnation that the sync began with.
        was: Incarnation,
        /// The one of the ticket.
        now: Incarnation,
    },
    /// A publisher that was superseded.
    #[error(
        "{peer} is of incarnation {theirs}, this receiver has followed {ours} already, and {theirs} did not begin later: \
         stop the old publisher, or remove the image to follow it after all"
    )]
    OldLife {
        /// Who was asked.
        peer: String,
        /// Its incarnation.
        theirs: Incarnation,
        /// The newest that was followed.
        ours: Incarnation,
    },
    /// The publisher is of another incarnation than the version that was asked for.
    #[error(
        "{peer} is of incarnation {theirs}, the version that was asked for is of {wanted}: ask for one of its own"
    )]
    OtherLife {
        /// Who was asked.
        peer: String,
        /// Its incarnation.
        theirs: Incarnation,
        /// The one that was asked for.
        wanted: Incarnation,
    },
    /// What was fetched does not start from what the image has.
    #[error("what was fetched leads on from {base}, and the image has {held}: fetch it again")]
    NotNext {
        /// Where it starts from.
        base: Identity,
        /// What the image has.
        held: String,
    },
    /// A manifest that is not the announced one.
    #[error(
        "the manifest of {peer} is of layout {found}, but it announces {announced}: check what listens there"
    )]
    OtherLayout {
        /// Who answered.
        peer: String,
        /// The layout of the manifest.
        found: String,
        /// The layout that was announced.
        announced: String,
    },
    /// It was called off between two steps.
    #[error("the sync with {peer} was given up while {stage}: {source}")]
    Stopped {
        /// Whom it was with.
        peer: String,
        /// Where it was.
        stage: Stage,
        /// Why.
        source: Stopped,
    },
    /// Memory for the delta.
    #[error("no memory for a delta of {bytes} bytes")]
    Memory {
        /// How much.
        bytes: u64,
        /// Why not.
        source: std::io::Error,
    },
}

impl ReceiverError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ReceiverError::Control(e) => e.kind(),
            ReceiverError::Image(e) => e.kind(),
            ReceiverError::Tcp(e) => e.kind(),
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
