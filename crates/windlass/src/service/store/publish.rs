//! The task of an agent that uploads what it seals.
//!
//! Owns: [`Publisher`], the order in which objects are written, and its figures. Called by [`crate::service::agent`]. Must not:
//! hold up training: it copies a part of a slot under a lease of its own, and uploads the copy.
//!
//! # One round
//!
//! 1. The delta from the last uploaded version to the newest sealed one is taken from the history, which composes several into
//!    one if the upload is slower than the trainer, and uploaded.
//! 2. If an anchor is due, its parts are copied from the slot that is whole now, and uploaded, until a newer version is sealed.
//!    The version of that slot becomes one that the deltas pass.
//! 3. If an anchor is complete, the index of the newest uploaded version is written, and the head is moved.
//! 4. Once there are enough deltas since the last time, one that does what all of them do is composed and uploaded. The next
//!    index lists it.
//! 5. Versions beyond the limits are removed, indexes first.
//!
//! If no delta leads on from the last uploaded version, the next one begins with an anchor.
//!
//! # Failures
//!
//! A failure is logged and the round repeated with a growing pause, whatever it is: names say what objects hold, so nothing is
//! written twice. One failure ends the task: another publisher has moved the head ([`PublishError::Fenced`]). The agent goes on
//! serving receivers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::json;
use windlass_core::address::StoreUrl;
use windlass_core::backoff::{Backoff, Span};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::store::{
    AnchorIndex, AnchorPolicy, AnchorRef, DeltaRef, Head, Kept, MAX_DELTAS, Object, ObjectHash, PartRef,
    Retention, Stored, VersionIndex, garbage, retire,
};
use windlass_data::history::Segment;
use windlass_data::serve::{ServeError, Server, SlotView};
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;

use super::bucket::{Bucket, StoreFailure, Written};
use super::kept::{add_kept, kept};
use super::model::{Look, StoredModel, Tag};
use crate::console::Session;
use crate::error::chain;
use crate::service::spans;

/// How long a part may be copied from a slot.
const LEASE: Duration = Duration::from_secs(5);
/// The pause after a failure.
const FAILED: Span = Span { first_ms: 200, cap_ms: 30_000 };
/// How often a failure that lasts is told.
const REMINDER: Duration = Duration::from_mins(1);
/// How long a look for a newer version waits.
const LOOK: Duration = Duration::from_millis(500);
/// How long what is under way may take when the agent is told to end.
const DRAIN: Duration = Duration::from_secs(10);
/// So many deltas are composed into one. The history keeps as many unless it is told otherwise.
const COMPOSED: usize = 16;
/// So many, if there are newer versions already, because the history may soon lead no further back.
const COMPOSED_LATE: usize = 8;
/// How long one round may take.
const ROUND: Duration = Duration::from_hours(6);

/// How an agent publishes to a store.
#[derive(Clone, Debug)]
pub(crate) struct StoreOptions {
    pub(crate) url: StoreUrl,
    /// A full image after so many versions at the latest.
    pub(crate) anchor: AnchorPolicy,
    pub(crate) keep: Retention,
    /// The most bytes uploaded in a second.
    pub(crate) bandwidth: Option<u64>,
    /// About how long a part is.
    pub(crate) part_bytes: u64,
    /// How many parts are uploaded at once.
    pub(crate) streams: usize,
}

/// Why a round failed.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error(transparent)]
    Store(#[from] StoreFailure),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error("cannot read the delta that is to be uploaded")]
    Read(#[source] std::io::Error),
    #[error(
        "{store}: another publisher has moved the head to {theirs}; this one, of incarnation {ours}, uploads nothing more. If it is \
         the right one, stop the other and start this one again, or give it a URL of its own"
    )]
    Fenced { store: String, theirs: Identity, ours: Incarnation },
    #[error(
        "{store}: the index of version {version} is there already, with other content: give this trainer a URL of its own"
    )]
    OtherVersion { store: String, version: Version },
}

impl PublishError {
    fn kind(&self) -> Kind {
        match self {
            PublishError::Store(e) => e.kind,
            PublishError::Serve(e) => e.kind(),
            PublishError::Read(_) => Kind::NotFound,
            PublishError::Fenced { .. } | PublishError::OtherVersion { .. } => Kind::Denied,
        }
    }
}

