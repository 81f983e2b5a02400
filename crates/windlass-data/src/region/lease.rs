//! Reading a region: leases, and the agent's seat.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use windlass_core::identity::{StateDigest, Version};

use super::owner::{Owner, alive};
use super::{LEASES, Region, RegionError, SlotState, deadline_after, digest_words, step};
use crate::flip::{Held, LeaseKind, Refused};
use crate::private::check_own;
use crate::shm::Mapping;

impl Region {
    /// Leases the slot that holds `id` for as long as `deadline`. While the lease stands the bytes do not change.
    pub fn lease(
        self: &Arc<Self>,
        id: u64,
        kind: LeaseKind,
        deadline: Duration,
    ) -> Result<Lease, RegionError> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let until = deadline_after(deadline);
        let owner = self.me();
        let held = self.flip().acquire(owner.0, id, kind, until, serial, alive).map_err(|e| match e {
            Refused::Gone | Refused::Closing => RegionError::LeaseGone { id },
            Refused::Full => RegionError::LeasesFull { dir: self.dir.clone(), max: LEASES },
        })?;
        // Under the lease these words stand still.
        let version = self.flip().snapshot().slots[held.slot].map_or(0, |w| w.version);
        step("leased");
        Ok(Lease {
            region: Arc::clone(self),
            held: Some(held),
            owner,
            slot: held.slot,
            id,
            version,
            given: deadline,
        })
    }

    /// Takes the agent's seat; a dead agent's is free.
    pub fn agent(self: &Arc<Self>) -> Result<AgentSeat, RegionError> {
        check_own(&self.lock, &self.dir)?;
        let owner = self.me();
        self.flip()
            .claim_agent(owner.0, alive)
            .map_err(|other| RegionError::AgentTaken { dir: self.dir.clone(), pid: Owner(other).pid() })?;
        self.ring();
        step("seated");
        Ok(AgentSeat { region: Arc::clone(self), owner })
    }
}

/// The right to read what a slot holds. Dropping it ends it.
///
/// The bytes do not change while it stands. It is broken if its deadline passes **and** the slot is wanted for the
/// next attempt; [`Lease::finish`] at the end of reading tells, and then what was read must be thrown away. Leases of
/// kind [`LeaseKind::Seal`] are broken only if the agent falls silent ([`AgentSeat::attend`]).
#[derive(Debug)]
pub struct Lease {
    region: Arc<Region>,
    /// `None` once it has ended.
    held: Option<Held>,
    owner: Owner,
    slot: usize,
    id: u64,
    version: Version,
    given: Duration,
}

impl Lease {
    /// Which slot it is on.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The id that the slot holds.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The version that the slot holds.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The data area.
    pub fn data(&self) -> &[u8] {
        let mapping = self.mapping();
        mapping.bytes(self.region.data_start()..mapping.len())
    }

    /// The whole slot, its header included.
    pub fn mapping(&self) -> &Mapping {
        self.region.slots[self.slot].view()
    }

    /// The slot's file, for `sendfile`. Pages in flight are read by the kernel: the lease ends when the peer has
    /// acknowledged them or its connection is reset.
    pub fn file(&self) -> &File {
        &self.region.slots[self.slot].file
    }

    /// Whether the next attempt waits for this lease, or has broken it.
    pub fn wanted_back(&self) -> bool {
        self.held.as_ref().is_some_and(|h| self.region.flip().wanted_back(h))
    }

    /// Whether it still stands.
    pub fn stands(&self) -> bool {
        self.held.as_ref().is_some_and(|h| self.region.flip().stands(h))
    }

    /// Moves the deadline to `deadline` from now. An error if the lease was broken before. In good time: a guard that
    /// has just seen the old deadline pass may still break it, which [`Lease::finish`] tells.
    pub fn renew(&self, deadline: Duration) -> Result<(), RegionError> {
        let flip = self.region.flip();
        let stands = self.held.as_ref().is_some_and(|h| flip.renew(h, deadline_after(deadline)));
        if stands { Ok(()) } else { Err(self.broken()) }
    }

