//! Fixed-size byte strings of the protocol. Text form: lower-case hexadecimal.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::TicketError;
use crate::hex::{self, hex_bytes};

macro_rules! wire_bytes {
    ($name:ident, $len:literal, $what:literal, $doc:literal) => {
        hex_bytes!(
            $name,
            $len,
            TicketError,
            // The text is left out: it may be a secret in the wrong place.
            |_| TicketError::Hex { what: $what, digits: 2 * $len },
            $doc
        );
    };
}

wire_bytes!(TicketId, 16, "ticket id", "Names one transfer. Random, so that it cannot be guessed or reused.");
wire_bytes!(Nonce, 32, "nonce", "A random number used in one handshake only.");
wire_bytes!(Mac, 32, "proof", "An HMAC-SHA256. Never compare two of them with `==` in a handshake.");

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
        s.collect_str(&hex::Hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for TicketKey {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<TicketKey, D::Error> {
        // The error names the length only: a mistyped key must not end up in a log.
        hex::parse(&String::deserialize(d)?)
            .map(TicketKey)
            .ok_or(TicketError::Hex { what: "ticket key", digits: 64 })
            .map_err(serde::de::Error::custom)
    }
}
