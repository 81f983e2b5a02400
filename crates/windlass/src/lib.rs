//! The `windlass` command.
pub mod synth;
