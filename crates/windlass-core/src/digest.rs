//! Block sums, tensor sums and the state digest.
//!
//! Owns: the hash that proves two images equal. Called wherever bytes are published, received, applied or
//! scrubbed. Must not: keep state; tables belong to their images.
//!
//! # The sum
//!
//! A tensor is a stream of little-endian 32-bit words, the last one filled up with zeros. Its sum has two
//! lanes, each an integer mod 2^64 from the first multiplication to the last addition:
//!
//! ```text
//! sum[lane] = Σ over bytes i of (byte[i] + 1) · 256^(i mod 4) · low[lane][w mod 1024] · high(lane, w div 1024)
//!             where w = i div 4
//! ```
//!
//! `low` is a table of 1024 random 32-bit keys for each lane, `high` an odd random 64-bit key computed from
//! the group's number. A word times a low key is one 32×32→64-bit multiplication, which every vector unit
//! has; the high key costs one multiplication per 4 KiB. So it runs at the speed of memory.
//!
//! With `mix` the finalizer of SplitMix64 (`x *= 0x9e3779b97f4a7c15; x ^= x >> 30; x *= 0xbf58476d1ce4e5b9;
//! x ^= x >> 27; x *= 0x94d049bb133111eb; x ^= x >> 31`, all mod 2^64), the keys of lanes 0 and 1 are
//!
//! ```text
//! low[lane][i]       = mix(L + i + 1) >> 32    L = 0x0057494e444c4153, 0x00532d4c4f572d42
//! high(lane, group)  = mix(H + group) | 1      H = 0x6a09e667f3bcc908, 0xbb67ae8584caa73b
//! key(lane, tensor)  = mix(T + index) | 1      T = 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1
//! ```
//!
//! Consequences:
//! - It is linear in the bytes: any division of a tensor, at any byte, into shards, blocks or tiles gives
//!   partial sums that add up to the sum of the whole, in any order. Keys depend on the position in the tensor
//!   and not on cuts.
//! - If some units change, the sum changes by the sum of their differences times their keys: a delta updates
//!   it in O(changes) ([`sum_of_changes`]).
//! - The `+ 1` makes zeros count: leaving out a range of zeros changes the sum.
//!
//! # From sums to a digest
//!
//! The state's raw sum is the sum of the tensors' sums, each times an odd key from the tensor's index; it is
//! additive too, so that the nodes of a trainer add up their parts ([`StateSum`]). The [`StateDigest`] is the
//! XXH3-128, big-endian, of `"windlass state 1\0"`, the layout hash and both lanes of the raw sum, each
//! little-endian. It depends on layout and bytes, not on cuts, history or
//! the process that computed it.
//!
//! # Odds
//!
//! For a given change of bytes, over the choice of keys: let `E` be, for one of the 1024 columns, the sum of
//! its words' differences times their high keys. The lane stays the same only if one low key, uniform in 32
//! bits, solves `low · E = c`. If one word of the column changed, or the column's words changed so that `E`
//! has fewer than 33 trailing zeros, at most one of 2^32 low keys does: 2^-32 for a lane, **2^-64 for both**.
//! The worst known case is a pair of flips of the same top bit (a sign flip of the odd element in two
//! words) exactly a multiple of 4 KiB apart in one tensor and nowhere else: about 2^-28 for a lane, **2^-56
//! for both**. A change of a single word and a pair of sign flips within 4 KiB are always detected. The keys are public
//! constants: the digest protects against accidents. Tokens and TLS protect against attackers.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::Xxh3;

use crate::hex::{self, Hex};
use crate::identity::{LayoutHash, StateDigest};
use crate::kernel::Kernels;
use crate::manifest::{Block, Manifest, ManifestError};
use crate::ranges::BlockRanges;

/// Words that share a high key.
pub const GROUP_WORDS: usize = 1024;
const GROUP_BYTES: u64 = GROUP_WORDS as u64 * 4;
/// A word whose bytes are all one: what the `+ 1` of four bytes adds.
const ONES: u64 = 0x0101_0101;

