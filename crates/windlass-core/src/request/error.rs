//! Why a request is refused.

use crate::address::AddressError;
use crate::chunk::ExtentError;
use crate::dtype::{Dtype, DtypeError};
use crate::error::Kind;
use crate::identity::IdentityError;

use super::{FieldError, HandleKind, LORA_DISK_LOAD, MAX_HANDLE_BYTES, MAX_JSON_BYTES, MAX_PARAMETERS};

/// A fault in a request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error(
        "request of {bytes} bytes is too large: the limit is {MAX_JSON_BYTES}; send several smaller ones"
    )]
    TooLarge { bytes: usize },
    #[error("request is not valid JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// A field is missing, unknown or of the wrong type.
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error(
        "unknown request type {0:?}: expected broadcast, cuda_ipc, packed_cuda_ipc, lora_disk, pull or store"
    )]
    UnknownType(String),
    #[error("the request names no parameters; do not send empty requests")]
    NoParameters,
    #[error("the request names {count} parameters: the limit is {MAX_PARAMETERS}; send several requests")]
    TooManyParameters { count: usize },
    /// Two lists that should have one entry per parameter differ in length.
    #[error("{field} has {got} entries for {expected} parameters; give {expected}")]
    Lengths {
        field: &'static str,
        /// How many entries it should have.
        expected: usize,
        got: usize,
    },
    #[error("names[{index}] is empty; every parameter has a name")]
    EmptyName { index: usize },
    #[error("parameter {name:?} is named twice, the second time as names[{index}]; name each once")]
    DuplicateName { name: String, index: usize },
    /// A parameter with the name that means LoRA loading in legacy dictionaries.
    #[error(
        "a parameter cannot be named {LORA_DISK_LOAD:?}, which stands for loading an adapter from disk; \
         rename it, or send a lora_disk request"
    )]
    ReservedName,
    #[error("dtypes[{index}]: {source}")]
    Dtype { index: usize, source: DtypeError },
    #[error("parameter {name:?} ({dtype} {shape:?}) cannot be sized: {source}; check its shape")]
    Extent { name: String, dtype: Dtype, shape: Vec<u64>, source: ExtentError },
    #[error(
        "{0:?} is not a GPU UUID: IPC handles are keyed by the physical GPU's UUID, such as \
         GPU-8a56a4bc-4184-b6f7-8a7f-0123456789ab, because device numbers and names mean different GPUs in \
         different processes"
    )]
    GpuUuid(String),
    #[error("{at}: GPU {uuid} is listed twice; give one handle per GPU")]
    DuplicateGpu { at: String, uuid: String },
    #[error("{at}: no IPC handles; give one per GPU on which an engine will read the parameter")]
    NoHandles { at: String },
    #[error(
        "{at}: expected a handle object {{kind, handle, size, offset}}, found {found}; a (function, arguments) \
         pair is a pickled reduction, and opening it would run whatever code it names, so handles travel only \
         as plain data"
    )]
    PickledHandle { at: String, found: &'static str },
    #[error("{at}: unknown handle kind {found:?}: expected legacy, vmm_fd or vmm_fabric")]
    HandleKind { at: String, found: String },
    #[error("{at}: the handle is not base64 (standard alphabet, padded): {source}")]
    HandleEncoding { at: String, source: base64::DecodeError },
    #[error(
        "{at}: a handle of kind {} has {got} bytes: expected {}",
        kind.as_str(),
        kind.fixed_len().map_or(format!("1 to {MAX_HANDLE_BYTES}"), |n| n.to_string())
    )]
    HandleLength { at: String, kind: HandleKind, got: usize },
    #[error("{at}: the handle covers {size} bytes from offset {offset}, which overflows 64 bits; check both")]
    HandleRange { at: String, offset: u64, size: u64 },
    /// A handle that covers less than is to be read through it.
    #[error("the handle for {what} on GPU {gpu} covers {size} bytes but {needed} are to be read")]
    HandleTooSmall {
        /// A parameter, or the packed buffer.
        what: String,
        gpu: String,
        size: u64,
        needed: u64,
    },
    #[error("layout of {name:?}: {field} is {got} but dtype and shape give {expected}")]
    LayoutMismatch { name: String, field: &'static str, expected: u64, got: u64 },
    #[error(
        "sizes of {name:?} is {got} but its shape has {expected} elements; sizes count elements, not bytes"
    )]
    LegacySizes { name: String, expected: u64, got: u64 },
    #[error("layout of {name:?}: offset {offset} is not a multiple of its {align}-byte elements; align it")]
    LayoutAlignment { name: String, offset: u64, align: u64 },
    #[error("layout of {name:?}: it ends beyond what 64 bits can address; check its offset")]
    LayoutRange { name: String },
    #[error("layout of {first:?} and {second:?} overlap; give each its own bytes")]
    LayoutOverlap {
        first: String,
        /// The one that begins inside it.
        second: String,
    },
    #[error(
        "lora_disk_path {0:?} is not usable: expected an absolute path of at most 4096 bytes, the same on every host"
    )]
    LoraPath(String),
    #[error("unknown pull mode {0:?}: expected full, delta or auto")]
    Mode(String),
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("a {request} request has no legacy dictionary: send its plain form (to_value); {remedy}")]
    NoLegacyForm { request: &'static str, remedy: &'static str },
    #[error(
        "a broadcast of {count} parameters is {count} legacy dictionaries, one each: use to_legacy_dicts"
    )]
    LegacyOnePerParameter { count: usize },
    #[error(
        "parameter {name:?} is {got} in a packed buffer of {expected}: legacy sizes count elements of one \
         dtype; send the plain form, or one request per dtype"
    )]
    LegacyMixedDtypes {
        name: String,
        /// The dtype of the first parameter.
        expected: Dtype,
        got: Dtype,
    },
    #[error(
        "parameter {name:?} is at offset {got} but legacy sizes put it at {expected}; pack without gaps and \
         in order, or send the plain form"
    )]
    LegacyGaps { name: String, expected: u64, got: u64 },
}

