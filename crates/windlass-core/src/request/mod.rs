//! Weight update requests and their legacy dictionaries.
//!
//! A request announces one transfer to an engine: its parameters, and where to get them. Senders
//! build one per chunk (or per version, where the engine side pulls), clients carry it as JSON, receivers
//! parse it with [`parse_request`]. This module owns the types, the checks and both JSON forms; it opens no
//! handle, connects to no endpoint and reads no file. Nothing here is pickled (C29).
//!
//! A value of one of these types has passed every check: there is no way to build one that has not.
//!
//! # Plain form
//!
//! One JSON object with a `type`; unknown fields are refused, null counts as absent.
//!
//! | `type` | fields besides `type` |
//! |---|---|
//! | `broadcast` | `names`, `dtypes`, `shapes` |
//! | `cuda_ipc` | the same, and `ipc_handles`: a list with one handle map per parameter |
//! | `packed_cuda_ipc` | the same, `layout`: one `{offset, bytes, numel}` per parameter, and `ipc_handles`: one handle map |
//! | `lora_disk` | `lora_disk_path` |
//! | `pull` | `identity` `{model_id, incarnation, version}`, `sender_endpoint`, `mode` (`full`, `delta`, `auto`) |
//! | `store` | `url`, `identity` |
//!
//! - `names` are not empty, not repeated, and at most [`MAX_PARAMETERS`].
//! - `dtypes` are written `bfloat16`; `torch.bfloat16` and `BF16` are read as well (C27).
//! - `shapes` are lists of unsigned integers; the size that dtype and shape give must be whole bytes and fit
//!   64 bits.
//! - A *handle map* has one entry per GPU, keyed by its UUID (C26, see [`GpuUuid`]); a *handle* is
//!   `{kind, handle, size, offset}`: `kind` is `legacy`, `vmm_fd` or `vmm_fabric`, `handle` is base64 of
//!   opaque bytes, and the memory is `size` bytes from `offset` into the exported allocation.
//! - In `layout`, `offset` and `bytes` count bytes from the start of that memory and `numel` counts elements
//!   (C25). Tensors are aligned to their elements, do not overlap, and end within every handle's `size`.
//!
//! JSON text is at most [`MAX_JSON_BYTES`] long and as deep as the JSON parser's own limit.
//!
//! # Legacy form
//!
//! The dictionaries that trainers sent before requests had types (C24). They have no `type`.
//!
//! | case | what | recognised by | fields |
//! |---|---|---|---|
//! | 1 | broadcast, one dictionary per parameter | neither `extras` nor `packed` | `names`, `dtypes`, `shapes` |
//! | 2 | one IPC handle per parameter | `extras`, and `packed` false or absent | `names`, `dtypes`, `shapes`, `extras[i].ipc_handles` |
//! | 3 | one IPC handle for a packed buffer | `packed` true | `names`, `dtypes`, `shapes`, `sizes`, `extras[0].ipc_handles` |
//! | 4 | adapter on disk | `names` is `["lora_disk_load"]` | `extras[0].lora_disk_path` |
//!
//! Case 1 is read with several parameters too, as some senders merge them; it is written one by one.
//! `sizes` count elements, and the tensors, all of one dtype, lie one after the other without gaps; a buffer
//! laid out in any other way has no legacy form. Handle maps are those of the plain form: the original pair
//! of a function and its arguments is a pickle and is refused. A parameter cannot be named
//! `lora_disk_load` in either form.
//!
//! # Names of errors
//!
//! [`RequestError::name`] gives each failure a stable name. The golden vectors under `testdata/requests`
//! list inputs with the expected typed form, legacy form or error name; every implementation reads them.

mod error;
mod fields;
mod ipc;
mod legacy;
mod parameters;
mod quick;

pub use error::RequestError;
pub use fields::FieldError;
pub use ipc::{GpuUuid, HandleKind, IpcHandle, IpcHandles, PackedTensor, packed_layout};
pub use legacy::{parse_request, parse_request_json};
pub use parameters::Parameters;
pub use quick::is_canonical_packed;

pub(crate) use fields::{Fields, tag};

