//! Sum tables on disk.
//!
//! Owns: the file beside each image that holds its block sums, so that an agent that comes back need not read the
//! image to know them. Called by the sealer and by whoever opens an image. Must not: believe a table that is
//! damaged, cut short or of another layout; the caller compares [`TableId`] with the slot that it lies beside and
//! sums the image anew where they differ.
//!
//! ```text
//! file = "WLSUMS1\0" · incarnation u64 · version u64 · slot id u64 · digest 16 · layout hash 16 · cuts hash 16
//!        · blocks u32 · zero u32 · sums, 16 bytes for each block · XXH3-64 of all before u64
//! ```
//!
//! All integers are little-endian. A table is written to a temporary file and renamed when it is whole. The digest
//! is that of the version, which is not that of the table where the table has only a part's sums.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use windlass_core::StateDigest;
use windlass_core::digest::{BlockSum, SumTable};
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, Version};
use windlass_core::manifest::Manifest;
use xxhash_rust::xxh3::Xxh3;

use super::draft::Draft;
use crate::file::io_kind;

const MAGIC: &[u8; 8] = b"WLSUMS1\0";
const HEAD: usize = 8 + 3 * 8 + 3 * 16 + 8;
const SUM: usize = 16;
/// Sums that are read or written at a time.
const CHUNK: usize = 4096;

/// What can be wrong with a table on disk.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("cannot {action} the sum table {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{} is not a sum table: it begins with {found:02x?}; sum the image anew", path.display())]
    Magic { path: PathBuf, found: Vec<u8> },
    /// It is longer or shorter than a table of this image.
    #[error("the sum table {} has {have} bytes instead of {need}; sum the image anew", path.display())]
    Length { path: PathBuf, have: u64, need: u64 },
    /// It is for another layout, cut table or number of blocks.
    #[error("the sum table {} is for {what} {found} instead of {expected}; sum the image anew", path.display())]
    Foreign { path: PathBuf, what: &'static str, found: String, expected: String },
    #[error(
        "the sum table {} is damaged: its check sum is {found:016x} instead of {expected:016x}; sum the image anew",
        path.display()
    )]
    Damaged { path: PathBuf, found: u64, expected: u64 },
}

impl TableError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            TableError::Io { source, .. } => io_kind(source),
            TableError::Magic { .. } => Kind::Invalid,
            TableError::Length { .. } | TableError::Damaged { .. } => Kind::Corrupt,
            TableError::Foreign { .. } => Kind::Stale,
        }
    }
}

/// Whose sums a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableId {
    /// Which life of the publisher.
    pub incarnation: Incarnation,
    pub version: Version,
    /// The slot's id: the attempt that committed it.
    pub slot_id: u64,
}

/// A table read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTable {
    /// Whose sums they are.
    pub id: TableId,
    /// The digest of the version.
    pub digest: StateDigest,
    pub sums: SumTable,
}

/// Writes a table to `path`, whole or not at all.
pub fn write(
    path: &Path,
    manifest: &Manifest,
    id: TableId,
    digest: StateDigest,
    sums: &SumTable,
) -> Result<(), TableError> {
    let io = |source| TableError::Io { action: "write", path: path.to_owned(), source };
    let draft = Draft::create(path).map_err(io)?;
    let mut h = Xxh3::new();
    let mut put = |bytes: &[u8]| {
        h.update(bytes);
        draft.file().write_all(bytes)
    };
    put(&head(manifest, id, digest)).map_err(io)?;
    let mut bytes = Vec::with_capacity(CHUNK * SUM);
    for chunk in sums.sums().chunks(CHUNK) {
        bytes.clear();
        chunk.iter().for_each(|s| bytes.extend_from_slice(&s.to_bytes()));
        put(&bytes).map_err(io)?;
    }
    draft.file().write_all(&h.digest().to_le_bytes()).map_err(io)?;
    draft.place().map_err(io)
}

