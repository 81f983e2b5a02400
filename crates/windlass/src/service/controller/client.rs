//! The other end of the controller's endpoints, for receivers, `windlass top` and tests.
//!
//! Owns: [`ControllerClient`] and what can go wrong with a request. Blocking; every call ends with its [`Stop`], or after
//! the time it asks to wait and [`TIMEOUT`] (see [`crate::service::client`]). A token that is refused is read again from its file. Must not: retry; callers decide
//! (see [`super::wire`] on the statuses).

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use windlass_core::address::{Endpoint, Token};
use windlass_core::barrier::Peer;
use windlass_core::error::Kind;
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;

use super::status::Status;
use super::wire::{
    Done, EvalDone, EvalTask, Gate, Join, Joined, Notified, NotifyVersion, Orders, Poll, Report, Service,
    TakeEval, TrainerLeft,
};
use crate::error::{CERTIFICATES, Error};
use crate::service::client::{Client, Request};
use crate::service::control::refusal;
use crate::service::token::{self, Held};

/// How long a request may take, on top of what it asks to wait.
pub const TIMEOUT: Duration = Duration::from_secs(15);
/// The longest answer: the status of thousands of receivers.
const MAX_ANSWER: u64 = 256 << 20;

/// A request that did not get what it asked for.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    #[error("cannot {what} at the controller {peer}: {why}")]
    Lost {
        peer: String,
        /// What was asked, as a verb with its object.
        what: &'static str,
        why: String,
        kind: Kind,
    },
    #[error("the controller {peer} refused to {what} (status {status}): {message}")]
    Refused { peer: String, what: &'static str, status: u16, kind: Kind, message: String },
    #[error("the controller {peer} answered the request to {what} with something else: {why}")]
    Answer {
        peer: String,
        what: &'static str,
        /// What is wrong with the answer.
        why: String,
    },
}

impl ControllerError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ControllerError::Lost { kind, .. } | ControllerError::Refused { kind, .. } => *kind,
            ControllerError::Answer { .. } => Kind::PeerLost,
        }
    }

    /// The status, if there was an answer.
    pub fn status(&self) -> Option<u16> {
        match self {
            ControllerError::Refused { status, .. } => Some(*status),
            ControllerError::Lost { .. } | ControllerError::Answer { .. } => None,
        }
    }
}

/// Talks to one controller.
#[derive(Clone, Debug)]
pub struct ControllerClient {
    endpoint: Endpoint,
    token: Held,
    client: Client,
}

impl ControllerClient {
    /// Talks to the controller at `url`, such as `http://10.0.0.5:7000`.
    pub fn new(url: &str, token: Token) -> Result<ControllerClient, Error> {
        let scheme = if url.contains("://") { "" } else { "http://" };
        let url = format!("{scheme}{}", url.trim_end_matches('/'));
        let endpoint = url.parse().map_err(|e| Error::Usage(format!("{e}")))?;
        Ok(ControllerClient { endpoint, token: Held::new(token), client: Client::default() })
    }

    /// Trusts `trust` if the controller has a certificate. The default is the system's authorities.
    #[must_use]
    pub fn with_trust(self, trust: Option<Trust>) -> ControllerClient {
        ControllerClient { client: Client::new(trust), ..self }
    }

    /// The controller's address.
    pub fn peer(&self) -> &str {
        self.endpoint.as_str()
    }

    /// A receiver joins.
    pub fn join(&self, join: &Join, stop: &Stop) -> Result<Joined, ControllerError> {
        self.post("join", "/register_receiver", join, 0, stop)
    }

    /// A receiver polls for orders.
    pub fn poll(&self, poll: &Poll, stop: &Stop) -> Result<Orders, ControllerError> {
        self.post("ask for orders", "/poll_orders", poll, poll.timeout_ms, stop)
    }

    /// A receiver reports the outcome of an order.
    pub fn report(&self, report: &Report, stop: &Stop) -> Result<Done, ControllerError> {
        self.post("report", "/report", report, 0, stop)
    }

    /// A receiver leaves.
    pub fn leave(&self, peer: &Peer, stop: &Stop) -> Result<Done, ControllerError> {
        self.post("leave", "/leave", peer, 0, stop)
    }

    /// A trainer has published a version. A synchronous one should say how long it may take: the time for the load, and as
    /// much again for the eval, is what is waited for.
    pub fn notify(&self, notify: &NotifyVersion, stop: &Stop) -> Result<Notified, ControllerError> {
        let sync = notify.sync || notify.eval.is_some();
        let load = notify.timeout_ms.unwrap_or(3_600_000);
        let wait = if sync { load.saturating_add(notify.eval.as_ref().map_or(0, |_| 3_600_000)) } else { 0 };
        self.post("notify a version", "/notify_version", notify, wait, stop)
    }

