//! The HTTP server of all services: bounded, authenticated, with errors that carry advice.
//!
//! Owns: the accept loop with its limits, the check of the token, the rate limit, and the JSON form of errors. Called
//! by the agent and the controller with a router. Must not: know the endpoints.
//!
//! | bound | value |
//! |---|---|
//! | connections | [`Limits::connections`]; see `connections` for which is closed when there are more |
//! | time to send a request's head | [`Limits::head`] |
//! | time of a request, its body included | [`Limits::request`], on top of [`Limits::poll`] |
//! | time without progress while a peer reads an answer | [`Limits::stall`] |
//! | head | 64 KiB |
//! | body | [`Limits::body`] |
//! | large bodies at a time, in bytes | [`Limits::bodies`]; the next one waits |
//! | requests per second with the token, all connections together | [`Limits::rate`], with bursts of twice that |
//! | the same without the token | [`Limits::strangers`] |
//!
//! With a certificate, every connection uses TLS. The handshake must finish within [`Limits::head`]; the connection counts
//! from its first byte. A request without TLS is answered with an error that says so.
//!
//! Requests and connections with and without the token are counted separately, so that strangers cannot exhaust the limits
//! of receivers. The server does not read the body of a request without the token.

mod connections;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::HttpBody as _;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_data::tls::Certificate;

use self::connections::{Connections, Slot};
use crate::service::token;

/// The bounds of a service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Connections at a time.
    pub(crate) connections: usize,
    /// How long a request's head may take to arrive.
    pub(crate) head: Duration,
    /// How long a request may take.
    pub(crate) request: Duration,
    /// Additional time for long polls.
    pub(crate) poll: Duration,
    /// How long a peer may read nothing of an answer.
    pub(crate) stall: Duration,
    pub(crate) body: usize,
    /// Total bytes of bodies larger than 64 KiB in memory.
    pub(crate) bodies: usize,
    pub(crate) rate: f64,
    /// Requests per second without the token.
    pub(crate) strangers: f64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            head: Duration::from_secs(5),
            request: Duration::from_secs(60),
            poll: MAX_POLL,
            stall: Duration::from_secs(30),
            body: 16 << 20,
            bodies: 64 << 20,
            rate: 2000.0,
            strangers: 2000.0,
        }
    }
}

/// The longest wait of an agent's long poll.
pub(crate) const MAX_POLL: Duration = Duration::from_secs(60);

/// A failed request.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What sort of failure.
    pub(crate) kind: Kind,
    pub(crate) message: String,
    /// The status, where it is not that of the kind.
    pub(crate) status: Option<StatusCode>,
}

impl Failure {
    /// A failure of a kind, with its status.
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), status: None }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let row = self.kind.row();
        let status = StatusCode::from_u16(row.http).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = json!({
            "ok": false,
            "error": { "kind": self.kind, "message": self.message, "advice": self.kind.advice() },
        });
        (self.status.unwrap_or(status), Json(body)).into_response()
    }
}

impl From<JsonRejection> for Failure {
    fn from(r: JsonRejection) -> Failure {
        Failure { status: Some(r.status()), ..Failure::new(Kind::Invalid, r.body_text()) }
    }
}

impl From<QueryRejection> for Failure {
    fn from(r: QueryRejection) -> Failure {
        Failure::new(Kind::Invalid, r.body_text())
    }
}

/// A request's body as JSON. A body that is not `T` is answered with a [`Failure`].
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, Failure> {
        let Json(value) = Json::from_request(request, state).await?;
        Ok(Body(value))
    }
}

/// A request's query. A query that is not `T` is answered with a [`Failure`].
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Params<T>, Failure> {
        let Query(value) = Query::from_request_parts(parts, state).await?;
        Ok(Params(value))
    }
}

struct Guard {
    token: Token,
    open: &'static [&'static str],
    limits: Limits,
    known: Bucket,
    strangers: Bucket,
    /// Room for large bodies, in [`UNIT`]s.
    bodies: Semaphore,
}

/// Bodies up to this size are bounded by the number of connections.
const SMALL: u64 = 64 << 10;
/// In which room for bodies is counted.
const UNIT: u64 = 1 << 10;
/// The longest head of a request.
const HEAD: usize = 64 << 10;

