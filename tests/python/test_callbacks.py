"""Callbacks in the libraries' own trainers: a receiver has the trainer's weights after each of its optimizer steps."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from torch import nn

from children import environment
from controlled import world
from windlass import Receiver, WeightManager, WindlassInvalid, WindlassNotFound, open_image
from windlass.callbacks import AcceleratePublisher, WindlassCallback

transformers = pytest.importorskip("transformers")

FIGURES = {f"windlass/offload_{name}" for name in ("version", "bytes", "wait_ms", "copy_ms", "commit_ms")}


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="callbacks-") as folder:
        yield folder


def tiny() -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Tokens(torch.utils.data.Dataset[Any]):
    """Sixteen sequences; one of them may raise an error."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.broken:
            raise OSError("the disk is gone")
        tokens = (torch.arange(6) * 5 + index) % 32
        return {"input_ids": tokens, "labels": tokens}


class Seen(transformers.TrainerCallback):
    """Compares a receiver's image with the model after each step that was published."""

    def __init__(self, callback: WindlassCallback, home: str, model_id: str = "policy") -> None:
        self.callback, self.home, self.model_id = callback, home, model_id
        self.versions: list[int] = []
        self.incarnations: list[int] = []
        self.receiver: Receiver | None = None
        self.named = WeightsOf.model

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        manager = self.callback.manager
        assert manager is not None
        if manager.version != state.global_step:
            return
        if self.receiver is None:
            region = f"{self.home}/windlass-{self.model_id}"
            self.receiver = Receiver(f"{self.home}/images", region=region, relay=False)
        self.receiver.wait(state.global_step, timeout=30)
        with self.receiver.hold() as image:
            wanted = self.named(model)
            assert image.version == state.global_step
            assert set(wanted) <= {*image.tensors}
            for name, tensor in wanted.items():
                assert torch.equal(image.tensors[name], tensor), name
            self.incarnations.append(image.incarnation)
        self.versions.append(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.close()

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


class WeightsOf:
    """What a receiver should have of a model."""

    @staticmethod
    def model(model: Any) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in model.named_parameters()}

    @staticmethod
    def merged(model: Any) -> dict[str, torch.Tensor]:
        return WeightsOf.model(copy.deepcopy(model).merge_and_unload())


def trainer_for(folder: Path, model: Any = None, data: Any = None, **options: Any) -> Any:
    args = {"per_device_train_batch_size": 1, "learning_rate": 1e-2, "disable_tqdm": True, "report_to": []}
    args |= {
        "save_strategy": "no",
        "use_cpu": True,
        "logging_steps": 1,
        "dataloader_num_workers": 0,
        **options,
    }
    return transformers.Trainer(
        model=model or tiny(),
        args=transformers.TrainingArguments(output_dir=str(folder), **args),
        train_dataset=data or Tokens(),
    )


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars of TensorBoard's files: values by step, by name."""
    proto = import_module("tensorboardX.proto.event_pb2")
    found: dict[str, dict[int, float]] = {}
    for path in folder.rglob("events.out.tfevents.*"):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = proto.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_a_transformers_trainer_publishes_every_optimizer_step(home: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, max_steps=3)
    callback = WindlassCallback(trainer, model_id="policy", region_dir=home, timeout=20.0)
    trainer.add_callback(callback)
    seen = Seen(callback, home)
    trainer.add_callback(seen)
    trainer.train()
    assert seen.versions == [1, 2, 3] and len(set(seen.incarnations)) == 1
    # At the end all is gone, and the receiver keeps its image.
    assert callback.manager is None
    assert [path.name for path in Path(home).iterdir()] == ["images"]


def test_figures_of_versions_are_in_what_a_transformers_trainer_logs(home: str, tmp_path: Path) -> None:
    report_to = ["tensorboard"] if find_spec("tensorboardX") else []
    trainer = trainer_for(tmp_path, max_steps=4, logging_steps=2, report_to=report_to)
    callback = WindlassCallback(trainer, every=2, region_dir=home, drain=0.0)
    trainer.add_callback(callback)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "windlass/offload_version" in row]
    assert [(row["step"], row["windlass/offload_version"]) for row in rows] == [(2, 2), (4, 4)]
    assert all(row.keys() >= FIGURES | {"loss"} for row in rows)
    assert all(row["windlass/offload_bytes"] > 0 for row in rows)
    if not report_to:
        pytest.skip("NOT TESTED: TensorBoard's files, because tensorboardX is missing")
    written = scalars(tmp_path)
    assert written["train/windlass/offload_version"] == {2: 2.0, 4: 4.0}
    assert {f"train/{name}" for name in FIGURES | {"loss"}} <= written.keys()


