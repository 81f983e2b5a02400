//! Memory: how much there is, who limits it, and what the kernel does with it.

use rustix::process::{Resource, Rlimit, getrlimit};
use windlass_core::error::Kind;

use super::system::System;
use super::{Check, LEAST, ROOM};
use crate::console::bytes;

/// All checks of memory.
pub(crate) fn checks(system: &System) -> Vec<Check> {
    vec![
        memory(system),
        cgroup(system),
        locked(system, getrlimit(Resource::Memlock)),
        huge(system),
        shared_huge(system),
        reserved(system),
        swap(system),
        overcommit(system),
    ]
}

/// Memory that a measurement may use, if that is known.
pub(crate) fn spare(system: &System) -> Option<u64> {
    let group = system.group().map(|g| g.limit.saturating_sub(g.used));
    [system.available(), group].into_iter().flatten().min()
}

fn memory(system: &System) -> Check {
    let name = "memory";
    let (Some(total), Some(free)) = (system.meminfo("MemTotal"), system.available()) else {
        return Check::unknown(name);
    };
    Check::ok(name, format!("{} available of {}", bytes(free), bytes(total)))
        .advise(
            free < ROOM,
            format!(
                "a region holds two versions of the model; make {} available for a small one",
                bytes(ROOM)
            ),
        )
        .problem(
            free < LEAST,
            Kind::Exhausted,
            format!(
                "not even an agent without a model fits into less than {}; free some memory",
                bytes(LEAST)
            ),
        )
}

fn cgroup(system: &System) -> Check {
    let name = "cgroup memory";
    let Some(group) = system.group() else { return Check::ok(name, "no limit") };
    let room = group.limit.saturating_sub(group.used);
    let raise = "raise the container's memory limit (--memory, resources.limits.memory)";
    Check::ok(name, format!("{} used of {}", bytes(group.used), bytes(group.limit)))
        .advise(
            room < ROOM,
            format!("regions count against this limit, and {} are left; {raise}", bytes(room)),
        )
        .problem(
            room < LEAST,
            Kind::Exhausted,
            format!(
                "only {} are left, so the kernel would kill the process for a region; {raise}",
                bytes(room)
            ),
        )
}

/// Locking is attempted and not needed. Half of the memory is more than any region should take.
fn locked(system: &System, limit: Rlimit) -> Check {
    let name = "memlock";
    let Some(soft) = limit.current else { return Check::ok(name, "unlimited") };
    let status = system.read("/proc/self/status").unwrap_or_default();
    let capabilities = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let capabilities = capabilities.and_then(|c| u64::from_str_radix(c.trim(), 16).ok()).unwrap_or(0);
    // CAP_IPC_LOCK is number 14. Only that of the machine's own user namespace counts, which maps every user to
    // itself; in another one it is shown but has no effect.
    let users = system.read("/proc/self/uid_map").unwrap_or_default();
    let first = users.split_whitespace().eq(["0", "0", "4294967295"]);
    if first && capabilities >> 14 & 1 == 1 {
        return Check::ok(name, format!("{}, not enforced (CAP_IPC_LOCK)", bytes(soft)));
    }
    let enough = system.meminfo("MemTotal").map_or(ROOM, |total| total / 2);
    Check::ok(name, bytes(soft)).advise(
        soft < enough,
        "regions cannot be locked and may be paged out; allow it with `ulimit -l unlimited` or --ulimit memlock=-1",
    )
}

/// The size of this machine's pages: kernels of aarch64 may have 64 KiB.
fn page() -> String {
    format!("{} KiB", rustix::param::page_size() >> 10)
}

fn huge(system: &System) -> Check {
    let (name, path) = ("transparent huge pages", "/sys/kernel/mm/transparent_hugepage/enabled");
    let Some(chosen) = system.chosen(path) else { return Check::unknown(name) };
    let off = chosen == "never";
    Check::ok(name, chosen).advise(
        off,
        format!("staging memory uses {} pages; `echo madvise > {path}` allows larger ones", page()),
    )
}