/// What a publisher has done so far.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Figures {
    /// The newest version whose index is in the store.
    pub(crate) version: Option<Version>,
    /// Bytes uploaded.
    pub(crate) bytes: u64,
    /// Bytes of the deltas among them.
    pub(crate) delta_bytes: u64,
    pub(crate) anchors: u64,
    pub(crate) versions: u64,
    pub(crate) removed: u64,
    pub(crate) failures: u64,
    /// The last failure, until a round succeeds.
    pub(crate) failure: Option<String>,
    /// Whether another publisher has taken over.
    pub(crate) fenced: bool,
}

/// A running upload. Dropping it ends it.
pub(crate) struct Publisher {
    figures: Arc<Mutex<Figures>>,
    /// Ends it once everything is uploaded.
    stop: Stop,
    /// Ends it at once.
    hard: Stop,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Publisher {
    /// Begins to upload what `server` seals.
    pub(crate) fn start(
        server: Arc<Server>,
        options: StoreOptions,
        trust: Option<Trust>,
        session: &Session,
    ) -> std::io::Result<Publisher> {
        let (figures, stop, hard) = (Arc::new(Mutex::default()), Stop::never(), Stop::never());
        let task = Task {
            server,
            options,
            trust,
            session: session.clone(),
            figures: Arc::clone(&figures),
            end: stop.clone(),
            name: format!(
                "{:016x}",
                std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id())
            ),
            model: None,
            chain: Uploaded::default(),
            uploading: None,
            kept: Vec::new(),
            unread: BTreeSet::new(),
            seen: None,
            hard: hard.clone(),
            owed: Mutex::new(Instant::now()),
        };
        let thread = std::thread::Builder::new().name("windlass-upload".into()).spawn(move || task.run())?;
        Ok(Publisher { figures, stop, hard, thread: Some(thread) })
    }

    pub(crate) fn figures(&self) -> Arc<Mutex<Figures>> {
        Arc::clone(&self.figures)
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.stop.set();
        let until = Stop::after(DRAIN);
        while !until.is_set() && self.thread.as_ref().is_some_and(|t| !t.is_finished()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.hard.set();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
    }
}

/// What is in the store, as far as the next index needs it.
#[derive(Clone, Debug, Default)]
struct Uploaded {
    /// The version that the deltas lead to, and its digest.
    tip: Option<(Version, StateDigest)>,
    /// The deltas from the start of the anchor, or of the one that is uploaded now, to the tip.
    deltas: Vec<DeltaRef>,
    /// Deltas that do what several of those do, and the version up to which they were looked at.
    composed: Vec<DeltaRef>,
    looked: Version,
    anchor: Option<(AnchorRef, AnchorIndex)>,
    manifest: Option<Stored>,
    /// The last version whose index was written, and the state of the head.
    published: Option<Version>,
    tag: Option<Tag>,
    earlier: Option<Version>,
}

/// A part that was uploaded, and the hashes of its blocks.
type UploadedPart = (PartRef, Vec<u8>);

/// An anchor on its way: which parts there are, and what was uploaded of them.
#[derive(Debug)]
struct Uploading {
    start: Version,
    digest: StateDigest,
    parts: Vec<Range<u32>>,
    done: Vec<UploadedPart>,
}

struct Task {
    server: Arc<Server>,
    options: StoreOptions,
    trust: Option<Trust>,
    session: Session,
    figures: Arc<Mutex<Figures>>,
    end: Stop,
    hard: Stop,
    /// The newest sealed version when the round began.
    seen: Option<Version>,
    /// What this process calls itself in heads.
    name: String,
    model: Option<StoredModel>,
    chain: Uploaded,
    uploading: Option<Uploading>,
    /// The versions that are there, oldest first; and those of them that could not be read.
    kept: Vec<Kept>,
    unread: BTreeSet<Object>,
    /// Until when the bytes that were uploaded use up the bandwidth.
    owed: Mutex<Instant>,
}

impl Task {
    fn run(mut self) {
        let (mut backoff, mut told) = (Backoff::default(), None::<Instant>);
        loop {
            let ending = self.end.is_set();
            let stop = self.hard.with_timeout(ROUND);
            match self.round(&stop) {
                Ok(busy) => {
                    backoff.reset();
                    told = None;
                    self.note(|f| f.failure = None);
                    if ending && !busy || self.hard.is_set() {
                        return;
                    }
                    if !busy {
                        let seen = self.seen.map(|version| (self.incarnation(), version));
                        let seen = seen.or(Some((Incarnation(0), 0)));
                        self.server.wait_version(seen, &self.end.with_timeout(LOOK));
                    }
                }
                Err(e) => {
                    let fenced = matches!(e, PublishError::Fenced { .. } | PublishError::OtherVersion { .. });
                    let (kind, text) = (e.kind(), chain(&e));
                    self.note(|f| {
                        f.failures += 1;
                        f.failure = Some(text.clone());
                        f.fenced = fenced;
                    });
                    let delay = backoff.failed(FAILED, self.chain.published.unwrap_or_default());
                    if fenced || told.is_none_or(|t| t.elapsed() >= REMINDER) {
                        told = Some(Instant::now());
                        let event = if fenced { "fenced" } else { "not_stored" };
                        let event = json!({ "event": event, "kind": kind, "reason": text });
                        self.session.event(&event, || format!("not uploaded: {text}"));
                    }
                    if fenced || ending {
                        return;
                    }
                    let until = self.end.with_timeout(Duration::from_millis(delay.ms));
                    while !until.is_set() {
                        std::thread::sleep(until.nap());
                    }
                }
            }
        }
    }

