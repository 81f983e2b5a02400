//! HTTP as all clients of this crate speak it: one request at a time, with a deadline, which a flag can end.
//!
//! Owns: [`Client`]. No redirects, no proxies: a client talks to what it was configured for and to nothing else. Called
//! by [`crate::service::control`] for agents and by [`crate::service::engines`] for engines, which know what an answer means. Must not:
//! retry, or interpret a status.
//!
//! An `https://` URL is reached through TLS or not at all: the certificate must be trusted and be for the host of the URL
//! ([`windlass_data::tls`]). The library below has TLS of its own, which is not used: data connections and requests
//! shall trust the same certificates, and fail with the same messages.
//!
//! Blocking; every request ends with its [`Stop`] or after the time it is given. The library below knows deadlines but
//! no flags, so waits for input are cut into glances at the flag; only connecting, which takes [`CONNECT`] at most, is
//! not.

use std::cell::RefCell;
use std::io::{self, Read as _, Write as _};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustls::{ClientConnection, StreamOwned};
use serde::Serialize;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, TcpConnector, Transport,
    TransportAdapter,
};
use windlass_core::error::Kind;
use windlass_data::stop::Stop;
use windlass_data::tls::{TlsError, Trust, server_name};

/// How long it may take to connect.
pub const CONNECT: Duration = Duration::from_secs(5);
/// How long a connection is kept for the next request: less than agents keep idle ones.
const IDLE: Duration = Duration::from_secs(3);

/// How many are kept, for one host and for all: the ranges that a store is asked for at once come without new handshakes.
const KEPT: (usize, usize) = (16, 64);

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
pub struct Client {
    agent: ureq::Agent,
    trust: Arc<Trusted>,
}

impl Default for Client {
    fn default() -> Client {
        Client::new(None)
    }
}

/// The trusted authorities, loaded at first use.
#[derive(Debug)]
struct Trusted {
    given: Option<Trust>,
    system: OnceLock<Trust>,
}

impl Trusted {
    fn get(&self) -> Result<&Trust, TlsError> {
        if let Some(trust) = self.given.as_ref().or_else(|| self.system.get()) {
            return Ok(trust);
        }
        let system = Trust::system()?;
        Ok(self.system.get_or_init(|| system))
    }
}

impl Client {
    /// Trusts `trust`, or the system's authorities.
    pub fn new(trust: Option<Trust>) -> Client {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .timeout_connect(Some(CONNECT))
            .max_idle_age(IDLE)
            .max_idle_connections_per_host(KEPT.0)
            .max_idle_connections(KEPT.1)
            .user_agent(concat!("windlass/", env!("CARGO_PKG_VERSION")))
            .build();
        let trust = Arc::new(Trusted { given: trust, system: OnceLock::new() });
        let connector = TcpConnector::default().chain(Glancing).chain(Securing(Arc::clone(&trust)));
        let agent = ureq::Agent::with_parts(config, connector, DefaultResolver::default());
        Client { agent, trust }
    }

    /// The trusted authorities.
    pub fn trust(&self) -> Result<Trust, TlsError> {
        self.trust.get().cloned()
    }

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

    /// Sends a request as it is; answers whatever comes back, with its body. At most `most` bytes of it are accepted.
    pub(crate) fn forward(
        &self,
        request: http::Request<impl AsRef<[u8]>>,
        timeout: Duration,
        most: u64,
        stop: &Stop,
    ) -> Result<http::Response<Vec<u8>>, (Kind, String)> {
        stop.check().map_err(|s| (s.kind(), s.to_string()))?;
        STOP.set(Some(stop.clone()));
        let answer = self.forward_now(request, timeout, most);
        STOP.set(None);
        answer.map_err(|error| stop.check().map_or_else(|s| (s.kind(), s.to_string()), |()| error))
    }

