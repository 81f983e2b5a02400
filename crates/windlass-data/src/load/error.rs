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
    /// A tensor that the image does not have.
    #[error("copy {copy} reads {name:?}, and the image has no such tensor: trace the engine with this image")]
    NoSource {
        /// Which copy.
        copy: usize,
        /// What it reads.
        name: String,
    },
    /// A target that was not given.
    #[error(
        "copy {copy} writes target {target}, and there are {targets}: give every parameter that is written"
    )]
    NoTarget {
        /// Which copy.
        copy: usize,
        /// What it writes.
        target: usize,
        /// How many there are.
        targets: usize,
    },
    /// Two targets of one name.
    #[error("two targets are named {name:?}: name each once")]
    DuplicateTarget {
        /// The name.
        name: String,
    },
    /// Sizes and strides of different lengths, or too many.
    #[error(
        "copy {copy} of {name:?} has {sizes} sizes, {from} source strides and {to} target strides: there must be as \
         many of each, and at most {max}"
    )]
    Dims {
        /// Which copy.
        copy: usize,
        /// What it reads.
        name: String,
        /// Sizes.
        sizes: usize,
        /// Strides of the source.
        from: usize,
        /// Strides of the target.
        to: usize,
        /// The most of each.
        max: usize,
    },
    /// Sizes and strides beyond 64 bits.
    #[error("copy {copy} of {name:?} spans more than 64 bits can count")]
    Overflow {
        /// Which copy.
        copy: usize,
        /// What it reads.
        name: String,
    },
    /// A copy that reads beyond its tensor.
    #[error("copy {copy} reads {name:?} up to element {end}, and it has {numel}")]
    BeyondSource {
        /// Which copy.
        copy: usize,
        /// What it reads.
        name: String,
        /// After the last element that it reads.
        end: u64,
        /// Elements of the tensor.
        numel: u64,
    },
    /// A copy that writes beyond its target.
    #[error("copy {copy} writes {target:?} up to element {end}, and it has {numel}")]
    BeyondTarget {
        /// Which copy.
        copy: usize,
        /// What it writes.
        target: String,
        /// After the last element that it writes.
        end: u64,
        /// Elements of the target.
        numel: u64,
    },
    /// A target that no memory could hold.
    #[error("target {target:?} has {numel} elements of {dtype}, more than memory can hold")]
    HugeTarget {
        /// Which target.
        target: String,
        /// Its elements.
        numel: u64,
        /// Their type.
        dtype: Dtype,
    },
    /// A copy that would have to convert.
    #[error(
        "copy {copy} brings {name:?} of {from} to {target:?} of {to}: a plan copies bits and does not cast; load this \
         module through the engine's own loader"
    )]
    Cast {
        /// Which copy.
        copy: usize,
        /// What it reads.
        name: String,
        /// Its type.
        from: Dtype,
        /// What it writes.
        target: String,
        /// Its type.
        to: Dtype,
    },
    /// Elements that do not fill bytes.
    #[error(
        "target {target:?} is of {dtype}, whose elements cross bytes: load this module through the engine's own loader"
    )]
    Packed {
        /// Which target.
        target: String,
        /// Its type.
        dtype: Dtype,
    },
    /// An element of a target that is written twice.
    #[error(
        "copy {copy} writes element {element} of {target:?}, which is written already: which of the two is right only \
         the engine's own loader knows"
    )]
    Overlap {
        /// Which copy, as it was given.
        copy: usize,
        /// The target.
        target: String,
        /// The element.
        element: u64,
    },
    /// Interleaved copies over too wide a range to be checked.
    #[error(
        "copies into {target:?} interleave over {elements} elements, more than {max}: they cannot be checked one by one"
    )]
    TooWide {
        /// The target or tensor.
        target: String,
        /// How far they reach.
        elements: u64,
        /// How far they may.
        max: u64,
    },
    /// Not as many targets as the plan has.
    #[error("the plan has {expected} targets and {found} were given: pass one for each, in the plan's order")]
    Targets {
        /// As many as the plan has.
        expected: usize,
        /// As many as were given.
        found: usize,
    },
    /// A target of another length.
    #[error(
        "target {target:?} has {found} bytes and the plan was made for {expected}: its storage was replaced; make the plan anew"
    )]
    TargetBytes {
        /// Which target.
        target: String,
        /// The plan's bytes.
        expected: u64,
        /// Those given.
        found: u64,
    },
    /// An image of another length.
    #[error("the image has {found} bytes and the plan was made for {expected}: make the plan anew")]
    ImageBytes {
        /// The plan's bytes.
        expected: u64,
        /// Those given.
        found: u64,
    },
    /// An image of another layout.
    #[error("the plan was made for layout {expected} and the image has {found}: make the plan anew")]
    Layout {
        /// The plan's.
        expected: LayoutHash,
        /// The image's.
        found: LayoutHash,
    },
    /// A tensor to replay that is not in the image.
    #[error("{name:?} is to be replayed, and the image has no such tensor")]
    NoSuchTensor {
        /// The name.
        name: String,
    },
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
