//! Element types and their spellings.
//!
//! The canonical spelling in requests and configuration is torch's without the prefix (`bfloat16`), in
//! images it is safetensors' (`BF16`); `torch.bfloat16` is accepted everywhere (C27).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Kind, excerpt};

/// An unknown spelling of a dtype.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DtypeError {
    #[error(
        "unknown dtype {0:?}; expected a torch name such as \"bfloat16\" or a safetensors name such as \"BF16\""
    )]
    Unknown(String),
}

impl DtypeError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            DtypeError::Unknown(_) => Kind::Invalid,
        }
    }
}

/// How the codec orders the bit patterns of an element, so that a small change of value is a small step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Line {
    /// Sign and magnitude, as in IEEE floats: patterns are put in order of value, all zeros and NaNs
    /// kept apart. The field is the number of explicit mantissa bits.
    Float(u8),
    /// Patterns as unsigned integers; steps wrap around.
    Integer,
}

macro_rules! dtypes {
    ($($name:ident, $st:literal, $torch:literal, $bits:literal, $unit:literal, $line:expr, $doc:literal;)*) => {
        /// Every element type that a safetensors file can hold.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Dtype {
            $(#[doc = $doc] $name,)*
        }

        impl Dtype {
            /// Every dtype.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$name,)*];

            /// The name in a safetensors header.
            pub const fn safetensors_name(self) -> &'static str {
                match self { $(Dtype::$name => $st,)* }
            }

            /// The canonical name: torch's, without `torch.`.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$name => $torch,)* }
            }

            /// Bits of one element; 4 and 6 for the packed micro-scaling types.
            pub const fn bits(self) -> u64 {
                match self { $(Dtype::$name => $bits,)* }
            }

            /// Bytes of the unit in which the codec and the cut table count: the element, a component of a
            /// complex element, or a byte of packed ones.
            pub const fn unit(self) -> usize {
                match self { $(Dtype::$name => $unit,)* }
            }

            /// How the codec orders units.
            pub const fn line(self) -> Line {
                match self { $(Dtype::$name => $line,)* }
            }

            fn parse(s: &str) -> Option<Dtype> {
                match s {
                    $($st | $torch => Some(Dtype::$name),)*
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    Bool, "BOOL", "bool", 8, 1, Line::Integer, "Boolean, one byte.";
    F4, "F4", "float4_e2m1fn_x2", 4, 1, Line::Integer, "MXFP4, two elements a byte.";
    F6E2M3, "F6_E2M3", "float6_e2m3fn", 6, 1, Line::Integer, "MXFP6 E2M3, four elements in three bytes.";
    F6E3M2, "F6_E3M2", "float6_e3m2fn", 6, 1, Line::Integer, "MXFP6 E3M2, four elements in three bytes.";
    U8, "U8", "uint8", 8, 1, Line::Integer, "Unsigned byte.";
    I8, "I8", "int8", 8, 1, Line::Integer, "Signed byte.";
    F8E5M2, "F8_E5M2", "float8_e5m2", 8, 1, Line::Float(2), "FP8 E5M2.";
    F8E4M3, "F8_E4M3", "float8_e4m3fn", 8, 1, Line::Float(3), "FP8 E4M3.";
    F8E8M0, "F8_E8M0", "float8_e8m0fnu", 8, 1, Line::Integer, "FP8 E8M0, a power-of-two scale.";
    F8E4M3Fnuz, "F8_E4M3FNUZ", "float8_e4m3fnuz", 8, 1, Line::Float(3), "FP8 E4M3 without negative zero.";
    F8E5M2Fnuz, "F8_E5M2FNUZ", "float8_e5m2fnuz", 8, 1, Line::Float(2), "FP8 E5M2 without negative zero.";
    I16, "I16", "int16", 16, 2, Line::Integer, "Signed 16-bit integer.";
    U16, "U16", "uint16", 16, 2, Line::Integer, "Unsigned 16-bit integer.";
    F16, "F16", "float16", 16, 2, Line::Float(10), "IEEE half.";
    BF16, "BF16", "bfloat16", 16, 2, Line::Float(7), "Brain float.";
    I32, "I32", "int32", 32, 4, Line::Integer, "Signed 32-bit integer.";
    U32, "U32", "uint32", 32, 4, Line::Integer, "Unsigned 32-bit integer.";
    F32, "F32", "float32", 32, 4, Line::Float(23), "IEEE single.";
    C64, "C64", "complex64", 64, 4, Line::Float(23), "Complex of two singles, each a unit of its own.";
    F64, "F64", "float64", 64, 8, Line::Float(52), "IEEE double.";
    I64, "I64", "int64", 64, 8, Line::Integer, "Signed 64-bit integer.";
    U64, "U64", "uint64", 64, 8, Line::Integer, "Unsigned 64-bit integer.";
}

impl Dtype {
    /// Bytes of `elements` elements, or `None` if they do not fill whole bytes or overflow.
    pub const fn bytes(self, elements: u64) -> Option<u64> {
        match elements.checked_mul(self.bits()) {
            Some(bits) if bits % 8 == 0 => Some(bits / 8),
            _ => None,
        }
    }
}

impl FromStr for Dtype {
    type Err = DtypeError;

    /// Accepts `bfloat16`, `torch.bfloat16` and `BF16`, and torch's short names (`half`, `float`, …).
    fn from_str(s: &str) -> Result<Dtype, DtypeError> {
        let bare = s.strip_prefix("torch.").unwrap_or(s);
        if let Some(dtype) = Dtype::parse(bare) {
            return Ok(dtype);
        }
        Ok(match bare {
            "half" => Dtype::F16,
            "float" => Dtype::F32,
            "double" => Dtype::F64,
            "short" => Dtype::I16,
            "int" => Dtype::I32,
            "long" => Dtype::I64,
            "cfloat" => Dtype::C64,
            _ => return Err(DtypeError::Unknown(excerpt(s))),
        })
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Dtype, D::Error> {
        let s = std::borrow::Cow::<'de, str>::deserialize(d)?;
        s.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_spelling_of_every_dtype_parses() {
        for &d in Dtype::ALL {
            for s in [d.name().to_owned(), format!("torch.{}", d.name()), d.safetensors_name().to_owned()] {
                assert_eq!(s.parse::<Dtype>(), Ok(d), "{s}");
            }
            assert_eq!(serde_json::to_string(&d).unwrap(), format!("\"{}\"", d.name()));
        }
    }

    #[test]
    fn unknown_spellings_are_named() {
        assert_eq!("bf17".parse::<Dtype>(), Err(DtypeError::Unknown("bf17".into())));
        assert!("torch.".parse::<Dtype>().is_err());
        assert!(matches!("x".repeat(10_000).parse::<Dtype>(), Err(DtypeError::Unknown(s)) if s.len() == 80));
    }

    #[test]
    fn the_list_is_that_of_safetensors() {
        for &d in Dtype::ALL {
            let json = format!("\"{}\"", d.safetensors_name());
            let theirs: safetensors::Dtype =
                serde_json::from_str(&json).unwrap_or_else(|e| panic!("{d}: {e}"));
            assert_eq!(theirs.bitsize() as u64, d.bits(), "{d}");
        }
        // Their list as they give it themselves, in the error about a name that they do not know.
        let error = serde_json::from_str::<safetensors::Dtype>("\"?\"").unwrap_err().to_string();
        let theirs: HashSet<&str> = error.split('`').skip(1).step_by(2).filter(|name| *name != "?").collect();
        let ours: HashSet<&str> = Dtype::ALL.iter().map(|d| d.safetensors_name()).collect();
        assert_eq!(ours, theirs, "{error}");
    }

    #[test]
    fn short_names_of_torch_stand_for_their_dtypes() {
        for (short, name) in [
            ("half", "float16"),
            ("float", "float32"),
            ("double", "float64"),
            ("short", "int16"),
            ("int", "int32"),
            ("long", "int64"),
            ("cfloat", "complex64"),
        ] {
            for spelling in [short.to_owned(), format!("torch.{short}")] {
                assert_eq!(spelling.parse::<Dtype>().unwrap().name(), name, "{spelling}");
            }
        }
    }

    #[test]
    fn packed_types_need_whole_bytes() {
        assert_eq!(Dtype::F4.bytes(2), Some(1));
        assert_eq!(Dtype::F4.bytes(3), None);
        assert_eq!(Dtype::F6E2M3.bytes(4), Some(3));
        assert_eq!(Dtype::F64.bytes(u64::MAX / 4), None);
    }
}
