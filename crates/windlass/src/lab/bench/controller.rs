//! `bench controller`: one version of every model to 3, 30 and 300 receivers, from the notify until all have their orders.
//!
//! The controller is a process of its own; the receivers are tasks of this one, each with its connections, over real HTTP.
//! They move no weights: they answer an order as soon as it comes, so the figures are those of the controller and of HTTP
//! alone. A round notifies a new version of each model, one after the other, and runs until it is served:
//!
//! | figure | from the first notify until |
//! |---|---|
//! | `notified_ms` | the last receiver has the order to stage the last model |
//! | `served_ms` | every receiver has staged, was told to load, has loaded, and the gate is open |
//!
//! Beside it stands what the machine needs for as many requests that do nothing (`/healthz`) on the same connections: one
//! for every order, `bare_ms`.

use std::io::{self, BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use windlass_core::barrier::{Peer, ReceiverId};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};

use super::{Figure, Spent, Timing, machine, write_bars};
use crate::console::round;
use crate::console::{Session, Table, bytes};
use crate::error::Error;
use crate::service::controller::wire::{
    Done, Join, Joined, Notified, NotifyVersion, Orders, Outcome, Poll, Report, Service, Task,
};
use crate::service::program;
use crate::service::token;

/// How long a request or a round may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// What a controller may take, with the most receivers.
const MAX_MEMORY: f64 = 200e6;

/// What to measure.
#[derive(Clone, Debug)]
pub(crate) struct ControllerConfig {
    pub(crate) receivers: Vec<usize>,
    /// Models, all of one set; every receiver serves all of them.
    pub(crate) models: usize,
    /// Rounds of each number; the median counts.
    pub(crate) repeats: usize,
}

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &ControllerConfig, session: &Session) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::Bug(format!("no async runtime: {e}")))?;
    let mut rows = Vec::new();
    for &receivers in &config.receivers {
        let served = Served::start(config)?;
        let row = runtime.block_on(measure(&served, receivers, config, session))?;
        rows.push(row);
    }
    report(&rows, config, session)
}

/// A controller in a process of its own, which ends with this.
struct Served {
    child: Child,
    address: String,
    token: String,
    models: Vec<ModelId>,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What is wrong with one of the two ends.
fn failed(what: impl ToString) -> Error {
    Error::Child { who: "controller".into(), what: what.to_string(), kind: Kind::PeerLost }
}

impl Served {
    fn start(config: &ControllerConfig) -> Result<Served, Error> {
        let mut random = [0u8; 16];
        getrandom::fill(&mut random).map_err(|e| Error::Bug(format!("no random bytes: {e}")))?;
        let token: String = random.iter().map(|b| format!("{b:02x}")).collect();
        let names: Vec<String> = (0..config.models).map(|n| format!("model{n}")).collect();
        let models = names.iter().map(ModelId::new).collect::<Result<_, _>>();
        let models = models.map_err(|e| Error::Bug(e.to_string()))?;
        let child = program::command()?
            .args(["controller", "--json", "--with-parent", "--settle=0.05", "--set"])
            .arg(format!("bench={}", names.join(",")))
            .env(token::VARIABLE, &token)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::io("start", "the controller".as_ref()))?;
        let mut served = Served { child, address: String::new(), token, models };
        let mut line = String::new();
        let out = served.child.stdout.take().ok_or_else(|| failed("it has no output"))?;
        BufReader::new(out).read_line(&mut line).map_err(Error::io("hear", "the controller".as_ref()))?;
        let said: Value = serde_json::from_str(&line).unwrap_or_default();
        let endpoint = said["endpoint"].as_str().and_then(|e| e.strip_prefix("http://"));
        endpoint.ok_or_else(|| failed(&line))?.clone_into(&mut served.address);
        Ok(served)
    }

    /// Resident memory of the controller.
    fn memory(&self) -> u64 {
        let path = format!("/proc/{}/statm", self.child.id());
        let pages = std::fs::read_to_string(path).ok();
        let pages = pages.and_then(|s| s.split(' ').nth(1)?.parse::<u64>().ok());
        pages.unwrap_or(0) * rustix::param::page_size() as u64
    }

    fn identity(&self, model: usize, version: Version) -> Option<Identity> {
        Some(Identity { model_id: self.models.get(model)?.clone(), incarnation: Incarnation(1), version })
    }

    async fn connect(&self) -> Result<Connection, Error> {
        let (address, token) = (self.address.clone(), self.token.clone());
        let stream = connect(&address).await.map_err(Error::io("connect to", address.as_ref()))?;
        Ok(Connection { address, stream, token, input: Vec::new() })
    }
}

