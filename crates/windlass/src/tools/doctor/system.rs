//! What the kernel says about itself in `/proc` and `/sys`.
//!
//! Owns: reading it, below a root that tests choose. Everything may be missing: containers hide some of it, and
//! kernels differ.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read as _;
use std::path::{Component, Path, PathBuf};

use windlass_data::cuda::CudaError;
use windlass_data::cuda::probe::Survey;
use windlass_data::cuda::survey::{Gpus, probe_with_timeout};

/// Files there are small; what is longer is cut.
const MAX_BYTES: u64 = 1 << 20;

/// The files of a machine, its CUDA driver and the environment of this process.
#[derive(Debug)]
pub(crate) struct System {
    root: PathBuf,
    env: fn(&str) -> Option<OsString>,
    gpus: fn() -> Result<Survey, CudaError>,
}

/// A cgroup's memory: the tightest limit on the way up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// The most it may have.
    pub(crate) limit: u64,
    /// What it has and cannot give back.
    pub(crate) used: u64,
}

impl System {
    /// This machine.
    pub(crate) fn here() -> System {
        System { root: "/".into(), env: |name| std::env::var_os(name), gpus: probe_with_timeout }
    }

    /// The GPUs and their driver.
    pub(crate) fn gpus(&self) -> Gpus {
        Gpus::look(&self.root, self.env, self.gpus)
    }

    /// An environment variable.
    pub(crate) fn env(&self, name: &str) -> Option<OsString> {
        (self.env)(name)
    }

    /// The contents of a file, if it is there and is text. `path` begins with a slash.
    pub(crate) fn read(&self, path: &str) -> Option<String> {
        let mut text = String::new();
        File::open(self.path(Path::new(path))).ok()?.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        Some(text)
    }

    /// The first number in a file.
    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.split_whitespace().next()?.parse().ok()
    }

    /// Whether something is there.
    pub(crate) fn exists(&self, path: &Path) -> bool {
        self.path(path).exists()
    }

    /// Where a link leads to.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        std::fs::read_link(self.path(Path::new(path))).ok()?.into_os_string().into_string().ok()
    }

    fn path(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// A field of `/proc/meminfo`: bytes where the kernel says kB, else as it is.
    pub(crate) fn meminfo(&self, field: &str) -> Option<u64> {
        let text = self.read("/proc/meminfo")?;
        let mut words =
            text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?.split_whitespace();
        let n: u64 = words.next()?.parse().ok()?;
        if words.next() == Some("kB") { n.checked_mul(1024) } else { Some(n) }
    }

    /// Memory that can be had without swapping.
    pub(crate) fn available(&self) -> Option<u64> {
        self.meminfo("MemAvailable")
    }

    /// The chosen word of a file such as `always [madvise] never`.
    pub(crate) fn chosen(&self, path: &str) -> Option<String> {
        let text = self.read(path)?;
        let word = text.split_whitespace().find_map(|w| w.strip_prefix('[')?.strip_suffix(']'))?;
        Some(word.to_owned())
    }

    /// The memory limit that this process is nearest to, of its cgroup or one above it. `None` if there is none, or
    /// none that can be seen. Both versions of cgroups are looked for, as machines may have both mounted.
    pub(crate) fn group(&self) -> Option<Group> {
        let text = self.read("/proc/self/cgroup")?;
        let mut found: Vec<Group> = Vec::new();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let (mounts, files): (&[&str], _) = if controllers.is_empty() {
                (&["/sys/fs/cgroup", "/sys/fs/cgroup/unified"], &V2)
            } else if controllers.split(',').any(|c| c == "memory") {
                (&["/sys/fs/cgroup/memory"], &V1)
            } else {
                continue;
            };
            // Seen from inside a namespace, a path may begin with `..`: what is above cannot be looked at.
            let below: PathBuf =
                Path::new(path).components().filter(|c| matches!(c, Component::Normal(_))).collect();
            for mount in mounts {
                let groups =
                    below.ancestors().filter_map(|dir| self.group_at(&Path::new(mount).join(dir), files));
                found.extend(groups);
            }
        }
        found.into_iter().min_by_key(|g| g.limit.saturating_sub(g.used))
    }

    fn group_at(&self, dir: &Path, files: &GroupFiles) -> Option<Group> {
        let dir = dir.to_str()?;
        // `max`, or in version 1 the largest multiple of a page, means no limit.
        let limit = self.number(&format!("{dir}/{}", files.limit)).filter(|&l| l < 1 << 60)?;
        let current = self.number(&format!("{dir}/{}", files.current))?;
        let stat = self.read(&format!("{dir}/memory.stat")).unwrap_or_default();
        let field = |name: &str| {
            let line = stat.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        // Cached files are counted but given back when needed. Shared memory is counted with them and is not.
        let reclaimable = field(files.cache).saturating_sub(field(files.shared));
        Some(Group { limit, used: current.saturating_sub(reclaimable) })
    }
}

