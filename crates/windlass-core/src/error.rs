//! Kinds of failure, and their meaning outside Rust.
//!
//! Every module of this crate has an error enum of its own, whose `kind()` sorts each failure into one of eleven
//! [`Kind`]s. [`Kind::row`] is the one table that maps a kind to a Python exception, an HTTP status, an exit code and a
//! meaning. No caller keeps a second table. The remedy is part of each error; [`Kind::advice`] gives one where it is the
//! same for all failures of a kind.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of a failure. It decides how a caller reacts; the error itself describes the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The input is malformed or contradicts itself.
    Invalid,
    /// The named thing does not exist.
    NotFound,
    /// The input is out of date: an older version, an earlier incarnation, a base that has changed.
    Stale,
    /// Bytes do not match their hash.
    Corrupt,
    Timeout,
    /// The peer disconnected or died.
    PeerLost,
    /// Memory, disk, connections or a configured limit ran out.
    Exhausted,
    /// This build, machine or peer cannot do it.
    Unsupported,
    /// Not authenticated or not allowed.
    Denied,
    /// Cancelled by the caller.
    Cancelled,
    /// A defect in Windlass.
    Bug,
}

/// One line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Name of the Python exception; each one also derives from `WindlassError`.
    pub python: &'static str,
    /// The builtin exception it derives from.
    pub builtin: &'static str,
    /// HTTP status of a response that carries it.
    pub http: u16,
    /// Exit code of the command line.
    pub exit: u8,
    pub meaning: &'static str,
}

impl Kind {
    /// Every kind, in the order of the table.
    pub const ALL: [Kind; 11] = [
        Kind::Invalid,
        Kind::NotFound,
        Kind::Stale,
        Kind::Corrupt,
        Kind::Timeout,
        Kind::PeerLost,
        Kind::Exhausted,
        Kind::Unsupported,
        Kind::Denied,
        Kind::Cancelled,
        Kind::Bug,
    ];

    /// The table. Exit code 1 is left free for commands whose answer is "no".
    pub const fn row(self) -> Row {
        const fn row(
            python: &'static str,
            builtin: &'static str,
            http: u16,
            exit: u8,
            meaning: &'static str,
        ) -> Row {
            Row { python, builtin, http, exit, meaning }
        }
        match self {
            Kind::Invalid => {
                row("WindlassInvalid", "ValueError", 400, 2, "the input is malformed or contradicts itself")
            }
            Kind::NotFound => {
                row("WindlassNotFound", "LookupError", 404, 3, "the named thing does not exist")
            }
            Kind::Stale => row(
                "WindlassStale",
                "RuntimeError",
                409,
                4,
                "the input is out of date: an older version, an earlier incarnation, a base that has changed",
            ),
            Kind::Corrupt => row("WindlassCorrupt", "RuntimeError", 422, 5, "bytes do not match their hash"),
            Kind::Timeout => row("WindlassTimeout", "TimeoutError", 504, 6, "a deadline passed"),
            Kind::PeerLost => {
                row("WindlassPeerLost", "ConnectionError", 502, 7, "the peer disconnected or died")
            }
            Kind::Exhausted => row(
                "WindlassExhausted",
                "OSError",
                507,
                8,
                "memory, disk, connections or a configured limit ran out",
            ),
            Kind::Unsupported => row(
                "WindlassUnsupported",
                "NotImplementedError",
                501,
                9,
                "this build, machine or peer cannot do it",
            ),
            Kind::Denied => {
                row("WindlassDenied", "PermissionError", 403, 10, "not authenticated or not allowed")
            }
            Kind::Cancelled => row("WindlassCancelled", "RuntimeError", 499, 130, "cancelled by the caller"),
            Kind::Bug => row("WindlassBug", "RuntimeError", 500, 70, "a defect in Windlass"),
        }
    }

    /// The remedy for any failure of this kind; empty where it depends on the failure.
    pub const fn advice(self) -> &'static str {
        match self {
            Kind::Corrupt => "fetch it again; if it repeats, check memory and disk",
            Kind::Bug => "please report this with the full message",
            Kind::Invalid
            | Kind::NotFound
            | Kind::Stale
            | Kind::Timeout
            | Kind::PeerLost
            | Kind::Exhausted
            | Kind::Unsupported
            | Kind::Denied
            | Kind::Cancelled => "",
        }
    }

    /// The name used in JSON, metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Invalid => "invalid",
            Kind::NotFound => "not_found",
            Kind::Stale => "stale",
            Kind::Corrupt => "corrupt",
            Kind::Timeout => "timeout",
            Kind::PeerLost => "peer_lost",
            Kind::Exhausted => "exhausted",
            Kind::Unsupported => "unsupported",
            Kind::Denied => "denied",
            Kind::Cancelled => "cancelled",
            Kind::Bug => "bug",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The first characters of an untrusted text, for messages.
pub(crate) fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_kind_has_its_own_name_exit_code_and_exception() {
        let exits: HashSet<_> = Kind::ALL.iter().map(|k| k.row().exit).collect();
        let names: HashSet<_> = Kind::ALL.iter().map(|k| k.as_str()).collect();
        let python: HashSet<_> = Kind::ALL.iter().map(|k| k.row().python).collect();
        assert_eq!((exits.len(), names.len(), python.len()), (11, 11, 11));
        assert!(!exits.contains(&0) && !exits.contains(&1));
    }

    #[test]
    fn json_name_is_as_str() {
        for kind in Kind::ALL {
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
        }
    }

    #[test]
    fn http_status_of_every_kind_is_that_of_an_error() {
        for kind in Kind::ALL {
            assert!((400..600).contains(&kind.row().http));
        }
    }
}
