//! Making a region.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write as _;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FallocateFlags, FlockOperation};
use windlass_core::identity::{Incarnation, ModelId};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;

use super::header::{Facts, Meta, Moment};
use super::owner::Owner;
use super::space::{self, Room, Shortage};
use super::{
    DELTAS, HEADER, HEADER_TMP, LEASES, MANIFEST, Region, RegionError, SLOT_NAMES, flock, gc, held_ranges,
    io_error, pid_namespace,
};
use crate::private;
use crate::seal::draft::make_dir;
use crate::shm;

/// How many slots a region has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slots {
    /// One: a receiver's image, changed in place.
    One,
    /// Two: a publisher's, one served while the other is written.
    Two,
}

/// Whether slots may be memfds of the creator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memfd {
    /// If the filesystem is too small for them.
    Auto,
    /// Never: too small a filesystem is an error.
    Never,
    Always,
}

/// What to make.
#[derive(Clone, Debug)]
pub struct RegionSpec {
    /// The region's own directory; made with its parents.
    pub dir: PathBuf,
    pub model_id: ModelId,
    pub manifest: Arc<Manifest>,
    pub slots: Slots,
    /// How many ranks write.
    pub ranks: u16,
    /// The blocks that are held here; `None` for all.
    pub part: Option<BlockRanges>,
    /// Whether the owner's group may read.
    pub group: bool,
    /// Whether slots may be memfds.
    pub memfd: Memfd,
    /// Bytes that the history may take, counted in the check for room.
    pub extra_bytes: u64,
    /// The incarnation, for the image of a receiver; a publisher mints its own.
    pub incarnation: Option<Incarnation>,
}

impl RegionSpec {
    /// The defaults: two slots, one rank, the whole image, for the owner alone.
    pub fn new(dir: impl Into<PathBuf>, model_id: ModelId, manifest: Arc<Manifest>) -> RegionSpec {
        RegionSpec {
            dir: dir.into(),
            model_id,
            manifest,
            slots: Slots::Two,
            ranks: 1,
            part: None,
            group: false,
            memfd: Memfd::Auto,
            extra_bytes: 0,
            incarnation: None,
        }
    }
}

/// Figures that replace those of the machine in tests.
#[derive(Debug, Default)]
pub(super) struct Limits {
    pub(super) filesystem: Option<Room>,
    pub(super) memory: Option<Room>,
    pub(super) file_size: Option<Room>,
}

const TMPFS: i64 = 0x0102_1994;

/// How often a collector may remove what is being made before we say so.
const TRIES: usize = 3;

pub(super) fn create(spec: &RegionSpec, limits: &Limits) -> Result<Arc<Region>, RegionError> {
    let plan = Plan::new(spec)?;
    let mut made = try_create(spec, &plan, limits);
    for _ in 1..TRIES {
        match made {
            Err(RegionError::Absent { .. }) => made = try_create(spec, &plan, limits),
            _ => break,
        }
    }
    made
}

/// `Absent` if another process removed the directory meanwhile.
fn try_create(spec: &RegionSpec, plan: &Plan, limits: &Limits) -> Result<Arc<Region>, RegionError> {
    let (lock, is_new) = lock_directory(spec)?;
    let old_bytes = if is_new { 0 } else { gc::allocated(&spec.dir) };
    let place = choose(spec, plan, limits, old_bytes).inspect_err(|_| {
        if is_new {
            let _ = fs::remove_dir(&spec.dir);
        }
    })?;
    let (facts, files) = fill(spec, plan, place, &lock).inspect_err(|_| {
        // What was begun is of no use; the first error is what matters.
        let _ = gc::remove(&spec.dir);
    })?;
    // Changing the lock may let it go for a moment, and a collector may use that: look that all is still there.
    let inode = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    let shared = flock(&lock, FlockOperation::NonBlockingLockShared, &spec.dir)?;
    let ours = files.header.metadata().map(|m| (m.dev(), m.ino())).ok();
    if !shared || inode(&spec.dir.join(HEADER)) != ours {
        return Err(RegionError::Absent { dir: spec.dir.clone() });
    }
    let Made { header, manifest, slots } = files;
    Region::from_files(super::Files { dir: spec.dir.clone(), lock, header, manifest, slots }, facts)
}

/// The sizes of what is to be made.
struct Plan {
    image_header: Vec<u8>,
    manifest_json: String,
    held: Vec<Range<u64>>,
    slots: usize,
    /// Bytes of all slots.
    slot_bytes: u64,
    /// Bytes of everything else but the history.
    small_bytes: u64,
}

