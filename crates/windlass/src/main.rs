//! The `windlass` command.

fn main() -> std::process::ExitCode {
    windlass::cli::main().into()
}
