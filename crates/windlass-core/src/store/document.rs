//! The JSON documents of a store.
//!
//! Owns: [`VersionIndex`], [`AnchorIndex`] and [`Head`], and what must hold of one that comes from outside. Unknown fields are
//! ignored, so that a later release may add some.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Object, ObjectHash, StoreError};
use crate::identity::{CutsHash, Identity, Incarnation, LayoutHash, ModelId, StateDigest, Version};
use crate::manifest::MAX_IMAGE;
use crate::wire::BlockVersions;

/// The format that this release writes and reads.
const FORMAT: u32 = 1;
/// The longest document.
pub const MAX_DOCUMENT: usize = 32 << 20;
/// The most deltas of one index.
pub const MAX_DELTAS: usize = 4096;
/// The most parts of an anchor.
pub const MAX_PARTS: usize = 1 << 18;
/// The longest name of a publisher.
const MAX_PUBLISHER: usize = 128;

/// The hash and the length of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    pub hash: ObjectHash,
    pub bytes: u64,
}

impl Stored {
    /// Those of an object with these bytes.
    pub fn of(bytes: &[u8]) -> Stored {
        Stored { hash: ObjectHash::of(bytes), bytes: bytes.len() as u64 }
    }
}

/// A delta in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeltaRef {
    pub base: Version,
    pub target: Version,
    /// The digest of the target.
    pub digest: StateDigest,
    pub hash: ObjectHash,
    pub bytes: u64,
}

/// The full image that an index begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnchorRef {
    /// The version at which it was begun; no part is older.
    pub start: Version,
    /// The digest of that version.
    pub digest: StateDigest,
    /// The newest version of its parts.
    pub version: Version,
    /// Bytes of all parts.
    pub image_bytes: u64,
    /// The [`AnchorIndex`].
    pub index: Stored,
}

/// A version, and all that it takes to get it. Its name is that of [`Object::Version`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionIndex {
    pub format: u32,
    pub identity: Identity,
    pub digest: StateDigest,
    pub layout_hash: LayoutHash,
    pub cuts_hash: CutsHash,
    pub manifest: Stored,
    pub anchor: AnchorRef,
    /// The deltas from the anchor's start to this one, oldest first.
    pub deltas: Vec<DeltaRef>,
    /// Deltas that each do what several of `deltas` do together, with fewer bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub composed: Vec<DeltaRef>,
    /// A version of this incarnation with an older anchor, whose deltas lead at least to the start of this one's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier: Option<Version>,
    /// When it was written, by the clock of its publisher, in milliseconds since the Unix epoch.
    pub unix_ms: u64,
}

/// Which blocks are in which part of an anchor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnchorIndex {
    pub format: u32,
    pub model_id: ModelId,
    pub incarnation: Incarnation,
    /// The version at which it was begun: no part is older, and the deltas begin here.
    pub start: Version,
    pub layout_hash: LayoutHash,
    pub cuts_hash: CutsHash,
    pub blocks: u32,
    /// The table with the hash of every block.
    pub sums: Stored,
    /// The parts, in the order of their blocks.
    pub parts: Vec<PartRef>,
}

/// A part of an anchor: consecutive blocks of one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRef {
    /// Its first block.
    pub first: u32,
    /// How many blocks.
    pub count: u32,
    pub version: Version,
    pub hash: ObjectHash,
    pub bytes: u64,
}

/// The newest version of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    pub format: u32,
    pub identity: Identity,
    pub digest: StateDigest,
    /// The process that wrote it: a random name.
    pub publisher: String,
}

impl Head {
    /// The head that leads to this version.
    pub fn new(index: &VersionIndex, publisher: &str) -> Head {
        let (identity, digest) = (index.identity.clone(), index.digest);
        Head { format: FORMAT, identity, digest, publisher: publisher.to_owned() }
    }

    /// Reads a head from outside.
    pub fn from_json(json: &[u8]) -> Result<Head, StoreError> {
        let head: Head = read("head", json)?;
        if head.publisher.len() > MAX_PUBLISHER {
            return Err(contradiction("head", "the name of its publisher is too long"));
        }
        Ok(head)
    }

    /// The JSON form.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads the object of a head.
    pub fn from_object(bytes: &[u8]) -> Result<Head, StoreError> {
        Head::from_json(proved("head", bytes)?)
    }

    /// The object: the JSON form and its hash.
    pub fn to_object(&self) -> Vec<u8> {
        with_hash(self.to_json())
    }
}

impl VersionIndex {
    pub const FORMAT: u32 = FORMAT;

    /// Reads an index from outside.
    pub fn from_json(json: &[u8]) -> Result<VersionIndex, StoreError> {
        let index: VersionIndex = read("version index", json)?;
        index.check()?;
        Ok(index)
    }

    /// The JSON form.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads the object of an index.
    pub fn from_object(bytes: &[u8]) -> Result<VersionIndex, StoreError> {
        VersionIndex::from_json(proved("version index", bytes)?)
    }

