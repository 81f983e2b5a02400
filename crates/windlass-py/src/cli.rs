//! The `windlass` command inside the wheel.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line with `argv`, of which the first is the name of the program, and returns the exit code.
/// `program` is how to start it again. Signals are the command's own from here on.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: Vec<OsString>, program: Vec<OsString>) -> u8 {
    windlass::service::program::set(program, Vec::new());
    py.detach(|| windlass::cli::main_from(argv))
}
