//! The `windlass` command.

use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Err(missing) = cpu() {
        let remedy = "build it for this machine: RUSTFLAGS='-C target-cpu=native' cargo build --release";
        // Nobody to tell if even this cannot be printed.
        let _ = writeln!(
            std::io::stderr(),
            "error: this build of windlass needs a CPU with {missing}\n  {remedy}"
        );
        return ExitCode::from(windlass_core::Kind::Unsupported.row().exit);
    }
    windlass::cli::main().into()
}

/// Whether this CPU has what the build assumes (`.cargo/config.toml`), before anything else needs it.
fn cpu() -> Result<(), &'static str> {
    #[cfg(all(target_arch = "x86_64", target_feature = "avx2"))]
    {
        if !is_x86_feature_detected!("avx2") {
            return Err("AVX2");
        }
        if !is_x86_feature_detected!("bmi2") || !is_x86_feature_detected!("lzcnt") {
            return Err("BMI2 and LZCNT");
        }
    }
    Ok(())
}
