//! What can go wrong with a region.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use windlass_core::error::Kind;
use windlass_core::identity::Version;
use windlass_core::manifest::ManifestError;

use super::owner::Owner;
use super::space::Shortage;
use crate::file::io_kind;
use crate::flip::{Blocker, LeaseKind, Said};
use crate::private::PrivateError;
use crate::stop::Stopped;

/// What an attempt was doing when it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Waiting for rank 0 to open one.
    Lead,
    /// Taking back the slot that it will write.
    Guard,
    /// Waiting for all ranks to join.
    Join,
    Write,
    /// Waiting for all ranks to be done and for the commit.
    Commit,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Lead => "waiting for rank 0 to open it",
            Stage::Guard => "taking back its slot",
            Stage::Join => "waiting for all ranks to join",
            Stage::Write => "writing",
            Stage::Commit => "waiting for all ranks to be done",
        })
    }
}

/// A process that an attempt waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which rank; `None` for readers and the agent.
    pub rank: Option<u16>,
    /// Its process; 0 if it never registered.
    pub pid: u32,
    pub alive: bool,
    /// What it has not done.
    pub what: String,
}

impl Missing {
    pub(crate) fn rank(rank: u16, said: Said, owner: u64) -> Missing {
        let what = match said {
            Said::Absent => "has not joined",
            Said::Joined => "has joined and is not done",
            Said::Done => "is done",
        };
        let what = if owner == 0 { "is not attached" } else { what };
        Missing {
            rank: Some(rank),
            pid: Owner(owner).pid(),
            alive: super::owner::alive(owner),
            what: what.into(),
        }
    }

    pub(crate) fn blocker(blocker: &Blocker) -> Missing {
        let (owner, what) = match blocker {
            Blocker::Lease { owner, kind, id } => {
                let kind = match kind {
                    LeaseKind::Stream => "sends from",
                    LeaseKind::Map => "reads",
                    LeaseKind::Seal => "compares with",
                };
                (*owner, format!("{kind} the slot under a lease on id {id}"))
            }
            Blocker::Agent { owner, id } => (*owner, format!("is the agent and has not sealed id {id}")),
        };
        Missing { rank: None, pid: Owner(owner).pid(), alive: super::owner::alive(owner), what }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rank) = self.rank {
            write!(f, "rank {rank} ")?;
        }
        if self.pid != 0 {
            write!(f, "(pid {}, {}) ", self.pid, if self.alive { "alive" } else { "dead" })?;
        }
        f.write_str(&self.what)
    }
}

