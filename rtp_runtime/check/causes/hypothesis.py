"""A mistake that may have been made: what it is called, how the reference is made wrong by it, and what mends it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from rtp_runtime.check.causes.rerun import Mistake
from rtp_runtime.check.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One mistake."""

    kind: str
    """Stable name."""
    words: str
    """What ours does, and what the reference does."""
    fix: str
    mistake: Mistake = nullcontext
    late: Mistake = nullcontext
    """A mistake in what attention is given, nearer to its caller than what records it."""
    other: Reference | None = None
    """Another copy of the reference that is run instead."""
    cost: float = 1.0
    """How far it is from the plainest mistakes; of two that explain as much the cheaper is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A mistake with a number in it, which is tried at some values and then fitted."""

    kind: str
    words: str
    """With {} where the value found stands."""
    fix: str
    mistake: Callable[[float], AbstractContextManager[Any]]
    right: float
    """The reference's value."""
    tries: tuple[float, ...] = ()
    step: float = 1e-3
    """From the right value, in which the effect is about linear; relative where `log`."""
    log: bool = False
    """Whether the number is a positive factor, on whose logarithm the effect depends."""
    cost: float = 2.0

    def at(self, value: float, cost: float = 0.0) -> Hypothesis:
        return Hypothesis(
            kind=self.kind,
            words=self.words.format(f"{value:.7g}"),
            fix=self.fix,
            mistake=lambda: self.mistake(value),
            cost=self.cost + cost,
        )
