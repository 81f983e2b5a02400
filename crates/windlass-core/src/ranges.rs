//! Sets of blocks.
//!
//! [`BlockRanges`] is a set of block ids (a block id is the index of a block in a manifest's cut table), kept
//! as sorted, disjoint half-open ranges that never touch. One set has one representation, so equality and
//! hashing are those of the set. Tickets, transfer requests and stripe plans speak in these sets; they own
//! nothing but numbers and do not know how large a block is.
//!
//! Ids run from 0 to `u32::MAX - 1`, so that the end of a range always fits.
//!
//! # JSON form
//!
//! `[[first, count], …]`, ascending and disjoint, `count` at least 1. Ranges that touch are accepted and
//! merged; ranges that overlap or go backwards are an error, because they show a mistake of the writer.
//!
//! # Binary form
//!
//! All numbers are LEB128 varints of at most 32 bits in their shortest form.
//!
//! | field | meaning |
//! |---|---|
//! | `n` | number of ranges |
//! | `n` × `gap` | first range: its first id; others: first id − end of the one before − 1 |
//! | `n` × `more` | ids in the range − 1; interleaved with `gap` |
//!
//! A set has exactly one binary form: touching, empty and unordered ranges cannot be written down.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Kind;
use crate::varint::{VarintFault, put_varint, take_varint};

/// A malformed set of blocks.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RangesError {
    #[error("block range {index} starts at {first} and has no blocks: leave empty ranges out")]
    Empty { index: usize, first: u32 },
    /// A range that starts before the one before it ends.
    #[error(
        "block range {index} starts at {first}, before block {previous_end} where the one before it ends: \
         sort the ranges and merge those that overlap"
    )]
    Overlap {
        index: usize,
        first: u32,
        /// Where the range before it ends.
        previous_end: u32,
    },
    #[error("block range {index} starts at {first} and has {count} blocks: block ids end below {}", u32::MAX)]
    Overflow { index: usize, first: u64, count: u64 },
    #[error("{count} block ranges are more than {max}: ask for fewer, wider ranges")]
    TooMany {
        /// How many there are, or are claimed to be.
        count: u64,
        max: usize,
    },
    #[error("a binary set of blocks ends after {len} bytes, in the middle of a number or a range")]
    Truncated { len: usize },
    /// A number in the binary form is longer than it must be, or wider than 32 bits.
    #[error("the number at byte {at} of a binary set of blocks is not a 32-bit varint in its shortest form")]
    Varint { at: usize },
}

impl RangesError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            RangesError::Empty { .. }
            | RangesError::Overlap { .. }
            | RangesError::Overflow { .. }
            | RangesError::Truncated { .. }
            | RangesError::Varint { .. } => Kind::Invalid,
            RangesError::TooMany { .. } => Kind::Exhausted,
        }
    }
}

/// A set of block ids as sorted, disjoint ranges that never touch.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct BlockRanges {
    runs: Vec<Range<u32>>,
}

impl BlockRanges {
    /// The most ranges one set from outside may have.
    pub const MAX_RANGES: usize = 1 << 18;

    /// The set without blocks.
    pub const fn new() -> BlockRanges {
        BlockRanges { runs: Vec::new() }
    }

