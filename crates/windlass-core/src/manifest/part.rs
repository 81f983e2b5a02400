//! Parts: how the blocks of an image are divided among nodes.
//!
//! A node's region holds one part of the image: the blocks that its ranks write. Cuts follow the boundaries
//! of owners (see [`super::cut`]), so a part is a set of whole blocks, and every block of the cut table is in
//! exactly one part. A part may be empty. One node is the case of one part ([`Parts::single`]).
//!
//! # JSON form
//!
//! ```text
//! {"layout_hash": "…", "cuts_hash": "…", "parts": [[[first block, count], …], …]}
//! ```
//!
//! Blocks are numbers in one cut table of one layout, so the form names both, and is refused for others. A
//! part is a set of blocks in the form of [`crate::ranges`], with its limit on the number of ranges.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Block, Manifest, ManifestError, not_canonical};
use crate::identity::{CutsHash, LayoutHash};
use crate::ranges::BlockRanges;

/// The division of an image among nodes. Parts are numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    layout_hash: LayoutHash,
    cuts_hash: CutsHash,
    /// The blocks of each part, and how many bytes they are.
    blocks: Vec<BlockRanges>,
    bytes: Vec<u64>,
    /// The first block of every range of every part, ascending, and the part that it belongs to.
    owners: Vec<(u32, usize)>,
}

impl Parts {
    /// Checks that every block of the manifest's cut table is in exactly one of these parts.
    pub fn new(manifest: &Manifest, parts: Vec<BlockRanges>) -> Result<Parts, ManifestError> {
        let mut runs: Vec<(Range<u32>, usize)> =
            parts.iter().enumerate().flat_map(|(p, blocks)| blocks.ranges().map(move |r| (r, p))).collect();
        runs.sort_unstable_by_key(|(run, _)| run.start);
        let count = manifest.cuts().blocks();
        let mut next = 0;
        for (run, _) in &runs {
            if run.start > next {
                break;
            }
            if run.start < next {
                return Err(ManifestError::BadParts { what: "two parts hold", block: run.start });
            }
            next = run.end;
        }
        if next < count {
            return Err(ManifestError::BadParts { what: "no part holds", block: next });
        }
        if let Some((run, _)) = runs.last().filter(|(run, _)| run.end > count) {
            return Err(ManifestError::NoSuchBlock { block: run.start.max(count), count });
        }
        let bytes = parts.iter().map(|blocks| bytes_of(manifest, blocks)).collect();
        let owners = runs.into_iter().map(|(run, part)| (run.start, part)).collect();
        let (layout_hash, cuts_hash) = (manifest.layout_hash(), manifest.cuts_hash());
        Ok(Parts { layout_hash, cuts_hash, blocks: parts, bytes, owners })
    }

    /// One part that holds everything.
    pub fn single(manifest: &Manifest) -> Parts {
        let blocks = manifest.cuts().blocks();
        Parts {
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
            blocks: vec![(0..blocks).into()],
            bytes: vec![manifest.data_bytes()],
            owners: if blocks > 0 { vec![(0, 0)] } else { Vec::new() },
        }
    }

    /// Assigns every block to one of `parts` parts. Where cuts follow the boundaries of shards,
    /// the first unit of a block decides.
    pub fn by_owner(
        manifest: &Manifest,
        parts: usize,
        mut owner: impl FnMut(&Block) -> usize,
    ) -> Result<Parts, ManifestError> {
        let mut runs: Vec<Vec<Range<u32>>> = vec![Vec::new(); parts];
        for number in 0..manifest.cuts().blocks() {
            // A block of no part is left out here and found missing below.
            if let Some(runs) = runs.get_mut(owner(&manifest.cuts().block(number)?)) {
                match runs.last_mut() {
                    Some(last) if last.end == number => last.end += 1,
                    Some(_) | None => runs.push(number..number + 1),
                }
            }
        }
        Parts::new(manifest, runs.into_iter().map(|runs| runs.into_iter().collect()).collect())
    }

    /// How many parts there are.
    pub fn count(&self) -> usize {
        self.blocks.len()
    }

