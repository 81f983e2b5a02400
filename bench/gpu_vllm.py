"""A real vLLM server that follows a trainer on a GPU: how long it pauses, and how soon a step is visible.

    PYTHONPATH=python python bench/gpu_vllm.py [--size 0.6B] [--steps 12] [--json FILE]
    make gpu-vllm                                    # the same, with the extension built for release first
    ... --device cpu --size tiny                     # without a GPU: everything but the figures
    ... --beside 5                                   # and five versions by each of vLLM's own ways (tests/gpu/vllm_own.py)

Needs vLLM (in this Python, or in another one by ``--vllm-python``), transformers, and a CUDA device unless
``--device cpu``. What is missing is said, and the exit code is 2.

A trainer (this process, ``--trainer-device``) holds a Qwen3 layout with random weights and changes about 1 % of them for
each step, in bf16 to a neighbour as nearly all changes of training are. It publishes by
``WeightManager(offload_mode=...)``. A sidecar (``windlass receive --from``) pulls over TCP on loopback and has the server
load, while requests are answered all the time: prompts of 8 to 700 tokens, streamed answers. The server starts from the
configuration alone, with weights of no meaning: all that it answers by came through Windlass. In the end the digest of its live
weights must be that of the last version. With ``--eager`` a second server is started on a checkpoint that the trainer wrote, and
greedy answers must be equal; compiled servers of one checkpoint differ among themselves, so that tokens prove nothing there.

| figure | from | to |
|---|---|---|
| trainer blocked | `offload()` is called, the GPU idle | it returns |
| step to visible | the same | the sidecar says that the server serves the version |
| engine pause | the end of the last step with the old weights | the next one may begin, as the server measured it |
| trainer alone | `offload()` is called after the server has ended | it returns |
| tokens a second | the trainer steps every two seconds and publishes every other step, twice ``--seconds`` long | the two seconds after a step that is published, beside those after one that is not |
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import multiprocessing
import os
import platform
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/engines", "tests/gpu", "tests/python", "python")]

import needs  # noqa: E402

needs.need("torch", "transformers", "windlass")

import vllm_own  # noqa: E402

import servers  # noqa: E402
import tiny  # noqa: E402

#: hidden, inner, layers, heads, kv heads, vocabulary, size of a head, tied
SIZES = {
    "tiny": (128, 256, 2, 4, 2, 512, 32, False),
    "0.6B": (1024, 3072, 28, 16, 8, 151_936, 128, True),
    "1.7B": (2048, 6144, 28, 16, 8, 151_936, 128, True),
    "8B": (4096, 12_288, 36, 32, 8, 151_936, 128, False),
}

#: What of the weights is written to the folder: two slots, deltas, an image, and at the end a checkpoint.
ROOM = 4.4
#: How long a server may take to start, and one version to arrive.
START, PATIENCE = 900.0, 600.0
#: What the server says that it took before the pause.
PARTS = ("stage_ms", "drain_ms")
#: Tokens of prompts and answers, in turn.
PROMPTS, ANSWERS = (8, 32, 128, 700), (64, 128, 256)
#: Into how many parts the two seconds after a step are divided.
BINS = 40


class Missing(Exception):
    """Something that this script cannot do without."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=needs.one_of(SIZES), default="0.6B", help=", ".join(SIZES))
    parser.add_argument("--device", default="cuda", help="of the server: cuda, cuda:1, cpu")
    parser.add_argument("--trainer-device", help="the server's if not given")
    parser.add_argument(
        "--steps", type=needs.whole(1), default=12, help="versions that count; two more come before"
    )
    parser.add_argument("--share", type=needs.share, default=0.01, help="of elements that change")
    parser.add_argument("--offload-mode", choices=("delta", "copy", "auto"), default="delta")
    parser.add_argument("--clients", type=needs.whole(1), default=8, help="requests at the same time")
    parser.add_argument(
        "--seconds",
        type=needs.whole(0),
        default=60,
        help="how long tokens are counted, with and without each",
    )
    parser.add_argument("--prefix-cache", choices=("reset", "keep"), default="reset")
    parser.add_argument("--eager", action="store_true", help="no compilation, and compare tokens at the end")
    parser.add_argument(
        "--beside",
        type=needs.whole(0),
        default=0,
        help="versions by each of vLLM's own ways; the server then starts from a checkpoint",
    )
    parser.add_argument("--pause", choices=("keep", "wait", "abort"), default="keep")
    parser.add_argument("--memory", type=float, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--vllm-python", default=os.environ.get("WINDLASS_VLLM_PYTHON", sys.executable))
    parser.add_argument("--home", help="a folder for models, regions and images; /dev/shm if not given")
    parser.add_argument("--json", help="where to write everything that was measured")
    given = parser.parse_args()
    given.trainer_device = given.trainer_device or given.device
    return given


def check(given: argparse.Namespace) -> dict[str, Any]:
    """What there is; :class:`Missing` names what is not."""
    import torch
    import transformers

    from windlass.transfer.facts import gpu_facts

    devices = [given.device, given.trainer_device]
    if any(d.startswith("cuda") for d in devices):
        facts = gpu_facts()
        if facts["cuda"]["unusable"]:
            raise Missing(f"no CUDA: {facts['cuda']['unusable']} (--device cpu --size tiny needs none)")
        if not torch.cuda.is_available():
            raise Missing(
                f"torch {torch.__version__} has no CUDA, though there is a GPU: install a build that has"
            )
        for device in devices:
            if torch.device(device).type == "cuda" and (torch.device(device).index or 0) >= len(
                facts["gpus"]
            ):
                raise Missing(f"there is no {device}: {len(facts['gpus'])} GPUs are visible")
    asked = [given.vllm_python, "-c", "import vllm; print(vllm.__version__)"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    except OSError as e:
        raise Missing(f"{given.vllm_python} cannot be run: {e}") from e
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Missing(
            f"no vLLM in {given.vllm_python} ({last}): pip install vllm there, or name another --vllm-python"
        )
    check_room(given)
    return {
        "vllm": found.stdout.strip().splitlines()[-1],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name(given.trainer_device) if "cuda" in given.trainer_device else None,
        "host": platform.platform(),
    }


def elements(size: str) -> int:
    """Parameters of a model."""
    hidden, inner, layers, heads, kv, vocabulary, head, tied = SIZES[size]
    layer = hidden * head * (2 * heads + 2 * kv) + 3 * hidden * inner + 2 * hidden + 2 * head
    return vocabulary * hidden * (1 if tied else 2) + layers * layer + hidden


def check_room(given: argparse.Namespace) -> None:
    """:class:`Missing` if there is no room, before anything is written."""
    folder = Path(given.home or "/dev/shm")
    if not folder.is_dir():
        raise Missing(f"there is no folder {folder}: make it, or name another --home")
    size = elements(given.size) * dtype_of(given).itemsize
    free = shutil.disk_usage(folder).free
    if free < ROOM * size:
        raise Missing(
            f"slots, image and checkpoint of {size / 1e9:.1f} GB of weights need {ROOM * size / 1e9:.1f} GB in {folder}, and "
            f"{free / 1e9:.1f} GB are free: name another --home (a tmpfs is quickest), or take a smaller --size"
        )


def make(given: argparse.Namespace, folder: Path) -> Any:
    """The trainer's model; its configuration and a tokenizer in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, inner, layers, heads, kv, vocabulary, head, tied = SIZES[given.size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        # Large enough for greedy answers to be more than one token.
        initializer_range=0.2 if given.size == "tiny" else 0.05,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    torch.manual_seed(0)
    with torch.device(given.trainer_device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype_of(given)).eval()
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tiny._tokenizer().save_pretrained(folder)
    return model


def dtype_of(given: argparse.Namespace) -> Any:
    import torch

    # Where a CPU has no fast bf16, vLLM's kernels for it end in an illegal instruction.
    return torch.float32 if given.device == "cpu" else torch.bfloat16


def step(model: Any, share: float) -> int:
    """Changes about so many of the weights. How many there are."""
    import torch

    count = 0
    with torch.no_grad():
        for parameter in model.parameters():
            # Piece by piece: an optimizer's step takes no memory of its own either.
            for piece in parameter.view(-1).split(1 << 24):
                draw = torch.rand(piece.shape, device=piece.device)
                if piece.dtype == torch.bfloat16:
                    # To a neighbour, as nearly all changes of a step of training are.
                    bits = piece.view(torch.int16)
                    size = bits & 0x7FFF
                    moves = (draw < share) & (size > 0) & (size < 0x7F00)
                    bits.add_(torch.where(draw < share / 2, 1, -1).to(torch.int16).mul_(moves))
                else:
                    piece += (draw < share) * (0.1 * torch.randn_like(piece))
            count += parameter.numel()
    return count


def idle(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


class Engine(servers.Vllm):
    """vLLM on the model of a folder, with our routes."""

    def __init__(
        self,
        given: argparse.Namespace,
        model: Path,
        token: str,
        *,
        dummy: bool,
        dtype: str | None = None,
        options: Sequence[str] = (),
        paths: Sequence[Path] = (),
        deadline: float = START,
    ) -> None:
        """``options`` are more of vLLM's own, ``paths`` more of where its processes find modules."""
        port = servers.free_port()
        command = [given.vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
        command += ["--max-model-len", "1024", "--max-num-seqs", "8"]
        command += ["--load-format", "dummy"] if dummy else []
        command += vllm_own.OPTIONS if given.beside else []
        command += ["--enforce-eager"] if given.eager and given.device != "cpu" else []
        command += options
        found, plugins = [str(ROOT / "python"), *map(str, paths)], "windlass"
        env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "WINDLASS_TOKEN": token}
        if given.device == "cpu":
            # Weights stay as they were loaded, as they do on a GPU.
            found.append(str(ROOT / "tests" / "engines" / "plugin"))
            plugins += ",plain_weights"
            command += ["--dtype", dtype or "float32", "--enforce-eager"]
            command += ["--distributed-executor-backend", "uni"]
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
            env |= {"WINDLASS_TEST_PLAIN_WEIGHTS": "1"}
        else:
            memory = given.memory or (0.45 if given.device == given.trainer_device else 0.85)
            command += ["--dtype", dtype or "bfloat16", "--gpu-memory-utilization", str(memory)]
            index = given.device.partition(":")[2]
            if index:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)] if visible else index
        # What Windlass says in the server's processes is in the log, too.
        told = {"class": "logging.StreamHandler"}
        logging = {"version": 1, "disable_existing_loggers": False, "handlers": {"told": told}}
        logging["root"] = {"level": "INFO", "handlers": ["told"]}
        (model.parent / "logging.json").write_text(json.dumps(logging))
        env["VLLM_LOGGING_CONFIG_PATH"] = str(model.parent / "logging.json")
        env |= {"VLLM_PLUGINS": plugins, "PYTHONPATH": os.pathsep.join(found)}
        env |= vllm_own.ENV if given.beside else {}
        env["PATH"] = os.pathsep.join([str(Path(given.vllm_python).parent), os.environ["PATH"]])
        servers.Server.__init__(self, command, env, port=port, deadline=deadline)


