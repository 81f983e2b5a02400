//! A rank that publishes by delta where it can.

use std::fmt;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use windlass_core::delta::DeltaHeader;
use windlass_core::delta::early::Roster;
use windlass_core::digest::SumTable;
use windlass_core::identity::{StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;

use super::apply::{Lag, Work};
use super::folder::{self, Folder, Part};
use super::{EarlyError, Records, RecordsFault};
use crate::container::{self, WriteFault};
use crate::region::{Attempt, Committed, OwnedAttempt, Region, Writer, step};
use crate::seal::draft::Draft;
use crate::seal::{self, Names};
use crate::shm::{Access, Mapping};
use crate::stop::{Stop, lap};
use crate::work::{self, step_back};

/// More than any header of a delta has.
const FRONT: u64 = 4096;

/// Deltas of so many bytes have a file ready: smaller ones are written at once, and larger ones take up too much.
const SPARE: Range<u64> = 4 << 20..1 << 30;
/// How many bytes of a delta engines are given a second to fetch, before the slot is written: both want the memory's bandwidth,
/// and nobody waits for the slot.
const FETCHED_PER_SECOND: u64 = 1 << 30;
/// The longest that they are given.
const REST: Duration = Duration::from_millis(200);

/// What a rank answers for, and how it works.
#[derive(Clone, Debug)]
pub struct RankSpec {
    /// Its blocks: all of what it writes, whole blocks, and no other rank's.
    pub blocks: BlockRanges,
    /// Threads of the background work.
    pub threads: usize,
}

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

/// Whoever knows what changed in a rank's blocks since the base.
pub trait DeltaSource: Send {
    /// The records of the change. Called once, in the background.
    fn records(self: Box<Self>, base: Base<'_>, stop: &Stop) -> Result<Records, EarlyError>;
}

/// Records that an encoder has made already.
impl DeltaSource for Records {
    fn records(self: Box<Self>, _: Base<'_>, _: &Stop) -> Result<Records, EarlyError> {
        Ok(*self)
    }
}

/// What a slot holds of this rank's blocks.
#[derive(Clone, Debug)]
struct Known {
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

/// A version that this rank has handed out, and what its blocks must be if it is written again.
#[derive(Clone, Copy, Debug)]
struct Taken {
    version: Version,
    digest: Option<StateDigest>,
}

/// What is left when background work is over.
struct Outcome {
    writer: Writer,
    memory: Result<Memory, EarlyError>,
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

struct Job {
    version: Version,
    /// What it is for.
    aim: Aim,
    stop: Stop,
    hurry: Arc<Hurry>,
    /// Carries nothing; it closes when the work is over.
    over: Receiver<()>,
    thread: JoinHandle<Outcome>,
}

/// Whether somebody waits for background work, which then does not rest.
#[derive(Debug, Default)]
struct Hurry {
    is_wanted: Mutex<bool>,
    changed: Condvar,
}

impl Hurry {
    fn now(&self) {
        *self.is_wanted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Returns after `time`, or at once when somebody waits.
    fn rest(&self, time: Duration) {
        let wanted = self.is_wanted.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(wanted, time, |wanted| !*wanted));
    }
}

enum Seat {
    Idle(Writer),
    Busy(Job),
    /// The writer is part of a copy.
    Lent,
    Closed,
}

/// One rank of a region, which publishes by delta where it can. Dropping it ends the background work and gives the rank
/// back.
pub struct Rank {
    region: Arc<Region>,
    number: u16,
    roster: Arc<Roster>,
    folder: Folder,
    threads: usize,
    seat: Seat,
    memory: Memory,
    /// Why there is nothing to start from.
    why: String,
    taken: Option<Taken>,
    /// The version that was published last by a copy.
    copied: Option<Version>,
    spare: Arc<Mutex<Option<Spare>>>,
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank")
            .field("rank", &self.number)
            .field("region", &self.region.dir())
            .finish_non_exhaustive()
    }
}

impl Rank {
    /// Takes over a rank's place: says which blocks it answers for, and removes what a predecessor left.
    pub fn new(writer: Writer, spec: RankSpec) -> Result<Rank, Box<(Writer, EarlyError)>> {
        match Rank::prepare(&writer, &spec) {
            Ok((roster, folder, taken)) => Ok(Rank {
                region: Arc::clone(writer.region()),
                number: writer.rank(),
                roster: Arc::new(roster),
                folder,
                threads: spec.threads.max(1),
                seat: Seat::Idle(writer),
                memory: Memory::default(),
                why: "nothing was published by this process yet".into(),
                taken,
                copied: None,
                spare: Arc::default(),
            }),
            Err(e) => Err(Box::new((writer, e))),
        }
    }

    fn prepare(writer: &Writer, spec: &RankSpec) -> Result<(Roster, Folder, Option<Taken>), EarlyError> {
        let (region, rank) = (writer.region(), writer.rank());
        let manifest = region.manifest();
        if region.slot_count() != 2 {
            return Err(EarlyError::Slots { rank, slots: region.slot_count() });
        }
        let roster = Roster {
            rank,
            ranks: region.ranks(),
            incarnation: region.incarnation(),
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
            blocks: spec.blocks.clone(),
        };
        roster
            .check(manifest, region.incarnation(), region.ranks())
            .map_err(|source| EarlyError::Blocks { rank, source })?;
        if let Some(block) = region.part().and_then(|held| spec.blocks.difference(held).first()) {
            return Err(EarlyError::NotHeld { rank, block });
        }
        let folder = Folder::new(region.parts_dir());
        let io = |action, path| move |source| EarlyError::Io { action, path, source };
        folder.make().map_err(io("make", region.parts_dir()))?;
        let taken = left_behind(region, &folder, &roster);
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
        Ok((roster, folder, taken))
    }

    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Which rank it is.
    pub fn rank(&self) -> u16 {
        self.number
    }

    /// The blocks that it answers for.
    pub fn blocks(&self) -> &BlockRanges {
        &self.roster.blocks
    }

    /// Whether background work is under way.
    pub fn is_busy(&self) -> bool {
        matches!(&self.seat, Seat::Busy(job) if !job.thread.is_finished())
    }

    /// The newest version that this rank has begun to publish: its number cannot be given to other bytes.
    pub fn newest(&self) -> Option<Version> {
        let committed = self.region.state().active.map(|s| s.version);
        self.taken.map(|t| t.version).max(committed)
    }

    /// How `version` can be published. Waits for the version before, and gives its error.
    pub fn way(&mut self, version: Version, stop: &Stop) -> Result<Way, EarlyError> {
        self.settle(stop)?;
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

    /// Publishes `version` by what `source` knows: returns at once, and works in the background until it is committed or
    /// `timeout` has passed. [`Rank::way`] must have said that it can.
    pub fn publish(
        &mut self,
        version: Version,
        source: Box<dyn DeltaSource>,
        timeout: Duration,
    ) -> Result<(), EarlyError> {
        let rank = self.number;
        let needs = |why: &str| EarlyError::NeedsCopy { rank, version, why: why.to_owned() };
        let newest = self.memory.newest.clone().ok_or_else(|| needs(&self.why))?;
        if version <= newest.version {
            return Err(crate::region::RegionError::VersionOrder { version, current: newest.version }.into());
        }
        let writer = self.take("publish a delta")?;
        let memory = std::mem::take(&mut self.memory);
        self.why = format!("version {version} is being published");
        let aim = Aim::Delta(self.taken.replace(Taken { version, digest: None }));
        self.collect(version);
        let run = Run {
            region: Arc::clone(&self.region),
            rank,
            roster: Arc::clone(&self.roster),
            folder: self.folder.clone(),
            threads: self.threads,
            version,
            spare: Arc::clone(&self.spare),
            hurry: Arc::default(),
        };
        let hurry = Arc::clone(&run.hurry);
        self.spawn(version, aim, timeout, hurry, writer, move |writer, stop, handed_out| {
            run.delta(writer, newest, memory.older, source, handed_out, stop)
        })
    }

    /// Begins to write `version` by a copy, together with all other ranks.
    pub fn begin(&mut self, version: Version, stop: &Stop) -> Result<OwnedAttempt, EarlyError> {
        self.settle(stop)?;
        self.allow(version)?;
        let writer = self.take("begin a copy")?;
        // From here on the slot may hold anything.
        self.memory = Memory::default();
        self.why = format!("version {version} was begun as a copy and not committed");
        match writer.into_attempt(version, stop) {
            Ok(attempt) => {
                self.seat = Seat::Lent;
                Ok(attempt)
            }
            Err(back) => {
                let (writer, e) = *back;
                self.seat = Seat::Idle(writer);
                Err(e.into())
            }
        }
    }

    /// Commits a copy. The sums of this rank's blocks may be given by who knows them (those of other blocks zero);
    /// otherwise they are made in the background.
    pub fn commit(
        &mut self,
        attempt: OwnedAttempt,
        sums: Option<SumTable>,
        stop: &Stop,
    ) -> Result<Committed, EarlyError> {
        if let Err(e) = self.confirm(&attempt, stop) {
            self.seat = Seat::Idle(attempt.abort());
            return Err(e);
        }
        let (writer, result) = attempt.done(stop);
        let committed = match result {
            Ok(committed) => committed,
            Err(e) => {
                self.seat = Seat::Idle(writer);
                return Err(e.into());
            }
        };
        let Committed { id, version, slot } = committed;
        self.copied = Some(version);
        if self.spare.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            let bytes = self.region.manifest().bytes_of(&self.roster.blocks) / container::LIKELY;
            make_spare(&self.spare, &self.folder, self.number, bytes);
        }
        let known = move |sums| {
            let newest = Some(Known { version, id, slot, sums: Arc::new(sums) });
            Memory { newest, older: None }
        };
        match sums {
            Some(sums) => {
                self.memory = known(sums);
                self.seat = Seat::Idle(writer);
            }
            None => {
                let (region, roster, threads) =
                    (Arc::clone(&self.region), Arc::clone(&self.roster), self.threads);
                // The version is there whether or not its sums can be made.
                self.spawn(version, Aim::Sums, Duration::MAX, Arc::default(), writer, move |_, stop, _| {
                    let data = region.slot_data(slot);
                    let kernels = crate::simd::kernels();
                    let sums = seal::sums(kernels, region.manifest(), &roster.blocks, data, threads, stop)?;
                    Ok(known(sums))
                })?;
            }
        }
        Ok(committed)
    }

    /// Gives a copy up.
    pub fn abort(&mut self, attempt: OwnedAttempt) {
        self.seat = Seat::Idle(attempt.abort());
    }

    /// Whether a version may be published at all: its number was not handed out for other bytes.
    pub fn allow(&self, version: Version) -> Result<(), EarlyError> {
        match self.taken {
            Some(Taken { version: taken, digest })
                if version < taken || version == taken && digest.is_none() =>
            {
                Err(EarlyError::Taken { rank: self.number, version, taken })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Whether what was written is what was handed out under the same number, if anything was.
    pub fn confirm(&self, attempt: &Attempt<'_>, stop: &Stop) -> Result<(), EarlyError> {
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
            Err(EarlyError::Taken { rank: self.number, version, taken: version })
        }
    }

    /// Waits for the background work of the version before, and gives its error.
    pub fn settle(&mut self, stop: &Stop) -> Result<(), EarlyError> {
        let Seat::Busy(job) = &self.seat else { return Ok(()) };
        job.hurry.now();
        while job.over.recv_timeout(stop.nap()) == Err(RecvTimeoutError::Timeout) {
            stop.check()?;
        }
        self.finish()
    }

    /// Ends the background work, and gives the rank back.
    pub fn close(&mut self) -> Result<(), EarlyError> {
        if let Seat::Busy(job) = &self.seat {
            job.stop.set();
            job.hurry.now();
        }
        let result = self.finish();
        self.seat = Seat::Closed;
        self.memory = Memory::default();
        result
    }

    /// Joins the thread, which is over or will be soon.
    fn finish(&mut self) -> Result<(), EarlyError> {
        let job = match std::mem::replace(&mut self.seat, Seat::Closed) {
            Seat::Busy(job) => job,
            other => {
                self.seat = other;
                return Ok(());
            }
        };
        let (rank, version) = (self.number, job.version);
        let Ok(outcome) = job.thread.join() else {
            self.why = "the background thread panicked".into();
            return Err(EarlyError::Panicked { rank, version });
        };
        self.seat = Seat::Idle(outcome.writer);
        if let Aim::Delta(before) = job.aim {
            // A number that was not handed out can be given to anything.
            let now = outcome.handed_out.map(|digest| Taken { version, digest: Some(digest) });
            self.taken = now.or(before);
        }
        match (outcome.memory, job.aim) {
            (Ok(memory), _) => {
                self.memory = memory;
                Ok(())
            }
            (Err(e), Aim::Delta(_)) => {
                self.why = format!("version {version} was not committed ({e})");
                Err(EarlyError::Background { rank, version, source: Box::new(e) })
            }
            (Err(e), Aim::Sums) => {
                // The copy was committed; only the next version cannot be a delta.
                self.why = format!("the sums of version {version} could not be made ({e})");
                tracing::warn!(version, error = %e, "the next version has to be a copy");
                Ok(())
            }
        }
    }

    fn take(&mut self, what: &'static str) -> Result<Writer, EarlyError> {
        let why = match std::mem::replace(&mut self.seat, Seat::Closed) {
            Seat::Idle(writer) => return Ok(writer),
            other => {
                let why = match &other {
                    Seat::Busy(_) => "the version before is still under way",
                    Seat::Lent => "a copy is being written",
                    Seat::Idle(_) | Seat::Closed => "it is closed",
                };
                self.seat = other;
                why
            }
        };
        Err(EarlyError::Turn { rank: self.number, what, why })
    }

    /// Runs work in the background. `work` may note where the rank's delta leads once that is in its place.
    fn spawn(
        &mut self,
        version: Version,
        aim: Aim,
        timeout: Duration,
        hurry: Arc<Hurry>,
        writer: Writer,
        work: impl FnOnce(&mut Writer, &Stop, &mut Option<StateDigest>) -> Result<Memory, EarlyError>
        + Send
        + 'static,
    ) -> Result<(), EarlyError> {
        let stop = Stop::never().with_timeout(timeout);
        let (ended, over) = channel::<()>();
        let theirs = stop.clone();
        // If no thread can be had, the writer is lost with the closure; another one is as good.
        let (region, rank) = (Arc::clone(&self.region), self.number);
        let thread = std::thread::Builder::new().name(format!("windlass-rank-{rank}")).spawn(move || {
            let mut writer = writer;
            let mut handed_out = None;
            let memory = work(&mut writer, &theirs, &mut handed_out);
            drop(ended);
            Outcome { writer, memory, handed_out }
        });
        match thread {
            Ok(thread) => {
                self.seat = Seat::Busy(Job { version, aim, stop, hurry, over, thread });
                Ok(())
            }
            Err(source) => {
                self.seat = Seat::Idle(region.writer(rank)?);
                Err(EarlyError::Exhausted { what: "a thread for the background work", source })
            }
        }
    }

    /// Removes own deltas that nobody needs any more.
    fn collect(&self, next: Version) {
        let state = self.region.state();
        let sealed = [state.active, state.inactive].into_iter().flatten().filter(|s| s.sealed.is_some());
        let sealed = sealed.map(|s| s.version).max();
        let before = state.active.map(|s| s.version);
        self.folder.remove(|part, _| match part {
            // The one before may not be sealed yet; what is older can no longer be sealed at all.
            Part::Delta { version, rank } => {
                rank == self.number && version < next && (Some(version) <= sealed || Some(version) < before)
            }
            Part::Roster { .. } | Part::Doubt { .. } => false,
        });
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "the last version of a rank that ends");
        }
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

/// The background work of one version.
struct Run {
    region: Arc<Region>,
    rank: u16,
    roster: Arc<Roster>,
    folder: Folder,
    threads: usize,
    version: Version,
    spare: Arc<Mutex<Option<Spare>>>,
    hurry: Arc<Hurry>,
}

/// A file for the next delta, reserved and mapped while nobody waits: that takes as long as filling it.
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
        Ok(spare) => *kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(spare),
        Err(error) => tracing::debug!(%error, "no file is kept ready for the next delta"),
    }
}

impl Run {
    fn delta(
        self,
        writer: &mut Writer,
        newest: Known,
        older: Option<(Known, Arc<Records>)>,
        source: Box<dyn DeltaSource>,
        handed_out: &mut Option<StateDigest>,
        stop: &Stop,
    ) -> Result<Memory, EarlyError> {
        let mut begun = Instant::now();
        let (rank, version, manifest) = (self.rank, self.version, self.region.manifest());
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
        self.hand_out(&newest, digest, &records, handed_out, stop);
        let part_ms = lap(&mut begun);
        if handed_out.is_some() {
            self.hurry.rest(rest(records.bytes()));
        }
        let rest_ms = lap(&mut begun);
        // Engines wait for what was handed out, and nobody waits for the slot.
        step_back();
        let attempt = writer.begin(version, stop)?;
        // Nobody but this rank writes its blocks, so they are as it left them, also if others have begun and given up.
        let older = older.filter(|(known, _)| known.slot == attempt.slot());
        let work = Work {
            region: &self.region,
            rank,
            blocks: &self.roster.blocks,
            lag: older.as_ref().map_or(Lag::Unknown, |(known, last)| Lag::Known(&known.sums, last)),
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
        Ok(Memory { newest: Some(known), older: Some((newest, records)) })
    }

    /// The sums after the records.
    fn next_sums(&self, base: &SumTable, records: &Records) -> Result<SumTable, EarlyError> {
        let (mut sums, mut tensor) = (base.clone(), 0);
        sums.set_all(records.entries().iter().map(|e| {
            let block = e.block;
            if !self.roster.blocks.contains(block) {
                let source = RecordsFault::NotOwn { block };
                return Err(EarlyError::Records { rank: self.rank, version: self.version, source });
            }
            tensor = self.region.manifest().cuts().tensor_of(block, tensor)?;
            Ok((block, tensor, e.sum))
        }))?;
        Ok(sums)
    }

    /// Puts the delta in its place and wakes the agent. Whatever fails here costs only time.
    fn hand_out(
        &self,
        newest: &Known,
        digest: StateDigest,
        records: &Records,
        handed_out: &mut Option<StateDigest>,
        stop: &Stop,
    ) {
        let (region, rank, version) = (&self.region, self.rank, self.version);
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
            let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (draft, memory) = match spare {
                Some(Spare { draft, memory }) => (draft.again(&path)?, Some(memory)),
                None => (Draft::create(&path)?, None),
            };
            let counts = (entries.len(), records.changes());
            container::write(draft.file(), &header, counts, record, self.threads, memory.as_ref(), stop)
                .map_err(WriteFault::into_io)?;
            step("part-drafted");
            // From here on somebody may have it.
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
