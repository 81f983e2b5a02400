//! Memory that processes share.
//!
//! Owns: [`Mapping`] (a mapped file or private staging memory), the run-time check that no two [`Loan`]s of one
//! mapping overlap, the futex that wakes waiters in other processes, memfds, and the attempts to lock memory and
//! to get huge pages ([`Mapping::prepare`]). Called by [`crate::region`] and by whatever fills or reads images.
//! Must not: know what the bytes mean, or who may touch them when; that is [`crate::flip`]'s.
//!
//! # Why reading shared memory is sound here
//!
//! The compiler cannot see the other processes. Three rules keep plain references honest:
//!
//! 1. Words that processes change under each other's eyes are reached through [`Mapping::words`] only, as
//!    atomics. They lie in a file of their own (`header`), of which nobody asks for plain bytes.
//! 2. [`Mapping::bytes`] and [`Loan`]s are made of slots. A slot's bytes are read under a lease and written
//!    by the ranks of an attempt, and the protocol never lets both be ([`crate::flip`], FLIP-1 and FLIP-3). A lease that
//!    outlived its deadline can be taken away; whoever reads under one checks at the end that it still stood.
//! 3. Within a process, exclusive access is a [`Loan`], and overlapping loans are refused at run time. Plain
//!    copies ([`Mapping::copy_in`], [`Mapping::copy_out`]) go through raw pointers and make no reference.
//!
//! A file that shrinks under a mapping kills its readers by SIGBUS. Files of a region never shrink: they are
//! reserved in full when they are made and removed only as a whole, and memfds are sealed against shrinking.
//!
//! # Invariants and their tests
//!
//! - SHM-1 No two living loans of a mapping overlap: `loans_of_a_mapping_never_overlap`.
//! - SHM-2 A mapping never reaches beyond its file: `a_mapping_longer_than_its_file_is_refused`.
//! - SHM-3 Every access is checked against the length: `access_beyond_a_mapping_panics`.
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;
use rustix::time::Timespec;
use windlass_core::error::Kind;

/// Whether a mapping may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Loads only; a store would be a fault.
    Read,
    Write,
}

/// A loan that cannot be given.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LoanError {
    #[error("bytes {}..{} are asked for while {}..{} are on loan", range.start, range.end, taken.start, taken.end)]
    Taken { range: Range<u64>, taken: Range<u64> },
    /// The range ends beyond the mapping, or before it begins.
    #[error("bytes {}..{} do not lie in a mapping of {len} bytes", range.start, range.end)]
    Outside { range: Range<u64>, len: u64 },
    #[error("bytes {}..{} are asked for writing, of a mapping for reading", range.start, range.end)]
    ReadOnly { range: Range<u64> },
}

impl LoanError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            LoanError::Taken { .. } | LoanError::Outside { .. } | LoanError::ReadOnly { .. } => Kind::Bug,
        }
    }
}