pub(crate) const fn splitmix(x: u64) -> u64 {
    let x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const LOW_SEED: [u64; 2] = [0x57_494e_444c_4153, 0x53_2d4c_4f57_2d42];
const HIGH_SEED: [u64; 2] = [0x6a09_e667_f3bc_c908, 0xbb67_ae85_84ca_a73b];
const TENSOR_SEED: [u64; 2] = [0x3c6e_f372_fe94_f82b, 0xa54f_f53a_5f1d_36f1];

/// The low keys of both lanes.
pub static LOW: [[u32; GROUP_WORDS]; 2] = {
    let mut keys = [[0; GROUP_WORDS]; 2];
    let mut lane = 0;
    while lane < 2 {
        let mut i = 0;
        while i < GROUP_WORDS {
            keys[lane][i] = (splitmix(LOW_SEED[lane].wrapping_add(i as u64 + 1)) >> 32) as u32;
            i += 1;
        }
        lane += 1;
    }
    keys
};

/// Sums of the first i low keys.
static PREFIX: [[u64; GROUP_WORDS + 1]; 2] = {
    let mut sums = [[0; GROUP_WORDS + 1]; 2];
    let mut lane = 0;
    while lane < 2 {
        let mut i = 0;
        while i < GROUP_WORDS {
            sums[lane][i + 1] = sums[lane][i] + LOW[lane][i] as u64;
            i += 1;
        }
        lane += 1;
    }
    sums
};

/// The high keys of a group of a tensor, one for each lane; odd.
pub fn high(group: u64) -> [u64; 2] {
    HIGH_SEED.map(|seed| splitmix(seed.wrapping_add(group)) | 1)
}

/// The sum of some bytes of a tensor: of a block, of a shard, of all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockSum(pub [u64; 2]);

impl BlockSum {
    /// Sixteen bytes, little-endian, lane 0 first.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut out = [0; 16];
        out[..8].copy_from_slice(&self.0[0].to_le_bytes());
        out[8..].copy_from_slice(&self.0[1].to_le_bytes());
        out
    }

    /// The inverse of [`BlockSum::to_bytes`].
    pub fn from_bytes(bytes: [u8; 16]) -> BlockSum {
        let n = u128::from_le_bytes(bytes);
        BlockSum([n as u64, (n >> 64) as u64])
    }

    /// The sum of the bytes of both.
    #[must_use]
    pub fn plus(self, other: BlockSum) -> BlockSum {
        BlockSum([self.0[0].wrapping_add(other.0[0]), self.0[1].wrapping_add(other.0[1])])
    }

    /// The sum without the bytes of `other`.
    #[must_use]
    pub fn minus(self, other: BlockSum) -> BlockSum {
        BlockSum([self.0[0].wrapping_sub(other.0[0]), self.0[1].wrapping_sub(other.0[1])])
    }

    fn times(self, keys: [u64; 2]) -> BlockSum {
        BlockSum([self.0[0].wrapping_mul(keys[0]), self.0[1].wrapping_mul(keys[1])])
    }
}

/// The text and JSON form: its sixteen bytes in hexadecimal.
impl fmt::Display for BlockSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(&self.to_bytes()).fmt(f)
    }
}

