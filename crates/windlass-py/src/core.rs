//! What `windlass-core` decides, for Python: chunks, dtypes, requests, sync infos and the choice of a strategy.
//!
//! Nothing is decided here. Records that have a JSON form (requests, sync infos, facts and choices) cross as JSON
//! text, which the Python side reads and writes with its own `json`; the rules stand in `windlass-core`, once for
//! both languages. What Python attaches to a parameter (a tensor) rides through the chunker untouched.

use std::path::PathBuf;

use pyo3::prelude::*;
use windlass_core::Dtype;
use windlass_core::address::{Endpoint, Host, StoreUrl};
use windlass_core::backoff::{self, Span};
use windlass_core::choose::{ChooseError, Facts, Overrides};
use windlass_core::chunk::{self, ChunkConfig, Extent, Item, WeightChunk};
use windlass_core::identity::{IdentityError, Incarnation, ModelId};
use windlass_core::request::{Parameters, WeightUpdateRequest, is_canonical_packed, parse_request_json};
use windlass_core::sync_info::{self, EngineShape, WeightSyncInfo};
use windlass_data::private::{self, Readers};

use crate::errors::Failure;

/// How long what failed is left alone before it is tried again: longer with every failure, up to a cap.
#[pyclass(module = "windlass._windlass")]
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    inner: backoff::Backoff,
}

#[pymethods]
impl Backoff {
    #[new]
    fn new() -> Backoff {
        Backoff::default()
    }

    /// Counts a failure: how many seconds to rest, from `first` to `cap`, and whether that has become longer. Whoever fails
    /// together with others gives another `salt` than they.
    fn failed(&mut self, first: f64, cap: f64, salt: u64) -> PyResult<(f64, bool)> {
        let ms = |what, seconds| Ok::<_, PyErr>(crate::held::seconds(what, seconds)?.as_millis() as u64);
        let first_ms = ms("a rest", first)?;
        let span = Span { first_ms, cap_ms: ms("a rest", cap)?.max(first_ms) };
        let rest = self.inner.failed(span, salt);
        Ok((rest.ms as f64 / 1e3, rest.longer))
    }

    /// It succeeded, or there is something newer to try.
    fn reset(&mut self) {
        self.inner.reset();
    }
}

/// A parameter as it left the chunker: name, dtype, shape, payload.
type Part = (String, &'static str, Vec<u64>, Py<PyAny>);

/// A chunk: the module that it is, if it is one, and its parameters.
type Parts = (Option<String>, Vec<Part>);

/// Turns a stream of parameters into chunks: push one, take the chunks that are finished, and flush the rest with
/// `finish`. Without arguments, every parameter is a chunk.
#[pyclass(module = "windlass._windlass")]
#[derive(Debug)]
pub(crate) struct Chunker {
    inner: Option<chunk::Chunker<Py<PyAny>>>,
}

#[pymethods]
impl Chunker {
    #[new]
    #[pyo3(signature = (*, group_by_module = false, threshold_bytes = None))]
    fn new(group_by_module: bool, threshold_bytes: Option<u64>) -> Chunker {
        let config = ChunkConfig { group_by_module, batch_threshold_bytes: threshold_bytes };
        Chunker { inner: Some(chunk::Chunker::new(config)) }
    }

    /// Takes the next parameter and gives back the chunks that it completes, in order: for each the module that it
    /// is, or `None`, and (name, dtype, shape, payload) of its parameters. Dtypes come back in their canonical
    /// spelling.
    fn push(
        &mut self,
        name: String,
        dtype: &str,
        shape: Vec<u64>,
        payload: Py<PyAny>,
    ) -> Result<Vec<Parts>, Failure> {
        let chunker = self.inner.as_mut().ok_or_else(|| {
            Failure::invalid(format!(
                "{name:?} was pushed after finish(): one chunker serves one stream; make another"
            ))
        })?;
        let dtype = dtype.parse::<Dtype>()?;
        // A size that does not exist is the item's own error, which names the parameter.
        let bytes = Extent::of(dtype, &shape).map_or(0, |extent| extent.bytes);
        let done = chunker.push(Item::new(name, dtype, shape, bytes, payload)?)?;
        Ok(done.into_iter().map(parts).collect())
    }

    /// Ends the stream: what is still held becomes the last chunk. A second call gives nothing.
    fn finish(&mut self) -> Vec<Parts> {
        self.inner.take().map_or_else(Vec::new, |chunker| chunker.finish().into_iter().map(parts).collect())
    }

    /// Bytes held back until later pushes or `finish`.
    #[getter]
    fn pending_bytes(&self) -> u64 {
        self.inner.as_ref().map_or(0, chunk::Chunker::pending_bytes)
    }
}

fn parts(chunk: WeightChunk<Py<PyAny>>) -> Parts {
    let module = chunk.module_name().map(str::to_owned);
    let part = |item: Item<Py<PyAny>>| {
        (item.name().to_owned(), item.dtype().name(), item.shape().to_vec(), item.into_payload())
    };
    (module, chunk.into_iter().map(part).collect())
}

/// Bytes of a threshold given as `weight_transfer_threshold_cuda_ipc_GB`, in units of 1024^3.
#[pyfunction]
pub(crate) fn threshold_from_gb(gb: f64) -> Result<u64, Failure> {
    Ok(chunk::threshold_from_gb(gb)?)
}

/// The module of a parameter: its name without the last two dotted parts, or `None` where nothing remains.
#[pyfunction]
pub(crate) fn module_of(name: &str) -> Option<&str> {
    chunk::module_of(name)
}

/// The canonical name of a dtype (`bfloat16`) from any spelling: `torch.bfloat16`, `BF16`, `half`, …
#[pyfunction]
pub(crate) fn dtype_name(spelling: &str) -> Result<&'static str, Failure> {
    Ok(spelling.parse::<Dtype>()?.name())
}

