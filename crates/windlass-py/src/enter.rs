//! The one door through which Python waits for Rust.
//!
//! Work that may block runs on a thread of its own, which never touches Python. The caller waits for it with the
//! interpreter released and looks for signals several times a second: Ctrl-C sets the work's [`Stop`], the thread is
//! joined, and the `KeyboardInterrupt` goes on its way. No thread outlives its call, except those that pass a receiver's versions
//! on; they end with the receiver.
//!
//! Everything that has a life in Rust also has a [`Home`]: the process that made it. A child of `fork` has the
//! memory of its parent's regions and none of its threads; it gets an error instead of a hang.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use pyo3::prelude::*;
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

use crate::errors::Failure;

/// Between two looks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// The process that something belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Home(u32);

impl Home {
    /// This one.
    pub(crate) fn here() -> Home {
        Home(std::process::id())
    }

    /// Whether this is it.
    pub(crate) fn is_here(self) -> bool {
        self.0 == std::process::id()
    }

    /// An error in a child of `fork`.
    pub(crate) fn check(self, what: &str) -> Result<(), Failure> {
        if self.is_here() {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Unsupported,
            format!(
                "this {what} belongs to process {}, and this is its forked child {}: make a new one here, or start \
                 the child with the \"spawn\" method",
                self.0,
                std::process::id()
            ),
        ))
    }
}

/// Runs `work` where it may block, and ends it on Ctrl-C and after `timeout`.
pub(crate) fn enter<T: Send>(
    py: Python<'_>,
    timeout: Option<f64>,
    work: impl FnOnce(&Stop) -> Result<T, Failure> + Send,
) -> PyResult<T> {
    let stop = stop_after(timeout)?;
    windlass::start_log();
    std::thread::scope(|scope| {
        let (ended, mut end) = channel::<()>();
        let theirs = stop.clone();
        let thread = std::thread::Builder::new()
            .name("windlass-call".into())
            .spawn_scoped(scope, move || {
                let result = work(&theirs);
                drop(ended);
                result
            })
            .map_err(|e| Failure::new(Kind::Exhausted, format!("cannot start a thread: {e}")))?;
        let (mut thread, mut interrupted) = (Some(thread), Ok(()));
        let result = loop {
            // Once, however short the call: a model that computes in Python gives the interpreter back late.
            let over = py.detach(|| is_over(&mut end).then(|| thread.take().map(ScopedJoinHandle::join)));
            if let Some(result) = over.flatten() {
                break result;
            }
            if interrupted.is_ok() {
                interrupted = py.check_signals();
                if interrupted.is_err() {
                    stop.set();
                }
            }
        };
        let result = result
            .map_err(|_| Failure::new(Kind::Bug, "a thread panicked; its message is on standard error"))?;
        // What the work says after it was called off is of no interest.
        interrupted?;
        Ok(result?)
    })
}

/// The channel carries nothing; it closes when the work is over, also by a panic.
fn is_over(end: &mut Receiver<()>) -> bool {
    end.recv_timeout(LOOK) == Err(RecvTimeoutError::Disconnected)
}

/// The stop of a call. `None` is no deadline.
pub(crate) fn stop_after(timeout: Option<f64>) -> Result<Stop, Failure> {
    let Some(seconds) = timeout else { return Ok(Stop::never()) };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(Failure::invalid(format!(
            "a timeout of {seconds} s makes no sense; give seconds, 0 or more"
        )));
    }
    // Beyond the clock is as good as none.
    Ok(Duration::try_from_secs_f64(seconds).map_or_else(|_| Stop::never(), Stop::after))
}
