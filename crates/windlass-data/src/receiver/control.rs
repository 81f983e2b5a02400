//! How a receiver talks to a publisher.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use windlass_core::digest::BlockSum;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::{
    Age, Registered, Registration, Relays, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
};
use windlass_core::wire::{BlockVersions, Ticket, TicketId};

use crate::stop::Stop;
use crate::tcp::{Landing, TcpError, Watch};
use crate::tls::Privacy;

/// A control connection that failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("cannot {what} at {peer}: {why}")]
    Lost {
        peer: String,
        what: &'static str,
        why: String,
        /// The kind of failure: a timeout, a lost peer and so on.
        kind: Kind,
    },
    #[error("{peer} refused to {what}: {message}")]
    Refused { peer: String, what: &'static str, kind: Kind, message: String },
    #[error("the answer of {peer} to {what} is malformed: {why}")]
    Answer { peer: String, what: &'static str, why: String },
}

impl ControlError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ControlError::Lost { kind, .. } | ControlError::Refused { kind, .. } => *kind,
            ControlError::Answer { .. } => Kind::Corrupt,
        }
    }
}

/// How a receiver talks to a publisher. See [`windlass_core::wire::control`] for what is said.
pub trait Control: Send + Sync {
    /// Who is at the other end, for people.
    fn peer(&self) -> String;
    /// What TLS the data connections must have that its tickets lead to. Where requests go through TLS, so must data.
    fn privacy(&self) -> Privacy {
        Privacy::default()
    }
    /// What brings the bytes of tickets, where the publisher does not send them over TCP itself.
    fn carrier(&self) -> Option<&dyn Carrier> {
        None
    }
    /// The publisher that is spoken to now, where this one turns from one to another: what a ticket is for comes from where it
    /// was granted.
    fn chosen(&self) -> Option<Arc<dyn Control>> {
        None
    }
    /// Whether what it announces is wanted although the image has a newer version of the same incarnation.
    fn goes_back(&self) -> bool {
        false
    }
    /// The address of this host on the way there. None if there is no way, as within one process.
    fn local_address(&self) -> Option<IpAddr> {
        None
    }
    /// What is served now. With `newer_than`, waits until something newer is, or some time has passed.
    fn version(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError>;
    /// How long ago the publisher's life began, where that can be told.
    fn age(&self, _stop: &Stop) -> Result<Option<Age>, ControlError> {
        Ok(None)
    }
    /// The layout of what is served.
    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError>;
    /// The table of a sealed version.
    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError>;
    /// Makes this receiver known.
    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError>;
    /// Asks for a transfer.
    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError>;
    /// Who else receives what a ticket is for, once there are more than `known`, or some time has passed.
    fn relays(&self, _ticket: TicketId, known: u32, _stop: &Stop) -> Result<Relays, ControlError> {
        Ok(Relays { receivers: known, relays: Vec::new() })
    }
    /// Says that a transfer is complete.
    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError>;
}

/// Gives each table of [`Carrier::tables`] to the receiver.
pub type EachTable<'a> = &'a mut dyn FnMut(&BlockVersions, &[BlockSum]);

/// Brings what tickets are for without a sender: from a store.
///
/// The image that a carrier brings may be of older versions than the one that it announces. Deltas lead on from them.
pub trait Carrier: Sync {
    /// Brings what a ticket is for to its place, checked.
    fn carry(
        &self,
        ticket: &Ticket,
        landing: &dyn Landing,
        watch: &Watch,
        stop: &Stop,
    ) -> Result<(), TcpError>;
    /// The hashes of all blocks of the image that it would bring, and then of each version that its deltas lead to. The
    /// receiver keeps these blocks, or all.
    fn tables(
        &self,
        keeps: Option<&BlockRanges>,
        each: EachTable<'_>,
        stop: &Stop,
    ) -> Result<(), ControlError>;
    /// Adds the digests of the versions that its deltas start from or lead to: of these blocks, or of all. Where that of a
    /// slice is not known, the digest of the whole stands for it unless there is one.
    fn digests(&self, keeps: Option<&BlockRanges>, known: &mut BTreeMap<Version, StateDigest>);
}
