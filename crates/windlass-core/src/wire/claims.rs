//! Assigns stripes to streams.
//!
//! [`Claims`] is the receiver's record for one ticket. Streams take stripes from it as they become free, so
//! a slow stream delays only the stripes it has claimed. It does no I/O: the receiver's threads call it
//! under a lock and follow its answers. Time is an argument, counted from any origin.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use super::WireError;
use super::frame::StreamId;
use super::message::{Fault, Verdict};
use super::pool::Pool;
use super::stripe::{Extent, SourceSet, Stripe, StripePlan};
use super::swarm::Place;
use super::ticket::{MAX_SOURCES, SourceId};
use crate::error::Kind;

/// The bounds of one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimPolicy {
    /// When the transfer must be over.
    pub deadline: Duration,
    /// How long a stream may take for a MiB of a stripe before it is called overdue.
    pub stripe_timeout: Duration,
    /// How many bad attempts a stripe may have before the transfer fails.
    pub max_bad: u16,
    /// After this time without a stripe, origins are asked for more of what others were given. A relay that takes longer for
    /// one of the last stripes is left.
    pub stall: Duration,
}

/// So many times [`ClaimPolicy::stall`] relays get to come to hold what no origin has any more.
const HOPE: u32 = 20;

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
/// - CLAIMS-6 Of an origin, a receiver takes what no receiver was given yet. Beyond that, while it is connected to a relay, it takes
///   little more than its share, and twice as much each time that nothing comes from anywhere.
/// - CLAIMS-7 Among several receivers, each asks an origin for few stripes at a time.
/// - CLAIMS-8 A relay that sends one bad stripe is to be left. That costs the stripe no attempt, and the transfer nothing.
#[derive(Clone, Debug)]
pub struct Claims {
    plan: StripePlan,
    policy: ClaimPolicy,
    work: Vec<Work>,
    /// Unclaimed stripes.
    pool: Pool,
    place: Place,
    /// Those of the plan, then relays.
    sources: Vec<SourceId>,
    lanes: BTreeMap<u16, Lane>,
    gone: SourceSet,
    /// Bytes claimed of origins and not given back.
    from_origins: u64,
    /// How often nothing came for [`ClaimPolicy::stall`].
    stalls: u32,
    /// When a stripe last arrived, or the last stall was found.
    moved: Duration,
    /// When a stripe last arrived.
    arrived: Duration,
    progress: Progress,
    failure: Option<Failure>,
}

impl Claims {
    /// The record of a receiver that knows of no other.
    pub fn new(plan: StripePlan, policy: ClaimPolicy) -> Claims {
        Claims::among(plan, policy, Place::ALONE)
    }

