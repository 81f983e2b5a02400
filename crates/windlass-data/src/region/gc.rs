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
use super::{HEADER, HEADER_TMP, RegionError, flock, io_error};
use crate::shm::{Access, Mapping};

/// A region that was removed, or would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Where it was.
    pub dir: PathBuf,
    /// Whose it was, if its header could be read.
    pub model_id: Option<ModelId>,
    /// Bytes that were given back.
    pub bytes: u64,
}

/// How far a [`Sweep`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// Levels below the directory in which regions are looked for; 1 for what is in it.
    pub depth: usize,
    /// The most directories that are looked into.
    pub most: usize,
    /// Says what would be removed, and removes nothing.
    pub dry_run: bool,
}

impl Sweep {
    /// What is in the directory itself.
    pub const SHALLOW: Sweep = Sweep { depth: 1, most: usize::MAX, dry_run: false };
    /// Everything below the directory that is not absurdly deep.
    pub const DEEP: Sweep = Sweep { depth: 16, most: 100_000, dry_run: false };
}

/// Removes the regions in `region_dir` that no process has open, and what is left of those whose creator died while
/// making them. Everything else is left alone: regions in use, other people's, and what is not a region.
pub fn gc(region_dir: &Path) -> Result<Vec<Removed>, RegionError> {
    sweep(region_dir, Sweep::SHALLOW)
}

/// As [`gc`], as far down as `how` says. Regions have no regions inside; links and other file systems are not entered, nor
/// are directories that cannot be read.
pub fn sweep(region_dir: &Path, how: Sweep) -> Result<Vec<Removed>, RegionError> {
    let mut removed = Vec::new();
    let device = match fs::metadata(region_dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(removed),
        other => other.map_err(io_error("read", region_dir))?.dev(),
    };
    // What is named must be readable; what is found below it may be anybody's.
    fs::read_dir(region_dir).map_err(io_error("read", region_dir))?;
    let (mut level, mut seen) = (vec![region_dir.to_owned()], 0usize);
    for _ in 0..how.depth {
        let mut below = Vec::new();
        for parent in level {
            for dir in directories(&parent) {
                seen += 1;
                if seen > how.most {
                    return Err(RegionError::TooWide { dir: region_dir.to_owned(), most: how.most });
                }
                if is_region(&dir) {
                    removed.extend(remove_dead(dir, how.dry_run)?);
                } else if fs::symlink_metadata(&dir).is_ok_and(|m| m.is_dir() && m.dev() == device) {
                    below.push(dir);
                }
            }
        }
        level = below;
    }
    Ok(removed)
}

/// The directories in a directory, and not those that links lead to.
fn directories(parent: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path())
}

/// Removes one region, unless somebody has it open or it is not ours to remove.
fn remove_dead(dir: PathBuf, dry_run: bool) -> Result<Option<Removed>, RegionError> {
    let Ok(lock) = File::open(&dir) else { return Ok(None) };
    // Asked again under the lock: another collector or a creator may have been here.
    if !flock(&lock, FlockOperation::NonBlockingLockExclusive, &dir)? || !is_region(&dir) {
        return Ok(None);
    }
    let model_id = facts(&dir).map(|f| f.meta.model_id);
    let bytes = allocated(&dir);
    match if dry_run { Ok(()) } else { remove(&dir) } {
        Ok(()) => Ok(Some(Removed { dir, model_id, bytes })),
        Err(RegionError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(e) => Err(e),
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

/// The living processes that are registered in a region, for messages.
pub(super) fn living(dir: &Path) -> Vec<u32> {
    let Some(facts) = facts(dir) else { return Vec::new() };
    let mut owners = vec![facts.creator];
    let words = PROTOCOL + facts.shape().words();
    let opened = fs::OpenOptions::new().read(true).write(true).open(dir.join(HEADER));
    if let Ok(header) = opened.and_then(|f| Mapping::map(&f, words as u64 * 8, Access::Write)) {
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
