//! Who a process is, in one word, and whether it still lives.
//!
//! An owner is `pid << 32 | low half of the start time`, both as `/proc/<pid>/stat` gives them. A process id that
//! is used again has another start time, so an owner that is dead stays dead.
//!
//! A killed process is dead when nothing of it runs any more. A zombie whose threads are still being torn down may
//! be in the middle of a store, so it counts as alive until its last thread is gone.

use std::fmt;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Pid, test_kill_process};

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(pub(crate) u64);

impl Owner {
    /// This process.
    pub(crate) fn me() -> io::Result<Owner> {
        // Asked for once, and again in a child of fork.
        static ME: AtomicU64 = AtomicU64::new(0);
        let pid = std::process::id();
        let known = Owner(ME.load(Ordering::Relaxed));
        if known.pid() == pid {
            return Ok(known);
        }
        let stat = fs::read_to_string("/proc/self/stat")?;
        let start = Stat::parse(&stat).ok_or(io::ErrorKind::InvalidData)?.start;
        let me = Owner(u64::from(pid) << 32 | start & u64::from(u32::MAX));
        ME.store(me.0, Ordering::Relaxed);
        Ok(me)
    }

    /// Its process id.
    pub(crate) fn pid(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Whether any of its threads may still run. In doubt, it lives: that costs patience, the other way bytes.
    pub(crate) fn is_alive(self) -> bool {
        match fs::read_to_string(format!("/proc/{}/stat", self.pid())) {
            Ok(text) => Stat::parse(&text).is_none_or(|s| self.matches(&s)),
            // Where /proc hides other people's processes, only a signal tells. A word that names no process may hold a
            // number that is no process id.
            Err(_) => i32::try_from(self.pid())
                .ok()
                .and_then(Pid::from_raw)
                .is_some_and(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH)),
        }
    }

    /// Whether it is this process, and not a copy made by fork.
    pub(crate) fn is_me(self) -> bool {
        self.pid() == std::process::id()
    }

    fn matches(self, stat: &Stat) -> bool {
        stat.start & u64::from(u32::MAX) == self.0 & u64::from(u32::MAX)
            && !(stat.zombie && stat.threads <= 1)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("no process");
        }
        write!(f, "pid {}, {}", self.pid(), if self.is_alive() { "alive" } else { "dead" })
    }
}

/// Whether the owner in a word lives; false for an empty word.
pub(crate) fn alive(owner: u64) -> bool {
    owner != 0 && Owner(owner).is_alive()
}

/// The fields of `/proc/<pid>/stat` that matter here.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    zombie: bool,
    threads: u64,
    start: u64,
}

impl Stat {
    fn parse(text: &str) -> Option<Stat> {
        // The name of the command, in parentheses, may hold spaces and parentheses itself.
        let fields: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_whitespace().collect();
        Some(Stat {
            zombie: matches!(*fields.first()?, "Z" | "X" | "x"),
            threads: fields.get(17)?.parse().ok()?,
            start: fields.get(19)?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_alive_until_it_is_killed_even_before_it_is_reaped() {
        assert!(Owner::me().unwrap().is_alive());
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let owner = Owner(u64::from(child.id()) << 32 | Stat::parse(&stat).unwrap().start & 0xffff_ffff);
        assert!(owner.is_alive());
        assert!(!Owner(owner.0 ^ 1).is_alive(), "the same pid with another start time is another process");
        child.kill().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while owner.is_alive() {
            assert!(std::time::Instant::now() < deadline, "a zombie is dead");
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!owner.is_alive());
        assert!(!alive(0));
    }

    #[test]
    fn a_word_that_names_no_process_is_not_alive() {
        assert!(!alive(u64::MAX) && !alive(1 << 63) && !alive(7));
    }

    #[test]
    fn a_zombie_whose_threads_still_run_counts_as_alive() {
        let text =
            |state: &str, threads: u64| format!("7 (a) b) {state} {} {threads} 0 99 1 2", "0 ".repeat(16));
        let owner = Owner((7 << 32) + 99);
        let parse = |s: &str, t| Stat::parse(&text(s, t)).unwrap();
        assert_eq!(parse("S", 3), Stat { zombie: false, threads: 3, start: 99 });
        assert!(owner.matches(&parse("Z", 2)));
        assert!(!owner.matches(&parse("Z", 1)));
        assert_eq!(Stat::parse("garbage"), None);
    }
}
