//! Where the bytes of a version come from.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use windlass_core::manifest::{Manifest, Parts};

use super::error::{BoxError, RoleError};
use crate::region::Region;

/// A trainer's weights: which tensors there are, which bytes of them this rank has, and the bytes themselves.
pub trait WeightExtractor: Sync {
    /// The tensors of the whole model, the same for all ranks.
    fn manifest(&self) -> &Arc<Manifest>;

    /// The bytes of a tensor (by its index in the manifest) that this rank extracts: in order and apart from each
    /// other. All of them unless said otherwise.
    fn ranges(&self, tensor: usize) -> Vec<Range<u64>> {
        let bytes = self.manifest().tensors().get(tensor).map_or(0, |t| t.bytes);
        Some(0..bytes).into_iter().filter(|r| !r.is_empty()).collect()
    }

    /// Fills `out` with bytes `range` of a tensor, which is one of its ranges or a piece of one. `out` is the slot
    /// itself and still has the bytes of an older version.
    fn extract(&self, tensor: usize, range: Range<u64>, out: &mut [u8]) -> Result<(), BoxError>;

    /// How many threads may extract at a time; 1 for weights that belong to the calling thread.
    fn max_threads(&self) -> usize {
        usize::MAX
    }
}

/// The bytes between two looks at whether the attempt still runs. A multiple of every element's size.
const PIECE: u64 = 4 << 20;

/// One call of [`WeightExtractor::extract`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) tensor: usize,
    pub(super) range: Range<u64>,
}

/// What a rank has to extract, in pieces, checked. A lone rank must cover all that the region holds.
pub(super) fn plan(
    extractor: &dyn WeightExtractor,
    region: &Region,
    rank: u16,
) -> Result<Vec<Piece>, RoleError> {
    let manifest = region.manifest();
    let (found, expected) = (extractor.manifest().layout_hash(), manifest.layout_hash());
    if found != expected {
        return Err(RoleError::OtherLayout { rank, found, expected });
    }
    let mut held = held_by_tensor(region)?;
    let mut pieces = Vec::new();
    for (tensor, t) in manifest.tensors().iter().enumerate() {
        let ranges = extractor.ranges(tensor);
        let mut end = 0;
        for range in &ranges {
            if range.start < end || range.start >= range.end || range.end > t.bytes {
                let (tensor, range) = (t.name.clone(), range.clone());
                return Err(RoleError::Range { rank, tensor, range, bytes: t.bytes });
            }
            end = range.end;
        }
        if region.ranks() == 1 {
            let needed = held.remove(&tensor).unwrap_or_default();
            if let Some(range) = first_gap(&needed, &ranges) {
                return Err(RoleError::Uncovered { tensor: t.name.clone(), range });
            }
        }
        for range in ranges {
            let starts = (range.start..range.end).step_by(PIECE as usize);
            pieces.extend(starts.map(|s| Piece { tensor, range: s..range.end.min(s + PIECE) }));
        }
    }
    Ok(pieces)
}

/// The bytes of each tensor that a region holds, in order.
fn held_by_tensor(region: &Region) -> Result<BTreeMap<usize, Vec<Range<u64>>>, RoleError> {
    let manifest = region.manifest();
    let whole = |(i, t): (usize, &windlass_core::manifest::Tensor)| {
        (t.bytes > 0).then(|| (i, std::iter::once(0..t.bytes).collect()))
    };
    let Some(part) = region.part() else {
        return Ok(manifest.tensors().iter().enumerate().filter_map(whole).collect());
    };
    let all = windlass_core::ranges::BlockRanges::from(0..manifest.cuts().blocks());
    let parts = Parts::new(manifest, vec![part.clone(), all.difference(part)])?;
    let mut held: BTreeMap<usize, Vec<Range<u64>>> = BTreeMap::new();
    for mut run in parts.byte_ranges(manifest, 0).filter(|r| !r.is_empty()) {
        // A run may go on into the next tensors.
        let mut tensor = manifest.tensors().partition_point(|t| t.range().end <= run.start);
        while let Some(t) = manifest.tensors().get(tensor).filter(|_| !run.is_empty()) {
            let end = run.end.min(t.range().end);
            if end > run.start {
                held.entry(tensor).or_default().push(run.start - t.offset..end - t.offset);
                run.start = end;
            }
            tensor += 1;
        }
    }
    for ranges in held.values_mut() {
        ranges.sort_unstable_by_key(|r| r.start);
    }
    Ok(held)
}

/// The first bytes of `needed` that `ranges` leave out. Both are in order.
fn first_gap(needed: &[Range<u64>], ranges: &[Range<u64>]) -> Option<Range<u64>> {
    let mut at = 0;
    for need in needed {
        let mut start = need.start;
        while start < need.end {
            match ranges.get(at) {
                Some(r) if r.end <= start => at += 1,
                Some(r) if r.start <= start => start = r.end,
                Some(r) if r.start < need.end => return Some(start..r.start),
                Some(_) | None => return Some(start..need.end),
            }
        }
    }
    None
}

/// Weights in this process' memory, one buffer for each tensor.
#[derive(Clone, Debug)]
pub struct Tensors {
    manifest: Arc<Manifest>,
    data: Vec<Vec<u8>>,
}

impl Tensors {
    /// All zeros.
    pub fn zeroed(manifest: Arc<Manifest>) -> Tensors {
        let data = manifest.tensors().iter().map(|t| vec![0; t.bytes as usize]).collect();
        Tensors { manifest, data }
    }

    /// The bytes of a tensor, to change them. `None` if there is no tensor or alias of this name.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut [u8]> {
        let tensor = self.manifest.find(name)?;
        self.data.get_mut(tensor).map(Vec::as_mut_slice)
    }

    /// The bytes of a tensor.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let tensor = self.manifest.find(name)?;
        self.data.get(tensor).map(Vec::as_slice)
    }

    /// All tensors in the manifest's order, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.data.iter_mut().map(Vec::as_mut_slice)
    }

    /// All tensors in the manifest's order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.data.iter().map(Vec::as_slice)
    }
}

impl WeightExtractor for Tensors {
    fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    fn extract(&self, tensor: usize, range: Range<u64>, out: &mut [u8]) -> Result<(), BoxError> {
        let bytes = self.data.get(tensor).and_then(|d| d.get(range.start as usize..range.end as usize));
        out.copy_from_slice(bytes.ok_or("no such bytes")?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "lists of ranges that have one")]
    fn the_first_gap_in_a_cover_is_found() {
        assert_eq!(first_gap(&[0..10], &[0..10]), None);
        assert_eq!(first_gap(&[0..10], &[0..4, 4..10]), None);
        assert_eq!(first_gap(&[0..10], &[0..4, 6..10]), Some(4..6));
        assert_eq!(first_gap(&[0..10], &[1..10]), Some(0..1));
        assert_eq!(first_gap(&[0..10], &[0..9]), Some(9..10));
        assert_eq!(first_gap(&[0..10], &[]), Some(0..10));
        assert_eq!(first_gap(&[2..4, 8..9], &[0..5, 7..9]), None);
        assert_eq!(first_gap(&[2..4, 8..9], &[0..5]), Some(8..9));
        assert_eq!(first_gap(&[], &[]), None);
    }
}
