"""A trainer's process and an engine's process, from the optimizer's step to the answers, on one GPU.

    PYTHONPATH=python python tests/gpu/end_to_end.py [--device cpu] [--versions 10] [NAME...]

Needs torch, transformers and the built extension. The trainer is this process: a tiny Qwen3 in bf16 with a real
optimizer. The engine is a child of it: the reference engine (``reference.py``), fused and plain, which answers throughout.

| test | the way of a version |
|---|---|
| disaggregated | ``WeightManager`` in delta mode, ``Receiver`` over TCP on loopback, ``Live``, staged before the pause |
| colocated | both CUDA IPC strategies, ``PlannedLoader`` |

After every version, greedy answers are those of a fresh model with the trainer's weights, and the digest of the live
weights is the version's. At the end every token that was made meanwhile is made again, with the versions that it was made
with: one that was computed with parts of two versions would differ. With ``--device cpu`` the second is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import needs

needs.need("torch", "transformers", "windlass")

import reference  # noqa: E402
import torch  # noqa: E402
from reference import PATIENCE, Child, ReferenceEngine, ReferenceSession, Token  # noqa: E402

from windlass import Receiver, WeightManager, _windlass, strategy_from_config  # noqa: E402
from windlass.extract.chunk import WeightChunk  # noqa: E402
from windlass.load import Live, LoadOrder, take  # noqa: E402
from windlass.load.planned import PlannedLoader  # noqa: E402
from windlass.load.trace import trace  # noqa: E402
from windlass.receive.follow import Follower  # noqa: E402
from windlass.transfer.request import parse_request  # noqa: E402

SIZE = "tiny"
#: Tokens that are made with each version at the least.
TOKENS = 6
#: How far the score of a token may be from that of the same step made again, as a part of it. A mixture of two versions may
#: be as near as one unit of bf16, so that only 0 proves that there was none.
NEAR = 0.0


def built(form: str, device: str, seed: int) -> Any:
    made = reference.plain(SIZE, device, seed)
    return reference.fuse(made) if form == "fused" else made


# The engine's process.


class Serving:
    """What both ways into the engine have in common."""

    def __init__(self, form: str, device: str) -> None:
        # Other weights than the trainer's.
        self.model = built(form, device, 99)
        self.engine = ReferenceEngine(self.model)
        self.session = ReferenceSession(self.model)

    def answers(self) -> list[Any]:
        with self.engine.pause(record=False):
            return reference.answers(self.model)

    def made(self, version: int) -> int:
        """How many tokens there are of a version, as soon as there are enough."""
        until = time.monotonic() + PATIENCE
        while (count := sum(t.version == version for t in list(self.engine.tokens))) < TOKENS:
            if self.engine.error is not None or time.monotonic() > until:
                raise RuntimeError(f"{count} tokens of version {version}: {self.engine.error}")
            time.sleep(0.001)
        return count

    def tokens(self) -> list[Any]:
        with self.engine.pause(record=False):
            return [[t.answer, t.version, t.token, t.score] for t in self.engine.tokens]

    def pauses(self) -> list[float]:
        return self.engine.pauses

    def close(self) -> None:
        self.engine.close()


class Disaggregated(Serving):
    """Versions by TCP into an image, and from there by what changed."""

    def __init__(self, form: str, device: str, image: str, endpoint: str, token_file: str) -> None:
        super().__init__(form, device)
        self.receiver = Receiver(
            image, endpoint=endpoint, token_file=token_file, keep_deltas=8, mode="auto", timeout=PATIENCE
        )
        self.live = Live(self.session, engine="reference", threads=2, verify_every=4)
        self.order: LoadOrder | None = None
        self.staged = False
        self.follower = Follower(self.receiver, self._load, self.engine.pause, self._stage)

    def _stage(self, image: Any) -> None:
        self.staged = self.live.stage(LoadOrder.of(image))

    def _load(self, image: Any) -> None:
        self.order = LoadOrder.of(image)
        report = self.live.load(self.order)
        if report.state != "clean":
            raise RuntimeError(f"the load failed: {report.error}")
        self.engine.version = image.version

    def follow(self, version: int) -> dict[str, Any]:
        """Takes versions over until it has this one."""
        until, loaded = time.monotonic() + PATIENCE, None
        while loaded is None or loaded.version < version:
            if time.monotonic() > until:
                raise TimeoutError(f"version {version} did not come; the image has {self.receiver.version}")
            if (step := self.follower.step(5.0)) is not None:
                loaded = step
            else:
                sys.stderr.write(f"nothing came for 5 s: {version} is waited for\n")
        self.engine.start()
        last = self.live.report().last
        assert last is not None
        return {
            "version": loaded.version,
            "mode": loaded.mode,
            "how": last.how,
            "load_ms": last.ms,
            "staged": self.staged,
        }

    def digest(self) -> str | None:
        assert self.order is not None
        parts = self.live.digest()["parts"]
        held = _windlass.open_image(self.order.image, 60.0, 60.0)
        told: str | None = json.loads(_windlass.combine_digests(held.layout(), [json.dumps(parts)]))["digest"]
        held.finish()
        return told

    def close(self) -> None:
        super().close()
        self.receiver.close()


class Taking(Disaggregated):
    """The same by :func:`windlass.load.take`: on a GPU, what changed is there before the image has it."""

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        with self.engine.pause():
            yield
            live, image = self.live.report().live, self.receiver.version
            assert live is not None and image is not None
            self.engine.version, self.staged = live.version, image < live.version

    def follow(self, version: int) -> dict[str, Any]:
        """Takes versions over until it has this one."""
        until = time.monotonic() + PATIENCE
        report = take(self.live, self.receiver, self._pause, timeout=PATIENCE)
        while report is not None and report.live is not None and report.live.version < version:
            report = take(self.live, self.receiver, self._pause, timeout=until - time.monotonic())
        if report is None or report.live is None or report.last is None:
            raise TimeoutError(f"version {version} did not come; the image has {self.receiver.version}")
        self.engine.start()
        with self.receiver.hold() as image:
            self.order = LoadOrder.of(image)
        told = {"version": report.live.version, "how": report.last.how, "load_ms": report.last.ms}
        return told | {"staged": self.staged}


class Colocated(Serving):
    """Versions by CUDA IPC, into parameters by copies that are known."""

    def __init__(self, form: str, device: str, kind: str) -> None:
        super().__init__(form, device)
        tensors = {n: p.cpu() for n, p in reference.plain(SIZE, "cpu").named_parameters()}
        with self.session.rehearsal() as targets:
            found = trace(self.session.load_weights, tensors, targets)
        live = dict(self.model.named_parameters(remove_duplicate=False))
        parameters = [live[target.name] for target in found.targets]
        self.loader = PlannedLoader(parameters, found.copies)
        self.layout = layout_of(tensors)
        used = sorted({c.target for c in found.copies})
        rows = [(found.targets[i].name, parameters[i].numel(), "bfloat16") for i in used]
        copies = [
            (c.source, c.source_offset, used.index(c.target), c.target_offset)
            + (list(c.sizes), list(c.source_strides), list(c.target_strides))
            for c in found.copies
        ]
        plan = _windlass.LoadPlan(self.layout, rows, copies)
        gpu = _windlass.Gpu.open(0)
        self.plan = gpu.load_plan(plan, [parameters[i].data_ptr() for i in used])
        strategy = strategy_from_config({"strategy": kind, "timeout": 60.0})
        self.receiver: Any = strategy.create_receiver(strategy.create_sync_info())
        self.standing = contextlib.ExitStack()

    def begin(self) -> None:
        self.standing.enter_context(self.engine.pause())

    def update(self, request: Any) -> None:
        asyncio.run(self.receiver.receive_and_load_weights(parse_request(request), self.loader))

    def resume(self, version: int) -> None:
        torch.cuda.synchronize()
        self.engine.version = version
        self.standing.close()
        self.engine.start()

    def digest(self) -> str | None:
        stream = int(torch.cuda.current_stream().cuda_stream)
        told: str | None = json.loads(_windlass.combine_digests(self.layout, [self.plan.digest(stream)]))[
            "digest"
        ]
        return told

    def close(self) -> None:
        super().close()
        self.receiver.close()


def layout_of(tensors: dict[str, torch.Tensor]) -> _windlass.Layout:
    return _windlass.Layout([(name, "BF16", list(t.shape)) for name, t in tensors.items()])


def serve(given: dict[str, Any]) -> None:
    way = given.pop("way")
    ways = {"disaggregated": Disaggregated, "taking": Taking, "colocated": Colocated}
    reference.answer(ways[way](**given))


# The trainer's process.


class Engine(Child):
    """The engine's process, as a client of the IPC strategies."""

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self.ask, "update", request=request.to_dict())


