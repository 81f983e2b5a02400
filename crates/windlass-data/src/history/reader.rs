//! A delta file read record by record, in bounded memory.
//!
//! Owns: one part at a time, checked. A history's files have their blocks in ascending order, because the sealer
//! and the joiner write them so; a file of another order is refused.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use windlass_core::delta::container::{Entry, Piece};
use windlass_core::delta::{DeltaError, DeltaHeader, Record};

/// More than any header has.
const FRONT: u64 = 4096;
/// The head of a part, and less than an end.
const PEEK: u64 = 24;
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

/// The records of a delta file.
pub(super) struct Records<'f> {
    file: &'f File,
    blocks: u32,
    at: u64,
    len: u64,
    part: Vec<u8>,
    entries: Vec<Entry>,
    next: usize,
    last: Option<u32>,
    /// Parts and records so far.
    seen: (u32, u64),
}

impl<'f> Records<'f> {
    /// At the first record of a file of `len` bytes.
    pub(super) fn open(file: &'f File, len: u64) -> Result<Records<'f>, Fault> {
        let (header, at) = front(file, len)?;
        let mut records = Records {
            file,
            blocks: header.blocks,
            at,
            len,
            part: Vec::new(),
            entries: Vec::new(),
            next: 0,
            last: None,
            seen: (0, 0),
        };
        records.load()?;
        Ok(records)
    }

    /// The block of the record at hand.
    pub(super) fn block(&self) -> Option<u32> {
        self.entries.get(self.next).map(|e| e.block)
    }

    /// The record at hand.
    pub(super) fn record(&self) -> Option<Record<'_>> {
        let e = self.entries.get(self.next)?;
        let payload = self.part.get(e.offset..e.offset + e.len as usize)?;
        Some(Record { block: e.block, mode: e.mode, sum: e.sum, payload })
    }

    /// Goes on to the next record.
    pub(super) fn advance(&mut self) -> Result<(), Fault> {
        self.next += 1;
        if self.next < self.entries.len() { Ok(()) } else { self.load() }
    }

    /// Reads the next part, or makes sure that the end is one.
    fn load(&mut self) -> Result<(), Fault> {
        self.entries.clear();
        self.next = 0;
        let left = self.len - self.at;
        self.read(left.min(PEEK))?;
        let cut = |need| DeltaError::Truncated { what: "parts", need, have: left };
        let len = Piece::len(&self.part)?.ok_or_else(|| cut(PEEK))? as u64;
        if len > left {
            return Err(cut(len).into());
        }
        self.read(len)?;
        self.at += len;
        match Piece::parse(&self.part, self.blocks)? {
            Piece::Part(entries, _) => {
                let first = entries.first().map(|e| e.block);
                if first <= self.last {
                    return Err(malformed("order", "its blocks do not ascend"));
                }
                self.last = entries.last().map(|e| e.block);
                self.seen = (self.seen.0 + 1, self.seen.1 + entries.len() as u64);
                self.entries = entries;
                Ok(())
            }
            Piece::End { parts, records, .. } if (parts, records) != self.seen => {
                Err(malformed("end", "it counts other parts or records than there are"))
            }
            Piece::End { .. } if self.at != self.len => Err(malformed("end", "more bytes follow it")),
            Piece::End { .. } => Ok(()),
        }
    }

    fn read(&mut self, len: u64) -> Result<(), Fault> {
        self.part.resize(len as usize, 0);
        self.file.read_exact_at(&mut self.part, self.at)?;
        Ok(())
    }
}
