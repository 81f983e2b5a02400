//! The deltas that lead to an image, as a reader of the image finds them.
//!
//! Owns: [`Trail`], read only. A [`super::History`] belongs to its writer and removes what it does not know; a
//! worker of an engine only looks. It opens every file of the way before it uses the first, so that one that is thrown
//! away meanwhile is missed at once or not at all.
//!
//! A trail is believed link by link: each leads to exactly the version *and digest* that the next begins at, and the
//! last to those of the image. There is no trail from another incarnation, from a version that is not on it, or to an
//! older version; the reason is in the error, and the remedy is to load the whole image.
//!
//! | | must hold | test |
//! |---|---|---|
//! | TRAIL-1 | A trail leads from the base asked for to the image, by version and digest, or there is none. | `a_trail_leads_from_the_base_to_the_image_or_says_why_not` |

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use windlass_core::delta::{Delta, DeltaError};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;

use super::chain::open_file;
use super::reader::{self, Fault};
use crate::shm::{Access, Mapping};

/// The most links that are followed; more than any history keeps.
const MAX_LINKS: usize = 1 << 16;

/// Why nothing leads from a version to an image.
#[derive(Debug, thiserror::Error)]
pub enum TrailError {
    #[error("no deltas lead from version {base} to {target}: {why}; load the whole image")]
    None { base: Version, target: Box<Identity>, why: String },
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// A file is not the delta that it should be.
    #[error("the delta {} cannot be used; load the whole image", path.display())]
    Broken { path: PathBuf, source: DeltaError },
}

impl TrailError {
    /// The kind of failure (see [`windlass_core::error`]). Whatever it is, the whole image can be loaded instead.
    pub fn kind(&self) -> Kind {
        match self {
            TrailError::None { .. } => Kind::Stale,
            TrailError::Io { source, .. } => crate::file::io_kind(source),
            TrailError::Broken { source, .. } => source.kind(),
        }
    }
}

/// Deltas that lead from one version to another, in order.
#[derive(Debug)]
pub struct Trail {
    links: Vec<(PathBuf, Mapping)>,
}

impl Trail {
    /// The deltas in `dir`, the `deltas` of an image's directory, that lead from `base` to the image's version.
    pub fn find(
        dir: &Path,
        manifest: &Manifest,
        base: (Incarnation, Version),
        image: (&Identity, StateDigest),
    ) -> Result<Trail, TrailError> {
        let (target, mut digest) = image;
        let none = |why: String| TrailError::None { base: base.1, target: Box::new(target.clone()), why };
        if base.0 != target.incarnation {
            let why = format!("it is of incarnation {}, another life of the publisher", base.0);
            return Err(none(why));
        }
        if base.1 > target.version {
            return Err(none("it is newer than the image".into()));
        }
        let dir = dir.join(format!("{:016x}", target.incarnation.0));
        let mut at = target.version;
        let known = if at == base.1 { Vec::new() } else { list(&dir)? };
        if at != base.1 && known.is_empty() {
            let why = "the receiver kept none; the version came as a whole, or it is not told to keep any";
            return Err(none(why.into()));
        }
        let mut links = Vec::new();
        while at != base.1 {
            // The longest step that does not begin before the base.
            let step = known.iter().filter(|(b, t)| *t == at && *b >= base.1 && b < t).min();
            let Some(&(from, to)) = step.filter(|_| links.len() < MAX_LINKS) else {
                let ends = known.iter().map(|(b, t)| format!("{b}-{t}")).collect::<Vec<_>>().join(", ");
                return Err(none(format!("those that were kept are {ends}")));
            };
            let path = dir.join(super::file_name(from, to));
            let (mapping, header) = open(&path)?;
            header.check(manifest).map_err(|source| TrailError::Broken { path: path.clone(), source })?;
            let begins = Identity { version: from, ..target.clone() };
            let leads = Identity { version: to, ..target.clone() };
            if (header.base_identity(), header.target_identity()) != (begins, leads)
                || header.target_digest != digest
            {
                return Err(none(format!("{} leads to another state", path.display())));
            }
            (at, digest) = (from, header.base_digest);
            links.push((path, mapping));
        }
        links.reverse();
        Ok(Trail { links })
    }

    /// The deltas, the oldest first, all of them checked, by so many threads.
    pub fn deltas(&self, threads: usize) -> Result<Vec<Delta<'_>>, TrailError> {
        self.links
            .iter()
            .map(|(path, m)| {
                crate::container::parse(m.bytes(0..m.len()), threads)
                    .map_err(|source| TrailError::Broken { path: path.clone(), source })
            })
            .collect()
    }

    /// How many deltas it is.
    pub fn len(&self) -> usize {
        self.links.len()
    }

    /// Whether the base is the image's own version.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }
}

/// The versions that files in `dir` are named for. None if there is no such directory.
fn list(dir: &Path) -> Result<Vec<(Version, Version)>, TrailError> {
    let io = |source| TrailError::Io { action: "read", path: dir.to_owned(), source };
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(io)?,
    };
    let mut known = Vec::new();
    for entry in entries {
        let name = entry.map_err(io)?.file_name();
        let versions = name.to_str().and_then(|n| n.strip_suffix(".wdelta")?.split_once('-'));
        if let Some((Ok(base), Ok(target))) = versions.map(|(b, t)| (b.parse(), t.parse())) {
            known.push((base, target));
        }
    }
    known.sort_unstable();
    Ok(known)
}

fn open(path: &Path) -> Result<(Mapping, windlass_core::delta::DeltaHeader), TrailError> {
    let io = |source| TrailError::Io { action: "open", path: path.to_owned(), source };
    let file = open_file(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    let (header, _) = reader::ends(&file, len).map_err(|fault| match fault {
        Fault::Io(source) => io(source),
        Fault::Delta(source) => TrailError::Broken { path: path.to_owned(), source },
    })?;
    Ok((Mapping::map(&file, len, Access::Read).map_err(io)?, header))
}
