"""A torch model as the worker of an engine of one's own.

Owns: :class:`ModelSession`, the smallest :class:`~windlass.load.session.Session`. Must not: know an engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from windlass.load.trace import Target

__all__ = ["ModelSession"]

Weights = Iterable[tuple[str, torch.Tensor]]


class ModelSession:
    """The weights of a torch model of which every worker has all, and nothing is post-processed after a load.

    ``load_weights`` takes names and tensors of the image and writes them to the model's parameters, sliced, fused or
    transposed as the model keeps them, as the models of vLLM do; it answers the names of the parameters. Without one, the
    image's tensors are those of the model, by name. It is rehearsed once with tensors that have no memory, so it must not
    look at values. Buffers must not be derived from weights; tensors that modules hold in other attributes are taken for
    derived ones, and the modules near them are loaded by the loader each time.

    >>> session = ModelSession(nn.Linear(2, 3))
    >>> sorted(session.load_weights({"weight": torch.ones(3, 2), "other": torch.ones(1)}.items()))
    ['weight']
    """

    parallelism, shares, partial, hides_writes = "tp1", 1, None, False

    def __init__(self, model: nn.Module, load_weights: Callable[[Weights], object] | None = None) -> None:
        self.model = model
        self._loader = load_weights

    def load_weights(self, weights: Weights) -> object:
        """The loader that was given, or by name."""
        if self._loader is not None:
            return self._loader(weights)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = set()
        with torch.no_grad():
            for name, tensor in weights:
                if name in parameters:
                    parameters[name].copy_(tensor)
                    loaded.add(name)
        return loaded

    # What is known of the modules.

    def refuses_plan(self) -> str | None:
        """Nothing stands in the way."""
        return None

    def vocabulary(self, module: nn.Module) -> int | None:
        """Nothing is padded."""
        return None

    def optional(self, module: nn.Module, attribute: str) -> bool:
        """Every parameter comes from the checkpoint."""
        return False

    def refuses(self, name: str, module: nn.Module) -> str | None:
        """Nothing happens to weights after they are loaded."""
        return None

    def independent(self, name: str, module: nn.Module, attribute: str) -> bool:
        """Buffers do not come from weights, by whatever name they are held."""
        held = module._buffers.get(attribute, getattr(module, attribute, None))
        return any(held is buffer for buffer in module._buffers.values() if buffer is not None)

    def serving(self, attribute: str) -> bool:
        """Nothing is known to."""
        return False

    def looks_into(self, value: object) -> bool:
        """Nothing has to be."""
        return False

    # Loading.

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[list[Target]]:
        """Parameters without memory in the place of the model's."""
        kept = [(prefix, module, dict(module._parameters)) for prefix, module in self.model.named_modules()]
        try:
            targets = []
            for prefix, module, parameters in kept:
                for name, tensor in parameters.items():
                    if tensor is not None:
                        stand_in = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
                        module._parameters[name] = stand_in
                        targets.append(Target(prefix, name, stand_in))
            yield targets
        finally:
            for _, module, parameters in kept:
                module._parameters.update(parameters)

    def begin(self) -> None:
        """Nothing to prepare."""

    def load(self, weights: Weights) -> None:
        """Feeds tensors to the loader."""
        with torch.no_grad():
            self.load_weights(weights)

    def finish(self) -> None:
        """Waits for what the loader has begun on GPUs."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def abandon(self) -> None:
        """Nothing to give up."""

    def incomplete(self) -> list[str]:
        """Nothing is kept back."""
        return []
