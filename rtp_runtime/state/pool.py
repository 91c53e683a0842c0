"""The blocks of one group: which are free, and how many references of each kind the others have.

A block is free only when all three counts are gone; even then the manager hands it back only after the steps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from rtp_runtime.state.arena import Arena


class Reference(IntEnum):
    """Who keeps a block."""

    REQUEST = 0
    CACHE = 1
    TRANSFER = 2


class BlockPool:
    """Blocks of one group, borrowed from the arena extent by extent and given back as soon as an extent is unused."""

    def __init__(self, arena: Arena, group: int) -> None:
        self._arena = arena
        self.group = group
        self.num_free = 0
        self._free: dict[int, list[int]] = {}
        """extent -> its free blocks, for extents that have any"""
        self._counts = np.zeros((len(Reference), arena.plan.num_ids(group)), np.int32)

    @property
    def num_held(self) -> int:
        """Blocks that somebody refers to."""
        return int(np.count_nonzero(self._counts.any(0)))

    def references(self, block: int) -> tuple[int, int, int]:
        """How many (requests, cached prefixes, transfers) keep the block."""
        request, cache, transfer = self._counts[:, block].tolist()
        return request, cache, transfer

    def free_blocks(self) -> list[int]:
        """Free blocks within borrowed extents."""
        return [block for blocks in self._free.values() for block in blocks]

    def allocate(self, count: int, kind: Reference = Reference.REQUEST) -> list[int]:
        """Free blocks, each now with one reference; the caller has checked that there are enough."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._free:
                self._borrow()
            extent, blocks = next(iter(self._free.items()))
            split = max(0, len(blocks) - (count - len(taken)))
            taken += reversed(blocks[split:])
            del blocks[split:]
            if not blocks:
                del self._free[extent]
        self.num_free -= count
        assert not self._counts[:, taken].any(), "a free block had references"
        self._counts[kind, taken] = 1
        return taken

    def take(self, blocks: Sequence[int], kind: Reference) -> None:
        """One more reference of a kind to each of different blocks."""
        self._counts[kind, blocks] += 1

    def drop(self, blocks: Sequence[int], kind: Reference) -> list[int]:
        """One reference less to each of different blocks; returns those that nobody keeps now, not free yet."""
        self._counts[kind, blocks] -= 1
        counts = self._counts[:, blocks]
        assert counts.size == 0 or counts.min() >= 0, f"group {self.group}: a reference was dropped twice"
        kept: list[int] = counts.sum(0).tolist()
        return [block for block, count in zip(blocks, kept, strict=True) if count == 0]

    def recycle(self, blocks: Sequence[int]) -> None:
        """Make unreferenced blocks free, and give back extents that are wholly free."""
        plan = self._arena.plan
        for block in blocks:
            extent = plan.extent_of(self.group, block)
            free = self._free.setdefault(extent, [])
            free.append(block)
            self.num_free += 1
            if len(free) == len(plan.blocks_of(self.group, extent)):
                del self._free[extent]
                self.num_free -= len(free)
                self._arena.give_back(extent)

    def _borrow(self) -> None:
        extent = self._arena.borrow()
        blocks = self._arena.plan.blocks_of(self.group, extent)
        self._free[extent] = list(reversed(blocks))
        self.num_free += len(blocks)
