//! The syncs of a controller as a trace that timeline viewers open (Perfetto, `chrome://tracing`, Speedscope).
//!
//! Owns: the translation of [`Status`] into the Trace Event Format: one process for each set, one thread for each lane and
//! its members, a complete event for each span, and an instant event where a version was served. Times are
//! microseconds since the oldest of them. Must not: ask or write anything.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::service::controller::status::{SetStatus, Status};
use crate::service::controller::wire::Lane;

/// Every span that the controller still knows.
pub(crate) fn events(status: &Status) -> Value {
    let syncs = status.sets.iter().flat_map(|set| &set.syncs);
    let starts = syncs.flat_map(|sync| {
        let spans = sync.spans.iter().map(|span| sync.at as f64 + span.from_ms);
        spans.chain([sync.at as f64])
    });
    let first = starts.fold(f64::INFINITY, f64::min);
    let all: Vec<Value> =
        status.sets.iter().zip(1..).flat_map(|(set, process)| of_set(set, process, first)).collect();
    json!({ "traceEvents": all, "displayTimeUnit": "ms" })
}

fn of_set(set: &SetStatus, process: u32, first: f64) -> Vec<Value> {
    // The order of the lanes is that of a version's way.
    let mut threads: BTreeMap<(Lane, &str), u32> = set
        .syncs
        .iter()
        .flat_map(|sync| &sync.spans)
        .map(|span| ((span.lane, span.who.as_str()), 0))
        .collect();
    threads.values_mut().zip(1..).for_each(|(thread, number)| *thread = number);
    let name = |what: &str, thread: u32, name: String| json!({ "ph": "M", "name": what, "pid": process, "tid": thread, "args": { "name": name } });
    let mut events =
        vec![name("process_name", 0, format!("set {}", set.set)), name("thread_name", 0, "served".into())];
    events.extend(
        threads.iter().map(|((lane, who), thread)| name("thread_name", *thread, format!("{lane} {who}"))),
    );
    for sync in &set.syncs {
        let micros = |ms: f64| (sync.at as f64 + ms - first) * 1e3;
        for span in &sync.spans {
            let thread = threads.get(&(span.lane, span.who.as_str()));
            events.push(json!({
                "ph": "X", "name": format!("{} {}", span.what, sync.version), "cat": span.lane, "pid": process,
                "tid": thread, "ts": micros(span.from_ms), "dur": (span.to_ms - span.from_ms) * 1e3,
                "args": { "version": sync.version, "model_id": span.model_id, "bytes": span.bytes },
            }));
        }
        if let Some(served) = sync.served_ms {
            events.push(json!({
                "ph": "i", "name": format!("version {} served", sync.version), "pid": process, "tid": 0, "s": "p",
                "ts": micros(served), "args": { "latency_ms": sync.latency_ms },
            }));
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_has_every_span_on_the_line_of_whoever_it_is_about() {
        let mut document = super::super::frame::tests::sample();
        let span = |lane: &str, who: &str, what: &str, from: f64, to: f64| json!({ "lane": lane, "who": who, "model_id": "actor", "what": what, "from_ms": from, "to_ms": to, "bytes": 7 });
        document["sets"][0]["syncs"][0]["spans"] = json!([
            span("wire", "gpu-0", "pull", 20.0, 30.5),
            span("trainer", "actor", "offload", -10.0, -2.0),
            span("wire", "gpu-2", "pull", 20.0, 40.0),
        ]);
        let status: Status = serde_json::from_value(document).unwrap();
        let trace = events(&status);
        let all = trace["traceEvents"].as_array().unwrap();
        let kind = |ph: &str| all.iter().filter(|e| e["ph"] == ph).collect::<Vec<_>>();
        let names: Vec<&str> = kind("M").iter().map(|e| e["args"]["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["set policy", "served", "trainer actor", "wire gpu-0", "wire gpu-2"]);
        let spans: Vec<_> =
            kind("X").iter().map(|e| (e["name"].as_str().unwrap(), &e["tid"], &e["ts"], &e["dur"])).collect();
        let expected = [
            ("pull 6", &json!(2), &json!(30_000.0), &json!(10_500.0)),
            ("offload 6", &json!(1), &json!(0.0), &json!(8_000.0)),
            ("pull 6", &json!(3), &json!(30_000.0), &json!(20_000.0)),
        ];
        assert_eq!(spans, expected);
        let served: Vec<_> = kind("i").iter().map(|e| e["ts"].as_f64().unwrap()).collect();
        assert_eq!(served, [410_000.0, 210_000.0]);
    }

    #[test]
    fn a_trace_of_nothing_is_empty() {
        let mut document = super::super::frame::tests::sample();
        document["sets"] = json!([]);
        let status: Status = serde_json::from_value(document).unwrap();
        assert_eq!(events(&status)["traceEvents"], json!([]));
    }
}
