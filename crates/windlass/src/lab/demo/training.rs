//! The training loop of one demo trainer: train, publish, notify the controller, wait when too far ahead.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use windlass_core::address::Token;
use windlass_core::barrier::SetName;
use windlass_core::error::Kind;
use windlass_core::wire::control::{Capabilities, VersionInfo};
use windlass_data::stop::Stop;

use super::TIMEOUT;
use super::cluster::{Expected, POLL};
use super::controller::SET;
use super::trainer::Trainer;
use crate::console::Session;
use crate::error::Error;
use crate::service::client::{Client, Request};
use crate::service::controller::client::ControllerClient;
use crate::service::controller::wire::{Gate, Lane, NotifyVersion, Span};

/// A trainer that is told to wait does so until it is at most this many versions ahead.
const AHEAD: u32 = 3;

/// Trains and publishes all steps of one trainer.
pub(super) struct TrainingLoop<'a> {
    pub(super) trainer: Trainer<'a>,
    /// Minimum duration of a step.
    pub(super) pace: Duration,
    pub(super) client: ControllerClient,
    pub(super) token: Token,
    pub(super) steps: u32,
    pub(super) session: &'a Session,
}

impl<'a> TrainingLoop<'a> {
    /// Runs all steps and records the digest of each.
    pub(super) fn run(mut self, expected: &Mutex<Expected>) -> Result<Trainer<'a>, Error> {
        let agent = Client::default();
        for step in 0..=self.steps {
            let begun = Instant::now();
            let digest = self.trainer.train(step)?;
            expected.lock().push(digest);
            let stop = self.session.cancel().with_timeout(TIMEOUT);
            while begun.elapsed() < self.pace {
                stop.check()?;
                std::thread::sleep(POLL.min(self.pace.saturating_sub(begun.elapsed())));
            }
            let offload = self.trainer.offload(step)?;
            let committed = Instant::now();
            let info = self.sealed(&agent, step, &stop)?;
            let sealed = Instant::now();
            if self.announce(&agent, step, info, (offload, committed, sealed), &stop)? {
                // The trainer is too far ahead of the served version.
                self.wait_for(step.saturating_sub(AHEAD), &stop)?;
            }
        }
        Ok(self.trainer)
    }

    fn ask<T: serde::de::DeserializeOwned>(
        &self,
        agent: &Client,
        path: &str,
        stop: &Stop,
    ) -> Result<T, Error> {
        let url = format!("{}{path}", self.trainer.endpoint);
        let bearer = Some(self.token.expose());
        let request = Request::<()> { url: &url, bearer, body: None, timeout: TIMEOUT, most: 1 << 20 };
        let failed =
            |kind, what| Error::Child { who: format!("{}agent", self.trainer.spec.prefix), what, kind };
        let (status, body) = agent.send(request, stop).map_err(|(kind, why)| match kind {
            Kind::Cancelled => Error::Cancelled,
            kind => failed(kind, why),
        })?;
        let told = serde_json::from_slice(&body);
        told.map_err(|e| failed(Kind::Bug, format!("answered {status} to {path}: {e}")))
    }

    /// Waits until the agent can serve the version.
    fn sealed(&self, agent: &Client, step: u32, stop: &Stop) -> Result<VersionInfo, Error> {
        loop {
            let info: VersionInfo = self.ask(agent, "/get_version", stop)?;
            if info.version >= Some(step.into()) {
                return Ok(info);
            }
            stop.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Notifies the controller. Returns whether the trainer must wait.
    fn announce(
        &self,
        agent: &Client,
        step: u32,
        VersionInfo { model_id, incarnation, .. }: VersionInfo,
        (offload, committed, sealed): (Duration, Instant, Instant),
        stop: &Stop,
    ) -> Result<bool, Error> {
        let delta: Capabilities = self.ask(agent, "/get_capabilities", stop)?;
        let image = self.trainer.manifest.data_bytes();
        let current = delta.delta_version == Some(step.into());
        let delta_bytes = delta.delta_size_bytes.filter(|_| current);
        let ago = |at: Instant| at.elapsed().as_secs_f64() * 1e3;
        let span = |lane, what: &str, began: f64, ended: f64, bytes| Span {
            lane,
            what: what.into(),
            began_ms_ago: began,
            ended_ms_ago: ended,
            bytes,
        };
        let spans = vec![
            span(
                Lane::Trainer,
                "offload",
                ago(committed) + offload.as_secs_f64() * 1e3,
                ago(committed),
                Some(image),
            ),
            span(Lane::Agent, "seal", ago(committed), ago(sealed), delta_bytes),
        ];
        let notify = NotifyVersion {
            model_id,
            incarnation,
            version: step.into(),
            sender_endpoint: self.trainer.endpoint.clone(),
            sync: false,
            eval: None,
            timeout_ms: None,
            spans,
            delta_sparsity: delta.delta_sparsity.filter(|_| current),
            delta_ratio: delta_bytes.map(|b| b as f64 / image.max(1) as f64),
        };
        Ok(self.client.notify(&notify, stop)?.wait)
    }

    /// Waits until this version is served.
    fn wait_for(&self, version: u32, stop: &Stop) -> Result<(), Error> {
        let set = SetName::new(SET).map_err(|e| Error::Bug(e.to_string()))?;
        let timeout_ms = Some(TIMEOUT.as_millis() as u64);
        let at_least = Some(version.into());
        let gate = Gate { set: Some(set), at_least, timeout_ms, ..Gate::default() };
        self.client.gate(&gate, stop)?;
        Ok(())
    }
}
