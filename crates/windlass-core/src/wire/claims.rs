//! Assigns stripes to streams.
//!
//! [`Claims`] is the receiver's record for one ticket. Streams take stripes from it as they become free, so
//! a slow stream delays only the stripes it has claimed. It does no I/O: the receiver's threads call it
//! under a lock and follow its answers. Time is an argument, counted from any origin.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::WireError;
use super::frame::StreamId;
use super::message::{Fault, Verdict};
use super::stripe::{Extent, SourceSet, Stripe, StripePlan};
use super::ticket::SourceId;
use crate::error::Kind;

/// The bounds of one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimPolicy {
    /// When the transfer must be over.
    pub deadline: Duration,
    /// How long a stream may take for a stripe before it is called overdue.
    pub stripe_timeout: Duration,
    /// How many bad attempts a stripe may have before the transfer fails.
    pub max_bad: u16,
}

/// Why a transfer failed as a whole.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Failure {
    #[error(
        "the transfer's deadline passed with {left} of {total} stripes outstanding: ask for a new ticket; \
         if it repeats, raise the deadline or the number of streams"
    )]
    Deadline { left: u32, total: u32 },
    #[error(
        "stripe {stripe} ({extent:?}) arrived with wrong hashes {times} times, the last time {verdict:?}: check the memory of both hosts and the path between them"
    )]
    Bad {
        stripe: u32,
        extent: Extent,
        times: u16,
        /// The last mismatch.
        verdict: Verdict,
    },
    #[error(
        "every source that holds stripe {stripe} ({extent:?}) is gone: restart the agent, then ask for a new ticket"
    )]
    NoSource { stripe: u32, extent: Extent },
    /// A peer reported that the ticket is void, or the caller cancelled the transfer.
    #[error("the transfer ended at stage {} ({}): {}", .0.stage, .0.kind, .0.message)]
    Ended(Fault),
}

impl Failure {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            Failure::Deadline { .. } => Kind::Timeout,
            Failure::Bad { .. } => Kind::Corrupt,
            Failure::NoSource { .. } => Kind::PeerLost,
            Failure::Ended(fault) => fault.kind,
        }
    }
}

/// The answer to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    Stripe {
        stripe: Stripe,
        /// How often it was claimed before.
        attempt: u16,
    },
    /// Nothing to fetch from this source now; ask again when a stream is lost or reports a bad stripe.
    Wait,
    /// Every stripe is acknowledged.
    Finished,
}

/// The state of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Running,
    /// Every stripe is acknowledged.
    Finished,
    /// It failed, and stays so.
    Failed(Failure),
}

/// The progress of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub stripes: u32,
    pub stripes_done: u32,
    /// Stripes claimed and not acknowledged.
    pub stripes_open: u32,
    pub bytes: u64,
    pub bytes_done: u64,
    /// Stripes that arrived with wrong hashes.
    pub bad: u32,
    pub lost: u32,
    pub live: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Work {
    attempts: u16,
    bad: u16,
}

#[derive(Clone, Debug)]
struct Lane {
    epoch: u16,
    live: bool,
    source: usize,
    held: BTreeSet<u32>,
    /// When it last claimed its first stripe or got rid of one.
    since: Duration,
}

/// The receiver's record for one ticket. A stripe is in the pool, held by one stream, or acknowledged and in
/// neither.
///
/// Rules:
///
/// - CLAIMS-1 A stripe is claimed by at most one live stream at a time, and acknowledged exactly once.
/// - CLAIMS-2 A lost stream returns its unacknowledged stripes. Call [`Claims::lost`] only when the
///   connection is reset and the thread has left the destination memory: from then on another stream may
///   write there.
/// - CLAIMS-3 A stripe with wrong hashes is fetched again, a bounded number of times.
/// - CLAIMS-4 After the deadline, or any other failure, nothing is handed out and nothing is acknowledged.
/// - CLAIMS-5 A stream is handed only stripes that its source holds; those with the fewest holders go first.
#[derive(Clone, Debug)]
pub struct Claims {
    plan: StripePlan,
    policy: ClaimPolicy,
    work: Vec<Work>,
    /// (number of holders, group) → unclaimed stripes of that group.
    pending: BTreeMap<(u32, u32), BTreeSet<u32>>,
    lanes: BTreeMap<u16, Lane>,
    gone: SourceSet,
    progress: Progress,
    failure: Option<Failure>,
}

