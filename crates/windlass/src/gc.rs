//! `windlass gc`: removes what dead processes left.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::json;
use windlass_data::region;

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
        std::fs::read_dir(&self.dir).map_err(Error::io("read", &self.dir))?;
        let removed = region::gc(&self.dir)?;
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
