//! Benchmarks and the demo, with synthetic models.
//!
//! | module | owns |
//! |---|---|
//! | [`image`] | images of synthetic models, in memory |
//! | [`bench`](mod@bench) | `windlass bench` |
//! | [`demo`] | `windlass demo` |

pub(crate) mod bench;
pub(crate) mod demo;
pub(crate) mod image;

use crate::error::Error;

impl From<windlass_synth::SynthError> for Error {
    fn from(e: windlass_synth::SynthError) -> Error {
        Error::of_module(e.kind(), e.kind().advice(), e)
    }
}
