//! What the steps of a model took, for the controller's page.

use std::time::{Duration, Instant};

use crate::service::controller::wire::{Lane, Span};

/// A step that took time.
#[derive(Clone, Debug)]
pub(super) struct Interval {
    lane: Lane,
    what: &'static str,
    pub(super) began: Instant,
    ended: Instant,
    bytes: Option<u64>,
}

impl Interval {
    pub(super) fn of(
        lane: Lane,
        what: &'static str,
        ended: Instant,
        ms: f64,
        bytes: Option<u64>,
    ) -> Interval {
        let span = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
        Interval { lane, what, began: ended.checked_sub(span).unwrap_or(ended), ended, bytes }
    }

    /// As it is told now.
    pub(super) fn span(&self) -> Span {
        // One clock for both: a step of no duration must not end before it began.
        let now = Instant::now();
        let ago = |at: Instant| now.saturating_duration_since(at).as_secs_f64() * 1e3;
        let (began_ms_ago, ended_ms_ago) = (ago(self.began), ago(self.ended));
        Span { lane: self.lane, what: self.what.into(), began_ms_ago, ended_ms_ago, bytes: self.bytes }
    }
}

/// Bytes per second, lately.
#[derive(Debug, Default)]
pub(super) struct Rate {
    last: Option<(Instant, u64)>,
    value: f64,
}

impl Rate {
    pub(super) fn at(&mut self, bytes: u64, now: Instant) -> f64 {
        match self.last {
            Some((then, before)) if bytes >= before => {
                let seconds = now.duration_since(then).as_secs_f64();
                if seconds > 0.05 {
                    self.value = (bytes - before) as f64 / seconds;
                    self.last = Some((now, bytes));
                }
            }
            Some(_) | None => *self = Rate { last: Some((now, bytes)), value: 0.0 },
        }
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_took_no_time_does_not_end_before_it_began() {
        let now = Instant::now();
        for ms in [0.0, 1e-6, 3.5, -1.0, f64::NAN, f64::INFINITY] {
            let span = Interval::of(Lane::Wire, "apply", now, ms, None).span();
            assert!(span.began_ms_ago >= span.ended_ms_ago && span.ended_ms_ago >= 0.0, "{ms}: {span:?}");
        }
    }

    #[test]
    fn the_rate_is_of_late_and_begins_anew_with_every_pull() {
        let (mut rate, start) = (Rate::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(rate.at(1000, at(0)).to_bits(), 0f64.to_bits());
        assert!((rate.at(2000, at(100)) - 10_000.0).abs() < 1.0);
        // Too soon to tell.
        assert!((rate.at(2001, at(101)) - 10_000.0).abs() < 1.0);
        assert!((rate.at(2000 + 500, at(200)) - 5000.0).abs() < 1.0);
        assert_eq!(rate.at(7, at(300)).to_bits(), 0f64.to_bits());
    }
}
