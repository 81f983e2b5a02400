//! Requests to an engine's own HTTP server.
//!
//! Owns: [`Http`], which adds the engine's address and key to a request and turns what comes back into a value or an
//! error that names engine, stage, route, status and body. Must not: know what the routes mean.
//!
//! A request that does no harm if it is done twice is sent [`ATTEMPTS`] times, with a backoff that doubles, if the
//! connection fails or the server says that it is busy (429, 502, 503, 504). Any other request is sent once.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

use super::error::{EngineError, Stage};
use crate::service::client::{Client, Request, kind_of};

/// The longest answer: the reports of many workers.
const MOST: u64 = 64 << 20;
/// How much of an answer is repeated in an error.
const SHOWN: usize = 2000;

/// How often a request that may be done twice is sent, and the pause before the second time.
const ATTEMPTS: u32 = 3;
const BACKOFF: Duration = Duration::from_millis(100);

/// For requests that take what they take: their [`Stop`] has the deadline.
pub const UNTIL_STOP: Duration = Duration::from_secs(24 * 3600);

/// An engine's server.
#[derive(Clone, Debug)]
pub struct Http {
    /// What it is called in messages.
    pub engine: String,
    /// Where it is, without a slash at the end.
    pub url: String,
    /// What it wants in the `Authorization` header.
    pub key: Option<Token>,
    client: Client,
}

/// A request of which nothing is expected but that it succeeds.
pub type Done = serde::de::IgnoredAny;

impl Http {
    /// Talks to the engine at `url`.
    pub fn new(engine: String, url: &str, key: Option<Token>) -> Http {
        Http { engine, url: url.trim_end_matches('/').to_owned(), key, client: Client::default() }
    }

    /// The same engine, with another key.
    #[must_use]
    pub fn with_key(&self, key: Option<Token>) -> Http {
        Http { key, ..self.clone() }
    }

    /// Asks for something, as often as the module says.
    pub fn get<T: DeserializeOwned>(
        &self,
        stage: Stage,
        path: &str,
        timeout: Duration,
        stop: &Stop,
    ) -> Result<T, EngineError> {
        let bytes = repeat(stop, || self.call(stage, path, None::<&()>, timeout, stop))?;
        self.parse(stage, path, &bytes)
    }

    /// Tells it to do something.
    pub fn post<T: DeserializeOwned>(
        &self,
        stage: Stage,
        path: &str,
        body: &impl Serialize,
        timeout: Duration,
        stop: &Stop,
    ) -> Result<T, EngineError> {
        let bytes = self.call(stage, path, Some(body), timeout, stop)?;
        self.parse(stage, path, &bytes)
    }

    /// Tells it to do something that may be done twice, whatever it answers with; as often as the module says.
    pub fn tell_again(
        &self,
        stage: Stage,
        path: &str,
        body: &Value,
        timeout: Duration,
        stop: &Stop,
    ) -> Result<(), EngineError> {
        repeat(stop, || self.tell(stage, path, body.clone(), timeout, stop))
    }

    /// Tells it to do something, whatever it answers with.
    pub fn tell(
        &self,
        stage: Stage,
        path: &str,
        body: Value,
        timeout: Duration,
        stop: &Stop,
    ) -> Result<(), EngineError> {
        let body = if body.is_null() { json!({}) } else { body };
        self.call(stage, path, Some(&body), timeout, stop).map(drop)
    }

    fn parse<T: DeserializeOwned>(&self, stage: Stage, path: &str, bytes: &[u8]) -> Result<T, EngineError> {
        let (engine, path) = (&self.engine, path.to_owned());
        serde_json::from_slice(bytes).map_err(|e| {
            let why = format!("{e}: {}", excerpt(bytes));
            EngineError::Answer { engine: engine.clone(), stage, path, why }
        })
    }

    fn call(
        &self,
        stage: Stage,
        path: &str,
        body: Option<&impl Serialize>,
        timeout: Duration,
        stop: &Stop,
    ) -> Result<Vec<u8>, EngineError> {
        let engine = || self.engine.clone();
        let url = format!("{}{path}", self.url);
        let bearer = self.key.as_ref().map(Token::expose);
        let (status, bytes) = self
            .client
            .send(Request { url: &url, bearer, body, timeout, most: MOST }, stop)
            .map_err(|(kind, why)| EngineError::Lost { engine: engine(), stage, why, kind })?;
        if bytes.len() as u64 > MOST {
            let why = format!("it is longer than {MOST} bytes");
            return Err(EngineError::Answer { engine: engine(), stage, path: path.to_owned(), why });
        }
        if (200..300).contains(&status) {
            return Ok(bytes);
        }
        Err(EngineError::Refused {
            engine: engine(),
            stage,
            path: path.to_owned(),
            status,
            body: excerpt(&bytes),
            kind: kind_of(status),
        })
    }
}

fn repeat<T>(stop: &Stop, call: impl Fn() -> Result<T, EngineError>) -> Result<T, EngineError> {
    let mut pause = BACKOFF;
    for _ in 1..ATTEMPTS {
        match call() {
            Err(
                EngineError::Lost { kind: Kind::PeerLost, .. }
                | EngineError::Refused { status: 429 | 502..=504, .. },
            ) if !stop.is_set() => {}
            other => return other,
        }
        std::thread::sleep(stop.left().map_or(pause, |left| left.min(pause)));
        pause *= 2;
    }
    call()
}

/// The beginning of an answer, on one line.
fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes.get(..bytes.len().min(4 * SHOWN)).unwrap_or_default());
    let words: Vec<&str> = text.split_whitespace().collect();
    let text: String = words.join(" ").chars().take(SHOWN).collect();
    if text.is_empty() { "(nothing)".into() } else { text }
}
