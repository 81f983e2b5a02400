//! A version held in place, at either end.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;
use windlass_core::slice::Selection;
use windlass_data::image::ImageView;
use windlass_data::region::{Lease, Region};

use crate::enter::{Home, enter};
use crate::errors::Failure;
use crate::layout::Layout;
use crate::memory::Memory;

/// A version held in place. Its bytes do not change until `finish` is called or its time is over.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Held {
    lease: Mutex<Option<Lease>>,
    manifest: Arc<Manifest>,
    /// The safetensors file that the memory is.
    #[pyo3(get)]
    path: PathBuf,
    /// Whose version.
    #[pyo3(get)]
    model_id: String,
    /// Which version.
    #[pyo3(get)]
    version: u64,
    /// Of which life of the publisher.
    #[pyo3(get)]
    incarnation: String,
    /// Its state digest, if it is known.
    #[pyo3(get)]
    digest: Option<String>,
    known: Option<(Identity, StateDigest)>,
    /// The blocks that it holds, if these are not all.
    slice: Option<BlockRanges>,
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
        let identity = Identity { model_id: region.model_id().clone(), incarnation, version };
        let known = digest.map(|digest| (identity, digest));
        let slice = region.part().cloned();
        let (model_id, manifest) = (region.model_id().to_string(), Arc::clone(region.manifest()));
        let (incarnation, digest) = (incarnation.to_string(), digest.map(|d| d.to_string()));
        Held {
            lease: Mutex::new(Some(lease)),
            manifest,
            path,
            model_id,
            version,
            incarnation,
            digest,
            known,
            slice,
            home: Home::here(),
        }
    }

    /// What `view` holds.
    pub(crate) fn of_view(view: ImageView) -> Held {
        let (known, path) = (view.known().clone(), view.path());
        let which = (known.identity.incarnation, known.identity.version);
        Held::new(view.into_lease(), path, which, Some(known.digest))
    }

    fn lease(&self) -> Result<MutexGuard<'_, Option<Lease>>, Failure> {
        self.home.check("version")?;
        Ok(self.lease.lock())
    }

    /// Gives the lease, which cannot be let go of meanwhile, to `work`.
    pub(crate) fn read<T>(&self, work: impl FnOnce(&Lease) -> Result<T, Failure>) -> Result<T, Failure> {
        let lease = self.lease()?;
        work(lease.as_ref().ok_or_else(|| self.ended())?)
    }

    /// Which version it is, with its digest, if that is known.
    pub(crate) fn known(&self) -> Result<(Identity, StateDigest), Failure> {
        let unknown = || Failure::new(Kind::Unsupported, "only a version in an image has a digest to go by");
        self.known.clone().ok_or_else(unknown)
    }

    /// The names of the tensors that these blocks are of.
    fn lacking(&self, blocks: &BlockRanges) -> Vec<String> {
        let cuts = self.manifest.cuts();
        let touched = |i: usize| {
            let own = cuts.of_tensor(i);
            blocks.ranges_from(own.start).next().is_some_and(|range| range.start < own.end)
        };
        let tensors = self.manifest.tensors().iter().enumerate();
        tensors.filter(|(i, _)| touched(*i)).map(|(_, t)| t.name.clone()).collect()
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
        Ok(Memory::new(lease.data(), false, Arc::<Region>::clone(lease.region())))
    }

    /// Its tensors.
    fn layout(&self) -> Layout {
        Layout(Arc::clone(&self.manifest))
    }

    /// Which blocks the image holds, if it keeps only a slice of the model: equal for equal slices of one layout. Its
    /// digest is then that of the slice.
    #[getter]
    fn slice(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        self.slice.as_ref()?.encode(&mut bytes);
        Some(bytes)
    }

    /// The tensors that the image does not hold whole, because it keeps only a slice. Where something is missing, its
    /// bytes are zeros.
    fn torn(&self) -> Vec<String> {
        let Some(kept) = &self.slice else { return Vec::new() };
        self.lacking(&BlockRanges::from(0..self.manifest.cuts().blocks()).difference(kept))
    }

    /// Those of the tensors of a selection, in JSON, of which the image does not hold all that is selected.
    fn lacks(&self, selection: &str) -> PyResult<Vec<String>> {
        let Some(kept) = &self.slice else { return Ok(Vec::new()) };
        let selection = Selection::from_json(selection.as_bytes()).map_err(|e| Failure::of(e.kind(), &e))?;
        let blocks = selection.blocks(&self.manifest).map_err(|e| Failure::of(e.kind(), &e))?;
        Ok(self.lacking(&blocks.difference(kept)))
    }

    /// Gives it `seconds` from now. An error if it was taken back before.
    fn renew(&self, seconds: f64) -> PyResult<()> {
        let lease = self.lease()?;
        let lease = lease.as_ref().ok_or_else(|| self.ended())?;
        let seconds = Duration::try_from_secs_f64(seconds)
            .map_err(|_| Failure::invalid(format!("{seconds} s is not a time to hold anything")))?;
        Ok(lease.renew(seconds).map_err(Failure::from)?)
    }

    /// Lets go of it, and of its image. An error if it was taken back before: what was read may be of two versions.
    fn finish(&self) -> PyResult<()> {
        match self.lease()?.take() {
            Some(lease) => Ok(lease.finish().map_err(Failure::from)?),
            None => Ok(()),
        }
    }
}

/// `value` as a time, or an error that says which.
pub(crate) fn seconds(name: &str, value: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| Failure::invalid(format!("{name} of {value} s makes no sense; give seconds, 0 or more")))
}

/// Holds the whole version in the image at `dir` for at most `seconds`. Needs no receiver: an image stays when its
/// receiver is gone. Waits for the image, and for a whole version in it, until `timeout`. An image that keeps only a slice
/// is refused unless the caller sees to it that nothing else is read (`slices`).
#[pyfunction]
#[pyo3(signature = (dir, seconds = 300.0, timeout = 60.0, *, slices = false))]
pub(crate) fn open_image(
    py: Python<'_>,
    dir: PathBuf,
    seconds: f64,
    timeout: f64,
    slices: bool,
) -> PyResult<Held> {
    let load = self::seconds("a hold", seconds)?;
    let view = enter(py, Some(timeout), |stop| Ok(ImageView::open(&dir, load, stop)?))?;
    if !slices && let Some(slice) = view.slice() {
        let (dir, kept, all) = (dir.display(), slice.len(), view.manifest().cuts().blocks());
        let text = format!(
            "the image {dir} keeps {kept} of the {all} blocks of its model, and all of them are needed"
        );
        return Err(
            Failure::new(Kind::Unsupported, text + "; use one that is received without a slice").into()
        );
    }
    Ok(Held::of_view(view))
}

/// Threads for what an engine waits for while it computes on a GPU, or not at all.
pub(crate) fn hands() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8)
}
