//! How a receiver without a controller retries after transient failures.
//!
//! Owns: which failures are transient ([`Transient`]), waiting for an unreachable publisher ([`retry_transient`]), and the
//! backoff between two attempts at a version ([`Attempts`]). Called by [`super::Receive`]; with a controller, the
//! controller decides when to retry. Must not: repeat itself: people see the first failure and then one line a minute,
//! programs get an event whenever the backoff grows.
//!
//! # What ends a receiver
//!
//! Before the first success ([`Standing::New`]), a permanent failure ends the receiver, because its user is there to read
//! it: a local failure at once, a failure that a peer reports after [`CONFIRM`] times in a row, because a flipped bit does
//! not repeat. After a success ([`Standing::Proven`]) no failure ends it: the same arguments worked, so the environment has
//! changed and may change back. Local failures are then retried with a longer backoff.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::{Duration, Instant};

use serde_json::json;
use windlass_core::backoff::{Backoff, Span};
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, Version};
use windlass_data::image::ImageError;
use windlass_data::local::LocalError;
use windlass_data::receiver::{Control, ReceiverError};
use windlass_data::region::RegionError;
use windlass_data::stop::Stop;

use crate::console::Session;
use crate::error::Error;

/// Backoff for an unreachable publisher: requests are cheap, and its return should be noticed soon.
const AWAY: Span = Span { first_ms: 100, cap_ms: 5_000 };
/// Backoff for a version that could not be fetched: every attempt may cost a full image.
const FAILED: Span = Span { first_ms: 100, cap_ms: 60_000 };
/// Backoff for a lack of resources on this host.
const LACKING: Span = Span { first_ms: 5_000, cap_ms: 60_000 };
/// How often people are reminded of a failure that lasts.
const REMINDER: Duration = Duration::from_mins(1);
/// How often in a row a peer must report a permanent failure before it is believed.
pub(super) const CONFIRM: u32 = 3;
/// Poll interval for publishers without long polls.
const GLANCE: Duration = Duration::from_millis(500);

/// A failure that may be transient.
pub(super) trait Transient: std::error::Error + Into<Error> {
    /// Whether a retry may succeed.
    fn is_transient(&self) -> bool;
    /// Whether the cause is on this host.
    fn is_local(&self) -> bool;
}

/// Whether the operation has succeeded before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    New,
    Proven,
}

/// Consecutive failures, and how many of them are permanent.
#[derive(Clone, Copy, Debug, Default)]
struct Failures {
    backoff: Backoff,
    firm: u32,
    told: Option<Instant>,
}

impl Failures {
    /// The backoff after this failure, or the failure itself if it ends the receiver.
    fn failed<E: Transient>(
        &mut self,
        error: E,
        standing: Standing,
        span: Span,
        session: &Session,
    ) -> Result<Duration, Error> {
        let text = crate::error::chain(&error);
        let (is_transient, local) = (error.is_transient(), error.is_local());
        let error: Error = error.into();
        self.firm = if is_transient { 0 } else { self.firm + 1 };
        let span = match standing {
            Standing::New if !is_transient && (local || self.firm >= CONFIRM) => return Err(error),
            Standing::Proven if !is_transient && local => LACKING,
            Standing::New | Standing::Proven => span,
        };
        let rest = self.backoff.failed(span, salt());
        let due = self.told.is_none_or(|told| told.elapsed() >= REMINDER);
        // A failure that may end the receiver is reported once, at the end.
        if (due || rest.longer && session.json()) && (is_transient || standing == Standing::Proven) {
            self.told = Some(Instant::now());
            let event = json!({
                "event": "waiting", "kind": error.kind(), "error": text, "failures": rest.failures, "retry_ms": rest.ms,
            });
            session.event(&event, || match standing {
                Standing::New => format!("waiting for a trainer: {text}"),
                Standing::Proven => format!("{text}; trying again"),
            });
        }
        Ok(Duration::from_millis(rest.ms))
    }
}

impl Transient for ReceiverError {
    fn is_transient(&self) -> bool {
        if let ReceiverError::Image(ImageError::Region(RegionError::Live { .. })) = self {
            // An engine is reading the image that another layout takes the place of.
            return true;
        }
        match self.kind() {
            Kind::PeerLost | Kind::Timeout | Kind::Stale | Kind::Corrupt => true,
            // What this host has not got, waiting for the publisher does not bring.
            Kind::NotFound | Kind::Exhausted => {
                !matches!(self, ReceiverError::Image(_) | ReceiverError::Memory { .. })
            }
            Kind::Invalid | Kind::Unsupported | Kind::Denied | Kind::Cancelled | Kind::Bug => false,
        }
    }

