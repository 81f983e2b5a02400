//! How fast the machine moves bytes, measured for a moment.
//!
//! The figures are the limits that benches are held against ([`crate::tools::limits`]), with all cores, in GB
//! (10⁹ bytes) of one image a second. They are rough: a few rounds, the middle one counts.

use std::fs::File;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use windlass_core::error::Kind;
use windlass_data::file::io_kind;

use super::Check;
use crate::error::Error;
use crate::tools::limits;
use windlass_data::stop::Stop;

/// Streams of a transfer if nothing else is said.
pub(crate) const STREAMS: usize = 6;

/// Time for each measurement, but for the round that it ends in.
const BUDGET: Duration = Duration::from_millis(100);
/// Image measured on, where there is memory for it: larger than the caches of most machines.
const IMAGE: u64 = 128 << 20;
/// A stream on this machine that stands still for so long is broken.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Any server of the last ten years copies faster with two cores; so does a link of 40 Gbit/s.
const SLOW_COPY: f64 = 5.0;
/// Reading two images gives no more than half of what reading one does.
const SLOW_READ: f64 = 4.0;
/// One core moves this much through the kernel's own loopback.
const SLOW_LOOPBACK: f64 = 1.0;

/// What was measured, or why not.
#[derive(Debug)]
pub(crate) struct Speed {
    pub(crate) copy: io::Result<f64>,
    /// Reading two streams of memory in step.
    pub(crate) read2: io::Result<f64>,
    /// `sendfile` to `recv` over [`STREAMS`] connections to this machine itself.
    pub(crate) loopback: io::Result<f64>,
}

impl Speed {
    /// Measures, using at most a fifth of the memory that is to `spare`.
    pub(crate) fn measure(spare: Option<u64>, cancel: &Stop) -> Result<Speed, Error> {
        let len = spare.map_or(IMAGE, |s| (s / 16).min(IMAGE)) as usize;
        // What it is filled with makes no difference, but pages that were never written to are all the same one.
        let (Some(mut a), Some(mut b)) = (filled(len), filled(len)) else {
            let short = || Err(io::ErrorKind::OutOfMemory.into());
            return Ok(Speed { copy: short(), read2: short(), loopback: short() });
        };
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let rate = |time: Duration, len: usize| len as f64 / time.as_secs_f64().max(1e-9) / 1e9;
        let copy = middle(BUDGET, cancel, || {
            let start = Instant::now();
            limits::copy(&a, &mut b, threads);
            Ok(start.elapsed())
        })?;
        let read2 = middle(BUDGET, cancel, || {
            let start = Instant::now();
            limits::read2(&a, &b, threads);
            Ok(start.elapsed())
        })?;
        // Half of it, as the file is memory too.
        let (sent, into) = (&b[..len / 2], &mut a[..len / 2]);
        let loopback = match in_memory(sent) {
            Ok(file) => middle(BUDGET, cancel, || limits::loopback(STREAMS, &file, into, TIMEOUT))?,
            Err(e) => Err(e),
        };
        let figure = |time: io::Result<Duration>, len| time.map(|time| rate(time, len));
        let (copy, read2) = (figure(copy, len), figure(read2, len));
        Ok(Speed { copy, read2, loopback: figure(loopback, len / 2) })
    }

    /// The checks of what was measured.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let machine = "check for other load on the machine, and for empty memory channels";
        let memory = |name, rate: &io::Result<f64>, bar| match rate {
            Ok(rate) => Check::ok(name, gbps(*rate)).advise(
                *rate < bar,
                format!("memory is slow for sealing and applying (below {bar} GB/s); {machine}"),
            ),
            Err(e) => Check::ok(name, format!("unknown: {e}")),
        };
        vec![
            memory("memory copy", &self.copy, SLOW_COPY),
            memory("memory read, 2 streams", &self.read2, SLOW_READ),
            self.judge_loopback(),
        ]
    }

    fn judge_loopback(&self) -> Check {
        let name = "loopback";
        let e = match &self.loopback {
            Ok(rate) => {
                return Check::ok(name, format!("{}, {STREAMS} streams", gbps(*rate))).advise(
                    *rate < SLOW_LOOPBACK,
                    "loopback TCP is slow; a sandbox's network stack or firewall rules may be the cause",
                );
            }
            Err(e) => e,
        };
        // An agent listens on 127.0.0.1 unless told otherwise.
        let check = Check::ok(name, e.to_string());
        match e.kind() {
            // Short memory has a check of its own.
            io::ErrorKind::OutOfMemory => check,
            io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::NetworkDown
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::AddrNotAvailable => check.problem(
                true,
                Kind::Unsupported,
                "127.0.0.1 cannot be reached; bring the interface up (`ip link set lo up`)",
            ),
            _ => check.problem(
                true,
                io_kind(e),
                "nothing could be sent to 127.0.0.1; solve other problems first, then look at sandbox and firewall",
            ),
        }
    }
}

