"""What all extractors share: names, casts, cutting into chunks, and who gets them.

A subclass says how whole weights come out of its kind of model (:meth:`WeightExtractor._extract_raw_weights`), and
where it can, what they will be (:meth:`WeightExtractor._extract_metadata`). The rest is done here, once:

1. **Names.** A raw weight is cut into the tensors of the checkpoint by the source map: slices, without a copy. A
   tensor that several parameters make up is put together and leaves when it is complete.
2. **Cast.** To the dtype that was given for this tensor or that a checkpoint has for it, else to
   ``generator_dtype``, which concerns floating-point weights only; on the device, one tensor at a time.
3. **Chunks.** By the chunker of the core. With metadata the chunks are known before anything is gathered, so a
   chunk leaves with its last weight and nothing of the next one is gathered before it is asked for.

A subclass decides about chunks in the ways of the interface design: by the flags ``self._group_by_module`` and
``self._batch_by_threshold``, by :meth:`WeightExtractor._should_group_by_module` and its sister, and about how it is done
by overriding the helpers ``_group_by_module(params)``, ``_batch_by_threshold(chunks, threshold_gb)`` or
``_group_by_module_impl(chunks)``, ``_batch_by_threshold_impl(chunks)``. A flag has the name of a helper and hides it; the
helper is found all the same.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch

from windlass import _windlass
from windlass.dtypes import Dtype, dtype_name
from windlass.errors import WindlassBug, WindlassInvalid, WindlassUnsupported
from windlass.extract.chunk import WeightChunk
from windlass.extract.pieces import Pieces, Views
from windlass.names import DtypeRules

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Metadata", "WeightExtractor", "settings"]

#: Name, dtype and shape of a weight that has not been gathered.
Metadata: TypeAlias = tuple[str, torch.dtype, tuple[int, ...]]

#: The default limit of a batch: the documented default of ``weight_transfer_threshold_cuda_ipc_GB``.
DEFAULT_THRESHOLD = _windlass.threshold_from_gb(1.0)

E = TypeVar("E", bound="WeightExtractor")

#: The module's name, if the chunk is one module, and the names of its weights.
_Plan: TypeAlias = list[tuple["str | None", list[str]]]


class WeightExtractor(ABC):
    """Gets whole weights out of a model; see :mod:`windlass.extract` for what holds for all of them.

    ``group_by_module`` keeps the parameters of one module in one chunk, ``threshold_gb`` joins chunks up to that
    size (units of 1024³ bytes); without either, each weight is a chunk. ``dtypes`` maps patterns of checkpoint names
    (``*.A_log``) to dtypes, ``checkpoint`` is one whose dtypes are followed, and both come before
    ``generator_dtype``; see :class:`windlass.names.DtypeRules`. ``names`` is the source map; without one it is made
    from the model. ``generator_dtype`` is that of every extraction that names none. ``training_backend`` is what a
    trainer's document says about the model; another extractor's is refused.

    ``cfg`` is a trainer's configuration: what it says (:func:`settings`) holds where no option says
    otherwise. ``model`` is the one to extract if :meth:`extract_weights` is given none.
    """

    #: Whether weights are taken out of a model; those of one's own may have another source.
    needs_model: ClassVar[bool] = False
    #: Values of ``training_backend`` that mean models of this extractor's kind; none where any may.
    backends: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        cfg: object = None,
        model: object = None,
        *,
        group_by_module: bool | None = None,
        threshold_gb: float | None = None,
        only_rank0: bool = False,
        lora: bool | None = None,
        dtypes: Mapping[str, Dtype] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        names: Views | None = None,
        generator_dtype: Dtype | None = None,
        training_backend: str | None = None,
    ) -> None:
        said = {} if cfg is None else settings(cfg)
        self.cfg, self.model = cfg, model
        training_backend = said.get("training_backend") if training_backend is None else training_backend
        if training_backend is not None and self.backends and training_backend not in self.backends:
            raise WindlassInvalid(
                f"training_backend is {training_backend!r}, and {type(self).__name__} is for "
                f"{' or '.join(map(repr, sorted(self.backends)))}",
                "correct trainer.training_backend, or use the extractor of that backend",
            )
        self.generator_dtype = said.get("generator_dtype") if generator_dtype is None else generator_dtype
        self.group_by_module = bool(
            said.get("group_by_module") if group_by_module is None else group_by_module
        )
        threshold_gb = said.get("threshold_gb") if threshold_gb is None else threshold_gb
        self.threshold_bytes = None if threshold_gb is None else _windlass.threshold_from_gb(threshold_gb)
        self.only_rank0 = only_rank0
        self.lora = lora
        named = {pattern: str(dtype) for pattern, dtype in (dtypes or {}).items()}
        self.dtypes = DtypeRules(dtypes=named, checkpoint=checkpoint)
        for pattern, scheme in self.dtypes.schemes.items():
            raise WindlassUnsupported(
                f"dtypes[{pattern!r}] is {scheme.name!r}, and extractors give weights as they are",
                "WeightManager publishes quantised weights",
            )
        self.names = names

    @classmethod
    def from_config(cls: type[E], cfg: Any, model: Any = None, **options: Any) -> E:
        """The extractor as a trainer's configuration has it; on :class:`WeightExtractor` itself, the one that fits
        ``model``."""
        if inspect.isabstract(cls):
            from windlass.extract import extractor_for

            if model is None:
                raise WindlassInvalid(
                    "which extractor depends on the model: WeightExtractor.from_config(cfg, model)"
                )
            found = extractor_for(model, cfg=cfg, **options)
            found.model = model
            return found  # type: ignore[return-value]
        return cls(cfg, model, **options)

    @abstractmethod
    def _extract_raw_weights(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, under the trainer's name for it, in the same order on every rank.

        The hook of a subclass. Gathers one weight when it is asked for one, and keeps nothing that it has yielded. It
        may also yield chunks, or give a mapping; then all of it is gathered at once. One that is declared with a second
        argument is given ``generator_dtype``.
        """

    def _extract_metadata(self, model: Any) -> Iterable[Metadata] | None:
        """What :meth:`_extract_raw_weights` will yield, in its order; None where that is not known in advance."""
        return None

    def _extract_buckets(self, model: Any) -> Iterable[Iterator[tuple[str, Tensor]]] | None:
        """Raw weights that are in chunks already, for a subclass with a cutting of its own; else None."""
        return None

    def _extract_lora(self, model: Any) -> Iterator[tuple[str, Tensor]] | None:
        """The adapters under their final names, or None for a model without any."""
        return None

    def _source_map(self, model: Any) -> Views | None:
        """The source map for this model; None when raw names are checkpoint names already."""
        return self.names

    def _should_group_by_module(self) -> bool:
        """Whether parameters of one module share a chunk; a subclass may decide otherwise."""
        return self._flag("_group_by_module", self.group_by_module)

    def _should_batch_by_threshold(self) -> bool:
        """Whether chunks are joined up to the threshold; a subclass may decide otherwise."""
        return self._flag("_batch_by_threshold", self.threshold_bytes is not None)

    def _group_by_module(self, params: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """The names of each module's parameters; a subclass may group otherwise. ``params`` are all of them, without
        values where shapes are known in advance. A name that is in no group is a chunk by itself.

        >>> from windlass.extract import ModuleWeightExtractor
        >>> names = ["layers.0.attn.q.weight", "layers.0.attn.k.weight", "norm"]
        >>> ModuleWeightExtractor()._group_by_module(dict.fromkeys(names))
        {'layers.0.attn': ['layers.0.attn.q.weight', 'layers.0.attn.k.weight']}
        """
        groups: dict[str, list[str]] = {}
        for name in params:
            module = _windlass.module_of(name)
            if module is not None:
                groups.setdefault(module, []).append(name)
        return groups

    def _batch_by_threshold(
        self, chunks: Iterable[WeightChunk], threshold_gb: float
    ) -> Iterator[list[WeightChunk]]:
        """Chunks that travel together, each list of at most so much; a subclass may batch otherwise."""
        most = _windlass.threshold_from_gb(threshold_gb)
        batch: list[WeightChunk] = []
        size = 0
        for chunk in chunks:
            bytes_ = chunk.total_size_bytes or 0
            if batch and size + bytes_ > most:
                yield batch
                batch, size = [], 0
            batch.append(chunk)
            size += bytes_
            del chunk
        if batch:
            yield batch

    def _group_by_module_impl(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Chunks of one parameter each as chunks of one module each; a subclass may group otherwise."""
        return _streamed(
            (pair for chunk in chunks for pair in chunk), _windlass.Chunker(group_by_module=True)
        )

    def _batch_by_threshold_impl(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Chunks joined up to the threshold; a subclass may batch otherwise."""
        batches = self._helper("_batch_by_threshold")(chunks, self._threshold() / (1 << 30))
        return (batch[0] if len(batch) == 1 else WeightChunk.joined(batch) for batch in batches)

    def _threshold(self) -> int:
        """Bytes of a batch, for a subclass that wants batches and does not say of which size."""
        return DEFAULT_THRESHOLD if self.threshold_bytes is None else self.threshold_bytes

    def _flag(self, name: str, otherwise: bool) -> bool:
        """What a subclass has set; the helper of the same name says nothing."""
        flag = getattr(self, name)
        if callable(flag):
            return otherwise
        if not isinstance(flag, bool):
            raise WindlassInvalid(f"{type(self).__name__}.{name} is {flag!r}: expected True or False")
        return flag

    def _helper(self, name: str) -> Callable[..., Any]:
        """A helper, also where a flag of its name hides it."""
        method = next(m for kind in type(self).__mro__ if callable(m := vars(kind).get(name)))
        return functools.partial(method, self)

    def _own(self, *names: str) -> bool:
        """Whether a subclass has helpers of its own."""
        helpers = ((vars(WeightExtractor)[name], self._helper(name)) for name in names)
        return any(helper.func is not ours for ours, helper in helpers)  # type: ignore[attr-defined]

    def extract_weights(
        self, model: object = None, generator_dtype: Dtype | None = None
    ) -> Generator[WeightChunk, None, None]:
        """The model's weights, chunk by chunk. Every rank iterates; see :mod:`windlass.extract`.

        >>> from windlass.extract import ModuleWeightExtractor
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3))
        >>> [(chunk.names, chunk.dtypes) for chunk in ModuleWeightExtractor().extract_weights(model, "bfloat16")]
        [(['0.weight'], ['bfloat16']), (['0.bias'], ['bfloat16'])]
        """
        dtypes = self.dtypes
        generator_dtype = self.generator_dtype if generator_dtype is None else generator_dtype
        if generator_dtype is not None:
            dtypes = dataclasses.replace(dtypes, generator_dtype=str(generator_dtype))
        model = self.model if model is None else model
        if model is None and self.needs_model:
            raise WindlassInvalid("there is no model to extract: give it here, or when the extractor is made")
        adapters = self._adapters(model)
        if adapters is not None:
            yield from self._share(adapters, lambda raw: self._cut(Pieces(None, dtypes).stream(raw), None))
            return
        views = self._source_map(model)
        by_hand = self._by_hand()
        buckets = self._extract_buckets(model) if self._should_batch_by_threshold() and not by_hand else None
        if buckets is not None:
            for bucket in buckets:
                yield from self._share(bucket, lambda raw: _bucket(Pieces(views, dtypes).stream(raw)))
            return
        metadata = self._extract_metadata(model)
        shadows = None if metadata is None else Pieces(views, dtypes).stream(_shadows(metadata))
        raw = self._raw(model, generator_dtype)
        yield from self._share(raw, lambda raw: self._cut(Pieces(views, dtypes).stream(raw), shadows))

    def _raw(self, model: Any, generator_dtype: Dtype | None) -> Iterator[tuple[str, Tensor]]:
        """What the hook gives, in whatever form, as weights one by one."""
        hook: Callable[..., Any] = self._extract_raw_weights
        takes = inspect.signature(hook).parameters
        given = hook(model, generator_dtype) if len(takes) > 1 else hook(model)
        if inspect.iscoroutine(given):
            given = _at_once(given)
        return _one_by_one(given)

    def _by_hand(self) -> bool:
        """Whether a subclass cuts in a way of its own."""
        group, batch = self._should_group_by_module(), self._should_batch_by_threshold()
        return (group and self._own("_group_by_module", "_group_by_module_impl")) or (
            batch and self._own("_batch_by_threshold", "_batch_by_threshold_impl")
        )

    def _cut(
        self, weights: Iterator[tuple[str, Tensor]], shadows: Iterator[tuple[str, Tensor]] | None
    ) -> Iterator[WeightChunk]:
        """The weights in chunks; ``shadows`` say what will come, where that is known."""
        if not self._by_hand():
            return (
                _streamed(weights, self._chunker())
                if shadows is None
                else _planned(weights, self._plan(shadows))
            )
        if not self._should_group_by_module():
            chunks: Iterator[WeightChunk] = _streamed(weights, _windlass.Chunker())
        elif self._own("_group_by_module"):
            if shadows is None:
                # The weights to come are not known before they are there.
                held = list(weights)
                weights, shadows = _drained(held), iter(held)
            chunks = _grouped(weights, self._helper("_group_by_module")(dict(shadows)))
        else:
            chunks = self._group_by_module_impl(_streamed(weights, _windlass.Chunker()))
        return self._batch_by_threshold_impl(chunks) if self._should_batch_by_threshold() else chunks

    def _adapters(self, model: Any) -> Iterator[tuple[str, Tensor]] | None:
        adapters = None if self.lora is False else self._extract_lora(model)
        if self.lora and adapters is None:
            raise WindlassInvalid(
                f"{type(model).__name__} has no LoRA adapters, but the extractor was made with lora=True",
                "leave lora out to send adapters where there are any, and the weights where there are none",
            )
        return adapters

    def _share(
        self,
        raw: Iterator[tuple[str, Tensor]],
        cut: Callable[[Iterator[tuple[str, Tensor]]], Iterator[WeightChunk]],
    ) -> Iterator[WeightChunk]:
        """The chunks, on the ranks that get them; the others take part in every collective and drop the rest."""
        if self.only_rank0 and _rank() != 0:
            collections.deque(raw, maxlen=0)
        else:
            yield from cut(raw)

    async def aextract_weights(
        self, model: object = None, generator_dtype: Dtype | None = None
    ) -> AsyncIterator[WeightChunk]:
        """:meth:`extract_weights` for a coroutine: the event loop runs on while weights are gathered.

        Gathering happens in one thread of its own, with the caller's current device, and only when a chunk is asked
        for; the caller starts no collective of the same group while it waits. A caller that leaves the loop early
        closes the iterator (``contextlib.aclosing``).
        """
        loop = asyncio.get_running_loop()
        chunks = self.extract_weights(model, generator_dtype)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        worker = ThreadPoolExecutor(1, "windlass-extract", _use_device, (device,))
        held: list[WeightChunk] = []
        try:
            while await loop.run_in_executor(worker, _pull, chunks, held):
                yield held.pop()
        finally:
            # In the thread too: a generator that is running there cannot be closed from here.
            worker.submit(chunks.close)
            worker.shutdown(wait=True)

    def _chunker(self) -> _windlass.Chunker:
        return _windlass.Chunker(
            group_by_module=self._should_group_by_module(),
            threshold_bytes=self._threshold() if self._should_batch_by_threshold() else None,
        )

    def _plan(self, shadows: Iterator[tuple[str, Tensor]]) -> _Plan:
        """The same cutting, done on shadows: where each chunk will end."""
        chunker = self._chunker()
        done = []
        for name, shadow in shadows:
            done += chunker.push(name, dtype_name(shadow.dtype), list(shadow.shape), None)
        done += chunker.finish()
        return [(module, [item[0] for item in items]) for module, items in done]


def _shadows(metadata: Iterable[Metadata]) -> Iterator[tuple[str, Tensor]]:
    """Tensors without memory, in place of those that will come."""
    return ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, dtype, shape in metadata)


def _one_by_one(given: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights from a mapping, from pairs or from chunks; keeps none."""
    if isinstance(given, Mapping):
        given = given.items()
    for item in given:
        if isinstance(item, WeightChunk):
            yield from item
        else:
            box = [item]
            del item
            yield box.pop()


def _at_once(hook: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine that waits for nothing returns."""
    try:
        hook.send(None)
    except StopIteration as e:
        return e.value
    hook.close()
    raise WindlassUnsupported(
        "_extract_raw_weights is a coroutine that waits for something, and weights are gathered between two chunks",
        "make it a generator of (name, tensor)",
    )


def _drained(held: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    held.reverse()
    while held:
        yield held.pop()


def _grouped(
    weights: Iterator[tuple[str, Tensor]], groups: Mapping[str, Iterable[str]]
) -> Iterator[WeightChunk]:
    """Chunks by the user's own grouping: one leaves when all of its weights have come."""
    left = {module: list(names) for module, names in groups.items()}
    module_of: dict[str, str] = {}
    for module, names in left.items():
        for name in names:
            if module_of.setdefault(name, module) != module or names.count(name) > 1:
                raise WindlassInvalid(
                    f"_group_by_module has {name!r} twice: in {module_of[name]!r} and {module!r}"
                )
    held: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in weights:
        own = module_of.get(name)
        parts = held.setdefault(own, []) if own is not None else []
        parts.append((name, tensor))
        del tensor
        if own is None:
            yield _take(parts, None)
            continue
        left[own].remove(name)
        if not left[own]:
            yield _take(held.pop(own), own)
    missing = [name for names in left.values() for name in names]
    if missing:
        raise WindlassInvalid(f"_group_by_module names {missing[0]!r}, which is no parameter of the model")


def _streamed(weights: Iterable[tuple[str, Tensor]], chunker: _windlass.Chunker) -> Iterator[WeightChunk]:
    """Chunks of weights that were not announced: one ends when a weight comes that does not belong to it."""
    for name, tensor in weights:
        done = chunker.push(name, dtype_name(tensor.dtype), list(tensor.shape), tensor)
        del tensor
        while done:
            yield _chunk(*done.pop(0))
    done = chunker.finish()
    while done:
        yield _chunk(*done.pop(0))


def _planned(weights: Iterator[tuple[str, Tensor]], plan: _Plan) -> Iterator[WeightChunk]:
    """Chunks as planned, each gathered when it is asked for."""
    for module, names in plan:
        held: list[tuple[str, Tensor]] = []
        for name in names:
            held.append(_expect(weights, name))
        yield _take(held, module)
    if (extra := next(weights, None)) is not None:
        raise WindlassBug(f"{extra[0]!r} came out of the model but was not announced")


def _bucket(weights: Iterator[tuple[str, Tensor]]) -> Iterator[WeightChunk]:
    """All of them in one chunk."""
    held = list(weights)
    if held:
        yield _take(held, None)


def _expect(weights: Iterator[tuple[str, Tensor]], name: str) -> tuple[str, Tensor]:
    weight = next(weights, None)
    if weight is None or weight[0] != name:
        came = "nothing" if weight is None else repr(weight[0])
        raise WindlassBug(f"{name!r} was announced as the next weight, but {came} came out of the model")
    return weight


def _take(held: list[tuple[str, Tensor]], module: str | None) -> WeightChunk:
    """The chunk of what is held, which is then held no more."""
    chunk = WeightChunk.of(held, module_name=module)
    held.clear()
    return chunk


def _chunk(module: str | None, items: list[tuple[str, str, list[int], object]]) -> WeightChunk:
    return WeightChunk(
        names=[name for name, _, _, _ in items],
        tensors=[tensor for _, _, _, tensor in items],  # type: ignore[misc]
        dtypes=[dtype for _, dtype, _, _ in items],
        shapes=[shape for _, _, shape, _ in items],
        module_name=module,
    )


def _pull(chunks: Iterator[WeightChunk], held: list[WeightChunk]) -> bool:
    """The next chunk goes into ``held``: as a result it would live in the future until the next one."""
    for chunk in chunks:
        held.append(chunk)
        return True
    return False


def _use_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def settings(config: object) -> dict[str, Any]:
    """The options of an extractor that a trainer's configuration asks for, nested or dotted.

    Where trainer and engine share their devices over NCCL, modules travel whole and in batches of
    ``generator.weight_transfer_threshold_cuda_ipc_GB``; ``generator.use_flashrl`` wants whole modules anywhere.
    ``generator.model_dtype`` is what weights are cast to, and ``trainer.training_backend`` must be the extractor's.

    >>> settings({"generator": {"weight_sync_backend": "nccl"}, "trainer": {"placement": {"colocate_all": True}}})
    {'group_by_module': True, 'threshold_gb': 1.0}
    >>> settings({})
    {'group_by_module': False, 'threshold_gb': None}
    """
    from windlass.document import flat

    said = {key: value for key, value in flat(config) if value is not None}
    backend = said.get("generator.weight_sync_backend")
    # As windlass.document has it: a trainer that demands IPC shares devices.
    shared = said.get("trainer.placement.colocate_all", backend == "cuda_ipc")
    colocated = backend in ("nccl", "cuda_ipc") and bool(shared)
    threshold = said.get("generator.weight_transfer_threshold_cuda_ipc_GB", 1.0)
    options = {
        "group_by_module": colocated or bool(said.get("generator.use_flashrl")),
        "threshold_gb": threshold if colocated else None,
    }
    named = {"generator_dtype": "generator.model_dtype", "training_backend": "trainer.training_backend"}
    return {**options, **{option: said[key] for option, key in named.items() if key in said}}
