//! A directory of shared memory: images in one or two slots, and the header by which processes take turns.
//!
//! Owns: the files of a region, who may open them, the room they need, and [`Writer`], [`Lease`] and [`AgentSeat`],
//! the three ways to use them. Called by publishers (ranks and the agent) and by receivers, whose image is a
//! region of one slot. Must not: know what moves the bytes, or decide when; the turns themselves are
//! [`crate::flip`]'s.
//!
//! # Files
//!
//! ```text
//! header          512 bytes of facts · the words of the protocol · facts as JSON     read and written by all
//! manifest.json   the tensors                                                         never changes
//! a.safetensors   slot 0: a valid model.safetensors, also while it is mapped
//! b.safetensors   slot 1, if there are two
//! a.sums b.sums   block sums of what is sealed in the slot                            the agent's
//! deltas/ token agent.sock digests.json                                               the agent's
//! wanted          who waits to make the next region here                              see [`Region::is_wanted`]
//! parts/          what ranks bring of a version before its slot is whole              ranks', see [`crate::publish`]
//! ```
//!
//! The directory is 0700 and the files 0600, or 0750 and 0640 for a group; then `header` is 0660, because to read
//! is to take a lease. `header` is renamed into place last: a process that opens it finds a whole region or none. While it is
//! being made or cleared it is `header.tmp`, by which [`sweep`] knows what is left of a creator that died.
//!
//! Every process that has a region open holds a shared `flock` on the directory; the kernel drops it when the
//! process dies. Creating over a region and removing one need the exclusive lock, so nothing alive is ever replaced
//! or removed. The lock travels with [`Region::descriptors`].
//!
//! # Room
//!
//! All room is reserved up front, after enough was found in the filesystem and under the memory limits ([`Shortage`]).
//! Where `region_dir` is too small (64 MiB in many containers) the slots are memfds of the creator, and their names in
//! the directory are links to `/proc/<pid>/fd/<n>`, which open as files do. Such a region ends with its creator.
//! A region that holds only a part of the image reserves only that part; the rest of its slots are holes.
//!
//! # Invariants and their tests
//!
//! - REGION-1 An old version stays readable and whole while a new one is written, whichever process dies or stops, and when:
//!   `a_killed_writer_leaves_the_old_version_whole_at_every_step`, `a_killed_reader_frees_its_slot_at_every_step`,
//!   `a_killed_agent_gives_up_its_seat_and_leases_at_every_step`.
//! - REGION-2 A rank that stalls is named, and cannot write into a later version:
//!   `a_stopped_writer_is_named_and_its_late_bytes_are_never_committed`.
//! - REGION-3 Ranks commit exactly the bytes they wrote: `ranks_in_parallel_commit_exactly_their_bytes`.
//! - REGION-4 A slot is a safetensors file at any time: `slots_open_with_the_safetensors_library_while_mapped`.
//! - REGION-5 Too little room is an error before anything is written: `too_little_room_is_said_before_anything_is_written`,
//!   `a_small_tmpfs_gets_memfd_slots`.
//! - REGION-6 Nothing alive is replaced or removed: `gc_removes_the_dead_and_leaves_the_living`,
//!   `a_live_region_is_not_replaced_and_a_dead_one_is`, `a_region_is_made_anew_once_its_last_user_is_gone`.
//!   A region that its publisher left, dead or alive, is let go of for the next one by an agent that is not the publisher's
//!   own: `an_agent_lets_go_of_a_dead_trainers_region_and_serves_the_next_one`,
//!   `a_living_trainer_makes_its_region_anew_while_an_agent_serves_it`, `only_a_living_creator_wants_what_a_dead_one_left`,
//!   `a_region_without_a_rank_is_left_though_its_creator_lives`.
//! - REGION-7 An agent that is stopped does not hold up writers for long, and cannot seal what they took back:
//!   `a_silent_agent_is_not_waited_for_and_finds_its_seal_broken`.

mod create;
mod error;
mod gc;
mod header;
pub(crate) mod incoming;
mod lease;
pub(crate) mod owner;
mod space;
#[cfg(test)]
pub(crate) mod tests;
mod wanted;
mod writer;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, Mode, OFlags};
use windlass_core::identity::{Incarnation, ModelId, StateDigest, Version};
use windlass_core::manifest::{Manifest, Parts};
use windlass_core::ranges::BlockRanges;

