//! The file or stream that holds a delta.

use std::ops::Range;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{DeltaError, Encoded, Mode, Record};
use crate::digest::BlockSum;
use crate::identity::{CutsHash, Identity, Incarnation, LayoutHash, ModelId, StateDigest};
use crate::manifest::{BLOCK_UNITS, Manifest};
use crate::varint::{put_varint, take_varint};

const MAGIC: &[u8; 8] = b"WLDELTA1";
const PART: &[u8; 4] = b"PART";
const END: &[u8; 4] = b"END\0";
/// Bytes in front of a part's index.
pub const PART_HEAD: usize = 24;
const END_LEN: usize = 32;
const FIXED_HEADER: usize = 8 + 4 + 4 * 16 + 4 * 8 + 4 + 2;
const MAX_HEADER: usize = FIXED_HEADER + ModelId::MAX_LEN + 8;

/// The most bytes of index and payload in a part.
pub const MAX_PART: usize = 64 << 20;
/// A writer closes a part when its payload reaches this many bytes.
pub const FULL_PAYLOAD: usize = 64 << 10;
/// A writer closes a part when it has this many records.
pub const FULL_RECORDS: usize = 1024;
/// Bytes of a block of the widest unit, and of any record.
const MAX_RECORD: u32 = BLOCK_UNITS as u32 * 8;

/// Base and target of a delta, and the layout it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaHeader {
    pub model_id: ModelId,
    /// Incarnation and version of the base.
    pub base: (Incarnation, u64),
    /// Incarnation and version of the target.
    pub target: (Incarnation, u64),
    /// The layout of both.
    pub layout_hash: LayoutHash,
    /// The cut table of the records.
    pub cuts_hash: CutsHash,
    /// The digest of the base.
    pub base_digest: StateDigest,
    /// The digest of the target.
    pub target_digest: StateDigest,
    /// How many blocks the cut table has.
    pub blocks: u32,
}

impl DeltaHeader {
    /// The base as an identity.
    pub fn base_identity(&self) -> Identity {
        self.identity(self.base)
    }

    /// The target as an identity.
    pub fn target_identity(&self) -> Identity {
        self.identity(self.target)
    }

    fn identity(&self, (incarnation, version): (Incarnation, u64)) -> Identity {
        Identity { model_id: self.model_id.clone(), incarnation, version }
    }

    /// The bytes at the front of a container. Their number depends on the model id alone, so that a writer
    /// can put the digests in when it knows them.
    pub fn to_bytes(&self) -> Vec<u8> {
        let id = self.model_id.as_str().as_bytes();
        let len = FIXED_HEADER + id.len() + 8;
        let mut out = Vec::with_capacity(len);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(len as u32).to_le_bytes());
        for hash in [self.layout_hash.0, self.cuts_hash.0, self.base_digest.0, self.target_digest.0] {
            out.extend_from_slice(&hash);
        }
        for n in [self.base.0.0, self.base.1, self.target.0.0, self.target.1] {
            out.extend_from_slice(&n.to_le_bytes());
        }
        out.extend_from_slice(&self.blocks.to_le_bytes());
        out.extend_from_slice(&(id.len() as u16).to_le_bytes());
        out.extend_from_slice(id);
        let sum = xxh3_64(&out);
        out.extend_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads the header at the front of `bytes` and returns its length.
    pub fn parse(bytes: &[u8]) -> Result<(DeltaHeader, usize), DeltaError> {
        if !bytes.starts_with(MAGIC) {
            return Err(DeltaError::Magic { found: bytes.iter().take(8).copied().collect() });
        }
        let mut c = Cursor { what: "header", bytes, at: 8 };
        let len = c.u32()? as usize;
        if !(FIXED_HEADER + 8..=MAX_HEADER).contains(&len) {
            let (value, limit) = (len as u64, MAX_HEADER as u64);
            return Err(DeltaError::Limit { what: "the header's length", value, limit });
        }
        c.bytes = bytes.get(..len).ok_or_else(|| c.truncated(len))?;
        let sum = c.bytes.last_chunk::<8>().map_or(0, |s| u64::from_le_bytes(*s));
        check_sum("header", xxh3_64(&c.bytes[..len - 8]), sum)?;
        let layout_hash = LayoutHash(c.take()?);
        let cuts_hash = CutsHash(c.take()?);
        let base_digest = StateDigest(c.take()?);
        let target_digest = StateDigest(c.take()?);
        let base = (Incarnation(c.u64()?), c.u64()?);
        let target = (Incarnation(c.u64()?), c.u64()?);
        let blocks = c.u32()?;
        let id_len = usize::from(u16::from_le_bytes(c.take()?));
        if FIXED_HEADER + id_len + 8 != len {
            return Err(DeltaError::Malformed { what: "header", why: "its lengths do not add up" });
        }
        let id = std::str::from_utf8(&c.bytes[FIXED_HEADER..FIXED_HEADER + id_len])
            .map_err(|_| DeltaError::Malformed { what: "header", why: "the model id is not UTF-8" })?;
        let model_id = ModelId::new(id)?;
        let header = DeltaHeader {
            model_id,
            base,
            target,
            layout_hash,
            cuts_hash,
            base_digest,
            target_digest,
            blocks,
        };
        Ok((header, len))
    }

