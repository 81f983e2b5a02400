//! Writing a region: ranks and their attempts.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use windlass_core::identity::Version;

use super::error::{Missing, Stage};
use super::owner::{Owner, alive};
use super::{Region, RegionError, io_error, now, step};
use crate::flip::{Phase, Said};
use crate::private::check_own;
use crate::shm::{Access, Mapping};
use crate::stop::{Stop, Stopped};

/// How long a gentle writer keeps new readers out, and how long it lets them in.
const KNOCK: Duration = Duration::from_millis(20);
const LET_IN: Duration = Duration::from_millis(20);
/// How many bytes are copied between two looks at whether the attempt still runs.
const PIECE: usize = 1 << 20;

impl Region {
    /// Registers this process as a rank; a dead predecessor's place is free.
    pub fn writer(self: &Arc<Self>, rank: u16) -> Result<Writer, RegionError> {
        check_own(&self.lock, &self.dir)?;
        let ranks = self.facts.ranks;
        if rank >= ranks {
            return Err(RegionError::NoSuchRank { dir: self.dir.clone(), rank, ranks });
        }
        for (slot, s) in self.slots.iter().enumerate() {
            if s.write.get().is_none() {
                let mapping = Mapping::map(&s.file, s.read.len(), Access::Write)
                    .map_err(io_error("map for writing", &self.slot_path(slot)))?;
                // Another thread may have been faster; one is as good as the other.
                let _ = s.write.set(mapping);
            }
        }
        let owner = self.me();
        let claimed = self.flip().claim_rank(rank.into(), owner.0, alive);
        let last = claimed.map_err(|other| RegionError::RankTaken {
            dir: self.dir.clone(),
            rank,
            pid: Owner(other).pid(),
        })?;
        self.ring();
        step("claimed");
        Ok(Writer { region: Arc::clone(self), owner, rank, last })
    }
}

/// One rank of a region. Dropping it gives the rank back.
#[derive(Debug)]
pub struct Writer {
    region: Arc<Region>,
    owner: Owner,
    rank: u16,
    /// The last attempt that this rank took part in.
    last: u64,
}

impl Writer {
    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Which rank this is.
    pub fn rank(&self) -> u16 {
        self.rank
    }

