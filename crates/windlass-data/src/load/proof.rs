//! What the targets hold, proved.
//!
//! A worker sums each box of each tensor that it holds, at the box's place in its tensor ([`LoadPlan::digest`]). What
//! it answers is plain data. Whoever has the answers of all workers of an engine puts them together ([`combine`]): a
//! box that several hold is counted once and must be the same everywhere; boxes that make up a tensor give its sum; if
//! all tensors are there, their sums give the state digest, to be compared with that of the version. What no worker
//! holds is listed.
//!
//! [`LoadPlan::differs`] compares samples with an image instead, which finds a foreign reload and not a flipped bit.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use windlass_core::digest::{BlockSum, StateSum, sum_range};
use windlass_core::identity::{LayoutHash, StateDigest};
use windlass_core::manifest::Manifest;

use super::check::{boxed, item};
use super::piece::{Piece, each};
use super::{LoadError, LoadPlan};
use crate::copies::{Copy, Dim};
use crate::simd::kernels;
use crate::stop::Stop;
use crate::work;

/// What the targets of one worker hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proof {
    /// The layout of the tensors.
    pub layout: LayoutHash,
    /// The tensors of which it holds anything.
    pub tensors: Vec<TensorProof>,
}

/// What one worker holds of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorProof {
    pub name: String,
    /// Its boxes. One that the worker holds twice is there twice.
    pub boxes: Vec<BoxSum>,
}

/// A box of a tensor and the sum of what is held of it. In elements.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BoxSum {
    pub offset: u64,
    /// How many along each dimension, outermost first; the last is contiguous.
    pub sizes: Vec<u64>,
    /// From one to the next along each dimension but the last.
    pub strides: Vec<u64>,
    /// The sum, as if the elements stood at their place in the tensor.
    #[serde(rename = "sum")]
    pub sum: Sum,
}

impl Proof {
    /// Tensors of which `other`, a proof of the same plan, has other sums.
    pub fn differs(&self, other: &Proof) -> Vec<String> {
        let sums: BTreeMap<&str, &[BoxSum]> =
            other.tensors.iter().map(|t| (t.name.as_str(), &t.boxes[..])).collect();
        let differ = self.tensors.iter().filter(|t| sums.get(t.name.as_str()) != Some(&&t.boxes[..]));
        differ.map(|t| t.name.clone()).collect()
    }
}

/// A sum that can be put in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "BlockSum", into = "BlockSum")]
pub struct Sum([u64; 2]);

impl From<BlockSum> for Sum {
    fn from(sum: BlockSum) -> Sum {
        Sum(sum.0)
    }
}

impl From<Sum> for BlockSum {
    fn from(sum: Sum) -> BlockSum {
        BlockSum(sum.0)
    }
}

/// What the proofs of all workers come to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Combined {
    /// The state digest, if every tensor is held whole and all workers agree.
    pub digest: Option<StateDigest>,
    /// The sum of each tensor that is held whole and on which all agree.
    pub sums: BTreeMap<String, BlockSum>,
    /// Tensors of which a box has different sums at different workers.
    pub disagree: Vec<String>,
    /// Tensors of which not all is held, and how many elements are.
    pub rest: Vec<(String, u64)>,
}

impl LoadPlan {
    /// The sums of what `targets` hold.
    pub fn digest(&self, targets: &[&[u8]], threads: usize, stop: &Stop) -> Result<Proof, LoadError> {
        self.check_targets(targets.iter().map(|t| t.len()))?;
        let state = || (Vec::new(), Vec::new());
        let summed =
            work::each(threads.max(1), self.pieces.len() as u64, stop, state, |(scratch, sums), i| {
                let piece = &self.pieces[i as usize];
                held_boxes(piece, |held| {
                    let sum = sum_at(
                        &held.reads,
                        piece.item,
                        &targets[piece.target][held.place as usize..],
                        scratch,
                    );
                    sums.push((piece.tensor, held.with(sum)));
                });
                Ok::<(), LoadError>(())
            })?;
        Ok(self.proof(summed.into_iter().flat_map(|(_, sums)| sums)))
    }

