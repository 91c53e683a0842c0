"""The memory of all groups: arena, pools, block tables and steps in flight, and what is or could be made free in it.

Knows blocks and who keeps them, no requests and no prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rtp_kernel.batch import NULL_BLOCK, ModelState, StateView
from rtp_runtime.state.arena import SCRATCH_SLOT, Arena, ArenaPlan
from rtp_runtime.state.grouping import GroupSpec
from rtp_runtime.state.holding import Holding
from rtp_runtime.state.inflight import StepsInFlight
from rtp_runtime.state.pool import BlockPool, Reference
from rtp_runtime.state.requests import RequestState
from rtp_runtime.state.tables import BlockTable


class StateMemory:
    """Blocks and slots of every group, by group index."""

    def __init__(self, groups: Sequence[GroupSpec], plan: ArenaPlan, device: torch.device, num_rows: int) -> None:
        self.groups = tuple(groups)
        self.arena = Arena(groups, plan, device)
        self.pools = [BlockPool(self.arena, spec.index) for spec in groups]
        self.tables = {spec.index: BlockTable(spec.block_size, num_rows) for spec in groups if not spec.is_slot}
        self.steps = StepsInFlight()

    @property
    def cached_bytes(self) -> int:
        """What cached prefixes refer to, whether or not somebody else does too."""
        return sum(pool.num_cached * spec.block_bytes for pool, spec in zip(self.pools, self.groups, strict=True))

    def views(self, num_layers: int) -> ModelState:
        """Each state as a tensor of fixed address, by layer and name."""
        layers: list[dict[str, StateView]] = [{} for _ in range(num_layers)]
        for spec in self.groups:
            for state in spec.states:
                data = self.arena.view(spec, state)
                layers[state.layer][state.name] = StateView(data, spec.index, state.tokens_per_entry)
        return layers

    def available(self, needs: Sequence[int]) -> bool:
        """Whether so many blocks of each group are free now."""
        if not any(needs):
            return True
        lacking = [max(0, need - pool.num_free) for need, pool in zip(needs, self.pools, strict=True)]
        return self.arena.plan.extents_for(lacking) <= self.arena.num_free

    def obtainable(self, needs: Sequence[int], *, cached: bool) -> bool:
        """Whether they are free once the steps in flight have ended, with `cached` also all cached prefixes gone."""
        lacking: list[int] = []
        extents = self.arena.num_free
        for need, pool in zip(needs, self.pools, strict=True):
            blocks, whole = pool.could_free(cached=cached)
            lacking.append(max(0, need - blocks))
            extents += whole
        return self.arena.plan.extents_for(lacking) <= extents

    def drop(self, group: int, blocks: Sequence[int], kind: Reference, *, settled: bool = False) -> None:
        """One reference less to each block; those that nobody keeps now become free as soon as no step uses them.

        `settled`: no step in flight reads or writes them on account of this reference.
        """
        pool = self.pools[group]
        if not settled and len(self.steps):
            pool.mark(blocks, self.steps.latest)
        self.steps.recycle(pool, pool.drop(blocks, kind), settled=settled)

    def complete(self, row: int, holding: Holding) -> None:
        """The content of a holding is there: reference the blocks of a table's row that a continuation reads."""
        for group, table in self.tables.items():
            first = first_place(self.groups[group], holding.num_tokens)
            blocks = table.get(row, first, holding.num_tokens // table.block_size)
            self.pools[group].take(blocks, holding.kind)
            holding.blocks[group] = first, tuple(blocks)
        holding.complete = True

    def pass_windows(self, state: RequestState) -> None:
        """Let go of a request's blocks that lie wholly behind what its next query sees."""
        for spec in self.groups:
            passed = first_place(spec, state.committed)
            first = state.first[spec.index]
            if passed > first:
                self.drop(spec.index, self.tables[spec.index].take(state.row, first, passed), Reference.REQUEST)
                state.first[spec.index] = passed

    def copy_slot(self, group: int, source: int, target: int) -> None:
        spec = self.groups[group]
        for placed in spec.states:
            data = self.arena.view(spec, placed)
            data[target].copy_(data[source])

    def poison(self, byte: int) -> None:
        """Overwrite all memory that nobody keeps."""
        assert len(self.steps) == 0, "a step is in flight"
        self.arena.fill_free(byte)
        for pool, spec in zip(self.pools, self.groups, strict=True):
            unowned = SCRATCH_SLOT if spec.is_slot else NULL_BLOCK
            self.arena.fill(spec.index, [unowned, *pool.free_blocks()], byte)


def first_place(spec: GroupSpec, num_tokens: int) -> int:
    """Place of the first block that a request of so many tokens still reads."""
    return max(0, num_tokens - spec.window + 1) // spec.block_size if spec.window else 0
