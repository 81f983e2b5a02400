//! Who moves weights, and when: the `windlass` command and its services.
//!
//! | room | owns | may use |
//! |---|---|---|
//! | [`cli`] | arguments, checked before anything happens, configuration, exit codes | all below |
//! | `lab` | benchmarks and the demo; the feature of that name | `tools`, `service` |
//! | `tools` | commands that look at files, hosts and services, and end | `service` |
//! | [`service`] | agent, receiver, controller, engines, and what they share | |
//! | `console`, `log`, `error` | output, log lines, errors | |
//!
//! `scripts/layers.py` checks the last column. Programs in Rust use [`service`]; the Python package also runs [`cli`].

pub mod cli;
mod console;
mod error;
#[cfg(feature = "lab")]
mod lab;
mod log;
pub mod service;
mod tools;

pub use self::error::{Error, chain};
pub use self::log::start as start_log;
