//! The barrier's state as plain data, for the live page, metrics and `top`.

use serde::{Deserialize, Serialize};

use crate::barrier::config::{Mode, Required};
use crate::barrier::group::Group;
use crate::barrier::member::{Lineage, Member};
use crate::barrier::name::{ReceiverId, SetName};
use crate::barrier::types::{Blocked, Millis, Phase, Served, WaitId};
use crate::identity::{Incarnation, ModelId, Version};

/// The state of the barrier at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// The latest time the barrier was told.
    pub now: Millis,
    /// Every set, in the order of the configuration.
    pub sets: Vec<SetSnapshot>,
    /// Every receiver, by name.
    pub receivers: Vec<ReceiverSnapshot>,
    /// Open gate waits and synchronous notifies.
    pub waits: usize,
    /// The first [`Snapshot::MAX_WAITING`] of them, in the order in which they came.
    pub waiting: Vec<WaitSnapshot>,
}

impl Snapshot {
    /// The most waits that are described.
    pub const MAX_WAITING: usize = 64;
}

/// One open wait.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WaitSnapshot {
    pub id: WaitId,
    pub what: Awaited,
    pub set: SetName,
    /// For which version, or a newer one.
    pub at_least: Version,
    /// The trainer, and its incarnation, that the wait belongs to.
    pub lineage: Option<(ModelId, Incarnation)>,
    pub since: Millis,
    /// Until when at most.
    pub until: Millis,
}

/// The kinds of waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Awaited {
    /// That a version is served, at the gate.
    Gate,
    /// That the version is served which was announced by a synchronous notify.
    Load,
    /// That the eval is done which a notify asked for.
    Eval,
}

/// One set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SetSnapshot {
    pub set: SetName,
    pub mode: Mode,
    pub required: Required,
    /// The fewest that must be ready.
    pub floor: usize,
    pub served: Option<Served>,
    /// One group in a strict set, one per model in a relaxed one.
    pub groups: Vec<GroupSnapshot>,
}

/// Models that move together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupSnapshot {
    pub models: Vec<ModelSnapshot>,
    pub service: Option<Version>,
    /// The version in flight.
    pub round: Option<RoundSnapshot>,
    /// Why nothing newer is served.
    pub blocked: Blocked,
    /// Its receivers, by name.
    pub members: Vec<MemberSnapshot>,
}

/// The publisher of one model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelSnapshot {
    pub model: ModelId,
    /// The incarnation that counts, once one has been heard of.
    pub incarnation: Option<Incarnation>,
    /// Its newest announced version that its agent is not known to lack.
    pub newest: Option<Version>,
    /// Announced versions that its agent does not show.
    pub absent: Vec<Version>,
    /// Where receivers pull from.
    pub endpoint: Option<String>,
    /// How many announced versions are not served yet.
    pub ahead: usize,
    /// Whether it has been told to wait.
    pub back_pressure: bool,
}

/// A version in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoundSnapshot {
    pub version: Version,
    /// How far it is.
    pub phase: Phase,
    /// Required receivers that are not done.
    pub waiting: usize,
    pub done: usize,
    /// When it may give way to a newer version.
    pub deadline: Millis,
}

/// One member of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemberSnapshot {
    pub receiver: ReceiverId,
    /// Whether it is in the live pool.
    pub live: bool,
    /// The version it is loading.
    pub loading: Option<Version>,
    /// When it is asked again after a failure.
    pub retry_at: Option<Millis>,
    pub slots: Vec<SlotSnapshot>,
}

/// One model at one receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlotSnapshot {
    pub model: ModelId,
    /// The version its engines are known to hold, of any lineage.
    pub loaded: Option<(Incarnation, Version)>,
    /// Versions that could be loaded without the network.
    pub staged: Vec<Version>,
    /// Versions on their way.
    pub staging: Vec<Version>,
}

/// A receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReceiverSnapshot {
    pub receiver: ReceiverId,
    pub session: u64,
    /// When it was last heard of.
    pub last_seen: Millis,
}

impl GroupSnapshot {
    pub(super) fn of(group: &Group) -> GroupSnapshot {
        let models = group.models.iter().zip(&group.lineages).enumerate().map(|(index, (model, lineage))| {
            let lineage = lineage.as_ref();
            ModelSnapshot {
                model: model.clone(),
                incarnation: lineage.map(|l| l.incarnation),
                newest: lineage.and_then(Lineage::newest),
                absent: lineage.map_or_else(Vec::new, |l| l.absent.iter().copied().collect()),
                endpoint: lineage.map(|l| l.endpoint().to_owned()),
                ahead: group.ahead(index),
                back_pressure: lineage.is_some_and(|l| l.pressed),
            }
        });
        let round = group.round.as_ref().map(|round| RoundSnapshot {
            version: round.version,
            phase: round.phase,
            waiting: group.tally.waiting,
            done: group.tally.done,
            deadline: round.deadline,
        });
        GroupSnapshot {
            models: models.collect(),
            service: group.service,
            round,
            blocked: group.blocked(),
            members: group.members.values().map(|m| MemberSnapshot::of(m, &group.models)).collect(),
        }
    }
}

impl MemberSnapshot {
    fn of(member: &Member, models: &[ModelId]) -> MemberSnapshot {
        let slot = |s: &crate::barrier::member::Slot| {
            Some(SlotSnapshot {
                model: models.get(s.model)?.clone(),
                loaded: s.loaded,
                staged: s.staged.iter().copied().collect(),
                staging: s.asked.iter().map(|a| a.version).collect(),
            })
        };
        MemberSnapshot {
            receiver: member.peer.receiver.clone(),
            live: member.live,
            loading: member.load.as_ref().map(|l| l.version),
            retry_at: member.retry_at,
            slots: member.slots.iter().filter_map(slot).collect(),
        }
    }
}
