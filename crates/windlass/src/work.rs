//! Work on many blocks with several threads.
//!
//! Owns: the threads of a command. [`each`] is for work without order; [`in_order`] is for output that must
//! not depend on the number of threads. Both stop early on Ctrl-C and on failure, and report the failure with
//! the lowest index, so that the same input gives the same error whatever the number of threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::session::Cancel;

/// The most consecutive blocks that a thread claims at once.
const HANDFUL: u64 = 16;

/// Calls `work(state, i)` for every `i` below `count`, each thread with a state of its own, and returns the
/// states.
pub fn each<S: Send>(
    threads: usize,
    count: u64,
    cancel: &Cancel,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, u64) -> Result<(), Error> + Sync,
) -> Result<Vec<S>, Error> {
    // Neighbouring blocks go to one thread: the memory that it asks for ahead of time is its own next block's.
    let handful = (count / (threads as u64 * 8).max(1)).clamp(1, HANDFUL);
    claim(threads, count.div_ceil(handful), state, |s, h| {
        (h * handful..count.min((h + 1) * handful)).try_for_each(|i| {
            cancel.check()?;
            work(s, i)
        })
    })
}

/// [`each`] without looking at Ctrl-C: every claimed index reaches `work`.
fn claim<S: Send>(
    threads: usize,
    count: u64,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, u64) -> Result<(), Error> + Sync,
) -> Result<Vec<S>, Error> {
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
        // More threads than there is work would only cost memory. Where the system gives no more of them, those
        // there are do all of it.
        let wanted = (threads as u64).clamp(1, count.max(1));
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
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
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
pub fn in_order<B: Batch, K: Send>(
    threads: usize,
    count: u64,
    cancel: &Cancel,
    sink: K,
    batch: impl Fn() -> B + Sync,
    make: impl Fn(&mut B, u64) -> Result<(), Error> + Sync,
    put: impl Fn(&mut K, &mut B) -> Result<(), Error> + Sync,
) -> Result<(K, Vec<B>), Error> {
    let handfuls = count.div_ceil(HANDFUL);
    let turn = Mutex::new(Turn { next: 0, failed: false, sink });
    let passed = Condvar::new();
    let batches = claim(threads, handfuls, batch, |b, h| {
        let alarm = Alarm { turn: &turn, passed: &passed };
        let run = |b: &mut B| {
            cancel.check()?;
            for i in h * HANDFUL..count.min((h + 1) * HANDFUL) {
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
    let turn = turn.into_inner().unwrap_or_else(PoisonError::into_inner);
    if turn.next < handfuls {
        return Err(Error::Bug("blocks were lost on the way to the output".into()));
    }
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
            self.turn.lock().unwrap_or_else(PoisonError::into_inner).failed = true;
            self.passed.notify_all();
        }
    }
}

/// Waits until it is `h`'s turn or something failed.
fn wait<'a, K>(turn: &'a Mutex<Turn<K>>, passed: &Condvar, h: u64) -> MutexGuard<'a, Turn<K>> {
    let mut mine = turn.lock().unwrap_or_else(PoisonError::into_inner);
    while mine.next != h && !mine.failed {
        mine = passed.wait(mine).unwrap_or_else(PoisonError::into_inner);
    }
    mine
}

fn keep_first(failure: &Mutex<Option<(u64, Error)>>, i: u64, e: Error) {
    let mut first = failure.lock().unwrap_or_else(PoisonError::into_inner);
    if first.as_ref().is_none_or(|(j, _)| i < *j) {
        *first = Some((i, e));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Pile(Vec<u64>, usize);

    impl Batch for Pile {
        fn full(&self) -> bool {
            self.0.len() >= self.1
        }
    }

    #[allow(clippy::unnecessary_wraps)]
    fn drain(sink: &mut Vec<u64>, pile: &mut Pile) -> Result<(), Error> {
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
            let (out, _) = in_order(threads, count, &Cancel::default(), Vec::new(), pile, make, drain).unwrap();
            prop_assert_eq!(out, (0..count).collect::<Vec<_>>());
        }

        #[test]
        fn the_lowest_failure_wins_and_nobody_hangs(bad in 0u64..100, threads in 1usize..9) {
            let make = |p: &mut Pile, i: u64| {
                if i >= bad { Err(Error::Bug(i.to_string())) } else { p.0.push(i); Ok(()) }
            };
            let pile = || Pile(Vec::new(), 5);
            let got = in_order(threads, 100, &Cancel::default(), Vec::new(), pile, make, drain);
            prop_assert!(matches!(got, Err(Error::Bug(i)) if i == bad.to_string()));
        }
    }

    #[test]
    fn every_index_is_visited_once() {
        let visited = each(4, 1000, &Cancel::default(), Vec::new, |s, i| {
            s.push(i);
            Ok(())
        });
        let mut all: Vec<u64> = visited.unwrap().concat();
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn cancelled_work_stops_with_its_own_error() {
        let cancel = Cancel::default();
        let done = each(
            3,
            u64::MAX,
            &cancel,
            || (),
            |(), i| {
                if i == 50 {
                    cancel.set();
                }
                Ok(())
            },
        );
        assert!(matches!(done, Err(Error::Cancelled)));
    }

    #[test]
    fn cancelling_ordered_work_leaves_nobody_waiting() {
        let cancel = Cancel::default();
        let make = |p: &mut Pile, i| {
            if i == 500 {
                cancel.set();
            }
            p.0.push(i);
            Ok(())
        };
        let done = in_order(4, 1 << 40, &cancel, Vec::new(), || Pile(Vec::new(), 3), make, drain);
        assert!(matches!(done, Err(Error::Cancelled)));
    }

    #[test]
    fn a_panic_in_ordered_work_leaves_nobody_waiting() {
        let make = |_: &mut Pile, i| if i == 40 { panic!("on purpose") } else { Ok(()) };
        let pile = || Pile(Vec::new(), 3);
        let work = || in_order(4, 1000, &Cancel::default(), Vec::new(), pile, make, drain);
        assert!(std::panic::catch_unwind(work).is_err());
    }
}
