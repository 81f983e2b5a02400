//! Memory in which deltas land, kept for the next ones: touching fresh pages takes as long as filling them.
//!
//! Owns: [`Shelf`], which lends [`Buffer`]s to transfers, and [`Handed`], the view that another process has of a delta in
//! them. With a directory, buffers are files of it, so that workers of engines can take a delta to their GPU before the image
//! has it. Called by the receiver's transfers, and in engines' workers by what stages deltas. Must not: read what it holds.
//!
//! | | invariant | test |
//! |---|---|---|
//! | SHELF-1 | A file that a reader holds is not written: readers lock it shared, the shelf exclusively before each use. | `a_file_that_a_reader_holds_is_not_lent_again` |
//! | SHELF-2 | Space of a file is reserved before it is written; without space, memory of this process alone is lent. | `without_space_for_files_a_delta_lands_in_private_memory` |

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use windlass_core::delta::Delta;
use windlass_core::error::Kind;
use windlass_core::identity::Identity;

use super::ReceiverError;
use crate::seal::draft::{make_dir, make_file};
use crate::shm::{Access, Mapping};

/// Where a receiver puts deltas for other processes of this host.
#[derive(Clone, Debug)]
pub struct Share {
    /// A directory of its own, best in memory. It is made when it is first needed.
    pub dir: PathBuf,
}

/// A stretch of memory, as long as was asked for or longer.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) memory: Arc<Mapping>,
    file: Option<(PathBuf, File)>,
    /// What the memory is of, if it has no name.
    nameless: Option<Arc<File>>,
}

impl Buffer {
    /// What was written is complete: other processes may read it. Its path, if it has one.
    pub(super) fn publish(&self) -> Option<&Path> {
        let (path, file) = self.file.as_ref()?;
        // From exclusive to shared; readers that come in between are told of the file only afterwards.
        file.lock_shared().ok().map(|()| path.as_path())
    }

    /// What to send it from, if it is of a file.
    pub(super) fn descriptor(&self) -> Option<Arc<File>> {
        let named = || self.file.as_ref()?.1.try_clone().ok().map(Arc::new);
        self.nameless.clone().or_else(named)
    }
}

/// Buffers that are not in use.
#[derive(Debug)]
pub(super) struct Shelf {
    free: Mutex<Vec<Buffer>>,
    share: Option<Share>,
    /// Whether deltas are passed on from here to other receivers.
    relays: bool,
    made: Mutex<u64>,
}

impl Shelf {
    /// Buffers that are kept: one is read while the next is filled.
    const KEPT: usize = 2;
    /// Larger ones are rare, and given back.
    const LARGE: u64 = 1 << 30;

    /// With a directory, buffers are files that other processes can open.
    pub(super) fn new(share: Option<Share>, relays: bool) -> Shelf {
        if let Some(share) = &share {
            // What a receiver left that was killed.
            let _ = fs::remove_dir_all(&share.dir);
        }
        Shelf { free: Mutex::default(), share, relays, made: Mutex::default() }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.free.lock()
    }

    pub(super) fn take(&self, bytes: u64) -> io::Result<Buffer> {
        let fits = |b: &Buffer| {
            b.memory.len() >= bytes && b.memory.len() / 4 <= bytes.max(1 << 20) && !is_read(b.file.as_ref())
        };
        let mut free = self.free();
        if let Some(i) = free.iter().position(fits) {
            return Ok(free.swap_remove(i));
        }
        drop(free);
        // The next one is a little longer, as often as not.
        let len = bytes.saturating_add(bytes / 4).max(1);
        if let Some(share) = &self.share {
            match self.make(share, len) {
                Ok(buffer) => return Ok(buffer),
                Err(error) => {
                    let dir = share.dir.display();
                    tracing::warn!(%dir, bytes = len, %error, "engines get this delta after the image: it cannot be put there");
                }
            }
        }
        if self.relays {
            // It is sent from a file, and its name is not needed.
            let file = File::from(memfd_create("windlass-delta", MemfdFlags::CLOEXEC)?);
            fallocate(&file, FallocateFlags::empty(), 0, len)?;
            let memory = Arc::new(Mapping::map(&file, len, Access::Write)?);
            return Ok(Buffer { memory, file: None, nameless: Some(Arc::new(file)) });
        }
        Ok(Buffer { memory: Arc::new(Mapping::anonymous(len)?), file: None, nameless: None })
    }