impl Plan {
    fn new(spec: &RegionSpec) -> Result<Plan, RegionError> {
        if spec.ranks == 0 {
            let reason = "a region needs at least one rank".into();
            return Err(RegionError::Spec { dir: spec.dir.clone(), reason });
        }
        let slots = match spec.slots {
            Slots::One => 1,
            Slots::Two => 2,
        };
        let held = held_ranges(&spec.manifest, spec.part.as_ref(), &spec.dir)?;
        let image_header = spec.manifest.to_safetensors_header();
        let manifest_json = spec.manifest.to_json();
        let page = rustix::param::page_size() as u64;
        let data: u64 = held.iter().map(|r| (r.end - r.start).next_multiple_of(page)).sum();
        let slot_bytes = slots as u64 * (image_header.len() as u64 + data);
        // The header, the part in it, and a table of sums for each slot.
        let sums = slots as u64 * 32 * u64::from(spec.manifest.cuts().blocks());
        let small_bytes = manifest_json.len() as u64 + sums + (256 << 10);
        Ok(Plan { image_header, manifest_json, held, slots, slot_bytes, small_bytes })
    }
}

/// The region's directory with its exclusive lock, and whether it was made now.
fn lock_directory(spec: &RegionSpec) -> Result<(File, bool), RegionError> {
    let dir = &spec.dir;
    let mode = if spec.group { 0o750 } else { 0o700 };
    let absent = || RegionError::Absent { dir: dir.clone() };
    let (lock, is_new) = match private::own(dir, mode) {
        // A collector removed it between our making and our opening.
        Err(e) if e.is_absent() => return Err(absent()),
        other => other?,
    };
    if !flock(&lock, FlockOperation::NonBlockingLockExclusive, dir)? {
        return Err(RegionError::Live { dir: dir.clone(), owners: gc::living(dir) });
    }
    let here = fs::metadata(dir).and_then(|m| Ok((m.ino(), lock.metadata()?.ino())));
    if !here.is_ok_and(|(path, held)| path == held) {
        // A collector removed it between our opening and our lock.
        return Err(absent());
    }
    if !is_new && !gc::is_region(dir) && fs::read_dir(dir).map_err(io_error("read", dir))?.next().is_some() {
        return Err(RegionError::Foreign { dir: dir.clone() });
    }
    lock.set_permissions(Permissions::from_mode(mode)).map_err(io_error("set permissions of", dir))?;
    Ok((lock, is_new))
}

/// The token of a dead region, if it is a plain file that no other user could have written or read.
fn kept_token(dir: &Path) -> Option<Vec<u8>> {
    let path = dir.join(super::TOKEN);
    let about = fs::symlink_metadata(&path).ok()?;
    let ours =
        about.is_file() && about.uid() == rustix::process::geteuid().as_raw() && about.mode() & 0o077 == 0;
    (ours && about.len() <= 4096).then(|| fs::read(&path).ok()).flatten()
}

fn put_token(dir: &Path, token: &[u8]) -> Result<(), RegionError> {
    let path = dir.join(super::TOKEN);
    let write = || {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(token)
    };
    write().map_err(io_error("write", &path))
}

/// The files that were made.
struct Made {
    header: File,
    manifest: File,
    slots: Vec<File>,
}

