//! How long what failed is left alone before it is tried again.
//!
//! Owns: [`Backoff`], which counts failures and says how long to rest after each. Used wherever a version is fetched or
//! loaded again: by receivers that follow an agent, and by the barrier for those that follow a controller. It must not know
//! a clock or draw random numbers: whoever asks gives the [`Span`] and a salt, and does the waiting.
//!
//! The rest doubles with every failure, from [`Span::first_ms`] to [`Span::cap_ms`]; up to a quarter of it is taken off by
//! the salt, so that receivers which failed together do not come back together. It is never longer than the cap. A success
//! ([`Backoff::reset`]) begins anew, and so does whatever is newer than what failed.

use crate::digest::splitmix;

/// The first and the longest rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// After the first failure, in milliseconds.
    pub first_ms: u64,
    /// The longest, in milliseconds; not below `first_ms`.
    pub cap_ms: u64,
}

/// How long to rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// This long, in milliseconds.
    pub ms: u64,
    /// Failures in a row.
    pub failures: u32,
    /// The rests have become longer by this failure: worth a word. At the cap they stay as they are, and nobody wants to
    /// read that again and again.
    pub longer: bool,
}

/// Failures in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Counts a failure.
    pub fn failed(&mut self, span: Span, salt: u64) -> Rest {
        let before = nominal(span, self.failures);
        self.failures = self.failures.saturating_add(1);
        let longest = nominal(span, self.failures);
        let jitter = splitmix(salt ^ u64::from(self.failures)) % (longest / 4 + 1);
        Rest { ms: longest - jitter, failures: self.failures, longer: longest != before }
    }

    /// It succeeded, or there is something newer to try.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Failures in a row.
    pub fn failures(self) -> u32 {
        self.failures
    }
}

/// The rest after so many failures, before the salt; none after none.
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
    fn rests_double_up_to_the_cap_and_say_so_only_while_they_grow() {
        let mut backoff = Backoff::default();
        let rests: Vec<Rest> = (0..70).map(|salt| backoff.failed(SPAN, salt)).collect();
        for (rest, nominal) in rests.iter().zip([100, 200, 400, 800, 1600, 3200, 5000, 5000]) {
            assert!((nominal * 3 / 4..=nominal).contains(&rest.ms), "{rest:?} is not near {nominal}");
        }
        assert!(rests.iter().all(|r| r.ms <= SPAN.cap_ms));
        assert_eq!(rests.iter().filter(|r| r.longer).count(), 7);
        assert_eq!((backoff.failures(), rests[69].failures), (70, 70));
        backoff.reset();
        let again = backoff.failed(SPAN, 0);
        assert!(again.longer && again.ms <= 100, "{again:?}");
    }

    #[test]
    fn those_who_failed_together_do_not_come_back_together() {
        let rest = |salt| {
            let mut backoff = Backoff::default();
            (0..8).map(|_| backoff.failed(SPAN, salt).ms).last().unwrap_or_default()
        };
        let mut rests: Vec<u64> = (0..64).map(rest).collect();
        rests.sort_unstable();
        rests.dedup();
        assert!(rests.len() > 48, "{rests:?}");
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