pub use create::{Memfd, RegionSpec, Slots};
pub use error::{Missing, RegionError, Stage};
pub use gc::{Dead, Left, Sweep, is_region, sweep};
pub use incoming::INCOMING;
pub use lease::{AgentSeat, Lease, Seal};
pub use space::{Room, Shortage, memory as memory_room};
pub use writer::{Attempt, Committed, OwnedAttempt, Writer};

pub use crate::flip::{LeaseKind, Phase};

use crate::flip::{BELL, Flip, Snapshot};
use crate::private;
use crate::shm::{Access, Mapping, Prepared, futex_wait, futex_wake_all};
use crate::stop::{Stop, Stopped};
use header::{Facts, PROTOCOL};
use owner::Owner;

/// Names in a region's directory.
const HEADER: &str = "header";
const HEADER_TMP: &str = "header.tmp";
const MANIFEST: &str = "manifest.json";
const SLOT_NAMES: [&str; 2] = ["a.safetensors", "b.safetensors"];
const SUMS_NAMES: [&str; 2] = ["a.sums", "b.sums"];
const DELTAS: &str = "deltas";
const PARTS: &str = "parts";
const TOKEN: &str = "token";
const SOCKET: &str = "agent.sock";
const WANTED: &str = "wanted";

/// How many leases there can be at a time.
const LEASES: usize = 256;

/// An open region.
#[derive(Debug)]
pub struct Region {
    dir: PathBuf,
    /// The directory, with its shared lock.
    lock: File,
    header_file: File,
    manifest_file: File,
    header: Mapping,
    facts: Facts,
    manifest: Arc<Manifest>,
    /// The bytes of the data area that are here, widened to pages.
    held: Vec<Range<u64>>,
    slots: Vec<Slot>,
    me: Owner,
    serial: AtomicU16,
    prepared: Mutex<Option<(Access, Prepared)>>,
}

#[derive(Debug)]
struct Slot {
    file: File,
    read: Mapping,
    /// Only processes that write have it, so that the others cannot by mistake.
    write: OnceLock<Mapping>,
}

impl Slot {
    fn new(file: File, len: u64) -> io::Result<Slot> {
        let read = Mapping::map(&file, len, Access::Read)?;
        Ok(Slot { file, read, write: OnceLock::new() })
    }

    fn view(&self) -> &Mapping {
        self.write.get().unwrap_or(&self.read)
    }
}

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotState {
    pub slot: usize,
    /// The attempt that filled it: names these bytes within the incarnation.
    pub id: u64,
    pub version: Version,
    /// Its digest, once sealed.
    pub sealed: Option<StateDigest>,
}

/// A region at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The current or last attempt; 0 before the first.
    pub attempt: u64,
    /// How far it is.
    pub phase: Phase,
    /// The newest committed version.
    pub active: Option<SlotState>,
    /// What the other slot holds, if it is whole.
    pub inactive: Option<SlotState>,
}

/// The descriptors by which a region is passed to another process, in the order of [`Region::descriptors`].
#[derive(Debug)]
pub struct Descriptors {
    lock: OwnedFd,
    header: OwnedFd,
    manifest: OwnedFd,
    slots: Vec<OwnedFd>,
}

impl Descriptors {
    /// Takes what came over a socket: the directory with its lock, `header`, `manifest.json`, one or two slots.
    pub fn new(fds: Vec<OwnedFd>) -> Result<Descriptors, RegionError> {
        let found = fds.len();
        let mut fds = fds.into_iter();
        match (fds.next(), fds.next(), fds.next(), fds.collect::<Vec<_>>()) {
            (Some(lock), Some(header), Some(manifest), slots) if matches!(slots.len(), 1 | 2) => {
                Ok(Descriptors { lock, header, manifest, slots })
            }
            _ => Err(RegionError::Descriptors { expected: 5, found }),
        }
    }
}

/// The files of a region, before they are believed.
struct Files {
    dir: PathBuf,
    lock: File,
    header: File,
    manifest: File,
    slots: Vec<File>,
}

impl Region {
    /// Makes a region, in place of a dead one if there is any. Keeps it open.
    pub fn create(spec: &RegionSpec) -> Result<Arc<Region>, RegionError> {
        Region::create_when_free(spec, &Stop::after(Duration::ZERO))
    }

