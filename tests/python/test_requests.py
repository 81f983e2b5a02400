"""Requests and sync infos as Python objects: what they refuse, and in which words."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

import windlass
from windlass import WindlassInvalid
from windlass.identity import Identity
from windlass.transfer.request import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    IpcHandle,
    LoraDiskWeightUpdateRequest,
    PackedCudaIpcWeightUpdateRequest,
    PullWeightUpdateRequest,
    StoreWeightUpdateRequest,
    packed_layout,
    parse_request,
)
from windlass.transfer.sync_info import (
    AgentWeightSyncInfo,
    EmptyWeightSyncInfo,
    EngineShape,
    StoreWeightSyncInfo,
    TorchDistributedWeightSyncInfo,
    engine_rank,
    parse_sync_info,
)

GPU = "GPU-8a56a4bc-4184-b6f7-8a7f-0123456789ab"
COLUMNS: dict[str, Any] = {"names": ["a", "b"], "dtypes": ["bfloat16"] * 2, "shapes": [[2, 3], [4]]}


def handle(size: int) -> dict[str, IpcHandle]:
    return {GPU: IpcHandle("legacy", bytes(range(64)), size, 512)}


def every_request() -> list[windlass.transfer.request.WeightUpdateRequest]:
    identity = Identity("actor", 2**64 - 1, 7)
    return [
        BroadcastWeightUpdateRequest(**COLUMNS),
        CudaIpcWeightUpdateRequest(**COLUMNS, ipc_handles=[handle(12), handle(8)]),
        PackedCudaIpcWeightUpdateRequest(**COLUMNS, layout=packed_layout(**COLUMNS), ipc_handles=handle(20)),
        LoraDiskWeightUpdateRequest("/mnt/adapters/7"),
        PullWeightUpdateRequest(identity, "http://trainer-0:9000", "delta"),
        StoreWeightUpdateRequest("s3://bucket/run", identity),
    ]


def every_info() -> list[windlass.transfer.sync_info.WeightSyncInfo]:
    return [
        TorchDistributedWeightSyncInfo("10.0.0.7", 29500, 3, backend="gloo"),
        EmptyWeightSyncInfo(),
        AgentWeightSyncInfo(["http://10.0.0.7:9000"], "hunter2", "actor", 5),
        StoreWeightSyncInfo("file:///mnt/weights"),
    ]


@pytest.mark.parametrize("request_", every_request(), ids=lambda r: r.type_name)
def test_a_request_survives_json_pickle_and_copy_unchanged(
    request_: windlass.transfer.request.WeightUpdateRequest,
) -> None:
    assert parse_request(request_.to_json()) == request_
    assert type(request_).from_dict(request_.to_dict()) == request_
    assert pickle.loads(pickle.dumps(request_)) == request_
    assert copy.deepcopy(request_) == request_
    with pytest.raises(dataclasses.FrozenInstanceError):
        request_.names = []  # type: ignore[attr-defined]


@pytest.mark.parametrize("info", every_info(), ids=lambda i: i.type_name)
def test_a_sync_info_survives_json_pickle_and_copy_unchanged(
    info: windlass.transfer.sync_info.WeightSyncInfo,
) -> None:
    assert parse_sync_info(info.to_json()) == info
    assert windlass.transfer.sync_info.WeightSyncInfo.from_dict(info.to_dict()) == info
    assert pickle.loads(pickle.dumps(info)) == info
    assert copy.copy(info) == info


def test_a_request_built_by_hand_takes_what_torch_gives() -> None:
    import torch

    tensor = torch.zeros(4, 2, dtype=torch.float8_e4m3fn)
    request = BroadcastWeightUpdateRequest(names=("w",), dtypes=(tensor.dtype,), shapes=(tensor.shape,))  # type: ignore[arg-type]
    assert request == BroadcastWeightUpdateRequest(["w"], ["float8_e4m3fn"], [[4, 2]])
    assert type(request.shapes[0]) is list


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BroadcastWeightUpdateRequest(["a"], ["bf17"], [[1]]), ["bf17"]),
        (lambda: BroadcastWeightUpdateRequest(["a"], ["bfloat16"], [[-1]]), ["shapes[0]"]),
        (lambda: BroadcastWeightUpdateRequest(["a"], ["bfloat16"], [[1], [2]]), ["shapes", "2"]),
        (lambda: BroadcastWeightUpdateRequest(["a"], [None], [[1]]), ["dtypes[0]"]),  # type: ignore[list-item]
        (lambda: LoraDiskWeightUpdateRequest("adapters"), ["adapters", "absolute"]),
        (lambda: PullWeightUpdateRequest(Identity("a/b", 0, 0), "h:1"), ["a/b"]),
        (lambda: PullWeightUpdateRequest(Identity("a", -1, 0), "h:1"), ["identity.incarnation"]),
        (lambda: PullWeightUpdateRequest(Identity("a", 0, 0), "h:1", "most"), ["most"]),  # type: ignore[arg-type]
        (lambda: StoreWeightUpdateRequest("ftp://x", Identity("a", 0, 0)), ['"ftp" is not a store URL']),
        (lambda: TorchDistributedWeightSyncInfo("10.0.0.7", 0, 3), ["master_port", "0"]),
        (lambda: TorchDistributedWeightSyncInfo("10.0.0.7", 1, 1), ["world_size", "1"]),
        (lambda: TorchDistributedWeightSyncInfo("0.0.0.0", 1, 2), ["0.0.0.0", "advertise_host"]),
        (lambda: EngineShape(tp=-1)._counts(), ["tp", "-1"]),
        (lambda: engine_rank(2, 1, EngineShape(tp=2)), ["local rank 2"]),
        (lambda: parse_request({"names": ["a"], "dtypes": ["bfloat16"], "shape": [[1]]}), ["shape"]),
        (lambda: parse_request({"type": "broadcast"}), ["names", "missing"]),
        (lambda: parse_request(b"\xff"), ["not JSON"]),
    ],
)
def test_a_refusal_names_the_field_and_the_value(make: Any, words: list[str]) -> None:
    with pytest.raises(WindlassInvalid) as refused:
        make()
    for word in words:
        assert word in str(refused.value)


def test_a_handle_that_would_have_to_be_pickled_is_refused() -> None:
    def rebuild() -> None: ...

    columns = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]}
    legacy = {**columns, "extras": [{"ipc_handles": {GPU: (rebuild, (0, 1))}}]}
    with pytest.raises(WindlassInvalid, match=r"not plain data.*function"):
        parse_request(legacy)
    # What pickle makes of such a handle is no better.
    legacy["extras"] = [{"ipc_handles": {GPU: ["rebuild_cuda_tensor", [0, 1]]}}]
    with pytest.raises(WindlassInvalid) as refused:
        parse_request(legacy)
    assert refused.value.name == "pickled_handle"


def test_a_handle_keyed_by_device_number_is_refused() -> None:
    handles = [{0: next(iter(handle(8).values()))}]
    with pytest.raises(WindlassInvalid) as refused:
        CudaIpcWeightUpdateRequest(["a"], ["bfloat16"], [[4]], handles)  # type: ignore[arg-type]
    assert refused.value.name == "bad_gpu_uuid"


def test_legacy_sizes_count_elements_and_the_layout_counts_both() -> None:
    packed = every_request()[2]
    assert isinstance(packed, PackedCudaIpcWeightUpdateRequest)
    assert packed.to_legacy_dict()["sizes"] == [6, 4]
    assert [(t.offset, t.bytes, t.numel) for t in packed.layout] == [(0, 12, 6), (12, 8, 4)]


def test_a_request_of_another_class_is_refused_by_from_dict() -> None:
    with pytest.raises(WindlassInvalid, match="lora_disk.*BroadcastWeightUpdateRequest"):
        BroadcastWeightUpdateRequest.from_dict({"type": "lora_disk", "lora_disk_path": "/a"})
    with pytest.raises(WindlassInvalid, match="empty.*TorchDistributed"):
        TorchDistributedWeightSyncInfo.from_dict({"type": "empty"})


def test_the_token_of_an_agent_is_in_its_json_and_in_no_repr() -> None:
    info = every_info()[2]
    assert "hunter2" in info.to_json()
    assert "hunter2" not in repr(info)
    with pytest.raises(WindlassInvalid) as refused:
        AgentWeightSyncInfo([], "hunter2", "actor")
    assert "hunter2" not in str(refused.value)


def test_the_older_names_of_sync_infos_are_the_same_classes() -> None:
    assert windlass.transfer.sync_info.WeightSyncInitInfo is windlass.transfer.sync_info.WeightSyncInfo
    assert windlass.transfer.sync_info.TorchDistributedWeightSyncInitInfo is TorchDistributedWeightSyncInfo
    assert windlass.transfer.sync_info.EmptyWeightSyncInitInfo is EmptyWeightSyncInfo


def test_a_request_that_is_sent_again_is_written_as_a_new_one_would_be() -> None:
    gpu = "GPU-00000000-0000-0000-0000-00000000000a"
    first = PackedCudaIpcWeightUpdateRequest(
        ["a", "b"],
        ["bfloat16", "float32"],
        [[3], [2]],
        packed_layout(["a", "b"], ["bfloat16", "float32"], [[3], [2]]),
        {gpu: IpcHandle("vmm_fd", b"one", 16)},
    )
    for words in (b"two", b"three"):
        handles = {gpu: IpcHandle("vmm_fd", words, 16)}
        fresh = PackedCudaIpcWeightUpdateRequest(
            first.names, first.dtypes, first.shapes, first.layout, handles
        )
        again = first.again(ipc_handles=handles)
        assert again == fresh != first
        for _ in range(2):
            assert again.to_json() == fresh.to_json()
            assert again.to_dict() == fresh.to_dict()
        assert parse_request(again.to_json()) == fresh
        assert again.again(ipc_handles=first.ipc_handles).to_json() == first.to_json()