    fn note(&self, change: impl FnOnce(&mut Figures)) {
        change(&mut self.figures.lock());
    }

    fn incarnation(&self) -> Incarnation {
        self.server.region().incarnation()
    }

    fn manifest(&self) -> Arc<Manifest> {
        Arc::clone(self.server.region().manifest())
    }

    fn model(&self) -> Result<&StoredModel, PublishError> {
        let lost = || StoreFailure {
            store: self.options.url.to_string(),
            action: "use",
            object: "the model".into(),
            kind: Kind::Bug,
            why: "it was not opened".into(),
        };
        Ok(self.model.as_ref().ok_or_else(lost)?)
    }

    /// Does what is due now. Answers whether there is more.
    fn round(&mut self, stop: &Stop) -> Result<bool, PublishError> {
        let began = Instant::now();
        if self.model.is_none() {
            self.open(stop)?;
        }
        let newest = self.server.version().version;
        self.seen = newest;
        let Some(newest) = newest else { return Ok(false) };
        if self.chain.tip.is_none() && self.uploading.is_none() {
            self.begin_anchor();
        }
        if self.uploading.is_none() && self.anchor_is_due() {
            self.begin_anchor();
        }
        self.lead_to_slot(stop)?;
        if !self.lead_to(newest, stop)? {
            return Ok(true);
        }
        let before = self.uploading.as_ref().map(|u| u.done.len());
        self.upload_parts(stop)?;
        self.publish(began, stop)?;
        self.compose(stop)?;
        self.remove_old(stop)?;
        // A trainer that has the slot leaves nothing to copy for now.
        let moved = self.uploading.as_ref().map(|u| u.done.len()) != before;
        Ok(self.uploading.is_some() && moved)
    }

    /// Opens the store, and takes over what an earlier process of this incarnation left.
    fn open(&mut self, stop: &Stop) -> Result<(), PublishError> {
        let bucket = Arc::new(Bucket::open(&self.options.url, self.trust.as_ref(), true)?);
        let model = StoredModel::new(bucket, self.server.region().model_id().clone());
        model.probe(stop)?;
        let (ours, mut chain) = (self.incarnation(), Uploaded::default());
        if let Look::Moved(head, tag) = model.look(None, stop)? {
            chain.tag = Some(tag);
            let theirs = head.identity.incarnation;
            if theirs > ours {
                let store = model.label();
                return Err(PublishError::Fenced { store, theirs: head.identity, ours });
            }
            if theirs == ours {
                let version = head.identity.version;
                chain.published = Some(version);
                let read = || found(&model, ours, version, stop);
                // What is damaged on the way is right when it is read again.
                match read().or_else(|e| if is_damage(e.kind) { read() } else { Err(e) }) {
                    Ok((index, anchor)) => {
                        chain.tip = Some((version, index.digest));
                        chain.manifest = Some(index.manifest);
                        chain.earlier = index.earlier;
                        chain.anchor = Some((index.anchor, anchor));
                        chain.deltas = index.deltas;
                        chain.looked = index.composed.last().map_or(0, |d| d.target);
                        chain.composed = index.composed;
                    }
                    Err(e) if is_damage(e.kind) => {
                        tracing::warn!(error = %e, "the newest version cannot be led on from: the next one begins with an anchor");
                    }
                    Err(e) => return Err(e.into()),
                }
            }
        }
        (self.kept, self.unread) = kept(&model, &is_damage, stop)?;
        self.note(|f| f.version = chain.published);
        (self.chain, self.model) = (chain, Some(model));
        Ok(())
    }

