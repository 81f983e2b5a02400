"""The names that windlass.skyrl meets in the main branch of SkyRL since September 2026, which no registry of Python packages has.

Not SkyRL: what these modules do is what tests/engines/skyrl/factory_policy.py needs to call vLLM's real factory in SkyRL's order. The
names and the order are those of NovaSky-AI/SkyRL 3deacde1; a release of it takes the place of this folder.
"""

_VLLM_RECEIVE_BACKENDS = {"nccl": "skyrl_nccl", "ipc": "skyrl_ipc"}


def get_transfer_strategy(weight_sync_backend: str, colocate_all: bool) -> str:
    return "ipc" if colocate_all else "nccl"


def get_vllm_receive_backend(weight_sync_backend: str, colocate_all: bool) -> str:
    return _VLLM_RECEIVE_BACKENDS[get_transfer_strategy(weight_sync_backend, colocate_all)]