    /// Gets ready for a delta of so many bytes, unless one came before or no other process reads them.
    pub(super) fn reserve(&self, bytes: u64) {
        if self.share.is_none() || bytes > Shelf::LARGE || *self.made.lock() > 0 {
            return;
        }
        match self.take(bytes) {
            Ok(buffer) => {
                // The first store to a page is what takes long.
                let page = rustix::param::page_size();
                (0..buffer.memory.len()).step_by(page).for_each(|at| buffer.memory.copy_in(at, &[0]));
                self.put(buffer);
            }
            Err(error) => tracing::debug!(%error, "no file is kept ready for the first delta"),
        }
    }

    /// A file with its space reserved: a write to a file that cannot grow any more would end the process.
    fn make(&self, share: &Share, len: u64) -> io::Result<Buffer> {
        make_dir(&share.dir)?;
        let mut made = self.made.lock();
        *made += 1;
        let path = share.dir.join(format!("{made}.delta"));
        // As open as its directory, which keeps out processes that may not read the image.
        let file = make_file(&path)?;
        let remove = Unless(Some(&path));
        file.try_lock().map_err(io::Error::from)?;
        fallocate(&file, FallocateFlags::empty(), 0, len)?;
        let memory = Arc::new(Mapping::map(&file, len, Access::Write)?);
        remove.keep();
        Ok(Buffer { memory, file: Some((path, file)), nameless: None })
    }

    pub(super) fn put(&self, buffer: Buffer) {
        if buffer.memory.len() > Shelf::LARGE {
            return discard(&buffer);
        }
        let mut free = self.free();
        free.push(buffer);
        if free.len() > Shelf::KEPT {
            discard(&free.remove(0));
        }
    }
}

impl Drop for Shelf {
    fn drop(&mut self) {
        if let Some(share) = &self.share {
            let _ = fs::remove_dir_all(&share.dir);
        }
    }
}

/// A part of a delta, checked by so many threads, that leads from one version to another.
pub(super) fn check_part<'a>(
    bytes: &'a [u8],
    threads: usize,
    (base, target): (&Identity, &Identity),
    peer: &str,
) -> Result<Delta<'a>, ReceiverError> {
    let part = crate::container::parse(bytes, threads)
        .map_err(|source| ReceiverError::Delta { peer: peer.to_owned(), source })?;
    let (from, to) = (part.header.base_identity(), part.header.target_identity());
    if (&from, &to) != (base, target) {
        let what = format!("a delta from {from} to {to}");
        return Err(ReceiverError::OtherTicket { peer: peer.to_owned(), what });
    }
    Ok(part)
}

/// Whether a reader still holds a file; if not, it is locked for writing.
fn is_read(file: Option<&(PathBuf, File)>) -> bool {
    file.is_some_and(|(_, file)| file.try_lock().is_err())
}

/// Takes the name away; readers keep what they have mapped.
fn discard(buffer: &Buffer) {
    if let Some((path, _)) = &buffer.file {
        let _ = fs::remove_file(path);
    }
}

/// Removes a file unless it is kept.
struct Unless<'a>(Option<&'a Path>);

impl Unless<'_> {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Unless<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

/// A delta that a receiver of this host has fetched, in a process that it was handed to: the files are locked for as long as
/// this lives.
#[derive(Debug)]
pub struct Handed {
    parts: Vec<(Arc<Mapping>, u64, File)>,
    base: Identity,
    target: Identity,
}

impl Drop for Handed {
    fn drop(&mut self) {
        for (.., file) in &self.parts {
            // By itself: a file that is mapped stays locked when it is closed, and mappings are kept.
            let _ = file.unlock();
        }
    }
}

