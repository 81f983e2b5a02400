//! The directory for regions: whether it is in memory, its size, and whether this user may write there.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use windlass_core::error::Kind;
use windlass_data::file::io_kind;

use super::{Check, ROOM};
use crate::console::bytes;

/// The default directory for regions.
pub(crate) const DEFAULT: &str = "/dev/shm";

/// Room for a region's header and manifest. Slots may be elsewhere (memfd).
const HEADER: u64 = 1 << 20;

/// Facts about the directory.
#[derive(Debug)]
struct RegionDir {
    in_memory: bool,
    /// The size of the filesystem; `None` if it has no limit of its own.
    total: Option<u64>,
    free: u64,
    writable: io::Result<()>,
}

/// Checks of the directory. `available` is the memory that can be had.
pub(crate) fn checks(dir: &Path, available: Option<u64>) -> Vec<Check> {
    match RegionDir::look(dir) {
        Ok(place) => place.judge(dir, available),
        Err(e) => {
            let check = Check::ok("region directory", format!("{}: {e}", dir.display()));
            let advice = "create it, or give another one with --region-dir";
            vec![check.problem(true, io_kind(&e), advice)]
        }
    }
}

impl RegionDir {
    fn look(dir: &Path) -> io::Result<RegionDir> {
        if !fs::metadata(dir)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let in_memory = windlass_data::shm::in_memory(dir)?;
        let sizes = rustix::fs::statvfs(dir)?;
        let total = sizes.f_blocks.saturating_mul(sizes.f_frsize);
        Ok(RegionDir {
            in_memory,
            total: (total > 0).then_some(total),
            free: sizes.f_bavail.saturating_mul(sizes.f_frsize),
            writable: probe(dir),
        })
    }

    fn judge(&self, dir: &Path, available: Option<u64>) -> Vec<Check> {
        let kind = if self.in_memory { "tmpfs" } else { "not tmpfs" };
        let may = if self.writable.is_ok() { "writable" } else { "not writable" };
        let mut place = Check::ok("region directory", format!("{}, {kind}, {may}", dir.display())).advise(
            !self.in_memory,
            "slots would be written back to a disk; use a directory on tmpfs, such as /dev/shm",
        );
        if let Err(e) = &self.writable {
            let advice = format!(
                "cannot create a file there ({e}); change its mode, or give another one with --region-dir"
            );
            place = place.problem(true, io_kind(e), advice);
        }
        vec![place, self.space(available)]
    }

    /// Two slots take twice the model.
    fn space(&self, available: Option<u64>) -> Check {
        let name = "region space";
        let free = match self.total {
            Some(_) => self.free,
            None => match available {
                Some(free) => free,
                None => return Check::ok(name, "no limit"),
            },
        };
        let total = self.total.map_or_else(|| "memory".into(), bytes);
        let grow = "enlarge it: --shm-size, an emptyDir of medium Memory, or `mount -o remount,size=…`";
        Check::ok(name, format!("{} free of {total}", bytes(free)))
            .advise(
                free < ROOM,
                format!("the largest model that fits with two slots has {}; {grow}", bytes(free / 2)),
            )
            .problem(free < HEADER, Kind::Exhausted, format!("no region fits there; {grow}"))
    }
}

/// Makes a file and removes it.
fn probe(dir: &Path) -> io::Result<()> {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanos = clock.map_or(0, |d| d.subsec_nanos());
    let path = dir.join(format!(".windlass-doctor-{}-{nanos}", std::process::id()));
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    fs::remove_file(&path)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn place(total: Option<u64>, free: u64) -> RegionDir {
        RegionDir { in_memory: true, total, free, writable: Ok(()) }
    }

    #[test]
    fn the_small_shared_memory_of_containers_gets_advice() {
        let docker = place(Some(64 << 20), 64 << 20).space(Some(1 << 40));
        assert!(
            matches!(&docker.verdict, Verdict::Advice(t) if t.contains("32.00 MiB") && t.contains("--shm-size"))
        );
        assert_eq!(place(Some(8 << 30), 4 << 30).space(Some(1)).verdict, Verdict::Ok);
        assert!(matches!(
            place(Some(8 << 30), 4096).space(None).verdict,
            Verdict::Problem(Kind::Exhausted, _)
        ));
        // A tmpfs without a size ends where memory does.
        assert!(matches!(place(None, 0).space(Some(1 << 30)).verdict, Verdict::Advice(_)));
        assert_eq!(place(None, 0).space(None).verdict, Verdict::Ok);
    }

    #[test]
    fn a_region_directory_that_cannot_be_written_to_is_a_problem() {
        let denied = RegionDir {
            writable: Err(io::ErrorKind::PermissionDenied.into()),
            ..place(Some(8 << 30), 8 << 30)
        };
        let check = denied.judge(Path::new("/x"), None).remove(0);
        assert!(matches!(check.verdict, Verdict::Problem(Kind::Denied, _)), "{check:?}");
        assert_eq!(check.value, "/x, tmpfs, not writable");
        let disk =
            RegionDir { in_memory: false, ..place(Some(8 << 30), 8 << 30) }.judge(Path::new("/x"), None);
        assert!(matches!(&disk[0].verdict, Verdict::Advice(t) if t.contains("/dev/shm")));
    }

    #[test]
    fn looking_at_a_region_directory_leaves_nothing_there() {
        let dir = tempfile::tempdir().unwrap();
        let found = checks(dir.path(), None);
        assert_eq!(found.len(), 2);
        assert!(found[0].value.ends_with(", writable"), "{found:?}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let absent = checks(&dir.path().join("absent"), None).remove(0);
        assert!(matches!(absent.verdict, Verdict::Problem(Kind::NotFound, _)));
        fs::write(dir.path().join("file"), "").unwrap();
        let file = checks(&dir.path().join("file"), None).remove(0);
        assert!(matches!(file.verdict, Verdict::Problem(Kind::Invalid, _)));
    }
}
