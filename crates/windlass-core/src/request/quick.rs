//! Packed requests in their plain form, read without a tree of JSON values.
//!
//! A colocated engine is paused while it reads one, with hundreds of tensors in it. A text that differs from the form this
//! crate writes takes the slow path ([`parse_request_json`](super::parse_request_json)), which reads every form and names
//! every fault. So this module returns a request or nothing.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;

use super::ipc::{PackedTensor, read_handles, write_handles};
use super::{MAX_JSON_BYTES, PackedCudaIpcWeightUpdateRequest, Parameters};
use crate::dtype::Dtype;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Packed<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    names: Vec<String>,
    #[serde(borrow)]
    dtypes: Vec<Cow<'a, str>>,
    shapes: Vec<Vec<u64>>,
    layout: Vec<PackedEntry>,
    ipc_handles: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PackedEntry {
    offset: u64,
    bytes: u64,
    numel: u64,
}

/// Whether the text is a packed request that passes every check and is in its canonical form, so that
/// [`to_value`](super::WeightUpdateRequest::to_value) would give the same text.
pub fn is_canonical_packed(text: &[u8]) -> bool {
    packed(text).is_some()
}

fn packed(text: &[u8]) -> Option<PackedCudaIpcWeightUpdateRequest> {
    if text.len() > MAX_JSON_BYTES {
        return None;
    }
    let given: Packed<'_> = serde_json::from_slice(text).ok()?;
    if given.kind != "packed_cuda_ipc" {
        return None;
    }
    let dtype = |name: &Cow<'_, str>| name.parse::<Dtype>().ok().filter(|d| d.name() == name);
    let dtypes = given.dtypes.iter().map(dtype).collect::<Option<_>>()?;
    let params = Parameters::new(given.names, dtypes, given.shapes).ok()?;
    let place = |p: PackedEntry| PackedTensor { offset: p.offset, bytes: p.bytes, numel: p.numel };
    let layout = given.layout.into_iter().map(place).collect();
    let handles = read_handles(&given.ipc_handles, "request").ok()?;
    if write_handles(&handles) != given.ipc_handles {
        return None;
    }
    PackedCudaIpcWeightUpdateRequest::new(params, layout, handles).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{WeightUpdateRequest, parse_request_json};
    use super::*;

    fn good() -> Value {
        json!({
            "type": "packed_cuda_ipc",
            "names": ["a", "b\u{e9}\n"],
            "dtypes": ["bfloat16", "float32"],
            "shapes": [[3], [2, 1]],
            "layout": [
                { "offset": 0, "bytes": 6, "numel": 3 },
                { "offset": 8, "bytes": 8, "numel": 2 },
            ],
            "ipc_handles": {
                "GPU-00000000-0000-0000-0000-00000000000a":
                    { "kind": "vmm_fd", "handle": "eHg=", "size": 16, "offset": 0 },
            },
        })
    }

    #[test]
    fn what_is_read_quickly_is_what_is_read_slowly() {
        let text = good().to_string();
        let quick = packed(text.as_bytes()).unwrap();
        let slow = parse_request_json(text.as_bytes()).unwrap();
        assert_eq!(slow, WeightUpdateRequest::PackedCudaIpc(quick));
        assert_eq!(slow.to_value(), good());
    }

    #[test]
    fn whatever_is_not_canonical_is_left_to_the_other_way() {
        let with = |at: &str, value: Value| {
            let mut changed = good();
            *changed.pointer_mut(at).unwrap() = value;
            changed
        };
        let handle = good()["ipc_handles"]["GPU-00000000-0000-0000-0000-00000000000a"].clone();
        let mut extra = good();
        extra["more"] = json!(1);
        let mut twice = good().to_string();
        twice.insert_str(1, "\"names\":[],");
        for other in [
            with("/type", json!("broadcast")),
            with("/dtypes/0", json!("torch.bfloat16")),
            with("/dtypes/0", json!("BF16")),
            with("/names/1", json!("a")),
            with("/layout/1/offset", json!(4)),
            with("/layout/0/numel", json!(4)),
            with("/shapes/0", json!([-3])),
            with("/ipc_handles", json!({ "GPU-00000000-0000-0000-0000-00000000000A": handle })),
            with("/ipc_handles", json!({})),
            extra,
        ] {
            assert!(!is_canonical_packed(other.to_string().as_bytes()), "{other}");
        }
        assert!(!is_canonical_packed(twice.as_bytes()));
        assert!(!is_canonical_packed(b"{"));
    }
}
