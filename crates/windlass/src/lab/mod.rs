//! Benchmarks and the demo, with synthetic models.
//!
//! | module | owns |
//! |---|---|
//! | [`synth`] | synthetic models that change as trained ones do |
//! | [`image`] | images of synthetic models, in memory |
//! | [`bench`](mod@bench) | `windlass bench` |
//! | [`demo`] | `windlass demo` |

pub(crate) mod bench;
pub(crate) mod demo;
pub(crate) mod image;
pub(crate) mod synth;
