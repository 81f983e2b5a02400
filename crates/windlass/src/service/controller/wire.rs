//! The JSON bodies of the controller's endpoints.
//!
//! Owns: the types only. `/openapi.json` describes them. Later minor versions may add fields to answers, so readers ignore
//! unknown ones; in a request an unknown field is an error.
//!
//! | endpoint | request | answer |
//! |---|---|---|
//! | `POST /notify_version` | [`NotifyVersion`] | [`Notified`] |
//! | `GET /service_version` with [`Gate`] as its query | – | [`Service`] |
//! | `POST /register_receiver` | [`Join`] | [`Joined`] |
//! | `POST /poll_orders` | [`Poll`] | [`Orders`] |
//! | `POST /report` | [`Report`] | [`Done`] |
//! | `POST /leave` | [`Peer`] | [`Done`] |
//! | `POST /take_eval` | [`TakeEval`] | [`EvalTask`], or none within the time |
//! | `POST /eval_done` | [`EvalDone`] | [`Done`] |
//! | `GET /status` | – | [`Status`](super::status::Status): the state, as the live page shows it |
//! | `GET /events` | – | the same as server-sent events, whenever something has changed |
//! | `GET /metrics` | – | Prometheus text |
//! | `GET /openapi.json`, `GET /`, `GET /healthz` | – | without a token |
//!
//! # Direction of calls
//!
//! Only the controller listens. Receivers hold a poll open, which is also their heartbeat, and get orders as its answers:
//! receivers and trainers need no port that the controller can reach. The controller repeats an order until a poll
//! acknowledges it ([`Poll::after`]), so that a lost answer loses no order.
//!
//! # Failures
//!
//! Every failure is `{"ok": false, "error": {"kind", "message", "advice"}}` with the status of its kind
//! ([`Kind::row`]). Statuses that a caller must distinguish:
//!
//! | status | what it means | what to do |
//! |---|---|---|
//! | 404 | to a receiver: it is not a member (it missed its heartbeat, or the controller restarted) | join again, with a greater session |
//! | 409 | a message of an earlier session, order or incarnation | drop it; with an earlier session or incarnation, stop |
//! | 504 | a gate or a synchronous notify timed out; the message says what is missing | retry, if there is time |
//! | 503 | the controller is shutting down | retry |
//! | 429, 507 | a limit is reached | wait |
//!
//! # Time
//!
//! Hosts' clocks differ. A [`Span`] gives start and end as durations before the message was sent, and the controller
//! converts them to its own clock.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use windlass_core::barrier::{Order, Peer, Phase, Served, SetName};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};
use windlass_core::wire::control::Brought;

/// Maximum number of spans in a message.
pub const MAX_SPANS: usize = 16;

/// A timed step, on the sender's clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    pub lane: Lane,
    /// Name of the step: `offload`, `seal`, `pull delta`, `pause`, `load`.
    pub what: String,
    /// How long before the message was sent it began, in milliseconds.
    pub began_ms_ago: f64,
    /// How long before the message was sent it ended.
    pub ended_ms_ago: f64,
    /// The bytes it moved, if it moved any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// A row of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    Trainer,
    /// The trainer's agent.
    Agent,
    /// The way to a receiver, and what it does to its image.
    Wire,
    /// The engines behind a receiver.
    Engine,
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Lane::Trainer => "trainer",
            Lane::Agent => "agent",
            Lane::Wire => "wire",
            Lane::Engine => "engine",
        })
    }
}

/// A trainer has published a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NotifyVersion {
    pub model_id: ModelId,
    /// Incarnation of the publisher; if absent or 0, the one that the agent shows ([`NotifyVersion::SHOWN`]).
    #[serde(default = "shown")]
    pub incarnation: Incarnation,
    pub version: Version,
    /// Where its agent serves it.
    pub sender_endpoint: String,
    /// Answer when the version is served, not at once.
    #[serde(default)]
    pub sync: bool,
    /// Run an eval on this version, with this text for the runner, and answer with its result. Implies `sync`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<Value>,
    /// How long a synchronous answer may take to the load; the controller's longest wait if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// What it took to publish it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<Span>,
    /// The share of elements that its delta does not change, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_sparsity: Option<f64>,
    /// The bytes of its delta over those of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_ratio: Option<f64>,
}

impl NotifyVersion {
    /// Stands for the incarnation that the agent shows. Incarnations count from 1.
    pub const SHOWN: Incarnation = Incarnation(0);
}

fn shown() -> Incarnation {
    NotifyVersion::SHOWN
}

/// The answer to a notify.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Notified {
    pub ok: bool,
    /// The trainer should wait at the gate before it publishes more: it is too far ahead of what is served.
    pub wait: bool,
    /// How many versions that it announced are not served yet.
    pub ahead: usize,
    /// The set of the model.
    pub set: SetName,
    /// What the set serves now.
    pub served: Option<ServedVersion>,
    /// What the eval returned, if one was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<Value>,
    /// Why the eval returned nothing, if it failed. The version is served all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_error: Option<String>,
}

/// The query of the gate. Without `at_least` it is answered at once with what is served; with it, when at least that is
/// served, and at the end of the time with 504.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// Which set. That of `model_id` if not given, or the only one there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<SetName>,
    /// The lowest version that will do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<Version>,
    /// Waits on behalf of this model's trainer. With `incarnation`, versions of an earlier one never open the gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<ModelId>,
    /// Incarnation of that trainer; a superseded one is refused with 409.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<Incarnation>,
    /// How long to wait; half a minute if not given, and never longer than the controller's longest wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Name of the waiter, such as its host and process; shown by `GET /status`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
}