@contextlib.contextmanager
def engine(**given: Any) -> Iterator[Engine]:
    made = Engine(__file__, **given)
    try:
        yield made
    finally:
        made.kill()


class Trainer:
    """A model, an optimizer, and what every version was."""

    def __init__(self, device: str, form: str) -> None:
        self.device, self.form = device, form
        self.model = reference.plain(SIZE, device, 1).requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4)
        self.pick = torch.Generator().manual_seed(5)
        #: Fresh models of every version, as the engine holds them.
        self.versions: dict[int, Any] = {}
        self.changed: list[float] = []

    def step(self) -> None:
        before = [p.detach().clone() for p in self.model.parameters()]
        ids = torch.randint(0, 512, (2, 24), generator=self.pick).to(self.device)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        differ = sum(int((a != b).sum()) for a, b in zip(before, self.model.parameters()))
        self.changed.append(differ / sum(p.numel() for p in before))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def keep(self, version: int) -> list[list[list[float]]]:
        """Makes a fresh model of the weights as they are, and what it answers."""
        fresh = built(self.form, self.device, 50)
        ReferenceSession(fresh).load(self.tensors().items())
        self.versions[version] = fresh
        return [[list(step) for step in answer] for answer in reference.answers(fresh)]

    def check(self, version: int, to: Engine) -> list[list[float]]:
        """The engine answers as a fresh model does."""
        wanted, found = self.keep(version), to.ask("answers")
        assert [[t for t, _ in a] for a in found] == [[t for t, _ in a] for a in wanted], (
            f"version {version}: the engine answers {found}, a fresh model {wanted}"
        )
        assert to.ask("made", version=version) >= TOKENS
        return [[t for t, _ in a] for a in found]

    def check_tokens(self, to: Engine, answers: list[Any]) -> str:
        assert len({json.dumps(a) for a in answers}) > 1, "no version changed an answer: nothing was proved"
        tokens = [Token(*row) for row in to.ask("tokens")]
        assert {t.version for t in tokens} == set(self.versions)
        steps, mixed = reference.replay(tokens, self.versions, NEAR)
        pauses = to.ask("pauses")
        return (
            f"{steps} tokens, {mixed} answers across versions, {statistics.median(self.changed):.1%} changed a step, "
            f"pauses ms: median {statistics.median(pauses[1:]):.2f} of {[round(p, 2) for p in pauses]}"
        )


