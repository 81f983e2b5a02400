//! Open waits: gates and synchronous notifies. Every wait has a deadline and exactly one answer,
//! unless it is cancelled.

use std::collections::{BTreeSet, HashMap};

use crate::barrier::error::BarrierError;
use crate::barrier::name::SetName;
use crate::barrier::snapshot::{Awaited, WaitSnapshot};
use crate::barrier::types::{Action, Blocked, GateFailure, Millis, NotifyOutcome, Served, WaitId};
use crate::identity::{Incarnation, ModelId, Version};

#[derive(Debug)]
enum For {
    Gate,
    Notify { eval: bool },
    Eval { served: Served },
}

#[derive(Debug)]
struct Wait {
    set: usize,
    at_least: Version,
    lineage: Option<(ModelId, Incarnation)>,
    since: Millis,
    until: Millis,
    what: For,
}

/// A wait to be opened.
pub(super) struct NewWait {
    pub(super) id: WaitId,
    pub(super) set: usize,
    pub(super) at_least: Version,
    pub(super) lineage: Option<(ModelId, Incarnation)>,
    /// How long from now.
    pub(super) timeout: Millis,
    /// `None` for a gate; otherwise whether an eval follows.
    pub(super) notify: Option<bool>,
}

/// All open waits, with those for a version sorted by it, per set.
#[derive(Debug, Default)]
pub(super) struct Waits {
    open: HashMap<WaitId, Wait>,
    by_version: Vec<BTreeSet<(Version, WaitId)>>,
}

