//! Formats, protocols and decisions of Windlass.
//!
//! Pure: no I/O, no clock, no environment, no threads, no unsafe. Time is an argument, bytes are slices.
//! Everything that crosses a process boundary is defined here once, as a type with a parser that checks
//! every untrusted number before it is used.
//!
//! | module | what it owns |
//! |---|---|
//! | [`error`] | kinds of failure and their meaning to Python, HTTP and the shell |
//! | [`dtype`] | element types and their spellings |
//! | [`identity`] | (model, incarnation, version) and the hashes that name layouts and states |
//! | [`address`] | hosts, endpoints, store URLs and tokens, as checked text |
//! | [`ranges`] | sets of blocks |
//! | [`manifest`] | the ordered tensors of an image, its safetensors header, cuts into blocks, parts |
//! | [`mod@slice`] | the part of a model that one host needs |
//! | [`chunk`] | grouping and batching of parameters on their way out of a trainer |
//! | [`request`] | weight update requests and their legacy dictionaries |
//! | [`sync_info`] | the connection data that trainers send to engines before the first sync |
//! | [`kernel`] | the three inner loops of codec and digest, replaceable by faster ones |
//! | [`digest`] | block sums, tensor sums and the state digest |
//! | [`delta`] | the codec for the changes between two versions |
//! | [`delta_mode`] | whether the deltas of several ranks are one |
//! | [`wire`] | the transfer protocol, without sockets |
//! | [`backoff`] | exponential backoff for retries |
//! | [`barrier`] | which receiver may load which version, and when |
//! | [`store`] | versions as objects in a store: names, documents, which are fetched, which may go |
//! | [`choose`] | which strategy, link and codec fit the facts, and why |
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod address;
pub mod backoff;
pub mod barrier;
pub mod choose;
pub mod chunk;
pub mod delta;
pub mod delta_mode;
pub mod digest;
pub mod dtype;
pub mod error;
mod hex;
pub mod identity;
pub mod kernel;
pub mod manifest;
pub mod ranges;
pub mod request;
pub mod slice;
pub mod store;
pub mod sync_info;
mod varint;
pub mod wire;

pub use dtype::Dtype;
pub use error::Kind;
pub use identity::{Identity, LayoutHash, StateDigest};
