"""Extractors in one process: names, casts, chunks, memory, and who decides (C11-C16)."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from models import Policy, differences, policy, reference, same
from windlass.errors import WindlassBug, WindlassInvalid
from windlass.extract import ModuleWeightExtractor, Source, WeightExtractor, extractor_for, settings

MIB = 1 << 20


def collected(extractor: WeightExtractor, model: Any, dtype: Any = None) -> dict[str, Tensor]:
    return {name: tensor for chunk in extractor.extract_weights(model, dtype) for name, tensor in chunk}


@dataclass
class View:
    """A view as :mod:`windlass.names` makes them."""

    box: tuple[tuple[int, int], ...]
    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    dims: tuple[int, ...]


class Counting(ModuleWeightExtractor):
    """Gathers into fresh memory, and tells what has been gathered and what is still alive."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gathered: list[str] = []
        self.alive: dict[int, int] = {}
        self.peak = 0

    def sources(self, model: torch.nn.Module) -> Iterator[Source]:
        for source in super().sources(model):
            yield Source(source.name, source.dtype, source.shape, lambda source=source: self._fresh(source))

    def _fresh(self, source: Source) -> Tensor:
        fresh = source.gather().clone()
        self.gathered.append(source.name)
        storage = fresh.untyped_storage()
        key = len(self.gathered)
        self.alive[key] = storage.nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        weakref.finalize(storage, self.alive.pop, key)
        return fresh


class Unannounced(Counting):
    """The same without metadata, as a subclass of somebody else's that has only the one hook."""

    def _extract_metadata(self, model: Any) -> None:
        return None


def stack(layers: int = 6, width: int = 256) -> torch.nn.Module:
    """Layers of one size: two matrices of 256 KiB each."""
    return torch.nn.Sequential(
        *(
            torch.nn.ModuleDict(
                {"a": torch.nn.Linear(width, width, False), "b": torch.nn.Linear(width, width, False)}
            )
            for _ in range(layers)
        )
    )


def test_a_plain_module_comes_out_bit_by_bit_and_without_a_copy() -> None:
    model = policy()
    got = collected(ModuleWeightExtractor(), model)
    assert differences(got, reference(model)) == []
    assert all(got[name].data_ptr() == value.data_ptr() for name, value in model.named_parameters())
    assert not any(tensor.requires_grad for tensor in got.values())


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "torch.float64", "F8_E4M3", "float8_e5m2"])
def test_casts_while_extracting_are_those_of_torch(dtype: Any) -> None:
    model = policy()
    assert differences(collected(ModuleWeightExtractor(), model, dtype), reference(model, dtype)) == []


def test_dtypes_of_single_tensors_come_before_the_generator_dtype() -> None:
    model = policy()
    extractor = ModuleWeightExtractor(
        buffers=True, dtypes={"layers.1.norm.bias": torch.float16, "*.norm.*": "float32", "scale": "float64"}
    )
    got = collected(extractor, model, "bfloat16")
    assert got["layers.0.norm.weight"].dtype == torch.float32
    assert got["layers.1.norm.bias"].dtype == torch.float16
    assert got["scale"].dtype == torch.float64
    assert got["head.weight"].dtype == torch.bfloat16
    assert got["steps"].dtype == torch.int64, "a counter is not cast"


def test_dtypes_of_a_checkpoint_come_before_the_generator_dtype(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    model = policy()
    stored = reference(model, "bfloat16") | {"layers.0.norm.weight": model.layers[0].norm.weight.detach()}
    save_file(stored, tmp_path / "model.safetensors")
    got = collected(ModuleWeightExtractor(checkpoint=tmp_path), model, "float16")
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        name: t.dtype for name, t in stored.items()
    }
    assert differences(got, stored) == []


def test_persistent_buffers_are_there_when_asked_for() -> None:
    assert collected(ModuleWeightExtractor(buffers=True), policy()).keys() - reference(policy()).keys() == {
        "steps"
    }


def test_a_tied_weight_and_a_frozen_parameter_come_out_once() -> None:
    model = policy()
    model.head.weight = model.embed.weight
    names = [name for chunk in ModuleWeightExtractor().extract_weights(model) for name in chunk.names]
    assert len(names) == len(set(names))
    assert "embed.weight" in names and "head.weight" not in names and "scale" in names


def test_a_compiled_module_comes_out_under_the_names_of_the_plain_one() -> None:
    model = policy()
    compiled = torch.compile(model, backend="eager")
    assert differences(collected(extractor_for(compiled), compiled), reference(model)) == []


