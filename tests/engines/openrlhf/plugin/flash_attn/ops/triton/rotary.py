"""See the package; vLLM imports this where the package is found."""

from flash_attn.bert_padding import absent as apply_rotary

__all__ = ["apply_rotary"]
