//! Who moves weights, and when: the `windlass` command.
//!
//! | room | owns | may use |
//! |---|---|---|
//! | [`cli`] | arguments, checked before anything happens, configuration, exit codes | all below |
//! | [`lab`] | benchmarks and the demo | `tools`, `service` |
//! | [`tools`] | commands that look at files, hosts and services, and end | `service` |
//! | [`service`] | agent, receiver, controller, engines, and what they share | |
//! | [`console`], [`log`], [`error`] | output, log lines, errors | |
//!
//! `scripts/layers.py` checks the last column.

pub mod cli;
pub mod console;
pub mod error;
pub mod lab;
pub mod log;
pub mod service;
pub mod tools;

use windlass_core::kernel::Kernels;

/// The fastest inner loops for this processor.
pub fn kernels() -> &'static dyn Kernels {
    windlass_data::simd::kernels()
}

/// Whether this CPU has what the build assumes (`.cargo/config.toml`), asked before anything else needs it.
pub fn cpu() -> Result<(), String> {
    #[cfg(all(target_arch = "x86_64", target_feature = "avx2"))]
    {
        let missing = |what: &str| {
            let remedy = "build it for this machine: RUSTFLAGS='-C target-cpu=native' cargo build --release";
            Err(format!("this build of windlass needs a CPU with {what}\n  {remedy}"))
        };
        if !is_x86_feature_detected!("avx2") {
            return missing("AVX2");
        }
        if !is_x86_feature_detected!("bmi2") || !is_x86_feature_detected!("lzcnt") {
            return missing("BMI2 and LZCNT");
        }
    }
    Ok(())
}
