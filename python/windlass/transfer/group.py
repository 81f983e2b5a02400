"""The update group: training rank 0 and every rank of every engine, in one named process group.

Owns: making such a group, its deadlines, and its end. Called by the broadcast strategy on both sides. Must not: touch
the process groups that a trainer or an engine has for itself.

How ranks meet
--------------
Rank 0 has a ``TCPStore`` from the moment the sync info is made, so its port is bound until the group ends. Everybody
else connects to it. Keys have the prefixes that ``init_custom_process_group`` of SGLang, OpenRLHF and others gives
them (``<name>`` and ``<name>/``, then ``<device>/`` for the first device of the backend), so those meet ours.

The backends of torch are made directly and are not entered in its table of groups: a trainer whose default group is
bound to a device would otherwise have the new group *split* from its own, and a default group would be needed for a
collective at all.

Deadlines
---------
Joining and every broadcast have one. A group in which something failed is broken: what the others have received is not
known, so nothing more is sent on it. It is left and made anew.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassInvalid, WindlassPeerLost, WindlassTimeout, WindlassUnsupported

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store, TCPStore

    from windlass.transfer.sync_info import TorchDistributedWeightSyncInfo

__all__ = ["UpdateGroup", "node_address", "open_store"]

log = logging.getLogger("windlass")

#: How long the store may take to say who is missing.
ROLL_S = 2.0

#: The groups that this process is in, by name: a process has one place in each.
_joined: weakref.WeakValueDictionary[str, UpdateGroup] = weakref.WeakValueDictionary()
_joining = threading.Lock()


def node_address(setting: str = "master_addr") -> str:
    """The address under which other hosts reach this one: Ray's in a process of a Ray cluster, else that of the interface with the
    default route. Where there is none it is loopback, with a warning that names the ``setting`` to use instead.

    >>> import ipaddress
    >>> bool(ipaddress.ip_address(node_address()))
    True
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: connecting a datagram socket only chooses the interface.
            probe.connect((somewhere, 9))
            return str(probe.getsockname()[0])
    log.warning(
        "this host has no default route, so engines are told 127.0.0.1, which only processes on this host reach: "
        "set %s to the address of this host in the engines' network",
        setting,
    )
    return "127.0.0.1"


