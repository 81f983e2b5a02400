//! Weights on a GPU: a trainer's baseline, and an engine's parameters.
//!
//! Tensors go in as addresses and streams as handles (`torch.cuda.Stream.cuda_stream`); the package keeps the tensors
//! for the duration of a call. Every call waits for the stream once, and has nothing under way when it returns.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use windlass_core::choose::baseline::{Ask, Have, Keep, Placed, place};
use windlass_core::delta::{Delta, DeltaHeader};
use windlass_core::digest::{BlockSum, SumTable};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, StateDigest, Version};
use windlass_data::cuda::driver;
use windlass_data::cuda::encode::{Baseline as DataBaseline, Keeping, Records, Which};
use windlass_data::cuda::load::{DevicePlan as Plan, Staged};
use windlass_data::cuda::memory::Registration;
use windlass_data::cuda::nvtx::Named;
use windlass_data::cuda::{self, StreamHandle};
use windlass_data::history::Trail;
use windlass_data::load::combine;
use windlass_data::receiver::{Handed, MappedFiles};
use windlass_data::region::{Region, memory_room};
use windlass_data::stop::Stop;

use crate::copies::Copies;
use crate::enter::{Home, enter, stop_after};
use crate::errors::Failure;
use crate::held::Held;
use crate::load::LoadPlan;
use crate::memory::Memory;
use crate::receive::FetchedDelta;

/// Addresses as the driver knows them.
pub(crate) fn wide(addresses: &[usize]) -> Vec<u64> {
    addresses.iter().map(|&a| a as u64).collect()
}

/// A GPU, shared with torch: its number, name, UUID and what it can do.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Gpu(pub(crate) cuda::Gpu);

#[pymethods]
impl Gpu {
    /// The device of this number, as torch counts them. Unsupported, with the reason, where there is no driver, too old
    /// a one, or no device.
    #[staticmethod]
    fn open(py: Python<'_>, ordinal: i64) -> PyResult<Gpu> {
        enter(py, None, |_| {
            let wrong = |_| Failure::invalid(format!("{ordinal} is no number of a GPU: they begin at 0"));
            Ok(Gpu(cuda::Gpu::open(u32::try_from(ordinal).map_err(wrong)?)?))
        })
    }

    /// The device of this UUID, with or without "GPU-".
    #[staticmethod]
    fn by_uuid(py: Python<'_>, uuid: String) -> PyResult<Gpu> {
        enter(py, None, |_| Ok(Gpu(cuda::Gpu::by_uuid(&uuid)?)))
    }

    /// How many devices are visible.
    #[staticmethod]
    fn count(py: Python<'_>) -> PyResult<u32> {
        enter(py, None, |_| Ok(driver::count()?))
    }

    /// Its number.
    #[getter]
    fn ordinal(&self) -> u32 {
        self.0.facts().ordinal
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.0.facts().name
    }

    /// "GPU-" and its UUID.
    #[getter]
    fn uuid(&self) -> &str {
        &self.0.facts().uuid
    }

    /// Its compute capability.
    #[getter]
    fn capability(&self) -> (u32, u32) {
        self.0.facts().capability
    }

    /// The version of CUDA that the driver supports.
    #[getter]
    fn cuda(&self) -> (u32, u32) {
        self.0.facts().cuda
    }

    /// Bytes that are free, and all of them.
    fn memory(&self) -> PyResult<(u64, u64)> {
        Ok(self.0.memory().map_err(Failure::from)?)
    }

    /// Whether its kernels can reach the memory of `other`.
    fn can_reach(&self, other: &Gpu) -> PyResult<bool> {
        Ok(self.0.can_reach(&other.0).map_err(Failure::from)?)
    }

