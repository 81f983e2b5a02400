"""Hosts that keep a part of the model: what workers read, what crosses the network, and what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from windlass import Receiver, WindlassError, WindlassInvalid, WindlassTimeout, _windlass, open_image
from windlass._windlass import Layout
from windlass.frameworks.sender import Sender
from windlass.identity import Identity
from windlass.load.live import Live
from windlass.load.model import ModelSession
from windlass.load.needs import blank, needs_of
from windlass.load.order import LoadOrder
from windlass.load.trace import Copy, Target, Trace, trace
from windlass.publish.division import Division
from windlass.receive.pulling import Brought, Pulling
from windlass.receive.reading import Reading, Selection, merged

WIDTH, RANKS = 512, 2
SHAPES = {
    "attn.q.weight": (WIDTH, WIDTH),
    "attn.k.weight": (WIDTH, WIDTH),
    "attn.o.weight": (WIDTH, 4 * WIDTH),
    "mlp.up.weight": (2 * WIDTH, WIDTH),
    "norm.weight": (WIDTH,),
    "draft.weight": (WIDTH, WIDTH),
}


class Share(nn.Module):
    """What one of two ranks has of a model: fused rows, columns, and a norm that both have."""

    def __init__(self) -> None:
        super().__init__()
        part = WIDTH // RANKS
        self.qk = nn.Parameter(torch.zeros(2 * part, WIDTH), requires_grad=False)
        self.o = nn.Parameter(torch.zeros(WIDTH, 4 * part), requires_grad=False)
        self.up = nn.Parameter(torch.zeros(2 * part, WIDTH), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)


class Rank(ModelSession):
    """The loader of one of two ranks."""

    shares = RANKS

    def __init__(self, rank: int) -> None:
        super().__init__(Share())
        self._rank = rank

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        model, done = self.model, set()
        assert isinstance(model, Share)
        for name, tensor in weights:
            if name in ("attn.q.weight", "attn.k.weight"):
                half = WIDTH // RANKS
                at = half * (name == "attn.k.weight")
                model.qk[at : at + half].copy_(tensor.chunk(RANKS)[self._rank])
                done.add("qk")
            elif name == "attn.o.weight":
                model.o.copy_(tensor.chunk(RANKS, dim=1)[self._rank])
                done.add("o")
            elif name == "mlp.up.weight":
                model.up.copy_(tensor.narrow(0, self._rank * WIDTH, WIDTH))
                done.add("up")
            elif name == "norm.weight":
                model.norm.copy_(tensor)
                done.add("norm")
        return done

    def expect(self, tensors: dict[str, torch.Tensor]) -> None:
        """The weights must be those of the trainer."""
        model, rank = self.model, self._rank
        assert isinstance(model, Share)
        qk = [tensors[f"attn.{n}.weight"].chunk(RANKS)[rank] for n in "qk"]
        assert torch.equal(model.qk, torch.cat(qk))
        assert torch.equal(model.o, tensors["attn.o.weight"].chunk(RANKS, dim=1)[rank])
        assert torch.equal(model.up, tensors["mlp.up.weight"].chunk(RANKS)[rank])
        assert torch.equal(model.norm, tensors["norm.weight"])


class World:
    """A trainer, and hosts of one worker each, with images of their own."""

    def __init__(self, home: Path, slices: int = RANKS) -> None:
        self.home = home
        settings = {"model_id": "policy", "region_dir": str(home), "timeout": 60.0, "slices": slices}
        self.sender = Sender(settings)
        torch.manual_seed(7)
        self.tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}

    def publish(self) -> Identity:
        if self.sender.version:
            for tensor in self.tensors.values():
                flat = tensor.view(-1)
                flat[torch.randint(0, len(flat), (len(flat) // 100 + 1,))] += 1.0
        return self.sender.publish(list(self.tensors.items())).identity

    def pulling(self, host: str) -> Pulling:
        source = self.sender.source()
        return Pulling(self.home / host, endpoint=source.endpoint, token=source.token)

    def layout(self) -> Layout:
        source = self.sender.source()
        assert source.token is not None
        return _windlass.layout_of(source.endpoint, source.token, None, 30.0)[1]


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="slices-") as folder:
        made: list[World] = []

        def make(slices: int = RANKS) -> World:
            made.append(World(Path(folder), slices))
            return made[-1]

        yield make
        for one in made:
            one.sender.close()


def order_of(brought: Brought) -> LoadOrder:
    return LoadOrder(image=str(brought.image), digest="", **vars(brought.identity))


def held_bytes(image: Path) -> int:
    """Memory that an image's slot takes."""
    return (image / "a.safetensors").stat().st_blocks * 512


