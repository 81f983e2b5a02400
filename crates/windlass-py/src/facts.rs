//! Facts about this machine, for the choice of a strategy.

use pyo3::prelude::*;
use windlass_data::cuda::survey::Gpus;

use crate::enter::enter;

/// The CUDA driver, the GPUs and the abilities of their memory, as JSON: the object "gpu" of `windlass doctor --json`.
/// A missing driver or GPU is no error; the object says so. Opens every visible device for a moment.
#[pyfunction]
pub(crate) fn gpu_survey(py: Python<'_>) -> PyResult<String> {
    enter(py, None, |_| Ok(Gpus::here().json().to_string()))
}
