"""The options of a run, read by the launcher and by every rank. Imports nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Size:
    """The shape of a Qwen3 model."""

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int


SIZES = {
    "tiny": Size(512, 64, 192, 2, 4, 2),
    "small": Size(2048, 256, 768, 6, 8, 4),
    "medium": Size(16384, 512, 1536, 12, 8, 4),
    "large": Size(32768, 768, 2304, 14, 12, 4),
}


@dataclass(frozen=True)
class Settings:
    """The options of one run."""

    size: str
    steps: int
    ranks: int
    engines: int
    learning_rate: float
    warm_up: int
    start: str
    init: Path | None
    prompts: int
    group: int
    digits: int
    seed: int
    stats: Path | None
    json: bool

    def plain(self) -> dict[str, object]:
        """The options that determine the result: no paths, and no warm-up where ``init`` provides the weights."""
        plain = {name: value for name, value in asdict(self).items() if name not in ("init", "stats", "json")}
        return plain | {"warm_up": None} if self.init is not None and self.init.exists() else plain


def parse(arguments: list[str], about: str) -> Settings:
    """Parses a command line."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="the tiny model, 5 warm-up steps and 3 GRPO steps by default")
    add("--size", choices=list(SIZES), default="small", help="0.1, 5, 46 or 122 million parameters")
    add("--steps", type=_count, default=6, help="GRPO steps; each publishes a version after the initial one")
    add("--ranks", type=_count, default=2, help="number of trainer ranks")
    add("--engines", type=_count, default=2, help="number of receivers")
    add("--learning-rate", type=float, default=3e-6, help="learning rate of the GRPO steps")
    add("--warm-up", type=int, default=30, help="supervised steps before the first GRPO step")
    add(
        "--init",
        type=Path,
        help="file with the initial weights; if it does not exist, the warm-up creates it",
    )
    add(
        "--start",
        choices=["bf16", "float32"],
        default="bf16",
        help="initial master weights: rounded to bf16, as from a checkpoint, or float32, as in a long run",
    )
    add("--prompts", type=_count, default=4, help="prompts per rank and step")
    add("--group", type=_count, default=8, help="completions per prompt")
    add("--digits", type=_count, default=4, help="number of digits to reverse")
    add("--seed", type=int, default=1, help="seed of the weights and of the sampling")
    add("--stats", type=Path, help="write statistics of the weight changes in each step to this JSON file")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(size="tiny", warm_up=5, steps=3)
    values = vars(parser.parse_args(arguments))
    del values["quick"]
    return Settings(**values)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
