//! Atomic output files.
//!
//! Owns: everything a command writes besides `--in-place`. Bytes go to a temporary file next to the target,
//! `.NAME.windlass-tmp`; [`OutFile::commit`] makes them durable and renames it into place. A command that fails
//! or is interrupted removes it; one that is killed leaves it, and the next run for the same target takes it
//! over. A lock keeps two runs for the same target apart: on the temporary file itself, or for a directory on
//! `.NAME.windlass-lock` next to it.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use windlass_data::file::INDEX;

use crate::error::Error;

/// How often a lock is tried for again because its file was renamed or removed before it was had.
const LOCK_TRIES: u32 = 16;

/// A file on its way to its place.
#[derive(Debug)]
pub(crate) struct OutFile {
    file: File,
    temp: PathBuf,
    target: PathBuf,
    mode: Option<u32>,
    committed: bool,
}

impl OutFile {
    /// Begins a file that will replace `target`, which must not be one of `inputs`.
    pub(crate) fn create(target: &Path, inputs: &[&Path]) -> Result<OutFile, Error> {
        let place = check_place(target)?;
        let bytes = target.as_os_str().as_bytes();
        if bytes.ends_with(b"/") || bytes.ends_with(b"/.") {
            return Err(Error::Usage(format!("{} names a directory, not a file to write", target.display())));
        }
        refuse_inputs(target, inputs)?;
        OutFile::begin(follow(&place)?, None)
    }

    /// Begins a file at `target` itself, even if a symbolic link is there, with the mode that it will have.
    pub(crate) fn create_here(target: &Path, mode: u32) -> Result<OutFile, Error> {
        OutFile::begin(check_place(target)?, Some(mode))
    }

    fn begin(target: PathBuf, mode: Option<u32>) -> Result<OutFile, Error> {
        let temp = beside(&target, "tmp")?;
        let file = lock_file(&temp, &target)?;
        // Only the owner of the lock may throw away what a killed run has left.
        file.set_len(0).map_err(Error::io("truncate", &temp))?;
        Ok(OutFile { file, temp, target, mode, committed: false })
    }

    /// Gives the file the mode of `source` at its commit. Until then only the owner can read it.
    pub(crate) fn with_mode_of(mut self, source: &File) -> Result<OutFile, Error> {
        let mode = source.metadata().map_err(Error::io("read", &self.target))?.mode() & 0o777;
        self.mode = Some(mode);
        self.file.set_permissions(Permissions::from_mode(0o600)).map_err(Error::io("protect", &self.temp))?;
        Ok(self)
    }

    /// The file to write to.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The place it will have.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// Makes the bytes durable and puts the file in its place.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        self.finish()?;
        fs::rename(&self.temp, &self.target).map_err(Error::io("replace", &self.target))?;
        self.committed = true;
        sync_parent(&self.target)
    }

    /// The same, but fails with [`io::ErrorKind::AlreadyExists`] if anything is at the target.
    pub(crate) fn commit_new(mut self) -> Result<(), Error> {
        self.finish()?;
        put_new(&self.temp, &self.target).map_err(Error::io("create", &self.target))?;
        self.committed = true;
        sync_parent(&self.target)
    }

    fn finish(&self) -> Result<(), Error> {
        if let Some(mode) = self.mode {
            let set = self.file.set_permissions(Permissions::from_mode(mode));
            set.map_err(Error::io("protect", &self.temp))?;
        }
        self.file.sync_all().map_err(Error::io("write", &self.temp))
    }
}

/// Renames `temp` unless anything is at `target`.
fn put_new(temp: &Path, target: &Path) -> io::Result<()> {
    match renameat_with(CWD, temp, CWD, target, RenameFlags::NOREPLACE) {
        // NFS has no such rename; it has links, which do not replace either.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            fs::hard_link(temp, target)?;
            fs::remove_file(temp)
        }
        renamed => renamed.map_err(io::Error::from),
    }
}

impl Drop for OutFile {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing better to do: a leftover is taken over by the next run.
            let _ = fs::remove_file(&self.temp);
        }
    }
}

/// A directory on its way to its place; like [`OutFile`], but the target must not exist yet.
#[derive(Debug)]
pub(crate) struct OutDir {
    /// Held until the lock's name is gone: see `drop`.
    _lock: File,
    lock_path: PathBuf,
    temp: PathBuf,
    target: PathBuf,
    mode: u32,
    committed: bool,
}