    /// The object: the JSON form and its hash.
    pub fn to_object(&self) -> Vec<u8> {
        with_hash(self.to_json())
    }

    /// Whether the chain leads from the anchor to the version.
    pub fn check(&self) -> Result<(), StoreError> {
        let wrong = |why: String| Err(contradiction("version index", why));
        let (version, anchor) = (self.identity.version, &self.anchor);
        if self.deltas.len() > MAX_DELTAS {
            return wrong(format!("it has {} deltas, more than {MAX_DELTAS}", self.deltas.len()));
        }
        if anchor.start > anchor.version || anchor.version > version {
            let (start, newest) = (anchor.start, anchor.version);
            return wrong(format!(
                "its anchor is of versions {start} to {newest}, and it is version {version}"
            ));
        }
        let (mut at, mut digest) = (anchor.start, anchor.digest);
        let mut passes = at == anchor.version;
        for delta in &self.deltas {
            if delta.base != at || delta.target <= delta.base {
                return wrong(format!(
                    "a delta leads from {} to {} after version {at}",
                    delta.base, delta.target
                ));
            }
            if !(1..=MAX_IMAGE).contains(&delta.bytes) {
                return wrong(format!("the delta to {} has {} bytes", delta.target, delta.bytes));
            }
            (at, digest) = (delta.target, delta.digest);
            passes |= at == anchor.version;
        }
        if !passes {
            return wrong(format!("no delta leads to version {} of its anchor", anchor.version));
        }
        if (at, digest) != (version, self.digest) {
            return wrong(format!("its deltas lead to version {at} with digest {digest}"));
        }
        if self.composed.len() > self.deltas.len() {
            return wrong(format!("it has {} composed deltas of {}", self.composed.len(), self.deltas.len()));
        }
        let passed = std::iter::once((anchor.start, anchor.digest));
        let passed: BTreeMap<_, _> = passed.chain(self.deltas.iter().map(|d| (d.target, d.digest))).collect();
        for delta in &self.composed {
            let ends = passed.contains_key(&delta.base) && passed.get(&delta.target) == Some(&delta.digest);
            if !ends || delta.target <= delta.base {
                return wrong(format!(
                    "a composed delta leads from {} to {}, which its deltas do not",
                    delta.base, delta.target
                ));
            }
            if !(1..=MAX_IMAGE).contains(&delta.bytes) {
                return wrong(format!("the composed delta to {} has {} bytes", delta.target, delta.bytes));
            }
        }
        if self.earlier.is_some_and(|e| e < anchor.start || e >= version) {
            return wrong("the earlier version is not before it, or before its anchor".into());
        }
        if anchor.image_bytes > MAX_IMAGE {
            return wrong(format!("its image has {} bytes", anchor.image_bytes));
        }
        let documents = [self.manifest, anchor.index];
        if let Some(stored) = documents.iter().find(|s| s.bytes > MAX_DOCUMENT as u64) {
            return wrong(format!("a document has {} bytes", stored.bytes));
        }
        Ok(())
    }

    /// The digest of a version that the chain passes.
    pub fn digest_of(&self, version: Version) -> Option<StateDigest> {
        let start = (version == self.anchor.start).then_some(self.anchor.digest);
        start.or_else(|| self.deltas.iter().find(|d| d.target == version).map(|d| d.digest))
    }

    fn incarnation(&self) -> Incarnation {
        self.identity.incarnation
    }

    /// The object that it is in.
    pub fn object(&self) -> Object {
        Object::Version { incarnation: self.incarnation(), version: self.identity.version }
    }

    /// The object of its layout.
    pub fn manifest_object(&self) -> Object {
        Object::Manifest { incarnation: self.incarnation(), hash: self.manifest.hash }
    }

    /// The object of its anchor's index.
    pub fn anchor_object(&self) -> Object {
        let AnchorRef { start, index, .. } = self.anchor;
        Object::Anchor { incarnation: self.incarnation(), start, hash: index.hash }
    }

    /// The object of one of its deltas.
    pub fn delta_object(&self, delta: &DeltaRef) -> Object {
        let &DeltaRef { base, target, hash, .. } = delta;
        Object::Delta { incarnation: self.incarnation(), base, target, hash }
    }

    /// All objects that it needs, with their lengths, given its anchor's index.
    pub fn needs(&self, anchor: &AnchorIndex) -> BTreeMap<Object, u64> {
        let mut all = BTreeMap::from([
            (self.object(), self.to_object().len() as u64),
            (self.manifest_object(), self.manifest.bytes),
            (self.anchor_object(), self.anchor.index.bytes),
            (anchor.sums_object(), anchor.sums.bytes),
        ]);
        all.extend(self.deltas.iter().chain(&self.composed).map(|d| (self.delta_object(d), d.bytes)));
        all.extend(anchor.parts.iter().enumerate().map(|(i, p)| (anchor.part_object(i), p.bytes)));
        all
    }
}