    /// The same, and waits until `stop` for those who still have the old one open. After a crash these are the agent
    /// and engines, which notice within a second, and forked children (data loaders), which take a few. An agent that is
    /// not the publisher's own would serve what the publisher left for ever: it is [asked](Region::is_wanted) to let go.
    pub fn create_when_free(spec: &RegionSpec, stop: &Stop) -> Result<Arc<Region>, RegionError> {
        let mut said = false;
        let mut wish = wanted::Wish::new(spec);
        loop {
            match create::create(spec, &create::Limits::default()) {
                Err(RegionError::Live { dir, owners }) if !stop.is_set() => {
                    wish.keep_up();
                    if !std::mem::replace(&mut said, true) {
                        tracing::info!(dir = %dir.display(), ?owners, "waiting for the region to be let go");
                    }
                    std::thread::sleep(stop.nap());
                }
                Err(RegionError::Live { dir, .. }) => {
                    let owners = gc::holders(&dir);
                    return Err(RegionError::Live { dir, owners });
                }
                other => return other,
            }
        }
    }

    /// Whether `dir` holds a region that no process publishes in any more, so that the next publisher takes its place: its creator
    /// is dead, or lives and no rank is taken, because the trainer has ended this incarnation. False where that cannot be told, as
    /// from another PID namespace.
    pub fn is_left(dir: &Path) -> bool {
        let here = pid_namespace().ok();
        gc::facts(dir).is_some_and(|f| {
            Some(f.namespace) == here && (!Owner(f.creator).is_alive() || !gc::has_writers(dir, &f))
        })
    }

    /// Whether `dir` holds a region that its publisher has [left](Region::is_left) and a living process waits to make its own
    /// region there: an agent that serves it should let go of it.
    pub fn is_wanted(dir: &Path) -> bool {
        wanted::is_there(dir) && Region::is_left(dir)
    }

    /// Whether its directory was removed and another region made in its place. Nothing is published in this one any more.
    pub fn is_replaced(&self) -> bool {
        let there =
            std::fs::metadata(self.dir.join(HEADER)).and_then(|m| Ok((m, self.header_file.metadata()?)));
        there.is_ok_and(|(there, ours)| (there.dev(), there.ino()) != (ours.dev(), ours.ino()))
    }

    /// Takes the region's directory out of its place and removes it. Those who have it open keep what they have mapped.
    pub(crate) fn set_aside(&self) -> Result<(), RegionError> {
        let name = self.dir.file_name().unwrap_or_default().to_string_lossy();
        let aside = self.dir.with_file_name(format!(".{name}.old-{}", self.me().0));
        std::fs::rename(&self.dir, &aside).map_err(io_error("rename", &self.dir))?;
        // The place is free. What is left of the old one blocks no process, and a collector finds it.
        if let Err(error) = gc::remove(&aside) {
            tracing::warn!(dir = %aside.display(), %error, "what a new image replaced is not removed");
        }
        Ok(())
    }

    /// Opens a region.
    pub fn open(dir: &Path) -> Result<Arc<Region>, RegionError> {
        let absent = || RegionError::Absent { dir: dir.to_owned() };
        let lock = match private::open(dir) {
            Err(e) if e.is_absent() => return Err(absent()),
            other => other?,
        };
        // The exclusive lock is held only while a region is made or removed: it is not there yet, or no longer.
        if !flock(&lock, FlockOperation::NonBlockingLockShared, dir)? {
            return Err(absent());
        }
        Region::open_locked(dir, lock)
    }