    /// Whether the delta is for images of this manifest, cut in this way.
    pub fn check(&self, manifest: &Manifest) -> Result<(), DeltaError> {
        let wrong = |what, found: String, expected: String| DeltaError::WrongLayout { what, found, expected };
        if self.layout_hash != manifest.layout_hash() {
            let (found, expected) = (self.layout_hash.to_string(), manifest.layout_hash().to_string());
            return Err(wrong("layout", found, expected));
        }
        if self.cuts_hash != manifest.cuts_hash() || self.blocks != manifest.cuts().blocks() {
            let (found, expected) = (self.cuts_hash.to_string(), manifest.cuts_hash().to_string());
            return Err(wrong("cut table", found, expected));
        }
        Ok(())
    }
}

/// Collects records into parts.
#[derive(Debug, Default)]
pub struct PartBuilder {
    records: u32,
    last: Option<u32>,
    index: Vec<u8>,
    payload: Vec<u8>,
    parts: u32,
    all_records: u64,
    changes: u64,
}

impl PartBuilder {
    /// An empty builder.
    pub fn new() -> PartBuilder {
        PartBuilder::default()
    }

    /// Adds the record of a block. Blocks of one part must be ascending; when one is not, or when the part
    /// is full, it is closed and appended to `out` first.
    pub fn push(&mut self, block: u32, encoded: &Encoded, payload: &[u8], out: &mut Vec<u8>) {
        let full = self.payload.len() >= FULL_PAYLOAD || self.records as usize >= FULL_RECORDS;
        if full || self.last.is_some_and(|last| last >= block) {
            self.close(out);
        }
        put_varint(&mut self.index, self.last.map_or(block, |last| block - last - 1));
        self.index.push(encoded.mode.code());
        put_varint(&mut self.index, payload.len() as u32);
        self.index.extend_from_slice(&encoded.sum.to_bytes());
        self.payload.extend_from_slice(payload);
        self.last = Some(block);
        self.records += 1;
        self.changes += u64::from(encoded.changes);
    }

    /// Closes the part, if it has records, and appends it to `out`.
    pub fn close(&mut self, out: &mut Vec<u8>) {
        if self.records == 0 {
            return;
        }
        let head = out.len();
        out.extend_from_slice(PART);
        out.extend_from_slice(&self.records.to_le_bytes());
        out.extend_from_slice(&(self.index.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.payload.len() as u32).to_le_bytes());
        let mut h = Xxh3::new();
        h.update(&out[head..]);
        h.update(&self.index);
        h.update(&self.payload);
        out.extend_from_slice(&h.digest().to_le_bytes());
        out.extend_from_slice(&self.index);
        out.extend_from_slice(&self.payload);
        self.parts += 1;
        self.all_records += u64::from(self.records);
        self.records = 0;
        self.last = None;
        self.index.clear();
        self.payload.clear();
    }

