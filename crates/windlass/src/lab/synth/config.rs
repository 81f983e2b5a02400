//! The tensors of a real model, from its `config.json`.
//!
//! Owns: which tensors a Hugging Face checkpoint of a supported family holds. Called by `synth`. Must not: read
//! anything but the file it is given, or guess: a config that it does not understand is an error by name.
//!
//! # What is known
//!
//! Names and shapes are those of the checkpoints that the families are published as. All are decoders of the same
//! plan (embedding, layers of attention and MLP between norms, final norm, output) and differ in this:
//!
//! | `model_type` | biases | more norms | MLP | `head_dim` if not given |
//! |---|---|---|---|---|
//! | `llama` | q k v o with `attention_bias`; gate up down with `mlp_bias` | | gate up down | hidden / heads |
//! | `mistral` | | | gate up down | hidden / heads |
//! | `mixtral` | | | `block_sparse_moe`: router, w1 w2 w3 of each expert | hidden / heads |
//! | `qwen2` | q k v | | gate up down | hidden / heads |
//! | `qwen3` | q k v o with `attention_bias` | q and k by head | gate up down | 128 |
//! | `qwen3_moe` | the same | the same | router, gate up down of each expert; dense in some layers | hidden / heads |
//!
//! `num_key_value_heads` is `num_attention_heads` if not given, and `dtype` (formerly `torch_dtype`) is bf16. With
//! `tie_word_embeddings` the output `lm_head.weight` is another name of the embedding, else a tensor. The layers of
//! `qwen3_moe` that `mlp_only_layers` lists, or that `decoder_sparse_step` steps over, are dense.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use windlass_core::Dtype;
use windlass_core::error::Kind;
use windlass_core::manifest::{MAX_TENSORS, TensorSpec};
use windlass_data::file::io_kind;

use super::shapes::{EMBEDDING, Shapes};
use super::{MAX_ELEMENTS, SynthError};

/// Configs are a few KiB; a longer file is something else.
const MAX_BYTES: u64 = 1 << 20;
/// The largest width, vocabulary or number of heads: sixty times today's largest.
const MAX_SIZE: u64 = 1 << 24;
/// The most layers, and the most experts of a layer: ten times today's most.
const MAX_REPEATS: u64 = 1 << 12;
/// The families that are known; see the module's documentation.
const FAMILIES: [(&str, Family); 6] = [
    ("llama", Family::Llama),
    ("mistral", Family::Mistral),
    ("mixtral", Family::Mixtral),
    ("qwen2", Family::Qwen2),
    ("qwen3", Family::Qwen3),
    ("qwen3_moe", Family::Qwen3Moe),
];

/// A config that gives no shapes.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the model config {}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} is longer than {MAX_BYTES} bytes; a model's config.json is not", path.display())]
    TooLong { path: PathBuf },
    #[error("{} is not JSON", path.display())]
    NotJson { path: PathBuf, source: serde_json::Error },
    #[error("{}: {source}", path.display())]
    Contents { path: PathBuf, source: ConfigFault },
}

/// What is wrong with a config.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigFault {
    #[error("the config is not a JSON object")]
    NotAnObject,
    #[error("model_type {found:?} is not supported; supported are {}", families())]
    Family { found: String },
    /// The checkpoint holds other tensors than the model: packed weights and scales.
    #[error("the config has a quantization_config; only the shapes of plain checkpoints are known")]
    Quantized,
    #[error("the field {field} is missing")]
    Missing { field: &'static str },
    #[error("the field {field} is {found}, not {wanted}")]
    Type { field: &'static str, found: String, wanted: &'static str },
    #[error("the field {field} is {value}, not in 1 to {most}")]
    OutOfRange { field: &'static str, value: u64, most: u64 },
    /// Two numbers that must divide each other and do not.
    #[error("{whole} = {of} is not a multiple of {part} = {by}")]
    NotDividing { whole: &'static str, of: u64, part: &'static str, by: u64 },
    #[error("the dtype {found:?} is not supported; supported are bfloat16, float16 and float32")]
    Dtype { found: String },
    #[error(
        "the model has more than {MAX_ELEMENTS} elements; the first tensor beyond is {name:?} of shape {shape:?}"
    )]
    TooLarge {
        /// The tensor that does not fit any more.
        name: String,
        shape: Vec<u64>,
    },
    #[error("the model has more than {MAX_TENSORS} tensors; the first one beyond is {name:?}")]
    TooManyTensors {
        /// The tensor that does not fit any more.
        name: String,
    },
}

