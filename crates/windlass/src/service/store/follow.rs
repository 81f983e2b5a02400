//! The receiver's end of a store: what an agent answers and sends, from objects.
//!
//! Owns: [`StoreControl`], a [`Control`] whose tickets the same process serves as a [`Carrier`]. Called by
//! `windlass receive --from URL`, whose receiver decides what it needs exactly as it does with an agent: the image, the digest and
//! the engines' loads are the same. Must not: accept a byte without its hash.
//!
//! # How a version comes
//!
//! - The head is read again and again, by its etag, with a pause that grows while nothing changes.
//! - For a delta, the links of the cheapest way are fetched into a [`History`] next to the image, many ranges at once, and
//!   compared with the hash in their names; a link may be one that the publisher composed. The history composes them into
//!   one. The links stay until the version is whole, so that a follower that is killed goes on with those that it has.
//! - For image bytes, ranges of the anchor's parts are fetched at once and land in the image; each block is compared with its
//!   hash. Meanwhile the links that lead on are fetched and composed. Memory is bounded by [`STRIPE`] and [`STREAMS`].
//! - After a kill, the image's hashes are compared with the anchor's, and with those that each delta leads to.
//! - A receiver that keeps a slice gets the ranges that its blocks are in, and of deltas the same blocks. See [`slice`].

mod links;
mod slice;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};
use windlass_core::address::Host;
use windlass_core::delta::Delta;
use windlass_core::digest::BlockSum;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;
use windlass_core::store::{AnchorIndex, Chain, DeltaRef, Head, Object, VersionIndex, Way};
use windlass_core::wire::control::{
    Granted, Refused, Registered, Registration, RequestMode, TransferAnswer, TransferDone, TransferRequest,
    VersionInfo,
};
use windlass_core::wire::{
    Base, BlockVersions, Check, Checks, Deadline, Endpoint, Extent, MAX_STREAMS, Mode, Payload, Progress,
    ProtocolVersion, Source, SourceId, Stripe, StripePlan, Ticket, TicketFields, TicketId, TicketKey,
    Verdict,
};
use windlass_data::history::{History, Limits, Segment};
use windlass_data::receiver::{Carrier, Control, ControlError, EachTable};
use windlass_data::seal::draft::make_dir;
use windlass_data::stop::Stop;
use windlass_data::tcp::{Landing, TcpError, Watch};

use self::links::AT_ONCE;
use super::bucket::StoreFailure;
use super::model::{Look, Pick, StoredModel, Tag};
use super::publish::is_damage;
use crate::error::chain;

/// Bytes of a range.
const STRIPE: u32 = 8 << 20;
/// How many ranges are fetched at once.
const STREAMS: u16 = 8;
/// How long a wait for a newer version lasts before the caller is asked whether to go on.
pub(super) const WAIT: Duration = Duration::from_secs(20);
/// The pause between two looks at the head: the first after something new, and the longest.
pub(super) const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How often the image bytes of one version are asked for before the store is blamed.
const FILLS: u32 = 16;
/// How many earlier indexes are read on the way back to what the receiver has.
const BACK: usize = 64;
/// How long a transfer may take.
const TRANSFER: Duration = Duration::from_hours(24);

/// The index of a version, with what it names.
#[derive(Debug)]
struct Stored {
    index: VersionIndex,
    chain: Chain,
}

/// An anchor and its table.
#[derive(Debug)]
struct Anchored {
    index: AnchorIndex,
    sums: Vec<BlockSum>,
    versions: BlockVersions,
}

/// What is known of the store.
#[derive(Debug, Default)]
struct State {
    head: Option<(Head, Tag)>,
    stored: Option<Arc<Stored>>,
    manifest: Option<Arc<Manifest>>,
    anchor: Option<(Object, Arc<Anchored>)>,
    history: Option<(Incarnation, Arc<History>)>,
    slice: slice::Slice,
    /// Whether ranges of an image are still to be fetched, and the deltas that were fetched meanwhile, with their bytes.
    filling: bool,
    ahead: BTreeMap<(Version, Version), u64>,
    /// How often image bytes of the version were asked for.
    fills: u32,
    /// What open tickets are for.
    cargo: BTreeMap<TicketId, Cargo>,
}

