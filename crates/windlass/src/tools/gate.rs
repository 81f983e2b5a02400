//! `windlass gate`: waits until a set of models serves a version, for shells.
//!
//! Owns: polling the controller until the timeout, and the output. The controller
//! decides when the gate opens. Must not: end because the controller is unreachable for a while; a restarted controller
//! forgets its waiters, so the command asks again.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde_json::json;
use windlass_core::backoff::{Backoff, Span};
use windlass_core::error::Kind;

use crate::console::Session;
use crate::error::Error;
use crate::service::controller::client::{ControllerClient, ControllerError};
use crate::service::controller::wire::{Gate, Service};

/// The longest that one request asks the controller to wait.
const ROUND: Duration = Duration::from_mins(5);
/// Backoff for an unreachable controller.
const AWAY: Span = Span { first_ms: 100, cap_ms: 2_000 };

/// The checked arguments of `gate`.
#[derive(Debug)]
pub(crate) struct WaitAtGate {
    pub(crate) controller: ControllerClient,
    /// What to wait for.
    pub(crate) gate: Gate,
    pub(crate) timeout: Duration,
}

impl WaitAtGate {
    /// Returns when the gate is open; what keeps it shut when the time is over is the error.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let begun = Instant::now();
        let service = self.wait(session, begun)?;
        let served =
            service.served.ok_or_else(|| Error::Bug("a gate opened and nothing is served".into()))?;
        let waited = begun.elapsed();
        let object = json!({
            "set": service.set,
            "version": served.version,
            "identities": served.identities,
            "waited_ms": waited.as_secs_f64() * 1e3,
        });
        session.finish(object, |out| {
            let _ = writeln!(
                out,
                "{} serves version {}, after {:.1} s",
                service.set,
                served.version,
                waited.as_secs_f64()
            );
        })
    }

    fn wait(&self, session: &Session, begun: Instant) -> Result<Service, Error> {
        let stop = session.cancel();
        let mut away = Backoff::default();
        loop {
            let left = self.timeout.saturating_sub(begun.elapsed());
            let timeout_ms = Some(left.min(ROUND).as_millis() as u64);
            let error = match self.controller.gate(&Gate { timeout_ms, ..self.gate.clone() }, stop) {
                Ok(service) => return Ok(service),
                Err(error) => error,
            };
            stop.check().map_err(|_| Error::Cancelled)?;
            let left = self.timeout.saturating_sub(begun.elapsed());
            if left.is_zero() || !passes(&error) {
                return Err(error.into());
            }
            if error.status().is_some_and(|s| s == 504) {
                // It did not open within a round.
                away.reset();
                continue;
            }
            let rest = away.failed(AWAY, u64::from(std::process::id()));
            if rest.failures == 1 {
                session.note(&format!("{error}; waiting for the controller"));
            }
            let until = stop.with_timeout(Duration::from_millis(rest.ms).min(left));
            while !until.is_set() {
                std::thread::sleep(until.nap());
            }
            stop.check().map_err(|_| Error::Cancelled)?;
        }
    }
}

/// Whether the same may succeed in a while.
fn passes(e: &ControllerError) -> bool {
    match e.status() {
        None => !matches!(e.kind(), Kind::Denied | Kind::Invalid | Kind::Corrupt),
        Some(status) => status == 429 || status >= 500,
    }
}