    /// Has the driver load the kernels that loads need, which takes a moment where it sees them for the first time.
    fn warm(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, None, |_| Ok(self.0.warm()?))
    }

    /// Pins host memory for DMA, until the answer is closed. Exhausted if the system refuses.
    fn register(&self, py: Python<'_>, memory: &Memory) -> PyResult<Registered> {
        let (address, bytes, writable) = memory.place();
        let owner = memory.owner();
        enter(py, None, |_| {
            let at = std::ptr::with_exposed_provenance_mut(address);
            let made = Registration::new(&self.0, (at, bytes), !writable, owner)?;
            Ok(Registered(Mutex::new(Some(made))))
        })
    }

    /// The state of the tensors that `copies` publishes, kept where this device reads it. Where `casts` is true, the tensor is
    /// fp32 and the image bf16. `room` is how many bytes of records a pass may make, by default a sixteenth of the weights.
    /// `keep`, `most` and `demanded` as for `place_baseline`; `ranks` of this host keep one.
    #[pyo3(signature = (copies, casts = None, room = None, *, keep = "device", most = None, demanded = true, ranks = 1))]
    #[expect(clippy::too_many_arguments, reason = "named in Python")]
    fn baseline(
        &self,
        py: Python<'_>,
        copies: &Copies,
        casts: Option<Vec<bool>>,
        room: Option<u64>,
        keep: &str,
        most: Option<u64>,
        demanded: bool,
        ranks: u32,
    ) -> PyResult<Baseline> {
        let region = Arc::clone(copies.region());
        let how = Keeping { room, keep: keep_of(keep, most)?, is_demanded: demanded, ranks };
        enter(py, None, |_| {
            let casts = casts.unwrap_or_default();
            let made = DataBaseline::new(&self.0, region.manifest(), copies.plan(), &casts, &how)?;
            Ok(Baseline { made: Arc::new(Mutex::new(made)), region, home: Home::here() })
        })
    }

    /// `plan` for parameters of this device, whose addresses are given in the order of its targets.
    fn load_plan(&self, py: Python<'_>, plan: &LoadPlan, addresses: Vec<usize>) -> PyResult<DevicePlan> {
        enter(py, None, |_| {
            let made = Plan::new(&self.0, plan.plan(), &wide(&addresses))?;
            Ok(DevicePlan { made: Arc::new(Mutex::new(made)), mapped: Arc::default(), home: Home::here() })
        })
    }
}

fn keep_of(name: &str, most: Option<u64>) -> Result<Keep, Failure> {
    let wrong =
        |()| Failure::invalid(format!("{name:?} is no place: expected \"auto\", \"device\" or \"host\""));
    let keep = name.parse().map_err(wrong)?;
    Ok(most.map_or(keep, Keep::AtMost))
}

/// Where a baseline of `weights` bytes would be, with `free` of `total` bytes on the device and `host` on the host: bytes on the
/// device, bytes on the host, bytes for records on the device, and the milliseconds that a comparison and a copy are expected to
/// take. `keep` is "auto", "device" or "host"; `most` limits the bytes on the device. Without `demanded`, "auto" takes at
/// most half of what is free there. Exhausted, with the remedy, if there is no room.
#[pyfunction]
#[pyo3(signature = (weights, free, total, host = None, *, keep = "auto", most = None, demanded = true))]
pub(crate) fn place_baseline(
    weights: u64,
    free: u64,
    total: u64,
    host: Option<u64>,
    keep: &str,
    most: Option<u64>,
    demanded: bool,
) -> PyResult<(u64, u64, u64, f64, f64)> {
    let ask = Ask { weights, records: None, keep: keep_of(keep, most)?, is_demanded: demanded };
    let placed = place(&ask, &Have { free, total: Some(total), host })
        .map_err(|refused| Failure::new(refused.kind(), refused.to_string()))?;
    Ok(told(&placed))
}

fn told(placed: &Placed) -> (u64, u64, u64, f64, f64) {
    let ms = |seconds: f64| seconds * 1e3;
    let Placed { device, host, records } = *placed;
    (device, host, records, ms(placed.compare_seconds()), ms(placed.copy_seconds()))
}

/// Bytes of memory that this process can still have, by its control groups and the machine; `None` if nothing says.
#[pyfunction]
pub(crate) fn host_memory() -> Option<u64> {
    memory_room().map(|room| room.free)
}