impl OutDir {
    /// Begins a directory that will appear at `target` with the mode of the directory `source`, or readable by all.
    pub(crate) fn create(target: &Path, source: Option<&Path>, inputs: &[&Path]) -> Result<OutDir, Error> {
        let target = check_place(target)?;
        refuse_inputs(&target, inputs)?;
        let mode_of =
            |dir: &Path| fs::metadata(dir).map(|m| m.mode() & 0o777).map_err(Error::io("read", dir));
        let mode = source.map_or(Ok(0o755), mode_of)?;
        let (temp, lock_path) = (beside(&target, "tmp")?, beside(&target, "lock")?);
        refuse_existing(&target)?;
        let lock = lock_file(&lock_path, &target)?;
        let out = OutDir { _lock: lock, lock_path, temp, target, mode, committed: false };
        // Another run may have ended just before the lock was had.
        refuse_existing(&out.target)?;
        // Only the owner of the lock may throw away what a killed run has left.
        match fs::remove_dir_all(&out.temp) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::io("remove", &out.temp)(e)),
            _ => {}
        }
        fs::create_dir(&out.temp).map_err(Error::io("create", &out.temp))?;
        let private = fs::set_permissions(&out.temp, Permissions::from_mode(0o700));
        private.map_err(Error::io("protect", &out.temp))?;
        Ok(out)
    }

    /// Where its files are written meanwhile.
    pub(crate) fn path(&self) -> &Path {
        &self.temp
    }

    /// Puts the directory in its place. Its files must have been committed.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        let set = fs::set_permissions(&self.temp, Permissions::from_mode(self.mode));
        set.map_err(Error::io("protect", &self.temp))?;
        fs::rename(&self.temp, &self.target).map_err(Error::io("create", &self.target))?;
        self.committed = true;
        sync_parent(&self.target)
    }
}

impl Drop for OutDir {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_dir_all(&self.temp);
        }
        // The lock is still held here. A process that opened the file meanwhile sees that its name is gone.
        let _ = fs::remove_file(&self.lock_path);
    }
}

/// Opens or makes the file `path` and locks it for this run; [`Error::Busy`] for `target` if another run has it.
pub(crate) fn lock_file(path: &Path, target: &Path) -> Result<File, Error> {
    for _ in 0..LOCK_TRIES {
        let file = open_own(path)?;
        if lock_named(&file, path, target)? {
            return Ok(file);
        }
    }
    Err(Error::Busy { path: target.into() })
}

fn open_own(path: &Path) -> Result<File, Error> {
    let alien = |found| Error::InTheWay { path: path.into(), found, wanted: "a file of an earlier run" };
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(path).map_err(|e| match e.raw_os_error() {
        Some(libc::ELOOP) => alien("a symbolic link"),
        _ => Error::io("create", path)(e),
    })?;
    let meta = file.metadata().map_err(Error::io("read", path))?;
    if meta.is_file() { Ok(file) } else { Err(alien("a device or pipe")) }
}

/// Locks an open file and says whether it is still the one named `path`. The run that had the lock before may
/// have renamed or removed it: then the lock is on something finished, and a new file must be made.
fn lock_named(file: &File, path: &Path, target: &Path) -> Result<bool, Error> {
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(Error::Busy { path: target.into() }),
        Err(TryLockError::Error(e)) => return Err(Error::io("lock", path)(e)),
    }
    let ours = file.metadata().map_err(Error::io("read", path))?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (ours.dev(), ours.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io("read", path)(e)),
    }
}

/// The path of a helper file next to `target`: `.NAME.windlass-WHAT`.
pub(crate) fn beside(target: &Path, what: &str) -> Result<PathBuf, Error> {
    let Some(name) = target.file_name() else {
        return Err(Error::Usage(format!("{} does not name a file to write", target.display())));
    };
    let mut own = OsString::from(".");
    own.push(name);
    own.push(".windlass-");
    own.push(what);
    Ok(parent(target).join(own))
}

/// Where `target` is, plainly written. Its folder must exist, so that no work is done in vain.
fn check_place(target: &Path) -> Result<PathBuf, Error> {
    let Some(name) = target.file_name() else {
        return Err(Error::Usage(format!("{} does not name a file to write", target.display())));
    };
    let folder = parent(target);
    let meta = fs::metadata(folder).map_err(Error::io("write to", folder))?;
    if !meta.is_dir() {
        return Err(Error::InTheWay { path: folder.into(), found: "a file", wanted: "a directory" });
    }
    // Without a folder, none: `out` and not `./out`, as it was given.
    Ok(target.parent().unwrap_or(Path::new("")).join(name))
}

