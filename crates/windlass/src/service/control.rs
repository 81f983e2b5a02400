//! The receiver's end of the control connection, over HTTP.
//!
//! Owns: [`HttpControl`], which says what [`windlass_data::receiver::Control`] and
//! [`windlass_data::serve::Peer`] want said. One endpoint, one token, no redirects, no proxies: a receiver talks to
//! what it was configured for and to nothing else. A token that is refused is read again from its file. Where it was configured for a region on this host, it reads
//! again where the agent is whenever it is lost: a restarted one listens elsewhere.
//!
//! Blocking; every call ends with its [`Stop`] or after [`TIMEOUT`] (see [`crate::service::client`]).

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use windlass_core::address::{Endpoint, Token};
use windlass_core::digest::BlockSum;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::TicketId;
use windlass_core::wire::control::{
    Age, Capabilities, PartInfo, PartRequest, Registered, Registration, Relays, SharedTicket, TransferAnswer,
    TransferDone, TransferRequest, VersionInfo,
};
use windlass_data::receiver::{Control, ControlError};
use windlass_data::region::is_region;
use windlass_data::serve::Peer;
use windlass_data::stop::Stop;
use windlass_data::tls::{Privacy, Trust};

use crate::error::{self, Error};
use crate::service::agent_address::AgentAddress;
use crate::service::client::{Client, Request, kind_of};
use crate::service::token::{self, Held};

/// How long a request may take, long-polls aside.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// How long one long-poll waits at the other end.
const POLL: Duration = Duration::from_secs(20);
/// How long one of those waits that looks for relays.
const SCOUT: Duration = Duration::from_secs(1);
/// The route for versions.
const VERSION: &str = "/get_version";
/// The longest answer: the manifest of a very large model.
const MAX_ANSWER: u64 = 1 << 30;

/// A control connection to one agent.
#[derive(Debug)]
pub struct HttpControl {
    source: Source,
    client: Client,
    timeout: Duration,
    /// Whether the last request went through TLS.
    https: AtomicBool,
}

/// Where the agent is, and what it wants to hear.
type Place = (Endpoint, Token);

#[derive(Debug)]
enum Source {
    Endpoint(Endpoint, Held),
    Region {
        dir: PathBuf,
        /// For an agent whose token is in no file.
        token: Option<Token>,
        /// As far as is known.
        place: Mutex<Option<Place>>,
    },
}

impl HttpControl {
    /// Talks to the agent at `endpoint`, such as `http://10.0.0.5:7777`, or `https://…` if it has a certificate.
    pub fn new(endpoint: &str, token: Token) -> Result<HttpControl, Error> {
        let scheme = if endpoint.contains("://") { "" } else { "http://" };
        let endpoint = format!("{scheme}{endpoint}").parse().map_err(|e| Error::Usage(format!("{e}")))?;
        Ok(HttpControl {
            source: Source::Endpoint(endpoint, Held::new(token)),
            client: Client::default(),
            timeout: TIMEOUT,
            https: AtomicBool::new(false),
        })
    }

    /// Talks to whatever agent serves the region in `dir` on this host; one that is not there yet is a lost one.
    /// `token` is for an agent that keeps its token in no file.
    pub fn of_region(dir: &Path, token: Option<Token>) -> HttpControl {
        let source = Source::Region { dir: dir.to_owned(), token, place: Mutex::new(None) };
        HttpControl { source, client: Client::default(), timeout: TIMEOUT, https: AtomicBool::new(false) }
    }

    /// Trusts `trust` if the agent has a certificate. The default is the system's authorities.
    #[must_use]
    pub fn with_trust(self, trust: Option<Trust>) -> HttpControl {
        HttpControl { client: Client::new(trust), ..self }
    }

    /// Sets the timeout of every request, at most [`TIMEOUT`].
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> HttpControl {
        HttpControl { timeout: timeout.min(TIMEOUT), ..self }
    }

