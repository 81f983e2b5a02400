//! What lets an interrupted update in place be finished.
//!
//! A block is written whole, but a process that is killed in the middle of a write leaves one that is neither
//! old nor new, and the delta alone cannot mend it. So before a block is written to its place, its new bytes are
//! written here, to a file `.NAME.windlass-journal` beside the base. The next run takes a torn block from
//! there; whether a slot is whole is told by the sum in the delta's record. When all is done the file is
//! removed.
//!
//! This survives a killed process, whose writes the kernel keeps in order. After a power cut, restore the base.
//!
//! ```text
//! journal = slot*            (SLOT bytes each, one for each thread of each run)
//! slot    = block number u32 · length u32 · new bytes of the block
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use windlass_core::manifest::BLOCK_UNITS;

use crate::error::Error;
use crate::outfile::{beside, lock_file};

const HEAD: u64 = 8;
/// Room for the head and the largest block: units have at most eight bytes.
const SLOT: u64 = HEAD + BLOCK_UNITS * 8;

/// The journal of one base.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
    /// Slots of earlier runs, by block: where their bytes are and how many.
    earlier: HashMap<u32, Vec<(u64, u32)>>,
    next: AtomicU64,
}

impl Journal {
    /// Opens the journal of `base`, with what an interrupted run may have left in it, and locks it.
    pub fn open(base: &Path) -> Result<Journal, Error> {
        // The real name, so that runs through different links meet.
        let base = base.canonicalize().map_err(Error::io("open", base))?;
        let path = beside(&base, "journal")?;
        let file = lock_file(&path, &base)?;
        let len = file.metadata().map_err(Error::io("read", &path))?.len();
        let slots = len.div_ceil(SLOT);
        let mut earlier: HashMap<u32, Vec<(u64, u32)>> = HashMap::new();
        for slot in 0..slots {
            let mut head = [0; HEAD as usize];
            match file.read_exact_at(&mut head, slot * SLOT) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(e) => return Err(Error::io("read", &path)(e)),
            }
            let n = u64::from_le_bytes(head);
            earlier.entry(n as u32).or_default().push((slot * SLOT + HEAD, (n >> 32) as u32));
        }
        Ok(Journal { file, path, earlier, next: AtomicU64::new(slots * SLOT) })
    }

    /// A slot for a thread of this run. Those of earlier runs are kept until the end.
    pub fn slot(&self) -> u64 {
        self.next.fetch_add(SLOT, Ordering::Relaxed)
    }

    /// Notes what a block is about to become.
    pub fn note(&self, slot: u64, block: u32, bytes: &[u8]) -> Result<(), Error> {
        let head = (u64::from(block) | (bytes.len() as u64) << 32).to_le_bytes();
        // The bytes first: a slot whose head is old and whose bytes are new has the sum of neither.
        self.file
            .write_all_at(bytes, slot + HEAD)
            .and_then(|()| self.file.write_all_at(&head, slot))
            .map_err(Error::io("write", &self.path))
    }

    /// Puts what an earlier run noted for a block into `bytes`, if `right` says that it is whole.
    pub fn recall(&self, block: u32, bytes: &mut [u8], right: impl Fn(&[u8]) -> bool) -> Result<bool, Error> {
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

    /// Whether an earlier run left something.
    pub fn is_fresh(&self) -> bool {
        self.earlier.is_empty()
    }

    /// Removes the journal: everything it was for is done, or nothing was begun.
    pub fn remove(self) -> Result<(), Error> {
        std::fs::remove_file(&self.path).map_err(Error::io("remove", &self.path))
    }
}
