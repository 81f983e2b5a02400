//! Whether there is room, before anything is written.
//!
//! A page of a tmpfs that cannot be had is SIGBUS in the middle of a store, or the end of the process by the
//! container's memory limit. So both limits are asked first: the free space of the filesystem, and the memory that
//! the control groups above this process still allow (v2, v1 or both) and that the machine has at all; the tightest
//! counts. Page cache does not count as used there, since the kernel drops it before it kills.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A limit and what is left of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes that can still be had.
    pub free: u64,
    /// Bytes in all, as configured.
    pub configured: u64,
    /// Where the limit is set.
    pub place: PathBuf,
}

/// Room that lacks. Its text says how much is needed, free and configured, and what to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// The filesystem is too small.
    Filesystem { needed: u64, room: Room },
    /// The limit on the size of a file is too low.
    FileSize {
        /// Bytes of the largest file that is needed.
        needed: u64,
        room: Room,
    },
    /// A memory limit is too low.
    Memory { needed: u64, room: Room },
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (needed, room, what, remedy) = match self {
            Shortage::Filesystem { needed, room } => (
                needed,
                room,
                "filesystem",
                "give the container more (docker --shm-size, Kubernetes emptyDir medium: Memory with a sizeLimit), \
                 or set region_dir to a larger tmpfs, or allow memfd",
            ),
            Shortage::FileSize { needed, room } => {
                (needed, room, "limit on the size of a file", "raise it (ulimit -f, systemd LimitFSIZE=)")
            }
            Shortage::Memory { needed, room } => (
                needed,
                room,
                "memory limit",
                "raise it (docker --memory, Kubernetes resources.limits.memory), take a larger machine, or lower the \
                 history cap",
            ),
        };
        write!(
            f,
            "{} needed, {} free of the {} configured for the {what} {}; nothing was written: {remedy}",
            Bytes(*needed),
            Bytes(room.free),
            Bytes(room.configured),
            room.place.display()
        )
    }
}

/// A number of bytes, exactly and readably.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 3] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match UNITS.iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, name)) => write!(f, "{} bytes ({:.1} {name})", self.0, self.0 as f64 / *unit as f64),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// Free and total space of the filesystem that `dir` lies on.
pub(super) fn filesystem(dir: &Path) -> io::Result<Room> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(Room {
        free: stat.f_bavail.saturating_mul(stat.f_frsize),
        configured: stat.f_blocks.saturating_mul(stat.f_frsize),
        place: dir.to_owned(),
    })
}

/// The limit on the size of a file that this process writes; `None` if there is none.
pub(super) fn file_size() -> Option<Room> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current?;
    Some(Room { free: limit, configured: limit, place: "/proc/self/limits".into() })
}

/// The tightest memory limit over this process; `None` if none can be read.
pub fn memory() -> Option<Room> {
    let read = |path: &Path| fs::read_to_string(path).ok();
    let mounts = read(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let machine = read(Path::new(MEMINFO)).and_then(|text| machine(&text));
    tightest(&mounts, &groups, read).into_iter().chain(machine).min_by_key(|r| r.free)
}

const MEMINFO: &str = "/proc/meminfo";

/// What the machine itself can still give: a tmpfs may be larger than memory.
fn machine(meminfo: &str) -> Option<Room> {
    let bytes = |key: &str| {
        let line = meminfo.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let swap = |key| bytes(key).unwrap_or(0);
    Some(Room {
        free: bytes("MemAvailable")?.saturating_add(swap("SwapFree")),
        configured: bytes("MemTotal")?.saturating_add(swap("SwapTotal")),
        place: MEMINFO.into(),
    })
}

/// The names of the files of one version of control groups.
struct Names {
    limit: &'static str,
    used: &'static str,
    /// Keys of `memory.stat` whose pages can be dropped.
    cache: [&'static str; 2],
}

const V2: Names =
    Names { limit: "memory.max", used: "memory.current", cache: ["inactive_file", "active_file"] };
const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};
/// v1 says "no limit" by a number near the end of its range.
const UNLIMITED: u64 = 1 << 60;

fn tightest(mounts: &str, groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<Room> {
    let mut rooms = Vec::new();
    for line in mounts.lines() {
        // id parent device root mount-point options … - type source super-options
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (Some(root), Some(point), Some(kind)) = (left.get(3), left.get(4), right.first()) else {
            continue;
        };
        let controllers = right.get(2).copied().unwrap_or_default();
        let names = match *kind {
            "cgroup2" => &V2,
            "cgroup" if controllers.split(',').any(|c| c == "memory") => &V1,
            _ => continue,
        };
        let Some(path) = group_path(groups, *kind == "cgroup2") else { continue };
        // Inside a container the mount may show only our own subtree.
        let below = path.strip_prefix(root.trim_end_matches('/')).unwrap_or("");
        let point = Path::new(point);
        let mut group = point.join(below.trim_start_matches('/'));
        loop {
            rooms.extend(room(&group, names, &read));
            if group == point || !group.pop() {
                break;
            }
        }
    }
    rooms.into_iter().min_by_key(|r| r.free)
}

/// Our group's path: of the unified hierarchy, or of the one with the memory controller.
fn group_path(groups: &str, unified: bool) -> Option<&str> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let ours =
            if unified { controllers.is_empty() } else { controllers.split(',').any(|c| c == "memory") };
        ours.then_some(path)
    })
}