    /// How long a long-poll may wait at the other end: well within what the request itself is given.
    fn poll(&self, stop: &Stop) -> Duration {
        let given = stop.left().map_or(self.timeout, |left| left.min(self.timeout));
        POLL.min(given / 4 * 3)
    }

    fn get_sums(&self, version: Version, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        let what = "get the sums";
        let bytes = self.call(what, &format!("/get_sums?version={version}"), None::<&()>, stop)?;
        let (sums, rest) = bytes.as_chunks::<16>();
        if !rest.is_empty() {
            return Err(self.answer(what, format!("{} bytes are no whole number of sums", bytes.len())));
        }
        Ok(sums.iter().map(|b| BlockSum::from_bytes(*b)).collect())
    }

    fn place(&self, what: &'static str) -> Result<Place, ControlError> {
        match &self.source {
            Source::Endpoint(endpoint, token) => Ok((endpoint.clone(), token.get())),
            Source::Region { dir, token, place } => {
                let mut place = place.lock();
                if let Some(place) = &*place {
                    return Ok(place.clone());
                }
                let found = look(dir, token.as_ref()).map_err(|e| {
                    let kind = match e.kind() {
                        Kind::NotFound => Kind::PeerLost,
                        kind => kind,
                    };
                    let why = match kind {
                        Kind::PeerLost => absent(dir),
                        _ => format!("no agent is known to serve it: {}", error::chain(&e)),
                    };
                    ControlError::Lost { peer: dir.display().to_string(), what, why, kind }
                })?;
                Ok(place.insert(found).clone())
            }
        }
    }

    /// What the agent can be asked for.
    pub fn capabilities(&self, stop: &Stop) -> Result<Capabilities, ControlError> {
        self.get("get the capabilities", "/get_capabilities", stop)
    }

    /// The agent does not answer: it may be elsewhere by the next request.
    fn forget(&self) {
        match &self.source {
            Source::Endpoint(..) => {}
            Source::Region { place, .. } => *place.lock() = None,
        }
    }

    /// The agent did not take `refused`. Whether another token is known by now.
    fn renew(&self, refused: &Token) -> bool {
        match &self.source {
            Source::Endpoint(_, token) => token.renew(refused),
            Source::Region { .. } => {
                self.forget();
                self.place("find its token").is_ok_and(|(_, token)| token != *refused)
            }
        }
    }

    fn name(&self) -> String {
        match &self.source {
            Source::Endpoint(endpoint, _) => endpoint.to_string(),
            Source::Region { dir, place, .. } => {
                let place = place.lock();
                place.as_ref().map_or_else(|| dir.display().to_string(), |(endpoint, _)| endpoint.to_string())
            }
        }
    }

    fn answer(&self, what: &'static str, why: impl ToString) -> ControlError {
        ControlError::Answer { peer: self.name(), what, why: why.to_string() }
    }

    /// One request. Without a body it is a GET.
    fn call(
        &self,
        what: &'static str,
        path: &str,
        body: Option<&impl Serialize>,
        stop: &Stop,
    ) -> Result<Vec<u8>, ControlError> {
        let lost = |peer: String, kind: Kind, why: String| ControlError::Lost { peer, what, why, kind };
        stop.check().map_err(|s| lost(self.name(), s.kind(), s.to_string()))?;
        let (mut endpoint, mut token) = self.place(what)?;
        let mut renewed = false;
        let (status, bytes) = loop {
            let (status, bytes) = self.send((&endpoint, &token), what, path, body, stop)?;
            if status != 401 || renewed || !self.renew(&token) {
                break (status, bytes);
            }
            renewed = true;
            (endpoint, token) = self.place(what)?;
        };
        if (200..300).contains(&status) {
            return Ok(bytes);
        }
        let (mut kind, mut message) = refusal(status, &bytes);
        if status == 401 {
            message = token::refused(&message, &token, token::OF_AGENTS);
        } else if kind == Kind::NotFound && path.starts_with(VERSION) {
            // Every agent has this route.
            kind = Kind::Unsupported;
            message = format!("this is not an agent ({message}): a controller is given with --controller");
        }
        Err(ControlError::Refused { peer: endpoint.to_string(), what, kind, message })
    }