/// Mapped memory. Unmapped when dropped; keeps no descriptor.
pub struct Mapping {
    at: NonNull<u8>,
    len: usize,
    access: Access,
    shared: bool,
    /// Start and end of every living loan.
    loans: Mutex<BTreeMap<u64, u64>>,
    /// Dropped before the memory goes.
    pins: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

// SAFETY: the memory belongs to the mapping until it is dropped, from whatever thread; what threads do to it at
// the same time is ruled by the module's three rules, not by which thread holds the handle.
unsafe impl Send for Mapping {}
// SAFETY: as above; the table of loans is behind a mutex.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`, shared. The file must be that long.
    pub fn map(file: &File, len: u64, access: Access) -> io::Result<Mapping> {
        let have = file.metadata()?.len();
        if have < len {
            let what = format!("the file has {have} bytes and {len} are to be mapped");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
        }
        let prot = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        let size = mapped_len(len)?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no memory that exists.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, prot, MapFlags::SHARED, file, 0) }?;
        Self::new(at, len, access, true)
    }

    /// Private memory, zero until written; pages come as they are touched.
    pub fn anonymous(len: u64) -> io::Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let size = mapped_len(len)?;
        // SAFETY: as in `map`.
        let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, prot, flags) }?;
        Self::new(at, len, Access::Write, false)
    }

    fn new(at: *mut c_void, len: u64, access: Access, shared: bool) -> io::Result<Mapping> {
        let at = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Mapping { at, len: len as usize, access, shared, loans: Mutex::default(), pins: Mutex::default() })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it may be written.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Where it begins, for interfaces that take addresses (host registration, DMA). Valid while it lives.
    pub fn address(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Keeps `pin`, such as the registration of the memory with a device, until the memory goes.
    pub fn pin(&self, pin: Arc<dyn Any + Send + Sync>) {
        self.pins.lock().push(pin);
    }

    /// Gives the memory back and keeps its addresses, which read as zeros from then on: for memory that other processes were
    /// told of, and may ask for late.
    pub fn retire(self) -> io::Result<()> {
        self.pins.lock().clear();
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let (at, len) = (self.at.as_ptr().cast(), self.len.max(1));
        // SAFETY: replaces pages of this mapping alone, to which there is no reference any more: `self` is consumed.
        unsafe { rustix::mm::mmap_anonymous(at, len, ProtFlags::READ, flags) }?;
        // Unmapping is what must not happen.
        std::mem::forget(self);
        Ok(())
    }

    /// All of it as words; a last part of a word is left out.
    ///
    /// # Panics
    /// If the mapping is for reading: words are there to be changed.
    pub fn words(&self) -> &[AtomicU64] {
        assert_eq!(self.access, Access::Write, "words of a mapping for writing");
        // SAFETY: page-aligned memory of at least this many words that lives as long as `self`. Atomics may be
        // shared with other processes (rule 1).
        unsafe { std::slice::from_raw_parts(self.at.as_ptr().cast(), self.len / 8) }
    }

    /// The half of a word that a futex can wait on.
    ///
    /// # Panics
    /// As [`Mapping::words`], and if there is no such word.
    pub fn half(&self, word: usize) -> &AtomicU32 {
        let word: *const AtomicU64 = &raw const self.words()[word];
        // SAFETY: four aligned bytes within the word, which nobody uses as a whole one.
        unsafe { &*word.cast::<AtomicU32>() }
    }

    /// Bytes for reading. Only under a lease, or for bytes that only this process writes (rule 2).
    ///
    /// # Panics
    /// If the range does not lie in the mapping.
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        self.check(&range).unwrap_or_else(|e| panic!("{e}"));
        // SAFETY: the range was checked and lives as long as `self`; nobody writes it meanwhile (rule 2).
        unsafe { std::slice::from_raw_parts(self.at.as_ptr().add(range.start as usize), span(&range)) }
    }

    /// Bytes for writing, unless they overlap another living loan of this mapping.
    pub fn lend(&self, range: Range<u64>) -> Result<Loan<'_>, LoanError> {
        self.check(&range)?;
        if self.access == Access::Read {
            return Err(LoanError::ReadOnly { range });
        }
        if !range.is_empty() {
            let mut loans = self.loans.lock();
            // Loans are disjoint, so only the last one that begins before our end can reach into the range.
            if let Some((&start, &end)) = loans.range(..range.end).next_back()
                && end > range.start
            {
                return Err(LoanError::Taken { range, taken: start..end });
            }
            loans.insert(range.start, range.end);
        }
        // SAFETY: the range was checked, it lives as long as `self`, no other loan overlaps it, and nobody else
        // touches it meanwhile (rule 2).
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(self.at.as_ptr().add(range.start as usize), span(&range))
        };
        Ok(Loan { mapping: self, start: range.start, bytes })
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Panics
    /// If they do not fit there, or the mapping is for reading.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) {
        assert_eq!(self.access, Access::Write, "a copy into a mapping for writing");
        let end = offset.saturating_add(bytes.len() as u64);
        self.check(&(offset..end)).unwrap_or_else(|e| panic!("{e}"));
        let to = self.at.as_ptr().wrapping_add(offset as usize);
        // SAFETY: the destination was checked; the source is a slice.
        unsafe { copy(bytes, to) };
    }

    /// Copies what lies at `offset` out.
    ///
    /// # Panics
    /// If the mapping ends before.
    pub fn copy_out(&self, offset: u64, into: &mut [u8]) {
        let end = offset.saturating_add(into.len() as u64);
        self.check(&(offset..end)).unwrap_or_else(|e| panic!("{e}"));
        // SAFETY: the source was checked; the rest as in `copy_in`.
        unsafe {
            std::ptr::copy(self.at.as_ptr().add(offset as usize), into.as_mut_ptr(), into.len());
        }
    }

    /// Asks for huge pages, locks the memory, and brings it in: whatever the kernel grants. Changes no bytes.
    pub fn prepare(&self) -> Prepared {
        self.prepare_in(std::slice::from_ref(&(0..self.len())))
    }

    /// [`Mapping::prepare`] for some ranges only: touching the holes of a file would fill them.
    ///
    /// # Panics
    /// If a range does not lie in the mapping.
    pub fn prepare_in(&self, ranges: &[Range<u64>]) -> Prepared {
        let fill = match self.access {
            Access::Read => Advice::LinuxPopulateRead,
            Access::Write => Advice::LinuxPopulateWrite,
        };
        let bytes = ranges.iter().map(|r| span(r) as u64).sum();
        let huge = self.each_page_range(ranges, |at, len| {
            // SAFETY: advice about pages of this mapping; their contents stay.
            unsafe { rustix::mm::madvise(at, len, Advice::LinuxHugepage) }
        });
        let locked = self.each_page_range(ranges, |at, len| {
            // SAFETY: pages of this mapping; locking changes nothing but where they may go.
            unsafe { rustix::mm::mlock(at, len) }
        });
        let resident = self.each_page_range(ranges, |at, len| {
            // SAFETY: as above; populating faults pages in as an access would.
            unsafe { rustix::mm::madvise(at, len, fill) }
        });
        Prepared {
            bytes,
            shared: self.shared,
            huge_pages: Granted::from(huge),
            locked: Granted::from(locked),
            resident: Granted::from(resident),
        }
    }

    /// Calls `f` for each range, widened to whole pages; stops at the first refusal.
    fn each_page_range(
        &self,
        ranges: &[Range<u64>],
        f: impl Fn(*mut c_void, usize) -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let page = rustix::param::page_size();
        for range in ranges.iter().filter(|r| !r.is_empty()) {
            self.check(range).unwrap_or_else(|e| panic!("{e}"));
            let start = range.start as usize / page * page;
            let end = (range.end as usize).next_multiple_of(page);
            f(self.at.as_ptr().wrapping_add(start).cast(), end - start)?;
        }
        Ok(())
    }

    fn check(&self, range: &Range<u64>) -> Result<(), LoanError> {
        if range.start <= range.end && range.end <= self.len() {
            Ok(())
        } else {
            Err(LoanError::Outside { range: range.clone(), len: self.len() })
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.pins.get_mut().clear();
        // SAFETY: mapped by `new` with this length, and all references borrow from `self`.
        let done = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.len.max(1)) };
        debug_assert!(done.is_ok(), "{done:?}");
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("len", &self.len)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

