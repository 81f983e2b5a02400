//! Recent history for people: syncs, errors, and the reports of trainers and receivers.
//!
//! Owns: the data behind the live page, `windlass top` and the metrics. All of it is bounded: [`SYNCS`] syncs per set,
//! [`SPANS`] spans per sync for the newest [`WITH_SPANS`] syncs, [`ERRORS`] errors. The barrier does not use it.

use std::collections::{HashMap, VecDeque};

use serde_json::Value;
use windlass_core::barrier::{Millis, ReceiverId, Served, SetName};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};

use super::status::{ErrorEntry, Sync, SyncModel, SyncSpan, SyncState, Unix};
use super::wire::{Doing, Join, Lane, NotifyVersion, Outcome, Report, Span};

/// Syncs kept per set.
pub(super) const SYNCS: usize = 50;
/// Syncs whose spans are kept, newest first.
pub(super) const WITH_SPANS: usize = 10;
/// Spans kept per sync.
pub(super) const SPANS: usize = 200;
/// Errors kept.
pub(super) const ERRORS: usize = 50;
/// Characters kept of the result of an eval.
const EVAL: usize = 200;

/// What is remembered.
#[derive(Debug, Default)]
pub(super) struct Record {
    syncs: HashMap<SetName, VecDeque<Entry>>,
    errors: VecDeque<ErrorEntry>,
    trainers: HashMap<ModelId, Trainer>,
    receivers: HashMap<ReceiverId, About>,
}

/// What is known about a publisher.
#[derive(Debug, Default)]
pub(super) struct Trainer {
    /// When it was last heard of.
    pub(super) heard: Millis,
    newest: Option<(Incarnation, Version)>,
    released: Option<(Incarnation, Version)>,
    pub(super) delta_ratio: Option<f64>,
    pub(super) delta_sparsity: Option<f64>,
    /// The incarnation that left.
    left: Option<Incarnation>,
}

impl Trainer {
    /// Whether this incarnation has left.
    pub(super) fn left(&self, incarnation: Incarnation) -> bool {
        self.left == Some(incarnation)
    }

    /// The newest version of this incarnation.
    pub(super) fn newest(&self, incarnation: Incarnation) -> Option<Version> {
        self.newest.filter(|(i, _)| *i == incarnation).map(|(_, v)| v)
    }

    pub(super) fn released(&self, incarnation: Incarnation) -> Option<Version> {
        self.released.filter(|(i, _)| *i == incarnation).map(|(_, v)| v)
    }
}

/// What is known about a member.
#[derive(Debug, Default)]
pub(super) struct About {
    pub(super) session: u64,
    pub(super) models: Vec<ModelId>,
    pub(super) host: String,
    pub(super) release: String,
    pub(super) joined: Millis,
    pub(super) doing: Vec<Doing>,
    /// Why it does not serve these models.
    pub(super) fenced: HashMap<ModelId, String>,
}

#[derive(Debug)]
struct Entry {
    at: Millis,
    /// Of each model: since when it is served, or that something newer is.
    fates: Vec<Option<Fate>>,
    sync: Sync,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Served,
    Passed,
}

/// What a version that has come to be served took.
pub(super) struct Latency {
    pub(super) set: SetName,
    pub(super) seconds: f64,
}

impl Record {
    pub(super) fn receiver(&self, id: &ReceiverId) -> Option<&About> {
        self.receivers.get(id)
    }

    pub(super) fn trainer(&self, model: &ModelId) -> Option<&Trainer> {
        self.trainers.get(model)
    }

    /// The syncs of a set, oldest first.
    pub(super) fn syncs(&self, set: &SetName, base: Unix) -> Vec<Sync> {
        let entries = self.syncs.get(set).into_iter().flatten();
        entries.map(|e| Sync { at: base + e.at, ..e.sync.clone() }).collect()
    }