    /// What [`LoadPlan::digest`] would say of targets that hold `image`.
    pub fn image_proof(&self, image: &[u8], threads: usize, stop: &Stop) -> Result<Proof, LoadError> {
        self.check_image(image)?;
        let summed = work::each(threads.max(1), self.pieces.len() as u64, stop, Vec::new, |sums, i| {
            let piece = &self.pieces[i as usize];
            held_boxes(piece, |held| {
                let mut sum = BlockSum::default();
                each(&held.reads, 0..held.reads.outer(), |at, _| {
                    let from = (piece.base + at) as usize;
                    let bytes = &image[from..from + held.reads.run as usize];
                    sum = sum.plus(sum_range(kernels(), at, bytes));
                });
                sums.push((piece.tensor, held.with(sum)));
            });
            Ok::<(), LoadError>(())
        })?;
        Ok(self.proof(summed.into_iter().flatten()))
    }

    /// The boxes that the targets hold: of which tensor, in which target, and what of it.
    pub(crate) fn held_boxes(&self) -> Vec<(u32, usize, HeldBox)> {
        let mut all = Vec::new();
        for p in &self.pieces {
            held_boxes(p, |held| all.push((p.tensor, p.target, held)));
        }
        all
    }

    /// What the sums of all boxes come to.
    pub(crate) fn proof(&self, sums: impl Iterator<Item = (u32, BoxSum)>) -> Proof {
        let mut by_tensor: BTreeMap<u32, Vec<BoxSum>> = BTreeMap::new();
        for (tensor, sum) in sums {
            by_tensor.entry(tensor).or_default().push(sum);
        }
        let tensors = by_tensor.into_iter().map(|(t, mut boxes)| {
            // The same whatever the threads did.
            boxes.sort_unstable();
            TensorProof { name: self.manifest.tensors()[t as usize].name.clone(), boxes }
        });
        Proof { layout: self.manifest.layout_hash(), tensors: tensors.collect() }
    }

    /// Compares about `count` places of the targets, spread over all of them and chosen by `seed`, with the image;
    /// answers the tensors that differ. With as many places as there are elements all of them are compared.
    pub fn differs(
        &self,
        image: &[u8],
        targets: &[&[u8]],
        count: u64,
        seed: u64,
    ) -> Result<Vec<String>, LoadError> {
        self.check_image(image)?;
        self.check_targets(targets.iter().map(|t| t.len()))?;
        let elements: u64 = self.pieces.iter().map(|p| p.bytes() / p.item).sum();
        let count = count.min(elements);
        let mut differ = vec![false; self.manifest.tensors().len()];
        let (mut piece, mut before) = (0, 0);
        for k in 0..count {
            // One place in each of `count` equal parts.
            let part = |k: u64| (u128::from(elements) * u128::from(k) / u128::from(count)) as u64;
            let (low, high) = (part(k), part(k + 1));
            let place = low + spread(seed ^ k) % (high - low);
            while let Some(p) = self.pieces.get(piece).filter(|p| place >= before + p.bytes() / p.item) {
                (piece, before) = (piece + 1, before + p.bytes() / p.item);
            }
            let Some(p) = self.pieces.get(piece) else { break };
            let (to, from) = nth(&p.writes, p.item, place - before);
            let at = (p.base + p.reads.at + from) as usize;
            let (item, to) = (p.item as usize, to as usize);
            differ[p.tensor as usize] |= image[at..at + item] != targets[p.target][to..to + item];
        }
        let names = self.manifest.tensors().iter().zip(differ).filter(|(_, differs)| *differs);
        Ok(names.map(|(t, _)| t.name.clone()).collect())
    }
}

