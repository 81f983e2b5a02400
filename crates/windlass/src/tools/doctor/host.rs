//! Cores, limits of this process, the network's settings, the container and the clock.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, Rlimit, getrlimit};
use windlass_core::error::Kind;
use windlass_data::simd;

use super::Check;
use super::system::System;
use crate::console::bytes;

/// Sealing reads two images at the speed of memory, which one or two cores do not reach.
const CORES: usize = 4;
/// What one stream needs to fill 25 Gbit/s over a millisecond: 3.1 MB, as a power of two.
const SOCKET_BUFFER: u64 = 4 << 20;
/// Descriptors for 512 receivers with six streams each, and as much again for files.
const DESCRIPTORS: u64 = 4096;
/// One transfer, its control connections and the region's files.
const LEAST_DESCRIPTORS: u64 = 64;
/// November 2023: the clock of a running machine is past it.
const LONG_AGO: u64 = 1_700_000_000;
/// The pid namespace that a machine boots with (`PROC_PID_INIT_INO`).
const FIRST_PIDS: &str = "pid:[4026531836]";

/// The processor.
pub(crate) fn cpu() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    judge_cpu(cores, simd::kernels_name())
}

fn judge_cpu(cores: usize, kernels: &str) -> Check {
    Check::ok("cpu", format!("{cores} cores, {kernels}"))
        .advise(kernels == simd::PORTABLE, simd::SLOWER)
        .advise(
            cores < CORES,
            format!(
                "with fewer than {CORES} cores, sealing does not reach memory bandwidth; give Windlass more"
            ),
        )
}

/// All other checks of the host.
pub(crate) fn checks(system: &System) -> Vec<Check> {
    let mut checks = vec![descriptors(getrlimit(Resource::Nofile))];
    checks.extend(buffers(system));
    checks.extend([congestion(system), container(system), clock(system, SystemTime::now())]);
    checks
}

fn descriptors(limit: Rlimit) -> Check {
    let name = "open files";
    let Some(soft) = limit.current else { return Check::ok(name, "unlimited") };
    let raise = match limit.maximum {
        Some(hard) if hard < DESCRIPTORS => "raise both limits (--ulimit nofile=65536:65536, limits.conf)",
        _ => "raise it with `ulimit -n 65536`",
    };
    Check::ok(name, soft.to_string())
        .advise(soft < DESCRIPTORS, format!("each receiver uses about eight descriptors; {raise}"))
        .problem(soft < LEAST_DESCRIPTORS, Kind::Exhausted, format!("not enough for one transfer; {raise}"))
}

/// How large the buffers of sockets may become: those set by hand (`net.core`), and those that grow by themselves.
fn buffers(system: &System) -> Vec<Check> {
    let settings = [
        ("net.core.wmem_max", "/proc/sys/net/core/wmem_max"),
        ("net.core.rmem_max", "/proc/sys/net/core/rmem_max"),
        ("net.ipv4.tcp_wmem", "/proc/sys/net/ipv4/tcp_wmem"),
        ("net.ipv4.tcp_rmem", "/proc/sys/net/ipv4/tcp_rmem"),
    ];
    let judge = |(name, path): (&'static str, &str)| {
        // The last of three numbers is the highest; the others have one.
        let text = system.read(path)?;
        let most: u64 = text.split_whitespace().last()?.parse().ok()?;
        let set = if name.starts_with("net.core") { "16777216" } else { "'4096 131072 16777216'" };
        Some(Check::ok(name, bytes(most)).advise(
            most < SOCKET_BUFFER,
            format!("too small for fast links between machines; `sysctl -w {name}={set}`"),
        ))
    };
    settings.into_iter().map(|s| judge(s).unwrap_or_else(|| Check::unknown(s.0))).collect()
}

fn congestion(system: &System) -> Check {
    let name = "tcp congestion control";
    let Some(text) = system.read("/proc/sys/net/ipv4/tcp_congestion_control") else {
        return Check::unknown(name);
    };
    let chosen = text.trim();
    Check::ok(name, chosen).advise(
        matches!(chosen, "reno" | "vegas"),
        "slow to fill fast links after a loss; `sysctl -w net.ipv4.tcp_congestion_control=cubic` (or bbr)",
    )
}

/// No verdict: containers are fine. But processes share a region only within one pid namespace, so it is named.
fn container(system: &System) -> Check {
    let groups = system.read("/proc/self/cgroup").unwrap_or_default();
    let kind = if system.env("KUBERNETES_SERVICE_HOST").is_some() || groups.contains("kubepods") {
        Some("kubernetes")
    } else if system.exists(Path::new("/run/.containerenv")) {
        Some("podman")
    } else if system.exists(Path::new("/.dockerenv")) || groups.contains("/docker") {
        Some("docker")
    } else {
        None
    };
    let value = match (kind, system.link("/proc/self/ns/pid")) {
        (None, None) => "unknown".into(),
        (None, Some(pids)) if pids == FIRST_PIDS => "none".into(),
        (kind, Some(pids)) if pids == FIRST_PIDS => format!("{}, pids of the host", kind.unwrap_or("none")),
        (kind, Some(pids)) => format!("{}, own {pids}", kind.unwrap_or("other")),
        (Some(kind), None) => kind.into(),
    };
    Check::ok("container", value)
}

