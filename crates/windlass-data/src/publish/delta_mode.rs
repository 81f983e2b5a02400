//! What a rank in delta mode knows of the slots, and the background work of each version.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::fs::{FallocateFlags, fallocate};
use windlass_core::delta::DeltaHeader;
use windlass_core::delta_mode::Roster;
use windlass_core::digest::SumTable;
use windlass_core::identity::{StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;

use super::apply::{Lag, Work};
use super::folder::{self, Folder, Part};
use super::{PublishError, Records, RecordsFault};
use crate::container::{self, WriteFault};
use crate::region::{Attempt, Committed, Region, Writer, step};
use crate::seal::draft::Draft;
use crate::seal::{self, Names};
use crate::shm::{Access, Mapping};
use crate::stop::{Stop, lap};
use crate::work::{self, step_back};

/// More than any header of a delta has.
const FRONT: u64 = 4096;

/// Deltas of so many bytes have a file ready: smaller ones are written at once, and larger ones take up too much.
const SPARE: Range<u64> = 4 << 20..1 << 30;
/// Grace period before the slot is written, at 1 GiB of delta per second: engines fetch first because only they are waiting.
const FETCHED_PER_SECOND: u64 = 1 << 30;
/// The longest grace period.
const REST: Duration = Duration::from_millis(200);

/// How a version can be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// By the records from this version on.
    Delta { base: Version },
    /// Only by a copy.
    Copy { why: String },
}

/// What an encoder compares with.
#[derive(Clone, Copy)]
pub struct Base<'a> {
    /// The layout and cuts.
    pub manifest: &'a Manifest,
    pub rank: u16,
    pub blocks: &'a BlockRanges,
    pub version: Version,
    pub data: &'a [u8],
    /// The sums of the rank's blocks.
    pub sums: &'a SumTable,
    /// How many threads may be used.
    pub threads: usize,
}

/// An encoder: finds the change of a rank's blocks since the base.
pub trait DeltaSource: Send {
    /// The records of the change. Called once, in the background.
    fn records(self: Box<Self>, base: Base<'_>, stop: &Stop) -> Result<Records, PublishError>;
}

/// Records that an encoder has made already.
impl DeltaSource for Records {
    fn records(self: Box<Self>, _: Base<'_>, _: &Stop) -> Result<Records, PublishError> {
        Ok(*self)
    }
}

/// What a slot holds of this rank's blocks.
#[derive(Clone, Debug)]
pub(super) struct Known {
    version: Version,
    id: u64,
    slot: usize,
    /// Those of other blocks are zero.
    sums: Arc<SumTable>,
}

/// What a rank knows of the region's slots.
#[derive(Clone, Debug, Default)]
struct Memory {
    newest: Option<Known>,
    /// The other slot, and what leads from there to the newest.
    older: Option<(Known, Arc<Records>)>,
}

impl Memory {
    fn of_copy(Committed { id, version, slot }: Committed, sums: SumTable) -> Memory {
        Memory { newest: Some(Known { version, id, slot, sums: Arc::new(sums) }), older: None }
    }
}

/// A version that this rank has handed out, and what its blocks must be if it is written again.
#[derive(Clone, Copy, Debug)]
struct Taken {
    version: Version,
    digest: Option<StateDigest>,
}

/// What is left when background work is over.
struct Outcome {
    writer: Writer,
    memory: Result<Memory, PublishError>,
    /// Where this rank's delta leads, if it was put in its place.
    handed_out: Option<StateDigest>,
}

/// What background work is for.
#[derive(Clone, Copy)]
enum Aim {
    /// A version by delta; what was handed out before.
    Delta(Option<Taken>),
    /// The sums of a version that was copied and is committed.
    Sums,
}

pub(super) struct Job {
    version: Version,
    aim: Aim,
    stop: Stop,
    hurry: Arc<Hurry>,
    /// Carries nothing; it closes when the work is over.
    over: Mutex<Receiver<()>>,
    thread: JoinHandle<Outcome>,
}

/// Whether a caller waits for background work, which then skips its grace period.
#[derive(Debug, Default)]
struct Hurry {
    is_wanted: Mutex<bool>,
    changed: Condvar,
}

impl Hurry {
    fn now(&self) {
        *self.is_wanted.lock() = true;
        self.changed.notify_all();
    }

