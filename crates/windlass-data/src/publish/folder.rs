//! The region's `parts/`: names, what is there, garbage.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use windlass_core::delta_mode::{DeltaModeError, MAX_ROSTER, Roster};
use windlass_core::identity::Version;

use crate::seal::draft::{self, Draft, is_draft, remove_if_there};

/// A name in the directory that says something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The delta of a rank to a version.
    Delta { version: Version, rank: u16 },
    /// The blocks of a rank.
    Roster { rank: u16 },
    /// The agent found that what was handed out up to this version contradicts itself.
    Doubt { version: Version },
}

impl Part {
    /// Its name.
    pub fn name(self) -> String {
        match self {
            Part::Delta { version, rank } => format!("{version:020}-{rank:05}.wdelta"),
            Part::Roster { rank } => format!("{rank:05}.roster"),
            Part::Doubt { version } => format!("{version:020}.doubt"),
        }
    }

    /// What a name says; `None` for all that [`Part::name`] would not give.
    pub fn parse(name: &str) -> Option<Part> {
        let (stem, kind) = name.rsplit_once('.')?;
        let part = match (kind, stem.split_once('-')) {
            ("wdelta", Some((version, rank))) => {
                Part::Delta { version: version.parse().ok()?, rank: rank.parse().ok()? }
            }
            ("roster", None) => Part::Roster { rank: stem.parse().ok()? },
            ("doubt", None) => Part::Doubt { version: stem.parse().ok()? },
            _ => return None,
        };
        (part.name() == name).then_some(part)
    }

    /// The part that a draft is for.
    fn of_draft(name: &OsStr) -> Option<Part> {
        Part::parse(name.to_str()?.strip_prefix('.')?.strip_suffix(".tmp")?)
    }
}

/// The directory.
#[derive(Clone, Debug)]
pub struct Folder {
    dir: PathBuf,
}

impl Folder {
    /// The `parts/` of a region, which need not be there.
    pub fn new(dir: PathBuf) -> Folder {
        Folder { dir }
    }

    /// Makes it.
    pub fn make(&self) -> io::Result<()> {
        draft::make_dir(&self.dir)
    }

    /// Where something is.
    pub fn path(&self, part: Part) -> PathBuf {
        self.dir.join(part.name())
    }

    /// Where a rank would put the file that it keeps ready; there is only ever its draft.
    pub(super) fn spare(&self, rank: u16) -> PathBuf {
        self.dir.join(format!("{rank:05}.spare"))
    }

    /// Whether something is there.
    pub fn has(&self, part: Part) -> bool {
        fs::symlink_metadata(self.path(part)).is_ok_and(|m| m.is_file())
    }

    /// Everything that is there, in no order. Nothing if the directory is not there.
    pub fn list(&self) -> Vec<Part> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|e| Part::parse(e.file_name().to_str()?)).collect()
    }

    /// The versions above `after` to which every one of `ranks` has brought its delta, ascending.
    pub fn complete(&self, ranks: u16, after: Version) -> Vec<Version> {
        let mut found: Vec<(Version, u16)> = self
            .list()
            .into_iter()
            .filter_map(|part| match part {
                Part::Delta { version, rank } if version > after && rank < ranks => Some((version, rank)),
                Part::Delta { .. } | Part::Roster { .. } | Part::Doubt { .. } => None,
            })
            .collect();
        found.sort_unstable();
        let versions = found.chunk_by(|a, b| a.0 == b.0);
        versions.filter(|c| c.len() == usize::from(ranks)).filter_map(|c| Some(c.first()?.0)).collect()
    }

    /// The newest version in doubt.
    pub fn doubt(&self) -> Option<Version> {
        let doubted = |part| match part {
            Part::Doubt { version } => Some(version),
            Part::Delta { .. } | Part::Roster { .. } => None,
        };
        self.list().into_iter().filter_map(doubted).max()
    }

    /// Why a version is in doubt.
    pub fn why(&self, version: Version) -> String {
        let mut text = Vec::new();
        let file = open(&self.path(Part::Doubt { version }));
        let _ = file.and_then(|f| f.take(1024).read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Puts a version in doubt.
    pub fn put_doubt(&self, version: Version, why: &str) -> io::Result<()> {
        self.make()?;
        self.put(Part::Doubt { version }, why.as_bytes())
    }

    /// Writes a small file, whole or not at all.
    pub(super) fn put(&self, part: Part, bytes: &[u8]) -> io::Result<()> {
        Draft::write(&self.path(part), bytes)
    }

    /// A rank's roster; `None` if it has not written one.
    pub fn roster(&self, rank: u16) -> io::Result<Option<Result<Roster, DeltaModeError>>> {
        let file = match open(&self.path(Part::Roster { rank })) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let mut bytes = Vec::new();
        // One byte more than the longest, by which a longer one is known.
        file.take(MAX_ROSTER as u64 + 1).read_to_end(&mut bytes)?;
        Ok(Some(Roster::parse(&bytes)))
    }

    /// Removes what `which` says, given what a file is, or is the draft of, and whether it is a draft.
    pub fn remove(&self, which: impl Fn(Part, bool) -> bool) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let drafted = is_draft(&name);
            let part = if drafted { Part::of_draft(&name) } else { name.to_str().and_then(Part::parse) };
            if part.is_some_and(|part| which(part, drafted))
                && let Err(error) = remove_if_there(&entry.path())
            {
                tracing::warn!(path = %entry.path().display(), %error, "cannot remove what is no longer needed");
            }
        }
    }
}

/// Opens a file of the directory; not through a link, and without waiting for a pipe.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
}
