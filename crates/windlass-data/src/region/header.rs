//! The facts in a region's header that never change.
//!
//! The first 512 bytes are 64 words, little-endian: magic, format, slots, ranks, entries of the lease table,
//! incarnation, pid namespace, creator, offset and length of the JSON; the rest is zero. Then come the words of the
//! protocol, and on a page of its own the JSON. Everything is checked before it is used: members of a group may
//! write here.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use windlass_core::identity::{LayoutHash, ModelId};
use windlass_core::ranges::BlockRanges;

use super::{HEADER, RegionError, io_error};
use crate::flip::Shape;

/// How a header begins: "WLREGION".
const MAGIC: u64 = u64::from_le_bytes(*b"WLREGION");
/// The format that this build reads and writes.
const FORMAT: u64 = 1;
/// The word at which the protocol begins.
pub(super) const PROTOCOL: usize = 64;
/// How many words of facts are in use.
const FACTS: usize = 10;
const MAX_LEASES: u64 = 4096;
const MAX_JSON: u64 = 64 << 20;

/// The facts that are JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Meta {
    pub(super) model_id: ModelId,
    pub(super) layout_hash: LayoutHash,
    pub(super) dir: PathBuf,
    pub(super) part: Option<BlockRanges>,
    pub(super) memfd: bool,
    pub(super) extra_bytes: u64,
    /// When it was made. Not given by an earlier release.
    #[serde(default)]
    pub(super) made: Option<Moment>,
}

/// A moment that no setting of the clock changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Moment {
    /// Names the run of the kernel.
    boot_id: String,
    /// Nanoseconds since its start, sleep included.
    ns: u64,
}

impl Moment {
    pub(super) fn now() -> Option<Moment> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Some(Moment { boot_id: boot_id.trim().to_owned(), ns: super::now() })
    }

    /// How long ago it was; `None` if that was before the machine was started.
    pub(super) fn elapsed(&self) -> Option<Duration> {
        let now = Moment::now().filter(|now| now.boot_id == self.boot_id)?;
        now.ns.checked_sub(self.ns).map(Duration::from_nanos)
    }
}

/// All facts.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) slots: usize,
    pub(super) ranks: u16,
    pub(super) leases: usize,
    pub(super) incarnation: u64,
    pub(super) namespace: u64,
    pub(super) creator: u64,
    pub(super) meta: Meta,
}

impl Facts {
    pub(super) fn shape(&self) -> Shape {
        Shape { slots: self.slots, ranks: self.ranks.into(), leases: self.leases }
    }

    fn json_offset(&self) -> u64 {
        ((PROTOCOL + self.shape().words()) as u64 * 8).next_multiple_of(4096)
    }

    /// The header of a new region.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let json = serde_json::to_vec(&self.meta).expect("texts and numbers always serialise");
        let words: [u64; FACTS] = [
            MAGIC,
            FORMAT,
            self.slots as u64,
            self.ranks.into(),
            self.leases as u64,
            self.incarnation,
            self.namespace,
            self.creator,
            self.json_offset(),
            json.len() as u64,
        ];
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.resize(self.json_offset() as usize, 0);
        bytes.extend_from_slice(&json);
        bytes
    }

    /// Whether a file begins as a header does.
    pub(super) fn is_header(file: &File) -> bool {
        let mut first = [0; 8];
        file.read_exact_at(&mut first, 0).is_ok() && u64::from_le_bytes(first) == MAGIC
    }

    /// Reads and checks a header.
    pub(super) fn read(file: &File, dir: &Path) -> Result<Facts, RegionError> {
        let path = dir.join(HEADER);
        let damaged = |reason: String| RegionError::Damaged { dir: dir.to_owned(), reason };
        let len = file.metadata().map_err(io_error("read", &path))?.len();
        if len < PROTOCOL as u64 * 8 {
            return Err(damaged(format!("its header has only {len} bytes")));
        }
        let mut bytes = [0; FACTS * 8];
        file.read_exact_at(&mut bytes, 0).map_err(io_error("read", &path))?;
        let word = |i: usize| bytes[i * 8..].first_chunk().map_or(0, |w| u64::from_le_bytes(*w));
        let [magic, format, slots, ranks, leases, incarnation, namespace, creator, offset, json_len] =
            std::array::from_fn(word);
        if magic != MAGIC {
            return Err(damaged("its header does not begin as one".into()));
        }
        if format != FORMAT {
            return Err(RegionError::Format { dir: dir.to_owned(), found: format, supported: FORMAT });
        }
        let ranks = u16::try_from(ranks).ok().filter(|&r| r > 0);
        let (Some(ranks), 1 | 2, 1..=MAX_LEASES, ..=MAX_JSON) = (ranks, slots, leases, json_len) else {
            return Err(damaged(format!(
                "{slots} slots, {ranks:?} ranks, {leases} leases, {json_len} bytes of JSON"
            )));
        };
        let shape = Shape { slots: slots as usize, ranks: ranks.into(), leases: leases as usize };
        let words = (PROTOCOL + shape.words()) as u64 * 8;
        if offset < words || offset.checked_add(json_len).is_none_or(|end| end > len) {
            return Err(damaged(format!(
                "its header of {len} bytes has JSON at {offset}, {json_len} bytes long"
            )));
        }
        let mut json = vec![0; json_len as usize];
        file.read_exact_at(&mut json, offset).map_err(io_error("read", &path))?;
        let meta = serde_json::from_slice(&json).map_err(|e| damaged(format!("facts in its header: {e}")))?;
        let (slots, leases) = (shape.slots, shape.leases);
        Ok(Facts { slots, ranks, leases, incarnation, namespace, creator, meta })
    }
}
