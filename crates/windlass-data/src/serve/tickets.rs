//! From a request to an offer: which mode serves, the ticket, and what it is served from.

use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use windlass_core::error::Kind;
use windlass_core::identity::{StateDigest, Version};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::{
    Granted, Have, PartRequest, Refused, RequestMode, SharedTicket, TransferAnswer, TransferRequest,
};
use windlass_core::wire::{
    Base, BlockVersions, Checks, Deadline, MAX_STREAMS, MAX_TIMEOUT_MS, Mode, Payload, ProtocolVersion,
    Source, SourceId, Ticket, TicketFields, TicketId, TicketKey, swarm_stripe_bytes,
};

use super::{
    Active, BACK_PATIENCE, Inner, NO_SLOT, PEER_PATIENCE, REPLACED_PATIENCE, SealedSlot, ServeError, count,
    random, sparsity, swarm, swarm::slice_key,
};
use crate::history::{HistoryError, Segment, Whole};
use crate::region::{Lease, LeaseKind, RegionError};
use crate::stop::Stop;
use crate::tcp::{Body, Crowd, Offer};
use xxhash_rust::xxh3::xxh3_64;

/// Deltas whose stripes' sums are kept.
const KEPT_SUMS: usize = 64;

impl Inner {
    pub(super) fn request(
        &self,
        request: &TransferRequest,
        stop: &Stop,
    ) -> Result<TransferAnswer, ServeError> {
        {
            let mut state = self.state();
            let instance = state.instances.get_mut(&request.instance_id);
            let unknown = || ServeError::UnknownInstance { instance: request.instance_id.clone() };
            let instance = instance.ok_or_else(unknown)?;
            (instance.heard, instance.slice) = (Instant::now(), request.keeps.as_ref().map(slice_key));
        }
        let bounds = |what, value: u64, allowed: String| ServeError::Bounds { what, value, allowed };
        if let Some(streams) = request.streams.filter(|s| !(1..=MAX_STREAMS).contains(s)) {
            return Err(bounds("streams", streams.into(), format!("1 to {MAX_STREAMS}")));
        }
        if let Some(ms) = request.timeout_ms.filter(|ms| !(1..=MAX_TIMEOUT_MS).contains(ms)) {
            return Err(bounds("timeout_ms", ms, format!("1 to {MAX_TIMEOUT_MS}")));
        }
        if request.layout_hash.is_some_and(|h| h != self.region.manifest().layout_hash()) {
            return Ok(refused(
                None,
                Kind::Stale,
                "the layout is another one: fetch the manifest again".into(),
            ));
        }
        let patience = stop.with_timeout(REPLACED_PATIENCE);
        loop {
            let (served, whole) = self.on_offer().ok_or_else(|| self.nothing_yet())?;
            match self.answer(request, &served, whole.as_ref(), stop) {
                // Its slot was taken back between the sealing of the next version and now, or is not whole yet.
                Err(ServeError::Region(RegionError::LeaseGone { .. }) | ServeError::NotWhole { .. })
                    if !patience.is_set() =>
                {
                    let mut state = self.state();
                    if state.served.as_ref().is_some_and(|s| (s.id, s.version) == (served.id, served.version))
                    {
                        self.changed.wait_for(&mut state, patience.nap());
                    }
                }
                other => return other,
            }
        }
    }

    /// What is served, and the newest version that is whole in a slot.
    fn on_offer(&self) -> Option<(SealedSlot, Option<SealedSlot>)> {
        let state = self.state();
        let served = state.served.clone()?;
        let whole = if served.id == NO_SLOT {
            state.slots.iter().flatten().max_by_key(|s| s.version).cloned()
        } else {
            Some(served.clone())
        };
        Some((served, whole))
    }

    fn answer(
        &self,
        request: &TransferRequest,
        slot: &SealedSlot,
        whole: Option<&SealedSlot>,
        stop: &Stop,
    ) -> Result<TransferAnswer, ServeError> {
        let delta = match request.mode {
            RequestMode::Full => Err("a full image was asked for".to_owned()),
            RequestMode::Delta | RequestMode::Auto => self.delta_for(request, slot, stop),
        };
        match (delta, request.mode) {
            (Ok(segment), _) => self.grant_delta(request, &segment, stop),
            (Err(reason), RequestMode::Delta) => Ok(refused(Some(RequestMode::Full), Kind::Stale, reason)),
            (Err(why), RequestMode::Full | RequestMode::Auto) => {
                // An older image than what is served is a beginning for all but those who have it.
                let has = |w: &SealedSlot| {
                    let digest = match &request.keeps {
                        Some(keeps) => self.slice_digest(keeps, w.version, stop),
                        None => Some(w.digest),
                    };
                    let have = request.have.as_ref();
                    have.is_some_and(|h| {
                        (h.incarnation, h.version, Some(h.digest))
                            == (self.region.incarnation(), w.version, digest)
                    })
                };
                match whole.filter(|w| w.version == slot.version || !has(w)) {
                    Some(whole) => self.grant_full(request, whole, why, stop),
                    None => Err(ServeError::NotWhole { version: slot.version }),
                }
            }
        }
    }

