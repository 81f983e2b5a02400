"""Windlass: `WeightManager` in the trainer, and the loop of docs/own-engine.md in the engine. Deltas over TCP."""

from __future__ import annotations

from typing import Any

from peers.peer import PATIENCE, Engine, Meeting, Pause, Peer, Tensors, Trainer, lacks


class Publisher(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        from windlass import WeightManager

        self._weights, self._meeting = weights, meeting
        # On a GPU a baseline is kept there, as docs/gpu.md advises; `auto` might find that it does not fit.
        mode = "delta" if next(iter(weights.values())).is_cuda else "auto"
        self._manager = WeightManager(
            model_id="policy", region_dir=str(meeting.home), timeout=PATIENCE, offload_mode=mode
        )

    def send(self, version: int) -> None:
        self._manager.offload(self._weights, version)
        if version == 1:
            self._meeting.put("agent", [self._manager.endpoint, self._manager.token_file])

    def settle(self) -> None:
        self._manager.wait_delta_ready()

    def close(self) -> None:
        self._manager.close()


def module_of(weights: Tensors) -> Any:
    """A torch module whose parameters are these tensors, by their names."""
    import torch

    root = torch.nn.Module()
    for name, tensor in weights.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return root


class Follower(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        from windlass.load import Live, ModelSession

        self._meeting, self._pause = meeting, pause
        self._live = Live(ModelSession(module_of(weights)))
        self._receiver: Any = None

    def take(self, version: int) -> None:
        from windlass import Receiver
        from windlass.load import take

        if self._receiver is None:
            endpoint, token_file = self._meeting.get("agent")
            images = self._meeting.home / "images"
            self._receiver = Receiver(images, endpoint=endpoint, token_file=token_file, keep_deltas=4)
        while True:
            report = take(self._live, self._receiver, self._pause, timeout=PATIENCE)
            if report is None:
                raise TimeoutError(f"version {version} did not come")
            if report.live is not None and report.live.version >= version:
                return

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


class Windlass(Peer):
    name = "Windlass"
    what = "deltas over TCP into an image, and from it into the parameters"
    settings = "keep_deltas=4, as docs/own-engine.md advises"
    packages = ("torch",)

    def missing(self) -> str | None:
        return lacks("windlass._windlass")

    def versions(self) -> dict[str, str]:
        import windlass

        return {"windlass": windlass.__version__, **super().versions()}

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Publisher(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Follower(weights, meeting, pause)


PEERS = [Windlass()]