    /// Closes the last part and appends it and the end of the container to `out`.
    pub fn finish(mut self, out: &mut Vec<u8>) {
        self.close(out);
        put_end(out, self.parts, self.all_records, self.changes);
    }

    /// Changes counted so far.
    pub fn changes(&self) -> u64 {
        self.changes
    }
}

/// Bytes that a record takes in the index of its part: `gap` is the number of blocks between it and the previous one, or
/// its own number if it is the first.
pub fn index_len(gap: u32, payload: u32) -> usize {
    let varint = |value: u32| (32 - (value | 1).leading_zeros()).div_ceil(7) as usize;
    varint(gap) + 1 + varint(payload) + 16
}

/// Appends the end of a container. A caller that builds all parts with one builder uses [`PartBuilder::finish`] instead.
pub fn put_end(out: &mut Vec<u8>, parts: u32, records: u64, changes: u64) {
    let at = out.len();
    out.extend_from_slice(END);
    out.extend_from_slice(&parts.to_le_bytes());
    out.extend_from_slice(&records.to_le_bytes());
    out.extend_from_slice(&changes.to_le_bytes());
    let sum = xxh3_64(&out[at..]);
    out.extend_from_slice(&sum.to_le_bytes());
}

/// A record's place in a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub block: u32,
    /// The form of the payload.
    pub mode: Mode,
    /// The block's sum after the change.
    pub sum: BlockSum,
    /// Where the payload begins, counted from the front of the parsed bytes.
    pub offset: usize,
    /// How long the payload is.
    pub len: u32,
}

/// One piece of a container after the header.
#[derive(Debug)]
pub enum Piece {
    /// A part, checked: its records, and how many bytes it takes.
    Part(Vec<Entry>, usize),
    /// The end: how many parts and records there must have been, how many units changed, and its length.
    End {
        /// Parts before the end.
        parts: u32,
        records: u64,
        changes: u64,
        len: usize,
    },
}

impl Piece {
    /// The head of a part, and the number that its index begins with.
    pub const GLANCE: usize = PART_HEAD + 5;

    /// How many bytes from the front of `bytes` the next piece takes, once known.
    pub fn len(bytes: &[u8]) -> Result<Option<usize>, DeltaError> {
        let Some(tag) = bytes.first_chunk::<4>() else { return Ok(None) };
        match tag {
            END => Ok(Some(END_LEN)),
            PART => {
                let Some(head) = bytes.first_chunk::<PART_HEAD>() else { return Ok(None) };
                let [_, _, index, payload, ..] = words(head);
                let len = index as usize + payload as usize;
                if len > MAX_PART {
                    let (value, limit) = (len as u64, MAX_PART as u64);
                    return Err(DeltaError::Limit { what: "a part's length", value, limit });
                }
                Ok(Some(PART_HEAD + len))
            }
            _ => Err(DeltaError::Malformed { what: "stream", why: "neither a part nor the end follows" }),
        }
    }

    /// What the first [`Piece::GLANCE`] bytes of a part tell: how many records it has, and the block of the first. `None` if
    /// it is the end. A part's sum is over this too, and is looked at only when the part is [parsed](Piece::parse).
    pub fn glance(bytes: &[u8]) -> Result<Option<(u32, u32)>, DeltaError> {
        if bytes.starts_with(END) {
            return Ok(None);
        }
        let have = bytes.len() as u64;
        let cut = DeltaError::Truncated { what: "parts", need: Piece::GLANCE as u64, have };
        let Some((head, mut index)) = bytes.split_first_chunk::<PART_HEAD>() else { return Err(cut) };
        let bad = |why| DeltaError::Malformed { what: "index", why };
        let first = take_varint(&mut index).map_err(|fault| bad(fault.why()))?;
        Ok(Some((words(head)[1], first)))
    }

