//! How Windlass moves bytes.
//!
//! Owns: the SIMD kernels behind the codec and the digest, and memory-mapped safetensors files.
//! Called by the `windlass` crate. Must not: use async, know Python, or decide who moves what and when.

pub mod file;
