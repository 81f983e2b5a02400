//! The ordered tensors of an image, and everything that follows from them.
//!
//! Owns: the order and the offsets of tensors in an image, the safetensors header in front of them
//! ([`header`]), the cut of every tensor into blocks ([`cut`]), the division of blocks among nodes
//! ([`part`]), and the [`LayoutHash`] that names the layout. Called by everything that touches weights.
//! Must not: know where the bytes are.
//!
//! # Order and offsets
//!
//! A manifest is always in canonical order: widest alignment first, then by name (bytewise). Tensors are
//! contiguous, so offsets follow from the order, and every tensor is aligned to its element. Manifests
//! of the same names, dtypes and shapes have the same offsets, the same block numbers and the
//! same hash, regardless of the order in which the tensors were given.
//!
//! # Aliases
//!
//! Tied parameters are stored once. The other names are aliases: they are listed in the header's
//! `__metadata__`, belong to the layout hash, and occupy no bytes.
//!
//! # Two hashes
//!
//! [`LayoutHash`] covers names, dtypes, shapes and aliases. It leaves the cut table out, because a state
//! digest is a function of layout and bytes alone and must not change when a run is re-sharded. The cut
//! table has a hash of its own ([`CutsHash`]); deltas, whose records name blocks, carry both.
//!
//! Both are XXH3-128, big-endian, of a byte string; numbers in it are u64, little-endian, and a *text* is its
//! length and its UTF-8 bytes.
//!
//! ```text
//! layout = "windlass layout 1\0" · count of tensors · tensor* · alias*
//! tensor = text(name) · text(safetensors dtype) · rank · dimension*      in canonical order
//! alias  = text(alias) · text(target)                                    by alias, bytewise
//! cuts   = "windlass cuts 1\0" · 65536 · entry*
//! entry  = text(name) · (dimension · count of bounds · bound*)* · 2^64-1  by name, bytewise
//! ```
//!
//! Dimensions without bounds, and tensors without any, are left out of the cuts.

pub mod cut;
pub mod header;
pub mod part;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

pub use cut::{BLOCK_UNITS, Block, CutTable, DimCut};
pub use header::{HeaderTensor, SafetensorsHeader};
pub use part::Parts;

use crate::dtype::Dtype;
use crate::error::{Kind, excerpt};
use crate::identity::{CutsHash, LayoutHash};

/// The most tensors a manifest may hold. The largest open models of today have about 150,000.
pub const MAX_TENSORS: usize = 1_000_000;
/// The longest tensor name, in bytes.
pub const MAX_NAME: usize = 1024;
/// The most dimensions of a tensor.
pub const MAX_RANK: usize = 64;
/// The largest image, in bytes.
pub const MAX_IMAGE: u64 = 1 << 50;