    /// The delta that serves a request, or why none does.
    pub(super) fn delta_for(
        &self,
        request: &TransferRequest,
        slot: &SealedSlot,
        stop: &Stop,
    ) -> Result<Arc<Segment>, String> {
        let Have { incarnation, version: base, digest } =
            request.have.as_ref().ok_or("the receiver has no version to start from")?;
        let target = request.version.unwrap_or(slot.version);
        if *incarnation != self.region.incarnation() {
            return Err(format!(
                "version {base} is of incarnation {incarnation}, this publisher is {}",
                self.region.incarnation()
            ));
        }
        if *base == target {
            return Err(format!("version {base} is what was asked for"));
        }
        if *base > target && request.version.is_none() {
            return Err(format!("version {base} is newer than {target}, and nobody asked to go back"));
        }
        let segment = self.segment(*base, target, stop).map_err(|e| e.to_string())?;
        let [known, _] = self.digests_of(request, &segment, stop)?;
        if known != *digest {
            return Err(format!("the receiver's version {base} has digest {digest}, here it has {known}"));
        }
        let image = self.region.manifest().bytes_of(&self.region.blocks());
        let share = segment.bytes as f64 / image.max(1) as f64;
        // Whoever names the version lifts blocks that it holds. Image bytes would not help it: they are the newest,
        // and may be lapped again.
        if share > self.config.dense_share && request.version.is_none() {
            return Err(format!(
                "the delta from {base} to {target} is too dense: {:.0} % of the image",
                share * 100.0
            ));
        }
        Ok(segment)
    }

    /// The digests of the versions that a delta leads from and to, of what the receiver keeps.
    fn digests_of(
        &self,
        request: &TransferRequest,
        segment: &Segment,
        stop: &Stop,
    ) -> Result<[StateDigest; 2], String> {
        let header = &segment.header;
        let digest = |version, part| match &request.keeps {
            Some(keeps) => self
                .slice_digest(keeps, version, stop)
                .ok_or_else(|| format!("the digest of this slice of version {version} is not known here")),
            None => self
                .whole_digest(version, part)
                .ok_or_else(|| format!("the digest of all parts of version {version} is not known here")),
        };
        Ok([digest(header.base.1, header.base_digest)?, digest(header.target.1, header.target_digest)?])
    }

    /// The digest of a whole version that deltas start from or lead to, given that of the part here.
    fn whole_digest(&self, version: Version, part: StateDigest) -> Option<StateDigest> {
        let known = self.state().digests.get(&version).copied();
        known.or_else(|| self.config.peers.is_empty().then_some(part))
    }

    /// The delta from one version to another, newer or older. The way back begins at the newest version in a slot.
    pub(super) fn segment(
        &self,
        base: Version,
        target: Version,
        stop: &Stop,
    ) -> Result<Arc<Segment>, ServeError> {
        if base <= target {
            return Ok(self.history.segment(base, target, stop)?);
        }
        let patience = stop.with_timeout(BACK_PATIENCE);
        loop {
            let mut state = self.state();
            let newest = state.slots.iter().flatten().max_by_key(|s| s.version).cloned();
            // What was served by delta only will be in a slot soon.
            let Some(slot) = newest.filter(|s| s.version >= base) else {
                if patience.is_set() || self.stop.is_set() {
                    return Err(ServeError::NotWhole { version: base });
                }
                self.changed.wait_for(&mut state, patience.nap());
                continue;
            };
            drop(state);
            match self.back(base, target, &slot, stop) {
                // A writer takes the slot; the next version will be in the other one.
                Err(
                    ServeError::Region(RegionError::LeaseGone { .. } | RegionError::LeaseBroken { .. })
                    | ServeError::History(HistoryError::Overtaken { .. }),
                ) if !patience.is_set() && !self.stop.is_set() => {
                    let mut state = self.state();
                    if state.slots.iter().flatten().all(|s| s.version <= slot.version) {
                        self.changed.wait_for(&mut state, patience.nap());
                    }
                }
                other => return other,
            }
        }
    }

