"""What each rank of the policy calls once, in a thread."""

from typing import Any

from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory


class Client:
    """Four methods, for all servers."""

    def __init__(self, urls: list[str]) -> None:
        self._clients = [HTTPVLLMWeightSyncClient(url) for url in urls]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for client in self._clients:
            client.init_weight_transfer_engine(init_info)


def build_trainer_engine(
    *,
    ie_cfg: Any,
    colocate_all: bool,
    rank: int,
    inference_world_size: int,
    source_factory: Any,
    server_urls: list[str],
    data_parallel_size: int,
    base_model_path: str | None = None,
) -> Any:
    import torch

    from skyrl.backends.skyrl_train.weight_sync import get_transfer_strategy

    backend = get_transfer_strategy(ie_cfg.weight_sync_backend, colocate_all)
    dtype = getattr(torch, ie_cfg.model_dtype)
    source = source_factory(dtype, backend)
    info, _ = _build_sender_init_info(
        backend=backend,
        ie_cfg=ie_cfg,
        rank=rank,
        inference_world_size=inference_world_size,
        dtype=dtype,
        server_urls=server_urls,
        data_parallel_size=data_parallel_size,
        base_model_path=base_model_path,
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=Client(server_urls), source=source)


def _build_sender_init_info(*, backend: str, **_: Any) -> tuple[Any, Any]:
    raise ValueError(f"Unknown weight sync backend {backend!r}.")


def maybe_set_reset_prefix_cache(engine: Any, reset: bool) -> None:
    setter = getattr(engine, "skyrl_set_reset_prefix_cache", None)
    if setter is not None:
        setter(reset)
