//! What this program says of its own accord, on standard error.

use std::sync::Once;

use tracing_subscriber::EnvFilter;

/// Logs go to standard error: warnings unless `WINDLASS_LOG` asks for more, such as `info` or `windlass_data=debug`. Does
/// nothing the second time, or in a program that has a subscriber of its own.
pub fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let filter = EnvFilter::try_from_env("WINDLASS_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
        let log =
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
        let _ = log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init();
    });
}