fn fill(
    spec: &RegionSpec,
    plan: &Plan,
    Place { memfd, extra_bytes }: Place,
    lock: &File,
) -> Result<(Facts, Made), RegionError> {
    let dir = &spec.dir;
    let predecessor = gc::facts(dir).map_or(0, |f| f.incarnation);
    // Receivers have the token of the life before: a trainer that comes back must not lock them out.
    let token = kept_token(dir);
    gc::clear(dir)?;
    if let Some(token) = token {
        put_token(dir, &token)?;
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let minted = clock.max(predecessor.saturating_add(1));
    let meta = Meta {
        model_id: spec.model_id.clone(),
        layout_hash: spec.manifest.layout_hash(),
        // Only for display in processes that got descriptors; a name that is not UTF-8 is shown as well as it goes.
        dir: PathBuf::from(dir.to_string_lossy().into_owned()),
        part: spec.part.clone(),
        memfd,
        extra_bytes,
        made: Moment::now(),
    };
    let facts = Facts {
        slots: plan.slots,
        ranks: spec.ranks,
        leases: LEASES,
        incarnation: spec.incarnation.map_or(minted, |i| i.0),
        namespace: pid_namespace().map_err(io_error("read", Path::new("/proc/self/ns/pid")))?,
        creator: Owner::me().map_err(io_error("read", Path::new("/proc/self/stat")))?.0,
        meta,
    };
    // First, so that whatever we leave if we die can be known as ours.
    let (header, tmp) = make_file(spec, HEADER_TMP, &facts.to_bytes())?;
    rustix::fs::fchmod(&header, if spec.group { 0o660 } else { 0o600 }.into())
        .map_err(|e| io_error("set permissions of", &tmp)(e.into()))?;
    let (manifest, _) = make_file(spec, MANIFEST, plan.manifest_json.as_bytes())?;
    let slots = SLOT_NAMES[..plan.slots]
        .iter()
        .map(|name| make_slot(spec, plan, name, memfd))
        .collect::<Result<Vec<_>, _>>()?;
    let deltas = dir.join(DELTAS);
    make_dir(&deltas).map_err(io_error("make", &deltas))?;
    rustix::fs::renameat(lock, HEADER_TMP, lock, HEADER).map_err(|e| io_error("rename", &tmp)(e.into()))?;
    Ok((facts, Made { header, manifest, slots }))
}

/// Where things go.
struct Place {
    /// Whether slots are memfds.
    memfd: bool,
    /// How much history the directory can hold.
    extra_bytes: u64,
}

/// Finds room for everything, or says what lacks. `old` bytes are about to be given back.
fn choose(spec: &RegionSpec, plan: &Plan, limits: &Limits, old: u64) -> Result<Place, RegionError> {
    let dir = &spec.dir;
    let short = |shortage| RegionError::Space { dir: dir.clone(), shortage };
    let longest = plan.image_header.len() as u64 + spec.manifest.data_bytes();
    if let Some(room) = limits.file_size.clone().or_else(space::file_size).filter(|r| r.free < longest) {
        return Err(short(Shortage::FileSize { needed: longest, room }));
    }
    let measured = || space::filesystem(dir).map_err(io_error("measure", dir));
    let mut room = limits.filesystem.clone().map_or_else(measured, Ok)?;
    room.free = room.free.saturating_add(old);
    let all = plan.slot_bytes.saturating_add(plan.small_bytes).saturating_add(spec.extra_bytes);
    let fits = all <= room.free;
    let memfd = match spec.memfd {
        Memfd::Always => true,
        Memfd::Auto => !fits,
        Memfd::Never => false,
    };
    if !memfd && !fits {
        return Err(short(Shortage::Filesystem { needed: all, room }));
    }
    let extra = if memfd {
        if plan.small_bytes > room.free {
            return Err(short(Shortage::Filesystem { needed: plan.small_bytes, room }));
        }
        // A tenth stays free for tables and temporary files.
        spec.extra_bytes.min((room.free - plan.small_bytes) / 10 * 9)
    } else {
        spec.extra_bytes
    };
    let in_memory = memfd
        || rustix::fs::statfs(dir).is_ok_and(|s| {
            #[allow(clippy::useless_conversion, reason = "the type differs between targets")]
            let kind = i64::from(s.f_type);
            kind == TMPFS
        });
    let memory = limits.memory.clone().or_else(space::memory).filter(|_| in_memory);
    if let Some(mut room) = memory {
        let needed = plan.slot_bytes.saturating_add(plan.small_bytes).saturating_add(extra);
        room.free = room.free.saturating_add(old);
        if needed > room.free {
            return Err(short(Shortage::Memory { needed, room }));
        }
    }
    Ok(Place { memfd, extra_bytes: extra })
}

/// A new file of the directory with these contents.
fn make_file(spec: &RegionSpec, name: &str, contents: &[u8]) -> Result<(File, PathBuf), RegionError> {
    let path = spec.dir.join(name);
    let mode = if spec.group { 0o640 } else { 0o600 };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&path)
        .map_err(io_error("make", &path))?;
    // Whatever the umask is.
    file.set_permissions(Permissions::from_mode(mode)).map_err(io_error("set permissions of", &path))?;
    file.write_all_at(contents, 0).map_err(io_error("write", &path))?;
    Ok((file, path))
}

fn make_slot(spec: &RegionSpec, plan: &Plan, name: &str, memfd: bool) -> Result<File, RegionError> {
    let path = spec.dir.join(name);
    let start = plan.image_header.len() as u64;
    let len = start + spec.manifest.data_bytes();
    let file = if memfd {
        let file = shm::memfd(&format!("windlass-{}-{name}", spec.model_id), len)
            .map_err(io_error("make a memfd for", &path))?;
        let mode = if spec.group { 0o640 } else { 0o600 };
        rustix::fs::fchmod(&file, mode.into())
            .map_err(|e| io_error("set permissions of", &path)(e.into()))?;
        let link = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        symlink(link, &path).map_err(io_error("make", &path))?;
        file
    } else {
        let (file, _) = make_file(spec, name, &[])?;
        file.set_len(len).map_err(io_error("lengthen", &path))?;
        file
    };
    let held = plan.held.iter().map(|r| r.start + start..r.end + start);
    for range in std::iter::once(0..start).chain(held) {
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), range.start, range.end - range.start) {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => {
                return Err(RegionError::NoReserve { dir: spec.dir.clone() });
            }
            Err(e) => return Err(io_error("reserve space for", &path)(e.into())),
        }
    }
    file.write_all_at(&plan.image_header, 0).map_err(io_error("write", &path))?;
    Ok(file)
}