/// Copies of at least this many bytes go past the cache; waiting for the last line of a shorter one costs more than
/// it saves.
#[cfg(target_arch = "x86_64")]
const STREAM_FROM: usize = 32 << 10;

/// Copies `from` to `to`, which will be read much later, past the cache where that is faster.
///
/// # Panics
/// If they are not of one length.
pub(crate) fn copy_slice(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "a copy of one length");
    // SAFETY: `to` was checked to be as long as `from`, and is nobody else's.
    unsafe { copy(from, to.as_mut_ptr()) };
}

/// Copies `from` to `to`. Both may be parts of one mapping and overlap.
///
/// # Safety
/// `to` must be valid for writing `from.len()` bytes.
unsafe fn copy(from: &[u8], to: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    {
        let (a, b) = (from.as_ptr().addr(), to.addr());
        if from.len() >= STREAM_FROM && a.abs_diff(b) >= from.len() {
            // SAFETY: the caller's promise; they do not overlap.
            return unsafe { stream(from, to) };
        }
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) };
}

/// Copies past the cache. An image is written once and read much later, and a line that is written through the cache
/// is read from memory first; the library's copy avoids that only for pieces of many megabytes. Four places are
/// written in turn, because the memory keeps several pages open at a time: a third faster than one after the other.
///
/// # Safety
/// `to` must be valid for writing `from.len()` bytes, and not overlap `from`.
#[cfg(target_arch = "x86_64")]
#[expect(clippy::cast_ptr_alignment, reason = "loads need none, and stores go to whole lines")]
unsafe fn stream(mut from: &[u8], mut to: *mut u8) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    const LANES: usize = 4;
    const PAGE: usize = 4096;
    // SAFETY: `to` and `from` move on together, and no more is written than `from` has left. Lanes begin on lines,
    // because `to` does after the head and lanes are whole lines.
    unsafe {
        let head = to.align_offset(LINE).min(from.len());
        std::ptr::copy_nonoverlapping(from.as_ptr(), to, head);
        (from, to) = (&from[head..], to.add(head));
        loop {
            let lane = (from.len() / LANES / LINE * LINE).min(PAGE);
            if lane == 0 {
                break;
            }
            for line in (0..lane).step_by(LINE) {
                for at in (0..LANES).map(|i| i * lane + line) {
                    let (source, target) = (from.as_ptr().add(at), to.add(at));
                    for i in (0..LINE).step_by(16) {
                        let word = _mm_loadu_si128(source.add(i).cast::<__m128i>());
                        _mm_stream_si128(target.add(i).cast::<__m128i>(), word);
                    }
                }
            }
            (from, to) = (&from[LANES * lane..], to.add(LANES * lane));
        }
        std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
        // Such stores are ordered with nothing: not even with the atomic that says they are done.
        _mm_sfence();
    }
}

