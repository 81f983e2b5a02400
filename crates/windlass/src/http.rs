//! HTTP as all services of Windlass speak it: bounded, authenticated, with errors that say what to do.
//!
//! Owns: the accept loop with its limits, the check of the token, the rate limit, and the JSON form of errors. Called
//! by the agent (and later the controller) with a router. Must not: know what the endpoints do.
//!
//! | bound | value |
//! |---|---|
//! | connections | [`Limits::connections`]; more are closed at once |
//! | time to send a request's head | [`Limits::head`] |
//! | time of a request, its body included | [`Limits::request`], on top of what a long-poll asks for |
//! | time that a peer may take none of an answer | [`Limits::stall`] |
//! | body | [`Limits::body`] |
//! | requests per second, all connections together | [`Limits::rate`], with bursts of twice that |
//!
//! Requests with the token and those without are counted apart: strangers cannot use up what receivers need.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use windlass_core::address::Token;
use windlass_core::error::Kind;

use crate::token;

/// The bounds of a service.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// How long a request's head may take to arrive.
    pub head: Duration,
    /// How long a request may take.
    pub request: Duration,
    /// How long a peer may take none of what is sent to it.
    pub stall: Duration,
    /// The longest body.
    pub body: usize,
    /// Requests per second.
    pub rate: f64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            head: Duration::from_secs(5),
            request: Duration::from_secs(60),
            stall: Duration::from_secs(30),
            body: 16 << 20,
            rate: 2000.0,
        }
    }
}

/// The longest that a long-poll may ask to wait.
pub const MAX_POLL: Duration = Duration::from_secs(60);

/// A failed request.
#[derive(Debug)]
pub struct Failure {
    /// What sort of failure.
    pub kind: Kind,
    /// For people.
    pub message: String,
    /// The status, where it is not that of the kind.
    pub status: Option<StatusCode>,
}

impl Failure {
    /// A failure of a kind, with its status.
    pub fn new(kind: Kind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), status: None }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let row = self.kind.row();
        let status = StatusCode::from_u16(row.http).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = json!({
            "ok": false,
            "error": { "kind": self.kind, "message": self.message, "advice": row.advice },
        });
        (self.status.unwrap_or(status), Json(body)).into_response()
    }
}

struct Guard {
    token: Token,
    limits: Limits,
    known: Bucket,
    strangers: Bucket,
}

/// So many requests a second.
struct Bucket {
    rate: f64,
    room: Mutex<(f64, Instant)>,
}

impl Bucket {
    fn new(rate: f64) -> Bucket {
        Bucket { rate, room: Mutex::new((rate, Instant::now())) }
    }

    /// Takes one request out of the bucket.
    fn admit(&self) -> bool {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
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

/// Puts the token, the rate, the time and the size limits in front of a router. `/healthz` needs no token.
pub fn guarded(router: Router, token: Token, limits: Limits) -> Router {
    let (known, strangers) = (Bucket::new(limits.rate), Bucket::new(limits.rate));
    let guard = Arc::new(Guard { token, limits, known, strangers });
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
    let bucket = if known { &guard.known } else { &guard.strangers };
    if !bucket.admit() {
        let failure = Failure::new(Kind::Exhausted, "too many requests at once: wait a second");
        let mut response = Failure { status: Some(StatusCode::TOO_MANY_REQUESTS), ..failure }.into_response();
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return response;
    }
    if request.uri().path() != "/healthz" && !known {
        let failure = Failure::new(
            Kind::Denied,
            "the token is missing or wrong: send the publisher's as `Authorization: Bearer …`",
        );
        let mut response = Failure { status: Some(StatusCode::UNAUTHORIZED), ..failure }.into_response();
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        return response;
    }
    let most = guard.limits.request + MAX_POLL;
    match tokio::time::timeout(most, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Failure::new(Kind::Timeout, "the request took too long").into_response(),
    }
}

/// Binds the first free port of a range on one address; port 0 means any.
pub async fn bind(address: IpAddr, ports: (u16, u16)) -> io::Result<TcpListener> {
    let mut last = None;
    for port in ports.0..=ports.1 {
        match TcpListener::bind(SocketAddr::new(address, port)).await {
            Ok(listener) => return Ok(listener),
            Err(e) => last = Some(e),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::other("the port range is empty")))
}

/// A stream whose writes fail once the peer has taken nothing for [`Limits::stall`]: one that sends requests and never
/// reads the answers would hold its connection for ever.
struct Moving {
    stream: TcpStream,
    most: Duration,
    stalled: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Moving {
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

/// Serves until `ended` is true, then gives open requests `grace`.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    mut ended: watch::Receiver<bool>,
    grace: Duration,
) {
    let room = Arc::new(Semaphore::new(limits.connections));
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = until(&mut ended) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            tracing::warn!(limit = limits.connections, "too many connections; one was closed");
            continue;
        };
        let _ = stream.set_nodelay(true);
        let stream = Moving { stream, most: limits.stall, stalled: None };
        let service = TowerToHyperService::new(router.clone());
        let mut ended = ended.clone();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            let _permit = permit;
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(limits.head)
                .serve_connection(TokioIo::new(stream), service);
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                // What went wrong on a connection concerns the peer alone.
                _ = connection.as_mut() => {}
                () = until(&mut ended) => {
                    connection.as_mut().graceful_shutdown();
                    let _ = tokio::time::timeout(grace, connection).await;
                }
            }
        });
    }
    drop(listener);
    // Each ends by itself within the grace; what does not is dropped with the set.
    let all = async { while tasks.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(grace + Duration::from_millis(100), all).await;
}

/// Returns when the value is true, or nobody can set it any more.
async fn until(ended: &mut watch::Receiver<bool>) {
    let _ = ended.wait_for(|e| *e).await;
}

/// A body of bytes.
pub fn octets(bytes: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/octet-stream")], Body::from(bytes)).into_response()
}
