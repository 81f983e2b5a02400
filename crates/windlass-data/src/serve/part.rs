//! Parts of an image that several servers hold.
//!
//! Owns: [`Peer`], and what a server does for the one that leads: it tells of its share, and serves it by tickets that the
//! other issued. Called by the leading server, through HTTP or within one process.

use std::sync::Arc;
use std::time::Duration;

use windlass_core::digest::{BlockSum, StateSum};
use windlass_core::identity::Version;
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::{PartInfo, PartRequest, PartSum, SharedTicket};
use windlass_core::wire::{MAX_STRIPE_BYTES, MIN_STRIPE_BYTES, Mode, Payload, Ticket};

use super::{ServeError, Server, swarm};
use crate::receiver::ControlError;
use crate::stop::Stop;
use crate::tcp::{Body, Crowd};

/// The holder of another part of the image.
pub trait Peer: Send + Sync {
    /// Its share of a version, once sealed there, and of the delta. Waits for that until `stop`.
    fn part(&self, wanted: PartRequest, stop: &Stop) -> Result<PartInfo, ControlError>;
    /// Its part of the table of a sealed version.
    fn part_sums(&self, version: Version, stop: &Stop) -> Result<Vec<BlockSum>, ControlError>;
    /// Makes a ticket known to it.
    fn share(&self, ticket: &SharedTicket, stop: &Stop) -> Result<(), ControlError>;
}

impl Server {
    /// This server's share of a version, for the one that leads. Waits until it is sealed, or `stop`.
    pub fn part(&self, wanted: PartRequest, stop: &Stop) -> Result<PartInfo, ServeError> {
        let PartRequest { version, base, stripe_bytes, keeps } = wanted;
        let allowed = MIN_STRIPE_BYTES..=MAX_STRIPE_BYTES;
        if let Some(bytes) = stripe_bytes.filter(|bytes| !allowed.contains(bytes)) {
            let allowed = format!("{MIN_STRIPE_BYTES} to {MAX_STRIPE_BYTES}");
            return Err(ServeError::Bounds { what: "stripe_bytes", value: bytes.into(), allowed });
        }
        self.wait_slot(version, stop)?;
        let state = self.inner.state();
        let newest = self.inner.version_info(&state).version;
        let slot = state.slots.iter().flatten().find(|s| s.version == version);
        // A delta may lead to a version that is in no slot any more, and needs no sum.
        let sum = slot.map(|s| s.sums.state());
        drop(state);
        let region = &self.inner.region;
        let segment = base.and_then(|b| self.inner.segment(b, version, stop).ok());
        let sum = sum.or(segment.as_ref().map(|_| StateSum::default()));
        let sum = sum.ok_or(ServeError::NoVersion { version, newest })?;
        let segment = match (segment, &keeps) {
            (Some(segment), Some(keeps)) => Some(self.inner.sliced(&segment, keeps, stop)?),
            (segment, _) => segment,
        };
        Ok(PartInfo {
            identity: self.inner.identity(version),
            layout_hash: region.manifest().layout_hash(),
            cuts_hash: region.manifest().cuts_hash(),
            blocks: region.blocks(),
            sum: PartSum(sum.to_bytes()),
            data: self.data_endpoint(),
            tls: self.inner.config.tcp.tls.is_some(),
            delta_bytes: segment.as_ref().map(|s| s.bytes),
            delta_sums: match (&segment, stripe_bytes) {
                (Some(segment), Some(stripe)) => self.inner.stripe_sums(segment, keeps.as_ref(), stripe)?,
                (None, _) | (_, None) => Vec::new(),
            },
        })
    }

    fn wait_slot(&self, version: Version, stop: &Stop) -> Result<(), ServeError> {
        let mut state = self.inner.state();
        loop {
            let newest = state.slots.iter().flatten().map(|s| s.version).max();
            if newest >= Some(version) {
                return Ok(());
            }
            if stop.is_set() || self.inner.stop.is_set() {
                return Err(ServeError::NoVersion { version, newest });
            }
            self.inner.changed.wait_for(&mut state, stop.nap());
        }
    }

    /// Serves this server's part of a ticket that another one issued.
    pub fn share(&self, shared: SharedTicket, stop: &Stop) -> Result<(), ServeError> {
        let ticket = Ticket::new(shared.ticket)?;
        let version = ticket.identity.version;
        let body = match &ticket.mode {
            Mode::Full => {
                let state = self.inner.state();
                let newest = self.inner.version_info(&state).version;
                let slot = state.slots.iter().flatten().find(|s| s.version == version).cloned();
                drop(state);
                let slot = slot.ok_or(ServeError::NoVersion { version, newest })?;
                self.inner.image_body(&slot, Duration::from_millis(ticket.deadline.timeout_ms))?
            }
            Mode::Delta { base, payloads } => {
                let mut segment = self.inner.segment(base.identity.version, version, stop)?;
                if ticket.wanted != BlockRanges::from(0..self.inner.region.manifest().cuts().blocks()) {
                    segment = self.inner.sliced(&segment, &ticket.wanted, stop)?;
                }
                let mine = |p: &Payload| p.sources.contains(&shared.source).then(|| Arc::clone(&segment));
                (
                    Body::payloads(payloads.iter().map(|p| mine(p).map(|s| Arc::clone(&s.file))).collect()),
                    None,
                )
            }
        };
        let cargo = swarm::cargo(&ticket);
        let crowd = match ticket.swarm {
            Some(_) => Crowd::Among(self.inner.state().swarms.board(cargo)),
            None => Crowd::One,
        };
        self.inner.offer(ticket, shared.source, body, crowd, "a peer".into())
    }
}

impl Peer for Server {
    fn part(&self, wanted: PartRequest, stop: &Stop) -> Result<PartInfo, ControlError> {
        Server::part(self, wanted, stop).map_err(|e| self.refusal("get a part", e))
    }

    fn part_sums(&self, version: Version, _: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        let sums = Server::part_sums(self, Some(version));
        Ok(sums.map_err(|e| self.refusal("get the sums", e))?.1.sums().to_vec())
    }

    fn share(&self, ticket: &SharedTicket, stop: &Stop) -> Result<(), ControlError> {
        Server::share(self, ticket.clone(), stop).map_err(|e| self.refusal("share a ticket", e))
    }
}
