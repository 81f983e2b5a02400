//! The dictionaries that trainers sent before requests had types, both ways.
//! The four cases are described in the module doc of [`crate::request`].

use serde_json::{Map, Value, json};

use super::fields::tag;
use super::ipc::{read_handles, write_handles};
use super::parameters::check_lengths;
use super::{
    BroadcastWeightUpdateRequest, CudaIpcWeightUpdateRequest, Fields, LORA_DISK_LOAD,
    LoraDiskWeightUpdateRequest, MAX_JSON_BYTES, PackedCudaIpcWeightUpdateRequest, Parameters, RequestError,
    WeightUpdateRequest, packed_layout,
};
use crate::error::excerpt;

/// Reads a request in its plain form or as one of the four legacy dictionaries.
pub fn parse_request(value: &Value) -> Result<WeightUpdateRequest, RequestError> {
    match tag(value, "request")? {
        Some(_) => WeightUpdateRequest::from_value(value),
        None => parse_legacy(value),
    }
}

/// [`parse_request`] on JSON text of at most [`MAX_JSON_BYTES`].
pub fn parse_request_json(text: &[u8]) -> Result<WeightUpdateRequest, RequestError> {
    if text.len() > MAX_JSON_BYTES {
        return Err(RequestError::TooLarge { bytes: text.len() });
    }
    parse_request(&serde_json::from_slice(text).map_err(RequestError::Json)?)
}

fn parse_legacy(value: &Value) -> Result<WeightUpdateRequest, RequestError> {
    const AT: &str = "legacy request";
    let fields = Fields::open(value, AT, &["names", "dtypes", "shapes", "sizes", "extras", "packed"])?;
    let names = fields.list("names")?.values;
    if names.first().and_then(Value::as_str) == Some(LORA_DISK_LOAD) && names.len() == 1 {
        return lora(&Fields::open(value, AT, &["names", "extras"])?);
    }
    if fields.flag("packed")? {
        return packed(&fields);
    }
    let fields = Fields::open(value, AT, &["names", "dtypes", "shapes", "extras", "packed"])?;
    let params = Parameters::read(&fields)?;
    if fields.optional("extras").is_none() {
        return Ok(WeightUpdateRequest::Broadcast(BroadcastWeightUpdateRequest { params }));
    }
    let handles = handles(&fields, params.len())?;
    Ok(WeightUpdateRequest::CudaIpc(CudaIpcWeightUpdateRequest::new(params, handles)?))
}

/// The handles of `extras`, which must have `expected` entries.
fn handles(fields: &Fields<'_>, expected: usize) -> Result<Vec<super::IpcHandles>, RequestError> {
    let extras = fields.list("extras")?;
    check_lengths("extras", expected, extras.values.len())?;
    let one = |(i, extra)| {
        let fields = Fields::open(extra, extras.path(i), &["ipc_handles"])?;
        read_handles(fields.required("ipc_handles")?, &fields.path("ipc_handles"))
    };
    extras.values.iter().enumerate().map(one).collect()
}

fn packed(fields: &Fields<'_>) -> Result<WeightUpdateRequest, RequestError> {
    let params = Parameters::read(fields)?;
    let sizes = fields.list("sizes")?;
    check_lengths("sizes", params.len(), sizes.values.len())?;
    for ((name, _, _, extent), got) in params.each().zip(sizes.u64s()?) {
        if got != extent.numel {
            return Err(RequestError::LegacySizes { name: excerpt(name), expected: extent.numel, got });
        }
    }
    check_one_dtype(&params)?;
    let layout = packed_layout(&params)?;
    // There is exactly one; were there none, the request's own check would refuse it.
    let handles = handles(fields, 1)?.into_iter().next().unwrap_or_default();
    Ok(WeightUpdateRequest::PackedCudaIpc(PackedCudaIpcWeightUpdateRequest::new(params, layout, handles)?))
}