/// Host memory that DMA may reach.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Registered(Mutex<Option<Registration>>);

#[pymethods]
impl Registered {
    /// Lets go of it. Nothing may be under way.
    fn close(&self) {
        self.0.lock().take();
    }
}

/// The last published state of a rank's weights, in memory that the device reads.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Baseline {
    pub(crate) made: Arc<Mutex<DataBaseline>>,
    region: Arc<Region>,
    home: Home,
}

impl Baseline {
    pub(crate) fn which(&self, version: u64) -> Which {
        (self.region.incarnation(), version)
    }

    /// The sums of `version`, which it must hold.
    pub(crate) fn sums(&self, version: u64) -> Result<SumTable, Failure> {
        let made = self.made.lock();
        if made.holds() != Some(self.which(version)) {
            let text = format!("the baseline does not hold version {version}; reset it before the commit");
            return Err(Failure::new(Kind::Stale, text));
        }
        Ok(made.table())
    }
}

#[pymethods]
impl Baseline {
    /// Memory that it takes: for the weights, and for the records of a pass.
    #[getter]
    fn bytes(&self) -> (u64, u64) {
        self.made.lock().bytes()
    }

    /// Where that is, as `place_baseline` tells it.
    #[getter]
    fn place(&self) -> (u64, u64, u64, f64, f64) {
        told(&self.made.lock().place())
    }

    /// How many blocks are this rank's.
    #[getter]
    fn blocks(&self) -> usize {
        self.made.lock().blocks()
    }

    /// The version that it holds.
    #[getter]
    fn version(&self) -> Option<u64> {
        self.made.lock().holds().map(|(_, version)| version)
    }

    /// The digest of what it holds, if all of the model is this rank's.
    fn digest(&self) -> Option<String> {
        self.made.lock().digest().map(|d| d.to_string())
    }

    /// Takes the tensors at `addresses` as `version`, whatever it held.
    #[pyo3(signature = (addresses, version, stream = 0, timeout = 60.0))]
    fn reset(
        &self,
        py: Python<'_>,
        addresses: Vec<usize>,
        version: u64,
        stream: u64,
        timeout: f64,
    ) -> PyResult<()> {
        self.home.check("baseline")?;
        let which = self.which(version);
        enter(py, Some(timeout), |stop| {
            Ok(self.made.lock().reset(&wide(&addresses), StreamHandle(stream), which, stop)?)
        })
    }

    /// Finds what leads from version `base`, which it must hold, to the tensors at `addresses`; they may change when it
    /// returns. Tells how many bytes that is, which wait on the device for `Publisher.publish_compared`. Stale if it holds
    /// another version: publish a copy.
    #[pyo3(signature = (addresses, base, version, stream = 0, timeout = 60.0))]
    fn compare(
        &self,
        py: Python<'_>,
        addresses: Vec<usize>,
        base: u64,
        version: u64,
        stream: u64,
        timeout: f64,
    ) -> PyResult<u64> {
        self.home.check("baseline")?;
        let (base, target) = (self.which(base), self.which(version));
        enter(py, Some(timeout), |stop| {
            let _named = Named::new("encode");
            Ok(self.made.lock().compare(&wide(&addresses), StreamHandle(stream), base, target, stop)?)
        })
    }

    /// The records that lead from version `base`, which it must hold, to the tensors at `addresses`, which it
    /// holds as `version` afterwards. Stale if it does not: publish a copy.
    #[pyo3(signature = (addresses, base, version, stream = 0, timeout = 60.0))]
    fn encode(
        &self,
        py: Python<'_>,
        addresses: Vec<usize>,
        base: u64,
        version: u64,
        stream: u64,
        timeout: f64,
    ) -> PyResult<DeltaRecords> {
        self.home.check("baseline")?;
        let (base, target) = (self.which(base), self.which(version));
        enter(py, Some(timeout), |stop| {
            let mut made = self.made.lock();
            let before = made.digest();
            let _named = Named::new("encode");
            let records = made.encode(&wide(&addresses), StreamHandle(stream), base, target, stop)?;
            let manifest = self.region.manifest();
            let unknown = StateDigest([0; 16]);
            let header = DeltaHeader {
                model_id: self.region.model_id().clone(),
                base,
                target,
                layout_hash: manifest.layout_hash(),
                cuts_hash: manifest.cuts_hash(),
                base_digest: before.unwrap_or(unknown),
                target_digest: made.digest().unwrap_or(unknown),
                blocks: manifest.cuts().blocks(),
            };
            Ok(DeltaRecords { records, header })
        })
    }
}