impl Serialize for BlockSum {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BlockSum {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<BlockSum, D::Error> {
        let bytes = hex::parse(&String::deserialize(d)?).map(BlockSum::from_bytes);
        bytes.ok_or_else(|| serde::de::Error::custom("a block sum is 32 hexadecimal digits"))
    }
}

impl std::iter::Sum for BlockSum {
    fn sum<I: Iterator<Item = BlockSum>>(iter: I) -> BlockSum {
        iter.fold(BlockSum::default(), BlockSum::plus)
    }
}

/// The sum of `bytes`, which stand at byte `offset` of their tensor.
pub fn sum_range<K: Kernels + ?Sized>(kernels: &K, mut offset: u64, mut bytes: &[u8]) -> BlockSum {
    let mut sum = BlockSum::default();
    let head = ((4 - offset % 4) % 4).min(bytes.len() as u64) as usize;
    if head > 0 {
        let (part, rest) = bytes.split_at(head);
        sum = sum.plus(sum_partial_word(offset, part));
        bytes = rest;
        offset += head as u64;
    }
    while bytes.len() >= 4 {
        let first = (offset % GROUP_BYTES / 4) as usize;
        let words = (GROUP_WORDS - first).min(bytes.len() / 4);
        let (part, rest) = bytes.split_at(words * 4);
        let keys = [&LOW[0][first..first + words], &LOW[1][first..first + words]];
        let mut inner = kernels.dot(part, keys);
        for lane in 0..2 {
            let keys = PREFIX[lane][first + words] - PREFIX[lane][first];
            inner[lane] = inner[lane].wrapping_add(keys.wrapping_mul(ONES));
        }
        sum = sum.plus(BlockSum(inner).times(high(offset / GROUP_BYTES)));
        bytes = rest;
        offset += words as u64 * 4;
    }
    if bytes.is_empty() { sum } else { sum.plus(sum_partial_word(offset, bytes)) }
}

/// The sum of at most three bytes that lie within one word.
fn sum_partial_word(offset: u64, bytes: &[u8]) -> BlockSum {
    let word = bytes
        .iter()
        .enumerate()
        .map(|(i, &b)| (u64::from(b) + 1) << (8 * ((offset as usize + i) % 4)))
        .sum::<u64>();
    let column = (offset % GROUP_BYTES / 4) as usize;
    let low = [word.wrapping_mul(LOW[0][column].into()), word.wrapping_mul(LOW[1][column].into())];
    BlockSum(low).times(high(offset / GROUP_BYTES))
}

/// The sum of a block, from its bytes run after run.
pub fn sum_block<K: Kernels + ?Sized>(kernels: &K, block: &Block, unit: usize, bytes: &[u8]) -> BlockSum {
    let run = block.run as usize * unit;
    if block.is_contiguous() {
        return sum_range(kernels, block.start * unit as u64, bytes);
    }
    block.runs().zip(bytes.chunks_exact(run)).map(|(r, b)| sum_range(kernels, r * unit as u64, b)).sum()
}

/// The first of these blocks, whose bytes come one block after the other, that does not have its sum in the table.
pub fn first_wrong<K: Kernels + ?Sized>(
    kernels: &K,
    manifest: &Manifest,
    blocks: std::ops::Range<u32>,
    bytes: &[u8],
    table: &SumTable,
) -> Result<Option<u32>, ManifestError> {
    let mut rest = bytes;
    for number in blocks {
        let block = manifest.cuts().block(number)?;
        let unit = manifest.tensors()[block.tensor as usize].dtype.unit();
        let Some((this, others)) = rest.split_at_checked(block.units() as usize * unit) else {
            return Ok(Some(number));
        };
        if sum_block(kernels, &block, unit, this) != table.get(number) {
            return Ok(Some(number));
        }
        rest = others;
    }
    Ok(None)
}

/// The change of a tensor's sum when some of its units change, in O(changes).
///
/// Unit `i` of the changes has `U` bytes, stands `offset(i)` bytes into the tensor, and `change(i)` gives its
/// old and its new value. Changes of one group share its high keys, which are multiplied in when the group is
/// left, so changes are best given in order.
#[inline(always)]
pub fn sum_of_changes<const U: usize>(
    changes: usize,
    offset: impl Fn(usize) -> u64,
    mut change: impl FnMut(usize) -> (u64, u64),
) -> BlockSum {
    let mut sum = BlockSum::default();
    let mut i = 0;
    while i < changes {
        let group = offset(i) / GROUP_BYTES;
        let (mut a, mut b) = (0u64, 0u64);
        while i < changes {
            let at = offset(i);
            if at / GROUP_BYTES != group {
                break;
            }
            let (old, new) = change(i);
            let column = (at % GROUP_BYTES / 4) as usize;
            let mut add = |column: usize, difference: u64| {
                a = a.wrapping_add(difference.wrapping_mul(LOW[0][column].into()));
                b = b.wrapping_add(difference.wrapping_mul(LOW[1][column].into()));
            };
            if U == 8 {
                let low = 0xffff_ffff;
                add(column, (new & low).wrapping_sub(old & low));
                add(column + 1, (new >> 32).wrapping_sub(old >> 32));
            } else {
                add(column, new.wrapping_sub(old) << (8 * (at % 4)));
            }
            i += 1;
        }
        sum = sum.plus(BlockSum([a, b]).times(high(group)));
    }
    sum
}

/// The raw sum of a state or of a part of one; parts add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateSum(BlockSum);

impl StateSum {
    /// Adds bytes of the tensor of this index.
    pub fn add(&mut self, tensor: u32, sum: BlockSum) {
        self.0 = self.0.plus(sum.times(tensor_key(tensor)));
    }

