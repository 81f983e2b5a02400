//! Grouping and batching of parameters on their way out of a trainer.
//!
//! An extractor yields parameters one by one; a sender wants [`WeightChunk`]s: parameters that travel
//! together. This module owns the chunk, the check that its columns agree, and the [`Chunker`] that turns
//! one stream into the other for every training backend. It is called by the extractors (through Python,
//! whose tensors ride along as an opaque payload `T`) and knows nothing of tensors, devices or transports.
//! A chunk is not a stripe: how bytes are cut for the wire is decided elsewhere.
//!
//! # Rules
//!
//! **Grouping** (`group_by_module`) comes first. The module of a parameter is its name without the last two
//! dotted parts, so that `model.layers.0.self_attn.q_proj.weight`, its bias and its `k_proj` and `v_proj`
//! siblings are one module, `model.layers.0.self_attn`. A name of fewer than three parts, or one whose
//! remainder is empty, is a module of its own under its full name: `lm_head.weight` and `scale` share no
//! module merely because nothing is left of either name. A group is a *consecutive run* of one module. The
//! stream is not searched for stragglers: a module whose parameters reappear later starts a second group,
//! because waiting for them would mean holding the whole model.
//!
//! **Batching** (`batch_threshold_bytes`) then joins whole groups (single parameters when grouping is off)
//! while they fit: a batch is flushed before it would exceed the threshold. A group is never split, and one
//! larger than the threshold travels alone. A batch that has reached the threshold leaves at once.
//!
//! With neither, every parameter is a chunk; with grouping alone, every group is.
//!
//! # Memory
//!
//! The parameters held between two pushes fit into one chunk: at most the threshold, or a single group.
//! As soon as a growing group can no longer join the batch before it, that batch leaves without waiting for
//! the group to end. The names seen so far are kept as well, to refuse a parameter that comes twice.
//!
//! # Invariants
//!
//! | # | invariant | test |
//! |---|---|---|
//! | 1 | all chunks in order are the input in order | `chunks_in_order_are_the_input_in_order` |
//! | 2 | a chunk exceeds the threshold only if it is one group | `a_chunk_exceeds_the_threshold_only_as_a_single_group` |
//! | 3 | a module's run is never split | `a_run_of_one_module_is_never_split` |
//! | 4 | the held parameters fit into one chunk | `what_the_chunker_holds_fits_into_one_chunk` |
//! | 5 | a batch is flushed only when the next group does not fit | `a_batch_is_flushed_only_when_the_next_group_does_not_fit` |

mod stream;

pub use stream::{ChunkConfig, Chunker, DEFAULT_THRESHOLD_GB, module_of, threshold_from_gb};

use std::collections::HashSet;

use crate::dtype::Dtype;
use crate::error::Kind;

/// Why a dtype and a shape have no size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtentError {
    #[error("its size overflows 64 bits")]
    Overflow,
    /// A packed dtype whose elements do not fill whole bytes.
    #[error("its elements do not fill whole bytes")]
    PartialByte,
}

/// How large a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub numel: u64,
    pub bytes: u64,
}

impl Extent {
    /// The extent of a tensor of this dtype and shape. A scalar (empty shape) has one element.
    pub fn of(dtype: Dtype, shape: &[u64]) -> Result<Extent, ExtentError> {
        // Asked first, so that [2^63, 2^63, 0] and [0, 2^63, 2^63] are the same empty tensor.
        if shape.contains(&0) {
            return Ok(Extent { numel: 0, bytes: 0 });
        }
        let numel = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or(ExtentError::Overflow)?;
        numel.checked_mul(dtype.bits()).ok_or(ExtentError::Overflow)?;
        let bytes = dtype.bytes(numel).ok_or(ExtentError::PartialByte)?;
        Ok(Extent { numel, bytes })
    }
}

/// Errors of chunks and thresholds.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ChunkError {
    #[error("a chunk needs at least one parameter; leave out empty chunks")]
    Empty,
    #[error("chunk has {names} names but {got} {column}; give one entry per parameter in each list")]
    Lengths { names: usize, column: &'static str, got: usize },
    #[error("parameter {name:?} ({dtype} {shape:?}) cannot be sized: {source}; check its shape")]
    Extent { name: String, dtype: Dtype, shape: Vec<u64>, source: ExtentError },
    /// The payload has another size than dtype and shape give.
    #[error(
        "parameter {name:?} ({dtype} {shape:?}) should be {expected} bytes but {got} were given; \
         pass the dtype and shape that the tensor has after casting and gathering"
    )]
    Bytes { name: String, dtype: Dtype, shape: Vec<u64>, expected: u64, got: u64 },
    /// The same name twice in a chunk or a stream.
    #[error("parameter {name:?} comes twice; every parameter of a sync has one name of its own")]
    Duplicate { name: String },
    #[error(
        "the sizes of the parameters up to {name:?} add up to more than 64 bits can hold; check its shape"
    )]
    TotalOverflow {
        /// The parameter at which it happened.
        name: String,
    },
    #[error(
        "weight_transfer_threshold_cuda_ipc_GB is {gb}; expected a number above 0 (in units of 1024^3 bytes) \
         and below 2^34, or no threshold at all to turn batching off"
    )]
    Threshold { gb: f64 },
}

