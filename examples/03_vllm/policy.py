"""Writes a checkpoint of a tiny Qwen3 with random weights and a tokenizer of single bytes: python policy.py DIRECTORY"""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
config = Qwen3Config(
    vocab_size=len(letters),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    eos_token_id=0,
    pad_token_id=0,
    bos_token_id=None,
)
Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(sys.argv[1])