/// A token bucket of requests per second.
struct Bucket {
    rate: f64,
    room: Mutex<(f64, Instant)>,
}

impl Bucket {
    fn new(rate: f64) -> Bucket {
        Bucket { rate, room: Mutex::new((rate, Instant::now())) }
    }

    /// Admits a request if the rate allows it.
    fn admit(&self) -> bool {
        let mut room = self.room.lock();
        let now = Instant::now();
        let refill = now.duration_since(room.1).as_secs_f64() * self.rate;
        *room = ((room.0 + refill).min(self.rate * 2.0), now);
        let admitted = room.0 >= 1.0;
        if admitted {
            room.0 -= 1.0;
        }
        admitted
    }
}

/// Puts the token, the rate, the time and the size limits in front of a router. `/healthz` and the paths in `open` need
/// no token.
pub(crate) fn guarded(router: Router, open: &'static [&'static str], token: Token, limits: Limits) -> Router {
    let (known, strangers) = (Bucket::new(limits.rate), Bucket::new(limits.strangers));
    let bodies = Semaphore::new(limits.bodies.max(limits.body) / UNIT as usize + 1);
    let guard = Arc::new(Guard { token, open, limits, known, strangers, bodies });
    router
        .route("/healthz", axum::routing::get(async || Json(json!({ "ok": true }))))
        .fallback(async |request: Request| {
            Failure::new(Kind::NotFound, format!("there is no {} {}", request.method(), request.uri().path()))
        })
        .method_not_allowed_fallback(async |request: Request| {
            let message = format!("{} does not take {}", request.uri().path(), request.method());
            Failure { status: Some(StatusCode::METHOD_NOT_ALLOWED), ..Failure::new(Kind::Invalid, message) }
        })
        .layer(DefaultBodyLimit::max(limits.body))
        .layer(axum::middleware::from_fn_with_state(guard, check))
}

async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|h| h.to_str().ok());
    let known = token::accepts(&guard.token, given);
    if let Some(slot) = request.extensions().get::<Arc<Slot>>().filter(|_| known) {
        slot.accept();
    }
    let bucket = if known { &guard.known } else { &guard.strangers };
    if !bucket.admit() {
        let failure = Failure::new(Kind::Exhausted, "too many requests: wait a second");
        let mut response = Failure { status: Some(StatusCode::TOO_MANY_REQUESTS), ..failure }.into_response();
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return response;
    }
    let path = request.uri().path();
    if !known && path != "/healthz" && !guard.open.contains(&path) {
        let failure = Failure::new(
            Kind::Denied,
            "the token is missing or wrong: send this service's token as `Authorization: Bearer …`",
        );
        let mut response = Failure { status: Some(StatusCode::UNAUTHORIZED), ..failure }.into_response();
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        if !request.body().is_end_stream() {
            // The body is not read, so the connection cannot be reused.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        return response;
    }
    let most = guard.limits.request + guard.limits.poll;
    // A body without a length counts as the longest allowed.
    let longest = guard.limits.body as u64;
    let length = request.body().size_hint().upper().unwrap_or(longest).min(longest);
    let answer = async {
        let units = u32::try_from(length / UNIT).unwrap_or(u32::MAX);
        // Held until the request is answered. The semaphore is never closed.
        let _room = if length > SMALL { guard.bodies.acquire_many(units).await.ok() } else { None };
        next.run(request).await
    };
    match tokio::time::timeout(most, answer).await {
        Ok(response) => response,
        Err(_) => Failure::new(Kind::Timeout, "the request took too long").into_response(),
    }
}

/// Binds the first free port of a range on one address; port 0 means any.
pub(crate) async fn bind(address: IpAddr, ports: (u16, u16)) -> io::Result<TcpListener> {
    let mut last = None;
    for port in ports.0..=ports.1 {
        match TcpListener::bind(SocketAddr::new(address, port)).await {
            Ok(listener) => return Ok(listener),
            Err(e) => last = Some(e),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::other("the port range is empty")))
}

