//! The requests of the `object_store` crate, sent by the HTTP client of all services.
//!
//! Owns: [`Transport`]. One client, one TLS library and one set of trusted authorities serve agents, engines and stores. A
//! request is sent on a thread of its own, because the client blocks; its body and its answer are in memory, which is bounded
//! by the length of a part. Must not: retry, follow redirects or read a status; `object_store` does.

use std::time::Duration;

use http_body_util::BodyExt as _;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

use crate::service::client::Client;

/// How long a request may take: a part of 32 MiB at 280 kB/s.
const TIMEOUT: Duration = Duration::from_mins(2);
/// The longest answer that is read.
const MAX_ANSWER: u64 = 256 << 20;

/// Sends the requests of a store's client until `stop` is set.
#[derive(Clone, Debug)]
pub(super) struct Transport {
    client: Client,
    stop: Stop,
}

impl Transport {
    pub(super) fn new(client: Client, stop: Stop) -> Transport {
        Transport { client, stop }
    }
}

impl HttpConnector for Transport {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

/// What went wrong with a request, as the client says it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failed(String);

fn failed(kind: Kind, message: String) -> HttpError {
    let kind = match kind {
        Kind::Timeout => HttpErrorKind::Timeout,
        Kind::PeerLost => HttpErrorKind::Interrupted,
        Kind::Invalid
        | Kind::NotFound
        | Kind::Stale
        | Kind::Corrupt
        | Kind::Exhausted
        | Kind::Unsupported
        | Kind::Denied
        | Kind::Cancelled
        | Kind::Bug => HttpErrorKind::Unknown,
    };
    HttpError::new(kind, Failed(message))
}

#[async_trait::async_trait]
impl HttpService for Transport {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let request = http::Request::from_parts(parts, body);
        let (client, stop) = (self.client.clone(), self.stop.clone());
        let sent = tokio::task::spawn_blocking(move || client.forward(request, TIMEOUT, MAX_ANSWER, &stop));
        let answer = match sent.await {
            Ok(answer) => answer.map_err(|(kind, message)| failed(kind, message))?,
            Err(e) => return Err(failed(Kind::Bug, e.to_string())),
        };
        let (parts, body) = answer.into_parts();
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(body)))
    }
}
