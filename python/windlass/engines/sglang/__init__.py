"""SGLang: weights into running engines.

:class:`SGLangWeightLoader` drives a server or an ``sglang.Engine``; :mod:`windlass.engines.sglang.custom` runs inside its workers;
:class:`SGLangLora` moves adapters. SGLang itself is imported only where one of its objects is given.
"""

from __future__ import annotations

from windlass.engines.sglang.loader import Loaded, SGLangWeightLoader
from windlass.engines.sglang.lora import SGLangLora

__all__ = ["Loaded", "SGLangLora", "SGLangWeightLoader"]
