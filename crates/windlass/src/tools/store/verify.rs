//! `windlass store verify`: reads everything that versions need, and hashes it again.
//!
//! Owns: what is compared with what. Every object with a hash in its name must have it; every block of an anchor must have the
//! hash of the anchor's table; and the table, lifted by the hashes in the deltas, must give the digest of each version. What
//! is damaged is named, and the command goes on; a store that does not answer ends it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde_json::json;
use windlass_core::delta::Delta;
use windlass_core::digest::{SumTable, first_wrong};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::store::{AnchorIndex, DeltaRef, Object, Stored, VersionIndex};
use windlass_data::stop::Stop;

use super::{Place, find, told};
use crate::console::{Progress, Session, bytes, count};
use crate::error::Error;
use crate::service::store::bucket::StoreFailure;
use crate::service::store::model::{Pick, StoredModel};
use crate::service::store::publish::is_damage;

/// How many objects are read at once.
const STREAMS: usize = 8;

/// The checked arguments of `store verify`.
#[derive(Debug)]
pub(crate) struct Verify {
    pub(crate) place: Place,
    /// The version; without a number, all of all models.
    pub(crate) pick: Pick,
}

/// What was found.
#[derive(Default)]
struct Report {
    versions: u64,
    /// Versions that cannot be had as they were published.
    lost: Vec<Identity>,
    objects: u64,
    bytes: u64,
    /// Objects that are damaged or missing, and why.
    damaged: BTreeMap<String, String>,
}

impl Verify {
    /// Reads and compares. Answers 1 if something is damaged.
    pub(crate) fn run(&self, session: &Session) -> Result<u8, Error> {
        let stop = session.cancel();
        let models = if self.pick == Pick::default() {
            self.place.models(stop)?
        } else {
            vec![self.place.model(stop)?]
        };
        let mut report = Report::default();
        for model in &models {
            self.model(model, &mut report, session, stop)?;
        }
        let object = json!({
            "url": self.place.url.as_str(),
            "versions": report.versions,
            "objects": report.objects,
            "bytes": report.bytes,
            "lost": report.lost,
            "damaged": report.damaged.iter().map(|(object, why)| json!({ "object": object, "why": why })).collect::<Vec<_>>(),
        });
        let whole = report.damaged.is_empty();
        session.finish(object, |out| {
            for why in report.damaged.values() {
                let _ = writeln!(out, "{why}");
            }
            for identity in &report.lost {
                let _ = writeln!(out, "{identity} cannot be had");
            }
            let (versions, objects) = (count(report.versions), count(report.objects));
            let found = if whole { "all as they were written" } else { "some are damaged" };
            let _ = writeln!(out, "{versions} versions, {objects} objects, {}: {found}", bytes(report.bytes));
        })?;
        Ok(u8::from(!whole))
    }

    fn model(
        &self,
        model: &StoredModel,
        report: &mut Report,
        session: &Session,
        stop: &Stop,
    ) -> Result<(), Error> {
        let mut indexes = Vec::new();
        if self.pick == Pick::default() {
            let (objects, _) = model.list(stop).map_err(told)?;
            for (object, (incarnation, version)) in objects.keys().filter_map(|o| Some((o, o.as_version()?)))
            {
                report.versions += 1;
                let read = model.version(incarnation, version, stop);
                let Some(index) = report.passes(model, object, read)? else {
                    report.lost.push(Identity { model_id: model.model_id().clone(), incarnation, version });
                    continue;
                };
                indexes.push(index);
            }
        } else {
            report.versions += 1;
            indexes.push(find(model, &self.pick, stop)?);
        }
        // Those with the same anchor, the shortest chain first.
        let mut groups: BTreeMap<Object, Vec<VersionIndex>> = BTreeMap::new();
        for index in indexes {
            groups.entry(index.anchor_object()).or_default().push(index);
        }
        let mut seen = BTreeSet::new();
        for group in groups.values_mut() {
            group.sort_by_key(|index| index.deltas.len());
            Group { model, report, seen: &mut seen }.verify(group, session, stop)?;
        }
        Ok(())
    }
}