    fn back(
        &self,
        base: Version,
        target: Version,
        slot: &SealedSlot,
        stop: &Stop,
    ) -> Result<Arc<Segment>, ServeError> {
        let lease = self.slot_lease(slot.id, BACK_PATIENCE)?;
        let wanted = || lease.wanted_back() || self.stop.is_set();
        let whole = Whole { version: slot.version, data: lease.data(), sums: &slot.sums, wanted: &wanted };
        let segment = self.history.back(base, target, &whole, stop)?;
        // What was read from a slot that was taken back meanwhile is of two versions.
        lease.renew(BACK_PATIENCE).inspect_err(|_| self.history.forget(base, target))?;
        Ok(segment)
    }

    pub(super) fn fields(
        &self,
        request: &TransferRequest,
        version: Version,
        digest: StateDigest,
    ) -> Result<TicketFields, ServeError> {
        let manifest = self.region.manifest();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let timeout = request.timeout_ms.unwrap_or(self.config.transfer_timeout.as_millis() as u64);
        let blocks = request.keeps.clone();
        let blocks = blocks.unwrap_or_else(|| BlockRanges::from(0..manifest.cuts().blocks()));
        let (endpoint, tls) = (self.data.clone(), self.config.tcp.tls.is_some());
        let source = Source { id: SourceId(0), endpoint, blocks: self.region.blocks(), tls };
        Ok(TicketFields {
            protocol: ProtocolVersion::CURRENT.major,
            id: TicketId(random()?),
            identity: self.identity(version),
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
            digest,
            mode: Mode::Full,
            why: String::new(),
            wanted: blocks.clone(),
            block_versions: BlockVersions::uniform(&blocks, version),
            sources: vec![source],
            streams: request.streams.unwrap_or(self.config.streams),
            stripe_bytes: self.config.stripe_bytes,
            checks: Checks::BlockSums,
            deadline: Deadline::starting(now, timeout),
            key: TicketKey::new(random()?),
            swarm: None,
        })
    }

    pub(super) fn grant_full(
        &self,
        request: &TransferRequest,
        slot: &SealedSlot,
        why: String,
        stop: &Stop,
    ) -> Result<TransferAnswer, ServeError> {
        let stop = &stop.with_timeout(PEER_PATIENCE);
        let digest = match &request.keeps {
            Some(keeps) => {
                let digest = self.slice_digest(keeps, slot.version, stop);
                digest.ok_or(ServeError::NoVersion { version: slot.version, newest: Some(slot.version) })?
            }
            None => slot.digest,
        };
        let mut fields = self.fields(request, slot.version, digest)?;
        fields.why = why;
        if let Some(wanted) = &request.wanted {
            fields.wanted = wanted.clone();
        }
        for (i, peer) in self.config.peers.iter().enumerate() {
            let part = peer.part(PartRequest::image(slot.version), stop)?;
            let id = SourceId(i as u32 + 1);
            fields.sources.push(Source { id, endpoint: part.data, blocks: part.blocks, tls: part.tls });
        }
        let crowd =
            if self.passes_on(request, false) { self.crowd(request, &mut fields) } else { Crowd::One };
        let ticket = Ticket::new(fields.clone())?;
        self.share_with_peers(&fields, stop)?;
        // After the peers, who may take their time: until the offer is made, nobody would end this lease for a writer.
        // The slot may have been taken back since it was looked up: then this says so.
        let body = self.image_body(slot, Duration::from_millis(ticket.deadline.timeout_ms))?;
        self.offer(ticket, SourceId(0), body, crowd, request.instance_id.clone())?;
        count(&self.counters.tickets_full);
        Ok(TransferAnswer::Granted(Box::new(Granted {
            ok: true,
            version: slot.version,
            mode: RequestMode::Full,
            delta_base_version: None,
            delta_size: None,
            sparsity: None,
            num_nonzero: None,
            compute_time: None,
            ticket: fields,
        })))
    }

    pub(super) fn image_body(
        &self,
        slot: &SealedSlot,
        deadline: Duration,
    ) -> Result<(Body, Option<Weak<Lease>>), ServeError> {
        let lease = self.slot_lease(slot.id, deadline)?;
        let body = Body::Image {
            manifest: Arc::clone(self.region.manifest()),
            file: Arc::clone(&self.files[lease.slot()]),
            data_start: self.region.data_start(),
            sums: Arc::clone(&slot.sums),
            hold: Arc::clone(&lease) as Arc<dyn std::any::Any + Send + Sync>,
        };
        Ok((body, Some(Arc::downgrade(&lease))))
    }