def test_grouping_keeps_a_module_together_and_names_it() -> None:
    chunks = list(ModuleWeightExtractor(group_by_module=True).extract_weights(policy()))
    attention = next(chunk for chunk in chunks if chunk.module_name == "layers.0.attn")
    assert attention.names == [
        f"layers.0.attn.{name}" for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight")
    ]


def test_batches_are_flushed_before_they_exceed_the_threshold() -> None:
    quarter = 256 * 256 * 4
    extractor = ModuleWeightExtractor(threshold_gb=3.5 * quarter / (1 << 30))
    sizes = [chunk.total_size_bytes // quarter for chunk in extractor.extract_weights(stack())]
    assert sizes == [3, 3, 3, 3]
    grouped = ModuleWeightExtractor(threshold_gb=3.5 * quarter / (1 << 30), group_by_module=True)
    assert [chunk.total_size_bytes // quarter for chunk in grouped.extract_weights(stack())] == [2] * 6


def test_a_threshold_counts_bytes_after_the_cast() -> None:
    quarter = 256 * 256 * 4
    extractor = ModuleWeightExtractor(threshold_gb=2 * quarter / (1 << 30))
    assert [len(chunk) for chunk in extractor.extract_weights(stack(), "bfloat16")] == [4, 4, 4]


def test_a_subclass_decides_whether_to_group_and_to_batch() -> None:
    class Whole(ModuleWeightExtractor):
        def _should_group_by_module(self) -> bool:
            return True

        def _should_batch_by_threshold(self) -> bool:
            return False

    chunks = list(Whole(threshold_gb=1.0).extract_weights(stack()))
    assert [chunk.module_name for chunk in chunks] == [str(layer) for layer in range(6)]


def test_the_one_hook_is_enough_for_an_extractor_of_ones_own() -> None:
    class Own(WeightExtractor):
        def _extract_raw_weights(self, model: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            yield from model.items()

    weights = {f"m.{layer}.{part}.w": torch.randn(4) for layer in range(3) for part in "ab"}
    chunks = list(Own(group_by_module=True).extract_weights(weights))
    assert [chunk.module_name for chunk in chunks] == ["m.0", "m.1", "m.2"]
    assert differences({name: tensor for chunk in chunks for name, tensor in chunk}, weights) == []


@pytest.mark.parametrize("options", [{}, {"group_by_module": True}, {"threshold_gb": 1.2 / 1024}])
def test_announced_and_unannounced_weights_make_the_same_chunks(options: dict[str, Any]) -> None:
    def shape(extractor: WeightExtractor) -> list[tuple[str | None, list[str]]]:
        return [(chunk.module_name, chunk.names) for chunk in extractor.extract_weights(stack(), "bfloat16")]

    assert shape(Counting(**options)) == shape(Unannounced(**options))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"group_by_module": True}, {"threshold_gb": 1.2 / 1024}])
def test_never_more_than_one_chunk_is_alive(options: dict[str, Any], dtype: str | None) -> None:
    extractor = Counting(**options)
    model = stack(layers=8)
    largest = 0
    for chunk in extractor.extract_weights(model, dtype):
        largest = max(largest, chunk.total_size_bytes)
        del chunk
        assert sum(extractor.alive.values()) == 0, "the extractor holds on to what it has yielded"
    # With a cast the gathered original of one tensor is alive next to the chunk of the cast ones, and no more.
    assert extractor.peak <= (largest if dtype is None else 256 * 256 * 4)
    assert len(extractor.gathered) == 16


def test_without_metadata_one_weight_more_is_alive_at_most() -> None:
    extractor = Unannounced(group_by_module=True)
    largest = 0
    for chunk in extractor.extract_weights(stack(layers=8)):
        largest = max(largest, chunk.total_size_bytes)
        del chunk
    assert extractor.peak <= largest + 256 * 256 * 4


