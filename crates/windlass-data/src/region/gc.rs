//! Removing what dead owners left.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FlockOperation;
use windlass_core::identity::ModelId;

use super::header::{Facts, PROTOCOL};
use super::owner::{Owner, alive};
use super::{HEADER, HEADER_TMP, RegionError, flock, incoming, io_error};
use crate::flip::Flip;
use crate::private;
use crate::shm::{Access, Mapping};

/// What a dead process left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The region of a publisher, or what is left of a directory whose header cannot be read.
    Region,
    /// The image of a receiver, with which the next one goes on.
    Image,
    /// Deltas on their way into engines.
    Deltas,
}

impl Left {
    /// For people and programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Left::Region => "region",
            Left::Image => "image",
            Left::Deltas => "deltas",
        }
    }
}

/// A directory that no process has open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dead {
    pub dir: PathBuf,
    /// Whose it was, if its header could be read.
    pub model_id: Option<ModelId>,
    /// Bytes that it takes.
    pub bytes: u64,
    pub what: Left,
}

/// How far a [`sweep`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// Levels below the directory in which regions are looked for; 1 for what is in it.
    pub depth: usize,
    /// The most directories that are looked into.
    pub most: usize,
}

impl Sweep {
    /// What is in the directory itself.
    pub const SHALLOW: Sweep = Sweep { depth: 1, most: usize::MAX };
    /// Everything below the directory that is not absurdly deep.
    pub const DEEP: Sweep = Sweep { depth: 16, most: 100_000 };
}

/// Finds the regions and images of this user that no process has open, what is left of those whose creator died while making
/// them, and deltas that a killed receiver left: `dir` itself, or what is below it. Everything else is left alone: what is in
/// use, other users', and what is none of these. Regions have no regions inside; links, other file systems and directories of
/// other users are not entered, nor are those that cannot be read.
pub fn sweep(dir: &Path, how: Sweep) -> Result<Vec<Dead>, RegionError> {
    let mut found = Vec::new();
    let device = match fs::metadata(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(found),
        other => other.map_err(io_error("read", dir))?.dev(),
    };
    private::place(dir)?;
    // What is named must be readable; what is found below it may be anybody's.
    fs::read_dir(dir).map_err(io_error("read", dir))?;
    match look(dir)? {
        Seen::Dead(dead) => return Ok(vec![dead]),
        Seen::InUse => return Ok(found),
        Seen::Other => {}
    }
    let (mut level, mut seen) = (vec![dir.to_owned()], 0usize);
    for _ in 0..how.depth {
        let mut below = Vec::new();
        for parent in level {
            for inner in directories(&parent) {
                seen += 1;
                if seen > how.most {
                    return Err(RegionError::TooWide { dir: dir.to_owned(), most: how.most });
                }
                match look(&inner)? {
                    Seen::Dead(dead) => found.push(dead),
                    Seen::InUse => {}
                    Seen::Other => below.push(inner),
                }
            }
        }
        below.retain(|d| fs::symlink_metadata(d).is_ok_and(|m| m.dev() == device && private::is_place(&m)));
        level = below;
    }
    Ok(found)
}

/// The directories in a directory, and not those that links lead to.
fn directories(parent: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path())
}

/// What a directory turned out to be.
enum Seen {
    Dead(Dead),
    InUse,
    /// Nothing that is collected.
    Other,
}

/// Looks at a directory. What belongs to another user is nothing of ours: its owner could put anything in its place while it
/// is removed.
fn look(dir: &Path) -> Result<Seen, RegionError> {
    if !fs::symlink_metadata(dir).is_ok_and(|m| private::is_own(&m)) {
        return Ok(Seen::Other);
    }
    let dead = |what, model_id, bytes| Seen::Dead(Dead { dir: dir.to_owned(), model_id, bytes, what });
    if incoming::is_incoming(dir) {
        let bytes = incoming::abandoned(dir, incoming::Discard::Nothing).map_err(io_error("read", dir))?;
        return Ok(bytes.map_or(Seen::InUse, |bytes| dead(Left::Deltas, None, bytes)));
    }
    if !is_region(dir) {
        return Ok(Seen::Other);
    }
    let Some(_lock) = lock_dead(dir)? else { return Ok(Seen::InUse) };
    let facts = facts(dir);
    let what = if facts.as_ref().is_some_and(|f| f.slots == 1) { Left::Image } else { Left::Region };
    Ok(dead(what, facts.map(|f| f.meta.model_id), allocated(dir)))
}

/// The exclusive lock of a region that no process has open; `None` if one has, or it is gone.
fn lock_dead(dir: &Path) -> Result<Option<File>, RegionError> {
    let Ok(lock) = File::open(dir) else { return Ok(None) };
    // Asked again under the lock: another collector or a creator may have been here.
    let alone = flock(&lock, FlockOperation::NonBlockingLockExclusive, dir)? && is_region(dir);
    Ok(alone.then_some(lock))
}

