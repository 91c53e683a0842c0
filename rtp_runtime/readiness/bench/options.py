"""What a bench is asked to do, and the rules by which a measurement counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rtp_runtime.errors import UsageError

MIN_REPEATS = 3
"""Fewer have no spread, so that nobody knows what their median is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Which points are measured, how often, and on what.

    Raises:
        UsageError: a value out of its range.
    """

    model: str
    batches: tuple[int, ...] = (1, 8, 32)
    prompts: tuple[int, ...] = (128, 512)
    """Tokens of each prompt."""
    new_tokens: int = 48
    warmup: int = 1
    """Runs of each point before those that count."""
    repeats: int = 5
    max_spread: float = 0.25
    """A point whose throughput's interquartile range over its median is larger is invalid."""
    dtype: str = "auto"
    device: str = "cpu"
    deterministic: bool = False
    seed: int = 0
    """Of the drawn prompts."""
    max_model_len: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, values in (("batch", self.batches), ("prompt", self.prompts)):
            if not values or any(value < 1 for value in values):
                raise UsageError(f"{name}={list(values)}: give one or more numbers from 1 up")
            if len(set(values)) != len(values):
                raise UsageError(f"{name}={list(values)} names a number twice: name each once")
        if self.new_tokens < 2:
            raise UsageError(f"new_tokens={self.new_tokens}: the time per output token needs two or more")
        for name, low in (("warmup", 0), ("repeats", 1), ("seed", 0)):
            if getattr(self, name) < low:
                raise UsageError(f"{name}={getattr(self, name)} is out of range: give {low} or more")
        if not self.max_spread > 0.0:
            raise UsageError(f"max_spread={self.max_spread} is out of range: give a number above 0, such as 0.25")

    @property
    def points(self) -> Iterator[tuple[int, int]]:
        """(batch, prompt), the cheap ones first."""
        yield from sorted(
            ((batch, prompt) for batch in self.batches for prompt in self.prompts),
            key=lambda point: (point[0] * (point[1] + self.new_tokens), point),
        )

    def settings(self) -> dict[str, Any]:
        """What is recorded as conditions besides dtype, device and seed."""
        return {
            "batches": list(self.batches),
            "prompts": list(self.prompts),
            "new_tokens": self.new_tokens,
            "warmup": self.warmup,
            "repeats": self.repeats,
            "max_spread": self.max_spread,
            "deterministic": self.deterministic,
            "max_model_len": self.max_model_len,
        }