def memory() -> int:
    """Bytes of this process that are its own, and no file's: code is read in and dropped as the machine likes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_the_memory_of_the_process_does_not_grow_with_the_model() -> None:
    # Counted from outside: what is cast is not seen by the extractor's own count.
    model = stack(layers=24, width=1024)
    extractor = ModuleWeightExtractor(threshold_gb=16 / 1024)
    before = memory()
    total = grown = 0
    for chunk in extractor.extract_weights(model, "float64"):
        total += chunk.total_size_bytes
        grown = max(grown, memory() - before)
        del chunk
    assert total == 48 * 8 * MIB
    # The allocator keeps some of what it gets back; chunks that were kept would be four times as much.
    assert grown < 96 * MIB, f"{grown / MIB:.0f} MiB for chunks of 16 MiB"
    kept = list(extractor.extract_weights(model, "float64"))
    assert memory() - before > 300 * MIB, "this measure sees chunks that are kept"
    del kept


def test_a_consumer_that_stops_early_has_gathered_no_more_than_it_took() -> None:
    extractor = Counting(group_by_module=True)
    chunks = extractor.extract_weights(stack())
    assert extractor.gathered == []
    next(chunks)
    assert extractor.gathered == ["0.a.weight", "0.b.weight"]
    next(chunks)
    chunks.close()
    assert len(extractor.gathered) == 4 and extractor.alive == {}


def test_the_async_wrapper_gives_the_same_chunks_and_lets_the_loop_run() -> None:
    model = policy()

    async def extract() -> tuple[dict[str, Tensor], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        got = {}
        async for chunk in ModuleWeightExtractor().aextract_weights(model, "bfloat16"):
            got.update(chunk)
        ticker.cancel()
        return got, ticks

    got, ticks = asyncio.run(extract())
    assert differences(got, reference(model, "bfloat16")) == []
    assert ticks > 0


def test_an_async_consumer_that_stops_early_leaves_no_thread_and_no_weights() -> None:
    import threading

    extractor = Counting(group_by_module=True)

    async def extract() -> None:
        async with contextlib.aclosing(extractor.aextract_weights(stack())) as chunks:
            async for chunk in chunks:
                del chunk
                assert extractor.alive == {}
                break

    asyncio.run(extract())
    assert len(extractor.gathered) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("windlass-extract")]


def test_an_error_while_gathering_reaches_the_async_consumer() -> None:
    class Broken(ModuleWeightExtractor):
        def _extract_raw_weights(self, model: Any) -> Iterator[tuple[str, Tensor]]:
            raise ConnectionError("rank 3 is gone")

    async def extract() -> None:
        async for _ in Broken().aextract_weights(policy()):
            pass

    with pytest.raises(ConnectionError, match="rank 3"):
        asyncio.run(extract())


class Fused:
    """Experts in one parameter, split; two halves in one tensor, merged; one name dropped; the rest as it is."""

    def views(self, name: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        if name == "experts":
            count, rows, width = shape
            half = rows // 2
            return tuple(
                View(
                    ((e, e + 1), (start, start + half), (0, width)),
                    f"experts.{e}.{part}",
                    (width, half),
                    (0, 0),
                    (2, 1),
                )
                for e in range(count)
                for start, part in ((0, "gate"), (half, "up"))
            )
        if name in ("left", "right"):
            box = tuple((0, size) for size in shape)
            return (
                View(box, "both", (shape[0], 2 * shape[1]), (0, 0 if name == "left" else shape[1]), (0, 1)),
            )
        if name == "value_head":
            return ()
        return (
            View(
                tuple((0, size) for size in shape), name, shape, (0,) * len(shape), tuple(range(len(shape)))
            ),
        )


class Fusing(torch.nn.Module):
    def __init__(self, right: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left = torch.nn.Parameter(torch.randn(4, 3))
        self.experts = torch.nn.Parameter(torch.randn(2, 6, 5))
        self.scalar = torch.nn.Parameter(torch.tensor(2.0))
        self.value_head = torch.nn.Parameter(torch.randn(9))
        if right:
            self.right = torch.nn.Parameter(torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_split_and_merge_parameters(dtype: torch.dtype) -> None:
    model = Fusing()
    want = {
        f"experts.{e}.{part}": model.experts[e, rows].T.to(dtype)
        for e in range(2)
        for part, rows in (("gate", slice(0, 3)), ("up", slice(3, 6)))
    }
    want |= {"both": torch.cat([model.left, model.right], 1).to(dtype), "scalar": model.scalar.to(dtype)}
    extractor = Counting(names=Fused())
    got = collected(extractor, model, dtype)
    assert differences(got, want) == []
    assert "value_head" not in extractor.gathered, "what is not in the checkpoint is not even gathered"


def test_a_split_is_a_view_and_no_copy() -> None:
    model = Fusing()
    got = collected(ModuleWeightExtractor(names=Fused()), model)
    assert got["experts.1.up"].untyped_storage().data_ptr() == model.experts.untyped_storage().data_ptr()
    assert same(got["experts.1.up"], model.experts.detach()[1, 3:].T)


def test_a_tensor_that_stays_incomplete_is_named() -> None:
    with pytest.raises(WindlassInvalid, match="'both' lacks 12 of its elements"):
        collected(ModuleWeightExtractor(names=Fused()), Fusing(right=False))


def test_weights_that_differ_from_what_was_announced_are_refused() -> None:
    class Liar(ModuleWeightExtractor):
        def _extract_raw_weights(self, model: Any) -> Iterator[tuple[str, Tensor]]:
            yield "another", torch.zeros(1)

    with pytest.raises(WindlassBug, match=r"'scale' was announced.*'another' came"):
        collected(Liar(), policy())


def test_a_module_on_the_meta_device_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Policy()
    with pytest.raises(WindlassInvalid, match=r"'embed\.weight'|'scale'.*meta"):
        collected(ModuleWeightExtractor(), model)


def test_a_sparse_parameter_is_refused_by_name() -> None:
    model = torch.nn.Module()
    model.table = torch.nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(WindlassInvalid, match="'table' is torch.sparse_coo"):
        collected(ModuleWeightExtractor(), model)


def test_settings_follow_flashrl_and_colocation() -> None:
    colocated = {
        "generator": {"weight_sync_backend": "nccl", "weight_transfer_threshold_cuda_ipc_GB": 0.5},
        "trainer": {"placement": {"colocate_all": True}},
    }
    assert settings(colocated) == {"group_by_module": True, "threshold_gb": 0.5}
    assert settings({**colocated, "trainer": {}}) == {"group_by_module": False, "threshold_gb": None}
    assert settings({"generator": {"use_flashrl": True}}) == {"group_by_module": True, "threshold_gb": None}
    assert ModuleWeightExtractor(**settings(colocated)).threshold_bytes == 1 << 29


def test_settings_are_read_dotted_as_they_are_nested() -> None:
    dotted = {
        "generator.weight_sync_backend": "nccl",
        "generator.weight_transfer_threshold_cuda_ipc_GB": 0.5,
        "trainer.placement.colocate_all": True,
    }
    assert settings(dotted) == {"group_by_module": True, "threshold_gb": 0.5}
    assert settings({"generator.use_flashrl": True})["group_by_module"]


def test_the_model_dtype_of_a_document_is_what_weights_are_cast_to() -> None:
    options = settings({"generator.model_dtype": "bfloat16"})
    model = torch.nn.Linear(2, 3)
    assert {t.dtype for t in collected(ModuleWeightExtractor(**options), model).values()} == {torch.bfloat16}
    # What is asked for at the call comes first.
    chunks = list(ModuleWeightExtractor(**options).extract_weights(model, "float16"))
    assert {dtype for chunk in chunks for dtype in chunk.dtypes} == {"float16"}


def test_a_training_backend_of_another_extractor_is_refused() -> None:
    from windlass.extract import DeepSpeedWeightExtractor, FSDPWeightExtractor

    options = settings({"trainer": {"training_backend": "fsdp"}})
    FSDPWeightExtractor(**options)
    ModuleWeightExtractor(**options)
    with pytest.raises(WindlassInvalid, match="training_backend is 'fsdp', and DeepSpeedWeightExtractor"):
        DeepSpeedWeightExtractor(**options)


def test_a_subclass_decides_about_chunks_by_what_it_sets_on_itself() -> None:
    class Grouped(ModuleWeightExtractor):
        def __init__(self, value: Any, **options: Any) -> None:
            super().__init__(**options)
            self._group_by_module = value

    def sizes(extractor: Any) -> list[int]:
        return [len(chunk) for chunk in extractor.extract_weights(model)]

    model = policy()
    grouped, single = sizes(ModuleWeightExtractor(group_by_module=True)), sizes(ModuleWeightExtractor())
    assert grouped != single
    assert sizes(Grouped(True)) == grouped
    assert sizes(Grouped(False, group_by_module=True)) == single
    with pytest.raises(WindlassInvalid, match="_group_by_module is 1"):
        list(Grouped(1).extract_weights(model))
    # Of which size is then the documented default, which holds all of this model.
    batched = ModuleWeightExtractor()
    batched._batch_by_threshold = True  # type: ignore[method-assign, assignment]
    assert len(sizes(batched)) == 1
