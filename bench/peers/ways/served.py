"""Ways into real servers: the sidecar of Windlass with vLLM and SGLang, their own reloads, and gloo through a worker extension of vLLM.

The engine's end has no parameters; it tells the server what to do, and the server's own workers compute the digest. Each way pauses
generation so that requests in flight stay, resets the prefix cache and resumes.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from peers.inside import group
from peers.model import SIZES
from peers.peer import PATIENCE, Engine, Line, Meeting, Pause, Peer, Tensors, Trainer
from peers.ways.by_windlass import Windlass

ROOT = Path(__file__).resolve().parent.parent.parent.parent
#: The secret of the plugin's routes, which the server is started with.
TOKEN = "of-this-benchmark"
#: The weight loader by which SGLang is asked for a digest.
LOOK = "peers.inside.look"


def post(url: str, path: str, body: Any = None) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(url + path, json.dumps(body or {}).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        text = answer.read()
    return json.loads(text) if text else None


class Served(Engine):
    """What all of them share. ``engine`` is vllm or sglang."""

    def __init__(self, meeting: Meeting, pause: Pause) -> None:
        self._meeting, self._url, self._pause = meeting, meeting.server, pause
        self.engine = str(meeting.get("engine"))

    def worker(self, method: str, *given: Any, **named: Any) -> Any:
        body = {"method": method, "args": list(given), "kwargs": named}
        return post(self._url, "/collective_rpc", body)["results"][0]

    def digest(self) -> str:
        if self.engine == "vllm":
            return str(self.worker("peers_digest"))
        note = self._meeting.home / "digest"
        note.unlink(missing_ok=True)
        order = torch.frombuffer(bytearray(json.dumps({"digest": str(note)}).encode()), dtype=torch.uint8)
        payload = base64.b64encode(pickle.dumps([("order", order.clone())], protocol=4)).decode()
        post(self._url, "/begin_weight_update", {"selector": "target"})
        body = {"serialized_named_tensors": [payload], "load_format": LOOK, "flush_cache": False}
        post(self._url, "/update_weights_from_tensor", body)
        post(self._url, "/end_weight_update")
        return note.read_text()

    def paused(self, method: str, *given: Any, **named: Any) -> None:
        """A method of vLLM's workers, in a pause."""
        post(self._url, "/pause?mode=keep&clear_cache=false")
        # From the answer, when no step is under way, until the next may begin.
        with self._pause():
            self.worker(method, *given, **named)
            post(self._url, "/reset_prefix_cache?reset_running_requests=true")
            post(self._url, "/resume")


class Sidecar(Served):
    """`windlass receive --engine`, as a process of its own."""

    _process: Any = None

    def _start(self) -> None:
        endpoint, token_file = self._meeting.get("agent")
        home = self._meeting.home
        secret = home / "engine-token"
        secret.touch(0o600)
        secret.write_text(TOKEN)
        words = ["receive", "--json", f"--from={endpoint}", f"--token-file={token_file}"]
        words += [f"--dir={home / 'images'}", f"--engine={self.engine}={self._url}"]
        words += [f"--engine-token-file={secret}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "windlass", *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def take(self, version: int) -> None:
        if self._process is None:
            self._start()
        late = threading.Timer(PATIENCE, self._process.kill)
        late.start()
        event: Any = None
        try:
            for line in self._process.stdout:
                event = json.loads(line)
                if event.get("event") == "loaded" and event["version"] == version:
                    # As the server measured it.
                    self._pause.seconds += event["pause_ms"] / 1e3
                    return
        finally:
            late.cancel()
        raise RuntimeError(f"the sidecar has not loaded version {version} and said last: {event}")

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE)


class WindlassServed(Windlass):
    name = "Windlass sidecar and plugin"
    what = "`windlass receive --engine vllm=URL` over TCP, and its plugin in the server"
    settings = "as in the README"
    lane = "vllm"

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Sidecar(meeting, pause)


class WindlassSglang(WindlassServed):
    name = "Windlass sidecar, SGLang"
    what = "`windlass receive --engine sglang=URL` over TCP, and its weight loader in the server"
    lane = "sglang"


class Checkpoints(Trainer):
    """Writes the model's checkpoint anew."""

    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._weights, self._home = dict(weights), meeting.home / "checkpoint"
        self._home.mkdir()
        (self._home / "config.json").write_text(json.dumps(SIZES[meeting.get("size")].config()))
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        path = self._home / "model.safetensors"
        save_file(self._weights, path.with_suffix(".new"), metadata={"format": "pt"})
        path.with_suffix(".new").rename(path)
        self._line.say(version)


class Reload(Served):
    def __init__(self, meeting: Meeting, pause: Pause) -> None:
        super().__init__(meeting, pause)
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        path = str(self._meeting.home / "checkpoint")
        if self.engine == "vllm":
            self.paused("reload_weights", weights_path=path)
            return
        post(self._url, "/pause_generation", {"mode": "retract"})
        with self._pause():
            told = post(self._url, "/update_weights_from_disk", {"model_path": path, "flush_cache": True})
            assert told["success"], told
            post(self._url, "/continue_generation", {})


class ReloadWeights(Peer):
    lane = "vllm"
    name = "vLLM reload_weights"
    what = "save_file to a directory in shared memory, then `/collective_rpc` reload_weights"
    settings = "pause mode keep, prefix cache reset"
    packages = ("safetensors", "torch")
    by_files = True

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Checkpoints(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Reload(meeting, pause)


class UpdateFromDisk(ReloadWeights):
    name = "SGLang update_weights_from_disk"
    what = "save_file to a directory in shared memory, then `/update_weights_from_disk`"
    settings = "pause mode retract, cache flushed"
    lane = "sglang"


class Broadcaster(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._weights = weights
        self._line = Line.listen(meeting)
        self._group = group(meeting.port, 0, PATIENCE)

    def send(self, version: int) -> None:
        self._line.say(version)
        for tensor in self._weights.values():
            self._group.broadcast(tensor, 0).wait()


class Extension(Served):
    def __init__(self, size: str, meeting: Meeting, pause: Pause) -> None:
        super().__init__(meeting, pause)
        self._size = size
        self._line = Line.connect(meeting)
        self.worker("peers_join", meeting.port, PATIENCE)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        self.paused("peers_take", self._size)


class GlooServed(Peer):
    lane = "vllm"
    name = "gloo broadcast, load_weights"
    what = "a worker extension receives each tensor by gloo and gives it to the model's load_weights"
    settings = "pause mode keep, prefix cache reset"
    packages = ("torch",)

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Broadcaster(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Extension(meeting.get("size"), meeting, pause)


PEERS: list[Peer] = [WindlassServed(), ReloadWeights(), GlooServed(), WindlassSglang(), UpdateFromDisk()]