    /// Returns after `time`, or at once when a caller waits.
    fn rest(&self, time: Duration) {
        self.changed.wait_while_for(&mut self.is_wanted.lock(), |wanted| !*wanted, time);
    }
}

/// A rank in delta mode.
pub(super) struct DeltaMode {
    region: Arc<Region>,
    rank: u16,
    roster: Arc<Roster>,
    folder: Folder,
    threads: usize,
    memory: Memory,
    /// Why there is nothing to start from.
    why: String,
    taken: Option<Taken>,
    /// The version that was published last by a copy.
    copied: Option<Version>,
    spare: Arc<Mutex<Option<Spare>>>,
}

impl DeltaMode {
    /// Says which blocks the writer's rank answers for, and removes the files that a predecessor left.
    pub(super) fn new(
        writer: &Writer,
        blocks: BlockRanges,
        threads: usize,
    ) -> Result<DeltaMode, PublishError> {
        let (region, rank) = (Arc::clone(writer.region()), writer.rank());
        let manifest = region.manifest();
        if region.slot_count() != 2 {
            return Err(PublishError::Slots { rank, slots: region.slot_count() });
        }
        let roster = Roster {
            rank,
            ranks: region.ranks(),
            incarnation: region.incarnation(),
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
            blocks,
        };
        roster
            .check(manifest, region.incarnation(), region.ranks())
            .map_err(|source| PublishError::Blocks { rank, source })?;
        if let Some(block) = region.part().and_then(|held| roster.blocks.difference(held).first()) {
            return Err(PublishError::NotHeld { rank, block });
        }
        let folder = Folder::new(region.parts_dir());
        let io = |action, path| move |source| PublishError::Io { action, path, source };
        folder.make().map_err(io("make", region.parts_dir()))?;
        let taken = left_behind(&region, &folder, &roster);
        // A draft takes the place of one that a predecessor left, and goes when it is dropped.
        drop(Draft::create(&folder.spare(rank)));
        let committed = region.state().active.map(|s| s.version);
        folder.remove(|part, is_draft| match part {
            Part::Delta { version, rank: of } => of == rank && (is_draft || Some(version) <= committed),
            Part::Roster { rank: of } => of == rank && is_draft,
            Part::Doubt { .. } => false,
        });
        let path = folder.path(Part::Roster { rank });
        folder.put(Part::Roster { rank }, &roster.to_bytes()).map_err(io("write", path))?;
        Ok(DeltaMode {
            region,
            rank,
            roster: Arc::new(roster),
            folder,
            threads: threads.max(1),
            memory: Memory::default(),
            why: "nothing was published by this process yet".into(),
            taken,
            copied: None,
            spare: Arc::default(),
        })
    }

    /// The newest version that was handed out by delta.
    pub(super) fn handed_out(&self) -> Option<Version> {
        self.taken.map(|t| t.version)
    }

    /// How `version` can be published.
    pub(super) fn way(&self, version: Version) -> Result<Way, PublishError> {
        self.allow(version)?;
        let copy = |why: String| Ok(Way::Copy { why });
        let Some(newest) = &self.memory.newest else { return copy(self.why.clone()) };
        let active = self.region.state().active;
        if active.map(|s| s.id) != Some(newest.id) {
            let active = active.map_or_else(|| "nothing".into(), |s| format!("version {}", s.version));
            return copy(format!("{active} is the newest and not version {} of this rank", newest.version));
        }
        if let Some(doubt) = self.folder.doubt().filter(|&d| self.copied.is_none_or(|copied| copied <= d)) {
            return copy(format!("the agent doubts version {doubt}: {}", self.folder.why(doubt)));
        }
        Ok(Way::Delta { base: newest.version })
    }

