//! The codec for the changes between two versions.
//!
//! Owns: the records that describe the change of one block, the container that holds them, their
//! application and their composition. Called by all code that seals, sends, stores or applies versions. Must not:
//! decide which deltas to keep or send.
//!
//! # Premise
//!
//! A step of reinforcement learning changes a few hundredths to a few per cent of the elements, nearly every
//! page has a change, and nine in ten changes are to a neighbouring value. So a record lists positions and
//! short steps, block by block, and a block's changes are coded with parameters of its own.
//!
//! # The line
//!
//! Units are moved onto a line on which neighbours in value are neighbours in number: for floats, patterns
//! with the sign bit set are inverted and the others get it set, so that the line runs from the largest
//! negative NaN through both zeros to the largest positive NaN; integers stay as they are. [`crate::dtype`]
//! lists the units of each dtype: complex elements are two floats, packed elements and E8M0 scales
//! are bytes on the line of integers. The map is a permutation of all bit patterns, so signed zeros and NaN
//! payloads are bits like any others. A *step* is the wrapped difference of two places on the line, read as a
//! signed number. Every change has exactly one step, of any size, so the format needs no second form
//! with a raw value: steps of two deltas add up to the step of their composition, always.
//!
//! # Records
//!
//! A block that did not change has no record. Otherwise its record has one of these forms:
//!
//! | mode | code | payload |
//! |---|---|---|
//! | sparse | 1 | `count-1` u16 · `k` u8 · `values.k` u8 · gaps · values |
//! | bitmap | 3 | `count-1` u16 · `values.k` u8 · one bit for each unit · values |
//! | dense | 4 | the new units themselves |
//! | context | 2 | `count-1` u16 · `top` 12 bits · `classes-1` 4 bits · class table · gaps · values |
//!
//! It is the smallest of the first three; of equal ones, the first listed. An encoder that makes context
//! records takes one where it is shorter still. It does not try where more than an eighth of the units
//! changed, or where the other record has fewer than 24 bytes.
//!
//! The *position* of a unit is its number within the block, counted from 0, run after run (see
//! [`crate::manifest::cut`]). `count` is how many units changed. All integers are little-endian, all bit
//! fields begin with the lowest bit, every *section* begins on a byte and is filled up with zero bits. A
//! *varint* is a number below 2^32 in groups of seven bits, lowest first, one to a byte, whose top bit is set
//! in all but the last; it has no more groups than it needs.
//!
//! **Gaps.** Positions are ascending; the gap of a position is its distance to the one before, less one, and
//! the gap of the first is the position itself. A gap is Rice-coded in two sections: first the low `k` bits
//! of every gap, then for every gap its remaining high part in unary (that many zeros and a one). Keeping
//! fixed-width bits apart from unary ones lets a decoder find every gap by counting ones, without reading
//! them in turn. `k` is the smallest that gives the shortest code, at most 15.
//!
//! **Values.** A step `s` becomes the code `zigzag(s) - 1`, so that -1, +1, -2, +2 … are 0, 1, 2, 3 …. Three
//! sections: the low `values.k` bits of every code; the remaining high part in unary, but at most
//! [`ESCAPE`]; and for those of exactly [`ESCAPE`] the high part in as many bits as the unit has beyond
//! `values.k`. `values.k` follows from the codes' bit lengths by the rule of [`values::parameter`].
//!
//! **Context.** The smaller a weight, the likelier it changes: the chance halves with each octave. Units are
//! put into `classes` classes, 1 to 16 of them, by the exponent of their *old* value, the bits between sign
//! and mantissa read as a number: class 0 is `top` and above, then one class for each exponent below, the
//! last class has all the rest. The class table gives for each class the count of its changes as a varint,
//! and then, in one section, `values.k` of each class that has changes, in 3, 4, 5 or 6 bits for units of 1,
//! 2, 4 or 8 bytes. Changes are listed class by class, in each by position.
//! Gaps count only units of their own class: a change stands for the `n`-th unit of its class, counted from
//! 0, and each class begins anew. Their `k` is not written: it is the largest, at most 15, with `count · 2^k
//! ≤ 0.7 · size`, where `size` is how many units the class has, or 0 if there is none
//! ([`context::gap_parameter`]). Sections are shared: low bits of all classes in turn, then all unary parts,
//! and so on. The decoder needs the old block. Only floats have context records.
//!
//! Encoders make 14 classes. They find `top` by looking at every 64th unit of the old block, from the first
//! on: it is the largest exponent such that a thirty-second of these, rounded up, have it or a larger one.
//!
//! Encoders that follow these rules give the same bytes for the same cut table, on any hardware.
//!
//! # Container
//!
//! ```text
//! container = header part* end
//! header    = "WLDELTA1" · length u32 · layout hash 16 · cuts hash 16 · base digest 16 · target digest 16
//!             · base incarnation u64 · base version u64 · target incarnation u64 · target version u64
//!             · blocks u32 · name length u16 · model id · XXH3-64 of all before u64
//! part      = "PART" · records u32 · index length u32 · payload length u32 · XXH3-64 u64 · index · payload
//! index     = for each record: block number (varint; the first in full, then distance to the one before,
//!             less one) · mode u8 · payload length varint · new block sum 16
//! end       = "END\0" · parts u32 · records u64 · changes u64 · XXH3-64 of the 24 bytes before u64
//! ```
//!
//! The header's length counts all of it, the XXH3 included. `changes` counts the units that changed. If a dense record went
//! into a composition, the count is unknown, and all units of the block count. A payload has 1 to
//! 2^19 bytes, a part at least one record. Writers close a part when its payload has 64 KiB or it has 1024
//! records, whichever comes first, so that the same records in the same order make the same file; readers do
//! not depend on it. A part's XXH3 covers its first 16 bytes, its
//! index and its payload. The container is an unordered union of parts: several writers (ranks, nodes, GPU
//! and CPU encoders) may each add some, in any order, as long as no block has two records. A reader checks
//! every length against the available bytes before it uses it; a part holds at most [`container::MAX_PART`] bytes,
//! so that a stream can be read part by part in bounded memory.
//!
//! # Applying
//!
//! A record carries the block's sum after the change and not the one before. The applier knows the block's
//! current sum from its table. If that is the new sum, the block is already up to date: *skip*. Otherwise the applier
//! computes the new units aside. If the current sum plus their differences is the new sum, this is the right base
//! and the block is written: *applied*. If not, the base is another one and nothing is written: *refetch*.
//! So applying is idempotent, never leaves a block half-written, and costs O(changes). A dense record needs no
//! base: its units must have its sum, and they replace the block. A caller that must not overwrite a foreign
//! image compares digests first.
//!
//! # Composition
//!
//! a→b and b→c make a→c without any image: steps add and cancel; a dense block replaces; steps after a dense
//! block are applied to it. Context records cannot be composed, as their positions need the image.
//!
//! # Recoding
//!
//! A plain record and the block before or after it give the context record ([`Recoder::to_context`]); a context record and the block
//! before it give the plain one ([`Recoder::to_plain`]). Publishers keep and compose plain deltas and recode for the
//! receivers that ask for it; those recode what they got before they use it.
//!
//! # Reverting
//!
//! A step has a negative, so a sparse or bitmap record can be reverted over the bytes that it led to
//! ([`Applier::revert`]). A dense record cannot: it does not hold the units it replaced. To revert one, the caller
//! keeps the old units, as a dense record of the other direction. A delta to an older version is a container like any
//! other, whose base is the newer one.

