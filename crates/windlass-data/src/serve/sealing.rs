//! From committed to served: recovery, the sealer, the gatherer and the warden.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use windlass_core::digest::{StateSum, SumTable};
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::TicketError;
use windlass_core::wire::control::PartRequest;

use super::{
    Active, BACK_PATIENCE, DeltaStats, GATHER_PATIENCE, Inner, Sealed, SealedSlot, ServeError, State, count,
    revoke_all,
};
use crate::region::{AgentSeat, Lease, LeaseKind, RegionError, Seal};
use crate::seal::draft::Draft;
use crate::seal::table::{self, TableId};
use crate::seal::{self, SealError, SealJob};
use crate::stop::Stop;

/// How long the trainer waits for an agent that is stopped, once; one that is merely slow says so in between.
pub(super) const SILENCE: Duration = Duration::from_secs(5);

/// The file of the digests of versions that several hold together.
const DIGESTS: &str = "digests.json";

#[derive(Deserialize, Serialize)]
struct Digests {
    incarnation: Incarnation,
    digests: BTreeMap<Version, StateDigest>,
}

impl Inner {
    /// Takes over what an earlier server left: slots that are sealed and whose table is whole.
    pub(super) fn recover(&self) -> Result<(), ServeError> {
        let region = self.region.state();
        self.read_digests();
        for slot in [region.inactive, region.active].into_iter().flatten() {
            let Some(digest) = slot.sealed else { continue };
            let path = self.region.sums_path(slot.slot);
            let id = self.table_id(slot.version, slot.id);
            match table::read(&path, self.region.manifest()) {
                Ok(stored) if stored.id == id && self.part_digest(stored.sums.state()) == digest => {
                    self.sealed(slot.slot, slot.id, slot.version, Arc::new(stored.sums), None);
                }
                Ok(_) | Err(_) => {
                    // The bytes are there; only the table has to be made again.
                    let lease = match self.region.lease(slot.id, LeaseKind::Seal, Duration::MAX) {
                        // A writer is taking it back.
                        Err(RegionError::LeaseGone { .. }) => continue,
                        other => other?,
                    };
                    let blocks = self.region.blocks();
                    let (kernels, manifest) = (crate::simd::kernels(), self.region.manifest());
                    let sums = seal::sums(
                        kernels,
                        manifest,
                        &blocks,
                        lease.data(),
                        self.config.threads,
                        &self.stop,
                    )?;
                    if self.part_digest(sums.state()) == digest {
                        self.keep_table(slot.slot, id, digest, &sums);
                        self.sealed(slot.slot, slot.id, slot.version, Arc::new(sums), None);
                    } else {
                        tracing::error!(
                            version = slot.version,
                            "a sealed slot has changed; it is not served"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn table_id(&self, version: Version, slot_id: u64) -> TableId {
        TableId { incarnation: self.region.incarnation(), version, slot_id }
    }

    pub(super) fn part_digest(&self, sum: StateSum) -> StateDigest {
        sum.digest(self.region.manifest().layout_hash())
    }

    /// Puts the table of a slot into its file. Without it a later server makes it again.
    pub(super) fn keep_table(&self, slot: usize, id: TableId, digest: StateDigest, sums: &SumTable) {
        let path = self.region.sums_path(slot);
        if let Err(error) = table::write(&path, self.region.manifest(), id, digest, sums) {
            tracing::warn!(version = id.version, %error, "the table of sums is not kept");
        }
    }

    /// Notes a sealed slot, and serves it unless other holders have to be asked first.
    pub(super) fn sealed(
        &self,
        slot: usize,
        id: u64,
        version: Version,
        sums: Arc<SumTable>,
        delta: Option<DeltaStats>,
    ) {
        let digest = self.part_digest(sums.state());
        let sealed = SealedSlot { id, version, sums, digest };
        let mut state = self.state();
        state.slots[slot] = Some(sealed.clone());
        if delta.is_some() {
            state.delta = delta;
        }
        if self.config.peers.is_empty() {
            state.failure = None;
            self.serve(&mut state, sealed);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The digests of whole versions, of which only a part is here, as an earlier server left them.
    fn read_digests(&self) {
        let path = self.region.dir().join(DIGESTS);
        let kept = std::fs::read(&path).ok().filter(|_| !self.config.peers.is_empty());
        if let Some(Ok(kept)) = kept.map(|text| serde_json::from_slice::<Digests>(&text))
            && kept.incarnation == self.region.incarnation()
        {
            self.state().digests = kept.digests;
        }
    }

    /// Keeps them for the next one. Without them nothing leads to a version that is in no slot any more.
    fn keep_digests(&self) {
        let (incarnation, digests) = (self.region.incarnation(), self.state().digests.clone());
        let path = self.region.dir().join(DIGESTS);
        let text = serde_json::to_vec(&Digests { incarnation, digests }).map_err(std::io::Error::from);
        if let Err(error) = text.and_then(|text| Draft::write(&path, &text)) {
            tracing::warn!(path = %path.display(), %error, "the digests of whole versions are not kept");
        }
    }

    pub(super) fn serve(&self, state: &mut State, sealed: SealedSlot) {
        let newest = sealed.version;
        state.digests.insert(newest, sealed.digest);
        let oldest = self.history.ends().map_or(newest, |(oldest, _)| oldest.min(newest));
        state.digests.retain(|v, _| *v >= oldest);
        // A later one may be served by delta already.
        if state.served.as_ref().is_none_or(|s| s.version <= newest) {
            state.served = Some(sealed);
        }
    }

    /// Serves what was sealed here once the other holders have it.
    pub(super) fn gather_loop(&self) {
        let mut told = None;
        while !self.stop.is_set() {
            let mut state = self.state();
            let newest = state.slots.iter().flatten().max_by_key(|s| s.version).cloned();
            let served = state.served.as_ref().map(|s| s.id);
            let Some(sealed) = newest.filter(|s| Some(s.id) != served) else {
                self.changed.wait_for(&mut state, Stop::GLANCE);
                continue;
            };
            drop(state);
            match self.gather(sealed.version, sealed.sums.state()) {
                Ok(digest) => {
                    let mut state = self.state();
                    state.failure = None;
                    self.serve(&mut state, SealedSlot { digest, ..sealed });
                    drop(state);
                    self.keep_digests();
                }
                Err(error) => {
                    if told != Some(sealed.id) && !self.stop.is_set() {
                        tracing::warn!(version = sealed.version, %error, "a part of the version is missing");
                        told = Some(sealed.id);
                    }
                    let mut state = self.state();
                    state.failure = Some(error.to_string());
                    self.changed.wait_for(&mut state, Stop::GLANCE);
                }
            }
            self.changed.notify_all();
        }
    }

    /// The digest of the whole image: this part and those of the peers.
    pub(super) fn gather(&self, version: Version, own: StateSum) -> Result<StateDigest, ServeError> {
        let stop = self.stop.with_timeout(GATHER_PATIENCE);
        let mut sum = own;
        let mut held = self.region.blocks();
        for peer in &self.config.peers {
            let part = peer.part(PartRequest::image(version), &stop)?;
            let manifest = self.region.manifest();
            let same = part.identity == self.identity(version)
                && (part.layout_hash, part.cuts_hash) == (manifest.layout_hash(), manifest.cuts_hash())
                && held.intersection(&part.blocks).is_empty();
            if !same {
                let newest = Some(part.identity.version);
                return Err(ServeError::NoVersion { version, newest });
            }
            held = held.union(&part.blocks);
            sum = sum.plus(StateSum::from_bytes(part.sum.0));
        }
        let all = BlockRanges::from(0..self.region.manifest().cuts().blocks());
        match all.difference(&held).first() {
            Some(block) => Err(TicketError::Uncovered { block }.into()),
            None => Ok(self.part_digest(sum)),
        }
    }

    pub(super) fn seal_loop(&self, seat: &AgentSeat) {
        while !self.stop.is_set() {
            let seen = self.region.bell();
            match seat.seal() {
                Ok(Some(job)) => {
                    if let Err(error) = self.seal(job) {
                        if self.stop.is_set() {
                            return;
                        }
                        count(&self.counters.seal_failures);
                        tracing::error!(%error, "a committed version could not be sealed; it will be tried again");
                        self.state().failure = Some(error.to_string());
                        self.region.wait(seen, Duration::from_secs(1));
                    }
                }
                Ok(None) => self.region.wait(seen, Stop::GLANCE),
                Err(error) => {
                    tracing::error!(%error, "the region cannot be read");
                    self.region.wait(seen, Duration::from_secs(1));
                }
            }
        }
    }

    pub(super) fn seal(&self, job: Seal) -> Result<(), ServeError> {
        let start = Instant::now();
        let (slot, id, version) = (job.new.slot(), job.new.id(), job.new.version());
        if self.joins() {
            self.join_ready();
            if let Some(sums) = self.delta_sums(version) {
                return self.seal_unseen(job, sums, start);
            }
        }
        let base = job.base.as_ref().and_then(|lease| {
            let known = self.state().slots[lease.slot()].clone().filter(|s| s.id == lease.id());
            known.filter(|k| k.version < version).map(|k| (lease, k))
        });
        let blocks = self.region.blocks();
        let sealed = self.seal_pass(&job, &blocks, version, base.as_ref())?;
        if let Err(error) = job.check() {
            // This process was stopped for so long that the trainer went on without it.
            if let Some((_, known)) = &base {
                let _ = std::fs::remove_file(self.history.path(known.version, version));
            }
            return Err(error.into());
        }
        self.keep_table(slot, self.table_id(version, id), sealed.digest, &sealed.sums);
        let mut delta = None;
        if let Some(file) = sealed.delta {
            let (bytes, changes) = (file.bytes, file.changes);
            let base = file.header.base.1;
            match self.history.add(file) {
                Ok(()) => {
                    let seconds = start.elapsed().as_secs_f64();
                    delta = Some(DeltaStats { base, version, bytes, changes, seconds });
                }
                Err(error) => {
                    tracing::warn!(version, %error, "the delta is not kept");
                    // The history does not know it, so nobody else would remove it.
                    let _ = std::fs::remove_file(self.history.path(base, version));
                }
            }
        }
        let digest = sealed.digest;
        count(&self.counters.sealed);
        if delta.is_none() && base.is_some() {
            count(&self.counters.sealed_without_delta);
        }
        self.counters.seal_ms.fetch_add(start.elapsed().as_millis() as u64, Ordering::Relaxed);
        drop(base);
        let base = self.hold_base(&job);
        job.finish(digest)?;
        self.sealed(slot, id, version, Arc::new(sealed.sums), delta);
        self.tell_sealed(version, start, delta);
        self.keep_back(base, version);
        if self.joins() {
            self.sweep(version);
            // What follows may have waited for this.
            self.join_ready();
        }
        Ok(())
    }

    fn tell_sealed(&self, version: Version, start: Instant, delta: Option<DeltaStats>) {
        let Some(on_sealed) = &self.config.on_sealed else { return };
        let (model_id, incarnation) = (self.region.model_id().clone(), self.region.incarnation());
        let identity = Identity { model_id, incarnation, version };
        on_sealed(&Sealed { identity, seconds: start.elapsed().as_secs_f64(), delta });
    }

    /// A hold on the slot of the version before, beyond the end of the sealing.
    fn hold_base(&self, job: &Seal) -> Option<(Lease, SealedSlot)> {
        let base = job.base.as_ref()?;
        let known = self.state().slots[base.slot()].clone().filter(|s| s.id == base.id())?;
        let lease = self.region.lease(base.id(), LeaseKind::Stream, BACK_PATIENCE).ok()?;
        Some((lease, known))
    }

    /// Keeps what the new version replaced for good, so that receivers can go back over it ([`crate::history`]). Nobody
    /// waits for this but the next writer of that slot.
    fn keep_back(&self, base: Option<(Lease, SealedSlot)>, version: Version) {
        let Some((lease, known)) = base else { return };
        let kept = self.history.keep_back((known.version, version), lease.data(), &known.sums, &self.stop);
        if let Err(error) = kept {
            tracing::warn!(version, %error, "nothing leads back over this version");
        }
        if let Err(error) = lease.finish() {
            tracing::warn!(version, %error, "the version before was taken while it was kept; nothing leads back");
            self.history.drop_back((known.version, version));
        }
    }

    /// Seals a version whose sums came with the deltas of its ranks.
    fn seal_unseen(&self, job: Seal, sums: Arc<SumTable>, start: Instant) -> Result<(), ServeError> {
        let (slot, id, version) = (job.new.slot(), job.new.id(), job.new.version());
        job.check()?;
        let digest = self.part_digest(sums.state());
        self.keep_table(slot, self.table_id(version, id), digest, &sums);
        count(&self.counters.sealed);
        self.counters.seal_ms.fetch_add(start.elapsed().as_millis() as u64, Ordering::Relaxed);
        let base = self.hold_base(&job);
        job.finish(digest)?;
        self.sealed(slot, id, version, Arc::clone(&sums), None);
        self.tell_sealed(version, start, None);
        self.keep_back(base, version);
        self.sealed_unseen(slot, SealedSlot { id, version, sums, digest });
        self.sweep(version);
        Ok(())
    }

    /// Sums and delta in one pass; without the delta if that fails for its own reasons.
    pub(super) fn seal_pass(
        &self,
        job: &Seal,
        blocks: &BlockRanges,
        version: Version,
        base: Option<&(&Lease, SealedSlot)>,
    ) -> Result<seal::Sealed, SealError> {
        let out = base.map(|(_, known)| self.history.path(known.version, version));
        let pass = |with_delta: bool| {
            seal::seal(SealJob {
                kernels: crate::simd::kernels(),
                manifest: self.region.manifest(),
                blocks,
                model_id: self.region.model_id(),
                incarnation: self.region.incarnation(),
                version,
                new: job.new.data(),
                base: base.filter(|_| with_delta).map(|(lease, known)| seal::Base {
                    data: lease.data(),
                    sums: &known.sums,
                    version: known.version,
                }),
                out: out.as_deref().filter(|_| with_delta),
                context_out: None,
                threads: self.config.threads,
                stop: &self.stop,
                progress: &|_| {},
            })
        };
        match pass(true) {
            Err(error) if base.is_some() && !self.stop.is_set() => {
                tracing::warn!(version, %error, "no delta could be made; receivers will get the full image");
                pass(false)
            }
            other => other,
        }
    }

    /// Ends offers whose slot a writer wants, forgets those that are over, and says that the agent is at work: a
    /// process that cannot even do this is not waited for.
    pub(super) fn watch_loop(&self, seat: &AgentSeat) {
        while !self.stop.is_set() {
            seat.attend(SILENCE);
            let seen = self.region.bell();
            let now = Instant::now();
            let lease = |o: &Active| o.lease.as_ref().and_then(Weak::upgrade);
            let wanted = |o: &Active| lease(o).is_some_and(|l| l.wanted_back());
            let (mut lapped, mut late) = (Vec::new(), Vec::new());
            {
                let mut state = self.state();
                for offer in std::mem::take(&mut state.offers) {
                    if offer.handle.progress().free {
                        let progress = offer.handle.progress();
                        let (acked, read) = (progress.bytes_acked, progress.bytes_read);
                        self.counters.bytes_read.fetch_add(read, Ordering::Relaxed);
                        self.counters.bytes_acked.fetch_add(acked, Ordering::Relaxed);
                    } else if wanted(&offer) {
                        lapped.push(offer);
                    } else if now >= offer.expires {
                        late.push(offer);
                    } else {
                        state.offers.push(offer);
                    }
                }
            }
            self.counters.revoked.fetch_add(lapped.len() as u64, Ordering::Relaxed);
            revoke_all(
                lapped,
                "a newer version takes the slot: ask for a new ticket",
                self.config.revoke_grace,
            );
            revoke_all(late, "the ticket has expired: ask for a new one", Duration::ZERO);
            self.region.wait(seen, Stop::GLANCE);
        }
    }
}