    /// Checks `(first, count)` pairs from outside: ascending, disjoint, none empty, none beyond the last id.
    /// Pairs that touch are merged.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (u32, u32)>) -> Result<BlockRanges, RangesError> {
        let mut set = BlockRanges::new();
        for (index, (first, count)) in pairs.into_iter().enumerate() {
            if index >= Self::MAX_RANGES {
                return Err(RangesError::TooMany { count: index as u64 + 1, max: Self::MAX_RANGES });
            }
            set.append(index, first, count)?;
        }
        Ok(set)
    }

    fn append(&mut self, index: usize, first: u32, count: u32) -> Result<(), RangesError> {
        if count == 0 {
            return Err(RangesError::Empty { index, first });
        }
        let end = first.checked_add(count).ok_or(RangesError::Overflow {
            index,
            first: first.into(),
            count: count.into(),
        })?;
        match self.runs.last_mut() {
            Some(last) if first < last.end => {
                Err(RangesError::Overlap { index, first, previous_end: last.end })
            }
            Some(last) if first == last.end => {
                last.end = end;
                Ok(())
            }
            Some(_) | None => {
                self.runs.push(first..end);
                Ok(())
            }
        }
    }

    /// The ranges, ascending.
    pub fn ranges(&self) -> impl DoubleEndedIterator<Item = Range<u32>> + ExactSizeIterator + '_ {
        self.runs.iter().cloned()
    }

    /// The ranges from block `first` on; the first one is cut where it begins before `first`.
    pub fn ranges_from(&self, first: u32) -> impl Iterator<Item = Range<u32>> + '_ {
        let skip = self.runs.partition_point(|r| r.end <= first);
        self.runs.iter().skip(skip).map(move |r| r.start.max(first)..r.end)
    }

    /// The ids, ascending.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.runs.iter().cloned().flatten()
    }

    /// How many blocks are in the set.
    pub fn len(&self) -> u32 {
        // Disjoint ranges below u32::MAX: the sum cannot overflow.
        self.runs.iter().map(|r| r.end - r.start).sum()
    }

    /// Whether the set has no blocks.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The lowest block.
    pub fn first(&self) -> Option<u32> {
        self.runs.first().map(|r| r.start)
    }

    /// The id after the highest block; 0 for the empty set.
    pub fn end(&self) -> u32 {
        self.runs.last().map_or(0, |r| r.end)
    }

    /// The range that holds `block`, if any.
    pub fn range_of(&self, block: u32) -> Option<Range<u32>> {
        let at = self.runs.partition_point(|r| r.end <= block);
        self.runs.get(at).filter(|r| r.start <= block).cloned()
    }

    /// Whether `block` is in the set.
    pub fn contains(&self, block: u32) -> bool {
        self.range_of(block).is_some()
    }

    /// The blocks in either set.
    #[must_use]
    pub fn union(&self, other: &BlockRanges) -> BlockRanges {
        self.ranges().chain(other.ranges()).collect()
    }

    /// The blocks in both sets.
    #[must_use]
    pub fn intersection(&self, other: &BlockRanges) -> BlockRanges {
        let mut runs = Vec::new();
        let (mut a, mut b) = (self.ranges().peekable(), other.ranges().peekable());
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            let both = x.start.max(y.start)..x.end.min(y.end);
            let x_ends_first = x.end <= y.end;
            if !both.is_empty() {
                runs.push(both);
            }
            if x_ends_first {
                a.next();
            } else {
                b.next();
            }
        }
        BlockRanges { runs }
    }

    /// The blocks of this set that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &BlockRanges) -> BlockRanges {
        let mut runs = Vec::new();
        let mut holes = other.ranges().peekable();
        for run in self.ranges() {
            let mut at = run.start;
            while let Some(hole) = holes.peek() {
                if hole.start >= run.end {
                    break;
                }
                if hole.start > at {
                    runs.push(at..hole.start);
                }
                at = at.max(hole.end);
                if hole.end > run.end {
                    // The hole may reach into the next run.
                    break;
                }
                holes.next();
            }
            if at < run.end {
                runs.push(at..run.end);
            }
        }
        BlockRanges { runs }
    }

    /// Appends the binary form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.runs.len() as u32);
        let mut free = 0;
        for run in &self.runs {
            put_varint(out, run.start - free);
            put_varint(out, run.end - run.start - 1);
            // The next run cannot start at `run.end`; written only where another run follows, so this fits.
            free = run.end.saturating_add(1);
        }
    }

    /// Reads a binary form from the front of `bytes`; also returns how many bytes it took.
    pub fn decode(bytes: &[u8]) -> Result<(BlockRanges, usize), RangesError> {
        let mut rest = bytes;
        let number = |rest: &mut &[u8]| {
            let at = bytes.len() - rest.len();
            take_varint(rest).map_err(|fault| match fault {
                VarintFault::Truncated => RangesError::Truncated { len: bytes.len() },
                VarintFault::Overlong | VarintFault::TooWide => RangesError::Varint { at },
            })
        };
        let count = number(&mut rest)?;
        if count as usize > Self::MAX_RANGES {
            return Err(RangesError::TooMany { count: count.into(), max: Self::MAX_RANGES });
        }
        // Each range takes two bytes or more, so a count that the input cannot hold allocates nothing.
        if rest.len() / 2 < count as usize {
            return Err(RangesError::Truncated { len: bytes.len() });
        }
        let mut runs = Vec::with_capacity(count as usize);
        let mut free = 0u64;
        for index in 0..count as usize {
            let first = free + u64::from(number(&mut rest)?);
            let count = u64::from(number(&mut rest)?) + 1;
            let overflow = RangesError::Overflow { index, first, count };
            let (Ok(start), Ok(end)) = (u32::try_from(first), u32::try_from(first + count)) else {
                return Err(overflow);
            };
            runs.push(start..end);
            free = u64::from(end) + 1;
        }
        Ok((BlockRanges { runs }, bytes.len() - rest.len()))
    }
}