impl ChunkError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ChunkError::Empty
            | ChunkError::Lengths { .. }
            | ChunkError::Extent { .. }
            | ChunkError::Bytes { .. }
            | ChunkError::Duplicate { .. }
            | ChunkError::TotalOverflow { .. }
            | ChunkError::Threshold { .. } => Kind::Invalid,
        }
    }
}

/// One parameter: its description, and the payload that its owner attached (a tensor, an index, nothing).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<T = ()> {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: u64,
    payload: T,
}

impl<T> Item<T> {
    /// A parameter whose payload has `bytes` bytes, which must match dtype and shape.
    pub fn new(
        name: impl Into<String>,
        dtype: Dtype,
        shape: Vec<u64>,
        bytes: u64,
        payload: T,
    ) -> Result<Item<T>, ChunkError> {
        let name = name.into();
        match Extent::of(dtype, &shape) {
            Ok(extent) if extent.bytes == bytes => Ok(Item { name, dtype, shape, bytes, payload }),
            Ok(extent) => Err(ChunkError::Bytes { name, dtype, shape, expected: extent.bytes, got: bytes }),
            Err(source) => Err(ChunkError::Extent { name, dtype, shape, source }),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn payload(&self) -> &T {
        &self.payload
    }

    pub fn into_payload(self) -> T {
        self.payload
    }
}

/// Parameters that travel together. Never empty, no name twice, columns of one length by construction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightChunk<T = ()> {
    items: Vec<Item<T>>,
    module_name: Option<String>,
    total_size_bytes: u64,
}

impl<T> WeightChunk<T> {
    /// A chunk from columns, one entry per parameter in each; `bytes[i]` is the size of `payloads[i]`.
    pub fn new(
        names: Vec<String>,
        dtypes: Vec<Dtype>,
        shapes: Vec<Vec<u64>>,
        bytes: Vec<u64>,
        payloads: Vec<T>,
    ) -> Result<WeightChunk<T>, ChunkError> {
        for (column, got) in [
            ("dtypes", dtypes.len()),
            ("shapes", shapes.len()),
            ("sizes in bytes", bytes.len()),
            ("payloads", payloads.len()),
        ] {
            if got != names.len() {
                return Err(ChunkError::Lengths { names: names.len(), column, got });
            }
        }
        let columns = names.into_iter().zip(dtypes).zip(shapes).zip(bytes).zip(payloads);
        let items = columns
            .map(|((((name, dtype), shape), bytes), payload)| Item::new(name, dtype, shape, bytes, payload))
            .collect::<Result<Vec<_>, _>>()?;
        WeightChunk::from_items(items)
    }

    /// A chunk from parameters that are already checked one by one.
    pub fn from_items(items: Vec<Item<T>>) -> Result<WeightChunk<T>, ChunkError> {
        if items.is_empty() {
            return Err(ChunkError::Empty);
        }
        let mut total = 0u64;
        let mut seen = HashSet::with_capacity(items.len());
        for item in &items {
            if !seen.insert(item.name()) {
                return Err(ChunkError::Duplicate { name: item.name.clone() });
            }
            total = total
                .checked_add(item.bytes)
                .ok_or_else(|| ChunkError::TotalOverflow { name: item.name.clone() })?;
        }
        Ok(WeightChunk { items, module_name: None, total_size_bytes: total })
    }

    /// The number of parameters; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a chunk is never empty")]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// The parameters in order.
    pub fn items(&self) -> &[Item<T>] {
        &self.items
    }

    /// The parameters in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Item<T>> {
        self.items.iter()
    }

    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.items.iter().map(Item::name)
    }

    pub fn dtypes(&self) -> impl ExactSizeIterator<Item = Dtype> {
        self.items.iter().map(Item::dtype)
    }

    pub fn shapes(&self) -> impl ExactSizeIterator<Item = &[u64]> {
        self.items.iter().map(Item::shape)
    }

    /// The module that the chunk is, if it is exactly one module's group.
    pub fn module_name(&self) -> Option<&str> {
        self.module_name.as_deref()
    }

    /// Bytes of all parameters.
    pub fn total_size_bytes(&self) -> u64 {
        self.total_size_bytes
    }
}