use serde_json::{Map, Value, json};

use crate::address::{Endpoint, StoreUrl};
use crate::error::excerpt;
use crate::identity::{Identity, Incarnation, ModelId};
use ipc::{check_cover, check_layout, read_handles, write_handles};
use parameters::check_lengths;

/// The most parameters that one request may name.
pub const MAX_PARAMETERS: usize = 1_000_000;

/// The largest JSON text of a request.
pub const MAX_JSON_BYTES: usize = 64 << 20;

/// The largest opaque handle.
pub const MAX_HANDLE_BYTES: usize = 4096;

/// The name that means "load an adapter from disk" in legacy dictionaries.
pub const LORA_DISK_LOAD: &str = "lora_disk_load";

/// The parameters follow by broadcast on the update group, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BroadcastWeightUpdateRequest {
    pub params: Parameters,
}

/// Each parameter lies in exported device memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaIpcWeightUpdateRequest {
    params: Parameters,
    ipc_handles: Vec<IpcHandles>,
}

impl CudaIpcWeightUpdateRequest {
    /// `ipc_handles[i]` are the handles of parameter `i`, each covering at least its bytes.
    pub fn new(
        params: Parameters,
        ipc_handles: Vec<IpcHandles>,
    ) -> Result<CudaIpcWeightUpdateRequest, RequestError> {
        check_lengths("ipc_handles", params.len(), ipc_handles.len())?;
        for ((name, _, _, extent), handles) in params.each().zip(&ipc_handles) {
            check_cover(handles, name, extent.bytes)?;
        }
        Ok(CudaIpcWeightUpdateRequest { params, ipc_handles })
    }

    pub fn params(&self) -> &Parameters {
        &self.params
    }

    /// The handles of each parameter.
    pub fn ipc_handles(&self) -> &[IpcHandles] {
        &self.ipc_handles
    }
}

/// All parameters lie in one exported buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedCudaIpcWeightUpdateRequest {
    params: Parameters,
    layout: Vec<PackedTensor>,
    ipc_handles: IpcHandles,
}

impl PackedCudaIpcWeightUpdateRequest {
    /// `layout[i]` is where parameter `i` lies (see [`packed_layout`]); every handle covers the buffer.
    pub fn new(
        params: Parameters,
        layout: Vec<PackedTensor>,
        ipc_handles: IpcHandles,
    ) -> Result<PackedCudaIpcWeightUpdateRequest, RequestError> {
        check_lengths("layout", params.len(), layout.len())?;
        let needed = check_layout(&params, &layout)?;
        check_cover(&ipc_handles, "the packed buffer", needed)?;
        Ok(PackedCudaIpcWeightUpdateRequest { params, layout, ipc_handles })
    }

    pub fn params(&self) -> &Parameters {
        &self.params
    }

    /// Where each parameter lies in the buffer.
    pub fn layout(&self) -> &[PackedTensor] {
        &self.layout
    }

    /// The handles of the buffer.
    pub fn ipc_handles(&self) -> &IpcHandles {
        &self.ipc_handles
    }
}

/// An adapter lies on a path that both sides see: a PEFT directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraDiskWeightUpdateRequest {
    lora_disk_path: String,
}

impl LoraDiskWeightUpdateRequest {
    /// The adapter at an absolute path; a relative one would mean another place in another process.
    pub fn new(lora_disk_path: &str) -> Result<LoraDiskWeightUpdateRequest, RequestError> {
        let ok = lora_disk_path.starts_with('/')
            && lora_disk_path.len() <= 4096
            && !lora_disk_path.contains(char::is_control);
        if !ok {
            return Err(RequestError::LoraPath(excerpt(lora_disk_path)));
        }
        Ok(LoraDiskWeightUpdateRequest { lora_disk_path: lora_disk_path.to_owned() })
    }

    /// The directory.
    pub fn lora_disk_path(&self) -> &str {
        &self.lora_disk_path
    }
}

/// The transfer mode that a receiver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PullMode {
    Full,
    /// The changes since its version; falls back to full where no delta can be served.
    Delta,
    Auto,
}

