//! The journal with which an interrupted in-place update is finished.
//!
//! A block is written whole, but a process that is killed in the middle of a write leaves one that is neither
//! old nor new, and the delta alone cannot mend it. So before a block is written to its place, its new bytes are
//! written here, to a file `.NAME.windlass-journal` next to the base. The next run takes a torn block from
//! there; whether a slot is whole is told by the sum in the delta's record. When all is done the file is
//! removed.
//!
//! The head says which update was begun. It is written before the first block is, so a shorter file means that
//! the base was not touched, and one with a head means that the base may be part old and part new: other
//! commands ask [`unfinished_update`] and refuse such a base.
//!
//! This survives a killed process, whose writes the kernel keeps in order. After a power cut, restore the base
//! and remove the journal.
//!
//! ```text
//! journal = head · slot*     (SLOT bytes each, one for each thread of each run)
//! head    = "WLJRNL1\0" · base digest [16] · target digest [16]
//! slot    = block number u32 · length u32 · new bytes of the block
//! ```

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use windlass_core::StateDigest;
use windlass_core::delta::DeltaHeader;
use windlass_core::manifest::BLOCK_UNITS;

use crate::error::Error;
use crate::tools::outfile::{beside, lock_file};

const MAGIC: [u8; 8] = *b"WLJRNL1\0";
const HEAD: u64 = 40;
const SLOT_HEAD: u64 = 8;
/// Room for its head and the largest block: units have at most eight bytes.
const SLOT: u64 = SLOT_HEAD + BLOCK_UNITS * 8;

/// The journal of an update in place of the checkpoint `path`, or of the directory that it is in, if one was
/// begun and not finished.
pub(crate) fn unfinished_update(path: &Path) -> Option<PathBuf> {
    let path = path.canonicalize().ok()?;
    let journals = [Some(path.as_path()), path.parent()].into_iter().flatten();
    let journals = journals.filter_map(|p| beside(p, "journal").ok());
    journals.into_iter().find(|j| fs::metadata(j).is_ok_and(|m| m.is_file() && m.len() >= HEAD))
}

/// An error if the checkpoint `path` may be part old and part new.
pub(crate) fn refuse_unfinished(path: &Path) -> Result<(), Error> {
    match unfinished_update(path) {
        Some(journal) => Err(Error::Unfinished { base: path.into(), journal }),
        None => Ok(()),
    }
}

fn head_of(update: &DeltaHeader) -> [u8; HEAD as usize] {
    let (StateDigest(base), StateDigest(target)) = (update.base_digest, update.target_digest);
    let mut head = [0; HEAD as usize];
    let parts = MAGIC.into_iter().chain(base).chain(target);
    head.iter_mut().zip(parts).for_each(|(h, b)| *h = b);
    head
}

/// The journal of one base.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    /// The head, if an earlier run has begun to write.
    head: Option<[u8; HEAD as usize]>,
    /// Slots of earlier runs, by block: where their bytes are and how many.
    earlier: HashMap<u32, Vec<(u64, u32)>>,
    next: AtomicU64,
}

impl Journal {
    /// Opens the journal of `base`, with what an interrupted run may have left in it, and locks it.
    pub(crate) fn open(base: &Path) -> Result<Journal, Error> {
        // The real name, so that runs through different links meet.
        let base = base.canonicalize().map_err(Error::io("open", base))?;
        let path = beside(&base, "journal")?;
        let file = lock_file(&path, &base)?;
        let len = file.metadata().map_err(Error::io("read", &path))?.len();
        if len < HEAD {
            // Killed before anything was written to the base.
            file.set_len(0).map_err(Error::io("truncate", &path))?;
            let next = AtomicU64::new(HEAD);
            return Ok(Journal { file, path, head: None, earlier: HashMap::new(), next });
        }
        let mut head = [0; HEAD as usize];
        file.read_exact_at(&mut head, 0).map_err(Error::io("read", &path))?;
        if !head.starts_with(&MAGIC) {
            return Err(Error::InTheWay { path, found: "another file", wanted: "a journal" });
        }
        let slots = (len - HEAD).div_ceil(SLOT);
        let mut earlier: HashMap<u32, Vec<(u64, u32)>> = HashMap::new();
        for slot in (0..slots).map(|i| HEAD + i * SLOT) {
            let mut head = [0; SLOT_HEAD as usize];
            match file.read_exact_at(&mut head, slot) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(e) => return Err(Error::io("read", &path)(e)),
            }
            let n = u64::from_le_bytes(head);
            earlier.entry(n as u32).or_default().push((slot + SLOT_HEAD, (n >> 32) as u32));
        }
        Ok(Journal { file, path, head: Some(head), earlier, next: AtomicU64::new(HEAD + slots * SLOT) })
    }

    /// Whether an earlier run has begun this very update.
    pub(crate) fn is_of(&self, update: &DeltaHeader) -> bool {
        self.head == Some(head_of(update))
    }

    /// Says that blocks will be written now. What runs of another update left is given up.
    pub(crate) fn begin(&mut self, update: &DeltaHeader) -> Result<(), Error> {
        if self.is_of(update) {
            return Ok(());
        }
        let head = head_of(update);
        let written = self.file.set_len(0).and_then(|()| self.file.write_all_at(&head, 0));
        written.map_err(Error::io("write", &self.path))?;
        self.earlier.clear();
        *self.next.get_mut() = HEAD;
        self.head = Some(head);
        Ok(())
    }

    /// A slot for a thread of this run. Those of earlier runs are kept until the end.
    pub(crate) fn slot(&self) -> u64 {
        self.next.fetch_add(SLOT, Ordering::Relaxed)
    }

    /// Notes what a block is about to become.
    pub(crate) fn note(&self, slot: u64, block: u32, bytes: &[u8]) -> Result<(), Error> {
        let head = (u64::from(block) | (bytes.len() as u64) << 32).to_le_bytes();
        // The bytes first: a slot whose head is old and whose bytes are new has the sum of neither.
        self.file
            .write_all_at(bytes, slot + SLOT_HEAD)
            .and_then(|()| self.file.write_all_at(&head, slot))
            .map_err(Error::io("write", &self.path))
    }

    /// Puts what an earlier run noted for a block into `bytes`, if `right` says that it is whole.
    pub(crate) fn recall(
        &self,
        block: u32,
        bytes: &mut [u8],
        right: impl Fn(&[u8]) -> bool,
    ) -> Result<bool, Error> {
        for &(offset, len) in self.earlier.get(&block).into_iter().flatten() {
            if len as usize != bytes.len() {
                continue;
            }
            match self.file.read_exact_at(bytes, offset) {
                Ok(()) if right(bytes) => return Ok(true),
                Err(e) if e.kind() != io::ErrorKind::UnexpectedEof => {
                    return Err(Error::io("read", &self.path)(e));
                }
                _ => {}
            }
        }
        Ok(false)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether no run has begun to write.
    pub(crate) fn is_fresh(&self) -> bool {
        self.head.is_none()
    }

    /// Whether a block was noted, by this run or an earlier one, and so may have been written.
    pub(crate) fn has_notes(&self) -> bool {
        // When in doubt, yes.
        self.file.metadata().map_or(true, |m| m.len() > HEAD)
    }

    /// Removes the journal: everything it was for is done, or nothing was begun.
    pub(crate) fn remove(self) -> Result<(), Error> {
        fs::remove_file(&self.path).map_err(Error::io("remove", &self.path))
    }
}