    /// The errors, newest first.
    pub(super) fn errors(&self, base: Unix) -> Vec<ErrorEntry> {
        self.errors.iter().rev().map(|e| ErrorEntry { at: base + e.at, ..e.clone() }).collect()
    }

    /// Something went wrong. The same thing again is counted, not listed again.
    pub(super) fn error(&mut self, now: Millis, who: String, kind: Kind, message: String) {
        let same = |e: &&mut ErrorEntry| e.who == who && e.kind == kind && e.message == message;
        if let Some(entry) = self.errors.iter_mut().rev().take(8).find(same) {
            entry.at = now;
            entry.count += 1;
            return;
        }
        if self.errors.len() == ERRORS {
            self.errors.pop_front();
        }
        let advice = kind.advice().to_owned();
        self.errors.push_back(ErrorEntry { at: now, count: 1, who, kind, message, advice });
    }

    // ---- trainers ---------------------------------------------------------------------------------

    /// A trainer has ended; an error names the incarnation that has superseded it.
    pub(super) fn left(&mut self, now: Millis, identity: &Identity) -> Result<(), Incarnation> {
        let Some(trainer) = self.trainers.get_mut(&identity.model_id) else { return Ok(()) };
        match trainer.newest {
            Some((current, _)) if current > identity.incarnation => Err(current),
            Some(_) | None => {
                (trainer.heard, trainer.left) = (now, Some(identity.incarnation));
                Ok(())
            }
        }
    }

    /// A version was announced, perhaps again. One that was served before it was announced (`passed`) is no sync.
    pub(super) fn announced(&mut self, now: Millis, set: &SetName, notify: &NotifyVersion, passed: bool) {
        let NotifyVersion { incarnation, version, delta_ratio, delta_sparsity, .. } = *notify;
        let trainer = self.trainers.entry(notify.model_id.clone()).or_default();
        trainer.heard = now;
        trainer.left = None;
        if trainer.newest.is_none_or(|newest| newest < (incarnation, version)) {
            trainer.newest = Some((incarnation, version));
            (trainer.delta_ratio, trainer.delta_sparsity) = (delta_ratio, delta_sparsity);
        }
        if passed {
            return;
        }
        let entry = self.entry(set, now, version, &notify.model_id, incarnation);
        if entry.sync.models.iter().any(|m| m.model_id == notify.model_id) {
            return;
        }
        let announced_ms = now.saturating_sub(entry.at) as f64;
        entry.sync.models.push(SyncModel {
            model_id: notify.model_id.clone(),
            incarnation,
            announced_ms,
            delta_ratio,
            delta_sparsity,
        });
        entry.fates.push(None);
        entry.add_spans(now, &notify.model_id, notify.model_id.as_str(), &notify.spans);
    }

    /// The open sync of a version, which is made if there is none that this model could be part of.
    fn entry(
        &mut self,
        set: &SetName,
        now: Millis,
        version: Version,
        model: &ModelId,
        incarnation: Incarnation,
    ) -> &mut Entry {
        let entries = self.syncs.entry(set.clone()).or_default();
        let fits = |e: &Entry| {
            let own = e.sync.models.iter().find(|m| m.model_id == *model);
            e.sync.version == version
                && own.is_none_or(|m| m.incarnation == incarnation)
                && e.sync.state != SyncState::Superseded
        };
        let at = entries.iter().rposition(fits).unwrap_or_else(|| {
            if entries.len() == SYNCS {
                entries.pop_front();
            }
            entries.push_back(Entry::new(now, version));
            if let Some(older) = entries.len().checked_sub(WITH_SPANS + 1).and_then(|i| entries.get_mut(i)) {
                older.sync.spans = Vec::new();
            }
            entries.len() - 1
        });
        // Found or pushed a moment ago.
        entries.get_mut(at).unwrap_or_else(|| unreachable!())
    }

