//! Deltas that come from the ranks of a trainer, each for its own blocks: who brings what, and whether all of it
//! together leads from one state to another.
//!
//! Owns: the [`Roster`], by which a rank says which blocks it answers for, and [`join`], which decides whether the
//! containers of all ranks are one delta. Called by the agent, which has the table of the base, and by ranks. Must not:
//! read files, or believe anything about a block that its sums do not say.
//!
//! # Roster
//!
//! ```text
//! roster = "WLROST1\0" · length u32 · rank u16 · ranks u16 · incarnation u64 · layout hash 16 · cuts hash 16
//!          · blocks (the binary form of `ranges`) · XXH3-64 of all before u64
//! ```
//!
//! All integers are little-endian. The length counts all of it, the XXH3 included. A rank is below the number of
//! ranks, and blocks are below the number of blocks of the cut table that is named, which only who has the manifest
//! can check ([`Roster::check`]). A set of blocks may be empty: a rank that holds nothing brings an empty delta.
//!
//! # A rank's delta
//!
//! A container as in [`crate::delta`], whose header has the digests of the sums of the rank's blocks alone, those of all other
//! blocks being zero: that of the blocks before and that of the blocks after the change. Its records are of the rank's
//! blocks, and plain: context records do not compose.
//!
//! # Joining
//!
//! Given the table of the base, the rosters of all ranks and a container of each, the new table is made and the whole is
//! a delta from the base if
//!
//! - the rosters are of ranks 0, 1, 2 … in this order, of one incarnation, layout and cut table;
//! - every block that is held here is in exactly one roster;
//! - every container is for this model, leads from the base's version to one and the same later version of the same
//!   incarnation, and has records of its rank's blocks only;
//! - for every rank, the digest of its blocks' sums in the base's table is the container's base digest;
//! - for every rank, the digest of its blocks' sums after the records were put in is the container's target digest.
//!
//! The last two tie each container to the very bytes that the base has and to what the rank says its blocks are now. The
//! process that applies a record checks what is in it.

use xxhash_rust::xxh3::xxh3_64;

use crate::delta::{Delta, DeltaError, Mode};
use crate::digest::{BlockSum, StateSum, SumTable};
use crate::error::Kind;
use crate::identity::{CutsHash, Incarnation, LayoutHash, ModelId, StateDigest};
use crate::manifest::{Manifest, ManifestError};
use crate::ranges::{BlockRanges, RangesError};

const MAGIC: &[u8; 8] = b"WLROST1\0";
const FIXED: usize = 8 + 4 + 2 + 2 + 8 + 16 + 16;
/// The longest roster that is read: as many ranges as a set may have, ten bytes each.
pub const MAX_ROSTER: usize = FIXED + 8 + 8 + 10 * BlockRanges::MAX_RANGES;

/// Why rosters or the deltas of ranks cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeltaModeError {
    #[error("not a roster: it begins with {found:02x?} instead of \"WLROST1\"")]
    Magic { found: Vec<u8> },
    #[error("a roster says that it has {said} bytes, and {have} are there")]
    Length { said: u64, have: u64 },
    #[error("a roster is damaged: its check sum is {found:016x} instead of {expected:016x}")]
    Damaged { found: u64, expected: u64 },
    #[error("the blocks of a roster are malformed: {0}")]
    Ranges(#[from] RangesError),
    #[error("a roster is of rank {rank} of {ranks}")]
    Rank { rank: u16, ranks: u16 },
    #[error("what rank {rank} brings is for {what} {found} instead of {expected}")]
    Foreign { rank: u16, what: &'static str, found: String, expected: String },
    #[error("{found} ranks brought something and there are {expected}")]
    Count { expected: u16, found: usize },
    #[error("block {block} is answered for by {what}")]
    Cover {
        block: u32,
        /// "two ranks", "no rank" or "a rank though it is not held here".
        what: &'static str,
    },
    #[error("rank {rank} brings a record of block {block}, which is not its own")]
    NotOwn { rank: u16, block: u32 },
    #[error("rank {rank} brings a context record of block {block}: encode in plain mode")]
    Context { rank: u16, block: u32 },
    /// A delta from another state than the one that is served.
    #[error(
        "the delta of rank {rank} begins at digest {found} of its blocks, and those of version {base} have {expected}"
    )]
    Base {
        rank: u16,
        /// The version that it should begin at.
        base: u64,
        found: StateDigest,
        expected: StateDigest,
    },
    /// A delta whose records do not lead to where it says.
    #[error(
        "the delta of rank {rank} says that it leads to digest {said} of its blocks, and its records lead to {found}"
    )]
    Target { rank: u16, said: StateDigest, found: StateDigest },
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("what rank {rank} brings cannot be used: {source}")]
    Delta { rank: u16, source: DeltaError },
}