    /// Asks what is served, or waits until it is what is asked for.
    pub fn gate(&self, gate: &Gate, stop: &Stop) -> Result<Service, ControllerError> {
        let fields = [
            ("set", gate.set.as_ref().map(ToString::to_string)),
            ("at_least", gate.at_least.map(|v| v.to_string())),
            ("model_id", gate.model_id.as_ref().map(ToString::to_string)),
            ("incarnation", gate.incarnation.map(|i| i.0.to_string())),
            ("timeout_ms", gate.timeout_ms.map(|t| t.to_string())),
            ("who", gate.who.as_deref().map(plain)),
        ];
        // Names have no characters that a query would have to escape.
        let fields = fields.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)));
        let path = format!("/service_version?{}", fields.collect::<Vec<_>>().join("&"));
        let wait = gate.at_least.map_or(0, |_| gate.timeout_ms.unwrap_or(30_000));
        self.get("wait at the gate", &path, wait, stop)
    }

    /// A trainer has ended.
    pub fn trainer_left(&self, left: &TrainerLeft, stop: &Stop) -> Result<Done, ControllerError> {
        self.post("say goodbye", "/trainer_left", left, 0, stop)
    }

    /// Waits for an eval to run.
    pub fn take_eval(&self, take: &TakeEval, stop: &Stop) -> Result<EvalTask, ControllerError> {
        self.post("take an eval", "/take_eval", take, take.timeout_ms, stop)
    }

    /// Reports the outcome of an eval.
    pub fn eval_done(&self, done: &EvalDone, stop: &Stop) -> Result<Done, ControllerError> {
        self.post("report an eval", "/eval_done", done, 0, stop)
    }

    /// The whole state.
    pub fn status(&self, stop: &Stop) -> Result<Status, ControllerError> {
        self.get("get the status", "/status", 0, stop)
    }

    fn get<T: DeserializeOwned>(
        &self,
        what: &'static str,
        path: &str,
        wait_ms: u64,
        stop: &Stop,
    ) -> Result<T, ControllerError> {
        self.call(what, path, None::<&()>, wait_ms, stop)
    }

    fn post<T: DeserializeOwned>(
        &self,
        what: &'static str,
        path: &str,
        body: &impl Serialize,
        wait_ms: u64,
        stop: &Stop,
    ) -> Result<T, ControllerError> {
        self.call(what, path, Some(body), wait_ms, stop)
    }

    /// One request, with what it asks to wait for.
    fn call<T: DeserializeOwned>(
        &self,
        what: &'static str,
        path: &str,
        body: Option<&impl Serialize>,
        wait_ms: u64,
        stop: &Stop,
    ) -> Result<T, ControllerError> {
        let peer = || self.endpoint.to_string();
        let url = format!("{}{path}", self.endpoint.as_str());
        let timeout = TIMEOUT.saturating_add(Duration::from_millis(wait_ms));
        let lost = |(kind, why)| ControllerError::Lost { peer: peer(), what, why, kind };
        let send = |token: &Token| {
            let bearer = Some(token.expose());
            let request = Request { url: &url, bearer, body, timeout, most: MAX_ANSWER };
            self.client.send(request, stop).map_err(lost)
        };
        let mut token = self.token.get();
        let (mut status, mut bytes) = send(&token)?;
        if status == 401 && self.token.renew(&token) {
            token = self.token.get();
            (status, bytes) = send(&token)?;
        }
        if !(200..300).contains(&status) {
            let (kind, mut message) = refusal(status, &bytes);
            if status == 401 {
                message = token::refused(&message, &token, token::OF_CONTROLLERS);
            }
            return Err(ControllerError::Refused { peer: peer(), what, status, kind, message });
        }
        serde_json::from_slice(&bytes).map_err(|e| ControllerError::Answer {
            peer: peer(),
            what,
            why: e.to_string(),
        })
    }
}

/// A name without characters that a query would have to escape.
fn plain(name: &str) -> String {
    let plain =
        |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':') { c } else { '-' };
    name.chars().map(plain).collect()
}

impl From<ControllerError> for Error {
    fn from(e: ControllerError) -> Error {
        let advice = match &e {
            ControllerError::Lost { kind: Kind::Denied | Kind::Invalid, .. } => CERTIFICATES,
            ControllerError::Lost { .. } => {
                "check that `windlass controller` runs there, and that this is the address it printed"
            }
            _ if e.kind() == Kind::Denied => {
                "give the token of the controller, which it named when it started"
            }
            _ => "",
        };
        Error::of_module(e.kind(), advice, e)
    }
}
