"""Weight update requests: what a sender announces, and what an engine is to do.

A request is plain data that has passed every check; the checks are those of the Rust core, and the golden files under
``testdata/requests`` say the same for both languages. :func:`parse_request` also reads the four dictionaries that
trainers sent before requests had types, and :meth:`WeightUpdateRequest.to_legacy_dicts` writes them.

>>> request = parse_request({"names": ["w"], "dtypes": ["torch.bfloat16"], "shapes": [[4, 2]]})
>>> request
BroadcastWeightUpdateRequest(names=['w'], dtypes=['bfloat16'], shapes=[[4, 2]])
>>> request.to_dict()
{'type': 'broadcast', 'names': ['w'], 'dtypes': ['bfloat16'], 'shapes': [[4, 2]]}
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from windlass import _windlass
from windlass.errors import WindlassInvalid
from windlass.identity import Identity
from windlass.plain import Plain, Record

__all__ = [
    "BroadcastWeightUpdateRequest",
    "CudaIpcWeightUpdateRequest",
    "Identity",
    "IpcHandle",
    "LoraDiskWeightUpdateRequest",
    "PackedCudaIpcWeightUpdateRequest",
    "PackedTensor",
    "PullWeightUpdateRequest",
    "StoreWeightUpdateRequest",
    "WeightUpdateRequest",
    "packed_layout",
    "parse_request",
]


@dataclass(frozen=True)
class IpcHandle:
    """A handle to device memory that another process on this host exported: ``size`` bytes from ``offset``.

    The bytes of the handle are opaque and never a pickle; in JSON they are base64.
    """

    kind: Literal["legacy", "vmm_fd", "vmm_fabric"]
    handle: bytes
    size: int
    offset: int = 0


class PackedTensor(NamedTuple):
    """Where one tensor lies in a packed buffer: offset and size in bytes, and its elements."""

    offset: int
    bytes: int
    numel: int


def packed_layout(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[PackedTensor]:
    """Lays parameters out one after the other in one buffer, each aligned to its elements.

    >>> packed_layout(["a", "b"], ["bfloat16", "float32"], [[3], [2]])
    [PackedTensor(offset=0, bytes=6, numel=3), PackedTensor(offset=8, bytes=8, numel=2)]
    """
    return [PackedTensor(*record) for record in _windlass.packed_layout(names, dtypes, shapes)]


class WeightUpdateRequest(Record):
    """One announced transfer. The subclasses say how the weights come.

    A strategy from outside may have requests of its own: a subclass with :meth:`to_dict` and :meth:`from_dict`.
    """

    _what = "request"
    _judge = _windlass.parse_request

    @staticmethod
    def _read(field: str, value: Any) -> Any:
        return _READ.get(field, _as_is)(value)

    @staticmethod
    def _write(value: Any) -> Any:
        return _plain(value)

    def to_legacy_dict(self) -> Plain:
        """The one legacy dictionary that this request is; a broadcast of several parameters is several."""
        return self._legacy(one=True)[0]

    def to_legacy_dicts(self) -> list[Plain]:
        """The legacy dictionaries that this request is: one per parameter for a broadcast, otherwise one."""
        return self._legacy(one=False)

    def _legacy(self, *, one: bool) -> list[Plain]:
        dicts: list[Plain] = json.loads(_windlass.legacy_request(self.to_json(), one))
        return dicts


@dataclass(frozen=True)
class BroadcastWeightUpdateRequest(WeightUpdateRequest):
    """The parameters follow by broadcast on the update group, in this order.

    >>> BroadcastWeightUpdateRequest(names=["w"], dtypes=["BF16"], shapes=[[2]]).dtypes
    ['bfloat16']
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    type_name = "broadcast"