    /// Begins to write `version` with all other ranks, and returns when all have joined. Rank 0 leads: it takes back
    /// the slot first, and its versions must grow (in a region of one slot they need not).
    pub fn begin(&mut self, version: Version, stop: &Stop) -> Result<Attempt<'_>, RegionError> {
        self.start(version, Manner::Firm, stop)
    }

    /// [`Writer::begin`], which lets readers in for as long as there are any. Once an attempt has
    /// begun, no reader may lease the slot. If it is the only slot, and the holder of a lease waits for another reader to take
    /// one too, both would wait for the writer, and the writer for them. So it only knocks, and withdraws while readers hold
    /// the slot.
    pub fn begin_gently(&mut self, version: Version, stop: &Stop) -> Result<Attempt<'_>, RegionError> {
        self.start(version, Manner::Gentle, stop)
    }

    /// [`Writer::begin`] for callers that cannot borrow: the attempt keeps the writer, and gives it back in the end.
    pub fn into_attempt(
        mut self,
        version: Version,
        stop: &Stop,
    ) -> Result<OwnedAttempt, Box<(Writer, RegionError)>> {
        match self.start(version, Manner::Firm, stop) {
            Ok(attempt) => Ok(OwnedAttempt { attempt, writer: self }),
            Err(e) => Err(Box::new((self, e))),
        }
    }

    /// The attempt's lifetime is whatever the caller makes of it.
    fn start<'a>(
        &mut self,
        version: Version,
        manner: Manner,
        stop: &Stop,
    ) -> Result<Attempt<'a>, RegionError> {
        let id = if self.rank == 0 { self.lead(version, manner, stop)? } else { self.follow(version, stop)? };
        self.last = id;
        // From here on, dropping ends the attempt.
        let attempt = Attempt::new(self, id, version);
        if !attempt.region().flip().join(attempt.rank.into(), id) {
            return Err(attempt.aborted(Stage::Join, Some(Said::Joined)));
        }
        attempt.region().ring();
        step("joined");
        attempt.wait_all(Said::Joined, Stage::Join, stop)?;
        step("barrier");
        Ok(attempt)
    }

    fn lead(&mut self, version: Version, manner: Manner, stop: &Stop) -> Result<u64, RegionError> {
        let region = &self.region;
        let current = region.state().active.map(|s| s.version);
        if let Some(current) = current.filter(|&c| region.slots.len() == 2 && version <= c) {
            return Err(RegionError::VersionOrder { version, current });
        }
        let flip = region.flip();
        // The agent compares with the slot that the guard takes from it; when time is up, the guard says who is missing.
        let _ = region.wait_for(stop, || {
            flip.unsealed(now(), alive).inspect(|_| step("unsealed")).is_none().then_some(())
        });
        let id = loop {
            let id = flip.begin();
            region.ring();
            step("guard");
            let mut blockers = Vec::new();
            let knock = match manner {
                Manner::Firm => stop.clone(),
                Manner::Gentle => stop.with_timeout(KNOCK),
            };
            let clear = region.wait_for(&knock, || {
                blockers = flip.blockers(id, now(), alive);
                blockers.is_empty().then_some(())
            });
            let Err(stopped) = clear else { break id };
            let missing = blockers.iter().map(Missing::blocker).collect();
            flip.abort(id);
            region.ring();
            if stop.is_set() {
                return Err(self.stopped(id, version, Stage::Guard, missing, stopped));
            }
            region.wait(region.bell(), LET_IN.min(stop.nap()));
        };
        self.note_unsealed();
        if !flip.open(id, version) {
            return Err(self.aborted(id, version, Stage::Guard));
        }
        region.ring();
        step("open");
        Ok(id)
    }

    /// Says that the next attempt goes on without the agent.
    fn note_unsealed(&self) {
        let Some(version) = self.region.state().active.filter(|s| s.sealed.is_none()).map(|s| s.version)
        else {
            return;
        };
        match self.region.flip().agent() {
            0 => tracing::debug!(version, "there is no agent: the version is not sealed and gets no delta"),
            owner => tracing::warn!(
                version,
                agent = %Owner(owner),
                "the agent is dead or silent: the version is not sealed and gets no delta"
            ),
        }
    }

    fn follow(&mut self, version: Version, stop: &Stop) -> Result<u64, RegionError> {
        let flip = self.region.flip();
        match self.region.wait_for(stop, || flip.open_attempt(self.last)) {
            Ok((id, opened)) if opened == version => Ok(id),
            Ok((attempt, opened)) => {
                flip.abort(attempt);
                self.last = attempt;
                self.region.ring();
                Err(RegionError::VersionMismatch { rank: self.rank, version, attempt, opened })
            }
            Err(stopped) => {
                let control = flip.control();
                let begun = control.attempt() > self.last && control.phase() == Phase::Guard;
                let attempt = if begun { control.attempt() } else { 0 };
                let (said, owner) = flip.said(0, attempt);
                let mut lead = Missing::rank(0, said, owner);
                if owner != 0 {
                    lead.what = if begun { "is taking back the slot" } else { "has not begun" }.into();
                }
                Err(self.stopped(attempt, version, Stage::Lead, vec![lead], stopped))
            }
        }
    }

    fn stopped(
        &self,
        attempt: u64,
        version: Version,
        stage: Stage,
        missing: Vec<Missing>,
        stopped: Stopped,
    ) -> RegionError {
        RegionError::Stopped { attempt, version, rank: self.rank, stage, missing, stopped }
    }

    fn aborted(&self, attempt: u64, version: Version, stage: Stage) -> RegionError {
        RegionError::Aborted { attempt, version, rank: self.rank, stage, missing: Vec::new() }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.owner.is_me() {
            self.region.flip().leave_rank(self.rank.into(), self.owner.0);
            self.region.ring();
        }
    }
}

