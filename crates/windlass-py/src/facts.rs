//! What this machine is, for whoever chooses a strategy.

use pyo3::prelude::*;
use windlass::tools::doctor::gpu::Gpus;
use windlass::tools::doctor::system::System;

use crate::enter::enter;

/// The CUDA driver, the GPUs and what their memory can do, as JSON: the object "gpu" of `windlass doctor --json`.
/// Never fails for what is missing, but says so. Opens every visible device for a moment.
#[pyfunction]
pub(crate) fn gpu_survey(py: Python<'_>) -> PyResult<String> {
    enter(py, None, |_| Ok(Gpus::look(&System::here()).json().to_string()))
}
