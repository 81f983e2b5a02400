//! Lists written by hand, counts that are known, and configs that no model has.

use serde_json::{Value, json};

use super::*;
use crate::lab::image;
use crate::lab::synth::Synth;

fn tiny_llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "torch_dtype": "float16",
    })
}

fn tiny_moe() -> Value {
    json!({
        "model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 24, "moe_intermediate_size": 6,
        "num_experts": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 6, "vocab_size": 16, "mlp_only_layers": [0], "tie_word_embeddings": true,
    })
}

/// The config with one field changed.
fn with(mut config: Value, field: &str, value: Value) -> Value {
    config[field] = value;
    config
}

fn listed(config: &Value) -> Vec<(String, Vec<u64>)> {
    shapes_of(config).unwrap().tensors.into_iter().map(|t| (t.name, t.shape)).collect()
}

fn owned(list: &[(&str, &[u64])]) -> Vec<(String, Vec<u64>)> {
    list.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect()
}

#[test]
fn a_tiny_llama_has_the_tensors_of_its_checkpoint() {
    let expected: &[(&str, &[u64])] = &[
        ("model.embed_tokens.weight", &[32, 8]),
        ("model.layers.0.input_layernorm.weight", &[8]),
        ("model.layers.0.self_attn.q_proj.weight", &[8, 8]),
        ("model.layers.0.self_attn.k_proj.weight", &[4, 8]),
        ("model.layers.0.self_attn.v_proj.weight", &[4, 8]),
        ("model.layers.0.self_attn.o_proj.weight", &[8, 8]),
        ("model.layers.0.post_attention_layernorm.weight", &[8]),
        ("model.layers.0.mlp.gate_proj.weight", &[20, 8]),
        ("model.layers.0.mlp.up_proj.weight", &[20, 8]),
        ("model.layers.0.mlp.down_proj.weight", &[8, 20]),
        ("model.layers.1.input_layernorm.weight", &[8]),
        ("model.layers.1.self_attn.q_proj.weight", &[8, 8]),
        ("model.layers.1.self_attn.k_proj.weight", &[4, 8]),
        ("model.layers.1.self_attn.v_proj.weight", &[4, 8]),
        ("model.layers.1.self_attn.o_proj.weight", &[8, 8]),
        ("model.layers.1.post_attention_layernorm.weight", &[8]),
        ("model.layers.1.mlp.gate_proj.weight", &[20, 8]),
        ("model.layers.1.mlp.up_proj.weight", &[20, 8]),
        ("model.layers.1.mlp.down_proj.weight", &[8, 20]),
        ("model.norm.weight", &[8]),
        ("lm_head.weight", &[32, 8]),
    ];
    assert_eq!(listed(&tiny_llama()), owned(expected));
    let shapes = shapes_of(&tiny_llama()).unwrap();
    assert!(shapes.aliases.is_empty() && shapes.tensors.iter().all(|t| t.dtype == Dtype::F16));
}

