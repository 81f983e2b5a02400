//! `windlass receive --as-dir`: versions as checkpoint directories, for programs that load from a path.
//!
//! Owns: [`AsDir`], the place of the directories, and the directories that it puts up. Called by
//! [`crate::service::receive`] when an image holds a version. Must not: touch a directory that it did not make.
//!
//! A directory has a copy of the image, links to the files of `--model-dir` that are not weights, and a record of what it is.
//! It is made under a hidden name and renamed when it is whole. Nothing is ever written to it again, except for the
//! marker, so that a program may read it while the next version arrives. Versions that are too old are removed; a program
//! that has one open keeps what it has open.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::Deserialize;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_data::image::{ImageView, Known};
use windlass_data::private;
use windlass_data::receiver::ReceiverError;
use windlass_data::region::Region;
use windlass_data::seal::draft::{Draft, make_dir};
use windlass_data::stop::Stop;

use super::Pattern;
use crate::error::Error;
use crate::service::engines::check::config_files;

/// What a directory is, in the directory.
const RECORD: &str = ".windlass.json";
/// The weights in it.
const WEIGHTS: &str = "model.safetensors";
/// How the names of directories end that are being made or removed.
const DRAFT: &str = ".windlass-tmp";
/// The file next to the directories that a receiver locks.
const LOCK: &str = ".windlass.lock";

/// Where versions are put up.
#[derive(Clone, Debug)]
pub(crate) struct AsDir {
    pub(crate) pattern: Pattern,
    /// Where the configuration and the tokenizer are.
    pub(crate) model_dir: Option<PathBuf>,
    /// The file that says that all receivers have the version.
    pub(crate) marker: Option<String>,
    /// How many versions are kept.
    pub(crate) keep: usize,
    /// Whether the user's group may read them.
    pub(crate) group: bool,
    /// How long the image may be held to be copied.
    pub(crate) timeout: Duration,
}

/// A version that was put up.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) path: PathBuf,
    /// Whether it was there already.
    pub(crate) found: bool,
    pub(crate) ms: f64,
}

impl AsDir {
    /// Makes the place of the directories, and keeps other receivers from it as long as the file is open.
    pub(crate) fn claim(&self) -> Result<File, Error> {
        let dir = self.pattern.dir();
        private::make_place(dir, if self.group { 0o750 } else { 0o700 })?;
        let lock = super::claim(&dir.join(LOCK), || {
            format!(
                "another receiver puts versions up in {}: one is enough for all engines of a host, or give --as-dir another \
                 directory",
                dir.display()
            )
        })?;
        // What a killed receiver had begun to make or to remove.
        for entry in fs::read_dir(dir).map_err(Error::io("list", dir))?.flatten() {
            if self.is_draft(&entry.file_name()) {
                clear(&entry.path())?;
            }
        }
        Ok(lock)
    }

