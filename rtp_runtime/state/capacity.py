"""How much state there is and how much a request takes: sizing, admission, and the numbers of messages and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rtp_runtime.errors import StateError
from rtp_runtime.state.arena import ArenaPlan
from rtp_runtime.state.grouping import DEFAULT_BLOCK_SIZE, GroupSpec
from rtp_runtime.state.requests import UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One group as `rtp inspect` shows it."""

    kind: str
    window: int
    block_size: int
    forced_by: str
    block_bytes: int
    states: tuple[str, ...]
    """e.g. "30 x kv [16, 2, 3, 64] bfloat16": layers, name, shape of one block, dtype."""
    max_blocks: int
    """Blocks (slots) when this group has the whole arena to itself."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits into an arena of a plan."""

    groups: tuple[GroupSpec, ...]
    plan: ArenaPlan
    max_drafts: int = 0
    span: int | None = None
    """Tokens that a request may have beyond what is committed, and blocks not yet returned; None: no bound."""

    @staticmethod
    def demand(
        groups: Sequence[GroupSpec],
        num_blocks: int | None,
        max_requests: int,
        max_drafts: int,
        span: int | None,
        num_snapshots: int,
    ) -> list[int] | None:
        """Blocks of each group that `num_blocks` stands for; None when memory is what was given."""
        if num_blocks is None:
            return None
        if num_blocks < 1:
            raise StateError(f"num_blocks is {num_blocks}; give at least 1, or a memory budget instead")
        num_tokens = num_blocks * min(
            (spec.block_size for spec in groups if not spec.is_slot), default=DEFAULT_BLOCK_SIZE
        )
        slots = max_requests * (1 + max_drafts) + num_snapshots
        demand: list[int] = []
        for spec in groups:
            blocks = slots if spec.is_slot else -(-num_tokens // spec.block_size)
            if spec.window and span is not None:
                blocks = min(blocks, max_requests * _window_blocks(spec, span))
            demand.append(blocks)
        return demand

    def check(self) -> None:
        """Raises StateError when not even a request of one token fits."""
        if not self.fits(1):
            raise StateError(f"{self.explain(1)}: give more memory")

    def blocks(self, num_tokens: int) -> list[int]:
        """Blocks (slots) of each group that a request of so many tokens holds at most."""
        held: list[int] = []
        for spec in self.groups:
            blocks = 1 + self.max_drafts if spec.is_slot else -(-num_tokens // spec.block_size)
            if spec.window and self.span is not None:
                blocks = min(blocks, _window_blocks(spec, self.span))
            held.append(blocks)
        return held

    def fits(self, num_tokens: int) -> bool:
        return self.plan.extents_for(self.blocks(num_tokens)) <= self.plan.num_extents

    def max_tokens(self) -> int:
        """The longest request that fits alone."""
        low, high = 0, UNBOUNDED
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low

    def explain(self, num_tokens: int) -> str:
        """Numbers for the message that refuses a request of so many tokens."""
        blocks = self.blocks(num_tokens)
        takes = self.plan.extents_for(blocks) * self.plan.extent_bytes
        parts = ", ".join(
            f"{count} slots" if spec.is_slot else f"{count} {spec.kind} blocks of {spec.block_size} tokens"
            for spec, count in zip(self.groups, blocks, strict=True)
        )
        total = self.plan.num_extents * self.plan.extent_bytes
        return (
            f"{num_tokens} tokens take {_size(takes)} of state ({parts}) and there are {_size(total)}, "
            f"enough for {self.max_tokens()} tokens of one request"
        )

    def report(self) -> tuple[GroupReport, ...]:
        return tuple(
            GroupReport(
                kind=spec.kind,
                window=spec.window,
                block_size=spec.block_size,
                forced_by=spec.forced_by,
                block_bytes=spec.block_bytes,
                states=describe_states(spec),
                max_blocks=self.plan.num_extents * self.plan.blocks_per_extent(spec.index),
            )
            for spec in self.groups
        )


def describe_states(spec: GroupSpec) -> tuple[str, ...]:
    """States of equal name, shape and dtype in one phrase each."""
    counts = Counter((state.name, state.shape, state.dtype) for state in spec.states)
    return tuple(f"{count} x {name} {list(shape)} {dtype}" for (name, shape, dtype), count in counts.items())


def _window_blocks(spec: GroupSpec, span: int) -> int:
    return -(-(spec.window + span) // spec.block_size) + 1


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
