//! Deltas that receivers put into files for the engines of their host: where they are, and whether a receiver was killed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// What the directory of a shelf is called, in the directory of engines beside the image.
pub const INCOMING: &str = "incoming";

/// Whether a directory is where receivers put deltas for engines: `<model>.engines/incoming`.
pub(crate) fn is_incoming(dir: &Path) -> bool {
    let beside = dir.parent().and_then(Path::extension);
    dir.file_name().is_some_and(|n| n == INCOMING) && beside.is_some_and(|e| e == "engines")
}

/// What is done with abandoned files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Discard {
    Nothing,
    Files,
}

/// The bytes of deltas that a receiver left when it was killed; `None` if there are none, or a process has files of it open. A
/// living receiver has locked every file that it made.
pub(crate) fn abandoned(dir: &Path, discard: Discard) -> io::Result<Option<u64>> {
    let mut bytes = 0;
    let mut locked = Vec::new();
    for entry in fs::read_dir(dir)? {
        let (path, about) = entry.and_then(|e| Ok((e.path(), e.metadata()?)))?;
        if !about.is_file() || path.extension().is_none_or(|e| e != "delta") {
            return Ok(None);
        }
        let file = File::open(&path)?;
        if file.try_lock().is_err() {
            return Ok(None);
        }
        bytes += about.blocks() * 512;
        locked.push((path, file));
    }
    if discard == Discard::Files {
        for (path, _) in &locked {
            fs::remove_file(path)?;
        }
        // One that is not empty is in use again. The directory of engines may hold what they need.
        let _ = fs::remove_dir(dir).and_then(|()| dir.parent().map_or(Ok(()), fs::remove_dir));
    }
    Ok((!locked.is_empty()).then_some(bytes))
}
