//! `windlass controller`: who loads which version when, for many models and many receivers, and what people see of it.
//!
//! Owns: the HTTP service around [`windlass_core::barrier`] and the process around that. Trainers tell it what they
//! published, receivers ask it what to do, data loaders wait at its gate, people look at its page. Must not: decide
//! anything that the barrier decides, or touch weights.
//!
//! | module | what it owns |
//! |---|---|
//! | [`wire`] | what travels |
//! | `hub` | what it knows, behind one lock; carries out what the barrier says |
//! | `outbox` | orders on their way to a receiver |
//! | `record` | what happened lately |
//! | [`status`] | the document of all there is to see |
//! | `routes` | the endpoints |
//! | `events` | the document as it changes, for page views |
//! | `metrics` | the same for Prometheus |
//! | [`openapi`] | the description of the endpoints |
//! | `page` | the live page |
//! | [`client`] | the other end, for receivers, `top` and tests |
//!
//! # Soft state
//!
//! Nothing is written to disk. A controller that is restarted knows nothing: receivers are told that they are not members
//! (404) and join again with what they hold, trainers announce their next version, and from these two everything is there
//! again. So it must come back under the same address: give it a port.
//!
//! # Bounds
//!
//! Everything that is kept is bounded: receivers, waits and versions by the barrier's limits, orders by the models of a
//! receiver, sets, evals, page views, spans and errors by constants, requests by [`crate::service::http`]. A request that is refused
//! leaves nothing behind.

pub mod client;
mod events;
mod hub;
mod metrics;
pub mod openapi;
mod outbox;
mod page;
mod record;
mod routes;
pub mod status;
pub mod wire;

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;
use windlass_core::address::{Host, HostPort, Token};
use windlass_data::tls::Certificate;

use crate::console::Session;
use crate::error::Error;
use crate::service::http::{self, Limits};
use crate::service::tls;
use crate::service::token;

pub use hub::Settings;

/// The checked arguments of `controller`.
#[derive(Clone, Debug)]
pub struct Controller {
    /// The address to listen on.
    pub bind: IpAddr,
    /// The first and the last port to try; zeros mean any.
    pub ports: (u16, u16),
    /// The host that others are told; that of `bind` if not given.
    pub advertise_host: Option<Host>,
    /// The token; read or made in `token_file` if not given.
    pub token: Option<Token>,
    /// Where the token is read from or made.
    pub token_file: PathBuf,
    /// Sets, deadlines and limits.
    pub settings: Settings,
    /// The files with the certificate and its key, for TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// End when standard input ends: the parent is gone.
    pub with_parent: bool,
}

impl Controller {
    /// Serves until it is told to end.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let host = self.host()?;
        let certificate = tls::certificate(self.tls.as_ref(), &host)?;
        if self.with_parent {
            let cancel = session.cancel().clone();
            Session::with_parent(move || cancel.set())?;
        }
        let (token, token_file) = match &self.token {
            Some(token) => (token.clone(), None),
            None => (token::read_or_make(&self.token_file)?, Some(self.token_file.as_path())),
        };
        http::raise_descriptors();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|e| Error::Bug(format!("no async runtime: {e}")))?;
        let listener = runtime
            .block_on(http::bind(self.bind, self.ports))
            .map_err(|source| Error::Listen { bind: self.bind, ports: self.ports, source })?;
        let port = listener.local_addr().map_err(|e| Error::Bug(e.to_string()))?.port();
        let address = HostPort::new(host, NonZeroU16::new(port).unwrap_or(NonZeroU16::MIN));
        let endpoint = format!("{}://{address}", tls::scheme(certificate.as_ref()));
        let sets: Vec<_> = self.settings.sets.iter().map(|s| &s.name).collect();
        let event = json!({
            "event": "listening",
            "endpoint": endpoint,
            "page": format!("{endpoint}/"),
            "page_with_token": page_command(&endpoint, token_file),
            "token_file": token_file,
            "sets": sets,
        });
        session.event(&event, || {
            let token = token_file.map_or("the one given".into(), |f| f.display().to_string());
            let command = page_command(&endpoint, token_file);
            format!(
                "controller at {endpoint}, token: {token}\nlive page: {endpoint}/\nits address with the token: {command}"
            )
        });
        let (end, ended) = watch::channel(false);
        let cancel = session.cancel().clone();
        let served = runtime.block_on(async {
            let signals = tokio::spawn(async move {
                while cancel.check().is_ok() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                let _ = end.send(true);
            });
            let served = answer(listener, certificate.as_ref(), self.settings.clone(), token, ended).await;
            signals.abort();
            served
        });
        runtime.shutdown_timeout(Duration::from_secs(1));
        served
    }

    fn host(&self) -> Result<Host, Error> {
        if let Some(host) = &self.advertise_host {
            return Ok(host.clone());
        }
        if self.bind.is_unspecified() {
            return Err(Error::Usage(format!(
                "--bind {} listens on every address: say with --advertise-host which one others should use",
                self.bind
            )));
        }
        Host::new(&self.bind.to_string()).map_err(|e| Error::Usage(e.to_string()))
    }
}

/// Answers requests until `ended` is true, inside TLS if there is a certificate. Returns when nothing of it is left.
pub async fn answer(
    listener: TcpListener,
    certificate: Option<&Certificate>,
    settings: Settings,
    token: Token,
    ended: watch::Receiver<bool>,
) -> Result<(), Error> {
    let limits = limits(&settings);
    let hub =
        hub::Hub::new(settings, token.clone(), ended.clone()).map_err(|e| Error::Usage(e.to_string()))?;
    let hub = Arc::new(hub);
    let router = http::guarded(routes::routes(Arc::clone(&hub)), routes::OPEN, token, limits)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&hub), routes::count));
    let ticker = tokio::spawn({
        let hub = Arc::clone(&hub);
        async move { hub.tick().await }
    });
    let publisher = tokio::spawn(async move { events::publish(&hub).await });
    http::serve(listener, certificate, router, limits, ended, Duration::from_secs(2)).await;
    ticker.abort();
    publisher.abort();
    Ok(())
}

/// The command that prints the page's address with the token, which is not printed here: logs are read by many.
fn page_command(endpoint: &str, token_file: Option<&Path>) -> String {
    let token = token_file.map_or_else(
        || format!("${}", token::VARIABLE),
        |file| {
            let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
            format!("$(cat '{}')", file.display().to_string().replace('\'', r"'\''"))
        },
    );
    format!("echo \"{endpoint}/#token={token}\"")
}

/// The bounds of the service. Each receiver has one connection for its polls and one for its reports.
fn limits(settings: &Settings) -> Limits {
    let barrier = &settings.limits;
    Limits {
        connections: barrier.max_receivers.saturating_mul(2).saturating_add(1024),
        request: Duration::from_secs(30),
        // A synchronous notify waits for its load, then for its eval.
        poll: Duration::from_millis(barrier.max_wait_ms.saturating_add(barrier.eval_ms)),
        body: 1 << 20,
        rate: 20_000.0,
        ..Limits::default()
    }
}