    /// Opens the files of a directory whose lock is held.
    fn open_locked(dir: &Path, lock: File) -> Result<Arc<Region>, RegionError> {
        let header = match open_at(&lock, HEADER, true) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(RegionError::Absent { dir: dir.to_owned() });
            }
            other => other.map_err(io_error("open", &dir.join(HEADER)))?,
        };
        let facts = Facts::read(&header, dir)?;
        let manifest = open_at(&lock, MANIFEST, false).map_err(io_error("open", &dir.join(MANIFEST)))?;
        let holder = Owner(facts.creator);
        let slots = SLOT_NAMES[..facts.slots]
            .iter()
            .map(|name| {
                // A link into /proc of a dead process may lead into a new one with the same id.
                if facts.meta.memfd && !holder.is_alive() {
                    return Err(RegionError::HolderGone { dir: dir.to_owned(), pid: holder.pid() });
                }
                // Members of the group may only read.
                let file = match open_at(&lock, name, true) {
                    Err(e) if e.kind() == io::ErrorKind::PermissionDenied => open_at(&lock, name, false),
                    other => other,
                };
                file.map_err(io_error("open", &dir.join(name)))
            })
            .collect::<Result<Vec<_>, _>>()?;
        Region::from_files(Files { dir: dir.to_owned(), lock, header, manifest, slots }, facts)
    }

    /// Opens a region that was passed by its descriptors.
    pub fn attach(parts: Descriptors) -> Result<Arc<Region>, RegionError> {
        let header = File::from(parts.header);
        let dir = PathBuf::from("(passed by descriptor)");
        let facts = Facts::read(&header, &dir)?;
        let lock = File::from(parts.lock);
        private::check_reader(&lock, &facts.meta.dir)?;
        let files = Files {
            dir: facts.meta.dir.clone(),
            lock,
            header,
            manifest: File::from(parts.manifest),
            slots: parts.slots.into_iter().map(File::from).collect(),
        };
        Region::from_files(files, facts)
    }

    /// What to pass to another process for [`Descriptors::new`]. The receiver can write the header, and slots if this
    /// process can.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let fixed = [self.lock.as_fd(), self.header_file.as_fd(), self.manifest_file.as_fd()];
        fixed.into_iter().chain(self.slots.iter().map(|s| s.file.as_fd())).collect()
    }

    fn from_files(files: Files, facts: Facts) -> Result<Arc<Region>, RegionError> {
        let Files { dir, lock, header: header_file, manifest: manifest_file, slots } = files;
        let damaged = |reason: String| RegionError::Damaged { dir: dir.clone(), reason };
        if facts.namespace != pid_namespace().map_err(io_error("read", Path::new("/proc/self/ns/pid")))? {
            return Err(RegionError::OtherNamespace { dir });
        }
        let manifest = read_manifest(&manifest_file, &dir)?;
        if manifest.layout_hash() != facts.meta.layout_hash {
            return Err(damaged("manifest.json is not the one it was made with".into()));
        }
        let held = held_ranges(&manifest, facts.meta.part.as_ref(), &dir)?;
        if slots.len() != facts.slots {
            return Err(damaged(format!("it has {} slots and {} came", facts.slots, slots.len())));
        }
        let expected = manifest.to_safetensors_header();
        let len = expected.len() as u64 + manifest.data_bytes();
        let slots = slots
            .into_iter()
            .zip(SLOT_NAMES)
            .map(|(file, name)| {
                let mut found = vec![0; expected.len()];
                let path = dir.join(name);
                file.read_exact_at(&mut found, 0).map_err(io_error("read", &path))?;
                if found != expected {
                    return Err(damaged(format!("the header of {name} is not that of the manifest")));
                }
                Slot::new(file, len).map_err(io_error("map", &path))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let words = PROTOCOL + facts.shape().words();
        let header = Mapping::map(&header_file, words as u64 * 8, Access::Write)
            .map_err(io_error("map", &dir.join(HEADER)))?;
        let me = Owner::me().map_err(io_error("read", Path::new("/proc/self/stat")))?;
        let mut seed = [0; 2];
        // Only spreads serials; any value will do.
        let _ = getrandom::fill(&mut seed);
        Ok(Arc::new(Region {
            dir,
            lock,
            header_file,
            manifest_file,
            header,
            facts,
            manifest: Arc::new(manifest),
            held,
            slots,
            me,
            serial: AtomicU16::new(u16::from_ne_bytes(seed)),
            prepared: Mutex::default(),
        }))
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The tensors of its images.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Which policy it holds.
    pub fn model_id(&self) -> &ModelId {
        &self.facts.meta.model_id
    }

    /// Which life of the publisher.
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.facts.incarnation)
    }

    /// How long ago it was made, whatever was done to the clock since; `None` if that cannot be told, because the machine was
    /// started again.
    pub fn age(&self) -> Option<Duration> {
        self.facts.meta.made.as_ref()?.elapsed()
    }

    /// The blocks that it holds; `None` for all.
    pub fn part(&self) -> Option<&BlockRanges> {
        self.facts.meta.part.as_ref()
    }

    /// The blocks that it holds.
    pub fn blocks(&self) -> BlockRanges {
        self.part().cloned().unwrap_or_else(|| BlockRanges::from(0..self.manifest.cuts().blocks()))
    }

    /// Where the data area begins in a slot's file.
    pub fn data_start(&self) -> u64 {
        self.slots[0].read.len() - self.manifest.data_bytes()
    }

    /// How many ranks write it.
    pub fn ranks(&self) -> u16 {
        self.facts.ranks
    }

    /// How many slots it has.
    pub fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// Whether its slots are memfds, which end with their creator.
    pub fn is_memfd(&self) -> bool {
        self.facts.meta.memfd
    }

    /// How many bytes the agent may use for history in the directory: what was asked for, or what a small filesystem
    /// can hold.
    pub fn extra_bytes(&self) -> u64 {
        self.facts.meta.extra_bytes
    }

    /// The file of a slot's image.
    pub fn slot_path(&self, slot: usize) -> PathBuf {
        self.dir.join(SLOT_NAMES[slot])
    }

    /// Where the agent keeps the block sums of a slot.
    pub fn sums_path(&self, slot: usize) -> PathBuf {
        self.dir.join(SUMS_NAMES[slot])
    }

    /// The directory of delta files.
    pub fn deltas_dir(&self) -> PathBuf {
        self.dir.join(DELTAS)
    }

    /// The directory of what ranks bring before a slot is whole.
    pub fn parts_dir(&self) -> PathBuf {
        self.dir.join(PARTS)
    }

    /// The data area of a slot, for a rank that took part in writing it: no rank writes it again before this rank has
    /// joined another attempt.
    pub(crate) fn slot_data(&self, slot: usize) -> &[u8] {
        let mapping = self.slots[slot].view();
        mapping.bytes(self.data_start()..mapping.len())
    }

    /// The file with the agent's token.
    pub fn token_path(&self) -> PathBuf {
        self.dir.join(TOKEN)
    }

    /// The agent's unix socket.
    pub fn socket_path(&self) -> PathBuf {
        self.dir.join(SOCKET)
    }

    /// What its slots hold, all at one moment.
    pub fn state(&self) -> State {
        let Snapshot { control, slots } = self.flip().snapshot();
        let state = |slot: usize| {
            slots[slot].map(|w| SlotState {
                slot,
                id: w.id,
                version: w.version,
                sealed: w.digest.map(digest_from_words),
            })
        };
        let active = control.active();
        State {
            attempt: control.attempt(),
            phase: control.phase(),
            active: state(active),
            inactive: if self.slots.len() == 2 { state(1 - active) } else { None },
        }
    }

    /// The bell: changes whenever the state does.
    pub fn bell(&self) -> u32 {
        self.header.half(PROTOCOL + BELL).load(Ordering::SeqCst)
    }

    /// Sleeps until the bell is no longer `seen` or `timeout` has passed. May return early. Deaths do not ring.
    pub fn wait(&self, seen: u32, timeout: Duration) {
        futex_wait(self.header.half(PROTOCOL + BELL), seen, timeout);
    }

    /// Asks for huge pages and locked, resident memory, once, and says what was refused. Whoever reads or writes whole
    /// images calls it after opening; it maps every page, so a rank of many may leave it to the agent.
    pub fn report(&self) -> Prepared {
        let access = self.slots[0].view().access();
        let mut known = self.prepared.lock();
        if let Some((_, report)) = known.as_ref().filter(|(a, _)| *a == access) {
            return report.clone();
        }
        let start = self.data_start();
        let ranges: Vec<_> = self.held.iter().map(|r| r.start + start..r.end + start).collect();
        let reports = self.slots.iter().map(|s| s.view().prepare_in(&ranges));
        let report = reports.reduce(Prepared::and).unwrap_or_else(|| self.header.prepare_in(&[]));
        *known = Some((access, report.clone()));
        report
    }

    /// Removes the region if no other process has it open, and returns whether it did. This process must not use it any
    /// more.
    pub fn discard(&self) -> Result<bool, RegionError> {
        if !flock(&self.lock, FlockOperation::NonBlockingLockExclusive, &self.dir)? {
            // A refused conversion may have dropped the shared lock.
            flock(&self.lock, FlockOperation::NonBlockingLockShared, &self.dir)?;
            return Ok(false);
        }
        gc::remove(&self.dir)?;
        Ok(true)
    }

    fn flip(&self) -> Flip<'_, AtomicU64> {
        Flip::new(&self.header.words()[PROTOCOL..], self.facts.shape())
    }

    /// This process: another one than opened the region, in a child of fork.
    fn me(&self) -> Owner {
        Owner::me().unwrap_or(self.me)
    }

    pub(crate) fn ring(&self) {
        let bell = self.header.half(PROTOCOL + BELL);
        bell.fetch_add(1, Ordering::SeqCst);
        futex_wake_all(bell);
    }

    /// Looks until there is an answer, sleeping on the bell in between.
    fn wait_for<T>(&self, stop: &Stop, mut look: impl FnMut() -> Option<T>) -> Result<T, Stopped> {
        loop {
            let seen = self.bell();
            // Before the look: what was there when it was called off still counts.
            let stopped = stop.check();
            if let Some(answer) = look() {
                return Ok(answer);
            }
            stopped?;
            self.wait(seen, stop.nap());
        }
    }

    /// Whether `range` of the data area is here.
    pub(crate) fn check_range(&self, range: &Range<u64>) -> Result<(), RegionError> {
        let (offset, end, len) = (range.start, range.end, self.manifest.data_bytes());
        if offset > end || end > len {
            return Err(RegionError::Beyond { offset, end, len });
        }
        let at = self.held.partition_point(|r| r.end < end);
        if range.is_empty() || self.held.get(at).is_some_and(|r| r.start <= offset) {
            Ok(())
        } else {
            Err(RegionError::OutsidePart { offset, end })
        }
    }
}

