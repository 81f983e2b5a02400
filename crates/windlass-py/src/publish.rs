//! A trainer's rank, forwarded to [`publish::Publisher`].

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_core::identity::ModelId;
use windlass_data::cuda::StreamHandle;
use windlass_data::cuda::encode::Uncollected;
use windlass_data::cuda::offload::Offload;
use windlass_data::publish::{self, Way};
use windlass_data::region::{LeaseKind, Memfd, Region, RegionError, RegionSpec};
use windlass_data::shm::Mapping;

use crate::copies::{Copies, Strided};
use crate::core::parse_incarnation;
use crate::enter::{Home, enter};
use crate::errors::Failure;
use crate::gpu::{Baseline, Gpu, wide};
use crate::held::{Held, seconds as duration};
use crate::layout::Layout;
use crate::memory::{Memory, lend};

/// One rank of a publisher: makes or joins a region and writes its share of each version.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Publisher {
    region: Arc<Region>,
    inner: Mutex<publish::Publisher>,
    home: Home,
}

impl Publisher {
    fn of(publisher: publish::Publisher) -> Publisher {
        let region = Arc::clone(publisher.region());
        Publisher { region, inner: Mutex::new(publisher), home: Home::here() }
    }

    fn publisher(&self) -> Result<MutexGuard<'_, publish::Publisher>, Failure> {
        self.home.check("publisher")?;
        Ok(self.inner.lock())
    }
}

#[pymethods]
impl Publisher {
    /// Makes the region `dir`, as rank 0 of `ranks`. A dead publisher's region is replaced; `timeout` is how long to
    /// wait for others to leave it. On one of several hosts it holds only `part`, ranges of blocks from
    /// `Layout.parts`, and belongs to the `incarnation` of the first one.
    #[staticmethod]
    #[pyo3(signature = (dir, model_id, layout, *, ranks = 1, part = None, incarnation = None, group = false,
        memfd = "auto", extra_bytes = 0, timeout = 5.0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn create(
        py: Python<'_>,
        dir: PathBuf,
        model_id: String,
        layout: &Layout,
        ranks: u16,
        part: Option<Vec<(u32, u32)>>,
        incarnation: Option<&str>,
        group: bool,
        memfd: &str,
        extra_bytes: u64,
        timeout: f64,
    ) -> PyResult<Publisher> {
        let memfd = match memfd {
            "auto" => Memfd::Auto,
            "never" => Memfd::Never,
            "always" => Memfd::Always,
            other => {
                let text = format!("memfd {other:?} is not one of \"auto\", \"never\" and \"always\"");
                return Err(Failure::invalid(text).into());
            }
        };
        let model_id = ModelId::new(model_id).map_err(|e| Failure::of(e.kind(), &e))?;
        let spec = RegionSpec {
            ranks,
            part: part.map(|ranges| ranges.into_iter().map(|(start, end)| start..end).collect()),
            group,
            memfd,
            extra_bytes,
            incarnation: incarnation.map(parse_incarnation).transpose()?,
            ..RegionSpec::new(dir, model_id, Arc::clone(&layout.0))
        };
        enter(py, Some(timeout), |stop| Ok(Publisher::of(publish::Publisher::create(&spec, stop)?)))
    }

    /// Joins the region `dir` as `rank` once it is there with this layout and rank 0, which made it, is alive.
    #[staticmethod]
    #[pyo3(signature = (dir, layout, *, rank, incarnation = None, timeout = 60.0))]
    fn open(
        py: Python<'_>,
        dir: PathBuf,
        layout: &Layout,
        rank: u16,
        incarnation: Option<&str>,
        timeout: f64,
    ) -> PyResult<Publisher> {
        let layout = layout.0.layout_hash();
        let incarnation = incarnation.map(parse_incarnation).transpose()?;
        enter(py, Some(timeout), |stop| {
            Ok(Publisher::of(publish::Publisher::join(&dir, layout, rank, incarnation, stop)?))
        })
    }

    /// The region's directory.
    #[getter]
    fn dir(&self) -> PathBuf {
        self.region.dir().to_owned()
    }

    /// The publisher's incarnation.
    #[getter]
    fn incarnation(&self) -> String {
        self.region.incarnation().to_string()
    }

    /// Whether the slots are anonymous memory of the process that made the region.
    #[getter]
    fn is_memfd(&self) -> bool {
        self.region.is_memfd()
    }

    /// The secret of the region's agent, made if there is none yet.
    fn token(&self) -> PyResult<String> {
        let token =
            windlass::service::token::read_or_make(&self.region.token_path()).map_err(Failure::from)?;
        Ok(token.expose().to_owned())
    }

    /// Gives the region's agent the secret of another one, so that receivers need only that.
    fn set_token(&self, token: String) -> PyResult<()> {
        let token = Token::new(token).map_err(|e| Failure::of(e.kind(), &e))?;
        Ok(windlass::service::token::write(&self.region.token_path(), &token).map_err(Failure::from)?)
    }