    /// A model was resumed: what its dead self announced is not waited for any more.
    pub(super) fn superseded(&mut self, set: &SetName, model: &ModelId, by: Incarnation) {
        let dead = |e: &&mut Entry| {
            e.sync.state == SyncState::Open
                && e.sync.models.iter().any(|m| m.model_id == *model && m.incarnation < by)
        };
        for entry in self.syncs.get_mut(set).into_iter().flatten().filter(dead) {
            entry.sync.state = SyncState::Superseded;
        }
    }

    pub(super) fn released(&mut self, identity: &Identity) {
        let trainer = self.trainers.entry(identity.model_id.clone()).or_default();
        trainer.released = Some((identity.incarnation, identity.version));
    }

    /// Loads of a version begin.
    pub(super) fn loading(&mut self, now: Millis, set: &SetName, identities: &[Identity]) {
        let Some(first) = identities.first() else { return };
        if let Some(entry) = self.find(set, first) {
            entry.sync.loading_ms.get_or_insert(now.saturating_sub(entry.at) as f64);
        }
    }

    /// What a set serves has changed. Returns what the syncs took that are served by it.
    pub(super) fn served(&mut self, now: Millis, set: &SetName, served: &Served) -> Vec<Latency> {
        let mut latencies = Vec::new();
        let open = |e: &&mut Entry| e.sync.state == SyncState::Open;
        for entry in self.syncs.get_mut(set).into_iter().flatten().filter(open) {
            let version = entry.sync.version;
            for (model, fate) in entry.sync.models.iter().zip(&mut entry.fates) {
                let own = served
                    .identities
                    .iter()
                    .find(|i| i.model_id == model.model_id && i.incarnation == model.incarnation);
                *fate = fate.or(match own {
                    Some(i) if i.version == version => Some(Fate::Served),
                    Some(i) if i.version > version => Some(Fate::Passed),
                    Some(_) | None => None,
                });
            }
            if entry.fates.iter().all(|f| *f == Some(Fate::Served)) {
                let at = now.saturating_sub(entry.at) as f64;
                let last = entry.sync.models.iter().map(|m| m.announced_ms).fold(0.0, f64::max);
                entry.sync.state = SyncState::Served;
                entry.sync.served_ms = Some(at);
                entry.sync.latency_ms = Some(at - last);
                latencies.push(Latency { set: set.clone(), seconds: (at - last) / 1e3 });
            } else if entry.fates.contains(&Some(Fate::Passed)) {
                entry.sync.state = SyncState::Skipped;
            }
        }
        latencies
    }

    // ---- receivers --------------------------------------------------------------------------------

    pub(super) fn joined(&mut self, now: Millis, join: &Join) {
        let known = self.receivers.get(&join.peer.receiver);
        if known.is_some_and(|k| k.session == join.peer.session) {
            return;
        }
        let about = About {
            session: join.peer.session,
            models: join.models.clone(),
            host: cut(&join.host, 128),
            release: cut(&join.release, 32),
            joined: now,
            doing: Vec::new(),
            fenced: HashMap::new(),
        };
        self.receivers.insert(join.peer.receiver.clone(), about);
    }

    pub(super) fn gone(&mut self, receiver: &ReceiverId) {
        self.receivers.remove(receiver);
    }

    /// Why a receiver does not serve these models; none if it does.
    pub(super) fn fenced(&mut self, receiver: &ReceiverId, models: &[ModelId], why: Option<&str>) {
        let Some(about) = self.receivers.get_mut(receiver) else { return };
        for model in models {
            match why {
                Some(why) => about.fenced.insert(model.clone(), why.to_owned()),
                None => about.fenced.remove(model),
            };
        }
    }

    /// What a receiver says it is doing. Returns whether that is news.
    pub(super) fn doing(&mut self, receiver: &ReceiverId, mut doing: Vec<Doing>) -> bool {
        let Some(about) = self.receivers.get_mut(receiver) else { return false };
        doing.retain(|d| about.models.contains(&d.model_id));
        doing.truncate(about.models.len());
        for one in &mut doing {
            one.stage = cut(&one.stage, 32);
            one.engines.truncate(32);
            one.brought.truncate(64);
            one.brought.iter_mut().for_each(|b| b.by = b.by.take().map(|name| cut(&name, 256)));
            for engine in &mut one.engines {
                engine.engine = cut(&engine.engine, 256);
                engine.condition = cut(&engine.condition, 32);
                engine.error = engine.error.take().map(|e| cut(&e, 300));
            }
        }
        let news = about.doing != doing;
        about.doing = doing;
        news
    }