impl AnchorIndex {
    pub const FORMAT: u32 = FORMAT;

    /// Reads an index from outside.
    pub fn from_json(json: &[u8]) -> Result<AnchorIndex, StoreError> {
        let index: AnchorIndex = read("anchor index", json)?;
        index.check()?;
        Ok(index)
    }

    /// The JSON form.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Whether the parts have every block once.
    pub fn check(&self) -> Result<(), StoreError> {
        let wrong = |why: String| Err(contradiction("anchor index", why));
        if !(1..=MAX_PARTS).contains(&self.parts.len()) {
            return wrong(format!("it has {} parts, not 1 to {MAX_PARTS}", self.parts.len()));
        }
        let mut next = 0;
        let mut bytes = 0_u64;
        for part in &self.parts {
            if part.first != next || part.count == 0 {
                return wrong(format!(
                    "a part of {} blocks begins at {}, not {next}",
                    part.count, part.first
                ));
            }
            let Some(end) = part.first.checked_add(part.count) else {
                return wrong("its blocks are too many".into());
            };
            if part.version < self.start {
                return wrong(format!(
                    "a part is of version {}, before its start {}",
                    part.version, self.start
                ));
            }
            // A block has at most 64 Ki units of 16 bytes, and at least a bit.
            if part.bytes == 0 || part.bytes > u64::from(part.count) << 20 {
                return wrong(format!("a part of {} blocks has {} bytes", part.count, part.bytes));
            }
            (next, bytes) = (end, bytes.saturating_add(part.bytes));
        }
        if next != self.blocks {
            return wrong(format!("its parts have {next} blocks of {}", self.blocks));
        }
        if bytes > MAX_IMAGE {
            return wrong(format!("its parts have {bytes} bytes"));
        }
        if self.sums.bytes != u64::from(self.blocks) * 16 {
            return wrong(format!("its table has {} bytes for {} blocks", self.sums.bytes, self.blocks));
        }
        Ok(())
    }

    /// The newest version of its parts.
    pub fn version(&self) -> Version {
        self.parts.iter().map(|p| p.version).max().unwrap_or_default()
    }

    /// Bytes of all parts.
    pub fn image_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }

    /// Which version each block is of.
    pub fn block_versions(&self) -> Result<BlockVersions, StoreError> {
        let runs = self.parts.iter().map(|p| (p.first, p.count, p.version));
        BlockVersions::from_runs(runs).map_err(|e| contradiction("anchor index", e.to_string()))
    }

    /// The part that has a block.
    pub fn part_of(&self, block: u32) -> Option<usize> {
        let after = self.parts.partition_point(|p| p.first <= block);
        after.checked_sub(1).filter(|_| block < self.blocks)
    }

    /// The object of a part.
    pub fn part_object(&self, part: usize) -> Object {
        let hash = self.parts.get(part).map_or(ObjectHash([0; 16]), |p| p.hash);
        Object::Part { incarnation: self.incarnation, start: self.start, part: part as u32, hash }
    }

    /// The object of its table.
    pub fn sums_object(&self) -> Object {
        Object::Sums { incarnation: self.incarnation, start: self.start, hash: self.sums.hash }
    }
}

/// A document whose name does not have its hash, with its hash in a line of its own.
fn with_hash(mut json: Vec<u8>) -> Vec<u8> {
    let hash = ObjectHash::of(&json);
    json.extend(format!("\n{hash}\n").bytes());
    json
}

/// The document in an object that ends with its hash.
fn proved<'a>(what: &'static str, bytes: &'a [u8]) -> Result<&'a [u8], StoreError> {
    let lines = bytes.strip_suffix(b"\n").unwrap_or_default();
    let end = lines.iter().rposition(|b| *b == b'\n').unwrap_or_default();
    let (json, hash) = lines.split_at(end);
    let hash = str::from_utf8(hash).ok().and_then(|hash| hash.trim_start().parse::<ObjectHash>().ok());
    if hash == Some(ObjectHash::of(json)) { Ok(json) } else { Err(StoreError::Damaged { what }) }
}

/// Only the field that decides how to read the others.
#[derive(Deserialize)]
struct Probe {
    format: u32,
}

fn read<T: DeserializeOwned>(what: &'static str, json: &[u8]) -> Result<T, StoreError> {
    if json.len() > MAX_DOCUMENT {
        return Err(StoreError::TooLong { what, len: json.len(), max: MAX_DOCUMENT });
    }
    let malformed = |e: serde_json::Error| StoreError::Json { what, why: e.to_string() };
    let Probe { format } = serde_json::from_slice(json).map_err(malformed)?;
    if format != FORMAT {
        return Err(StoreError::Format { what, theirs: format, ours: FORMAT });
    }
    serde_json::from_slice(json).map_err(malformed)
}

pub(super) fn contradiction(what: &'static str, why: impl Into<String>) -> StoreError {
    StoreError::Contradiction { what, why: why.into() }
}
