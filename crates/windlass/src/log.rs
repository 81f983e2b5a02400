//! Log lines of this process, on standard error.

use std::io::IsTerminal as _;
use std::sync::Once;

use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The variable that selects which lines are logged.
const VARIABLE: &str = "WINDLASS_LOG";

/// Logs warnings, or what `WINDLASS_LOG` selects, such as `info` or `warn,windlass_data=debug`. Does nothing the second time, or
/// in a program that has a subscriber of its own.
pub fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let asked = std::env::var(VARIABLE).ok().filter(|text| !text.trim().is_empty());
        let text = asked.unwrap_or_else(|| "warn".into());
        let parsed: Result<Targets, _> = text.parse();
        let wrong = parsed.as_ref().err().map(ToString::to_string);
        let filter = parsed.unwrap_or_else(|_| Targets::new().with_default(LevelFilter::WARN));
        let log = tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_target(false)
            .with_ansi(std::io::stderr().is_terminal());
        let _ = tracing_subscriber::registry().with(log.with_filter(filter)).try_init();
        if let Some(error) = wrong {
            tracing::warn!(
                error,
                "{VARIABLE} is {text:?}: write levels and targets, as in warn,windlass_data=debug"
            );
        }
    });
}