fn shared_huge(system: &System) -> Check {
    let (name, path) = ("huge pages of tmpfs", "/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let Some(chosen) = system.chosen(path) else { return Check::unknown(name) };
    let off = matches!(&*chosen, "never" | "deny");
    Check::ok(name, chosen).advise(
        off,
        format!(
            "regions use {} pages, which costs TLB misses and mapping time; `echo advise > {path}`",
            page()
        ),
    )
}

/// Windlass uses transparent huge pages only; memory reserved for other pages is lost. Advice starts at a tenth.
fn reserved(system: &System) -> Check {
    let name = "reserved huge pages";
    let fields = ["HugePages_Total", "HugePages_Free", "Hugepagesize", "MemTotal"].map(|f| system.meminfo(f));
    let [Some(total), Some(free), Some(size), Some(memory)] = fields else { return Check::unknown(name) };
    let idle = free.saturating_mul(size);
    let value = if total == 0 { "none".into() } else { format!("{free} free of {total} ({})", bytes(size)) };
    Check::ok(name, value).advise(
        idle > memory / 10,
        format!("{} are reserved in pages that Windlass cannot use; lower vm.nr_hugepages", bytes(idle)),
    )
}

/// Swap that is empty does no harm. Pages of tmpfs go there as others do, and come back one by one.
fn swap(system: &System) -> Check {
    let name = "swap";
    let (Some(total), Some(free)) = (system.meminfo("SwapTotal"), system.meminfo("SwapFree")) else {
        return Check::unknown(name);
    };
    let used = total.saturating_sub(free);
    let value = if total == 0 { "none".into() } else { format!("{} used of {}", bytes(used), bytes(total)) };
    Check::ok(name, value).advise(
        used > total / 100,
        "the system is swapping, and regions can be swapped too; use less memory, or `swapoff -a`",
    )
}

fn overcommit(system: &System) -> Check {
    let name = "overcommit";
    match system.number("/proc/sys/vm/overcommit_memory") {
        Some(0) => Check::ok(name, "heuristic"),
        Some(1) => Check::ok(name, "always"),
        Some(2) => {
            let fields = [system.meminfo("CommitLimit"), system.meminfo("Committed_AS")];
            let value = match fields {
                [Some(limit), Some(used)] => format!("strict, {} left", bytes(limit.saturating_sub(used))),
                _ => "strict".into(),
            };
            Check::ok(name, value).advise(
                true,
                "mappings count in full, even pages that are never touched; set vm.overcommit_memory=0, or leave room",
            )
        }
        _ => Check::unknown(name),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::super::system::tests::machine;
    use super::*;

    const MEMINFO: &str = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n\
        HugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB\n";

    fn advice(check: &Check) -> &str {
        match &check.verdict {
            Verdict::Advice(text) => text,
            other => panic!("{}: {other:?}", check.name),
        }
    }

    #[test]
    fn a_machine_without_proc_is_unknown_and_not_blamed() {
        let (_dir, system) = machine(&[]);
        let no_limit = Rlimit { current: None, maximum: None };
        let all = checks(&system).into_iter().filter(|c| c.name != "memlock");
        for check in all.chain([locked(&system, no_limit)]) {
            assert_eq!(check.verdict, Verdict::Ok, "{check:?}");
            assert!(["unknown", "no limit", "unlimited"].contains(&&*check.value), "{check:?}");
        }
        assert_eq!(spare(&system), None);
    }

    #[test]
    fn short_memory_is_advice_and_none_is_a_problem() {
        let of = |available: u64| {
            let text = format!("MemTotal: 16777216 kB\nMemAvailable: {available} kB\n");
            let (_dir, system) = machine(&[("/proc/meminfo", &text)]);
            memory(&system).verdict
        };
        assert_eq!(of(8 << 20), Verdict::Ok);
        assert!(matches!(of(1 << 20), Verdict::Advice(text) if text.contains("two versions")));
        assert!(matches!(of(10), Verdict::Problem(Kind::Exhausted, _)));
    }

    #[test]
    fn a_tight_cgroup_is_advice_and_a_full_one_a_problem() {
        let of = |used: u64| {
            let (_dir, system) = machine(&[
                ("/proc/self/cgroup", "0::/\n"),
                ("/proc/meminfo", MEMINFO),
                ("/sys/fs/cgroup/memory.max", &(4u64 << 30).to_string()),
                ("/sys/fs/cgroup/memory.current", &used.to_string()),
            ]);
            assert_eq!(spare(&system), Some((4 << 30) - used));
            cgroup(&system)
        };
        assert_eq!(of(1 << 30).verdict, Verdict::Ok);
        assert!(advice(&of(3 << 30)).contains("1.00 GiB are left"));
        assert!(matches!(of((4 << 30) - 5).verdict, Verdict::Problem(Kind::Exhausted, _)));
    }

    #[test]
    fn locking_needs_a_limit_or_the_capability() {
        let low = Rlimit { current: Some(8 << 20), maximum: None };
        let meminfo = ("/proc/meminfo", MEMINFO);
        let (_dir, system) = machine(&[meminfo, ("/proc/self/status", "CapEff:\t0000000000000400\n")]);
        assert!(advice(&locked(&system, low)).contains("ulimit -l"));
        let half = Rlimit { current: Some(8 << 30), maximum: None };
        assert_eq!(locked(&system, half).verdict, Verdict::Ok);
        let able = ("/proc/self/status", "CapEff:\t0000000000004400\n");
        let map = "/proc/self/uid_map";
        let (_dir, system) = machine(&[meminfo, able, (map, "         0          0 4294967295\n")]);
        assert_eq!(locked(&system, low).verdict, Verdict::Ok);
        let (_dir, rootless) = machine(&[meminfo, able, (map, "0 1000 1\n")]);
        assert!(advice(&locked(&rootless, low)).contains("ulimit -l"));
    }

    #[test]
    fn each_unhelpful_setting_of_the_kernel_gets_its_line() {
        let (_dir, system) = machine(&[
            ("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
            (
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size advise [never] deny force\n",
            ),
            ("/proc/sys/vm/overcommit_memory", "2\n"),
            (
                "/proc/meminfo",
                "MemTotal: 1000 kB\nHugePages_Total: 3\nHugePages_Free: 2\nHugepagesize: 100 kB\n\
                 SwapTotal: 1000 kB\nSwapFree: 500 kB\nCommitLimit: 3 kB\nCommitted_AS: 1 kB\n",
            ),
        ]);
        assert!(advice(&huge(&system)).contains("echo madvise"));
        assert!(advice(&shared_huge(&system)).contains("echo advise"));
        assert!(advice(&reserved(&system)).contains("200.00 KiB are reserved"));
        assert!(advice(&swap(&system)).contains("swapoff"));
        assert!(advice(&overcommit(&system)).contains("vm.overcommit_memory=0"));
        let (_dir, system) = machine(&[
            ("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            (
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size [advise] never deny force\n",
            ),
            ("/proc/sys/vm/overcommit_memory", "0\n"),
            ("/proc/meminfo", MEMINFO),
        ]);
        for check in
            [huge(&system), shared_huge(&system), reserved(&system), swap(&system), overcommit(&system)]
        {
            assert!(check.verdict == Verdict::Ok && check.value != "unknown", "{check:?}");
        }
    }
}