/// A bijection that looks like chance.
fn spread(x: u64) -> u64 {
    let x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// Where the `n`-th element of a copy is, on either side.
fn nth(copy: &Copy, item: u64, n: u64) -> (u64, u64) {
    let per_run = copy.run / item;
    let within = n % per_run * item;
    let (mut rest, mut to, mut from) = (n / per_run, copy.at + within, within);
    for d in copy.dims.iter().rev() {
        let i = rest % d.count;
        rest /= d.count;
        (to, from) = (to + i * d.to, from + i * d.from);
    }
    (to, from)
}

/// A box of a tensor that a target holds, not yet summed.
pub(crate) struct HeldBox {
    /// All but the sum.
    shape: BoxSum,
    /// Its bytes of the tensor, and by `from` where they are in the target from `place` on.
    pub(crate) reads: Copy,
    /// The byte of the target at which it begins.
    pub(crate) place: u64,
}

impl HeldBox {
    /// The box with its sum.
    pub(crate) fn with(&self, sum: BlockSum) -> BoxSum {
        BoxSum { sum: sum.into(), ..self.shape.clone() }
    }
}

/// Finds the boxes that the target holds of a piece. One that went to several places of the target is one for each.
fn held_boxes(piece: &Piece, mut found: impl FnMut(HeldBox)) {
    let (reads, item) = (&piece.reads, piece.item);
    let whole = boxed(reads);
    let sizes: Vec<u64> = whole.dims.iter().map(|d| d.count).chain([whole.run / item]).collect();
    let strides: Vec<u64> = whole.dims.iter().map(|d| d.to / item).collect();
    let shape = BoxSum { offset: whole.at / item, sizes, strides, sum: BlockSum::default().into() };
    let (moving, still): (Vec<Dim>, Vec<Dim>) = reads.dims.iter().partition(|d| d.to != 0);
    let reads = Copy { at: reads.at, run: reads.run, dims: moving };
    let places = Copy { at: 0, run: reads.run, dims: still };
    each(&places, 0..places.outer(), |_, place| {
        found(HeldBox { shape: shape.clone(), reads: reads.clone(), place: piece.writes.at + place });
    });
}

/// The sum of the elements of `reads`, which stand in `target` by its other side.
fn sum_at(reads: &Copy, item: u64, target: &[u8], scratch: &mut Vec<u8>) -> BlockSum {
    let mut sum = BlockSum::default();
    if let Some(last) = reads.dims.last().filter(|d| reads.run == item && d.to == item) {
        // Neighbours in the tensor and not in the target.
        let rows = Copy { dims: reads.dims[..reads.dims.len() - 1].to_vec(), ..*reads };
        scratch.resize((last.count * item) as usize, 0);
        each(&rows, 0..rows.outer(), |at, from| {
            let mut from = from as usize;
            for slot in scratch.chunks_exact_mut(item as usize) {
                slot.copy_from_slice(&target[from..from + item as usize]);
                from += last.from as usize;
            }
            sum = sum.plus(sum_range(kernels(), at, scratch));
        });
    } else {
        let run = reads.run as usize;
        each(reads, 0..reads.outer(), |at, from| {
            sum = sum.plus(sum_range(kernels(), at, &target[from as usize..from as usize + run]));
        });
    }
    sum
}

/// Puts the proofs of all workers of an engine together. `None` if one is of another layout.
pub fn combine(manifest: &Manifest, proofs: &[Proof]) -> Option<Combined> {
    type Boxes<'a> = BTreeMap<(u64, &'a [u64], &'a [u64]), Sum>;
    let mut held: BTreeMap<&str, (Boxes<'_>, bool)> = BTreeMap::new();
    for proof in proofs {
        if proof.layout != manifest.layout_hash() {
            return None;
        }
        for tensor in &proof.tensors {
            let (boxes, agree) = held.entry(&tensor.name).or_insert((BTreeMap::new(), true));
            for b in &tensor.boxes {
                let known = boxes.entry((b.offset, &b.sizes, &b.strides)).or_insert(b.sum);
                *agree &= *known == b.sum;
            }
        }
    }
    let (mut sums, mut disagree, mut rest) = (BTreeMap::new(), Vec::new(), Vec::new());
    let mut state = StateSum::default();
    for (t, tensor) in manifest.tensors().iter().enumerate() {
        let numel = tensor.bytes / item(tensor.dtype).unwrap_or(1);
        let Some((boxes, agree)) = held.get(tensor.name.as_str()) else {
            if numel > 0 {
                rest.push((tensor.name.clone(), 0));
            }
            continue;
        };
        let elements = boxes.keys().map(|(_, sizes, _)| sizes.iter().copied().fold(1, u64::saturating_mul));
        let elements = elements.fold(0, u64::saturating_add);
        if !agree {
            disagree.push(tensor.name.clone());
        } else if elements == numel {
            let sum: BlockSum = boxes.values().map(|s| BlockSum::from(*s)).sum();
            state.add(t as u32, sum);
            sums.insert(tensor.name.clone(), sum);
        } else {
            rest.push((tensor.name.clone(), elements));
        }
    }
    let all = disagree.is_empty() && rest.is_empty();
    let digest = all.then(|| state.digest(manifest.layout_hash()));
    Some(Combined { digest, sums, disagree, rest })
}
