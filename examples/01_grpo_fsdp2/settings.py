"""What can be set, for the launcher and for the ranks alike. Imports nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Size:
    """A Qwen3 of this shape."""

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
    """One run."""

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
        """What a result depends on, without paths; no warm-up where the weights are there already."""
        told = {name: value for name, value in asdict(self).items() if name not in ("init", "stats", "json")}
        return told | {"warm_up": None} if self.init is not None and self.init.exists() else told


def parse(arguments: list[str], about: str) -> Settings:
    """From a command line."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="small", help="0.1, 5, 46 or 122 million parameters")
    add("--steps", type=_count, default=6, help="GRPO steps, and so versions after the first")
    add("--ranks", type=_count, default=2, help="trainer ranks")
    add("--engines", type=_count, default=2, help="receivers")
    add("--learning-rate", type=float, default=3e-6, help="of the GRPO steps")
    add("--warm-up", type=int, default=30, help="supervised steps before them")
    add("--init", type=Path, help="start from these weights; the warm-up makes the file if there is none")
    add(
        "--start",
        choices=["bf16", "float32"],
        default="bf16",
        help="master weights rounded to bf16, as loaded from a checkpoint, or as a long run would have them",
    )
    add("--prompts", type=_count, default=4, help="prompts of a rank and step")
    add("--group", type=_count, default=8, help="completions of a prompt")
    add("--digits", type=_count, default=4, help="how many digits are to be reversed")
    add("--seed", type=int, default=1, help="of the weights and of the sampling")
    add("--stats", type=Path, help="write how the weights changed, step by step, to this JSON file")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return Settings(**vars(parser.parse_args(arguments)))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