fn lora(fields: &Fields<'_>) -> Result<WeightUpdateRequest, RequestError> {
    let extras = fields.list("extras")?;
    check_lengths("extras", 1, extras.values.len())?;
    let extra = extras.values.first().unwrap_or(&Value::Null);
    let extra = Fields::open(extra, extras.path(0), &["lora_disk_path"])?;
    let path = extra.text("lora_disk_path")?;
    Ok(WeightUpdateRequest::LoraDisk(LoraDiskWeightUpdateRequest::new(path)?))
}

/// Legacy offsets are sums of element counts, which have no meaning across dtypes.
fn check_one_dtype(params: &Parameters) -> Result<(), RequestError> {
    let Some(&expected) = params.dtypes().first() else { return Err(RequestError::NoParameters) };
    match params.each().find(|&(_, dtype, _, _)| dtype != expected) {
        None => Ok(()),
        Some((name, got, _, _)) => {
            Err(RequestError::LegacyMixedDtypes { name: excerpt(name), expected, got })
        }
    }
}

impl WeightUpdateRequest {
    /// The one legacy dictionary that this request is. See [`WeightUpdateRequest::to_legacy_dicts`] for a
    /// broadcast of several parameters.
    pub fn to_legacy_dict(&self) -> Result<Value, RequestError> {
        let mut dicts = self.to_legacy_dicts()?;
        match (dicts.pop(), dicts.len()) {
            (Some(only), 0) => Ok(only),
            (_, rest) => Err(RequestError::LegacyOnePerParameter { count: rest + 1 }),
        }
    }

    /// The legacy dictionaries that this request is: one per parameter for a broadcast, otherwise one.
    pub fn to_legacy_dicts(&self) -> Result<Vec<Value>, RequestError> {
        match self {
            WeightUpdateRequest::Broadcast(r) => Ok(r
                .params
                .each()
                .map(|(name, dtype, shape, _)| {
                    json!({ "names": [name], "dtypes": [dtype], "shapes": [shape] })
                })
                .collect()),
            WeightUpdateRequest::CudaIpc(r) => {
                let extras: Vec<_> = r.ipc_handles().iter().map(extra).collect();
                let mut dict = Map::new();
                r.params().write(&mut dict);
                dict.insert("extras".to_owned(), extras.into());
                dict.insert("packed".to_owned(), false.into());
                Ok(vec![dict.into()])
            }
            WeightUpdateRequest::PackedCudaIpc(r) => packed_dict(r).map(|dict| vec![dict]),
            WeightUpdateRequest::LoraDisk(r) => Ok(vec![json!({
                "names": [LORA_DISK_LOAD],
                "extras": [{ "lora_disk_path": r.lora_disk_path() }],
            })]),
            WeightUpdateRequest::Pull(_) => Err(RequestError::NoLegacyForm {
                request: self.type_name(),
                remedy: "an engine without a receiver is served by the broadcast strategy",
            }),
            WeightUpdateRequest::Store(_) => Err(RequestError::NoLegacyForm {
                request: self.type_name(),
                remedy: "an engine without a receiver loads the stored files by its own load-from-disk call",
            }),
        }
    }
}

fn extra(handles: &super::IpcHandles) -> Value {
    json!({ "ipc_handles": write_handles(handles) })
}

fn packed_dict(r: &PackedCudaIpcWeightUpdateRequest) -> Result<Value, RequestError> {
    check_one_dtype(r.params())?;
    let legacy = packed_layout(r.params())?;
    for ((name, _, _, _), (expected, got)) in r.params().each().zip(legacy.iter().zip(r.layout())) {
        if expected != got {
            let (expected, got) = (expected.offset, got.offset);
            return Err(RequestError::LegacyGaps { name: excerpt(name), expected, got });
        }
    }
    let sizes: Vec<_> = legacy.iter().map(|tensor| tensor.numel).collect();
    let mut dict = Map::new();
    r.params().write(&mut dict);
    dict.insert("sizes".to_owned(), sizes.into());
    dict.insert("extras".to_owned(), json!([extra(r.ipc_handles())]));
    dict.insert("packed".to_owned(), true.into());
    Ok(dict.into())
}
