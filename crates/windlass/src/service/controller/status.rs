//! The document of `GET /status`: everything there is to see at one moment, as the live page and `windlass top` show it.
//!
//! Owns: its types, and how it is made from the barrier's snapshot and the record. Answers may gain fields in later
//! minor versions. Must not: hold anything longer than it takes to send it.
//!
//! # How to read it
//!
//! Points in time are milliseconds since 1970 on the controller's clock, which never steps back; spans and latencies are
//! milliseconds. `now` is when the document was made, so that a reader can say how long ago something was without
//! trusting its own clock. A *sync* is one version of one set from its first announcement on; its spans are counted from
//! that moment, so what the trainer did before is negative.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use windlass_core::barrier::{
    Awaited, Blocked, MemberSnapshot, Millis, Mode, Phase, ReceiverId, Required, SetName, Snapshot, WaitId,
};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};

use super::record::{Record, Trainer};
use super::wire::{Doing, Lane, ServedVersion};

/// A point in time: milliseconds since 1970.
pub type Unix = u64;

/// Everything there is to see.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub release: String,
    /// When this was made.
    pub now: Unix,
    /// When the controller started.
    pub started: Unix,
    /// Whether sets are made as models turn up.
    pub zero_config: bool,
    /// Every set, in the order of the configuration.
    pub sets: Vec<SetStatus>,
    /// The publisher of each model that has announced something.
    pub trainers: Vec<TrainerStatus>,
    /// Every receiver that is a member, by name.
    pub receivers: Vec<ReceiverStatus>,
    /// What went wrong lately, newest first.
    pub errors: Vec<ErrorEntry>,
    /// Gates and synchronous notifies that wait for something.
    pub waits: usize,
    /// The first 64 of them, in the order in which they came.
    #[serde(default)]
    pub waiting: Vec<WaitStatus>,
}

/// A client that waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitStatus {
    /// Name the waiter gave itself.
    pub who: String,
    /// At the gate, for the load of what was announced, or for an eval.
    pub what: Awaited,
    pub set: SetName,
    /// For which version, or a newer one.
    pub at_least: Version,
    pub since: Unix,
    /// Until when at most.
    pub until: Unix,
}

/// Whether a trainer is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainerState {
    /// It was heard of lately.
    #[default]
    Here,
    /// Nothing was heard of it for longer than the heartbeat: it may have died.
    Silent,
    /// It said that it has ended.
    Left,
}

/// One set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SetStatus {
    pub set: SetName,
    pub models: Vec<ModelId>,
    pub mode: Mode,
    /// Who must have staged and loaded: `all`, a number or a percentage.
    pub required: String,
    /// The fewest receivers that must have.
    pub floor: usize,
    /// What it serves; none before its first load and after an incarnation change.
    pub served: Option<ServedVersion>,
    /// Why it serves nothing newer, for people.
    pub blocked: String,
    /// Whether there is nothing newer.
    pub up_to_date: bool,
    /// Versions in flight: at most one in a strict set, one per model in a relaxed one.
    pub rounds: Vec<RoundStatus>,
    /// Receivers that serve models of it.
    pub receivers: usize,
    /// Those of them that are live, for all their models of the set.
    pub live: usize,
    /// The last syncs, oldest first.
    pub syncs: Vec<Sync>,
}

/// A version in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundStatus {
    pub models: Vec<ModelId>,
    pub version: Version,
    /// How far it is.
    pub phase: Phase,
    /// Required receivers that are not done.
    pub waiting: usize,
    pub done: usize,
    /// When it may give way to a newer version.
    pub deadline: Unix,
}

/// One version of one set, from its first announcement on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sync {
    pub version: Version,
    pub state: SyncState,
    /// When it was first announced.
    pub at: Unix,
    /// Each model's part in it, in the order of their announcements.
    pub models: Vec<SyncModel>,
    /// When the first load of it was ordered, in milliseconds after `at`.
    pub loading_ms: Option<f64>,
    /// When it was served, in milliseconds after `at`.
    pub served_ms: Option<f64>,
    /// From the last of its announcements until it was served, in milliseconds.
    pub latency_ms: Option<f64>,
    /// The longest that an engine was paused for it, in milliseconds.
    pub pause_ms: Option<f64>,
    /// Bytes that went over the wire.
    pub bytes: u64,
    /// How often it was received whole.
    pub full: u32,
    /// How often it was received as a delta.
    pub delta: u32,
    /// Receivers that reported it staged, once for each model.
    pub staged: u32,
    /// Receivers that reported it loaded, once for each model.
    pub loaded: u32,
    /// Failures to stage or load it.
    pub failed: u32,
    /// The result of its eval, if there was one: a text as it is, anything else as JSON.
    #[serde(default)]
    pub eval: Option<String>,
    /// What took how long. Kept for the newest syncs only.
    pub spans: Vec<SyncSpan>,
    /// Spans that were left out because there were too many.
    pub spans_left_out: u32,
}