/// `POST /trainer_left`: a trainer has ended, as it should. What it published goes on being served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerLeft {
    pub model_id: ModelId,
    /// Its incarnation. A superseded one is refused with 409.
    pub incarnation: Incarnation,
}

/// What a set serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedVersion {
    /// The version that all models of the set have reached.
    pub version: Version,
    pub identities: Vec<Identity>,
}

impl From<Served> for ServedVersion {
    fn from(served: Served) -> ServedVersion {
        ServedVersion { version: served.version, identities: served.identities }
    }
}

/// The answer of the gate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    pub set: SetName,
    /// What it serves; none before its first load.
    pub served: Option<ServedVersion>,
    /// Why it serves nothing newer, for people.
    pub blocked: String,
}

/// A receiver joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// Who, with a session greater than any before it: nanoseconds of its clock will do.
    pub peer: Peer,
    /// The models it serves.
    pub models: Vec<ModelId>,
    /// What all its engines hold, of each model.
    #[serde(default)]
    pub has: Vec<Identity>,
    /// Its host, for people.
    #[serde(default)]
    pub host: String,
    #[serde(default)]
    pub release: String,
}

/// The answer to a join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    pub ok: bool,
    /// Heartbeat timeout.
    pub heartbeat_ms: u64,
    /// How long a poll should ask to wait.
    pub poll_ms: u64,
    /// Maximum backoff between attempts to reach the controller. A restarted controller waits for its
    /// receivers for several of them.
    pub rejoin_ms: u64,
    /// How many versions an agent's history must reach back for every order to be carried out.
    pub max_ahead: usize,
}

/// A receiver asks for orders, and says that it is alive and what it is doing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Poll {
    pub peer: Peer,
    /// The number of the last order that was taken; those up to it are not given again.
    #[serde(default)]
    pub after: u64,
    /// How long to wait if there is none.
    #[serde(default)]
    pub timeout_ms: u64,
    /// What it is doing, per model.
    #[serde(default)]
    pub doing: Vec<Doing>,
}

/// What a receiver does with one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Doing {
    pub model_id: ModelId,
    /// What: `idle`, `waiting`, `pulling`, `applying`, `staged`, `loading`, `failed`.
    pub stage: String,
    /// The version it is about, or holds.
    pub version: Option<Version>,
    #[serde(default)]
    pub bytes: u64,
    /// Bytes in all, if known.
    #[serde(default)]
    pub of_bytes: u64,
    /// Bytes per second, lately.
    #[serde(default)]
    pub rate: f64,
    /// Who brought how much of the last version that other receivers took part in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub brought: Vec<Brought>,
    /// Its engines, each with what it has.
    #[serde(default)]
    pub engines: Vec<EngineDoing>,
}

/// One engine behind a receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineDoing {
    /// Its name, such as `vllm=http://127.0.0.1:8000`.
    pub engine: String,
    /// `away`, `serving`, `loading` or `fenced`.
    pub condition: String,
    /// The version it has, if known.
    pub version: Option<Version>,
    /// The last failure, until a load succeeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Loads by the engine's own loader where a plan was expected.
    #[serde(default)]
    pub unplanned: u64,
    /// Why the last of them was, until a load goes by plan again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow: Option<String>,
}

/// The answer to a poll.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// Those that were not taken yet, oldest first. Empty when the time is over.
    pub orders: Vec<Numbered>,
}

/// An order with its position in the queue of one session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numbered {
    /// What the next poll's `after` may be.
    pub seq: u64,
    pub task: Task,
}

/// What a receiver is told to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Task {
    /// Bring this version here, while the engines serve on. Staged versions queue.
    Stage {
        /// To be quoted by the report.
        order: Order,
        identity: Identity,
        sender_endpoint: String,
    },
    /// Load these, all of them, each reported; serve again when all are loaded.
    Load {
        /// To be quoted by the reports.
        order: Order,
        set: SetName,
        /// One for every model of the set that this receiver serves.
        identities: Vec<Identity>,
    },
    /// The order no longer matters.
    Abandon {
        order: Order,
        /// What it was about.
        identity: Identity,
    },
    /// A staged version is given up, whichever order up to this one it was staged for.
    Drop { order: Order, identity: Identity },
    /// It serves what the others serve, or must not (with the reason).
    Live {
        set: SetName,
        /// The models that this is about: all that it serves of a strict set, one of a relaxed one.
        #[serde(default)]
        models: Vec<ModelId>,
        live: bool,
        /// Why not, for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
}

/// How an order went, for one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    pub peer: Peer,
    pub order: Order,
    /// What is staged or loaded, or was not.
    pub identity: Identity,
    pub outcome: Outcome,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<Span>,
    /// How it came: `full`, `delta`, `held`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// How long engines did not serve, in milliseconds: the longest of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
}

/// How an order went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It can be loaded without the network.
    Staged,
    /// Every engine has it.
    Loaded,
    /// It was not staged, because the agent shows no such version, or no agent answers where it was announced.
    Absent {
        /// What was found there, for people.
        reason: String,
    },
    Failed {
        /// Which of the two.
        phase: Phase,
        /// What sort of failure.
        kind: Kind,
        reason: String,
    },
}

/// A runner offers to run evals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeEval {
    /// Of this set, or of any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<SetName>,
    /// How long to wait for one.
    #[serde(default)]
    pub timeout_ms: u64,
}

/// An eval to be run now. The runner answers with [`EvalDone`]. If it does not, no other runner gets the eval, and the
/// notify ends at its deadline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalTask {
    /// To be quoted by the answer; none if there was nothing to do within the time.
    pub id: Option<u64>,
    pub served: Option<ServedVersion>,
    pub eval: Option<Value>,
}

/// How an eval went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalDone {
    pub id: u64,
    /// Its result, for the trainer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// It was taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    pub ok: bool,
}