impl Claims {
    pub fn new(plan: StripePlan, policy: ClaimPolicy) -> Claims {
        let progress =
            Progress { stripes: plan.stripes().len() as u32, bytes: plan.bytes(), ..Progress::default() };
        let work = vec![Work::default(); plan.stripes().len()];
        let mut pending: BTreeMap<(u32, u32), BTreeSet<u32>> = BTreeMap::new();
        for stripe in plan.stripes() {
            pending.entry(pool_key(&plan, stripe)).or_default().insert(stripe.id);
        }
        let (lanes, gone) = (BTreeMap::new(), SourceSet::default());
        Claims { plan, policy, work, pending, lanes, gone, progress, failure: None }
    }

    pub fn plan(&self) -> &StripePlan {
        &self.plan
    }

    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// The state of the transfer at `now`.
    pub fn outcome(&mut self, now: Duration) -> Outcome {
        match self.running(now) {
            Err(failure) => Outcome::Failed(failure),
            Ok(()) if self.finished() => Outcome::Finished,
            Ok(()) => Outcome::Running,
        }
    }

    /// A stream has proved itself and may claim. Under a higher epoch it replaces its predecessor, which must
    /// be gone from the destination memory as if by [`Claims::lost`].
    pub fn join(&mut self, stream: StreamId, source: SourceId, now: Duration) -> Result<(), WireError> {
        self.running(now)?;
        let position = self
            .plan
            .source_position(source)
            .filter(|p| !self.gone.contains(*p))
            .ok_or(WireError::UnknownSource { source_id: source.0 })?;
        if let Some(lane) = self.lanes.get(&stream.index) {
            if stream.epoch <= lane.epoch {
                return Err(WireError::OldEpoch { stream, current: lane.epoch });
            }
            let previous = StreamId { epoch: lane.epoch, ..stream };
            self.lost(previous);
        }
        let lane =
            Lane { epoch: stream.epoch, live: true, source: position, held: BTreeSet::new(), since: now };
        self.lanes.insert(stream.index, lane);
        self.progress.live += 1;
        Ok(())
    }

    /// Assigns the next stripe to a free stream.
    pub fn claim(&mut self, stream: StreamId, now: Duration) -> Result<Grant, WireError> {
        self.running(now)?;
        if self.finished() {
            return Ok(Grant::Finished);
        }
        let source = self.live(stream)?.source;
        let holds = |(_, group): &(u32, u32)| self.plan.group_holders(*group).contains(source);
        let Some(key) = self.pending.keys().find(|key| holds(key)).copied() else { return Ok(Grant::Wait) };
        let Some(id) = self.take_pending(key) else { return Ok(Grant::Wait) };
        let (stripe, work) = (self.plan.stripes()[id as usize], &mut self.work[id as usize]);
        let attempt = work.attempts;
        work.attempts = attempt.saturating_add(1);
        self.progress.stripes_open += 1;
        let lane = self.live(stream)?;
        if lane.held.is_empty() {
            lane.since = now;
        }
        lane.held.insert(id);
        Ok(Grant::Stripe { stripe, attempt })
    }

    /// The stripe's hashes are right and its bytes in place. After this the acknowledgement may be sent.
    pub fn complete(&mut self, stream: StreamId, stripe: u32, now: Duration) -> Result<(), WireError> {
        self.running(now)?;
        self.release(stream, stripe, now)?;
        self.progress.stripes_done += 1;
        self.progress.bytes_done += self.plan.get(stripe).map_or(0, |s| u64::from(s.bytes));
        Ok(())
    }

    /// The stripe's hashes are wrong. It goes back to the pool, or fails the transfer.
    pub fn bad(
        &mut self,
        stream: StreamId,
        stripe: u32,
        verdict: Verdict,
        now: Duration,
    ) -> Result<(), WireError> {
        self.running(now)?;
        self.release(stream, stripe, now)?;
        self.progress.bad += 1;
        // Held by the stream until now, so it is in the plan.
        let (plan, work) = (self.plan.stripes()[stripe as usize], &mut self.work[stripe as usize]);
        work.bad = work.bad.saturating_add(1);
        if work.bad > self.policy.max_bad {
            let failure = Failure::Bad { stripe, extent: plan.extent, times: work.bad, verdict };
            self.failure = Some(failure.clone());
            return Err(failure.into());
        }
        self.pending.entry(pool_key(&self.plan, &plan)).or_default().insert(stripe);
        Ok(())
    }

