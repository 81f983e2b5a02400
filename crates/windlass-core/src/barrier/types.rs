//! The barrier's vocabulary: its events, its actions, and the reasons it gives.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::barrier::name::{ReceiverId, SetName};
use crate::identity::{Identity, Incarnation, ModelId, Version};

/// A point in time or a span of it, in milliseconds, on a clock of the caller's choice that never steps
/// back. (Where it does, the barrier holds on to the latest time it has seen.)
pub type Millis = u64;

/// One incarnation of a receiver. Every join carries a greater `session` than all earlier joins of the same
/// receiver, so the barrier recognises messages of an earlier incarnation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    pub receiver: ReceiverId,
    pub session: u64,
}

/// The number of one order to a receiver. Grows with every order; answers quote it, and an answer to an
/// order that is no longer open changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Order(pub u64);

/// Names a gate wait or a synchronous notify; chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WaitId(pub u64);

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for WaitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which of the two phases an order belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The version is being brought to the receivers; engines serve undisturbed.
    Staging,
    /// Engines load the staged version.
    Loading,
}

/// A synchronous notify: the answer comes when the version is served, or after the eval that follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncNotify {
    /// Quoted by the reply.
    pub id: WaitId,
    /// Whether an eval runs after the load.
    pub eval: bool,
    /// How long the load may take; cut to the configured longest wait.
    pub timeout: Millis,
}

/// Input of the barrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A trainer has sealed a version and serves it at `sender_endpoint`. Repeating one is harmless.
    Notify {
        identity: Identity,
        /// Where receivers pull it from.
        sender_endpoint: String,
        /// Whether the trainer waits for the load.
        sync: Option<SyncNotify>,
    },
    /// A receiver starts: the models it serves and the version its engines hold of each. `has` lists a version only if
    /// *all* engines of that model have loaded it whole.
    Join {
        /// The receiver, with a fresh session.
        peer: Peer,
        /// The models it serves.
        models: Vec<ModelId>,
        /// The versions its engines have loaded.
        has: Vec<Identity>,
    },
    /// A receiver is alive. Every other message from it says so too.
    Heartbeat { peer: Peer },
    /// A `Stage` order is done: the receiver can load `identity` without the network. The identity is
    /// the received version, which may be newer than the ordered one.
    Staged {
        peer: Peer,
        /// The order this answers.
        order: Order,
        identity: Identity,
    },
    /// One model of a `Load` order is loaded and its digest is right. The receiver resumes its engines
    /// when every model of the order is.
    Loaded {
        peer: Peer,
        /// The order this answers.
        order: Order,
        identity: Identity,
    },
    Failed {
        peer: Peer,
        /// The order that failed.
        order: Order,
        /// The version that could not be staged or loaded.
        identity: Identity,
        /// Whether it was a `Stage` or a `Load`.
        phase: Phase,
        reason: String,
    },
    /// The agent of an announced version answers, is of its incarnation, and does not show it, or no agent answers where the
    /// version was announced: the `Stage` order was not
    /// carried out.
    Absent {
        /// The receiver that asked the agent.
        peer: Peer,
        /// The order that this answers.
        order: Order,
        /// The version that the agent does not show.
        identity: Identity,
    },
    /// A receiver leaves.
    Leave { peer: Peer },
    /// A caller waits until `set` serves `at_least` (the `get_batch` gate).
    GateWait {
        /// Quoted by the answer.
        id: WaitId,
        set: SetName,
        /// The lowest version that will do.
        at_least: Version,
        /// On whose behalf. With it, versions of an earlier incarnation never open the gate, even when
        /// the wait overtakes the first notify of the new one.
        lineage: Option<(ModelId, Incarnation)>,
        /// How long to wait; cut to the configured longest wait.
        timeout: Millis,
    },
    /// The waiting caller has gone away. No answer follows.
    Cancel { id: WaitId },
    /// The eval asked for by [`Action::RunEval`] has ended.
    EvalDone {
        /// The synchronous notify it belongs to.
        id: WaitId,
        /// Results or failure, opaque to the barrier.
        result: Result<String, String>,
    },
}

/// A served version of a set, and the identity of each model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Served {
    /// The version all models of the set have reached.
    pub version: Version,
    /// Each model's own. In a strict set all have `version`; in a relaxed one some may be ahead.
    pub identities: Vec<Identity>,
}

