//! The state machine of one rank: idle, copying, staging or working in the background.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use windlass_core::digest::SumTable;
use windlass_core::identity::{Incarnation, LayoutHash, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;

use super::delta_mode::{DeltaMode, DeltaSource, Job, Way};
use super::{PublishError, Staging};
use crate::copies::CopyTarget;
use crate::region::{Attempt, Committed, OwnedAttempt, Region, RegionError, RegionSpec, Writer};
use crate::stop::Stop;

/// How often a rank that joins looks for the region.
const LOOK_EVERY: Duration = Duration::from_millis(10);

enum State {
    Idle(Writer),
    /// This rank copies its share into the slot.
    Copying(OwnedAttempt),
    /// This rank puts its share into staging memory.
    Staging(Writer, Version),
    /// A thread hands out a delta, or hashes a copy.
    Background(Job),
    Closed,
}

impl State {
    fn describe(&self) -> &'static str {
        match self {
            State::Idle(_) => "no version is being written",
            State::Copying(_) | State::Staging(..) => "a version is being written",
            State::Background(_) => "the version before is still under way",
            State::Closed => "the publisher is closed",
        }
    }
}

/// One rank of a publisher. Dropping it ends the background work and gives the rank back.
pub struct Publisher {
    region: Arc<Region>,
    rank: u16,
    state: State,
    /// Present once this rank may publish by delta.
    delta: Option<DeltaMode>,
    /// Allocated by the first version that is staged.
    staging: Option<Staging>,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher")
            .field("rank", &self.rank)
            .field("region", &self.region.dir())
            .field("state", &self.state.describe())
            .finish_non_exhaustive()
    }
}

impl Publisher {
    /// Takes the place of `rank` in a region.
    pub fn new(region: Arc<Region>, rank: u16) -> Result<Publisher, RegionError> {
        let state = State::Idle(region.writer(rank)?);
        Ok(Publisher { region, rank, state, delta: None, staging: None })
    }

    /// Makes the region, as rank 0. Waits for other processes to release a region that its publisher left, then replaces it.
    pub fn create(spec: &RegionSpec, stop: &Stop) -> Result<Publisher, RegionError> {
        Publisher::new(Region::create_when_free(spec, stop)?, 0)
    }

    /// Joins the region in `dir` as `rank`. Waits until rank 0 has made it with this layout and, if one is given, of this
    /// incarnation.
    pub fn join(
        dir: &Path,
        layout: LayoutHash,
        rank: u16,
        incarnation: Option<Incarnation>,
        stop: &Stop,
    ) -> Result<Publisher, PublishError> {
        loop {
            // Joining a region that its trainer left would keep rank 0 from making the new one.
            let region = if Region::is_left(dir) { None } else { Some(Region::open(dir)) };
            let found = match region {
                None => "the trainer that made it is dead, or publishes there no more".to_owned(),
                Some(Ok(region)) => {
                    let is = region.incarnation();
                    if incarnation.is_some_and(|wanted| wanted != is) {
                        format!("it is of incarnation {is}")
                    } else if region.manifest().layout_hash() != layout {
                        "it has other tensors".to_owned()
                    } else {
                        match Publisher::new(region, rank) {
                            Ok(publisher) => return Ok(publisher),
                            Err(e) if stop.is_set() || incarnation.is_some() => return Err(e.into()),
                            // The rank's predecessor died a moment ago, and rank 0 is about to replace the region.
                            Err(_) => "this rank's place in it is taken".to_owned(),
                        }
                    }
                }
                Some(Err(RegionError::Absent { .. })) => "it is not there".to_owned(),
                Some(Err(e)) => return Err(e.into()),
            };
            let dir = || dir.to_owned();
            stop.check().map_err(|source| PublishError::Join { rank, dir: dir(), found, source })?;
            std::thread::sleep(stop.nap().min(LOOK_EVERY));
        }
    }

    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub fn rank(&self) -> u16 {
        self.rank
    }

    /// Turns delta mode on. This rank answers for `blocks`: all that it writes, in whole blocks of `layout`, and no other
    /// rank's. `threads` work in the background.
    pub fn use_deltas(
        &mut self,
        layout: &Manifest,
        blocks: BlockRanges,
        threads: usize,
    ) -> Result<(), PublishError> {
        if layout.cuts_hash() != self.region.manifest().cuts_hash() {
            return Err(PublishError::OtherCuts { rank: self.rank });
        }
        match &self.state {
            State::Idle(writer) if self.delta.is_none() => {
                self.delta = Some(DeltaMode::new(writer, blocks, threads)?);
                Ok(())
            }
            _ => Err(self.turn("change how it publishes")),
        }
    }