impl DeltaModeError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        use DeltaModeError as E;
        match self {
            E::Magic { .. } | E::Rank { .. } | E::Count { .. } | E::Cover { .. } => Kind::Invalid,
            E::Length { .. } | E::Damaged { .. } | E::NotOwn { .. } | E::Base { .. } | E::Target { .. } => {
                Kind::Corrupt
            }
            E::Context { .. } => Kind::Unsupported,
            E::Foreign { .. } => Kind::Stale,
            E::Ranges(e) => e.kind(),
            E::Manifest(e) => e.kind(),
            E::Delta { source, .. } => source.kind(),
        }
    }

    /// Whether what was brought is well-formed, for this base, and contradicts what is known of it.
    pub fn is_contradiction(&self) -> bool {
        use DeltaModeError as E;
        match self {
            E::NotOwn { .. } | E::Base { .. } | E::Target { .. } | E::Cover { .. } => true,
            E::Magic { .. }
            | E::Length { .. }
            | E::Damaged { .. }
            | E::Ranges(_)
            | E::Rank { .. }
            | E::Foreign { .. }
            | E::Count { .. }
            | E::Context { .. }
            | E::Manifest(_)
            | E::Delta { .. } => false,
        }
    }
}

/// Which blocks a rank answers for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roster {
    pub rank: u16,
    pub ranks: u16,
    /// Which life of the publisher.
    pub incarnation: Incarnation,
    /// The layout of the image.
    pub layout_hash: LayoutHash,
    /// The cut table that blocks are numbers in.
    pub cuts_hash: CutsHash,
    pub blocks: BlockRanges,
}

impl Roster {
    /// The form in a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut blocks = Vec::new();
        self.blocks.encode(&mut blocks);
        let len = FIXED + blocks.len() + 8;
        let mut out = Vec::with_capacity(len);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(len as u32).to_le_bytes());
        out.extend_from_slice(&self.rank.to_le_bytes());
        out.extend_from_slice(&self.ranks.to_le_bytes());
        out.extend_from_slice(&self.incarnation.0.to_le_bytes());
        out.extend_from_slice(&self.layout_hash.0);
        out.extend_from_slice(&self.cuts_hash.0);
        out.extend_from_slice(&blocks);
        let sum = xxh3_64(&out);
        out.extend_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads a roster, which must be all of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Roster, DeltaModeError> {
        if !bytes.starts_with(MAGIC) {
            return Err(DeltaModeError::Magic { found: bytes.iter().take(8).copied().collect() });
        }
        let have = bytes.len() as u64;
        let short = || DeltaModeError::Length { said: FIXED as u64 + 8, have };
        let (body, sum) = bytes.split_last_chunk::<8>().ok_or_else(short)?;
        let mut fields = Fields(body.get(MAGIC.len()..).ok_or_else(short)?);
        let said = fields.take().map(u32::from_le_bytes).ok_or_else(short)?;
        if u64::from(said) != have || bytes.len() > MAX_ROSTER {
            return Err(DeltaModeError::Length { said: said.into(), have });
        }
        let (found, expected) = (xxh3_64(body), u64::from_le_bytes(*sum));
        if found != expected {
            return Err(DeltaModeError::Damaged { found, expected });
        }
        let rank = fields.take().map(u16::from_le_bytes).ok_or_else(short)?;
        let ranks = fields.take().map(u16::from_le_bytes).ok_or_else(short)?;
        let incarnation = fields.take().map(u64::from_le_bytes).map(Incarnation).ok_or_else(short)?;
        let layout_hash = LayoutHash(fields.take().ok_or_else(short)?);
        let cuts_hash = CutsHash(fields.take().ok_or_else(short)?);
        let (blocks, taken) = BlockRanges::decode(fields.0)?;
        if taken != fields.0.len() {
            let said = (FIXED + taken + 8) as u64;
            return Err(DeltaModeError::Length { said, have });
        }
        if rank >= ranks {
            return Err(DeltaModeError::Rank { rank, ranks });
        }
        Ok(Roster { rank, ranks, incarnation, layout_hash, cuts_hash, blocks })
    }

    /// Whether it is of this life of a publisher of this manifest.
    pub fn check(
        &self,
        manifest: &Manifest,
        incarnation: Incarnation,
        ranks: u16,
    ) -> Result<(), DeltaModeError> {
        let foreign = |what, found: String, expected: String| DeltaModeError::Foreign {
            rank: self.rank,
            what,
            found,
            expected,
        };
        if self.incarnation != incarnation {
            return Err(foreign("incarnation", self.incarnation.to_string(), incarnation.to_string()));
        }
        if self.layout_hash != manifest.layout_hash() {
            let expected = manifest.layout_hash().to_string();
            return Err(foreign("layout", self.layout_hash.to_string(), expected));
        }
        if self.cuts_hash != manifest.cuts_hash() {
            return Err(foreign("cut table", self.cuts_hash.to_string(), manifest.cuts_hash().to_string()));
        }
        if self.ranks != ranks {
            return Err(foreign("ranks", self.ranks.to_string(), ranks.to_string()));
        }
        let (end, blocks) = (self.blocks.end(), manifest.cuts().blocks());
        if end > blocks {
            return Err(ManifestError::NoSuchBlock { block: end - 1, count: blocks }.into());
        }
        Ok(())
    }
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }
}

