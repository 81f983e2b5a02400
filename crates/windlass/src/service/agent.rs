//! `windlass agent`: serves a region to receivers.
//!
//! Owns: the HTTP endpoints in front of [`windlass_data::serve::Server`], the process around it (signals, the pipe of
//! its parent, files that say where it is), and its metrics. The first rank on a node starts it and
//! restarts it if it dies; all its state is in the region. Must not: write to a slot.
//!
//! # Endpoints
//!
//! Those of [`windlass_core::wire::control`], and `/metrics` (Prometheus text), `/status` (receivers
//! and the newest delta) and `/healthz`. All but `/healthz` require the token.
//!
//! # Address
//!
//! `agent.json` in the region's directory holds the endpoint, the data port and the path of the token, for processes on
//! the same host. The agent removes it at a regular end.
//!
//! # Successive regions
//!
//! An agent that its trainer did not start outlives the trainer and keeps serving the last version. When a trainer waits to
//! create its region in the place of one that no process publishes in any more ([`Region::is_wanted`]), the agent releases the
//! old one, waits for the new region and serves it, at the same ports if possible. The waiting trainer may be the next one, or the
//! same one that begins a new incarnation, with another layout for example. The agent does the same if the directory was
//! removed and another region made in its place ([`Region::is_replaced`]).

use std::fmt::Write as _;
use std::io;
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::watch;
use windlass_core::address::{Host, HostPort, Token};
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, Version};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::TicketId;
use windlass_core::wire::control::{
    BufferInfo, PartRequest, Registration, Relays, SharedTicket, TransferDone, TransferRequest, VersionInfo,
};
use windlass_data::history::Limits as HistoryLimits;
use windlass_data::local::LocalServer;
use windlass_data::nixl::Exporter;
use windlass_data::region::{Region, RegionError};
use windlass_data::seal::draft::Draft;
use windlass_data::serve::{Peer, ServeError, Server, ServerConfig};
use windlass_data::stop::Stop;
use windlass_data::tcp::SenderConfig;
use windlass_data::tls::{Certificate, Trust};

use crate::console::Session;
use crate::error::{Error, chain};
use crate::service::agent_address::{self, AgentAddress};
use crate::service::control::HttpControl;
use crate::service::http::{self, Body, Failure, Limits, MAX_POLL, Params};
use crate::service::nixl::Nixl;
use crate::service::spans::{self, Spans};
use crate::service::store::publish::{Figures, Publisher, StoreOptions};
use crate::service::tls;
use crate::service::token;

/// The checked arguments of `agent`.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    /// The region to serve.
    pub(crate) region: PathBuf,
    /// The address to listen on, for control and data.
    pub(crate) bind: IpAddr,
    /// The first and the last port to try for requests; zeros mean any.
    pub(crate) ports: (u16, u16),
    /// The same for data.
    pub(crate) data_ports: (u16, u16),
    /// The host that others are told; that of `bind` if not given.
    pub(crate) advertise_host: Option<Host>,
    /// The token; read or made in the region's directory if not given.
    pub(crate) token: Option<Token>,
    /// Where the token is read from or made.
    pub(crate) token_file: Option<PathBuf>,
    /// How many deltas are kept.
    pub(crate) history: usize,
    /// How many bytes of deltas are kept.
    pub(crate) history_bytes: u64,
    /// How often the bytes of a version that was handed out by delta are summed; 0 for never.
    pub(crate) check_every: u64,
    /// From so many receivers on that can, they pass deltas on to each other, and images always; 0 for never.
    pub(crate) relay_from: usize,
    /// Whether receivers may read images from memory.
    pub(crate) nixl: Nixl,
    /// Threads of the sealer.
    pub(crate) threads: usize,
    /// Streams of a transfer.
    pub(crate) streams: u16,
    /// How long a transfer may take.
    pub(crate) timeout: Duration,
    /// Agents that hold the other parts.
    pub(crate) peers: Vec<String>,
    /// The files with the certificate and its key, for TLS.
    pub(crate) tls: Option<(PathBuf, PathBuf)>,
    /// Authorities to trust for peers; by default the system's.
    pub(crate) trust: Option<Trust>,
    /// Where what is sealed is uploaded, and how.
    pub(crate) store: Option<StoreOptions>,
    /// How long to wait for the region to be made.
    pub(crate) wait: Duration,
    /// End when standard input ends: the parent is gone.
    pub(crate) with_parent: bool,
    /// The ports of an earlier agent for requests and data: tried first, if they are among those above.
    pub(crate) again: Option<(u16, u16)>,
}