    /// A stream is lost; its unacknowledged stripes go back to the pool. Returns how many there were.
    /// A second report, or one about a replaced stream, changes nothing.
    pub fn lost(&mut self, stream: StreamId) -> usize {
        let Ok(lane) = self.live(stream) else { return 0 };
        lane.live = false;
        let held = std::mem::take(&mut lane.held);
        self.progress.lost += 1;
        self.progress.live -= 1;
        self.progress.stripes_open -= held.len() as u32;
        for id in &held {
            let key = pool_key(&self.plan, &self.plan.stripes()[*id as usize]);
            self.pending.entry(key).or_default().insert(*id);
        }
        held.len()
    }

    /// A source will not come back: its streams are lost, and stripes that only it held fail the transfer.
    pub fn abandon(&mut self, source: SourceId) -> Result<(), WireError> {
        let position =
            self.plan.source_position(source).ok_or(WireError::UnknownSource { source_id: source.0 })?;
        self.gone.insert(position);
        let its: Vec<StreamId> = self
            .lanes
            .iter()
            .filter(|(_, lane)| lane.source == position)
            .map(|(index, lane)| StreamId { index: *index, epoch: lane.epoch })
            .collect();
        for stream in its {
            self.lost(stream);
        }
        let orphan = self.pending.iter().find_map(|((_, group), stripes)| {
            let orphaned = self.plan.group_holders(*group).is_subset(&self.gone);
            stripes.first().filter(|_| orphaned).and_then(|id| self.plan.get(*id))
        });
        match orphan {
            Some(stripe) if self.failure.is_none() => {
                let failure = Failure::NoSource { stripe: stripe.id, extent: stripe.extent };
                self.failure = Some(failure.clone());
                Err(failure.into())
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Ends the transfer: a peer's fault that [ends the ticket](Fault::ends_ticket), or the caller's request.
    /// The first failure stays; a finished transfer cannot fail any more.
    pub fn end(&mut self, fault: Fault) {
        if !self.finished() && self.failure.is_none() {
            self.failure = Some(Failure::Ended(fault));
        }
    }

    /// Streams that take too long for a stripe. Reset their connections, then report them lost.
    pub fn overdue(&self, now: Duration) -> Vec<StreamId> {
        let late = |since: Duration| now.saturating_sub(since) > self.policy.stripe_timeout;
        self.lanes
            .iter()
            .filter(|(_, lane)| lane.live && !lane.held.is_empty() && late(lane.since))
            .map(|(index, lane)| StreamId { index: *index, epoch: lane.epoch })
            .collect()
    }

    fn finished(&self) -> bool {
        self.progress.stripes_done == self.progress.stripes
    }

    fn running(&mut self, now: Duration) -> Result<(), Failure> {
        if self.failure.is_none() && now >= self.policy.deadline && !self.finished() {
            let Progress { stripes: total, stripes_done, .. } = self.progress;
            self.failure = Some(Failure::Deadline { left: total - stripes_done, total });
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn live(&mut self, stream: StreamId) -> Result<&mut Lane, WireError> {
        self.lanes
            .get_mut(&stream.index)
            .filter(|lane| lane.live && lane.epoch == stream.epoch)
            .ok_or(WireError::NotLive { stream })
    }

    fn take_pending(&mut self, key: (u32, u32)) -> Option<u32> {
        let stripes = self.pending.get_mut(&key)?;
        let id = stripes.pop_first();
        if stripes.is_empty() {
            self.pending.remove(&key);
        }
        id
    }

    fn release(&mut self, stream: StreamId, stripe: u32, now: Duration) -> Result<(), WireError> {
        let lane = self.live(stream)?;
        if !lane.held.remove(&stripe) {
            return Err(WireError::NotClaimed { stream, stripe });
        }
        lane.since = now;
        self.progress.stripes_open -= 1;
        Ok(())
    }
}

/// The queue of a stripe: scarce ones first.
fn pool_key(plan: &StripePlan, stripe: &Stripe) -> (u32, u32) {
    (plan.holders(stripe).len(), StripePlan::group(stripe))
}
