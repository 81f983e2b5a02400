//! Requests to an engine's own HTTP server.
//!
//! Owns: [`Http`], which adds the engine's address and key to a request and turns what comes back into a value or an
//! error that names engine, stage, route, status and body. Must not: know what the routes mean, or repeat
//! what may have been done.

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

    /// Asks for something; once more if the connection was gone, which a server may have closed meanwhile.
    pub fn get<T: DeserializeOwned>(
        &self,
        stage: Stage,
        path: &str,
        timeout: Duration,
        stop: &Stop,
    ) -> Result<T, EngineError> {
        let bytes = match self.call(stage, path, None::<&()>, timeout, stop) {
            Err(EngineError::Lost { kind: Kind::PeerLost, .. }) => {
                self.call(stage, path, None::<&()>, timeout, stop)
            }
            other => other,
        }?;
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

/// The beginning of an answer, on one line.
fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes.get(..bytes.len().min(4 * SHOWN)).unwrap_or_default());
    let words: Vec<&str> = text.split_whitespace().collect();
    let text: String = words.join(" ").chars().take(SHOWN).collect();
    if text.is_empty() { "(nothing)".into() } else { text }
}
