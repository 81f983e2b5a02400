//! Strided copies of a rank's tensors into its region.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use windlass_data::copies::{Copy, CopyPlan, Dim};
use windlass_data::cuda::offload::Offload;
use windlass_data::region::Region;

use crate::errors::Failure;

/// Where the first run goes, its bytes, and (count, stride in the slot, stride in the source) of the dimensions.
pub(crate) type Strided = (u64, u64, Vec<(u64, u64, u64)>);

/// Copies that were found to fit their region.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Copies {
    plan: CopyPlan,
    region: Arc<Region>,
    /// What a GPU needs for them, and for which casts it was made.
    device: Mutex<Option<(Vec<bool>, Offload)>>,
}

impl Copies {
    /// Checks copies against a region.
    pub(crate) fn new(region: &Arc<Region>, copies: Vec<Strided>) -> Result<Copies, Failure> {
        let copy = |(at, run, dims): Strided| Copy {
            at,
            run,
            dims: dims.into_iter().map(|(count, to, from)| Dim { count, to, from }).collect(),
        };
        let copies = copies.into_iter().map(copy).collect();
        let plan = CopyPlan::new(copies, region).map_err(|e| Failure::of(e.kind(), &e))?;
        Ok(Copies { plan, region: Arc::clone(region), device: Mutex::default() })
    }

    pub(crate) fn plan(&self) -> &CopyPlan {
        &self.plan
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(crate) fn device(&self) -> &Mutex<Option<(Vec<bool>, Offload)>> {
        &self.device
    }
}

#[pymethods]
impl Copies {
    /// How many bytes they copy.
    #[getter]
    fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    fn __len__(&self) -> usize {
        self.plan.spans().len()
    }
}