impl RequestError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        self.row().0
    }

    /// The stable name of the failure, the same in every language; golden vectors refer to it.
    pub fn name(&self) -> &'static str {
        self.row().1
    }

    fn row(&self) -> (Kind, &'static str) {
        match self {
            RequestError::TooLarge { .. } => (Kind::Invalid, "too_large"),
            RequestError::Json(_) => (Kind::Invalid, "not_json"),
            RequestError::Field(e) => (e.kind(), e.name()),
            RequestError::UnknownType(_) => (Kind::Invalid, "unknown_type"),
            RequestError::NoParameters => (Kind::Invalid, "no_parameters"),
            RequestError::TooManyParameters { .. } => (Kind::Invalid, "too_many_parameters"),
            RequestError::Lengths { .. } => (Kind::Invalid, "lengths"),
            RequestError::EmptyName { .. } => (Kind::Invalid, "empty_name"),
            RequestError::DuplicateName { .. } => (Kind::Invalid, "duplicate_name"),
            RequestError::ReservedName => (Kind::Invalid, "reserved_name"),
            RequestError::Dtype { source, .. } => (source.kind(), "unknown_dtype"),
            RequestError::Extent { .. } => (Kind::Invalid, "bad_extent"),
            RequestError::GpuUuid(_) => (Kind::Invalid, "bad_gpu_uuid"),
            RequestError::DuplicateGpu { .. } => (Kind::Invalid, "duplicate_gpu"),
            RequestError::NoHandles { .. } => (Kind::Invalid, "no_handles"),
            RequestError::PickledHandle { .. } => (Kind::Invalid, "pickled_handle"),
            RequestError::HandleKind { .. } => (Kind::Invalid, "unknown_handle_kind"),
            RequestError::HandleEncoding { .. } => (Kind::Invalid, "handle_encoding"),
            RequestError::HandleLength { .. } => (Kind::Invalid, "handle_length"),
            RequestError::HandleRange { .. } => (Kind::Invalid, "handle_range"),
            RequestError::HandleTooSmall { .. } => (Kind::Invalid, "handle_too_small"),
            RequestError::LayoutMismatch { .. } => (Kind::Invalid, "layout_mismatch"),
            RequestError::LegacySizes { .. } => (Kind::Invalid, "legacy_sizes"),
            RequestError::LayoutAlignment { .. } => (Kind::Invalid, "layout_alignment"),
            RequestError::LayoutRange { .. } => (Kind::Invalid, "layout_range"),
            RequestError::LayoutOverlap { .. } => (Kind::Invalid, "layout_overlap"),
            RequestError::LoraPath(_) => (Kind::Invalid, "bad_lora_path"),
            RequestError::Mode(_) => (Kind::Invalid, "unknown_mode"),
            RequestError::Address(e) => (e.kind(), e.name()),
            RequestError::Identity(e) => (e.kind(), "bad_identity"),
            RequestError::NoLegacyForm { .. } => (Kind::Unsupported, "no_legacy_form"),
            RequestError::LegacyOnePerParameter { .. } => (Kind::Unsupported, "legacy_one_per_parameter"),
            RequestError::LegacyMixedDtypes { .. } => (Kind::Unsupported, "legacy_mixed_dtypes"),
            RequestError::LegacyGaps { .. } => (Kind::Unsupported, "legacy_gaps"),
        }
    }
}
