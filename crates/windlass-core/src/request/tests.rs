use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::dtype::Dtype;
use crate::error::Kind;

const GPU: &str = "GPU-8a56a4bc-4184-b6f7-8a7f-0123456789ab";

fn params(list: &[(&str, Dtype, &[u64])]) -> Parameters {
    Parameters::new(
        list.iter().map(|p| p.0.to_owned()).collect(),
        list.iter().map(|p| p.1).collect(),
        list.iter().map(|p| p.2.to_vec()).collect(),
    )
    .unwrap()
}

fn handles(size: u64) -> IpcHandles {
    let handle = IpcHandle::new(HandleKind::Legacy, vec![7; 64], size, 512).unwrap();
    [(GPU.parse().unwrap(), handle)].into()
}

fn identity() -> Identity {
    Identity { model_id: ModelId::new("actor").unwrap(), incarnation: Incarnation(u64::MAX), version: 101 }
}

fn packed() -> WeightUpdateRequest {
    let params = params(&[("a", Dtype::BF16, &[2, 3]), ("b", Dtype::BF16, &[4])]);
    let layout = packed_layout(&params).unwrap();
    let request = PackedCudaIpcWeightUpdateRequest::new(params, layout, handles(20)).unwrap();
    WeightUpdateRequest::PackedCudaIpc(request)
}

fn error(value: &Value) -> RequestError {
    parse_request(value).unwrap_err()
}

/// Changes one value of a request's plain form and says what is wrong with it then.
fn with(request: &WeightUpdateRequest, pointer: &str, new: Value) -> &'static str {
    let mut value = request.to_value();
    *value.pointer_mut(pointer).expect(pointer) = new;
    error(&value).name()
}

#[test]
fn more_than_a_million_names_are_refused_before_they_are_read() {
    let names = vec![Value::Null; MAX_PARAMETERS + 1];
    let value = json!({ "type": "broadcast", "names": names, "dtypes": [], "shapes": [] });
    assert_eq!(error(&value).name(), "too_many_parameters");
    let names = (0..=MAX_PARAMETERS).map(|i| i.to_string()).collect::<Vec<_>>();
    let n = names.len();
    let refused = Parameters::new(names, vec![Dtype::U8; n], vec![vec![]; n]).unwrap_err();
    assert!(matches!(refused, RequestError::TooManyParameters { count } if count == n));
}

#[test]
fn request_text_is_bounded_in_size_and_depth() {
    let long = vec![b' '; MAX_JSON_BYTES + 1];
    assert_eq!(parse_request_json(&long).unwrap_err().name(), "too_large");
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    assert_eq!(parse_request_json(deep.as_bytes()).unwrap_err().name(), "not_json");
    assert_eq!(parse_request_json(b"{\"type\":\"broadcast\xff\"}").unwrap_err().name(), "not_json");
    assert_eq!(parse_request_json(b"{} {}").unwrap_err().name(), "not_json");
}

#[test]
fn a_layout_that_contradicts_itself_is_named() {
    let bad = |pointer: &str, new: u64| with(&packed(), pointer, new.into());
    assert_eq!(bad("/layout/0/bytes", 6), "layout_mismatch");
    assert_eq!(bad("/layout/0/numel", 12), "layout_mismatch");
    assert_eq!(bad("/layout/1/offset", 13), "layout_alignment");
    assert_eq!(bad("/layout/1/offset", 10), "layout_overlap");
    assert_eq!(bad("/layout/0/offset", 14), "layout_overlap");
    assert_eq!(bad("/layout/1/offset", u64::MAX - 1), "layout_range");
    assert_eq!(bad("/layout/1/offset", 14), "handle_too_small");
    assert_eq!(with(&packed(), "/layout", json!([])), "lengths");
}

#[test]
fn tensors_of_a_layout_may_come_in_any_order_and_empty_ones_lie_anywhere() {
    let params = params(&[("a", Dtype::U8, &[4]), ("empty", Dtype::U8, &[0]), ("b", Dtype::U8, &[4])]);
    let layout = [(4, 4), (6, 0), (0, 4)].map(|(offset, n)| PackedTensor { offset, bytes: n, numel: n });
    let request = PackedCudaIpcWeightUpdateRequest::new(params, layout.to_vec(), handles(8)).unwrap();
    let refused = WeightUpdateRequest::PackedCudaIpc(request).to_legacy_dict().unwrap_err();
    assert_eq!((refused.name(), refused.kind()), ("legacy_gaps", Kind::Unsupported));
}