/// What changed between two versions, in pinned host memory.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct DeltaRecords {
    records: Records,
    header: DeltaHeader,
}

#[pymethods]
impl DeltaRecords {
    fn __len__(&self) -> usize {
        self.records.len()
    }

    /// Units that changed.
    #[getter]
    fn changes(&self) -> u64 {
        self.records.changes()
    }

    /// Bytes of all records.
    #[getter]
    fn payload_bytes(&self) -> u64 {
        self.records.bytes()
    }

    /// Records that found no room on the device and came as dense ones.
    #[getter]
    fn lost(&self) -> usize {
        self.records.lost()
    }

    /// How many milliseconds the pass, the way to the host and reading the index took.
    #[getter]
    fn milliseconds(&self) -> (f64, f64, f64) {
        let spent = self.records.spent();
        let ms = |d: std::time::Duration| d.as_secs_f64() * 1e3;
        (ms(spent.pass), ms(spent.copy), ms(spent.index))
    }

    /// A container of these records. Its digests are zero where a part of the model is another rank's.
    fn container<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let container = enter(py, None, |_| Ok(self.records.container(&self.header)))?;
        Ok(PyBytes::new(py, &container))
    }
}

/// A load plan for parameters on a GPU. Whatever is given up, by its timeout or by Ctrl-C, may leave a mixture: load
/// again, whole.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct DevicePlan {
    made: Arc<Mutex<Plan>>,
    /// The files in which deltas of a receiver of this host come.
    mapped: Arc<Mutex<MappedFiles>>,
    home: Home,
}

#[pymethods]
impl DevicePlan {
    /// Copies all of the image whose data begins at `image` on this device, or of the tensors in `only`, to the
    /// parameters: (bytes, copies).
    #[pyo3(signature = (image, stream = 0, only = None, timeout = 60.0))]
    fn dense(
        &self,
        py: Python<'_>,
        image: usize,
        stream: u64,
        only: Option<Vec<String>>,
        timeout: f64,
    ) -> PyResult<(u64, u64)> {
        self.home.check("plan")?;
        enter(py, Some(timeout), |stop| {
            let loaded = self.made.lock().dense(image as u64, only.as_deref(), StreamHandle(stream), stop)?;
            Ok((loaded.bytes, loaded.copies))
        })
    }

    /// Copies all of `held`, or of the tensors in `only`, to the parameters: (bytes, copies).
    #[pyo3(signature = (held, stream = 0, threads = 1, only = None, timeout = 60.0))]
    fn dense_held(
        &self,
        py: Python<'_>,
        held: &Held,
        stream: u64,
        threads: usize,
        only: Option<Vec<String>>,
        timeout: f64,
    ) -> PyResult<(u64, u64)> {
        self.home.check("plan")?;
        enter(py, Some(timeout), |stop| {
            held.read(|lease| {
                let mut made = self.made.lock();
                made.plan().check_layout(lease.region().manifest())?;
                let only = only.as_deref();
                let loaded = made.dense_from_host(lease.data(), only, StreamHandle(stream), threads, stop)?;
                Ok((loaded.bytes, loaded.copies))
            })
        })
    }

