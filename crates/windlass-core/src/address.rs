//! Addresses of peers: hosts, endpoints, store URLs, and the token that opens them.
//!
//! Owns: the checks that make such a text usable by a peer. Each type is a checked text: once it exists, it has
//! the form its documentation states. Called by requests, sync infos and tickets, which carry them. Must not:
//! resolve or connect.

use core::net::{IpAddr, Ipv6Addr};
use std::fmt;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Kind, excerpt};

/// An unusable address. The message shows the text except where it may hold a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("{0:?} is not a host: expected a DNS name, an IPv4 address or an IPv6 address")]
    Host(String),
    #[error(
        "{0:?} means every interface of this machine and cannot be reached from another; set advertise_host"
    )]
    Wildcard(String),
    #[error("{0:?} is not host:port: expected both, an IPv6 address in brackets, and nothing else")]
    HostPort(String),
    #[error(
        "{0:?} is not an endpoint: expected host:port, http://host:port or https://host:port, \
         an IPv6 address in brackets, and no path"
    )]
    Endpoint(String),
    #[error("{0:?} has no usable port: expected 1 to 65535; advertise the port that was bound")]
    Port(String),
    #[error(
        "{0:?} is not a store URL: expected scheme://bucket/prefix with one of the schemes {schemes}, \
         or file:///absolute/path",
        schemes = StoreUrl::SCHEMES.join(", ")
    )]
    StoreUrl(String),
    /// A store URL with a password, query or fragment, which would travel into logs.
    #[error(
        "the {0} store URL carries credentials, a query or a fragment; give credentials by the \
         environment or configuration of the store instead"
    )]
    StoreSecret(String),
    #[error("the token is not usable: expected 1 to {max} visible ASCII characters without spaces", max = Token::MAX_LEN)]
    Token,
}

impl AddressError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            AddressError::Host(_)
            | AddressError::Wildcard(_)
            | AddressError::HostPort(_)
            | AddressError::Endpoint(_)
            | AddressError::Port(_)
            | AddressError::StoreUrl(_)
            | AddressError::StoreSecret(_)
            | AddressError::Token => Kind::Invalid,
        }
    }

    /// The stable name of the failure, the same in every language.
    pub fn name(&self) -> &'static str {
        match self {
            AddressError::Host(_) => "bad_host",
            AddressError::Wildcard(_) => "wildcard_host",
            AddressError::HostPort(_) => "bad_host_port",
            AddressError::Endpoint(_) => "bad_endpoint",
            AddressError::Port(_) => "bad_port",
            AddressError::StoreUrl(_) => "bad_store_url",
            AddressError::StoreSecret(_) => "secret_in_store_url",
            AddressError::Token => "bad_token",
        }
    }
}

/// A host to advertise: a DNS name, an IPv4 or a bare IPv6 address, but no wildcard.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Host(String);

impl Host {
    /// Checks and wraps a host.
    pub fn new(text: &str) -> Result<Host, AddressError> {
        if let Ok(ip) = text.parse::<IpAddr>() {
            let text = text.to_owned();
            return if ip.is_unspecified() { Err(AddressError::Wildcard(text)) } else { Ok(Host(text)) };
        }
        let label = |l: &str| {
            (1..=63).contains(&l.len())
                && l.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        };
        // A last label of digits only is a mistyped IPv4 address, never a name.
        let digits = |l: &str| l.bytes().all(|b| b.is_ascii_digit());
        let name = text.strip_suffix('.').unwrap_or(text);
        let ok = name.len() <= 253
            && name.split('.').all(label)
            && name.rsplit('.').next().is_some_and(|last| !digits(last));
        if ok { Ok(Host(text.to_owned())) } else { Err(AddressError::Host(excerpt(text))) }
    }

    /// The host as text, an IPv6 address without brackets.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An address to connect to, `host:port`: the advertised one, never the one bound to. An IPv6 address stands
/// in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    host: Host,
    port: NonZeroU16,
}

impl HostPort {
    pub fn new(host: Host, port: NonZeroU16) -> HostPort {
        HostPort { host, port }
    }

    /// Reads the end of `text` from byte `start` on. Messages show the text, as `malformed` puts it.
    fn parse(text: &str, start: usize, malformed: fn(String) -> AddressError) -> Result<Self, AddressError> {
        // Credentials do not belong here; the part before the @ is kept out of the message.
        if let Some((_, rest)) = text.rsplit_once('@') {
            return Err(malformed(excerpt(rest)));
        }
        let malformed = || malformed(excerpt(text));
        let (host, port) = text[start..].rsplit_once(':').ok_or_else(malformed)?;
        let host = match host.strip_prefix('[').map(|h| h.strip_suffix(']')) {
            Some(Some(v6)) if v6.parse::<Ipv6Addr>().is_ok() => v6,
            None if !host.contains(':') => host,
            Some(_) | None => return Err(malformed()),
        };
        if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(malformed());
        }
        let port = port.parse().map_err(|_| AddressError::Port(excerpt(text)))?;
        Ok(HostPort { host: Host::new(host)?, port })
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    pub fn port(&self) -> u16 {
        self.port.get()
    }
}

