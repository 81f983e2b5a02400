//! The barrier's configuration: the model sets, the required receivers, and every deadline.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::barrier::error::BarrierError;
use crate::barrier::name::SetName;
use crate::barrier::types::Millis;
use crate::identity::ModelId;

/// Whether the models of a set must agree on a version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Two phases: no receiver loads a version before every required receiver has staged all its models.
    #[default]
    Strict,
    /// Each model is loaded as it comes, each receiver on its own.
    Relaxed,
}

/// How many receivers must have staged before a load begins, and loaded before a version is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Required {
    /// Every live receiver, save those that failed or ran past a deadline in this round. While none is
    /// live, every member.
    #[default]
    All,
    /// This many members of the set, live or catching up.
    AtLeast(usize),
    /// This percentage of the set's members, rounded up.
    Percent(u8),
}

/// One model set: models that are served together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetConfig {
    /// Its name, in URLs and on the live page.
    pub name: SetName,
    /// Its models. Each model belongs to exactly one set.
    pub models: Vec<ModelId>,
    /// Whether the models must agree on a version.
    #[serde(default)]
    pub mode: Mode,
    /// Which receivers must have staged and loaded.
    #[serde(default)]
    pub required: Required,
    /// The fewest receivers that must have staged, then loaded, regardless of `required`. At least 1.
    #[serde(default = "one")]
    pub floor: usize,
}

fn one() -> usize {
    1
}

impl SetConfig {
    /// A strict set that requires all receivers, with a floor of one.
    pub fn strict(name: SetName, models: Vec<ModelId>) -> SetConfig {
        SetConfig { name, models, mode: Mode::Strict, required: Required::All, floor: 1 }
    }

    pub(super) fn validate(&self) -> Result<(), BarrierError> {
        let (count, max) = (self.models.len(), Config::MAX_MODELS);
        if !(1..=max).contains(&count) {
            return Err(BarrierError::SetSize { set: self.name.clone(), count, max });
        }
        let mut models = HashSet::new();
        if let Some(twice) = self.models.iter().find(|m| !models.insert(*m)) {
            return Err(BarrierError::DuplicateModel(twice.clone()));
        }
        positive("floor", self.floor as u64)?;
        match self.required {
            Required::All => Ok(()),
            Required::AtLeast(n) => positive("required.at_least", n as u64),
            Required::Percent(p) => in_percent("required.percent", p),
        }
    }
}

/// Deadlines and limits, the same for all sets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// A receiver that is silent for this long is evicted.
    pub heartbeat_ms: Millis,
    /// How long a new barrier waits for receivers that outlived its predecessor. Until then versions
    /// are staged, but nothing is loaded or served. Only time in which the barrier was called counts. 0: not at all.
    pub settle_ms: Millis,
    /// How long a receiver may take to stage one version of one model.
    pub stage_ms: Millis,
    /// How long a receiver may take to load one version of a set.
    pub load_ms: Millis,
    /// How long the barrier backs off after a receiver's first failure. The delay doubles with every further failure in a
    /// row. A success or a newer version resets it.
    pub retry_ms: Millis,
    /// The longest such delay.
    pub retry_cap_ms: Millis,
    /// How long a receiver outside the pool still holds back the release of history.
    pub history_ms: Millis,
    /// The longest a gate wait or synchronous notify may last; a longer timeout is cut to it.
    pub max_wait_ms: Millis,
    /// How long an eval may take after the load.
    pub eval_ms: Millis,
    /// How many announced versions a trainer may be ahead of the served one before it is told to wait.
    /// Also how many versions are staged ahead, and how often an unfinished round may move on.
    pub max_ahead: usize,
    /// The most receivers at once.
    pub max_receivers: usize,
    /// The most gate waits and synchronous notifies at once.
    pub max_waits: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            heartbeat_ms: 15_000,
            settle_ms: 2_000,
            stage_ms: 300_000,
            load_ms: 120_000,
            retry_ms: 2_000,
            retry_cap_ms: 60_000,
            history_ms: 600_000,
            max_wait_ms: 3_600_000,
            eval_ms: 3_600_000,
            max_ahead: 4,
            max_receivers: 4096,
            max_waits: 16_384,
        }
    }
}

impl Limits {
    /// The longest delay of a receiver between two attempts to join. Several attempts fit into `settle_ms`, so that every
    /// running receiver has joined by its end.
    pub fn rejoin_ms(&self) -> Millis {
        (self.settle_ms / 4).max(10)
    }

    /// Checks that nothing is zero that must not be.
    pub fn validate(&self) -> Result<(), BarrierError> {
        for (field, value) in [
            ("heartbeat_ms", self.heartbeat_ms),
            ("stage_ms", self.stage_ms),
            ("load_ms", self.load_ms),
            ("retry_ms", self.retry_ms),
            ("retry_cap_ms", self.retry_cap_ms),
            ("max_wait_ms", self.max_wait_ms),
            ("eval_ms", self.eval_ms),
            ("max_ahead", self.max_ahead as u64),
            ("max_receivers", self.max_receivers as u64),
            ("max_waits", self.max_waits as u64),
        ] {
            positive(field, value)?;
        }
        Ok(())
    }
}

/// Everything the barrier is configured with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model sets. They are independent of each other.
    pub sets: Vec<SetConfig>,
    #[serde(default)]
    pub limits: Limits,
}

impl Config {
    /// The most models in one set.
    pub const MAX_MODELS: usize = 1024;

    /// A configuration with default limits.
    pub fn new(sets: Vec<SetConfig>) -> Config {
        Config { sets, limits: Limits::default() }
    }

    /// The most sets of one barrier.
    pub const MAX_SETS: usize = 256;

    /// Checks everything that [`Barrier::new`](crate::barrier::Barrier::new) relies on.
    pub fn validate(&self) -> Result<(), BarrierError> {
        if self.sets.is_empty() {
            return Err(BarrierError::NoSets);
        }
        if self.sets.len() > Self::MAX_SETS {
            return Err(BarrierError::TooManySets { limit: Self::MAX_SETS });
        }
        let (mut names, mut models) = (HashSet::new(), HashSet::new());
        for set in &self.sets {
            set.validate()?;
            if !names.insert(&set.name) {
                return Err(BarrierError::DuplicateSet(set.name.clone()));
            }
            if let Some(twice) = set.models.iter().find(|m| !models.insert(*m)) {
                return Err(BarrierError::DuplicateModel(twice.clone()));
            }
        }
        self.limits.validate()
    }
}

fn positive(field: &'static str, value: u64) -> Result<(), BarrierError> {
    if value > 0 { Ok(()) } else { Err(BarrierError::OutOfRange { field, value, expected: "at least 1" }) }
}

fn in_percent(field: &'static str, value: u8) -> Result<(), BarrierError> {
    if (1..=100).contains(&value) {
        Ok(())
    } else {
        Err(BarrierError::OutOfRange { field, value: value.into(), expected: "1 to 100" })
    }
}
