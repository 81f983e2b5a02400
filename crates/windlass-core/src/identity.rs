//! Identity of a version: (model, incarnation, version), and the hashes that name layouts and states.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{Kind, excerpt};
use crate::hex::hex_bytes;

/// A malformed identity.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum IdentityError {
    /// The model id is empty, too long or has characters that paths and headers do not accept.
    #[error(
        "model id {0:?} is not usable: expected 1 to 128 of the characters A-Z a-z 0-9 . _ - and no leading '.'"
    )]
    ModelId(String),
    #[error("{0:?} is not a 128-bit hash: expected 32 hexadecimal digits")]
    Hash(String),
    #[error("{0:?} is not an incarnation: expected up to 16 hexadecimal digits")]
    Incarnation(String),
}

impl IdentityError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            IdentityError::ModelId(_) | IdentityError::Hash(_) | IdentityError::Incarnation(_) => {
                Kind::Invalid
            }
        }
    }
}

/// Names a policy. Safe as a file name and in a URL path by construction.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct ModelId(String);

impl ModelId {
    /// The longest model id.
    pub const MAX_LEN: usize = 128;

    /// Checks and wraps a model id.
    pub fn new(id: impl Into<String>) -> Result<ModelId, IdentityError> {
        let id = id.into();
        let ok = (1..=Self::MAX_LEN).contains(&id.len())
            && !id.starts_with('.')
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
        if ok { Ok(ModelId(id)) } else { Err(IdentityError::ModelId(excerpt(&id))) }
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ModelId {
    type Err = IdentityError;
    fn from_str(s: &str) -> Result<ModelId, IdentityError> {
        ModelId::new(s)
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for ModelId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<ModelId, D::Error> {
        ModelId::new(String::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

/// One run of a publisher. Greater means newer: the publisher mints it from its clock, in nanoseconds, and
/// never below its predecessor. A newer incarnation supersedes an older one, regardless of their versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl FromStr for Incarnation {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Incarnation, IdentityError> {
        let number = u64::from_str_radix(text, 16);
        number.map(Incarnation).map_err(|_| IdentityError::Incarnation(excerpt(text)))
    }
}

/// A version number. Only grows within an incarnation.
pub type Version = u64;

/// Names a version everywhere: in tickets, deltas, notifications, engine reports and store paths.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    pub model_id: ModelId,
    pub incarnation: Incarnation,
    pub version: Version,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}.{}", self.model_id, self.incarnation, self.version)
    }
}

impl Identity {
    /// The ids, for OpenTelemetry, of the trace of this version and of the span that is the parent of all others in it. Every
    /// process computes them, so that they write into one trace without telling each other. `windlass.trace` in Python does the same.
    pub fn trace_ids(&self) -> ([u8; 16], [u8; 8]) {
        let name = format!("{}@{:016x}.{}", self.model_id, self.incarnation.0, self.version);
        let hash: [u8; 32] = Sha256::digest(name).into();
        let (mut trace, mut parent) = ([0; 16], [0; 8]);
        let bytes = hash.iter();
        trace.iter_mut().chain(&mut parent).zip(bytes).for_each(|(id, byte)| *id = *byte);
        (trace, parent)
    }
}

macro_rules! hash128 {
    ($name:ident, $doc:literal) => {
        hex_bytes!($name, 16, IdentityError, |text| IdentityError::Hash(excerpt(text)), $doc);
    };
}

hash128!(
    LayoutHash,
    "Names a layout: the names, dtypes, shapes and aliases of a manifest, and nothing else."
);
hash128!(CutsHash, "Names a cut table: how the tensors of a layout are cut into blocks.");
hash128!(StateDigest, "Names a state: a function of the layout and the bytes, and of nothing else.");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_ids_are_safe_file_names() {
        for good in ["actor", "Qwen3-0.6B", "a_b.c-d", &"x".repeat(128)] {
            assert!(ModelId::new(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a b", "ü", "a\n", "a\0", &"x".repeat(129)] {
            assert!(ModelId::new(bad).is_err(), "{bad:?}");
            let json = serde_json::to_string(bad).unwrap();
            assert!(serde_json::from_str::<ModelId>(&json).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_ids_of_a_versions_trace_are_those_that_python_computes() {
        let model_id = ModelId::new("policy").unwrap();
        let identity = Identity { model_id, incarnation: Incarnation(0x18e9_8e48), version: 7 };
        let (trace, parent) = identity.trace_ids();
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        // hashlib.sha256(b"policy@0000000018e98e48.7").hexdigest(); tests/python/test_otel.py has the same.
        assert_eq!(
            (hex(&trace), hex(&parent)),
            ("bd4d3ade307eded8e039a62950f61e29".into(), "2dcb4086ca520fc1".into())
        );
    }

    #[test]
    fn hashes_round_trip_as_text() {
        let h = StateDigest([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 254, 255]);
        assert_eq!(h.to_string(), "000102030405060708090a0b0c0dfeff");
        assert_eq!(h.to_string().parse::<StateDigest>(), Ok(h));
        for bad in ["", "00", "zz0102030405060708090a0b0c0dfeff", &"0".repeat(33), "éééééééééééééééé"]
        {
            assert!(bad.parse::<StateDigest>().is_err(), "{bad}");
        }
    }
}
