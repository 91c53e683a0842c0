"""How a model is laid out over ranks. Passed in, never global."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Rank and size of the tensor-parallel group; one rank is the whole model."""

    rank: int = 0
    size: int = 1
