//! HTTP as all clients of this crate speak it: one request at a time, with a deadline, which a flag can end.
//!
//! Owns: [`Client`]. No redirects, no proxies: a client talks to what it was configured for and to nothing else. Called
//! by [`crate::control`] for agents and by [`crate::engines`] for engines, which know what an answer means. Must not:
//! retry, or interpret a status.
//!
//! Blocking; every request ends with its [`Stop`] or after the time it is given. The library below knows deadlines but
//! no flags, so waits for input are cut into glances at the flag; only connecting, which takes [`CONNECT`] at most, is
//! not.

use std::cell::RefCell;
use std::io::{self, Read as _};
use std::time::{Duration, Instant};

use serde::Serialize;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, NextTimeout, TcpConnector, Transport,
};
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

/// How long it may take to connect.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long a connection is kept for the next request: less than agents keep idle ones.
const IDLE: Duration = Duration::from_secs(3);

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a, B> {
    /// Where to, in full.
    pub url: &'a str,
    /// What follows `Bearer` in its `Authorization` header.
    pub bearer: Option<&'a str>,
    /// Its body as JSON. Without one it is a GET.
    pub body: Option<&'a B>,
    /// How long it may take.
    pub timeout: Duration,
    /// The longest answer that is read; of a longer one, one byte more.
    pub most: u64,
}

/// Sends requests. Connections are kept for a few seconds.
#[derive(Clone, Debug)]
pub struct Client(ureq::Agent);

impl Default for Client {
    fn default() -> Client {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .timeout_connect(Some(CONNECT))
            .max_idle_age(IDLE)
            .user_agent(concat!("windlass/", env!("CARGO_PKG_VERSION")))
            .build();
        let connector = TcpConnector::default().chain(Glancing);
        Client(ureq::Agent::with_parts(config, connector, DefaultResolver::default()))
    }
}

impl Client {
    /// Sends a request; answers the status and the body, or what went wrong.
    pub fn send<B: Serialize>(
        &self,
        request: Request<'_, B>,
        stop: &Stop,
    ) -> Result<(u16, Vec<u8>), (Kind, String)> {
        stop.check().map_err(|s| (s.kind(), s.to_string()))?;
        STOP.set(Some(stop.clone()));
        let answer = self.exchange(request, stop);
        STOP.set(None);
        // Whatever a request that was called off says, that is what happened to it.
        answer.map_err(|error| stop.check().map_or_else(|s| (s.kind(), s.to_string()), |()| error))
    }

    fn exchange<B: Serialize>(
        &self,
        request: Request<'_, B>,
        stop: &Stop,
    ) -> Result<(u16, Vec<u8>), (Kind, String)> {
        let timeout = stop.left().map_or(request.timeout, |left| left.min(request.timeout));
        let timeout = Some(timeout.max(Duration::from_millis(1)));
        let bearer = request.bearer.map(|secret| format!("Bearer {secret}"));
        let sent = match request.body {
            None => {
                let mut get = self.0.get(request.url);
                if let Some(bearer) = &bearer {
                    get = get.header("authorization", bearer);
                }
                get.config().timeout_global(timeout).build().call()
            }
            Some(body) => {
                let mut post = self.0.post(request.url);
                if let Some(bearer) = &bearer {
                    post = post.header("authorization", bearer);
                }
                post.config().timeout_global(timeout).build().send_json(body)
            }
        };
        let mut response = sent.map_err(|e| match &e {
            ureq::Error::Timeout(_) => (Kind::Timeout, e.to_string()),
            _ => (Kind::PeerLost, e.to_string()),
        })?;
        let mut bytes = Vec::new();
        let read =
            response.body_mut().as_reader().take(request.most.saturating_add(1)).read_to_end(&mut bytes);
        match read {
            Ok(_) => Ok((response.status().as_u16(), bytes)),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => Err((Kind::Timeout, e.to_string())),
            Err(e) => Err((Kind::PeerLost, e.to_string())),
        }
    }
}

/// What a status means where the body does not say. Something in between may answer for a peer; most of that passes.
pub fn kind_of(status: u16) -> Kind {
    match status {
        401 => Kind::Denied,
        429 | 503 => Kind::Exhausted,
        _ => {
            let named = Kind::ALL.into_iter().find(|k| k.row().http == status);
            named.unwrap_or(if status >= 500 { Kind::PeerLost } else { Kind::Invalid })
        }
    }
}

thread_local! {
    /// What may end the request that this thread is waiting for. A connection outlives a request, so it cannot be
    /// given to it when it is made.
    static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) };
}

/// Makes connections that look at [`STOP`] while they wait.
#[derive(Debug)]
struct Glancing;

#[derive(Debug)]
struct Glance<T>(T);

impl<In: Transport> Connector<In> for Glancing {
    type Out = Glance<In>;

    fn connect(
        &self,
        _: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Glance<In>>, ureq::Error> {
        Ok(chained.map(Glance))
    }
}

impl<T: Transport> Transport for Glance<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.0.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.0.transmit_output(amount, timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        let start = Instant::now();
        loop {
            if STOP.with_borrow(|stop| stop.as_ref().is_some_and(Stop::is_set)) {
                // Not `Interrupted`, which readers take as a wish to go on.
                return Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
            }
            let left = timeout.after.saturating_sub(start.elapsed());
            let glance = NextTimeout { after: left.min(Stop::GLANCE).into(), ..timeout };
            match self.0.await_input(glance) {
                Err(ureq::Error::Timeout(_)) if left > Stop::GLANCE => {}
                other => return other,
            }
        }
    }

    fn is_open(&mut self) -> bool {
        self.0.is_open()
    }
}