/// A fault in a manifest, a safetensors header or a cut table.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("{count} tensors are more than the {MAX_TENSORS} that a manifest may hold")]
    TooManyTensors { count: usize },
    /// A name is empty, too long or has control characters.
    #[error("tensor name {name:?} is not usable: expected 1 to {MAX_NAME} bytes without control characters")]
    BadName {
        /// The name, cut to a readable length.
        name: String,
    },
    #[error("\"__metadata__\" is reserved by the safetensors format and cannot name a tensor")]
    ReservedName,
    #[error("tensor {name:?} is listed twice")]
    DuplicateName { name: String },
    #[error("tensor {name:?} has {rank} dimensions, more than {MAX_RANK}")]
    TooManyDims { name: String, rank: usize },
    /// Shape times element size does not fit, or goes beyond [`MAX_IMAGE`].
    #[error(
        "tensor {name:?} of shape {shape:?} and dtype {dtype} is larger than any image ({MAX_IMAGE} bytes)"
    )]
    TooLarge { name: String, shape: Vec<u64>, dtype: Dtype },
    /// A packed dtype whose elements do not fill whole bytes.
    #[error("tensor {name:?} of shape {shape:?} and dtype {dtype} does not fill whole bytes")]
    PartialByte { name: String, shape: Vec<u64>, dtype: Dtype },
    #[error("the tensors add up to more than {MAX_IMAGE} bytes")]
    ImageTooLarge,
    #[error("alias {alias:?} stands for {target:?}, which is not a tensor of this manifest")]
    DanglingAlias { alias: String, target: String },
    #[error("tensor {name:?}: {source}")]
    Dtype { name: String, source: crate::dtype::DtypeError },
    #[error("the safetensors header needs {need} bytes, but only {have} are available")]
    Truncated { need: u64, have: u64 },
    #[error("the safetensors header declares {len} bytes, more than the format's limit of {max}", max = header::MAX_HEADER)]
    HeaderTooLarge { len: u64 },
    #[error("the safetensors header is not UTF-8 after byte {valid_up_to}")]
    NotUtf8 { valid_up_to: usize },
    #[error("not a valid {what}: {source}")]
    Json { what: &'static str, source: serde_json::Error },
    #[error("tensor {name:?} occupies bytes {begin}..{end}, but its dtype and shape need {need} bytes")]
    SizeMismatch { name: String, begin: u64, end: u64, need: u64 },
    #[error("tensors {a:?} and {b:?} overlap at byte {at}")]
    Overlap { a: String, b: String, at: u64 },
    #[error("bytes {begin}..{end} before tensor {next:?} belong to no tensor")]
    Hole { begin: u64, end: u64, next: String },
    #[error("the file has {have} bytes of data and its tensors need {need}")]
    DataLength { need: u64, have: u64 },
    #[error("manifest format {found} is not supported; this build reads format {supported}", supported = FORMAT)]
    Format { found: u32 },
    /// Offsets, sizes or hashes in a manifest JSON are not those of the canonical layout.
    #[error("{what} of {name:?} is {found}, but the canonical layout gives {expected}")]
    NotCanonical { what: &'static str, name: String, found: String, expected: String },
    #[error("cuts are given for {name:?}, which is not a tensor of this manifest")]
    CutsUnknownTensor { name: String },
    /// A cut along a dimension that the tensor does not have, or twice along one.
    #[error(
        "cuts of {name:?} along dimension {dim}: the tensor has rank {rank}, and each dimension may be named once, in order"
    )]
    CutsBadDim { name: String, dim: usize, rank: usize },
    #[error(
        "cuts of {name:?} along dimension {dim}: boundary {bound} must grow and lie strictly between 0 and {size}"
    )]
    CutsBadBound { name: String, dim: usize, bound: u64, size: u64 },
    /// A cut through the middle of a byte of packed elements.
    #[error(
        "cuts of {name:?} along dimension {dim}: boundary {bound} splits a byte of packed {dtype} elements"
    )]
    CutsPartialByte { name: String, dim: usize, bound: u64, dtype: Dtype },
    #[error("the cuts make more than {max} blocks or cells; cut less finely", max = cut::MAX_BLOCKS)]
    TooManyBlocks,
    #[error("block {block} is beyond the {count} blocks of this manifest")]
    NoSuchBlock { block: u32, count: u32 },
    #[error("{what} block {block}: every block must belong to exactly one part")]
    BadParts {
        /// "no part holds" or "two parts hold".
        what: &'static str,
        block: u32,
    },
}

impl From<&ManifestError> for Kind {
    fn from(error: &ManifestError) -> Kind {
        error.kind()
    }
}

