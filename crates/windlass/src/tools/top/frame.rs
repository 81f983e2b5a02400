//! One frame of `windlass top`: a status as lines of text.
//!
//! Owns: what is shown, in what order, and what is left out where there is little room. A pure function of the document and
//! the size. What others sent is cleaned of control characters, which a terminal would obey.

use std::fmt::Write as _;
use std::io::IsTerminal as _;

use crate::console::{bytes, percent};
use crate::service::controller::status::{
    HeldStatus, ReceiverStatus, SetStatus, Status, Sync, SyncState, TrainerState, TrainerStatus,
};
use windlass_core::barrier::{Awaited, Mode, Phase};

/// Whether to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    /// With colours and weights.
    Colour,
}

impl Style {
    /// Colours on a terminal, unless `NO_COLOR` is set.
    pub(crate) fn of_stdout() -> Style {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        if std::io::stdout().is_terminal() && !plain { Style::Colour } else { Style::Plain }
    }
}

/// From a low bar to a high one.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// How a piece of text is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tone {
    Strong,
    Faint,
    Good,
    Warn,
    Bad,
}

/// A place to draw in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame<'a> {
    url: &'a str,
    rows: usize,
    columns: usize,
    style: Style,
}

/// Lines of a table: columns of text, each to the left or to the right.
struct Columns {
    heads: Vec<(&'static str, bool)>,
    rows: Vec<(Option<Tone>, Vec<String>)>,
}

impl Columns {
    fn new(heads: &[(&'static str, bool)]) -> Columns {
        Columns { heads: heads.to_vec(), rows: Vec::new() }
    }

    fn row(&mut self, tone: Option<Tone>, cells: Vec<String>) {
        self.rows.push((tone, cells));
    }

    fn lines(&self, frame: &Frame<'_>) -> Vec<String> {
        let width = |c: usize| {
            let cells = self.rows.iter().filter_map(|(_, r)| r.get(c)).map(|t| t.chars().count());
            cells.chain(self.heads.get(c).map(|h| h.0.len())).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.heads.len()).map(width).collect();
        let line = |cells: &[String]| {
            let mut out = String::new();
            for ((cell, w), (_, right)) in cells.iter().zip(&widths).zip(&self.heads) {
                let _ = if *right { write!(out, "  {cell:>w$}") } else { write!(out, "  {cell:<w$}") };
            }
            frame.cut(out.trim_end())
        };
        let heads: Vec<String> = self.heads.iter().map(|(h, _)| (*h).to_owned()).collect();
        let mut lines = vec![frame.tone(Tone::Faint, &line(&heads))];
        lines.extend(self.rows.iter().map(|(tone, cells)| match tone {
            Some(tone) => frame.tone(*tone, &line(cells)),
            None => line(cells),
        }));
        lines
    }
}

impl<'a> Frame<'a> {
    /// A frame of this many rows and columns.
    pub(crate) fn new(url: &'a str, (rows, columns): (usize, usize), style: Style) -> Frame<'a> {
        Frame { url, rows, columns: columns.max(40), style }
    }

    /// The document as text. `lost` says why it is not of now.
    pub(crate) fn draw(&self, status: &Status, lost: Option<&str>) -> String {
        let mut head = self.head(status, lost);
        for set in &status.sets {
            head.push(String::new());
            head.extend(self.set(status, set));
        }
        if status.sets.is_empty() {
            head.push(String::new());
            head.push(
                "  No version has been announced yet: trainers announce versions with notify_version.".into(),
            );
        }
        head.extend(self.waiting(status));
        let errors = self.errors(status);
        // Receivers are many; they get the room that is left.
        let room = self.rows.saturating_sub(head.len() + errors.len() + 1);
        head.extend(self.receivers(status, room));
        head.extend(errors);
        head.truncate(self.rows.saturating_sub(1).max(1));
        head.join("\n") + "\n"
    }

    fn head(&self, status: &Status, lost: Option<&str>) -> Vec<String> {
        let errors = match status.errors.len() {
            0 => "no errors".to_owned(),
            1 => "1 error".to_owned(),
            n => format!("{n} errors"),
        };
        let up = took(status.now.saturating_sub(status.started) as f64);
        let line = format!("windlass {}  {}  up {up}  {errors}", clean(&status.release), self.url);
        let mut lines = vec![self.tone(Tone::Strong, &self.cut(&line))];
        lines.extend(lost.map(|why| self.tone(Tone::Bad, &self.cut(&format!("{}; retrying", clean(why))))));
        lines
    }

    fn set(&self, status: &Status, set: &SetStatus) -> Vec<String> {
        let mode = match set.mode {
            Mode::Strict => "strict",
            Mode::Relaxed => "relaxed",
        };
        let served = match &set.served {
            Some(served) => format!("serving version {}", served.version),
            None => "serving nothing yet".to_owned(),
        };
        let mut line = format!("{}  {mode}  {served}  {} of {} live", set.set, set.live, set.receivers);
        if let Some(last) = set.syncs.iter().rfind(|s| s.state == SyncState::Served) {
            let _ = write!(line, "  latency {}", last.latency_ms.map_or("-".into(), took));
            let _ = write!(line, "  paused {}", last.pause_ms.map_or("-".into(), took));
            let _ = write!(line, "  wire {}", bytes(last.bytes));
        }
        let mut lines = vec![self.tone(Tone::Strong, &self.cut(&line))];
        if !set.up_to_date {
            lines.push(self.tone(Tone::Faint, &self.cut(&format!("  {}", clean(&set.blocked)))));
        }
        for round in &set.rounds {
            let doing = match round.phase {
                Phase::Staging => "staging",
                Phase::Loading => "loading",
            };
            let all = round.done + round.waiting;
            let bar = meter(round.done as f64 / all.max(1) as f64);
            lines.push(self.cut(&format!("  v{} {doing} {bar} {} of {all}", round.version, round.done)));
        }
        lines.extend(self.models(status, set));
        lines.extend(self.syncs(set));
        lines
    }

    fn models(&self, status: &Status, set: &SetStatus) -> Vec<String> {
        let heads = [
            ("MODEL", false),
            ("SERVED", true),
            ("ANNOUNCED", true),
            ("AHEAD", true),
            ("DELTA", true),
            ("AGENT", false),
            ("HEARD", true),
        ];
        let mut table = Columns::new(&heads);
        for model in &set.models {
            let served = set.served.as_ref().and_then(|s| s.identities.iter().find(|i| i.model_id == *model));
            let mut cells = vec![model.to_string(), version(served.map(|i| i.version))];
            let trainer: Option<&TrainerStatus> = status.trainers.iter().find(|t| t.model_id == *model);
            let tone = trainer.is_some_and(|t| t.waiting).then_some(Tone::Warn);
            match trainer {
                Some(t) => cells.extend([
                    version(t.version),
                    format!("{}{}", t.ahead, if t.waiting { ", waits" } else { "" }),
                    t.delta_ratio.map_or("-".into(), percent),
                    clean(t.endpoint.trim_start_matches("http://")),
                    match t.state {
                        TrainerState::Here => ago(status.now, t.last_heard),
                        TrainerState::Silent => format!("silent, {}", ago(status.now, t.last_heard)),
                        TrainerState::Left => "left".into(),
                    },
                ]),
                None => cells.extend(["-", "-", "-", "no trainer yet", "-"].map(String::from)),
            }
            table.row(tone, cells);
        }
        table.lines(self)
    }

    /// The latencies of the last syncs, as a row of bars.
    fn syncs(&self, set: &SetStatus) -> Vec<String> {
        let latency = |s: &Sync| s.latency_ms.filter(|_| s.state == SyncState::Served);
        let most = set.syncs.iter().filter_map(latency).fold(0.0, f64::max);
        let least = set.syncs.iter().filter_map(latency).fold(f64::INFINITY, f64::min);
        if most <= 0.0 {
            return Vec::new();
        }
        let bar = |s: &Sync| match latency(s) {
            Some(ms) => BARS[((ms / most * 8.0).ceil() as usize).clamp(1, 8) - 1],
            None => '·',
        };
        let bars: String = set.syncs.iter().map(bar).collect();
        let text = format!("  last {} syncs {bars} {} to {}", set.syncs.len(), took(least), took(most));
        vec![self.tone(Tone::Faint, &self.cut(&text))]
    }

    fn receivers(&self, status: &Status, room: usize) -> Vec<String> {
        if status.receivers.is_empty() {
            let text = "  No receivers: start `windlass receive --controller` with this address.";
            return vec![String::new(), self.cut(text)];
        }
        let heads =
            [("RECEIVER", false), ("STATE", false), ("MODEL", false), ("LOADED", true), ("DOING", false)];
        let mut table = Columns::new(&heads);
        let mut order: Vec<&ReceiverStatus> = status.receivers.iter().collect();
        let need: usize = order.iter().map(|r| r.models.len().max(1)).sum();
        // An empty line, the heads, and a line that tells of those left out.
        let room = room.saturating_sub(3);
        if need > room {
            // Where not all can be shown, those that are up to something come first.
            order.sort_by_key(|r| (live(r), !busy(r)));
        }
        let (mut used, mut shown) = (0, 0);
        for receiver in &order {
            used += receiver.models.len().max(1);
            if used > room && shown > 0 {
                break;
            }
            shown += 1;
            receiver_rows(&mut table, receiver, status.now);
        }
        let mut lines = vec![String::new()];
        lines.extend(table.lines(self));
        if shown < order.len() {
            lines.push(self.tone(Tone::Faint, &format!("  … {} more", order.len() - shown)));
        }
        lines
    }

    /// Who waits for what, since when, until when.
    fn waiting(&self, status: &Status) -> Vec<String> {
        let few = if self.rows < 40 { 2 } else { 8 };
        let mut lines: Vec<String> = Vec::new();
        for wait in status.waiting.iter().take(few) {
            let what = match wait.what {
                Awaited::Gate => "at the gate for",
                Awaited::Load => "for the load of",
                Awaited::Eval => "for the eval of",
            };
            let left = took(wait.until.saturating_sub(status.now) as f64);
            let since = took(status.now.saturating_sub(wait.since) as f64);
            let (who, set, version) = (clean(&wait.who), &wait.set, wait.at_least);
            let text = format!("  {who} waits {what} v{version} of {set}, since {since}, for {left} at most");
            lines.push(self.cut(&text));
        }
        if let Some(more) = status.waits.checked_sub(lines.len()).filter(|n| *n > 0) {
            lines.push(self.tone(Tone::Faint, &format!("  and {more} more")));
        }
        if !lines.is_empty() {
            lines.insert(0, String::new());
        }
        lines
    }

    fn errors(&self, status: &Status) -> Vec<String> {
        let mut lines = Vec::new();
        let few = if self.rows < 40 { 2 } else { 5 };
        for error in status.errors.iter().take(few) {
            let times = if error.count > 1 { format!(" ({} times)", error.count) } else { String::new() };
            let (who, message) = (clean(&error.who), clean(&error.message));
            let when = ago(status.now, error.at);
            let text = format!("  {when}  {who} {}{times}: {message}", error.kind.as_str());
            lines.push(self.tone(Tone::Bad, &self.cut(&text)));
            if !error.advice.is_empty() {
                lines.push(self.tone(Tone::Faint, &self.cut(&format!("    {}", clean(&error.advice)))));
            }
        }
        if !lines.is_empty() {
            lines.insert(0, String::new());
        }
        lines
    }

    /// No wider than the frame.
    fn cut(&self, text: &str) -> String {
        if text.chars().count() <= self.columns {
            return text.to_owned();
        }
        text.chars().take(self.columns.saturating_sub(1)).chain(['…']).collect()
    }

    fn tone(&self, tone: Tone, text: &str) -> String {
        let code = match (self.style, tone) {
            (Style::Plain, _) => return text.to_owned(),
            (Style::Colour, Tone::Strong) => "1",
            (Style::Colour, Tone::Faint) => "2",
            (Style::Colour, Tone::Good) => "32",
            (Style::Colour, Tone::Warn) => "33",
            (Style::Colour, Tone::Bad) => "31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

fn live(receiver: &ReceiverStatus) -> bool {
    !receiver.places.is_empty() && receiver.places.iter().all(|p| p.live)
}

fn busy(receiver: &ReceiverStatus) -> bool {
    let at_it = |m: &HeldStatus| {
        let stage = m.doing.as_ref().map_or("idle", |d| d.stage.as_str());
        !m.staging.is_empty() || !["idle", "staged", "waiting"].contains(&stage)
    };
    receiver.models.iter().any(at_it) || receiver.places.iter().any(|p| p.loading.is_some())
}

fn receiver_rows(table: &mut Columns, receiver: &ReceiverStatus, now: u64) {
    let (state, tone) = match (live(receiver), busy(receiver)) {
        (true, _) => ("live", Tone::Good),
        (false, true) => ("catching up", Tone::Warn),
        (false, false) => ("not live", Tone::Bad),
    };
    let tone = (tone != Tone::Good).then_some(tone);
    let why = receiver.places.iter().find_map(|p| p.why.as_ref().map(|why| (p, clean(why))));
    for (i, held) in receiver.models.iter().enumerate() {
        let first = |text: String| if i == 0 { text } else { String::new() };
        let mut doing = doing_of(receiver, held);
        if let Some((place, why)) = why.as_ref().filter(|_| i == 0) {
            let again = place
                .retry_at
                .filter(|at| *at > now)
                .map(|at| format!(", again in {}", took((at - now) as f64)));
            doing = format!("{doing}; {why}{}", again.unwrap_or_default());
        }
        let loaded = version(held.loaded.map(|l| l.version));
        let name = first(clean(receiver.receiver.as_str()));
        table.row(tone, vec![name, first(state.to_owned()), held.model_id.to_string(), loaded, doing]);
    }
    if receiver.models.is_empty() {
        let name = clean(receiver.receiver.as_str());
        table.row(tone, vec![name, state.to_owned(), "-".into(), "-".into(), "-".into()]);
    }
}

/// A receiver's activity for a model, as short text.
fn doing_of(receiver: &ReceiverStatus, held: &HeldStatus) -> String {
    let loading = receiver.places.iter().any(|p| p.loading.is_some() && p.models.contains(&held.model_id));
    let mut text = match &held.doing {
        Some(doing) if doing.stage == "idle" => "idle".to_owned(),
        Some(doing) => format!("{} {}", clean(&doing.stage), version(doing.version)),
        None if !held.staging.is_empty() => "staging".to_owned(),
        None if loading => "loading".to_owned(),
        None => "idle".to_owned(),
    };
    let Some(doing) = &held.doing else { return text };
    if doing.of_bytes > 0 && doing.bytes < doing.of_bytes {
        let bar = meter(doing.bytes as f64 / doing.of_bytes as f64);
        let _ = write!(text, " {bar} {} of {}", bytes(doing.bytes), bytes(doing.of_bytes));
    }
    if doing.rate > 0.0 {
        let _ = write!(text, " {}/s", bytes(doing.rate.round() as u64));
    }
    let (mut serving, mut others) = (0, Vec::new());
    for engine in &doing.engines {
        if engine.condition == "serving" {
            serving += 1;
        } else {
            others.push(format!("{} {}", clean(&engine.engine), clean(&engine.condition)));
        }
        if let Some(why) = &engine.slow {
            others.push(format!("{} slow, not by plan: {}", clean(&engine.engine), clean(why)));
        }
    }
    if !doing.engines.is_empty() {
        let _ = write!(text, "; {serving} of {} engines serve", doing.engines.len());
    }
    for other in others {
        let _ = write!(text, "; {other}");
    }
    text
}

/// Ten cells, as many of them full as the share says.
fn meter(share: f64) -> String {
    let full = (share.clamp(0.0, 1.0) * 10.0).round() as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(10 - full))
}

fn version(version: Option<u64>) -> String {
    version.map_or("-".into(), |v| format!("v{v}"))
}

/// A time for people, from milliseconds.
pub(crate) fn took(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1e3 => format!("{ms:.0} ms"),
        ms if ms < 60e3 => format!("{:.2} s", ms / 1e3),
        ms if ms < 3600e3 => format!("{} min {} s", (ms / 60e3) as u64, (ms % 60e3 / 1e3) as u64),
        ms => format!("{} h {} min", (ms / 3600e3) as u64, (ms % 3600e3 / 60e3) as u64),
    }
}

fn ago(now: u64, at: u64) -> String {
    match now.saturating_sub(at) {
        past if past < 1500 => "now".into(),
        past if past < 60_000 => format!("{} s ago", past / 1000),
        past if past < 3_600_000 => format!("{} min ago", past / 60_000),
        past => format!("{} h ago", past / 3_600_000),
    }
}

/// Without characters that a terminal would obey.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '·' } else { c }).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A set of two models with three receivers: one pulls, one is out, one is idle.
    pub(in crate::tools::top) fn sample() -> Value {
        let sync = |version: u64, state: &str, latency: Option<f64>| {
            json!({
                "version": version, "state": state, "at": 90_000, "models": [], "loading_ms": null,
                "served_ms": latency, "latency_ms": latency, "pause_ms": latency.map(|_| 9.25), "bytes": 3 << 20,
                "full": 0, "delta": 6, "staged": 6, "loaded": 6, "failed": 0, "spans": [], "spans_left_out": 0,
            })
        };
        let held = |model: &str, version: u64, doing: Value| {
            json!({
                "model_id": model, "loaded": { "incarnation": 1, "version": version }, "staged": [],
                "staging": if doing["stage"] == "pulling" { json!([8]) } else { json!([]) }, "doing": doing,
            })
        };
        let doing = |stage: &str, more: Value| {
            let mut one = json!({ "model_id": "actor", "stage": stage, "version": 8 });
            one.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            one
        };
        let engine =
            |condition: &str| json!({ "engine": "vllm=http://e", "condition": condition, "version": 7 });
        let pulling = doing(
            "pulling",
            json!({
                "bytes": 5 << 20, "of_bytes": 10 << 20, "rate": 1.5 * 1024.0 * 1024.0,
                "engines": [engine("serving"), engine("fenced")],
            }),
        );
        let receiver = |name: &str, live: bool, models: Value, why: Value| {
            json!({
                "receiver": name, "session": 1, "host": "h", "release": "0.1.0", "joined": 0, "last_seen": 99_000,
                "orders": 0, "rate": 0.0, "models": models,
                "places": [{
                    "set": "policy", "models": ["actor", "verifier"], "live": live, "loading": null,
                    "retry_at": if live { Value::Null } else { json!(104_000) }, "why": why,
                }],
            })
        };
        let idle = || doing("idle", json!({}));
        json!({
            "release": "0.1.0", "now": 100_000, "started": 0, "zero_config": false, "waits": 3,
            "waiting": [
                { "who": "loader:\u{1b}7", "what": "gate", "set": "policy", "at_least": 9, "since": 98_000, "until": 130_000 },
                { "who": "the trainer of actor", "what": "load", "set": "policy", "at_least": 8, "since": 99_000, "until": 110_000 },
            ],
            "sets": [{
                "set": "policy", "models": ["actor", "verifier"], "mode": "strict", "required": "all", "floor": 1,
                "served": { "version": 7, "identities": [
                    { "model_id": "actor", "incarnation": 1, "version": 7 },
                    { "model_id": "verifier", "incarnation": 1, "version": 7 },
                ] },
                "blocked": "1 receiver is still staging version 8", "up_to_date": false,
                "rounds": [{
                    "models": ["actor", "verifier"], "version": 8, "phase": "staging", "waiting": 1, "done": 2,
                    "deadline": 130_000,
                }],
                "receivers": 3, "live": 2,
                "syncs": [sync(6, "served", Some(400.0)), sync(7, "served", Some(200.0)), sync(8, "open", None)],
            }],
            "trainers": [{
                "model_id": "actor", "set": "policy", "incarnation": 1, "version": 8,
                "endpoint": "http://10.0.0.5:7000", "last_heard": 95_000, "ahead": 1, "waiting": true,
                "released": null, "delta_ratio": 0.0084, "delta_sparsity": 0.99,
            }],
            "receivers": [
                receiver("gpu-0", true, json!([held("actor", 7, idle()), held("verifier", 7, idle())]), Value::Null),
                receiver("gpu-1", false, json!([held("actor", 6, idle())]), json!("load failed")),
                receiver("gpu-2", true, json!([held("actor", 7, pulling)]), Value::Null),
            ],
            "errors": [{
                "at": 91_000, "count": 3, "who": "gpu-1", "kind": "peer_lost", "message": "load\u{1b}[2J failed",
                "advice": "look at the engine",
            }],
        })
    }

    fn draw(document: &Value, size: (usize, usize), style: Style) -> String {
        let status: Status = serde_json::from_value(document.clone()).unwrap();
        Frame::new("http://c:1", size, style).draw(&status, None)
    }

    #[test]
    fn a_frame_says_what_the_document_says() {
        let text = draw(&sample(), (usize::MAX, 200), Style::Plain);
        let want = "\
windlass 0.1.0  http://c:1  up 1 min 40 s  1 error

policy  strict  serving version 7  2 of 3 live  latency 200 ms  paused 9.2 ms  wire 3.00 MiB
  1 receiver is still staging version 8
  v8 staging ███████░░░ 2 of 3
  MODEL     SERVED  ANNOUNCED     AHEAD   DELTA  AGENT             HEARD
  actor         v7         v8  1, waits  0.84 %  10.0.0.5:7000   5 s ago
  verifier      v7          -         -       -  no trainer yet        -
  last 3 syncs █▄· 200 ms to 400 ms

  loader:·7 waits at the gate for v9 of policy, since 2.00 s, for 30.00 s at most
  the trainer of actor waits for the load of v8 of policy, since 1.00 s, for 10.00 s at most
  and 1 more

  RECEIVER  STATE     MODEL     LOADED  DOING
  gpu-0     live      actor         v7  idle
                      verifier      v7  idle
  gpu-1     not live  actor         v6  idle; load failed, again in 4.00 s
  gpu-2     live      actor         v7  pulling v8 █████░░░░░ 5.00 MiB of 10.00 MiB 1.50 MiB/s; 1 of 2 engines serve; vllm=http://e fenced

  9 s ago  gpu-1 peer_lost (3 times): load·[2J failed
    look at the engine
";
        let tidy = |t: &str| t.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
        assert_eq!(tidy(&text), tidy(want), "\n{text}");
    }

    #[test]
    fn a_frame_keeps_to_its_size_and_shows_first_what_is_up_to_something() {
        let mut document = sample();
        let receivers = document["receivers"].as_array_mut().unwrap();
        let idle = receivers[0].clone();
        for i in 0..200 {
            let mut one = idle.clone();
            one["receiver"] = json!(format!("a-{i:03}"));
            receivers.insert(0, one);
        }
        for (rows, columns) in [(24, 80), (40, 100), (10, 40), (3, 200)] {
            let text = draw(&document, (rows, columns), Style::Plain);
            assert!(text.lines().count() < rows.max(2), "{rows}: {text}");
            assert!(text.lines().all(|l| l.chars().count() <= columns), "{columns}: {text}");
        }
        let text = draw(&document, (24, 80), Style::Plain);
        let at = |what: &str| {
            text.lines().position(|l| l.contains(what)).unwrap_or_else(|| panic!("{what}: {text}"))
        };
        assert!(at("gpu-1") < at("gpu-2") && at("gpu-2") < at("… "), "{text}");
        assert!(text.contains("more") && text.contains("look at the engine"), "{text}");
    }

    #[test]
    fn colours_change_no_words_and_nothing_from_outside_moves_the_cursor() {
        let plain = draw(&sample(), (60, 120), Style::Plain);
        let colour = draw(&sample(), (60, 120), Style::Colour);
        assert!(!plain.contains('\x1b') && colour.contains("\x1b[1m"));
        let mut stripped = String::new();
        let mut rest = colour.as_str();
        while let Some((before, after)) = rest.split_once("\x1b[") {
            stripped.push_str(before);
            rest = after.split_once('m').unwrap().1;
        }
        stripped.push_str(rest);
        assert_eq!(stripped, plain);
    }

    #[test]
    fn a_frame_of_an_empty_controller_says_what_to_do() {
        let mut document = sample();
        for name in ["sets", "trainers", "receivers", "errors", "waiting"] {
            document[name] = json!([]);
        }
        document["waits"] = json!(0);
        let text = draw(&document, (24, 80), Style::Plain);
        assert!(text.contains("notify_version") && text.contains("windlass receive --controller"), "{text}");
        let status: Status = serde_json::from_value(document).unwrap();
        let lost = Frame::new("http://c:1", (24, 80), Style::Plain).draw(&status, Some("it is\x07 gone"));
        assert!(lost.lines().nth(1).unwrap().starts_with("it is· gone; retrying"), "{lost}");
    }
}
