"""Which implementations of the ops a run takes: the ones that would serve, those behind them, the plain references."""

from __future__ import annotations

from dataclasses import dataclass

from rtp_kernel.registry import Implementation, OpContext, OpRegistry, Selection


@dataclass(frozen=True, slots=True)
class Kernels:
    """One way to choose among the implementations that support what a component asks."""

    rank: int = 0
    """0: the first, which a server takes; 1: the one behind it; and so on, the last where there are no more."""
    deterministic: bool = False
    """Only implementations of which a row's result is independent of its company."""


PLAIN = 1 << 16
"""A rank beyond all: the plain-torch reference of every op."""


class RankedRegistry(OpRegistry):
    """A registry that hands out a later candidate instead of the first."""

    def __init__(self, inner: OpRegistry, rank: int) -> None:
        super().__init__()
        self._inner = inner
        self._rank = rank

    def ops(self) -> tuple[str, ...]:
        return self._inner.ops()

    def implementations(self, op: str) -> tuple[Implementation, ...]:
        return self._inner.implementations(op)

    def select(self, op: str, context: OpContext) -> Selection:
        first = self._inner.select(op, context)
        able = [each for each in self._inner.implementations(op) if each.supports(context).ok]
        return Selection(able[min(self._rank, len(able) - 1)], first.refused)
