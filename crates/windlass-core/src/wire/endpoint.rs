//! Where a source can be reached.

use core::net::{Ipv4Addr, Ipv6Addr};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::ticket::TicketError;

/// An address to connect to, `HOST:PORT`: the advertised one, never the one bound to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    host: String,
    port: u16,
}

impl Endpoint {
    /// The host: a name, an IPv4 address, or an IPv6 address without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for Endpoint {
    type Err = TicketError;
    fn from_str(text: &str) -> Result<Endpoint, TicketError> {
        let bad = |why| TicketError::Endpoint { text: text.chars().take(80).collect(), why };
        let (host, port) = text.rsplit_once(':').ok_or_else(|| bad("there is no port"))?;
        if !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad("the port is not a number"));
        }
        let port = port.parse().ok().filter(|p| *p != 0).ok_or_else(|| bad("the port is not 1 to 65535"))?;
        let host = if let Some(inner) = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            let address: Ipv6Addr = inner.parse().map_err(|_| bad("not an IPv6 address in brackets"))?;
            if address.is_unspecified() {
                return Err(bad("it is the wildcard address"));
            }
            inner
        } else {
            let label = |l: &str| {
                (1..=63).contains(&l.len())
                    && l.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
            };
            if host.len() > 253 || !host.split('.').all(label) {
                return Err(bad("not a host name"));
            }
            if host.parse::<Ipv4Addr>().is_ok_and(|a| a.is_unspecified()) {
                return Err(bad("it is the wildcard address"));
            }
            host
        };
        Ok(Endpoint { host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Serialize for Endpoint {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Endpoint {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Endpoint, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}
