//! Memory of a GPU that several processes know. How handles travel is the package's part; see `windlass_data::cuda::ipc`.

use std::os::fd::IntoRawFd;

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use windlass_core::error::Kind;
use windlass_data::copies::{Copy, Dim};
use windlass_data::cuda::StreamHandle;
use windlass_data::cuda::ipc::{self, Row, Way};
use windlass_data::stop::Stop;

use crate::enter::{Home, enter};
use crate::errors::Failure;
use crate::gpu::{Gpu, wide};

/// Where it reads, where it writes, bytes of a run, and dimensions: how often, and the strides on both sides.
type GivenRow = (u64, u64, u64, Vec<(u64, u64, u64)>);

/// Something that can be closed.
struct Closable<T>(Mutex<Option<T>>);

impl<T> Closable<T> {
    fn new(value: T) -> Closable<T> {
        Closable(Mutex::new(Some(value)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.0.lock()
    }

    fn with<R>(&self, what: &str, work: impl FnOnce(&mut T) -> Result<R, Failure>) -> Result<R, Failure> {
        let mut held = self.lock();
        let value =
            held.as_mut().ok_or_else(|| Failure::new(Kind::Invalid, format!("this {what} was closed")))?;
        work(value)
    }
}

/// Memory of a GPU that other processes open by its handle.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct SharedMemory {
    made: Closable<ipc::SharedMemory>,
    home: Home,
}

#[pymethods]
impl SharedMemory {
    /// So many bytes on `gpu`, of any content.
    #[new]
    fn new(py: Python<'_>, gpu: &Gpu, bytes: u64) -> PyResult<SharedMemory> {
        enter(py, None, |_| {
            let made = Closable::new(ipc::SharedMemory::new(&gpu.0, bytes)?);
            Ok(SharedMemory { made, home: Home::here() })
        })
    }

    /// Where it is in this process.
    #[getter]
    fn address(&self) -> PyResult<u64> {
        Ok(self.made.with("memory", |m| Ok(m.address()))?)
    }

    /// The 64 bytes by which another process opens it.
    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let handle = self.made.with("memory", |m| Ok(m.handle()))?;
        Ok(PyBytes::new(py, &handle))
    }

    /// Gives it back. Those who have it open keep it until they close it.
    fn close(&self, py: Python<'_>) {
        if self.home.is_here() {
            py.detach(|| self.made.lock().take());
        }
    }
}

/// How memory of somebody else on this GPU can be had by another process.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Exported {
    gpu: windlass_data::cuda::Gpu,
    found: ipc::Exported,
}

#[pymethods]
impl Exported {
    /// Finds out for `bytes` at `address`. Unsupported, with the reason, if it cannot be had.
    #[new]
    fn new(py: Python<'_>, gpu: &Gpu, address: u64, bytes: u64) -> PyResult<Exported> {
        let gpu = gpu.0.clone();
        // Asks the driver for a few numbers; a thread for it would cost more.
        py.detach(|| {
            Ok(Exported { found: ipc::Exported::find(&gpu, address, bytes).map_err(Failure::from)?, gpu })
        })
    }

    /// Where its allocation begins.
    #[getter]
    fn base(&self) -> u64 {
        self.found.base
    }

    /// Bytes of its allocation.
    #[getter]
    fn size(&self) -> u64 {
        self.found.bytes
    }

    /// The handle of legacy memory.
    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        match &self.found.way {
            Way::Legacy(handle) => Some(PyBytes::new(py, handle)),
            Way::Granules(_) => None,
        }
    }

    /// Bytes of the granules of virtual memory.
    #[getter]
    fn granules(&self) -> Vec<u64> {
        match &self.found.way {
            Way::Legacy(_) => Vec::new(),
            Way::Granules(sizes) => sizes.clone(),
        }
    }

    /// Whether the same memory is still there.
    fn is_there(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| Ok(self.found.is_there(&self.gpu).map_err(Failure::from)?))
    }

    /// Descriptors of the granules, which the caller closes.
    fn descriptors(&self, py: Python<'_>) -> PyResult<Vec<i32>> {
        let made = py.detach(|| self.found.descriptors(&self.gpu)).map_err(Failure::from)?;
        Ok(made.into_iter().map(IntoRawFd::into_raw_fd).collect())
    }
}

/// Memory of a GPU that another process exported.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Opened {
    made: Closable<ipc::Opened>,
    home: Home,
}

#[pymethods]
impl Opened {
    /// By the 64 bytes of its handle.
    #[staticmethod]
    fn legacy(py: Python<'_>, gpu: &Gpu, handle: &[u8]) -> PyResult<Opened> {
        enter(py, None, |_| {
            let made = ipc::Opened::legacy(&gpu.0, &ipc::handle_of(handle)?)?;
            Ok(Opened { made: Closable::new(made), home: Home::here() })
        })
    }