    /// The part that holds a block; `None` if the block is beyond the cut table.
    pub fn part_of(&self, block: u32) -> Option<usize> {
        let after = self.owners.partition_point(|&(first, _)| first <= block);
        let (_, part) = *self.owners.get(after.checked_sub(1)?)?;
        self.blocks[part].contains(block).then_some(part)
    }

    /// The blocks of a part.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn blocks(&self, part: usize) -> &BlockRanges {
        &self.blocks[part]
    }

    /// How many bytes a part holds.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn bytes(&self, part: usize) -> u64 {
        self.bytes[part]
    }

    /// The bytes of a part as ranges of the image's data: ascending, and none touches the next. Computed
    /// tensor by tensor, so that a part of many strided tiles does not need them all in memory.
    ///
    /// # Panics
    /// If there is no such part, or if the parts were made for another layout or cut table.
    pub fn byte_ranges<'a>(
        &'a self,
        manifest: &'a Manifest,
        part: usize,
    ) -> impl Iterator<Item = Range<u64>> + 'a {
        let ours = (self.layout_hash, self.cuts_hash);
        assert_eq!(ours, (manifest.layout_hash(), manifest.cuts_hash()), "parts of this manifest");
        let blocks = &self.blocks[part];
        let tensors = 0..manifest.tensors().len();
        let mut ranges = tensors.flat_map(move |t| tensor_ranges(manifest, blocks, t)).peekable();
        std::iter::from_fn(move || {
            let mut range = ranges.next()?;
            while let Some(next) = ranges.next_if(|next| next.start == range.end) {
                range.end = next.end;
            }
            Some(range)
        })
    }

    /// The JSON form: fixed order of keys, no white space.
    pub fn to_json(&self) -> String {
        let Parts { layout_hash, cuts_hash, ref blocks, .. } = *self;
        let form = PartsJson { layout_hash, cuts_hash, parts: blocks.clone() };
        serde_json::to_string(&form).expect("strings and numbers always serialise")
    }

    /// Reads the JSON form back, for this manifest.
    pub fn from_json(manifest: &Manifest, json: &[u8]) -> Result<Parts, ManifestError> {
        let form: PartsJson = serde_json::from_slice(json)
            .map_err(|source| ManifestError::Json { what: "division into parts", source })?;
        not_canonical("layout_hash", "parts", &form.layout_hash, &manifest.layout_hash())?;
        not_canonical("cuts_hash", "parts", &form.cuts_hash, &manifest.cuts_hash())?;
        Parts::new(manifest, form.parts)
    }
}

/// The blocks of a tensor that are among these.
fn of_tensor<'a>(
    manifest: &Manifest,
    blocks: &'a BlockRanges,
    tensor: usize,
) -> impl Iterator<Item = Range<u32>> + use<'a> {
    let all = manifest.cuts().of_tensor(tensor);
    let end = all.end;
    blocks
        .ranges_from(all.start)
        .take_while(move |run| run.start < end)
        .map(move |run| run.start..run.end.min(end))
}

/// The bytes of a tensor that are in these blocks, ascending. Those of strided tiles that stand side by side
/// interleave, and become one range where they meet.
fn tensor_ranges(manifest: &Manifest, blocks: &BlockRanges, tensor: usize) -> Vec<Range<u64>> {
    let all = manifest.cuts().of_tensor(tensor);
    if all.is_empty() {
        return Vec::new();
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut push = |range: Range<u64>| match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        Some(_) | None => ranges.push(range),
    };
    for run in of_tensor(manifest, blocks, tensor) {
        if run == all {
            return vec![manifest.tensors()[tensor].range()];
        }
        for block in geometry(manifest, run) {
            manifest.byte_runs(&block).for_each(&mut push);
        }
    }
    ranges.sort_unstable_by_key(|r| r.start);
    ranges
}

pub(super) fn bytes_of(manifest: &Manifest, blocks: &BlockRanges) -> u64 {
    let of_run = |tensor: usize, run: Range<u32>| {
        let t = &manifest.tensors()[tensor];
        if run == manifest.cuts().of_tensor(tensor) {
            return t.bytes;
        }
        geometry(manifest, run).map(|block| block.units() * t.dtype.unit() as u64).sum()
    };
    let tensors = 0..manifest.tensors().len();
    tensors.flat_map(|t| of_tensor(manifest, blocks, t).map(move |run| of_run(t, run))).sum()
}

