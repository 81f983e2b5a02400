//! The `windlass` command.

use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Err(missing) = windlass::cpu() {
        // Nobody to tell if even this cannot be printed.
        let _ = writeln!(std::io::stderr(), "error: {missing}");
        return ExitCode::from(windlass_core::Kind::Unsupported.row().exit);
    }
    windlass::cli::main().into()
}
