//! `windlass doctor`: checks this machine and gives advice.
//!
//! Owns: the list of checks, what is good enough and why, and one line of advice for each thing that is not.
//! Called by `cli`. Must not: change anything on the machine (one file of no bytes is made in the region directory
//! and removed; a page is pinned and an allocation exported on each GPU, and both given back), or fail because something
//! cannot be found out: that is `unknown`, and nothing is held against the machine for it. The CUDA driver is loaded,
//! within a deadline.
//!
//! A check is `ok`, `advice` (Windlass works, but slower or for fewer receivers or smaller models than it could), or
//! a `problem` (Windlass cannot be used here until it is solved). The exit code is that of the first problem's
//! [`Kind`], 0 if there is none. Thresholds and their reasons are next to the checks.
//!
//! | module | checks |
//! |---|---|
//! | [`host`] | cores, limits of descriptors and sockets, container, clock |
//! | [`gpu`] | CUDA driver, devices, pinned memory, peer access, IPC, torch's allocator |
//! | [`memory`] | memory, cgroup, locking, huge pages, swap, overcommit |
//! | [`nixl`] | the NIXL library, RDMA devices, GPUDirect |
//! | [`region_dir`] | the region directory |
//! | [`speed`] | copying, reading two streams, loopback |
//!
//! [`choice`] checks nothing: it explains which transport would be chosen for trainers on this machine.

pub(crate) mod choice;
pub(crate) mod gpu;
pub(crate) mod host;
pub(crate) mod memory;
pub(crate) mod nixl;
pub(crate) mod region_dir;
pub(crate) mod speed;
pub(crate) mod system;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};
use windlass_core::error::Kind;
use windlass_data::cuda::survey::Gpus;

use crate::console::round;
use crate::console::{Session, Table};
use crate::error::Error;
use speed::Speed;
use system::System;

/// Room that a region should have: two slots of the smallest models that people post-train, half a billion bf16
/// parameters (1 GB) each.
pub(crate) const ROOM: u64 = 2 << 30;
/// Minimum memory of an agent or a receiver without its images.
pub(crate) const LEAST: u64 = 64 << 20;

/// The checked arguments of `doctor`.
#[derive(Debug)]
pub(crate) struct Doctor {
    /// Where regions would be.
    pub(crate) region_dir: PathBuf,
    /// Bytes of the model that a choice is made for.
    pub(crate) model_bytes: Option<u64>,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Good, or unknown.
    Ok,
    /// Can be improved, with advice.
    Advice(String),
    /// Windlass cannot be used, with advice.
    Problem(Kind, String),
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    pub(crate) name: Cow<'static, str>,
    pub(crate) value: String,
    pub(crate) verdict: Verdict,
}

impl Check {
    /// A check without findings.
    pub(crate) fn ok(name: impl Into<Cow<'static, str>>, value: impl Into<String>) -> Check {
        Check { name: name.into(), value: value.into(), verdict: Verdict::Ok }
    }

    /// A value that cannot be determined.
    pub(crate) fn unknown(name: impl Into<Cow<'static, str>>) -> Check {
        Check::ok(name, "unknown")
    }

    /// This check, with a line of advice where `needed`.
    #[must_use]
    pub(crate) fn advise(mut self, needed: bool, advice: impl Into<String>) -> Check {
        if needed && self.verdict == Verdict::Ok {
            self.verdict = Verdict::Advice(advice.into());
        }
        self
    }

    /// This check, a problem where `needed`.
    #[must_use]
    pub(crate) fn problem(mut self, needed: bool, kind: Kind, advice: impl Into<String>) -> Check {
        if needed {
            self.verdict = Verdict::Problem(kind, advice.into());
        }
        self
    }

    fn verdict(&self) -> &'static str {
        match self.verdict {
            Verdict::Ok => "ok",
            Verdict::Advice(_) => "advice",
            Verdict::Problem(..) => "problem",
        }
    }

    fn advice(&self) -> Option<&str> {
        match &self.verdict {
            Verdict::Ok => None,
            Verdict::Advice(text) | Verdict::Problem(_, text) => Some(text),
        }
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "value": self.value,
            "verdict": self.verdict(),
            "advice": self.advice(),
        })
    }
}

