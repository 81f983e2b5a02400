//! Who moves weights, and when: the `windlass` command.
//!
//! | module | what it owns |
//! |---|---|
//! | [`cli`] | arguments, checked before anything happens, and exit codes |
//! | [`config`] | values from `windlass.toml` and the environment, `windlass config` |
//! | [`log`] | what is said on standard error |
//! | [`session`] | tables, progress bars, JSON, Ctrl-C |
//! | [`program`] | how this program is started again |
//! | [`error`] | what can go wrong, and what to do about it |
//! | [`outfile`] | outputs that are whole or absent |
//! | [`delta`] | `windlass delta make`, `apply`, `show` |
//! | [`diff`] | `windlass diff` |
//! | [`inspect`] | `windlass inspect` |
//! | [`verify`] | `windlass verify` |
//! | [`synth`] | made-up models that change as trained ones do |
//! | [`image`] | images of made-up models, in memory |
//! | [`bench`](mod@bench) | `windlass bench` |
//! | [`doctor`] | `windlass doctor` |
//! | [`demo`] | `windlass demo` |
//! | [`http`] | HTTP as all services speak it: bounded and authenticated |
//! | [`token`] | the secret of the control connection |
//! | [`agent`] | `windlass agent` |
//! | [`supervise`] | an agent that is kept running |
//! | [`client`] | HTTP as all clients speak it: with deadlines and a flag |
//! | [`control`] | the receiver's end of the control connection |
//! | [`plane`] | both ends of the control connection, for trainers and engines in Rust |
//! | [`controller`] | `windlass controller` |
//! | [`receive`] | `windlass receive` |
//! | [`engines`] | engines that load what was received |
//! | [`top`] | `windlass top` |
//! | [`gate`] | `windlass gate` |
//! | [`gc`] | `windlass gc` |

pub mod agent;
pub mod agent_address;
pub mod bench;
pub mod cli;
pub mod client;
pub mod config;
pub mod control;
pub mod controller;
pub mod delta;
pub mod demo;
pub mod diff;
pub mod doctor;
pub mod engines;
pub mod error;
pub mod gate;
pub mod gc;
pub mod http;
pub mod image;
pub mod inspect;
pub mod log;
pub mod outfile;
pub mod plane;
pub mod program;
pub mod receive;
pub mod session;
pub mod supervise;
pub mod synth;
pub mod tls;
pub mod token;
pub mod top;
pub mod verify;

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