    /// The record of one receiver among others.
    pub fn among(plan: StripePlan, policy: ClaimPolicy, place: Place) -> Claims {
        let progress =
            Progress { stripes: plan.stripes().len() as u32, bytes: plan.bytes(), ..Progress::default() };
        Claims {
            work: vec![Work::default(); plan.stripes().len()],
            pool: Pool::new(&plan, place),
            place,
            sources: plan.sources().to_vec(),
            plan,
            policy,
            lanes: BTreeMap::new(),
            gone: SourceSet::default(),
            from_origins: 0,
            stalls: 0,
            moved: Duration::ZERO,
            arrived: Duration::ZERO,
            progress,
            failure: None,
        }
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

    /// So many receivers are known by now.
    pub fn crowd(&mut self, receivers: u32) {
        self.place.receivers = receivers.max(1);
    }

    /// Another receiver passes on what it has. It holds nothing until it [says so](Claims::holds).
    pub fn add_relay(&mut self, relay: SourceId) -> Result<(), WireError> {
        if self.sources.contains(&relay) || self.sources.len() >= MAX_SOURCES {
            return Err(WireError::UnknownSource { source_id: relay.0 });
        }
        self.sources.push(relay);
        Ok(())
    }

    /// What the source of a stream says of stripes: a relay that it holds them, an origin that it has given them to
    /// others.
    pub fn holds(&mut self, stream: StreamId, stripes: Range<u32>) -> Result<(), WireError> {
        let source = self.live(stream)?.source;
        if self.is_relay(source) {
            self.pool.holds(source, stripes);
        } else {
            self.pool.given(stripes);
        }
        Ok(())
    }

    fn is_relay(&self, source: usize) -> bool {
        source >= self.plan.sources().len()
    }

    fn position(&self, source: SourceId) -> Option<usize> {
        self.sources.iter().position(|s| *s == source)
    }

    /// Whether an origin may be asked for what others were given.
    fn may_ask_again(&mut self, now: Duration) -> bool {
        if !self.lanes.values().any(|lane| lane.live && self.is_relay(lane.source)) {
            return true;
        }
        if now.saturating_sub(self.moved) >= self.policy.stall {
            self.stalls += 1;
            self.moved = now;
        }
        // Its share, and more of it where there are few: the more receivers there are, the less an origin adds to what they can
        // send each other.
        let receivers = u64::from(self.place.receivers);
        let share = self.progress.bytes / receivers;
        let share = share.saturating_add(share.saturating_mul(2) / receivers);
        let most = share.saturating_mul(1u64.checked_shl(self.stalls).unwrap_or(u64::MAX));
        let stripe = self.progress.bytes / u64::from(self.progress.stripes.max(1));
        self.from_origins.saturating_add(stripe) <= most
    }

    /// Whether an origin is sending as much as this receiver should ask for at a time. An origin sends to all at once, and what
    /// it sends arrives, and can be passed on, the later the more it is.
    fn has_enough_of(&self, origin: usize) -> bool {
        let receivers = self.place.receivers;
        let open = || self.lanes.values().filter(|l| l.live && l.source == origin).map(|l| l.held.len());
        receivers > 1 && open().sum::<usize>() >= self.place.open()
    }

    /// How long a source may take for a stripe of this size. When only stripes under way are left, a relay that is much slower than
    /// the others holds everything up, and its stripes are found elsewhere.
    fn patience(&self, source: usize, bytes: u32, now: Duration) -> Duration {
        let most = self.policy.stripe_timeout.saturating_mul(bytes.div_ceil(1 << 20).max(1));
        let Progress { stripes, stripes_done, stripes_open, live, .. } = self.progress;
        if !self.is_relay(source) || stripes_done + stripes_open < stripes {
            return most;
        }
        let usual = now.saturating_mul(live) / stripes_done.max(1);
        usual.saturating_mul(4).max(self.policy.stall).min(most)
    }

    /// A stream has proved itself and may claim. Under a higher epoch it replaces its predecessor, which must
    /// be gone from the destination memory as if by [`Claims::lost`].
    pub fn join(&mut self, stream: StreamId, source: SourceId, now: Duration) -> Result<(), WireError> {
        self.running(now)?;
        let position = self
            .position(source)
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
        let id = if self.is_relay(source) {
            self.pool.next_of_relay(source)
        } else if self.has_enough_of(source) {
            None
        } else {
            let again = self.may_ask_again(now);
            self.pool.next_of_origin(|group| self.plan.group_holders(group).contains(source), again)
        };
        let Some(id) = id else { return Ok(Grant::Wait) };
        if !self.is_relay(source) {
            self.from_origins += self.plan.get(id).map_or(0, |s| u64::from(s.bytes));
        }
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
        (self.moved, self.arrived) = (now, now);
        self.progress.stripes_done += 1;
        self.progress.bytes_done += self.plan.get(stripe).map_or(0, |s| u64::from(s.bytes));
        Ok(())
    }

    /// The stripe's hashes are wrong. It goes back to the pool, or fails the transfer. Answers whether its source is a
    /// relay, which is to be [left](Claims::abandon).
    pub fn bad(
        &mut self,
        stream: StreamId,
        stripe: u32,
        verdict: Verdict,
        now: Duration,
    ) -> Result<bool, WireError> {
        self.running(now)?;
        let source = self.live(stream)?.source;
        self.release(stream, stripe, now)?;
        self.progress.bad += 1;
        let relay = self.is_relay(source);
        // Held by the stream until now, so it is in the plan.
        let (plan, work) = (self.plan.stripes()[stripe as usize], &mut self.work[stripe as usize]);
        work.bad = work.bad.saturating_add(u16::from(!relay));
        if work.bad > self.policy.max_bad {
            let failure = Failure::Bad { stripe, extent: plan.extent, times: work.bad, verdict };
            self.failure = Some(failure.clone());
            return Err(failure.into());
        }
        self.give_back(source, stripe);
        Ok(relay)
    }

    fn give_back(&mut self, source: usize, stripe: u32) {
        if !self.is_relay(source) {
            let bytes = self.plan.get(stripe).map_or(0, |s| u64::from(s.bytes));
            self.from_origins = self.from_origins.saturating_sub(bytes);
        }
        self.pool.put(stripe);
    }

    /// A stream is lost; its unacknowledged stripes go back to the pool. Returns how many there were.
    /// A second report, or one about a replaced stream, changes nothing.
    pub fn lost(&mut self, stream: StreamId) -> usize {
        let Ok(lane) = self.live(stream) else { return 0 };
        lane.live = false;
        let (held, source) = (std::mem::take(&mut lane.held), lane.source);
        self.progress.lost += 1;
        self.progress.live -= 1;
        self.progress.stripes_open -= held.len() as u32;
        for id in &held {
            self.give_back(source, *id);
        }
        held.len()
    }

    /// A source will not come back: its streams are lost, and stripes that only it held fail the transfer, unless there
    /// is a relay that may come to hold them.
    pub fn abandon(&mut self, source: SourceId) -> Result<(), WireError> {
        let position = self.position(source).ok_or(WireError::UnknownSource { source_id: source.0 })?;
        self.gone.insert(position);
        self.pool.without(position);
        let its: Vec<StreamId> = self
            .lanes
            .iter()
            .filter(|(_, lane)| lane.source == position)
            .map(|(index, lane)| StreamId { index: *index, epoch: lane.epoch })
            .collect();
        for stream in its {
            self.lost(stream);
        }
        if (self.plan.sources().len()..self.sources.len()).any(|relay| !self.gone.contains(relay)) {
            return Ok(());
        }
        match self.orphaned() {
            Some(failure) => Err(failure.into()),
            None => Ok(()),
        }
    }

    /// Fails the transfer if there is a stripe that no source holds any more.
    fn orphaned(&mut self) -> Option<Failure> {
        let orphan = self.pool.orphan(|group| self.plan.group_holders(group).is_subset(&self.gone));
        let stripe = orphan.and_then(|id| self.plan.get(id)).filter(|_| self.failure.is_none())?;
        self.failure = Some(Failure::NoSource { stripe: stripe.id, extent: stripe.extent });
        self.failure.clone()
    }

    /// Ends the transfer: a peer's fault that [ends the ticket](Fault::ends_ticket), or the caller's request.
    /// The first failure stays; a finished transfer cannot fail any more.
    pub fn end(&mut self, fault: Fault) {
        if !self.finished() && self.failure.is_none() {
            self.failure = Some(Failure::Ended(fault));
        }
    }

    /// Whether a stream takes too long for a stripe, and how long it may take. Reset its connection, then report it lost.
    pub fn overdue(&self, stream: StreamId, now: Duration) -> Option<Duration> {
        let lane = self.lanes.get(&stream.index).filter(|lane| lane.live && lane.epoch == stream.epoch)?;
        let largest = lane.held.iter().filter_map(|id| self.plan.get(*id)).map(|s| s.bytes).max();
        let limit = self.patience(lane.source, largest.unwrap_or(0), now);
        let late = !lane.held.is_empty() && now.saturating_sub(lane.since) > limit;
        late.then_some(limit)
    }

    fn finished(&self) -> bool {
        self.progress.stripes_done == self.progress.stripes
    }

    fn running(&mut self, now: Duration) -> Result<(), Failure> {
        if self.failure.is_none() && now >= self.policy.deadline && !self.finished() {
            let Progress { stripes: total, stripes_done, .. } = self.progress;
            self.failure = Some(Failure::Deadline { left: total - stripes_done, total });
        }
        // Relays may come to hold what no origin has any more, but not for ever.
        let hopeless = now.saturating_sub(self.arrived) >= self.policy.stall.saturating_mul(HOPE);
        if self.failure.is_none() && hopeless && !self.gone.is_empty() && !self.finished() {
            let _ = self.orphaned();
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn live(&mut self, stream: StreamId) -> Result<&mut Lane, WireError> {
        self.lanes
            .get_mut(&stream.index)
            .filter(|lane| lane.live && lane.epoch == stream.epoch)
            .ok_or(WireError::NotLive { stream })
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