    fn is_local(&self) -> bool {
        matches!(self, ReceiverError::Image(_) | ReceiverError::Memory { .. })
    }
}

impl Transient for LocalError {
    fn is_transient(&self) -> bool {
        match self {
            // No process listens there, or not any more.
            LocalError::Io { source, .. } => source.kind() != std::io::ErrorKind::PermissionDenied,
            LocalError::Region(e) => {
                matches!(e.kind(), Kind::NotFound | Kind::Stale | Kind::PeerLost | Kind::Timeout)
            }
            LocalError::TooLong { .. } | LocalError::Refused { .. } | LocalError::Answer { .. } => false,
        }
    }

    fn is_local(&self) -> bool {
        matches!(self, LocalError::TooLong { .. })
    }
}

/// Something that differs by process and moment.
fn salt() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Retries an operation while the publisher is unreachable.
pub(super) fn retry_transient<T, E: Transient>(
    standing: Standing,
    session: &Session,
    stop: &Stop,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, Error> {
    let mut failures = Failures::default();
    loop {
        let error = match attempt() {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        stop.check().map_err(|_| Error::Cancelled)?;
        pause(failures.failed(error, standing, AWAY, session)?, stop);
        stop.check().map_err(|_| Error::Cancelled)?;
    }
}

/// Waits so long, or until it is told to end.
pub(super) fn pause(span: Duration, stop: &Stop) {
    let until = stop.with_timeout(span);
    while !until.is_set() {
        std::thread::sleep(until.nap());
    }
}

/// The attempts at one version after the other.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    at: Option<(Incarnation, Version)>,
    failures: Failures,
}

impl Attempts {
    /// What is tried next. What is newer has not failed yet.
    pub(super) fn at(&mut self, what: (Incarnation, Version)) {
        if self.at.replace(what) != Some(what) {
            self.failures.backoff.reset();
        }
    }

    /// It is here.
    pub(super) fn succeeded(&mut self) {
        self.failures = Failures::default();
    }

    /// It failed: rests, unless the failure does not pass, until it may be tried again or there is something newer.
    pub(super) fn failed(
        &mut self,
        error: ReceiverError,
        standing: Standing,
        control: &dyn Control,
        session: &Session,
        stop: &Stop,
    ) -> Result<(), Error> {
        stop.check().map_err(|_| Error::Cancelled)?;
        let pause = self.failures.failed(error, standing, FAILED, session)?;
        rest(control, self.at, &stop.with_timeout(pause));
        stop.check().map_err(|_| Error::Cancelled)
    }
}

/// Waits until `until`, or until the publisher has something else than `failed`.
fn rest(control: &dyn Control, failed: Option<(Incarnation, Version)>, until: &Stop) {
    while !until.is_set() {
        let asked = Instant::now();
        if let Ok(info) = control.version(failed, until)
            && info.version.is_some_and(|v| Some((info.incarnation, v)) != failed)
        {
            return;
        }
        // Limits the rate of requests to a publisher that fails at once.
        let again = until.with_timeout(GLANCE.saturating_sub(asked.elapsed()));
        while !again.is_set() {
            std::thread::sleep(again.nap());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use windlass_core::digest::BlockSum;
    use windlass_core::identity::{CutsHash, Identity, LayoutHash, ModelId};
    use windlass_core::manifest::Manifest;
    use windlass_core::wire::control::{
        Registered, Registration, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
    };
    use windlass_data::receiver::ControlError;

    use super::*;

    /// Serves one version, after it was asked so often.
    struct Publisher {
        version: Version,
        after: u64,
        asked: AtomicU64,
    }

    fn lost<T>() -> Result<T, ControlError> {
        let (peer, why) = ("nobody".to_owned(), "it is away".into());
        Err(ControlError::Lost { peer, what: "get the version", why, kind: Kind::PeerLost })
    }

    impl Control for Publisher {
        fn peer(&self) -> String {
            "the publisher".into()
        }

        fn version(&self, _: Option<(Incarnation, Version)>, _: &Stop) -> Result<VersionInfo, ControlError> {
            if self.asked.fetch_add(1, Ordering::Relaxed) < self.after {
                return lost();
            }
            Ok(VersionInfo {
                version: Some(self.version),
                model_id: ModelId::new("m").unwrap(),
                incarnation: Incarnation(1),
                digest: None,
                layout_hash: LayoutHash([0; 16]),
                cuts_hash: CutsHash([0; 16]),
            })
        }

        fn manifest(&self, _: &Stop) -> Result<Manifest, ControlError> {
            lost()
        }

        fn sums(&self, _: &Identity, _: &Stop) -> Result<Vec<BlockSum>, ControlError> {
            lost()
        }

        fn register(&self, _: &Registration, _: &Stop) -> Result<Registered, ControlError> {
            lost()
        }

        fn request(&self, _: &TransferRequest, _: &Stop) -> Result<TransferAnswer, ControlError> {
            lost()
        }

        fn done(&self, _: &TransferDone, _: &Stop) -> Result<(), ControlError> {
            lost()
        }
    }

    #[test]
    fn rest_ends_with_its_time_or_as_soon_as_there_is_something_newer() {
        let failed = Some((Incarnation(1), 7));
        let same = Publisher { version: 7, after: 0, asked: AtomicU64::new(0) };
        let until = Stop::after(Duration::from_millis(120));
        rest(&same, failed, &until);
        assert!(until.is_set(), "it went on before its time, with nothing newer");
        assert_eq!(same.asked.load(Ordering::Relaxed), 1, "it asks all the time");
        // One hour.
        let newer = Publisher { version: 8, after: 1, asked: AtomicU64::new(0) };
        let until = Stop::after(Duration::from_hours(1));
        rest(&newer, failed, &until);
        assert!(!until.is_set() && newer.asked.load(Ordering::Relaxed) == 2);
        let stop = Stop::never();
        stop.set();
        rest(&same, failed, &stop.with_timeout(Duration::from_hours(1)));
    }

    #[test]
    fn nothing_ends_what_has_succeeded_before_and_a_flipped_bit_ends_nothing() {
        let session = Session::start(true).unwrap();
        let denied = || {
            let (peer, message) = ("a".to_owned(), "the token is wrong".to_owned());
            ReceiverError::from(ControlError::Refused { peer, what: "sync", kind: Kind::Denied, message })
        };
        let away = || ReceiverError::from(lost::<()>().unwrap_err());
        let full = || ReceiverError::Memory { bytes: 1, source: std::io::ErrorKind::OutOfMemory.into() };
        let mut failures = Failures::default();
        let mut new = |e| failures.failed(e, Standing::New, AWAY, &session).map(drop).map_err(|e| e.kind());
        // What is not said often enough in a row may be a flipped bit.
        for error in [denied(), denied(), away(), denied(), denied()] {
            assert_eq!(new(error), Ok(()));
        }
        assert_eq!(new(denied()), Err(Kind::Denied));
        assert_eq!(new(full()), Err(Kind::Exhausted), "nobody else said so");
        let mut failures = Failures::default();
        let mut proven = |e| failures.failed(e, Standing::Proven, AWAY, &session).unwrap();
        assert!((0..20).map(|_| proven(denied())).all(|rest| rest <= Duration::from_millis(AWAY.cap_ms)));
        assert!(proven(full()) > Duration::from_secs(30), "this host is seldom asked");
    }

    #[test]
    fn failures_count_for_one_version_and_until_it_is_there() {
        let mut attempts = Attempts::default();
        attempts.at((Incarnation(1), 7));
        for _ in 0..3 {
            attempts.failures.backoff.failed(FAILED, 0);
            attempts.at((Incarnation(1), 7));
        }
        assert_eq!(attempts.failures.backoff.failures(), 3);
        attempts.at((Incarnation(1), 8));
        assert_eq!(attempts.failures.backoff.failures(), 0);
        attempts.failures.backoff.failed(FAILED, 0);
        attempts.at((Incarnation(2), 8));
        assert_eq!(
            attempts.failures.backoff.failures(),
            0,
            "another life of the publisher is something newer"
        );
        attempts.failures.backoff.failed(FAILED, 0);
        attempts.succeeded();
        assert_eq!(attempts.failures.backoff.failures(), 0);
    }
}
