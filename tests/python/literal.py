"""What the interface design and its migration plan have a trainer and an engine type, as two processes.

    python literal.py train design | python literal.py serve design

Standard output of the one is the RPC to the other, a line of JSON for each call.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from outside import Kept, digest, say
from windlass.compat import (
    BroadcastTransferStrategy,
    BroadcastWeightTransferReceiver,
    BroadcastWeightTransferSender,
    BroadcastWeightUpdateRequest,
    FSDPWeightExtractor,
    WeightChunk,
    WeightExtractor,
    init_custom_process_group,
)
from windlass.transfer.sync_info import EngineShape, WeightSyncInfo


class DictConfig(Mapping[str, Any]):
    """A configuration as OmegaConf gives it: keys are attributes too, and a value that is missing raises when read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if value == "???":
            raise RuntimeError(f"missing mandatory value: {key}")
        return DictConfig(value) if isinstance(value, dict) else value

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return self[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sequential(torch.nn.Linear(3, 5)))


def trainer_document(**generator: Any) -> DictConfig:
    """A trainer's whole document: what is ours in it, and much that is not."""
    return DictConfig(
        {
            "data": {"train_data": "???", "val_data": None},
            "trainer": {
                "placement": {"colocate_all": False, "colocate_policy_ref": True, "policy_num_nodes": 1},
                "strategy": "fsdp2",
                "policy": {
                    "model": {
                        "path": "Qwen/Qwen3-8B",
                        "lora": {"rank": 0, "alpha": 16, "dropout": 0, "target_modules": "all-linear"},
                    },
                    "optimizer_config": {"lr": 1e-6, "betas": [0.9, 0.999]},
                },
                "algorithm": {"advantage_estimator": "grpo", "kl_ctrl": {"type": "fixed"}},
                "epochs": 1,
                "ckpt_path": "???",
            },
            "generator": {
                "model_name": "${trainer.policy.model.path}",
                "backend": "vllm",
                "weight_sync_backend": "gloo",
                "weight_transfer_threshold_cuda_ipc_GB": 1.0,
                "override_existing_update_group": "auto",
                "inference_engine_tensor_parallel_size": 1,
                "inference_engine_expert_parallel_size": 1,
                "num_inference_engines": 1,
                "run_engines_locally": True,
                "master_addr": "127.0.0.1",
                "n_samples_per_prompt": 5,
                "enable_chunked_prefill": True,
                "sampling_params": {"temperature": 1.0, "max_generate_length": 1024},
                "engine_init_kwargs": {},
                "remote_inference_engine_urls": ["127.0.0.1:8001"],
                **generator,
            },
            "environment": {"env_class": "gsm8k"},
        }
    )


class Engines:
    """The engines behind standard output."""

    shapes = (EngineShape(),)

    async def init_weight_transfer(self, sync_info: WeightSyncInfo) -> object:
        raise AssertionError("the controller tells them")

    async def update_weights(self, request: Any) -> object:
        say(request.to_dict())
        return None


async def train_design() -> None:
    cfg, inference_client = trainer_document(), Engines()
    strategy = BroadcastTransferStrategy()
    sync_info = await strategy.create_sync_info(cfg, inference_client)
    transfer_sender = await strategy.create_sender(cfg, inference_client, sync_info)
    # It is returned to the controller, which tells the engines: after the sender was made.
    say(sync_info.to_dict())
    extractor = FSDPWeightExtractor(cfg)
    weight_chunks_iterator = extractor.extract_weights(model(), torch.bfloat16)
    await transfer_sender.send_chunks(weight_chunks_iterator, inference_client)
    transfer_sender.close()


async def serve_design() -> None:
    cfg, strategy, loader = trainer_document(), BroadcastTransferStrategy(), Kept()
    sync_info = WeightSyncInfo.from_json(sys.stdin.readline())
    transfer_receiver = await strategy.create_receiver(cfg, sync_info, 1)
    for line in sys.stdin:
        request = transfer_receiver.parse_request(json.loads(line))
        assert isinstance(request, BroadcastWeightUpdateRequest)
        await transfer_receiver.receive_and_load_weights(request, loader)
    transfer_receiver.close()
    say({"loads": loader.loads, "tensors": digest(loader.tensors.items())})


class PlanExtractor(WeightExtractor):
    """As the plan writes one: chunks of one parameter, and flags."""

    def __init__(self, cfg: Any, model: Any) -> None:
        super().__init__(cfg, model)
        self._group_by_module = cfg.generator.get("use_flashrl", False)

    def _extract_raw_weights(self, model: Any) -> Iterator[WeightChunk]:  # type: ignore[override]
        for name, param in model.named_parameters():
            full_tensor = param.detach().to(torch.bfloat16)
            yield WeightChunk(
                names=[name],
                dtypes=[str(full_tensor.dtype)],
                shapes=[list(full_tensor.shape)],
                tensors=[full_tensor],
                total_size_bytes=full_tensor.numel() * full_tensor.element_size(),
            )


async def train_plan() -> None:
    cfg = trainer_document(use_flashrl=True)
    # Bound and never listening, so that the port is nobody else's until the group is there.
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        port = keeper.getsockname()[1]
        where = {
            "master_addr": "127.0.0.1",
            "master_port": port,
            "world_size": 2,
            "group_name": "g",
            "backend": "gloo",
        }
        strategy = BroadcastTransferStrategy()
        say((await strategy.create_init_info(**where)).to_dict())
        group = await asyncio.to_thread(lambda: init_custom_process_group(rank=0, **where))
    sender = await strategy.create_sender(process_group=group)
    assert isinstance(sender, BroadcastWeightTransferSender)
    extractor = PlanExtractor(cfg, model=model())
    await sender.send_chunks(extractor.extract_weights(), Engines())
    sender.close()


async def serve_plan() -> None:
    info: Any = WeightSyncInfo.from_json(sys.stdin.readline())
    loader = Kept()
    receiver = BroadcastWeightTransferReceiver(
        init_custom_process_group(
            info.master_addr, info.master_port, info.world_size, 1, info.group_name, info.backend
        )
    )
    for line in sys.stdin:
        await receiver.receive_and_load_weights(receiver.parse_request(json.loads(line)), loader)
    receiver.close()
    say({"loads": loader.loads, "tensors": digest(loader.tensors.items())})


if __name__ == "__main__":
    asyncio.run(globals()["_".join(sys.argv[1:3])]())