    fn anchor_is_due(&self) -> bool {
        let Some((anchor, _)) = &self.chain.anchor else { return false };
        // A version between two publications does not count twice.
        self.options.anchor.is_due(&self.chain.deltas, &self.chain.composed, anchor.image_bytes)
    }

    /// Begins an anchor at the tip, or at the slot that is whole now if nothing leads on.
    fn begin_anchor(&mut self) {
        let (start, digest) = match self.chain.tip {
            Some(tip) => tip,
            None => {
                let Some(slot) = self.server.newest_slot() else { return };
                self.chain = Uploaded { tip: Some((slot.version, slot.digest)), ..self.chain.clone() };
                self.chain.deltas.clear();
                self.chain.composed.clear();
                (self.chain.anchor, self.chain.earlier) = (None, None);
                (slot.version, slot.digest)
            }
        };
        let (manifest, mut parts) = (self.manifest(), Vec::new());
        let (mut first, mut bytes) = (0, 0);
        for block in 0..manifest.cuts().blocks() {
            let its = manifest.bytes_of(&(block..block + 1).into());
            if bytes > 0 && bytes + its > self.options.part_bytes {
                parts.push(first..block);
                (first, bytes) = (block, 0);
            }
            bytes += its;
        }
        if bytes > 0 {
            parts.push(first..manifest.cuts().blocks());
        }
        self.uploading = Some(Uploading { start, digest, parts, done: Vec::new() });
    }

    /// Makes the version of the slot that is whole now one that the deltas pass, while an anchor is on its way.
    fn lead_to_slot(&mut self, stop: &Stop) -> Result<(), PublishError> {
        if self.uploading.is_some()
            && let Some(slot) = self.server.newest_slot()
        {
            self.lead_to(slot.version, stop)?;
        }
        Ok(())
    }

    /// Uploads the delta from the tip to a later version. Answers false if none leads there, and an anchor must.
    fn lead_to(&mut self, version: Version, stop: &Stop) -> Result<bool, PublishError> {
        let Some((tip, _)) = self.chain.tip.filter(|(tip, _)| *tip < version) else { return Ok(true) };
        let full = self.chain.deltas.len() >= MAX_DELTAS - 1;
        let segment = match self.server.segment(tip, version, stop) {
            Ok(segment) if !full => segment,
            Ok(_) => {
                self.start_over("the chain is too long");
                return Ok(false);
            }
            Err(e) if stop.is_set() => return Err(e.into()),
            Err(e) => {
                self.start_over(&chain(&e));
                return Ok(false);
            }
        };
        let delta = self.upload_delta(&segment, stop)?;
        self.chain.deltas.push(delta);
        self.chain.tip = Some((delta.target, delta.digest));
        Ok(true)
    }