impl ConfigError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ConfigError::Unreadable { source, .. } => io_kind(source),
            ConfigError::TooLong { .. } | ConfigError::NotJson { .. } => Kind::Invalid,
            ConfigError::Contents { source, .. } => source.kind(),
        }
    }
}

impl ConfigFault {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ConfigFault::Family { .. } | ConfigFault::Quantized | ConfigFault::Dtype { .. } => {
                Kind::Unsupported
            }
            ConfigFault::NotAnObject
            | ConfigFault::Missing { .. }
            | ConfigFault::Type { .. }
            | ConfigFault::OutOfRange { .. }
            | ConfigFault::NotDividing { .. }
            | ConfigFault::TooLarge { .. }
            | ConfigFault::TooManyTensors { .. } => Kind::Invalid,
        }
    }
}

/// The shapes of the model that a `config.json` describes.
pub fn shapes_from_config(path: &Path) -> Result<Shapes, SynthError> {
    let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
    let mut text = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(ConfigError::TooLong { path: path.to_owned() }.into());
    }
    let config: Value = serde_json::from_slice(&text)
        .map_err(|source| ConfigError::NotJson { path: path.to_owned(), source })?;
    let shapes = shapes_of(&config);
    Ok(shapes.map_err(|source| ConfigError::Contents { path: path.to_owned(), source })?)
}

/// The shapes of the model that the contents of a `config.json` describe.
pub fn shapes_of(config: &Value) -> Result<Shapes, ConfigFault> {
    let fields = Fields(config.as_object().ok_or(ConfigFault::NotAnObject)?);
    let mut plan = Plan { model: Model::read(&fields)?, tensors: Vec::new(), elements: 0 };
    plan.fill()?;
    let mut aliases = BTreeMap::new();
    if plan.model.tied {
        aliases.insert(HEAD.to_owned(), EMBEDDING.to_owned());
    }
    Ok(Shapes { tensors: plan.tensors, aliases })
}

/// The name of the output matrix.
const HEAD: &str = "lm_head.weight";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
}

fn families() -> String {
    FAMILIES.map(|(name, _)| name).join(", ")
}

/// The fields of a config, checked as they are asked for. A null counts as absent, as it does for the libraries
/// that write these files.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    fn wrong(field: &'static str, value: &Value, wanted: &'static str) -> ConfigFault {
        ConfigFault::Type { field, found: value.to_string().chars().take(60).collect(), wanted }
    }

    fn number(&self, field: &'static str, most: u64) -> Result<Option<u64>, ConfigFault> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let n = value.as_u64().ok_or_else(|| Fields::wrong(field, value, "a whole number above 0"))?;
        if (1..=most).contains(&n) {
            Ok(Some(n))
        } else {
            Err(ConfigFault::OutOfRange { field, value: n, most })
        }
    }

    fn size(&self, field: &'static str) -> Result<u64, ConfigFault> {
        self.number(field, MAX_SIZE)?.ok_or(ConfigFault::Missing { field })
    }

    fn flag(&self, field: &'static str) -> Result<bool, ConfigFault> {
        let Some(value) = self.get(field) else { return Ok(false) };
        value.as_bool().ok_or_else(|| Fields::wrong(field, value, "true or false"))
    }

    fn text(&self, field: &'static str) -> Result<Option<&str>, ConfigFault> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| Fields::wrong(field, value, "a text"))
    }
}

/// What a config says, checked.
#[derive(Debug)]
struct Model {
    family: Family,
    dtype: Dtype,
    hidden: u64,
    vocab: u64,
    layers: u64,
    head: u64,
    /// Widths of the queries, and of the keys and of the values.
    q: u64,
    kv: u64,
    bias: Biases,
    tied: bool,
    /// The width of a dense MLP, where the model has one.
    ffn: Option<u64>,
    experts: Option<Experts>,
}

/// Which projections have a bias.
#[derive(Clone, Copy, Debug)]
struct Biases {
    qkv: bool,
    o: bool,
    mlp: bool,
}

#[derive(Debug)]
struct Experts {
    count: u64,
    ffn: u64,
    /// Every so many layers has experts, the first such layer being number `step - 1`.
    step: u64,
    /// Layers that do not, all the same.
    dense: Vec<u64>,
}