/// The blocks of these numbers, all within the cut table.
fn geometry(manifest: &Manifest, numbers: Range<u32>) -> impl Iterator<Item = Block> {
    numbers.map(|number| manifest.cuts().block(number).expect("parts hold blocks of their cut table"))
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartsJson {
    layout_hash: LayoutHash,
    cuts_hash: CutsHash,
    parts: Vec<BlockRanges>,
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // Lists of one range are what is meant.
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::tests::{manifest, shape_and_cuts, spec};
    use super::super::{BLOCK_UNITS, DimCut};
    use super::*;
    use crate::dtype::Dtype;

    fn set(runs: &[Range<u32>]) -> BlockRanges {
        runs.iter().cloned().collect()
    }

    /// Three blocks of "w", one of "b".
    fn four_blocks() -> Manifest {
        manifest(vec![spec("w", Dtype::F32, &[BLOCK_UNITS * 2 + 5]), spec("b", Dtype::BF16, &[3])])
    }

    /// A matrix whose columns 0..4 and 4..10 belong to two owners: one strided tile each.
    fn two_tiles() -> Manifest {
        let cuts = BTreeMap::from([("w".to_owned(), vec![DimCut { dim: 1, bounds: vec![4] }])]);
        manifest(vec![spec("w", Dtype::BF16, &[3, 10]), spec("v", Dtype::F64, &[2])])
            .with_cuts(&cuts)
            .unwrap()
    }

    #[test]
    fn every_block_is_in_exactly_one_part() {
        let m = four_blocks();
        let parts = |parts: &[BlockRanges]| Parts::new(&m, parts.to_vec());
        let good = parts(&[set(&[1..2, 3..4]), set(&[]), set(&[0..1, 2..3])]).unwrap();
        assert_eq!(
            (0..5).map(|b| good.part_of(b)).collect::<Vec<_>>(),
            [Some(2), Some(0), Some(2), Some(0), None]
        );
        assert_eq!((good.count(), good.blocks(1).len(), good.bytes(1)), (3, 0, 0));
        let fault = |these: &[BlockRanges]| match parts(these) {
            Err(ManifestError::BadParts { what, block }) => (what, block),
            other => panic!("{other:?}"),
        };
        assert_eq!(fault(&[]), ("no part holds", 0));
        assert_eq!(fault(&[set(&[1..4])]), ("no part holds", 0));
        assert_eq!(fault(&[set(&[0..1]), set(&[2..4])]), ("no part holds", 1));
        assert_eq!(fault(&[set(&[0..2]), set(&[2..3])]), ("no part holds", 3));
        assert_eq!(fault(&[set(&[0..4]), set(&[2..3])]), ("two parts hold", 2));
        assert_eq!(fault(&[set(&[3..4, 0..1]), set(&[0..4])]), ("two parts hold", 0));
        for beyond in [set(&[0..5]), set(&[0..4, 7..9])] {
            let got = parts(&[beyond]);
            assert!(matches!(got, Err(ManifestError::NoSuchBlock { block: 4 | 7, count: 4 })), "{got:?}");
        }
    }

    #[test]
    fn one_node_is_the_one_part_case() {
        for m in [four_blocks(), two_tiles(), manifest(vec![]), manifest(vec![spec("e", Dtype::U8, &[0])])] {
            let single = Parts::single(&m);
            assert_eq!(single, Parts::new(&m, vec![(0..m.cuts().blocks()).into()]).unwrap());
            assert_eq!(single, Parts::by_owner(&m, 1, |_| 0).unwrap());
            let ranges: Vec<_> = single.byte_ranges(&m, 0).collect();
            assert_eq!(ranges, if m.data_bytes() > 0 { vec![0..m.data_bytes()] } else { vec![] });
        }
    }

    #[test]
    fn strided_tiles_are_a_range_per_run_until_their_neighbour_joins_them() {
        let m = two_tiles();
        // "v" is block 0 at bytes 0..16; "w" begins at byte 16 with rows of 20 bytes.
        let parts = Parts::by_owner(&m, 2, |b| usize::from(b.tensor == 1 && b.start == 4)).unwrap();
        assert_eq!(parts.byte_ranges(&m, 0).collect::<Vec<_>>(), [0..24, 36..44, 56..64]);
        assert_eq!(parts.byte_ranges(&m, 1).collect::<Vec<_>>(), [24..36, 44..56, 64..76]);
        assert_eq!((parts.bytes(0), parts.bytes(1)), (40, 36));
        let together = Parts::new(&m, vec![set(&[0..1]), set(&[1..3])]).unwrap();
        assert_eq!(together.byte_ranges(&m, 1).collect::<Vec<_>>(), [16..76]);
    }

    #[test]
    fn an_owner_outside_the_parts_leaves_its_block_without_one() {
        let owned = Parts::by_owner(&four_blocks(), 2, |b| b.start as usize / BLOCK_UNITS as usize);
        assert!(
            matches!(owned, Err(ManifestError::BadParts { what: "no part holds", block: 2 })),
            "{owned:?}"
        );
    }

    #[test]
    fn the_json_form_of_parts_is_checked_against_the_manifest() {
        let m = two_tiles();
        let parts = Parts::by_owner(&m, 2, |b| usize::from(b.start == 4)).unwrap();
        let json = parts.to_json();
        assert!(json.ends_with(r#""parts":[[[0,2]],[[2,1]]]}"#), "{json}");
        assert_eq!(Parts::from_json(&m, json.as_bytes()).unwrap(), parts);
        let uncut = m.clone().with_cuts(&BTreeMap::new()).unwrap();
        for other in [uncut, four_blocks()] {
            assert!(matches!(
                Parts::from_json(&other, json.as_bytes()),
                Err(ManifestError::NotCanonical { .. })
            ));
        }
        for (from, to) in
            [("[[2,1]]", "[[2,0]]"), ("[[2,1]]", "[]"), ("\"parts\"", "\"part\""), ("]}", "],\"x\":1}")]
        {
            assert!(json.contains(from));
            let bad = json.replacen(from, to, 1);
            assert!(Parts::from_json(&m, bad.as_bytes()).is_err(), "{from} -> {to}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn byte_ranges_of_all_parts_partition_the_image(
            (shape, cuts) in shape_and_cuts(), tail in 0u64..200_000, owners in prop::collection::vec(0usize..4, 1..40),
        ) {
            prop_assume!(shape.iter().product::<u64>() < 3_000_000);
            let specs = vec![spec("w", Dtype::U8, &shape), spec("e", Dtype::U8, &[0]), spec("z", Dtype::U8, &[tail])];
            let m = manifest(specs).with_cuts(&BTreeMap::from([("w".to_owned(), cuts)])).unwrap();
            let mut asked = owners.iter().cycle().copied();
            let parts = Parts::by_owner(&m, 4, |_| asked.next().unwrap()).unwrap();
            let mut holder = vec![None; m.data_bytes() as usize];
            for part in 0..parts.count() {
                let (mut bytes, mut last) = (0, None);
                for range in parts.byte_ranges(&m, part) {
                    prop_assert!(range.start < range.end && last.is_none_or(|end| end < range.start));
                    last = Some(range.end);
                    bytes += range.end - range.start;
                    for slot in &mut holder[range.start as usize..range.end as usize] {
                        prop_assert_eq!(slot.replace(part), None, "two parts hold a byte");
                    }
                }
                prop_assert_eq!(bytes, parts.bytes(part));
            }
            for number in 0..m.cuts().blocks() {
                let part = parts.part_of(number);
                prop_assert!(part.is_some_and(|p| parts.blocks(p).contains(number)));
                for range in m.byte_runs(&m.cuts().block(number).unwrap()) {
                    prop_assert!(holder[range.start as usize..range.end as usize].iter().all(|h| *h == part));
                }
            }
            prop_assert!(holder.iter().all(Option::is_some), "every byte is in a block");
            prop_assert_eq!(Parts::from_json(&m, parts.to_json().as_bytes()).unwrap(), parts);
        }
    }
}