/// Mappings of the files that deltas come in: a receiver uses a few of them again and again, and registering memory with a
/// device takes its time.
#[derive(Debug, Default)]
pub struct MappedFiles(Vec<((u64, u64), Arc<Mapping>)>);

impl MappedFiles {
    /// As many as a receiver keeps, and some that readers hold it from using.
    const KEPT: usize = 2 * Shelf::KEPT;

    fn map(&mut self, file: &File, bytes: u64) -> io::Result<Arc<Mapping>> {
        let facts = file.metadata()?;
        let key = (facts.dev(), facts.ino());
        // While it is mapped, no other file gets its number.
        if let Some((_, known)) = self.0.iter().find(|(k, m)| *k == key && m.len() >= bytes) {
            return Ok(Arc::clone(known));
        }
        let memory = Arc::new(Mapping::map(file, facts.len().max(bytes), Access::Read)?);
        if self.0.len() >= MappedFiles::KEPT {
            self.0.remove(0);
        }
        self.0.push((key, Arc::clone(&memory)));
        Ok(memory)
    }
}

/// Why a delta cannot be taken from a receiver.
#[derive(Debug, thiserror::Error)]
pub enum HandedError {
    #[error("the delta in {path} cannot be read: the receiver took it back, or this process may not read it")]
    File { path: PathBuf, source: io::Error },
    #[error("the delta in {path} is being written: the receiver took it back")]
    Rewritten { path: PathBuf },
    #[error("the file {path} has {found} bytes, and a delta of {bytes} was to be in it")]
    Length { path: PathBuf, bytes: u64, found: u64 },
}

impl HandedError {
    /// What sort of failure it is.
    pub fn kind(&self) -> Kind {
        match self {
            HandedError::File { .. } | HandedError::Rewritten { .. } => Kind::Stale,
            HandedError::Length { .. } => Kind::Invalid,
        }
    }
}

impl Handed {
    /// Opens the files of a delta from `base` to `target`, each with the length of its container.
    pub fn open(
        files: &[(PathBuf, u64)],
        (base, target): (Identity, Identity),
        mapped: &mut MappedFiles,
    ) -> Result<Handed, HandedError> {
        let mut open = |(path, bytes): &(PathBuf, u64)| {
            let failed = |source| HandedError::File { path: path.clone(), source };
            let file = File::open(path).map_err(failed)?;
            match file.try_lock_shared() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(HandedError::Rewritten { path: path.clone() }),
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
            let whole = file.metadata().map_err(failed)?.len();
            if *bytes == 0 || *bytes > whole {
                return Err(HandedError::Length { path: path.clone(), bytes: *bytes, found: whole });
            }
            Ok((mapped.map(&file, *bytes).map_err(failed)?, *bytes, file))
        };
        Ok(Handed { parts: files.iter().map(&mut open).collect::<Result<_, _>>()?, base, target })
    }

    /// The version that it leads from.
    pub fn base(&self) -> &Identity {
        &self.base
    }

    /// The memory that it is in.
    pub fn memory(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        self.parts.iter().map(|(memory, ..)| memory)
    }

    /// The bytes of its parts, which are not checked yet.
    pub fn containers(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().map(|(memory, bytes, _)| memory.bytes(0..*bytes))
    }

    /// One of [`Handed::containers`], checked by so many threads.
    pub fn part<'a>(&self, bytes: &'a [u8], threads: usize) -> Result<Delta<'a>, ReceiverError> {
        check_part(bytes, threads, (&self.base, &self.target), "the receiver of this host")
    }
}

#[cfg(test)]
mod tests {
    use windlass_core::identity::Incarnation;

    use super::*;
    use crate::region::incoming::{Discard, INCOMING, abandoned, is_incoming};

    fn shelf(dir: &Path) -> Shelf {
        Shelf::new(Some(Share { dir: dir.join("incoming") }), false)
    }

    fn open(path: &Path, bytes: u64, mapped: &mut MappedFiles) -> Result<Handed, HandedError> {
        let identity =
            |version| Identity { model_id: "policy".parse().unwrap(), incarnation: Incarnation(7), version };
        Handed::open(&[(path.to_owned(), bytes)], (identity(1), identity(2)), mapped)
    }