/// How long a client that knows a newer incarnation waits for a version.
const OTHER_LIFE: Duration = Duration::from_secs(1);

impl Agent {
    /// Serves until it is told to end.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let _spans = Spans::start("windlass-agent");
        let advertise_host = match &self.advertise_host {
            Some(host) => host.clone(),
            None => Host::new(&self.advertised()?).map_err(|e| Error::Usage(e.to_string()))?,
        };
        http::raise_descriptors();
        let certificate = tls::certificate(self.tls.as_ref(), &advertise_host)?;
        if let Some(plain) = self.peers.iter().find(|p| self.tls.is_some() && !p.starts_with("https://")) {
            return Err(Error::Usage(format!(
                "--peer {plain} is without TLS, but receivers of this agent take nothing that is: start it with \
                 --tls-cert, too, and name it with https://"
            )));
        }
        let nixl = self.nixl.exporter(certificate.is_some())?;
        if self.with_parent {
            // Before anything is waited for: a parent may die while the region is not there yet.
            let cancel = session.cancel().clone();
            Session::with_parent(move || cancel.set())?;
        }
        let (mut wait, mut again) = (Some(self.wait), self.again);
        loop {
            let region = self.open(wait.take(), session)?;
            let data = (certificate.as_ref(), nixl.clone());
            let Some(ports) = self.life(region, &advertise_host, data, again, session)? else {
                return Ok(());
            };
            again = Some(ports);
        }
    }

    /// Serves one region until the agent is told to end, or the region is wanted or replaced; then, the ports that it had.
    fn life(
        &self,
        region: Arc<Region>,
        advertise_host: &Host,
        (certificate, nixl): (Option<&Certificate>, Option<Arc<Exporter>>),
        again: Option<(u16, u16)>,
        session: &Session,
    ) -> Result<Option<(u16, u16)>, Error> {
        let (token, token_file) = self.token(&region)?;
        let peer = |url: &String| -> Result<Arc<dyn Peer>, Error> {
            Ok(Arc::new(HttpControl::new(url, token.clone())?.with_trust(self.trust.clone())))
        };
        let config = ServerConfig {
            advertise_host: advertise_host.clone(),
            tcp: SenderConfig {
                bind: self.bind,
                ports: self.data_ports.0..=self.data_ports.1,
                first: again.map(|(_, data)| data).filter(|p| is_among(*p, self.data_ports)),
                tls: certificate.cloned(),
                nixl,
                ..SenderConfig::default()
            },
            history: HistoryLimits { count: self.history, bytes: self.history_bytes.min(room(&region)) },
            check_every: self.check_every,
            relay_from: self.relay_from,
            threads: self.threads,
            streams: self.streams,
            transfer_timeout: self.timeout,
            peers: self.peers.iter().map(peer).collect::<Result<_, _>>()?,
            on_sealed: Some(Arc::new(spans::of_sealed)),
            ..ServerConfig::new(advertise_host.clone())
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|e| Error::Bug(format!("no async runtime: {e}")))?;
        let listener = runtime.block_on(self.bind(again)).map_err(|source| Error::Listen {
            bind: self.bind,
            ports: self.ports,
            source,
        })?;
        let address = listener.local_addr().map_err(|e| Error::Bug(e.to_string()))?;
        // The region's report of what the system refused belongs to the start, and is said once.
        tracing::info!(memory = %region.report(), "region");
        if self.store.is_some() && (region.part().is_some() || !self.peers.is_empty()) {
            return Err(Error::Usage(
                "--store is for an agent that has the whole model; this one has a part of it, and the others the rest: receive \
                 from the agents, or let a receiver put checkpoints up with --as-dir"
                    .into(),
            ));
        }
        let server = Arc::new(Server::start(Arc::clone(&region), config)?);
        let publisher = self.store.clone().map(|store| {
            let started = Publisher::start(Arc::clone(&server), store, self.trust.clone(), session);
            started.map_err(|e| Error::Bug(format!("no thread for uploads: {e}")))
        });
        let publisher = publisher.transpose()?;
        let figures = publisher.as_ref().map(Publisher::figures);
        let local = match LocalServer::start(Arc::clone(&region)) {
            Ok(local) => Some(local),
            Err(error) => {
                tracing::warn!(%error, "receivers on this host must copy the slots instead of mapping them");
                None
            }
        };
        let port = NonZeroU16::new(address.port()).unwrap_or(NonZeroU16::MIN);
        let here = AgentAddress {
            endpoint: format!(
                "{}://{}",
                tls::scheme(certificate),
                HostPort::new(advertise_host.clone(), port)
            ),
            data_port: server.data_endpoint().port(),
            token_file,
            pid: std::process::id(),
        };
        let path = region.dir().join(agent_address::FILE);
        let text = serde_json::to_vec(&here).map_err(|e| Error::Bug(e.to_string()))?;
        Draft::write(&path, &text).map_err(Error::io("write", &path))?;
        let event = json!({
            "event": "listening",
            "endpoint": here.endpoint,
            "data_port": here.data_port,
            "token_file": here.token_file,
            "region": region.dir(),
            "model_id": region.model_id(),
            "incarnation": region.incarnation(),
        });
        session.event(&event, || {
            let token = here.token_file.as_ref().map_or("the one given".into(), |f| f.display().to_string());
            let (model, dir) = (region.model_id(), region.dir().display());
            format!(
                "serving {model} from {dir} at {} (data port {}), token: {token}",
                here.endpoint, here.data_port
            )
        });
        let end = runtime.block_on(self.serve(listener, (Arc::clone(&server), figures), token, session));
        // In a directory that was replaced, a file of this name is another agent's.
        if !region.is_replaced() {
            let _ = std::fs::remove_file(&path);
        }
        drop(local);
        // Uploads what was sealed last.
        drop(publisher);
        runtime.shutdown_timeout(Duration::from_secs(1));
        if let Some(server) = Arc::into_inner(server) {
            server.shutdown(Duration::from_secs(2));
        }
        let why = match end {
            End::Told => return Ok(None),
            End::Wanted => "its trainer has left it, and a trainer waits for the place",
            End::Replaced => "it was removed, and another region was made in its place",
        };
        session.event(&json!({ "event": "let_go", "region": region.dir(), "reason": why }), || {
            format!("let go of {}: {why}", region.dir().display())
        });
        Ok(Some((address.port(), here.data_port)))
    }

    async fn bind(&self, again: Option<(u16, u16)>) -> io::Result<tokio::net::TcpListener> {
        let again = again.map(|(port, _)| port).filter(|p| is_among(*p, self.ports));
        match again {
            Some(port) => match http::bind(self.bind, (port, port)).await {
                Err(_) => http::bind(self.bind, self.ports).await,
                ok => ok,
            },
            None => http::bind(self.bind, self.ports).await,
        }
    }

    /// The region, which its publisher may be about to make. Without a time, as long as it takes.
    fn open(&self, wait: Option<Duration>, session: &Session) -> Result<Arc<Region>, Error> {
        let stop = wait.map_or_else(|| session.cancel().clone(), |w| session.cancel().with_timeout(w));
        let mut said = false;
        loop {
            // An open region that its trainer has left would block the next one.
            let found = if Region::is_wanted(&self.region) {
                Err(RegionError::Absent { dir: self.region.clone() })
            } else {
                Region::open(&self.region)
            };
            match found {
                Err(RegionError::Absent { dir } | RegionError::HolderGone { dir, .. }) if !stop.is_set() => {
                    if !std::mem::replace(&mut said, true) {
                        let event = json!({ "event": "waiting", "region": dir });
                        session
                            .event(&event, || format!("waiting for a publisher to make {}", dir.display()));
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => {
                    session.cancel().check()?;
                    return Ok(other?);
                }
            }
        }
    }

    fn token(&self, region: &Region) -> Result<(Token, Option<PathBuf>), Error> {
        if let Some(token) = &self.token {
            return Ok((token.clone(), None));
        }
        let path = self.token_file.clone().unwrap_or_else(|| region.dir().join("token"));
        Ok((token::read_or_make(&path)?, Some(path)))
    }

    fn advertised(&self) -> Result<String, Error> {
        if self.bind.is_unspecified() {
            return Err(Error::Usage(format!(
                "--bind {} listens on every address: say with --advertise-host which one receivers should use",
                self.bind
            )));
        }
        Ok(self.bind.to_string())
    }

    async fn serve(
        &self,
        listener: tokio::net::TcpListener,
        (server, figures): (Arc<Server>, Option<Arc<Mutex<Figures>>>),
        token: Token,
        session: &Session,
    ) -> End {
        let (end, ended) = watch::channel(false);
        let cancel = session.cancel().clone();
        let region = Arc::clone(server.region());
        let watching = tokio::spawn(async move {
            let why = loop {
                if cancel.check().is_err() {
                    break End::Told;
                }
                if Region::is_wanted(region.dir()) {
                    break End::Wanted;
                }
                if region.is_replaced() {
                    break End::Replaced;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            let _ = end.send(true);
            why
        });
        answer(listener, server, figures, token, ended).await;
        // It is over, or nothing would have ended.
        watching.await.unwrap_or(End::Told)
    }
}

/// Why an agent serves a region no longer.
enum End {
    /// It was told to end.
    Told,
    /// No process publishes in the region any more, and a trainer waits for the place.
    Wanted,
    /// The region was removed, and there is another one in its place.
    Replaced,
}

/// Answers requests about `server`, inside TLS if its data is, until `ended` is true. Returns when nothing of it is left.
pub(crate) async fn answer(
    listener: tokio::net::TcpListener,
    server: Arc<Server>,
    figures: Option<Arc<Mutex<Figures>>>,
    token: Token,
    ended: watch::Receiver<bool>,
) {
    let (newest, versions) = watch::channel(server.version());
    let certificate = server.certificate().cloned();
    let limits = Limits::default();
    let port = listener.local_addr().map_or(0, |a| a.port());
    let stop = Stop::never();
    let (joins, joined) = watch::channel(0);
    let shared = Shared { server: Arc::clone(&server), figures, versions, joined, port, stop: stop.clone() };
    let router = http::guarded(routes(shared), &[], token, limits);
    // Long-polls wait on these channels, so that a thousand of them cost no thread.
    let (watch_stop, watched) = (stop.clone(), Arc::clone(&server));
    let join_watcher = tokio::task::spawn_blocking(move || {
        while !watch_stop.is_set() {
            let seen = *joins.borrow();
            let now = watched.wait_joined(seen, &watch_stop.with_timeout(Duration::from_secs(1)));
            joins.send_if_modified(|old| std::mem::replace(old, now) != now);
        }
    });
    let watch_stop = stop.clone();
    let watcher = tokio::task::spawn_blocking(move || {
        let mut seen = None;
        while !watch_stop.is_set() {
            let info = server.wait_version(seen, &watch_stop.with_timeout(Duration::from_secs(1)));
            seen = info.version.map(|v| (info.incarnation, v));
            newest.send_if_modified(|old| (*old != info).then(|| *old = info.clone()).is_some());
        }
    });
    // At the end, the watcher closes the channel, which answers all waiting requests at once.
    let (mut told, at_end) = (ended.clone(), stop.clone());
    let ending = tokio::spawn(async move {
        let _ = told.wait_for(|e| *e).await;
        at_end.set();
    });
    http::serve(listener, certificate.as_ref(), router, limits, ended, Duration::from_secs(2)).await;
    ending.abort();
    stop.set();
    let _ = (watcher.await, join_watcher.await);
}

/// What the region was promised for deltas; a region that was made without a promise has no bound of its own.
fn room(region: &Region) -> u64 {
    match region.extra_bytes() {
        0 => u64::MAX,
        bytes => bytes,
    }
}

/// Whether a port is one of those that may be used; zeros mean any.
fn is_among(port: u16, (first, last): (u16, u16)) -> bool {
    port != 0 && (first == 0 || (first..=last).contains(&port))
}

#[derive(Clone)]
struct Shared {
    server: Arc<Server>,
    /// Of the upload to a store, if there is one.
    figures: Option<Arc<Mutex<Figures>>>,
    versions: watch::Receiver<VersionInfo>,
    /// How often receivers joined those that pass versions on.
    joined: watch::Receiver<u64>,
    port: u16,
    /// Set when the service ends.
    stop: Stop,
}

impl Shared {
    fn store(&self) -> Option<Figures> {
        self.figures.as_ref().map(|f| f.lock().clone())
    }
}

fn routes(shared: Shared) -> Router {
    Router::new()
        .route("/get_version", get(get_version))
        .route("/get_buffer_info", get(get_buffer_info))
        .route("/get_capabilities", get(get_capabilities))
        .route("/get_manifest", get(get_manifest))
        .route("/get_sums", get(get_sums))
        .route("/get_relays", get(get_relays))
        .route("/get_part", get(get_part).post(get_part_of_slice))
        .route("/share_ticket", post(share_ticket))
        .route("/register_receiver", post(register))
        .route("/register_sglang_instance", post(register))
        .route("/request_transfer", post(request_transfer))
        .route("/transfer_done", post(transfer_done))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .with_state(shared)
}

fn failure(error: ServeError) -> Failure {
    // Before the first version the answer is 503, as documented.
    let status = matches!(error, ServeError::NothingYet { .. }).then_some(StatusCode::SERVICE_UNAVAILABLE);
    Failure { kind: error.kind(), message: chain(&error), status }
}

/// Runs blocking work on its own thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ServeError> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(failure),
        Err(e) => Err(Failure::new(Kind::Bug, e.to_string())),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct VersionQuery {
    newer_than: Option<Version>,
    incarnation: Option<Incarnation>,
    timeout_ms: Option<u64>,
}

async fn get_version(
    State(shared): State<Shared>,
    Params(query): Params<VersionQuery>,
) -> Result<Json<VersionInfo>, Failure> {
    let mut versions = shared.versions.clone();
    if query.newer_than.is_none() && query.incarnation.is_none() {
        // Asks the server, not the channel, which may be behind the last sealed version.
        return Ok(Json(shared.server.version()));
    }
    let own = versions.borrow().incarnation;
    let seen = (query.incarnation.unwrap_or(own), query.newer_than.unwrap_or(0));
    let mut wait = Duration::from_millis(query.timeout_ms.unwrap_or(30_000)).min(MAX_POLL);
    if seen.0 > own {
        // The client knows a newer incarnation, so no newer version will come from here soon.
        wait = wait.min(OTHER_LIFE);
    }
    let newer = versions.wait_for(|info| info.is_newer_than(Some(seen)));
    // On timeout, answers the current version; the client compares.
    let _ = tokio::time::timeout(wait, newer).await;
    Ok(Json(shared.server.version()))
}

async fn get_buffer_info(State(shared): State<Shared>) -> Result<Json<BufferInfo>, Failure> {
    if shared.server.version().version.is_none() {
        let model = shared.server.region().model_id().to_string();
        return Err(failure(ServeError::NothingYet { model }));
    }
    Ok(Json(BufferInfo::of(shared.server.region().manifest())))
}

async fn get_capabilities(State(shared): State<Shared>) -> Response {
    Json(shared.server.capabilities()).into_response()
}

async fn get_manifest(State(shared): State<Shared>) -> Response {
    let json = shared.server.region().manifest().to_json();
    ([(header::CONTENT_TYPE, "application/json")], json).into_response()
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SumsQuery {
    version: Option<Version>,
}

async fn get_sums(
    State(shared): State<Shared>,
    Params(query): Params<SumsQuery>,
) -> Result<Response, Failure> {
    let stop = shared.stop.with_timeout(Limits::default().request);
    let sums = blocking(move || shared.server.sums(query.version, &stop)).await?;
    Ok(http::octets(sums.sums().iter().flat_map(|s| s.to_bytes()).collect()))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RelaysQuery {
    ticket: TicketId,
    known: u32,
    timeout_ms: Option<u64>,
}

async fn get_relays(
    State(shared): State<Shared>,
    Params(query): Params<RelaysQuery>,
) -> Result<Response, Failure> {
    let until =
        tokio::time::Instant::now() + Duration::from_millis(query.timeout_ms.unwrap_or(0)).min(MAX_POLL);
    let (server, mut joined) = (shared.server, shared.joined);
    let more = |hurry| server.more_relays(query.ticket, query.known, hurry).map_err(failure);
    let relays = loop {
        joined.mark_unchanged();
        if let Some(relays) = more(true)? {
            break relays;
        }
        match tokio::time::timeout_at(until, joined.changed()).await {
            Ok(Ok(())) => {}
            // The time is over, or the service ends.
            Ok(Err(_)) | Err(_) => {
                let none = Relays { receivers: query.known, relays: Vec::new() };
                break more(false)?.unwrap_or(none);
            }
        }
    };
    Ok(Json(relays).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartQuery {
    version: Version,
    base: Option<Version>,
    stripe_bytes: Option<u32>,
    timeout_ms: Option<u64>,
}

async fn get_part(
    State(shared): State<Shared>,
    Params(query): Params<PartQuery>,
) -> Result<Response, Failure> {
    part(shared, query, None).await
}

async fn get_part_of_slice(
    State(shared): State<Shared>,
    Params(query): Params<PartQuery>,
    Body(keeps): Body<BlockRanges>,
) -> Result<Response, Failure> {
    part(shared, query, Some(keeps)).await
}

async fn part(shared: Shared, query: PartQuery, keeps: Option<BlockRanges>) -> Result<Response, Failure> {
    let wait = Duration::from_millis(query.timeout_ms.unwrap_or(30_000)).min(MAX_POLL);
    let (server, stop) = (shared.server, shared.stop.with_timeout(wait));
    let PartQuery { version, base, stripe_bytes, .. } = query;
    let wanted = PartRequest { version, base, stripe_bytes, keeps };
    let part = blocking(move || server.part(wanted, &stop)).await?;
    Ok(Json(part).into_response())
}

async fn share_ticket(
    State(shared): State<Shared>,
    Body(body): Body<SharedTicket>,
) -> Result<Response, Failure> {
    let stop = shared.stop.with_timeout(Limits::default().request);
    blocking(move || shared.server.share(body, &stop)).await?;
    Ok(Json(json!({ "ok": true })).into_response())
}

async fn register(State(shared): State<Shared>, Body(body): Body<Registration>) -> Result<Response, Failure> {
    let registered = shared.server.register(&body, shared.port).map_err(failure)?;
    let mut answer = serde_json::to_value(registered).map_err(|e| Failure::new(Kind::Bug, e.to_string()))?;
    if let Some(fields) = answer.as_object_mut() {
        // Existing clients expect these fields. They are empty: the trainer's memory is not exposed.
        fields.insert("trainer_session_ids".into(), json!([]));
        fields.insert("trainer_buffer_ptr".into(), json!(0));
    }
    Ok(Json(answer).into_response())
}

async fn request_transfer(
    State(shared): State<Shared>,
    Body(body): Body<TransferRequest>,
) -> Result<Response, Failure> {
    let stop = shared.stop.with_timeout(Limits::default().request);
    let answer = blocking(move || shared.server.request(&body, &stop)).await?;
    Ok(Json(answer).into_response())
}

async fn transfer_done(
    State(shared): State<Shared>,
    Body(body): Body<TransferDone>,
) -> Result<Response, Failure> {
    shared.server.completed(&body).map_err(failure)?;
    Ok(Json(json!({ "ok": true })).into_response())
}

async fn status(State(shared): State<Shared>) -> Response {
    let server = &shared.server;
    Json(json!({
        "version": server.version(),
        "delta": server.delta(),
        "instances": server.instances(),
        "open_transfers": server.open_transfers(),
        "relayed": server.passed(),
        "counters": server.counters(),
        "failure": server.failure(),
        "contradiction": server.contradiction(),
        "region": server.region().dir(),
        "memory": server.region().report().to_string(),
        "store": shared.store(),
    }))
    .into_response()
}

async fn metrics(State(shared): State<Shared>) -> Response {
    let text = metrics_text(&shared.server, shared.store().as_ref());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// The metrics in Prometheus' text form.
fn metrics_text(server: &Server, store: Option<&Figures>) -> String {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    let model = server.region().model_id();
    let mut out = String::new();
    let mut put = |name: &str, kind: &str, help: &str, value: f64| {
        let _ = writeln!(out, "# HELP windlass_{name} {help}\n# TYPE windlass_{name} {kind}");
        let _ = writeln!(out, "windlass_{name}{{model_id=\"{model}\"}} {value}");
    };
    let n = |c: &AtomicU64| c.load(Relaxed) as f64;
    let (info, c) = (server.version(), server.counters());
    put(
        "version",
        "gauge",
        "Newest sealed version; -1 before the first.",
        info.version.map_or(-1.0, |v| v as f64),
    );
    put("incarnation", "gauge", "Incarnation of the publisher.", info.incarnation.0 as f64);
    put("receivers", "gauge", "Known receivers.", server.instances().len() as f64);
    put("transfers_open", "gauge", "Open transfers.", server.open_transfers() as f64);
    let delta = server.delta();
    put("delta_bytes", "gauge", "Size of the newest delta.", delta.map_or(0.0, |d| d.bytes as f64));
    put(
        "delta_changes",
        "gauge",
        "Elements changed by the newest delta.",
        delta.map_or(0.0, |d| d.changes as f64),
    );
    put("delta_seconds", "gauge", "Time to encode the newest delta.", delta.map_or(0.0, |d| d.seconds));
    put("image_bytes", "gauge", "Bytes of one image.", server.region().manifest().data_bytes() as f64);
    put("sealed_total", "counter", "Versions sealed.", n(&c.sealed));
    put(
        "sealed_without_delta_total",
        "counter",
        "Versions sealed without a delta.",
        n(&c.sealed_without_delta),
    );
    put("seal_failures_total", "counter", "Versions that could not be sealed.", n(&c.seal_failures));
    put("seal_seconds_total", "counter", "Time spent sealing.", n(&c.seal_ms) / 1e3);
    put("joined_total", "counter", "Versions served by delta before their slot was complete.", n(&c.joined));
    put(
        "parts_refused_total",
        "counter",
        "Versions whose deltas from ranks were not used.",
        n(&c.parts_refused),
    );
    put(
        "sealed_by_delta_total",
        "counter",
        "Versions sealed from the hashes of their ranks.",
        n(&c.sealed_by_delta),
    );
    put("checked_total", "counter", "Versions among those whose slot was re-hashed.", n(&c.checked));
    put(
        "contradictions_total",
        "counter",
        "Re-hashed slots that contradicted their published hashes.",
        n(&c.contradictions),
    );
    put("tickets_full_total", "counter", "Tickets for full images.", n(&c.tickets_full));
    put("tickets_delta_total", "counter", "Tickets for deltas.", n(&c.tickets_delta));
    put("refused_total", "counter", "Requests refused.", n(&c.refused));
    put("completed_total", "counter", "Transfers completed.", n(&c.completed));
    put("revoked_total", "counter", "Transfers ended because the slot was needed.", n(&c.revoked));
    put("sent_bytes_total", "counter", "Bytes sent and acknowledged.", n(&c.bytes_acked));
    put("read_bytes_total", "counter", "Bytes that receivers read from memory by NIXL.", n(&c.bytes_read));
    put(
        "relayed_bytes_total",
        "counter",
        "Bytes that receivers got from other receivers.",
        n(&c.bytes_relayed),
    );
    if let Some(store) = store {
        let newest = store.version.map_or(-1.0, |v| v as f64);
        put("store_version", "gauge", "Newest version in the store; -1 before the first.", newest);
        put("store_bytes_total", "counter", "Bytes uploaded to the store.", store.bytes as f64);
        put("store_anchors_total", "counter", "Full images uploaded to the store.", store.anchors as f64);
        put("store_removed_total", "counter", "Versions removed from the store.", store.removed as f64);
        put(
            "store_failures_total",
            "counter",
            "Uploads that failed and were tried again.",
            store.failures as f64,
        );
        put(
            "store_fenced",
            "gauge",
            "1 if another publisher has taken the store over.",
            f64::from(u8::from(store.fenced)),
        );
    }
    out
}
