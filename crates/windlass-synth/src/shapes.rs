//! The tensors of a model, without their weights.
//!
//! Owns: the shapes of a decoder of a given size, and the role of each tensor. Called by `synth`.

use windlass_core::Dtype;
use windlass_core::manifest::TensorSpec;

/// The name of the embedding in a Hugging Face checkpoint.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// A Llama-like decoder with at most `elements` elements (at least [`MIN_ELEMENTS`](super::MIN_ELEMENTS)) that
/// has one matrix for embedding and output.
pub(super) fn of_size(elements: u64) -> Vec<TensorSpec> {
    // A layer has about 11.5 h² elements and models of this family about h / 72 layers; the embedding takes
    // what is left of about an eighth.
    let body = 0.88 * elements as f64;
    let ideal = (body * 72.0 / 11.5).cbrt();
    let grain = if ideal < 128.0 { 16 } else { 64 };
    let h = ((ideal / grain as f64) as u64 * grain).max(16);
    let (kv, ffn) = (h / 4, 3 * h);
    let layer = 2 * h * h + 2 * h * kv + 3 * h * ffn + 2 * h;
    let layers = ((body / layer as f64) as u64).max(1);
    let vocab = (elements - layers * layer - h) / h;

    let tensor = |name: &str, shape: &[u64]| TensorSpec::new(name, Dtype::BF16, shape);
    let mut tensors = vec![tensor(EMBEDDING, &[vocab, h])];
    for l in 0..layers {
        let mut push = |part: &str, shape: &[u64]| {
            tensors.push(tensor(&format!("model.layers.{l}.{part}.weight"), shape));
        };
        push("input_layernorm", &[h]);
        push("self_attn.q_proj", &[h, h]);
        push("self_attn.k_proj", &[kv, h]);
        push("self_attn.v_proj", &[kv, h]);
        push("self_attn.o_proj", &[h, h]);
        push("post_attention_layernorm", &[h]);
        push("mlp.gate_proj", &[ffn, h]);
        push("mlp.up_proj", &[ffn, h]);
        push("mlp.down_proj", &[h, ffn]);
    }
    tensors.push(tensor("model.norm.weight", &[h]));
    tensors
}

/// What a tensor is for; it decides how the tensor moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Embedding,
    Matrix,
    Norm,
}

impl Role {
    pub(super) fn of(spec: &TensorSpec) -> Role {
        if spec.name == EMBEDDING {
            Role::Embedding
        } else if spec.shape.len() < 2 {
            Role::Norm
        } else {
            Role::Matrix
        }
    }
}