    /// How an order went.
    pub(super) fn reported(&mut self, now: Millis, set: &SetName, report: &Report) {
        let Some(entry) = self.find(set, &report.identity) else { return };
        let sync = &mut entry.sync;
        match report.outcome {
            Outcome::Staged => sync.staged += 1,
            Outcome::Loaded => sync.loaded += 1,
            Outcome::Absent { .. } | Outcome::Failed { .. } => sync.failed += 1,
        }
        match report.mode.as_deref() {
            Some("full") => sync.full += 1,
            Some("delta") => sync.delta += 1,
            Some(_) | None => {}
        }
        let longest = report.pause_ms.unwrap_or(0.0).max(sync.pause_ms.unwrap_or(0.0));
        sync.pause_ms = sync.pause_ms.or(report.pause_ms).map(|_| longest);
        sync.bytes = sync.bytes.saturating_add(wire_bytes(&report.spans));
        entry.add_spans(now, &report.identity.model_id, report.peer.receiver.as_str(), &report.spans);
    }

    /// An eval of a version has ended.
    pub(super) fn evaluated(&mut self, set: &SetName, identity: &Identity, result: Result<&str, &str>) {
        let Some(entry) = self.find(set, identity) else { return };
        let text = match result.map(serde_json::from_str) {
            Ok(Ok(Value::String(text))) => text,
            Ok(Ok(other)) => other.to_string(),
            Ok(Err(_)) => return,
            Err(why) => format!("failed: {why}"),
        };
        entry.sync.eval = Some(cut(&text, EVAL));
    }

    fn find(&mut self, set: &SetName, identity: &Identity) -> Option<&mut Entry> {
        let own = |m: &SyncModel| m.model_id == identity.model_id && m.incarnation == identity.incarnation;
        let fits = |e: &&mut Entry| e.sync.version == identity.version && e.sync.models.iter().any(own);
        self.syncs.get_mut(set)?.iter_mut().rev().find(fits)
    }
}

/// The bytes that went over the wire.
pub(super) fn wire_bytes(spans: &[Span]) -> u64 {
    let wire = spans.iter().filter(|s| s.lane == Lane::Wire);
    wire.filter_map(|s| s.bytes).fold(0, u64::saturating_add)
}

impl Entry {
    fn new(at: Millis, version: Version) -> Entry {
        let sync = Sync {
            version,
            state: SyncState::Open,
            at: 0,
            models: Vec::new(),
            loading_ms: None,
            served_ms: None,
            latency_ms: None,
            pause_ms: None,
            bytes: 0,
            full: 0,
            delta: 0,
            staged: 0,
            loaded: 0,
            failed: 0,
            eval: None,
            spans: Vec::new(),
            spans_left_out: 0,
        };
        Entry { at, fates: Vec::new(), sync }
    }

    /// Converts spans to the controller's clock: senders give times as durations ago.
    fn add_spans(&mut self, now: Millis, model: &ModelId, who: &str, spans: &[Span]) {
        let sent = now as f64 - self.at as f64;
        for span in spans {
            if self.sync.spans.len() >= SPANS {
                self.sync.spans_left_out = self.sync.spans_left_out.saturating_add(1);
                continue;
            }
            self.sync.spans.push(SyncSpan {
                lane: span.lane,
                who: who.to_owned(),
                model_id: model.clone(),
                what: cut(&span.what, 64),
                from_ms: tenths(sent - span.began_ms_ago),
                to_ms: tenths(sent - span.ended_ms_ago),
                bytes: span.bytes,
            });
        }
    }
}