    fn forward_now(
        &self,
        request: http::Request<impl AsRef<[u8]>>,
        timeout: Duration,
        most: u64,
    ) -> Result<http::Response<Vec<u8>>, (Kind, String)> {
        let (parts, body) = request.into_parts();
        let carries = matches!(parts.method.as_str(), "PUT" | "POST" | "PATCH");
        let sent = if carries {
            let request = http::Request::from_parts(parts, body.as_ref());
            self.agent.run(self.agent.configure_request(request).timeout_global(Some(timeout)).build())
        } else {
            let request = http::Request::from_parts(parts, ());
            self.agent.run(self.agent.configure_request(request).timeout_global(Some(timeout)).build())
        };
        let (parts, mut body) = sent.map_err(failure)?.into_parts();
        let mut bytes = Vec::with_capacity(body.content_length().unwrap_or(0).min(most) as usize);
        let read =
            body.as_reader().take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(broken_off)?;
        if read as u64 > most {
            return Err((Kind::Corrupt, format!("an answer of more than {most} bytes")));
        }
        Ok(http::Response::from_parts(parts, bytes))
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
                let mut get = self.agent.get(request.url);
                if let Some(bearer) = &bearer {
                    get = get.header("authorization", bearer);
                }
                get.config().timeout_global(timeout).build().call()
            }
            Some(body) => {
                let mut post = self.agent.post(request.url);
                if let Some(bearer) = &bearer {
                    post = post.header("authorization", bearer);
                }
                post.config().timeout_global(timeout).build().send_json(body)
            }
        };
        let mut response = sent.map_err(failure)?;
        let mut bytes = Vec::new();
        let read =
            response.body_mut().as_reader().take(request.most.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(broken_off)?;
        Ok((response.status().as_u16(), bytes))
    }
}

/// What a request that was not answered says.
fn failure(e: ureq::Error) -> (Kind, String) {
    match &e {
        ureq::Error::Timeout(_) => (Kind::Timeout, e.to_string()),
        ureq::Error::Other(inner) => match inner.downcast_ref::<TlsError>() {
            Some(tls) => (tls.kind(), tls.to_string()),
            None => (Kind::PeerLost, e.to_string()),
        },
        _ => (Kind::PeerLost, e.to_string()),
    }
}

/// What an answer that did not come to its end says.
fn broken_off(e: io::Error) -> (Kind, String) {
    let kind = if e.kind() == io::ErrorKind::TimedOut { Kind::Timeout } else { Kind::PeerLost };
    (kind, e.to_string())
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

/// Puts connections to `https://` URLs inside TLS. The handshake is over when the connection is made, so that nothing is
/// sent to an untrusted peer.
#[derive(Debug)]
struct Securing(Arc<Trusted>);

impl<In: Transport> Connector<In> for Securing {
    type Out = Either<In, Secured<In>>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else { return Ok(None) };
        if !details.needs_tls() {
            return Ok(Some(Either::A(transport)));
        }
        let failed = |e: TlsError| ureq::Error::Other(Box::new(e));
        let peer = details.uri.authority().map(ToString::to_string).unwrap_or_default();
        let host = details.uri.host().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        let name = server_name(host).ok_or_else(|| {
            let why = format!("no certificate can be for {host:?}");
            failed(TlsError::Untrusted { peer: peer.clone(), why })
        })?;
        let config = self.0.get().map_err(failed)?.http();
        let mut conn = ClientConnection::new(config, name).map_err(|e| failed(TlsError::of(&peer, e)))?;
        let mut sock = TransportAdapter::new(transport, details.current_time.clone());
        sock.set_timeout(details.timeout);
        while conn.is_handshaking() {
            conn.complete_io(&mut sock)
                .map_err(|e| TlsError::of_io(&peer, &e).map_or_else(|| e.into(), failed))?;
        }
        let (input, output) = (details.config.input_buffer_size(), details.config.output_buffer_size());
        Ok(Some(Either::B(Secured {
            buffers: LazyBuffers::new(input, output),
            stream: StreamOwned::new(conn, sock),
        })))
    }
}

/// A connection inside TLS.
struct Secured<T: Transport> {
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter<T>>,
}

impl<T: Transport> std::fmt::Debug for Secured<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secured").finish_non_exhaustive()
    }
}

impl<T: Transport> Transport for Secured<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let output = self.buffers.output().get(..amount).unwrap_or_default();
        Ok(self.stream.write_all(output)?)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let amount = self.stream.read(self.buffers.input_append_buf())?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}