    /// Takes bytes of the tensor of this index away, to put changed ones in their place.
    pub fn remove(&mut self, tensor: u32, sum: BlockSum) {
        self.0 = self.0.minus(sum.times(tensor_key(tensor)));
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: StateSum) -> StateSum {
        StateSum(self.0.plus(other.0))
    }

    /// The form in which holders of parts exchange it.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_bytes()
    }

    /// See [`StateSum::to_bytes`].
    pub fn from_bytes(bytes: [u8; 16]) -> StateSum {
        StateSum(BlockSum::from_bytes(bytes))
    }

    /// The digest of a state of this layout, if this is the sum of all of it.
    pub fn digest(self, layout: LayoutHash) -> StateDigest {
        let mut h = Xxh3::new();
        h.update(b"windlass state 1\0");
        h.update(&layout.0);
        h.update(&self.0.to_bytes());
        StateDigest(h.digest128().to_be_bytes())
    }
}

fn tensor_key(tensor: u32) -> [u64; 2] {
    TENSOR_SEED.map(|seed| splitmix(seed.wrapping_add(tensor.into())) | 1)
}

/// The sums of all blocks of one version, and the state sum that follows from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumTable {
    sums: Vec<BlockSum>,
    state: StateSum,
}

impl SumTable {
    /// The table of these sums, one for each block of the manifest.
    ///
    /// # Panics
    /// If there are not as many sums as blocks.
    pub fn new(manifest: &Manifest, sums: Vec<BlockSum>) -> SumTable {
        assert_eq!(sums.len(), manifest.cuts().blocks() as usize, "one sum for each block");
        let mut state = StateSum::default();
        for (t, sum) in tensor_sums(manifest, &sums).into_iter().enumerate() {
            state.add(t as u32, sum);
        }
        SumTable { sums, state }
    }

    /// The sum of a block.
    pub fn get(&self, block: u32) -> BlockSum {
        self.sums[block as usize]
    }

    /// Replaces the sum of a block of the tensor of this index, in constant time.
    pub fn set(&mut self, block: u32, tensor: u32, sum: BlockSum) {
        let old = std::mem::replace(&mut self.sums[block as usize], sum);
        self.state.remove(tensor, old);
        self.state.add(tensor, sum);
    }

    /// Replaces the sums of blocks, each given with its tensor; returns the change of the state. Fastest if the
    /// blocks of a tensor come together. After an error some are replaced and some are not, and the state sum is invalid.
    pub fn set_all<E>(
        &mut self,
        blocks: impl IntoIterator<Item = Result<(u32, u32, BlockSum), E>>,
    ) -> Result<StateSum, E> {
        let (mut change, mut last, mut by) = (StateSum::default(), 0, BlockSum::default());
        for block in blocks {
            let (block, tensor, sum) = block?;
            if tensor != last {
                change.add(last, std::mem::take(&mut by));
                last = tensor;
            }
            let old = std::mem::replace(&mut self.sums[block as usize], sum);
            by = by.plus(sum).minus(old);
        }
        change.add(last, by);
        self.state = self.state.plus(change);
        Ok(change)
    }

    /// All sums, by block number.
    pub fn sums(&self) -> &[BlockSum] {
        &self.sums
    }

    /// The sum of each tensor.
    pub fn tensors(&self, manifest: &Manifest) -> Vec<BlockSum> {
        tensor_sums(manifest, &self.sums)
    }

    /// The raw state sum of these blocks alone.
    pub fn state_of(&self, manifest: &Manifest, blocks: &BlockRanges) -> StateSum {
        let (mut state, mut tensor) = (StateSum::default(), 0);
        for block in blocks.iter().take_while(|b| (*b as usize) < self.sums.len()) {
            tensor = manifest.cuts().tensor_of(block, tensor).unwrap_or(tensor);
            state.add(tensor, self.get(block));
        }
        state
    }

    /// The raw state sum.
    pub fn state(&self) -> StateSum {
        self.state
    }

    /// The digest of the state.
    pub fn digest(&self, manifest: &Manifest) -> StateDigest {
        self.state.digest(manifest.layout_hash())
    }
}

fn tensor_sums(manifest: &Manifest, sums: &[BlockSum]) -> Vec<BlockSum> {
    let cuts = manifest.cuts();
    let of = |t| cuts.of_tensor(t).map(|b| sums[b as usize]).sum();
    (0..manifest.tensors().len()).map(of).collect()
}

#[cfg(test)]
mod tests;
