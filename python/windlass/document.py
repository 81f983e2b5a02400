"""A trainer's configuration, in the keys of its own document.

Owns: what ``generator.*`` and ``trainer.*`` keys mean for weight sync. Trainers write them nested
(``{"generator": {"weight_sync_backend": "nccl"}}``) or dotted (``{"generator.weight_sync_backend": "nccl"}``); both are
read here, and become the facts and overrides that :func:`windlass.choose` decides by and the settings of the strategy
that it chooses.

A trainer's document is taken whole, as it is. Keys that are not ours are left alone: their values are not even read,
so that an interpolation that cannot be resolved yet does no harm. A key that looks like one of ours misspelt is refused
with the one that was meant, because a key that is misspelt is a wish that is not granted.

What a document leaves open is assumed, and the assumption is logged: nccl is taken to mean that there are GPUs,
``colocate_all`` that trainers and engines share them, and so does a ``weight_sync_backend`` of ``cuda_ipc`` where nothing
else is said. ``facts`` that the caller has gathered come before all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from windlass.errors import WindlassInvalid

__all__ = ["Document", "codec_of", "flat", "is_document", "offloading", "plain", "section", "settings_for"]

log = logging.getLogger("windlass")

#: Stand for GPUs that the document does not name. Only their being the same or not matters.
_TRAINER_GPU = "GPU-00000000-0000-0000-0000-000000000001"
_ENGINE_GPU = "GPU-00000000-0000-0000-0000-000000000002"

_ENGINES = "generator.inference_engine_"
_LORA = "trainer.policy.model.lora."

#: Every key, and what it is for.
KEYS = {
    "generator.weight_sync_backend": "nccl, gloo or cuda_ipc",
    "generator.weight_transfer_threshold_cuda_ipc_GB": "bytes of one bucket, in units of 1024 cubed",
    "generator.override_existing_update_group": "true, false, enable, disable or auto",
    "generator.pack_weights": "whether IPC packs parameters into buckets",
    "generator.use_cuda_ipc": "whether to use CUDA IPC",
    "generator.strategy": "a strategy by its name",
    "generator.link": "a link by its name",
    "generator.codec": "a codec by its name",
    "generator.encoder": "who encodes",
    "generator.offload_mode": "copy, delta or auto",
    "generator.strict": "whether a slower fallback is an error",
    "generator.backend": "vllm or sglang",
    "generator.run_engines_locally": "whether engines run on the trainers' host",
    "generator.num_inference_engines": "how many engines there are",
    f"{_ENGINES}tensor_parallel_size": "ranks of an engine",
    f"{_ENGINES}pipeline_parallel_size": "ranks of an engine",
    f"{_ENGINES}data_parallel_size": "ranks of an engine",
    "generator.engines": "the shapes of the engines, one by one",
    "generator.model_dtype": "what weights are cast to; tcp's, and windlass.extract.settings",
    "generator.use_flashrl": "whole modules in one chunk; windlass.extract.settings",
    "generator.enable_prefix_caching": "whether there is a cache to reset; windlass.transfer.client.settings",
    "generator.group_name": "the name of the update group",
    "generator.master_addr": "the address of training rank 0",
    "generator.timeout": "seconds for one transfer",
    "generator.join_timeout": "seconds for joining",
    "generator.model_id": "which policy",
    "generator.image_dir": "where receivers keep their image",
    "generator.store_url": "a store that trainers and engines reach: a URL, or a path",
    "generator.cross_region": "whether engines are in another region, or cannot reach the trainers",
    "trainer.placement.colocate_all": "whether engines run on the trainers' GPUs",
    "trainer.training_backend": "fsdp, megatron or deepspeed; windlass.extract.settings",
    f"{_LORA}rank": "more than 0 for an adapter",
    f"{_LORA}alpha": "the adapter's scale; the model's",
    f"{_LORA}dropout": "the adapter's dropout; the model's",
    f"{_LORA}lora_sync_path": "a directory that trainers and engines see",
}

_OVERRIDES = (
    "weight_sync_backend",
    "pack_weights",
    "use_cuda_ipc",
    "strategy",
    "link",
    "codec",
    "encoder",
    "offload_mode",
    "strict",
)


def section(config: object) -> Mapping[str, Any] | None:
    """A part of a document as a mapping: a dictionary, OmegaConf's, a dataclass or a namespace; else None.

    >>> from types import SimpleNamespace
    >>> section(SimpleNamespace(weight_sync_backend="nccl")), section("nccl")
    ({'weight_sync_backend': 'nccl'}, None)
    """
    if isinstance(config, Mapping):
        return config
    named = type(config).__name__ in ("Namespace", "SimpleNamespace")
    if (is_dataclass(config) and not isinstance(config, type)) or named:
        parts: Mapping[str, Any] = vars(config)
        return parts
    return None


def is_document(config: Mapping[str, object]) -> bool:
    """Whether a configuration is written in the keys of a trainer's document.

    >>> is_document({"trainer": {}}), is_document({"generator.strategy": "tcp"}), is_document({"strategy": "tcp"})
    (True, True, False)
    """
    return any(str(key).split(".")[0] in ("generator", "trainer") for key in config)


@dataclass(frozen=True)
class Document:
    """What a document says, key by key."""

    values: Mapping[str, Any]
    #: What it does not say and was taken for granted.
    assumed: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, config: object) -> Document:
        """Reads a document, nested or dotted. Keys that are not ours are left alone, unless one looks misspelt.

        >>> Document.read({"generator": {"strategy": "tcp", "sampling_params": {"temperature": 1.0}}, "data": {}}).values
        {'generator.strategy': 'tcp'}
        """
        values: dict[str, Any] = {}
        others: list[str] = []
        for key, place, last in _keys(config, ""):
            if key not in KEYS:
                others.append(key)
                continue
            if key in values:
                raise WindlassInvalid(f"the configuration gives {key!r} twice, nested and dotted")
            values[key] = plain(place[last])
        for key in others:
            meant = _meant(key)
            if meant in values:
                # A template has the right one, and this may be a key of the trainer's own.
                log.warning(
                    "the configuration has the key %r, which is left alone; did you mean %r?", key, meant
                )
            elif meant is not None:
                raise WindlassInvalid(
                    f"the configuration has the key {key!r}; did you mean {meant!r}?",
                    f"spell it {meant!r}; if {key!r} is a key of your own, say {meant!r} beside it, null for its default",
                    "unknown_key",
                )
        # A key without a value says nothing.
        return cls({key: value for key, value in values.items() if value is not None})

    def overrides(self) -> dict[str, Any]:
        """What it demands of the choice."""
        own = {name: self.values.get(f"generator.{name}") for name in _OVERRIDES}
        if own["weight_sync_backend"] == "cuda_ipc":
            if own["use_cuda_ipc"] is False:
                raise WindlassInvalid(
                    "generator.weight_sync_backend is 'cuda_ipc' and generator.use_cuda_ipc is false: say one of them"
                )
            own |= {"weight_sync_backend": "nccl", "use_cuda_ipc": True}
        return {name: value for name, value in own.items() if value is not None}

    def facts(self, known: Mapping[str, object] | None = None) -> dict[str, Any]:
        """What it says about the run; what is ``known`` comes first."""
        backend = self.values.get("generator.weight_sync_backend", "nccl")
        demanded = self.demands_ipc
        # An engine that runs elsewhere shares no GPU, whatever else is said.
        local = bool(self.values.get("generator.run_engines_locally", True))
        colocated = local and bool(self.values.get("trainer.placement.colocate_all", demanded))
        facts: dict[str, Any] = {
            "backend": "nccl" if backend == "cuda_ipc" else backend,
            "placement": "same_gpu" if colocated else "same_host" if local else "remote",
        }
        for name in ("store_url", "cross_region"):
            if f"generator.{name}" in self.values:
                facts[name] = self.values[f"generator.{name}"]
        if facts["backend"] == "nccl":
            facts["trainer_gpus"] = [_TRAINER_GPU]
            facts["engine_gpus"] = [_TRAINER_GPU if colocated else _ENGINE_GPU]
            if not {"trainer_gpus", "engine_gpus"} <= set(known or {}):
                by = "cuda_ipc" if not self.values.get("trainer.placement.colocate_all") else "colocate_all"
                self.assumed.append(
                    f"{backend} means GPUs" + (f", and {by} shared ones" if colocated else "")
                )
        engine = self.values.get("generator.backend")
        if engine is not None:
            facts["engines"] = [engine]
        if self.lora:
            facts["lora"] = True
            facts["lora_sync_path"] = self.values.get(f"{_LORA}lora_sync_path")
        return {**facts, **dict(known or {})}

    @property
    def lora(self) -> bool:
        """Whether an adapter is trained."""
        rank = self.values.get(f"{_LORA}rank", 0)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise WindlassInvalid(f"{_LORA}rank is {rank!r}: expected 0 for no adapter, or its rank")
        return rank > 0

    @property
    def engines(self) -> list[Any]:
        """The shapes of the engines."""
        given = self.values.get("generator.engines")
        if given is not None:
            return list(given)
        count = self.values.get("generator.num_inference_engines", 1)
        shape = {
            short: self.values.get(f"{_ENGINES}{long}_parallel_size", 1)
            for short, long in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
        }
        for key, value in (("num_inference_engines", count), *shape.items()):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise WindlassInvalid(f"{key} of the engines is {value!r}: expected 1 or more")
        return [dict(shape) for _ in range(count)]

    @property
    def names_engines(self) -> bool:
        """Whether it says how many engines there are, and of which shape."""
        keys = ("generator.engines", "generator.num_inference_engines")
        return any(key in self.values for key in keys) or any(key.startswith(_ENGINES) for key in self.values)

    @property
    def demands_ipc(self) -> bool:
        """Whether nothing else will do."""
        said = [self.values.get(f"generator.{name}") for name in ("weight_sync_backend", "strategy")]
        return (
            "cuda_ipc" in said
            or "packed_cuda_ipc" in said
            or self.values.get("generator.use_cuda_ipc") is True
        )

    def demanding(self, strategy: str) -> Document:
        """The same, for this strategy and no other."""
        rest = {key: value for key, value in self.values.items() if key != "generator.pack_weights"}
        return Document({**rest, "generator.strategy": strategy}, self.assumed)

    def with_engines(self, shapes: Sequence[Any]) -> Document:
        """The same, with engines of these shapes."""
        engines = [{"tp": shape.tp, "pp": shape.pp, "dp": shape.dp} for shape in shapes]
        return Document({**self.values, "generator.engines": engines}, self.assumed)

    @property
    def override_group(self) -> bool:
        """Whether a group of the same name is left for the new one."""
        value = self.values.get("generator.override_existing_update_group", False)
        named = {"enable": True, "disable": False, True: True, False: False}
        if value == "auto":
            # Servers that outlive a trainer still have its group.
            return not self.values.get("generator.run_engines_locally", True)
        if value not in named:
            raise WindlassInvalid(
                f"generator.override_existing_update_group is {value!r}: expected true, false, 'enable', 'disable' or "
                "'auto'"
            )
        return named[value]


def settings_for(strategy: str, document: Document, choice: Mapping[str, object]) -> dict[str, Any]:
    """The settings of the chosen strategy."""
    values = document.values

    def some(*names: str) -> dict[str, Any]:
        return {name: values[f"generator.{name}"] for name in names if f"generator.{name}" in values}

    own: dict[str, Any] = {"link": choice["link"], "codec": codec_of(choice, document.overrides())}
    if strategy == "broadcast":
        own |= {
            "engines": document.engines,
            "weight_sync_backend": values.get("generator.weight_sync_backend", "nccl"),
            "override_existing_update_group": document.override_group,
            **some("group_name", "master_addr", "timeout", "join_timeout"),
        }
    elif strategy in ("cuda_ipc", "packed_cuda_ipc"):
        threshold = values.get("generator.weight_transfer_threshold_cuda_ipc_GB", 1.0)
        own |= {"weight_transfer_threshold_cuda_ipc_GB": threshold, **some("timeout")}
    elif strategy in ("tcp", "store"):
        manager = offloading(choice, document.overrides()).get("manager", {})
        if "generator.model_dtype" in values:
            manager = {**manager, "generator_dtype": values["generator.model_dtype"]}
        own |= {"manager": manager, **some("model_id", "image_dir", "timeout")}
        if strategy == "store":
            # Whole images come as anchors, when they are due.
            codec = codec_of(choice, document.overrides()) if "generator.codec" in values else "delta_plain"
            own |= {"codec": codec, **some("store_url")}
    elif strategy == "lora":
        path = values.get(f"{_LORA}lora_sync_path")
        own |= {
            **({} if path is None else {"lora_sync_path": path}),
            **some("model_id", "image_dir", "timeout"),
        }
    return own


def codec_of(choice: Mapping[str, object], overrides: Mapping[str, object]) -> str:
    """The codec of a choice, as a setting. Agents write plain records, so context mode is only demanded, never taken."""
    named = {key.removeprefix("generator."): value for key, value in overrides.items()}
    if choice["codec"] == "delta_context" and named.get("codec") is None:
        return "delta_plain"
    return str(choice["codec"])


def offloading(choice: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, Any]:
    """What a choice says about offloading, as settings of ``tcp``. A copy that the document does not demand is left to the manager,
    which looks for itself whether a GPU can tell what changed.

    >>> offloading({"strategy": "tcp", "offload": "delta"}, {})
    {'manager': {'offload_mode': 'delta'}}
    >>> offloading({"strategy": "tcp", "offload": "copy"}, {})
    {}
    """
    named = {key.removeprefix("generator."): value for key, value in overrides.items()}
    if choice["strategy"] != "tcp" or (choice["offload"] == "copy" and named.get("offload_mode") != "copy"):
        return {}
    return {"manager": {"offload_mode": choice["offload"]}}


def flat(config: object) -> Iterator[tuple[str, Any]]:
    """Every key of ours in a document with its value, dotted, however it is written.

    >>> list(flat({"generator": {"strategy": "tcp", "n": 8}, "trainer.training_backend": "fsdp"}))
    [('generator.strategy', 'tcp'), ('trainer.training_backend', 'fsdp')]
    """
    for key, place, last in _keys(config, ""):
        if key in KEYS:
            yield key, plain(place[last])


def _keys(config: Any, prefix: str) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Every key with the place of its value. Values are read only where they may hold keys of ours."""
    part = section(config) or {}
    for last in part:
        name = f"{prefix}{last}"
        nested = None
        # A key of the table may itself hold a mapping or a list.
        if name not in KEYS and name.count(".") < _DEPTH:
            try:
                nested = section(part[last])
            except Exception:
                # OmegaConf: an interpolation or a value that is still missing.
                nested = None
        if nested is None:
            yield name, part, last
        else:
            yield from _keys(nested, f"{name}.")