/// Why a receiver must not serve a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FenceReason {
    /// A load failed, so its engines may hold a mix of versions.
    LoadFailed {
        identity: Identity,
        /// The reason that the receiver gave.
        reason: String,
    },
    /// A load ran past its deadline.
    LoadTimeout {
        /// The version of the set that was being loaded.
        version: Version,
    },
    /// The others serve a version that this receiver has not loaded.
    Lagging {
        /// The version that the set serves now.
        version: Version,
    },
    /// A newer incarnation has superseded the version it holds.
    Superseded {
        /// The model that was resumed.
        model: ModelId,
        incarnation: Incarnation,
    },
}

/// Why a receiver is no longer a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EvictReason {
    /// It sent no message within the heartbeat deadline.
    Silent,
    /// It took its leave.
    Left,
    /// It joined again with a new session.
    Rejoined,
}

/// Why a receiver did not stage in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LagReason {
    /// It reported a failure.
    Failed(String),
    /// The staging deadline passed.
    Timeout,
    /// It received a newer version than the one ordered and waits for the others there.
    Ahead { got: Version },
}

/// Why a set does not serve a newer version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Blocked {
    /// Everything announced by all models is served.
    UpToDate,
    /// A model has announced nothing since the controller started.
    NothingAnnounced { model: ModelId },
    /// The models have announced versions, but none in common that may still be loaded.
    NoCommonVersion {
        /// The newest announced version of each model.
        newest: Vec<(ModelId, Version)>,
    },
    /// Some models have gone on to a version that others have not announced; nothing else is waited for.
    Unmatched {
        /// The newest announced version. In a relaxed set it is served as far as it can be.
        version: Version,
        /// The models that have not announced it.
        missing: Vec<ModelId>,
    },
    /// The barrier is new, and receivers that outlived the one before it may not have joined yet.
    Settling,
    /// No receiver has joined.
    NoReceivers,
    /// No receiver that is ready serves this model.
    Uncovered { model: ModelId },
    /// Fewer receivers are ready than the floor or quorum asks for.
    TooFew {
        have: usize,
        /// How many must be.
        need: usize,
    },
    /// A trainer announced a version that its agent does not show, or that is announced where no agent answers.
    Absent { model: ModelId, version: Version },
    /// Required receivers have not finished the phase.
    Waiting {
        /// The version in flight.
        version: Version,
        phase: Phase,
        /// How many are not done.
        receivers: usize,
    },
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Blocked::UpToDate => {
                f.write_str("everything announced is served; the trainers have not announced more")
            }
            Blocked::NothingAnnounced { model } => {
                write!(
                    f,
                    "{model} has announced nothing since the controller started; notify its version again"
                )
            }
            Blocked::NoCommonVersion { newest } => {
                f.write_str("the models have no loadable version in common: newest are")?;
                newest.iter().try_for_each(|(m, v)| write!(f, " {m} {v}"))?;
                f.write_str("; resume them from the same step")
            }
            Blocked::Unmatched { version, missing } => {
                write!(f, "version {version} is announced, but not by")?;
                missing.iter().try_for_each(|m| write!(f, " {m}"))?;
                f.write_str("; announce it for them too")
            }
            Blocked::Settling => f.write_str(
                "the controller has just started and waits for receivers to join again; no action is needed",
            ),
            Blocked::NoReceivers => f.write_str("no receivers have joined; start one"),
            Blocked::Uncovered { model } => {
                write!(f, "no receiver that serves {model} is ready; start one, or check why it fails")
            }
            Blocked::TooFew { have, need } => {
                write!(
                    f,
                    "{have} receivers are ready, {need} are needed; start more or lower the floor or quorum"
                )
            }
            Blocked::Absent { model, version } => {
                write!(
                    f,
                    "version {version} of {model} was announced, but its agent does not show it, or none answers at the \
                     announced endpoint; publish it, or announce the version that was published and its endpoint"
                )
            }
            Blocked::Waiting { version, phase, receivers } => {
                let doing = match phase {
                    Phase::Staging => "staging",
                    Phase::Loading => "loading",
                };
                let who = if *receivers == 1 { "receiver is" } else { "receivers are" };
                write!(f, "{receivers} {who} still {doing} version {version}")
            }
        }
    }
}

/// Why a gate did not open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateFailure {
    Timeout {
        /// The version that the set serves.
        service: Option<Version>,
        /// What the set is waiting for.
        blocked: Blocked,
    },
    /// The publisher on whose behalf the gate was asked for is superseded.
    Superseded { by: Incarnation },
}

