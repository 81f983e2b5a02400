//! One-sided reads of other hosts' memory, by NIXL.
//!
//! Owns: the library ([`Library`]), agents and what they have registered: [`Exporter`] at a sender, [`Reader`] at a receiver. Called
//! by the [TCP link](crate::tcp), whose connections say what may be read and until when, by the server, which exports its
//! slots, and by `windlass doctor`. Must not: know offers or stripes, or decide what is read.
//!
//! # The library
//!
//! It is opened when an agent is first made, and never linked: `libnixl_capi.so` of the Python package `nixl-cu12`, or of
//! a path. It is refused if it lacks a function or is of another major version, and two peers use it only if both have the same
//! release: NIXL does not promise that the metadata of one release can be read by another.
//!
//! # Who may read
//!
//! A process that has the metadata of an agent can read what that agent has registered, at any time: RDMA knows no tickets, and
//! UCX does not encrypt. The metadata is given to peers that have proved a ticket, over connections without TLS
//! only; an agent with a certificate exports nothing. NIXL is therefore for networks that are trusted, and off unless it is
//! asked for.
//!
//! # Memory
//!
//! A slot is mapped and registered once, for the life of the server ([`Exporter::export`]), an image once for the life of its mapping
//! ([`Agent::register`]). Where an exported file is withdrawn, its addresses stay readable as zeros: over links without RDMA,
//! UCX in *this* process reads what a peer asks for, and a peer that was stalled may ask late.
//!
//! # How a read ends
//!
//! A read that did not succeed may still be writing. So its memory is given back only when it has succeeded or when its agent
//! was destroyed ([`Read`]); the next transfer makes a new agent, and those within [`REST`] of the failure use TCP.
//!
//! # Invariants
//!
//! | | invariant | test |
//! |---|---|---|
//! | NIXL-1 | memory that is read into is on loan until the read succeeded or its agent is gone | `memory_is_on_loan_until_its_read_has_ended` |
//! | NIXL-2 | a peer that is killed or stalled ends its reads in bounded time, and the transfer ends with equal bytes over TCP | `a_read_from_a_killed_process_ends`, `a_transfer_goes_on_over_tcp_when_its_reads_fail` |
//! | NIXL-3 | memory that is withdrawn can still be asked for and harms no process | `withdrawn_memory_reads_as_zeros` |
//! | NIXL-4 | nothing is left behind | `agents_leave_no_thread_and_no_descriptor` |

mod agent;
mod error;
mod find;
mod library;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

pub use agent::{Agent, Exporter, Read, Reader, Remote};
pub use error::NixlError;

/// The plugin that is used.
const PLUGIN: &str = "UCX";
/// The major version that this build works with, as releases begin, and what errors say of it.
const MAJOR: &str = "1.";
const SUPPORTED: &str = "1.5 (any 1.x that has the functions)";
/// How long NIXL is left alone after a read that failed.
pub const REST: Duration = Duration::from_secs(10);

/// How NIXL is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// `libnixl_capi.so`, its directory, or the directory of packages that it is installed in; looked for if not given.
    pub library: Option<PathBuf>,
    /// Parameters of the UCX plugin, such as `ucx_error_handling_mode`.
    pub params: Vec<(String, String)>,
}

/// A library that works, for those who ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    pub path: PathBuf,
    /// Its package and release.
    pub release: String,
    pub plugins: Vec<String>,
}

/// Opens the library and starts UCX once, as a transfer would.
pub fn survey(config: &Config) -> Result<Library, NixlError> {
    let nixl = library::Nixl::open(config.library.as_deref())?;
    let raw = library::Raw::create(nixl, "windlass-doctor", &config.params)?;
    Ok(Library { path: raw.path().to_owned(), release: raw.release().to_owned(), plugins: raw.plugins()? })
}

/// The RDMA devices of this host, by name.
pub fn rdma_devices() -> Vec<String> {
    let devices = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let mut names: Vec<String> = devices.map(|d| d.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
