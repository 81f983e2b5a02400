//! OpenTelemetry spans of versions, as OTLP over HTTP in JSON.
//!
//! Owns: [`Spans`], which sends until it is dropped, and [`record`], which the services call. A process that has no endpoint in its
//! environment sends nothing and starts no thread. The variables are those of OpenTelemetry. The spans of a version are in the trace that
//! [`Identity::trace_ids`] names, with those that Python processes write (`windlass.trace`). Must not: hold up a service. Spans
//! are sent by a thread of their own, and those that a collector does not take are dropped, counted and told.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use windlass_core::identity::{Identity, ModelId};
use windlass_data::receiver::Synced;
use windlass_data::serve::{DeltaStats, Sealed};
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;

use super::client::Client;
use super::engines::EngineEvent;

/// How many spans may wait.
const ROOM: usize = 4096;
/// How many are sent at once.
const BATCH: usize = 512;
/// How long a span waits for others.
const DELAY: Duration = Duration::from_secs(1);
/// The pause after a failure.
const AGAIN: Duration = Duration::from_secs(5);
/// How long the end of a service waits for its last spans.
const LAST: Duration = Duration::from_secs(5);
/// The pause after a failure then.
const LAST_AGAIN: Duration = Duration::from_millis(200);
/// How often a failure that lasts is told.
const REMINDER: Duration = Duration::from_mins(1);
/// How long a request may take unless the environment says so.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest answer that is read.
const MAX_ANSWER: u64 = 64 << 10;

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";

/// Where spans go, once a service of this process has begun to send them.
static EXPORTER: OnceLock<Exporter> = OnceLock::new();

