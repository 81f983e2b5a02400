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
//! | body | [`Limits::body`] |
//! | requests per second, all connections together | [`Limits::rate`], with bursts of twice that |

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::net::TcpListener;
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
    bucket: Mutex<(f64, Instant)>,
}

impl Guard {
    /// Takes one request out of the bucket.
    fn admit(&self) -> bool {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let refill = now.duration_since(bucket.1).as_secs_f64() * self.limits.rate;
        *bucket = ((bucket.0 + refill).min(self.limits.rate * 2.0), now);
        let room = bucket.0 >= 1.0;
        if room {
            bucket.0 -= 1.0;
        }
        room
    }
}

/// Puts the token, the rate, the time and the size limits in front of a router. `/healthz` needs no token.
pub fn guarded(router: Router, token: Token, limits: Limits) -> Router {
    let bucket = Mutex::new((limits.rate, Instant::now()));
    let guard = Arc::new(Guard { token, limits, bucket });
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
    if !guard.admit() {
        let failure = Failure::new(Kind::Exhausted, "too many requests at once: wait a second");
        return Failure { status: Some(StatusCode::TOO_MANY_REQUESTS), ..failure }.into_response();
    }
    let given = request.headers().get(header::AUTHORIZATION).and_then(|h| h.to_str().ok());
    if request.uri().path() != "/healthz" && !token::accepts(&guard.token, given) {
        let failure = Failure::new(
            Kind::Denied,
            "the token is missing or wrong: send the publisher's as `Authorization: Bearer …`",
        );
        return Failure { status: Some(StatusCode::UNAUTHORIZED), ..failure }.into_response();
    }
    let most = guard.limits.request + MAX_POLL;
    match tokio::time::timeout(most, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Failure::new(Kind::Timeout, "the request took too long").into_response(),
    }
}

/// Binds the first free port of a range on one address; port 0 means any.
pub async fn bind(address: std::net::IpAddr, ports: (u16, u16)) -> std::io::Result<TcpListener> {
    let mut last = None;
    for port in ports.0..=ports.1 {
        match TcpListener::bind(SocketAddr::new(address, port)).await {
            Ok(listener) => return Ok(listener),
            Err(e) => last = Some(e),
        }
    }
    Err(last.unwrap_or_else(|| std::io::Error::other("the port range is empty")))
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