/// What a version of cgroups calls its files and fields.
struct GroupFiles {
    limit: &'static str,
    current: &'static str,
    cache: &'static str,
    shared: &'static str,
}

const V2: GroupFiles =
    GroupFiles { limit: "memory.max", current: "memory.current", cache: "file", shared: "shmem" };
const V1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    current: "memory.usage_in_bytes",
    cache: "total_cache",
    shared: "total_shmem",
};

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine that has only these files.
    pub(crate) fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, System) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let system = System::at(dir.path());
        (dir, system)
    }

    impl System {
        /// The machine whose `/proc` and `/sys` are below `root`, with an empty environment and no CUDA driver.
        pub(crate) fn at(root: &Path) -> System {
            System {
                root: root.to_owned(),
                env: |_| None,
                gpus: || Err(CudaError::NoDriver { said: String::new() }),
            }
        }

        /// The same machine with GPUs.
        pub(crate) fn with_gpus(self, gpus: fn() -> Result<Survey, CudaError>) -> System {
            System { gpus, ..self }
        }

        /// The same machine with an environment.
        pub(crate) fn with_env(self, env: fn(&str) -> Option<OsString>) -> System {
            System { env, ..self }
        }
    }

    #[test]
    fn the_nearest_limit_of_nested_cgroups_counts() {
        let (_dir, system) = machine(&[
            ("/proc/self/cgroup", "0::/pod/engine\n"),
            ("/sys/fs/cgroup/pod/engine/memory.max", "max\n"),
            ("/sys/fs/cgroup/pod/engine/memory.current", "7\n"),
            ("/sys/fs/cgroup/pod/memory.max", "1000\n"),
            ("/sys/fs/cgroup/pod/memory.current", "900\n"),
            ("/sys/fs/cgroup/pod/memory.stat", "anon 100\nfile 700\nshmem 300\nfile_mapped 9\n"),
            ("/sys/fs/cgroup/memory.max", "800\n"),
            ("/sys/fs/cgroup/memory.current", "100\n"),
        ]);
        // 900 in use, of which 400 are cached files.
        assert_eq!(system.group(), Some(Group { limit: 1000, used: 500 }));
    }

    #[test]
    fn cgroups_of_version_one_are_read_also_from_within_a_container() {
        let limit = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
        let usage = ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "100\n");
        let (_dir, system) = machine(&[
            ("/proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/docker/ab12\n0::/\n"),
            limit,
            usage,
        ]);
        assert_eq!(system.group(), Some(Group { limit: 5000, used: 100 }));
        let none = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        let (_dir, system) = machine(&[("/proc/self/cgroup", "4:memory:/../..\n"), none, usage]);
        assert_eq!(system.group(), None);
    }

    #[test]
    fn what_is_not_there_or_not_understood_is_unknown() {
        let (_dir, system) = machine(&[
            (
                "/proc/meminfo",
                "MemTotal: much kB\nMemAvailable:\nHugePages_Total:       3\nSwapTotal: 2 kB\n",
            ),
            ("/proc/self/cgroup", "nonsense\n::\n0::\n"),
            ("/sys/fs/cgroup/memory.max", "-5\n"),
            ("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise never\n"),
        ]);
        assert_eq!((system.meminfo("MemTotal"), system.available(), system.group()), (None, None, None));
        assert_eq!((system.meminfo("HugePages_Total"), system.meminfo("SwapTotal")), (Some(3), Some(2048)));
        assert_eq!(system.chosen("/sys/kernel/mm/transparent_hugepage/enabled"), None);
    }
}
