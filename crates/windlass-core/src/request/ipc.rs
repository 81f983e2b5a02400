//! CUDA IPC in requests: which GPU, which handle, and where tensors lie in a packed buffer.
//!
//! A handle is plain data. It names memory that another process on the same host exported. Its holder
//! can map that memory, and nothing in it is executable. This crate does not open handles.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::fields::{object, type_of};
use super::{Fields, MAX_HANDLE_BYTES, Parameters, RequestError};
use crate::dtype::Dtype;
use crate::error::excerpt;

/// The UUID of a physical GPU: the same in every process, regardless of `CUDA_VISIBLE_DEVICES`.
///
/// Written `GPU-` and the UUID in lower case; read with or without the prefix, in either case, so that what
/// `nvidia-smi` prints and what torch's device properties hold are one key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid([u8; 16]);

impl FromStr for GpuUuid {
    type Err = RequestError;

    fn from_str(text: &str) -> Result<GpuUuid, RequestError> {
        parse_uuid(text).map(GpuUuid).ok_or_else(|| RequestError::GpuUuid(excerpt(text)))
    }
}

/// 8-4-4-4-12 hexadecimal digits, after an optional `GPU-`.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let bare = text.strip_prefix("GPU-").unwrap_or(text).as_bytes();
    if bare.len() != 36 || [8, 13, 18, 23].iter().any(|&i| bare.get(i) != Some(&b'-')) {
        return None;
    }
    let mut digits = bare.iter().filter(|&&b| b != b'-').map(|&b| (b as char).to_digit(16));
    let mut uuid = [0; 16];
    for byte in &mut uuid {
        *byte = (digits.next()?? << 4 | digits.next()??) as u8;
    }
    Some(uuid)
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (i, byte) in self.0.iter().enumerate() {
            let dash = if matches!(i, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// How device memory was exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HandleKind {
    /// `cuIpcGetMemHandle`: the 64 bytes of the handle, without the framing that torch puts around it.
    Legacy,
    /// A virtual-memory allocation exported as a POSIX descriptor. The bytes tell the receiver where to ask
    /// for the descriptor, which itself can only travel over a unix socket.
    VmmFd,
    /// A virtual-memory allocation exported as a 64-byte fabric handle.
    VmmFabric,
}

impl HandleKind {
    /// The name in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            HandleKind::Legacy => "legacy",
            HandleKind::VmmFd => "vmm_fd",
            HandleKind::VmmFabric => "vmm_fabric",
        }
    }

    /// The length that every handle of this kind has, if there is one.
    pub const fn fixed_len(self) -> Option<usize> {
        match self {
            HandleKind::Legacy | HandleKind::VmmFabric => Some(64),
            HandleKind::VmmFd => None,
        }
    }

    fn parse(text: &str) -> Option<HandleKind> {
        match text {
            "legacy" => Some(HandleKind::Legacy),
            "vmm_fd" => Some(HandleKind::VmmFd),
            "vmm_fabric" => Some(HandleKind::VmmFabric),
            _ => None,
        }
    }
}

/// A handle to exported device memory: `size` bytes from `offset` into the exported allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    kind: HandleKind,
    handle: Vec<u8>,
    size: u64,
    offset: u64,
}

impl IpcHandle {
    /// Checks and wraps a handle.
    pub fn new(kind: HandleKind, handle: Vec<u8>, size: u64, offset: u64) -> Result<IpcHandle, RequestError> {
        IpcHandle { kind, handle, size, offset }.checked("IPC handle")
    }

    fn checked(self, at: &str) -> Result<IpcHandle, RequestError> {
        let IpcHandle { kind, ref handle, size, offset } = self;
        let got = handle.len();
        let fits = kind.fixed_len().map_or((1..=MAX_HANDLE_BYTES).contains(&got), |n| got == n);
        if !fits {
            return Err(RequestError::HandleLength { at: at.to_owned(), kind, got });
        }
        if offset.checked_add(size).is_none() {
            return Err(RequestError::HandleRange { at: at.to_owned(), offset, size });
        }
        Ok(self)
    }

    /// How the memory was exported.
    pub fn kind(&self) -> HandleKind {
        self.kind
    }

    /// The handle itself.
    pub fn handle(&self) -> &[u8] {
        &self.handle
    }

