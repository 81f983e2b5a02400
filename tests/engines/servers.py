"""Real engines as child processes: started, asked, stopped and killed.

Owns: command lines, environments and logs of vLLM and SGLang servers on a machine without a GPU. Each engine lives in an
environment of its own; ``WINDLASS_VLLM_PYTHON`` and ``WINDLASS_SGLANG_PYTHON`` say where its Python is, otherwise
``.venv-vllm`` and ``.venv-sglang`` of this tree (``make engine-venvs``). Servers are forks of a process that has imported
their engine (tests/python/template.py); test_examples.py starts them by the commands that a user types.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from template import Process, Template

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGE = ROOT / "python"
#: What makes the vLLM of an environment run on a CPU.
PLUGINS = {"vllm": [HERE / "plugin"], "verl": [HERE / "verl" / "plugin", HERE / "plugin"]}


def python_of(engine: str) -> Path:
    """The Python of an engine's environment."""
    named = os.environ.get(f"WINDLASS_{engine.upper()}_PYTHON")
    python = Path(named) if named else ROOT / f".venv-{engine}" / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{python} does not exist: `make engine-venvs` makes it")
    return python


_held: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody listens on now, and that the system gives to no other process as long as this one lives.

    It stays bound here without a listener, so only a server that is told the number, and reuses addresses, can have it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])


VLLM = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    # Nothing is compiled for the few tokens of a test.
    "TORCHDYNAMO_DISABLE": "1",
}
SGLANG = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}


def environment_of(engine: str) -> dict[str, str]:
    """The variables of all programs of an engine's environment."""
    paths = [HERE / "stubs"] if engine == "sglang" else PLUGINS[engine]
    return {
        **{k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"},
        **(SGLANG if engine == "sglang" else VLLM),
        # Threads that wait for each other at every operation are slow on cores that others use too.
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": os.pathsep.join([str(python_of(engine).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, [PACKAGE, *paths])),
    }


#: What servers import, in the one or the other of their processes.
IMPORTS_OF_VLLM = (
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)
IMPORTS_OF_SGLANG = ("sglang.srt.entrypoints.http_server", "sglang.srt.models.registry")
IMPORTS = {"vllm": IMPORTS_OF_VLLM, "verl": IMPORTS_OF_VLLM, "sglang": IMPORTS_OF_SGLANG}


_templates: dict[str, Template] = {}


def template(engine: str) -> Template:
    """The one that forks for an engine's environment, as long as this process lives."""
    if engine not in _templates:
        _templates[engine] = Template(python_of(engine), IMPORTS[engine], environment_of(engine))
    return _templates[engine]


class HttpFailure(RuntimeError):
    """An engine's answer other than 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body}")
        self.status = status
        self.body = body


class Server:
    """One engine in a process group of its own. Ready when the ``with`` block begins."""

    health = "/health"

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        port: int,
        deadline: float,
        engine: str | None = None,
    ) -> None:
        """With ``engine``, the command is what follows the Python of that engine, and a template forks for it."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._env = dict(env)
        self._deadline = deadline
        self._engine = engine
        self._process: Process | subprocess.Popen[bytes] | None = None
        descriptor, path = tempfile.mkstemp(prefix="windlass-engine-", suffix=".log")
        os.close(descriptor)
        self.log = Path(path)

    def start(self) -> None:
        """Starts it and returns at once."""
        with self.log.open("ab") as log:
            if self._engine is not None:
                env = {**environment_of(self._engine), **self._env}
                self._process = template(self._engine).start(self._command, env, stdout=log, fork=True)
                return
            inherited = {k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "PYTHONPATH")}
            self._process = subprocess.Popen(
                self._command,
                # Threads that wait for each other at every operation are slow on cores that others use too.
                env={**inherited, "OMP_NUM_THREADS": "1", **self._env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Returns when it serves; an error with the end of its log if it does not within the deadline."""
        until = time.monotonic() + self._deadline
        while time.monotonic() < until:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"the engine ended with {self._process.returncode}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(self.url + self.health, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.2)
        raise TimeoutError(f"the engine is not ready after {self._deadline:g} s:\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def pid(self) -> int:
        """The process that was started; its children are in its group."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to the engine and everything it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(120)
            self._process = None

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float = 180.0,
        headers: Mapping[str, str] = {},
    ) -> Any:
        """One request; the JSON of the answer, or its text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json", **headers}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as e:
            raise HttpFailure(e.code, e.read().decode(errors="replace")) from None
        try:
            return json.loads(text)
        except ValueError:
            return text

    def post(self, path: str, body: Any = None, **how: Any) -> Any:
        """POST."""
        return self.request("POST", path, body, **how)

    def get(self, path: str, **how: Any) -> Any:
        """GET."""
        return self.request("GET", path, **how)

    def generate(self, prompt: Sequence[int], tokens: int = 24, **how: Any) -> list[int]:
        """The engine's greedy answer, as token ids."""
        raise NotImplementedError

    def answers(self, tokens: int = 24) -> list[list[int]]:
        """Its answers to the prompts of :mod:`tiny`."""
        import tiny

        return [self.generate(prompt, tokens) for prompt in tiny.PROMPTS]

    def __enter__(self) -> Any:
        try:
            if self._process is None:
                self.start()
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            sys.stderr.write(f"--- {self.log}\n{self.tail()}\n")
        self.kill()
        self.log.unlink(missing_ok=True)


class Vllm(Server):
    """``vllm serve``.

    ``plain`` keeps weights unpacked, so that they can be written in place as on a GPU (see plugin/plain_weights.py).
    ``dev`` opens vLLM's own routes for weight updates. ``environment`` says which vLLM: verl's is older.
    """

    def __init__(
        self,
        model: Path,
        *,
        tp: int = 1,
        dev: bool = True,
        plain: bool = False,
        plugins: str | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] = {},
        dtype: str = "float32",
        deadline: float = 300.0,
        environment: Literal["vllm", "verl"] = "vllm",
    ) -> None:
        port = free_port()
        argv = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--dtype", dtype, "--max-model-len", "512"]
        argv += ["--max-num-seqs", "8", "--enforce-eager", "--served-model-name", "tiny", *options]
        # With one worker, none in a process of its own: two that wait for each other spin, on as many cores.
        argv += ["-tp", str(tp)] if tp > 1 else []
        if tp == 1 and "--distributed-executor-backend" not in options:
            argv += ["--distributed-executor-backend", "uni"]
        own = {}
        if dev:
            own["VLLM_SERVER_DEV_MODE"] = "1"
        if plain:
            own["WINDLASS_TEST_PLAIN_WEIGHTS"] = "1"
        if plugins is not None:
            own["VLLM_PLUGINS"] = plugins
        super().__init__(argv, {**own, **env}, port=port, deadline=deadline, engine=environment)

    def generate(self, prompt: Sequence[int], tokens: int = 24, **how: Any) -> list[int]:
        timeout = how.pop("timeout", 180.0)
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "return_token_ids": True, **how}
        answer = self.post("/v1/completions", body, timeout=timeout)
        return [int(t) for t in answer["choices"][0]["token_ids"]]


