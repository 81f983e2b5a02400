//! Exponential backoff for retries.
//!
//! Owns: [`Backoff`], which counts failures and gives the delay before the next attempt. Receivers that follow an agent use
//! it, and the barrier uses it for receivers that follow a controller. It must not read a clock or draw random numbers: the
//! caller passes the [`Span`] and a salt, and does the waiting.
//!
//! The delay doubles with every failure, from [`Span::first_ms`] to [`Span::cap_ms`]. The salt subtracts up to a quarter of
//! it, so that receivers which failed together do not retry together. A success ([`Backoff::reset`]) starts over, and so
//! does a newer version than the one that failed.

use crate::digest::splitmix;

/// The first and the longest delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// After the first failure, in milliseconds.
    pub first_ms: u64,
    /// The longest, in milliseconds; not below `first_ms`.
    pub cap_ms: u64,
}

/// How long to wait before the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    pub ms: u64,
    /// Failures in a row.
    pub failures: u32,
    /// This failure made the delay longer, so it is worth a log line. At the cap the delay stays the same.
    pub longer: bool,
}

/// Failures in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Counts a failure.
    pub fn failed(&mut self, span: Span, salt: u64) -> Delay {
        let before = nominal(span, self.failures);
        self.failures = self.failures.saturating_add(1);
        let longest = nominal(span, self.failures);
        let jitter = splitmix(salt ^ u64::from(self.failures)) % (longest / 4 + 1);
        Delay { ms: longest - jitter, failures: self.failures, longer: longest != before }
    }

    /// The attempt succeeded, or a newer version is there to try.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Failures in a row.
    pub fn failures(self) -> u32 {
        self.failures
    }
}

/// The delay after so many failures, before the salt; 0 without failures.
fn nominal(span: Span, failures: u32) -> u64 {
    let Some(doublings) = failures.checked_sub(1) else { return 0 };
    let factor = 1u64.checked_shl(doublings).unwrap_or(u64::MAX);
    span.first_ms.saturating_mul(factor).min(span.cap_ms.max(span.first_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Span = Span { first_ms: 100, cap_ms: 5000 };

    #[test]
    fn delays_double_up_to_the_cap_and_report_only_growth() {
        let mut backoff = Backoff::default();
        let delays: Vec<Delay> = (0..70).map(|salt| backoff.failed(SPAN, salt)).collect();
        for (delay, nominal) in delays.iter().zip([100, 200, 400, 800, 1600, 3200, 5000, 5000]) {
            assert!((nominal * 3 / 4..=nominal).contains(&delay.ms), "{delay:?} is not near {nominal}");
        }
        assert!(delays.iter().all(|r| r.ms <= SPAN.cap_ms));
        assert_eq!(delays.iter().filter(|r| r.longer).count(), 7);
        assert_eq!((backoff.failures(), delays[69].failures), (70, 70));
        backoff.reset();
        let again = backoff.failed(SPAN, 0);
        assert!(again.longer && again.ms <= 100, "{again:?}");
    }

    #[test]
    fn receivers_that_failed_together_do_not_retry_together() {
        let delay = |salt| {
            let mut backoff = Backoff::default();
            (0..8).map(|_| backoff.failed(SPAN, salt).ms).last().unwrap_or_default()
        };
        let mut delays: Vec<u64> = (0..64).map(delay).collect();
        delays.sort_unstable();
        delays.dedup();
        assert!(delays.len() > 48, "{delays:?}");
    }

    #[test]
    fn spans_at_the_ends_of_the_range_do_no_harm() {
        for (first_ms, cap_ms) in [(0, 0), (0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX), (7, 3)] {
            let (mut backoff, span) = (Backoff::default(), Span { first_ms, cap_ms });
            for salt in 0..200 {
                assert!(backoff.failed(span, salt).ms <= cap_ms.max(first_ms));
            }
        }
    }
}