struct Exporter {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

enum Message {
    Span(Value),
    /// Send what there is until then, and say so.
    Flush(SyncSender<()>, Instant),
}

/// Sends what is recorded. When it is dropped, what is left is sent, for [`LAST`] at most.
#[must_use]
#[derive(Debug)]
pub(crate) struct Spans(());

impl Spans {
    /// Begins to send spans if the environment names an endpoint. What is wrong with it is logged, and nothing is sent.
    pub(crate) fn start(service: &'static str) -> Spans {
        match Settings::read(service, &|name| std::env::var(name).ok()) {
            Ok(None) => {}
            Ok(Some(settings)) => settings.start(),
            Err(why) => tracing::warn!("no spans are sent: {why}"),
        }
        Spans(())
    }
}

impl Drop for Spans {
    fn drop(&mut self) {
        let Some(exporter) = EXPORTER.get() else { return };
        let (done, sent) = sync_channel(1);
        let until = Instant::now() + LAST;
        if exporter.queue.try_send(Message::Flush(done, until)).is_ok() {
            let _ = sent.recv_timeout(LAST);
        }
    }
}

/// A span of a version that took so many milliseconds and ends now, and why it failed if it did.
pub(crate) fn record(
    name: &'static str,
    identity: &Identity,
    ms: f64,
    attributes: Vec<(&'static str, Value)>,
    error: Option<&str>,
) {
    let Some(exporter) = EXPORTER.get() else { return };
    let span = span(name, identity, (ms, SystemTime::now()), attributes, error);
    if let Err(TrySendError::Full(_)) = exporter.queue.try_send(Message::Span(span)) {
        exporter.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// A span of what an agent sealed.
pub(crate) fn of_sealed(sealed: &Sealed) {
    let delta = |delta: DeltaStats| {
        [("windlass.bytes", delta.bytes.into()), ("windlass.changes", delta.changes.into())]
    };
    let attributes = sealed.delta.into_iter().flat_map(delta).collect();
    record("windlass.seal", &sealed.identity, sealed.seconds * 1e3, attributes, None);
}

/// A span of a sync, as `Receiver.sync()` writes it in Python.
pub(crate) fn of_sync(identity: &Identity, synced: &Synced) {
    let attributes = vec![
        ("windlass.mode", synced.mode.into()),
        ("windlass.bytes", synced.wire_bytes.into()),
        ("windlass.ask_s", seconds(synced.ask_ms)),
        ("windlass.wire_s", seconds(synced.wire_ms)),
        ("windlass.open_s", seconds(synced.open_ms)),
        ("windlass.apply_s", seconds(synced.apply_ms)),
    ];
    record("windlass.receive", identity, synced.total_ms, attributes, None);
}

/// A span of what an engine did with a version.
pub(crate) fn of_engine(model_id: &ModelId, event: &EngineEvent) {
    const NAME: &str = "windlass.engine";
    let (engine, label, failure) = match event {
        // Loaded by an earlier receiver.
        EngineEvent::Loaded { how, .. } if how == "found" => return,
        EngineEvent::Loaded { engine, label, how, pause_ms, load_ms, before_ms, .. } => {
            let mut attributes = vec![
                ("windlass.engine", engine.as_str().into()),
                ("windlass.how", how.as_str().into()),
                ("windlass.load_s", seconds(*load_ms)),
            ];
            let (stage_ms, drain_ms) = *before_ms;
            let phases = [
                ("windlass.pause_s", *pause_ms),
                ("windlass.stage_s", stage_ms),
                ("windlass.drain_s", drain_ms),
            ];
            attributes.extend(phases.iter().filter_map(|(name, ms)| Some((*name, seconds((*ms)?)))));
            let ms = stage_ms.unwrap_or_default()
                + drain_ms.unwrap_or_default()
                + load_ms.max(pause_ms.unwrap_or_default());
            let identity = Identity {
                model_id: model_id.clone(),
                incarnation: label.incarnation,
                version: label.version,
            };
            return record(NAME, &identity, ms, attributes, None);
        }
        EngineEvent::Failed { engine, label: Some(label), failure, .. }
        | EngineEvent::Fenced { engine, label: Some(label), failure, .. } => (engine, label, failure),
        EngineEvent::Failed { .. }
        | EngineEvent::Fenced { .. }
        | EngineEvent::Waiting { .. }
        | EngineEvent::Extras { .. } => return,
    };
    let identity =
        Identity { model_id: model_id.clone(), incarnation: label.incarnation, version: label.version };
    let stage = serde_json::to_value(failure.stage).unwrap_or_default();
    let attributes = vec![("windlass.engine", engine.as_str().into()), ("windlass.failed_at", stage)];
    record(NAME, &identity, 0.0, attributes, Some(&failure.text));
}

pub(crate) fn seconds(ms: f64) -> Value {
    (ms / 1e3).into()
}

fn span(
    name: &str,
    identity: &Identity,
    (ms, ended): (f64, SystemTime),
    attributes: Vec<(&'static str, Value)>,
    error: Option<&str>,
) -> Value {
    let nanos = |at: SystemTime| at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let took = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
    let began = ended.checked_sub(took).unwrap_or(ended);
    let (trace, parent) = identity.trace_ids();
    let mut id = [0; 8];
    // Without random numbers no connection would have been made either.
    let _ = getrandom::fill(&mut id);
    let own: [(&str, Value); 3] = [
        ("windlass.model_id", identity.model_id.as_str().into()),
        // A number of 64 bits does not fit into an attribute's integer.
        ("windlass.incarnation", format!("{:016x}", identity.incarnation.0).into()),
        ("windlass.version", identity.version.into()),
    ];
    let attributes: Vec<Value> =
        own.into_iter().chain(attributes).map(|(key, value)| attribute(key, &value)).collect();
    let mut span = json!({
        "traceId": Hex(&trace).to_string(),
        "spanId": Hex(&id).to_string(),
        "parentSpanId": Hex(&parent).to_string(),
        "name": name,
        "kind": 1,
        // Numbers of 64 bits are texts in the JSON of protocol buffers.
        "startTimeUnixNano": nanos(began).to_string(),
        "endTimeUnixNano": nanos(ended).to_string(),
        "attributes": attributes,
    });
    if let (Some(message), Some(span)) = (error, span.as_object_mut()) {
        span.insert("status".into(), json!({ "code": 2, "message": message }));
    }
    span
}

fn attribute(key: &str, value: &Value) -> Value {
    let value = match value {
        Value::Bool(yes) => json!({ "boolValue": yes }),
        Value::Number(number) if number.is_f64() => json!({ "doubleValue": number }),
        Value::Number(number) => json!({ "intValue": number.to_string() }),
        Value::String(text) => json!({ "stringValue": text }),
        Value::Null | Value::Array(_) | Value::Object(_) => json!({ "stringValue": value.to_string() }),
    };
    json!({ "key": key, "value": value })
}

/// Bytes as hexadecimal digits, as OTLP has ids in JSON.
struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What the environment says.
struct Settings {
    url: String,
    headers: Vec<(String, String)>,
    resource: Vec<Value>,
    timeout: Duration,
    trust: Option<Trust>,
}

/// Names and values, as in `a=1,b=2`, with `%20` and the like for characters that must not be there.
fn pairs(variable: &str, text: &str) -> Result<Vec<(String, String)>, String> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (name, value) = part.split_once('=')?;
        Some((name.trim().to_owned(), unescaped(value.trim())?))
    };
    // A value may be a secret.
    parts
        .map(|part| pair(part).ok_or_else(|| format!("{variable} is not like name=value,name=value")))
        .collect()
}

fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, others)) = rest.split_first() {
        rest = others;
        if *first == b'%' {
            let digits = others.get(..2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = others.get(2..)?;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

impl Settings {
    /// None if nothing is to be sent.
    fn read(service: &str, var: &dyn Fn(&str) -> Option<String>) -> Result<Option<Settings>, String> {
        let var = |name: &str| var(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        let own = |end: &str| {
            let (own, all) =
                (format!("OTEL_EXPORTER_OTLP_TRACES_{end}"), format!("OTEL_EXPORTER_OTLP_{end}"));
            var(&own).map(|text| (own, text)).or_else(|| var(&all).map(|text| (all, text)))
        };
        if var("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        match var("OTEL_TRACES_EXPORTER").as_deref() {
            Some("none") => return Ok(None),
            None | Some("otlp") => {}
            Some(other) => return Err(format!("OTEL_TRACES_EXPORTER is {other:?}: write otlp or none")),
        }
        let (variable, url) = match (var(TRACES_ENDPOINT), var(ENDPOINT)) {
            (Some(url), _) => (TRACES_ENDPOINT, url),
            (None, Some(base)) => (ENDPOINT, format!("{}/v1/traces", base.trim_end_matches('/'))),
            (None, None) => return Ok(None),
        };
        let wrong = |why: &dyn fmt::Display| format!("{variable}: {why}");
        let uri: http::Uri = url.parse().map_err(|e| wrong(&e))?;
        let plain = uri.authority().is_some_and(|a| !a.as_str().contains('@'));
        if !plain || !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(wrong(&"write a URL such as http://collector:4318, without a password"));
        }
        if let Some((name, protocol)) = own("PROTOCOL")
            && protocol == "grpc"
        {
            let how = "spans are sent over HTTP, for which collectors have another port, usually 4318";
            return Err(format!(
                "{name} is grpc: {how}; set {TRACES_ENDPOINT} to it and {name} to http/json"
            ));
        }
        let headers = own("HEADERS").map_or(Ok(Vec::new()), |(name, text)| pairs(&name, &text))?;
        let timeout = own("TIMEOUT").map_or(Ok(TIMEOUT), |(name, text)| {
            let ms: Result<u64, _> = text.parse();
            ms.map(Duration::from_millis).map_err(|_| format!("{name} is {text:?}: write milliseconds"))
        })?;
        let trust = own("CERTIFICATE")
            .map(|(name, path)| Trust::of_file(path.as_ref()).map_err(|e| format!("{name}: {e}")));
        let mut resource = var("OTEL_RESOURCE_ATTRIBUTES")
            .map_or(Ok(Vec::new()), |text| pairs("OTEL_RESOURCE_ATTRIBUTES", &text))?;
        let name = var("OTEL_SERVICE_NAME");
        if name.is_some() || !resource.iter().any(|(key, _)| key == "service.name") {
            resource.retain(|(key, _)| key != "service.name");
            resource.push(("service.name".into(), name.unwrap_or_else(|| service.to_owned())));
        }
        let resource = resource.iter().map(|(key, value)| attribute(key, &value.as_str().into())).collect();
        Ok(Some(Settings { url, headers, resource, timeout, trust: trust.transpose()? }))
    }

    fn start(self) {
        let (queue, inbox) = sync_channel(ROOM);
        let dropped = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&dropped);
        if EXPORTER.set(Exporter { queue, dropped }).is_err() {
            return;
        }
        let run = move || self.run(&inbox, &counted);
        if let Err(error) = std::thread::Builder::new().name("windlass-spans".into()).spawn(run) {
            tracing::warn!(%error, "no spans are sent: there is no thread for them");
        }
    }

    fn run(&self, inbox: &Receiver<Message>, dropped: &AtomicU64) {
        let client = Client::new(self.trust.clone());
        let (mut waiting, mut due, mut failing) = (Vec::new(), None::<Instant>, false);
        let mut told = None::<Instant>;
        loop {
            let left = due.map_or(REMINDER, |at| at.saturating_duration_since(Instant::now()));
            let flush = match inbox.recv_timeout(left) {
                Ok(Message::Span(span)) => {
                    if waiting.len() < ROOM {
                        waiting.push(span);
                    } else {
                        dropped.fetch_add(1, Ordering::Relaxed);
                    }
                    let at = *due.get_or_insert_with(|| Instant::now() + DELAY);
                    if (failing || waiting.len() < BATCH) && Instant::now() < at {
                        continue;
                    }
                    None
                }
                Ok(Message::Flush(done, until)) => Some((done, until)),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            while !waiting.is_empty() {
                let some = waiting.get(..BATCH).unwrap_or(&waiting);
                let sent = self.send(&client, some);
                failing = matches!(sent, Err(Refusal { again: true, .. }));
                if let Err(refusal) = &sent
                    && told.is_none_or(|at| at.elapsed() >= REMINDER)
                {
                    told = Some(Instant::now());
                    tracing::warn!(
                        dropped = dropped.load(Ordering::Relaxed),
                        "spans are not taken by {}: {}",
                        self.url,
                        refusal.why
                    );
                }
                if failing {
                    if flush.as_ref().is_none_or(|(_, until)| Instant::now() + LAST_AGAIN >= *until) {
                        break;
                    }
                    std::thread::sleep(LAST_AGAIN);
                    continue;
                }
                let gone = some.len();
                if sent.is_err() {
                    dropped.fetch_add(gone as u64, Ordering::Relaxed);
                }
                waiting.drain(..gone);
            }
            due = failing.then(|| Instant::now() + AGAIN);
            if let Some((done, _)) = flush {
                let _ = done.send(());
            }
        }
    }

    fn send(&self, client: &Client, spans: &[Value]) -> Result<(), Refusal> {
        let scope = json!({ "name": "windlass", "version": env!("CARGO_PKG_VERSION") });
        let all = json!({ "resourceSpans": [{
            "resource": { "attributes": self.resource },
            "scopeSpans": [{ "scope": scope, "spans": spans }],
        }] });
        let mut request = http::Request::post(&self.url).header("content-type", "application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        // An error of it names no value of a header.
        let request =
            request.body(all.to_string()).map_err(|e| Refusal { again: false, why: e.to_string() })?;
        let answer = client.forward(request, self.timeout, MAX_ANSWER, &Stop::never());
        let answer = answer.map_err(|(_, why)| Refusal { again: true, why })?;
        let status = answer.status();
        if status.is_success() {
            return Ok(());
        }
        let again = matches!(status.as_u16(), 429 | 502 | 503 | 504);
        Err(Refusal { again, why: format!("it answers {status}") })
    }
}

/// Why spans were not taken, and whether they may be later.
struct Refusal {
    again: bool,
    why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Option<Settings>, String> {
        let find = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Settings::read("windlass-agent", &find)
    }

    #[test]
    fn the_environment_says_whether_and_where_spans_go() {
        assert!(read(&[]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, "")]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, "http://c:4318"), ("OTEL_SDK_DISABLED", "True")]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, "http://c:4318"), ("OTEL_TRACES_EXPORTER", "none")]).unwrap().is_none());
        let settings = read(&[
            (ENDPOINT, "http://c:4318/otel/"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20x, b=c"),
            ("OTEL_RESOURCE_ATTRIBUTES", "run=7,service.name=other"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "2500"),
        ]);
        let settings = settings.unwrap().unwrap();
        assert_eq!(settings.url, "http://c:4318/otel/v1/traces");
        assert_eq!(settings.headers[0], ("Authorization".into(), "Bearer x".into()));
        assert_eq!((settings.headers.len(), settings.timeout), (2, Duration::from_millis(2500)));
        assert_eq!(
            settings.resource[1],
            json!({ "key": "service.name", "value": { "stringValue": "other" } })
        );
        let named =
            read(&[(TRACES_ENDPOINT, "https://c/x"), (ENDPOINT, "http://d"), ("OTEL_SERVICE_NAME", "me")]);
        let named = named.unwrap().unwrap();
        assert_eq!(named.url, "https://c/x");
        assert_eq!(named.resource, [json!({ "key": "service.name", "value": { "stringValue": "me" } })]);
    }

