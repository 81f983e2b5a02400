//! What a receiver says to its controller, and how.
//!
//! Owns: [`Link`], the four things that are said, and [`HttpLink`], which says them over HTTP. Called by
//! [`super::member`]. Must not: repeat anything; whoever asks knows whether that is of use.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use windlass_core::address::{Endpoint, Token};
use windlass_core::barrier::Peer;
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

use crate::client::{Client, Request};
use crate::control;
use crate::controller::wire::{Done, Join, Joined, Orders, Poll, Report};
use crate::error::Error;

/// How long an answer may take that is made at once.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer.
const MAX_ANSWER: u64 = 16 << 20;

/// Why something could not be said.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LinkError {
    /// Nobody answered, or nothing that makes sense.
    #[error("the controller at {peer} does not answer: {why}")]
    Away {
        /// Where it should be.
        peer: String,
        /// What happened.
        why: String,
        /// What sort of failure.
        kind: Kind,
    },
    /// The controller refused.
    #[error("the controller at {peer} refused to {what}: {why}")]
    Refused {
        /// Where it is.
        peer: String,
        /// What was asked for.
        what: &'static str,
        /// Why not.
        why: String,
        /// What sort of refusal.
        kind: Kind,
    },
}

impl LinkError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub(super) fn kind(&self) -> Kind {
        match self {
            LinkError::Away { kind, .. } | LinkError::Refused { kind, .. } => *kind,
        }
    }

    /// Whether the same may succeed in a while.
    pub(super) fn passes(&self) -> bool {
        match self {
            LinkError::Away { .. } => true,
            LinkError::Refused { kind, .. } => {
                matches!(kind, Kind::Exhausted | Kind::Timeout | Kind::PeerLost)
            }
        }
    }
}

/// The controller, as a receiver sees it. Every call ends with its [`Stop`], or in time.
pub(super) trait Link: Sync {
    /// Where it is, for people.
    fn peer(&self) -> String;
    /// Begins a life.
    fn join(&self, join: &Join, stop: &Stop) -> Result<Joined, LinkError>;
    /// Asks for orders.
    fn poll(&self, poll: &Poll, stop: &Stop) -> Result<Orders, LinkError>;
    /// Says how an order went.
    fn report(&self, report: &Report, stop: &Stop) -> Result<(), LinkError>;
    /// Takes its leave.
    fn leave(&self, peer: &Peer, stop: &Stop) -> Result<(), LinkError>;
}

/// A controller over HTTP.
#[derive(Debug)]
pub(super) struct HttpLink {
    endpoint: Endpoint,
    token: Token,
    client: Client,
}

impl HttpLink {
    pub(super) fn new(url: &str, token: Token) -> Result<HttpLink, Error> {
        if url.starts_with("https://") {
            return Err(Error::Usage(format!(
                "{url}: a controller speaks plain http; across networks that are not trusted, use a tunnel"
            )));
        }
        let scheme = if url.starts_with("http://") { "" } else { "http://" };
        let endpoint = format!("{scheme}{url}").parse().map_err(|e| Error::Usage(format!("{e}")))?;
        Ok(HttpLink { endpoint, token, client: Client::default() })
    }

    fn post<T: DeserializeOwned>(
        &self,
        (what, path): (&'static str, &str),
        body: &impl Serialize,
        timeout: Duration,
        stop: &Stop,
    ) -> Result<T, LinkError> {
        let away = |kind: Kind, why: String| LinkError::Away { peer: self.peer(), why, kind };
        let url = format!("{}{path}", self.endpoint.as_str().trim_end_matches('/'));
        let bearer = Some(self.token.expose());
        let request = Request { url: &url, bearer, body: Some(body), timeout, most: MAX_ANSWER };
        let (status, bytes) = self.client.send(request, stop).map_err(|(kind, why)| away(kind, why))?;
        if (200..300).contains(&status) {
            return serde_json::from_slice(&bytes)
                .map_err(|e| away(Kind::Corrupt, format!("its answer makes no sense: {e}")));
        }
        let (kind, why) = control::refusal(status, &bytes);
        Err(LinkError::Refused { peer: self.peer(), what, why, kind })
    }
}

impl Link for HttpLink {
    fn peer(&self) -> String {
        self.endpoint.to_string()
    }

    fn join(&self, join: &Join, stop: &Stop) -> Result<Joined, LinkError> {
        self.post(("let this receiver join", "/register_receiver"), join, PATIENCE, stop)
    }

    fn poll(&self, poll: &Poll, stop: &Stop) -> Result<Orders, LinkError> {
        let timeout = Duration::from_millis(poll.timeout_ms) + PATIENCE;
        self.post(("give orders", "/poll_orders"), poll, timeout, stop)
    }

    fn report(&self, report: &Report, stop: &Stop) -> Result<(), LinkError> {
        self.post(("take a report", "/report"), report, PATIENCE, stop).map(|_: Done| ())
    }

    fn leave(&self, peer: &Peer, stop: &Stop) -> Result<(), LinkError> {
        self.post(("let this receiver leave", "/leave"), peer, PATIENCE, stop).map(|_: Done| ())
    }
}