    /// Sends one request; answers the status and the body.
    fn send(
        &self,
        (endpoint, token): (&Endpoint, &Token),
        what: &'static str,
        path: &str,
        body: Option<&impl Serialize>,
        stop: &Stop,
    ) -> Result<(u16, Vec<u8>), ControlError> {
        self.https.store(endpoint.is_https(), Ordering::Relaxed);
        let url = format!("{}{path}", endpoint.as_str().trim_end_matches('/'));
        let bearer = Some(token.expose());
        let request = Request { url: &url, bearer, body, timeout: self.timeout, most: MAX_ANSWER };
        let (status, bytes) = self.client.send(request, stop).map_err(|(kind, why)| {
            self.forget();
            ControlError::Lost { peer: endpoint.to_string(), what, why, kind }
        })?;
        if bytes.len() as u64 > MAX_ANSWER {
            return Err(self.answer(what, "it is longer than a gibibyte"));
        }
        Ok((status, bytes))
    }

    fn get<T: DeserializeOwned>(
        &self,
        what: &'static str,
        path: &str,
        stop: &Stop,
    ) -> Result<T, ControlError> {
        let bytes = self.call(what, path, None::<&()>, stop)?;
        serde_json::from_slice(&bytes).map_err(|e| self.answer(what, e))
    }

    fn post<T: DeserializeOwned>(
        &self,
        what: &'static str,
        path: &str,
        body: &impl Serialize,
        stop: &Stop,
    ) -> Result<T, ControlError> {
        let bytes = self.call(what, path, Some(body), stop)?;
        serde_json::from_slice(&bytes).map_err(|e| self.answer(what, e))
    }
}

/// What is missing where an agent's region should be.
fn absent(dir: &Path) -> String {
    if is_region(dir) {
        return "its trainer has made the region, and no agent serves it yet".into();
    }
    let inside = |dir: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut found: Vec<String> =
            entries.map(|e| e.path()).filter(|p| is_region(p)).map(|p| p.display().to_string()).collect();
        found.sort();
        found
    };
    let (below, beside) = (inside(dir), dir.parent().map(inside).unwrap_or_default());
    let here = match (below.is_empty(), beside.is_empty()) {
        (false, _) => format!("it is not a region itself; those in it: {}", below.join(", ")),
        (true, false) => format!("regions here: {}", beside.join(", ")),
        (true, true) => "there is no other region here".into(),
    };
    format!("nothing has been published in it yet; {here}")
}

/// Where the agent of a region is and what it wants to hear.
fn look(dir: &Path, token: Option<&Token>) -> Result<Place, Error> {
    let here = AgentAddress::read(dir)?;
    let its = here.token_file.as_deref().map(token::read).transpose()?;
    let token = its.or_else(|| token.cloned()).ok_or_else(|| {
        let name = token::VARIABLE;
        Error::Usage(format!("its token is in no file: give it with --token-file or in {name}"))
    })?;
    let endpoint = here.endpoint.parse().map_err(|e| Error::Usage(format!("{e}")))?;
    Ok((endpoint, token))
}

/// What an error response says; its status where it says nothing.
pub(crate) fn refusal(status: u16, body: &[u8]) -> (Kind, String) {
    #[derive(serde::Deserialize)]
    struct Outer {
        error: Inner,
    }
    #[derive(serde::Deserialize)]
    struct Inner {
        kind: Kind,
        message: String,
    }
    match serde_json::from_slice::<Outer>(body) {
        Ok(Outer { error: Inner { kind, message } }) => (kind, message),
        // A service of ours says what is wrong in this form, also where it has no such route.
        Err(_) if matches!(status, 404 | 405 | 501) => {
            (Kind::Unsupported, format!("what listens there is not a Windlass service (status {status})"))
        }
        Err(_) => (kind_of(status), format!("status {status}")),
    }
}