    /// The lease that all offers of a slot share, good for at least `time`.
    pub(super) fn slot_lease(&self, id: u64, time: Duration) -> Result<Arc<Lease>, RegionError> {
        let until = Instant::now() + time;
        let mut state = self.state();
        if let Some((lease, given)) = &mut state.lease
            && let Some(lease) = lease.upgrade().filter(|l| l.id() == id)
        {
            if lease.wanted_back() {
                return Err(RegionError::LeaseGone { id });
            }
            if until > *given {
                lease.renew(time)?;
                *given = until;
            }
            return Ok(lease);
        }
        let lease = Arc::new(self.region.lease(id, LeaseKind::Stream, time)?);
        state.lease = Some((Arc::downgrade(&lease), until));
        Ok(lease)
    }

    pub(super) fn grant_delta(
        &self,
        request: &TransferRequest,
        segment: &Arc<Segment>,
        stop: &Stop,
    ) -> Result<TransferAnswer, ServeError> {
        let stop = &stop.with_timeout(PEER_PATIENCE);
        let (base, target) = (segment.header.base.1, segment.header.target.1);
        let [base_digest, digest] = match self.digests_of(request, segment, stop) {
            Ok(digests) => digests,
            Err(reason) => return Ok(refused(Some(RequestMode::Full), Kind::Stale, reason)),
        };
        let sliced = request.keeps.as_ref().map(|keeps| self.sliced(segment, keeps, stop)).transpose()?;
        let segment = sliced.as_ref().unwrap_or(segment);
        let mut fields = self.fields(request, target, digest)?;
        fields.why = format!("the delta from {base} has {} bytes", segment.bytes);
        fields.checks = Checks::Xxh3;
        let stripe = self.passes_on(request, true).then(|| self.swarm_stripe(request, true));
        let keeps = request.keeps.as_ref();
        let sums =
            stripe.map(|stripe| self.stripe_sums(segment, keeps, stripe)).transpose()?.unwrap_or_default();
        let mut payloads = vec![Payload { bytes: segment.bytes, sources: vec![SourceId(0)], sums }];
        for (i, peer) in self.config.peers.iter().enumerate() {
            let wanted = PartRequest {
                version: target,
                base: Some(base),
                stripe_bytes: stripe,
                keeps: request.keeps.clone(),
            };
            let part = peer.part(wanted, stop)?;
            let id = SourceId(i as u32 + 1);
            let Some(bytes) = part.delta_bytes else {
                let reason = format!("the holder at {} has no delta from {base} to {target}", part.data);
                return Ok(refused(Some(RequestMode::Full), Kind::Stale, reason));
            };
            payloads.push(Payload { bytes, sources: vec![id], sums: part.delta_sums });
            fields.sources.push(Source { id, endpoint: part.data, blocks: part.blocks, tls: part.tls });
        }
        fields.stripe_bytes = delta_stripe(&payloads, fields.streams, self.config.stripe_bytes);
        let (parts, bytes) = (payloads.len(), payloads.iter().map(|p| p.bytes).sum::<u64>());
        // An earlier release does not tell its sums.
        let summed = payloads.iter().all(|p| !p.sums.is_empty()) && bytes >= swarm::LEAST;
        if !summed {
            payloads.iter_mut().for_each(|p| p.sums.clear());
        }
        let base = Base { identity: self.identity(base), digest: base_digest };
        fields.mode = Mode::Delta { base: base.clone(), payloads };
        let crowd = if summed { self.crowd(request, &mut fields) } else { Crowd::One };
        let ticket = Ticket::new(fields.clone())?;
        self.share_with_peers(&fields, stop)?;
        let mut files = vec![None; parts];
        files[0] = Some(Arc::clone(&segment.file));
        self.offer(ticket, SourceId(0), (Body::payloads(files), None), crowd, request.instance_id.clone())?;
        count(&self.counters.tickets_delta);
        let units: u64 =
            self.region.manifest().tensors().iter().map(windlass_core::manifest::Tensor::units).sum();
        let stats = self.state().delta.filter(|d| (d.base, d.version) == (base.identity.version, target));
        Ok(TransferAnswer::Granted(Box::new(Granted {
            ok: true,
            version: target,
            mode: RequestMode::Delta,
            delta_base_version: Some(base.identity.version),
            delta_size: Some(segment.bytes),
            sparsity: stats.map(|d| sparsity(d.changes, units)),
            num_nonzero: stats.map(|d| d.changes),
            compute_time: stats.map(|d| d.seconds),
            ticket: fields,
        })))
    }

