//! Layouts: which tensors an image has, and where.

use std::collections::BTreeMap;
use std::str::FromStr as _;
use std::sync::Arc;

use pyo3::prelude::*;
use windlass_core::Dtype;
use windlass_core::manifest::{Block, DimCut, Manifest, Parts, Tensor, TensorSpec};

use crate::errors::Failure;

/// Dimensions and where they are cut.
type Bounds = Vec<(usize, Vec<u64>)>;
/// A box by its first element and the one after its last, and the host that holds it.
type Owned = (Vec<u64>, Vec<u64>, usize);

/// The tensors of an image in their order, with their offsets. The same names, dtypes and shapes give the same layout
/// whatever order they come in.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Layout(pub(crate) Arc<Manifest>);

#[pymethods]
impl Layout {
    /// `tensors` are (name, dtype, shape); `aliases` maps further names of a tensor to it; `cuts` gives, for tensors
    /// that several nodes hold, the dimension and the bounds of their shares.
    #[new]
    #[pyo3(signature = (tensors, aliases = None, cuts = None))]
    fn new(
        tensors: Vec<(String, String, Vec<u64>)>,
        aliases: Option<BTreeMap<String, String>>,
        cuts: Option<Vec<(String, Bounds)>>,
    ) -> PyResult<Layout> {
        let specs = tensors
            .into_iter()
            .map(|(name, dtype, shape)| {
                let dtype =
                    Dtype::from_str(&dtype).map_err(|e| Failure::invalid(format!("tensor {name:?}: {e}")))?;
                Ok(TensorSpec::new(name, dtype, shape))
            })
            .collect::<Result<Vec<_>, Failure>>()?;
        let mut manifest = Manifest::new(specs, aliases.unwrap_or_default()).map_err(Failure::from)?;
        if let Some(cuts) = cuts {
            let dims = |dims: Bounds| -> Vec<DimCut> {
                dims.into_iter().map(|(dim, bounds)| DimCut { dim, bounds }).collect()
            };
            let cuts = cuts.into_iter().map(|(name, d)| (name, dims(d))).collect();
            manifest = manifest.with_cuts(&cuts).map_err(Failure::from)?;
        }
        Ok(Layout(Arc::new(manifest)))
    }

    /// Names the layout: 32 hexadecimal digits.
    #[getter]
    fn hash(&self) -> String {
        self.0.layout_hash().to_string()
    }

    /// Bytes of an image without its header.
    #[getter]
    fn data_bytes(&self) -> u64 {
        self.0.data_bytes()
    }

    /// (name, dtype, shape, offset in the data, bytes) of each tensor, in the order of the image.
    fn tensors(&self) -> Vec<(String, String, Vec<u64>, u64, u64)> {
        let row = |t: &Tensor| (t.name.clone(), t.dtype.to_string(), t.shape.clone(), t.offset, t.bytes);
        self.0.tensors().iter().map(row).collect()
    }

    /// Further names, each with the tensor that it stands for.
    fn aliases(&self) -> BTreeMap<String, String> {
        self.0.aliases().clone()
    }

    /// Ranges of blocks for each of `count` hosts. `owners` gives, for each tensor, its boxes: the coordinates of the
    /// first element, those after the last, and the host. Tensors that are not named belong to the first host.
    fn parts(&self, count: usize, owners: Vec<(String, Vec<Owned>)>) -> PyResult<Vec<Vec<(u32, u32)>>> {
        let manifest = &self.0;
        let owners: BTreeMap<_, _> = owners.into_iter().collect();
        let rows: Vec<_> = manifest.tensors().iter().map(|t| owners.get(&t.name)).collect();
        let owner = |block: &Block| {
            let Some(boxes) = rows.get(block.tensor as usize).copied().flatten() else { return 0 };
            let tensor = &manifest.tensors()[block.tensor as usize];
            let at = coordinates(tensor, block.start);
            let inside =
                |(low, high, _): &&Owned| at.iter().zip(low).zip(high).all(|((a, l), h)| l <= a && a < h);
            boxes.iter().find(inside).map_or(usize::MAX, |(_, _, host)| *host)
        };
        let parts = Parts::by_owner(manifest, count, owner).map_err(Failure::from)?;
        let ranges = |part| parts.blocks(part).ranges().map(|r| (r.start, r.end)).collect();
        Ok((0..count).map(ranges).collect())
    }

    fn __len__(&self) -> usize {
        self.0.tensors().len()
    }
}

/// The coordinates of the element that holds a tensor's `unit`.
fn coordinates(tensor: &Tensor, unit: u64) -> Vec<u64> {
    let mut element = unit * 8 * tensor.dtype.unit() as u64 / tensor.dtype.bits();
    let mut at: Vec<u64> = tensor
        .shape
        .iter()
        .rev()
        .map(|&n| {
            let n = n.max(1);
            let i = element % n;
            element /= n;
            i
        })
        .collect();
    at.reverse();
    at
}
