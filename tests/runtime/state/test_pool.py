"""References of three kinds, and extents that wander between groups."""

from __future__ import annotations

import pytest
import torch

from rtp_runtime.state.arena import Arena, plan_arena
from rtp_runtime.state.grouping import GroupSpec
from rtp_runtime.state.inflight import StepsInFlight
from rtp_runtime.state.pool import BlockPool, Reference


def pools(*block_bytes: int, blocks: tuple[int, ...]) -> tuple[Arena, list[BlockPool]]:
    specs = tuple(
        GroupSpec(index=index, kind="paged", block_size=16, forced_by="", block_bytes=size, states=())
        for index, size in enumerate(block_bytes)
    )
    arena = Arena(specs, plan_arena(specs, blocks=blocks), torch.device("cpu"))
    return arena, [BlockPool(arena, spec.index) for spec in specs]


def test_a_block_is_unused_only_when_all_three_kinds_are_gone() -> None:
    arena, (pool,) = pools(64, blocks=(4,))
    (block,) = pool.allocate(1)
    pool.take([block], Reference.CACHE)
    pool.take([block], Reference.CACHE)
    pool.take([block], Reference.TRANSFER)
    assert pool.references(block) == (1, 2, 1)
    assert pool.drop([block], Reference.CACHE) == []
    assert pool.drop([block], Reference.REQUEST) == []
    assert pool.drop([block], Reference.CACHE) == []
    assert pool.references(block) == (0, 0, 1)
    assert pool.num_held == 1
    assert pool.drop([block], Reference.TRANSFER) == [block]
    assert (pool.num_held, arena.num_free) == (0, 3)
    pool.recycle([block])
    assert (pool.num_free, arena.num_free) == (0, 4)


def test_a_reference_that_nobody_has_cannot_be_dropped() -> None:
    _, (pool,) = pools(64, blocks=(4,))
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="dropped twice"):
        pool.drop([block], Reference.CACHE)


def test_an_extent_given_back_by_one_group_serves_another() -> None:
    arena, (large, small) = pools(256, 64, blocks=(2, 0))
    assert (arena.num_free, arena.plan.blocks_per_extent(1)) == (2, 4)
    first = large.allocate(2)
    assert arena.num_free == 0
    large.recycle(large.drop(first[:1], Reference.REQUEST))
    assert arena.num_free == 1
    taken = small.allocate(4)
    assert {arena.plan.extent_of(1, block) for block in taken} == {arena.plan.extent_of(0, first[0])}
    small.recycle(small.drop(taken[:3], Reference.REQUEST))
    assert (small.num_free, arena.num_free) == (3, 0), "an extent of which one block is held stays lent"
    assert sorted(small.free_blocks()) == sorted(taken[:3])
    small.recycle(small.drop(taken[3:], Reference.REQUEST))
    assert (small.num_free, arena.num_free) == (0, 1)


def test_blocks_let_go_during_steps_are_free_after_all_of_those() -> None:
    arena, (pool,) = pools(64, blocks=(4,))
    steps = StepsInFlight()
    blocks = pool.allocate(3)
    older, newer = steps.begin(), steps.begin()
    steps.recycle(pool, pool.drop(blocks[:1], Reference.REQUEST))
    latest = steps.begin()
    steps.recycle(pool, pool.drop(blocks[1:2], Reference.REQUEST))
    assert (steps.num_waiting, arena.num_free) == (2, 1)
    steps.end(newer)
    assert (steps.num_waiting, arena.num_free) == (2, 1), "the older step still runs"
    steps.end(older)
    steps.end(older)
    assert (steps.num_waiting, arena.num_free) == (1, 2)
    steps.end(latest)
    assert (steps.num_waiting, arena.num_free) == (0, 3)
    steps.recycle(pool, pool.drop(blocks[2:], Reference.REQUEST))
    assert (steps.num_waiting, arena.num_free) == (0, 4)
