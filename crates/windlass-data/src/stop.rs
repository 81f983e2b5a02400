//! When to give up: a flag that anybody may set, and a deadline.
//!
//! Owns: [`Stop`], which every wait and every long loop of this crate takes. A clone shares the flag; a deadline
//! can be made sooner for a part of the work and never later. It sets no alarm: whoever waits looks at
//! [`Stop::left`] and at the flag at least every [`Stop::GLANCE`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use windlass_core::error::Kind;

/// Why something was given up.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Stopped {
    #[error("called off")]
    Cancelled,
    #[error("the deadline passed")]
    Deadline,
}

impl Stopped {
    /// The kind of failure (see [`windlass_core::error`]).
    pub const fn kind(self) -> Kind {
        match self {
            Stopped::Cancelled => Kind::Cancelled,
            Stopped::Deadline => Kind::Timeout,
        }
    }
}

/// A flag and a deadline.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    flag: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl Stop {
    /// The longest that a wait sleeps before it looks at the flag again.
    pub const GLANCE: Duration = Duration::from_millis(100);

    /// No deadline; the flag can be set.
    pub fn never() -> Stop {
        Stop::default()
    }

    /// A deadline `timeout` from now.
    pub fn after(timeout: Duration) -> Stop {
        Stop::never().with_timeout(timeout)
    }

    /// Shares `flag`, which a signal handler may set; no deadline.
    pub fn from_flag(flag: Arc<AtomicBool>) -> Stop {
        Stop { flag, deadline: None }
    }

    /// The same flag with a deadline `timeout` from now, or the present one if that is sooner.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Stop {
        // A timeout beyond the clock's range is as good as none.
        let until = Instant::now().checked_add(timeout);
        let deadline = match (self.deadline, until) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Stop { flag: Arc::clone(&self.flag), deadline }
    }

    /// Calls it off, for all clones.
    pub fn set(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }

    /// Whether the flag is set or the deadline has passed.
    pub fn is_set(&self) -> bool {
        self.check().is_err()
    }

    /// How long until the deadline; `None` if there is none.
    pub fn left(&self) -> Option<Duration> {
        self.deadline.map(|d| d.saturating_duration_since(Instant::now()))
    }

    /// How long to sleep before looking again: until the deadline, at most [`Stop::GLANCE`].
    pub fn nap(&self) -> Duration {
        self.left().map_or(Self::GLANCE, |left| left.min(Self::GLANCE))
    }

    /// An error if it is time to give up.
    pub fn check(&self) -> Result<(), Stopped> {
        if self.flag.load(Ordering::Relaxed) {
            return Err(Stopped::Cancelled);
        }
        match self.left() {
            Some(Duration::ZERO) => Err(Stopped::Deadline),
            Some(_) | None => Ok(()),
        }
    }
}

/// Milliseconds since `begun`, which is now after.
pub(crate) fn lap(begun: &mut Instant) -> f64 {
    let now = Instant::now();
    let taken = now.duration_since(std::mem::replace(begun, now));
    taken.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_shares_its_flag_and_keeps_the_sooner_deadline() {
        let stop = Stop::after(Duration::from_mins(1));
        let longer = stop.with_timeout(Duration::from_hours(1));
        assert!(longer.left().unwrap() <= Duration::from_mins(1));
        let passed = stop.with_timeout(Duration::ZERO);
        assert_eq!(passed.check(), Err(Stopped::Deadline));
        assert_eq!(stop.check(), Ok(()));
        longer.set();
        assert_eq!(stop.check(), Err(Stopped::Cancelled));
        assert_eq!(Stop::never().left(), None);
    }
}