fn room(group: &Path, names: &Names, read: &impl Fn(&Path) -> Option<String>) -> Option<Room> {
    let number = |name: &str| read(&group.join(name))?.trim().parse::<u64>().ok();
    // "max" is no number and no limit.
    let limit = number(names.limit).filter(|&l| l < UNLIMITED)?;
    let used = number(names.used)?;
    let stat = read(&group.join("memory.stat")).unwrap_or_default();
    let cache: u64 = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(key, _)| names.cache.contains(key))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .sum();
    let free = limit.saturating_sub(used.saturating_sub(cache));
    Some(Room { free, configured: limit, place: group.join(names.limit) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn world(files: &[(&str, &str)]) -> impl Fn(&Path) -> Option<String> + use<> {
        let files: HashMap<PathBuf, String> =
            files.iter().map(|(p, t)| (PathBuf::from(p), (*t).to_owned())).collect();
        move |path: &Path| files.get(path).cloned()
    }

    #[test]
    fn the_tightest_limit_up_the_v2_hierarchy_counts_and_page_cache_does_not() {
        let mounts = "25 1 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n30 1 0:3 / / rw - ext4 /dev/x rw\n";
        let read = world(&[
            ("/sys/fs/cgroup/pod/box/memory.max", "max\n"),
            ("/sys/fs/cgroup/pod/box/memory.current", "5000\n"),
            ("/sys/fs/cgroup/pod/memory.max", "10000\n"),
            ("/sys/fs/cgroup/pod/memory.current", "7000\n"),
            ("/sys/fs/cgroup/pod/memory.stat", "anon 10\ninactive_file 1500\nactive_file 500\nfile 9999\n"),
        ]);
        let room = tightest(mounts, "0::/pod/box\n", read).unwrap();
        assert_eq!((room.free, room.configured), (5000, 10000));
        assert_eq!(room.place, Path::new("/sys/fs/cgroup/pod/memory.max"));
    }

    #[test]
    fn a_v1_limit_is_found_where_a_container_mounts_only_its_own_subtree() {
        let mounts = "9 1 0:9 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup ro,memory\n\
                      8 1 0:8 / /sys/fs/cgroup/cpu ro - cgroup cgroup ro,cpu\n";
        let groups = "4:memory:/docker/abc\n3:cpu:/\n0::/\n";
        let read = world(&[
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4096"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5000"),
            ("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1000\n"),
        ]);
        assert_eq!(tightest(mounts, groups, read).unwrap().free, 96);
        let none = world(&[
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5000"),
        ]);
        assert_eq!(tightest(mounts, groups, none), None);
    }

    #[test]
    fn the_memory_of_the_machine_is_a_limit_too() {
        let text = "MemTotal:       100 kB\nMemFree:  1 kB\nMemAvailable:    40 kB\nSwapTotal: 8 kB\nSwapFree: 7 kB\n";
        let room = machine(text).unwrap();
        assert_eq!((room.free, room.configured), (47 * 1024, 108 * 1024));
        assert_eq!(machine("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn a_shortage_says_needed_free_configured_and_what_to_set() {
        let room = Room { free: 60 << 20, configured: 64 << 20, place: "/dev/shm".into() };
        let text = Shortage::Filesystem { needed: 3 << 30, room: room.clone() }.to_string();
        for part in [
            "3221225472 bytes (3.0 GiB) needed",
            "60.0 MiB",
            "64.0 MiB",
            "/dev/shm",
            "--shm-size",
            "region_dir",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = Shortage::Memory { needed: 100, room }.to_string();
        assert!(text.contains("100 bytes needed") && text.contains("limits.memory"), "{text}");
    }

    #[test]
    fn this_machine_can_be_asked_for_room() {
        let room = filesystem(Path::new("/dev/shm")).unwrap();
        assert!(room.free <= room.configured && room.configured > 0);
        let room = memory().unwrap();
        assert!(room.free <= room.configured && room.free > 0);
    }
}
