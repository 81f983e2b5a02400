"""An engine's side in Python: an image on this host that follows a publisher.

Owns: :class:`Receiver`, for engines that embed it, for evaluation scripts and for tests. Services use
``windlass receive``, which needs no Python. Must not: pause an engine or load weights into one.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from windlass import _windlass, trace
from windlass.config import Known, TransferStatus, unfit_nixl_params
from windlass.errors import (
    WindlassCancelled,
    WindlassCorrupt,
    WindlassDenied,
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
)
from windlass.plain import numbers

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer, Self

    from windlass.receive.reading import Selection

__all__ = ["Image", "Receiver", "Synced", "open_image"]

#: How often it is seen whether somebody still waits.
STOP_S = 1.0


@dataclass(frozen=True)
class Image:
    """A whole version, in place. Its tensors are the image's own memory: copy what should outlive the hold, and write to
    none of them. What is written there is what other engines read and the next hold gives, under the digest of what was
    there before, until the receiver finds the difference."""

    version: int
    incarnation: int
    #: The state digest, which was found right.
    digest: str | None
    #: The image as a safetensors file.
    path: Path
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Synced:
    """What one sync of a receiver carried, and how long its parts took."""

    #: The version that is visible now; ``None`` if nothing was newer.
    image: Known | None = None
    #: "full", "delta", "fuzzy" (several transfers), or "none".
    mode: str = "none"
    #: Bytes of all transfers.
    wire_bytes: int = 0
    #: Those of them that other receivers passed on.
    relayed_bytes: int = 0
    #: Those of them that were read from the publisher's memory by NIXL.
    read_bytes: int = 0
    #: Why images came over TCP although ``nixl`` was wanted.
    unread: str | None = None
    #: Relays that could not be reached, failed or lied.
    relays_lost: int = 0
    transfers: int = 0
    #: Pulls that the publisher lapped.
    laps: int = 0
    #: Blocks that a delta found to be wrong.
    refetched: int = 0
    #: Asking for versions and tickets.
    ask_ms: float = 0.0
    #: Bytes flowing.
    wire_ms: float = 0.0
    #: Waiting for engines.
    open_ms: float = 0.0
    #: Applying deltas.
    apply_ms: float = 0.0
    total_ms: float = 0.0

    @classmethod
    def of(cls, text: str) -> Synced:
        """From the words of the core."""
        said = json.loads(text)
        image = said.pop("image", None)
        known = {name.name for name in fields(cls)}
        own = {name: value for name, value in said.items() if name in known}
        return cls(image=None if image is None else Known.from_dict(image), **own)

    def _traced(self) -> Synced:
        if self.image is not None:
            phases = {
                f"windlass.{phase}_s": getattr(self, f"{phase}_ms") / 1e3
                for phase in ("ask", "wire", "open", "apply")
            }
            said = {"windlass.mode": self.mode, "windlass.bytes": self.wire_bytes, **phases}
            trace.record("windlass.receive", self.image.identity, self.total_ms / 1e3, said)
        return self

    def __getitem__(self, name: str) -> Any:
        # It was a dictionary once.
        return getattr(self, name)

    def metrics(self, prefix: str = "windlass/sync_") -> dict[str, float]:
        """What a logger such as wandb or TensorBoard plots: numbers by flat names.

        >>> Synced(mode="delta", wire_bytes=4096).metrics()["windlass/sync_wire_bytes"]
        4096
        """
        return numbers(
            prefix, self, [f.name for f in fields(self) if f.name not in ("image", "mode", "unread")]
        )


class Receiver:
    """Keeps an image at the newest version of one publisher.

    >>> receiver = Receiver("/dev/shm", endpoint="http://trainer:18100", token="...")    # doctest: +SKIP
    >>> receiver.wait(version=7, timeout=60)                                             # doctest: +SKIP
    >>> with receiver.hold() as image:                                                   # doctest: +SKIP
    ...     model.load_state_dict(image.tensors, strict=False)    # tied names are stored once
    ...     model.tie_weights()

    ``endpoint`` is the agent's, with its token or the file that holds it; on the trainer's host, ``region`` names the region's directory
    instead. ``store`` is the URL of a store (``docs/store.md``), such as ``s3://bucket/run``; credentials come from the environment, and
    ``version`` asks for that version instead of the newest. With an agent and a ``store``, versions come from the store while the agent has
    been away for ``store_after`` seconds, and from the agent again when it answers; ``status().publisher`` says which. ``tls_ca`` is a PEM file with those to trust where the endpoint begins with ``https://``; without it, the one
    that ``WINDLASS_TLS_CA`` names, or those of the system. The image is kept in a directory of the model's name below ``image_dir``. Receiving goes on in
    :meth:`sync` and :meth:`wait` only. What this receiver has, it passes on in the background to other receivers of the same version
    (``relay=False`` disables that), on a port of ``relay_ports`` (first and last; zeros take any). With ``keep_deltas``, the last deltas that led to the image
    stay beside it, so that engines can load only what changed. With ``slice`` the image keeps only a part of the model
    (``docs/slices.md``): names of tensors or patterns, each with the boxes that are needed of it, as in
    ``{"lm_head.weight": [[[0, 64000]]], "model.layers.0.*": [[]]}``. With ``nixl`` full images are read from the agent's memory, if it
    runs with ``nixl`` too (``docs/nixl.md``): ``True`` and "on" need the library here, "auto" takes it where there is an RDMA device.
    ``nixl_params`` are for its UCX plugin, such as ``{"engine_config": "TLS=tcp"}``. A publisher that is not there yet is waited for by the first
    call that needs it; with ``timeout`` it must answer within that time, or this is an error.
    """

    def __init__(
        self,
        image_dir: str | Path,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        region: str | Path | None = None,
        store: str | None = None,
        store_after: float = 30.0,
        version: int | None = None,
        slice: Selection | None = None,
        name: str = "receiver",
        mode: Literal["auto", "full", "delta"] = "auto",
        streams: int | None = None,
        threads: int = 1,
        transfer_timeout: float = 600.0,
        group_readable: bool = False,
        keep_deltas: int = 0,
        relay: bool = True,
        relay_ports: tuple[int, int] = (0, 0),
        nixl: bool | Literal["off", "auto", "on"] = False,
        nixl_library: str | Path | None = None,
        nixl_params: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> None:
        if token_file is not None:
            if token is not None:
                raise WindlassInvalid("give a token or the file that holds it, not both")
            token = _windlass.read_token(Path(token_file), group=group_readable)
        when = nixl if isinstance(nixl, str) else "on" if nixl else "off"
        if unfit := unfit_nixl_params({} if nixl_params is None else nixl_params, when):
            raise WindlassInvalid(f"nixl_params is {nixl_params!r}: expected {unfit}")
        try:
            self._inner = _windlass.Receiver(
                Path(image_dir),
                endpoint=endpoint,
                token=token,
                tls_ca=None if tls_ca is None else Path(tls_ca),
                region=None if region is None else Path(region),
                store=store,
                store_after=store_after,
                version=version,
                slice=None if slice is None else json.dumps(slice),
                name=name,
                mode=mode,
                streams=streams,
                threads=threads,
                transfer_timeout=transfer_timeout,
                group=group_readable,
                keep_deltas=keep_deltas,
                relay=relay,
                relay_ports=relay_ports,
                nixl=when,
                nixl_library=None if nixl_library is None else Path(nixl_library),
                nixl_params=None if nixl_params is None else dict(nixl_params),
                timeout=timeout,
            )
        except WindlassDenied as e:
            # Not only tokens are denied: a certificate may not be trusted, or another receiver may have the image.
            if token_file is None or "the token is missing or wrong" not in str(e):
                raise
            raise WindlassDenied(
                f"{e}; the token that was sent is that of the file {token_file}", e.advice, e.name
            ) from e

    def sync(self, timeout: float = 600.0) -> Synced:
        """Brings the image to the newest version, and tells how: mode, bytes, milliseconds of each part."""
        return Synced.of(self._inner.sync(timeout))._traced()

    def wait_newer(self, timeout: float) -> tuple[int, int] | None:
        """Waits until the publisher has something newer: (incarnation, version), or ``None`` after ``timeout``."""
        newer = self._inner.wait_newer(timeout)
        return None if newer is None else (int(newer[0], 16), newer[1])

    def wait(self, version: int, timeout: float = 60.0, stop: threading.Event | None = None) -> Synced:
        """Syncs until the image is at ``version`` or beyond, and tells how the last sync went.

        An agent that is away, or dies, is waited for as the version is: its trainer starts another one. If ``stop`` is set, waiting
        ends with an error; a transfer that is under way is not cut short.
        """
        until = time.monotonic() + timeout
        lost: WindlassError | None = None
        while True:
            if stop is not None and stop.is_set():
                raise WindlassCancelled(f"nobody waits for version {version} any more")
            told: Synced | None = None
            try:
                # Before the first version there is nothing to sync to; it is waited for like any other.
                with contextlib.suppress(WindlassNotFound):
                    told = self.sync(max(0.0, until - time.monotonic()))
                have = self.version
                if told is not None and have is not None and have >= version:
                    return told
                lost = None
                if (left := until - time.monotonic()) > 0:
                    self.wait_newer(left if stop is None else min(left, STOP_S))
            except (WindlassPeerLost, WindlassTimeout, WindlassStale, WindlassCorrupt) as e:
                lost = e
                time.sleep(max(0.0, min(0.1, until - time.monotonic())))
            if time.monotonic() >= until:
                why = "" if lost is None else f"; {lost}"
                raise WindlassTimeout(
                    f"version {version} did not come within {timeout:g} s; the image has {self.version}{why}",
                    "see whether the trainer publishes, or give it more time",
                ) from lost

    def fetch(
        self, timeout: float = 60.0, newer: tuple[int, int] | None = None
    ) -> _windlass.FetchedDelta | None:
        """The delta from what the image holds to the newest version, in memory, once there is something newer; or to the one
        that :meth:`wait_newer` has told of.

        For an engine that takes a version over before the image does (:meth:`windlass.load.Live.stage_fetched`); the image
        is not touched, and :meth:`show` brings it up to date afterwards. ``None`` if nothing newer came within ``timeout``,
        or if a delta does not do: then :meth:`sync` finds out.
        """
        until = time.monotonic() + timeout
        if self.version is None:
            return None
        if newer is None and (newer := self.wait_newer(timeout)) is None:
            return None
        incarnation, version = newer
        return self._inner.fetch(f"{incarnation:016x}", version, max(0.1, until - time.monotonic()))

    def show(self, fetched: _windlass.FetchedDelta, timeout: float = 600.0) -> Synced:
        """Brings the image to the version of a delta that was fetched, and tells how, as :meth:`sync` does."""
        return Synced.of(self._inner.show(fetched, timeout))._traced()

    @property
    def version(self) -> int | None:
        """The version in the image."""
        known = json.loads(self._inner.status()).get("image")
        return None if known is None else int(known["identity"]["version"])

    def status(self) -> TransferStatus:
        """Where it stands. Answers at once, also while a sync runs."""
        return TransferStatus.from_dict(json.loads(self._inner.status()))

    @contextlib.contextmanager
    def hold(self, seconds: float = 300.0, timeout: float = 60.0) -> Iterator[Image]:
        """The version in the image, which does not change while it is held, for at most ``seconds``.

        An error at the end if it had to be taken back: what was read may be of two versions.
        """
        held = self._inner.hold(seconds, timeout)
        try:
            yield Image(held.version, int(held.incarnation, 16), held.digest, Path(held.path), Tensors(held))
        finally:
            held.finish()

    def close(self) -> None:
        """Lets go of the image, which stays for the next receiver."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def open_image(directory: str | Path, seconds: float = 300.0, timeout: float = 60.0) -> Iterator[Image]:
    """The version in the image of a ``windlass receive`` on this host, by the image's directory alone.

    >>> with open_image("/dev/shm/actor") as image:                                      # doctest: +SKIP
    ...     model.load_state_dict(image.tensors, strict=False)

    It does not change while it is held, for at most ``seconds``; a receiver that has a newer one waits for that. An error
    at the end if it had to be taken back. An image that is being changed is waited for, for at most ``timeout``.
    """
    held = _windlass.open_image(Path(directory), seconds, timeout, slices=True)
    try:
        yield Image(held.version, int(held.incarnation, 16), held.digest, Path(held.path), Tensors(held))
    finally:
        held.finish()


