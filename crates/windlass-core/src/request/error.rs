//! Why a request is refused.

use crate::chunk::ExtentError;
use crate::dtype::{Dtype, DtypeError};
use crate::error::Kind;
use crate::identity::IdentityError;
use crate::sync_info::AddressError;

use super::{FieldError, HandleKind, LORA_DISK_LOAD, MAX_HANDLE_BYTES, MAX_JSON_BYTES, MAX_PARAMETERS};

/// What can go wrong here.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// More text than a request can be.
    #[error(
        "request of {bytes} bytes is too large: the limit is {MAX_JSON_BYTES}; send several smaller ones"
    )]
    TooLarge {
        /// Its length.
        bytes: usize,
    },
    /// Not JSON.
    #[error("request is not valid JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// A field is missing, unknown or of the wrong type.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// A `type` that we do not know.
    #[error(
        "unknown request type {0:?}: expected broadcast, cuda_ipc, packed_cuda_ipc, lora_disk, pull or store"
    )]
    UnknownType(String),
    /// A request for no parameter at all.
    #[error("the request names no parameters; do not send empty requests")]
    NoParameters,
    /// Absurdly many parameters.
    #[error("the request names {count} parameters: the limit is {MAX_PARAMETERS}; send several requests")]
    TooManyParameters {
        /// How many.
        count: usize,
    },
    /// Two lists that should have one entry per parameter differ in length.
    #[error("{field} has {got} entries for {expected} parameters; give {expected}")]
    Lengths {
        /// Which list.
        field: &'static str,
        /// How many entries it should have.
        expected: usize,
        /// How many it has.
        got: usize,
    },
    /// A parameter without a name.
    #[error("names[{index}] is empty; every parameter has a name")]
    EmptyName {
        /// Its position.
        index: usize,
    },
    /// One name twice.
    #[error("parameter {name:?} is named twice, the second time as names[{index}]; name each once")]
    DuplicateName {
        /// The name.
        name: String,
        /// Position of the second.
        index: usize,
    },
    /// A parameter with the name that means LoRA loading in legacy dictionaries.
    #[error(
        "a parameter cannot be named {LORA_DISK_LOAD:?}, which stands for loading an adapter from disk; \
         rename it, or send a lora_disk request"
    )]
    ReservedName,
    /// An unknown dtype.
    #[error("dtypes[{index}]: {source}")]
    Dtype {
        /// Its position.
        index: usize,
        /// What is wrong with it.
        source: DtypeError,
    },
    /// Dtype and shape have no size.
    #[error("parameter {name:?} ({dtype} {shape:?}) cannot be sized: {source}; check its shape")]
    Extent {
        /// The parameter.
        name: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Why.
        source: ExtentError,
    },
    /// Not the UUID of a GPU.
    #[error(
        "{0:?} is not a GPU UUID: IPC handles are keyed by the physical GPU's UUID, such as \
         GPU-8a56a4bc-4184-b6f7-8a7f-0123456789ab, because device numbers and names mean different GPUs in \
         different processes"
    )]
    GpuUuid(String),
    /// One GPU twice, in two spellings.
    #[error("{at}: GPU {uuid} is there twice; give one handle per GPU")]
    DuplicateGpu {
        /// Where.
        at: String,
        /// The GPU.
        uuid: String,
    },
    /// No handle at all.
    #[error("{at}: no IPC handles; give one per GPU on which an engine will read the parameter")]
    NoHandles {
        /// Where.
        at: String,
    },
    /// A handle that is not plain data.
    #[error(
        "{at}: expected a handle object {{kind, handle, size, offset}}, found {found}; a (function, arguments) \
         pair is a pickled reduction, and opening it would run whatever code it names, so handles travel only \
         as plain data"
    )]
    PickledHandle {
        /// Where.
        at: String,
        /// What is there.
        found: &'static str,
    },
    /// A handle of an unknown kind.
    #[error("{at}: unknown handle kind {found:?}: expected legacy, vmm_fd or vmm_fabric")]
    HandleKind {
        /// Where.
        at: String,
        /// The kind given.
        found: String,
    },
    /// A handle that is not base64.
    #[error("{at}: the handle is not base64 (standard alphabet, padded): {source}")]
    HandleEncoding {
        /// Where.
        at: String,
        /// What is wrong with it.
        source: base64::DecodeError,
    },
    /// A handle of the wrong length for its kind.
    #[error(
        "{at}: a handle of kind {} has {got} bytes: expected {}",
        kind.as_str(),
        kind.fixed_len().map_or(format!("1 to {MAX_HANDLE_BYTES}"), |n| n.to_string())
    )]
    HandleLength {
        /// Where.
        at: String,
        /// Its kind.
        kind: HandleKind,
        /// Its length.
        got: usize,
    },
    /// A range that 64 bits cannot express.
    #[error("{at}: the handle covers {size} bytes from offset {offset}, which overflows 64 bits; check both")]
    HandleRange {
        /// Where.
        at: String,
        /// Its offset.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// A handle that covers less than is to be read through it.
    #[error("the handle for {what} on GPU {gpu} covers {size} bytes but {needed} are to be read")]
    HandleTooSmall {
        /// A parameter, or the packed buffer.
        what: String,
        /// The GPU.
        gpu: String,
        /// Bytes covered.
        size: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// A layout record that contradicts dtype and shape.
    #[error("layout of {name:?}: {field} is {got} but dtype and shape give {expected}")]
    LayoutMismatch {
        /// The parameter.
        name: String,
        /// `numel` or `bytes`.
        field: &'static str,
        /// By dtype and shape.
        expected: u64,
        /// By the layout.
        got: u64,
    },
    /// Legacy `sizes` that contradict the shapes.
    #[error(
        "sizes of {name:?} is {got} but its shape has {expected} elements; sizes count elements, not bytes"
    )]
    LegacySizes {
        /// The parameter.
        name: String,
        /// Elements by its shape.
        expected: u64,
        /// The size given.
        got: u64,
    },
    /// A tensor that begins inside an element.
    #[error("layout of {name:?}: offset {offset} is not a multiple of its {align}-byte elements; align it")]
    LayoutAlignment {
        /// The parameter.
        name: String,
        /// Its offset.
        offset: u64,
        /// Bytes of an element.
        align: u64,
    },
    /// A range that 64 bits cannot express.
    #[error("layout of {name:?}: it ends beyond what 64 bits can address; check its offset")]
    LayoutRange {
        /// The parameter.
        name: String,
    },
    /// Two tensors share bytes.
    #[error("layout of {first:?} and {second:?} overlap; give each its own bytes")]
    LayoutOverlap {
        /// The one that begins first.
        first: String,
        /// The one that begins inside it.
        second: String,
    },
    /// An adapter path that another process could not open.
    #[error(
        "lora_disk_path {0:?} is not usable: expected an absolute path of at most 4096 bytes, the same on every host"
    )]
    LoraPath(String),
    /// An unknown pull mode.
    #[error("unknown pull mode {0:?}: expected full, delta or auto")]
    Mode(String),
    /// A bad endpoint or store URL.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A bad model id.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// There is no legacy dictionary for this type.
    #[error("a {request} request has no legacy dictionary: send its plain form (to_value); {remedy}")]
    NoLegacyForm {
        /// The type.
        request: &'static str,
        /// What else would do.
        remedy: &'static str,
    },
    /// A broadcast of several parameters is several legacy dictionaries.
    #[error(
        "a broadcast of {count} parameters is {count} legacy dictionaries, one each: use to_legacy_dicts"
    )]
    LegacyOnePerParameter {
        /// How many parameters.
        count: usize,
    },
    /// Legacy packing knows a single dtype.
    #[error(
        "parameter {name:?} is {got} in a packed buffer of {expected}: legacy sizes count elements of one \
         dtype; send the plain form, or one request per dtype"
    )]
    LegacyMixedDtypes {
        /// The parameter.
        name: String,
        /// The dtype of the first parameter.
        expected: Dtype,
        /// Its own.
        got: Dtype,
    },
    /// Legacy packing knows no gaps.
    #[error(
        "parameter {name:?} is at offset {got} but legacy sizes put it at {expected}; pack without gaps and \
         in order, or send the plain form"
    )]
    LegacyGaps {
        /// The parameter.
        name: String,
        /// Where the sizes put it.
        expected: u64,
        /// Where it is.
        got: u64,
    },
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
