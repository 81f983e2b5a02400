//! The long-running processes, and what they share.
//!
//! | module | owns |
//! |---|---|
//! | [`agent`] | `windlass agent`: serves a region to receivers |
//! | [`agent_address`] | where the agent of a region listens |
//! | [`supervise`] | keeps an agent running for a trainer |
//! | [`receive`] | `windlass receive`: keeps images up to date |
//! | [`disk`] | `windlass publish` and `--as-dir`: checkpoints in directories as versions, and back |
//! | [`store`] | versions in S3, GCS, Azure or a directory: their publisher and the receiver's end |
//! | [`engines`] | has inference engines load what was received |
//! | [`controller`] | `windlass controller`: the version barrier as a service |
//! | [`control`] | the receiver's end of the control connection |
//! | [`plane`] | both ends of the control connection, for trainers and engines written in Rust |
//! | [`http`] | the HTTP server of all services: bounded and authenticated |
//! | [`client`] | the HTTP client of all services: with deadlines |
//! | [`spans`] | OpenTelemetry spans of what services do with a version |
//! | [`token`], [`tls`] | secrets and certificates |
//! | [`nixl`] | whether a service reads or exports memory by NIXL |
//! | [`program`] | how this program starts itself again |

pub(crate) mod agent;
pub mod agent_address;
pub mod client;
pub mod control;
pub mod controller;
pub(crate) mod disk;
pub mod engines;
pub(crate) mod http;
pub mod nixl;
pub mod plane;
pub mod program;
pub(crate) mod receive;
pub(crate) mod spans;
pub mod store;
pub mod supervise;
pub mod tls;
pub mod token;