class _NoTensor(WindlassNotFound, KeyError):
    """What a mapping raises for a key that it does not have: `in` and `get` catch it."""

    __str__ = WindlassNotFound.__str__


class Tensors(Mapping[str, Any]):
    """Tensors of an image by name, aliases included; made when they are asked for.

    An image may keep only a slice of its model. ``whole`` refuses what is not there entirely, which would be
    zeros; a loader that is known to read no more than the slice goes without.
    """

    def __init__(self, held: _windlass.Held, *, whole: bool = True) -> None:
        self._lay(held.layout(), held.memory())
        self._torn = frozenset(held.torn() if whole else ())

    @classmethod
    def laid(cls, layout: _windlass.Layout, memory: Buffer) -> Self:
        """Those of a layout in any memory."""
        made = cls.__new__(cls)
        made._lay(layout, memory)
        made._torn = frozenset()
        return made

    def _lay(self, layout: _windlass.Layout, memory: _windlass.Memory | Buffer) -> None:
        from windlass.receive.memory import flat

        self._data = flat(memory)
        self._table = {name: (dtype, shape, at, size) for name, dtype, shape, at, size in layout.tensors()}
        self._aliases = layout.aliases()

    def __getitem__(self, name: str) -> torch.Tensor:
        from windlass.receive.memory import tensor_at

        own = self._aliases.get(name, name)
        row = self._table.get(own)
        if row is None:
            raise _NoTensor(f"the image has no tensor {name!r}")
        if own in self._torn:
            raise WindlassInvalid(
                f"the image keeps only a slice of the model, and does not hold all of {name!r}",
                "read it from a receiver that keeps it whole, or name it in this one's slice",
                name="outside_slice",
            )
        dtype, shape, offset, size = row
        if dtype == "float4_e2m1fn_x2" and shape:
            # torch counts pairs.
            shape = [*shape[:-1], shape[-1] // 2]
        return tensor_at(self._data, offset, size, dtype, shape)

    def __contains__(self, name: object) -> bool:
        return name in self._table or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        yield from self._table
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._table) + len(self._aliases)