    #[test]
    fn a_file_that_a_reader_holds_is_not_lent_again() {
        let home = tempfile::tempdir().unwrap();
        let shelf = shelf(home.path());
        let first = shelf.take(1000).unwrap();
        let (path, memory) = (first.publish().unwrap().to_owned(), Arc::clone(&first.memory));
        let mut mapped = MappedFiles::default();
        let reader = open(&path, 1000, &mut mapped).unwrap();
        let seen = Arc::clone(reader.memory().next().unwrap());
        shelf.put(first);
        let second = shelf.take(1000).unwrap();
        assert_ne!(second.publish().unwrap(), path);
        shelf.put(second);
        drop(reader);
        // Free again, and the same memory; a reader that comes while it is written is told so.
        let again = [shelf.take(1000).unwrap(), shelf.take(1000).unwrap()];
        let same = again.iter().find(|b| Arc::ptr_eq(&b.memory, &memory)).unwrap();
        let refused = open(&path, 1000, &mut mapped);
        assert!(matches!(refused, Err(HandedError::Rewritten { path: p }) if p == path));
        same.publish().unwrap();
        let reader = open(&path, 1000, &mut mapped).unwrap();
        assert!(Arc::ptr_eq(reader.memory().next().unwrap(), &seen), "it is mapped once");
    }

    #[test]
    fn without_space_for_files_a_delta_lands_in_private_memory() {
        let home = tempfile::tempdir().unwrap();
        // A directory that cannot be made: there is a file in its place.
        fs::write(home.path().join("incoming"), b"").unwrap();
        let shelf = shelf(home.path());
        let buffer = shelf.take(1000).unwrap();
        assert!(buffer.publish().is_none());
        assert!(buffer.memory.len() >= 1000);
    }

    #[test]
    fn a_shelf_leaves_no_file_and_a_length_that_is_not_there_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let shelf = shelf(home.path());
        let buffer = shelf.take(10).unwrap();
        let path = buffer.publish().unwrap().to_owned();
        for bytes in [0, buffer.memory.len() + 1, u64::MAX] {
            let opened = open(&path, bytes, &mut MappedFiles::default());
            assert!(matches!(opened, Err(HandedError::Length { .. })), "{bytes}");
        }
        drop((buffer, shelf));
        assert!(!home.path().join("incoming").exists());
        let gone = open(&path, 10, &mut MappedFiles::default());
        assert!(matches!(gone, Err(HandedError::File { .. })));
    }

    #[test]
    fn deltas_of_a_killed_receiver_are_removed_and_those_of_a_living_one_are_not() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("policy.engines").join(INCOMING);
        fs::create_dir(dir.parent().unwrap()).unwrap();
        let shelf = Shelf::new(Some(Share { dir: dir.clone() }), false);
        let (lent, kept) = (shelf.take(1000).unwrap(), shelf.take(1000).unwrap());
        kept.publish().unwrap();
        shelf.put(kept);
        assert!(is_incoming(&dir) && !is_incoming(home.path()));
        assert_eq!(abandoned(&dir, Discard::Files).unwrap(), None, "its receiver lives");
        // A kill lets go of the locks and removes nothing.
        shelf.free().clear();
        drop(lent);
        std::mem::forget(shelf);
        let reader = File::open(dir.join("1.delta")).unwrap();
        reader.try_lock_shared().unwrap();
        assert_eq!(abandoned(&dir, Discard::Files).unwrap(), None, "an engine reads one");
        drop(reader);
        let dead = crate::region::sweep(home.path(), crate::region::Sweep::DEEP).unwrap();
        let [dead] = &dead[..] else { panic!("{dead:?}") };
        assert!(dead.what == crate::region::Left::Deltas && dead.dir == dir && dead.bytes >= 2000);
        assert!(dead.remove().unwrap());
        assert!(!dir.parent().unwrap().exists());
    }
}
