//! One model in a store: its head, its versions and its documents.
//!
//! Owns: [`StoredModel`], and finding models below a URL. Called by the publisher, the follower and the tools. Must not: decide
//! what is fetched, written or removed.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use windlass_core::digest::BlockSum;
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, ModelId, Version};
use windlass_core::manifest::Manifest;
use windlass_core::store::{
    AnchorIndex, Head, MAX_DOCUMENT, Object, ObjectHash, StoreError, Stored, VersionIndex,
};
use windlass_data::stop::Stop;

use super::bucket::{Bucket, Found, Listed, State, StoreFailure, Written};

/// The longest head.
const MAX_HEAD: u64 = 64 << 10;
/// How many numbered heads are kept for readers that have just listed them.
const HEADS: usize = 8;

/// The state of a head, for the next swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    State(State),
    Number(u64),
}

/// What a look at the head found.
#[derive(Clone, Debug)]
pub(crate) enum Look {
    /// There is none: nothing was published.
    Absent,
    Same,
    Moved(Head, Tag),
}

/// Which version of a model is meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pick {
    /// By default the newest that has the version.
    pub(crate) incarnation: Option<Incarnation>,
    /// By default the newest.
    pub(crate) version: Option<Version>,
}

/// One model in a store.
#[derive(Clone, Debug)]
pub(crate) struct StoredModel {
    bucket: Arc<Bucket>,
    model_id: ModelId,
    /// What stands before the names of its objects: nothing where the URL is that of the model.
    prefix: String,
}

impl StoredModel {
    /// The model of this id below the URL of the store. If the URL ends with the id, it is the URL of the model.
    pub(crate) fn new(bucket: Arc<Bucket>, model_id: ModelId) -> StoredModel {
        let prefix = format!("{model_id}/");
        StoredModel { bucket, model_id, prefix }
    }

    /// All models that the store has, or the one that its URL names.
    pub(crate) fn find(bucket: &Arc<Bucket>, stop: &Stop) -> Result<Vec<StoredModel>, StoreFailure> {
        let named = bucket.url().as_str().trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        if let Ok(model_id) = ModelId::new(named) {
            let own = StoredModel { bucket: Arc::clone(bucket), model_id, prefix: String::new() };
            if let Look::Moved(head, _) = own.look(None, stop)? {
                // A bucket or a directory may have been copied to another name.
                return Ok(vec![StoredModel { model_id: head.identity.model_id, ..own }]);
            }
        }
        let mut found = Vec::new();
        for model_id in bucket.folders(stop)?.into_iter().filter_map(|name| ModelId::new(name).ok()) {
            let model = StoredModel::new(Arc::clone(bucket), model_id);
            if !matches!(model.look(None, stop)?, Look::Absent) {
                found.push(model);
            }
        }
        Ok(found)
    }

    /// The only model of the store.
    pub(crate) fn only(bucket: &Arc<Bucket>, stop: &Stop) -> Result<StoredModel, StoreFailure> {
        let mut found = StoredModel::find(bucket, stop)?;
        match (found.pop(), found.first()) {
            (Some(model), None) => Ok(model),
            (None, _) => {
                let why = "no version of any model has been published there yet: check the URL, or wait for the first";
                Err(bucket.failure("find", "a model", Kind::NotFound, why))
            }
            (Some(last), Some(_)) => {
                let names: Vec<&str> = found.iter().chain([&last]).map(|m| m.model_id.as_str()).collect();
                let why = format!("there are {}: name one at the end of the URL", names.join(", "));
                Err(bucket.failure("choose", "a model", Kind::Invalid, why))
            }
        }
    }

    pub(crate) fn bucket(&self) -> &Arc<Bucket> {
        &self.bucket
    }

    pub(crate) fn model_id(&self) -> &ModelId {
        &self.model_id
    }

    /// The model and its store, for people.
    pub(crate) fn label(&self) -> String {
        if self.prefix.is_empty() {
            self.bucket.url().to_string()
        } else {
            format!("{} at {}", self.model_id, self.bucket.url())
        }
    }