    /// The sums of the blocks of what the parameters hold, sixteen bytes each in the order of blocks, by which records
    /// are checked from now on; `None`: not any more.
    fn set_sums(&self, py: Python<'_>, sums: Option<&[u8]>) -> PyResult<()> {
        self.home.check("plan")?;
        let sums: Option<Vec<BlockSum>> = match sums.map(<[u8]>::as_chunks::<16>) {
            None => None,
            Some((sums, [])) => Some(sums.iter().map(|s| BlockSum::from_bytes(*s)).collect()),
            Some(_) => return Err(Failure::invalid("sums have sixteen bytes each").into()),
        };
        enter(py, None, |_| Ok(self.made.lock().set_sums(sums.as_deref())?))
    }

    /// Takes the sums of what the parameters hold now for those of their blocks, by which records are checked from now
    /// on. The parameters are only read, and must be a version whole.
    #[pyo3(signature = (stream = 0, timeout = 60.0))]
    fn sum_blocks(&self, py: Python<'_>, stream: u64, timeout: f64) -> PyResult<()> {
        self.home.check("plan")?;
        enter(py, Some(timeout), |stop| Ok(self.made.lock().sum_blocks(StreamHandle(stream), stop)?))
    }

    /// Compares all that the parameters hold with `held`, by sums, and names the tensors that differ. The image itself is
    /// read, by `threads`, only where the digest of the version does not tell.
    #[pyo3(signature = (held, stream = 0, threads = 1, timeout = 600.0))]
    fn difference(
        &self,
        py: Python<'_>,
        held: &Held,
        stream: u64,
        threads: usize,
        timeout: f64,
    ) -> PyResult<Vec<String>> {
        self.home.check("plan")?;
        enter(py, Some(timeout), |stop| {
            held.read(|lease| {
                let mut made = self.made.lock();
                let manifest = lease.region().manifest();
                made.plan().check_layout(manifest)?;
                let proof = made.digest(StreamHandle(stream), stop)?;
                let combined = combine(manifest, std::slice::from_ref(&proof)).and_then(|c| c.digest);
                if combined.is_some_and(|digest| held.known().is_ok_and(|(_, known)| known == digest)) {
                    return Ok(Vec::new());
                }
                Ok(proof.differs(&made.plan().image_proof(lease.data(), threads, stop)?))
            })
        })
    }

    /// Brings a delta, a container of records, to the device. The parameters are not touched.
    #[pyo3(signature = (delta, only = None, timeout = 60.0))]
    fn stage(
        &self,
        py: Python<'_>,
        delta: &[u8],
        only: Option<Vec<String>>,
        timeout: f64,
    ) -> PyResult<StagedDelta> {
        self.home.check("plan")?;
        enter(py, Some(timeout), |stop| {
            let delta = Delta::parse(delta).map_err(|e| Failure::of(e.kind(), &e))?;
            Ok(StagedDelta(self.made.lock().stage(&delta, only.as_deref(), stop)?))
        })
    }

    /// Brings the deltas that lead from a version to `held` to the device, to be applied one after another, and says which
    /// digest the parameters have, if `prove` is a stream that they are read after. Stale, with the reason, if the deltas were
    /// not kept.
    #[pyo3(signature = (held, base, prove = None, only = None, timeout = 60.0))]
    fn stage_held(
        &self,
        py: Python<'_>,
        held: &Held,
        base: (u64, Version),
        prove: Option<u64>,
        only: Option<Vec<String>>,
        timeout: f64,
    ) -> PyResult<Brought> {
        self.home.check("plan")?;
        let base = (Incarnation(base.0), base.1);
        enter(py, Some(timeout), |stop| {
            held.read(|lease| {
                let region = lease.region();
                let mut made = self.made.lock();
                made.plan().check_layout(region.manifest())?;
                let (identity, digest) = held.known()?;
                let trail = Trail::find(&region.deltas_dir(), region.manifest(), base, (&identity, digest))?;
                let deltas = trail.deltas(crate::held::hands())?;
                let only = only.as_deref();
                let staged = stage_and_prove(&mut made, prove, stop, |made| {
                    deltas.iter().map(|delta| Ok(made.stage(delta, only, stop)?)).collect()
                });
                staged.map(brought)
            })
        })
    }

