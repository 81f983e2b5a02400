//! How Windlass moves bytes.
//!
//! Owns: the SIMD kernels behind the codec and the digest ([`simd`]), safetensors files on disk
//! ([`file`](mod@file)), memory shared between processes ([`shm`]), the protocol by which its users take turns
//! ([`flip`]), the directory that holds it ([`region`]) and the link between hosts ([`tcp`]). Called by the
//! `windlass` crate. Must not: use async, know Python, or decide who moves what and when.

pub mod file;
pub mod flip;
pub mod region;
pub mod shm;
pub mod simd;
pub mod stop;
pub mod tcp;