#[test]
fn a_tiny_mixture_of_experts_has_the_tensors_of_its_checkpoint() {
    let expected: &[(&str, &[u64])] = &[
        ("model.embed_tokens.weight", &[16, 8]),
        ("model.layers.0.input_layernorm.weight", &[8]),
        ("model.layers.0.self_attn.q_proj.weight", &[12, 8]),
        ("model.layers.0.self_attn.k_proj.weight", &[6, 8]),
        ("model.layers.0.self_attn.v_proj.weight", &[6, 8]),
        ("model.layers.0.self_attn.o_proj.weight", &[8, 12]),
        ("model.layers.0.self_attn.q_norm.weight", &[6]),
        ("model.layers.0.self_attn.k_norm.weight", &[6]),
        ("model.layers.0.post_attention_layernorm.weight", &[8]),
        ("model.layers.0.mlp.gate_proj.weight", &[24, 8]),
        ("model.layers.0.mlp.up_proj.weight", &[24, 8]),
        ("model.layers.0.mlp.down_proj.weight", &[8, 24]),
        ("model.layers.1.input_layernorm.weight", &[8]),
        ("model.layers.1.self_attn.q_proj.weight", &[12, 8]),
        ("model.layers.1.self_attn.k_proj.weight", &[6, 8]),
        ("model.layers.1.self_attn.v_proj.weight", &[6, 8]),
        ("model.layers.1.self_attn.o_proj.weight", &[8, 12]),
        ("model.layers.1.self_attn.q_norm.weight", &[6]),
        ("model.layers.1.self_attn.k_norm.weight", &[6]),
        ("model.layers.1.post_attention_layernorm.weight", &[8]),
        ("model.layers.1.mlp.gate.weight", &[2, 8]),
        ("model.layers.1.mlp.experts.0.gate_proj.weight", &[6, 8]),
        ("model.layers.1.mlp.experts.0.up_proj.weight", &[6, 8]),
        ("model.layers.1.mlp.experts.0.down_proj.weight", &[8, 6]),
        ("model.layers.1.mlp.experts.1.gate_proj.weight", &[6, 8]),
        ("model.layers.1.mlp.experts.1.up_proj.weight", &[6, 8]),
        ("model.layers.1.mlp.experts.1.down_proj.weight", &[8, 6]),
        ("model.norm.weight", &[8]),
    ];
    assert_eq!(listed(&tiny_moe()), owned(expected));
    let shapes = shapes_of(&tiny_moe()).unwrap();
    assert!(shapes.tensors.iter().all(|t| t.dtype == Dtype::BF16));
    assert_eq!(shapes.aliases.get("lm_head.weight").map(String::as_str), Some("model.embed_tokens.weight"));
    // Stepping over the first layer makes it dense too.
    let stepped = with(with(tiny_moe(), "mlp_only_layers", json!([])), "decoder_sparse_step", json!(2));
    assert_eq!(listed(&stepped), owned(expected));
}

#[test]
fn biases_stand_where_their_family_has_them() {
    let biases = |config: &Value| {
        let names = listed(config).into_iter().filter(|(n, _)| n.starts_with("model.layers.0."));
        let biases = names.filter_map(|(n, shape)| {
            Some((n.strip_suffix(".bias")?.strip_prefix("model.layers.0.")?.to_owned(), shape))
        });
        biases.collect::<Vec<_>>()
    };
    let qkv: &[(&str, &[u64])] =
        &[("self_attn.q_proj", &[8]), ("self_attn.k_proj", &[4]), ("self_attn.v_proj", &[4])];
    let of = |family: &str| with(tiny_llama(), "model_type", json!(family));
    assert_eq!(biases(&of("qwen2")), owned(qkv));
    let with_o = [qkv, &[("self_attn.o_proj", &[8])]].concat();
    assert_eq!(biases(&with(tiny_llama(), "attention_bias", json!(true))), owned(&with_o));
    let mlp: &[(&str, &[u64])] = &[("mlp.gate_proj", &[20]), ("mlp.up_proj", &[20]), ("mlp.down_proj", &[8])];
    assert_eq!(biases(&with(tiny_llama(), "mlp_bias", json!(true))), owned(mlp));
    for family in ["llama", "mistral", "qwen3"] {
        assert!(biases(&of(family)).is_empty(), "{family}");
    }
    // These flags mean nothing to families that do not know them.
    assert!(biases(&with(of("mistral"), "attention_bias", json!(true))).is_empty());
}