impl Dead {
    /// Removes it, unless a process has opened it since; returns whether it is gone.
    pub fn remove(&self) -> Result<bool, RegionError> {
        let removed = match self.what {
            Left::Deltas => incoming::abandoned(&self.dir, incoming::Discard::Files)
                .map(|freed| freed.is_some())
                .map_err(io_error("remove", &self.dir)),
            Left::Region | Left::Image => match lock_dead(&self.dir)? {
                Some(_lock) => remove(&self.dir).map(|()| true),
                None => Ok(false),
            },
        };
        match removed {
            Err(RegionError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                Ok(false)
            }
            other => other,
        }
    }
}

/// Whether a directory holds a region, or what is left of one.
pub fn is_region(dir: &Path) -> bool {
    [HEADER, HEADER_TMP].iter().any(|name| File::open(dir.join(name)).is_ok_and(|f| Facts::is_header(&f)))
}

/// The facts of a region that may be damaged or half made.
pub(super) fn facts(dir: &Path) -> Option<Facts> {
    [HEADER, HEADER_TMP].iter().find_map(|name| Facts::read(&File::open(dir.join(name)).ok()?, dir).ok())
}

/// The header of a region with its protocol.
fn map_header(dir: &Path, facts: &Facts) -> io::Result<Mapping> {
    let words = PROTOCOL + facts.shape().words();
    let header = fs::OpenOptions::new().read(true).write(true).open(dir.join(HEADER))?;
    Mapping::map(&header, words as u64 * 8, Access::Write)
}

/// Whether a living process has the place of a rank, as far as can be told.
pub(super) fn has_writers(dir: &Path, facts: &Facts) -> bool {
    map_header(dir, facts)
        .map_or(true, |header| Flip::new(&header.words()[PROTOCOL..], facts.shape()).has_writers(alive))
}

/// The living processes that are registered in a region, for messages.
pub(super) fn living(dir: &Path) -> Vec<u32> {
    let Some(facts) = facts(dir) else { return Vec::new() };
    let mut owners = vec![facts.creator];
    if let Ok(header) = map_header(dir, &facts) {
        // Owners stand among other words; only those that name a living process by id and start time are shown.
        let protocol = header.words().iter().skip(PROTOCOL);
        owners.extend(protocol.map(|w: &AtomicU64| w.load(Ordering::SeqCst)));
    }
    owners.retain(|&o| alive(o));
    let mut pids: Vec<u32> = owners.into_iter().map(|o| Owner(o).pid()).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// The processes that keep a region from being replaced, for messages: those registered in it, and all whose
/// descriptors can be seen and are of its directory. A forked child has its parent's, and is registered nowhere.
pub(super) fn holders(dir: &Path) -> Vec<u32> {
    let mut pids = living(dir);
    // This process may have made it and let it go since; its descriptors tell.
    pids.retain(|pid| *pid != std::process::id());
    let Ok(dir) = fs::canonicalize(dir) else { return pids };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbered = processes.filter_map(|p| Some((p.file_name().to_str()?.parse::<u32>().ok()?, p.path())));
    let holds = |path: &Path| {
        let mut descriptors = fs::read_dir(path.join("fd")).into_iter().flatten().flatten();
        descriptors.any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == dir))
    };
    pids.extend(numbered.filter(|(_, path)| holds(path)).map(|(pid, _)| pid));
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// Bytes that the files of a region take.
pub(super) fn allocated(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let inside = |path: PathBuf| match fs::symlink_metadata(&path) {
        Ok(m) if m.is_dir() => allocated(&path),
        Ok(m) => m.blocks() * 512,
        Err(_) => 0,
    };
    entries.flatten().map(|e| inside(e.path())).sum()
}

/// Empties a region's directory. From the first step on it cannot be opened, and until the last one it can be known
/// for what it is.
pub(super) fn clear(dir: &Path) -> Result<(), RegionError> {
    let (header, tmp) = (dir.join(HEADER), dir.join(HEADER_TMP));
    match fs::rename(&header, &tmp) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("rename", &header)(e)),
        _ => {}
    }
    for entry in fs::read_dir(dir).map_err(io_error("read", dir))?.flatten() {
        if entry.file_name() == HEADER_TMP {
            continue;
        }
        let path = entry.path();
        // Links, such as those of memfds and of a model's configuration, go themselves and not what they lead to.
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            fs::remove_dir_all(&path).map_err(io_error("remove", &path))?;
        } else {
            remove_file(&path)?;
        }
    }
    remove_file(&tmp)
}

/// Removes a region's directory. The caller holds the exclusive lock.
pub(super) fn remove(dir: &Path) -> Result<(), RegionError> {
    clear(dir)?;
    match fs::remove_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error("remove", dir)(e)),
        _ => Ok(()),
    }
}

fn remove_file(path: &Path) -> Result<(), RegionError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error("remove", path)(e)),
        _ => Ok(()),
    }
}