    /// Whether a directory of this name is being made or removed.
    fn is_draft(&self, name: &OsStr) -> bool {
        let name = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_suffix(DRAFT));
        name.is_some_and(|name| self.pattern.version(OsStr::new(name)).is_some())
    }

    /// Puts up the version that the image in `image` holds, unless it is there, and removes those that are too old.
    pub(crate) fn put(&self, image: &Path, known: &Known, stop: &Stop) -> Result<Placed, Error> {
        let began = Instant::now();
        let path = self.pattern.path(known.identity.version);
        let record = serde_json::to_vec(known).map_err(|e| Error::Bug(e.to_string()))?;
        let there = read_record(&path)?;
        let found = there.as_ref().is_some_and(|there| there.bytes == record);
        if !found {
            let is_ours = there.is_some();
            if !is_ours && path.symlink_metadata().is_ok() {
                return Err(Error::Usage(format!(
                    "{} is there and was not made by windlass: move it away, or give --as-dir another directory",
                    path.display()
                )));
            }
            // Room for the new one first; but one stays until it is there.
            self.remove_old(self.keep.saturating_sub(1).max(1));
            self.make(&path, image, known, &record, is_ours && path.exists(), stop)?;
        }
        self.remove_old(self.keep);
        Ok(Placed { path, found, ms: began.elapsed().as_secs_f64() * 1e3 })
    }

    fn make(
        &self,
        path: &Path,
        image: &Path,
        known: &Known,
        record: &[u8],
        replace: bool,
        stop: &Stop,
    ) -> Result<(), Error> {
        let draft = hidden(path);
        clear(&draft)?;
        make_dir(&draft).map_err(Error::io("create", &draft))?;
        let made = self.fill(&draft, image, known, record, stop).and_then(|()| {
            let flags = if replace { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
            renameat_with(CWD, &draft, CWD, path, flags).map_err(|e| Error::io("rename", path)(e.into()))
        });
        if made.is_err() || replace {
            clear(&draft)?;
        }
        made
    }

    fn fill(
        &self,
        draft: &Path,
        image: &Path,
        known: &Known,
        record: &[u8],
        stop: &Stop,
    ) -> Result<(), Error> {
        let stop = stop.with_timeout(self.timeout);
        let view =
            ImageView::take(&Region::open(image)?, self.timeout, &stop).map_err(ReceiverError::from)?;
        if view.known() != known {
            return Err(Error::Plane {
                doing: "put up a version",
                kind: windlass_core::error::Kind::Stale,
                source: format!("the image holds {} by now, not {}", view.known().identity, known.identity)
                    .into(),
            });
        }
        let weights = draft.join(WEIGHTS);
        let target = Draft::create(&weights).map_err(Error::io("create", &weights))?;
        copy(&view.path(), target.file()).map_err(Error::io("write", &weights))?;
        // If a receiver took the image back, the copy may be of two versions.
        view.finish().map_err(ReceiverError::from)?;
        target.place().map_err(Error::io("write", &weights))?;
        for (name, file) in self.model_dir.as_deref().map(config_files).transpose()?.unwrap_or_default() {
            let link = draft.join(name);
            symlink(&file, &link).map_err(Error::io("link", &link))?;
        }
        let path = draft.join(RECORD);
        Draft::write(&path, record).map_err(Error::io("write", &path))
    }

    /// Says that all receivers have a version, if it is still there.
    pub(crate) fn mark(&self, version: Version) -> Result<(), Error> {
        let Some(marker) = &self.marker else { return Ok(()) };
        let path = self.pattern.path(version);
        if read_record(&path)?.is_none() {
            return Ok(());
        }
        let path = path.join(marker);
        Draft::write(&path, b"").map_err(Error::io("write", &path))
    }

    /// Removes all but the newest `keep`. A version of a later incarnation is newer, whatever its number.
    fn remove_old(&self, keep: usize) {
        let entries = fs::read_dir(self.pattern.dir()).into_iter().flatten().flatten();
        let mut ours: Vec<(Incarnation, Version, PathBuf)> = entries
            .filter(|entry| self.pattern.version(&entry.file_name()).is_some())
            .filter_map(|entry| {
                let record = read_record(&entry.path()).ok()??;
                Some((record.identity.incarnation, record.identity.version, entry.path()))
            })
            .collect();
        ours.sort_unstable();
        for (.., path) in ours.iter().rev().skip(keep) {
            // At no moment is there half of one.
            let draft = hidden(path);
            let removed = clear(&draft)
                .and_then(|()| fs::rename(path, &draft).map_err(Error::io("rename", path)))
                .and_then(|()| clear(&draft));
            if let Err(error) = removed {
                tracing::warn!(path = %path.display(), error = %error.chain(), "cannot remove an old version");
            }
        }
    }
}

/// The name under which a directory is made and removed.
fn hidden(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}{DRAFT}"))
}

/// Removes a directory, if it is there.
fn clear(dir: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", dir)(e)),
        _ => Ok(()),
    }
}

/// What a directory of ours is.
#[derive(Deserialize)]
struct Record {
    identity: Identity,
    #[serde(skip)]
    bytes: Vec<u8>,
}

/// The record of a directory; none if it is not there or not ours.
fn read_record(dir: &Path) -> Result<Option<Record>, Error> {
    if !fs::symlink_metadata(dir).is_ok_and(|found| found.is_dir()) {
        return Ok(None);
    }
    let path = dir.join(RECORD);
    let bytes = match fs::read(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(Error::io("read", &path))?,
    };
    Ok(serde_json::from_slice(&bytes).ok().map(|record| Record { bytes, ..record }))
}

/// Copies a file: by reference where the file system can, otherwise by the kernel.
fn copy(from: &Path, mut to: &File) -> io::Result<()> {
    let mut from = File::open(from)?;
    if rustix::fs::ioctl_ficlone(to, &from).is_err() {
        io::copy(&mut from, &mut to)?;
    }
    Ok(())
}
