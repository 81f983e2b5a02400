"""Python reads the golden files with the same results as Rust, in the same words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vectors import cases, keys
from windlass import WindlassError, _windlass
from windlass.transfer.request import WeightUpdateRequest, parse_request
from windlass.transfer.sync_info import EngineShape, WeightSyncInfo, rank_offsets, world_size


def each(directory: str, least: int) -> pytest.MarkDecorator:
    found = cases(directory)
    # A directory that has lost its files would make a test of nothing.
    assert len(found) >= least, f"only {len(found)} cases in {directory}"
    return pytest.mark.parametrize("case", [case for _, case in found], ids=[name for name, _ in found])


@each("chunks", 12)
def test_python_chunks_end_where_the_golden_vectors_say(case: dict[str, Any]) -> None:
    assert keys(case) == ["config", "items", "chunks"]
    config = case["config"]
    chunker = _windlass.Chunker(
        group_by_module=config.get("group_by_module", False),
        threshold_bytes=config.get("batch_threshold_bytes"),
    )
    payloads = [object() for _ in case["items"]]
    chunks = []
    for (name, dtype, shape), payload in zip(case["items"], payloads, strict=True):
        chunks += chunker.push(name, dtype, shape, payload)
    chunks += chunker.finish()
    plain = [
        {
            "names": [part[0] for part in parts],
            "module_name": module,
            "total_size_bytes": sum(_windlass.extent(part[1], part[2])[1] for part in parts),
        }
        for module, parts in chunks
    ]
    assert plain == case["chunks"]
    parts = [part for _, parts in chunks for part in parts]
    assert [(name, dtype, shape) for name, dtype, shape, _ in parts] == [
        (name, _windlass.dtype_name(dtype), shape) for name, dtype, shape in case["items"]
    ]
    assert all(part[3] is payload for part, payload in zip(parts, payloads, strict=True))


@each("requests", 80)
def test_python_requests_are_what_the_golden_vectors_say(case: dict[str, Any]) -> None:
    if "error" in case:
        assert keys(case) == ["input", "error"]
        for data in (case["input"], json.dumps(case["input"]), json.dumps(case["input"]).encode()):
            with pytest.raises(WindlassError) as refused:
                parse_request(data)
            assert refused.value.name == case["error"], refused.value
        return
    request = parse_request(case["input"])
    typed = case.get("typed", case["input"])
    # The text is compared too: names and order of fields are part of the form.
    assert json.dumps(request.to_dict()) == json.dumps(typed)
    assert parse_request(typed) == request == parse_request(request.to_json())
    assert WeightUpdateRequest.from_dict(typed) == type(request).from_dict(typed) == request
    # Made by hand, through the constructor, it is the same request.
    assert type(request)(**{key: getattr(request, key) for key in typed if key != "type"}) == request
    if "legacy_error" in case:
        with pytest.raises(WindlassError) as refused:
            request.to_legacy_dict()
        assert refused.value.name == case["legacy_error"]
        return
    assert keys(case)[-1] == "legacy"
    legacy = request.to_legacy_dicts()
    assert json.dumps(legacy) == json.dumps(case["legacy"])
    if len(legacy) == 1:
        assert parse_request(request.to_legacy_dict()) == request


@each("sync_info", 20)
def test_python_sync_infos_and_ranks_are_what_the_golden_vectors_say(case: dict[str, Any]) -> None:
    if "engines" in case:
        engines = [EngineShape(**engine) for engine in case["engines"]]
        if "error" in case:
            for compute in (world_size, rank_offsets):
                with pytest.raises(WindlassError) as refused:
                    compute(engines)
                assert refused.value.name == case["error"]
        else:
            assert world_size(engines) == case["world_size"]
            assert rank_offsets(engines) == case["rank_offsets"]
    elif "error" in case:
        with pytest.raises(WindlassError) as refused:
            WeightSyncInfo.from_dict(case["input"])
        assert refused.value.name == case["error"], refused.value
    else:
        info = WeightSyncInfo.from_dict(case["input"])
        typed = case.get("typed", case["input"])
        assert json.dumps(info.to_dict()) == json.dumps(typed)
        assert WeightSyncInfo.from_json(info.to_json()) == type(info).from_dict(typed) == info
        assert type(info)(**{key: value for key, value in typed.items() if key != "type"}) == info
