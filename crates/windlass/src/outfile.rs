//! Output files that are whole or absent.
//!
//! Owns: everything a command writes besides `--in-place`. Bytes go to a temporary file beside the target,
//! `.NAME.windlass-tmp`; [`OutFile::commit`] makes them durable and renames it into place. A command that fails
//! or is interrupted removes it; one that is killed leaves it, and the next run for the same target takes it
//! over. A lock on it keeps two runs for the same target apart.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use windlass_data::file::INDEX;

use crate::error::Error;

/// A file on its way to its place.
#[derive(Debug)]
pub struct OutFile {
    file: File,
    temp: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl OutFile {
    /// Begins a file that will replace `target`, which must not be one of `inputs`.
    pub fn create(target: &Path, inputs: &[&Path]) -> Result<OutFile, Error> {
        refuse_inputs(target, inputs)?;
        let target = follow(target)?;
        let temp = temp_beside(&target)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&temp)
            .map_err(Error::io("create", &temp))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Busy { path: target }),
            Err(TryLockError::Error(e)) => return Err(Error::io("lock", &temp)(e)),
        }
        // Only the owner of the lock may throw away what a killed run has left.
        file.set_len(0).map_err(Error::io("truncate", &temp))?;
        Ok(OutFile { file, temp, target, committed: false })
    }

    /// The file to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The place it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Makes the bytes durable and puts the file in its place.
    pub fn commit(mut self) -> Result<(), Error> {
        self.file.sync_all().map_err(Error::io("write", &self.temp))?;
        fs::rename(&self.temp, &self.target).map_err(Error::io("replace", &self.target))?;
        self.committed = true;
        sync_parent(&self.target)
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
pub struct OutDir {
    temp: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl OutDir {
    /// Begins a directory that will appear at `target`.
    pub fn create(target: &Path, inputs: &[&Path]) -> Result<OutDir, Error> {
        refuse_inputs(target, inputs)?;
        if target.exists() {
            let found = if target.is_dir() { "a directory" } else { "a file" };
            return Err(Error::InTheWay { path: target.into(), found, wanted: "a new directory" });
        }
        let temp = temp_beside(target)?;
        match fs::remove_dir_all(&temp) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::io("remove", &temp)(e)),
            _ => {}
        }
        fs::create_dir(&temp).map_err(Error::io("create", &temp))?;
        Ok(OutDir { temp, target: target.into(), committed: false })
    }

    /// Where its files are written meanwhile.
    pub fn path(&self) -> &Path {
        &self.temp
    }

    /// Puts the directory in its place. Its files must have been committed.
    pub fn commit(mut self) -> Result<(), Error> {
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
    }
}

/// An error if writing `output` would change one of `inputs`: if it is one of them under any name, or a weight
/// file in one that is a directory of shards.
pub fn refuse_inputs(output: &Path, inputs: &[&Path]) -> Result<(), Error> {
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

fn temp_beside(target: &Path) -> Result<PathBuf, Error> {
    let Some(name) = target.file_name() else {
        return Err(Error::Usage(format!("{} does not name a file to write", target.display())));
    };
    let mut temp = std::ffi::OsString::from(".");
    temp.push(name);
    temp.push(".windlass-tmp");
    Ok(parent(target).join(temp))
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
        assert!(matches!(OutDir::create(&shard, &[dir.path()]), Err(Error::Overwrite { .. })));
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