impl ManifestError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        use ManifestError as E;
        match self {
            E::TooManyTensors { .. }
            | E::BadName { .. }
            | E::ReservedName
            | E::DuplicateName { .. }
            | E::TooManyDims { .. }
            | E::TooLarge { .. }
            | E::PartialByte { .. }
            | E::ImageTooLarge
            | E::DanglingAlias { .. }
            | E::Dtype { .. }
            | E::HeaderTooLarge { .. }
            | E::NotUtf8 { .. }
            | E::Json { .. }
            | E::SizeMismatch { .. }
            | E::Overlap { .. }
            | E::Hole { .. }
            | E::NotCanonical { .. }
            | E::CutsUnknownTensor { .. }
            | E::CutsBadDim { .. }
            | E::CutsBadBound { .. }
            | E::CutsPartialByte { .. }
            | E::TooManyBlocks
            | E::BadParts { .. } => Kind::Invalid,
            E::Truncated { .. } | E::DataLength { .. } => Kind::Corrupt,
            E::NoSuchBlock { .. } => Kind::NotFound,
            E::Format { .. } => Kind::Unsupported,
        }
    }
}

/// A tensor as its owner describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub dtype: Dtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// A tensor of this name, dtype and shape.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<u64>>) -> TensorSpec {
        TensorSpec { name: name.into(), dtype, shape: shape.into() }
    }

    /// Its size in bytes, checked: name, rank, overflow, whole bytes.
    pub fn bytes(&self) -> Result<u64, ManifestError> {
        check_name(&self.name)?;
        if self.shape.len() > MAX_RANK {
            return Err(ManifestError::TooManyDims { name: self.name.clone(), rank: self.shape.len() });
        }
        let too_large = || ManifestError::TooLarge {
            name: self.name.clone(),
            shape: self.shape.clone(),
            dtype: self.dtype,
        };
        // A zero anywhere empties the tensor, but must not hide an overflow before it.
        let elements = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
        if elements > MAX_IMAGE {
            return Err(too_large());
        }
        let bytes = self.dtype.bytes(elements).ok_or_else(|| ManifestError::PartialByte {
            name: self.name.clone(),
            shape: self.shape.clone(),
            dtype: self.dtype,
        })?;
        if bytes > MAX_IMAGE { Err(too_large()) } else { Ok(bytes) }
    }
}

fn check_name(name: &str) -> Result<(), ManifestError> {
    if name == "__metadata__" {
        return Err(ManifestError::ReservedName);
    }
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        return Err(ManifestError::BadName { name: excerpt(name) });
    }
    Ok(())
}

/// A tensor with its place in the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<u64>,
    /// Where its bytes begin, counted from the first byte of data.
    pub offset: u64,
    /// How many bytes it has.
    pub bytes: u64,
}

impl Tensor {
    /// How many units (see [`Dtype::unit`]) it has.
    pub fn units(&self) -> u64 {
        self.bytes / self.dtype.unit() as u64
    }

    /// Its bytes as a range of the image's data.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.offset..self.offset + self.bytes
    }
}

/// The ordered tensors of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    tensors: Vec<Tensor>,
    aliases: BTreeMap<String, String>,
    data_bytes: u64,
    layout_hash: LayoutHash,
    cuts: CutTable,
}

/// The version of the manifest's JSON form.
pub const FORMAT: u32 = 1;

impl Manifest {
    /// Lays out these tensors. `aliases` maps further names to tensors that they share bytes with.
    pub fn new(
        specs: impl IntoIterator<Item = TensorSpec>,
        aliases: BTreeMap<String, String>,
    ) -> Result<Manifest, ManifestError> {
        let mut tensors = Vec::new();
        for spec in specs {
            let bytes = spec.bytes()?;
            if tensors.len() == MAX_TENSORS {
                return Err(ManifestError::TooManyTensors { count: MAX_TENSORS + 1 });
            }
            let TensorSpec { name, dtype, shape } = spec;
            tensors.push(Tensor { name, dtype, shape, offset: 0, bytes });
        }
        tensors.sort_unstable_by(|a, b| {
            alignment(b.dtype).cmp(&alignment(a.dtype)).then_with(|| a.name.cmp(&b.name))
        });
        let mut data_bytes = 0u64;
        for t in &mut tensors {
            t.offset = data_bytes;
            data_bytes += t.bytes;
            if data_bytes > MAX_IMAGE {
                return Err(ManifestError::ImageTooLarge);
            }
        }
        check_names(&tensors, &aliases)?;
        let layout_hash = layout_hash(&tensors, &aliases);
        let cuts = CutTable::new(&tensors, &BTreeMap::new())?;
        Ok(Manifest { tensors, aliases, data_bytes, layout_hash, cuts })
    }

