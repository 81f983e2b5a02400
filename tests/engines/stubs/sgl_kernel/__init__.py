"""Stands where SGLang's compiled kernels are on a GPU. Every name is there; whoever calls one gets an error.

SGLang imports its kernels wherever it runs, and its models for the CPU call none of them. Where there is no CUDA, requests
for pinned memory are dropped as well.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "0.0.0+none"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU")

    missing.__name__ = name
    return missing


if not torch.cuda.is_available():

    def _unpinned(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return make(*args, **options)

        made.__name__ = make.__name__
        return made

    for _name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    # Called wherever memory is released; without a driver it would raise, and end the server.
    torch.cuda.synchronize = lambda *_: None