pub mod apply;
pub mod bits;
pub mod compose;
pub mod container;
pub mod context;
pub mod encode;
pub mod gaps;
pub mod line;
pub mod positions;
pub mod recode;
pub mod values;

use serde::{Deserialize, Serialize};

pub use apply::{Applier, Outcome};
pub use compose::{Composer, compose};
pub use container::{Delta, DeltaHeader, PartBuilder};
pub use encode::{Encoded, Encoder};
pub use positions::{Changed, Positions};
pub use recode::{Recoder, Side};
pub use values::ESCAPE;

use crate::digest::BlockSum;
use crate::dtype::Line;
use crate::error::Kind;
use crate::manifest::{Block, Manifest, ManifestError};

/// A fault in a delta.
#[derive(Debug, thiserror::Error)]
pub enum DeltaError {
    #[error("not a Windlass delta: it begins with {found:02x?} instead of \"WLDELTA1\"")]
    Magic { found: Vec<u8> },
    #[error("the delta ends within its {what}: {need} bytes are needed and {have} are there; fetch it again")]
    Truncated { what: &'static str, need: u64, have: u64 },
    #[error(
        "the delta's {what} is damaged: its check sum is {found:016x} instead of {expected:016x}; fetch it again"
    )]
    Damaged { what: &'static str, found: u64, expected: u64 },
    #[error("the delta declares {value} for {what}, beyond the limit of {limit}")]
    Limit { what: &'static str, value: u64, limit: u64 },
    /// A part, index or end is malformed although its checksum is right.
    #[error("the delta's {what} is malformed: {why}")]
    Malformed { what: &'static str, why: &'static str },
    #[error("the {mode} record of block {block} is malformed: {why}")]
    BadRecord { block: u32, mode: Mode, why: &'static str },
    #[error("block {block} has two records")]
    DuplicateBlock { block: u32 },
    #[error(
        "the delta is for {what} {found}, but this image has {expected}; make or fetch one for this image"
    )]
    WrongLayout { what: &'static str, found: String, expected: String },
    #[error("the first delta ends at {first} and the second begins at {second}: they cannot be composed")]
    NotConsecutive { first: String, second: String },
    /// A context record cannot be composed or relayed without the image.
    #[error(
        "block {block} has a context record, which cannot be composed without the image; encode in plain mode"
    )]
    ContextNeedsImage { block: u32 },
    #[error(
        "block {block} has a dense record, which cannot be taken back; fetch the older version another way"
    )]
    OneWay { block: u32 },
    /// The delta names a block that does not exist, or has a malformed identity.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Identity(#[from] crate::identity::IdentityError),
}