/// How a sync went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyncState {
    Open,
    Served,
    /// A newer one was served instead.
    Skipped,
    /// A newer incarnation took over.
    Superseded,
}

/// One model's part in a sync.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncModel {
    pub model_id: ModelId,
    /// Incarnation of its publisher.
    pub incarnation: Incarnation,
    /// When it was announced, in milliseconds after the first announcement of the sync.
    pub announced_ms: f64,
    /// The bytes of its delta over those of the image, if there is one.
    pub delta_ratio: Option<f64>,
    /// The share of elements that its delta does not change.
    pub delta_sparsity: Option<f64>,
}

/// Something that took time, on the controller's clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncSpan {
    pub lane: Lane,
    /// Who did it: a model's trainer, or a receiver.
    pub who: String,
    /// Which model it is about.
    pub model_id: ModelId,
    pub what: String,
    /// When it began, in milliseconds after the first announcement of the sync.
    pub from_ms: f64,
    pub to_ms: f64,
    /// The bytes it moved.
    pub bytes: Option<u64>,
}

/// The publisher of one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerStatus {
    pub model_id: ModelId,
    pub set: SetName,
    /// The current incarnation.
    pub incarnation: Incarnation,
    /// The newest version it announced.
    pub version: Option<Version>,
    /// Where its agent serves it.
    pub endpoint: String,
    /// When it was last heard of.
    pub last_heard: Unix,
    /// Whether it is there.
    #[serde(default)]
    pub state: TrainerState,
    /// How many versions that it announced are not served yet.
    pub ahead: usize,
    /// Whether it was told to wait.
    pub waiting: bool,
    /// The oldest version that may still be asked for.
    pub released: Option<Version>,
    /// The bytes of its newest delta over those of the image.
    pub delta_ratio: Option<f64>,
    /// The share of elements that its newest delta does not change.
    pub delta_sparsity: Option<f64>,
}

impl Status {
    /// The receivers of a model that do not hold a version of it, or a later one.
    pub fn without(&self, identity: &Identity) -> Vec<&ReceiverId> {
        let wanted = (identity.incarnation, identity.version);
        let lacks = |held: &HeldStatus| {
            held.model_id == identity.model_id
                && held.loaded.is_none_or(|is| (is.incarnation, is.version) < wanted)
        };
        self.receivers.iter().filter(|r| r.models.iter().any(lacks)).map(|r| &r.receiver).collect()
    }
}

/// A receiver that is a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiverStatus {
    pub receiver: ReceiverId,
    /// Its session.
    pub session: u64,
    pub host: String,
    pub release: String,
    pub joined: Unix,
    /// When it was last heard of.
    pub last_seen: Unix,
    /// Orders that it has not taken yet.
    pub orders: usize,
    /// Bytes per second, all its models together.
    pub rate: f64,
    /// Its place in each set: one in a strict set, one for each model in a relaxed one.
    pub places: Vec<PlaceStatus>,
    /// Each of its models.
    pub models: Vec<HeldStatus>,
}

/// A receiver's place among models that move together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceStatus {
    pub set: SetName,
    /// The models that move together, as far as it serves them.
    pub models: Vec<ModelId>,
    /// Whether it serves what the others serve.
    pub live: bool,
    /// The version it is ordered to load.
    pub loading: Option<Version>,
    /// When it is asked again after a failure.
    pub retry_at: Option<Unix>,
    /// Why it is not live, as far as is known.
    pub why: Option<String>,
}

/// One model at one receiver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeldStatus {
    pub model_id: ModelId,
    /// What its engines hold for certain.
    pub loaded: Option<Held>,
    /// Versions that could be loaded without the network.
    pub staged: Vec<Version>,
    /// Versions on their way.
    pub staging: Vec<Version>,
    /// What it says it is doing.
    pub doing: Option<Doing>,
}

/// What engines hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Incarnation of the publisher.
    pub incarnation: Incarnation,
    pub version: Version,
}

/// Something that went wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ErrorEntry {
    /// When it was last seen.
    pub at: Unix,
    /// How often in a row.
    pub count: u64,
    /// Where: a receiver or a model's trainer.
    pub who: String,
    /// What sort of failure.
    pub kind: Kind,
    pub message: String,
    /// What to do about it.
    pub advice: String,
}

/// Who must have staged and loaded, as it is configured.
pub fn required_text(required: Required) -> String {
    match required {
        Required::All => "all".into(),
        Required::AtLeast(n) => n.to_string(),
        Required::Percent(p) => format!("{p}%"),
    }
}

/// Inputs of the document besides the barrier's snapshot.
pub(super) struct About<'a> {
    pub(super) record: &'a Record,
    /// Silence after which a client may be dead.
    pub(super) heartbeat: Millis,
    /// The point in time of the barrier's zero.
    pub(super) base: Unix,
}

