//! The file that an agent's standard error goes to.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::SuperviseError;

/// A log that has become longer than this loses its older part.
pub const MAX_LOG: u64 = 4 << 20;

/// What stays of a log that has become too long, and the most that is read of one.
const TAIL: u64 = 64 << 10;

/// Lines that are kept of what an agent said last.
const LINES: usize = 8;

#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    /// Opened for appending, as by the agents, so that no process overwrites another's lines.
    file: File,
    /// Where the present agent began.
    start: u64,
    /// Whether the supervisor chose the name: then it removes an empty log.
    own: bool,
}

impl Log {
    /// Opens the file that was asked for, or one of this process in the directory for temporary files.
    pub(super) fn open(asked: Option<&Path>, region: &Path) -> Result<Log, SuperviseError> {
        let name = region.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let default =
            || std::env::temp_dir().join(format!("windlass-agent-{name}-{}.log", std::process::id()));
        let path = asked.map_or_else(default, Path::to_owned);
        let failed = |source| SuperviseError::Log { path: path.clone(), source };
        let path_abs = std::path::absolute(&path).map_err(failed)?;
        let mut options = OpenOptions::new();
        options.create(true).append(true).read(true).mode(0o600);
        if asked.is_none() {
            // Others can write to that directory: what is found there must be ours.
            options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        }
        let file = options.open(&path_abs).map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        if asked.is_none() && about.uid() != rustix::process::geteuid().as_raw() {
            return Err(failed(io::ErrorKind::PermissionDenied.into()));
        }
        Ok(Log { path: path_abs, file, start: about.len(), own: asked.is_none() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// For the next agent.
    pub(super) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The next agent begins here.
    pub(super) fn mark(&mut self) {
        self.start = self.len();
    }

    fn len(&self) -> u64 {
        self.file.metadata().map_or(0, |m| m.len())
    }

    /// The last lines of the present agent.
    pub(super) fn said(&self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.tail().ok()?).into_owned();
        let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|l| !l.is_empty()).collect();
        let last = lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default();
        (!last.is_empty()).then(|| last.join("\n"))
    }

    fn tail(&self) -> io::Result<Vec<u8>> {
        let mut file = &self.file;
        let from = self.len().saturating_sub(TAIL).max(self.start);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(TAIL).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Keeps it within [`MAX_LOG`]. A line that is said at this moment may be lost.
    pub(super) fn bound(&mut self) {
        if self.len() <= MAX_LOG || !self.file.metadata().is_ok_and(|m| m.is_file()) {
            return;
        }
        self.start = 0;
        let kept = self.tail().unwrap_or_default();
        if self.file.set_len(0).is_ok() {
            let _ = self
                .file
                .write_all(b"(older lines were left out)\n")
                .and_then(|()| self.file.write_all(&kept));
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if self.own && self.len() == 0 {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_keeps_its_last_lines_within_its_bound() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("log");
        std::fs::write(&path, "of an earlier life\n").unwrap();
        let mut log = Log::open(Some(&path), Path::new("region")).unwrap();
        log.mark();
        assert_eq!(log.said(), None, "only the present agent counts");
        let mut agent = log.file().unwrap();
        for line in 0..MAX_LOG / 16 {
            writeln!(agent, "line {line:>12}").unwrap();
        }
        log.bound();
        assert!(log.len() <= TAIL + 100, "{}", log.len());
        writeln!(agent, "the last one\n").unwrap();
        let said = log.said().unwrap();
        assert!(said.ends_with("the last one") && said.lines().count() == LINES, "{said}");
        drop(log);
        assert!(path.exists(), "what was asked for stays");
        let own = Log::open(None, Path::new("region")).unwrap();
        let path = own.path().to_owned();
        drop(own);
        assert!(!path.exists(), "without output, no log file appears");
    }
}
