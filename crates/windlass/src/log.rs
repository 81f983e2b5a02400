//! Log lines of this process, on standard error.

use std::io::IsTerminal as _;
use std::sync::Once;

use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The variable that selects which lines are logged.
const VARIABLE: &str = "WINDLASS_LOG";
/// The variable that selects how a line is written.
const FORMAT: &str = "WINDLASS_LOG_FORMAT";

/// Logs warnings, or what `WINDLASS_LOG` selects, such as `info` or `warn,windlass_data=debug`, as text, or with
/// `WINDLASS_LOG_FORMAT=json` as one JSON object a line. Does nothing the second time, or in a program that has a subscriber
/// of its own.
pub fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let asked = |variable| std::env::var(variable).ok().filter(|text: &String| !text.trim().is_empty());
        let text = asked(VARIABLE).unwrap_or_else(|| "warn".into());
        let parsed: Result<Targets, _> = text.parse();
        let wrong = parsed.as_ref().err().map(ToString::to_string);
        let filter = parsed.unwrap_or_else(|_| Targets::new().with_default(LevelFilter::WARN));
        let format = asked(FORMAT).unwrap_or_else(|| "text".into());
        let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        let log = match format.as_str() {
            // The fields stand at the top, as what collects logs wants them.
            "json" => log.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed(),
            _ => log.with_target(false).with_ansi(std::io::stderr().is_terminal()).boxed(),
        };
        let _ = tracing_subscriber::registry().with(log.with_filter(filter)).try_init();
        if let Some(error) = wrong {
            tracing::warn!(
                error,
                "{VARIABLE} is {text:?}: write levels and targets, as in warn,windlass_data=debug"
            );
        }
        if !["text", "json"].contains(&format.as_str()) {
            tracing::warn!("{FORMAT} is {format:?}: write text or json");
        }
    });
}