    /// By descriptors of granules, which the caller closes, and their sizes.
    #[staticmethod]
    fn granules(py: Python<'_>, gpu: &Gpu, descriptors: Vec<i32>, sizes: Vec<u64>) -> PyResult<Opened> {
        enter(py, None, |_| {
            let made = ipc::Opened::granules(&gpu.0, &descriptors, &sizes)?;
            Ok(Opened { made: Closable::new(made), home: Home::here() })
        })
    }

    /// Where it is in this process.
    #[getter]
    fn address(&self) -> PyResult<u64> {
        Ok(self.made.with("memory", |m| Ok(m.address()))?)
    }

    /// How many bytes it has.
    #[getter]
    fn size(&self) -> PyResult<u64> {
        Ok(self.made.with("memory", |m| Ok(m.bytes()))?)
    }

    /// Lets go of it. Nothing may be under way.
    fn close(&self, py: Python<'_>) {
        if self.home.is_here() {
            py.detach(|| self.made.lock().take());
        }
    }
}

/// A point in a stream that two processes know.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Signal {
    made: Closable<ipc::Signal>,
    home: Home,
}

#[pymethods]
impl Signal {
    /// One of this process, or, with a handle, of another.
    #[new]
    #[pyo3(signature = (gpu, handle = None))]
    fn new(py: Python<'_>, gpu: &Gpu, handle: Option<&[u8]>) -> PyResult<Signal> {
        enter(py, None, |_| {
            let made = match handle {
                None => ipc::Signal::new(&gpu.0)?,
                Some(handle) => ipc::Signal::open(&gpu.0, &ipc::handle_of(handle)?)?,
            };
            Ok(Signal { made: Closable::new(made), home: Home::here() })
        })
    }

    /// The 64 bytes by which another process opens it.
    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let handle = self.made.with("signal", |s| Ok(s.handle()))?;
        Ok(PyBytes::new(py, &handle))
    }

    /// Puts it behind all that was started on the stream so far.
    fn record(&self, stream: u64) -> PyResult<()> {
        Ok(self.made.with("signal", |s| Ok(s.record(StreamHandle(stream))?))?)
    }

    /// Waits until it is passed; PeerLost if the socket `peer` ends before.
    #[pyo3(signature = (peer = None, timeout = 60.0))]
    fn wait(&self, py: Python<'_>, peer: Option<i32>, timeout: f64) -> PyResult<()> {
        self.home.check("signal")?;
        // It often is: a thread to wait in would cost more than the look.
        if self.made.with("signal", |s| Ok(s.is_past()?))? {
            return Ok(());
        }
        enter(py, Some(timeout), |stop| {
            self.made.with("signal", |s| {
                Ok(s.wait(peer, "waiting for the GPU work of the other process", stop)?)
            })
        })
    }

    /// Gives it back.
    fn close(&self, py: Python<'_>) {
        if self.home.is_here() {
            py.detach(|| self.made.lock().take());
        }
    }
}

/// Many copies within a GPU that are started at once.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct CopyTable {
    made: Mutex<ipc::CopyTable>,
    home: Home,
}

#[pymethods]
impl CopyTable {
    /// `rows` are (offset where it reads, offset where it writes, bytes of a run, [(count, stride where it writes, stride
    /// where it reads)]), outermost first. `addresses` must be memory of the GPU.
    #[new]
    fn new(py: Python<'_>, gpu: &Gpu, rows: Vec<GivenRow>, addresses: Vec<usize>) -> PyResult<CopyTable> {
        let row = |(from, at, run, dims): GivenRow| {
            let dims = dims.into_iter().map(|(count, to, from)| Dim { count, to, from }).collect();
            Row { from, copy: Copy { at, run, dims } }
        };
        enter(py, None, |_| {
            gpu.0.check_addresses("tensor", &wide(&addresses))?;
            let rows: Vec<Row> = rows.into_iter().map(row).collect();
            Ok(CopyTable { made: Mutex::new(ipc::CopyTable::new(&gpu.0, &rows)?), home: Home::here() })
        })
    }

    /// Bytes that it copies.
    #[getter]
    fn bytes(&self) -> u64 {
        self.made.lock().bytes()
    }

    /// Starts the copies between two ranges, each an address and its bytes, on a stream, and does not wait for them. Where
    /// rows have addresses in place of offsets, the range is `None`.
    #[pyo3(signature = (read, write, stream = 0, timeout = 60.0))]
    fn start(
        &self,
        py: Python<'_>,
        read: Option<(u64, u64)>,
        write: Option<(u64, u64)>,
        stream: u64,
        timeout: f64,
    ) -> PyResult<()> {
        self.home.check("table")?;
        let work = |stop: &Stop| {
            let mut made = self.made.lock();
            let (read, write) = (read.unwrap_or(ipc::ALL), write.unwrap_or(ipc::ALL));
            Ok(made.start(read, write, StreamHandle(stream), stop)?)
        };
        let is_at_once = {
            let made = self.made.lock();
            made.starts_at_once(StreamHandle(stream))
        };
        if is_at_once {
            return Ok(py.detach(|| work(&Stop::never()))?);
        }
        enter(py, Some(timeout), work)
    }
}