    /// Brings a delta that a receiver has fetched to the device, to be applied part after part, and says which digest the
    /// parameters have, if `prove` is a stream that they are read after. Stale if it begins at another version than the one
    /// given.
    #[pyo3(signature = (fetched, base, prove = None, only = None, timeout = 60.0))]
    fn stage_fetched(
        &self,
        py: Python<'_>,
        fetched: &FetchedDelta,
        base: (u64, Version),
        prove: Option<u64>,
        only: Option<Vec<String>>,
        timeout: f64,
    ) -> PyResult<Brought> {
        self.home.check("plan")?;
        enter(py, Some(timeout), |stop| {
            fetched.with(|fetched| {
                let begins = fetched.base();
                if (begins.incarnation, begins.version) != (Incarnation(base.0), base.1) {
                    let text = format!("what was fetched begins at {begins}, and not at version {}", base.1);
                    return Err(Failure::new(Kind::Stale, text));
                }
                let mut made = self.made.lock();
                fetched.memory().for_each(|memory| made.note(memory));
                let staged = stage_and_prove(&mut made, prove, stop, |made| {
                    let stage = |bytes| {
                        let read = || fetched.part(bytes, crate::held::hands()).map_err(Failure::from);
                        made.stage_unread(bytes, read, only.as_deref(), stop)
                    };
                    fetched.containers().map(stage).collect()
                });
                staged.map(brought)
            })
        })
    }

    /// Begins to bring a delta that a receiver of this host has fetched, and handed over in files (path, bytes), to the device.
    /// It leads from one version to another, each an incarnation and a version. A thread that needs no interpreter does it,
    /// which an engine that computes in Python would give back late. If `prove` is a stream, it also makes the digest of the
    /// parameters, which are read after that. Stale if the receiver took the delta back.
    #[pyo3(signature = (files, model_id, base, target, prove = None, timeout = 60.0))]
    fn begin_handed(
        &self,
        files: Vec<(PathBuf, u64)>,
        model_id: &str,
        base: (u64, Version),
        target: (u64, Version),
        prove: Option<u64>,
        timeout: f64,
    ) -> PyResult<DeltaOnItsWay> {
        self.home.check("plan")?;
        let model_id = ModelId::new(model_id).map_err(Failure::from)?;
        let identity = |(incarnation, version)| Identity {
            model_id: model_id.clone(),
            incarnation: Incarnation(incarnation),
            version,
        };
        let leads = (identity(base), identity(target));
        let stop = stop_after(Some(timeout))?;
        let (made, mapped, theirs) = (Arc::clone(&self.made), Arc::clone(&self.mapped), stop.clone());
        let work = move || -> Result<Staging, Failure> {
            let handed = Handed::open(&files, leads, &mut mapped.lock())?;
            let mut made = made.lock();
            handed.memory().for_each(|memory| made.note(memory));
            stage_and_prove(&mut made, prove, &theirs, |made| {
                let stage = |bytes| {
                    let read = || handed.part(bytes, crate::held::hands()).map_err(Failure::from);
                    made.stage_unread(bytes, read, None, &theirs)
                };
                handed.containers().map(stage).collect()
            })
        };
        let thread = std::thread::Builder::new()
            .name("windlass-stage".into())
            .spawn(work)
            .map_err(|e| Failure::new(Kind::Exhausted, format!("cannot start a thread: {e}")))?;
        Ok(DeltaOnItsWay { thread: Mutex::new(Some(thread)), stop, home: self.home })
    }

    /// Takes memory for deltas of up to so many bytes, so that the first of them need not wait for it.
    fn reserve(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        self.home.check("plan")?;
        enter(py, None, |_| Ok(self.made.lock().reserve(bytes)?))
    }

    /// Lets the device read the memory that deltas came in by itself, for those that come in it again. A thread does it, which
    /// takes as long as a delta itself: call it when nothing waits for one.
    fn pin_files(&self) -> PyResult<()> {
        self.home.check("plan")?;
        if !self.made.lock().has_noted() {
            return Ok(());
        }
        let made = Arc::clone(&self.made);
        let work = move || Plan::pin_noted(&made);
        std::thread::Builder::new()
            .name("windlass-pin".into())
            .spawn(work)
            .map_err(|e| Failure::new(Kind::Exhausted, format!("cannot start a thread: {e}")))?;
        Ok(())
    }