    /// What the system granted for the region's memory, in words.
    fn report(&self) -> String {
        self.region.report().to_string()
    }

    /// The newest committed version and its digest, once sealed.
    fn newest(&self) -> PyResult<Option<(u64, Option<String>)>> {
        self.home.check("publisher")?;
        let active = self.region.state().active;
        Ok(active.map(|s| (s.version, s.sealed.map(|d| d.to_string()))))
    }

    /// Checks copies against the region: each is (offset in the data, bytes of a run, [(count, stride in the data,
    /// stride in the source)]), all in bytes.
    fn plan(&self, copies: Vec<Strided>) -> PyResult<Copies> {
        Ok(Copies::new(&self.region, copies)?)
    }

    /// Begins `version` together with all other ranks.
    fn begin(&self, py: Python<'_>, version: u64, timeout: f64) -> PyResult<()> {
        enter(py, Some(timeout), |stop| Ok(self.publisher()?.begin(version, stop)?))
    }

    /// From now on versions may be published by delta: this rank answers for `blocks`, ranges of whole blocks of
    /// `layout`, all of what it writes. `threads` work in the background.
    fn deltas(&self, layout: &Layout, blocks: Vec<(u32, u32)>, threads: usize) -> PyResult<()> {
        let blocks = blocks.into_iter().map(|(start, end)| start..end).collect();
        let result = self.publisher()?.use_deltas(&layout.0, blocks, threads);
        Ok(result.map_err(Failure::from)?)
    }

    /// Why `version` has to be a copy; `None` if it can be a delta. Waits for the version before, and raises its error.
    fn needs_copy(&self, py: Python<'_>, version: u64, timeout: f64) -> PyResult<Option<String>> {
        enter(py, Some(timeout), |stop| match self.publisher()?.way(version, stop)? {
            Way::Delta { .. } => Ok(None),
            Way::Copy { why } => Ok(Some(why)),
        })
    }

    /// Begins `version` as a delta from the version before: `slot` and `copy` fill memory of this process.
    fn stage(&self, version: u64) -> PyResult<()> {
        Ok(self.publisher()?.stage(version).map_err(Failure::from)?)
    }

    /// Publishes the staged version: returns at once, and works in the background for at most `timeout`.
    fn publish(&self, timeout: f64) -> PyResult<()> {
        let timeout = duration("a timeout", timeout)?;
        Ok(self.publisher()?.publish_staged(timeout).map_err(Failure::from)?)
    }

    /// Publishes what `Baseline.compare` found, which leads from the newest version, `base`, to `version`: returns at once,
    /// and works in the background for at most `timeout`.
    fn publish_compared(&self, baseline: &Baseline, base: u64, version: u64, timeout: f64) -> PyResult<()> {
        let timeout = duration("a timeout", timeout)?;
        let mut publisher = self.publisher()?;
        let newest = self.region.state().active.map(|s| (self.region.incarnation(), s.version));
        if newest != Some(baseline.which(base)) {
            let text =
                format!("the records begin from version {base} of this baseline, which is not the newest");
            return Err(Failure::new(Kind::Stale, format!("{text}: publish a copy")).into());
        }
        let source = Uncollected { baseline: Arc::clone(&baseline.made), target: baseline.which(version) };
        Ok(publisher.publish(version, Box::new(source), timeout).map_err(Failure::from)?)
    }

    /// Waits for the background work of the last version, and raises its error. Nothing if there is none.
    fn settle(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        enter(py, Some(timeout), |stop| Ok(self.publisher()?.settle(stop)?))
    }

    /// The newest version that was committed or handed out by delta.
    #[getter]
    fn newest_number(&self) -> PyResult<Option<u64>> {
        self.home.check("publisher")?;
        // A caller that holds the interpreter does not wait for a call that is under way.
        Ok(match self.inner.try_lock() {
            Some(publisher) => publisher.newest(),
            None => self.region.state().active.map(|s| s.version),
        })
    }

    /// The data of the slot that is being written, or of the memory where a delta is staged.
    fn slot(&self) -> PyResult<Memory> {
        let publisher = self.publisher()?;
        if let Some(staging) = publisher.staged() {
            let memory = staging.memory();
            return Ok(Memory::new(memory.bytes(0..memory.len()), true, Arc::<Mapping>::clone(memory)));
        }
        let mapping = publisher.attempt().map_err(Failure::from)?.mapping();
        let data = mapping.bytes(self.region.data_start()..mapping.len());
        Ok(Memory::new(data, true, Arc::<Region>::clone(&self.region)))
    }