fn tenths(ms: f64) -> f64 {
    (ms * 10.0).round() / 10.0
}

/// At most so many characters.
pub(super) fn cut(text: &str, most: usize) -> String {
    text.chars().take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set() -> SetName {
        SetName::new("s").unwrap()
    }

    fn identity(version: Version) -> Identity {
        Identity { model_id: ModelId::new("m").unwrap(), incarnation: Incarnation(1), version }
    }

    fn notify(version: Version, spans: usize) -> NotifyVersion {
        let span = Span {
            lane: Lane::Trainer,
            what: "w".repeat(500),
            began_ms_ago: 3.0,
            ended_ms_ago: 1.0,
            bytes: None,
        };
        NotifyVersion {
            model_id: identity(version).model_id,
            incarnation: Incarnation(1),
            version,
            sender_endpoint: "h:1".into(),
            sync: false,
            eval: None,
            timeout_ms: None,
            spans: vec![span; spans],
            delta_sparsity: None,
            delta_ratio: None,
        }
    }

    fn served(version: Version) -> Served {
        Served { version, identities: vec![identity(version)] }
    }

    #[test]
    fn the_record_keeps_the_newest_and_is_bounded() {
        let mut record = Record::default();
        for version in 0..=SYNCS as u64 {
            record.announced(version, &set(), &notify(version, 2), false);
        }
        let syncs = record.syncs(&set(), 1000);
        assert_eq!((syncs.len(), syncs[0].version, syncs[0].at), (SYNCS, 1, 1001));
        assert_eq!(syncs.iter().filter(|s| !s.spans.is_empty()).count(), WITH_SPANS);
        assert_eq!(syncs[SYNCS - 1].spans[0].what.len(), 64);
        record.announced(90, &set(), &notify(99, SPANS + 5), false);
        let last = record.syncs(&set(), 0).pop().unwrap();
        assert_eq!((last.spans.len(), last.spans_left_out), (SPANS, 5));
        for n in 0..2 * ERRORS {
            record.error(n as u64, "r".into(), Kind::Timeout, format!("{n}"));
            record.error(n as u64, "r".into(), Kind::Timeout, format!("{n}"));
        }
        let errors = record.errors(0);
        assert_eq!((errors.len(), errors[0].message.as_str(), errors[0].count), (ERRORS, "99", 2));
    }

    #[test]
    fn a_sync_is_served_skipped_or_superseded() {
        let mut record = Record::default();
        for (at, version) in [(10, 1), (20, 2), (30, 3)] {
            record.announced(at, &set(), &notify(version, 0), false);
        }
        record.announced(35, &set(), &notify(3, 0), false);
        record.loading(40, &set(), &[identity(2)]);
        let latencies = record.served(50, &set(), &served(2));
        assert_eq!(latencies.iter().map(|l| l.seconds).collect::<Vec<_>>(), [0.03]);
        let next = Incarnation(2);
        record.superseded(&set(), &identity(0).model_id, next);
        let states: Vec<_> = record.syncs(&set(), 0).iter().map(|s| s.state).collect();
        assert_eq!(states, [SyncState::Skipped, SyncState::Served, SyncState::Superseded]);
        let second = &record.syncs(&set(), 0)[1];
        assert_eq!(
            (second.loading_ms, second.served_ms, second.latency_ms),
            (Some(20.0), Some(30.0), Some(30.0))
        );
        record.announced(60, &set(), &NotifyVersion { incarnation: next, ..notify(3, 0) }, false);
        assert_eq!(record.syncs(&set(), 0).len(), 4, "the same number in another life is another sync");
        record.announced(70, &set(), &NotifyVersion { incarnation: next, ..notify(1, 0) }, true);
        assert_eq!(record.syncs(&set(), 0).len(), 4, "what is served already is no sync");
        assert_eq!(record.trainer(&identity(0).model_id).unwrap().newest(next), Some(3));
    }
}