impl Report {
    /// What was read, unless it is damaged, which is noted.
    fn passes<T>(
        &mut self,
        model: &StoredModel,
        object: &Object,
        read: Result<T, StoreFailure>,
    ) -> Result<Option<T>, Error> {
        match read {
            Ok(read) => Ok(Some(read)),
            Err(e) if is_damage(e.kind) => {
                self.damaged.entry(model.name(object)).or_insert_with(|| e.to_string());
                Ok(None)
            }
            Err(e) => Err(told(e)),
        }
    }
}

/// The versions of one anchor.
struct Group<'a> {
    model: &'a StoredModel,
    report: &'a mut Report,
    /// What was counted already.
    seen: &'a mut BTreeSet<Object>,
}

/// An anchor whose documents are right.
struct Anchored {
    index: AnchorIndex,
    manifest: Manifest,
    table: SumTable,
}

impl Anchored {
    /// Of which version a block of the anchor is.
    fn version_of(&self, block: u32) -> Option<Version> {
        self.index.part_of(block).and_then(|part| self.index.parts.get(part)).map(|part| part.version)
    }
}

/// A part that was read, and its length.
type ReadPart = (Object, u64, Result<(), StoreFailure>);

/// The table of an anchor, as far as the deltas of a chain have lifted it.
struct Lifted {
    links: Vec<DeltaRef>,
    table: SumTable,
    /// As it was where composed deltas begin.
    bases: BTreeMap<Version, SumTable>,
    /// Whether all links could be read.
    whole: bool,
}