/// What a ticket is for.
#[derive(Clone, Debug)]
enum Cargo {
    Image(Arc<Anchored>),
    /// A delta, and how many bytes were fetched for it.
    Delta(Arc<Segment>, u64),
}

/// A model in a store, as a receiver follows it.
#[derive(Debug)]
pub(crate) struct StoreControl {
    model: StoredModel,
    pick: Pick,
    /// Where links are kept until the version is whole.
    links: PathBuf,
    /// Where the hashes of a slice's version are kept.
    sums: PathBuf,
    state: Mutex<State>,
}

impl StoreControl {
    /// Follows `model`, or gets one version of it. Links are kept in a directory below `dir`.
    pub(crate) fn new(model: StoredModel, pick: Pick, dir: &Path) -> StoreControl {
        let place = |end: &str| dir.join(format!(".{}.{end}", model.model_id()));
        let (links, sums) = (place("store"), place("sums"));
        StoreControl { model, pick, links, sums, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn lost(&self, what: &'static str, failure: &StoreFailure) -> ControlError {
        ControlError::Lost { peer: self.peer(), what, why: failure.to_string(), kind: failure.kind }
    }

    fn odd(&self, what: &'static str, kind: Kind, why: String) -> ControlError {
        ControlError::Lost { peer: self.peer(), what, why, kind }
    }

    /// Looks at the head, and reads the index of its version if that is another one.
    fn refresh(&self, stop: &Stop) -> Result<(), ControlError> {
        const WHAT: &str = "get the version";
        let seen = self.state().head.as_ref().map(|(_, tag)| tag.clone());
        let look = self.model.look(seen.as_ref(), stop).map_err(|e| self.lost(WHAT, &e))?;
        let (head, tag) = match look {
            Look::Same => return Ok(()),
            Look::Absent => {
                let why = "no version has been published there yet".to_owned();
                return Err(self.odd(WHAT, Kind::NotFound, why));
            }
            Look::Moved(head, tag) => (head, tag),
        };
        if head.identity.model_id != *self.model.model_id() {
            let why = format!("the head is of model {}", head.identity.model_id);
            return Err(self.odd(WHAT, Kind::Corrupt, why));
        }
        let index = self.model.pick(&head, &self.pick, stop).map_err(|e| self.lost(WHAT, &e))?;
        if self.pick == Pick::default() && index.digest != head.digest {
            let why = format!("the head and the index of {} have different digests", head.identity);
            return Err(self.odd(WHAT, Kind::Corrupt, why));
        }
        let mut state = self.state();
        let same = state.stored.as_ref().is_some_and(|s| s.index.identity == index.identity);
        if !same {
            if state.stored.as_ref().is_some_and(|s| s.index.manifest != index.manifest) {
                state.manifest = None;
            }
            state.fills = 0;
            state.ahead.clear();
            let chain = Chain::new(&index);
            state.stored = Some(Arc::new(Stored { index, chain }));
        }
        state.head = Some((head, tag));
        Ok(())
    }

    /// The newest version. Where the receiver has it, links to it are let go of.
    pub(super) fn glance(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        self.refresh(stop)?;
        let index = &self.stored()?.index;
        let info = VersionInfo {
            version: Some(index.identity.version),
            model_id: index.identity.model_id.clone(),
            incarnation: index.identity.incarnation,
            digest: Some(index.digest),
            layout_hash: index.layout_hash,
            cuts_hash: index.cuts_hash,
        };
        if let Some(had) = newer_than.filter(|_| !info.is_newer_than(newer_than)) {
            self.save(had);
            self.clear_links();
        }
        Ok(info)
    }

    /// Removes links that are not needed any more.
    pub(super) fn clear_links(&self) {
        let history = self.state().history.clone();
        if let Some((_, history)) = history.filter(|(_, h)| !h.versions().is_empty()) {
            history.clear();
        }
    }

    fn stored(&self) -> Result<Arc<Stored>, ControlError> {
        let why = || self.odd("get the version", Kind::NotFound, "no version is known yet".into());
        self.state().stored.clone().ok_or_else(why)
    }

    fn layout(&self, stop: &Stop) -> Result<Arc<Manifest>, ControlError> {
        if let Some(manifest) = self.state().manifest.clone() {
            return Ok(manifest);
        }
        let stored = self.stored()?;
        let manifest =
            self.model.manifest(&stored.index, stop).map_err(|e| self.lost("get the manifest", &e))?;
        let manifest = Arc::new(manifest);
        self.state().manifest = Some(Arc::clone(&manifest));
        Ok(manifest)
    }

    fn anchored(&self, stop: &Stop) -> Result<Arc<Anchored>, ControlError> {
        const WHAT: &str = "get the anchor";
        let stored = self.stored()?;
        let object = stored.index.anchor_object();
        if let Some((_, anchored)) = self.state().anchor.as_ref().filter(|(known, _)| *known == object) {
            return Ok(Arc::clone(anchored));
        }
        let index = self.model.anchor(&stored.index, stop).map_err(|e| self.lost(WHAT, &e))?;
        let manifest = self.layout(stop)?;
        let bytes =
            |p: &windlass_core::store::PartRef| manifest.bytes_of(&(p.first..p.first + p.count).into());
        if index.blocks != manifest.cuts().blocks() || index.parts.iter().any(|p| bytes(p) != p.bytes) {
            let why = format!("{} does not fit the layout of the model", self.model.name(&object));
            return Err(self.odd(WHAT, Kind::Corrupt, why));
        }
        let sums = self.model.sums(&index, stop).map_err(|e| self.lost(WHAT, &e))?;
        let versions = index.block_versions().map_err(|e| self.odd(WHAT, e.kind(), e.to_string()))?;
        let anchored = Arc::new(Anchored { index, sums, versions });
        self.state().anchor = Some((object, Arc::clone(&anchored)));
        Ok(anchored)
    }

    /// The cheapest way from what the receiver has to `to`, and the chain that it is on.
    fn way(
        &self,
        have: Option<(Version, StateDigest)>,
        to: Version,
        stop: &Stop,
    ) -> Result<(Arc<Stored>, Option<Way>), ControlError> {
        for _ in 0..BACK {
            let stored = self.stored()?;
            let way = stored.chain.way(have, to);
            let Some(Way::Earlier(version)) = way else { return Ok((stored, way)) };
            let found = self.model.find_version(stored.index.identity.incarnation, version, stop);
            let mut chain = stored.chain.clone();
            match found.map_err(|e| self.lost("get an earlier version", &e))? {
                Some(older) => chain
                    .extend(&older)
                    .map_err(|e| self.odd("get an earlier version", e.kind(), e.to_string()))?,
                // Retention has removed it: the anchor is what is left.
                None => chain.ends_here(),
            }
            self.state().stored = Some(Arc::new(Stored { index: stored.index.clone(), chain }));
        }
        let stored = self.stored()?;
        Ok((stored, None))
    }

    /// One delta from `base` to `target`, and the bytes that were fetched for it. None if the chain does not lead there.
    fn segment(
        &self,
        stored: &Stored,
        (base, target): (Version, Version),
        stop: &Stop,
    ) -> Result<Option<(Arc<Segment>, u64)>, ControlError> {
        const WHAT: &str = "get a delta";
        let history = self.history(stored, stop)?;
        let had = history.versions();
        let mut fetched = self.state().ahead.remove(&(base, target)).unwrap_or_default();
        if !had.contains(&base) || !had.contains(&target) {
            // What is there is the beginning of the way, if the chain leads on from its end.
            let newest = had.last().copied().filter(|_| had.contains(&base));
            let on = newest.and_then(|newest| stored.chain.between(newest, target));
            let Some(links) = on.or_else(|| stored.chain.between(base, target)) else { return Ok(None) };
            fetched += match self.fetch(stored, &history, &links, stop) {
                Err(e) if is_damage(e.kind()) => match stored.chain.each_between(base, target) {
                    Some(each) if each.len() > links.len() => {
                        tracing::warn!(error = %e, "a composed delta cannot be used: those of every version are fetched");
                        self.fetch(stored, &history, each, stop)
                    }
                    Some(_) | None => Err(e),
                },
                fetched => fetched,
            }?;
        }
        let segment = history.segment(base, target, stop).map_err(|e| match e.kind() {
            Kind::Corrupt => self.odd(WHAT, Kind::Corrupt, chain(&e)),
            _ => self.odd(WHAT, Kind::Exhausted, chain(&e)),
        })?;
        Ok(Some((segment, fetched)))
    }

    /// Makes sure that the history has these links, which lead one after another. What is there goes on if they lead on from its
    /// end, and begins anew otherwise. Answers how many bytes were fetched.
    fn fetch(
        &self,
        stored: &Stored,
        history: &History,
        links: &[DeltaRef],
        stop: &Stop,
    ) -> Result<u64, ControlError> {
        let had: BTreeSet<_> =
            history.list().iter().filter(|l| !l.composed).map(|l| (l.base, l.target)).collect();
        let mut missing =
            links.iter().position(|l| !had.contains(&(l.base, l.target))).unwrap_or(links.len());
        let leads_on = |link: &DeltaRef| history.versions().last() == Some(&link.base);
        if links.get(missing).is_some_and(|link| !leads_on(link)) {
            history.clear();
            missing = 0;
        }
        let links = links.get(missing..).unwrap_or_default();
        for links in links.chunks(AT_ONCE) {
            self.fetch_links(stored, history, links, stop)?;
        }
        Ok(links.iter().map(|link| link.bytes).sum())
    }

    fn history(&self, stored: &Stored, stop: &Stop) -> Result<Arc<History>, ControlError> {
        let incarnation = stored.index.identity.incarnation;
        if let Some((_, history)) = self.state().history.as_ref().filter(|(of, _)| *of == incarnation) {
            return Ok(Arc::clone(history));
        }
        let manifest = self.layout(stop)?;
        let failed = |why: String| self.odd("keep deltas", Kind::Exhausted, why);
        make_dir(&self.links).map_err(|e| failed(format!("{}: {e}", self.links.display())))?;
        let limits = Limits { count: windlass_core::store::MAX_DELTAS, bytes: u64::MAX };
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let model_id = self.model.model_id().clone();
        let history = History::open(&self.links, model_id, incarnation, manifest, limits, threads);
        let history = Arc::new(history.map_err(|e| failed(chain(&e)))?);
        self.state().history = Some((incarnation, Arc::clone(&history)));
        Ok(history)
    }

    /// A ticket that this process serves itself.
    fn grant(
        &self,
        cargo: Cargo,
        (mode, identity, digest): (Mode, Identity, StateDigest),
        (wanted, versions): (BlockRanges, BlockVersions),
        why: String,
    ) -> Result<TransferAnswer, ControlError> {
        let stored = self.stored()?;
        let mut random = [0; 48];
        getrandom::fill(&mut random)
            .map_err(|e| self.odd("make a ticket", Kind::Exhausted, e.to_string()))?;
        let (id, key) = random.split_at(16);
        let id = TicketId(id.try_into().unwrap_or_default());
        let key = TicketKey::new(key.try_into().unwrap_or_default());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
        let granted = match &mode {
            Mode::Full => RequestMode::Full,
            Mode::Delta { .. } => RequestMode::Delta,
        };
        let checks = if granted == RequestMode::Full { Checks::BlockSums } else { Checks::Xxh3 };
        let version = identity.version;
        // A ticket has a source. Nothing connects to this one: the carrier brings the bytes.
        let host = Host::new("store").map_err(|e| self.odd("make a ticket", Kind::Bug, e.to_string()))?;
        let endpoint = Endpoint::new(host, NonZeroU16::MIN);
        let ticket = TicketFields {
            protocol: ProtocolVersion::CURRENT.major,
            id,
            identity,
            layout_hash: stored.index.layout_hash,
            cuts_hash: stored.index.cuts_hash,
            digest,
            mode,
            why,
            sources: vec![Source { id: SourceId(0), endpoint, blocks: wanted.clone(), tls: false }],
            wanted,
            block_versions: versions,
            streams: STREAMS.min(MAX_STREAMS),
            stripe_bytes: STRIPE,
            checks,
            deadline: Deadline::starting(now.max(1), TRANSFER.as_millis() as u64),
            key,
            swarm: None,
        };
        let mut state = self.state();
        // A receiver has one transfer at a time; what was not carried is not asked for again.
        state.cargo.retain(|_, c| matches!(c, Cargo::Delta(..)));
        while state.cargo.len() > 64 {
            state.cargo.pop_first();
        }
        state.cargo.insert(id, cargo);
        Ok(TransferAnswer::Granted(Box::new(Granted {
            ok: true,
            version,
            mode: granted,
            delta_base_version: None,
            delta_size: None,
            sparsity: None,
            num_nonzero: None,
            compute_time: None,
            ticket,
        })))
    }

    fn grant_image(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        let anchored = self.anchored(stop)?;
        let stored = self.stored()?;
        let fills = {
            let mut state = self.state();
            state.fills += 1;
            state.fills
        };
        let version = anchored.index.version();
        if fills > FILLS {
            let why = format!(
                "the image bytes of its anchor were fetched {FILLS} times, and its deltas do not lead on from them: the store is \
                 damaged; `windlass store verify` says where"
            );
            return Err(self.odd("get the image", Kind::Corrupt, why));
        }
        let keeps = request.keeps.as_ref();
        let digest = match keeps {
            Some(keeps) => self.slice_digest(&stored, keeps, version, stop)?,
            None => stored.chain.digest_of(version),
        };
        let digest = digest.ok_or_else(|| {
            self.odd(
                "get the image",
                Kind::Bug,
                format!("version {version} of the anchor is not in the chain"),
            )
        })?;
        let all = BlockRanges::from(0..anchored.index.blocks);
        let wanted = request.wanted.as_ref().or(keeps).cloned().unwrap_or(all);
        let identity = Identity { version, ..stored.index.identity.clone() };
        let versions = anchored.versions.clone();
        let why = format!("the anchor of version {version} begins the cheapest chain");
        self.grant(Cargo::Image(anchored), (Mode::Full, identity, digest), (wanted, versions), why)
    }

    fn grant_delta(
        &self,
        stored: &Stored,
        (base, target): (Version, Version),
        request: &TransferRequest,
        stop: &Stop,
    ) -> Result<TransferAnswer, ControlError> {
        let Some((mut segment, mut fetched)) = self.segment(stored, (base, target), stop)? else {
            return Ok(refused("there is no delta"));
        };
        let digests = match (&request.keeps, &request.have) {
            // That of its base was compared.
            (Some(keeps), Some(have)) => (Some(have.digest), self.slice_digest(stored, keeps, target, stop)?),
            (..) => (stored.chain.digest_of(base), stored.chain.digest_of(target)),
        };
        let (Some(base_digest), Some(digest)) = digests else { return Ok(refused("its base is unknown")) };
        if let Some(keeps) = &request.keeps {
            segment = self.only(stored, &segment, keeps, (base_digest, digest), stop)?;
            fetched += self.fetched_for_hashes();
        }
        let named = |version| Identity { version, ..stored.index.identity.clone() };
        let why = format!("{fetched} bytes of deltas lead from version {base}");
        let base = Base { identity: named(base), digest: base_digest };
        let payloads = vec![Payload { bytes: segment.bytes, sources: vec![SourceId(0)], sums: Vec::new() }];
        let all = BlockRanges::from(0..self.layout(stop)?.cuts().blocks());
        let wanted = request.keeps.clone().unwrap_or(all);
        let versions = BlockVersions::uniform(&wanted, target);
        let mode = Mode::Delta { base, payloads };
        self.grant(Cargo::Delta(segment, fetched), (mode, named(target), digest), (wanted, versions), why)
    }
}

fn refused(reason: &str) -> TransferAnswer {
    TransferAnswer::Refused(Refused {
        ok: false,
        fallback: None,
        reason: reason.to_owned(),
        kind: Kind::NotFound,
    })
}

impl Control for StoreControl {
    fn peer(&self) -> String {
        self.model.label()
    }

    fn carrier(&self) -> Option<&dyn Carrier> {
        Some(self)
    }

    fn goes_back(&self) -> bool {
        self.pick.version.is_some()
    }

    fn version(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        let until = stop.with_timeout(WAIT);
        let mut pause = PAUSES.0;
        loop {
            let info = self.glance(newer_than, stop)?;
            if newer_than.is_none() || info.is_newer_than(newer_than) || until.is_set() {
                return Ok(info);
            }
            let again = until.with_timeout(pause);
            while !again.is_set() {
                std::thread::sleep(again.nap());
            }
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        Ok(Manifest::clone(&*self.layout(stop)?))
    }

    fn sums(&self, _: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        let mut last = Vec::new();
        self.tables(None, &mut |_, sums| last = sums.to_vec(), stop)?;
        Ok(last)
    }

    fn register(&self, _: &Registration, _: &Stop) -> Result<Registered, ControlError> {
        let stored = self.stored()?;
        Ok(Registered {
            instance_id: "store".into(),
            model_id: self.model.model_id().clone(),
            incarnation: stored.index.identity.incarnation,
            trainer_global_rank: 0,
            trainer_world_size: 1,
            trainer_buffer_length: stored.index.anchor.image_bytes,
            trainer_hostname: String::new(),
            trainer_rpc_port: 0,
            data_port: 0,
            relays: false,
        })
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        let stored = self.stored()?;
        let to = request.version.unwrap_or(stored.index.identity.version);
        let ours = stored.index.identity.incarnation;
        let have = request.have.as_ref().filter(|h| h.incarnation == ours).map(|h| (h.version, h.digest));
        let have = match &request.keeps {
            Some(keeps) if request.mode != RequestMode::Full => self.whole_of(keeps, have, to, stop)?,
            Some(_) | None => have,
        };
        match request.mode {
            RequestMode::Full => self.grant_image(request, stop),
            RequestMode::Delta | RequestMode::Auto => {
                let (stored, way) = self.way(have, to, stop)?;
                let base = have.filter(|(v, d)| stored.chain.digest_of(*v) == Some(*d)).map(|(v, _)| v);
                match (way, request.mode, base) {
                    (Some(Way::Deltas { .. }), _, Some(base)) => {
                        self.grant_delta(&stored, (base, to), request, stop)
                    }
                    // What costs more than the anchor is still what was asked for.
                    (Some(Way::Anchor { .. }), RequestMode::Delta, Some(base)) if base < to => {
                        self.grant_delta(&stored, (base, to), request, stop)
                    }
                    (_, RequestMode::Auto, _) => self.grant_image(request, stop),
                    (_, RequestMode::Delta | RequestMode::Full, _) => {
                        let have = have.map_or_else(
                            || "nothing of this incarnation".into(),
                            |(v, _)| format!("version {v}"),
                        );
                        Ok(refused(&format!("no delta of the store leads from {have} to version {to}")))
                    }
                }
            }
        }
    }

    fn done(&self, done: &TransferDone, _: &Stop) -> Result<(), ControlError> {
        let cargo = self.state().cargo.remove(&done.completion.ticket);
        let stored = self.stored()?;
        let incarnation = stored.index.identity.incarnation;
        match cargo {
            Some(Cargo::Image(anchored)) => self.save((incarnation, anchored.index.version())),
            Some(Cargo::Delta(segment, _)) => self.save((incarnation, segment.header.target.1)),
            None => {}
        }
        Ok(())
    }
}

impl Carrier for StoreControl {
    fn digests(&self, keeps: Option<&BlockRanges>, known: &mut BTreeMap<Version, StateDigest>) {
        let Some(stored) = self.state().stored.clone() else { return };
        let anchor = &stored.index.anchor;
        let deltas = stored.index.deltas.iter().map(|d| (d.target, d.digest));
        let whole = std::iter::once((anchor.start, anchor.digest)).chain(deltas);
        match keeps {
            None => known.extend(whole),
            Some(keeps) => {
                known.extend(self.slice_digests(keeps));
                // Parts of an anchor may be of versions of which the slice's digest is not known. Deltas lead on from them, and the
                // version that they lead to is proved.
                whole.for_each(|(version, digest)| _ = known.entry(version).or_insert(digest));
            }
        }
    }

    fn tables(
        &self,
        keeps: Option<&BlockRanges>,
        each: EachTable<'_>,
        stop: &Stop,
    ) -> Result<(), ControlError> {
        const WHAT: &str = "get the hashes";
        let (stored, anchored) = (self.stored()?, self.anchored(stop)?);
        let mut sums = anchored.sums.clone();
        each(&anchored.versions, &sums);
        let newest = anchored.index.version();
        let note = |version: Version, sums: &[BlockSum]| match keeps.filter(|_| version >= newest) {
            Some(keeps) => self.note(&stored, keeps, (version, sums), stop),
            None => Ok(()),
        };
        note(anchored.index.start, &sums)?;
        if stored.index.deltas.is_empty() {
            return Ok(());
        }
        // Every version of the chain: the blocks may be of any of them.
        let history = self.history(&stored, stop)?;
        self.fetch(&stored, &history, &stored.index.deltas, stop)?;
        let all = BlockRanges::from(0..anchored.index.blocks);
        for link in &stored.index.deltas {
            let path = history.path(link.base, link.target);
            let local =
                |e: std::io::Error| self.odd(WHAT, Kind::Exhausted, format!("{}: {e}", path.display()));
            let bytes = std::fs::read(&path).map_err(local)?;
            let wrong = |why: String| self.odd(WHAT, Kind::Corrupt, why);
            let delta = Delta::parse(&bytes).map_err(|e| wrong(e.to_string()))?;
            slice::overlay(&mut sums, &anchored.versions, &delta, link.target);
            note(link.target, &sums)?;
            // Blocks that the anchor has at a later version are not of this one.
            let later = anchored.versions.covered().difference(&anchored.versions.lagging(link.target + 1));
            let versions = all.difference(&later);
            let versions =
                BlockVersions::from_runs(versions.ranges().map(|r| (r.start, r.end - r.start, link.target)));
            each(&versions.map_err(|e| wrong(e.to_string()))?, &sums);
        }
        Ok(())
    }

    fn carry(
        &self,
        ticket: &Ticket,
        landing: &dyn Landing,
        watch: &Watch,
        stop: &Stop,
    ) -> Result<(), TcpError> {
        landing.check(ticket)?;
        let carried = |kind, message: String| TcpError::Carried { peer: self.peer(), kind, message };
        let unknown =
            || carried(Kind::Stale, format!("ticket {} is not of this store, or was used", ticket.id));
        let cargo = self.state().cargo.get(&ticket.id).cloned().ok_or_else(unknown)?;
        let plan = StripePlan::new(ticket, |block| landing.block_bytes(block))?;
        let stop = stop.with_timeout(Duration::from_millis(ticket.deadline.timeout_ms));
        let shown = Mutex::new(Progress {
            stripes: plan.stripes().len() as u32,
            bytes: plan.bytes(),
            ..Progress::default()
        });
        if let Cargo::Delta(_, fetched) = &cargo {
            watch.received(*fetched);
        }
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let give_up = AtomicBool::new(false);
        let run = |stripe: &Stripe, lander: &mut dyn windlass_data::tcp::Lander| -> Result<(), TcpError> {
            stop.check()?;
            lander.begin(*stripe)?;
            let check = match &cargo {
                Cargo::Delta(segment, _) => {
                    let Extent::Bytes { offset, len, .. } = stripe.extent else { return Err(unknown()) };
                    let mut at = offset;
                    let mut fill = |place: &mut [u8]| {
                        segment
                            .file
                            .read_exact_at(place, at)
                            .map_err(|source| TcpError::Read { ticket: ticket.id, source })?;
                        at += place.len() as u64;
                        Ok(())
                    };
                    lander.take(len, &mut fill)?;
                    Check::Xxh3(0)
                }
                Cargo::Image(anchored) => {
                    self.land_blocks(anchored, &plan, stripe, landing, lander, watch, &stop)?
                }
            };
            match lander.verdict(&check) {
                Verdict::Good => {
                    lander.keep();
                    let mut shown = shown.lock();
                    shown.stripes_done += 1;
                    shown.bytes_done += u64::from(stripe.bytes);
                    watch.show(&shown);
                    Ok(())
                }
                Verdict::BadBlock(block) => {
                    let object = match &cargo {
                        Cargo::Image(anchored) => {
                            anchored.index.part_of(block).map(|p| anchored.index.part_object(p))
                        }
                        Cargo::Delta(..) => None,
                    };
                    let object = object.map_or_else(String::new, |o| self.model.name(&o));
                    let why = format!(
                        "block {block} in {object} does not have its hash: it was damaged in the store or on the way"
                    );
                    Err(carried(Kind::Corrupt, why))
                }
                Verdict::BadStripe => {
                    Err(carried(Kind::Corrupt, "a delta changed while it was copied".into()))
                }
            }
        };
        // Deltas were proved when they were fetched, and are proved again record by record.
        let verify = matches!(cargo, Cargo::Image(_));
        std::thread::scope(|scope| {
            if let Cargo::Image(anchored) = &cargo {
                self.state().filling = true;
                scope.spawn(|| self.fetch_ahead(anchored, ticket, &stop));
            }
            for _ in 0..plan.stripes().len().min(STREAMS.into()) {
                scope.spawn(|| {
                    let mut lander = landing.lander(ticket, &plan, verify);
                    while !give_up.load(Ordering::Relaxed) {
                        let Some(stripe) = plan.stripes().get(next.fetch_add(1, Ordering::Relaxed)) else {
                            break;
                        };
                        if let Err(e) = run(stripe, &mut *lander) {
                            give_up.store(true, Ordering::Relaxed);
                            failed.lock().get_or_insert(e);
                        }
                    }
                    self.state().filling = false;
                });
            }
        });
        match failed.into_inner() {
            Some(e) => Err(e),
            None => landing.finish().map_err(|fault| TcpError::Unaccepted { ticket: ticket.id, fault }),
        }
    }
}

impl StoreControl {
    /// Fetches the blocks of a stripe from the parts that have them. Answers the hashes that they must have.
    #[expect(clippy::too_many_arguments, reason = "all that a stripe is brought with")]
    fn land_blocks(
        &self,
        anchored: &Anchored,
        plan: &StripePlan,
        stripe: &Stripe,
        landing: &dyn Landing,
        lander: &mut dyn windlass_data::tcp::Lander,
        watch: &Watch,
        stop: &Stop,
    ) -> Result<Check, TcpError> {
        let carried = |kind, message: String| TcpError::Carried { peer: self.peer(), kind, message };
        let bytes_of =
            |blocks: std::ops::Range<u32>| blocks.filter_map(|b| landing.block_bytes(b)).sum::<u64>();
        let mut sums = Vec::new();
        for run in plan.blocks(stripe) {
            let mut first = run.start;
            while first < run.end {
                let outside = || carried(Kind::Corrupt, format!("block {first} is in no part of the anchor"));
                let number = anchored.index.part_of(first).ok_or_else(outside)?;
                let part = anchored.index.parts.get(number).ok_or_else(outside)?;
                let end = run.end.min(part.first + part.count);
                let offset = bytes_of(part.first..first);
                let len = bytes_of(first..end);
                let name = self.model.name(&anchored.index.part_object(number));
                let got = self.model.bucket().read_range(&name, offset..offset + len, stop);
                let got = got.map_err(|e| carried(e.kind, e.to_string()))?;
                watch.received(len);
                let mut rest = &got[..];
                let mut fill = |place: &mut [u8]| {
                    let (this, others) = rest.split_at(place.len().min(rest.len()));
                    if let Some(place) = place.get_mut(..this.len()) {
                        place.copy_from_slice(this);
                    }
                    rest = others;
                    Ok(())
                };
                lander.take(len as u32, &mut fill)?;
                let these = anchored.sums.get(first as usize..end as usize).ok_or_else(outside)?;
                sums.extend_from_slice(these);
                first = end;
            }
        }
        Ok(Check::BlockSums(sums))
    }
}