def test_disaggregated(device: str, versions: int) -> str:
    notes = []
    for way, form in (("disaggregated", "fused"), ("disaggregated", "plain"), ("taking", "fused")):
        trainer = Trainer(device, form)
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="e2e-") as home, WeightManager(
            model_id="policy", region_dir=home, offload_mode="delta", timeout=60.0
        ) as wm:  # fmt: skip
            answers, hows = [], []
            wm.offload(trainer.tensors(), 1, 0, 1)
            given = {"image": f"{home}/image", "endpoint": wm.endpoint, "token_file": wm.token_file}
            with engine(way=way, form=form, device=device, **given) as to:
                for version in range(1, versions + 2):
                    if version > 1:
                        trainer.step()
                        mode = wm.offload(trainer.tensors(), version, 0, 1).mode
                        # The first may still be a copy, from which the baseline is made.
                        assert mode == "delta" or version == 2, f"version {version} went by {mode}"
                    told = to.ask("follow", version=version)
                    assert told["version"] == version
                    hows.append(told["how"])
                    assert told["staged"] == (device != "cpu" and version > 1), told
                    answers.append(trainer.check(version, to))
                    assert to.ask("digest") == wm.wait_delta_ready(version), f"version {version}"
                assert hows == ["session"] + ["sparse"] * versions, hows
                notes.append(f"{way}, {form}: {trainer.check_tokens(to, answers)}")
    return "; ".join(notes)


def state_digest(tensors: dict[str, torch.Tensor]) -> str | None:
    """The digest of tensors of the trainer, by the CPU."""
    host = {name: t.cpu().contiguous() for name, t in tensors.items()}
    layout = layout_of(host)
    rows = [(name, t.numel(), "bfloat16") for name, t in host.items()]
    copies = [(name, 0, i, 0, [t.numel()], [1], [1]) for i, (name, t) in enumerate(host.items())]
    plan = _windlass.LoadPlan(layout, rows, copies)
    proof = plan.digest([t.data_ptr() for t in host.values()])
    told: str | None = json.loads(_windlass.combine_digests(layout, [proof]))["digest"]
    return told


def test_colocated(device: str, versions: int) -> str:
    if device == "cpu":
        return "SKIPPED: no GPU is used, and CUDA IPC is between processes of one"
    notes = []
    for kind in ("packed_cuda_ipc", "cuda_ipc"):
        for form in ("fused", "plain"):
            trainer, answers = Trainer(device, form), []
            strategy = strategy_from_config({"strategy": kind, "timeout": 60.0})
            with (
                engine(way="colocated", form=form, device=device, kind=kind) as to,
                strategy.create_sender(strategy.create_sync_info()) as sender,
            ):
                for version in range(1, versions + 2):
                    if version > 1:
                        trainer.step()
                    pairs = list(trainer.tensors().items())
                    chunks = [WeightChunk.of(pairs[i::3]) for i in range(3)]
                    to.ask("begin")
                    asyncio.run(sender.send_chunks(chunks, to))
                    to.ask("resume", version=version)
                    answers.append(trainer.check(version, to))
                    assert to.ask("digest") == state_digest(trainer.tensors()), f"version {version}"
                notes.append(f"{kind}, {form}: {trainer.check_tokens(to, answers)}")
    return "; ".join(notes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of the names of tests")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--versions", type=needs.whole(1), default=10)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument(
        "--near", type=float, default=0.0, help="where kernels do not repeat themselves: 0.02"
    )
    given = parser.parse_args()
    global NEAR
    NEAR = given.near
    logging.basicConfig(level=logging.WARNING, format="  log: %(message)s")
    torch.set_num_threads(1)
    if given.serve:
        serve(json.loads(given.serve))
        return 0
    if given.device == "cuda":
        needs.need_device("the way from a trainer to an engine", "--device cpu tests a part of it")
    return needs.run_tests(globals(), given.names, given.device, given.versions, patience=2 * PATIENCE)


if __name__ == "__main__":
    sys.exit(main())