/// The answer to a client without TLS on a TLS port. Others may have read its token.
fn without_tls() -> Router {
    Router::new().fallback(async || {
        let message = "this port speaks TLS: use https:// instead of http://, and change the token if this one was sent \
                       over an untrusted network";
        let mut response = Failure::new(Kind::Invalid, message).into_response();
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        response
    })
}

/// Whether a connection begins like a request without TLS: with a letter. Waits for the first byte.
async fn begins_plain(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    match stream.peek(&mut first).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(first[0].is_ascii_alphabetic()),
    }
}

/// A stream whose writes fail once the peer has read nothing for [`Limits::stall`]. Otherwise a peer that never reads its
/// answers would hold the connection forever.
struct Moving {
    stream: TcpStream,
    most: Duration,
    stalled: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Moving {
    fn new(stream: TcpStream, limits: Limits) -> Moving {
        Moving { stream, most: limits.stall, stalled: None }
    }

    fn bounded<T>(&mut self, cx: &mut Context<'_>, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.stalled = None;
            return done;
        }
        let most = self.most;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(most)));
        timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Moving {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Moving {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.bounded(cx, done)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_write_vectored(cx, bytes);
        this.bounded(cx, done)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

/// Raises the descriptor limit to the maximum: every connection of a receiver needs a descriptor.
pub(crate) fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "cannot raise the descriptor limit; only a few receivers may be able to connect");
    }
}

/// Serves until `ended` is true, then gives open requests `grace`. With a certificate, inside TLS.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<&Certificate>,
    router: Router,
    limits: Limits,
    mut ended: watch::Receiver<bool>,
    grace: Duration,
) {
    let connections = Connections::new(limits.connections);
    let tls = tls.map(|certificate| TlsAcceptor::from(certificate.http()));
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = until(&mut ended) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
                // The descriptors may be exhausted.
                connections.shed();
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Some(slot) = connections.take(peer.ip()) else { continue };
        let slot = Arc::new(slot);
        let _ = stream.set_nodelay(true);
        let (router, tls, ended) = (router.clone(), tls.clone(), ended.clone());
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            let end = Ending { ended, grace };
            let service = Served { router, slot: Arc::clone(&slot) };
            // Errors of a connection concern its peer only.
            let conversation = async {
                match tls {
                    Some(tls) => secret(stream, tls, service, limits, end).await,
                    None => converse(Moving::new(stream, limits), service, limits, end).await,
                }
            };
            tokio::select! {
                () = conversation => {}
                () = slot.shed() => {}
            }
        });
    }
    drop(listener);
    // Connections end within the grace period; the rest is dropped with the set.
    let all = async { while tasks.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(grace + Duration::from_millis(100), all).await;
}

/// The service of one connection, and its slot.
#[derive(Clone)]
struct Served {
    router: Router,
    slot: Arc<Slot>,
}

impl hyper::service::Service<hyper::Request<Incoming>> for Served {
    type Response = Response;
    type Error = Infallible;
    type Future = <TowerToHyperService<Router> as hyper::service::Service<hyper::Request<Incoming>>>::Future;

    fn call(&self, mut request: hyper::Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(Arc::clone(&self.slot));
        TowerToHyperService::new(self.router.clone()).call(request)
    }
}

/// The signal to end a connection, and its grace period.
struct Ending {
    ended: watch::Receiver<bool>,
    grace: Duration,
}

/// One connection on a port with TLS.
async fn secret(stream: TcpStream, tls: TlsAcceptor, service: Served, limits: Limits, mut end: Ending) {
    let by = tokio::time::Instant::now() + limits.head;
    let shake = async {
        match tokio::time::timeout_at(by, begins_plain(&stream)).await {
            Ok(Ok(true)) => return Some(Err(stream)),
            Ok(Ok(false)) => {}
            Ok(Err(_)) | Err(_) => return None,
        }
        let shaken = tokio::time::timeout_at(by, tls.accept(Moving::new(stream, limits))).await;
        shaken.ok()?.ok().map(Ok)
    };
    let shaken = tokio::select! {
        shaken = shake => shaken,
        () = until(&mut end.ended) => None,
    };
    match shaken {
        Some(Ok(stream)) => converse(stream, service, limits, end).await,
        Some(Err(plain)) => {
            let service = Served { router: without_tls(), ..service };
            converse(Moving::new(plain, limits), service, limits, end).await;
        }
        None => {}
    }
}