impl Doctor {
    /// Looks at everything, prints it, and gives the exit code.
    pub(crate) fn run(&self, session: &Session) -> Result<u8, Error> {
        let system = System::here();
        let mut checks = vec![host::cpu()];
        checks.extend(memory::checks(&system));
        checks.extend(region_dir::checks(&self.region_dir, system.available()));
        checks.extend(host::checks(&system));
        let gpus = system.gpus();
        checks.extend(gpu::checks(&gpus));
        let nixl = nixl::Found::look(&system);
        checks.extend(nixl.checks());
        let speed = Speed::measure(memory::spare(&system), session.cancel())?;
        checks.extend(speed.checks());
        let (found, cuda) = gpus.side();
        let choices = choice::choices(&found, &cuda, self.model_bytes, (nixl.usable(), nixl.has_rdma()));
        report(&checks, &gpus, &choices, &speed, session)
    }
}

/// The exit code: that of the first problem.
fn exit_code(checks: &[Check]) -> u8 {
    let problems = checks.iter().filter_map(|c| match &c.verdict {
        Verdict::Problem(kind, _) => Some(kind.row().exit),
        Verdict::Ok | Verdict::Advice(_) => None,
    });
    problems.take(1).sum()
}

fn report(
    checks: &[Check],
    gpus: &Gpus,
    choices: &[choice::Asked],
    speed: &Speed,
    session: &Session,
) -> Result<u8, Error> {
    let exit = exit_code(checks);
    let figure = |rate: &std::io::Result<f64>| rate.as_ref().ok().map(|r| round(*r));
    let object = json!({
        "ok": exit == 0,
        "exit": exit,
        "checks": checks.iter().map(Check::json).collect::<Vec<_>>(),
        "gpu": gpus.json(),
        "choices": choices.iter().map(choice::Asked::json).collect::<Vec<_>>(),
        "copy_gbps": figure(&speed.copy),
        "read2_gbps": figure(&speed.read2),
        "loopback_gbps": figure(&speed.loopback),
        "loopback_streams": speed::STREAMS,
    });
    session.finish(object, |out| {
        let mut table = Table::new(["check", "value", "verdict"]);
        for check in checks {
            table.row([check.name.to_string(), check.value.clone(), check.verdict().into()]);
        }
        table.write(out);
        for check in checks {
            if let Some(advice) = check.advice() {
                let _ = write!(out, "\n{} ({}): {advice}", check.name, check.verdict());
            }
        }
        out.push_str("\n\nfor trainers here, and engines\n");
        choices.iter().for_each(|asked| asked.write(out));
        let counted = |verdict| checks.iter().filter(|c| c.verdict() == verdict).count();
        let verdicts = ["ok", "advice", "problem"].map(|v| format!("{} {v}", counted(v)));
        let _ = writeln!(out, "\n{} checks: {}", checks.len(), verdicts.join(", "));
    })?;
    Ok(exit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_that_of_the_first_problem() {
        let fine = Check::ok("a", "1").advise(true, "more");
        assert_eq!(exit_code(std::slice::from_ref(&fine)), 0);
        let full = Check::ok("b", "0").advise(true, "more").problem(true, Kind::Exhausted, "make room");
        let denied = Check::ok("c", "no").problem(true, Kind::Denied, "ask").advise(true, "lost");
        assert_eq!(exit_code(&[fine.clone(), full.clone(), denied.clone()]), Kind::Exhausted.row().exit);
        assert_eq!(exit_code(&[denied.clone(), full]), Kind::Denied.row().exit);
        assert_eq!(denied.advice(), Some("ask"), "a problem is not watered down to advice");
        assert_eq!((fine.verdict(), fine.advice()), ("advice", Some("more")));
    }
}
