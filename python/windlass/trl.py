"""Weight sync of TRL's trainers by Windlass.

For ``AsyncGRPOTrainer`` (and async distillation), an argument:

>>> from windlass.trl import WindlassTransfer                                                     # doctest: +SKIP
>>> transfer = WindlassTransfer("http://engine:8000", token_file="token")                         # doctest: +SKIP
>>> trainer = AsyncGRPOTrainer(model=..., weight_transfer=transfer)                               # doctest: +SKIP

For ``GRPOTrainer``, ``RLOOTrainer``, ``OnlineDPOTrainer`` and the others that sync by TRL's ``VLLMClient`` (``vllm_mode="server"``), one
call before the trainer is made:

>>> windlass.trl.use(token_file="token")                                                          # doctest: +SKIP

The servers are ``vllm serve`` with ``VLLM_PLUGINS=windlass`` and ``WINDLASS_TOKEN_FILE``: docs/trl.md.

Owns: :class:`WindlassTransfer` and :func:`use`. Must not: change anything of TRL unless :func:`use` is called.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import ipaddress
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from windlass.engines.vllm.endpoint import PauseOptions
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.frameworks.after_import import after_import
from windlass.frameworks.sender import Published, Sender, listed, reached_by, settings_of
from windlass.frameworks.servers import Loaded, Servers, own_address

if TYPE_CHECKING:
    import torch

__all__ = ["WindlassTransfer", "use"]

log = logging.getLogger("windlass")


class WindlassTransfer:
    """What ``AsyncGRPOTrainer(weight_transfer=...)`` takes.

    ``servers`` is the address of a vLLM server, or several of them. ``token_file`` holds the secret of their routes (``token`` is the
    secret itself; without either, that of ``WINDLASS_TOKEN`` or of the file ``WINDLASS_TOKEN_FILE``).

    ``checkpoint`` is the directory that the servers were started from: weights are published in its dtypes, and those that TRL
    never sends because they are frozen are taken from it. ``dtype`` is the servers' dtype, if no checkpoint says it. ``pause``,
    ``cache`` and ``lease`` say how requests in flight are treated, ``image_dir`` is a directory in memory on the servers' hosts,
    ``manager`` are further fields of :class:`windlass.WeightManagerConfig`. ``timeout`` bounds one sync, and ``away`` how long a server may
    not answer meanwhile.

    The stream is published while TRL believes the servers to be paused; they generate meanwhile, and are paused only for the load
    itself. After a failure the servers serve the version before, or none if they could not be made whole.
    """

    def __init__(
        self,
        servers: str | Iterable[str],
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        model_id: str = "policy",
        checkpoint: str | os.PathLike[str] | None = None,
        dtype: str | None = None,
        image_dir: str | None = None,
        pause: Literal["keep", "wait", "abort"] = "keep",
        cache: Literal["reset", "keep"] = "reset",
        lease: float = 60.0,
        manager: Mapping[str, object] | None = None,
        timeout: float = 600.0,
        away: float = 120.0,
    ) -> None:
        if token is None and token_file is None:
            token = os.environ.get("WINDLASS_TOKEN") or None
            token_file = None if token else os.environ.get("WINDLASS_TOKEN_FILE") or None
            if token is None and token_file is None:
                raise WindlassInvalid(
                    "the servers' routes need a token, and none was given",
                    "give token_file=FILE, the file that WINDLASS_TOKEN_FILE names for the servers",
                )
        self.servers = Servers(
            servers,
            token=token,
            token_file=None if token_file is None else Path(token_file),
            image_dir=image_dir,
            pause=PauseOptions(mode=pause, cache=cache, lease=lease),
            timeout=timeout,
            away=away,
        )
        self._timeout = timeout
        #: By when the sync that is under way has to end.
        self._until = 0.0
        path = None if checkpoint is None else os.fspath(checkpoint)
        self._settings = settings_of(model_id, manager, dtype=dtype, checkpoint=path)
        self._sender: Sender | None = None
        self._published: Published | None = None
        #: What the servers compute in, until it was compared with what is sent.
        self._served_dtype: str | None = None
        self._log: Any = None
        #: The figures of the last sync, by the names that loggers plot.
        self.metrics: dict[str, float] = {}

    # TRL's protocol; the main process calls it.

    def init_weight_transfer(self) -> None:
        """Waits for the servers, and starts publishing."""
        for told, url in zip(self.servers.check(), self.servers.urls, strict=True):
            log.info("%s: vLLM %s takes versions of windlass", url, told["engine_version"])
            self._served_dtype = told["dtype"]
        if self._sender is None:
            self._sender = Sender(reached_by(own_address(self.servers.urls), self._settings))

    def pause(self) -> None:
        """Nothing: the servers generate until they have everything that they load."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publishes the stream; returns as soon as the trainer may go on."""
        if self._sender is None:
            raise WindlassInvalid("nothing can be sent before init_weight_transfer() was called")
        self._until = time.monotonic() + self._timeout
        self._published = None
        self._published = self._sender.publish(self._noting_dtypes(iterator), self._timeout)

    def _noting_dtypes(self, iterator: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Warns once if the weights are mostly of another dtype than the servers' and nobody said what to cast them to."""
        if self._served_dtype is None or not {"checkpoint", "generator_dtype"}.isdisjoint(self._settings):
            yield from iterator
            return
        sizes: dict[str, int] = {}
        for name, tensor in iterator:
            dtype = str(tensor.dtype).removeprefix("torch.")
            sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
            yield name, tensor
        sent, served = max(sizes, key=sizes.__getitem__, default=None), self._served_dtype
        self._served_dtype = None
        if sent is not None and sent != served:
            log.warning(
                "the servers compute in %s and the weights are sent in %s: the servers cast all of them at every sync. Give "
                "WindlassTransfer the checkpoint that the servers were started from (checkpoint=), or dtype=%r",
                served,
                sent,
                served,
            )

    def resume(self) -> None:
        """Brings the version to all servers while they generate, and has them load it."""
        sender, published = self._sender, self._published
        if sender is None or published is None:
            raise WindlassInvalid("no version was published: the call of send_weights() before failed")
        digest = sender.sealed(self._left())
        source = sender.source()
        self.servers.pull(source, published.identity, self._left())
        loaded = self.servers.load(source, published.identity, digest, self._left())
        self._note(published, loaded)

    def destroy(self) -> None:
        """Ends publishing. The servers go on with the last version."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    # What TRL does not ask for.

    def add(self, url: str) -> None:
        """One more server: it gets the newest version at once, if there is one. So does one that was restarted between two syncs."""
        alone = self.servers.only(url)
        alone.check()
        agent = None if self._sender is None else self._sender.manager.config.agent
        if agent is not None and own_address([url]) and ipaddress.ip_address(agent.bind).is_loopback:
            raise WindlassInvalid(
                f"{url} is on another host, and the agent was started for servers on this one (it listens on {agent.bind})",
                'give manager={"agent": {"bind": "0.0.0.0", "advertise_host": ADDRESS}} from the beginning',
            )
        if self._sender is not None and self._published is not None:
            source, identity = self._sender.source(), self._published.identity
            alone.load(source, identity)
        self.servers.add(url)

    def remove(self, url: str) -> None:
        """One server less."""
        self.servers.remove(url)

    def log_to(self, trainer: object) -> None:
        """The figures of each sync go into the trainer's own log, beside ``perf/weight_sync_s``."""
        table = getattr(trainer, "_metrics", None)
        if not isinstance(table, Mapping) or "train" not in table:
            raise WindlassUnsupported(
                f"{type(trainer).__name__} has no table of metrics that windlass knows",
                "log transfer.metrics after each sync instead",
            )
        self._log = table["train"]

    def _left(self) -> float:
        return max(1.0, self._until - time.monotonic())

    def _note(self, published: Published, loaded: list[Loaded]) -> None:
        self.metrics = {
            **published.metrics(),
            "windlass/wire_bytes": float(sum(one.wire_bytes for one in loaded)),
            "windlass/stage_s": max(one.pull_s for one in loaded),
            "windlass/load_s": max(one.load_s for one in loaded),
            "windlass/pause_s": max(one.pause_s for one in loaded),
        }
        log.info("%s is served by %d servers: %s", published.identity, len(loaded), listed(self.metrics))
        if self._log is not None:
            for name, value in self.metrics.items():
                self._log[name].append(value)


def use(servers: str | Iterable[str] | None = None, **how: Any) -> None:
    """From now on, TRL's ``VLLMClient`` syncs by Windlass: ``GRPOTrainer``, ``RLOOTrainer``, ``OnlineDPOTrainer`` and all others that
    build on it.

    Call it before the trainer is made. ``servers`` are by default the one that the trainer was configured with; the other arguments
    are those of :class:`WindlassTransfer`. Colocated engines (``vllm_mode="colocate"``) are refused: they take weights inside the process.
    """
    import trl.generation.vllm_client as client_module
    import trl.generation.vllm_generation as generation_module

    before = client_module.VLLMClient
    base = getattr(before, "_windlass_base", before)

    class WindlassVLLMClient(base):  # type: ignore[misc, valid-type]
        """TRL's client, with our transfer."""

        _windlass_base = base
        _transfer: WindlassTransfer | None = None
        _collected: list[tuple[str, Any]] | None = None

        def init_communicator(self, device: Any = 0) -> None:
            """Waits for the servers and starts publishing, on any device."""
            self._transfer = WindlassTransfer(self.base_url if servers is None else servers, **how)
            self._transfer.init_weight_transfer()
            atexit.register(self.close_communicator)

        @contextlib.contextmanager
        def weight_update(self) -> Iterator[None]:
            """Parameters that are updated one by one become one version at the end."""
            self._collected = []
            try:
                yield
                self._send(self._collected)
            finally:
                self._collected = None

        def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Any]]) -> None:
            """The whole model is a version; within :meth:`weight_update`, a part of one."""
            if self._collected is None:
                self._send(named_params)
            else:
                # Those who call it free them before the next one.
                self._collected += [
                    (name, tensor.detach().to("cpu", copy=True)) for name, tensor in named_params
                ]

        def _send(self, weights: Iterable[tuple[str, Any]]) -> None:
            if self._transfer is None:
                raise WindlassInvalid("weights were sent before init_communicator() was called")
            self._transfer.send_weights(iter(weights))
            self._transfer.resume()

        def reset_prefix_cache(self) -> None:
            """A load does it, unless it was told not to."""
            if self._transfer is None:
                super().reset_prefix_cache()

        def close_communicator(self) -> None:
            """Ends publishing."""
            if self._transfer is not None:
                self._transfer.destroy()

    generation = generation_module.VLLMGeneration
    start = getattr(generation._init_vllm, "_windlass_base", generation._init_vllm)

    def _init_vllm(self: Any) -> Any:
        _refuse_colocated(self.mode)
        return start(self)

    _init_vllm._windlass_base = start  # type: ignore[attr-defined]
    generation._init_vllm = _init_vllm
    # It makes its engines itself.
    after_import("trl.experimental.online_dpo.online_dpo_trainer", _online_dpo)
    for module in list(sys.modules.values()):
        # Those that took the name over when they were imported.
        if (
            getattr(module, "__name__", "").startswith("trl.")
            and getattr(module, "VLLMClient", None) is before
        ):
            module.VLLMClient = WindlassVLLMClient  # type: ignore[attr-defined]


def _refuse_colocated(mode: str) -> None:
    if mode != "server":
        raise WindlassUnsupported(
            f"windlass.trl.use() was called, and vllm_mode is {mode!r}: a colocated engine takes its weights inside the process",
            'set vllm_mode="server", or do not call use()',
        )


def _online_dpo(module: Any) -> None:
    """``OnlineDPOTrainer`` is colocated unless it is told otherwise."""
    trainer = module.OnlineDPOTrainer
    begin = trainer.__init__
    if begin.__module__ == __name__:
        return

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        args = inspect.signature(begin).bind(self, *given, **named).arguments.get("args")
        if args is not None and args.use_vllm:
            _refuse_colocated(args.vllm_mode)
        begin(self, *given, **named)

    trainer.__init__ = functools.wraps(begin, assigned=("__doc__", "__name__", "__qualname__"))(__init__)