/// `mmap` refuses a length of zero; an empty mapping has one byte that nobody can reach.
fn mapped_len(len: u64) -> io::Result<usize> {
    usize::try_from(len.max(1)).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))
}

fn span(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}

/// Bytes of a [`Mapping`] that nobody else in this process can borrow for writing meanwhile.
#[derive(Debug)]
pub struct Loan<'a> {
    mapping: &'a Mapping,
    start: u64,
    bytes: &'a mut [u8],
}

impl Deref for Loan<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for Loan<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if !self.bytes.is_empty() {
            self.mapping.loans.lock().remove(&self.start);
        }
    }
}

/// What the kernel said to one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Granted {
    Yes,
    /// It was refused, and why.
    No(String),
}

impl From<rustix::io::Result<()>> for Granted {
    fn from(result: rustix::io::Result<()>) -> Granted {
        match result {
            Ok(()) => Granted::Yes,
            Err(e) => Granted::No(io::Error::from(e).to_string()),
        }
    }
}

/// What came of [`Mapping::prepare`]. Its text names each refusal and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// How many bytes were asked for.
    pub bytes: u64,
    /// Whether they belong to a file.
    pub shared: bool,
    /// Advice to use huge pages. Taking the advice is not a promise.
    pub huge_pages: Granted,
    pub locked: Granted,
    /// Brought in and entered into the page table.
    pub resident: Granted,
}

impl Prepared {
    /// Both reports as one: a refusal in either is a refusal.
    #[must_use]
    pub fn and(self, other: Prepared) -> Prepared {
        let both = |a: Granted, b: Granted| if a == Granted::Yes { b } else { a };
        Prepared {
            bytes: self.bytes + other.bytes,
            shared: self.shared || other.shared,
            huge_pages: both(self.huge_pages, other.huge_pages),
            locked: both(self.locked, other.locked),
            resident: both(self.resident, other.resident),
        }
    }
}