impl Waits {
    pub(super) fn add_set(&mut self) {
        self.by_version.push(BTreeSet::new());
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether a wait of this id could be opened.
    pub(super) fn check(&self, id: WaitId, limit: usize) -> Result<(), BarrierError> {
        if self.open.contains_key(&id) {
            Err(BarrierError::DuplicateWait(id))
        } else if self.open.len() >= limit {
            Err(BarrierError::TooManyWaits { limit })
        } else {
            Ok(())
        }
    }

    /// The first open waits, in order of arrival.
    pub(super) fn snapshot(
        &self,
        most: usize,
        set_name: impl Fn(usize) -> Option<SetName>,
    ) -> Vec<WaitSnapshot> {
        let mut open: Vec<_> = self.open.iter().collect();
        open.sort_unstable_by_key(|(id, wait)| (wait.since, **id));
        let one = |(id, wait): (&WaitId, &Wait)| {
            Some(WaitSnapshot {
                id: *id,
                what: match wait.what {
                    For::Gate => Awaited::Gate,
                    For::Notify { .. } => Awaited::Load,
                    For::Eval { .. } => Awaited::Eval,
                },
                set: set_name(wait.set)?,
                at_least: wait.at_least,
                lineage: wait.lineage.clone(),
                since: wait.since,
                until: wait.until,
            })
        };
        open.into_iter().take(most).filter_map(one).collect()
    }

    pub(super) fn add(&mut self, new: NewWait, now: Millis, until: Millis) {
        let NewWait { id, set, at_least, lineage, notify, .. } = new;
        let what = notify.map_or(For::Gate, |eval| For::Notify { eval });
        if let Some(queue) = self.by_version.get_mut(set) {
            queue.insert((at_least, id));
        }
        self.open.insert(id, Wait { set, at_least, lineage, since: now, until, what });
    }

    fn take(&mut self, id: WaitId) -> Option<Wait> {
        let wait = self.open.remove(&id)?;
        if let Some(queue) = self.by_version.get_mut(wait.set) {
            queue.remove(&(wait.at_least, id));
        }
        Some(wait)
    }

    pub(super) fn cancel(&mut self, id: WaitId) -> Result<(), BarrierError> {
        self.take(id).map(|_| ()).ok_or(BarrierError::UnknownWait(id))
    }

    /// Answers all waits for the version that `set` now serves. Returns whether an eval has begun.
    pub(super) fn serve(
        &mut self,
        set: usize,
        served: &Served,
        eval_until: Millis,
        out: &mut Vec<Action>,
    ) -> bool {
        let Some(queue) = self.by_version.get(set) else { return false };
        let of_lineage = |wait: &Wait| {
            wait.lineage.as_ref().is_none_or(|(model, incarnation)| {
                served.identities.iter().any(|i| i.model_id == *model && i.incarnation == *incarnation)
            })
        };
        let ids: Vec<WaitId> = queue
            .range(..=(served.version, WaitId(u64::MAX)))
            .map(|(_, id)| *id)
            .filter(|id| self.open.get(id).is_some_and(of_lineage))
            .collect();
        let mut evals = false;
        for id in ids {
            let Some(mut wait) = self.take(id) else { continue };
            let served = served.clone();
            match wait.what {
                For::Gate => out.push(Action::OpenGate { id, served }),
                For::Notify { eval: false } => {
                    out.push(Action::NotifyReply { id, outcome: NotifyOutcome::Loaded { served } });
                }
                For::Notify { eval: true } | For::Eval { .. } => {
                    out.push(Action::RunEval { id, served: served.clone() });
                    wait.what = For::Eval { served };
                    wait.until = eval_until;
                    self.open.insert(id, wait);
                    evals = true;
                }
            }
        }
        evals
    }

    pub(super) fn eval_done(
        &mut self,
        id: WaitId,
        result: Result<String, String>,
        out: &mut Vec<Action>,
    ) -> Result<(), BarrierError> {
        let evaluating = self.open.get(&id).is_some_and(|w| matches!(w.what, For::Eval { .. }));
        let wait = if evaluating { self.open.remove(&id) } else { None };
        match wait.map(|w| w.what) {
            Some(For::Eval { served }) => {
                let outcome = NotifyOutcome::Evaluated { served, result };
                out.push(Action::NotifyReply { id, outcome });
                Ok(())
            }
            Some(For::Gate | For::Notify { .. }) | None => Err(BarrierError::UnknownWait(id)),
        }
    }

    /// Ends the waits of superseded publishers. Waits without a lineage follow the new one; evals that
    /// have begun are left to finish.
    pub(super) fn supersede(&mut self, model: &ModelId, by: Incarnation, out: &mut Vec<Action>) {
        let dead = |w: &Wait| {
            !matches!(w.what, For::Eval { .. })
                && w.lineage.as_ref().is_some_and(|(m, incarnation)| m == model && *incarnation < by)
        };
        for id in self.ids(dead) {
            match self.take(id).map(|w| w.what) {
                Some(For::Gate) => {
                    out.push(Action::FailGate { id, why: GateFailure::Superseded { by } });
                }
                Some(For::Notify { .. } | For::Eval { .. }) => {
                    out.push(Action::NotifyReply { id, outcome: NotifyOutcome::Superseded { by } });
                }
                None => {}
            }
        }
    }

    /// Ends every wait whose deadline has passed. `state` gives the served version of a set and what blocks it.
    pub(super) fn expire(
        &mut self,
        now: Millis,
        state: impl Fn(usize) -> (Option<Version>, Blocked),
        out: &mut Vec<Action>,
    ) {
        for id in self.ids(|w| w.until <= now) {
            let Some(wait) = self.take(id) else { continue };
            match wait.what {
                For::Gate => {
                    let (service, blocked) = state(wait.set);
                    out.push(Action::FailGate { id, why: GateFailure::Timeout { service, blocked } });
                }
                For::Notify { .. } => {
                    let outcome = NotifyOutcome::LoadTimeout { blocked: state(wait.set).1 };
                    out.push(Action::NotifyReply { id, outcome });
                }
                For::Eval { served } => {
                    out.push(Action::NotifyReply { id, outcome: NotifyOutcome::EvalTimeout { served } });
                }
            }
        }
    }

    /// Sorted, so that the same events always give the same actions.
    fn ids(&self, pick: impl Fn(&Wait) -> bool) -> Vec<WaitId> {
        let mut ids: Vec<_> = self.open.iter().filter(|(_, w)| pick(w)).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    pub(super) fn next_deadline(&self) -> Option<Millis> {
        self.open.values().map(|w| w.until).min()
    }
}