/// The name of a dtype in a safetensors header (`BF16`), from any spelling.
#[pyfunction]
pub(crate) fn dtype_safetensors(spelling: &str) -> Result<&'static str, Failure> {
    Ok(spelling.parse::<Dtype>()?.safetensors_name())
}

/// Bits of one element of a dtype in any spelling; 4 and 6 for the packed micro-scaling types.
#[pyfunction]
pub(crate) fn dtype_bits(spelling: &str) -> Result<u64, Failure> {
    Ok(spelling.parse::<Dtype>()?.bits())
}

/// Every dtype by its canonical name.
#[pyfunction]
pub(crate) fn dtypes() -> Vec<&'static str> {
    Dtype::ALL.iter().map(|dtype| dtype.name()).collect()
}

/// (elements, bytes) of a tensor. A scalar has one element.
#[pyfunction]
pub(crate) fn extent(dtype: &str, shape: Vec<u64>) -> Result<(u64, u64), Failure> {
    let item = Extent::of(dtype.parse()?, &shape)
        .map_err(|e| Failure::invalid(format!("{dtype} {shape:?} cannot be sized: {e}; check the shape")))?;
    Ok((item.numel, item.bytes))
}

/// Checks the id of a model, which is also the name of a directory.
#[pyfunction]
pub(crate) fn check_model_id(text: &str) -> Result<(), Failure> {
    ModelId::new(text)?;
    Ok(())
}

/// Checks the address of an agent or a controller, such as `http://10.0.0.7:9000`.
#[pyfunction]
pub(crate) fn check_endpoint(text: &str) -> Result<(), Failure> {
    text.parse::<Endpoint>()?;
    Ok(())
}

/// Checks the URL of a store, such as `s3://bucket/run`.
#[pyfunction]
pub(crate) fn check_store_url(text: &str) -> Result<(), Failure> {
    text.parse::<StoreUrl>()?;
    Ok(())
}

/// The token in a file, which must be this user's or root's, and nobody else's to read; its group's too, if `group`.
#[pyfunction]
#[pyo3(signature = (path, *, group = false))]
pub(crate) fn read_token(path: PathBuf, group: bool) -> Result<String, Failure> {
    let readers = if group { Readers::Group } else { Readers::Owner };
    Ok(windlass::service::token::read_for(&path, readers)?.expose().to_owned())
}

/// Makes a directory below which things of this user are kept, if it is not there. Raises `WindlassDenied` if another user
/// could replace what is in it.
#[pyfunction]
#[pyo3(signature = (path, *, group = false))]
pub(crate) fn make_place(path: PathBuf, group: bool) -> Result<(), Failure> {
    Ok(private::make_place(&path, if group { 0o750 } else { 0o700 }).map_err(windlass::Error::from)?)
}