/// How a synchronous notify ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NotifyOutcome {
    /// The version, or a newer one, is served.
    Loaded { served: Served },
    /// The eval ran on the served version.
    Evaluated {
        /// The version that was served when the eval began.
        served: Served,
        /// Its result, as given.
        result: Result<String, String>,
    },
    /// The deadline of the load passed.
    LoadTimeout {
        /// What the set was waiting for.
        blocked: Blocked,
    },
    /// The deadline of the eval passed.
    EvalTimeout { served: Served },
    /// A newer incarnation superseded the version before it was served.
    Superseded { by: Incarnation },
}

/// Output of the barrier. Orders (`Stage`, `Load`, `Abandon`, `Drop`) go to receivers, which must ignore
/// those addressed to another session, and a `Load` numbered below one they have acted on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Bring a version to the receiver while its engines serve on. Staged versions queue: staging a newer
    /// one keeps the older ones loadable until they are abandoned or passed by a load.
    Stage {
        to: Peer,
        /// To be quoted by the answer.
        order: Order,
        identity: Identity,
        /// Where to pull it from.
        sender_endpoint: String,
    },
    /// Load these versions, all of them: pause the engines, load each model, report each, resume when all
    /// are loaded. After a failure the engines stay paused until a later `Load` succeeds.
    Load {
        to: Peer,
        /// To be quoted by the answers.
        order: Order,
        /// The set they belong to.
        set: SetName,
        /// One identity for every model of the set (relaxed: for one model) that the receiver serves.
        identities: Vec<Identity>,
    },
    /// The order is void and its answer will be ignored. The receiver may drop what it staged for it, unless another
    /// order was answered with the same; a load whose writing has begun is finished all the same.
    Abandon { to: Peer, order: Order, identity: Identity },
    /// A staged version is given up: no answer to an order up to this one counts on it.
    Drop { to: Peer, order: Order, identity: Identity },
    /// The receiver has loaded the served version and may serve these models: add it to the live pool.
    GoLive {
        receiver: ReceiverId,
        set: SetName,
        /// The models of the set that it serves.
        models: Vec<ModelId>,
        /// The version it has loaded.
        version: Version,
    },
    /// The receiver must not serve these models: take it out of the live pool at once. It stays a member
    /// and comes back by catching up.
    Fence {
        receiver: ReceiverId,
        set: SetName,
        /// The models of the set that it served.
        models: Vec<ModelId>,
        why: FenceReason,
    },
    /// The receiver is no longer a member of anything; it may join again.
    Evict { receiver: ReceiverId, why: EvictReason },
    /// The receiver did not stage this version; the others do not wait for it.
    Lagging {
        receiver: ReceiverId,
        /// The version that was ordered.
        identity: Identity,
        /// Why it was not.
        why: LagReason,
    },
    /// A trainer announced a version that its agent does not show. The set serves other versions meanwhile, including lower
    /// ones. Emitted once, and again if the version is announced again.
    Absent { identity: Identity, endpoint: String, receiver: ReceiverId },
    /// The receiver keeps failing, and the barrier backs off longer than before. Emitted once for each length.
    BackingOff {
        receiver: ReceiverId,
        set: SetName,
        /// Failures in a row.
        failures: u32,
        /// How long the barrier sends it no order.
        delay_ms: Millis,
    },
    /// A new incarnation took over: everything of the old one may be dropped.
    Superseded {
        model: ModelId,
        old: Incarnation,
        /// The one that counts.
        new: Incarnation,
    },
    /// The served version of a set has changed; `None` after an incarnation change, until its first load.
    ServiceVersion { set: SetName, served: Option<Served> },
    /// The set cannot advance until something changes. Reported once per cause.
    Stalled { set: SetName, why: Blocked },
    /// Answer a gate wait: the version is served.
    OpenGate { id: WaitId, served: Served },
    /// Answer a gate wait: it ended without the version.
    FailGate { id: WaitId, why: GateFailure },
    /// Run the eval of a synchronous notify on the served version; [`Event::EvalDone`] brings the result.
    RunEval { id: WaitId, served: Served },
    /// Answer a synchronous notify.
    NotifyReply { id: WaitId, outcome: NotifyOutcome },
    /// Tell the trainer of a model to wait before it publishes more, or to continue.
    BackPressure {
        model: ModelId,
        incarnation: Incarnation,
        /// How many announced versions are not served yet.
        ahead: usize,
        wait: bool,
    },
    /// Nothing older than `identity` will be asked for again, nor does a receiver that holds less still
    /// have a claim on the deltas up to it. The version itself may still be asked for.
    Release {
        /// The oldest version of its lineage that is still of use.
        identity: Identity,
    },
}
