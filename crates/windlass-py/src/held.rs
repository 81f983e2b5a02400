//! A version held in place, at either end.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, StateDigest, Version};
use windlass_data::region::{Lease, Region};

use crate::enter::Home;
use crate::errors::Failure;
use crate::layout::Layout;
use crate::memory::Memory;

/// A version held in place. Its bytes do not change until `finish` is called or its time is over.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Held {
    lease: Mutex<Option<Lease>>,
    region: Arc<Region>,
    /// The safetensors file that the memory is.
    #[pyo3(get)]
    path: PathBuf,
    /// Which version.
    #[pyo3(get)]
    version: u64,
    /// Of which life of the publisher.
    #[pyo3(get)]
    incarnation: String,
    /// Its state digest, if it is known.
    #[pyo3(get)]
    digest: Option<String>,
    home: Home,
}

impl Held {
    /// What `lease` holds.
    pub(crate) fn new(
        lease: Lease,
        path: PathBuf,
        (incarnation, version): (Incarnation, Version),
        digest: Option<StateDigest>,
    ) -> Held {
        let region = Arc::clone(lease.region());
        let (incarnation, digest) = (incarnation.to_string(), digest.map(|d| d.to_string()));
        Held {
            lease: Mutex::new(Some(lease)),
            region,
            path,
            version,
            incarnation,
            digest,
            home: Home::here(),
        }
    }

    fn lease(&self) -> Result<MutexGuard<'_, Option<Lease>>, Failure> {
        self.home.check("version")?;
        Ok(self.lease.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn ended(&self) -> Failure {
        Failure::new(Kind::Stale, format!("version {} is no longer held; take it again", self.version))
    }
}

#[pymethods]
impl Held {
    /// The data, by the layout.
    fn memory(&self) -> PyResult<Memory> {
        let lease = self.lease()?;
        let lease = lease.as_ref().ok_or_else(|| self.ended())?;
        Ok(Memory::new(lease.data(), false, Arc::<Region>::clone(&self.region)))
    }

    /// Its tensors.
    fn layout(&self) -> Layout {
        Layout(Arc::clone(self.region.manifest()))
    }

    /// Gives it `seconds` from now. An error if it was taken back before.
    fn renew(&self, seconds: f64) -> PyResult<()> {
        let lease = self.lease()?;
        let lease = lease.as_ref().ok_or_else(|| self.ended())?;
        let seconds = Duration::try_from_secs_f64(seconds)
            .map_err(|_| Failure::invalid(format!("{seconds} s is not a time to hold anything")))?;
        Ok(lease.renew(seconds).map_err(Failure::from)?)
    }

    /// Lets go. An error if it was taken back before: what was read may be of two versions.
    fn finish(&self) -> PyResult<()> {
        match self.lease()?.take() {
            Some(lease) => Ok(lease.finish().map_err(Failure::from)?),
            None => Ok(()),
        }
    }
}
