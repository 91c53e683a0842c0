"""What is measured of a model's speed and size, in which unit, and which way is worse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtp_runtime.readiness.declarative import Table

VALID, INVALID, NOT_RUN = "valid", "invalid", "not run"
STATUSES = (VALID, INVALID, NOT_RUN)


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a point."""

    name: str
    words: str
    unit: str
    higher_is_better: bool = False

    def show(self, value: float) -> str:
        return f"{value:,.1f} {self.unit}" if abs(value) < 1000 else f"{value:,.0f} {self.unit}"

    def worse_by(self, value: float, base: float) -> float:
        """By what share of `base` the value is worse; negative where it is better."""
        change = (value - base) / base
        return -change if self.higher_is_better else change

    def within(self, value: float, limit: float) -> bool:
        return value >= limit if self.higher_is_better else value <= limit


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("ttft_ms_p50", "time to first token, median", "ms"),
        Metric("ttft_ms_p99", "time to first token, 99th percentile", "ms"),
        Metric("tpot_ms", "time per output token, median", "ms"),
        Metric("tpot_ms_p99", "time per output token, 99th percentile", "ms"),
        Metric("throughput_tok_s", "output tokens per second, all requests together", "tok/s", higher_is_better=True),
        Metric("memory_mb", "memory: resident on a processor, allocated at most on a GPU", "MiB"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of batch, prompt length and new tokens, and what was measured there."""

    batch: int
    prompt: int
    new_tokens: int
    status: str = VALID
    why: str = ""
    """Why it was not run, or why its numbers count for nothing."""
    repeats: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    """Of each metric: half the repeats lie within this share of the median (interquartile range over median)."""
    notes: tuple[str, ...] = ()
    """What bounded it: steps that a prompt was divided into, state that it took."""

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.batch, self.prompt, self.new_tokens)

    @property
    def name(self) -> str:
        return point_name(self.key)

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "prompt": self.prompt,
            "new_tokens": self.new_tokens,
            "status": self.status,
            "why": self.why,
            "repeats": self.repeats,
            "metrics": {name: self.metrics[name] for name in METRICS if name in self.metrics},
            "spread": {name: self.spread[name] for name in METRICS if name in self.spread},
            "notes": list(self.notes),
        }


def point_name(key: tuple[int, int, int]) -> str:
    """The point in words."""
    batch, prompt, new_tokens = key
    return f"batch {batch}, prompt {prompt}, {new_tokens} new"


def read_points(numbers: Mapping[str, Any], file: str) -> list[Point]:
    """The points of a bench record.

    Raises:
        UsageError: numbers that are not a bench record's.
    """
    table = Table(numbers, file, "numbers")
    return [_point(each) for each in table.tables("points", empty=True)]


def _point(table: Table) -> Point:
    status = table.string("status", choices=STATUSES)
    metrics = _numbers(table.table("metrics"))
    if status == VALID and metrics.keys() != METRICS.keys():
        raise table.refuse("metrics", f"of a valid point should be {', '.join(METRICS)}")
    found = Point(
        batch=table.integer("batch", low=1),
        prompt=table.integer("prompt", low=1),
        new_tokens=table.integer("new_tokens", low=2),
        status=status,
        why=table.string("why", empty=True),
        repeats=table.integer("repeats"),
        metrics=metrics,
        spread=_numbers(table.table("spread")),
        notes=table.strings("notes"),
    )
    table.finish()
    return found


def _numbers(table: Table) -> dict[str, float]:
    found = {name: table.number(name, None) for name in METRICS}
    table.finish()
    return {name: value for name, value in found.items() if value is not None}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-int(share * 1_000_000) * len(ordered) // 1_000_000))
    return ordered[rank - 1]


def spread_of(values: Iterable[float]) -> float:
    """The interquartile range over the median; 0 for fewer than two values or a median of 0."""
    import statistics

    ordered = sorted(values)
    middle = statistics.median(ordered) if ordered else 0.0
    if len(ordered) < 2 or not middle:
        return 0.0
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return (high - low) / middle