    /// The same layout, cut along these boundaries (by tensor name) instead of the default ones.
    pub fn with_cuts(mut self, cuts: &BTreeMap<String, Vec<DimCut>>) -> Result<Manifest, ManifestError> {
        self.cuts = CutTable::new(&self.tensors, cuts)?;
        Ok(self)
    }

    /// The tensors, in canonical order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Further names of tensors.
    pub fn aliases(&self) -> &BTreeMap<String, String> {
        &self.aliases
    }

    /// The index of a tensor, by name or alias.
    pub fn find(&self, name: &str) -> Option<usize> {
        let name = self.aliases.get(name).map_or(name, String::as_str);
        // Tensors of one alignment are sorted by name, and there are at most four alignments.
        let mut rest = self.tensors.as_slice();
        let mut base = 0;
        while let Some(first) = rest.first() {
            let align = alignment(first.dtype);
            let len = rest.partition_point(|t| alignment(t.dtype) == align);
            if let Ok(i) = rest[..len].binary_search_by(|t| t.name.as_str().cmp(name)) {
                return Some(base + i);
            }
            rest = &rest[len..];
            base += len;
        }
        None
    }

    /// Bytes of an image, without the header.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Names the layout.
    pub fn layout_hash(&self) -> LayoutHash {
        self.layout_hash
    }

    /// How the tensors are cut into blocks.
    pub fn cuts(&self) -> &CutTable {
        &self.cuts
    }

    /// Names the cut table.
    pub fn cuts_hash(&self) -> CutsHash {
        self.cuts.hash()
    }

    /// How many bytes these blocks have together. Blocks beyond the cut table have none.
    pub fn bytes_of(&self, blocks: &crate::ranges::BlockRanges) -> u64 {
        part::bytes_of(self, blocks)
    }

    /// The bytes of a block's runs, each as a range of the image's data; a contiguous block has one.
    pub fn byte_runs(&self, block: &Block) -> impl Iterator<Item = std::ops::Range<u64>> + use<> {
        let t = &self.tensors[block.tensor as usize];
        let (offset, unit, run) = (t.offset, t.dtype.unit() as u64, block.run);
        block.runs().map(move |start| offset + start * unit..offset + (start + run) * unit)
    }

    /// The canonical JSON form: fixed order of keys, no white space. Equal manifests give equal bytes.
    pub fn to_json(&self) -> String {
        let wire = ManifestJson {
            windlass_manifest: FORMAT,
            layout_hash: self.layout_hash,
            data_bytes: self.data_bytes,
            tensors: self
                .tensors
                .iter()
                .map(|t| TensorJson {
                    name: t.name.clone(),
                    dtype: t.dtype.safetensors_name().to_owned(),
                    shape: t.shape.clone(),
                    offset: t.offset,
                    bytes: t.bytes,
                })
                .collect(),
            aliases: self.aliases.clone(),
            cuts: self.cuts.given().clone(),
        };
        serde_json::to_string(&wire).expect("strings and numbers always serialise")
    }