def test_each_host_brings_and_keeps_only_what_its_workers_read(world: Callable[..., World]) -> None:
    trainer = world()
    trainer.publish()
    size = sum(t.numel() * 4 for t in trainer.tensors.values())
    ranks = [Rank(r) for r in range(RANKS)]
    lives = [Live(session, rank=r) for r, session in enumerate(ranks)]
    hosts = [trainer.pulling(f"host{r}") for r in range(RANKS)]
    layout = trainer.layout()
    for rank, (live, host) in enumerate(zip(lives, hosts)):
        host.read("policy", live.needs(layout), rank, 1)
    used = size - 4 * WIDTH * WIDTH
    for version in (1, 2, 3):
        wanted = (
            trainer.publish() if version > 1 else Identity("policy", trainer.sender.manager.incarnation, 1)
        )
        for live, host, session in zip(lives, hosts, ranks):
            brought = host.bring(wanted, 60.0)
            assert brought.synced is not None
            assert brought.synced.mode == ("full" if version == 1 else "delta")
            if version == 1:
                assert brought.synced.wire_bytes <= 1.1 * used / RANKS
            report = live.load(order_of(brought))
            assert report.error is None and report.last is not None
            # The first load is the reference; later ones write what changed.
            assert report.last.how == ("session" if version == 1 else "sparse"), report
            session.expect(trainer.tensors)
    for host in hosts:
        assert held_bytes(host.image_of("policy")) <= 1.1 * used / RANKS
        host.close()


def test_what_a_slice_lacks_is_refused_and_never_read_as_zeros(world: Callable[..., World]) -> None:
    trainer = world()
    wanted = trainer.publish()
    layout = trainer.layout()
    host = trainer.pulling("host")
    host.read("policy", Live(Rank(0)).needs(layout), 0, 1)
    image = host.bring(wanted, 60.0).image
    with open_image(image) as held:
        assert torch.equal(held.tensors["norm.weight"], trainer.tensors["norm.weight"])
        for name in ("attn.o.weight", "mlp.up.weight", "draft.weight"):
            with pytest.raises(WindlassInvalid, match=f"slice of the model.*{name}") as caught:
                held.tensors[name]
            assert caught.value.name == "outside_slice"
    with pytest.raises(WindlassError, match="keeps .* of the .* blocks of its model"):
        _windlass.open_image(image, 5.0, 5.0)
    # The other rank's worker, which reads the other half.
    session = Rank(1)
    before = {name: p.clone() for name, p in session.model.named_parameters()}
    live = Live(session, rank=1)
    with pytest.raises(WindlassInvalid, match=r"without all that rank 1 reads of attn\.") as caught:
        live.load(order_of(Brought(image, wanted, "", None)))
    assert caught.value.name == "outside_slice"
    assert all(torch.equal(p, before[name]) for name, p in session.model.named_parameters())
    assert live.report().state == "clean"
    host.close()


