//! Why a plan cannot be made or replayed.

use windlass_core::delta::DeltaError;
use windlass_core::dtype::Dtype;
use windlass_core::error::Kind;
use windlass_core::identity::LayoutHash;

use crate::stop::Stopped;

/// Why a plan cannot be made or replayed. Everything but [`LoadError::Stopped`] is found before the first byte is
/// written.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("copy {copy} reads {name:?}, and the image has no such tensor: trace the engine with this image")]
    NoSource { copy: usize, name: String },
    #[error(
        "copy {copy} writes target {target}, and there are {targets}: give every parameter that is written"
    )]
    NoTarget { copy: usize, target: usize, targets: usize },
    #[error("two targets are named {name:?}: name each once")]
    DuplicateTarget { name: String },
    #[error(
        "copy {copy} of {name:?} has {sizes} sizes, {from} source strides and {to} target strides: there must be as \
         many of each, and at most {max}"
    )]
    Dims { copy: usize, name: String, sizes: usize, from: usize, to: usize, max: usize },
    #[error("copy {copy} of {name:?} spans more than 64 bits can count")]
    Overflow { copy: usize, name: String },
    #[error("copy {copy} reads {name:?} up to element {end}, and it has {numel}")]
    BeyondSource {
        copy: usize,
        name: String,
        /// After the last element that it reads.
        end: u64,
        numel: u64,
    },
    #[error("copy {copy} writes {target:?} up to element {end}, and it has {numel}")]
    BeyondTarget {
        copy: usize,
        target: String,
        /// After the last element that it writes.
        end: u64,
        numel: u64,
    },
    #[error("target {target:?} has {numel} elements of {dtype}, more than memory can hold")]
    HugeTarget { target: String, numel: u64, dtype: Dtype },
    #[error(
        "copy {copy} brings {name:?} of {from} to {target:?} of {to}: a plan copies bits and does not cast; load this \
         module through the engine's own loader"
    )]
    Cast { copy: usize, name: String, from: Dtype, target: String, to: Dtype },
    #[error(
        "target {target:?} is of {dtype}, whose elements cross bytes: load this module through the engine's own loader"
    )]
    Packed { target: String, dtype: Dtype },
    #[error(
        "copy {copy} writes element {element} of {target:?}, which is written already: which of the two is right only \
         the engine's own loader knows"
    )]
    Overlap {
        /// Which copy, as it was given.
        copy: usize,
        target: String,
        element: u64,
    },
    /// Interleaved copies over too wide a range to be checked.
    #[error(
        "copies into {target:?} interleave over {elements} elements, more than {max}: they cannot be checked one by one"
    )]
    TooWide { target: String, elements: u64, max: u64 },
    #[error("the plan has {expected} targets and {found} were given: pass one for each, in the plan's order")]
    Targets {
        /// As many as the plan has.
        expected: usize,
        found: usize,
    },
    #[error(
        "target {target:?} has {found} bytes and the plan was made for {expected}: its storage was replaced; make the plan anew"
    )]
    TargetBytes { target: String, expected: u64, found: u64 },
    #[error("the image has {found} bytes and the plan was made for {expected}: make the plan anew")]
    ImageBytes { expected: u64, found: u64 },
    #[error("the plan was made for layout {expected} and the image has {found}: make the plan anew")]
    Layout { expected: LayoutHash, found: LayoutHash },
    /// A tensor to replay that is not in the image.
    #[error("{name:?} is to be replayed, and the image has no such tensor")]
    NoSuchTensor { name: String },
    /// A delta that cannot be read, or is for another image.
    #[error("the changed elements cannot be told: load the whole image")]
    Delta(#[from] DeltaError),
    /// Called off or too late. What was written before stays: the targets hold a mixture until they are loaded whole.
    #[error("the load was not finished, and the targets hold a mixture until they are loaded whole: {0}")]
    Stopped(#[from] Stopped),
}

impl LoadError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            LoadError::NoSource { .. }
            | LoadError::NoTarget { .. }
            | LoadError::DuplicateTarget { .. }
            | LoadError::Dims { .. }
            | LoadError::Overflow { .. }
            | LoadError::BeyondSource { .. }
            | LoadError::BeyondTarget { .. }
            | LoadError::HugeTarget { .. }
            | LoadError::Overlap { .. }
            | LoadError::Targets { .. }
            | LoadError::NoSuchTensor { .. } => Kind::Invalid,
            LoadError::Cast { .. } | LoadError::Packed { .. } | LoadError::TooWide { .. } => {
                Kind::Unsupported
            }
            LoadError::TargetBytes { .. } | LoadError::ImageBytes { .. } | LoadError::Layout { .. } => {
                Kind::Stale
            }
            LoadError::Delta(e) => e.kind(),
            LoadError::Stopped(s) => s.kind(),
        }
    }
}