#[test]
fn a_handle_that_is_not_plain_data_is_refused_with_the_reason() {
    let pointer = format!("/ipc_handles/{GPU}");
    for pickle in [json!(["rebuild_cuda_tensor", [0, "x"]]), json!("gASVLgAAAAAAAACM"), json!(null)] {
        assert_eq!(with(&packed(), &pointer, pickle), "pickled_handle");
    }
    let mut value = packed().to_legacy_dict().unwrap();
    value["extras"][0]["ipc_handles"][GPU] = json!(["rebuild_cuda_tensor", []]);
    let message = error(&value).to_string();
    assert!(message.contains("run whatever code") && message.contains("extras[0]"), "{message}");
}

#[test]
fn one_gpu_in_two_spellings_is_refused() {
    let mut value = packed().to_value();
    let handle = value["ipc_handles"][GPU].clone();
    value["ipc_handles"][&GPU[4..]] = handle;
    assert_eq!(error(&value).name(), "duplicate_gpu");
}

#[test]
fn pulls_and_stores_have_no_legacy_form_and_say_what_to_use() {
    let pull = WeightUpdateRequest::Pull(PullWeightUpdateRequest {
        identity: identity(),
        sender_endpoint: "http://trainer-0:9000".parse().unwrap(),
        mode: PullMode::Auto,
    });
    let store = WeightUpdateRequest::Store(StoreWeightUpdateRequest {
        url: "s3://bucket/run".parse().unwrap(),
        identity: identity(),
    });
    for (request, remedy) in [(pull, "broadcast strategy"), (store, "load-from-disk")] {
        let refused = request.to_legacy_dict().unwrap_err();
        assert_eq!((refused.name(), refused.kind()), ("no_legacy_form", Kind::Unsupported));
        assert!(refused.to_string().contains(remedy), "{refused}");
    }
}

