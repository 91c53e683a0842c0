"""One byte arena, lent out to groups in extents; the arithmetic of where a group's blocks lie in it.

A block's address is `origin + id * block_bytes`: a view over all ids of a group is one strided tensor, bound once,
and any extent can serve any group. Knows nothing of owners of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Final

from rtp_runtime.errors import StateError
from rtp_runtime.state.grouping import STATE_ALIGNMENT, GroupSpec, PlacedState

if TYPE_CHECKING:
    import torch

MAX_EXTENTS: Final = 512
"""About how many extents an arena is cut into: enough that what a group holds in vain stays small."""
MIN_BLOCKS: Final = 16
"""Blocks per extent of a group whose block does not divide it: bounds what is lost at the two edges to 1/8."""

SCRATCH_SLOT: Final = 1
"""The slot of every slot group to which padding requests write; slot 0, the null one, is only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """Where every block of every group lies: reserved ones first, then, from byte `reserved_bytes` on, the extents."""

    block_bytes: tuple[int, ...]
    extent_bytes: int
    num_extents: int
    reserved_bytes: int
    first_ids: tuple[int, ...]
    """By group: the id whose block would start exactly where the extents start."""

    @property
    def num_bytes(self) -> int:
        return self.reserved_bytes + self.num_extents * self.extent_bytes

    def origin(self, group: int) -> int:
        """Byte address of the group's block 0."""
        return self.reserved_bytes - self.first_ids[group] * self.block_bytes[group]

    def num_ids(self, group: int) -> int:
        """Ids from 0 that lie inside the arena."""
        return (self.num_bytes - self.origin(group)) // self.block_bytes[group]

    def blocks_of(self, group: int, extent: int) -> range:
        """The ids of the group's blocks that lie wholly inside the extent."""
        size, start = self.block_bytes[group], extent * self.extent_bytes
        first = self.first_ids[group]
        return range(first + -(-start // size), first + (start + self.extent_bytes) // size)

    def extent_of(self, group: int, block: int) -> int:
        return (block - self.first_ids[group]) * self.block_bytes[group] // self.extent_bytes

    def blocks_per_extent(self, group: int) -> int:
        """Blocks that the group finds in any extent, at least."""
        whole, rest = divmod(self.extent_bytes, self.block_bytes[group])
        return whole if rest == 0 else whole - 1

    def extents_for(self, blocks: Sequence[int]) -> int:
        """Extents that hold so many blocks of each group."""
        return sum(-(-count // self.blocks_per_extent(group)) for group, count in enumerate(blocks))


def plan_arena(
    specs: Sequence[GroupSpec], *, blocks: Sequence[int] | None = None, memory: int | None = None
) -> ArenaPlan:
    """Cut an arena that holds so many blocks of each group at once, or that fits into `memory` bytes.

    Raises:
        StateError: the memory holds not even one block of each group.
    """
    block_bytes = tuple(spec.block_bytes for spec in specs)
    unit = _extent_unit(block_bytes)
    wanted = memory if blocks is None else sum(count * size for count, size in zip(blocks, block_bytes, strict=True))
    assert wanted is not None
    extent_bytes = unit * max(1, wanted // (unit * MAX_EXTENTS))
    reserved_bytes, first_ids = _reserve(specs)
    plan = ArenaPlan(
        block_bytes=block_bytes,
        extent_bytes=extent_bytes,
        num_extents=0,
        reserved_bytes=reserved_bytes,
        first_ids=first_ids,
    )
    if blocks is not None:
        num_extents = plan.extents_for(blocks)
    else:
        num_extents = (wanted - reserved_bytes) // extent_bytes
        least = plan.extents_for([1] * len(specs))
        if num_extents < least:
            raise StateError(
                f"{wanted} bytes of memory for state are too few: one block of each group takes "
                f"{reserved_bytes + least * extent_bytes}; give at least that much"
            )
    return ArenaPlan(
        block_bytes=block_bytes, extent_bytes=extent_bytes, num_extents=num_extents,
        reserved_bytes=reserved_bytes, first_ids=first_ids,
    )  # fmt: skip


def _extent_unit(block_bytes: Sequence[int]) -> int:
    """The smallest extent: blocks of every group divide it, or it holds enough of them for the edges not to matter."""
    if not block_bytes:
        return STATE_ALIGNMENT
    largest = max(block_bytes)
    common = lcm(*block_bytes)
    for times in range(1, MIN_BLOCKS + 1):
        unit = largest * times
        if unit == common or all(unit % size == 0 or unit // size >= MIN_BLOCKS for size in block_bytes):
            return unit
    raise AssertionError("an extent of MIN_BLOCKS largest blocks holds MIN_BLOCKS of each")


def _reserve(specs: Sequence[GroupSpec]) -> tuple[int, tuple[int, ...]]:
    """Lay the reserved blocks of all groups before the extents: their bytes, and each group's first id."""
    low = 0
    first_ids = [0] * len(specs)
    for spec in sorted(specs, key=lambda spec: -spec.block_bytes):
        # Counted in whole blocks back from the extents, so that blocks which divide an extent start where it starts.
        first_ids[spec.index] = -(low // spec.block_bytes) + num_reserved(spec)
        low = -first_ids[spec.index] * spec.block_bytes
    return -low, tuple(first_ids)


def num_reserved(spec: GroupSpec) -> int:
    """Ids that nobody owns: 0, the null one, and for slots `SCRATCH_SLOT`, where padding requests write."""
    return 2 if spec.is_slot else 1


class Arena:
    """The memory itself: reserved once, in huge pages where there are any, committed when touched, lent in extents."""

    def __init__(self, specs: Sequence[GroupSpec], plan: ArenaPlan, device: torch.device) -> None:
        import torch

        from rtp_kernel.memory import empty

        self.plan = plan
        self.buffer = empty((plan.num_bytes,), torch.uint8, device)
        self._free = list(reversed(range(plan.num_extents)))
        for spec in specs:
            for state in spec.states:
                self.view(spec, state)[0].fill_(state.initial)

    @property
    def num_free(self) -> int:
        """Extents that no group holds."""
        return len(self._free)

    def borrow(self) -> int:
        """An extent for a group; the caller has checked `num_free`."""
        return self._free.pop()

    def give_back(self, extent: int) -> None:
        assert extent not in self._free, f"extent {extent} was given back twice"
        self._free.append(extent)

    def view(self, spec: GroupSpec, state: PlacedState) -> torch.Tensor:
        """[blocks, entries, *axes] (or [slots, *axes]) over every id of the group, lent to it or not."""
        import torch

        typed = self.buffer.view(getattr(torch, state.dtype))
        size = typed.element_size()
        ids = self.plan.num_ids(spec.index)
        return typed.as_strided(
            (ids, *state.shape),
            (spec.block_bytes // size, *state.strides),
            (self.plan.origin(spec.index) + state.offset) // size,
        )

    def fill(self, group: int, blocks: Sequence[int], byte: int) -> None:
        """Overwrite blocks of a group."""
        size, origin = self.plan.block_bytes[group], self.plan.origin(group)
        for block in blocks:
            self.buffer[origin + block * size : origin + (block + 1) * size].fill_(byte)

    def fill_free(self, byte: int) -> None:
        """Overwrite the extents that no group holds."""
        size = self.plan.extent_bytes
        for extent in self._free:
            start = self.plan.reserved_bytes + extent * size
            self.buffer[start : start + size].fill_(byte)
