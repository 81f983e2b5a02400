"""Names: what a trainer's parameters are called, shaped and typed in a Hugging Face checkpoint.

Names in an image are checkpoint names, whatever the trainer calls its parameters. This package owns the map
between the two (:class:`SourceMap`), which tensors belong to the image (:class:`Selection`) and in which
dtype (:class:`DtypeRules`). It works on names and shapes only, so that every rank can copy its own shards
straight into place, and imports neither torch nor transformers until :meth:`SourceMap.from_model` is called.

>>> from windlass.names import SourceMap
>>> names = SourceMap.for_model_type("qwen3")
>>> [view.name for view in names.views("_orig_mod.model.norm.weight", (64,))]
['model.norm.weight']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass._lazy import lazily
from windlass.names.checkpoint import Layout, checkpoint_layout
from windlass.names.dtypes import DtypeRules, canonical_dtype
from windlass.names.quantised import SCHEMES, Scheme, quantization_config
from windlass.names.selection import Chosen, Selection
from windlass.names.source_map import Rule, SourceMap, names_of
from windlass.names.view import AsTheyAre, Box, Shape, View, split_rows, transpose

if TYPE_CHECKING:
    from windlass.names.conversion import persistent_buffers

__all__ = [
    "SCHEMES",
    "AsTheyAre",
    "Box",
    "Chosen",
    "DtypeRules",
    "Layout",
    "Rule",
    "Scheme",
    "Selection",
    "Shape",
    "SourceMap",
    "View",
    "canonical_dtype",
    "checkpoint_layout",
    "names_of",
    "persistent_buffers",
    "quantization_config",
    "split_rows",
    "transpose",
]


#: It needs torch.
__getattr__ = lazily(__name__, {"persistent_buffers": "windlass.names.conversion"})
