//! Work on many blocks with several threads.
//!
//! Owns: the threads of a pass over an image, which end before the call returns, and the priority of background work. Called
//! by [`crate::seal`], by the code that applies deltas, and by the commands. [`each`] is for work without order; [`in_order`] is for output
//! that must not depend on the number of threads. Both look at their [`Stop`] before every block, end early on
//! failure, and report the failure with the lowest index, so that the same input gives the same error whatever
//! the number of threads. Errors are the caller's own type, which must be able to say why work was stopped.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::stop::{Stop, Stopped};

/// The most consecutive blocks that a thread claims at once.
const HANDFUL: u64 = 16;
/// The `nice` value of background work: a third of a core where another thread wants all of it.
const NICE: i32 = 5;

/// How many of a process's threads do background work. A trainer and a receiver on one host then take at most half of its
/// cores, and the engine beside them keeps the rest.
pub fn fewer(threads: usize) -> usize {
    threads.div_ceil(4)
}

/// Lowers the priority of this thread and of those that it starts, for good.
pub fn step_back() {
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::debug!(%error, "the background work keeps its priority");
    }
}

/// Runs background work in a thread of lower priority ([`step_back`]), and waits for it.
///
/// # Panics
/// If the work does.
pub fn aside<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let stepped_back = || {
        step_back();
        work()
    };
    let done = std::thread::scope(|scope| scope.spawn(stepped_back).join());
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Calls `work(state, i)` for every `i` below `count`, each thread with a state of its own, and returns the
/// states.
pub fn each<S: Send, E: From<Stopped> + Send>(
    threads: usize,
    count: u64,
    stop: &Stop,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, u64) -> Result<(), E> + Sync,
) -> Result<Vec<S>, E> {
    // Neighbouring blocks go to one thread: the memory that it asks for ahead of time is its own next block's.
    let handful = (count / (threads as u64 * 8).max(1)).clamp(1, HANDFUL);
    claim(threads, count.div_ceil(handful), state, |s, h| {
        (h * handful..count.min((h + 1) * handful)).try_for_each(|i| {
            stop.check()?;
            work(s, i)
        })
    })
}

/// The most threads that are of use to a pass over memory.
fn most_threads() -> u64 {
    static MOST: OnceLock<u64> = OnceLock::new();
    *MOST.get_or_init(|| std::thread::available_parallelism().map_or(1, |cores| 4 * cores.get() as u64))
}

/// [`each`] without a [`Stop`]: every claimed index reaches `work`.
pub(crate) fn claim<S: Send, E: Send>(
    threads: usize,
    count: u64,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, u64) -> Result<(), E> + Sync,
) -> Result<Vec<S>, E> {
    let next = AtomicU64::new(0);
    let failure = Mutex::new(None);
    let run = || {
        let mut s = state();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return s;
            }
            if let Err(e) = work(&mut s, i) {
                // Indices are claimed in order, so everything below `i` still finishes or fails.
                next.fetch_max(count, Ordering::Relaxed);
                keep_first(&failure, i, e);
                return s;
            }
        }
    };
    let states = std::thread::scope(|scope| {
        // More threads than there is work, or than cores can keep busy, would only cost memory: one that finds none for its
        // stack ends the process. Where the system gives no more of them, those there are do all of it.
        let wanted = (threads as u64).clamp(1, count.clamp(1, most_threads()));
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, run).ok();
        let others: Vec<_> = (1..wanted).map_while(spawn).collect();
        let mut states = vec![run()];
        for other in others {
            match other.join() {
                Ok(s) => states.push(s),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        states
    });
    match failure.into_inner() {
        Some((_, e)) => Err(e),
        None => Ok(states),
    }
}

/// Something that collects the results of consecutive blocks until they are put down.
pub trait Batch: Send {
    /// Whether it should be put down before more is added.
    fn full(&self) -> bool;
}

/// Calls `make(batch, i)` for every `i` below `count` on several threads and `put(sink, batch)` for their
/// results strictly in order, one thread at a time. Blocks are claimed by the handful so that threads rarely
/// wait for each other; a batch that is full waits for its turn, so that memory stays bounded. Answers the sink
/// and the threads' batches.
pub fn in_order<B: Batch, K: Send, E: From<Stopped> + Send>(
    threads: usize,
    count: u64,
    stop: &Stop,
    sink: K,
    batch: impl Fn() -> B + Sync,
    make: impl Fn(&mut B, u64) -> Result<(), E> + Sync,
    put: impl Fn(&mut K, &mut B) -> Result<(), E> + Sync,
) -> Result<(K, Vec<B>), E> {
    let handfuls = count.div_ceil(HANDFUL);
    let turn = Mutex::new(Turn { next: 0, failed: false, sink });
    let passed = Condvar::new();
    let batches = claim(threads, handfuls, batch, |b, h| {
        let alarm = Alarm { turn: &turn, passed: &passed };
        let run = |b: &mut B| {
            for i in h * HANDFUL..count.min((h + 1) * HANDFUL) {
                stop.check()?;
                make(b, i)?;
                if b.full() {
                    let mut mine = wait(&turn, &passed, h);
                    if mine.failed {
                        return Ok(());
                    }
                    put(&mut mine.sink, b)?;
                }
            }
            Ok(())
        };
        let result = run(b);
        let mut mine = wait(&turn, &passed, h);
        let result = if mine.failed { Ok(()) } else { result.and_then(|()| put(&mut mine.sink, b)) };
        mine.next += u64::from(!mine.failed);
        mine.failed |= result.is_err();
        drop(mine);
        passed.notify_all();
        drop(alarm);
        result
    })?;
    let turn = turn.into_inner();
    // A turn is skipped only after a failure or a panic, and `claim` has passed both of them on.
    assert_eq!(turn.next, handfuls, "every handful is put down once");
    Ok((turn.sink, batches))
}