@dataclass(frozen=True)
class CudaIpcWeightUpdateRequest(WeightUpdateRequest):
    """Each parameter lies in exported device memory of its own: for each, a handle by GPU UUID."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    ipc_handles: list[dict[str, IpcHandle]]

    type_name = "cuda_ipc"


@dataclass(frozen=True)
class PackedCudaIpcWeightUpdateRequest(WeightUpdateRequest):
    """All parameters lie in one exported buffer (see :func:`packed_layout`): a handle by GPU UUID."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    layout: list[PackedTensor]
    ipc_handles: dict[str, IpcHandle]

    type_name = "packed_cuda_ipc"


@dataclass(frozen=True)
class LoraDiskWeightUpdateRequest(WeightUpdateRequest):
    """An adapter lies in a PEFT directory that both sides see.

    >>> LoraDiskWeightUpdateRequest("/mnt/adapters/7").to_legacy_dict()
    {'names': ['lora_disk_load'], 'extras': [{'lora_disk_path': '/mnt/adapters/7'}]}
    """

    lora_disk_path: str

    type_name = "lora_disk"


@dataclass(frozen=True)
class PullWeightUpdateRequest(WeightUpdateRequest):
    """A version is ready at an agent: pull it. What is in it stands in the agent's manifest."""

    identity: Identity
    sender_endpoint: str
    mode: Literal["full", "delta", "auto"] = "auto"

    type_name = "pull"


@dataclass(frozen=True)
class StoreWeightUpdateRequest(WeightUpdateRequest):
    """A version is ready in a store: read it. What is in it stands in its manifest there."""

    url: str
    identity: Identity

    type_name = "store"


WeightUpdateRequest._types = {
    request.type_name: request
    for request in (
        BroadcastWeightUpdateRequest,
        CudaIpcWeightUpdateRequest,
        PackedCudaIpcWeightUpdateRequest,
        LoraDiskWeightUpdateRequest,
        PullWeightUpdateRequest,
        StoreWeightUpdateRequest,
    )
}


def parse_request(data: Mapping[str, object] | str | bytes) -> WeightUpdateRequest:
    """Reads a request in its plain form or as one of the four legacy dictionaries, given as such or as JSON text.

    >>> parse_request({"names": ["lora_disk_load"], "extras": [{"lora_disk_path": "/mnt/a"}]})
    LoraDiskWeightUpdateRequest(lora_disk_path='/mnt/a')
    """
    return WeightUpdateRequest._parse(data)


def _as_is(value: Any) -> Any:
    return value


def _read_handles(value: Any) -> Any:
    if isinstance(value, list):
        return [_read_handles(handles) for handles in value]
    return {
        gpu: IpcHandle(h["kind"], _from_base64(h["handle"]), h["size"], h["offset"])
        for gpu, h in value.items()
    }


@lru_cache(maxsize=64)
def _from_base64(text: str) -> bytes:
    # The handles of a request say the same, parameter after parameter.
    return base64.b64decode(text)


def _read_identity(value: Any) -> Identity:
    return Identity(**value)


def _read_layout(value: Any) -> list[PackedTensor]:
    # Judged already, and there are hundreds in the pause of an engine: without a call of Python's for each.
    make = tuple.__new__
    return [make(PackedTensor, record) for record in map(_LAYOUT, value)]


_LAYOUT = itemgetter(*PackedTensor._fields)
_READ = {"ipc_handles": _read_handles, "identity": _read_identity, "layout": _read_layout}


def _plain(value: Any) -> Any:
    """A field in its plain form. Requests name hundreds of tensors in the pause of an engine, so the common kinds come
    first."""
    kind = type(value)
    if kind is str or kind is int:
        return value
    if kind is PackedTensor:
        return {"offset": value.offset, "bytes": value.bytes, "numel": value.numel}
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    if kind is IpcHandle:
        return {
            "kind": value.kind,
            "handle": _base64(value.handle),
            "size": value.size,
            "offset": value.offset,
        }
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@lru_cache(maxsize=64)
def _base64(handle: object) -> str:
    try:
        return base64.b64encode(handle).decode()  # type: ignore[arg-type]
    except (TypeError, binascii.Error) as e:
        raise WindlassInvalid(
            f"the handle of an IpcHandle is {type(handle).__name__}, expected bytes", name="wrong_type"
        ) from e
