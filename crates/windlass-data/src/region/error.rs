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
    /// Writing.
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

/// Somebody that an attempt waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which rank; `None` for readers and the agent.
    pub rank: Option<u16>,
    /// Its process; 0 if it never registered.
    pub pid: u32,
    /// Whether that lives.
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
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The directory is not this user's alone, or cannot be made or opened.
    #[error(transparent)]
    Private(#[from] PrivateError),
    /// There is not enough room, and nothing was written.
    #[error("region {}: {shortage}", dir.display())]
    Space {
        /// The region.
        dir: PathBuf,
        /// What lacks.
        shortage: Shortage,
    },
    /// The filesystem cannot reserve space.
    #[error(
        "the filesystem of {} cannot reserve space (fallocate): set region_dir to a tmpfs, ext4 or xfs directory",
        dir.display()
    )]
    NoReserve {
        /// The region.
        dir: PathBuf,
    },
    /// A region that others use cannot be replaced.
    #[error(
        "region {} is in use by {}: stop it (if it is an agent, the new publisher starts its own), or choose another directory or model id",
        dir.display(), pids(owners)
    )]
    Live {
        /// The region.
        dir: PathBuf,
        /// Who uses it.
        owners: Vec<u32>,
    },
    /// More directories than anybody looks into.
    #[error(
        "there are more than {most} directories below {}: name one that is nearer to the regions",
        dir.display()
    )]
    TooWide {
        /// Where regions were looked for.
        dir: PathBuf,
        /// The most that are looked into.
        most: usize,
    },
    /// There is no region there.
    #[error("there is no region at {}: start its publisher or receiver first", dir.display())]
    Absent {
        /// Where it should be.
        dir: PathBuf,
    },
    /// The directory holds something else, which is left alone.
    #[error("{} exists and is not a region: choose another directory or remove it", dir.display())]
    Foreign {
        /// The directory.
        dir: PathBuf,
    },
    /// The files contradict themselves or each other.
    #[error("region {} is damaged: {reason}: remove it and publish again", dir.display())]
    Damaged {
        /// The region.
        dir: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The header was written by another Windlass.
    #[error("region {} has format {found} and this build reads format {supported}: use the same release", dir.display())]
    Format {
        /// The region.
        dir: PathBuf,
        /// Its format.
        found: u64,
        /// Ours.
        supported: u64,
    },
    /// The manifest in the region is malformed.
    #[error("region {}: {source}", dir.display())]
    Manifest {
        /// The region.
        dir: PathBuf,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// The memory is held by a process that is gone.
    #[error(
        "the memory of region {} was held by pid {pid}, which is gone: publish again (with room in region_dir, regions outlive their creator)",
        dir.display()
    )]
    HolderGone {
        /// The region.
        dir: PathBuf,
        /// The creator.
        pid: u32,
    },
    /// Process ids mean something else here.
    #[error(
        "region {} belongs to another pid namespace, where this process cannot tell who is alive: run both in one (docker --pid=host or container:..., Kubernetes shareProcessNamespace)",
        dir.display()
    )]
    OtherNamespace {
        /// The region.
        dir: PathBuf,
    },
    /// The specification contradicts itself.
    #[error("region {}: {reason}", dir.display())]
    Spec {
        /// The region.
        dir: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The wrong descriptors were passed.
    #[error("a region is passed as {expected} descriptors and {found} came")]
    Descriptors {
        /// How many there must be.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// There is no such rank.
    #[error("rank {rank} is beyond the {ranks} ranks of region {}", dir.display())]
    NoSuchRank {
        /// The region.
        dir: PathBuf,
        /// The rank asked for.
        rank: u16,
        /// How many there are.
        ranks: u16,
    },
    /// A living process is this rank already.
    #[error("rank {rank} of region {} is taken by pid {pid}, which is alive: end it first", dir.display())]
    RankTaken {
        /// The region.
        dir: PathBuf,
        /// The rank.
        rank: u16,
        /// Its process.
        pid: u32,
    },
    /// A living agent is attached already.
    #[error("region {} has an agent, pid {pid}, which is alive: end it first", dir.display())]
    AgentTaken {
        /// The region.
        dir: PathBuf,
        /// The agent.
        pid: u32,
    },
    /// The version is not newer than the one before.
    #[error("version {version} is not newer than {current}, which is published: versions only grow")]
    VersionOrder {
        /// The version to write.
        version: Version,
        /// The active one.
        current: Version,
    },
    /// Ranks disagree about what they write.
    #[error("rank {rank} writes version {version}, but rank 0 opened attempt {attempt} for version {opened}")]
    VersionMismatch {
        /// This rank.
        rank: u16,
        /// What it wants to write.
        version: Version,
        /// The attempt.
        attempt: u64,
        /// What the lead wants.
        opened: Version,
    },
    /// An attempt was given up because a deadline passed or somebody called it off.
    #[error(
        "attempt {attempt} to write version {version} was given up by rank {rank} while {stage}: {stopped}; waiting for: {}. The version before it is still served",
        list(missing)
    )]
    Stopped {
        /// The attempt; 0 if none was open.
        attempt: u64,
        /// What it was to write.
        version: Version,
        /// Who gave it up.
        rank: u16,
        /// When.
        stage: Stage,
        /// Who was missing.
        missing: Vec<Missing>,
        /// Why.
        #[source]
        stopped: Stopped,
    },
    /// A rank died in the middle of an attempt.
    #[error(
        "attempt {attempt} to write version {version} failed while {stage}: {lost}. Restart that rank and write the version again; the one before it is still served"
    )]
    PeerLost {
        /// The attempt.
        attempt: u64,
        /// What it was to write.
        version: Version,
        /// When.
        stage: Stage,
        /// Who died.
        lost: Missing,
    },
    /// Somebody else gave the attempt up.
    #[error(
        "attempt {attempt} to write version {version} was given up by another rank while rank {rank} was {stage}{}; nothing of it is served. Begin again",
        waited(missing)
    )]
    Aborted {
        /// The attempt.
        attempt: u64,
        /// What it was to write.
        version: Version,
        /// This rank.
        rank: u16,
        /// When.
        stage: Stage,
        /// Who had not joined, if that was what it waited for.
        missing: Vec<Missing>,
    },
    /// Bytes beyond the image.
    #[error("bytes {offset}..{end} are beyond the {len} bytes of the image")]
    Beyond {
        /// First byte.
        offset: u64,
        /// Byte after the last.
        end: u64,
        /// Length of the data area.
        len: u64,
    },
    /// Bytes that this region does not hold.
    #[error("bytes {offset}..{end} do not belong to the part of the image that this region holds")]
    OutsidePart {
        /// First byte.
        offset: u64,
        /// Byte after the last.
        end: u64,
    },
    /// The leased contents are gone or about to go.
    #[error("no slot holds id {id} any more, or it is being taken back: ask for the current version")]
    LeaseGone {
        /// The id asked for.
        id: u64,
    },
    /// All leases are held by living processes.
    #[error("all {max} leases of region {} are held by living processes: end some readers", dir.display())]
    LeasesFull {
        /// The region.
        dir: PathBuf,
        /// How many there are.
        max: usize,
    },
    /// A lease was taken away because it outlived its deadline, so what was read under it may be mixed.
    #[error(
        "the lease on id {id} ended at its deadline, {after:?} after it was given: throw away what was read, and read the current version or ask for a later deadline"
    )]
    LeaseBroken {
        /// The id.
        id: u64,
        /// How long it was given for.
        after: Duration,
    },
    /// Writers did not wait for the agent.
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
