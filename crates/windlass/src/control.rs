//! The receiver's end of the control connection, over HTTP.
//!
//! Owns: [`HttpControl`], which says what [`windlass_data::receiver::Control`] and
//! [`windlass_data::serve::Peer`] want said. One endpoint, one token, no redirects, no proxies: a receiver talks to
//! what it was configured for and to nothing else. Blocking; every call ends with its [`Stop`] or after
//! [`PATIENCE`].

use std::io::Read as _;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use windlass_core::address::{Endpoint, Token};
use windlass_core::digest::BlockSum;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::control::{
    PartInfo, Registered, Registration, SharedTicket, TransferAnswer, TransferDone, TransferRequest,
    VersionInfo,
};
use windlass_data::receiver::{Control, ControlError};
use windlass_data::serve::Peer;
use windlass_data::stop::Stop;

use crate::error::Error;

/// How long a request may take, long-polls aside.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How long one long-poll waits at the other end.
const POLL: Duration = Duration::from_secs(20);
/// The longest answer: the manifest of a very large model.
const MAX_ANSWER: u64 = 1 << 30;

/// A control connection to one agent.
#[derive(Debug)]
pub struct HttpControl {
    endpoint: Endpoint,
    token: Token,
    client: ureq::Agent,
}

impl HttpControl {
    /// Talks to the agent at `endpoint`, such as `http://10.0.0.5:7777`.
    pub fn new(endpoint: &str, token: Token) -> Result<HttpControl, Error> {
        let endpoint = endpoint.parse().map_err(|e| Error::Usage(format!("{e}")))?;
        let client = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .timeout_connect(Some(Duration::from_secs(5)))
            .user_agent(concat!("windlass/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        Ok(HttpControl { endpoint, token, client })
    }

    fn lost(&self, what: &'static str, error: ureq::Error) -> ControlError {
        let kind = match &error {
            ureq::Error::Timeout(_) => Kind::Timeout,
            _ => Kind::PeerLost,
        };
        let peer = self.endpoint.to_string();
        ControlError::Lost { peer, what, why: error.to_string(), kind }
    }

    fn answer(&self, what: &'static str, why: impl ToString) -> ControlError {
        ControlError::Answer { peer: self.endpoint.to_string(), what, why: why.to_string() }
    }

    /// One request. Without a body it is a GET.
    fn call(
        &self,
        what: &'static str,
        path: &str,
        body: Option<&impl Serialize>,
        stop: &Stop,
    ) -> Result<Vec<u8>, ControlError> {
        let peer = || self.endpoint.to_string();
        if let Err(stopped) = stop.check() {
            let (why, kind) = (stopped.to_string(), stopped.kind());
            return Err(ControlError::Lost { peer: peer(), what, why, kind });
        }
        let patience = stop.left().map_or(PATIENCE, |left| left.min(PATIENCE)).max(Duration::from_millis(1));
        let url = format!("{}{path}", self.endpoint.as_str().trim_end_matches('/'));
        let bearer = format!("Bearer {}", self.token.expose());
        let sent = match body {
            None => {
                let request = self.client.get(&url).header("authorization", &bearer);
                request.config().timeout_global(Some(patience)).build().call()
            }
            Some(body) => {
                let request = self.client.post(&url).header("authorization", &bearer);
                request.config().timeout_global(Some(patience)).build().send_json(body)
            }
        };
        let mut response = sent.map_err(|e| self.lost(what, e))?;
        let mut bytes = Vec::new();
        let read = response.body_mut().as_reader().take(MAX_ANSWER + 1).read_to_end(&mut bytes);
        if let Err(e) = read {
            let kind = if e.kind() == std::io::ErrorKind::TimedOut { Kind::Timeout } else { Kind::PeerLost };
            return Err(ControlError::Lost { peer: peer(), what, why: e.to_string(), kind });
        }
        if bytes.len() as u64 > MAX_ANSWER {
            return Err(self.answer(what, "it is longer than a gibibyte"));
        }
        if response.status().is_success() {
            return Ok(bytes);
        }
        let status = response.status().as_u16();
        let (kind, message) = refusal(status, &bytes);
        Err(ControlError::Refused { peer: peer(), what, kind, message })
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

/// What an error response says; its status where it says nothing.
fn refusal(status: u16, body: &[u8]) -> (Kind, String) {
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
        Err(_) => {
            let kind = Kind::ALL.into_iter().find(|k| k.row().http == status).unwrap_or(Kind::Invalid);
            (kind, format!("status {status}"))
        }
    }
}

impl Control for HttpControl {
    fn peer(&self) -> String {
        self.endpoint.to_string()
    }

    fn version(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        let what = "get the version";
        match newer_than {
            None => self.get(what, "/get_version", stop),
            Some((incarnation, version)) => {
                let wait = stop.left().map_or(POLL, |left| left.min(POLL)).as_millis();
                let path = format!(
                    "/get_version?newer_than={version}&incarnation={}&timeout_ms={wait}",
                    incarnation.0
                );
                self.get(what, &path, stop)
            }
        }
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        let what = "get the manifest";
        let bytes = self.call(what, "/get_manifest", None::<&()>, stop)?;
        Manifest::from_json(&bytes).map_err(|e| self.answer(what, e))
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        let what = "get the sums";
        let bytes = self.call(what, &format!("/get_sums?version={}", identity.version), None::<&()>, stop)?;
        let (sums, rest) = bytes.as_chunks::<16>();
        if !rest.is_empty() {
            return Err(self.answer(what, format!("{} bytes are no whole number of sums", bytes.len())));
        }
        Ok(sums.iter().map(|b| BlockSum::from_bytes(*b)).collect())
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<String, ControlError> {
        let registered: Registered = self.post("register", "/register_receiver", registration, stop)?;
        Ok(registered.instance_id)
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        self.post("request a transfer", "/request_transfer", request, stop)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        self.call("report a transfer", "/transfer_done", Some(done), stop).map(drop)
    }
}

impl Peer for HttpControl {
    fn part(&self, version: Version, base: Option<Version>, stop: &Stop) -> Result<PartInfo, ControlError> {
        let wait = stop.left().map_or(POLL, |left| left.min(POLL)).as_millis();
        let mut path = format!("/get_part?version={version}&timeout_ms={wait}");
        if let Some(base) = base {
            path.push_str(&format!("&base={base}"));
        }
        self.get("get a part", &path, stop)
    }

    fn share(&self, ticket: &SharedTicket, stop: &Stop) -> Result<(), ControlError> {
        self.call("share a ticket", "/share_ticket", Some(ticket), stop).map(drop)
    }
}
