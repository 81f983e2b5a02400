"""Which weights: the version of a policy that is published, announced, fetched and loaded."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity:
    """One version of one policy in one incarnation of its publisher."""

    model_id: str
    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.model_id}@{self.incarnation:016x}.{self.version}"
