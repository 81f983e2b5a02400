//! `windlass gc`: removes what dead processes left, at any depth below a directory.
//!
//! Owns: what is said about it, which directories are refused, and the directories of killed demos. Which region or image
//! is dead is decided by [`windlass_data::region::sweep`] alone, by its lock. Must not: follow links, enter other file
//! systems, or remove what it does not know.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde_json::json;
use windlass_data::region::{self, Removed, Sweep};

use crate::demo;
use crate::error::Error;
use crate::session::{Session, bytes};

/// Directories that are the system's, or everybody's: whoever names one mistyped.
const TOO_WIDE: [&str; 17] = [
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/mnt", "/opt", "/proc", "/root",
    "/sbin", "/srv", "/sys", "/usr", "/var",
];

/// The checked arguments of `gc`.
#[derive(Debug)]
pub struct Gc {
    /// Where regions and images are kept.
    pub dir: PathBuf,
    /// Say what would go, and leave it.
    pub dry_run: bool,
}

impl Gc {
    /// Removes regions and images that no living process has open.
    pub fn run(&self, session: &Session) -> Result<(), Error> {
        // The library takes a directory that is not there for an empty one; somebody who names it mistyped.
        let dir = fs::canonicalize(&self.dir).map_err(Error::io("read", &self.dir))?;
        if TOO_WIDE.iter().any(|wide| dir == Path::new(wide)) {
            return Err(Error::TooWide { dir });
        }
        let abandoned = demo::abandoned(&self.dir)?;
        let mut removed = region::sweep(&self.dir, Sweep { dry_run: self.dry_run, ..Sweep::DEEP })?;
        for home in abandoned {
            removed.extend(clear(&home, self.dry_run)?);
        }
        let freed: u64 = removed.iter().map(|r| r.bytes).sum();
        let object = json!({
            "dir": self.dir,
            "dry_run": self.dry_run,
            "freed_bytes": freed,
            "removed": removed.iter().map(|r| json!({
                "dir": r.dir, "model_id": r.model_id, "bytes": r.bytes,
            })).collect::<Vec<_>>(),
        });
        session.finish(object, |out| {
            let (each, be) = if self.dry_run { ("would remove", "would be ") } else { ("removed", "") };
            for r in &removed {
                let model = r.model_id.as_ref().map_or("(unfinished)", |m| m.as_str());
                let _ = writeln!(out, "{each} {}  {model}  {}", r.dir.display(), bytes(r.bytes));
            }
            let _ = match removed.len() {
                0 => writeln!(out, "nothing to remove in {}", self.dir.display()),
                n => writeln!(out, "{n} {be}removed, {} {be}freed", bytes(freed)),
            };
        })
    }
}

/// Removes the logs and the token of a killed demo, whose regions and images are gone, and its directories if nothing else
/// is in them.
fn clear(home: &Path, dry_run: bool) -> Result<Option<Removed>, Error> {
    let mut freed = None;
    for entry in fs::read_dir(home).map_err(Error::io("read", home))?.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            if !dry_run {
                // What is not empty is still in use, or not ours.
                let _ = fs::remove_dir(&path);
            }
        } else if path.extension().is_some_and(|e| e == "log") || entry.file_name() == demo::TOKEN {
            let taken = entry.metadata().map_or(0, |m| m.blocks() * 512);
            if dry_run || fs::remove_file(&path).is_ok() {
                *freed.get_or_insert(0) += taken;
            }
        }
    }
    if !dry_run {
        let _ = fs::remove_dir(home);
    }
    Ok(freed.map(|bytes| Removed { dir: home.to_owned(), model_id: None, bytes }))
}