    /// The newest version that this rank has begun to publish: its number cannot be given to other bytes.
    pub fn newest(&self) -> Option<Version> {
        let committed = self.region.state().active.map(|s| s.version);
        self.delta.as_ref().and_then(DeltaMode::handed_out).max(committed)
    }

    /// How `version` can be published. Waits for the version before, and gives its error.
    pub fn way(&mut self, version: Version, stop: &Stop) -> Result<Way, PublishError> {
        self.settle(stop)?;
        match (&self.state, &self.delta) {
            (State::Idle(_), Some(delta)) => delta.way(version),
            (State::Idle(_), None) => Ok(Way::Copy { why: "this rank publishes by copies only".into() }),
            (State::Copying(_) | State::Staging(..) | State::Background(_) | State::Closed, _) => {
                Err(self.turn("begin"))
            }
        }
    }

    /// Begins to copy `version`, together with all other ranks. Waits for the version before.
    pub fn begin(&mut self, version: Version, stop: &Stop) -> Result<(), PublishError> {
        self.settle(stop)?;
        self.delta.as_ref().map_or(Ok(()), |delta| delta.allow(version))?;
        let writer = self.take("begin")?;
        if let Some(delta) = &mut self.delta {
            delta.forget(version);
        }
        let (state, result) = match writer.into_attempt(version, stop) {
            Ok(attempt) => (State::Copying(attempt), Ok(())),
            Err(back) => {
                let (writer, e) = *back;
                (State::Idle(writer), Err(e.into()))
            }
        };
        self.state = state;
        result
    }