impl fmt::Display for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {} memory", self.bytes, if self.shared { "shared" } else { "private" })?;
        let mut line = |what: &str, granted: &Granted, remedy: &str| match granted {
            Granted::Yes => write!(f, "; {what}"),
            Granted::No(why) => write!(f, "; not {what} ({why}): {remedy}"),
        };
        line("locked", &self.locked, "raise the memlock limit (ulimit -l, --ulimit memlock)")?;
        let remedy = "set transparent_hugepage/shmem_enabled or /enabled to advise";
        line("advised to use huge pages", &self.huge_pages, remedy)?;
        line("resident", &self.resident, "pages come in at their first use instead")
    }
}

/// Whether the files of a directory are kept in memory: on tmpfs or ramfs.
pub fn in_memory(dir: &Path) -> io::Result<bool> {
    // As in linux/magic.h.
    Ok(matches!(rustix::fs::statfs(dir)?.f_type as u64, 0x0102_1994 | 0x8584_58f6))
}

/// Sleeps while `word` is `seen`, until it is woken or `timeout` has passed. May return early.
pub fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // Woken, timed out, interrupted or changed already: the caller looks again in every case.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
}

/// Wakes everybody who sleeps on `word`, in any process.
pub fn futex_wake_all(word: &AtomicU32) {
    // Fails only for an address that is not mapped.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// A file of `len` bytes in memory, without a name in any directory, that cannot shrink. Nothing is reserved.
pub fn memfd(name: &str, len: u64) -> io::Result<File> {
    let fd: OwnedFd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let file = File::from(fd);
    file.set_len(len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    proptest! {
        #[test]
        fn loans_of_a_mapping_never_overlap(
            asked in proptest::collection::vec((0u64..4096, 0u64..600, any::<bool>()), 1..40),
        ) {
            let memory = Mapping::anonymous(4096).unwrap();
            let mut held: Vec<(Range<u64>, Loan<'_>)> = Vec::new();
            for (start, len, give_back) in asked {
                let range = start..start + len;
                let taken = held.iter().any(|(r, _)| r.start.max(range.start) < r.end.min(range.end));
                match memory.lend(range.clone()) {
                    Ok(loan) => {
                        prop_assert!(!taken && range.end <= 4096);
                        prop_assert_eq!(loan.len() as u64, len);
                        held.push((range, loan));
                    }
                    Err(LoanError::Taken { .. }) => prop_assert!(taken),
                    Err(LoanError::Outside { .. }) => prop_assert!(range.end > 4096),
                    Err(e @ LoanError::ReadOnly { .. }) => prop_assert!(false, "{}", e),
                }
                if give_back && !held.is_empty() {
                    held.swap_remove(start as usize % held.len());
                }
            }
            drop(held);
            prop_assert!(memory.lend(0..4096).is_ok(), "all were given back");
        }
    }

    proptest! {
        #[test]
        fn a_copy_into_a_mapping_changes_its_range_and_nothing_else(
            offset in 0u64..200, len in 0usize..90_000, skew in 0usize..70,
        ) {
            let memory = Mapping::anonymous(91_000).unwrap();
            memory.lend(0..91_000).unwrap().fill(0xA5);
            let source: Vec<u8> = (0..len + skew).map(|i| (i * 31 / 7) as u8).collect();
            memory.copy_in(offset, &source[skew..]);
            let (start, end) = (offset as usize, offset as usize + len);
            let all = memory.bytes(0..91_000);
            prop_assert_eq!(&all[start..end], &source[skew..]);
            prop_assert!(all[..start].iter().chain(&all[end..]).all(|b| *b == 0xA5));
        }
    }

    #[test]
    fn a_copy_within_a_mapping_may_overlap() {
        const LEN: u64 = 40_000;
        let memory = Mapping::anonymous(3 * LEN).unwrap();
        let bytes: Vec<u8> = (0..3 * LEN as u32).map(|i| (i * 7 / 3) as u8).collect();
        for (from, to) in [(0, 100), (100, 0), (0, LEN - 1), (LEN - 1, 0), (0, LEN), (LEN, 0)] {
            memory.copy_in(0, &bytes);
            memory.copy_in(to, memory.bytes(from..from + LEN));
            assert_eq!(memory.bytes(to..to + LEN), &bytes[from as usize..(from + LEN) as usize]);
        }
    }

    #[test]
    fn a_loan_of_a_mapping_for_reading_is_refused() {
        let file = memfd("windlass-test", 100).unwrap();
        let read = Mapping::map(&file, 100, Access::Read).unwrap();
        let e = read.lend(0..1).unwrap_err();
        assert_eq!(e, LoanError::ReadOnly { range: 0..1 });
        assert_eq!(e.kind(), Kind::Bug);
    }

    #[test]
    fn a_mapping_longer_than_its_file_is_refused() {
        let file = memfd("windlass-test", 4096).unwrap();
        let e = Mapping::map(&file, 4097, Access::Read).unwrap_err();
        assert!(e.to_string().contains("4096") && e.to_string().contains("4097"), "{e}");
        assert!(file.set_len(10).is_err(), "a memfd is sealed against shrinking");
    }

    #[test]
    fn access_beyond_a_mapping_panics() {
        let memory = Mapping::anonymous(10).unwrap();
        memory.copy_in(4, &[1; 6]);
        let panics = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
        assert!(panics(&|| memory.copy_in(5, &[1; 6])));
        assert!(panics(&|| memory.copy_in(u64::MAX, &[1])));
        assert!(panics(&|| memory.copy_out(9, &mut [0; 2])));
        assert!(panics(&|| drop(memory.bytes(0..11).to_vec())));
        assert_eq!(memory.words().len(), 1);
        assert_eq!(memory.bytes(0..10), [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
        let empty = Mapping::anonymous(0).unwrap();
        assert!(empty.bytes(0..0).is_empty() && empty.is_empty() && empty.prepare().bytes == 0);
    }

    #[test]
    fn two_mappings_of_a_file_are_the_same_memory() {
        let file = memfd("windlass-test", 5000).unwrap();
        let (a, b) =
            (Mapping::map(&file, 5000, Access::Write).unwrap(), Mapping::map(&file, 5000, Access::Read));
        a.lend(4990..5000).unwrap().copy_from_slice(b"0123456789");
        let mut out = [0; 10];
        b.unwrap().copy_out(4990, &mut out);
        assert_eq!(&out, b"0123456789");
    }

    #[test]
    fn a_futex_wakes_a_waiter_and_gives_up_after_its_timeout() {
        let memory = Arc::new(Mapping::map(&memfd("windlass-test", 8).unwrap(), 8, Access::Write).unwrap());
        let begun = Instant::now();
        futex_wait(memory.half(0), 0, Duration::from_millis(20));
        assert!(begun.elapsed() >= Duration::from_millis(20));
        futex_wait(memory.half(0), 1, Duration::from_mins(1));
        let other = Arc::clone(&memory);
        let waiter = std::thread::spawn(move || {
            while other.half(0).load(Ordering::SeqCst) == 0 {
                futex_wait(other.half(0), 0, Duration::from_mins(1));
            }
        });
        memory.half(0).store(1, Ordering::SeqCst);
        futex_wake_all(memory.half(0));
        waiter.join().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn what_the_kernel_refuses_is_named_with_its_remedy() {
        let memory = Mapping::anonymous(1 << 20).unwrap();
        let report = memory.prepare();
        assert_eq!(report.bytes, 1 << 20);
        assert_eq!(memory.bytes(0..1 << 20).iter().find(|&&b| b != 0), None);
        let refused = Prepared { locked: Granted::No("Operation not permitted".into()), ..report.clone() };
        let both = report.and(refused);
        let text = both.to_string();
        assert!(
            text.contains("not locked (Operation not permitted)") && text.contains("ulimit -l"),
            "{text}"
        );
        assert!(text.starts_with("2097152 bytes of private memory"), "{text}");
    }
}
