"""Block tables and slot mappings: integers kept per request, laid out per step without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtp_kernel.batch import NULL_BLOCK

Ints = npt.NDArray[np.int64]
RequestId = str | int


@dataclass(frozen=True, slots=True)
class StepRow:
    """One request's share of a step."""

    request: RequestId
    start: int
    """Index in its request of the first new token."""
    num_tokens: int
    """New tokens, drafts included."""
    drafts: int = 0
    """How many of them, at the end, are drafts that may be rejected."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where each token of a step belongs; `T` counts padding, `N` only real tokens, `R` requests without padding."""

    padded_requests: int
    padded_tokens: int
    starts: Ints
    """[R] index of each request's first new token."""
    first_row: Ints
    """[R] token row of it."""
    request: Ints
    """[N] row of each token's request."""
    index: Ints
    """[N] place of each token in its request."""

    @classmethod
    def of(cls, rows: Sequence[StepRow], padded_requests: int, padded_tokens: int) -> StepLayout:
        starts = np.array([row.start for row in rows], np.int64)
        lens = np.array([row.num_tokens for row in rows], np.int64)
        first_row = np.cumsum(lens) - lens
        request = np.repeat(np.arange(len(rows)), lens)
        index = np.arange(len(request)) - (first_row - starts)[request]
        assert len(rows) <= padded_requests and len(request) <= padded_tokens, "padding is smaller than the step"
        return cls(padded_requests, padded_tokens, starts, first_row, request, index)


class BlockTable:
    """The block table of one group over all requests: one row of integers each, grown as needed."""

    def __init__(self, block_size: int, num_rows: int) -> None:
        self.block_size = block_size
        self._table = np.full((num_rows, 8), NULL_BLOCK, np.int32)  # [rows, blocks]

    def put(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Enter blocks from place `first` on."""
        end = first + len(blocks)
        rows, columns = self._table.shape
        if row >= rows or end > columns:
            grown = np.full(
                (max(rows, 2 * row if row >= rows else 0), columns if end <= columns else 2 * end), NULL_BLOCK, np.int32
            )
            grown[:rows, :columns] = self._table
            self._table = grown
        self._table[row, first:end] = blocks

    def get(self, row: int, first: int, end: int) -> list[int]:
        return [int(block) for block in self._table[row, first:end].tolist()]

    def take(self, row: int, first: int, end: int) -> list[int]:
        """The blocks in places [first, end), which are empty afterwards."""
        blocks = self.get(row, first, end)
        self._table[row, first:end] = NULL_BLOCK
        return blocks

    def batch(self, rows: Ints, padded: int, width: int) -> npt.NDArray[np.int32]:
        """[padded, width] table of the given rows; a copy, so that later changes do not reach a step in flight."""
        table = np.full((padded, width), NULL_BLOCK, np.int32)
        kept = min(width, self._table.shape[1])
        table[: len(rows), :kept] = self._table[rows, :kept]
        return table

    def slots(self, rows: Ints, layout: StepLayout, tokens_per_entry: int) -> Ints:
        """[T] the entry that each token writes, or closes; -1 for none."""
        size, entries = self.block_size, self.block_size // tokens_per_entry
        mapping = np.full(layout.padded_tokens, -1, np.int64)
        blocks = self._table[rows[layout.request], layout.index // size].astype(np.int64)
        assert (blocks != NULL_BLOCK).all(), "a token of the step has no block: grow its request first"
        places = blocks * entries + layout.index % size // tokens_per_entry
        closes = (layout.index + 1) % tokens_per_entry == 0
        mapping[: len(places)] = np.where(closes, places, -1)
        return mapping
