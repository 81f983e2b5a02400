//! What an encoder found, in host memory.

use std::fmt;

use windlass_core::delta::container::Entry;
use windlass_core::delta::{Mode, Record};
use windlass_core::error::Kind;

/// What is wrong with records.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum RecordsFault {
    #[error("the record of block {block} stands at or before the one of a lower block")]
    Order { block: u32 },
    #[error("the payload of block {block} ends at {end}, and there are {have} bytes")]
    Beyond { block: u32, end: u64, have: u64 },
    #[error("the payload of block {block} is empty")]
    Empty { block: u32 },
    #[error("the record of block {block} is of context mode, which does not compose: encode in plain mode")]
    Context { block: u32 },
    #[error("there is a record of block {block}, which is not this rank's")]
    NotOwn { block: u32 },
}

impl RecordsFault {
    /// The kind of failure (see [`windlass_core::error`]).
    pub const fn kind(self) -> Kind {
        match self {
            RecordsFault::Order { .. }
            | RecordsFault::Beyond { .. }
            | RecordsFault::Empty { .. }
            | RecordsFault::NotOwn { .. } => Kind::Invalid,
            RecordsFault::Context { .. } => Kind::Unsupported,
        }
    }
}

/// The change of a rank's blocks from one version to the next, by ascending block. Blocks without a record did not change.
///
/// The payloads are wherever the encoder put them: in a vector, or in pinned memory that a GPU wrote.
pub struct Records {
    entries: Vec<Entry>,
    changes: u64,
    payload: Box<dyn AsRef<[u8]> + Send + Sync>,
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records")
            .field("records", &self.entries.len())
            .field("changes", &self.changes)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl Records {
    /// Checks that `entries` ascend and that their payloads lie in `payload`. `changes` is how many units changed.
    pub fn new(
        entries: Vec<Entry>,
        changes: u64,
        payload: Box<dyn AsRef<[u8]> + Send + Sync>,
    ) -> Result<Records, RecordsFault> {
        let have = (*payload).as_ref().len() as u64;
        let mut last = None;
        for e in &entries {
            let block = e.block;
            if last >= Some(block) {
                return Err(RecordsFault::Order { block });
            }
            last = Some(block);
            let end = (e.offset as u64).saturating_add(e.len.into());
            if end > have {
                return Err(RecordsFault::Beyond { block, end, have });
            }
            if e.len == 0 {
                return Err(RecordsFault::Empty { block });
            }
            if e.mode == Mode::Context {
                return Err(RecordsFault::Context { block });
            }
        }
        Ok(Records { entries, changes, payload })
    }

    /// Where the records are, by ascending block.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// How many units changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Bytes of all payloads.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|e| u64::from(e.len)).sum()
    }

    /// The record of an entry of these records.
    pub fn record(&self, e: &Entry) -> Record<'_> {
        let payload = &(*self.payload).as_ref()[e.offset..e.offset + e.len as usize];
        Record { block: e.block, mode: e.mode, sum: e.sum, payload }
    }

    /// The record of a block, if it changed.
    pub fn find(&self, block: u32) -> Option<Record<'_>> {
        let i = self.entries.binary_search_by_key(&block, |e| e.block).ok()?;
        self.entries.get(i).map(|e| self.record(e))
    }
}
