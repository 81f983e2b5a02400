//! The safetensors header, read and written.
//!
//! Reading accepts any valid safetensors file, in any order of tensors, and refuses the faults that the format
//! refuses: overlaps, holes, sizes that disagree with dtype and shape, trailing bytes. Writing gives the
//! header of an image: canonical order, aliases in `__metadata__`, padded with spaces so that the data
//! begins on a page boundary.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::{MAX_TENSORS, Manifest, ManifestError, TensorSpec, parse_dtype};

/// The longest header that the format allows.
pub const MAX_HEADER: u64 = 100_000_000;
/// Data begins on a multiple of this.
pub const PAGE: u64 = 4096;
/// The key in `__metadata__` under which aliases are kept, as a JSON object.
pub const ALIASES: &str = "windlass.aliases";

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    pub spec: TensorSpec,
    /// Where its bytes begin, counted from the first byte of data.
    pub begin: u64,
    /// The byte after its last.
    pub end: u64,
}

/// The header of a safetensors file, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafetensorsHeader {
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<HeaderTensor>,
    pub metadata: BTreeMap<String, String>,
    /// Where the data begins in the file.
    pub data_start: u64,
    pub data_bytes: u64,
}

impl SafetensorsHeader {
    /// How many bytes from the start of a file are needed to parse its header, from its first eight.
    pub fn prefix_len(first: [u8; 8]) -> Result<u64, ManifestError> {
        let len = u64::from_le_bytes(first);
        if len > MAX_HEADER { Err(ManifestError::HeaderTooLarge { len }) } else { Ok(8 + len) }
    }

    /// Parses the header of a file of `file_len` bytes from `prefix`, its beginning (or all of it).
    pub fn parse(prefix: &[u8], file_len: u64) -> Result<SafetensorsHeader, ManifestError> {
        let have = prefix.len() as u64;
        let Some(first) = prefix.first_chunk::<8>() else {
            return Err(ManifestError::Truncated { need: 8, have });
        };
        let data_start = Self::prefix_len(*first)?;
        let Some(json) = prefix.get(8..data_start as usize) else {
            return Err(ManifestError::Truncated { need: data_start, have });
        };
        let raw: RawHeader = serde_json::from_str(utf8(json)?)
            .map_err(|source| ManifestError::Json { what: "safetensors header", source })?;
        if raw.tensors.len() > MAX_TENSORS {
            return Err(ManifestError::TooManyTensors { count: raw.tensors.len() });
        }
        let mut tensors = Vec::with_capacity(raw.tensors.len());
        for (name, t) in raw.tensors {
            let dtype = parse_dtype(&name, &t.dtype)?;
            let spec = TensorSpec { name, dtype, shape: t.shape };
            let need = spec.bytes()?;
            let [begin, end] = t.data_offsets;
            if begin.checked_add(need) != Some(end) {
                return Err(ManifestError::SizeMismatch { name: spec.name, begin, end, need });
            }
            tensors.push(HeaderTensor { spec, begin, end });
        }
        super::distinct(tensors.iter().map(|t| t.spec.name.as_str()))?;
        tensors.sort_by(|a, b| (a.begin, a.end, &a.spec.name).cmp(&(b.begin, b.end, &b.spec.name)));
        let data_bytes = check_cover(&tensors)?;
        let have = file_len.saturating_sub(data_start);
        if have != data_bytes {
            return Err(ManifestError::DataLength { need: data_bytes, have });
        }
        Ok(SafetensorsHeader { tensors, metadata: raw.metadata, data_start, data_bytes })
    }

    /// The aliases that the metadata lists; none if Windlass did not write the file.
    pub fn aliases(&self) -> Result<BTreeMap<String, String>, ManifestError> {
        match self.metadata.get(ALIASES) {
            None => Ok(BTreeMap::new()),
            Some(json) => {
                serde_json::from_str(json).map_err(|source| ManifestError::Json { what: ALIASES, source })
            }
        }
    }

    /// The manifest of these tensors. Its offsets are canonical; the file's own may differ.
    pub fn manifest(&self) -> Result<Manifest, ManifestError> {
        Manifest::new(self.tensors.iter().map(|t| t.spec.clone()), self.aliases()?)
    }
}

impl Manifest {
    /// The header of an image with this manifest: eight bytes of length, JSON, spaces up to a page.
    pub fn to_safetensors_header(&self) -> Vec<u8> {
        let mut metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        if !self.aliases().is_empty() {
            metadata.insert(ALIASES.to_owned(), to_json(self.aliases()));
        }
        let mut json = format!("{{\"__metadata__\":{}", to_json(&metadata));
        for t in self.tensors() {
            let _ = write!(
                json,
                ",{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                to_json(&t.name),
                t.dtype.safetensors_name(),
                to_json(&t.shape),
                t.offset,
                t.offset + t.bytes
            );
        }
        json.push('}');
        let padded = (8 + json.len() as u64).next_multiple_of(PAGE) - 8;
        let mut out = Vec::with_capacity(8 + padded as usize);
        out.extend_from_slice(&padded.to_le_bytes());
        out.extend_from_slice(json.as_bytes());
        out.resize(8 + padded as usize, b' ');
        out
    }
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers always serialise")
}

pub(super) fn utf8(bytes: &[u8]) -> Result<&str, ManifestError> {
    std::str::from_utf8(bytes).map_err(|e| ManifestError::NotUtf8 { valid_up_to: e.valid_up_to() })
}

/// Tensors in byte order must follow one another without overlap or hole. Returns where the last one ends.
fn check_cover(tensors: &[HeaderTensor]) -> Result<u64, ManifestError> {
    let mut at = 0;
    let mut before = "";
    for t in tensors {
        if t.begin < at {
            return Err(ManifestError::Overlap { a: before.to_owned(), b: t.spec.name.clone(), at: t.begin });
        }
        if t.begin > at {
            return Err(ManifestError::Hole { begin: at, end: t.begin, next: t.spec.name.clone() });
        }
        at = t.end;
        before = &t.spec.name;
    }
    Ok(at)
}

struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<RawHeader, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
                let mut seen_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if std::mem::replace(&mut seen_metadata, true) {
                            return Err(serde::de::Error::custom("__metadata__ is listed twice"));
                        }
                        header.metadata = map.next_value()?;
                    } else {
                        header.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        d.deserialize_map(V)
    }
}