/// What a writer does while the slot is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// Admits no new reader until the slot is free.
    Firm,
    /// Admits no new reader for a moment at a time.
    Gentle,
}

/// A version that was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The attempt: names these bytes within the incarnation.
    pub id: u64,
    pub version: Version,
    /// The slot that holds it.
    pub slot: usize,
}

/// A version that is being written. Dropping it gives it up, for all ranks.
///
/// All writes into the slot must have ended when it is dropped or done: threads that borrow it have by then; a caller
/// that writes by other means (DMA, a loan of [`Attempt::mapping`]) sees to that.
#[derive(Debug)]
pub struct Attempt<'w> {
    region: Arc<Region>,
    owner: Owner,
    rank: u16,
    id: u64,
    version: Version,
    slot: usize,
    over: bool,
    /// The next attempt of this rank begins after this one has ended.
    writer: PhantomData<&'w mut Writer>,
}

impl<'w> Attempt<'w> {
    fn new(writer: &Writer, id: u64, version: Version) -> Attempt<'w> {
        let region = Arc::clone(&writer.region);
        // The target does not change while this rank takes part: nothing commits without it.
        let slot = region.flip().target(region.flip().control());
        let (owner, rank) = (writer.owner, writer.rank);
        Attempt { region, owner, rank, id, version, slot, over: false, writer: PhantomData }
    }

    fn region(&self) -> &Region {
        &self.region
    }

    /// Names the bytes that this attempt writes within the incarnation.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The slot that is written.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The slot's memory, for DMA and loans. The data area begins at [`Region::data_start`].
    pub fn mapping(&self) -> &Mapping {
        self.region.slots[self.slot].view()
    }

    /// An error if the attempt was given up.
    pub fn check(&self) -> Result<(), RegionError> {
        if self.region.flip().control().is_open(self.id) {
            Ok(())
        } else {
            Err(self.aborted(Stage::Write, None))
        }
    }

    /// Copies `bytes` to `offset` of the data area. Any number of threads may write at a time.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        let end = offset.saturating_add(bytes.len() as u64);
        self.region.check_range(&(offset..end))?;
        let start = self.region.data_start() + offset;
        let mapping = self.mapping();
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            self.check()?;
            step("piece");
            mapping.copy_in(start + (i * PIECE) as u64, piece);
        }
        Ok(())
    }

    /// Says that this rank has written its part, and returns when the version is committed.
    pub fn done(mut self, stop: &Stop) -> Result<Committed, RegionError> {
        let region = Arc::clone(&self.region);
        let flip = region.flip();
        self.check()?;
        flip.done(self.rank.into(), self.id);
        region.ring();
        step("done");
        if self.rank == 0 {
            self.wait_all(Said::Done, Stage::Commit, stop)?;
            step("committing");
            if !flip.commit(self.id, self.version) {
                return Err(self.aborted(Stage::Commit, None));
            }
            region.ring();
        } else {
            self.wait_commit(stop)?;
        }
        self.over = true;
        step("committed");
        Ok(Committed { id: self.id, version: self.version, slot: self.slot })
    }

    /// Waits until all ranks have said this, or gives the attempt up and says who was missing.
    fn wait_all(&self, said: Said, stage: Stage, stop: &Stop) -> Result<(), RegionError> {
        let flip = self.region.flip();
        let waited = self.region.wait_for(stop, || {
            // The ranks first: what they said before the attempt ended does not count if it ended.
            let all = flip.all_said(self.id, said);
            if !flip.control().is_open(self.id) {
                return Some(Err(self.aborted(stage, Some(said))));
            }
            if all { Some(Ok(())) } else { self.lost(stage).map(Err) }
        });
        waited.unwrap_or_else(|stopped| Err(self.give_up(stage, said, stopped)))
    }

    /// Waits for the lead to commit.
    fn wait_commit(&self, stop: &Stop) -> Result<(), RegionError> {
        let flip = self.region.flip();
        let waited = self.region.wait_for(stop, || match flip.outcome(self.id) {
            Some(true) => Some(Ok(())),
            Some(false) => Some(Err(self.aborted(Stage::Commit, None))),
            None => self.lost(Stage::Commit).map(Err),
        });
        match waited {
            Ok(Err(RegionError::PeerLost { .. })) | Err(_) if flip.abort(self.id) => Ok(()),
            Ok(result) => result,
            Err(stopped) => Err(self.give_up(Stage::Commit, Said::Done, stopped)),
        }
    }

    /// A rank that joined and died before it was done. A rank that has not joined may still be restarted. A lead that
    /// died after it was done can no longer commit.
    fn lost(&self, stage: Stage) -> Option<RegionError> {
        let flip = self.region.flip();
        (0..self.region.facts.ranks).find_map(|rank| {
            let (said, owner) = flip.said(rank.into(), self.id);
            let needed = said == Said::Joined || said == Said::Done && rank == 0;
            (needed && !alive(owner)).then(|| RegionError::PeerLost {
                attempt: self.id,
                version: self.version,
                stage,
                lost: Missing::rank(rank, said, owner),
            })
        })
    }

    fn give_up(&self, stage: Stage, wanted: Said, stopped: Stopped) -> RegionError {
        let flip = self.region.flip();
        flip.abort(self.id);
        self.region.ring();
        let missing = (0..self.region.facts.ranks).filter_map(|rank| {
            let (said, owner) = flip.said(rank.into(), self.id);
            (said < wanted || rank == 0 && self.rank != 0 && stage == Stage::Commit)
                .then(|| Missing::rank(rank, said, owner))
        });
        let (attempt, version, rank) = (self.id, self.version, self.rank);
        RegionError::Stopped { attempt, version, rank, stage, missing: missing.collect(), stopped }
    }

    /// Why the attempt ended, as far as this rank can tell: the rank that gave it up saw another one die, or not come.
    fn aborted(&self, stage: Stage, waited_for: Option<Said>) -> RegionError {
        if let Some(lost) = self.lost(stage) {
            return lost;
        }
        let missing = waited_for.map_or_else(Vec::new, |said| self.missing(said));
        let (attempt, version, rank) = (self.id, self.version, self.rank);
        RegionError::Aborted { attempt, version, rank, stage, missing }
    }

    /// The ranks that have not said this.
    fn missing(&self, wanted: Said) -> Vec<Missing> {
        let flip = self.region.flip();
        let ranks = (0..self.region.facts.ranks).map(|rank| (rank, flip.said(rank.into(), self.id)));
        let late = ranks.filter(|(_, (said, _))| *said < wanted);
        late.map(|(rank, (said, owner))| Missing::rank(rank, said, owner)).collect()
    }
}

/// An [`Attempt`] together with its writer. Dropping it gives the version up and takes the rank off the list.
#[derive(Debug)]
pub struct OwnedAttempt {
    // Dropped first: the attempt ends before its rank leaves.
    attempt: Attempt<'static>,
    writer: Writer,
}

impl std::ops::Deref for OwnedAttempt {
    type Target = Attempt<'static>;

    fn deref(&self) -> &Attempt<'static> {
        &self.attempt
    }
}

impl OwnedAttempt {
    /// [`Attempt::done`]. The writer can begin the next version whether or not this one was committed.
    pub fn done(self, stop: &Stop) -> (Writer, Result<Committed, RegionError>) {
        let OwnedAttempt { attempt, writer } = self;
        (writer, attempt.done(stop))
    }

    /// Gives the version up.
    pub fn abort(self) -> Writer {
        let OwnedAttempt { attempt, writer } = self;
        drop(attempt);
        writer
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.over && self.owner.is_me() {
            self.region.flip().abort(self.id);
            self.region.ring();
        }
    }
}
