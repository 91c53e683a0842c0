"""Positions that are added to the embeddings of tokens: learned, or sinusoids by formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.declarations import Place


@dataclass(frozen=True)
class Positions(Block):
    """A row for each position, counted from `offset`."""

    number: str | None
    """Code of how many rows are learned; None = they follow from a formula."""
    offset: int = 0
    shift: int = 0
    """Of the formula: `SinusoidalEmbedding`."""
    class_name: str = "Positions"
    word: ClassVar[str] = "positions"

    def make(self) -> str:
        if self.number is not None:
            return f"Embedding({self.number}, config.hidden_size)"
        return f"SinusoidalEmbedding(config.hidden_size{', shift=1' if self.shift else ''})"

    @property
    def argument(self) -> str:
        """What its call is given."""
        return f"batch.positions + {self.offset}" if self.offset else "batch.positions"

    def declare(self, place: Place) -> None:
        if self.number is not None:
            place.weight("weight", self.number, "hidden")

    def describe(self) -> str:
        kind = f"{self.number} learned" if self.number else "sinusoidal"
        return f"{kind} positions{f', counted from {self.offset}' if self.offset else ''}"
