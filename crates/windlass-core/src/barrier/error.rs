//! The barrier's refusals.

use crate::barrier::name::{NameError, ReceiverId, SetName};
use crate::barrier::types::{Order, WaitId};
use crate::error::Kind;
use crate::identity::{Identity, Incarnation, ModelId};

/// An event or a configuration that the barrier refuses. A refused event has changed nothing.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BarrierError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("no model sets are configured: name at least one set with its models")]
    NoSets,
    #[error("model set {0} is configured twice: give each set its own name")]
    DuplicateSet(SetName),
    /// A set without models, or with more than the barrier keeps track of.
    #[error("model set {set} has {count} models: expected 1 to {max}")]
    SetSize { set: SetName, count: usize, max: usize },
    #[error("model {0} is listed twice: a model belongs to exactly one set")]
    DuplicateModel(ModelId),
    #[error("{field} = {value} is out of range: expected {expected}")]
    OutOfRange { field: &'static str, value: u64, expected: &'static str },
    #[error(
        "model {model} belongs to no configured set: add it to a set or correct the name; there are {}",
        listed(known)
    )]
    UnknownModel { model: ModelId, known: Vec<ModelId> },
    #[error(
        "there is no model set {set}: check the name against the configuration; there are {}",
        listed(known)
    )]
    UnknownSet { set: SetName, known: Vec<SetName> },
    #[error("model {model} is not part of set {set}: wait on the set the model belongs to")]
    NotInSet { model: ModelId, set: SetName },
    #[error("receiver {0} is not a member (it left, was evicted, or the controller restarted): join again")]
    UnknownReceiver(ReceiverId),
    /// A message of an earlier incarnation of a receiver, or a join that repeats a spent session.
    #[error(
        "receiver {receiver} uses session {got}, but its latest session is {known}: join with a greater session"
    )]
    StaleSession {
        receiver: ReceiverId,
        got: u64,
        /// The latest session seen from it.
        known: u64,
    },
    /// A version of a lineage that a newer incarnation has superseded.
    #[error("{identity} belongs to a superseded incarnation: publish under incarnation {current}")]
    StaleIncarnation { identity: Identity, current: Incarnation },
    #[error(
        "incarnation {got} of {model} waits at the gate, but incarnation {current} has superseded it: stop"
    )]
    StaleWaiter { model: ModelId, got: Incarnation, current: Incarnation },
    /// An answer to an order that is no longer open: answered already, abandoned, expired or superseded.
    #[error("order {order} of receiver {receiver} for {identity} is no longer open: drop the answer")]
    StaleOrder { receiver: ReceiverId, order: Order, identity: Identity },
    /// An answer that names an older version than the ordered one, or another lineage.
    #[error(
        "receiver {receiver} answered order {order} for {ordered} with {got}: stage the ordered version or a newer one"
    )]
    WrongAnswer { receiver: ReceiverId, order: Order, ordered: Identity, got: Identity },
    #[error("receiver {receiver} joins with {problem}: list each model it serves once")]
    BadJoin {
        receiver: ReceiverId,
        /// The fault in the list.
        problem: String,
    },
    #[error("sender endpoint of {length} bytes is not usable: expected 1 to {max}")]
    Endpoint { length: usize, max: usize },
    #[error("there are already {limit} model sets: put models that are served together into one set")]
    TooManySets { limit: usize },
    #[error("there are already {limit} receivers: raise max_receivers or let some leave")]
    TooManyReceivers { limit: usize },
    #[error("there are already {limit} open waits: raise max_waits or poll less often")]
    TooManyWaits { limit: usize },
    #[error("wait {0} is already open: give each wait its own id")]
    DuplicateWait(WaitId),
    /// A wait id that is not open (or, for an eval result, not evaluating).
    #[error("wait {0} is not open: it was answered, cancelled or ran past its deadline")]
    UnknownWait(WaitId),
}

impl BarrierError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            BarrierError::Name(_)
            | BarrierError::NoSets
            | BarrierError::DuplicateSet(_)
            | BarrierError::SetSize { .. }
            | BarrierError::DuplicateModel(_)
            | BarrierError::OutOfRange { .. }
            | BarrierError::NotInSet { .. }
            | BarrierError::WrongAnswer { .. }
            | BarrierError::BadJoin { .. }
            | BarrierError::Endpoint { .. }
            | BarrierError::DuplicateWait(_) => Kind::Invalid,
            BarrierError::UnknownModel { .. }
            | BarrierError::UnknownSet { .. }
            | BarrierError::UnknownReceiver(_)
            | BarrierError::UnknownWait(_) => Kind::NotFound,
            BarrierError::StaleSession { .. }
            | BarrierError::StaleIncarnation { .. }
            | BarrierError::StaleWaiter { .. }
            | BarrierError::StaleOrder { .. } => Kind::Stale,
            BarrierError::TooManySets { .. }
            | BarrierError::TooManyReceivers { .. }
            | BarrierError::TooManyWaits { .. } => Kind::Exhausted,
        }
    }
}

/// The first of some names.
fn listed(names: &[impl std::fmt::Display]) -> String {
    const MOST: usize = 16;
    let first: Vec<String> = names.iter().take(MOST).map(ToString::to_string).collect();
    match names.len() {
        0 => "none yet".into(),
        n if n > MOST => format!("{} and {} more", first.join(", "), n - MOST),
        _ => first.join(", "),
    }
}
