//! The header protocol of a region, as `windlass-data` compiles it, with its models.

#[path = "../../crates/windlass-data/src/flip/mod.rs"]
pub mod flip;