impl Group<'_> {
    fn verify(&mut self, group: &[VersionIndex], session: &Session, stop: &Stop) -> Result<(), Error> {
        let Some(first) = group.first() else { return Ok(()) };
        let Some(anchor) = self.documents(first, stop)? else {
            self.report.lost.extend(group.iter().map(|index| index.identity.clone()));
            return Ok(());
        };
        let longest = group.last().unwrap_or(first);
        let total = longest.needs(&anchor.index).values().sum();
        let progress = session.progress("hashing", total);
        let parts = self.parts(&anchor, &progress, stop)?;
        let fresh = || Lifted {
            links: Vec::new(),
            table: anchor.table.clone(),
            bases: BTreeMap::new(),
            whole: parts,
        };
        let composed: BTreeMap<Object, DeltaRef> =
            group.iter().flat_map(|i| i.composed.iter().map(|d| (i.delta_object(d), *d))).collect();
        let mut lifted = fresh();
        for index in group {
            stop.check()?;
            let mut has_layout = true;
            if index.manifest != first.manifest {
                let read = self.model.manifest(index, stop);
                has_layout = self.report.passes(self.model, &index.manifest_object(), read)?.is_some();
            }
            // A publisher that was restarted may have composed its deltas in another way.
            if !index.deltas.starts_with(&lifted.links) {
                lifted = fresh();
            }
            for link in index.deltas.get(lifted.links.len()..).unwrap_or_default() {
                if composed.values().any(|d| d.base == link.base) {
                    lifted.bases.insert(link.base, lifted.table.clone());
                }
                self.lift(&mut lifted, index, link, &anchor, &progress, stop)?;
                for (object, delta) in composed.iter().filter(|(_, d)| d.target == link.target) {
                    self.composed(&lifted, object, delta, &anchor, stop)?;
                }
            }
            let right =
                lifted.digest(&anchor, index.identity.version).is_none_or(|found| found == index.digest);
            if !right && lifted.whole {
                let name = self.model.name(&index.object());
                let why =
                    format!("{name}: its anchor and its deltas do not lead to its digest {}", index.digest);
                self.report.damaged.insert(name, why);
            }
            if !right || !lifted.whole || !has_layout {
                self.report.lost.push(index.identity.clone());
            }
            self.count(index.object(), index.to_object().len() as u64);
        }
        Ok(())
    }

    fn count(&mut self, object: Object, bytes: u64) {
        if self.seen.insert(object) {
            self.report.objects += 1;
            self.report.bytes += bytes;
        }
    }

    /// The layout, the parts and the table of an anchor, unless one is damaged.
    fn documents(&mut self, index: &VersionIndex, stop: &Stop) -> Result<Option<Anchored>, Error> {
        let model = self.model;
        let manifest = self.report.passes(model, &index.manifest_object(), model.manifest(index, stop))?;
        let anchor = self.report.passes(model, &index.anchor_object(), model.anchor(index, stop))?;
        let (Some(manifest), Some(anchor)) = (manifest, anchor) else { return Ok(None) };
        self.count(index.manifest_object(), index.manifest.bytes);
        self.count(index.anchor_object(), index.anchor.index.bytes);
        let object = anchor.sums_object();
        let sums = self.report.passes(model, &object, model.sums(&anchor, stop))?;
        let Some(sums) = sums else { return Ok(None) };
        self.count(object, anchor.sums.bytes);
        if anchor.blocks != manifest.cuts().blocks() {
            let name = model.name(&index.anchor_object());
            let why = format!("{name}: it does not fit the layout of the model");
            self.report.damaged.insert(name, why);
            return Ok(None);
        }
        let table = SumTable::new(&manifest, sums);
        Ok(Some(Anchored { index: anchor, manifest, table }))
    }

    /// Reads all parts of an anchor, several at once. Whether all are right.
    fn parts(&mut self, anchor: &Anchored, progress: &Progress, stop: &Stop) -> Result<bool, Error> {
        let (model, next) = (self.model, AtomicUsize::new(0));
        let read: Mutex<Vec<ReadPart>> = Mutex::default();
        std::thread::scope(|scope| {
            for _ in 0..STREAMS.min(anchor.index.parts.len()) {
                scope.spawn(|| {
                    while !stop.is_set() {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let Some(part) = anchor.index.parts.get(number) else { break };
                        let object = anchor.index.part_object(number);
                        let result = self::part(model, anchor, number, &object, stop);
                        progress.add(part.bytes);
                        read.lock().push((object, part.bytes, result));
                    }
                });
            }
        });
        stop.check()?;
        let mut whole = true;
        for (object, bytes, result) in read.into_inner() {
            whole &= self.report.passes(model, &object, result)?.is_some();
            self.count(object, bytes);
        }
        Ok(whole)
    }

    /// Reads a delta, and lifts the table by it.
    fn lift(
        &mut self,
        lifted: &mut Lifted,
        index: &VersionIndex,
        link: &DeltaRef,
        anchor: &Anchored,
        progress: &Progress,
        stop: &Stop,
    ) -> Result<(), Error> {
        let object = index.delta_object(link);
        let name = self.model.name(&object);
        lifted.links.push(*link);
        let stored = Stored { hash: link.hash, bytes: link.bytes };
        let read = self.report.passes(self.model, &object, self.model.proved(&object, stored, stop))?;
        progress.add(link.bytes);
        self.count(object, link.bytes);
        let Some(bytes) = read else {
            lifted.whole = false;
            return Ok(());
        };
        if let Err(why) = lifted.apply(&bytes, link, anchor) {
            self.report.damaged.entry(name.clone()).or_insert_with(|| format!("{name}: {why}"));
            lifted.whole = false;
        }
        Ok(())
    }

    /// Reads a composed delta, and compares it with the deltas that it stands for. No version is lost without it.
    fn composed(
        &mut self,
        lifted: &Lifted,
        object: &Object,
        delta: &DeltaRef,
        anchor: &Anchored,
        stop: &Stop,
    ) -> Result<(), Error> {
        if self.seen.contains(object) {
            return Ok(());
        }
        self.count(*object, delta.bytes);
        let stored = Stored { hash: delta.hash, bytes: delta.bytes };
        let read = self.report.passes(self.model, object, self.model.proved(object, stored, stop))?;
        if let Some(bytes) = read
            && let Err(why) = lifted.agrees(&bytes, delta, anchor)
        {
            let name = self.model.name(object);
            self.report.damaged.entry(name.clone()).or_insert_with(|| format!("{name}: {why}"));
        }
        Ok(())
    }
}