impl PullMode {
    /// The name in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            PullMode::Full => "full",
            PullMode::Delta => "delta",
            PullMode::Auto => "auto",
        }
    }

    fn parse(text: &str) -> Result<PullMode, RequestError> {
        match text {
            "full" => Ok(PullMode::Full),
            "delta" => Ok(PullMode::Delta),
            "auto" => Ok(PullMode::Auto),
            _ => Err(RequestError::Mode(excerpt(text))),
        }
    }
}

/// A version is ready at an agent: pull it. Names, dtypes and shapes are in the agent's manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullWeightUpdateRequest {
    pub identity: Identity,
    /// The agent that has it.
    pub sender_endpoint: Endpoint,
    /// How much to ask for.
    pub mode: PullMode,
}

/// A version is ready in a store: read it. Names, dtypes and shapes are in its manifest there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreWeightUpdateRequest {
    pub url: StoreUrl,
    pub identity: Identity,
}

/// One announced transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightUpdateRequest {
    Broadcast(BroadcastWeightUpdateRequest),
    /// By one IPC handle per parameter.
    CudaIpc(CudaIpcWeightUpdateRequest),
    /// By one IPC handle for all.
    PackedCudaIpc(PackedCudaIpcWeightUpdateRequest),
    /// By an adapter on disk.
    LoraDisk(LoraDiskWeightUpdateRequest),
    /// By pulling from an agent.
    Pull(PullWeightUpdateRequest),
    /// By reading from a store.
    Store(StoreWeightUpdateRequest),
}

impl WeightUpdateRequest {
    /// The `type` in JSON.
    pub const fn type_name(&self) -> &'static str {
        match self {
            WeightUpdateRequest::Broadcast(_) => "broadcast",
            WeightUpdateRequest::CudaIpc(_) => "cuda_ipc",
            WeightUpdateRequest::PackedCudaIpc(_) => "packed_cuda_ipc",
            WeightUpdateRequest::LoraDisk(_) => "lora_disk",
            WeightUpdateRequest::Pull(_) => "pull",
            WeightUpdateRequest::Store(_) => "store",
        }
    }

    /// The parameters that the request itself lists. Adapters, pulls and stores list them elsewhere.
    pub fn params(&self) -> Option<&Parameters> {
        match self {
            WeightUpdateRequest::Broadcast(r) => Some(&r.params),
            WeightUpdateRequest::CudaIpc(r) => Some(&r.params),
            WeightUpdateRequest::PackedCudaIpc(r) => Some(&r.params),
            WeightUpdateRequest::LoraDisk(_)
            | WeightUpdateRequest::Pull(_)
            | WeightUpdateRequest::Store(_) => None,
        }
    }

    /// The plain form.
    pub fn to_value(&self) -> Value {
        let mut map = Map::new();
        map.insert("type".to_owned(), self.type_name().into());
        if let Some(params) = self.params() {
            params.write(&mut map);
        }
        let mut put = |field: &str, value: Value| map.insert(field.to_owned(), value);
        match self {
            WeightUpdateRequest::Broadcast(_) => {}
            WeightUpdateRequest::CudaIpc(r) => {
                put("ipc_handles", r.ipc_handles.iter().map(write_handles).collect());
            }
            WeightUpdateRequest::PackedCudaIpc(r) => {
                let record =
                    |t: &PackedTensor| json!({ "offset": t.offset, "bytes": t.bytes, "numel": t.numel });
                put("layout", r.layout.iter().map(record).collect());
                put("ipc_handles", write_handles(&r.ipc_handles));
            }
            WeightUpdateRequest::LoraDisk(r) => {
                put("lora_disk_path", r.lora_disk_path.as_str().into());
            }
            WeightUpdateRequest::Pull(r) => {
                put("identity", json!(r.identity));
                put("sender_endpoint", r.sender_endpoint.as_str().into());
                put("mode", r.mode.as_str().into());
            }
            WeightUpdateRequest::Store(r) => {
                put("url", r.url.as_str().into());
                put("identity", json!(r.identity));
            }
        }
        map.into()
    }

    /// The plain form as JSON text.
    pub fn to_json(&self) -> String {
        self.to_value().to_string()
    }

    /// Reads and checks the plain form. [`parse_request`] reads the legacy form as well.
    pub fn from_value(value: &Value) -> Result<WeightUpdateRequest, RequestError> {
        const AT: &str = "request";
        match tag(value, AT)? {
            Some("broadcast") => {
                let params =
                    Parameters::read(&Fields::open(value, AT, &["type", "names", "dtypes", "shapes"])?)?;
                Ok(WeightUpdateRequest::Broadcast(BroadcastWeightUpdateRequest { params }))
            }
            Some("cuda_ipc") => read_cuda_ipc(value),
            Some("packed_cuda_ipc") => read_packed(value),
            Some("lora_disk") => {
                let fields = Fields::open(value, AT, &["type", "lora_disk_path"])?;
                let path = fields.text("lora_disk_path")?;
                Ok(WeightUpdateRequest::LoraDisk(LoraDiskWeightUpdateRequest::new(path)?))
            }
            Some("pull") => {
                let fields = Fields::open(value, AT, &["type", "identity", "sender_endpoint", "mode"])?;
                Ok(WeightUpdateRequest::Pull(PullWeightUpdateRequest {
                    identity: read_identity(&fields)?,
                    sender_endpoint: fields.text("sender_endpoint")?.parse()?,
                    mode: PullMode::parse(fields.text("mode")?)?,
                }))
            }
            Some("store") => {
                let fields = Fields::open(value, AT, &["type", "url", "identity"])?;
                let url = fields.text("url")?.parse()?;
                let identity = read_identity(&fields)?;
                Ok(WeightUpdateRequest::Store(StoreWeightUpdateRequest { url, identity }))
            }
            Some(other) => Err(RequestError::UnknownType(excerpt(other))),
            None => Err(FieldError::Missing { at: AT.to_owned(), field: "type" }.into()),
        }
    }
}