/// The requests of one connection.
async fn converse<S>(stream: S, service: Served, limits: Limits, mut end: Ending)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => {}
        () = until(&mut end.ended) => {
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(end.grace, connection).await;
        }
    }
}

/// Returns when the value is true, or the sender is gone.
async fn until(ended: &mut watch::Receiver<bool>) {
    let _ = ended.wait_for(|e| *e).await;
}

/// A body of bytes.
pub(crate) fn octets(bytes: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use super::*;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    /// A service with an echo of bodies and a long text, until it is dropped.
    struct Service {
        address: SocketAddr,
        end: watch::Sender<bool>,
        _runtime: tokio::runtime::Runtime,
    }

    impl Service {
        fn start(limits: Limits) -> Service {
            Service::start_with(limits, None)
        }

        /// With the certificate of the bench, which is for 127.0.0.1.
        fn start_secret(limits: Limits) -> Service {
            use std::os::unix::fs::PermissionsExt as _;
            let dir = tempfile::tempdir().unwrap();
            let (certificate, key) = (dir.path().join("certificate"), dir.path().join("key"));
            std::fs::write(&certificate, include_str!("../../lab/bench/tls/server.pem")).unwrap();
            std::fs::write(&key, include_str!("../../lab/bench/tls/server.key")).unwrap();
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
            Service::start_with(limits, Some(Certificate::read(&certificate, &key).unwrap()))
        }

        fn start_with(limits: Limits, tls: Option<Certificate>) -> Service {
            let router = Router::new()
                .route("/echo", axum::routing::post(async |body: String| body))
                .route("/long", axum::routing::get(async || "x".repeat(32 << 20)));
            let router = guarded(router, &[], Token::new(TOKEN).unwrap(), limits);
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let listener = runtime.block_on(bind([127, 0, 0, 1].into(), (0, 0))).unwrap();
            let address = listener.local_addr().unwrap();
            let (end, ended) = watch::channel(false);
            let grace = Duration::from_millis(100);
            runtime.spawn(async move { serve(listener, tls.as_ref(), router, limits, ended, grace).await });
            Service { address, end, _runtime: runtime }
        }

        fn connect(&self) -> TcpStream {
            let stream = TcpStream::connect(self.address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            stream
        }

        /// The status line's number of one request on a connection of its own; none if it was closed unanswered.
        fn ask(&self, head: &str, body: &[u8]) -> Option<u16> {
            let mut stream = self.connect();
            let length = body.len();
            let head = format!("{head} HTTP/1.1\r\nhost: h\r\ncontent-length: {length}\r\nconnection: close");
            let token = format!("authorization: Bearer {TOKEN}");
            stream.write_all(format!("{head}\r\n{token}\r\n\r\n").as_bytes()).ok()?;
            stream.write_all(body).ok()?;
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            answer.split(' ').nth(1)?.parse().ok()
        }
    }

    impl Drop for Service {
        fn drop(&mut self) {
            let _ = self.end.send(true);
        }
    }

    fn small() -> Limits {
        Limits {
            connections: 3,
            head: Duration::from_millis(300),
            request: Duration::from_millis(300),
            stall: Duration::from_millis(300),
            body: 1024,
            bodies: 1024,
            rate: 1e6,
            strangers: 1e6,
            poll: MAX_POLL,
        }
    }

    #[test]
    fn a_body_may_be_as_long_as_allowed_and_no_longer() {
        let service = Service::start(small());
        assert_eq!(service.ask("POST /echo", &[b'x'; 1024]), Some(200));
        assert_eq!(service.ask("POST /echo", &[b'x'; 1025]), Some(413));
    }

    #[test]
    fn a_head_that_trickles_in_is_cut_off() {
        let service = Service::start(small());
        let mut slow = service.connect();
        let begun = Instant::now();
        // A byte at a time does not buy more time. Nothing else ends this loop than the closed connection.
        let head = format!("GET /healthz HTTP/1.1\r\nx: {}", "y".repeat(4096));
        let closed = head.bytes().any(|b| {
            slow.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            slow.write_all(&[b]).is_err() || matches!(slow.read(&mut [0; 64]), Ok(0))
        });
        assert!(closed, "still open after {:?}", begun.elapsed());
        assert_eq!(service.ask("GET /healthz", b""), Some(200));
    }

    #[test]
    fn silent_connections_are_closed_and_more_than_allowed_are_not_kept() {
        let service = Service::start(Limits { head: Duration::from_secs(600), ..small() });
        let mut silent: Vec<TcpStream> = (0..3).map(|_| service.connect()).collect();
        // They do not block clients with the token: the oldest is closed, long before its timeout.
        for _ in 0..2 {
            assert_eq!(service.ask("GET /healthz", b""), Some(200));
        }
        assert_eq!(silent[0].read(&mut [0; 8]).unwrap_or(0), 0);
        let service = Service::start(small());
        let mut silent = service.connect();
        assert_eq!(silent.read(&mut [0; 8]).unwrap_or(0), 0, "closed when its time is over");
    }

    #[test]
    fn half_heads_of_strangers_do_not_keep_out_who_has_the_token() {
        let limits = Limits { connections: 64, head: Duration::from_secs(600), ..small() };
        let service = Service::start(limits);
        let token = format!("authorization: Bearer {TOKEN}");
        let poll = format!("GET /healthz HTTP/1.1\r\nhost: h\r\n{token}\r\n\r\n");
        let mut known = service.connect();
        let mut answered = || {
            known.write_all(poll.as_bytes()).unwrap();
            let mut answer = [0; 15];
            known.read_exact(&mut answer).unwrap();
            // The rest of the answer, whose body is `{"ok":true}`.
            let mut rest = Vec::new();
            while !rest.ends_with(b"true}") {
                let mut byte = [0];
                known.read_exact(&mut byte).unwrap();
                rest.push(byte[0]);
            }
            &answer == b"HTTP/1.1 200 OK"
        };
        assert!(answered());
        let mut strangers = Vec::new();
        for round in 0..8 {
            for _ in 0..limits.connections {
                let mut stranger = service.connect();
                stranger.write_all(b"GET /get_version HTTP/1.1\r\nhost: h\r\nx: ").unwrap();
                strangers.push(stranger);
            }
            for _ in 0..4 {
                assert_eq!(service.ask("GET /healthz", b""), Some(200), "round {round}");
            }
            assert!(answered(), "a connection with an accepted request is not closed for strangers");
        }
    }

    #[test]
    fn the_body_of_a_stranger_is_not_read() {
        let service = Service::start(Limits { body: 16 << 20, bodies: 16 << 20, ..small() });
        let mut stranger = service.connect();
        // Answered, and closed, though nothing of the body has come.
        let head = format!("POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: {}\r\n\r\n", 14 << 20);
        stranger.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stranger.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 401 ") && answer.contains("connection: close"), "{answer}");
    }

    #[test]
    fn large_bodies_wait_for_room_and_small_ones_do_not() {
        let (large, longer) = (1 << 20, Duration::from_secs(600));
        let limits = Limits { body: large, bodies: large, request: longer, connections: 8, ..small() };
        let service = Service::start(limits);
        let token = format!("authorization: Bearer {TOKEN}");
        let begin = |connection: &mut TcpStream| {
            let head = format!("POST /echo HTTP/1.1\r\nhost: h\r\n{token}\r\ncontent-length: {large}");
            connection.write_all(format!("{head}\r\nexpect: 100-continue\r\n\r\n").as_bytes()).unwrap();
        };
        let mut said = [0; 25];
        let mut first = service.connect();
        begin(&mut first);
        first.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"HTTP/1.1 100 Continue\r\n\r\n", "it is read");
        let mut second = service.connect();
        begin(&mut second);
        assert_eq!(service.ask("POST /echo", &[b'x'; 1024]), Some(200), "small ones go on");
        second.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        assert!(second.read(&mut said).is_err(), "it is not asked for its body while there is no room");
        drop(first);
        second.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        second.read_exact(&mut said).unwrap();
        second.write_all(&vec![b'x'; large]).unwrap();
        let mut answer = [0; 15];
        second.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
    }

    #[test]
    fn a_peer_that_never_reads_its_answers_is_let_go_of() {
        let service = Service::start(Limits { connections: 1, ..small() });
        let mut deaf = service.connect();
        let token = format!("authorization: Bearer {TOKEN}");
        deaf.write_all(format!("GET /long HTTP/1.1\r\nhost: h\r\n{token}\r\n\r\n").as_bytes()).unwrap();
        // Its first bytes: it has the one slot.
        let mut first = [0; 8];
        deaf.read_exact(&mut first).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while service.ask("GET /healthz", b"") != Some(200) {
            assert!(Instant::now() < until, "it holds the connection still");
        }
    }

    #[test]
    fn strangers_run_into_the_rate_limit_alone() {
        // Nothing is filled in again while the test runs.
        let service = Service::start(Limits { rate: 1e-3, connections: 64, ..small() });
        assert_eq!(service.ask("GET /healthz", b""), Some(429), "less than one request in the bucket");
        let guard = Bucket::new(3.0);
        assert_eq!((0..100).filter(|_| guard.admit()).count(), 3);
        let limits = Limits { rate: 5.0, strangers: 5.0, connections: 64, ..small() };
        let service = Service::start(limits);
        let mut stranger = service.connect();
        let request = "GET /get_version HTTP/1.1\r\nhost: h\r\n\r\n".repeat(50);
        let last = "GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n";
        stranger.write_all(format!("{request}{last}").as_bytes()).unwrap();
        let mut answers = String::new();
        stranger.read_to_string(&mut answers).unwrap();
        let count = |status: &str| answers.matches(&format!("HTTP/1.1 {status} ")).count();
        assert!(count("401") >= 5 && count("429") >= 1, "{} {}", count("401"), count("429"));
        assert_eq!(count("401") + count("429"), 51);
        assert_eq!(service.ask("GET /healthz", b""), Some(200), "who has the token is not held up");
    }

    /// How long a connection stayed open after these bytes, and what came back on it.
    fn left_alone(service: &Service, bytes: &[u8]) -> (Duration, Vec<u8>) {
        let (mut stream, began) = (service.connect(), Instant::now());
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        (began.elapsed(), answer)
    }

    #[test]
    fn garbage_and_slow_handshakes_at_a_port_with_tls_are_cut_off() {
        let service = Service::start_secret(small());
        let most = Duration::from_secs(5);
        // What is no handshake is closed with an alert, or with nothing; what takes too long, at the bound of a head.
        let alert = [21, 3];
        let (after, said) = left_alone(&service, &[0xff; 4096]);
        assert!(after < most && (said.is_empty() || said.starts_with(&alert)), "{after:?} {said:?}");
        let (after, said) = left_alone(&service, &[22, 3, 1, 0, 200, 1, 0]);
        assert!(after >= small().head && after < most && said.is_empty(), "{after:?} {said:?}");
        let (after, said) = left_alone(&service, &[]);
        assert!(after >= small().head && after < most && said.is_empty(), "{after:?} {said:?}");
        // A request without TLS is answered, and told what to do.
        let (after, said) = left_alone(&service, b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n");
        let said = String::from_utf8(said).unwrap();
        assert!(said.starts_with("HTTP/1.1 400 ") && said.contains("https://") && after < most, "{said}");
        // One that never ends its head is not waited for either.
        let (after, _) = left_alone(&service, b"GET /healthz HT");
        assert!(after >= small().head && after < most, "{after:?}");
    }

    #[test]
    fn handshakes_count_as_connections() {
        let service = Service::start_secret(Limits { head: Duration::from_secs(600), ..small() });
        let mut silent: Vec<_> = (0..small().connections).map(|_| service.connect()).collect();
        // One more: the oldest goes, long before its time for a handshake is over.
        let _one_more = service.connect();
        assert_eq!(silent[0].read(&mut [0; 8]).unwrap_or(0), 0);
    }
}