struct Turn<K> {
    next: u64,
    failed: bool,
    sink: K,
}

/// Wakes the others when a thread panics, so that they end instead of waiting for its turn.
struct Alarm<'a, K> {
    turn: &'a Mutex<Turn<K>>,
    passed: &'a Condvar,
}

impl<K> Drop for Alarm<'_, K> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.turn.lock().failed = true;
            self.passed.notify_all();
        }
    }
}

/// Waits until it is `h`'s turn or something failed. The others look at their stop and end or pass the turn on,
/// so that this wait is as long as theirs.
fn wait<'a, K>(turn: &'a Mutex<Turn<K>>, passed: &Condvar, h: u64) -> MutexGuard<'a, Turn<K>> {
    let mut mine = turn.lock();
    while mine.next != h && !mine.failed {
        passed.wait(&mut mine);
    }
    mine
}

fn keep_first<E>(failure: &Mutex<Option<(u64, E)>>, i: u64, e: E) {
    let mut first = failure.lock();
    if first.as_ref().is_none_or(|(j, _)| i < *j) {
        *first = Some((i, e));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, PartialEq)]
    enum Failed {
        At(u64),
        Stopped(Stopped),
    }

    impl From<Stopped> for Failed {
        fn from(s: Stopped) -> Failed {
            Failed::Stopped(s)
        }
    }

    struct Pile(Vec<u64>, usize);

    impl Batch for Pile {
        fn full(&self) -> bool {
            self.0.len() >= self.1
        }
    }

    #[allow(clippy::unnecessary_wraps)]
    fn drain(sink: &mut Vec<u64>, pile: &mut Pile) -> Result<(), Failed> {
        sink.append(&mut pile.0);
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn ordered_work_does_not_depend_on_threads(count in 0u64..200, threads in 1usize..9, full in 1usize..20) {
            let make = |p: &mut Pile, i| {
                if i % 7 == 3 {
                    std::thread::yield_now();
                }
                p.0.push(i);
                Ok(())
            };
            let pile = || Pile(Vec::new(), full);
            let (out, _) = in_order(threads, count, &Stop::never(), Vec::new(), pile, make, drain).unwrap();
            prop_assert_eq!(out, (0..count).collect::<Vec<_>>());
        }

        #[test]
        fn the_lowest_failure_wins_and_nobody_hangs(bad in 0u64..100, threads in 1usize..9) {
            let make = |p: &mut Pile, i: u64| {
                if i >= bad { Err(Failed::At(i)) } else { p.0.push(i); Ok(()) }
            };
            let pile = || Pile(Vec::new(), 5);
            let got = in_order(threads, 100, &Stop::never(), Vec::new(), pile, make, drain);
            prop_assert!(matches!(got, Err(Failed::At(i)) if i == bad));
        }
    }

    #[test]
    fn every_index_is_visited_once() {
        let visited = each(4, 1000, &Stop::never(), Vec::new, |s, i| {
            s.push(i);
            Ok(())
        });
        let mut all: Vec<u64> = visited.map_err(|e: Failed| e).unwrap().concat();
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn cancelled_work_stops_with_its_own_error() {
        let stop = Stop::never();
        let done = each(
            3,
            u64::MAX,
            &stop,
            || (),
            |(), i| {
                if i == 50 {
                    stop.set();
                }
                Ok(())
            },
        );
        assert!(matches!(done, Err(Failed::Stopped(Stopped::Cancelled))));
    }

    #[test]
    fn cancelling_ordered_work_leaves_nobody_waiting() {
        let stop = Stop::never();
        let make = |p: &mut Pile, i| {
            if i == 500 {
                stop.set();
            }
            p.0.push(i);
            Ok(())
        };
        let done = in_order(4, 1 << 40, &stop, Vec::new(), || Pile(Vec::new(), 3), make, drain);
        assert!(matches!(done, Err(Failed::Stopped(Stopped::Cancelled))));
    }

    #[test]
    fn a_panic_in_ordered_work_leaves_nobody_waiting() {
        let make = |_: &mut Pile, i| if i == 40 { panic!("on purpose") } else { Ok(()) };
        let pile = || Pile(Vec::new(), 3);
        let work = || in_order(4, 1000, &Stop::never(), Vec::new(), pile, make, drain);
        assert!(std::panic::catch_unwind(work).is_err());
    }

    #[test]
    fn work_past_its_deadline_stops_with_that_as_the_reason() {
        let stop = Stop::after(std::time::Duration::ZERO);
        let done = each(2, 10, &stop, || (), |(), _| Ok::<(), Failed>(()));
        assert_eq!(done, Err(Failed::Stopped(Stopped::Deadline)));
    }
}