impl From<&DeltaError> for Kind {
    fn from(error: &DeltaError) -> Kind {
        error.kind()
    }
}

impl DeltaError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        use DeltaError as E;
        match self {
            E::Truncated { .. } | E::Damaged { .. } | E::BadRecord { .. } => Kind::Corrupt,
            E::Magic { .. } | E::Limit { .. } | E::Malformed { .. } | E::DuplicateBlock { .. } => {
                Kind::Invalid
            }
            E::WrongLayout { .. } | E::NotConsecutive { .. } => Kind::Stale,
            E::ContextNeedsImage { .. } | E::OneWay { .. } => Kind::Unsupported,
            E::Manifest(e) => e.kind(),
            E::Identity(e) => e.kind(),
        }
    }
}

/// The form of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Positions as gaps, steps.
    Sparse,
    /// Positions as gaps within classes of old values, steps.
    Context,
    /// Positions as a bitmap, steps.
    Bitmap,
    Dense,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Mode; 4] = [Mode::Sparse, Mode::Context, Mode::Bitmap, Mode::Dense];

    /// The code in an index.
    pub const fn code(self) -> u8 {
        match self {
            Mode::Sparse => 1,
            Mode::Context => 2,
            Mode::Bitmap => 3,
            Mode::Dense => 4,
        }
    }

    fn from_code(code: u8) -> Option<Mode> {
        Mode::ALL.into_iter().find(|m| m.code() == code)
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mode::Sparse => "sparse",
            Mode::Context => "context",
            Mode::Bitmap => "bitmap",
            Mode::Dense => "dense",
        })
    }
}

/// The geometry and the dtype of a block, as the codec needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub number: u32,
    pub block: Block,
    /// Bytes of a unit: 1, 2, 4 or 8.
    pub unit: usize,
    /// The order of units.
    pub line: Line,
}

impl Tile {
    /// The block of this number.
    pub fn of(manifest: &Manifest, number: u32) -> Result<Tile, ManifestError> {
        let block = manifest.cuts().block(number)?;
        let dtype = manifest.tensors()[block.tensor as usize].dtype;
        Ok(Tile { number, block, unit: dtype.unit(), line: dtype.line() })
    }

    /// How many units it has; between 1 and 65,536.
    pub fn units(&self) -> usize {
        self.block.units() as usize
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.units() * self.unit
    }

    /// The change of its sum when the units at these positions change; `change` gives old and new value, by index.
    #[inline(always)]
    fn sum_of_changes<T: line::Unit>(
        &self,
        positions: &[u16],
        change: impl FnMut(usize) -> (T, T),
    ) -> BlockSum {
        let (n, unit) = (positions.len(), T::BYTES as u64);
        if self.block.is_contiguous() {
            let start = self.block.start;
            T::sum_of_changes(n, |i| (start + u64::from(positions[i])) * unit, change)
        } else {
            T::sum_of_changes(n, |i| self.block.tensor_unit(positions[i].into()) * unit, change)
        }
    }
}

/// The change of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    pub block: u32,
    /// The form of the payload.
    pub mode: Mode,
    /// The block's sum after the change.
    pub sum: BlockSum,
    pub payload: &'a [u8],
}

impl Record<'_> {
    fn bad(&self, why: &'static str) -> DeltaError {
        DeltaError::BadRecord { block: self.block, mode: self.mode, why }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod vectors;
