//! How Windlass moves bytes.
//!
//! Owns: the SIMD kernels behind the codec and the digest ([`simd`]), safetensors files on disk
//! ([`file`](mod@file)), threads over blocks ([`work`]) and when they give up ([`stop`]), sealing ([`seal`]) and the
//! deltas that it leaves ([`history`]). Called by the `windlass` crate. Must not: use async, know Python, or decide who moves
//! what and when.

pub mod file;
pub mod history;
pub mod seal;
pub mod simd;
pub mod stop;
pub mod work;