def open_store(address: str, timeout: float, port: int = 0) -> TCPStore:
    """The meeting point on this host, on a free port unless one is named, which stays bound while the store lives."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(
            address, port, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
    except RuntimeError as e:
        where = f"{address}:{port}" if port else address
        raise WindlassInvalid(
            f"no store can be opened on {where}: {e}",
            "master_addr must be an address or name of the host of training rank 0",
        ) from e


class UpdateGroup:
    """This process's place in an update group; joined when made.

    ``store`` is rank 0's own; the others connect to the address in ``info``. ``override`` leaves a group of the same
    name that this process is in; without it, that is an error.
    """

    def __init__(
        self,
        info: TorchDistributedWeightSyncInfo,
        rank: int,
        *,
        store: Store | None = None,
        timeout: float = 120.0,
        override: bool = False,
    ) -> None:
        if not 0 <= rank < info.world_size:
            raise WindlassInvalid(
                f"rank {rank} is none of the {info.world_size} ranks of group {info.group_name!r}",
                "the world is 1 + the ranks of all engines; check rank_offset and the shapes of the engines",
            )
        self._begin(info, rank)
        with _joining:
            standing = _joined.get(info.group_name)
            if standing is not None and not standing.closed:
                if not override:
                    raise WindlassInvalid(
                        f"this process has joined update group {info.group_name!r} as rank {standing.rank} already",
                        "close the sender or receiver that is in it, give the new group another group_name, or set "
                        "override_existing_update_group",
                    )
                standing.close()
            _joined[info.group_name] = self
        try:
            self._join(store, timeout)
        except BaseException:
            self.close()
            raise

    @classmethod
    def given(cls, process_group: dist.ProcessGroup | UpdateGroup) -> UpdateGroup:
        """A process group of torch's that somebody else has made and ends, with the trainer as its rank 0."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import ProcessGroup

        from windlass.transfer.sync_info import TorchDistributedWeightSyncInfo

        if isinstance(process_group, cls):
            return process_group
        if not isinstance(process_group, ProcessGroup):
            raise WindlassInvalid(
                f"the process group is a {type(process_group).__name__}: expected one of torch.distributed, or what "
                "init_custom_process_group gives"
            )
        backend = str(dist.get_backend(process_group))
        group = cls.__new__(cls)
        info = TorchDistributedWeightSyncInfo(
            "127.0.0.1",
            1,
            process_group.size(),
            process_group.group_name,
            backend,  # type: ignore[arg-type]
        )
        group._begin(info, process_group.rank())
        group._own = False
        group._backends = dict.fromkeys(_devices(backend), process_group)
        return group

    def _begin(self, info: TorchDistributedWeightSyncInfo, rank: int) -> None:
        self.info, self.rank = info, rank
        self._broken: str | None = None
        self._closed = False
        #: Whether it is ended when it is left.
        self._own = True
        self._store: Store | None = None
        self._backends: dict[str, Any] = {}

    @property
    def closed(self) -> bool:
        """Whether it was left."""
        return self._closed

    def _join(self, store: Store | None, timeout: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import PrefixStore

        info, until = self.info, time.monotonic() + timeout
        where = f"update group {info.group_name!r} at {info.master_addr}:{info.master_port}"
        try:
            if store is None:
                store = TCPStore(
                    info.master_addr, info.master_port, is_master=False, timeout=timedelta(seconds=timeout)
                )
            store.set_timeout(timedelta(seconds=timeout))
            if store.add(f"windlass/{info.group_name}/{self.rank}", 1) > 1:
                raise WindlassInvalid(
                    f"rank {self.rank} of {where} was joined before, by this or another process",
                    "give each engine its own rank_offset, and make new sync info to join again",
                )
            self._store = store
            # As others name it: once by the caller and once by torch, which also adds the device.
            named = PrefixStore(f"{info.group_name}/", PrefixStore(info.group_name, store))
            devices = _devices(info.backend)
            # One for all devices, as torch has it, under the name of the first.
            made = _backend(
                info,
                self.rank,
                PrefixStore(f"{devices[0]}/", named),
                timedelta(seconds=max(0.1, until - time.monotonic())),
            )
            self._backends = dict.fromkeys(devices, made)
        except RuntimeError as e:
            if isinstance(e, (WindlassInvalid, WindlassUnsupported)):
                raise
            late = time.monotonic() >= until - 0.2 or "timed out" in str(e).lower()
            kind, what = (
                (WindlassTimeout, "was not complete within") if late else (WindlassPeerLost, "broke within")
            )
            raise kind(
                f"rank {self.rank} of {info.world_size}: {where} {what} {timeout:g} s{self._absent()}: {_brief(e)}",
                "see whether every engine was given this sync info and reaches that address "
                "(GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME choose the interface)",
            ) from e
        log.info("rank %d of %d joined %s over %s", self.rank, info.world_size, where, info.backend)

    def _absent(self) -> str:
        """Who has not come, in words. Engines that join by an interface of their own do not sign in."""
        store = self._store
        if store is None:
            return ": its store was not reached"
        from windlass.exchange import attempt

        keys = [f"windlass/{self.info.group_name}/{rank}" for rank in range(self.info.world_size)]
        counts = attempt(ROLL_S, lambda: [store.add(key, 0) for key in keys])
        if counts is None:
            return ": its store does not answer"
        missing = [str(rank) for rank, count in enumerate(counts) if count == 0]
        if not missing:
            return ""
        return f": rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} did not sign in"

    def broadcast(self, tensor: torch.Tensor, timeout: float, what: str) -> None:
        """Sends from rank 0 what ``tensor`` holds there into that of every other rank. Blocks, at most ``timeout``.

        ``what`` is the parameter, for the error. Bytes are sent, whatever the dtype: collectives know few dtypes, and
        what arrives is the same.
        """
        import torch
        from torch.distributed.distributed_c10d import BroadcastOptions

        self.check()
        backend = self._backends.get(tensor.device.type)
        if backend is None:
            raise WindlassUnsupported(
                f"{what!r} is on {tensor.device}, and {self.info.backend} moves {' and '.join(self._backends)} "
                "memory only; choose the backend by where the weights are"
            )
        if tensor.numel() == 0:
            return
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout)
        until = time.monotonic() + timeout
        try:
            flat = tensor.detach().view(-1).view(torch.uint8)
            work = backend.broadcast([flat], options)
            # With a time, NCCL waits here as gloo does, and not only on its stream.
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as e:
            side = "sending" if self.rank == 0 else "receiving"
            self._broken = f"rank {self.rank} failed {side} {what!r}: {_brief(e)}"
            late = time.monotonic() >= until - 0.2 or "timed out" in str(e).lower()
            kind = WindlassTimeout if late else WindlassPeerLost
            peers = "an engine" if self.rank == 0 else "the trainer or another engine"
            raise kind(
                f"update group {self.info.group_name!r}: {self._broken}",
                f"{peers} is gone or takes no part; close both ends and join again",
            ) from e

    def check(self) -> None:
        """Raises unless the group is whole, as far as this end knows."""
        if self._closed:
            raise WindlassInvalid(f"this end has left update group {self.info.group_name!r}")
        if self._broken is not None:
            raise WindlassPeerLost(
                f"update group {self.info.group_name!r} broke before: {self._broken}",
                "close both ends, make new sync info and join again",
            )

    def abandon(self, why: str) -> None:
        """Marks the group as broken: nothing more is sent on it."""
        self._broken = self._broken or why

    def close(self) -> None:
        """Leaves. Others that wait for this rank get an error."""
        if self._closed:
            return
        self._closed = True
        backends, self._backends = self._backends, {}
        for backend in set(backends.values()) if self._own else ():
            # A group that is broken complains once more; NCCL must not wait for those that are gone.
            with contextlib.suppress(Exception):
                end = getattr(backend, "abort" if self._broken else "shutdown", None)
                if end is not None:
                    end()
        self._store = None


def _devices(backend: str) -> list[str]:
    """The kinds of memory that the backend moves, in torch's order."""
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    return [device for device in BackendConfig(Backend(backend)).get_device_backend_map() if device]


def _backend(info: TorchDistributedWeightSyncInfo, rank: int, store: Store, timeout: timedelta) -> Any:
    import torch.distributed.distributed_c10d as c10d

    if info.backend == "gloo":
        return c10d.ProcessGroupGloo(store, rank, info.world_size, timeout=timeout)
    if not c10d.is_nccl_available():
        raise WindlassUnsupported("this torch has no NCCL; set weight_sync_backend to gloo")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = c10d.ProcessGroupNCCL(store, rank, info.world_size, options)
    made._set_sequence_number_for_group()
    return made


def _brief(error: BaseException) -> str:
    """The first line of a message of torch's, without the path of its source file."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split("] ", 1)[-1] if line.startswith("[") else line
