"""safetensors in a directory that trainer and engine share. It is in shared memory here, which is faster than any shared disk."""

from __future__ import annotations

from safetensors import safe_open
from safetensors.torch import save_file

from peers.peer import Engine, Line, Meeting, Pause, Peer, Tensors, Trainer


class Writer(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._weights, self._home = dict(weights), meeting.home
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        path = self._home / "model.safetensors"
        save_file(self._weights, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        self._line.say(version)


class Reader(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        self._weights, self._home, self._pause = weights, meeting.home, pause
        self._device = str(next(iter(weights.values())).device)
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        with safe_open(self._home / "model.safetensors", "pt", self._device) as file, self._pause():
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                self._weights[name].copy_(file.get_tensor(name))


class Files(Peer):
    name = "safetensors, shared directory"
    what = (
        "save_file to a directory in shared memory, renamed when complete; safe_open and one copy per tensor"
    )
    settings = "the reader maps the file"
    packages = ("safetensors", "torch")
    by_files = True

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Writer(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Reader(weights, meeting, pause)


PEERS = [Files()]