def test_accumulated_gradients_are_one_step_and_the_last_step_is_published(home: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, max_steps=5, gradient_accumulation_steps=2)
    callback = WindlassCallback(every=2, region_dir=home, drain=0.0)
    trainer.add_callback(callback)
    seen = Seen(callback, home)
    trainer.add_callback(seen)
    trainer.train()
    assert seen.versions == [2, 4, 5]


def test_a_step_that_the_optimizer_skips_is_not_published(home: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, max_steps=3)
    callback = WindlassCallback(region_dir=home, drain=0.0)

    class Skips(transformers.TrainerCallback):
        def on_optimizer_step(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
        ) -> None:
            # What Accelerate notes when gradients overflow under fp16.
            optimizer._is_overflow = state.global_step == 1

    trainer.add_callback(Skips())
    trainer.add_callback(callback)
    seen = Seen(callback, home)
    trainer.add_callback(seen)
    trainer.train()
    assert seen.versions == [1, 3]


def test_a_resumed_training_goes_on_with_its_versions(home: str, tmp_path: Path) -> None:
    incarnations = []
    for steps, resume in [(2, False), (4, True)]:
        trainer = trainer_for(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        callback = WindlassCallback(region_dir=home, drain=0.0)
        trainer.add_callback(callback)
        seen = Seen(callback, home)
        trainer.add_callback(seen)
        trainer.train(resume_from_checkpoint=resume)
        assert seen.versions == [steps - 1, steps]
        incarnations += seen.incarnations
    assert sorted(incarnations) == incarnations and len(set(incarnations)) == 2


def test_a_manager_of_ones_own_follows_a_training_that_goes_back_and_stays_open(
    home: str, tmp_path: Path
) -> None:
    with WeightManager(model_id="policy", region_dir=home, timeout=20.0) as manager:
        incarnations = []
        for resume, versions in [(None, [1, 2, 3, 4]), (str(tmp_path / "checkpoint-2"), [3, 4])]:
            trainer = trainer_for(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
            callback = WindlassCallback(manager=manager)
            trainer.add_callback(callback)
            seen = Seen(callback, home)
            trainer.add_callback(seen)
            trainer.train(resume_from_checkpoint=resume)
            assert seen.versions == versions
            incarnations += seen.incarnations
        assert sorted(incarnations) == incarnations and len(set(incarnations)) == 2
        assert manager.version == 4 and manager.wait_delta_ready()


def test_a_peft_model_in_a_trainer_is_published_merged(home: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules="all-linear"))
    trainer = trainer_for(tmp_path, model, max_steps=2)
    callback = WindlassCallback(region_dir=home, drain=0.0)
    trainer.add_callback(callback)
    seen = Seen(callback, home)
    seen.named = WeightsOf.merged
    trainer.add_callback(seen)
    trainer.train()
    assert seen.versions == [1, 2]


def test_after_a_training_that_failed_the_callback_can_be_closed_or_train_again(
    home: str, tmp_path: Path
) -> None:
    trainer = trainer_for(tmp_path, max_steps=16)
    callback = WindlassCallback(trainer, region_dir=home, drain=0.0)
    trainer.add_callback(callback)
    for closed in (True, False):
        trainer.train_dataset = Tokens(broken=2)
        with pytest.raises(OSError, match="the disk is gone"):
            trainer.train()
        # The trainer tells callbacks of no error.
        assert callback.manager is not None
        if closed:
            callback.close()
            assert callback.manager is None and not [*Path(home).iterdir()]
    trainer.train_dataset = Tokens()
    trainer.args.max_steps = 2
    trainer.train()
    assert callback.manager is None and not [*Path(home).iterdir()]
    assert callback.metrics["windlass/offload_version"] == 2


def test_an_offload_that_fails_ends_the_training_with_its_own_error_and_leaves_nothing(
    home: str, tmp_path: Path
) -> None:
    trainer = trainer_for(tmp_path, max_steps=2)
    callback = WindlassCallback(region_dir=home, lora="adapter")
    trainer.add_callback(callback)
    with pytest.raises(WindlassInvalid, match="adapter"):
        trainer.train()
    assert callback.manager is None and not [*Path(home).iterdir()]


@pytest.mark.parametrize("fetches", [True, False])
def test_receivers_have_time_to_fetch_the_last_version(
    fetches: bool, home: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_for(tmp_path, max_steps=2)
    trainer.add_callback(WindlassCallback(region_dir=home, drain=60.0 if fetches else 0.2))

    class Reader(transformers.TrainerCallback):
        receiver: Receiver
        late: Timer | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                self.receiver = Receiver(f"{home}/images", region=f"{home}/windlass-policy", relay=False)
                self.receiver.wait(1)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if fetches and "train_runtime" in logs:
                self.late = Timer(1.0, self.receiver.wait, [2])
                self.late.start()

    reader = Reader()
    trainer.add_callback(reader)
    with caplog.at_level(logging.WARNING, logger="windlass"):
        trainer.train()
    if reader.late is not None:
        reader.late.join()
    assert reader.receiver.version == (2 if fetches else 1)
    reader.receiver.close()
    assert ("not every receiver" in caplog.text) != fetches


class Arrival(transformers.TrainerCallback):
    """Goes on at the end of the training when a receiver has its last version: an agent waits for those alone that it knows."""

    def __init__(self, image: Path) -> None:
        self.image = image

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        deadline = time.monotonic() + 300.0
        while not self.has(state.global_step):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def has(self, version: int) -> bool:
        try:
            with open_image(self.image) as image:
                return image.version == version
        except WindlassNotFound:
            return False


@pytest.mark.timeout(400)
def test_a_controller_in_the_options_is_told_of_each_version(home: str, tmp_path: Path) -> None:
    with world(Path(home)) as there:
        there.receiver("r1", "policy")
        trainer = trainer_for(tmp_path, max_steps=3)
        token = str(there.token_file)
        options = {"controller": there.url, "controller_token_file": token, "agent": {"token_file": token}}
        trainer.add_callback(Arrival(Path(home) / "r1" / "policy"))
        trainer.add_callback(WindlassCallback(region_dir=home, drain=300.0, timeout=60.0, **options))
        trainer.train()
        with open_image(Path(home) / "r1" / "policy") as image:
            assert image.version == 3
            for name, tensor in WeightsOf.model(trainer.model).items():
                assert torch.equal(image.tensors[name], tensor), name


def test_a_controller_that_is_away_does_not_end_the_training(
    home: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_for(tmp_path, max_steps=2)
    away = "http://127.0.0.1:1"
    trainer.add_callback(WindlassCallback(region_dir=home, drain=0.0, timeout=3.0, controller=away))
    with caplog.at_level(logging.WARNING, logger="windlass"):
        trainer.train()
    assert trainer.state.global_step == 2 and not [*Path(home).iterdir()]
    assert "the controller was not told of a version" in caplog.text


def test_wrong_options_are_refused_before_anything_is_trained() -> None:
    with pytest.raises(WindlassInvalid, match="every is 0"):
        WindlassCallback(every=0)
    with pytest.raises(WindlassInvalid, match="no field 'model'"):
        WindlassCallback(model="policy")
    with pytest.raises(WindlassInvalid, match="drain is -1"):
        WindlassCallback(drain=-1)
    with pytest.raises(WindlassInvalid, match="not both"):
        WindlassCallback(manager=WeightManager(), model_id="policy")
    with pytest.raises(WindlassInvalid, match=r"expected an accelerate\.Accelerator"):
        AcceleratePublisher(nn.Linear(1, 1), nn.Linear(1, 1))


MISSING = """
import json, sys
import windlass.callbacks
heavy = [m for m in ("torch", "transformers", "lightning", "pytorch_lightning", "accelerate") if m in sys.modules]
for name in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
    sys.modules[name] = None
said = []
for name in ("WindlassCallback", "LightningCallback"):
    try:
        getattr(windlass.callbacks, name)(model_id="policy")
    except windlass.WindlassNotFound as e:
        said.append((str(e), e.advice, e.name))
print(json.dumps((heavy, said)))
"""


def test_callbacks_import_no_library_and_name_the_one_that_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert done.returncode == 0, done.stderr
    heavy, said = json.loads(done.stdout)
    assert heavy == []
    assert [advice for _, advice, _ in said] == [
        "install it: pip install transformers",
        "install it: pip install lightning",
    ]
    assert [name for *_, name in said] == ["not_installed"] * 2
    assert issubclass(WindlassNotFound, LookupError)


# Accelerate.


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_with_accelerate_publish_their_optimizer_steps(kind: str, ranks: Any) -> None:
    pytest.importorskip("accelerate")
    told = ranks(2, "callback_ranks:accelerated", [kind], 100.0)
    for versions, logged in told:
        assert versions == [None, 1, None, 2, None, 3]
        assert logged == ([1, 2, 3] if (versions, logged) == told[0] else [])


def test_the_steps_of_an_accelerate_publisher_go_on_from_a_checkpoint(home: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    net = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with AcceleratePublisher(accelerator, model, every=2, region_dir=home, drain=0.0) as publisher:
        accelerator.register_for_checkpointing(publisher)

        def step() -> int | None:
            accelerator.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
            optimizer.zero_grad()
            done = publisher.step()
            return None if done is None else done.version

        assert [step() for _ in range(3)] == [None, 2, None]
        accelerator.save_state(str(tmp_path))
        assert [step() for _ in range(3)] == [4, None, 6]
        manager = publisher.manager
        assert manager is not None
        before = manager.incarnation
        accelerator.load_state(str(tmp_path))
        assert [step() for _ in range(2)] == [4, None]
        assert before is not None and manager.incarnation is not None and manager.incarnation > before
    assert publisher.metrics["windlass/offload_version"] == 5 and publisher.manager is None
    assert not [*Path(home).iterdir()]


@pytest.mark.timeout(180)
def test_every_rank_of_a_transformers_trainer_publishes_its_share(ranks: Any) -> None:
    pytest.importorskip("accelerate")
    assert ranks(2, "callback_ranks:trained", ["transformers"], 150.0) == [[1, 2, 3], []]


# Lightning.


LIGHTNINGS = ["lightning.pytorch", "pytorch_lightning"]


def lightning(name: str) -> Any:
    """The library by one of its names, and the callback for it."""
    if not find_spec(name.partition(".")[0]):
        pytest.skip(f"NOT TESTED: the callback of Lightning, because {name} is missing")
    library = import_module(name)
    from windlass.callbacks import LightningCallback

    class Actor(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.actor = tiny()
            self.broken: int | None = None

        def training_step(self, batch: Any, index: int) -> Any:
            if index == self.broken:
                raise OSError("the disk is gone")
            return self.actor(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.actor.parameters(), lr=1e-2)

    class LightningSeen(library.Callback):  # type: ignore[name-defined, misc]
        def __init__(self, callback: Any, home: str) -> None:
            self.seen = Seen(callback, home)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            state = type("State", (), {"global_step": trainer.global_step})
            if trainer.global_step and trainer.global_step not in self.seen.versions:
                self.seen.on_step_end(None, state, None, module.actor)

        def on_train_end(self, *_: Any) -> None:
            self.seen.close()

    return library, Actor, LightningCallback, LightningSeen


def lightning_trainer(library: Any, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    return library.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def loader() -> Any:
    return torch.utils.data.DataLoader(Tokens(), batch_size=1)


@pytest.mark.parametrize("name", LIGHTNINGS)
def test_lightning_publishes_every_optimizer_step(name: str, home: str, tmp_path: Path) -> None:
    library, Actor, LightningCallback, LightningSeen = lightning(name)
    callback = LightningCallback(region_dir=home)
    seen = LightningSeen(callback, home)
    logger = library.loggers.CSVLogger(tmp_path)
    trainer = lightning_trainer(
        library,
        tmp_path,
        [callback, seen],
        max_steps=3,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        logger=logger,
    )
    trainer.fit(Actor(), loader())
    assert seen.seen.versions == [1, 2, 3]
    assert callback.manager is None and [path.name for path in Path(home).iterdir()] == ["images"]
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    names = header.split(",")
    assert set(names) >= FIGURES
    versions = [row.split(",")[names.index("windlass/offload_version")] for row in rows]
    assert [float(version) for version in versions] == [1.0, 2.0, 3.0]


@pytest.mark.timeout(180)
def test_every_rank_of_lightning_publishes_its_share(ranks: Any) -> None:
    lightning(LIGHTNINGS[0])
    assert ranks(2, "callback_ranks:trained", ["lightning"], 150.0) == [[1, 2, 3], []]


def test_lightning_resumes_its_versions_and_ends_with_an_error(home: str, tmp_path: Path) -> None:
    library, Actor, LightningCallback, LightningSeen = lightning(LIGHTNINGS[0])
    path = None
    incarnations: list[int] = []
    # The attribute alone, every second step and the last.
    for steps, versions in [(2, [2]), (5, [4])]:
        callback = LightningCallback(region_dir=home, every=2, module="actor", drain=0.0)
        seen = LightningSeen(callback, home)
        trainer = lightning_trainer(library, tmp_path, [callback, seen], max_steps=steps, logger=False)
        trainer.fit(Actor(), loader(), ckpt_path=path)
        assert seen.seen.versions == versions and callback.metrics["windlass/offload_version"] == steps
        incarnations += seen.seen.incarnations
        path = str(tmp_path / "checkpoint")
        trainer.save_checkpoint(path)
    assert len(set(incarnations)) == 2

    callback = LightningCallback(region_dir=home)
    broken = Actor()
    broken.broken = 2
    trainer = lightning_trainer(library, tmp_path, [callback], max_steps=5, logger=False)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(broken, loader())
    assert callback.manager is None and callback.metrics["windlass/offload_version"] == 2
    assert not Path(home, "windlass-policy").exists()