fn refuse_existing(target: &Path) -> Result<(), Error> {
    let Ok(meta) = fs::symlink_metadata(target) else { return Ok(()) };
    let found = if meta.is_dir() { "a directory" } else { "a file" };
    Err(Error::InTheWay { path: target.into(), found, wanted: "a new directory" })
}

/// An error if writing `output` would change one of `inputs`: if it is one of them under any name, or a weight
/// file in one that is a directory of shards.
pub(crate) fn refuse_inputs(output: &Path, inputs: &[&Path]) -> Result<(), Error> {
    let id = |p: &Path| fs::metadata(p).ok().map(|m| (m.dev(), m.ino()));
    let weights = output.extension().is_some_and(|e| e == "safetensors") || output.ends_with(INDEX);
    for &input in inputs {
        let Some(theirs) = id(input) else { continue };
        let inside = input.is_dir() && weights && id(parent(output)) == Some(theirs);
        if id(output) == Some(theirs) || inside {
            return Err(Error::Overwrite { output: output.into(), input: input.into() });
        }
    }
    Ok(())
}

/// Where a file named `target` would be written: the end of a link, if it is one. Only files are replaced.
fn follow(target: &Path) -> Result<PathBuf, Error> {
    let Ok(meta) = fs::metadata(target) else { return Ok(target.into()) };
    if !meta.is_file() {
        let found = if meta.is_dir() { "a directory" } else { "a device or pipe" };
        return Err(Error::InTheWay { path: target.into(), found, wanted: "a file" });
    }
    target.canonicalize().map_err(Error::io("open", target))
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

fn sync_parent(path: &Path) -> Result<(), Error> {
    let dir = parent(path);
    File::open(dir).and_then(|d| d.sync_all()).map_err(Error::io("write", dir))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn outputs_appear_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        fs::write(&target, "old").unwrap();
        {
            let out = OutFile::create(&target, &[]).unwrap();
            out.file().write_all(b"half").unwrap();
        }
        assert_eq!((fs::read(&target).unwrap(), names(dir.path())), (b"old".to_vec(), vec!["out".into()]));
        let out = OutFile::create(&target, &[]).unwrap();
        out.file().write_all(b"new").unwrap();
        out.commit().unwrap();
        assert_eq!((fs::read(&target).unwrap(), names(dir.path())), (b"new".to_vec(), vec!["out".into()]));
    }

    #[test]
    fn a_new_file_replaces_nothing_and_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let (target, other) = (dir.path().join("out"), dir.path().join("other"));
        std::os::unix::fs::symlink(&other, &target).unwrap();
        let out = OutFile::create_here(&target, 0o755).unwrap();
        let refused = out.commit_new().unwrap_err();
        assert!(matches!(refused, Error::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists));
        assert_eq!(names(dir.path()), ["out"]);
        OutFile::create_here(&target, 0o755).unwrap().commit().unwrap();
        let meta = fs::symlink_metadata(&target).unwrap();
        assert!(meta.is_file() && meta.mode() & 0o7777 == 0o755 && !other.exists());
        fs::remove_file(&target).unwrap();
        OutFile::create_here(&target, 0o644).unwrap().commit_new().unwrap();
        assert_eq!(
            (fs::metadata(&target).unwrap().mode() & 0o7777, names(dir.path())),
            (0o644, vec!["out".into()])
        );
    }

    #[test]
    fn leftovers_of_a_killed_run_are_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        fs::write(dir.path().join(".out.windlass-tmp"), "leftover of a longer run").unwrap();
        let out = OutFile::create(&target, &[]).unwrap();
        out.file().write_all(b"new").unwrap();
        out.commit().unwrap();
        assert_eq!((fs::read(&target).unwrap(), names(dir.path())), (b"new".to_vec(), vec!["out".into()]));
    }

    #[test]
    fn two_runs_for_one_target_are_kept_apart() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let first = OutFile::create(&target, &[]).unwrap();
        assert!(matches!(OutFile::create(&target, &[]), Err(Error::Busy { .. })));
        first.file().write_all(b"first").unwrap();
        first.commit().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"first");
    }

    /// The second run once removed the directory that the first was writing to.
    #[test]
    fn two_runs_for_one_directory_are_kept_apart() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let first = OutDir::create(&target, Some(dir.path()), &[]).unwrap();
        fs::write(first.path().join("shard"), "first").unwrap();
        assert!(matches!(OutDir::create(&target, Some(dir.path()), &[]), Err(Error::Busy { .. })));
        first.commit().unwrap();
        assert_eq!(fs::read(target.join("shard")).unwrap(), b"first");
        assert!(matches!(OutDir::create(&target, Some(dir.path()), &[]), Err(Error::InTheWay { .. })));
        assert_eq!(names(dir.path()), ["out"]);
        // What a killed run leaves is taken over, and nothing of it remains.
        let next = dir.path().join("next");
        fs::create_dir(dir.path().join(".next.windlass-tmp")).unwrap();
        fs::write(dir.path().join(".next.windlass-tmp/old"), "").unwrap();
        fs::write(dir.path().join(".next.windlass-lock"), "").unwrap();
        OutDir::create(&next, Some(dir.path()), &[]).unwrap().commit().unwrap();
        assert_eq!((names(&next), names(dir.path())), (vec![], vec!["next".into(), "out".into()]));
    }

    /// A run that opened the temporary file just before it was renamed once emptied the finished output.
    #[test]
    fn a_lock_on_a_file_that_was_renamed_or_removed_meanwhile_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let temp = beside(&target, "tmp").unwrap();
        for (end, successor) in [(true, false), (false, false), (true, true)] {
            let first = OutFile::create(&target, &[]).unwrap();
            let late = open_own(&temp).unwrap();
            assert!(matches!(lock_named(&late, &temp, &target), Err(Error::Busy { .. })));
            if end {
                first.commit().unwrap();
            } else {
                drop(first);
            }
            let _next = successor.then(|| OutFile::create(&target, &[]).unwrap());
            assert!(!lock_named(&late, &temp, &target).unwrap(), "{end} {successor}");
        }
        let own = open_own(&temp).unwrap();
        assert!(lock_named(&own, &temp, &target).unwrap());
    }

    #[test]
    fn a_link_in_the_place_of_a_temporary_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join(".out.windlass-tmp")).unwrap();
        let refused = OutFile::create(&dir.path().join("out"), &[]);
        assert!(matches!(refused, Err(Error::InTheWay { found: "a symbolic link", .. })));
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn places_that_cannot_be_written_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        for slash in ["new/", "new/."] {
            assert!(matches!(OutFile::create(&dir.path().join(slash), &[]), Err(Error::Usage(_))));
        }
        let missing = OutFile::create(&dir.path().join("no/out"), &[]);
        assert!(matches!(missing, Err(Error::Io { path, .. }) if path.ends_with("no")));
        let missing = OutDir::create(&dir.path().join("no/out"), Some(dir.path()), &[]);
        assert!(matches!(missing, Err(Error::Io { path, .. }) if path.ends_with("no")));
        assert_eq!(names(dir.path()), Vec::<String>::new());
        for slash in ["a/", "b/."] {
            OutDir::create(&dir.path().join(slash), Some(dir.path()), &[]).unwrap().commit().unwrap();
        }
        assert_eq!(names(dir.path()), ["a", "b"]);
    }

    #[test]
    fn inputs_are_recognised_under_other_names() {
        let dir = tempfile::tempdir().unwrap();
        let input = dir.path().join("in");
        fs::write(&input, "x").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&input, &link).unwrap();
        for output in [&input, &link] {
            assert!(matches!(OutFile::create(output, &[&input]), Err(Error::Overwrite { .. })));
        }
        let shard = dir.path().join("new.safetensors");
        assert!(matches!(OutFile::create(&shard, &[dir.path()]), Err(Error::Overwrite { .. })));
        assert!(matches!(
            OutDir::create(&shard, Some(dir.path()), &[dir.path()]),
            Err(Error::Overwrite { .. })
        ));
        assert!(OutFile::create(&dir.path().join("new.delta"), &[dir.path()]).is_ok());
        assert_eq!(fs::read(&input).unwrap(), b"x");
    }

    #[test]
    fn links_are_followed_and_only_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let out = OutFile::create(&link, &[]).unwrap();
        out.file().write_all(b"new").unwrap();
        out.commit().unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert!(matches!(OutFile::create(dir.path(), &[]), Err(Error::InTheWay { .. })));
        // Once replaced a device by a file of its name.
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(matches!(OutFile::create(&socket, &[]), Err(Error::InTheWay { .. })));
    }
}