class Requests:
    """Requests at the same time until it ends, as rollouts would be: short prompts and long ones, short answers and long ones.
    Answers are streamed, and every token counts when it comes. They are made in a process of their own: the trainer's must not
    hold them up."""

    def __init__(self, engine: Any, clients: int, vocabulary: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        words = (engine.url, clients, vocabulary, theirs)
        self._process = context.Process(target=make_requests, args=words, daemon=True)
        self._process.start()

    def times(self) -> list[float]:
        """When each token came so far, in order; an error if a request has failed."""
        self._line.send("times")
        times, failure = self._line.recv()
        if failure:
            raise RuntimeError(f"a request failed meanwhile: {failure}")
        return sorted(times)

    def rates(self, seconds: float, without: Any, with_: Any) -> dict[str, dict[str, Any]]:
        """Tokens a second in the two seconds after each of two things begins, and in each part of those. The two take turns
        for so many seconds each, so that a change of load concerns both alike."""
        starts: dict[str, list[float]] = {"without": [], "with": []}
        for turn in range(2 * max(1, round(seconds / 2.0))):
            began = time.perf_counter()
            starts["with" if turn % 2 else "without"].append(began)
            (with_ if turn % 2 else without)()
            left = began + 2.0 - time.perf_counter()
            if left < 0:
                say(
                    f"WARNING: a step and what follows took {2.0 - left:.1f} s, more than the 2 s that are counted"
                )
            time.sleep(max(0.0, left))
        found, times = {}, self.times()
        for what, begins in starts.items():
            tokens, counts = [], [0] * BINS
            for at in begins:
                first, last = bisect.bisect_left(times, at), bisect.bisect_left(times, at + 2.0)
                tokens.append(last - first)
                for token in times[first:last]:
                    counts[int((token - at) * BINS / 2.0)] += 1
            by_time = [count * BINS / 2.0 / len(begins) for count in counts]
            rate = sum(tokens) / (2.0 * len(begins))
            found[what] = {"rate": rate, "tokens": tokens, "by_time": by_time}
        return found

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(PATIENCE)


def make_requests(url: str, clients: int, vocabulary: int, line: Any) -> None:
    """The process of :class:`Requests`: asks until it is killed, and tells when it is asked."""
    times: list[float] = []
    failures: list[str] = []

    def ask(client: int) -> None:
        for turn in itertools.count(client):
            length = PROMPTS[turn % 4]
            prompt = [3 + (turn * 7919 + i * 104_729) % (vocabulary - 3) for i in range(length)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWERS[turn % 3], "temperature": 1.0}
            try:
                for _ in stream(url, body | {"ignore_eos": True, "stream": True}):
                    # The clock of all processes of a host.
                    times.append(time.perf_counter())
            except Exception as e:
                failures.append(f"{type(e).__name__}: {e}")
                return

    for client in range(clients):
        threading.Thread(target=ask, args=(client,), daemon=True).start()
    while True:
        line.recv()
        line.send((list(times), failures[0] if failures else None))


def stream(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The events of a streamed answer, one for each token."""
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield line.decode()


def measure(given: argparse.Namespace, home: Path, model: Any, folder: Path) -> dict[str, Any]:
    """Every version, and what the server answers after the last."""
    from sidecar import Sidecar
    from windlass import WeightManager

    token = secrets.token_hex(16)
    secret = home / "engine-token"
    secret.touch(0o600)
    secret.write_text(token)
    rows: list[dict[str, Any]] = []
    rates: dict[str, dict[str, Any]] = {}
    own: dict[str, list[dict[str, float]]] = {}
    if given.beside:
        model.save_pretrained(folder)
    manager = WeightManager(model_id="policy", region_dir=str(home), offload_mode=given.offload_mode)
    with manager, Engine(given, folder, token, dummy=not given.beside) as engine:
        say(f"vLLM serves at {engine.url}")
        before = engine.answers()
        model_step = step(model, given.share)
        idle(given.trainer_device)
        manager.offload(model.named_parameters(), 1, 0, 1)
        options = [
            f"--from={manager.endpoint}",
            f"--token-file={manager.token_file}",
            f"--dir={home / 'images'}",
        ]
        options += [f"--engine=vllm={engine.url}", f"--engine-token-file={secret}", f"--model-dir={folder}"]
        options += [f"--pause={given.pause}", f"--prefix-cache={given.prefix_cache}"]
        began = time.perf_counter()
        with Sidecar(*options) as sidecar, Requests(engine, given.clients, SIZES[given.size][5]) as requests:
            first = sidecar.wait("loaded", PATIENCE, version=1)
            first |= {"seconds": time.perf_counter() - began}
            say(f"version 1 is served: {json.dumps(first)}")
            version = 1

            def sync() -> None:
                nonlocal version
                version += 1
                step(model, given.share)
                idle(given.trainer_device)
                start = time.perf_counter()
                told = manager.offload(model.named_parameters(), version, 0, 1)
                blocked = time.perf_counter() - start
                loaded = sidecar.wait("loaded", PATIENCE, version=version)
                visible = time.perf_counter() - start
                rows.append(
                    {
                        "version": version,
                        "offload": told.mode,
                        "how": loaded["how"],
                        "ahead": loaded["ahead"],
                        "slow": loaded["why"],
                        "trainer_blocked_ms": 1e3 * blocked,
                        "step_to_visible_ms": 1e3 * visible,
                        "engine_pause_ms": loaded["pause_ms"],
                        "load_ms": loaded["load_ms"],
                        "stage_ms": loaded.get("stage_ms"),
                        "drain_ms": loaded.get("drain_ms"),
                    }
                )

            for _ in range(given.steps + 2):
                sync()
                # The trainer's next step; its slot and the host's image are written meanwhile.
                manager.wait_delta_ready()
                if rows[-1]["ahead"]:
                    rows[-1]["synced"] = sidecar.wait("synced", PATIENCE)
            timed = rows[2:]
            requests.times()
            if given.seconds:
                # The trainer's own steps go on, as they do on a GPU that both share: what is compared is publishing.
                rates = requests.rates(given.seconds, lambda: step(model, given.share), sync)
                say_rates(rates)
            proved = prove(engine, token, home / "images" / "policy", version)
            requests_made = len(requests.times())
        after = engine.answers()
        if compares(given):
            # What follows changes the model.
            shutil.copytree(folder, home / "checkpoint")
            model.save_pretrained(home / "checkpoint")
        if given.beside:
            with Requests(engine, given.clients, SIZES[given.size][5]) as requests:
                theirs = vllm_own.Own(engine, model, folder)
                # A CPU has no handles to send.
                for way in vllm_own.WAYS[given.device == "cpu" :]:
                    own[way] = []
                    for _ in range(given.beside):
                        step(model, given.share)
                        own[way].append(theirs.sync(way))
                requests.times()
        log = engine.log.read_text(errors="replace")
        served = [
            line[line.index("windlass: version") :] for line in log.splitlines() if "is served:" in line
        ]
        engine.kill()
        alone = [offload_alone(given, manager, model, version + 1 + i) for i in range(given.steps)]
    return {
        "own": own,
        "alone": alone[1:],
        "staged": re.findall(r"a delta is on the device .*", log)[:4],
        "read": re.findall(r"Loading weights took ([0-9.]+) seconds", log),
        "parameters": model_step,
        "rows": timed,
        "all_rows": rows,
        "first": first,
        "rates": rates,
        "proved": proved,
        "served": served,
        "tokens_meanwhile": requests_made,
        "answers_before": before,
        "answers": after,
    }


def say_rates(rates: dict[str, dict[str, Any]]) -> None:
    """Both rates, and where in the two seconds after a step tokens are missing."""
    with_, without = rates["with"], rates["without"]
    lost = [(b - a) * 2.0 / BINS for a, b in zip(with_["by_time"], without["by_time"], strict=True)]
    shown = ", ".join(f"{sum(lost[i : i + 4]):.0f}" for i in range(0, BINS, 4))
    say(f"tokens fewer in each 0.2 s after a step: {shown}")
    ratio = with_["rate"] / without["rate"]
    pairs = [b - a for a, b in zip(without["tokens"], with_["tokens"], strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5 / 2.0 / without["rate"] if len(pairs) > 1 else 1.0
    say(
        f"{with_['rate']:.0f} tokens/s in the 2 s after a step that is published, {without['rate']:.0f} after one that is not: "
        f"{ratio:.3f}, standard error {error:.3f}"
    )


def offload_alone(given: argparse.Namespace, manager: Any, model: Any, version: int) -> float:
    """How long the trainer is blocked where nothing else computes."""
    step(model, given.share)
    idle(given.trainer_device)
    began = time.perf_counter()
    manager.offload(model.named_parameters(), version, 0, 1)
    blocked = 1e3 * (time.perf_counter() - began)
    manager.wait_delta_ready()
    return blocked


def prove(engine: Any, token: str, image: Path, version: int) -> bool:
    """Whether the digest of the weights that the server's workers hold is that of the version in the image."""
    from windlass import _windlass

    held = _windlass.open_image(str(image), 60.0, 60.0)
    try:
        request = urllib.request.Request(engine.url + "/windlass/v1/verify", b"{}", method="POST")
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            workers = json.load(answer)["workers"]
        parts = [json.dumps(worker["parts"]) for worker in workers]
        combined = json.loads(_windlass.combine_digests(held.layout(), parts))
        return held.version == version and combined["digest"] == held.digest
    finally:
        held.finish()


def compares(given: argparse.Namespace) -> bool:
    """Whether tokens prove anything: compiled engines of one checkpoint differ among themselves."""
    return bool(given.eager or given.device == "cpu")


def fresh_answers(given: argparse.Namespace, checkpoint: Path) -> Any:
    """What a server answers that has never heard of us, from a checkpoint of the trainer's weights."""
    with Engine(given, checkpoint, secrets.token_hex(16), dummy=False) as engine:
        return engine.answers()


def figures(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each."""
    found = {}
    for name in ("trainer_blocked_ms", "step_to_visible_ms", "engine_pause_ms", "load_ms", *PARTS):
        values = [row[name] for row in rows if row[name] is not None]
        if values:
            found[name] = middle(values)
    return found


def middle(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread(row: dict[str, float]) -> str:
    return f"median {row['median']:9.2f}   {row['min']:9.2f} .. {row['max']:9.2f}"


def main() -> int:
    """Measures, compares, prints; 0 if the answers are equal."""
    given = arguments()
    try:
        versions = check(given)
    except Missing as e:
        sys.stderr.write(f"\n*** gpu-vllm CANNOT RUN: {e}\n*** nothing was measured\n\n")
        return 2
    # The server ends with this script, also by `timeout`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    home = Path(tempfile.mkdtemp(prefix="windlass-gpu-vllm-", dir=given.home or "/dev/shm"))
    try:
        model = make(given, home / "model")
        found = measure(given, home, model, home / "model")
        fresh = None
        if compares(given):
            say("a second server loads the trainer's checkpoint")
            fresh = fresh_answers(given, home / "checkpoint")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    equal = found["proved"] and (fresh is None or fresh == found["answers"])
    changed = found["answers"] != found["answers_before"]
    summary = figures(found["rows"])
    say(
        f"\nQwen3 {given.size}, {found['parameters']:,} parameters, about {given.share:.1%} changed in each of {given.steps} steps"
    )
    say(
        f"vLLM {versions['vllm']}, torch {versions['torch']}, {versions['gpu'] or 'no GPU: times mean nothing'}"
    )
    for name, row in summary.items():
        say(f"  {name:20} {spread(row)}")
    if found["alone"]:
        summary["trainer_alone_ms"] = middle(found["alone"])
        say(f"  {'trainer_alone_ms':20} {spread(summary['trainer_alone_ms'])}")
    for way, rows in found["own"].items():
        for name in rows[0]:
            # The first of each connects and opens.
            value = summary[f"own_{way}_{name}"] = middle([row[name] for row in rows[1:] or rows])
            say(f"  vLLM's own {way:6} {name:20} {spread(value)}")
    first = found["all_rows"][0]
    say(
        f"  first version loaded in {found['first']['load_ms']:.0f} ms, first delta {first['step_to_visible_ms']:.1f} ms to visible"
    )
    for seconds in found["read"]:
        say(f"  vLLM read the checkpoint that it began from in {seconds} s")
    kinds = {key: sorted({row[key] for row in found["rows"]}) for key in ("offload", "how")}
    say(f"  offloaded by {', '.join(kinds['offload'])}; loaded {', '.join(kinds['how'])}")
    ahead = sum(row["ahead"] for row in found["rows"])
    say(f"  {ahead} of {len(found['rows'])} versions were loaded before the host's image held them")
    for why in sorted({row["slow"] for row in found["all_rows"] if row["slow"]}):
        say(f"  WARNING: vLLM's own loader was used: {why}")
    for line in found["served"][-3:]:
        say(f"  {line}")
    say(f"  {found['tokens_meanwhile']} tokens were generated meanwhile")
    say(
        f"  digest of the live weights: {'that of the version' if found['proved'] else 'ANOTHER THAN THE VERSION'}"
    )
    if fresh is not None:
        say(
            f"  greedy answers {'EQUAL' if fresh == found['answers'] else 'DIFFER FROM'} those of a fresh server"
            + ("" if changed else " (and of no weights at all)")
        )
    if given.json:
        everything = {
            "arguments": vars(given),
            "versions": versions,
            "summary": summary,
            "equal": equal,
            **found,
        }
        everything["fresh_answers"] = fresh
        Path(given.json).write_text(json.dumps(everything, indent=1) + "\n")
    rates = {way: row["rate"] for way, row in found["rates"].items()}
    told = {"size": given.size, "equal": equal, "changed": changed, "rates": rates}
    say(json.dumps({**told, **kinds, **summary}))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
