//! How Windlass moves bytes.
//!
//! Owns: the SIMD kernels behind the codec and the digest ([`simd`]), and safetensors files on disk
//! ([`file`](mod@file)). Called by the `windlass` crate. Must not: use async, know Python, or decide who moves
//! what and when.

pub mod file;
pub mod shm;
pub mod simd;
pub mod stop;
pub mod tcp;