#[test]
fn a_broadcast_of_several_parameters_is_one_legacy_dict_each() {
    let params = params(&[("a", Dtype::BF16, &[2]), ("b", Dtype::F32, &[])]);
    let request = WeightUpdateRequest::Broadcast(BroadcastWeightUpdateRequest { params });
    assert_eq!(request.to_legacy_dict().unwrap_err().name(), "legacy_one_per_parameter");
    let expected = [
        json!({ "names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]] }),
        json!({ "names": ["b"], "dtypes": ["float32"], "shapes": [[]] }),
    ];
    assert_eq!(request.to_legacy_dicts().unwrap(), expected);
}

#[test]
fn a_parameter_cannot_take_the_name_that_means_lora() {
    for names in [json!(["lora_disk_load"]), json!(["a", "lora_disk_load"])] {
        let n = names.as_array().unwrap().len();
        let value = json!({ "type": "broadcast", "names": names, "dtypes": vec!["bfloat16"; n], "shapes": vec![[1]; n] });
        assert_eq!(error(&value).name(), "reserved_name");
    }
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL)
}

/// Parameters of any dtype; the last dimension is a multiple of 4, so that packed dtypes fill whole bytes.
fn any_params(dtype: impl Strategy<Value = Dtype>) -> impl Strategy<Value = Parameters> {
    let one = ("[a-z.\u{e9}\"]{0,6}", dtype, prop::collection::vec(0..5u64, 0..3), 0..4u64);
    prop::collection::vec(one, 1..6).prop_map(|list| {
        let names = list.iter().enumerate().map(|(i, p)| format!("{i}{}", p.0)).collect();
        let shapes = list.iter().map(|p| p.2.iter().copied().chain([p.3 * 4]).collect()).collect();
        Parameters::new(names, list.iter().map(|p| p.1).collect(), shapes).unwrap()
    })
}

fn any_handles(size: u64) -> impl Strategy<Value = IpcHandles> {
    let kind = prop::sample::select(vec![HandleKind::Legacy, HandleKind::VmmFd, HandleKind::VmmFabric]);
    let handle = (kind, prop::collection::vec(any::<u8>(), 64), 0..1000u64, any::<u32>()).prop_map(
        move |(kind, bytes, slack, offset)| IpcHandle::new(kind, bytes, size + slack, offset.into()).unwrap(),
    );
    prop::collection::btree_map(any::<u128>(), handle, 1..3).prop_map(|map| {
        let uuid = |n: u128| {
            let hex = format!("{n:032x}");
            format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
        };
        map.into_iter().map(|(n, handle)| (uuid(n).parse().unwrap(), handle)).collect()
    })
}

fn any_cuda_ipc() -> impl Strategy<Value = WeightUpdateRequest> {
    any_params(dtype()).prop_flat_map(|params| {
        let sizes: Vec<_> = params.extents().iter().map(|e| any_handles(e.bytes)).collect();
        sizes.prop_map(move |handles| {
            WeightUpdateRequest::CudaIpc(CudaIpcWeightUpdateRequest::new(params.clone(), handles).unwrap())
        })
    })
}

fn any_packed(dtype: impl Strategy<Value = Dtype> + 'static) -> impl Strategy<Value = WeightUpdateRequest> {
    any_params(dtype).prop_flat_map(|params| {
        let layout = packed_layout(&params).unwrap();
        let size = layout.last().map_or(0, |t| t.offset + t.bytes);
        any_handles(size).prop_map(move |handles| {
            let request = PackedCudaIpcWeightUpdateRequest::new(params.clone(), layout.clone(), handles);
            WeightUpdateRequest::PackedCudaIpc(request.unwrap())
        })
    })
}

fn any_request() -> impl Strategy<Value = WeightUpdateRequest> {
    let broadcast = any_params(dtype())
        .prop_map(|params| WeightUpdateRequest::Broadcast(BroadcastWeightUpdateRequest { params }));
    let lora = "/[a-z/]{0,9}"
        .prop_map(|path| WeightUpdateRequest::LoraDisk(LoraDiskWeightUpdateRequest::new(&path).unwrap()));
    let mode = prop::sample::select(vec![PullMode::Full, PullMode::Delta, PullMode::Auto]);
    let pull = (any::<u64>(), mode).prop_map(|(version, mode)| {
        let sender_endpoint = "https://[fe80::1]:9000".parse().unwrap();
        let identity = Identity { version, ..identity() };
        WeightUpdateRequest::Pull(PullWeightUpdateRequest { identity, sender_endpoint, mode })
    });
    let store = any::<u64>().prop_map(|version| {
        let identity = Identity { version, ..identity() };
        let url = "file:///mnt/weights".parse().unwrap();
        WeightUpdateRequest::Store(StoreWeightUpdateRequest { url, identity })
    });
    prop_oneof![broadcast, any_cuda_ipc(), any_packed(dtype()), lora, pull, store]
}

/// Requests that have exactly one legacy dictionary.
fn any_with_legacy() -> impl Strategy<Value = WeightUpdateRequest> {
    let one_dtype = Dtype::ALL.iter().map(|&d| any_packed(Just(d)).boxed()).collect::<Vec<_>>();
    prop_oneof![any_cuda_ipc(), prop::strategy::Union::new(one_dtype)]
}

/// Junk to put in the place of any value.
fn junk() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
        Just(json!([[u64::MAX, u64::MAX]])),
    ]
}

/// Replaces the value that a walk in preorder meets at step `at`.
fn replace(value: &mut Value, at: &mut usize, new: &Value) {
    if *at == 0 {
        *value = new.clone();
    }
    *at = at.wrapping_sub(1);
    match value {
        Value::Array(list) => list.iter_mut().for_each(|v| replace(v, at, new)),
        Value::Object(map) => map.values_mut().for_each(|v| replace(v, at, new)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

proptest! {
    #[test]
    fn requests_round_trip_through_their_plain_form(request in any_request()) {
        prop_assert_eq!(&WeightUpdateRequest::from_value(&request.to_value()).unwrap(), &request);
        prop_assert_eq!(&parse_request_json(request.to_json().as_bytes()).unwrap(), &request);
    }

    #[test]
    fn requests_round_trip_through_their_legacy_form(request in any_with_legacy()) {
        prop_assert_eq!(parse_request(&request.to_legacy_dict().unwrap()).unwrap(), request);
    }

    #[test]
    fn a_damaged_request_is_an_error_or_another_valid_request(
        (request, at, junk) in (any_request(), 0..60usize, junk())
    ) {
        let mut values = vec![request.to_value()];
        values.extend(request.to_legacy_dicts().unwrap_or_default());
        for mut value in values {
            replace(&mut value, &mut at.clone(), &junk);
            match parse_request(&value) {
                Ok(parsed) => prop_assert_eq!(parse_request(&parsed.to_value()).unwrap(), parsed),
                Err(e) => prop_assert!(!e.name().is_empty() && !e.to_string().is_empty()),
            }
        }
    }

    #[test]
    fn any_bytes_are_a_request_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        // No panic is the point; random bytes do not make a request.
        prop_assert!(parse_request_json(&bytes).is_err());
    }
}
