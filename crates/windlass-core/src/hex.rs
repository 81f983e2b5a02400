//! Bytes as hexadecimal text: written in lower case, read in either.
//!
//! Used by every byte string that has a text form: hashes, digests, block sums, ticket ids, nonces, keys.

use std::fmt;

/// Shows bytes as two digits each.
pub(crate) struct Hex<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// Reads exactly `N` bytes; `None` if the text is anything else.
pub(crate) fn parse<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut out = [0; N];
    fill(&mut out, text).then_some(out)
}

fn fill(out: &mut [u8], text: &str) -> bool {
    let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    pairs.len() == out.len()
        && rest.is_empty()
        && out.iter_mut().zip(pairs).all(|(o, &[high, low])| {
            let byte = digit(high).zip(digit(low)).map(|(high, low)| high << 4 | low);
            byte.inspect(|&b| *o = b).is_some()
        })
}

/// The bytes of a golden vector.
#[cfg(test)]
pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let mut out = vec![0; text.len() / 2];
    assert!(fill(&mut out, text), "not hexadecimal: {text}");
    out
}

/// Defines a string of `$len` bytes whose text and JSON form is hexadecimal. `$malformed` makes the error
/// from a text that is something else.
macro_rules! hex_bytes {
    ($name:ident, $len:literal, $error:ty, $malformed:expr, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; $len]);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::hex::Hex(&self.0).fmt(f)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl std::str::FromStr for $name {
            type Err = $error;
            fn from_str(text: &str) -> Result<$name, $error> {
                $crate::hex::parse(text).map($name).ok_or_else(|| $malformed(text))
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<$name, D::Error> {
                String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use hex_bytes;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_text_is_read_whole_or_not_at_all() {
        assert_eq!(parse("00fF1a"), Some([0, 255, 26]));
        assert_eq!(Hex(&[0, 255, 26]).to_string(), "00ff1a");
        for bad in ["", "00ff1", "00ff1a0", "00ff1a00", "00ff1g", "+0ff1a", "é0f1", "00 f1a"] {
            assert_eq!(parse::<3>(bad), None, "{bad:?}");
        }
    }
}
