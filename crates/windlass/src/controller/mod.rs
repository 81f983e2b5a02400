//! The controller: who loads which version when, for many models and many receivers, and what people see of it.
//!
//! Owns: the HTTP service around [`windlass_core::barrier`]. Must not: decide anything that the barrier decides.

pub mod wire;