/// The state that deltas of ranks are to begin from.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// The layout and cuts.
    pub manifest: &'a Manifest,
    pub model_id: &'a ModelId,
    /// Which life of its publisher.
    pub incarnation: Incarnation,
    /// The blocks that are held here.
    pub held: &'a BlockRanges,
    pub version: u64,
    pub sums: &'a SumTable,
}

/// Who answers for which blocks: the rosters of all ranks, if every block that is `held` is in exactly one of them.
pub fn cover(
    manifest: &Manifest,
    incarnation: Incarnation,
    held: &BlockRanges,
    rosters: &[Roster],
) -> Result<(), DeltaModeError> {
    let ranks = u16::try_from(rosters.len()).unwrap_or(u16::MAX);
    let mut all = BlockRanges::new();
    for (i, roster) in rosters.iter().enumerate() {
        roster.check(manifest, incarnation, ranks)?;
        if usize::from(roster.rank) != i {
            return Err(DeltaModeError::Rank { rank: roster.rank, ranks });
        }
        if let Some(block) = all.intersection(&roster.blocks).first() {
            return Err(DeltaModeError::Cover { block, what: "two ranks" });
        }
        all = all.union(&roster.blocks);
    }
    if let Some(block) = held.difference(&all).first() {
        return Err(DeltaModeError::Cover { block, what: "no rank" });
    }
    if let Some(block) = all.difference(held).first() {
        return Err(DeltaModeError::Cover { block, what: "a rank though it is not held here" });
    }
    Ok(())
}

/// The raw sum of some blocks of a table.
pub fn state_of(
    manifest: &Manifest,
    sums: &SumTable,
    blocks: &BlockRanges,
) -> Result<StateSum, ManifestError> {
    let (mut state, mut tensor, mut of_tensor) = (StateSum::default(), 0, BlockSum::default());
    for number in blocks.iter() {
        let next = manifest.cuts().tensor_of(number, tensor)?;
        if next != tensor {
            state.add(tensor, std::mem::take(&mut of_tensor));
            tensor = next;
        }
        of_tensor = of_tensor.plus(sums.get(number));
    }
    state.add(tensor, of_tensor);
    Ok(state)
}

/// The table of `version`, to which the deltas of all ranks lead from `base`, if they do. Rosters must cover what is
/// held ([`cover`]); there is one delta for each.
///
/// # Panics
/// If the base's table has another number of blocks than its manifest.
pub fn join(
    base: Origin<'_>,
    version: u64,
    rosters: &[Roster],
    deltas: &[Delta<'_>],
) -> Result<SumTable, DeltaModeError> {
    let manifest = base.manifest;
    assert_eq!(base.sums.sums().len(), manifest.cuts().blocks() as usize, "a table of this manifest");
    if rosters.len() != deltas.len() {
        let expected = u16::try_from(rosters.len()).unwrap_or(u16::MAX);
        return Err(DeltaModeError::Count { expected, found: deltas.len() });
    }
    let layout = manifest.layout_hash();
    let mut sums = base.sums.clone();
    for (roster, delta) in rosters.iter().zip(deltas) {
        let rank = roster.rank;
        check_header(&base, version, rank, delta)?;
        let state = state_of(manifest, base.sums, &roster.blocks)?;
        let expected = state.digest(layout);
        if delta.header.base_digest != expected {
            let found = delta.header.base_digest;
            return Err(DeltaModeError::Base { rank, base: base.version, found, expected });
        }
        let mut tensor = 0;
        let change = sums.set_all(delta.entries().iter().map(|entry| {
            let block = entry.block;
            if !roster.blocks.contains(block) {
                return Err(DeltaModeError::NotOwn { rank, block });
            }
            if entry.mode == Mode::Context {
                return Err(DeltaModeError::Context { rank, block });
            }
            tensor = manifest.cuts().tensor_of(block, tensor)?;
            Ok((block, tensor, entry.sum))
        }))?;
        let found = state.plus(change).digest(layout);
        if delta.header.target_digest != found {
            return Err(DeltaModeError::Target { rank, said: delta.header.target_digest, found });
        }
    }
    Ok(sums)
}

fn check_header(base: &Origin<'_>, version: u64, rank: u16, delta: &Delta<'_>) -> Result<(), DeltaModeError> {
    let header = &delta.header;
    header.check(base.manifest).map_err(|source| DeltaModeError::Delta { rank, source })?;
    let foreign =
        |what, found: String, expected: String| Err(DeltaModeError::Foreign { rank, what, found, expected });
    if header.model_id != *base.model_id {
        return foreign("model", header.model_id.to_string(), base.model_id.to_string());
    }
    let (from, to) = ((base.incarnation, base.version), (base.incarnation, version));
    let show = |(i, v): (Incarnation, u64)| format!("{i}/{v}");
    if header.base != from {
        return foreign("base", show(header.base), show(from));
    }
    if header.target != to || version <= base.version {
        return foreign("version", show(header.target), show(to));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