fn gbps(rate: f64) -> String {
    format!("{rate:.1} GB/s")
}

fn filled(len: usize) -> Option<Vec<u8>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(len).ok()?;
    memory.resize(len, 1);
    Some(memory)
}

fn in_memory(contents: &[u8]) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("windlass-doctor", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(contents)?;
    Ok(file)
}

/// The middle of as many rounds as fit into the budget, at least three. The first, which finds caches cold and
/// threads asleep, is not counted.
fn middle(
    budget: Duration,
    cancel: &Stop,
    mut round: impl FnMut() -> io::Result<Duration>,
) -> Result<io::Result<Duration>, Error> {
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 4 || start.elapsed() < budget {
        cancel.check()?;
        match round() {
            Ok(time) => times.push(time),
            Err(e) => return Ok(Err(e)),
        }
    }
    let counted = &mut times[1..];
    counted.sort();
    Ok(Ok(counted[counted.len() / 2]))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn the_middle_round_counts_and_the_first_does_not() {
        let mut rounds = [90, 5, 1, 3].into_iter();
        let round = || rounds.next().map(Duration::from_millis).ok_or(io::ErrorKind::Other.into());
        let time = middle(Duration::ZERO, &Stop::never(), round);
        assert_eq!(time.unwrap().unwrap(), Duration::from_millis(3));
        let cancelled = Stop::never();
        cancelled.set();
        assert!(matches!(middle(BUDGET, &cancelled, || Ok(Duration::ZERO)), Err(Error::Cancelled)));
        assert!(middle(BUDGET, &Stop::never(), || Err(io::ErrorKind::Other.into())).unwrap().is_err());
    }

    #[test]
    fn slow_machines_get_advice_and_broken_loopback_is_a_problem() {
        let fast = Speed { copy: Ok(9.0), read2: Ok(9.0), loopback: Ok(4.0) };
        assert!(fast.checks().iter().all(|c| c.verdict == Verdict::Ok));
        let slow = Speed { copy: Ok(1.0), read2: Ok(1.0), loopback: Ok(0.3) };
        assert!(slow.checks().iter().all(|c| matches!(c.verdict, Verdict::Advice(_))));
        let broken = |kind: io::ErrorKind| {
            Speed { copy: Err(kind.into()), read2: Err(kind.into()), loopback: Err(kind.into()) }.checks()
        };
        let [copy, read2, loopback] = broken(io::ErrorKind::NetworkUnreachable).try_into().unwrap();
        assert_eq!((copy.verdict, read2.verdict), (Verdict::Ok, Verdict::Ok));
        assert!(matches!(&loopback.verdict, Verdict::Problem(Kind::Unsupported, t) if t.contains("lo up")));
        let blocked = broken(io::ErrorKind::PermissionDenied).remove(2);
        assert!(matches!(&blocked.verdict, Verdict::Problem(Kind::Denied, t) if t.contains("firewall")));
        assert!(broken(io::ErrorKind::OutOfMemory).iter().all(|c| c.verdict == Verdict::Ok));
    }

    #[test]
    fn measuring_keeps_to_the_memory_there_is() {
        let speed = Speed::measure(Some(16 << 20), &Stop::never()).unwrap();
        for rate in [&speed.copy, &speed.read2, &speed.loopback] {
            assert!(rate.as_ref().unwrap() > &0.0, "{speed:?}");
        }
    }
}