class Sglang(Server):
    """``python -m sglang.launch_server``."""

    def __init__(
        self,
        model: Path,
        *,
        tp: int = 1,
        options: Sequence[str] = (),
        env: Mapping[str, str] = {},
        dtype: str = "float32",
        deadline: float = 300.0,
    ) -> None:
        port = free_port()
        argv = ["-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--disable-overlap-schedule"]
        argv += ["--attention-backend", "torch_native", "--mem-fraction-static", "0.4"]
        argv += ["--max-total-tokens", "4096", "--sleep-on-idle", *options]
        if tp > 1:
            argv += ["--tp", str(tp)]
        threads = "|".join(str(i % (os.cpu_count() or 1)) for i in range(tp))
        own = {"SGLANG_CPU_OMP_THREADS_BIND": threads, **env}
        super().__init__(argv, own, port=port, deadline=deadline, engine="sglang")

    def generate(self, prompt: Sequence[int], tokens: int = 24, **how: Any) -> list[int]:
        timeout = how.pop("timeout", 180.0)
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = self.post(
            "/generate", {"input_ids": list(prompt), "sampling_params": sampling, **how}, timeout=timeout
        )
        return [int(t) for t in answer["output_ids"]]

    def flush(self, timeout: float = 180.0) -> None:
        """Forgets cached prefixes. A request whose answer is out may still be on its way out of the scheduler, and the
        server refuses the flush until it is gone."""
        until = time.monotonic() + timeout
        while True:
            try:
                self.post("/flush_cache")
            except HttpFailure as e:
                if e.status != 400 or time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                return