impl Model {
    fn read(fields: &Fields<'_>) -> Result<Model, ConfigFault> {
        let found = fields.text("model_type")?.ok_or(ConfigFault::Missing { field: "model_type" })?;
        let (_, family) = FAMILIES
            .into_iter()
            .find(|(name, _)| *name == found)
            .ok_or_else(|| ConfigFault::Family { found: found.chars().take(60).collect() })?;
        if fields.get("quantization_config").is_some() {
            return Err(ConfigFault::Quantized);
        }
        let hidden = fields.size("hidden_size")?;
        let heads = fields.size("num_attention_heads")?;
        let kv_heads = fields.number("num_key_value_heads", MAX_SIZE)?.unwrap_or(heads);
        divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
        let head = match fields.number("head_dim", MAX_SIZE)? {
            Some(head) => head,
            None if family == Family::Qwen3 => 128,
            None => divides(("hidden_size", hidden), ("num_attention_heads", heads))?,
        };
        let layers = fields
            .number("num_hidden_layers", MAX_REPEATS)?
            .ok_or(ConfigFault::Missing { field: "num_hidden_layers" })?;
        let attention_bias = match family {
            Family::Llama | Family::Qwen3 | Family::Qwen3Moe => fields.flag("attention_bias")?,
            Family::Mistral | Family::Mixtral | Family::Qwen2 => false,
        };
        let experts = Experts::read(family, fields)?;
        // Where experts take the place of every dense MLP, its width may be left out.
        let needs_dense = experts.as_ref().is_none_or(|e| (0..layers).any(|l| !e.at(l)));
        let ffn = if needs_dense { Some(fields.size("intermediate_size")?) } else { None };
        Ok(Model {
            family,
            dtype: read_dtype(fields)?,
            hidden,
            vocab: fields.size("vocab_size")?,
            layers,
            head,
            // Both factors are at most 2²⁴, as are those of every shape but these.
            q: heads * head,
            kv: kv_heads * head,
            bias: Biases {
                qkv: attention_bias || family == Family::Qwen2,
                o: attention_bias,
                mlp: family == Family::Llama && fields.flag("mlp_bias")?,
            },
            tied: fields.flag("tie_word_embeddings")?,
            ffn,
            experts,
        })
    }
}

impl Experts {
    fn read(family: Family, fields: &Fields<'_>) -> Result<Option<Experts>, ConfigFault> {
        match family {
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => Ok(None),
            Family::Mixtral => {
                let field = "num_local_experts";
                let count = fields.number(field, MAX_REPEATS)?.ok_or(ConfigFault::Missing { field })?;
                let ffn = fields.size("intermediate_size")?;
                Ok(Some(Experts { count, ffn, step: 1, dense: Vec::new() }))
            }
            Family::Qwen3Moe => {
                let count = match fields.number("num_experts", MAX_REPEATS)? {
                    Some(count) => Some(count),
                    None => fields.number("num_local_experts", MAX_REPEATS)?,
                };
                let count = count.ok_or(ConfigFault::Missing { field: "num_experts" })?;
                let ffn = fields.size("moe_intermediate_size")?;
                let step = fields.number("decoder_sparse_step", MAX_REPEATS)?.unwrap_or(1);
                let dense = match fields.get("mlp_only_layers") {
                    None => Vec::new(),
                    Some(list) => {
                        let layers = list.as_array().map(|l| l.iter().map(Value::as_u64).collect());
                        let wanted = "a list of numbers of layers";
                        layers.flatten().ok_or_else(|| Fields::wrong("mlp_only_layers", list, wanted))?
                    }
                };
                Ok(Some(Experts { count, ffn, step, dense }))
            }
        }
    }

    fn at(&self, layer: u64) -> bool {
        (layer + 1).is_multiple_of(self.step) && !self.dense.contains(&layer)
    }
}

fn divides((whole, of): (&'static str, u64), (part, by): (&'static str, u64)) -> Result<u64, ConfigFault> {
    if of.is_multiple_of(by) { Ok(of / by) } else { Err(ConfigFault::NotDividing { whole, of, part, by }) }
}

