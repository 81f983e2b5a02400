//! The door from Python to Windlass.
//!
//! Owns: the conversion of Python objects to Rust values and back, the release of the interpreter lock
//! around blocking calls, and the table that turns error kinds into exceptions. Called by the Python
//! package. Must not: hold any logic that a Rust program would also want.
//!
//! Nothing is here yet; the Python package is not part of this release.