    /// The name of an object below the URL.
    pub(crate) fn name(&self, object: &Object) -> String {
        format!("{}{object}", self.prefix)
    }

    fn broken(&self, object: &Object, e: &StoreError) -> StoreFailure {
        self.bucket.failure("use", &self.name(object), e.kind(), e.to_string())
    }

    /// The newest head, unless it is the one with this tag.
    pub(crate) fn look(&self, seen: Option<&Tag>, stop: &Stop) -> Result<Look, StoreFailure> {
        if !self.bucket.swaps() {
            return self.look_numbered(seen, stop);
        }
        let state = match seen {
            Some(Tag::State(state)) => Some(state),
            Some(Tag::Number(_)) | None => None,
        };
        let name = self.name(&Object::Head);
        match self.bucket.read_if_changed(&name, state, MAX_HEAD, stop)? {
            Found::Absent => Ok(Look::Absent),
            Found::Same => Ok(Look::Same),
            Found::Read(read) => {
                let head = Head::from_object(&read.bytes).map_err(|e| self.broken(&Object::Head, &e))?;
                let state = read.state.ok_or_else(|| {
                    let why =
                        "the store gives objects no etag, without which two publishers cannot be told apart";
                    self.bucket.failure("use", &name, Kind::Unsupported, why)
                })?;
                let tag = Tag::State(state);
                Ok(if seen == Some(&tag) { Look::Same } else { Look::Moved(head, tag) })
            }
        }
    }

    fn look_numbered(&self, seen: Option<&Tag>, stop: &Stop) -> Result<Look, StoreFailure> {
        loop {
            let Some(newest) = self.heads(stop)?.last().copied() else { return Ok(Look::Absent) };
            if seen == Some(&Tag::Number(newest)) {
                return Ok(Look::Same);
            }
            let object = Object::NumberedHead(newest);
            match self.bucket.read_if_changed(&self.name(&object), None, MAX_HEAD, stop)? {
                Found::Read(read) => {
                    let head = Head::from_object(&read.bytes).map_err(|e| self.broken(&object, &e))?;
                    return Ok(Look::Moved(head, Tag::Number(newest)));
                }
                // It was removed because there are newer ones by now.
                Found::Absent | Found::Same => {
                    stop.check().map_err(|s| {
                        self.bucket.failure(
                            "read",
                            &self.name(&object),
                            s.kind(),
                            "it was removed again and again",
                        )
                    })?;
                }
            }
        }
    }