/// Checks the host part of an address that peers are told to connect to.
#[pyfunction]
pub(crate) fn check_host(text: &str) -> Result<(), Failure> {
    Host::new(text)?;
    Ok(())
}

/// Reads and checks JSON text of a request, plain or one of the four legacy dictionaries; gives the plain form, or nothing
/// if the text is that.
#[pyfunction]
pub(crate) fn parse_request(text: &str) -> Result<Option<String>, Failure> {
    if is_canonical_packed(text.as_bytes()) {
        return Ok(None);
    }
    Ok(Some(parse_request_json(text.as_bytes())?.to_json()))
}

/// The legacy dictionaries of a request, as JSON text of a list. With `one`, a request that is several is refused.
#[pyfunction]
pub(crate) fn legacy_request(text: &str, one: bool) -> Result<String, Failure> {
    let request: WeightUpdateRequest = parse_request_json(text.as_bytes())?;
    let dicts = if one { vec![request.to_legacy_dict()?] } else { request.to_legacy_dicts()? };
    Ok(serde_json::Value::from(dicts).to_string())
}

/// Lays parameters out in one buffer: (offset, bytes, numel) of each, aligned to its elements.
#[pyfunction]
pub(crate) fn packed_layout(
    names: Vec<String>,
    dtypes: Vec<String>,
    shapes: Vec<Vec<u64>>,
) -> Result<Vec<(u64, u64, u64)>, Failure> {
    let dtypes = dtypes.iter().map(|dtype| dtype.parse()).collect::<Result<Vec<Dtype>, _>>()?;
    let layout = windlass_core::request::packed_layout(&Parameters::new(names, dtypes, shapes)?)?;
    Ok(layout.into_iter().map(|t| (t.offset, t.bytes, t.numel)).collect())
}

/// Reads and checks JSON text of a sync info; gives the plain form.
#[pyfunction]
pub(crate) fn parse_sync_info(text: &str) -> Result<String, Failure> {
    Ok(WeightSyncInfo::from_json(text.as_bytes())?.to_json())
}

fn shapes(engines: Vec<(u32, u32, u32)>) -> Vec<EngineShape> {
    engines.into_iter().map(|(tp, pp, dp)| EngineShape { tp, pp, dp }).collect()
}

/// Ranks of the update group, given (tp, pp, dp) of each engine: the trainer's one and all of theirs.
#[pyfunction]
pub(crate) fn world_size(engines: Vec<(u32, u32, u32)>) -> Result<u32, Failure> {
    Ok(sync_info::world_size(&shapes(engines))?)
}

/// Each engine's rank offset: 1 for the first, then advancing by the ranks of the engine before.
#[pyfunction]
pub(crate) fn rank_offsets(engines: Vec<(u32, u32, u32)>) -> Result<Vec<u32>, Failure> {
    Ok(sync_info::rank_offsets(&shapes(engines))?)
}

/// The rank in the update group of a rank inside an engine of shape (tp, pp, dp) at `rank_offset`.
#[pyfunction]
pub(crate) fn engine_rank(
    local_rank: u32,
    rank_offset: u32,
    engine: (u32, u32, u32),
) -> Result<u32, Failure> {
    let (tp, pp, dp) = engine;
    Ok(sync_info::engine_rank(local_rank, rank_offset, EngineShape { tp, pp, dp })?)
}

/// Decides on strategy, link and codec: JSON text of the facts and of the overrides in, of the choice out.
#[pyfunction]
pub(crate) fn choose(facts: &str, overrides: &str) -> Result<String, Failure> {
    let facts: Facts = serde_json::from_str(facts)
        .map_err(|e| Failure::invalid(format!("the facts cannot be read: {e}")))?;
    let overrides: serde_json::Map<String, serde_json::Value> = serde_json::from_str(overrides)
        .map_err(|e| Failure::invalid(format!("the configuration cannot be read: {e}")))?;
    let choice = Overrides::try_from(overrides).and_then(|o| windlass_core::choose::choose(&facts, &o));
    let choice = choice.map_err(|e: ChooseError| Failure::from(e))?;
    serde_json::to_string(&choice).map_err(|e| Failure::invalid(format!("the choice cannot be written: {e}")))
}

pub(crate) fn parse_incarnation(text: &str) -> Result<Incarnation, Failure> {
    text.parse().map_err(|e: IdentityError| Failure::of(e.kind(), &e))
}