impl<T> IntoIterator for WeightChunk<T> {
    type Item = Item<T>;
    type IntoIter = std::vec::IntoIter<Item<T>>;
    fn into_iter(self) -> Self::IntoIter {
        self.items.into_iter()
    }
}

impl<'a, T> IntoIterator for &'a WeightChunk<T> {
    type Item = &'a Item<T>;
    type IntoIter = std::slice::Iter<'a, Item<T>>;
    fn into_iter(self) -> Self::IntoIter {
        self.items.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Columns = (Vec<String>, Vec<Dtype>, Vec<Vec<u64>>, Vec<u64>, Vec<usize>);

    fn columns(n: usize) -> Columns {
        let names = (0..n).map(|i| format!("p{i}")).collect();
        (names, vec![Dtype::BF16; n], vec![vec![2, 3]; n], vec![12; n], (0..n).collect())
    }

    #[test]
    fn a_chunk_computes_its_size_and_keeps_its_payloads_in_order() {
        let (names, dtypes, shapes, bytes, payloads) = columns(3);
        let chunk = WeightChunk::new(names, dtypes, shapes, bytes, payloads).unwrap();
        assert_eq!((chunk.len(), chunk.total_size_bytes()), (3, 36));
        assert_eq!(chunk.names().collect::<Vec<_>>(), ["p0", "p1", "p2"]);
        assert_eq!(chunk.shapes().next(), Some(&[2, 3][..]));
        assert_eq!(chunk.dtypes().last(), Some(Dtype::BF16));
        assert_eq!(chunk.module_name(), None);
        assert_eq!(chunk.into_iter().map(Item::into_payload).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn a_chunk_with_columns_of_different_lengths_is_refused() {
        for column in ["dtypes", "shapes", "sizes in bytes", "payloads"] {
            let (names, mut dtypes, mut shapes, mut bytes, mut payloads) = columns(3);
            match column {
                "dtypes" => drop(dtypes.pop()),
                "shapes" => drop(shapes.pop()),
                "sizes in bytes" => bytes.push(12),
                _ => payloads.push(9),
            }
            let error = WeightChunk::new(names, dtypes, shapes, bytes, payloads).unwrap_err();
            assert!(
                matches!(&error, ChunkError::Lengths { names: 3, column: c, .. } if *c == column),
                "{error}"
            );
        }
        let (_, dtypes, shapes, bytes, payloads) = columns(0);
        assert_eq!(WeightChunk::new(vec![], dtypes, shapes, bytes, payloads), Err(ChunkError::Empty));
    }

    #[test]
    fn a_chunk_with_one_name_twice_is_refused() {
        let (mut names, dtypes, shapes, bytes, payloads) = columns(3);
        names[2] = "p0".into();
        let error = WeightChunk::new(names, dtypes, shapes, bytes, payloads).unwrap_err();
        assert_eq!(error, ChunkError::Duplicate { name: "p0".into() });
    }

    #[test]
    fn a_payload_of_another_size_than_its_shape_is_refused() {
        let error = Item::new("w", Dtype::BF16, vec![2, 3], 24, ()).unwrap_err();
        assert!(matches!(&error, ChunkError::Bytes { expected: 12, got: 24, .. }), "{error}");
        assert_eq!(error.kind(), Kind::Invalid);
        // A cast that went unnoticed: the dtype says bfloat16, the payload is still float32.
        assert!(error.to_string().contains("after casting"));
    }

    #[test]
    fn extents_cover_scalars_empty_tensors_and_overflow() {
        let of = |dtype, shape: &[u64]| Extent::of(dtype, shape);
        assert_eq!(of(Dtype::F32, &[]), Ok(Extent { numel: 1, bytes: 4 }));
        assert_eq!(of(Dtype::F32, &[7, 0]), Ok(Extent { numel: 0, bytes: 0 }));
        assert_eq!(of(Dtype::F32, &[1 << 63, 1 << 63, 0]), of(Dtype::F32, &[0, 1 << 63, 1 << 63]));
        assert_eq!(of(Dtype::F32, &[1 << 32, 1 << 32]), Err(ExtentError::Overflow));
        assert_eq!(of(Dtype::F64, &[1 << 60]), Err(ExtentError::Overflow));
        assert_eq!(of(Dtype::F4, &[3]), Err(ExtentError::PartialByte));
        assert_eq!(of(Dtype::F4, &[3, 2]), Ok(Extent { numel: 6, bytes: 3 }));
    }

    #[test]
    fn a_chunk_whose_total_overflows_is_refused() {
        let huge = |name: &str| Item::new(name, Dtype::U8, vec![1 << 60], 1 << 60, ()).unwrap();
        let items = (0..16).map(|i| huge(&format!("p{i}"))).collect();
        assert_eq!(WeightChunk::from_items(items), Err(ChunkError::TotalOverflow { name: "p15".into() }));
    }
}
