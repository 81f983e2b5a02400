//! Errors of commands and services, with advice.
//!
//! Owns: the crate's [`Error`]. `cli` prints a failure once, with its causes and one line of advice, and
//! turns its kind into the exit code.

use std::fmt::Write as _;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use windlass_core::StateDigest;
use windlass_core::error::Kind;
use windlass_data::file::{FileError, io_kind};
use windlass_data::image::ImageError;
use windlass_data::local::LocalError;
use windlass_data::nixl::NixlError;
use windlass_data::private::PrivateError;
use windlass_data::receiver::ReceiverError;
use windlass_data::region::RegionError;
use windlass_data::seal::SealError;
use windlass_data::serve::ServeError;
use windlass_data::stop::Stopped;
use windlass_data::tls::TlsError;

/// A command that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Usage(String),
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{}: {source}", path.display())]
    Content {
        path: PathBuf,
        /// What sort of failure that is.
        kind: Kind,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} and {} do not have the same tensors: {name:?} {how}", a.display(), b.display())]
    LayoutDiffers { a: PathBuf, b: PathBuf, name: String, how: String },
    /// A delta was to be applied to something that is not its base.
    #[error("{} is not the base of {}: {why}", base.display(), delta.display())]
    WrongBase {
        /// What it was to be applied to.
        base: PathBuf,
        delta: PathBuf,
        why: String,
    },
    #[error("the state digest of {} is {found}, not {expected}", path.display())]
    Digest { path: PathBuf, found: StateDigest, expected: StateDigest },
    #[error("writing {} would change the input {}", output.display(), input.display())]
    Overwrite { output: PathBuf, input: PathBuf },
    /// The output path exists and is of another type.
    #[error("{} already exists and is {found}, not {wanted}", path.display())]
    InTheWay {
        path: PathBuf,
        found: &'static str,
        /// What was to be put there.
        wanted: &'static str,
    },
    #[error("the token file {} cannot be read or made: its folder {} does not exist", path.display(), folder.display())]
    NoFolder { path: PathBuf, folder: PathBuf },
    /// `gc` of a directory that holds more than regions and images.
    #[error("{} holds much more than regions and images; gc does not search it", dir.display())]
    TooWide { dir: PathBuf },
    #[error("another windlass is writing {}", path.display())]
    Busy { path: PathBuf },
    /// A checkpoint with an unfinished in-place update.
    #[error("{} has an unfinished in-place update (journal {})", base.display(), journal.display())]
    Unfinished { base: PathBuf, journal: PathBuf },
    /// An in-place update that stopped after its first write.
    #[error("{} is part old, part new: {source}", base.display())]
    PartlyUpdated { base: PathBuf, source: Box<Error> },
    #[error(transparent)]
    Seal(SealError),
    #[error("cannot {doing}")]
    Plane {
        /// What was tried, as a verb with its object.
        doing: &'static str,
        /// What sort of failure it is.
        kind: Kind,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{identity} was announced, but the agent at {endpoint} shows {}", shown(*newest))]
    NotShown {
        identity: windlass_core::identity::Identity,
        endpoint: String,
        newest: Option<windlass_core::identity::Version>,
    },
    #[error("{identity} was announced, but no agent of its model answers at {endpoint}")]
    NotReached { identity: windlass_core::identity::Identity, endpoint: String, source: Box<Error> },
    #[error("cannot listen on {bind}, ports {} to {}", ports.0, ports.1)]
    Listen {
        bind: IpAddr,
        /// The first and the last port tried.
        ports: (u16, u16),
        /// What the system said of the last one.
        source: io::Error,
    },
    /// A directory or a secret that other users can read or replace.
    #[error(transparent)]
    Private(#[from] PrivateError),
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Receiver(#[from] ReceiverError),
    #[error(transparent)]
    Local(#[from] LocalError),
    #[error(transparent)]
    Nixl(#[from] NixlError),
    #[error("the demo's {who}: {what}")]
    Child { who: String, what: String, kind: Kind },
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The error of a module that has a type of its own: a configuration, a controller, an engine, a synthetic model.
    #[error("{source}")]
    Module {
        /// What sort of failure it is.
        kind: Kind,
        /// What to do next, or nothing.
        advice: String,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error(
        "{} of {total} engines did not load version {version}: {}",
        failed.len(),
        failed.iter().map(|(engine, why)| format!("{engine} ({why})")).collect::<Vec<_>>().join("; ")
    )]
    Engines {
        version: u64,
        failed: Vec<(String, String)>,
        total: usize,
        /// What sort of failure the first of them is.
        kind: Kind,
    },
    #[error("interrupted")]
    Cancelled,
    #[error("the deadline passed before the work was done")]
    Deadline,
    #[error("internal error: {0}")]
    Bug(String),
}

impl From<Stopped> for Error {
    fn from(stopped: Stopped) -> Error {
        match stopped {
            Stopped::Cancelled => Error::Cancelled,
            Stopped::Deadline => Error::Deadline,
        }
    }
}

/// A cancelled pass is an interrupted command.
impl From<SealError> for Error {
    fn from(e: SealError) -> Error {
        match e {
            SealError::Stopped(stopped) => stopped.into(),
            SealError::Io { .. }
            | SealError::ImageLength { .. }
            | SealError::ShortTensor { .. }
            | SealError::BeyondBlocks { .. }
            | SealError::TableLength { .. }
            | SealError::NotNewer { .. }
            | SealError::BaseChanged { .. }
            | SealError::Manifest(_) => Error::Seal(e),
        }
    }
}

/// Advice on a refused certificate.
pub(crate) const CERTIFICATES: &str =
    "see docs/security.md on how to create certificates and what they must contain";

impl Error {
    /// The error of a module above this one.
    pub(crate) fn of_module(
        kind: Kind,
        advice: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Error {
        Error::Module { kind, advice: advice.into(), source: Box::new(source) }
    }

    /// For `map_err` on file operations.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }

    /// For `map_err` on core's errors about the contents of a file.
    pub fn content<E>(path: &Path) -> impl FnOnce(E) -> Error
    where
        E: std::error::Error + Send + Sync + 'static,
        for<'a> Kind: From<&'a E>,
    {
        let path = path.to_owned();
        move |source| Error::Content { path, kind: Kind::from(&source), source: Box::new(source) }
    }

    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            Error::Usage(_)
            | Error::TooWide { .. }
            | Error::Overwrite { .. }
            | Error::InTheWay { .. }
            | Error::LayoutDiffers { .. } => Kind::Invalid,
            Error::WrongBase { .. } | Error::Unfinished { .. } => Kind::Stale,
            Error::PartlyUpdated { source, .. } => source.kind(),
            Error::Io { source, .. } => io_kind(source),
            Error::File(e) => e.kind(),
            Error::Digest { .. } => Kind::Corrupt,
            Error::NoFolder { .. } | Error::NotShown { .. } | Error::NotReached { .. } => Kind::NotFound,
            // Another run holds the lock.
            Error::Busy { .. } => Kind::Denied,
            // An address of another host never becomes free; a port may.
            Error::Listen { source, .. } if source.kind() == io::ErrorKind::AddrNotAvailable => Kind::Invalid,
            Error::Listen { .. } => Kind::Exhausted,
            Error::Seal(e) => e.kind(),
            Error::Private(e) => e.kind(),
            Error::Region(e) => e.kind(),
            Error::Serve(e) => e.kind(),
            Error::Receiver(e) => e.kind(),
            Error::Local(e) => e.kind(),
            Error::Nixl(e) => e.kind(),
            Error::Child { kind, .. }
            | Error::Content { kind, .. }
            | Error::Plane { kind, .. }
            | Error::Engines { kind, .. }
            | Error::Module { kind, .. } => *kind,
            Error::Tls(e) => e.kind(),
            Error::Cancelled => Kind::Cancelled,
            Error::Deadline => Kind::Timeout,
            Error::Bug(_) => Kind::Bug,
        }
    }

    /// What to do next. Empty if the message says it all.
    pub fn advice(&self) -> String {
        match self {
            Error::Io { source, path, .. }
            | Error::File(FileError::Io { source, path, .. })
            | Error::Private(PrivateError::Io { source, path, .. })
            | Error::Region(
                RegionError::Io { source, path, .. }
                | RegionError::Private(PrivateError::Io { source, path, .. }),
            )
            | Error::Tls(TlsError::Read { source, path, .. }) => io_advice(source, path),
            Error::Overwrite { .. } => "choose another output; windlass never overwrites inputs".into(),
            Error::InTheWay { .. } => "choose another output".into(),
            Error::NoFolder { folder, .. } => {
                format!("create it with `mkdir -p -m 700 {}`, or give another file with --token-file", folder.display())
            }
            Error::Receiver(ReceiverError::Image(ImageError::Taken { pid, .. })) => format!(
                "stop the other receiver (`kill {pid}`), or give this one another --dir; engines on one host can share an image"
            ),
            Error::Private(_)
            | Error::Region(RegionError::Private(_))
            | Error::Receiver(ReceiverError::Image(ImageError::Region(RegionError::Private(_)))) => {
                "see docs/security.md on the required owners and modes of directories and secrets".into()
            }
            Error::TooWide { .. } => {
                "give the directory of regions, such as /dev/shm or the trainer's region_dir".into()
            }
            Error::File(FileError::NoShards { .. }) => {
                "give a safetensors file, or a directory with safetensors files".into()
            }
            Error::File(FileError::IsDelta { .. }) => {
                "give a safetensors file or a directory of shards; two arguments may be swapped".into()
            }
            Error::Listen { source, .. } if source.kind() == io::ErrorKind::AddrNotAvailable => {
                "this host does not have that address: give one of its own with --bind, or 0.0.0.0 with --advertise-host".into()
            }
            Error::Listen { .. } => {
                "free a port, widen the range with --ports, or choose another address with --bind".into()
            }
            Error::Busy { .. } => "wait for the other run to end, or choose another output".into(),
            Error::Usage(_) => "see --help".into(),
            Error::Module { advice, .. } => advice.clone(),
            Error::Nixl(_) => "see docs/nixl.md; `windlass doctor` tests the library".into(),
            Error::Tls(_) => CERTIFICATES.into(),
            Error::Cancelled => {
                "no partial output is left; run the same command again when ready".into()
            }
            Error::Unfinished { base, journal } => format!(
                "run `windlass delta apply {} DELTA --in-place` again to finish it; if you restored the checkpoint since, remove {}",
                base.display(),
                journal.display()
            ),
            Error::PartlyUpdated { source, .. } => {
                let again = "run the same command again to finish";
                if let Error::Io { .. } = **source {
                    format!("{}; then {again}", source.advice())
                } else {
                    again.into()
                }
            }
            Error::LayoutDiffers { .. } => {
                "compare versions of one model that have the same tensors and dtypes".into()
            }
            Error::WrongBase { .. } => {
                "nothing was changed; apply the delta to its base, which `windlass inspect` names"
                    .into()
            }
            Error::Digest { .. } => {
                "this is another version, or it is corrupt; fetch it again".into()
            }
            Error::Content { .. }
            | Error::File(_)
            | Error::NotShown { .. }
            | Error::NotReached { .. }
            | Error::Seal(_)
            | Error::Plane { .. }
            | Error::Region(_)
            | Error::Serve(_)
            | Error::Receiver(_)
            | Error::Local(_)
            | Error::Child { .. }
            | Error::Engines { .. }
            | Error::Deadline
            | Error::Bug(_) => self.kind().advice().into(),
        }
    }

    /// The message with its causes, without repetitions.
    pub fn chain(&self) -> String {
        chain(self)
    }
}

/// An error's message with its causes, without repetitions.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(c) = cause {
        let said = c.to_string();
        if !text.contains(&said) {
            let _ = write!(text, ": {said}");
        }
        cause = c.source();
    }
    text
}

/// A text with its advice on a line below, if there is any.
pub(crate) fn advised(text: &str, advice: &str) -> String {
    if advice.is_empty() { text.to_owned() } else { format!("{text}\n  {advice}") }
}

fn io_advice(source: &io::Error, path: &Path) -> String {
    match source.kind() {
        io::ErrorKind::NotFound => {
            "check that the file or its folder exists; relative paths start at the current directory".into()
        }
        io::ErrorKind::PermissionDenied => "check the owner and the mode of the file and its folder".into(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("free some space where {} is, or write elsewhere with -o", path.display())
        }
        io::ErrorKind::FileTooLarge => {
            format!("raise the limit on the size of files (ulimit -f) for {}, or write less", path.display())
        }
        _ => io_kind(source).advice().into(),
    }
}

/// The version that an agent shows.
fn shown(newest: Option<windlass_core::identity::Version>) -> String {
    newest.map_or_else(|| "no version yet".into(), |v| format!("version {v} at most"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One advice per kind was wrong for most failures: "check the token" for a directory that is in use, "restart
    /// the peer" for a wrong port, "please report this" for an engine that was started without a flag.
    #[test]
    fn advice_is_about_the_failure_and_not_about_its_kind() {
        for (error, advice) in [
            (Error::Busy { path: "out".into() }, "wait for the other run to end, or choose another output"),
            (Error::Deadline, ""),
            (Error::Region(RegionError::Live { dir: "a".into(), owners: vec![7] }), ""),
            (Error::Bug("odd".into()), "please report this with the full message"),
        ] {
            assert_eq!(error.advice(), advice, "{error}");
        }
        assert_eq!(advised("what", ""), "what");
        assert_eq!(advised("what", "do"), "what\n  do");
    }
}