    /// Copies the memory at `addresses`, one for each copy of the plan, into the slot.
    fn copy(
        &self,
        py: Python<'_>,
        copies: &Copies,
        addresses: Vec<usize>,
        threads: usize,
        timeout: f64,
    ) -> PyResult<()> {
        if !Arc::ptr_eq(copies.region(), &self.region) {
            return Err(Failure::new(Kind::Bug, "copies were planned for another region").into());
        }
        enter(py, Some(timeout), |stop| {
            let publisher = self.publisher()?;
            let into = publisher.target()?;
            lend(&addresses, copies.plan().spans(), |sources| {
                let result = copies.plan().run_into(into, sources, threads, stop);
                result.map_err(|e| Failure::of(e.kind(), &e))
            })
        })
    }

    /// Copies tensors of a GPU at `addresses`, one for each copy of the plan, into the slot, once `stream` has come to where
    /// it is now. Where `casts` is true, the tensor is fp32, with strides of fp32, and the slot gets bf16. Answers whether
    /// DMA went straight into the slot; if not, the system refused to pin it.
    #[pyo3(signature = (gpu, copies, addresses, stream = 0, casts = None, timeout = 60.0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn copy_device(
        &self,
        py: Python<'_>,
        gpu: &Gpu,
        copies: &Copies,
        addresses: Vec<usize>,
        stream: u64,
        casts: Option<Vec<bool>>,
        timeout: f64,
    ) -> PyResult<bool> {
        if !Arc::ptr_eq(copies.region(), &self.region) {
            return Err(Failure::new(Kind::Bug, "copies were planned for another region").into());
        }
        enter(py, Some(timeout), |stop| {
            let publisher = self.publisher()?;
            let attempt = publisher.attempt()?;
            let casts = casts.unwrap_or_default();
            let mut device = copies.device().lock();
            let ready = device.take().filter(|(made_for, offload)| {
                *made_for == casts && offload.gpu().facts().uuid == gpu.0.facts().uuid
            });
            let mut offload = match ready {
                Some((_, offload)) => offload,
                None => Offload::new(&gpu.0, &self.region, copies.plan(), &casts)?,
            };
            let done = offload.run(attempt, &wide(&addresses), StreamHandle(stream), stop);
            *device = Some((casts, offload));
            Ok(done?.is_direct)
        })
    }

    /// Says that this rank's share is written, and returns when the version is committed: (attempt, slot). `baseline`
    /// holds the same version, and knows its sums.
    #[pyo3(signature = (timeout, baseline = None))]
    fn commit(&self, py: Python<'_>, timeout: f64, baseline: Option<&Baseline>) -> PyResult<(u64, usize)> {
        enter(py, Some(timeout), |stop| {
            let mut publisher = self.publisher()?;
            let sums = match (publisher.attempt(), baseline) {
                (Ok(attempt), Some(baseline)) => Some(baseline.sums(attempt.version())?),
                (Ok(_) | Err(_), _) => None,
            };
            let committed = publisher.commit(sums, stop)?;
            Ok((committed.id, committed.slot))
        })
    }

    /// Gives up the version that is being written, for all ranks. Nothing happens if there is none.
    fn abort(&self) -> PyResult<()> {
        self.publisher()?.abort();
        Ok(())
    }

    /// Waits until `version` is sealed, and returns its digest.
    fn wait_sealed(&self, py: Python<'_>, version: u64, timeout: f64) -> PyResult<String> {
        self.home.check("publisher")?;
        enter(py, Some(timeout), |stop| Ok(publish::wait_sealed(&self.region, version, stop)?.to_string()))
    }

    /// The newest committed version, held in place for at most `seconds`.
    fn hold(&self, seconds: f64) -> PyResult<Held> {
        self.home.check("publisher")?;
        let seconds = Duration::try_from_secs_f64(seconds)
            .map_err(|_| Failure::invalid(format!("{seconds} s is not a time to hold anything")))?;
        loop {
            let Some(active) = self.region.state().active else {
                return Err(Failure::new(Kind::NotFound, "nothing was committed yet").into());
            };
            match self.region.lease(active.id, LeaseKind::Map, seconds) {
                Ok(lease) => {
                    let path = self.region.slot_path(active.slot);
                    let which = (self.region.incarnation(), active.version);
                    return Ok(Held::new(lease, path, which, active.sealed));
                }
                // Replaced since the look above.
                Err(RegionError::LeaseGone { .. }) => {}
                Err(e) => return Err(Failure::from(e).into()),
            }
        }
    }

    /// Gives up its place in the region.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // Background work is stopped and waited for; the version it was for was never promised.
        enter(py, None, |_| {
            if let Err(error) = self.publisher()?.close() {
                tracing::warn!(%error, "the last version of a rank that ends was not published");
            }
            Ok(())
        })
    }

    /// Removes the region if no other process has it open, and says whether it is gone. After `close`.
    fn discard(&self) -> PyResult<bool> {
        Ok(self.publisher()?.discard().map_err(Failure::from)?)
    }
}