/// Collects ranges in any order, overlapping or not; empty ones are left out.
impl FromIterator<Range<u32>> for BlockRanges {
    fn from_iter<I: IntoIterator<Item = Range<u32>>>(ranges: I) -> BlockRanges {
        let mut all: Vec<Range<u32>> = ranges.into_iter().filter(|r| !r.is_empty()).collect();
        all.sort_by_key(|r| r.start);
        let mut runs: Vec<Range<u32>> = Vec::with_capacity(all.len());
        for range in all {
            match runs.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                Some(_) | None => runs.push(range),
            }
        }
        BlockRanges { runs }
    }
}

impl From<Range<u32>> for BlockRanges {
    fn from(range: Range<u32>) -> BlockRanges {
        std::iter::once(range).collect()
    }
}

impl fmt::Debug for BlockRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(&self.runs).finish()
    }
}

impl Serialize for BlockRanges {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_seq(self.runs.iter().map(|r| (r.start, r.end - r.start)))
    }
}

impl<'de> Deserialize<'de> for BlockRanges {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<BlockRanges, D::Error> {
        BlockRanges::from_pairs(Vec::<(u32, u32)>::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn small_set() -> impl Strategy<Value = BTreeSet<u32>> {
        // Dense enough that ranges touch, overlap and nest.
        proptest::collection::btree_set(0u32..60, 0..40)
    }

    fn of(ids: &BTreeSet<u32>) -> BlockRanges {
        ids.iter().map(|&i| i..i + 1).collect()
    }

    fn is_canonical(set: &BlockRanges) -> bool {
        set.runs.iter().all(|r| r.start < r.end) && set.runs.windows(2).all(|w| w[0].end < w[1].start)
    }

    proptest! {
        #[test]
        fn block_ranges_agree_with_a_set_of_ids(a in small_set(), b in small_set(), id in 0u32..70) {
            let (x, y) = (of(&a), of(&b));
            prop_assert!(x.iter().eq(a.iter().copied()));
            prop_assert_eq!(x.len() as usize, a.len());
            prop_assert_eq!(x.contains(id), a.contains(&id));
            prop_assert_eq!(x.first(), a.first().copied());
            prop_assert_eq!(x.end(), a.last().map_or(0, |l| l + 1));
            prop_assert!(x.ranges_from(id).flatten().eq(a.range(id..).copied()));
            for (ours, model) in [
                (x.union(&y), &a | &b),
                (x.intersection(&y), &a & &b),
                (x.difference(&y), &a - &b),
            ] {
                prop_assert!(is_canonical(&ours), "{:?}", ours);
                prop_assert_eq!(ours, of(&model));
            }
        }

        #[test]
        fn block_ranges_survive_both_of_their_forms(
            ranges in proptest::collection::vec((any::<u32>(), 0u32..1000), 0..50)
        ) {
            let set: BlockRanges = ranges.iter().map(|&(s, n)| s..s.saturating_add(n)).collect();
            let mut bytes = Vec::new();
            set.encode(&mut bytes);
            let len = bytes.len();
            for cut in 0..len {
                prop_assert!(BlockRanges::decode(&bytes[..cut]).is_err(), "cut at {}", cut);
            }
            bytes.extend([7; 3]);
            prop_assert_eq!(BlockRanges::decode(&bytes), Ok((set.clone(), len)));
            let json = serde_json::to_string(&set).unwrap();
            prop_assert_eq!(serde_json::from_str::<BlockRanges>(&json).unwrap(), set);
        }

        #[test]
        fn any_bytes_are_a_canonical_set_of_blocks_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..40)
        ) {
            if let Ok((set, len)) = BlockRanges::decode(&bytes) {
                prop_assert!(is_canonical(&set));
                let mut again = Vec::new();
                set.encode(&mut again);
                prop_assert_eq!(&again, &bytes[..len]);
            }
        }
    }

