//! What can go wrong with NIXL.

use std::path::PathBuf;
use std::time::Duration;

use windlass_core::error::Kind;

/// What can go wrong with NIXL.
#[derive(Debug, thiserror::Error)]
pub enum NixlError {
    #[error(
        "NIXL is not installed: looked for {}; install the package nixl-cu12 into the Python environment that runs \
         Windlass, or name libnixl_capi.so with --nixl-library",
        sought.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    Absent { sought: Vec<PathBuf> },
    #[error("{} cannot be loaded: {cause}; install the package nixl-cu12 anew", path.display())]
    Load { path: PathBuf, cause: String },
    #[error(
        "{} is NIXL of another version: it has no {symbol}; install nixl-cu12 {}",
        path.display(), super::SUPPORTED
    )]
    Symbol { path: PathBuf, symbol: &'static str },
    #[error(
        "{} is NIXL {found}, and this build works with {}: install that, or name another library with --nixl-library",
        path.display(), super::SUPPORTED
    )]
    Release { path: PathBuf, found: String },
    #[error(
        "NIXL at {} has no plugin {plugin}, only {}: look in its directory `plugins`, or unset NIXL_PLUGIN_DIR",
        path.display(), if found.is_empty() { "none" } else { found }
    )]
    Plugin { path: PathBuf, plugin: &'static str, found: String },
    /// A name or a parameter that no C string can hold.
    #[error("{what} {text:?} has a zero byte in it: leave it out")]
    Text { what: &'static str, text: String },
    #[error("NIXL cannot {doing}: code {code}; the lines that NIXL and UCX wrote to stderr say why")]
    Call { doing: &'static str, code: i32 },
    #[error("{metadata} bytes of metadata are more than the {max} that fit a frame: register less memory")]
    Metadata { metadata: usize, max: usize },
    /// The agent was destroyed, because a read did not end well.
    #[error("the agent was shut down after a read that failed")]
    Closed,
    #[error("a read from {peer} failed: the peer is gone, or its memory is")]
    Read { peer: String },
    #[error("a read from {peer} did not end within {after:?}: the peer is stalled or cut off")]
    Stalled { peer: String, after: Duration },
    #[error("NIXL is left alone for {left:?} after a failure: {why}")]
    Resting { left: Duration, why: String },
    #[error("cannot map what is to be read: {source}")]
    Map { source: std::io::Error },
}

impl NixlError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            NixlError::Absent { .. } => Kind::NotFound,
            NixlError::Load { .. }
            | NixlError::Symbol { .. }
            | NixlError::Release { .. }
            | NixlError::Plugin { .. } => Kind::Unsupported,
            NixlError::Text { .. } => Kind::Invalid,
            NixlError::Call { .. } | NixlError::Metadata { .. } | NixlError::Map { .. } => Kind::Exhausted,
            NixlError::Closed | NixlError::Read { .. } | NixlError::Resting { .. } => Kind::PeerLost,
            NixlError::Stalled { .. } => Kind::Timeout,
        }
    }
}
