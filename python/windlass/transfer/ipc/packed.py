"""Packed IPC: all parameters of a chunk in one buffer, with one handle for each device.

Owns: :class:`PackedCudaIpcTransferStrategy`. How it moves is :mod:`windlass.transfer.ipc.strategy`; what differs is the
request: one handle and a layout of byte offsets (:func:`windlass.transfer.request.packed_layout`) instead of a handle per parameter. Only
what has to be is packed: parameters that lie where they lay in the sync before are read there
(:mod:`windlass.transfer.ipc.lending`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from windlass.errors import WindlassInvalid
from windlass.transfer.ipc.lending import Look
from windlass.transfer.ipc.strategy import IpcReceiver, IpcSender, IpcStrategy, Rows
from windlass.transfer.request import IpcHandle, PackedCudaIpcWeightUpdateRequest, PackedTensor
from windlass.transfer.sync_info import EmptyWeightSyncInfo, info_for
from windlass.transfer.trainer import TrainerRanks

if TYPE_CHECKING:
    import torch

    from windlass.extract.chunk import WeightChunk
    from windlass.transfer.request import WeightUpdateRequest
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = [
    "PackedCudaIpcTransferReceiver",
    "PackedCudaIpcTransferSender",
    "PackedCudaIpcTransferStrategy",
]


class PackedCudaIpcTransferStrategy(IpcStrategy):
    """One handle for each bucket.

    >>> PackedCudaIpcTransferStrategy({"weight_transfer_threshold_cuda_ipc_GB": 0.5}).get_request_type().type_name
    'packed_cuda_ipc'
    """

    def create_sender(self, sync_info: WeightSyncInfo) -> PackedCudaIpcTransferSender:
        """Every training rank makes one, at the same time."""
        info_for("IPC", sync_info, EmptyWeightSyncInfo)
        return PackedCudaIpcTransferSender(TrainerRanks(), self._arena(), self.settings.timeout)

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> PackedCudaIpcTransferReceiver:
        """Opens handles of this process's device."""
        info_for("IPC", sync_info, EmptyWeightSyncInfo)
        return PackedCudaIpcTransferReceiver(self._opener())

    def get_request_type(self) -> type[PackedCudaIpcWeightUpdateRequest]:
        """Packed IPC requests."""
        return PackedCudaIpcWeightUpdateRequest


class PackedCudaIpcTransferSender(IpcSender):
    """One handle for each bucket."""

    def _handles(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look
    ) -> list[IpcHandle]:
        return [self._arena.whole(chunk, layout, total, look)]

    def _request(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], handles: Sequence[Mapping[str, IpcHandle]]
    ) -> PackedCudaIpcWeightUpdateRequest:
        return PackedCudaIpcWeightUpdateRequest(
            chunk.names, chunk.dtypes, chunk.shapes, list(layout), dict(handles[0])
        )

    def _again(
        self, request: WeightUpdateRequest, handles: Sequence[Mapping[str, IpcHandle]]
    ) -> WeightUpdateRequest:
        return request.again(ipc_handles=handles[0])


class PackedCudaIpcTransferReceiver(IpcReceiver):
    """Opens one handle, and takes the parameters out of it by the layout."""

    request_type = PackedCudaIpcWeightUpdateRequest

    def _checked(self, request: WeightUpdateRequest) -> PackedCudaIpcWeightUpdateRequest:
        if not isinstance(request, PackedCudaIpcWeightUpdateRequest):
            raise WindlassInvalid(
                f"the request is {type(request).__name__}: this engine opens packed buckets"
            )
        return request

    def _rows(self, request: WeightUpdateRequest) -> Rows:
        request = self._checked(request)
        handle = self._own(request.ipc_handles, "the bucket")
        layout = request.layout
        places = [place.offset for place in layout], [place.bytes for place in layout]
        return Rows(request.names, request.dtypes, request.shapes, handle, *places)

    def _opened(self, request: WeightUpdateRequest) -> Iterator[tuple[str, torch.Tensor, IpcHandle]]:
        from windlass.receive.memory import tensor_at

        request = self._checked(request)
        handle = self._own(request.ipc_handles, "the bucket")
        parts = self._opener.parts(handle, request.layout)
        rows = zip(request.names, request.dtypes, request.shapes, request.layout, parts, strict=True)
        for name, dtype, shape, place, data in rows:
            yield name, tensor_at(data, 0, place.bytes, dtype, shape), handle