    /// Reads the piece at the front of `bytes`. Blocks must be below `blocks`.
    pub fn parse(bytes: &[u8], blocks: u32) -> Result<Piece, DeltaError> {
        let have = bytes.len() as u64;
        let cut = |need: usize| DeltaError::Truncated { what: "parts", need: need as u64, have };
        let len = Piece::len(bytes)?.ok_or_else(|| cut(END_LEN))?;
        let piece = bytes.get(..len).ok_or_else(|| cut(len))?;
        if piece.starts_with(END) {
            let mut c = Cursor { what: "end", bytes: piece, at: 4 };
            let (parts, records, changes, sum) = (c.u32()?, c.u64()?, c.u64()?, c.u64()?);
            check_sum("end", xxh3_64(&piece[..END_LEN - 8]), sum)?;
            return Ok(Piece::End { parts, records, changes, len });
        }
        let head = piece.first_chunk::<PART_HEAD>().ok_or_else(|| cut(PART_HEAD))?;
        let [_, records, index_len, _, a, b] = words(head);
        let mut h = Xxh3::new();
        h.update(&head[..16]);
        h.update(&piece[PART_HEAD..]);
        check_sum("part", h.digest(), u64::from(a) | u64::from(b) << 32)?;
        let index = &piece[PART_HEAD..PART_HEAD + index_len as usize];
        let entries = parse_index(index, records, PART_HEAD + index.len(), len, blocks)?;
        Ok(Piece::Part(entries, len))
    }
}

fn parse_index(
    mut index: &[u8],
    records: u32,
    mut offset: usize,
    end: usize,
    blocks: u32,
) -> Result<Vec<Entry>, DeltaError> {
    let bad = |why| DeltaError::Malformed { what: "index", why };
    // Each record takes at least 19 bytes of index, so this allocates at most a few times the index.
    if records == 0 || records as usize > index.len() / 19 {
        return Err(bad("it is too short for its records"));
    }
    let mut entries = Vec::with_capacity(records as usize);
    let mut next = 0u64;
    for _ in 0..records {
        let block = next + u64::from(take_varint(&mut index).map_err(|fault| bad(fault.why()))?);
        if block >= u64::from(blocks) {
            return Err(bad("it names a block beyond the last"));
        }
        next = block + 1;
        let (&code, rest) = index.split_first().ok_or_else(|| bad("it ends within a record"))?;
        let mode = Mode::from_code(code).ok_or_else(|| bad("it has a mode that this build does not know"))?;
        index = rest;
        let len = take_varint(&mut index).map_err(|fault| bad(fault.why()))?;
        if len == 0 || len > MAX_RECORD {
            return Err(bad("a payload is empty or longer than any block"));
        }
        let (sum, rest) = index.split_first_chunk::<16>().ok_or_else(|| bad("it ends within a record"))?;
        index = rest;
        entries.push(Entry { block: block as u32, mode, sum: BlockSum::from_bytes(*sum), offset, len });
        offset += len as usize;
    }
    if !index.is_empty() || offset != end {
        return Err(bad("its lengths do not add up to the part's"));
    }
    Ok(entries)
}

/// A whole delta, checked, over the bytes that hold it.
#[derive(Clone, Debug)]
pub struct Delta<'a> {
    pub header: DeltaHeader,
    pub changes: u64,
    /// How many parts it came in.
    pub parts: u32,
    bytes: &'a [u8],
    entries: Vec<Entry>,
}

