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
        plan = arena.plan
        self._counts = np.zeros((len(Reference), plan.num_ids(group)), np.int32)
        self._left = np.zeros(plan.num_ids(group), np.int64)
        """the last step that was begun when a block may last have been read or written"""
        self._lent = np.zeros(plan.num_extents, np.bool_)
        self._sizes = np.array([len(plan.blocks_of(group, extent)) for extent in range(plan.num_extents)], np.int64)
        self.num_cached = 0
        """Blocks with references of cached prefixes."""

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
        if kind is Reference.CACHE:
            self.num_cached += count
        return taken

    def take(self, blocks: Sequence[int], kind: Reference) -> None:
        """One more reference of a kind to each of different blocks."""
        if kind is Reference.CACHE:
            self.num_cached += len(blocks) - int(np.count_nonzero(self._counts[kind, blocks]))
        self._counts[kind, blocks] += 1

    def drop(self, blocks: Sequence[int], kind: Reference) -> list[int]:
        """One reference less to each of different blocks; returns those that nobody keeps now, not free yet."""
        self._counts[kind, blocks] -= 1
        counts = self._counts[:, blocks]
        assert counts.size == 0 or counts.min() >= 0, f"group {self.group}: a reference was dropped twice"
        if kind is Reference.CACHE:
            self.num_cached -= len(blocks) - int(np.count_nonzero(counts[kind]))
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
                self._lent[extent] = False
                self._arena.give_back(extent)

    def mark(self, blocks: Sequence[int], step: int) -> None:
        """Blocks may be in use up to this step."""
        self._left[list(blocks)] = step

    def unused_since(self, blocks: Sequence[int], step: int) -> list[bool]:
        """Of each block, whether no step from this one on can use it."""
        found: list[bool] = (self._left[list(blocks)] < step).tolist()
        return found

    def only_cached(self, blocks: Sequence[int]) -> bool:
        """Whether nobody but cached prefixes keeps any of the blocks."""
        others = self._counts[[Reference.REQUEST, Reference.TRANSFER]]
        return not others[:, list(blocks)].any()

    def could_free(self, *, cached: bool) -> tuple[int, int]:
        """What would be free if all steps had ended, and with `cached` all cached prefixes were gone besides:
        blocks in extents of which others are held, and whole extents that the group has borrowed."""
        counts = self._counts[[Reference.REQUEST, Reference.TRANSFER]] if cached else self._counts
        held = np.flatnonzero(counts.any(0))
        extents = (held - self._arena.plan.first_ids[self.group]) * self._arena.plan.block_bytes[self.group]
        per_extent = np.bincount(extents // self._arena.plan.extent_bytes, minlength=len(self._lent))
        partly = per_extent > 0
        return int((self._sizes - per_extent)[partly].sum()), int(np.count_nonzero(self._lent & ~partly))

    def _borrow(self) -> None:
        extent = self._arena.borrow()
        blocks = self._arena.plan.blocks_of(self.group, extent)
        self._lent[extent] = True
        self._free[extent] = list(reversed(blocks))
        self.num_free += len(blocks)