    /// Uploads one delta that does what the last ones do, if there are enough of them and it has clearly fewer bytes.
    fn compose(&mut self, stop: &Stop) -> Result<(), PublishError> {
        let from = self.chain.deltas.partition_point(|d| d.base < self.chain.looked);
        let (Some(first), Some(last)) = (self.chain.deltas.get(from), self.chain.deltas.last()) else {
            return Ok(());
        };
        let (base, target) = (first.base, last.target);
        let late = self.server.version().version.is_some_and(|newest| newest > target);
        let deltas = &self.chain.deltas[from..];
        if deltas.len() < if late { COMPOSED_LATE } else { COMPOSED } {
            return Ok(());
        }
        let apart: u64 = deltas.iter().map(|d| d.bytes).fold(0, u64::saturating_add);
        match self.server.segment(base, target, stop) {
            Ok(segment) if segment.bytes <= apart / 4 * 3 => {
                let delta = self.upload_delta(&segment, stop)?;
                self.chain.composed.push(delta);
            }
            Ok(segment) => tracing::debug!(base, target, apart, bytes = segment.bytes, "not worth composing"),
            Err(e) if stop.is_set() => return Err(e.into()),
            Err(e) => tracing::warn!(
                base,
                target,
                why = chain(&e),
                "no delta over these versions is uploaded, and receivers that are behind fetch each: raise the agent's --history"
            ),
        }
        self.chain.looked = target;
        Ok(())
    }

    fn start_over(&mut self, why: &str) {
        tracing::info!(
            why,
            "no delta leads on from the last uploaded version: the next one begins with an anchor"
        );
        (self.uploading, self.chain.tip) = (None, None);
    }

    fn upload_delta(&mut self, segment: &Segment, stop: &Stop) -> Result<DeltaRef, PublishError> {
        let header = &segment.header;
        let hash = ObjectHash::of_file(|buffer, at| segment.file.read_exact_at(buffer, at), segment.bytes);
        let (base, target, hash) = (header.base.1, header.target.1, hash.map_err(PublishError::Read)?);
        let object = Object::Delta { incarnation: self.incarnation(), base, target, hash };
        let len = segment.bytes;
        self.pace(len, stop);
        let (model, room) = (self.model()?, (self.options.part_bytes, self.options.streams));
        model.bucket().write_file(&model.name(&object), &segment.file, len, room, stop)?;
        self.note(|f| {
            f.bytes += len;
            f.delta_bytes += len;
        });
        Ok(DeltaRef { base, target, digest: header.target_digest, hash, bytes: len })
    }

