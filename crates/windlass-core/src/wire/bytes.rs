//! Fixed-size byte strings of the protocol. Text form: lower-case hexadecimal.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::TicketError;

macro_rules! hex_bytes {
    ($name:ident, $len:literal, $what:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; $len]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl FromStr for $name {
            type Err = TicketError;
            fn from_str(s: &str) -> Result<$name, TicketError> {
                parse_hex(s).map($name).ok_or(TicketError::Hex { what: $what, digits: 2 * $len })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<$name, D::Error> {
                String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

hex_bytes!(TicketId, 16, "ticket id", "Names one transfer. Random, so that it cannot be guessed or reused.");
hex_bytes!(Nonce, 32, "nonce", "A random number used in one handshake only.");
hex_bytes!(Mac, 32, "proof", "An HMAC-SHA256. Never compare two of them with `==` in a handshake.");
hex_bytes!(
    BlockSum,
    16,
    "block sum",
    "A block's sum as it travels: two lanes of 64 bits, each little-endian (see [`crate::digest`])."
);

/// The secret of one ticket. Its text form exists in the ticket's JSON only; `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct TicketKey([u8; 32]);

impl TicketKey {
    /// Wraps 32 random bytes.
    pub const fn new(bytes: [u8; 32]) -> TicketKey {
        TicketKey(bytes)
    }

    pub(super) const fn secret(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for TicketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TicketKey(redacted)")
    }
}

impl Serialize for TicketKey {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&Mac(self.0))
    }
}

impl<'de> Deserialize<'de> for TicketKey {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<TicketKey, D::Error> {
        // The error names the length only: a mistyped key must not end up in a log.
        parse_hex(&String::deserialize(d)?)
            .map(TicketKey)
            .ok_or(TicketError::Hex { what: "ticket key", digits: 64 })
            .map_err(serde::de::Error::custom)
    }
}

fn write_hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
}

fn parse_hex<const N: usize>(s: &str) -> Option<[u8; N]> {
    let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    let (pairs, rest) = s.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut out = [0; N];
    for (o, [high, low]) in out.iter_mut().zip(pairs) {
        *o = digit(*high)? << 4 | digit(*low)?;
    }
    Some(out)
}