def test_workers_of_one_host_have_what_any_of_them_reads(world: Callable[..., World]) -> None:
    trainer = world()
    wanted = trainer.publish()
    layout = trainer.layout()
    sessions = [Rank(r) for r in range(RANKS)]
    lives = [Live(session, rank=r) for r, session in enumerate(sessions)]
    pulls = [trainer.pulling("host") for _ in lives]
    found: list[Brought | BaseException] = []

    def bring(pulling: Pulling) -> None:
        try:
            found.append(pulling.bring(wanted, 60.0))
        except BaseException as e:
            found.append(e)

    pulls[0].read("policy", lives[0].needs(layout), 0, RANKS)
    first = threading.Thread(target=bring, args=(pulls[0],))
    first.start()
    # It waits for the other one, which says what it reads only now.
    pulls[1].read("policy", lives[1].needs(layout), 1, RANKS)
    bring(pulls[1])
    first.join(60.0)
    assert all(isinstance(f, Brought) for f in found), found
    with open_image(pulls[0].image_of("policy")) as held:
        # What only the trainer has is left out.
        assert torch.equal(held.tensors["attn.o.weight"], trainer.tensors["attn.o.weight"])
        with pytest.raises(WindlassInvalid, match="draft"):
            held.tensors["draft.weight"]
    for live, session in zip(lives, sessions):
        brought = found[0]
        assert isinstance(brought, Brought)
        live.load(order_of(brought))
        session.expect(trainer.tensors)
    for pulling in pulls:
        pulling.close()


def test_a_worker_that_says_nothing_is_missed_in_time(world: Callable[..., World]) -> None:
    trainer = world()
    wanted = trainer.publish()
    host = trainer.pulling("host")
    host.read("policy", Live(Rank(0)).needs(trainer.layout()), 0, 3)
    with pytest.raises(WindlassTimeout, match="1 of the engine's 3 workers"):
        host.bring(wanted, 0.5)
    host.close()


def test_an_engine_with_another_parallelism_has_its_image_made_anew(world: Callable[..., World]) -> None:
    trainer = world()
    wanted = trainer.publish()
    layout = trainer.layout()
    host = trainer.pulling("host")
    for rank in (0, 1, 0):
        session = Rank(rank)
        live = Live(session, rank=rank)
        host.read("policy", live.needs(layout), rank, 1)
        brought = host.bring(wanted, 60.0)
        assert brought.synced is not None and brought.synced.mode == "full"
        live.load(order_of(brought))
        session.expect(trainer.tensors)
    host.close()


SAYS = """
import sys, time
from pathlib import Path
from windlass.receive.reading import Reading, Selection, merged
Reading(Path(sys.argv[1]), "policy", {"gone.weight": [[]]}, 5, 1)
print("said", flush=True)
time.sleep(600)
"""