    /// Uploads parts of the slot that is whole now, as many at once as there may be, until all are there, the trainer takes the
    /// slot back, or a newer version is sealed, whose delta goes first.
    fn upload_parts(&mut self, stop: &Stop) -> Result<(), PublishError> {
        let Some(uploading) = &self.uploading else { return Ok(()) };
        let (start, from) = (uploading.start, uploading.done.len());
        let Some(slot) = self.server.newest_slot().filter(|slot| self.passes(slot.version, start)) else {
            return Ok(());
        };
        let left = uploading.parts.get(from..).unwrap_or_default();
        let (this, next, over) = (&*self, AtomicUsize::new(0), AtomicBool::new(false));
        let uploaded = Mutex::new(BTreeMap::new());
        // While one copies and hashes its next part, the others upload theirs.
        let work = || {
            let mut room = Vec::new();
            let mut goes_on = true;
            while goes_on {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(blocks) = left.get(i) else { break };
                let part = this.upload_part(&slot, start, from + i, blocks.clone(), &mut room, stop);
                if !matches!(part, Ok(Some(_))) {
                    over.store(true, Ordering::Relaxed);
                }
                uploaded.lock().insert(i, part);
                goes_on = !over.load(Ordering::Relaxed) && this.server.version().version == this.seen;
            }
        };
        std::thread::scope(|scope| {
            let streams = self.options.streams.min(left.len());
            let threads: Vec<_> = (0..streams).map(|_| scope.spawn(work)).collect();
            // A thread that panicked has said so, and its part is uploaded again.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        });
        // Parts are kept in their order, as far as they came.
        for (i, part) in uploaded.into_inner() {
            let Some(part) = part? else { break };
            match &mut self.uploading {
                Some(uploading) if uploading.done.len() == from + i => uploading.done.push(part),
                Some(_) | None => break,
            }
        }
        self.finish_anchor(stop)
    }

    /// Whether the deltas since the start of the anchor pass a version.
    fn passes(&self, version: Version, start: Version) -> bool {
        version == start || version > start && self.chain.deltas.iter().any(|d| d.target == version)
    }

    /// Copies a part into `room` and uploads it. None if the trainer has taken the slot back.
    fn upload_part(
        &self,
        slot: &SlotView,
        start: Version,
        number: usize,
        blocks: Range<u32>,
        room: &mut Vec<u8>,
        stop: &Stop,
    ) -> Result<Option<UploadedPart>, PublishError> {
        self.pace(self.manifest().bytes_of(&blocks.clone().into()), stop);
        if !slot.copy(blocks.clone(), LEASE, room)? {
            return Ok(None);
        }
        let (hash, len) = (ObjectHash::of(room), room.len() as u64);
        let incarnation = self.incarnation();
        let object = Object::Part { incarnation, start, part: number as u32, hash };
        let model = self.model()?;
        let bytes = Bytes::from(std::mem::take(room));
        let written = model.bucket().write(&model.name(&object), bytes.clone(), stop);
        // The next part comes into the same memory, whose pages are there already.
        if let Ok(mut bytes) = bytes.try_into_mut() {
            bytes.clear();
            *room = bytes.into();
        }
        written?;
        self.note(|f| f.bytes += len);
        let (first, count) = (blocks.start, blocks.end - blocks.start);
        let sums = blocks.flat_map(|b| slot.sums.get(b).to_bytes()).collect();
        Ok(Some((PartRef { first, count, version: slot.version, hash, bytes: len }, sums)))
    }

    /// Writes the table and the index of an anchor whose parts are all there. The next version is told of it.
    fn finish_anchor(&mut self, stop: &Stop) -> Result<(), PublishError> {
        let Some(uploading) = self.uploading.take_if(|u| u.done.len() == u.parts.len()) else {
            return Ok(());
        };
        let written = self.write_anchor(&uploading, stop);
        let (anchor, index) = match written {
            Ok(written) => written,
            Err(e) => {
                self.uploading = Some(uploading);
                return Err(e);
            }
        };
        self.chain.deltas.retain(|d| d.base >= anchor.start);
        self.chain.composed.retain(|d| d.base >= anchor.start);
        // The last index with the anchor before leads at least to the start of this one.
        self.chain.earlier =
            self.chain.published.filter(|p| self.chain.anchor.is_some() && *p >= anchor.start);
        self.chain.anchor = Some((anchor, index));
        self.note(|f| f.anchors += 1);
        Ok(())
    }

    fn write_anchor(
        &mut self,
        uploading: &Uploading,
        stop: &Stop,
    ) -> Result<(AnchorRef, AnchorIndex), PublishError> {
        let (incarnation, manifest) = (self.incarnation(), self.manifest());
        let table: Vec<u8> = uploading.done.iter().flat_map(|(_, sums)| sums.iter().copied()).collect();
        let index = AnchorIndex {
            format: AnchorIndex::FORMAT,
            model_id: self.server.region().model_id().clone(),
            incarnation,
            start: uploading.start,
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
            blocks: manifest.cuts().blocks(),
            sums: Stored::of(&table),
            parts: uploading.done.iter().map(|(part, _)| *part).collect(),
        };
        self.write(&index.sums_object(), table.into(), stop)?;
        let json = index.to_json();
        let stored = Stored::of(&json);
        let (start, digest) = (uploading.start, uploading.digest);
        let object = Object::Anchor { incarnation, start, hash: stored.hash };
        self.write(&object, json.into(), stop)?;
        let (version, image_bytes) = (index.version(), index.image_bytes());
        Ok((AnchorRef { start, digest, version, image_bytes, index: stored }, index))
    }

    /// Writes the index of the tip and moves the head, if there is an anchor and the tip is new.
    fn publish(&mut self, began: Instant, stop: &Stop) -> Result<(), PublishError> {
        let (Some((version, digest)), Some((anchor, parts))) = (self.chain.tip, self.chain.anchor.clone())
        else {
            return Ok(());
        };
        if self.chain.published.is_some_and(|p| p >= version) {
            return Ok(());
        }
        self.check_head(stop)?;
        let manifest = self.manifest();
        let stored = match self.chain.manifest {
            Some(stored) => stored,
            None => {
                let json = manifest.to_json().into_bytes();
                let stored = Stored::of(&json);
                let object = Object::Manifest { incarnation: self.incarnation(), hash: stored.hash };
                self.write(&object, json.into(), stop)?;
                *self.chain.manifest.insert(stored)
            }
        };
        let (model_id, incarnation) = (self.server.region().model_id().clone(), self.incarnation());
        let index = VersionIndex {
            format: VersionIndex::FORMAT,
            identity: Identity { model_id, incarnation, version },
            digest,
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
            manifest: stored,
            anchor,
            deltas: self.chain.deltas.clone(),
            composed: self.chain.composed.clone(),
            earlier: self.chain.earlier,
            unix_ms: now_ms(),
        };
        index.check().map_err(|e| StoreFailure {
            store: self.options.url.to_string(),
            action: "write",
            object: index.object().to_string(),
            kind: Kind::Bug,
            why: e.to_string(),
        })?;
        let (index, new) = self.write_index(index, stop)?;
        let moved = self.move_head(&index, stop);
        if new && matches!(moved, Err(PublishError::Fenced { .. })) {
            // The publisher that has the store now did not know of this version when it removed what it found unneeded.
            let model = self.model()?;
            model.bucket().remove([model.name(&index.object()).as_str()], stop)?;
        }
        moved?;
        let parts = if index.anchor == anchor { parts } else { self.model()?.anchor(&index, stop)? };
        self.chain.published = Some(version);
        // One that an earlier process has written without moving the head was found with the others.
        let object = index.object();
        self.kept.retain(|k| k.object != object);
        self.kept.push(Kept { object, unix_ms: index.unix_ms, needs: index.needs(&parts) });
        let links = index.deltas.len();
        let attributes = vec![("windlass.deltas", links.into())];
        spans::record(
            "windlass.store",
            &index.identity,
            began.elapsed().as_secs_f64() * 1e3,
            attributes,
            None,
        );
        self.note(|f| {
            f.version = Some(version);
            f.versions += 1;
        });
        let event =
            json!({ "event": "stored", "identity": index.identity, "digest": digest, "deltas": links });
        self.session.event(&event, || format!("{}: stored, {links} deltas after its anchor", index.identity));
        Ok(())
    }

    /// A publisher that has lost the store to a later one writes no version: what it needs may have been removed.
    fn check_head(&self, stop: &Stop) -> Result<(), PublishError> {
        let (model, ours) = (self.model()?, self.incarnation());
        match model.look(self.chain.tag.as_ref(), stop)? {
            Look::Moved(found, _) if found.identity.incarnation > ours => {
                Err(PublishError::Fenced { store: model.label(), theirs: found.identity, ours })
            }
            Look::Moved(..) | Look::Same | Look::Absent => Ok(()),
        }
    }

    /// Writes an index unless it is there. One that an earlier attempt has written is as good. Answers whether it is new.
    fn write_index(&self, index: VersionIndex, stop: &Stop) -> Result<(VersionIndex, bool), PublishError> {
        let model = self.model()?;
        let (incarnation, version) = (index.identity.incarnation, index.identity.version);
        let created = model.bucket().create(&model.name(&index.object()), index.to_object().into(), stop)?;
        if created != Written::Otherwise {
            return Ok((index, true));
        }
        let there = model.version(incarnation, version, stop)?;
        if there.digest != index.digest {
            return Err(PublishError::OtherVersion { store: model.label(), version });
        }
        Ok((there, false))
    }

    /// Moves the head to a version, from the state in which this publisher saw it.
    fn move_head(&mut self, index: &VersionIndex, stop: &Stop) -> Result<(), PublishError> {
        let (model, ours) = (self.model()?.clone(), self.incarnation());
        let head = Head::new(index, &self.name);
        if let Some(tag) = model.move_head(&head, self.chain.tag.as_ref(), stop)? {
            self.chain.tag = Some(tag);
            return Ok(());
        }
        match model.look(None, stop)? {
            // A request that was repeated finds its own work.
            Look::Moved(found, tag) if found == head => {
                self.chain.tag = Some(tag);
                Ok(())
            }
            // A region has one agent at a time: a request of one that was killed came late.
            Look::Moved(found, tag)
                if found.identity.incarnation == ours && found.identity.version >= index.identity.version =>
            {
                self.chain.tag = Some(tag);
                Ok(())
            }
            Look::Moved(found, tag) if found.identity.incarnation <= ours => {
                self.chain.tag = Some(tag);
                let why =
                    format!("an earlier publisher has moved it to {}: it is moved again", found.identity);
                Err(model.bucket().failure("move", "the head", Kind::Stale, why).into())
            }
            Look::Moved(found, _) => {
                Err(PublishError::Fenced { store: model.label(), theirs: found.identity, ours })
            }
            Look::Absent | Look::Same => {
                self.chain.tag = None;
                let why = "it is gone: it was removed while the publisher ran; it is written again";
                Err(model.bucket().failure("move", "the head", Kind::Stale, why).into())
            }
        }
    }

    /// Removes the versions beyond the limits, and what only they needed.
    fn remove_old(&mut self, stop: &Stop) -> Result<(), PublishError> {
        let incarnation = self.incarnation();
        let head = self.chain.published.map(|version| Object::Version { incarnation, version });
        if retire(&self.kept, head, now_ms(), &self.options.keep) == 0 {
            return Ok(());
        }
        // The list may have been an old one when this publisher began, and a read may have failed on the way.
        let model = self.model()?.clone();
        add_kept(&model, &mut self.kept, &mut self.unread, &is_damage, stop)?;
        let gone = retire(&self.kept, head, now_ms(), &self.options.keep);
        let (out, stay) = self.kept.split_at(gone);
        let under_way = self.under_way();
        let removed: Vec<Object> =
            garbage(out, stay).into_iter().filter(|o| !under_way.contains(o)).collect();
        let names: Vec<String> = removed.iter().map(|o| model.name(o)).collect();
        model.bucket().remove(names.iter().map(String::as_str), stop)?;
        self.note(|f| f.removed += gone as u64);
        self.unread.retain(|o| !removed.contains(o));
        self.kept.drain(..gone);
        Ok(())
    }

    /// What the next index will need.
    fn under_way(&self) -> BTreeSet<Object> {
        let incarnation = self.incarnation();
        let delta =
            |d: &DeltaRef| Object::Delta { incarnation, base: d.base, target: d.target, hash: d.hash };
        let manifest = self.chain.manifest.map(|stored| Object::Manifest { incarnation, hash: stored.hash });
        let anchor = self.chain.anchor.iter().flat_map(|(anchor, index)| {
            let (start, hash) = (anchor.start, anchor.index.hash);
            let parts = (0..index.parts.len()).map(|part| index.part_object(part));
            parts.chain([index.sums_object(), Object::Anchor { incarnation, start, hash }])
        });
        let deltas = self.chain.deltas.iter().chain(&self.chain.composed).map(delta);
        deltas.chain(manifest).chain(anchor).collect()
    }

    fn write(&mut self, object: &Object, bytes: Bytes, stop: &Stop) -> Result<(), PublishError> {
        let len = bytes.len() as u64;
        self.pace(len, stop);
        let model = self.model()?;
        model.bucket().write(&model.name(object), bytes, stop)?;
        self.note(|f| f.bytes += len);
        Ok(())
    }

    /// Waits until so many more bytes may be uploaded.
    fn pace(&self, bytes: u64, stop: &Stop) {
        let Some(bandwidth) = self.options.bandwidth else { return };
        let takes = Duration::from_secs_f64(bytes as f64 / bandwidth.max(1) as f64);
        let until = {
            let mut owed = self.owed.lock();
            let until = (*owed).max(Instant::now());
            *owed = until + takes;
            until
        };
        while Instant::now() < until && !stop.is_set() && !self.end.is_set() {
            std::thread::sleep((until - Instant::now().min(until)).min(stop.nap()));
        }
    }
}

/// Whether an object is missing or damaged, which trying again does not mend.
pub(crate) fn is_damage(kind: Kind) -> bool {
    matches!(kind, Kind::Corrupt | Kind::NotFound | Kind::Unsupported)
}

/// A version and its anchor.
fn found(
    model: &StoredModel,
    incarnation: Incarnation,
    version: Version,
    stop: &Stop,
) -> Result<(VersionIndex, AnchorIndex), StoreFailure> {
    let index = model.version(incarnation, version, stop)?;
    let anchor = model.anchor(&index, stop)?;
    Ok((index, anchor))
}

/// The present, in milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}