    #[test]
    fn block_ranges_from_outside_are_checked() {
        let pairs = |p: &[(u32, u32)]| BlockRanges::from_pairs(p.iter().copied());
        assert_eq!(pairs(&[(0, 2), (2, 3), (9, 1)]), Ok([0..5, 9..10].into_iter().collect()));
        assert_eq!(pairs(&[(3, 0)]), Err(RangesError::Empty { index: 0, first: 3 }));
        assert_eq!(
            pairs(&[(3, 4), (6, 1)]),
            Err(RangesError::Overlap { index: 1, first: 6, previous_end: 7 })
        );
        assert_eq!(
            pairs(&[(u32::MAX, 1)]),
            Err(RangesError::Overflow { index: 0, first: u32::MAX.into(), count: 1 })
        );
        assert!(pairs(&[(u32::MAX - 1, 1)]).is_ok());
        let many = (0..=BlockRanges::MAX_RANGES as u32).map(|i| (i * 2, 1));
        assert_eq!(BlockRanges::from_pairs(many).unwrap_err().kind(), Kind::Exhausted);
        for bad in ["[[1]]", "[[1,2,3]]", "[[-1,2]]", "[[4294967296,1]]", "[[0,0]]", "{}", "[[5,1],[1,1]]"] {
            assert!(serde_json::from_str::<BlockRanges>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_binary_set_of_blocks_has_one_spelling() {
        let mut bytes = Vec::new();
        [0..5u32, 9..10, 400..1000].into_iter().collect::<BlockRanges>().encode(&mut bytes);
        assert_eq!(bytes, [3, 0, 4, 3, 0, 0x85, 3, 0xd7, 4]);
        assert_eq!(BlockRanges::decode(&[1, 0x80, 0, 0]), Err(RangesError::Varint { at: 1 }));
        assert_eq!(BlockRanges::decode(&[0xff; 9]), Err(RangesError::Varint { at: 0 }));
        assert_eq!(BlockRanges::decode(&[0xff, 0xff, 0x1f]).unwrap_err().kind(), Kind::Exhausted);
        assert_eq!(BlockRanges::decode(&[0x80, 0x80, 1]), Err(RangesError::Truncated { len: 3 }));
        let beyond = [1, 0xff, 0xff, 0xff, 0xff, 0x0f, 0];
        assert!(matches!(BlockRanges::decode(&beyond), Err(RangesError::Overflow { index: 0, .. })));
    }
}