fn read_dtype(fields: &Fields<'_>) -> Result<Dtype, ConfigFault> {
    let found = match fields.text("dtype")? {
        Some(found) => found,
        None => fields.text("torch_dtype")?.unwrap_or("bfloat16"),
    };
    match found.parse() {
        Ok(dtype @ (Dtype::BF16 | Dtype::F16 | Dtype::F32)) => Ok(dtype),
        _ => Err(ConfigFault::Dtype { found: found.chars().take(60).collect() }),
    }
}

/// The list of tensors as it grows.
struct Plan {
    model: Model,
    tensors: Vec<TensorSpec>,
    elements: u64,
}

impl Plan {
    fn fill(&mut self) -> Result<(), ConfigFault> {
        let Model { hidden, vocab, layers, tied, .. } = self.model;
        self.push(EMBEDDING.into(), &[vocab, hidden])?;
        for layer in 0..layers {
            self.attention(layer)?;
            self.mlp(layer)?;
        }
        self.push("model.norm.weight".into(), &[hidden])?;
        if tied { Ok(()) } else { self.push(HEAD.into(), &[vocab, hidden]) }
    }

    fn attention(&mut self, layer: u64) -> Result<(), ConfigFault> {
        let Model { family, hidden, head, q, kv, bias, .. } = self.model;
        let at = format!("model.layers.{layer}");
        self.push(format!("{at}.input_layernorm.weight"), &[hidden])?;
        self.linear(&format!("{at}.self_attn.q_proj"), [q, hidden], bias.qkv)?;
        self.linear(&format!("{at}.self_attn.k_proj"), [kv, hidden], bias.qkv)?;
        self.linear(&format!("{at}.self_attn.v_proj"), [kv, hidden], bias.qkv)?;
        self.linear(&format!("{at}.self_attn.o_proj"), [hidden, q], bias.o)?;
        match family {
            Family::Qwen3 | Family::Qwen3Moe => {
                self.push(format!("{at}.self_attn.q_norm.weight"), &[head])?;
                self.push(format!("{at}.self_attn.k_norm.weight"), &[head])?;
            }
            Family::Llama | Family::Mistral | Family::Mixtral | Family::Qwen2 => {}
        }
        self.push(format!("{at}.post_attention_layernorm.weight"), &[hidden])
    }

    fn mlp(&mut self, layer: u64) -> Result<(), ConfigFault> {
        let Model { family, hidden, bias, ffn, .. } = self.model;
        let sparse = self.model.experts.as_ref().filter(|e| e.at(layer)).map(|e| (e.count, e.ffn));
        let Some((count, width)) = sparse else {
            let ffn = ffn.ok_or(ConfigFault::Missing { field: "intermediate_size" })?;
            return self.gated(
                &format!("model.layers.{layer}.mlp"),
                ["gate_proj", "up_proj", "down_proj"],
                ffn,
                bias.mlp,
            );
        };
        let (block, parts) = match family {
            Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
                ("mlp", ["gate_proj", "up_proj", "down_proj"])
            }
        };
        self.push(format!("model.layers.{layer}.{block}.gate.weight"), &[count, hidden])?;
        (0..count).try_for_each(|expert| {
            self.gated(&format!("model.layers.{layer}.{block}.experts.{expert}"), parts, width, false)
        })
    }

    /// Gate and up, `width` wide, and down again.
    fn gated(&mut self, at: &str, parts: [&str; 3], width: u64, bias: bool) -> Result<(), ConfigFault> {
        let hidden = self.model.hidden;
        let [gate, up, down] = parts.map(|part| format!("{at}.{part}"));
        self.linear(&gate, [width, hidden], bias)?;
        self.linear(&up, [width, hidden], bias)?;
        self.linear(&down, [hidden, width], bias)
    }

    fn linear(&mut self, name: &str, shape: [u64; 2], bias: bool) -> Result<(), ConfigFault> {
        self.push(format!("{name}.weight"), &shape)?;
        if bias { self.push(format!("{name}.bias"), &shape[..1]) } else { Ok(()) }
    }

    fn push(&mut self, name: String, shape: &[u64]) -> Result<(), ConfigFault> {
        if self.tensors.len() == MAX_TENSORS {
            return Err(ConfigFault::TooManyTensors { name });
        }
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        match elements.and_then(|n| self.elements.checked_add(n)).filter(|&n| n <= MAX_ELEMENTS) {
            Some(elements) => self.elements = elements,
            None => return Err(ConfigFault::TooLarge { name, shape: shape.to_vec() }),
        }
        self.tensors.push(TensorSpec::new(name, self.model.dtype, shape));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
