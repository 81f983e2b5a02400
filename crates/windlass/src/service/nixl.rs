//! Whether a service reads or exports memory by NIXL.
//!
//! Owns: [`Nixl`], the configuration that an agent and a receiver share. Called when a service or a receiver in Python starts. Must not: fall back in
//! silence. What is asked for with `on` and cannot be had is an error; what `auto` does without is in the log with the reason.

use std::sync::Arc;

use windlass_data::nixl::{Config, Exporter, NixlError, Reader, rdma_devices};

use crate::error::Error;

/// When NIXL is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Not at all.
    Off,
    /// Where this host has the library and an RDMA device.
    Auto,
    /// Or the service does not start.
    On,
}

/// When and how NIXL is used.
#[derive(Clone, Debug)]
pub struct Nixl {
    pub when: When,
    pub config: Config,
}

impl Nixl {
    fn start<T>(
        &self,
        secret: bool,
        start: impl FnOnce(&Config) -> Result<T, NixlError>,
    ) -> Result<Option<Arc<T>>, Error> {
        let without = |why: &str| {
            tracing::info!(why, "without NIXL: images go over TCP");
            Ok(None)
        };
        match self.when {
            When::Off => return Ok(None),
            When::On if secret => {
                let why = "--nixl on contradicts --tls-cert: NIXL does not encrypt; leave one of them out";
                return Err(Error::Usage(why.into()));
            }
            When::Auto if secret => return without("this service uses TLS, and NIXL does not encrypt"),
            When::Auto if rdma_devices().is_empty() => return without("this host has no RDMA device"),
            When::On | When::Auto => {}
        }
        match start(&self.config) {
            Ok(started) => Ok(Some(Arc::new(started))),
            Err(error) if self.when == When::Auto => without(&error.to_string()),
            Err(error) => Err(error.into()),
        }
    }

    /// For a sender; `secret` if it has a certificate.
    pub(crate) fn exporter(&self, secret: bool) -> Result<Option<Arc<Exporter>>, Error> {
        self.start(secret, Exporter::start)
    }

    /// For a receiver.
    pub fn reader(&self) -> Result<Option<Arc<Reader>>, Error> {
        self.start(false, |config| Reader::start(config.clone()))
    }
}