    /// Applies a staged delta to the parameters, which must hold its base: (records applied, records that were there
    /// already). Corrupt if a record does not fit what is there; the parameters are a mixture then.
    #[pyo3(signature = (staged, stream = 0, timeout = 60.0))]
    fn apply(&self, py: Python<'_>, staged: &StagedDelta, stream: u64, timeout: f64) -> PyResult<(u64, u64)> {
        self.home.check("plan")?;
        enter(py, Some(timeout), |stop| {
            let done = self.made.lock().apply(&staged.0, StreamHandle(stream), stop)?;
            Ok((done.applied, done.skipped))
        })
    }

    /// The sums of what the parameters hold, box by box, as JSON; see `combine_digests`.
    #[pyo3(signature = (stream = 0, timeout = 60.0))]
    fn digest(&self, py: Python<'_>, stream: u64, timeout: f64) -> PyResult<String> {
        self.home.check("plan")?;
        enter(py, Some(timeout), |stop| {
            let proof = self.made.lock().digest(StreamHandle(stream), stop)?;
            serde_json::to_string(&proof).map_err(|e| Failure::new(Kind::Bug, e.to_string()))
        })
    }
}

/// The parts of a delta on the device, and the digest of the parameters, if that was asked for and they are all of the model.
type Staging = (Vec<Staged>, Option<String>);
/// The same, for Python.
type Brought = (Vec<StagedDelta>, Option<String>);

fn brought((parts, digest): Staging) -> Brought {
    (parts.into_iter().map(StagedDelta).collect(), digest)
}

/// Stages a delta while the device sums the parameters, which it only reads.
fn stage_and_prove(
    made: &mut Plan,
    prove: Option<u64>,
    stop: &Stop,
    stage: impl FnOnce(&mut Plan) -> Result<Vec<Staged>, Failure>,
) -> Result<Staging, Failure> {
    let Some(stream) = prove else { return Ok((stage(made)?, None)) };
    made.begin_digest(StreamHandle(stream), stop)?;
    let staged = stage(made);
    // Nothing of it is under way any more when an error is told.
    let proof = made.end_digest()?;
    let combined = combine(made.plan().manifest(), std::slice::from_ref(&proof));
    Ok((staged?, combined.and_then(|c| c.digest).map(|digest| digest.to_string())))
}

/// A delta that is being brought to the device. Nothing outlives it: letting go of it calls it off.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct DeltaOnItsWay {
    thread: Mutex<Option<JoinHandle<Result<Staging, Failure>>>>,
    stop: Stop,
    home: Home,
}

#[pymethods]
impl DeltaOnItsWay {
    /// Whether it is there, or failed.
    #[getter]
    fn done(&self) -> bool {
        self.thread.lock().as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// The delta, to be applied part after part, once it is there, and the digest of the parameters.
    fn take(&self, py: Python<'_>) -> PyResult<Brought> {
        self.home.check("delta")?;
        let thread = self.thread.lock().take();
        let thread = thread.ok_or_else(|| Failure::invalid("the delta was taken before"))?;
        let ended = py.detach(|| thread.join());
        let staged =
            ended.map_err(|_| Failure::new(Kind::Bug, "a thread panicked; see standard error"))??;
        Ok(brought(staged))
    }
}

impl Drop for DeltaOnItsWay {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.lock().take().filter(|_| self.home.is_here()) {
            // It looks at the stop between any two pieces of its work.
            let _ = thread.join();
        }
    }
}

/// A delta on the device, for one plan.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct StagedDelta(Staged);

#[pymethods]
impl StagedDelta {
    /// Records that reach this worker.
    fn __len__(&self) -> usize {
        self.0.records()
    }

    /// Bytes that it takes on the device.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}