/// A delta between the versions that its index says.
fn parsed<'a>(bytes: &'a [u8], link: &DeltaRef) -> Result<Delta<'a>, String> {
    let delta = Delta::parse(bytes).map_err(|e| e.to_string())?;
    let header = &delta.header;
    if (header.base.1, header.target.1, header.target_digest) != (link.base, link.target, link.digest) {
        return Err("it leads between other versions than its index says".into());
    }
    Ok(delta)
}

impl Lifted {
    fn apply(&mut self, bytes: &[u8], link: &DeltaRef, anchor: &Anchored) -> Result<(), String> {
        let delta = parsed(bytes, link)?;
        let mut near = 0;
        for record in delta.records() {
            near = anchor.manifest.cuts().tensor_of(record.block, near).map_err(|e| e.to_string())?;
            // A part may be of a later version than the delta leads to.
            if anchor.version_of(record.block).is_some_and(|version| version < link.target) {
                self.table.set(record.block, near, record.sum);
            }
        }
        match self.digest(anchor, link.target) {
            Some(found) if self.whole && found != link.digest => {
                Err(format!("the hashes in it lead to digest {found}, not {}", link.digest))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Whether a composed delta leads where those lead that have lifted the table to its target.
    fn agrees(&self, bytes: &[u8], delta: &DeltaRef, anchor: &Anchored) -> Result<(), String> {
        let found = parsed(bytes, delta)?;
        let Some(base) = self.bases.get(&delta.base).filter(|_| self.whole) else { return Ok(()) };
        for block in 0..anchor.index.blocks {
            // What the table has of parts of later versions is not of these.
            let version = anchor.version_of(block);
            let (before, after) = (base.get(block), self.table.get(block));
            let right = match found.find(block) {
                Some(record) => record.sum == after || version.is_none_or(|v| v > delta.target),
                None => before == after || version.is_none_or(|v| v > delta.base),
            };
            if !right {
                return Err(format!(
                    "it leads to another state of block {block} than the deltas that it stands for"
                ));
            }
        }
        Ok(())
    }

    /// The digest of a version, unless parts of the anchor are of later ones.
    fn digest(&self, anchor: &Anchored, version: Version) -> Option<StateDigest> {
        (version >= anchor.index.version()).then(|| self.table.digest(&anchor.manifest))
    }
}

/// Reads a part and compares its blocks with the table.
fn part(
    model: &StoredModel,
    anchor: &Anchored,
    number: usize,
    object: &Object,
    stop: &Stop,
) -> Result<(), StoreFailure> {
    let name = model.name(object);
    let wrong = |why: String| model.bucket().failure("use", &name, Kind::Corrupt, why);
    let Some(part) = anchor.index.parts.get(number) else {
        return Err(wrong("there is no such part".into()));
    };
    let bytes = model.proved(object, Stored { hash: part.hash, bytes: part.bytes }, stop)?;
    let blocks = part.first..part.first + part.count;
    let kernels = windlass_data::simd::kernels();
    match first_wrong(kernels, &anchor.manifest, blocks, &bytes, &anchor.table) {
        Ok(None) => Ok(()),
        Ok(Some(block)) => Err(wrong(format!("block {block} in it does not have its hash"))),
        Err(e) => Err(wrong(e.to_string())),
    }
}
