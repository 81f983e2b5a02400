//! Load plans: an image into the live parameters of an engine, without the engine's loader.
//!
//! | module | what it owns |
//! |---|---|
//! | `piece` | one copy, as the loops want it |
//! | `check` | what a plan must satisfy, and what it covers |
//! | `dense` | all of an image |
//! | `sparse` | what changed since the version that the targets hold |
//! | `proof` | the sums of what the targets hold, and samples of it |
//!
//! Owns: [`LoadPlan`], made once from the copies that an engine's own loader was seen to make, and replayed for every
//! version. Called by workers of engines, through Python or from Rust. Must not: know how copies are traced, whether
//! a module may be replayed, or which version an engine is at; whoever replays sparsely vouches for the base.
//!
//! # Words
//!
//! A *target* is the memory of one parameter of the engine: a name, a number of elements and a dtype. A *copy* brings
//! a box of one tensor of the image to one target: offset, sizes and strides on either side, counted in elements. An
//! element is what torch calls one: packed four-bit values come in pairs, complex numbers whole. Fused, sliced,
//! permuted and transposed parameters are all copies of this kind; a cast is none.
//!
//! # What a plan is checked for
//!
//! Once, when it is made: every name is known, every box lies within its tensor and its target, dtypes are equal,
//! and no element of a target is written twice. [`LoadPlan::coverage`] tells how many elements of each target are
//! written and how many of each tensor are read; whether that is enough is for the caller to say. When it is
//! replayed: as many targets as it was made for, of the lengths it was made for, and an image of its layout.
//! All of this before the first byte is written.
//!
//! # Dense
//!
//! Targets are cut into windows of a few MiB, each the memory of one thread for a while, so that no two threads hold
//! the same bytes, and none of this needs `unsafe`. Small targets share a job. Between two jobs a thread looks at the
//! [`Stop`](crate::stop::Stop); what it ends stays half done.
//!
//! # Sparse
//!
//! From the deltas between the version in the targets and the one in the image only *positions* are taken, and values
//! from the image itself. So it is idempotent, a delta of five versions' steps is five lists of positions, and nothing
//! is decoded over an engine's memory. A tensor of which many elements changed is copied whole, and so is one with a
//! record whose positions cannot be told (a context record). Threads share targets,
//! not windows: the largest first.
//!
//! # Proof
//!
//! [`LoadPlan::digest`] sums what the targets hold, box by box, as if it were still in its tensor. Sums add up (see
//! [`windlass_core::digest`]), so that the parts of all workers of an engine give the tensors' sums and the state
//! digest: [`combine`]. Boxes that several workers hold are counted once, and compared.
//!
//! # Invariants
//!
//! | | must hold | test |
//! |---|---|---|
//! | LOAD-1 | A dense load leaves what copying element by element would. | `a_dense_load_is_what_copying_by_elements_gives` |
//! | LOAD-2 | A sparse load over any number of deltas leaves what a dense one does, if the targets held the base. | `a_sparse_load_is_what_a_dense_one_gives` |
//! | LOAD-3 | No plan reads or writes beyond its tensors and targets, or an element twice; nothing is written by one that is refused. | `plans_that_do_not_fit_are_refused_by_name`, `an_element_that_is_written_twice_is_found`, `memory_that_does_not_fit_the_plan_is_refused_before_a_write` |
//! | LOAD-4 | The workers' sums give the image's digest, however it was cut, and one wrong bit anywhere does not. | `the_sums_of_all_workers_are_the_image_s_digest` |
//! | LOAD-5 | What is not named in `only` is not touched. | `only_the_named_tensors_are_replayed` |

mod check;
mod dense;
mod error;
mod piece;
mod proof;
mod sparse;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use windlass_core::dtype::Dtype;
use windlass_core::manifest::Manifest;

pub use self::check::Coverage;
use self::check::Group;
pub use self::error::LoadError;
pub(crate) use self::piece::Piece;
pub(crate) use self::proof::HeldBox;
pub use self::proof::{BoxSum, Combined, Proof, Sum, TensorProof, combine};

/// Memory of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// What the engine calls it.
    pub name: String,
    /// How many elements it has.
    pub numel: u64,
    pub dtype: Dtype,
}

