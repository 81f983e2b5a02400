//! The `windlass` command.

use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Err(missing) = windlass::check_cpu() {
        // If standard error is closed too, the exit code is all that is left.
        let _ = writeln!(std::io::stderr(), "error: {missing}");
        return ExitCode::from(windlass_core::Kind::Unsupported.row().exit);
    }
    windlass::cli::main().into()
}