    /// Bytes that may be read.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where they begin in the exported allocation.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    fn read(value: &Value, at: &str) -> Result<IpcHandle, RequestError> {
        if !value.is_object() {
            return Err(RequestError::PickledHandle { at: at.to_owned(), found: type_of(value) });
        }
        let fields = Fields::open(value, at, &["kind", "handle", "size", "offset"])?;
        let kind = fields.text("kind")?;
        let kind = HandleKind::parse(kind)
            .ok_or_else(|| RequestError::HandleKind { at: at.to_owned(), found: excerpt(kind) })?;
        let text = fields.text("handle")?;
        // Four characters a triple of bytes: longer text cannot decode to an acceptable handle.
        if text.len() > MAX_HANDLE_BYTES.div_ceil(3) * 4 {
            return Err(RequestError::HandleLength { at: at.to_owned(), kind, got: text.len() / 4 * 3 });
        }
        let handle = STANDARD
            .decode(text)
            .map_err(|source| RequestError::HandleEncoding { at: at.to_owned(), source })?;
        IpcHandle { kind, handle, size: fields.u64("size")?, offset: fields.u64("offset")? }.checked(at)
    }

    fn to_value(&self) -> Value {
        json!({
            "kind": self.kind.as_str(),
            "handle": STANDARD.encode(&self.handle),
            "size": self.size,
            "offset": self.offset,
        })
    }
}

/// The same memory as seen from each GPU: one handle per GPU on which an engine reads it.
pub type IpcHandles = BTreeMap<GpuUuid, IpcHandle>;

/// Reads the handles of one allocation. `at` is their path, for messages.
pub(super) fn read_handles(value: &Value, at: &str) -> Result<IpcHandles, RequestError> {
    let map = object(value, at)?;
    let mut handles = IpcHandles::new();
    for (key, value) in map {
        let uuid: GpuUuid = key.parse()?;
        let handle = IpcHandle::read(value, &format!("{at}.{key}"))?;
        if handles.insert(uuid, handle).is_some() {
            return Err(RequestError::DuplicateGpu { at: at.to_owned(), uuid: uuid.to_string() });
        }
    }
    Ok(handles)
}

pub(super) fn write_handles(handles: &IpcHandles) -> Value {
    let entries = handles.iter().map(|(uuid, handle)| (uuid.to_string(), handle.to_value()));
    Value::Object(entries.collect::<Map<_, _>>())
}

/// Every handle must cover the bytes that are to be read through it.
pub(super) fn check_cover(handles: &IpcHandles, what: &str, needed: u64) -> Result<(), RequestError> {
    if handles.is_empty() {
        return Err(RequestError::NoHandles { at: excerpt(what) });
    }
    match handles.iter().find(|(_, handle)| handle.size < needed) {
        None => Ok(()),
        Some((uuid, handle)) => Err(RequestError::HandleTooSmall {
            what: excerpt(what),
            gpu: uuid.to_string(),
            size: handle.size,
            needed,
        }),
    }
}

/// Where one tensor lies in a packed buffer. It gives bytes and elements, so that a size is never ambiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedTensor {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
    pub numel: u64,
}

/// The offsets of tensors must be multiples of this, so that a view of the buffer can be one of the tensor.
fn alignment(dtype: Dtype) -> u64 {
    dtype.bits().div_ceil(8)
}

/// Lays parameters out one after the other, each aligned to its elements. Without gaps if they share a dtype.
pub fn packed_layout(params: &Parameters) -> Result<Vec<PackedTensor>, RequestError> {
    let mut end = 0u64;
    let mut layout = Vec::with_capacity(params.len());
    for (name, dtype, _, extent) in params.each() {
        let offset = end.checked_next_multiple_of(alignment(dtype));
        let next = offset.and_then(|offset| offset.checked_add(extent.bytes));
        let (Some(offset), Some(next)) = (offset, next) else {
            return Err(RequestError::LayoutRange { name: excerpt(name) });
        };
        layout.push(PackedTensor { offset, bytes: extent.bytes, numel: extent.numel });
        end = next;
    }
    Ok(layout)
}

