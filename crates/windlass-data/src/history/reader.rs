//! A delta file read record by record, in bounded memory.
//!
//! Owns: where the parts of a file are, and one part at a time, checked. A history's files have their blocks in ascending
//! order, because the sealer and the joiner write them so; a file of another order is refused.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use windlass_core::delta::container::{Entry, Piece};
use windlass_core::delta::{DeltaError, DeltaHeader, Record};

/// More than any header has.
const FRONT: u64 = 4096;
/// Bytes of the end of a container.
const END: u64 = 32;

/// Why a file cannot be read as a delta.
#[derive(Debug)]
pub(super) enum Fault {
    Io(io::Error),
    Delta(DeltaError),
}

impl From<io::Error> for Fault {
    fn from(e: io::Error) -> Fault {
        Fault::Io(e)
    }
}

impl From<DeltaError> for Fault {
    fn from(e: DeltaError) -> Fault {
        Fault::Delta(e)
    }
}

fn malformed(what: &'static str, why: &'static str) -> Fault {
    Fault::Delta(DeltaError::Malformed { what, why })
}

fn front(file: &File, len: u64) -> Result<(DeltaHeader, u64), Fault> {
    let mut bytes = vec![0; len.min(FRONT) as usize];
    file.read_exact_at(&mut bytes, 0)?;
    let (header, header_len) = DeltaHeader::parse(&bytes)?;
    Ok((header, header_len as u64))
}

/// The header of a file of `len` bytes and how many units it changes, if both of its ends are there. What lies
/// between is checked when it is read.
pub(super) fn ends(file: &File, len: u64) -> Result<(DeltaHeader, u64), Fault> {
    let (header, header_len) = front(file, len)?;
    let at = len.checked_sub(END).filter(|&at| at >= header_len).ok_or(DeltaError::Truncated {
        what: "end",
        need: header_len + END,
        have: len,
    })?;
    let mut tail = [0; END as usize];
    file.read_exact_at(&mut tail, at)?;
    match Piece::parse(&tail, header.blocks)? {
        Piece::End { changes, .. } => Ok((header, changes)),
        Piece::Part(..) => Err(malformed("end", "a part is in its place")),
    }
}

/// The parts of a delta file, as their heads tell.
#[derive(Debug)]
pub(super) struct Parts {
    blocks: u32,
    places: Vec<Place>,
}

#[derive(Debug)]
struct Place {
    /// The block of its first record.
    first: u32,
    len: u32,
    at: u64,
}

impl Parts {
    /// Finds the parts of a file of `len` bytes, and makes sure that the end is one and counts them.
    pub(super) fn find(file: &File, len: u64) -> Result<Parts, Fault> {
        let (header, mut at) = front(file, len)?;
        let blocks = header.blocks;
        let mut parts = Parts { blocks, places: Vec::new() };
        let mut all_records = 0;
        loop {
            let left = len - at;
            let cut = |need| DeltaError::Truncated { what: "parts", need, have: left };
            let mut head = [0; Piece::GLANCE];
            let head = &mut head[..left.min(Piece::GLANCE as u64) as usize];
            file.read_exact_at(head, at)?;
            let take = Piece::len(head)?.ok_or_else(|| cut(Piece::GLANCE as u64))?;
            if take as u64 > left {
                return Err(cut(take as u64).into());
            }
            if let Some((records, first)) = Piece::glance(head)? {
                if first >= blocks {
                    return Err(malformed("index", "it names a block beyond the last"));
                }
                if parts.places.last().is_some_and(|p| p.first >= first) {
                    return Err(malformed("order", "its blocks do not ascend"));
                }
                parts.places.push(Place { first, len: take as u32, at });
                all_records += u64::from(records);
                at += take as u64;
                continue;
            }
            let mut end = [0; END as usize];
            file.read_exact_at(&mut end, at)?;
            return match Piece::parse(&end, blocks)? {
                Piece::End { parts: p, records: r, .. }
                    if (p as usize, r) != (parts.places.len(), all_records) =>
                {
                    Err(malformed("end", "it counts other parts or records than there are"))
                }
                _ if left > END => Err(malformed("end", "more bytes follow it")),
                _ => Ok(parts),
            };
        }
    }
}

/// The records of a delta file, one after another. Holds one part.
pub(super) struct Records<'f> {
    file: &'f File,
    parts: Arc<Parts>,
    /// Which part the record at hand is in.
    part: usize,
    /// The part, once it is needed: until then there are no entries.
    bytes: Vec<u8>,
    entries: Vec<Entry>,
    next: usize,
}

impl<'f> Records<'f> {
    /// At the first record of a file of `len` bytes.
    pub(super) fn open(file: &'f File, len: u64) -> Result<Records<'f>, Fault> {
        Ok(Records::of(file, Arc::new(Parts::find(file, len)?)))
    }

    /// At the first record of a file whose parts are known.
    pub(super) fn of(file: &'f File, parts: Arc<Parts>) -> Records<'f> {
        Records { file, parts, part: 0, bytes: Vec::new(), entries: Vec::new(), next: 0 }
    }

    /// The block of the record at hand.
    pub(super) fn block(&self) -> Option<u32> {
        let unread = || self.parts.places.get(self.part).map(|p| p.first);
        self.entries.get(self.next).map(|e| e.block).or_else(unread)
    }

    /// The record at hand.
    pub(super) fn record(&mut self) -> Result<Option<Record<'_>>, Fault> {
        self.load()?;
        let Some(e) = self.entries.get(self.next) else { return Ok(None) };
        let payload = self.bytes.get(e.offset..e.offset + e.len as usize);
        Ok(payload.map(|payload| Record { block: e.block, mode: e.mode, sum: e.sum, payload }))
    }

    /// Goes on to the next record.
    pub(super) fn advance(&mut self) -> Result<(), Fault> {
        self.load()?;
        self.go(self.next + 1);
        Ok(())
    }

    /// Goes on to the first record of this block or a later one; never back.
    pub(super) fn seek(&mut self, block: u32) -> Result<(), Fault> {
        if self.block().is_none_or(|at| at >= block) {
            return Ok(());
        }
        // The last part that begins at or before it.
        let part = self.parts.places.partition_point(|p| p.first <= block) - 1;
        if part > self.part {
            self.part = part;
            self.entries.clear();
        }
        self.load()?;
        self.go(self.entries.partition_point(|e| e.block < block));
        Ok(())
    }

    /// To an entry of this part, or to the next part.
    fn go(&mut self, next: usize) {
        self.next = next;
        if next >= self.entries.len() {
            self.part += 1;
            self.entries.clear();
            self.next = 0;
        }
    }

    /// Reads the part at hand, if that was not done.
    fn load(&mut self) -> Result<(), Fault> {
        let Some(place) = self.parts.places.get(self.part).filter(|_| self.entries.is_empty()) else {
            return Ok(());
        };
        self.next = 0;
        self.bytes.resize(place.len as usize, 0);
        self.file.read_exact_at(&mut self.bytes, place.at)?;
        let Piece::Part(entries, _) = Piece::parse(&self.bytes, self.parts.blocks)? else {
            return Err(malformed("parts", "there is an end among them"));
        };
        let end = self.parts.places.get(self.part + 1).map_or(self.parts.blocks, |after| after.first);
        let begins = entries.first().is_some_and(|e| e.block == place.first);
        if !begins || entries.last().is_some_and(|e| e.block >= end) {
            return Err(malformed("order", "its blocks do not ascend"));
        }
        self.entries = entries;
        Ok(())
    }
}
