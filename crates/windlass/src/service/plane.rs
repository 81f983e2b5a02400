//! The control connections of the [roles](windlass_data::roles), over HTTP.
//!
//! Owns: [`HttpPlane`], by which a trainer in Rust answers the same requests as `windlass agent` does, from its own
//! process, and an engine in Rust asks them. Must not: know what the endpoints do; they are those of [`crate::service::agent`].

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use windlass_core::address::{Endpoint, Host, HostPort, Token};
use windlass_core::error::Kind;
use windlass_core::sync_info::AgentWeightSyncInfo;
use windlass_data::receiver::{Control, ControlError};
use windlass_data::roles::{ControlPlane, Reachable};
use windlass_data::serve::Server;
use windlass_data::tls::Trust;

use crate::service::agent;
use crate::service::control::HttpControl;
use crate::service::http;
use crate::service::tls;

/// HTTP with a token.
#[derive(Clone, Debug)]
pub struct HttpPlane {
    /// The address that the trainer's side listens on.
    pub bind: IpAddr,
    /// The first and the last port to try; zeros mean any.
    pub ports: (u16, u16),
    /// The host that engines are told; that of `bind` if not given.
    pub advertise_host: Option<Host>,
    /// What engines must have. The engine's side takes it from the sync info.
    pub token: Token,
    /// Authorities that the engine's side trusts for the trainer's certificate; by default the system's.
    /// The trainer's certificate is that of its data connections ([`windlass_data::tcp::SenderConfig::tls`]).
    pub trust: Option<Trust>,
}

impl HttpPlane {
    /// On the loopback interface, at any port.
    pub fn loopback(token: Token) -> HttpPlane {
        let bind = std::net::Ipv4Addr::LOCALHOST.into();
        HttpPlane { bind, ports: (0, 0), advertise_host: None, token, trust: None }
    }

    fn failed(&self, why: impl ToString, kind: Kind) -> ControlError {
        ControlError::Lost { peer: self.bind.to_string(), what: "listen", why: why.to_string(), kind }
    }
}

/// Requests are answered while this is alive.
struct Listening {
    end: watch::Sender<bool>,
    runtime: Option<tokio::runtime::Runtime>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.end.send(true);
        if let (Some(runtime), Some(task)) = (self.runtime.take(), self.task.take()) {
            // The task holds the server, which must be free to end when this has returned.
            let _ = runtime.block_on(task);
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

impl ControlPlane for HttpPlane {
    fn serve(&self, server: &Arc<Server>) -> Result<Reachable, ControlError> {
        let invalid = |e: &dyn std::fmt::Display| self.failed(e, Kind::Invalid);
        if self.bind.is_unspecified() && self.advertise_host.is_none() {
            return Err(invalid(
                &"it is every address: say with advertise_host which one engines should use",
            ));
        }
        let host = match &self.advertise_host {
            Some(host) => host.clone(),
            None => Host::new(&self.bind.to_string()).map_err(|e| invalid(&e))?,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("windlass-http")
            .enable_all()
            .build()
            .map_err(|e| self.failed(e, Kind::Exhausted))?;
        let listener = runtime
            .block_on(http::bind(self.bind, self.ports))
            .map_err(|e| self.failed(e, Kind::Exhausted))?;
        let port = listener.local_addr().map_err(|e| self.failed(e, Kind::Exhausted))?.port();
        let address = HostPort::new(host, NonZeroU16::new(port).unwrap_or(NonZeroU16::MIN));
        let endpoint: Endpoint =
            format!("{}://{address}", tls::scheme(server.certificate())).parse().map_err(|e| invalid(&e))?;
        let (model, incarnation) = (server.region().model_id().clone(), server.region().incarnation());
        let info = AgentWeightSyncInfo::new(vec![endpoint], self.token.clone(), model, Some(incarnation))
            .map_err(|e| invalid(&e))?;
        let (end, ended) = watch::channel(false);
        let answering = agent::answer(listener, Arc::clone(server), None, self.token.clone(), ended);
        let task = Some(runtime.spawn(answering));
        Ok(Reachable { info, hold: Box::new(Listening { end, runtime: Some(runtime), task }) })
    }

    fn connect(&self, info: &AgentWeightSyncInfo) -> Result<Arc<dyn Control>, ControlError> {
        let Some(endpoint) = info.endpoints().first() else {
            return Err(self.failed("the sync info names no endpoint", Kind::Invalid));
        };
        let control = HttpControl::new(endpoint.as_str(), info.token.clone())
            .map_err(|e| self.failed(e, Kind::Invalid))?;
        Ok(Arc::new(control.with_trust(self.trust.clone())))
    }
}