/// Checks a layout of as many records as there are parameters; returns the required size of the buffer.
pub(super) fn check_layout(params: &Parameters, layout: &[PackedTensor]) -> Result<u64, RequestError> {
    let mut ranges = Vec::with_capacity(layout.len());
    for ((name, dtype, _, extent), tensor) in params.each().zip(layout) {
        for (field, expected, got) in
            [("numel", extent.numel, tensor.numel), ("bytes", extent.bytes, tensor.bytes)]
        {
            if expected != got {
                return Err(RequestError::LayoutMismatch { name: excerpt(name), field, expected, got });
            }
        }
        let align = alignment(dtype);
        if !tensor.offset.is_multiple_of(align) {
            let offset = tensor.offset;
            return Err(RequestError::LayoutAlignment { name: excerpt(name), offset, align });
        }
        let end = tensor.offset.checked_add(tensor.bytes);
        let end = end.ok_or_else(|| RequestError::LayoutRange { name: excerpt(name) })?;
        ranges.push((tensor.offset, end, name));
    }
    let size = ranges.iter().map(|&(_, end, _)| end).max().unwrap_or(0);
    // An empty tensor overlaps nothing, wherever it is.
    ranges.retain(|&(start, end, _)| start < end);
    ranges.sort_unstable();
    match ranges.windows(2).find_map(|pair| match pair {
        [(_, end, first), (start, _, second)] if start < end => Some((first, second)),
        _ => None,
    }) {
        None => Ok(size),
        Some((first, second)) => {
            Err(RequestError::LayoutOverlap { first: excerpt(first), second: excerpt(second) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-8a56a4bc-4184-b6f7-8a7f-0123456789ab";

    #[test]
    fn gpu_uuids_are_one_key_with_and_without_prefix_in_either_case() {
        for text in
            [UUID, &UUID[4..], &UUID[4..].to_uppercase(), &format!("GPU-{}", UUID[4..].to_uppercase())]
        {
            assert_eq!(text.parse::<GpuUuid>().unwrap().to_string(), UUID, "{text}");
        }
    }

    #[test]
    fn device_numbers_and_names_are_not_gpu_uuids() {
        for bad in [
            "0",
            "",
            "cuda:0",
            "GPU-",
            "GPU-GPU-8a56a4bc",
            &UUID.replace('-', ""),
            &UUID.replace("8a5", "xyz"),
            "8a56a4bc4-184-b6f7-8a7f-0123456789ab",
            "+a56a4bc-4184-b6f7-8a7f-0123456789ab",
            "éa56a4b-4184-b6f7-8a7f-0123456789ab",
        ] {
            assert!(matches!(bad.parse::<GpuUuid>(), Err(RequestError::GpuUuid(_))), "{bad:?}");
        }
    }

    #[test]
    fn handles_have_the_length_of_their_kind() {
        for kind in [HandleKind::Legacy, HandleKind::VmmFd, HandleKind::VmmFabric] {
            assert_eq!(HandleKind::parse(kind.as_str()), Some(kind));
            for n in [0, 1, 63, 64, 65, MAX_HANDLE_BYTES, MAX_HANDLE_BYTES + 1] {
                let ok = IpcHandle::new(kind, vec![7; n], 1, 0).is_ok();
                let expected =
                    if kind == HandleKind::VmmFd { (1..=MAX_HANDLE_BYTES).contains(&n) } else { n == 64 };
                assert_eq!(ok, expected, "{kind:?} {n}");
            }
        }
        let error = IpcHandle::new(HandleKind::Legacy, vec![0; 64], 1, u64::MAX).unwrap_err();
        assert!(matches!(error, RequestError::HandleRange { .. }));
    }

    #[test]
    fn an_endless_handle_text_is_refused_before_it_is_decoded() {
        let value = json!({ "kind": "vmm_fd", "handle": "A".repeat(1 << 20), "size": 1, "offset": 0 });
        assert!(
            matches!(IpcHandle::read(&value, "h"), Err(RequestError::HandleLength { got, .. }) if got == 786_432)
        );
    }

    #[test]
    fn the_layout_of_mixed_dtypes_is_aligned_to_each_element() {
        let params = Parameters::new(
            vec!["a".into(), "b".into(), "c".into()],
            vec![Dtype::BF16, Dtype::F32, Dtype::U8],
            vec![vec![3], vec![2], vec![1]],
        )
        .unwrap();
        let layout = packed_layout(&params).unwrap();
        assert_eq!(
            layout.iter().map(|t| (t.offset, t.bytes, t.numel)).collect::<Vec<_>>(),
            [(0, 6, 3), (8, 8, 2), (16, 1, 1)]
        );
        assert_eq!(check_layout(&params, &layout).unwrap(), 17);
    }
}
