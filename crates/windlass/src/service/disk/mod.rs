//! The disk bridge, for programs that pass weights on as directories of checkpoints.
//!
//! | module | owns |
//! |---|---|
//! | [`follow`] | `windlass publish`: each finished checkpoint becomes a version |
//! | [`as_dir`] | `windlass receive --as-dir`: each version becomes a checkpoint, whole or not at all |
//!
//! Such a program believes in a file system that its hosts share. The two ends give it the same paths, and the deltas between
//! versions go over the wire. [`Pattern`] is how both know which directory is which version.

pub(crate) mod as_dir;
pub(crate) mod follow;

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::OFlags;
use windlass_core::identity::Version;

use crate::error::Error;

/// Locks the file at `path`, which is made if it is missing, as long as it is open. If another process has it, the error
/// says `taken`.
fn claim(path: &Path, taken: impl FnOnce() -> String) -> Result<File, Error> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600).custom_flags(flags);
    let file = options.open(path).map_err(Error::io("open", path))?;
    file.try_lock().map_err(|_| Error::Usage(taken()))?;
    Ok(file)
}

/// Directories whose names hold the number of a version: `/dev/shm/w/weight_v%06d`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    dir: PathBuf,
    before: String,
    /// The least number of digits.
    width: usize,
    after: String,
}

impl Pattern {
    /// Where the directories are.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of a version.
    pub(crate) fn path(&self, version: Version) -> PathBuf {
        let Pattern { dir, before, width, after } = self;
        dir.join(format!("{before}{version:0width$}{after}"))
    }

    /// The version of a name; none if [`Pattern::path`] would not give the name.
    pub(crate) fn version(&self, name: &OsStr) -> Option<Version> {
        let digits = name.to_str()?.strip_prefix(&self.before)?.strip_suffix(&self.after)?;
        let version = digits.parse().ok()?;
        (self.path(version).file_name() == Some(name)).then_some(version)
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Pattern, String> {
        let bad = |why: &str| format!("{text:?} {why}: write it as DIR/weight_v%06d or DIR/step_%d");
        let (dir, name) = text.rsplit_once('/').map_or((".", text), |(dir, name)| (dir, name));
        let dir = PathBuf::from(if dir.is_empty() { "/" } else { dir });
        let (before, rest) = name.split_once('%').ok_or_else(|| bad("does not say where the version is"))?;
        let (width, after) = rest.split_once('d').ok_or_else(|| bad("has something else after the %"))?;
        let width = match width {
            "" => 1,
            _ => width
                .strip_prefix('0')
                .and_then(|w| w.parse().ok())
                .filter(|w| (1..=20).contains(w))
                .ok_or_else(|| bad("has something else after the %"))?,
        };
        if dir.to_string_lossy().contains('%') || after.contains('%') {
            return Err(bad("has more than one %"));
        }
        // Hidden names are drafts.
        if before.starts_with('.') {
            return Err(bad("begins with a dot"));
        }
        Ok(Pattern { dir, before: before.to_owned(), width, after: after.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_its_version_lead_to_each_other() {
        for (text, version, path) in [
            ("/dev/shm/w/weight_v%06d", 12, "/dev/shm/w/weight_v000012"),
            ("/dev/shm/w/weight_v%06d", 12_345_678, "/dev/shm/w/weight_v12345678"),
            ("out/step_%d", 0, "out/step_0"),
            ("/%d-policy", 7, "/7-policy"),
            ("%d", u64::MAX, "./18446744073709551615"),
        ] {
            let pattern: Pattern = text.parse().unwrap();
            assert_eq!(pattern.path(version), Path::new(path), "{text}");
            assert_eq!(pattern.version(Path::new(path).file_name().unwrap()), Some(version), "{text}");
        }
    }

    #[test]
    fn other_names_are_no_versions() {
        let pattern: Pattern = "/w/weight_v%06d".parse().unwrap();
        for name in
            ["weight_v12", "weight_v000012.tmp", "weight_v00001x", "weight_v+00012", "other", "weight_v"]
        {
            assert_eq!(pattern.version(OsStr::new(name)), None, "{name}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_told_how_to_be_one() {
        for bad in ["/w", "/w/%s", "/w/%6d", "/w/%099d", "/%d/%d", "/w/%d%d", "/w/.x%d", ""] {
            let error = bad.parse::<Pattern>().unwrap_err();
            assert!(error.contains("DIR/step_%d"), "{bad}: {error}");
        }
    }
}