impl<'a> Delta<'a> {
    /// Parses a container and checks all of its hashes.
    pub fn parse(bytes: &'a [u8]) -> Result<Delta<'a>, DeltaError> {
        let (header, mut at) = DeltaHeader::parse(bytes)?;
        let mut pieces = Vec::new();
        loop {
            let piece = Piece::parse(&bytes[at..], header.blocks)?;
            let (len, is_end) = match &piece {
                Piece::Part(_, len) => (*len, false),
                Piece::End { len, .. } => (*len, true),
            };
            pieces.push((at, piece));
            at += len;
            if is_end {
                return Delta::assemble(bytes, header, pieces);
            }
        }
    }

    /// The header of a container and the positions of its pieces, for callers that parse them in several threads
    /// ([`Piece::parse`]) before they [assemble](Delta::assemble) them. Reads only their lengths. `None` if that
    /// fails: [`Delta::parse`] names the fault.
    pub fn pieces(bytes: &[u8]) -> Option<(DeltaHeader, Vec<Range<usize>>)> {
        let (header, mut at) = DeltaHeader::parse(bytes).ok()?;
        let mut pieces = Vec::new();
        while let Some(rest) = bytes.get(at..).filter(|r| !r.is_empty()) {
            let len = Piece::len(rest).ok().flatten().filter(|len| *len > 0 && *len <= rest.len())?;
            pieces.push(at..at + len);
            at += len;
        }
        Some((header, pieces))
    }

    /// A container of all its pieces, in their order, each with where it begins.
    pub fn assemble(
        bytes: &'a [u8],
        header: DeltaHeader,
        pieces: Vec<(usize, Piece)>,
    ) -> Result<Delta<'a>, DeltaError> {
        let malformed = |why| DeltaError::Malformed { what: "end", why };
        let mut entries: Vec<Entry> = Vec::new();
        let (mut seen_parts, mut end) = (0, None);
        for (at, piece) in pieces {
            match piece {
                _ if end.is_some() => return Err(malformed("more bytes follow it")),
                Piece::Part(mut these, _) => {
                    these.iter_mut().for_each(|e| e.offset += at);
                    entries.append(&mut these);
                    seen_parts += 1;
                }
                Piece::End { parts, records, changes, len } => {
                    end = Some((parts, records, changes, at + len));
                }
            }
        }
        let (parts, records, changes, end) = end.ok_or_else(|| malformed("it is missing"))?;
        if parts != seen_parts || records != entries.len() as u64 {
            return Err(malformed("it counts other parts or records than there are"));
        }
        if end != bytes.len() {
            return Err(malformed("more bytes follow it"));
        }
        entries.sort_unstable_by_key(|e| e.block);
        if let Some(twice) = entries.windows(2).find(|w| w[0].block == w[1].block) {
            return Err(DeltaError::DuplicateBlock { block: twice[0].block });
        }
        Ok(Delta { header, changes, parts, bytes, entries })
    }

    /// Where the records are, by ascending block.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The record of an entry of this delta.
    pub fn record(&self, entry: &Entry) -> Record<'a> {
        let payload = &self.bytes[entry.offset..entry.offset + entry.len as usize];
        Record { block: entry.block, mode: entry.mode, sum: entry.sum, payload }
    }

    /// All records, by ascending block.
    pub fn records(&self) -> impl ExactSizeIterator<Item = Record<'a>> {
        self.entries.iter().map(|e| self.record(e))
    }

    /// The record of a block, if it changed.
    pub fn find(&self, block: u32) -> Option<Record<'a>> {
        let i = self.entries.binary_search_by_key(&block, |e| e.block).ok()?;
        Some(self.record(&self.entries[i]))
    }

    /// The container, from which [`Entry::offset`] counts.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Bytes of the container.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }
}

fn words(head: &[u8; PART_HEAD]) -> [u32; 6] {
    let (words, _) = head.as_chunks::<4>();
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

fn check_sum(what: &'static str, found: u64, expected: u64) -> Result<(), DeltaError> {
    if found == expected { Ok(()) } else { Err(DeltaError::Damaged { what, found, expected }) }
}

struct Cursor<'a> {
    what: &'static str,
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn truncated(&self, need: usize) -> DeltaError {
        DeltaError::Truncated { what: self.what, need: need as u64, have: self.bytes.len() as u64 }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], DeltaError> {
        let taken = self.bytes.get(self.at..).and_then(|b| b.first_chunk::<N>());
        let taken = *taken.ok_or_else(|| self.truncated(self.at + N))?;
        self.at += N;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, DeltaError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, DeltaError> {
        self.take().map(u64::from_le_bytes)
    }
}
