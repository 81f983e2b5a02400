//! Layouts: which tensors an image has, and where.

use std::collections::BTreeMap;
use std::str::FromStr as _;
use std::sync::Arc;

use pyo3::prelude::*;
use windlass_core::Dtype;
use windlass_core::manifest::{DimCut, Manifest, TensorSpec};

use crate::errors::Failure;

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
        cuts: Option<BTreeMap<String, Vec<(usize, Vec<u64>)>>>,
    ) -> PyResult<Layout> {
        let specs = tensors
            .into_iter()
            .map(|(name, dtype, shape)| {
                let dtype = Dtype::from_str(&dtype)
                    .map_err(|e| Failure::invalid(format!("tensor {name:?}: {e}")))?;
                Ok(TensorSpec::new(name, dtype, shape))
            })
            .collect::<Result<Vec<_>, Failure>>()?;
        let mut manifest = Manifest::new(specs, aliases.unwrap_or_default()).map_err(Failure::from)?;
        if let Some(cuts) = cuts {
            let dims = |dims: Vec<(usize, Vec<u64>)>| -> Vec<DimCut> {
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
        let row = |t: &windlass_core::manifest::Tensor| {
            (t.name.clone(), t.dtype.to_string(), t.shape.clone(), t.offset, t.bytes)
        };
        self.0.tensors().iter().map(row).collect()
    }

    /// Further names, each with the tensor that it stands for.
    fn aliases(&self) -> BTreeMap<String, String> {
        self.0.aliases().clone()
    }

    fn __len__(&self) -> usize {
        self.0.tensors().len()
    }
}