/// Incarnations are numbered by the clock, and every wait reads it.
fn clock(system: &System, now: SystemTime) -> Check {
    let source = system.read("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    let source = source.as_deref().map_or("unknown", str::trim);
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Check::ok("clock", format!("{source}, {seconds} s since 1970"))
        .advise(
            seconds < LONG_AGO,
            "the clock is wrong; if it is set back, a restarted trainer gets an older incarnation than before",
        )
        .advise(
            matches!(source, "hpet" | "acpi_pm" | "jiffies"),
            "reading this clock takes a microsecond or more; boot with tsc as the clock source if it is stable",
        )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Verdict;
    use super::super::system::tests::machine;
    use super::*;

    fn advice(check: &Check) -> &str {
        match &check.verdict {
            Verdict::Advice(text) => text,
            other => panic!("{}: {other:?}", check.name),
        }
    }

    #[test]
    fn a_host_that_hides_everything_is_not_blamed() {
        let (_dir, system) = machine(&[]);
        let mut all = buffers(&system);
        all.extend([congestion(&system), container(&system)]);
        for check in all {
            assert_eq!(check.verdict, Verdict::Ok, "{check:?}");
            assert!(["unknown", "none"].contains(&&*check.value), "{check:?}");
        }
        assert_eq!(clock(&system, SystemTime::now()).verdict, Verdict::Ok);
    }

    #[test]
    fn few_cores_and_missing_vectors_get_advice() {
        assert_eq!(judge_cpu(4, "avx2").verdict, Verdict::Ok);
        assert!(advice(&judge_cpu(2, "avx2")).contains("fewer than 4 cores"));
        assert!(advice(&judge_cpu(2, "portable")).contains("vector"));
    }

    #[test]
    fn few_descriptors_get_advice_that_can_be_followed() {
        let of = |soft, hard| descriptors(Rlimit { current: Some(soft), maximum: Some(hard) });
        assert_eq!(of(65_536, 65_536).verdict, Verdict::Ok);
        assert!(advice(&of(1024, 524_288)).contains("ulimit -n"));
        assert!(advice(&of(1024, 1024)).contains("both limits"));
        assert!(matches!(of(32, 1024).verdict, Verdict::Problem(Kind::Exhausted, _)));
    }

    #[test]
    fn small_socket_buffers_and_slow_congestion_control_get_advice() {
        let (_dir, system) = machine(&[
            ("/proc/sys/net/core/wmem_max", "212992\n"),
            ("/proc/sys/net/core/rmem_max", "8388608\n"),
            ("/proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304\n"),
            ("/proc/sys/net/ipv4/tcp_rmem", "4096\t16384\t65536\n"),
            ("/proc/sys/net/ipv4/tcp_congestion_control", "reno\n"),
        ]);
        let [wmem, rmem, tcp_wmem, tcp_rmem] = buffers(&system).try_into().unwrap();
        assert!(advice(&wmem).contains("sysctl -w net.core.wmem_max=16777216"));
        assert_eq!((rmem.verdict, tcp_wmem.verdict), (Verdict::Ok, Verdict::Ok));
        assert!(advice(&tcp_rmem).contains("'4096 131072 16777216'"));
        assert!(advice(&congestion(&system)).contains("cubic"));
    }

    #[test]
    fn containers_are_named_with_their_pids() {
        let (dir, system) = machine(&[("/.dockerenv", ""), ("/proc/self/ns/x", "")]);
        assert_eq!(container(&system).value, "docker");
        std::os::unix::fs::symlink("pid:[4026532999]", dir.path().join("proc/self/ns/pid")).unwrap();
        assert_eq!(container(&system).value, "docker, own pid:[4026532999]");
        let (_dir, system) = machine(&[("/proc/self/cgroup", "0::/kubepods/pod1\n")]);
        assert_eq!(container(&system).value, "kubernetes");
    }

    #[test]
    fn wrong_and_slow_clocks_get_advice() {
        let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        let (_dir, system) = machine(&[(path, "hpet\n")]);
        assert!(advice(&clock(&system, SystemTime::now())).contains("tsc"));
        assert!(advice(&clock(&system, UNIX_EPOCH + Duration::from_secs(5))).contains("clock is wrong"));
        assert!(advice(&clock(&system, UNIX_EPOCH - Duration::from_secs(5))).contains("clock is wrong"));
    }
}