def test_what_a_killed_worker_read_does_not_count(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", SAYS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "said\n"
    own = Reading(tmp_path, "policy", {"w": [[[0, 4]]]}, 0, 1)
    # Of another model, whose name begins alike.
    other = Reading(tmp_path, "policy-b", {"b.weight": [[]]}, 0, 1)
    until, stopped = time.monotonic() + 60.0, threading.Event()
    assert own.of_all(until, stopped) == {"w": [[[0, 4]]], "gone.weight": [[]]}
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    assert own.of_all(until, stopped) == {"w": [[[0, 4]]]}
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == [f".reads-policy-0-{os.getpid()}"]
    own.close()
    assert not list(tmp_path.iterdir())


def test_a_box_has_all_that_a_copy_reads() -> None:
    pick = random.Random(5)
    for _ in range(300):
        shape = [pick.randint(1, 7) for _ in range(pick.randint(1, 3))]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        view = whole
        for dim, size in enumerate(shape):
            first = pick.randrange(size)
            view = view.narrow(dim, first, pick.randint(1, size - first))
        how = pick.choice(["as it is", "transposed", "every other", "flat"])
        if how == "transposed" and view.dim() > 1:
            view = view.transpose(0, 1)
        elif how == "every other":
            view = view[::2]
        elif how == "flat":
            first = pick.randrange(whole.numel())
            view = whole.view(-1)[first : pick.randint(first + 1, whole.numel())]
        made = Copy("w", view.storage_offset(), view.stride(), 0, 0, view.stride(), tuple(view.shape))
        found = Trace([Target("", "w", whole)], copies=[made], reached={"w": {0}})
        (box,) = needs_of(found, Layout([("w", "float32", shape)]))["w"]
        inside = whole[tuple(slice(a, b) for a, b in box)]
        assert set(view.reshape(-1).tolist()) <= set(inside.reshape(-1).tolist()), (shape, how, box)
        if how in ("as it is", "transposed"):
            assert inside.numel() == view.numel()


def test_what_passes_an_operation_is_needed_whole() -> None:
    layout = Layout([("a", "float32", [8, 4]), ("b", "float32", [8, 4])])
    into = torch.zeros(4, 4)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            into.copy_(tensor[:4] * 2 if name == "a" else tensor[:4])

    found = trace(load, blank(layout), [Target("", "w", into)])
    # Both reach the same parameter, of which it is not known what was read.
    assert needs_of(found, layout) == {"a": [[[0, 8], [0, 4]]], "b": [[[0, 8], [0, 4]]]}


def test_selections_are_merged_without_repeating() -> None:
    one: Selection = {"w": [[[0, 4], [0, 8]]], "a": [[[0, 2]]]}
    other: Selection = {"w": [[[0, 4], [2, 3]], [[4, 8], [0, 8]]]}
    assert merged([one, other]) == {"w": [[[0, 4], [0, 8]], [[4, 8], [0, 8]]], "a": [[[0, 2]]]}


def test_columns_are_blocks_of_their_own_where_the_trainer_says_so(world: Callable[..., World]) -> None:
    sizes = []
    for slices, host in ((1, "uncut"), (RANKS, "cut")):
        trainer = world(slices)
        trainer.publish()
        source = trainer.sender.source()
        columns: Selection = {"attn.o.weight": [[[0, WIDTH], [0, WIDTH]]]}
        folder = trainer.home / host
        with Receiver(folder, endpoint=source.endpoint, token=source.token, slice=columns) as receiver:
            sizes.append(receiver.wait(1).wire_bytes)
        trainer.sender.close()
    assert sizes[1] <= 0.55 * sizes[0], sizes


def test_ranks_must_cut_alike() -> None:
    said = [
        {"node": "n", "tensors": [["w", "float32", [4], [[2 * r, 2 * r + 2]]]], "aliases": {}, "empty": []}
        for r in range(2)
    ]
    words = [{**one, "by_rank": False, "slices": 1 + rank} for rank, one in enumerate(said)]
    with pytest.raises(WindlassInvalid, match="rank 0 has slices=1 and rank 1 slices=2"):
        Division(words)


@pytest.mark.parametrize(
    ("slice", "words"),
    [
        ({"attn.z.weight": [[]]}, "matches no tensor"),
        ({"norm.weight": [[[0, WIDTH + 1]]]}, f"end <= {WIDTH}"),
        ({"norm.weight": []}, "write"),
        ({}, "1 to 1000000 patterns"),
    ],
)
def test_a_slice_that_does_not_fit_is_named(
    world: Callable[..., World], slice: Selection, words: str
) -> None:
    trainer = world()
    trainer.publish()
    source = trainer.sender.source()
    with (
        pytest.raises(WindlassInvalid, match=words),
        Receiver(
            trainer.home / "host", endpoint=source.endpoint, token=source.token, slice=slice
        ) as receiver,
    ):
        receiver.wait(1)


def test_the_command_keeps_the_slice_of_a_file(world: Callable[..., World], tmp_path: Path) -> None:
    trainer = world()
    trainer.publish()
    trainer.sender.sealed(60.0)
    (file := tmp_path / "slice.json").write_text(json.dumps({"attn.*": [[[0, 256]]]}))
    region = trainer.sender.manager.region
    words = [
        sys.executable,
        "-m",
        "windlass",
        "receive",
        "--region",
        str(region),
        "--dir",
        str(trainer.home / "host"),
    ]
    done = subprocess.run(
        [*words, "--slice", str(file), "--until", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with open_image(trainer.home / "host" / "policy") as held, pytest.raises(WindlassInvalid, match="norm"):
        held.tensors["norm.weight"]
    for text, said in (("{", "not a valid selection"), ('{"attn.*": []}', "write [[]] for whole tensors")):
        file.write_text(text)
        done = subprocess.run(
            [*words, "--slice", str(file), "--until", "1"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2 and said in done.stderr and str(file) in done.stderr, done.stderr