#[test]
fn published_models_have_their_published_parameter_counts() {
    let model = |family: &str, sizes: [u64; 6], more: Value| {
        let [hidden, ffn, layers, heads, kv_heads, vocab] = sizes;
        let mut config = json!({
            "model_type": family, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        });
        for (field, value) in more.as_object().unwrap() {
            config[field] = value.clone();
        }
        config
    };
    let qwen3_small = model(
        "qwen3",
        [1024, 3072, 28, 16, 8, 151_936],
        json!({ "head_dim": 128, "tie_word_embeddings": true }),
    );
    let qwen3_moe = json!({ "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768 });
    let counts = [
        (qwen3_small.clone(), 596_049_920),
        (with(qwen3_small.clone(), "tie_word_embeddings", json!(false)), 751_632_384),
        (model("llama", [4096, 14_336, 32, 32, 8, 128_256], json!({})), 8_030_261_248),
        (model("mistral", [4096, 14_336, 32, 32, 8, 32_000], json!({})), 7_241_732_096),
        (model("qwen2", [3584, 18_944, 28, 28, 4, 152_064], json!({})), 7_615_616_512),
        (model("qwen3_moe", [2048, 6144, 48, 32, 4, 151_936], qwen3_moe), 30_532_122_624),
        (
            model("mixtral", [4096, 14_336, 32, 32, 8, 32_000], json!({ "num_local_experts": 8 })),
            46_702_792_704,
        ),
    ];
    for (config, count) in counts {
        assert_eq!(shapes_of(&config).unwrap().elements(), count, "{config}");
    }
    // The width of a head is 128 in this family unless the config says otherwise.
    let mut without = qwen3_small.clone();
    without.as_object_mut().unwrap().remove("head_dim");
    assert_eq!(shapes_of(&without), shapes_of(&qwen3_small));
}

#[test]
fn configs_that_no_model_has_are_refused_by_name() {
    let fault = |config: Value| shapes_of(&config).unwrap_err();
    let says = |config: Value, words: &str| {
        let text = fault(config).to_string();
        assert!(text.contains(words), "{text:?} does not say {words:?}");
    };
    assert_eq!(fault(json!([1])), ConfigFault::NotAnObject);
    says(with(tiny_llama(), "model_type", json!("gpt2")), "llama, mistral, mixtral, qwen2, qwen3, qwen3_moe");
    assert_eq!(fault(with(tiny_llama(), "model_type", json!("gpt2"))).kind(), Kind::Unsupported);
    assert_eq!(fault(with(tiny_llama(), "quantization_config", json!({}))), ConfigFault::Quantized);
    for field in [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ] {
        assert_eq!(fault(with(tiny_llama(), field, Value::Null)), ConfigFault::Missing { field });
        says(with(tiny_llama(), field, json!([])), &format!("field {field} is [], not"));
    }
    for field in ["num_experts", "moe_intermediate_size"] {
        assert_eq!(fault(with(tiny_moe(), field, Value::Null)), ConfigFault::Missing { field });
    }
    for field in ["hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"] {
        says(with(tiny_llama(), field, json!(0)), &format!("{field} is 0, not in 1 to"));
        says(with(tiny_llama(), field, json!(-1)), &format!("{field} is -1, not a whole number"));
        says(with(tiny_llama(), field, json!(8.5)), &format!("{field} is 8.5, not a whole number"));
        says(with(tiny_llama(), field, json!(u64::MAX)), &format!("{field} is 18446744073709551615, not in"));
    }
    says(with(tiny_llama(), "num_key_value_heads", json!(3)), "num_attention_heads = 4 is not a multiple of");
    says(with(tiny_llama(), "hidden_size", json!(9)), "hidden_size = 9 is not a multiple of");
    says(with(tiny_llama(), "torch_dtype", json!("int8")), "\"int8\" is not supported");
    says(with(tiny_llama(), "dtype", json!("fast")), "\"fast\" is not supported");
    says(with(tiny_llama(), "tie_word_embeddings", json!("yes")), "is \"yes\", not true or false");
    says(with(tiny_moe(), "mlp_only_layers", json!([-1])), "mlp_only_layers is [-1], not a list");
}

#[test]
fn configs_of_absurd_models_are_refused_before_memory_is_asked_for() {
    let most = json!(MAX_SIZE);
    let wide = with(with(tiny_llama(), "num_attention_heads", most.clone()), "head_dim", most.clone());
    let wide = with(with(wide, "hidden_size", most), "num_key_value_heads", json!(1));
    assert!(
        matches!(shapes_of(&wide), Err(ConfigFault::TooLarge { name, .. }) if name.contains("q_proj")),
        "2⁷² elements do not fit into 64 bits"
    );
    let many = with(tiny_moe(), "num_experts", json!(MAX_REPEATS));
    let many = with(many, "num_hidden_layers", json!(MAX_REPEATS));
    assert!(matches!(shapes_of(&many), Err(ConfigFault::TooManyTensors { .. })));
}

#[test]
fn config_files_that_cannot_be_used_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let error = || shapes_from_config(&path).unwrap_err();
    assert!(matches!(error(), SynthError::Config(ConfigError::Unreadable { .. })));
    assert_eq!(error().kind(), Kind::NotFound);
    std::fs::write(&path, "{\"model_type\": ").unwrap();
    assert!(matches!(error(), SynthError::Config(ConfigError::NotJson { .. })));
    std::fs::write(&path, "{}").unwrap();
    let text = error().to_string();
    assert!(text.starts_with(&*path.to_string_lossy()) && text.contains("model_type is missing"), "{text}");
    std::fs::write(&path, vec![b' '; MAX_BYTES as usize + 1]).unwrap();
    assert!(matches!(error(), SynthError::Config(ConfigError::TooLong { .. })));
    std::fs::write(&path, tiny_llama().to_string()).unwrap();
    assert_eq!(shapes_from_config(&path).unwrap(), shapes_of(&tiny_llama()).unwrap());
    // Its dtype is none that steps are made up for.
    let refused = Synth::of(shapes_from_config(&path).unwrap(), 1, 0.01).unwrap_err();
    assert!(matches!(&refused, SynthError::Dtype { dtype: Dtype::F16, .. }), "{refused}");
    assert_eq!(refused.kind(), Kind::Unsupported);
}

#[test]
fn a_model_made_from_a_config_changes_as_asked() {
    let mut config = with(tiny_moe(), "hidden_size", json!(128));
    for (field, value) in [("intermediate_size", 384), ("moe_intermediate_size", 96), ("vocab_size", 512)] {
        config[field] = json!(value);
    }
    let config = with(config, "attention_bias", json!(true));
    let shapes = shapes_of(&config).unwrap();
    let synth = Synth::of(shapes.clone(), 5, 0.02).unwrap();
    assert_eq!(synth.elements(), shapes.elements());
    let manifest = image::manifest_of(&synth).unwrap();
    assert_eq!(manifest.tensors().len(), shapes.tensors.len());
    assert_eq!(manifest.find("lm_head.weight"), manifest.find("model.embed_tokens.weight"));
    let mut changed = 0;
    for (t, tensor) in synth.tensors().iter().enumerate() {
        let bytes = tensor.elements() as usize * 2;
        let (mut a, mut b) = (vec![0; bytes], vec![0; bytes]);
        synth.fill_base(t, 0, &mut a);
        synth.fill_next(t, 0, &mut b);
        changed += a.chunks_exact(2).zip(b.chunks_exact(2)).filter(|(a, b)| a != b).count();
        if tensor.name.contains("_proj.bias") {
            let top = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16).abs();
            assert!(a.chunks_exact(2).all(|b| top(b) < 0.2), "{} is not around 0", tensor.name);
        }
    }
    let rate = changed as f64 / synth.elements() as f64;
    assert!((rate / 0.02 - 1.0).abs() < 0.15, "{rate}");
    // With nearly everything in the embedding, most rows are those of tokens that do not occur.
    let lopsided = shapes_of(&with(config, "vocab_size", json!(1 << 20))).unwrap();
    let error = Synth::of(lopsided, 5, 0.5).unwrap_err();
    assert!(matches!(error, SynthError::Unreachable { most, .. } if most < 0.4), "{error}");
}
