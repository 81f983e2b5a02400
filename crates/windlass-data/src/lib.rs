//! How Windlass moves bytes.
//!
//! | module | what it owns |
//! |---|---|
//! | [`simd`] | the inner loops of the codec and the digest |
//! | [`file`](mod@file) | safetensors files on disk |
//! | [`shm`] | shared memory, and all of the `unsafe` that it takes |
//! | [`flip`] | who may read and who may write a slot: the protocol in a region's header |
//! | [`private`] | whose directories and secrets are |
//! | [`region`] | the directory that publishers and readers share |
//! | [`copies`] | a process' tensors into the slot that is written |
//! | [`cuda`] | weights on a GPU |
//! | [`work`] | threads over blocks |
//! | [`container`] | a delta's container by several threads |
//! | [`seal`] | sums and delta of a committed version, in one pass |
//! | [`publish`] | one rank of a publisher: copies, or publishes by delta where it can |
//! | [`history`] | deltas on disk, and those composed from them |
//! | [`tcp`] | the link between two hosts |
//! | [`serve`] | what an agent does, without HTTP |
//! | [`image`] | the image at a receiver |
//! | [`receiver`] | how an image is kept at the newest version |
//! | [`load`] | an image into the live parameters of an engine |
//! | [`local`] | the way into a region on the same host |
//! | [`nixl`] | one-sided reads of other hosts' memory |
//! | [`roles`] | the four roles as traits, for trainers and engines in Rust |
//! | `conformance` | what every link and loader must do, as a suite (feature `conformance`) |
//! | [`tls`] | certificates and whom to trust |
//! | [`stop`] | when to give up |
//!
//! Called by the `windlass` crate, and by programs in Rust that train or serve. Must not: use async, know Python or
//! HTTP, or decide who moves what and when.

#[cfg(feature = "conformance")]
pub mod conformance;
pub mod container;
pub mod copies;
pub mod cuda;
pub mod file;
pub mod flip;
pub mod history;
pub mod image;
pub mod load;
pub mod local;
pub mod nixl;
pub mod private;
pub mod publish;
pub mod receiver;
pub mod region;
pub mod roles;
pub mod seal;
pub mod serve;
pub mod shm;
pub mod simd;
pub mod stop;
pub mod tcp;
pub mod tls;
pub mod work;