    #[test]
    fn what_is_wrong_in_the_environment_is_named_and_no_secret() {
        for (vars, named) in [
            (vec![(ENDPOINT, "collector:4318")], ENDPOINT),
            (vec![(ENDPOINT, "ftp://collector")], ENDPOINT),
            (vec![(TRACES_ENDPOINT, "http://me:hunter2@c/")], TRACES_ENDPOINT),
            (vec![(ENDPOINT, "http://c"), ("OTEL_TRACES_EXPORTER", "zipkin")], "OTEL_TRACES_EXPORTER"),
            (
                vec![(ENDPOINT, "http://c"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
                "OTEL_EXPORTER_OTLP_PROTOCOL",
            ),
            (
                vec![(ENDPOINT, "http://c"), ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2")],
                "OTEL_EXPORTER_OTLP_HEADERS",
            ),
            (vec![(ENDPOINT, "http://c"), ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1s")], "TRACES_TIMEOUT"),
            (vec![(ENDPOINT, "https://c"), ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/none")], "OTLP_CERTIFICATE"),
        ] {
            let said = read(&vars).err().unwrap();
            assert!(said.contains(named) && !said.contains("hunter2"), "{vars:?}: {said}");
        }
    }

    #[test]
    fn a_span_has_the_ids_of_its_version_and_times_as_texts() {
        let model_id = ModelId::new("policy").unwrap();
        let identity =
            Identity { model_id, incarnation: windlass_core::identity::Incarnation(1), version: 3 };
        let ended = UNIX_EPOCH + Duration::from_secs(100);
        let told = span(
            "windlass.seal",
            &identity,
            (1500.0, ended),
            vec![("windlass.bytes", 7.into())],
            Some("no room"),
        );
        let (trace, parent) = identity.trace_ids();
        assert_eq!(told["traceId"], Hex(&trace).to_string());
        assert_eq!(told["parentSpanId"], Hex(&parent).to_string());
        assert_eq!(told["spanId"].as_str().unwrap().len(), 16);
        assert_eq!(
            (&told["startTimeUnixNano"], &told["endTimeUnixNano"]),
            (&json!("98500000000"), &json!("100000000000"))
        );
        assert_eq!(told["status"], json!({ "code": 2, "message": "no room" }));
        let bytes = json!({ "key": "windlass.bytes", "value": { "intValue": "7" } });
        assert!(told["attributes"].as_array().unwrap().contains(&bytes), "{told}");
    }
}
