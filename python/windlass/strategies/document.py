"""A trainer's configuration, in the keys of its own document.

Owns: what ``generator.*`` and ``trainer.*`` keys mean for weight sync. Trainers write them nested
(``{"generator": {"weight_sync_backend": "nccl"}}``) or dotted (``{"generator.weight_sync_backend": "nccl"}``); both are
read here, and become the facts and overrides that :func:`windlass.choose` decides by and the settings of the strategy
that it chooses. A key that is not known is refused, because a key that is misspelt is a wish that is not granted.

What a document leaves open is assumed, and the assumption is logged: nccl is taken to mean that there are GPUs, and
``colocate_all`` that trainers and engines share them. ``facts`` that somebody has gathered come before both.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import WindlassInvalid

__all__ = ["Document", "codec_of", "flat", "is_document", "offloading", "settings_for"]

#: Stand for GPUs that nobody has named. Only their being the same or not matters.
_TRAINER_GPU = "GPU-00000000-0000-0000-0000-000000000001"
_ENGINE_GPU = "GPU-00000000-0000-0000-0000-000000000002"

_ENGINES = "generator.inference_engine_"
_LORA = "trainer.policy.model.lora."

#: Every key, and what it is for.
KEYS = {
    "generator.weight_sync_backend": "nccl or gloo",
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
    "generator.enable_prefix_caching": "whether there is a cache to reset; windlass.client.settings",
    "generator.group_name": "the name of the update group",
    "generator.master_addr": "the address of training rank 0",
    "generator.timeout": "seconds for one transfer",
    "generator.join_timeout": "seconds for joining",
    "generator.model_id": "which policy",
    "generator.image_dir": "where receivers keep their image",
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


def is_document(config: Mapping[str, Any]) -> bool:
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
    def read(cls, config: Mapping[str, Any]) -> Document:
        """Reads a document, nested or dotted. Unknown keys are refused."""
        values: dict[str, Any] = {}
        for key, value in flat(config):
            if key not in KEYS:
                near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(KEYS)}"
                raise WindlassInvalid(f"the configuration has no key {key!r}; {hint}", name="unknown_key")
            if key in values:
                raise WindlassInvalid(f"the configuration gives {key!r} twice, nested and dotted")
            values[key] = value
        return cls({key: value for key, value in values.items() if value is not None})

    def overrides(self) -> dict[str, Any]:
        """What it demands of the choice."""
        own = {name: self.values.get(f"generator.{name}") for name in _OVERRIDES}
        return {name: value for name, value in own.items() if value is not None}

    def facts(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What it says about the run; what is ``known`` comes first."""
        backend = self.values.get("generator.weight_sync_backend", "nccl")
        colocated = bool(self.values.get("trainer.placement.colocate_all"))
        local = bool(self.values.get("generator.run_engines_locally", True))
        facts: dict[str, Any] = {
            "backend": backend,
            "placement": "same_gpu" if colocated else "same_host" if local else "remote",
        }
        if backend == "nccl":
            facts["trainer_gpus"] = [_TRAINER_GPU]
            facts["engine_gpus"] = [_TRAINER_GPU if colocated else _ENGINE_GPU]
            if not {"trainer_gpus", "engine_gpus"} <= set(known or {}):
                self.assumed.append(
                    "nccl means GPUs" + (", and colocate_all shared ones" if colocated else "")
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


def settings_for(strategy: str, document: Document, choice: Mapping[str, Any]) -> dict[str, Any]:
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
    elif strategy == "tcp":
        manager = offloading(choice, document.overrides()).get("manager", {})
        if "generator.model_dtype" in values:
            manager = {**manager, "generator_dtype": values["generator.model_dtype"]}
        own |= {"manager": manager, **some("model_id", "image_dir", "timeout")}
    elif strategy == "lora":
        path = values.get(f"{_LORA}lora_sync_path")
        own |= {
            **({} if path is None else {"lora_sync_path": path}),
            **some("model_id", "image_dir", "timeout"),
        }
    return own


def codec_of(choice: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """The codec of a choice, as a setting. Agents write plain records, so context mode is only demanded, never taken."""
    named = {key.removeprefix("generator."): value for key, value in overrides.items()}
    if choice["codec"] == "delta_context" and named.get("codec") is None:
        return "delta_plain"
    return str(choice["codec"])


def offloading(choice: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a choice says about offloading, as settings of ``tcp``. A copy that nobody demanded is left to the manager,
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


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a document with its value, dotted, however it is written.

    >>> list(flat({"generator": {"strategy": "tcp"}, "trainer.training_backend": "fsdp"}))
    [('generator.strategy', 'tcp'), ('trainer.training_backend', 'fsdp')]
    """
    for key, value in config.items():
        name = f"{prefix}{key}"
        # A key of the table may itself hold a mapping or a list; what is not in it and is nested is looked into.
        if isinstance(value, Mapping) and name not in KEYS:
            yield from flat(value, f"{name}.")
        else:
            yield name, value
