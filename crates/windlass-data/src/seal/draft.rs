//! Files that are whole or absent.
//!
//! Owns: how a file comes into being that other processes read. Bytes go to `.NAME.tmp` next to the target, which is
//! renamed into place when it is whole. A failure removes it; a kill leaves it, and the next draft of the same name or
//! [`crate::history::History::open`] removes it then.
//!
//! The rule for fsync: a file that must survive a power cut is synced before it is renamed. Those are secrets and the
//! output files of commands (`outfile` of the `windlass` crate, which also locks them). All other drafts are on tmpfs or
//! mean nothing without the memory that the images are in, and are not synced.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// A file on its way to its place.
#[derive(Debug)]
pub struct Draft {
    file: File,
    temp: PathBuf,
    target: PathBuf,
    placed: bool,
}

impl Draft {
    /// Begins the file that will be at `target`. Whoever may read the directory may read the file.
    pub fn create(target: &Path) -> io::Result<Draft> {
        let temp = hidden(target)?;
        remove_if_there(&temp)?;
        let file = make_file(&temp)?;
        Ok(Draft { file, temp, target: target.to_owned(), placed: false })
    }

    /// Puts a file with these bytes at `target`, over what may be there.
    pub fn write(target: &Path, bytes: &[u8]) -> io::Result<()> {
        let draft = Draft::create(target)?;
        (&draft.file).write_all(bytes)?;
        draft.place()
    }

    /// A synced draft of these bytes, for its owner alone. Several processes may draft the same secret at once.
    pub fn secret(target: &Path, bytes: &[u8]) -> io::Result<Draft> {
        let temp = hidden(&target.with_added_extension(std::process::id().to_string()))?;
        remove_if_there(&temp)?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temp)?;
        let mut draft = Draft { file, temp, target: target.to_owned(), placed: false };
        draft.file.write_all(bytes)?;
        draft.file.sync_all()?;
        Ok(draft)
    }

    /// As [`Draft::create`], of the file that a draft of another target left.
    pub fn again(self, target: &Path) -> io::Result<Draft> {
        let temp = hidden(target)?;
        fs::rename(&self.temp, &temp)?;
        let file = self.file.try_clone()?;
        // Gone from where it was, so that dropping it removes nothing.
        Ok(Draft { file, temp, target: target.to_owned(), placed: false })
    }

    /// The file to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Puts it in its place, over what may be there.
    pub fn place(mut self) -> io::Result<()> {
        fs::rename(&self.temp, &self.target)?;
        self.placed = true;
        Ok(())
    }

    /// Puts it in its place unless there is a file, which stays.
    pub fn place_if_absent(self) -> io::Result<()> {
        match fs::hard_link(&self.temp, &self.target) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        }
    }
}

/// Makes `link` a symbolic link to `to`, at no moment to nothing.
pub fn place_link(link: &Path, to: &Path) -> io::Result<()> {
    let temp = hidden(link)?;
    remove_if_there(&temp)?;
    symlink(to, &temp)?;
    fs::rename(&temp, link)
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.placed {
            // Nothing better to do: a leftover is removed by the next draft or by the history.
            let _ = fs::remove_file(&self.temp);
        }
    }
}

/// Where the draft of a file is.
fn hidden(target: &Path) -> io::Result<PathBuf> {
    let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(".tmp");
    Ok(target.with_file_name(hidden))
}

/// Whether a file of this name is a draft.
pub fn is_draft(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b".") && name.as_bytes().ends_with(b".tmp")
}

/// Makes a directory that is as open as the one it is in, unless it is there.
pub fn make_dir(path: &Path) -> io::Result<()> {
    let mode = parent_mode(path)? & 0o770;
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // Whatever the umask is.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(mode)),
        Err(e) => Err(e),
    }
}

/// Makes a file that is as open as the directory it is in, whatever the umask is.
pub(crate) fn make_file(path: &Path) -> io::Result<File> {
    let mode = parent_mode(path)? & 0o660;
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    Ok(file)
}

/// Removes a file; one that is gone already is as good.
pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn parent_mode(path: &Path) -> io::Result<u32> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(fs::metadata(parent)?.mode())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_in_its_place_when_it_is_whole_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("f");
        let names = || fs::read_dir(dir.path()).unwrap().count();
        drop(Draft::create(&target).unwrap());
        assert_eq!(names(), 0);
        // What a killed process left is no hindrance, also where it is a link to somewhere else.
        let elsewhere = dir.path().join("elsewhere");
        fs::write(&elsewhere, b"kept").unwrap();
        std::os::unix::fs::symlink(&elsewhere, dir.path().join(".f.tmp")).unwrap();
        let draft = Draft::create(&target).unwrap();
        draft.file().write_all(b"new").unwrap();
        assert!(!target.exists() && is_draft(OsStr::new(".f.tmp")));
        draft.place().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(fs::read(&elsewhere).unwrap(), b"kept");
        assert_eq!(names(), 2);
    }

    #[test]
    fn a_draft_is_as_open_as_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        for (of_dir, of_file) in [(0o700, 0o600), (0o750, 0o640)] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(of_dir)).unwrap();
            let draft = Draft::create(&dir.path().join("f")).unwrap();
            let mode = draft.file().metadata().unwrap().mode() & 0o777;
            assert_eq!(mode, of_file, "in a directory of {of_dir:o}");
        }
    }

    #[test]
    fn a_secret_is_its_owners_alone_and_the_first_one_stays_where_that_is_wanted() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o750)).unwrap();
        let target = dir.path().join("token");
        for (bytes, place, kept) in [
            (b"first", Draft::place_if_absent as fn(Draft) -> io::Result<()>, b"first"),
            (b"other", Draft::place_if_absent, b"first"),
            (b"third", Draft::place, b"third"),
        ] {
            Draft::secret(&target, bytes).and_then(place).unwrap();
            assert_eq!(fs::read(&target).unwrap(), kept);
            assert_eq!(fs::metadata(&target).unwrap().mode() & 0o777, 0o600);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }
}
