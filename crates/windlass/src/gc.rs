//! `windlass gc`: removes what dead processes left.
//!
//! Owns: what is said about it, and the directories of killed demos. Which region or image is dead is decided by
//! [`windlass_data::region::gc`] alone, by its lock.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use windlass_data::region::{self, Removed};

use crate::demo;
use crate::error::Error;
use crate::session::{Session, bytes};

/// The checked arguments of `gc`.
#[derive(Debug)]
pub struct Gc {
    /// Where regions and images are kept.
    pub dir: PathBuf,
}

impl Gc {
    /// Removes regions and images that no living process has open.
    pub fn run(&self, session: &Session) -> Result<(), Error> {
        // The library takes a directory that is not there for an empty one; somebody who names it mistyped.
        let abandoned = demo::abandoned(&self.dir)?;
        let mut removed = region::gc(&self.dir)?;
        for home in abandoned {
            clear(&home, &mut removed)?;
        }
        let freed: u64 = removed.iter().map(|r| r.bytes).sum();
        let object = json!({
            "dir": self.dir,
            "freed_bytes": freed,
            "removed": removed.iter().map(|r| json!({
                "dir": r.dir, "model_id": r.model_id, "bytes": r.bytes,
            })).collect::<Vec<_>>(),
        });
        session.finish(object, |out| {
            for r in &removed {
                let model = r.model_id.as_ref().map_or("(unfinished)", |m| m.as_str());
                let _ = writeln!(out, "removed {}  {model}  {}", r.dir.display(), bytes(r.bytes));
            }
            let _ = match removed.len() {
                0 => writeln!(out, "nothing to remove in {}", self.dir.display()),
                n => writeln!(out, "{n} removed, {} freed", bytes(freed)),
            };
        })
    }
}

/// Removes the regions and images of a killed demo, then its logs, its token and its directories if nothing else is in
/// them.
fn clear(home: &Path, removed: &mut Vec<Removed>) -> Result<(), Error> {
    removed.extend(region::gc(home)?);
    for entry in fs::read_dir(home).map_err(Error::io("read", home))?.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            removed.extend(region::gc(&path)?);
            // What is not empty is still in use, or not ours.
            let _ = fs::remove_dir(&path);
        } else if path.extension().is_some_and(|e| e == "log") || entry.file_name() == demo::TOKEN {
            let _ = fs::remove_file(&path);
        }
    }
    let _ = fs::remove_dir(home);
    Ok(())
}
