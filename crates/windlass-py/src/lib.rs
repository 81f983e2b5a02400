//! The door from Python to Windlass.
//!
//! Owns: the conversion of Python objects to Rust values and back, the release of the interpreter lock
//! around blocking calls ([`enter`]), and the table that turns error kinds into exceptions ([`errors`]). Called by
//! the Python package, which is the only one to import `windlass._windlass`. Must not: hold any logic that a Rust
//! program would also want, start a thread that calls into Python, or do anything at import.

mod cli;
mod enter;
mod errors;
mod supervise;

/// The compiled half of the package. Everything public is re-exported by `windlass`.
#[pyo3::pymodule]
mod _windlass {
    #[pymodule_export]
    use crate::cli::main;
    #[pymodule_export]
    use crate::errors::kinds;
    #[pymodule_export]
    use crate::supervise::Supervisor;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        windlass::cpu().map_err(pyo3::exceptions::PyImportError::new_err)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
