//! What the controller counts, as Prometheus reads it.
//!
//! Owns: the counters, and the text of `GET /metrics`. Names begin with `windlass_controller_`, because an agent has
//! metrics of its own; labels are the words of the glossary. There are no series per receiver: a pool of thousands must
//! not become thousands of series for each figure.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use windlass_core::barrier::{EvictReason, SetName};
use windlass_core::error::Kind;

use super::hub::phase_name;
use super::record::Latency;
use super::status::Status;
use super::wire::{Outcome, Task};

/// Upper bounds of the buckets, in seconds: from a pause of an engine to a very large model over a slow link.
const BUCKETS: [f64; 14] =
    [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0];

/// How long something took, how often.
#[derive(Clone, Debug, Default)]
pub(super) struct Histogram {
    buckets: [u64; BUCKETS.len()],
    sum: f64,
    count: u64,
}

impl Histogram {
    pub(super) fn add(&mut self, seconds: f64) {
        for (bucket, _) in self.buckets.iter_mut().zip(BUCKETS).filter(|(_, most)| seconds <= *most) {
            *bucket += 1;
        }
        self.sum += seconds;
        self.count += 1;
    }
}

/// What is counted.
#[derive(Debug, Default)]
pub(super) struct Counters {
    notifies: u64,
    orders: BTreeMap<&'static str, u64>,
    reports: BTreeMap<(&'static str, &'static str), u64>,
    failures: BTreeMap<&'static str, u64>,
    evictions: BTreeMap<&'static str, u64>,
    requests: BTreeMap<u16, u64>,
    received: BTreeMap<SetName, u64>,
    syncs: BTreeMap<SetName, Histogram>,
    pauses: BTreeMap<SetName, Histogram>,
    gates: Histogram,
    pub(super) fenced: u64,
    pub(super) superseded: u64,
    pub(super) absent: u64,
}

impl Counters {
    pub(super) fn notified(&mut self) {
        self.notifies += 1;
    }

    pub(super) fn ordered(&mut self, task: &Task) {
        let name = match task {
            Task::Stage { .. } => "stage",
            Task::Load { .. } => "load",
            Task::Abandon { .. } => "abandon",
            Task::Drop { .. } => "drop",
            Task::Live { .. } => "live",
        };
        *self.orders.entry(name).or_default() += 1;
    }

    pub(super) fn reported(&mut self, outcome: &Outcome, bytes: u64, pause_ms: Option<f64>, set: &SetName) {
        let key = match outcome {
            Outcome::Staged => ("staging", "done"),
            Outcome::Loaded => ("loading", "done"),
            Outcome::Absent { .. } => ("staging", "failed"),
            Outcome::Failed { phase, .. } => (phase_name(*phase), "failed"),
        };
        *self.reports.entry(key).or_default() += 1;
        let received = self.received.entry(set.clone()).or_default();
        *received = received.saturating_add(bytes);
        if let Some(ms) = pause_ms {
            self.pauses.entry(set.clone()).or_default().add(ms / 1e3);
        }
    }

    pub(super) fn served(&mut self, latency: &Latency) {
        self.syncs.entry(latency.set.clone()).or_default().add(latency.seconds);
    }

    pub(super) fn failed(&mut self, kind: Kind) {
        *self.failures.entry(kind.as_str()).or_default() += 1;
    }

    pub(super) fn evicted(&mut self, why: EvictReason) {
        let name = match why {
            EvictReason::Silent => "silent",
            EvictReason::Left => "left",
            EvictReason::Rejoined => "rejoined",
        };
        *self.evictions.entry(name).or_default() += 1;
    }

    pub(super) fn answered(&mut self, status: u16) {
        *self.requests.entry(status).or_default() += 1;
    }

    pub(super) fn gate(&mut self, seconds: f64) {
        self.gates.add(seconds);
    }
}

/// Writes one figure after the other.
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(
            self.0,
            "# HELP windlass_controller_{name} {help}\n# TYPE windlass_controller_{name} {kind}"
        );
    }

    fn line(&mut self, name: &str, labels: &[(&str, &dyn Display)], value: f64) {
        let labels: Vec<String> = labels.iter().map(|(k, v)| format!("{k}=\"{v}\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "windlass_controller_{name}{labels} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.line(name, &[], value);
    }

    fn each<K: Display, V: Copy + Into<f64>>(
        &mut self,
        name: &str,
        (kind, help): (&str, &str),
        label: &str,
        values: impl IntoIterator<Item = (K, V)>,
    ) {
        self.head(name, kind, help);
        for (key, value) in values {
            self.line(name, &[(label, &key)], value.into());
        }
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &dyn Display)], histogram: &Histogram) {
        let mut with = labels.to_vec();
        with.push(("le", &""));
        for (most, count) in BUCKETS.iter().zip(histogram.buckets) {
            if let Some(le) = with.last_mut() {
                *le = ("le", most);
            }
            self.line(&format!("{name}_bucket"), &with, count as f64);
        }
        if let Some(le) = with.last_mut() {
            *le = ("le", &"+Inf");
        }
        self.line(&format!("{name}_bucket"), &with, histogram.count as f64);
        self.line(&format!("{name}_sum"), labels, histogram.sum);
        self.line(&format!("{name}_count"), labels, histogram.count as f64);
    }
}

const GAUGE: &str = "gauge";
const COUNTER: &str = "counter";