impl FromStr for HostPort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<HostPort, AddressError> {
        HostPort::parse(text, 0, AddressError::HostPort)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostPort { host, port } = self;
        if host.0.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl Serialize for HostPort {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HostPort {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<HostPort, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Where an agent listens: `host:port`, optionally after `http://` or `https://`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    text: String,
    address: HostPort,
}

impl Endpoint {
    /// The endpoint as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Its host and port.
    pub fn address(&self) -> &HostPort {
        &self.address
    }

    /// Whether it is to be reached through TLS.
    pub fn is_https(&self) -> bool {
        self.text.starts_with("https://")
    }
}

impl FromStr for Endpoint {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Endpoint, AddressError> {
        let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://")).unwrap_or(text);
        let address = HostPort::parse(text, text.len() - rest.len(), AddressError::Endpoint)?;
        Ok(Endpoint { text: text.to_owned(), address })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Where versions are stored: `scheme://bucket/prefix` or `file:///absolute/path`, without credentials.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreUrl(String);

impl StoreUrl {
    /// The schemes that a store can have.
    pub const SCHEMES: [&str; 9] = ["file", "s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"];

    /// The URL as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for StoreUrl {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<StoreUrl, AddressError> {
        let (scheme, rest) = text
            .split_once("://")
            .filter(|(scheme, _)| Self::SCHEMES.contains(scheme))
            // The remainder may hold a secret that has not been checked for yet.
            .ok_or_else(|| {
                AddressError::StoreUrl(excerpt(text.split([':', '@', '?', '#']).next().unwrap_or("")))
            })?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // `container@account` is how Azure names a bucket; anything else before an @ is a credential.
        let credential = |(user, _): (&str, &str)| user.contains(':') || !scheme.starts_with("abfs");
        if authority.rsplit_once('@').is_some_and(credential) || text.contains(['?', '#']) {
            return Err(AddressError::StoreSecret(scheme.to_owned()));
        }
        let located =
            if scheme == "file" { authority.is_empty() && !path.is_empty() } else { !authority.is_empty() };
        let plain = text.len() <= 2048 && !text.contains(|c: char| c.is_control() || c.is_whitespace());
        if located && plain {
            Ok(StoreUrl(text.to_owned()))
        } else {
            Err(AddressError::StoreUrl(excerpt(text)))
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The secret that an agent requires. Not printed by `Debug`; there is no `Display`. Equality is for tests
/// and configuration: code that authenticates a peer compares in constant time.
#[derive(Clone)]
pub struct Token {
    secret: String,
    origin: Option<String>,
    file: Option<PathBuf>,
}

impl PartialEq for Token {
    fn eq(&self, other: &Token) -> bool {
        self.secret == other.secret
    }
}

impl Eq for Token {}

impl Token {
    /// The longest token.
    pub const MAX_LEN: usize = 1024;

    /// Checks and wraps a token: visible ASCII, so that a header can carry it.
    pub fn new(secret: impl Into<String>) -> Result<Token, AddressError> {
        let secret = secret.into();
        let ok = (1..=Self::MAX_LEN).contains(&secret.len()) && secret.bytes().all(|b| b.is_ascii_graphic());
        if ok { Ok(Token { secret, origin: None, file: None }) } else { Err(AddressError::Token) }
    }

    /// Notes where it was found, such as the path of its file, for the message about a wrong token.
    #[must_use]
    pub fn found_in(self, origin: impl Into<String>) -> Token {
        Token { origin: Some(origin.into()), ..self }
    }

    /// Notes the file it was read from, which may hold another token later.
    #[must_use]
    pub fn read_from(self, file: impl Into<PathBuf>) -> Token {
        let file = file.into();
        Token { origin: Some(format!("the file {}", file.display())), file: Some(file), ..self }
    }

    /// The file it was read from.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Where it was found, if that was noted.
    pub fn origin(&self) -> Option<&str> {
        self.origin.as_deref()
    }

    /// The secret itself, for the one place that sends it.
    pub fn expose(&self) -> &str {
        &self.secret
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_or_addresses_that_a_peer_can_reach() {
        for good in
            ["trainer-0", "trainer_0.ns.svc.cluster.local", "a.b.", "10.0.0.7", "fe80::1", "localhost"]
        {
            assert_eq!(Host::new(good).map(|h| h.as_str().to_owned()), Ok(good.to_owned()));
        }
        for bad in ["", ".", "a..b", "a b", "a/b", "[::1]", "10.0.0", "256.1.1.1", "ü.de", &"x".repeat(64)] {
            assert!(matches!(Host::new(bad), Err(AddressError::Host(_))), "{bad:?}");
        }
        for wildcard in ["0.0.0.0", "::"] {
            assert_eq!(Host::new(wildcard), Err(AddressError::Wildcard(wildcard.into())));
        }
    }

    #[test]
    fn endpoints_have_a_host_and_a_port_and_nothing_else() {
        for (good, host, port) in [
            ("node:1", "node", 1),
            ("http://10.0.0.7:65535", "10.0.0.7", 65535),
            ("https://[2001:db8::7]:443", "2001:db8::7", 443),
        ] {
            let endpoint: Endpoint = good.parse().unwrap();
            let address = endpoint.address();
            assert_eq!((endpoint.as_str(), address.host().as_str(), address.port()), (good, host, port));
        }
        for bad in [
            "",
            "node",
            "node:",
            ":80",
            "::1:80",
            "[::1:80",
            "[node]:80",
            "node:+80",
            "node:80/",
            "ftp://node:80",
            "http://user@node:80",
            "http://http://node:80",
            "[]:80",
        ] {
            let error = bad.parse::<Endpoint>().unwrap_err();
            assert!(matches!(error, AddressError::Endpoint(_) | AddressError::Host(_)), "{bad:?}: {error}");
        }
        for bad in ["node:0", "node:65536", "node:99999999999999999999"] {
            assert_eq!(bad.parse::<Endpoint>(), Err(AddressError::Port(bad.into())));
        }
        assert!(matches!("http://0.0.0.0:80".parse::<Endpoint>(), Err(AddressError::Wildcard(_))));
        assert!(matches!("[::]:80".parse::<Endpoint>(), Err(AddressError::Wildcard(_))));
    }

    #[test]
    fn host_ports_are_addresses_that_can_be_dialled() {
        for good in ["trainer-0:1", "10.0.0.4:7071", "a.b_c.d:65535", "[::1]:80", "[2001:db8::7]:7071"] {
            assert_eq!(good.parse::<HostPort>().unwrap().to_string(), good);
        }
        let v6: HostPort = "[2001:db8::7]:7071".parse().unwrap();
        assert_eq!((v6.host().as_str(), v6.port()), ("2001:db8::7", 7071));
        for bad in [
            "",
            ":1",
            "host",
            "host:",
            "host:0",
            "host:65536",
            "host:+1",
            "ho st:1",
            "a..b:1",
            "::1:80",
            "[::1]",
            "[zz]:1",
            "0.0.0.0:7071",
            "[::]:7071",
            "user@host:1",
            "host/x:1",
            "http://host:1",
            "hôte:1",
            &format!("{}:1", "x".repeat(64)),
            &format!("{}:1", "x.".repeat(127) + "xxxxx"),
        ] {
            assert!(bad.parse::<HostPort>().is_err(), "{bad:?}");
            let json = serde_json::to_string(bad).unwrap();
            assert!(serde_json::from_str::<HostPort>(&json).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn store_urls_name_a_place_and_hold_no_secret() {
        for good in
            ["s3://bucket", "gs://bucket/a/b", "file:///mnt/w", "abfss://c@acc.dfs.core.windows.net/x"]
        {
            assert_eq!(good.parse::<StoreUrl>().map(|u| u.to_string()), Ok(good.to_owned()));
        }
        for bad in [
            "",
            "bucket/x",
            "ftp://h/x",
            "s3://",
            "s3:///x",
            "file://x",
            "file://",
            "s3://b/a b",
            "s3://b/\n",
        ] {
            assert!(matches!(bad.parse::<StoreUrl>(), Err(AddressError::StoreUrl(_))), "{bad:?}");
        }
        for secret in [
            "https://u:hunter2@h/x",
            "https://hunter2@h/x",
            "abfss://u:hunter2@h/x",
            "s3://b/x?sig=hunter2",
            "gs://b/x#hunter2",
        ] {
            let error = secret.parse::<StoreUrl>().unwrap_err();
            assert!(matches!(error, AddressError::StoreSecret(_)), "{secret:?}");
            assert!(!error.to_string().contains("hunter2"));
        }
        for misspelt in ["S3://u:hunter2@h/x", "u:hunter2@h"] {
            let error = misspelt.parse::<StoreUrl>().unwrap_err();
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn credentials_in_an_endpoint_are_refused_and_not_shown() {
        for secret in ["http://u:hunter2@node:80", "hunter2@node:80", "http://hunter2@node"] {
            let error = secret.parse::<Endpoint>().unwrap_err();
            assert!(matches!(error, AddressError::Endpoint(_)), "{secret:?}");
            assert!(!error.to_string().contains("hunter2"));
            let error = secret.parse::<HostPort>().unwrap_err();
            assert!(!error.to_string().contains("hunter2"));
        }
    }

    #[test]
    fn tokens_are_not_printed() {
        let token = Token::new("hunter2").unwrap();
        assert_eq!((format!("{token:?}").as_str(), token.expose()), ("Token(…)", "hunter2"));
        for bad in ["", "a b", "a\n", "ü", &"x".repeat(Token::MAX_LEN + 1)] {
            assert_eq!(Token::new(bad), Err(AddressError::Token), "{bad:?}");
        }
    }
}