#: Dots of the longest key.
_DEPTH = max(key.count(".") for key in KEYS)


def _meant(key: str) -> str | None:
    """The key of ours that this one is a misspelling of, if it looks like one."""
    parts = key.split(".")
    for ours in KEYS:
        own = ours.split(".")
        differ = [(a, b) for a, b in zip(parts, own) if a != b]
        if len(own) != len(parts) or len(differ) != 1:
            continue
        (given, right), *_ = differ
        # A plural is another word.
        if given in (f"{right}s", right.removesuffix("s")):
            continue
        if given.lower() == right.lower() or _distance(given, right) <= (2 if len(right) >= 10 else 1):
            return ours
    return None


def _distance(a: str, b: str) -> int:
    """How many letters are to be put in, left out, replaced or exchanged with their neighbour.

    >>> _distance("rnk", "rank"), _distance("stratgey", "strategy"), _distance("model_name", "model_dtype")
    (1, 1, 4)
    """
    before: list[int] = []
    last: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = last, row, [i]
        for j, y in enumerate(b, 1):
            best = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if before and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, before[j - 2] + 1)
            row.append(best)
    return row[-1]


def plain(value: object) -> Any:
    """A value as plain data, whatever kind of list or mapping the document has."""
    part = section(value)
    if part is not None:
        return {str(key): plain(item) for key, item in part.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(item) for item in value]
    return value