fn digest_words(digest: StateDigest) -> [u64; 2] {
    let all = u128::from_be_bytes(digest.0);
    [(all >> 64) as u64, all as u64]
}

fn digest_from_words([high, low]: [u64; 2]) -> StateDigest {
    StateDigest((u128::from(high) << 64 | u128::from(low)).to_be_bytes())
}

/// The bytes of the data area that a part holds, widened to pages and merged, so that even a part of millions of
/// narrow tiles has few of them.
fn held_ranges(
    manifest: &Manifest,
    part: Option<&BlockRanges>,
    dir: &Path,
) -> Result<Vec<Range<u64>>, RegionError> {
    let len = manifest.data_bytes();
    let Some(part) = part else { return Ok(Vec::from_iter((len > 0).then_some(0..len))) };
    let all = BlockRanges::from(0..manifest.cuts().blocks());
    let parts = Parts::new(manifest, vec![part.clone(), all.difference(part)])
        .map_err(|source| RegionError::Manifest { dir: dir.to_owned(), source })?;
    let page = rustix::param::page_size() as u64;
    let mut held: Vec<Range<u64>> = Vec::new();
    for range in parts.byte_ranges(manifest, 0).filter(|r| !r.is_empty()) {
        let (start, end) = (range.start / page * page, range.end.next_multiple_of(page).min(len));
        match held.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            Some(_) | None => held.push(start..end),
        }
    }
    Ok(held)
}