    /// An error if the number of this version was handed out for other bytes.
    pub(super) fn allow(&self, version: Version) -> Result<(), PublishError> {
        match self.taken {
            Some(Taken { version: taken, digest })
                if version < taken || version == taken && digest.is_none() =>
            {
                Err(PublishError::Taken { rank: self.rank, version, taken })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// An error if other bytes were handed out under the number of the version that was written.
    pub(super) fn confirm(&self, attempt: &Attempt<'_>, stop: &Stop) -> Result<(), PublishError> {
        let version = attempt.version();
        let Some(Taken { digest: Some(digest), .. }) = self.taken.filter(|t| t.version == version) else {
            return Ok(());
        };
        let (manifest, kernels) = (self.region.manifest(), crate::simd::kernels());
        let data = self.region.slot_data(attempt.slot());
        let sums = seal::sums(kernels, manifest, &self.roster.blocks, data, self.threads, stop)?;
        if sums.digest(manifest) == digest {
            Ok(())
        } else {
            Err(PublishError::Taken { rank: self.rank, version, taken: version })
        }
    }

    /// A copy of `version` begins: from here on the slot may hold anything.
    pub(super) fn forget(&mut self, version: Version) {
        self.memory = Memory::default();
        self.why = format!("version {version} was begun as a copy and not committed");
    }

    /// Notes a copy that was committed. Returns the work that is left if its hashes are not known.
    pub(super) fn committed(&mut self, committed: Committed, sums: Option<SumTable>) -> Option<CopyRun> {
        self.copied = Some(committed.version);
        if self.spare.lock().is_none() {
            let bytes = self.region.manifest().bytes_of(&self.roster.blocks) / container::LIKELY;
            make_spare(&self.spare, &self.folder, self.rank, bytes);
        }
        match sums {
            Some(sums) => {
                self.memory = Memory::of_copy(committed, sums);
                None
            }
            None => {
                let (region, roster) = (Arc::clone(&self.region), Arc::clone(&self.roster));
                Some(CopyRun { region, roster, threads: self.threads, committed })
            }
        }
    }

    /// What `version` can be a delta from.
    pub(super) fn base_of(&self, version: Version) -> Result<Known, PublishError> {
        let Some(newest) = &self.memory.newest else {
            return Err(PublishError::NeedsCopy { rank: self.rank, version, why: self.why.clone() });
        };
        if version <= newest.version {
            return Err(crate::region::RegionError::VersionOrder { version, current: newest.version }.into());
        }
        Ok(newest.clone())
    }

    /// Begins to publish `version` as a delta from `newest`.
    pub(super) fn begin(&mut self, version: Version, newest: Known) -> DeltaRun {
        let older = std::mem::take(&mut self.memory).older;
        self.why = format!("version {version} is being published");
        let before = self.taken.replace(Taken { version, digest: None });
        self.collect(version);
        DeltaRun {
            region: Arc::clone(&self.region),
            rank: self.rank,
            roster: Arc::clone(&self.roster),
            folder: self.folder.clone(),
            threads: self.threads,
            version,
            newest,
            older,
            before,
            spare: Arc::clone(&self.spare),
            hurry: Arc::default(),
        }
    }

    /// Joins the thread of a job and notes what it left. The writer is lost if the thread panicked.
    pub(super) fn end(&mut self, job: Job) -> (Option<Writer>, Result<(), PublishError>) {
        let (rank, version) = (self.rank, job.version);
        let Ok(outcome) = job.thread.join() else {
            self.why = "the background thread panicked".into();
            return (None, Err(PublishError::Panicked { rank, version }));
        };
        if let Aim::Delta(before) = job.aim {
            // A number that was not handed out can be given to anything.
            let now = outcome.handed_out.map(|digest| Taken { version, digest: Some(digest) });
            self.taken = now.or(before);
        }
        let result = match (outcome.memory, job.aim) {
            (Ok(memory), _) => {
                self.memory = memory;
                Ok(())
            }
            (Err(e), Aim::Delta(_)) => {
                self.why = format!("version {version} was not committed ({e})");
                Err(PublishError::Background { rank, version, source: Box::new(e) })
            }
            (Err(e), Aim::Sums) => {
                // The copy was committed; only the next version cannot be a delta.
                self.why = format!("the hashes of version {version} could not be computed ({e})");
                tracing::warn!(version, error = %e, "the next version has to be a copy");
                Ok(())
            }
        };
        (Some(outcome.writer), result)
    }

    /// Removes own deltas that no agent needs any more.
    fn collect(&self, next: Version) {
        let state = self.region.state();
        let sealed = [state.active, state.inactive].into_iter().flatten().filter(|s| s.sealed.is_some());
        let sealed = sealed.map(|s| s.version).max();
        let before = state.active.map(|s| s.version);
        self.folder.remove(|part, _| match part {
            // The one before may not be sealed yet; what is older can no longer be sealed at all.
            Part::Delta { version, rank } => {
                rank == self.rank && version < next && (Some(version) <= sealed || Some(version) < before)
            }
            Part::Roster { .. } | Part::Doubt { .. } => false,
        });
    }
}

impl Job {
    /// Hands out a delta and brings the slot to it, for at most `timeout`.
    pub(super) fn delta(
        run: DeltaRun,
        source: Box<dyn DeltaSource>,
        timeout: Duration,
        writer: Writer,
    ) -> Result<Job, PublishError> {
        let (version, aim, hurry) = (run.version, Aim::Delta(run.before), Arc::clone(&run.hurry));
        Job::spawn(version, aim, timeout, hurry, writer, move |writer, stop, handed_out| {
            run.run(writer, source, handed_out, stop)
        })
    }

    /// Computes the hashes of a copy, which is committed whether or not that succeeds.
    pub(super) fn sums(run: CopyRun, writer: Writer) -> Result<Job, PublishError> {
        let version = run.committed.version;
        Job::spawn(version, Aim::Sums, Duration::MAX, Arc::default(), writer, move |_, stop, _| run.run(stop))
    }

    /// `work` may note where the rank's delta leads once that is in its place.
    fn spawn(
        version: Version,
        aim: Aim,
        timeout: Duration,
        hurry: Arc<Hurry>,
        mut writer: Writer,
        work: impl FnOnce(&mut Writer, &Stop, &mut Option<StateDigest>) -> Result<Memory, PublishError>
        + Send
        + 'static,
    ) -> Result<Job, PublishError> {
        let stop = Stop::never().with_timeout(timeout);
        let (ended, over) = channel::<()>();
        let theirs = stop.clone();
        let name = format!("windlass-rank-{}", writer.rank());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let mut handed_out = None;
            let memory = work(&mut writer, &theirs, &mut handed_out);
            drop(ended);
            Outcome { writer, memory, handed_out }
        });
        let what = "a thread for the background work";
        let thread = thread.map_err(|source| PublishError::Exhausted { what, source })?;
        Ok(Job { version, aim, stop, hurry, over: Mutex::new(over), thread })
    }

    /// Waits until the work is over, which no longer rests.
    pub(super) fn wait(&self, stop: &Stop) -> Result<(), PublishError> {
        self.hurry.now();
        let over = self.over.lock();
        while over.recv_timeout(stop.nap()) == Err(RecvTimeoutError::Timeout) {
            stop.check()?;
        }
        Ok(())
    }

    /// Tells the work to stop.
    pub(super) fn cancel(&self) {
        self.stop.set();
        self.hurry.now();
    }
}

/// The background work after a copy.
pub(super) struct CopyRun {
    region: Arc<Region>,
    roster: Arc<Roster>,
    threads: usize,
    committed: Committed,
}

impl CopyRun {
    fn run(self, stop: &Stop) -> Result<Memory, PublishError> {
        let CopyRun { region, roster, threads, committed } = self;
        let data = region.slot_data(committed.slot);
        let kernels = crate::simd::kernels();
        let sums = seal::sums(kernels, region.manifest(), &roster.blocks, data, threads, stop)?;
        Ok(Memory::of_copy(committed, sums))
    }
}

/// The newest version that a predecessor has handed out and that was not committed.
fn left_behind(region: &Region, folder: &Folder, roster: &Roster) -> Option<Taken> {
    let committed = region.state().active.map(|s| s.version);
    let of = roster.rank;
    let versions = folder.list().into_iter().filter_map(|part| match part {
        Part::Delta { version, rank } if rank == of && Some(version) > committed => Some(version),
        Part::Delta { .. } | Part::Roster { .. } | Part::Doubt { .. } => None,
    });
    let version = versions.max()?;
    // What it leads to can be compared only if it was for the same blocks.
    let same = matches!(folder.roster(of), Ok(Some(Ok(theirs))) if theirs == *roster);
    let header = folder::open(&folder.path(Part::Delta { version, rank: of })).ok().and_then(|file| {
        let mut front = Vec::new();
        file.take(FRONT).read_to_end(&mut front).ok()?;
        DeltaHeader::parse(&front).ok()
    });
    let digest = header.filter(|_| same).map(|(header, _)| header.target_digest);
    Some(Taken { version, digest })
}

/// How long engines are given to fetch a delta before its slot is written.
fn rest(bytes: u64) -> Duration {
    if bytes < SPARE.start {
        return Duration::ZERO;
    }
    Duration::from_secs_f64(bytes as f64 / FETCHED_PER_SECOND as f64).min(REST)
}

/// The background work of a version by delta.
pub(super) struct DeltaRun {
    region: Arc<Region>,
    rank: u16,
    roster: Arc<Roster>,
    folder: Folder,
    threads: usize,
    version: Version,
    newest: Known,
    /// The other slot, and what leads from there to the newest.
    older: Option<(Known, Arc<Records>)>,
    /// What was handed out before.
    before: Option<Taken>,
    spare: Arc<Mutex<Option<Spare>>>,
    hurry: Arc<Hurry>,
}

/// A file for the next delta, reserved and mapped in advance: that takes as long as filling it.
struct Spare {
    draft: Draft,
    memory: Mapping,
}

impl Spare {
    fn new(folder: &Folder, rank: u16, bytes: u64) -> io::Result<Spare> {
        let draft = Draft::create(&folder.spare(rank))?;
        fallocate(draft.file(), FallocateFlags::empty(), 0, bytes)?;
        let memory = Mapping::map(draft.file(), bytes, Access::Write)?;
        // The first store to a page is what takes long.
        let page = rustix::param::page_size();
        (0..bytes).step_by(page).for_each(|at| memory.copy_in(at, &[0]));
        Ok(Spare { draft, memory })
    }
}

/// Gets ready for a delta of up to so many bytes. Without, it takes a little longer.
fn make_spare(kept: &Mutex<Option<Spare>>, folder: &Folder, rank: u16, bytes: u64) {
    if !SPARE.contains(&bytes) {
        return;
    }
    match Spare::new(folder, rank, bytes) {
        Ok(spare) => *kept.lock() = Some(spare),
        Err(error) => tracing::debug!(%error, "no file is kept ready for the next delta"),
    }
}

impl DeltaRun {
    fn run(
        self,
        writer: &mut Writer,
        source: Box<dyn DeltaSource>,
        handed_out: &mut Option<StateDigest>,
        stop: &Stop,
    ) -> Result<Memory, PublishError> {
        let mut begun = Instant::now();
        let (rank, version, manifest, newest) =
            (self.rank, self.version, self.region.manifest(), &self.newest);
        let data = self.region.slot_data(newest.slot);
        let records = source.records(
            Base {
                manifest,
                rank,
                blocks: &self.roster.blocks,
                version: newest.version,
                data,
                sums: &newest.sums,
                threads: self.threads,
            },
            stop,
        )?;
        let sums = self.next_sums(&newest.sums, &records)?;
        let records = Arc::new(records);
        let encode_ms = lap(&mut begun);
        let digest = sums.digest(manifest);
        self.hand_out(digest, &records, handed_out, stop);
        let part_ms = lap(&mut begun);
        if handed_out.is_some() {
            self.hurry.rest(rest(records.bytes()));
        }
        let rest_ms = lap(&mut begun);
        // Engines wait for the delta; no process waits for the slot.
        step_back();
        let attempt = writer.begin(version, stop)?;
        // Only this rank writes its blocks, so they are as it left them, even if other ranks have begun and given up.
        let older = self.older.as_ref().filter(|(known, _)| known.slot == attempt.slot());
        let work = Work {
            region: &self.region,
            rank,
            blocks: &self.roster.blocks,
            lag: older.map_or(Lag::Unknown, |(known, last)| Lag::Known(&known.sums, last)),
            base: (data, &newest.sums),
            version,
            records: &records,
            threads: work::fewer(self.threads),
        };
        let wait_ms = lap(&mut begun);
        let done = work.run(&attempt, stop)?;
        let apply_ms = lap(&mut begun);
        let Committed { id, slot, .. } = attempt.done(stop)?;
        tracing::debug!(
            rank,
            version,
            ?done,
            encode_ms,
            part_ms,
            rest_ms,
            wait_ms,
            apply_ms,
            commit_ms = lap(&mut begun),
            "a version was committed by records"
        );
        if handed_out.is_some() {
            let bytes = records.bytes() + records.entries().len() as u64 * 24;
            make_spare(&self.spare, &self.folder, rank, bytes + bytes / 4);
        }
        let known = Known { version, id, slot, sums: Arc::new(sums) };
        Ok(Memory { newest: Some(known), older: Some((self.newest, records)) })
    }