fn list(missing: &[Missing]) -> String {
    if missing.is_empty() {
        return "nobody in particular".into();
    }
    missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn waited(missing: &[Missing]) -> String {
    if missing.is_empty() { String::new() } else { format!(" ({})", list(missing)) }
}

fn pids(pids: &[u32]) -> String {
    match pids {
        [] => "a process that has not registered".into(),
        [pid] => format!("pid {pid}"),
        many => format!("pids {}", many.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// A region that cannot be made, opened or used as asked.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The directory is not this user's alone, or cannot be made or opened.
    #[error(transparent)]
    Private(#[from] PrivateError),
    #[error("region {}: {shortage}", dir.display())]
    Space { dir: PathBuf, shortage: Shortage },
    #[error(
        "the filesystem of {} cannot reserve space (fallocate): set region_dir to a tmpfs, ext4 or xfs directory",
        dir.display()
    )]
    NoReserve { dir: PathBuf },
    #[error(
        "region {} is in use by {}: stop it (if it is an agent, the new publisher starts its own), or choose another directory or model id",
        dir.display(), pids(owners)
    )]
    Live { dir: PathBuf, owners: Vec<u32> },
    #[error(
        "there are more than {most} directories below {}: name one that is nearer to the regions",
        dir.display()
    )]
    TooWide {
        dir: PathBuf,
        /// The most that are looked into.
        most: usize,
    },
    #[error("there is no region at {}: start its publisher or receiver first", dir.display())]
    Absent { dir: PathBuf },
    #[error("{} exists and is not a region: choose another directory or remove it", dir.display())]
    Foreign { dir: PathBuf },
    #[error("region {} is damaged: {reason}: remove it and publish again", dir.display())]
    Damaged { dir: PathBuf, reason: String },
    #[error("region {} has format {found} and this build reads format {supported}: use the same release", dir.display())]
    Format { dir: PathBuf, found: u64, supported: u64 },
    #[error("region {}: {source}", dir.display())]
    Manifest { dir: PathBuf, source: ManifestError },
    /// The memory is held by a process that is gone.
    #[error(
        "the memory of region {} was held by pid {pid}, which is gone: publish again (with room in region_dir, regions outlive their creator)",
        dir.display()
    )]
    HolderGone { dir: PathBuf, pid: u32 },
    #[error(
        "region {} belongs to another pid namespace, where this process cannot tell who is alive: run both in one (docker --pid=host or container:..., Kubernetes shareProcessNamespace)",
        dir.display()
    )]
    OtherNamespace { dir: PathBuf },
    #[error("region {}: {reason}", dir.display())]
    Spec { dir: PathBuf, reason: String },
    #[error("a region is passed as {expected} descriptors and {found} came")]
    Descriptors { expected: usize, found: usize },
    #[error("rank {rank} is beyond the {ranks} ranks of region {}", dir.display())]
    NoSuchRank { dir: PathBuf, rank: u16, ranks: u16 },
    #[error("rank {rank} of region {} is taken by pid {pid}, which is alive: end it first", dir.display())]
    RankTaken { dir: PathBuf, rank: u16, pid: u32 },
    #[error("region {} has an agent, pid {pid}, which is alive: end it first", dir.display())]
    AgentTaken { dir: PathBuf, pid: u32 },
    #[error("version {version} is not newer than {current}, which is published: versions only grow")]
    VersionOrder { version: Version, current: Version },
    #[error("rank {rank} writes version {version}, but rank 0 opened attempt {attempt} for version {opened}")]
    VersionMismatch { rank: u16, version: Version, attempt: u64, opened: Version },
    /// An attempt was given up because a deadline passed or the caller cancelled it.
    #[error(
        "attempt {attempt} to write version {version} was given up by rank {rank} while {stage}: {stopped}; waiting for: {}. The version before it is still served",
        list(missing)
    )]
    Stopped {
        /// The attempt; 0 if none was open.
        attempt: u64,
        version: Version,
        rank: u16,
        stage: Stage,
        missing: Vec<Missing>,
        #[source]
        stopped: Stopped,
    },
    #[error(
        "attempt {attempt} to write version {version} failed while {stage}: {lost}. Restart that rank and write the version again; the one before it is still served"
    )]
    PeerLost { attempt: u64, version: Version, stage: Stage, lost: Missing },
    #[error(
        "attempt {attempt} to write version {version} was given up by another rank while rank {rank} was {stage}{}; nothing of it is served. Begin again",
        waited(missing)
    )]
    Aborted {
        attempt: u64,
        version: Version,
        rank: u16,
        stage: Stage,
        /// Who had not joined or was not done, if that was what it waited for.
        missing: Vec<Missing>,
    },
    #[error("bytes {offset}..{end} are beyond the {len} bytes of the image")]
    Beyond { offset: u64, end: u64, len: u64 },
    #[error("bytes {offset}..{end} do not belong to the part of the image that this region holds")]
    OutsidePart { offset: u64, end: u64 },
    #[error("no slot holds id {id} any more, or it is being taken back: ask for the current version")]
    LeaseGone { id: u64 },
    #[error("all {max} leases of region {} are held by living processes: end some readers", dir.display())]
    LeasesFull { dir: PathBuf, max: usize },
    /// A lease was taken away because it outlived its deadline, so what was read under it may be mixed.
    #[error(
        "the lease on id {id} ended at its deadline, {after:?} after it was given: throw away what was read, and read the current version or ask for a later deadline"
    )]
    LeaseBroken {
        id: u64,
        /// How long it was given for.
        after: Duration,
    },
    #[error(
        "id {id} is not sealed: the agent was silent for too long (stopped, or on a machine that slept), and writers went on without it. It seals what comes next"
    )]
    SealBroken {
        /// The id that was being sealed or compared with.
        id: u64,
    },
}

impl RegionError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            RegionError::Io { source, .. } => io_kind(source),
            RegionError::Private(e) => e.kind(),
            RegionError::Space { .. } | RegionError::LeasesFull { .. } => Kind::Exhausted,
            RegionError::NoReserve { .. }
            | RegionError::OtherNamespace { .. }
            | RegionError::Format { .. } => Kind::Unsupported,
            RegionError::Absent { .. } => Kind::NotFound,
            RegionError::Damaged { .. } => Kind::Corrupt,
            RegionError::Manifest { source, .. } => source.kind(),
            RegionError::HolderGone { .. } | RegionError::PeerLost { .. } => Kind::PeerLost,
            RegionError::Live { .. }
            | RegionError::TooWide { .. }
            | RegionError::Foreign { .. }
            | RegionError::Spec { .. }
            | RegionError::Descriptors { .. }
            | RegionError::NoSuchRank { .. }
            | RegionError::RankTaken { .. }
            | RegionError::AgentTaken { .. }
            | RegionError::VersionMismatch { .. }
            | RegionError::Beyond { .. }
            | RegionError::OutsidePart { .. } => Kind::Invalid,
            RegionError::VersionOrder { .. }
            | RegionError::Aborted { .. }
            | RegionError::LeaseGone { .. }
            | RegionError::LeaseBroken { .. }
            | RegionError::SealBroken { .. } => Kind::Stale,
            RegionError::Stopped { stopped, .. } => stopped.kind(),
        }
    }
}
