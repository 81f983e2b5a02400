//! Benchmarks and the demo, with synthetic models.
//!
//! | module | owns |
//! |---|---|
//! | [`synth`] | synthetic models that change as trained ones do |
//! | [`image`] | images of synthetic models, in memory |
//! | [`bench`](mod@bench) | `windlass bench` |
//! | [`demo`] | `windlass demo` |

pub mod bench;
pub mod demo;
pub mod image;
pub mod synth;