/// A box of a tensor, and where it goes. Offsets and strides are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanCopy {
    /// The tensor of the image, or an alias of it.
    pub source: String,
    /// Its first element that is read.
    pub source_offset: u64,
    pub target: usize,
    /// Its first element that is written.
    pub target_offset: u64,
    /// How many elements along each dimension.
    pub sizes: Vec<u64>,
    /// From one to the next in the tensor.
    pub source_strides: Vec<u64>,
    /// From one to the next in the target.
    pub target_strides: Vec<u64>,
}

/// What a replay did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Bytes that were written.
    pub bytes: u64,
    /// Elements that were written.
    pub elements: u64,
    /// Copies that they belong to.
    pub copies: u64,
}

impl Loaded {
    fn plus(self, other: Loaded) -> Loaded {
        Loaded {
            bytes: self.bytes + other.bytes,
            elements: self.elements + other.elements,
            copies: self.copies + other.copies,
        }
    }
}

/// Copies from an image of one layout into targets, checked.
#[derive(Debug)]
pub struct LoadPlan {
    manifest: Arc<Manifest>,
    targets: Vec<Target>,
    /// In the order of targets, and within one of where they write first.
    pieces: Vec<Piece>,
    /// Pieces whose bytes interleave, in the same order.
    groups: Vec<Group>,
    coverage: Coverage,
}

impl LoadPlan {
    /// Checks `copies` and makes them a plan.
    pub fn new(
        manifest: Arc<Manifest>,
        targets: Vec<Target>,
        copies: &[PlanCopy],
    ) -> Result<LoadPlan, LoadError> {
        let mut names = BTreeSet::new();
        for t in &targets {
            check::target_item(t)?;
            if !names.insert(&t.name) {
                return Err(LoadError::DuplicateTarget { name: t.name.clone() });
            }
        }
        let mut pieces = Vec::with_capacity(copies.len());
        for (given, copy) in copies.iter().enumerate() {
            pieces.extend(check::piece(&manifest, &targets, given, copy)?);
        }
        pieces.sort_by_key(|p: &Piece| (p.target, p.writes.at));
        let groups = check::groups(&pieces, &targets)?;
        let coverage = check::coverage(&manifest, &targets, &pieces)?;
        Ok(LoadPlan { manifest, targets, pieces, groups, coverage })
    }

    /// The layout that it was made for.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// The targets, in the order in which their memory is given.
    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// Bytes of each target.
    pub fn target_bytes(&self) -> Vec<u64> {
        self.targets.iter().map(|t| t.numel * check::item(t.dtype).unwrap_or(0)).collect()
    }

    /// What is written and what is read.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// Whether an image of this layout can be loaded.
    pub fn check_layout(&self, manifest: &Manifest) -> Result<(), LoadError> {
        let (expected, found) = (self.manifest.layout_hash(), manifest.layout_hash());
        if expected == found { Ok(()) } else { Err(LoadError::Layout { expected, found }) }
    }

    /// Its copies, in the order of targets.
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    pub(crate) fn check_image(&self, image: &[u8]) -> Result<(), LoadError> {
        let (expected, found) = (self.manifest.data_bytes(), image.len() as u64);
        if expected == found { Ok(()) } else { Err(LoadError::ImageBytes { expected, found }) }
    }

    pub(crate) fn check_targets(&self, found: impl ExactSizeIterator<Item = usize>) -> Result<(), LoadError> {
        if found.len() != self.targets.len() {
            return Err(LoadError::Targets { expected: self.targets.len(), found: found.len() });
        }
        for ((target, expected), found) in self.targets.iter().zip(self.target_bytes()).zip(found) {
            if found as u64 != expected {
                let (target, found) = (target.name.clone(), found as u64);
                return Err(LoadError::TargetBytes { target, expected, found });
            }
        }
        Ok(())
    }

    /// Which tensors to replay, by index; all if none are named.
    pub(crate) fn chosen(&self, only: Option<&[String]>) -> Result<Vec<bool>, LoadError> {
        let Some(only) = only else { return Ok(vec![true; self.manifest.tensors().len()]) };
        let mut chosen = vec![false; self.manifest.tensors().len()];
        for name in only {
            let found = self.manifest.find(name);
            *found
                .and_then(|t| chosen.get_mut(t))
                .ok_or_else(|| LoadError::NoSuchTensor { name: name.clone() })? = true;
        }
        Ok(chosen)
    }
}