async fn connect(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

/// A connection that is kept, with one request at a time.
struct Connection {
    address: String,
    stream: TcpStream,
    token: String,
    input: Vec<u8>,
}

impl Connection {
    async fn post<T: DeserializeOwned>(&mut self, path: &str, body: &impl Serialize) -> Result<T, Error> {
        let body = serde_json::to_string(body).map_err(|e| Error::Bug(e.to_string()))?;
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: c\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            self.token,
            body.len()
        );
        self.exchange(path, &request).await
    }

    async fn get<T: DeserializeOwned>(&mut self, path: &str) -> Result<T, Error> {
        let token = &self.token;
        let request = format!("GET {path} HTTP/1.1\r\nhost: c\r\nauthorization: Bearer {token}\r\n\r\n");
        self.exchange(path, &request).await
    }

    async fn exchange<T: DeserializeOwned>(&mut self, path: &str, request: &str) -> Result<T, Error> {
        let answer = async {
            match self.ask(request).await {
                // The controller closes a connection that was idle for a while. Every request here may be repeated.
                Err(e) if closed(&e) && self.input.is_empty() => {
                    self.stream = connect(&self.address).await?;
                    self.ask(request).await
                }
                answer => answer,
            }
        };
        let answer = tokio::time::timeout(TIMEOUT, answer).await.map_err(|_| Error::Deadline)?;
        let (status, body) = answer.map_err(|e| failed(format!("{path}: {e}")))?;
        let text = || String::from_utf8_lossy(&body).into_owned();
        if status != 200 {
            return Err(failed(format!("{path}: status {status}: {}", text())));
        }
        serde_json::from_slice(&body).map_err(|e| failed(format!("{path}: {e}: {}", text())))
    }

    async fn ask(&mut self, request: &str) -> io::Result<(u16, Vec<u8>)> {
        self.write(request.as_bytes()).await?;
        self.read().await
    }

    async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    async fn read(&mut self) -> io::Result<(u16, Vec<u8>)> {
        let bad = || io::Error::from(io::ErrorKind::InvalidData);
        let mut buffer = vec![0; 16 << 10];
        loop {
            if let Some(end) = self.input.windows(4).position(|w| w == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(self.input.get(..end).unwrap_or_default()).to_lowercase();
                let length = head
                    .lines()
                    .find_map(|l| l.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
                let status = head.split(' ').nth(1).and_then(|s| s.parse().ok());
                let (length, status) = (length.ok_or_else(bad)?, status.ok_or_else(bad)?);
                if self.input.len() >= end + 4 + length {
                    let rest = self.input.split_off(end + 4 + length);
                    let whole = std::mem::replace(&mut self.input, rest);
                    return Ok((status, whole.get(end + 4..).unwrap_or_default().to_vec()));
                }
            }
            self.stream.readable().await?;
            match self.stream.try_read(&mut buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.input.extend_from_slice(buffer.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
    }
}

fn closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// A receiver that moves no weights.
struct Light {
    peer: Peer,
    poll_ms: u64,
    /// Polls are held open on one connection, so reports have another.
    polls: Connection,
    reports: Connection,
    /// Hears of every order to stage.
    staged: mpsc::UnboundedSender<Version>,
}

impl Light {
    async fn join(
        served: &Served,
        number: usize,
        staged: mpsc::UnboundedSender<Version>,
    ) -> Result<Light, Error> {
        let receiver = ReceiverId::new(format!("light{number}")).map_err(|e| Error::Bug(e.to_string()))?;
        let peer = Peer { receiver, session: 1 };
        let mut polls = served.connect().await?;
        let join = Join {
            peer: peer.clone(),
            models: served.models.clone(),
            has: Vec::new(),
            host: "bench".into(),
            release: env!("CARGO_PKG_VERSION").into(),
        };
        let joined: Joined = polls.post("/register_receiver", &join).await?;
        Ok(Light { peer, poll_ms: joined.poll_ms, polls, reports: served.connect().await?, staged })
    }

    /// Obeys until it is dropped.
    async fn run(mut self) -> Result<(), Error> {
        let mut after = 0;
        loop {
            let poll = Poll { peer: self.peer.clone(), after, timeout_ms: self.poll_ms, doing: Vec::new() };
            let Orders { orders } = self.polls.post("/poll_orders", &poll).await?;
            // Told first: what is measured is when orders come, not how long their answers take.
            for version in orders.iter().filter_map(|n| match &n.task {
                Task::Stage { identity, .. } => Some(identity.version),
                Task::Load { .. } | Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => None,
            }) {
                let _ = self.staged.send(version);
            }
            for numbered in orders {
                after = numbered.seq;
                match numbered.task {
                    Task::Stage { order, identity, .. } => {
                        self.report(order, identity, Outcome::Staged).await?;
                    }
                    Task::Load { order, identities, .. } => {
                        for identity in identities {
                            self.report(order, identity, Outcome::Loaded).await?;
                        }
                    }
                    Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => {}
                }
            }
        }
    }

    async fn report(
        &mut self,
        order: windlass_core::barrier::Order,
        identity: Identity,
        outcome: Outcome,
    ) -> Result<(), Error> {
        let (peer, spans) = (self.peer.clone(), Vec::new());
        let report = Report { peer, order, identity, outcome, spans, mode: None, pause_ms: None };
        let _: Done = self.reports.post("/report", &report).await?;
        Ok(())
    }
}

/// What came out for one number of receivers.
struct Row {
    receivers: usize,
    orders: usize,
    notified: Vec<Spent>,
    served: Vec<Spent>,
    bare: Vec<Spent>,
    memory: u64,
}

async fn measure(
    served: &Served,
    receivers: usize,
    config: &ControllerConfig,
    session: &Session,
) -> Result<Row, Error> {
    let orders = receivers * config.models;
    let mut row =
        Row { receivers, orders, notified: Vec::new(), served: Vec::new(), bare: Vec::new(), memory: 0 };
    let (tell, mut staged) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for number in 0..receivers {
        let light = Light::join(served, number, tell.clone()).await?;
        tasks.spawn(light.run());
    }
    let mut trainer = served.connect().await?;
    for turn in 0..=config.repeats.max(1) {
        session.cancel().check()?;
        let bare = bare(served, receivers, config.models).await?;
        let version = turn as Version + 1;
        let begun = Instant::now();
        let all = async {
            let notified = async {
                for model in 0..config.models {
                    let identity = served.identity(model, version).ok_or_else(|| failed("no such model"))?;
                    let _: Notified = trainer.post("/notify_version", &notify(identity)).await?;
                }
                let mut left = orders;
                while left > 0 {
                    match staged.recv().await {
                        Some(v) => left -= usize::from(v == version),
                        None => return Err(failed("the receivers are gone")),
                    }
                }
                let notified = begun.elapsed();
                let gate = format!("/service_version?set=bench&at_least={version}&timeout_ms=30000");
                let _: Service = trainer.get(&gate).await?;
                Ok((notified, begun.elapsed()))
            };
            tokio::time::timeout(TIMEOUT, notified).await.map_err(|_| Error::Deadline)?
        };
        let (notified, gone) = tokio::select! {
            times = all => times?,
            Some(ended) = tasks.join_next() => {
                ended.map_err(|e| Error::Bug(e.to_string()))??;
                return Err(failed("a receiver ended"));
            }
        };
        if turn > 0 {
            let spent = |time: Duration| Spent { wall: time.as_secs_f64(), cpu: 0.0 };
            row.notified.push(spent(notified));
            row.served.push(spent(gone));
            row.bare.push(spent(bare));
        }
    }
    row.memory = served.memory();
    Ok(row)
}

fn notify(identity: Identity) -> NotifyVersion {
    NotifyVersion {
        model_id: identity.model_id,
        incarnation: identity.incarnation,
        version: identity.version,
        sender_endpoint: "http://127.0.0.1:9".into(),
        sync: false,
        eval: None,
        timeout_ms: None,
        spans: Vec::new(),
        delta_sparsity: None,
        delta_ratio: None,
    }
}

/// As many requests that do nothing as there are orders, on as many connections as there are receivers.
async fn bare(served: &Served, receivers: usize, each: usize) -> Result<Duration, Error> {
    let mut connections = Vec::new();
    for _ in 0..receivers {
        connections.push(served.connect().await?);
    }
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    for mut connection in connections {
        tasks.spawn(async move {
            for _ in 0..each {
                let _: Value = connection.get("/healthz").await?;
            }
            Ok::<_, Error>(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|e| Error::Bug(e.to_string()))??;
    }
    Ok(begun.elapsed())
}

fn report(rows: &[Row], config: &ControllerConfig, session: &Session) -> Result<(), Error> {
    let ms = |times: &[Spent]| Timing::from_rounds(times).median * 1e3;
    let mut bars = Vec::new();
    if let Some(last) = rows.last() {
        let name = format!("notified, {} receivers of {} models, s", last.receivers, config.models);
        bars.push(Figure { name, value: ms(&last.notified) / 1e3, bar: 1.0, at_least: false });
        let name = "memory of the controller, MB".into();
        bars.push(Figure { name, value: last.memory as f64 / 1e6, bar: MAX_MEMORY / 1e6, at_least: false });
    }
    let object = |row: &Row| {
        json!({
            "receivers": row.receivers,
            "orders": row.orders,
            "notified_ms": round(ms(&row.notified)),
            "served_ms": round(ms(&row.served)),
            "bare_ms": round(ms(&row.bare)),
            "us_per_order": round(ms(&row.notified) * 1e3 / row.orders as f64),
            "memory_bytes": row.memory,
            "spread": round(Timing::from_rounds(&row.notified).spread()),
        })
    };
    let figures = json!({
        "bench": "controller",
        "models": config.models,
        "repeats": config.repeats,
        "machine": machine(),
        "rows": rows.iter().map(object).collect::<Vec<_>>(),
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    session.finish(figures, |out| {
        use std::fmt::Write as _;
        let _ = writeln!(out, "controller: {} models, median of {}\n", config.models, config.repeats);
        let head = ["", "notified ms", "served ms", "as many bare requests ms", "µs per order", "memory"];
        let mut t = Table::new(head);
        for row in rows {
            t.row([
                format!("{} receivers", row.receivers),
                format!("{:.2}", ms(&row.notified)),
                format!("{:.2}", ms(&row.served)),
                format!("{:.2}", ms(&row.bare)),
                format!("{:.1}", ms(&row.notified) * 1e3 / row.orders as f64),
                bytes(row.memory),
            ]);
        }
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}