/// The metrics in Prometheus' text form.
pub(super) fn text(status: &Status, counters: &Counters, orders: usize) -> String {
    let mut page = Page(String::new());
    page.one(
        "started_seconds",
        GAUGE,
        "Start time of the controller, as a Unix timestamp.",
        status.started as f64 / 1e3,
    );
    sets(&mut page, status);
    trainers(&mut page, status);
    page.one("receivers", GAUGE, "Receivers that are members.", status.receivers.len() as f64);
    page.one("waits", GAUGE, "Gates and synchronous notifies that wait.", status.waits as f64);
    page.one("orders_waiting", GAUGE, "Orders that receivers have not taken yet.", orders as f64);
    let rate = status.receivers.iter().fold(0.0, |all, r| all + r.rate);
    page.one("receive_bytes_per_second", GAUGE, "Total receive rate, as reported by receivers.", rate);
    let doings = status.receivers.iter().flat_map(|r| r.models.iter().filter_map(|m| m.doing.as_ref()));
    let unplanned: u64 = doings.flat_map(|d| &d.engines).map(|e| e.unplanned).fold(0, u64::saturating_add);
    let what = "Loads by the engines' own loader although a load plan was expected.";
    page.one("unplanned_loads", GAUGE, what, unplanned as f64);
    page.one("memory_bytes", GAUGE, "Resident memory of the controller.", resident() as f64);
    counts(&mut page, counters);
    page.head("sync_seconds", "histogram", "From the last announcement of a version until it was served.");
    for (set, histogram) in &counters.syncs {
        page.histogram("sync_seconds", &[("set", set)], histogram);
    }
    page.head("pause_seconds", "histogram", "How long a receiver's engines were paused for a load.");
    for (set, histogram) in &counters.pauses {
        page.histogram("pause_seconds", &[("set", set)], histogram);
    }
    page.head("gate_wait_seconds", "histogram", "Duration of waits at the gate, opened or not.");
    page.histogram("gate_wait_seconds", &[], &counters.gates);
    page.0
}

fn sets(page: &mut Page, status: &Status) {
    let sets = || status.sets.iter();
    let version = |v: Option<u64>| v.map_or(-1.0, |v| v as f64);
    page.each(
        "service_version",
        (GAUGE, "Version that a set serves; -1 before the first."),
        "set",
        sets().map(|s| (&s.set, version(s.served.as_ref().map(|v| v.version)))),
    );
    page.each(
        "up_to_date",
        (GAUGE, "1 while a set serves the newest announced version."),
        "set",
        sets().map(|s| (&s.set, u8::from(s.up_to_date))),
    );
    page.each(
        "set_receivers",
        (GAUGE, "Receivers that serve models of a set."),
        "set",
        sets().map(|s| (&s.set, s.receivers as f64)),
    );
    page.each(
        "set_receivers_live",
        (GAUGE, "Receivers that serve the version of their set."),
        "set",
        sets().map(|s| (&s.set, s.live as f64)),
    );
}

fn trainers(page: &mut Page, status: &Status) {
    let trainers = || status.trainers.iter();
    page.each(
        "announced_version",
        (GAUGE, "Newest version that a model's trainer announced; -1 before the first."),
        "model_id",
        trainers().map(|t| (&t.model_id, t.version.map_or(-1.0, |v| v as f64))),
    );
    page.each(
        "ahead",
        (GAUGE, "Announced versions that are not served yet."),
        "model_id",
        trainers().map(|t| (&t.model_id, t.ahead as f64)),
    );
    page.each(
        "back_pressure",
        (GAUGE, "1 while the controller tells a trainer to wait."),
        "model_id",
        trainers().map(|t| (&t.model_id, u8::from(t.waiting))),
    );
    page.each(
        "delta_ratio",
        (GAUGE, "Size of the newest delta relative to the image."),
        "model_id",
        trainers().filter_map(|t| Some((&t.model_id, t.delta_ratio?))),
    );
    page.each(
        "delta_sparsity",
        (GAUGE, "Share of elements that the newest delta does not change."),
        "model_id",
        trainers().filter_map(|t| Some((&t.model_id, t.delta_sparsity?))),
    );
}

fn counts(page: &mut Page, counters: &Counters) {
    let c = counters;
    let f = |(k, v): (&&'static str, &u64)| (*k, *v as f64);
    page.one("notifies_total", COUNTER, "Accepted notifies.", c.notifies as f64);
    page.each("orders_total", (COUNTER, "Orders to receivers."), "task", c.orders.iter().map(f));
    page.head("reports_total", COUNTER, "Reports of receivers.");
    for ((phase, outcome), n) in &c.reports {
        page.line("reports_total", &[("phase", phase), ("outcome", outcome)], *n as f64);
    }
    page.each(
        "received_bytes_total",
        (COUNTER, "Bytes received over the network, as reported by receivers."),
        "set",
        c.received.iter().map(|(set, n)| (set, *n as f64)),
    );
    page.each("failures_total", (COUNTER, "Failures of receivers."), "kind", c.failures.iter().map(f));
    page.each(
        "evictions_total",
        (COUNTER, "Receivers that left or were evicted."),
        "why",
        c.evictions.iter().map(f),
    );
    page.one("fences_total", COUNTER, "Receivers fenced.", c.fenced as f64);
    page.one(
        "superseded_total",
        COUNTER,
        "Times that a newer incarnation of a model took over.",
        c.superseded as f64,
    );
    page.one("absent_total", COUNTER, "Announced versions that no agent has.", c.absent as f64);
    page.each(
        "requests_total",
        (COUNTER, "Requests by HTTP status."),
        "status",
        c.requests.iter().map(|(status, n)| (status, *n as f64)),
    );
}

/// Resident memory of this process.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|s| s.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