fn read_cuda_ipc(value: &Value) -> Result<WeightUpdateRequest, RequestError> {
    let fields = Fields::open(value, "request", &["type", "names", "dtypes", "shapes", "ipc_handles"])?;
    let params = Parameters::read(&fields)?;
    let list = fields.list("ipc_handles")?;
    check_lengths("ipc_handles", params.len(), list.values.len())?;
    let handles = list.values.iter().enumerate().map(|(i, map)| read_handles(map, &list.path(i)));
    let handles = handles.collect::<Result<_, _>>()?;
    Ok(WeightUpdateRequest::CudaIpc(CudaIpcWeightUpdateRequest::new(params, handles)?))
}

fn read_packed(value: &Value) -> Result<WeightUpdateRequest, RequestError> {
    let known = &["type", "names", "dtypes", "shapes", "layout", "ipc_handles"];
    let fields = Fields::open(value, "request", known)?;
    let params = Parameters::read(&fields)?;
    let list = fields.list("layout")?;
    check_lengths("layout", params.len(), list.values.len())?;
    let record = |(i, record)| {
        let fields = Fields::open(record, list.path(i), &["offset", "bytes", "numel"])?;
        let (offset, bytes, numel) = (fields.u64("offset")?, fields.u64("bytes")?, fields.u64("numel")?);
        Ok(PackedTensor { offset, bytes, numel })
    };
    let layout = list.values.iter().enumerate().map(record).collect::<Result<_, FieldError>>()?;
    let handles = read_handles(fields.required("ipc_handles")?, &fields.path("ipc_handles"))?;
    Ok(WeightUpdateRequest::PackedCudaIpc(PackedCudaIpcWeightUpdateRequest::new(params, layout, handles)?))
}

fn read_identity(fields: &Fields<'_>) -> Result<Identity, RequestError> {
    let at = fields.path("identity");
    let fields = Fields::open(fields.required("identity")?, at, &["model_id", "incarnation", "version"])?;
    Ok(Identity {
        model_id: ModelId::new(fields.text("model_id")?)?,
        incarnation: Incarnation(fields.u64("incarnation")?),
        version: fields.u64("version")?,
    })
}

#[cfg(test)]
mod tests;