    /// Reads the JSON form back. Offsets, sizes and hashes must be those of the canonical layout.
    pub fn from_json(json: &[u8]) -> Result<Manifest, ManifestError> {
        let text = header::utf8(json)?;
        let wire: ManifestJson =
            serde_json::from_str(text).map_err(|source| ManifestError::Json { what: "manifest", source })?;
        if wire.windlass_manifest != FORMAT {
            return Err(ManifestError::Format { found: wire.windlass_manifest });
        }
        let mut specs = Vec::with_capacity(wire.tensors.len().min(MAX_TENSORS));
        for t in &wire.tensors {
            specs.push(TensorSpec {
                name: t.name.clone(),
                dtype: parse_dtype(&t.name, &t.dtype)?,
                shape: t.shape.clone(),
            });
        }
        let manifest = Manifest::new(specs, wire.aliases)?.with_cuts(&wire.cuts)?;
        for (got, want) in wire.tensors.iter().zip(&manifest.tensors) {
            not_canonical("position", &want.name, &got.name, &want.name)?;
            not_canonical("offset", &want.name, &got.offset, &want.offset)?;
            not_canonical("size", &want.name, &got.bytes, &want.bytes)?;
        }
        not_canonical("data_bytes", "manifest", &wire.data_bytes, &manifest.data_bytes)?;
        not_canonical("layout_hash", "manifest", &wire.layout_hash, &manifest.layout_hash)?;
        Ok(manifest)
    }
}

fn not_canonical<T: PartialEq + ToString>(
    what: &'static str,
    name: &str,
    found: &T,
    expected: &T,
) -> Result<(), ManifestError> {
    if found == expected {
        return Ok(());
    }
    Err(ManifestError::NotCanonical {
        what,
        name: name.to_owned(),
        found: found.to_string(),
        expected: expected.to_string(),
    })
}

fn parse_dtype(name: &str, dtype: &str) -> Result<Dtype, ManifestError> {
    dtype.parse().map_err(|source| ManifestError::Dtype { name: excerpt(name), source })
}

/// Alignment of a tensor's first byte. Complex elements are aligned as a pair.
fn alignment(dtype: Dtype) -> usize {
    if dtype == Dtype::C64 { 8 } else { dtype.unit() }
}

/// The names, sorted; a repeated name is an error.
fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Result<Vec<&'a str>, ManifestError> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        Some(twice) => Err(ManifestError::DuplicateName { name: twice[0].to_owned() }),
        None => Ok(names),
    }
}

fn check_names(tensors: &[Tensor], aliases: &BTreeMap<String, String>) -> Result<(), ManifestError> {
    let names = distinct(tensors.iter().map(|t| t.name.as_str()))?;
    if tensors.len() + aliases.len() > MAX_TENSORS {
        return Err(ManifestError::TooManyTensors { count: tensors.len() + aliases.len() });
    }
    for (alias, target) in aliases {
        check_name(alias)?;
        if names.binary_search(&alias.as_str()).is_ok() {
            return Err(ManifestError::DuplicateName { name: alias.clone() });
        }
        if names.binary_search(&target.as_str()).is_err() {
            return Err(ManifestError::DanglingAlias { alias: alias.clone(), target: target.clone() });
        }
    }
    Ok(())
}

fn layout_hash(tensors: &[Tensor], aliases: &BTreeMap<String, String>) -> LayoutHash {
    let mut h = Xxh3::new();
    let text = |h: &mut Xxh3, s: &str| {
        h.update(&(s.len() as u64).to_le_bytes());
        h.update(s.as_bytes());
    };
    h.update(b"windlass layout 1\0");
    h.update(&(tensors.len() as u64).to_le_bytes());
    for t in tensors {
        text(&mut h, &t.name);
        text(&mut h, t.dtype.safetensors_name());
        h.update(&(t.shape.len() as u64).to_le_bytes());
        t.shape.iter().for_each(|d| h.update(&d.to_le_bytes()));
    }
    for (alias, target) in aliases {
        text(&mut h, alias);
        text(&mut h, target);
    }
    LayoutHash(h.digest128().to_be_bytes())
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestJson {
    windlass_manifest: u32,
    layout_hash: LayoutHash,
    data_bytes: u64,
    tensors: Vec<TensorJson>,
    aliases: BTreeMap<String, String>,
    cuts: BTreeMap<String, Vec<DimCut>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorJson {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    offset: u64,
    bytes: u64,
}

#[cfg(test)]
mod tests;