    /// Ends the lease. An error if it was broken meanwhile: what was read may be mixed of two versions.
    pub fn finish(mut self) -> Result<(), RegionError> {
        if self.end() { Ok(()) } else { Err(self.broken()) }
    }

    fn broken(&self) -> RegionError {
        RegionError::LeaseBroken { id: self.id, after: self.given }
    }

    fn end(&mut self) -> bool {
        // A child of fork holds copies of its parent's leases, which are not its to end.
        let Some(held) = self.held.take().filter(|_| self.owner.is_me()) else { return true };
        let stood = self.region.flip().release(&held);
        self.region.ring();
        stood
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end();
    }
}

/// The one agent of a region. Dropping it frees the seat.
///
/// While an agent holds the seat, the next attempt waits for what is committed to be sealed. An agent that cannot seal
/// leaves the seat, so that publishing goes on without deltas.
#[derive(Debug)]
pub struct AgentSeat {
    region: Arc<Region>,
    owner: Owner,
}

impl AgentSeat {
    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Says that the agent is at work. If it is then silent for longer than `silence`, writers go on without it, until
    /// it says so again. One that has never said it is waited for as long as its process lives.
    pub fn attend(&self, silence: Duration) {
        self.region.flip().attend(deadline_after(silence));
    }

    /// The committed version that is not sealed yet, held for sealing; `None` if there is none. One at a time.
    pub fn seal(&self) -> Result<Option<Seal>, RegionError> {
        let state = self.region.state();
        let Some(SlotState { id, sealed: None, .. }) = state.active else { return Ok(None) };
        let hold = |id| self.region.lease(id, LeaseKind::Seal, Duration::MAX);
        let new = match hold(id) {
            Ok(lease) => lease,
            // Replaced between our look and our lease: the next look finds what replaced it.
            Err(RegionError::LeaseGone { .. }) => return Ok(None),
            Err(e) => return Err(e),
        };
        let base = match state.inactive.map(|s| hold(s.id)).transpose() {
            Ok(base) => base,
            // The next attempt is taking the slot back already: this version gets no delta.
            Err(RegionError::LeaseGone { .. }) => None,
            Err(e) => return Err(e),
        };
        step("sealing");
        Ok(Some(Seal { new, base, base_state: state.inactive }))
    }
}

impl Drop for AgentSeat {
    fn drop(&mut self) {
        if self.owner.is_me() {
            self.region.flip().leave_agent(self.owner.0);
            self.region.ring();
        }
    }
}

/// A version that is being sealed. Dropping it leaves the version unsealed.
#[derive(Debug)]
pub struct Seal {
    /// The version to seal.
    pub new: Lease,
    /// What the other slot holds, to compare with; `None` if it is not whole or is being taken back.
    pub base: Option<Lease>,
    base_state: Option<SlotState>,
}

impl Seal {
    /// The state of [`Seal::base`], with its digest if it was sealed.
    pub fn base_state(&self) -> Option<SlotState> {
        self.base_state.filter(|_| self.base.is_some())
    }

    /// An error if writers went on without the agent meanwhile: then neither sums nor delta can be believed.
    pub fn check(&self) -> Result<(), RegionError> {
        let broken = std::iter::once(&self.new).chain(&self.base).find(|lease| !lease.stands());
        broken.map_or(Ok(()), |lease| Err(RegionError::SealBroken { id: lease.id }))
    }

    /// Fixes the digest. Sums and delta must be in their files before. An error if the version was taken back.
    pub fn finish(self, digest: StateDigest) -> Result<(), RegionError> {
        let region = Arc::clone(&self.new.region);
        let sealed = self.new.held.as_ref().is_some_and(|h| region.flip().seal(h, digest_words(digest)));
        if !sealed {
            return Err(RegionError::SealBroken { id: self.new.id });
        }
        // The sealed word is out before the leases end, so that the guard never sees the one without the other.
        drop(self);
        region.ring();
        step("sealed");
        Ok(())
    }
}