/// Reads the table of an image of this manifest and checks all of it.
pub fn read(path: &Path, manifest: &Manifest) -> Result<StoredTable, TableError> {
    let path_buf = || path.to_owned();
    let io = |source| TableError::Io { action: "read", path: path_buf(), source };
    let mut file = File::open(path).map_err(io)?;
    let have = file.metadata().map_err(io)?.len();
    let mut bytes = vec![0; HEAD.min(have as usize)];
    file.read_exact(&mut bytes).map_err(io)?;
    if !bytes.starts_with(MAGIC) {
        return Err(TableError::Magic { path: path_buf(), found: bytes.into_iter().take(8).collect() });
    }
    let blocks = manifest.cuts().blocks() as usize;
    let need = (HEAD + blocks * SUM + 8) as u64;
    let length = TableError::Length { path: path_buf(), have, need };
    let Some(head) = Head::parse(&bytes) else { return Err(length) };
    head.check(path, manifest)?;
    if have != need {
        return Err(length);
    }
    let mut h = Xxh3::new();
    h.update(&bytes);
    let mut sums = Vec::with_capacity(blocks);
    while sums.len() < blocks {
        bytes.resize((blocks - sums.len()).min(CHUNK) * SUM, 0);
        file.read_exact(&mut bytes).map_err(io)?;
        h.update(&bytes);
        sums.extend(bytes.as_chunks::<SUM>().0.iter().map(|b| BlockSum::from_bytes(*b)));
    }
    let mut end = [0; 8];
    file.read_exact(&mut end).map_err(io)?;
    let (found, expected) = (h.digest(), u64::from_le_bytes(end));
    if found != expected {
        return Err(TableError::Damaged { path: path_buf(), found, expected });
    }
    Ok(StoredTable { id: head.id, digest: head.digest, sums: SumTable::new(manifest, sums) })
}

fn head(manifest: &Manifest, id: TableId, digest: StateDigest) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD);
    out.extend_from_slice(MAGIC);
    for word in [id.incarnation.0, id.version, id.slot_id] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    for hash in [digest.0, manifest.layout_hash().0, manifest.cuts_hash().0] {
        out.extend_from_slice(&hash);
    }
    out.extend_from_slice(&u64::from(manifest.cuts().blocks()).to_le_bytes());
    debug_assert_eq!(out.len(), HEAD);
    out
}

struct Head {
    id: TableId,
    digest: StateDigest,
    layout: [u8; 16],
    cuts: [u8; 16],
    blocks: u64,
}

impl Head {
    /// The head at the front of these bytes, if all of it is there.
    fn parse(bytes: &[u8]) -> Option<Head> {
        let bytes: &[u8; HEAD] = bytes.first_chunk()?;
        let (words, _) = bytes.as_chunks::<8>();
        let word = |i: usize| words.get(i).map(|w| u64::from_le_bytes(*w));
        let hash = |at: usize| bytes.get(at..at + 16).and_then(|b| b.first_chunk::<16>()).copied();
        Some(Head {
            id: TableId { incarnation: Incarnation(word(1)?), version: word(2)?, slot_id: word(3)? },
            digest: StateDigest(hash(32)?),
            layout: hash(48)?,
            cuts: hash(64)?,
            blocks: word(10)?,
        })
    }

    fn check(&self, path: &Path, manifest: &Manifest) -> Result<(), TableError> {
        use windlass_core::identity::{CutsHash, LayoutHash};
        let compare = |what, found: String, expected: String| {
            let foreign = TableError::Foreign { path: path.to_owned(), what, found, expected };
            Err(foreign)
        };
        if self.layout != manifest.layout_hash().0 {
            let found = LayoutHash(self.layout).to_string();
            return compare("layout", found, manifest.layout_hash().to_string());
        }
        if self.cuts != manifest.cuts_hash().0 {
            return compare("cut table", CutsHash(self.cuts).to_string(), manifest.cuts_hash().to_string());
        }
        if self.blocks != u64::from(manifest.cuts().blocks()) {
            return compare("blocks", self.blocks.to_string(), manifest.cuts().blocks().to_string());
        }
        Ok(())
    }
}