/// The longest manifest that is read: a million tensors with long names.
const MAX_MANIFEST: u64 = 1 << 30;

fn read_manifest(file: &File, dir: &Path) -> Result<Manifest, RegionError> {
    let path = dir.join(MANIFEST);
    let len = file.metadata().map_err(io_error("read", &path))?.len();
    if len > MAX_MANIFEST {
        let reason = format!("manifest.json has {len} bytes, more than {MAX_MANIFEST}");
        return Err(RegionError::Damaged { dir: dir.to_owned(), reason });
    }
    let mut json = vec![0; len as usize];
    file.read_exact_at(&mut json, 0).map_err(io_error("read", &path))?;
    Manifest::from_json(&json).map_err(|source| RegionError::Manifest { dir: dir.to_owned(), source })
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RegionError + use<> {
    let path = path.to_owned();
    move |source| RegionError::Io { action, path, source }
}

/// Opens a file of the directory, for writing too if `write`.
fn open_at(dir: &File, name: &str, write: bool) -> io::Result<File> {
    let flags = if write { OFlags::RDWR } else { OFlags::RDONLY } | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(dir, name, flags, Mode::empty())?))
}

/// Takes or changes a lock without waiting; false if others are in the way.
fn flock(dir: &File, operation: FlockOperation, path: &Path) -> Result<bool, RegionError> {
    match rustix::fs::flock(dir, operation) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(io_error("lock", path)(e.into())),
    }
}

/// Names the pid namespace of this process.
fn pid_namespace() -> io::Result<u64> {
    Ok(rustix::fs::stat("/proc/self/ns/pid")?.st_ino)
}

/// Now, on the clock of lease deadlines: nanoseconds since boot, sleep included, the same in all processes.
fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    (t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64)
}

fn deadline_after(timeout: Duration) -> u64 {
    now().saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX))
}

/// A named point between two steps, at which tests stop or kill a process.
#[cfg(not(test))]
pub(crate) const fn step(_name: &'static str) {}
#[cfg(test)]
pub(crate) use tests::step;