    /// The slot that is being copied into.
    pub fn attempt(&self) -> Result<&Attempt<'static>, PublishError> {
        match &self.state {
            State::Copying(attempt) => Ok(attempt),
            State::Idle(_) | State::Staging(..) | State::Background(_) | State::Closed => {
                Err(self.turn("write"))
            }
        }
    }

    /// The memory that this rank stages a delta in, if it does.
    pub fn staged(&self) -> Option<&Staging> {
        self.staging.as_ref().filter(|_| matches!(self.state, State::Staging(..)))
    }

    /// The slot or the staging memory, whichever this rank's share belongs into now.
    pub fn target(&self) -> Result<&dyn CopyTarget, PublishError> {
        match self.staged() {
            Some(staging) => Ok(staging),
            None => Ok(self.attempt()?),
        }
    }

    /// Says that this rank's share of the slot is written, and returns when the version is committed. In delta mode a
    /// caller that knows the hashes of this rank's blocks gives them (those of other blocks zero); otherwise a background
    /// thread computes them.
    pub fn commit(&mut self, sums: Option<SumTable>, stop: &Stop) -> Result<Committed, PublishError> {
        let attempt = match std::mem::replace(&mut self.state, State::Closed) {
            State::Copying(attempt) => attempt,
            other => {
                self.state = other;
                return Err(self.turn("commit"));
            }
        };
        if let Some(Err(e)) = self.delta.as_ref().map(|delta| delta.confirm(&attempt, stop)) {
            self.state = State::Idle(attempt.abort());
            return Err(e);
        }
        let (writer, result) = attempt.done(stop);
        match (&mut self.delta, &result) {
            (Some(delta), Ok(committed)) => match delta.committed(*committed, sums) {
                None => self.state = State::Idle(writer),
                Some(work) => {
                    let job = Job::sums(work, writer);
                    self.run(job)?;
                }
            },
            (None, _) | (Some(_), Err(_)) => self.state = State::Idle(writer),
        }
        Ok(result?)
    }

    /// Publishes `version` by a copy: `write` fills this rank's share of the slot. If it fails, all ranks give the version
    /// up.
    pub fn copy<T, E: From<PublishError>>(
        &mut self,
        version: Version,
        stop: &Stop,
        write: impl FnOnce(&Attempt<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.begin(version, stop)?;
        match write(self.attempt()?) {
            Ok(done) => {
                self.commit(None, stop)?;
                Ok(done)
            }
            Err(e) => {
                self.abort();
                Err(e)
            }
        }
    }

    /// Begins `version` as a delta from the version before: [`Publisher::target`] is memory of this process.
    pub fn stage(&mut self, version: Version) -> Result<(), PublishError> {
        if self.delta.is_none() {
            return Err(self.turn("begin a delta"));
        }
        if self.staging.is_none() {
            self.staging = Some(Staging::new(self.region.manifest().data_bytes())?);
        }
        let writer = self.take("begin a delta")?;
        self.state = State::Staging(writer, version);
        Ok(())
    }

    /// Publishes the staged version: returns at once, and works in the background for at most `timeout`.
    pub fn publish_staged(&mut self, timeout: Duration) -> Result<(), PublishError> {
        match (std::mem::replace(&mut self.state, State::Closed), &self.staging) {
            (State::Staging(writer, version), Some(staging)) => {
                let source = Box::new(staging.clone());
                self.state = State::Idle(writer);
                self.publish(version, source, timeout)
            }
            (other, _) => {
                self.state = other;
                Err(self.turn("publish a delta"))
            }
        }
    }

    /// Publishes `version` by the records of `source`: returns at once, and works in the background until the version is
    /// committed or `timeout` has passed. [`Publisher::way`] must have said that it can.
    pub fn publish(
        &mut self,
        version: Version,
        source: Box<dyn DeltaSource>,
        timeout: Duration,
    ) -> Result<(), PublishError> {
        let what = "publish a delta";
        let newest = match &self.delta {
            Some(delta) => delta.base_of(version)?,
            None => return Err(self.turn(what)),
        };
        let writer = self.take(what)?;
        let Some(delta) = &mut self.delta else { return Err(self.turn(what)) };
        let job = Job::delta(delta.begin(version, newest), source, timeout, writer);
        self.run(job)
    }

    /// Gives up the version that is being written, for all ranks. If there is none, does nothing.
    pub fn abort(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Closed) {
            State::Copying(attempt) => State::Idle(attempt.abort()),
            State::Staging(writer, _) => State::Idle(writer),
            other @ (State::Idle(_) | State::Background(_) | State::Closed) => other,
        };
    }

    /// Waits for the background work of the version before, and gives its error.
    pub fn settle(&mut self, stop: &Stop) -> Result<(), PublishError> {
        if let State::Background(job) = &self.state {
            job.wait(stop)?;
        }
        self.finish()
    }

    /// Ends the background work, gives up the version that is being written, and gives the rank back.
    pub fn close(&mut self) -> Result<(), PublishError> {
        if let State::Background(job) = &self.state {
            job.cancel();
        }
        let result = self.finish();
        self.state = State::Closed;
        self.delta = None;
        result
    }

    /// Removes the region of a closed publisher if no other process has it open. Returns whether it is gone.
    pub fn discard(&self) -> Result<bool, PublishError> {
        match &self.state {
            State::Closed => Ok(self.region.discard()?),
            State::Idle(_) | State::Copying(_) | State::Staging(..) | State::Background(_) => {
                Err(self.turn("remove the region"))
            }
        }
    }

    /// Joins the background thread, which has ended or soon will.
    fn finish(&mut self) -> Result<(), PublishError> {
        let job = match std::mem::replace(&mut self.state, State::Closed) {
            State::Background(job) => job,
            other => {
                self.state = other;
                return Ok(());
            }
        };
        let Some(delta) = &mut self.delta else { return Ok(()) };
        let (writer, result) = delta.end(job);
        if let Some(writer) = writer {
            self.state = State::Idle(writer);
        }
        result
    }

    /// Goes on with a job. A thread that could not be started takes the writer with it, and another one is as good.
    fn run(&mut self, job: Result<Job, PublishError>) -> Result<(), PublishError> {
        match job {
            Ok(job) => {
                self.state = State::Background(job);
                Ok(())
            }
            Err(e) => {
                self.state = State::Idle(self.region.writer(self.rank)?);
                Err(e)
            }
        }
    }

    fn take(&mut self, what: &'static str) -> Result<Writer, PublishError> {
        match std::mem::replace(&mut self.state, State::Closed) {
            State::Idle(writer) => Ok(writer),
            other => {
                self.state = other;
                Err(self.turn(what))
            }
        }
    }

    fn turn(&self, what: &'static str) -> PublishError {
        let why = match &self.state {
            State::Idle(_) if self.delta.is_none() && what.ends_with("delta") => {
                "it publishes by copies only"
            }
            state => state.describe(),
        };
        PublishError::Turn { rank: self.rank, what, why }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "the last version of a rank that ends was not published");
        }
    }
}

/// Waits until `version` of a region is sealed, and returns its digest.
pub fn wait_sealed(region: &Region, version: Version, stop: &Stop) -> Result<StateDigest, PublishError> {
    loop {
        let bell = region.bell();
        let state = region.state();
        let slots = [state.active, state.inactive];
        let mut sealed = slots.into_iter().flatten().filter(|s| s.version == version);
        if let Some(digest) = sealed.find_map(|s| s.sealed) {
            return Ok(digest);
        }
        if let Some(newest) = state.active.map(|s| s.version).filter(|newest| *newest > version) {
            return Err(PublishError::Replaced { version, newest });
        }
        stop.check().map_err(|source| PublishError::Unsealed { version, source })?;
        region.wait(bell, stop.nap());
    }
}
