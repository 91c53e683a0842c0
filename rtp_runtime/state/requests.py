"""What the manager remembers of one request: how long it is, and which places of each group's table it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rtp_kernel.batch import NULL_BLOCK
from rtp_runtime.errors import StateError
from rtp_runtime.state.grouping import GroupSpec
from rtp_runtime.state.holding import Holding

if TYPE_CHECKING:
    from rtp_runtime.state.sharing import Share

UNBOUNDED: Final = 2**31 - 1
"""Tokens of a request whose state does not grow (slots only)."""


@dataclass(slots=True)
class RequestSlots:
    """The slots of one request in one slot group."""

    own: int = NULL_BLOCK
    """Written by every step; the null slot until the request has grown."""
    source: int = NULL_BLOCK
    """Read by the first step instead of `own`: the null slot of a new request, a snapshot of a restored one."""
    source_at: int = 0
    """Tokens of the request after which `source` is its state."""
    candidates: list[int] = field(default_factory=list)
    kept_from: int = 0
    """Candidate j holds the state after `kept_from + j` tokens, for j < `kept`."""
    kept: int = 0

    def reading(self, start: int) -> int:
        """The slot that holds the state after `start` tokens."""
        return self.source if start == self.source_at else self.own

    def rewind(self, num_tokens: int) -> None:
        """Make the candidate after `num_tokens` tokens the request's own slot; at `source_at` the source still serves.

        Raises:
            StateError: no candidate was left there.
        """
        if num_tokens == self.source_at:
            return
        place = num_tokens - self.kept_from
        if not 0 <= place < self.kept:
            kept = f"{self.kept_from} to {self.kept_from + self.kept - 1}" if self.kept else "none"
            raise StateError(
                f"slot state cannot rewind to {num_tokens} tokens; candidates were left after: {kept}. "
                "Submit the tokens that may be rejected as drafts of their step"
            )
        self.own, self.candidates[place] = self.candidates[place], self.own
        self.kept = 0


@dataclass(slots=True)
class RequestState:
    """One request's lengths and places."""

    row: int
    """In the block tables."""
    first: list[int]
    """By group: place of the first block held (0 unless a window has passed it)."""
    end: list[int]
    """By group: place behind the last block held."""
    slots: dict[int, RequestSlots]
    """By slot group."""
    length: int = 0
    """Tokens that have a place."""
    submitted: int = 0
    """Tokens of steps that have begun."""
    committed: int = 0
    """Tokens of steps that were collected; nothing rewinds behind them."""
    room: int = 0
    """Tokens up to which nothing is lacking."""
    snapshots: list[Holding] = field(default_factory=list)
    """Asked for, and not complete yet."""
    share: Share | None = None
    """Its part in the prefix cache."""

    def check_snapshot(self, request: str | int, num_tokens: int, unit: int) -> None:
        """
        Raises:
            StateError: a snapshot after `num_tokens` is not at the end of blocks (`unit`), or comes too late.
        """
        if num_tokens < 1 or num_tokens % unit:
            raise StateError(
                f"a snapshot after {num_tokens} tokens is not at the end of a block; take a multiple of {unit}"
            )
        now = num_tokens == self.committed == self.submitted
        if not now and num_tokens <= self.submitted:
            raise StateError(
                f"request {request!r} has submitted {self.submitted} tokens and committed {self.committed}: "
                f"a snapshot after {num_tokens} comes too late; ask before the step that passes it"
            )

    def due_snapshots(self, num_tokens: int) -> list[Holding]:
        """Take out the snapshots up to there that are still wanted."""
        due = [holding for holding in self.snapshots if holding.num_tokens <= num_tokens and not holding.released]
        self.snapshots = [holding for holding in self.snapshots if holding.num_tokens > num_tokens]
        return due

    @classmethod
    def new(cls, row: int, groups: Sequence[GroupSpec]) -> RequestState:
        """A request without tokens."""
        slots = {spec.index: RequestSlots() for spec in groups if spec.is_slot}
        return cls(row, [0] * len(groups), [0] * len(groups), slots)

    def measure(self, groups: Sequence[GroupSpec]) -> None:
        """Find `room` again after blocks came or went."""
        held = [self.end[spec.index] * spec.block_size for spec in groups if not spec.is_slot]
        missing = any(slots.own == NULL_BLOCK for slots in self.slots.values())
        self.room = 0 if missing else min(held, default=UNBOUNDED)

    def lacks(self, spec: GroupSpec, length: int, drafts: int) -> int:
        """Blocks (slots) of a group that are missing for `length` tokens, the last `drafts` of them drafts."""
        if not spec.is_slot:
            return max(0, -(-length // spec.block_size) - self.end[spec.index])
        slots = self.slots[spec.index]
        return (slots.own == NULL_BLOCK) + max(0, drafts - len(slots.candidates))
