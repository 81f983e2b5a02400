//! Which version each block of a transfer has.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::TicketError;
use crate::identity::Version;
use crate::ranges::BlockRanges;

/// The version of each block, as runs of blocks that share one. JSON: `[[first, count, version], …]`.
///
/// In a full pull of a quiet image this is one run. In a fuzzy pull the sources hold blocks of several
/// versions, and the receiver brings older ones up to date with deltas afterwards. Runs may cover blocks that are not
/// wanted, so that a whole image at one version is always one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockVersions {
    runs: Vec<(u32, u32, Version)>,
}

impl BlockVersions {
    /// Every block of `blocks` at `version`.
    pub fn uniform(blocks: &BlockRanges, version: Version) -> BlockVersions {
        let runs = if blocks.is_empty() { Vec::new() } else { vec![(0, blocks.end(), version)] };
        BlockVersions { runs }
    }

    /// Checks runs of `(first, count, version)` from outside: ascending, disjoint, none empty. Runs that
    /// touch and have one version are merged.
    pub fn from_runs(
        runs: impl IntoIterator<Item = (u32, u32, Version)>,
    ) -> Result<BlockVersions, TicketError> {
        let mut merged: Vec<(u32, u32, Version)> = Vec::new();
        for (index, (first, count, version)) in runs.into_iter().enumerate() {
            if index >= BlockRanges::MAX_RANGES {
                return Err(TicketError::TooManyVersionRuns { max: BlockRanges::MAX_RANGES });
            }
            let previous_end = merged.last().map_or(0, |(f, c, _)| f + c);
            if count == 0 || first.checked_add(count).is_none() || first < previous_end {
                return Err(TicketError::VersionRun { index, first, count });
            }
            match merged.last_mut() {
                Some((_, c, v)) if previous_end == first && *v == version => *c += count,
                Some(_) | None => merged.push((first, count, version)),
            }
        }
        Ok(BlockVersions { runs: merged })
    }

    /// The runs: first block, number of blocks, version.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = (u32, u32, Version)> + '_ {
        self.runs.iter().copied()
    }

    /// The version of `block`, if a run covers it.
    pub fn version_of(&self, block: u32) -> Option<Version> {
        let after = self.runs.partition_point(|(first, ..)| *first <= block);
        let (first, count, version) = *self.runs.get(after.checked_sub(1)?)?;
        (block - first < count).then_some(version)
    }

    /// The blocks that runs cover.
    pub fn covered(&self) -> BlockRanges {
        self.runs.iter().map(|(first, count, _)| *first..first + count).collect()
    }

    /// The blocks below `version`, which a fuzzy pull still has to update.
    pub fn lagging(&self, version: Version) -> BlockRanges {
        self.runs
            .iter()
            .filter(|(.., v)| *v < version)
            .map(|(first, count, _)| *first..first + count)
            .collect()
    }
}

impl Serialize for BlockVersions {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_seq(&self.runs)
    }
}

impl<'de> Deserialize<'de> for BlockVersions {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<BlockVersions, D::Error> {
        BlockVersions::from_runs(Vec::<(u32, u32, Version)>::deserialize(d)?)
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_versions_answer_per_block_and_merge_equal_neighbours() {
        let v = BlockVersions::from_runs([(0, 5, 7), (5, 5, 7), (10, 2, 6), (20, 1, 9)]).unwrap();
        assert_eq!(v.runs().collect::<Vec<_>>(), [(0, 10, 7), (10, 2, 6), (20, 1, 9)]);
        let versions: Vec<_> = [0, 9, 10, 11, 12, 19, 20, 21].map(|b| v.version_of(b)).into();
        let expected = [Some(7), Some(7), Some(6), Some(6), None, None, Some(9), None];
        assert_eq!(versions, expected);
        assert_eq!(v.lagging(9), BlockRanges::from(0..12));
        assert_eq!(serde_json::to_string(&v).unwrap(), "[[0,10,7],[10,2,6],[20,1,9]]");
        assert_eq!(BlockVersions::uniform(&BlockRanges::new(), 3).runs().len(), 0);
    }

    #[test]
    fn runs_of_block_versions_from_outside_are_checked() {
        for bad in ["[[0,0,1]]", "[[4,2,1],[5,1,1]]", "[[4,2,1],[0,1,1]]", "[[4294967295,1,1]]", "[[0,1]]"] {
            assert!(serde_json::from_str::<BlockVersions>(bad).is_err(), "{bad}");
        }
    }
}
