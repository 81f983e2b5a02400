//! Names of receivers and model sets, as checked text.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::excerpt;

/// A receiver id or set name with characters that paths, headers and logs do not accept.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{what} {value:?} is not usable: expected 1 to 128 of the characters A-Z a-z 0-9 . _ : - and no leading '.'"
)]
pub struct NameError {
    what: &'static str,
    value: String,
}

macro_rules! name {
    ($name:ident, $what:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            pub const MAX_LEN: usize = 128;

            pub fn new(text: impl AsRef<str>) -> Result<$name, NameError> {
                let text = text.as_ref();
                let ok = (1..=Self::MAX_LEN).contains(&text.len())
                    && !text.starts_with('.')
                    && text
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b':'));
                if ok { Ok($name(text.into())) } else { Err(NameError { what: $what, value: excerpt(text) }) }
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<$name, D::Error> {
                $name::new(String::deserialize(d)?).map_err(serde::de::Error::custom)
            }
        }
    };
}

name!(ReceiverId, "receiver id", "Names a receiver. A receiver keeps its id across restarts.");
name!(SetName, "set name", "Names a model set.");