/// Makes the document.
pub(super) fn status(
    snapshot: Snapshot,
    about: &About<'_>,
    orders: impl Fn(&ReceiverId) -> usize,
    blocked: impl Fn(&SetName) -> Blocked,
    waiter: impl Fn(WaitId) -> String,
) -> Status {
    let About { record, heartbeat, base } = *about;
    let now = snapshot.now;
    let waiting = snapshot.waiting.into_iter().map(|wait| WaitStatus {
        who: waiter(wait.id),
        what: wait.what,
        set: wait.set,
        at_least: wait.at_least,
        since: base + wait.since,
        until: base + wait.until,
    });
    let waiting = waiting.collect();
    let state = |about: Option<&Trainer>, incarnation| match about {
        Some(trainer) if trainer.left(incarnation) => TrainerState::Left,
        Some(trainer) if now.saturating_sub(trainer.heard) > heartbeat => TrainerState::Silent,
        Some(_) | None => TrainerState::Here,
    };
    let mut receivers: Vec<ReceiverStatus> = snapshot
        .receivers
        .iter()
        .map(|r| {
            let about = record.receiver(&r.receiver);
            ReceiverStatus {
                receiver: r.receiver.clone(),
                session: r.session,
                host: about.map(|a| a.host.clone()).unwrap_or_default(),
                release: about.map(|a| a.release.clone()).unwrap_or_default(),
                joined: base + about.map_or(0, |a| a.joined),
                last_seen: base + r.last_seen,
                orders: orders(&r.receiver),
                rate: about.map_or(0.0, |a| a.doing.iter().fold(0.0, |all, d| all + d.rate)),
                places: Vec::new(),
                models: Vec::new(),
            }
        })
        .collect();
    let index: HashMap<ReceiverId, usize> =
        receivers.iter().enumerate().map(|(i, r)| (r.receiver.clone(), i)).collect();
    let (mut sets, mut trainers) = (Vec::new(), Vec::new());
    for set in snapshot.sets {
        let (mut members, mut rounds, mut models) = (HashMap::new(), Vec::new(), Vec::new());
        let blocked = blocked(&set.set);
        for group in set.groups {
            let names: Vec<ModelId> = group.models.iter().map(|m| m.model.clone()).collect();
            models.extend(names.iter().cloned());
            rounds.extend(group.round.map(|round| RoundStatus {
                models: names,
                version: round.version,
                phase: round.phase,
                waiting: round.waiting,
                done: round.done,
                deadline: base + round.deadline,
            }));
            for member in group.members {
                let live = members.entry(member.receiver.clone()).or_insert(true);
                *live &= member.live;
                if let Some(receiver) = index.get(&member.receiver).and_then(|i| receivers.get_mut(*i)) {
                    place(receiver, &set.set, member, record, base);
                }
            }
            for model in group.models {
                let (Some(incarnation), Some(endpoint)) = (model.incarnation, model.endpoint) else {
                    continue;
                };
                let about = record.trainer(&model.model);
                trainers.push(TrainerStatus {
                    set: set.set.clone(),
                    incarnation,
                    version: model.newest.max(about.and_then(|a| a.newest(incarnation))),
                    endpoint,
                    last_heard: base + about.map_or(0, |a| a.heard),
                    state: state(about, incarnation),
                    ahead: model.ahead,
                    waiting: model.back_pressure,
                    released: about.and_then(|a| a.released(incarnation)),
                    delta_ratio: about.and_then(|a| a.delta_ratio),
                    delta_sparsity: about.and_then(|a| a.delta_sparsity),
                    model_id: model.model,
                });
            }
        }
        sets.push(SetStatus {
            models,
            mode: set.mode,
            required: required_text(set.required),
            floor: set.floor,
            served: set.served.map(ServedVersion::from),
            up_to_date: blocked == Blocked::UpToDate,
            blocked: blocked.to_string(),
            rounds,
            receivers: members.len(),
            live: members.values().filter(|live| **live).count(),
            syncs: record.syncs(&set.set, base),
            set: set.set,
        });
    }
    Status {
        release: env!("CARGO_PKG_VERSION").into(),
        now: base + now,
        started: base,
        zero_config: false,
        sets,
        trainers,
        receivers,
        errors: record.errors(base),
        waits: snapshot.waits,
        waiting,
    }
}

/// Puts what one group knows about a receiver into its entry.
fn place(receiver: &mut ReceiverStatus, set: &SetName, member: MemberSnapshot, record: &Record, base: Unix) {
    let about = record.receiver(&receiver.receiver);
    let models: Vec<ModelId> = member.slots.iter().map(|s| s.model.clone()).collect();
    receiver.models.extend(member.slots.into_iter().map(|slot| HeldStatus {
        loaded: slot.loaded.map(|(incarnation, version)| Held { incarnation, version }),
        staged: slot.staged,
        staging: slot.staging,
        doing: about.and_then(|a| a.doing.iter().find(|d| d.model_id == slot.model).cloned()),
        model_id: slot.model,
    }));
    let why = about.and_then(|a| a.fenced.get(models.first()?).cloned()).filter(|_| !member.live);
    receiver.places.push(PlaceStatus {
        set: set.clone(),
        models,
        live: member.live,
        loading: member.loading,
        retry_at: member.retry_at.map(|at| base + at),
        why,
    });
}
