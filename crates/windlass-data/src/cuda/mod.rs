//! Weights on a GPU: out of a trainer's memory, and into an engine's.
//!
//! | module | what it owns |
//! |---|---|
//! | `boxes` | strided copies as what a kernel and a DMA engine take |
//! | [`driver`] | the driver, a device, its streams and memory |
//! | `kernels` | the compiled programs and the structures that they take |
//! | [`offload`] | copy mode: device memory into the slot that is written |
//! | [`encode`] | delta mode: the baseline, and records of what changed |
//! | [`load`] | a load plan on the device: dense, sparse, and the digest of live weights |
//! | [`ipc`] | memory that another process on the host reads |
//! | [`nvtx`] | names for a profiler |
//! | [`probe`] | what driver and devices can do, tried out |
//! | [`error`](mod@error) | what can go wrong |
//!
//! Owns: every call of the CUDA driver. Called by the Python door, with the addresses of torch's tensors and the handles
//! of its streams, and by programs in Rust. Must not: link to CUDA, touch it at start, or know torch. A machine without a
//! driver gets [`CudaError::NoDriver`] from the first call and loses nothing else.
//!
//! # Whose context, whose streams
//!
//! A process has one *primary context* for a device, which torch uses too, so that addresses are the same on both sides.
//! Work goes to streams of our own. They never wait for a stream of the caller, nor it for them: a call first waits on
//! the host, with its deadline, until the caller's stream has come to where it was when the call was made, then starts
//! work that depends on nothing else, and returns when that is done. So the caller's stream is waited for once in
//! a call, what is started always ends soon, and a call that was given up has nothing under way in memory that is not
//! its own.
//!
//! # Why the `unsafe` here is sound
//!
//! 1. The driver checks its arguments, not addresses. Memory of our own is behind types that live as long as it does
//!    ([`memory::DeviceBuffer`], [`memory::MappedBuffer`], [`memory::Registration`]); whoever starts work on them waits for
//!    its end before they go, also when a call fails ([`driver::Stream`] drains when dropped).
//! 2. Addresses from outside are checked to be memory of this device ([`driver::Gpu::check_addresses`]). How far they
//!    reach is the promise of the caller, as it is for host tensors: the package computes it from shapes and strides.
//! 3. Kernels write only where their tables say. Tables are made here from plans that were checked against the layout.

mod boxes;
pub mod driver;
pub mod encode;
pub mod error;
pub mod ipc;
mod kernels;
mod launch;
pub mod load;
pub mod memory;
pub mod nvtx;
pub mod offload;
pub mod probe;
pub mod survey;

use std::convert::Infallible;

use crate::copies::Copy;

pub use driver::{Facts, Gpu, Stream, StreamHandle};
pub use error::CudaError;
pub use memory::{DeviceBuffer, HostBuffer, MappedBuffer};

/// Calls `each(in the target, in the source)` for every run of a copy.
fn each_run(copy: &Copy, mut each: impl FnMut(u64, u64)) {
    let Ok(()) = copy.runs(0..copy.outer(), |to, from| {
        each(to, from);
        Ok::<(), Infallible>(())
    });
}