    /// The sums after the records.
    fn next_sums(&self, base: &SumTable, records: &Records) -> Result<SumTable, PublishError> {
        let (mut sums, mut tensor) = (base.clone(), 0);
        sums.set_all(records.entries().iter().map(|e| {
            let block = e.block;
            if !self.roster.blocks.contains(block) {
                let source = RecordsFault::NotOwn { block };
                return Err(PublishError::Records { rank: self.rank, version: self.version, source });
            }
            tensor = self.region.manifest().cuts().tensor_of(block, tensor)?;
            Ok((block, tensor, e.sum))
        }))?;
        Ok(sums)
    }

    /// Puts the delta in its place and wakes the agent. A failure here costs only time.
    fn hand_out(
        &self,
        digest: StateDigest,
        records: &Records,
        handed_out: &mut Option<StateDigest>,
        stop: &Stop,
    ) {
        let (region, rank, version, newest) = (&self.region, self.rank, self.version, &self.newest);
        if region.part().is_some() {
            return;
        }
        let own = region.manifest().bytes_of(&self.roster.blocks);
        if records.bytes() > own / 2 {
            tracing::debug!(version, bytes = records.bytes(), own, "too much changed for a delta");
            return;
        }
        let manifest = region.manifest();
        let names = Names {
            model_id: region.model_id().clone(),
            incarnation: region.incarnation(),
            base: newest.version,
            target: version,
        };
        let header = names.header(manifest, newest.sums.digest(manifest), digest);
        let path = self.folder.path(Part::Delta { version, rank });
        let entries = records.entries();
        let record = |i: usize| records.record(&entries[i]);
        let mut write = || {
            step("part");
            let spare = self.spare.lock().take();
            let (draft, memory) = match spare {
                Some(Spare { draft, memory }) => (draft.again(&path)?, Some(memory)),
                None => (Draft::create(&path)?, None),
            };
            let counts = (entries.len(), records.changes());
            container::write(draft.file(), &header, counts, record, self.threads, memory.as_ref(), stop)
                .map_err(WriteFault::into_io)?;
            step("part-drafted");
            // From here on an engine may have it.
            *handed_out = Some(digest);
            draft.place()
        };
        match write() {
            Ok(()) => {
                region.ring();
                step("part-placed");
            }
            Err(error) => {
                tracing::warn!(version, rank, %error, "the delta is not handed out; receivers wait for the slot");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn background_work_that_rests_goes_on_when_somebody_waits() {
        let hour = Duration::from_secs(3600);
        let hurry = Hurry::default();
        std::thread::scope(|scope| {
            let resting = scope.spawn(|| hurry.rest(hour));
            hurry.now();
            resting.join().unwrap();
        });
        // Also if they came first.
        hurry.rest(hour);
    }

    #[test]
    fn engines_are_given_time_for_a_large_delta_and_not_for_ever() {
        assert_eq!(rest(1 << 20), Duration::ZERO);
        assert_eq!(rest(128 << 20), Duration::from_millis(125));
        assert_eq!(rest(u64::MAX), REST);
    }
}