impl Control for HttpControl {
    fn peer(&self) -> String {
        self.name()
    }

    fn privacy(&self) -> Privacy {
        // The request whose answer was the ticket.
        let required = self.https.load(Ordering::Relaxed);
        Privacy { trust: required.then(|| self.client.trust().ok()).flatten(), required }
    }

    fn local_address(&self) -> Option<IpAddr> {
        let (endpoint, _) = self.place("find the way to it").ok()?;
        let (host, port) = (endpoint.address().host().as_str(), endpoint.address().port());
        // Nothing is sent: only the route is looked up.
        let look_up = |to: SocketAddr| {
            let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            let socket = UdpSocket::bind((any, 0)).ok()?;
            socket.connect(to).ok()?;
            Some(socket.local_addr().ok()?.ip())
        };
        (host, port).to_socket_addrs().ok()?.find_map(look_up)
    }

    fn version(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        let what = "get the version";
        match newer_than {
            None => self.get(what, VERSION, stop),
            Some((incarnation, version)) => {
                let wait = self.poll(stop).as_millis();
                let path =
                    format!("{VERSION}?newer_than={version}&incarnation={}&timeout_ms={wait}", incarnation.0);
                self.get(what, &path, stop)
            }
        }
    }

    fn age(&self, stop: &Stop) -> Result<Option<Age>, ControlError> {
        Ok(self.capabilities(stop)?.age)
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        let what = "get the manifest";
        let bytes = self.call(what, "/get_manifest", None::<&()>, stop)?;
        Manifest::from_json(&bytes).map_err(|e| self.answer(what, e))
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        self.get_sums(identity.version, stop)
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError> {
        self.post("register", "/register_receiver", registration, stop)
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        self.post("request a transfer", "/request_transfer", request, stop)
    }

    fn relays(&self, ticket: TicketId, known: u32, stop: &Stop) -> Result<Relays, ControlError> {
        // What is little news is told at the end of the wait.
        let wait = self.poll(stop).min(SCOUT).as_millis();
        self.get("find relays", &format!("/get_relays?ticket={ticket}&known={known}&timeout_ms={wait}"), stop)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        self.call("report a transfer", "/transfer_done", Some(done), stop).map(drop)
    }
}

impl Peer for HttpControl {
    fn part(&self, wanted: PartRequest, stop: &Stop) -> Result<PartInfo, ControlError> {
        let PartRequest { version, base, stripe_bytes, keeps } = wanted;
        let wait = self.poll(stop).as_millis();
        let mut path = format!("/get_part?version={version}&timeout_ms={wait}");
        if let Some(base) = base {
            let _ = write!(path, "&base={base}");
        }
        if let Some(bytes) = stripe_bytes {
            let _ = write!(path, "&stripe_bytes={bytes}");
        }
        match keeps {
            Some(keeps) => self.post("get a part", &path, &keeps, stop),
            None => self.get("get a part", &path, stop),
        }
    }

    fn part_sums(&self, version: Version, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        self.get_sums(version, stop)
    }

    fn share(&self, ticket: &SharedTicket, stop: &Stop) -> Result<(), ControlError> {
        self.call("share a ticket", "/share_ticket", Some(ticket), stop).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_by_something_in_between_keeps_its_sort() {
        let said = br#"{"ok":false,"error":{"kind":"stale","message":"m","advice":"a"}}"#;
        assert_eq!(refusal(503, said), (Kind::Stale, "m".into()));
        let kind = |status| refusal(status, b"<html>").0;
        assert_eq!(
            [401, 403, 400, 418, 404].map(kind),
            [Kind::Denied, Kind::Denied, Kind::Invalid, Kind::Invalid, Kind::Unsupported]
        );
        // A receiver waits these out.
        let passing = [Kind::PeerLost, Kind::PeerLost, Kind::Exhausted, Kind::Exhausted, Kind::Timeout];
        assert_eq!([502, 520, 503, 429, 504].map(kind), passing);
    }
}
