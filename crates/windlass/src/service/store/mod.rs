//! Versions in a store: S3, GCS, Azure or a directory.
//!
//! | module | owns |
//! |---|---|
//! | [`bucket`] | objects below a URL, through the `object_store` crate; no message repeats a secret |
//! | [`model`] | one model: its head, its versions and its documents |
//! | [`publish`] | the task of an agent that uploads what it seals |
//! | [`follow`] | the receiver's end |
//! | [`transport`] | the requests, sent by the client of all services |
//!
//! The format, and every decision about what is fetched, written and removed, is [`windlass_core::store`].

pub(crate) mod bucket;
pub(crate) mod follow;
pub(crate) mod model;
pub(crate) mod publish;
mod transport;