    /// Whether a receiver will be one of those that pass on what they get. Images always are: the first that ask for one
    /// cannot know whether others will.
    fn passes_on(&self, request: &TransferRequest, delta: bool) -> bool {
        let least = self.config.relay_from;
        if least == 0 || request.relay.is_none() || request.wanted.is_some() {
            return false;
        }
        !delta || self.state().heard_lately(request.keeps.as_ref().map(slice_key)) >= least
    }

    /// The stripes of an image, or of a delta, for receivers that pass it on.
    fn swarm_stripe(&self, request: &TransferRequest, delta: bool) -> u32 {
        let manifest = self.region.manifest();
        let bytes = request.keeps.as_ref().map_or(manifest.data_bytes(), |keeps| manifest.bytes_of(keeps));
        swarm_stripe_bytes(bytes, delta, self.config.stripe_bytes)
    }

    /// Makes the receiver one of those that pass on what the ticket is for.
    fn crowd(&self, request: &TransferRequest, fields: &mut TicketFields) -> Crowd {
        let Some(offer) = request.relay.clone() else { return Crowd::One };
        let cargo = swarm::cargo(fields);
        fields.stripe_bytes = self.swarm_stripe(request, cargo.0.1.is_some());
        let mut state = self.state();
        let named = state.instances.get(&request.instance_id).and_then(|i| i.name.clone());
        let name = named.unwrap_or_else(|| offer.endpoint.to_string());
        let expected =
            u32::try_from(state.heard_lately(request.keeps.as_ref().map(slice_key))).unwrap_or(u32::MAX);
        let who = (&*request.instance_id, name);
        let (swarm, board) = state.swarms.join(cargo, expected, who, fields.id, offer);
        fields.swarm = Some(swarm);
        state.joined += 1;
        drop(state);
        self.changed.notify_all();
        Crowd::Among(board)
    }

    /// The sums of the stripes of a delta, with which receivers compare what relays send.
    pub(super) fn stripe_sums(
        &self,
        segment: &Segment,
        keeps: Option<&BlockRanges>,
        stripe: u32,
    ) -> Result<Vec<u64>, ServeError> {
        let key = (segment.header.target.1, segment.header.base.1, keeps.map(slice_key), stripe);
        if let Some(known) = self.state().stripe_sums.get(&key) {
            return Ok(known.clone());
        }
        let unreadable = |source| ServeError::Slot { path: segment.path.clone(), source };
        let mut buffer = vec![0; stripe as usize];
        let (mut sums, mut at) = (Vec::new(), 0);
        while at < segment.bytes {
            let piece = &mut buffer[..(segment.bytes - at).min(stripe.into()) as usize];
            segment.file.read_exact_at(piece, at).map_err(unreadable)?;
            sums.push(xxh3_64(piece));
            at += piece.len() as u64;
        }
        let mut state = self.state();
        state.stripe_sums.insert(key, sums.clone());
        while state.stripe_sums.len() > KEPT_SUMS {
            state.stripe_sums.pop_first();
        }
        Ok(sums)
    }

    pub(super) fn share_with_peers(&self, fields: &TicketFields, stop: &Stop) -> Result<(), ServeError> {
        for (i, peer) in self.config.peers.iter().enumerate() {
            peer.share(&SharedTicket { source: SourceId(i as u32 + 1), ticket: fields.clone() }, stop)?;
        }
        Ok(())
    }

    pub(super) fn offer(
        &self,
        ticket: Ticket,
        source: SourceId,
        (body, lease): (Body, Option<Weak<Lease>>),
        crowd: Crowd,
        instance: String,
    ) -> Result<(), ServeError> {
        let expires = Instant::now() + Duration::from_millis(ticket.deadline.timeout_ms);
        let handle = self.sender.offer(Offer { ticket, source, body, crowd })?;
        self.state().offers.push(Active { handle, lease, instance, expires });
        Ok(())
    }
}

fn refused(fallback: Option<RequestMode>, kind: Kind, reason: String) -> TransferAnswer {
    TransferAnswer::Refused(Refused { ok: false, fallback, reason, kind })
}

/// The stripes of a delta: one for each stream where that leaves them large enough to be worth a connection, and
/// none larger than those of images.
fn delta_stripe(payloads: &[Payload], streams: u16, most: u32) -> u32 {
    const WORTH_A_STREAM: u32 = 1 << 20;
    let bytes = payloads.iter().map(|p| p.bytes).fold(0, u64::saturating_add);
    let share = bytes.div_ceil(u64::from(streams.max(1))).min(u64::from(u32::MAX)) as u32;
    share.max(WORTH_A_STREAM).min(most)
}