    /// The numbers of the heads, ascending.
    fn heads(&self, stop: &Stop) -> Result<Vec<u64>, StoreFailure> {
        let listed = self.bucket.list(&format!("{}head", self.prefix), stop)?;
        let number = |l: &Listed| match Object::parse(l.name.strip_prefix(&self.prefix)?) {
            Some(Object::NumberedHead(number)) => Some(number),
            Some(_) | None => None,
        };
        let mut numbers: Vec<u64> = listed.iter().filter_map(number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Moves the head from the state that was seen. Answers its new state, or none if it is in another one.
    pub(crate) fn move_head(
        &self,
        head: &Head,
        seen: Option<&Tag>,
        stop: &Stop,
    ) -> Result<Option<Tag>, StoreFailure> {
        let bytes = Bytes::from(head.to_object());
        if self.bucket.swaps() {
            let name = self.name(&Object::Head);
            let moved = match seen {
                Some(Tag::State(state)) => self.bucket.swap(&name, bytes, state, stop)?,
                Some(Tag::Number(_)) | None => self.bucket.create(&name, bytes, stop)?,
            };
            let Written::Done(state) = moved else { return Ok(None) };
            let state = state.ok_or_else(|| {
                let why = "the store answers a write without an etag, so two publishers cannot be told apart";
                self.bucket.failure("write", &name, Kind::Unsupported, why)
            })?;
            return Ok(Some(Tag::State(state)));
        }
        let next = match seen {
            Some(Tag::Number(number)) => number + 1,
            Some(Tag::State(_)) | None => 1,
        };
        let created = self.bucket.create(&self.name(&Object::NumberedHead(next)), bytes, stop)?;
        if created == Written::Otherwise {
            return Ok(None);
        }
        // Another publisher may have gone further while this one slept: then the head is not at this number.
        let heads = self.heads(stop)?;
        if heads.last() != Some(&next) {
            return Ok(None);
        }
        let old = heads.iter().rev().skip(HEADS).map(|n| self.name(&Object::NumberedHead(*n)));
        let old: Vec<String> = old.collect();
        self.bucket.remove(old.iter().map(String::as_str), stop)?;
        Ok(Some(Tag::Number(next)))
    }

    /// Makes sure that the store refuses to write an object twice: without that, two publishers cannot be told apart.
    pub(crate) fn probe(&self, stop: &Stop) -> Result<(), StoreFailure> {
        let name = self.name(&Object::Probe);
        for _ in 0..2 {
            let written = self.bucket.create(&name, Bytes::from_static(b"windlass"), stop)?;
            if written == Written::Otherwise {
                return Ok(());
            }
        }
        let why = "the store wrote it twice although it was to write it only if absent: two publishers would overwrite each \
                   other; use a store with conditional writes";
        Err(self.bucket.failure("write", &name, Kind::Unsupported, why))
    }

    /// The index of a version, or none if there is no such version.
    pub(crate) fn find_version(
        &self,
        incarnation: Incarnation,
        version: Version,
        stop: &Stop,
    ) -> Result<Option<VersionIndex>, StoreFailure> {
        let object = Object::Version { incarnation, version };
        let name = self.name(&object);
        let Found::Read(read) = self.bucket.read_if_changed(&name, None, MAX_DOCUMENT as u64, stop)? else {
            return Ok(None);
        };
        let index = VersionIndex::from_object(&read.bytes).map_err(|e| self.broken(&object, &e))?;
        let found = &index.identity;
        if (found.incarnation, found.version) != (incarnation, version) || found.model_id != self.model_id {
            let why = format!("it is the index of {found}: an object was copied to another name");
            return Err(self.bucket.failure("use", &name, Kind::Corrupt, why));
        }
        Ok(Some(index))
    }

    /// The index of a version that must be there.
    pub(crate) fn version(
        &self,
        incarnation: Incarnation,
        version: Version,
        stop: &Stop,
    ) -> Result<VersionIndex, StoreFailure> {
        self.find_version(incarnation, version, stop)?.ok_or_else(|| {
            let name = self.name(&Object::Version { incarnation, version });
            let why = "there is no such version: it was not published, or was removed by retention";
            self.bucket.failure("read", &name, Kind::NotFound, why)
        })
    }

    /// The newest head.
    pub(crate) fn head(&self, stop: &Stop) -> Result<Head, StoreFailure> {
        match self.look(None, stop)? {
            Look::Moved(head, _) => Ok(head),
            Look::Absent | Look::Same => {
                let why = "no version has been published there yet";
                Err(self.bucket.failure("read", &self.name(&Object::Head), Kind::NotFound, why))
            }
        }
    }

    /// The index of the version that is meant, given the newest head.
    pub(crate) fn pick(&self, head: &Head, pick: &Pick, stop: &Stop) -> Result<VersionIndex, StoreFailure> {
        let newest = &head.identity;
        let incarnation = pick.incarnation.unwrap_or(newest.incarnation);
        let version = match pick.version {
            Some(version) => version,
            None if incarnation == newest.incarnation => newest.version,
            None => {
                let found = self.versions(stop)?.into_iter().filter(|(i, _)| *i == incarnation).max();
                let why = format!(
                    "there is no version of incarnation {incarnation}: `windlass store ls` lists them"
                );
                found.ok_or_else(|| self.bucket.failure("find", "a version", Kind::NotFound, why))?.1
            }
        };
        if let (None, Some(_)) = (pick.incarnation, pick.version) {
            if let Some(index) = self.find_version(incarnation, version, stop)? {
                return Ok(index);
            }
            // Of an earlier incarnation, the latest that has it.
            let latest = self.versions(stop)?.into_iter().filter(|(_, v)| *v == version).max();
            return self.version(latest.map_or(incarnation, |(i, _)| i), version, stop);
        }
        self.version(incarnation, version, stop)
    }

    /// All versions that are there.
    fn versions(&self, stop: &Stop) -> Result<Vec<(Incarnation, Version)>, StoreFailure> {
        let (objects, _) = self.list(stop)?;
        Ok(objects.keys().filter_map(Object::as_version).collect())
    }

    /// An object whose bytes must have the hash in its name.
    pub(crate) fn proved(&self, object: &Object, stored: Stored, stop: &Stop) -> Result<Bytes, StoreFailure> {
        let name = self.name(object);
        let bytes = self.bucket.read(&name, stored.bytes, stop)?;
        let found = ObjectHash::of(&bytes);
        if found != stored.hash || bytes.len() as u64 != stored.bytes {
            let why = format!(
                "it has {} bytes with hash {found}, not {} with {}: it was damaged in the store or on the way",
                bytes.len(),
                stored.bytes,
                stored.hash
            );
            return Err(self.bucket.failure("use", &name, Kind::Corrupt, why));
        }
        Ok(bytes)
    }

    /// The layout of a version.
    pub(crate) fn manifest(&self, index: &VersionIndex, stop: &Stop) -> Result<Manifest, StoreFailure> {
        let object = index.manifest_object();
        let bytes = self.proved(&object, index.manifest, stop)?;
        let wrong = |why: String| self.bucket.failure("use", &self.name(&object), Kind::Corrupt, why);
        let manifest = Manifest::from_json(&bytes).map_err(|e| wrong(e.to_string()))?;
        if (manifest.layout_hash(), manifest.cuts_hash()) != (index.layout_hash, index.cuts_hash) {
            return Err(wrong("it is of another layout than the version".into()));
        }
        Ok(manifest)
    }

    /// The parts of a version's anchor.
    pub(crate) fn anchor(&self, index: &VersionIndex, stop: &Stop) -> Result<AnchorIndex, StoreFailure> {
        let object = index.anchor_object();
        let bytes = self.proved(&object, index.anchor.index, stop)?;
        let anchor = AnchorIndex::from_json(&bytes).map_err(|e| self.broken(&object, &e))?;
        let ours = (&index.identity.model_id, index.identity.incarnation, index.layout_hash, index.cuts_hash);
        let theirs = (&anchor.model_id, anchor.incarnation, anchor.layout_hash, anchor.cuts_hash);
        let ends = (anchor.start, anchor.version(), anchor.image_bytes());
        if ours != theirs || ends != (index.anchor.start, index.anchor.version, index.anchor.image_bytes) {
            let why = "it is of another layout, or of other versions, than the index that names it";
            return Err(self.bucket.failure("use", &self.name(&object), Kind::Corrupt, why));
        }
        Ok(anchor)
    }

    /// The block hashes of an anchor.
    pub(crate) fn sums(&self, anchor: &AnchorIndex, stop: &Stop) -> Result<Vec<BlockSum>, StoreFailure> {
        let bytes = self.proved(&anchor.sums_object(), anchor.sums, stop)?;
        Ok(bytes.as_chunks::<16>().0.iter().map(|b| BlockSum::from_bytes(*b)).collect())
    }

    /// All objects of the model, and the names below its prefix that are no objects of ours.
    pub(crate) fn list(&self, stop: &Stop) -> Result<(BTreeMap<Object, Listed>, Vec<Listed>), StoreFailure> {
        let mut strange = Vec::new();
        let mut objects = BTreeMap::new();
        for listed in self.bucket.list(&self.prefix, stop)? {
            match listed.name.strip_prefix(&self.prefix).and_then(Object::parse) {
                Some(object) => drop(objects.insert(object, listed)),
                None => strange.push(listed),
            }
        }
        Ok((objects, strange))
    }
}
