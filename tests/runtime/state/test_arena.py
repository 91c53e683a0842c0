"""The arena: addresses of all groups' blocks never overlap, and views reach exactly them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rtp_runtime.errors import StateError
from rtp_runtime.state.arena import SCRATCH_SLOT, Arena, num_reserved, plan_arena
from rtp_runtime.state.descriptors import PagedState, SlotState, StateDescriptors
from rtp_runtime.state.grouping import GroupSpec, group_states


def specs_of(sizes: list[tuple[int, bool]]) -> tuple[GroupSpec, ...]:
    """Groups whose blocks have so many cache lines; slots where the flag says so."""
    return tuple(
        GroupSpec(
            index=index, kind="slot" if slot else "paged", block_size=16, forced_by="", block_bytes=64 * size, states=()
        )
        for index, (size, slot) in enumerate(sizes)
    )


SIZES = st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=4)


@given(SIZES, st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_blocks_of_all_groups_lie_apart_and_inside(sizes: list[tuple[int, bool]], counts: list[int]) -> None:
    specs = specs_of(sizes)
    plan = plan_arena(specs, blocks=counts[: len(specs)])

    def span(group: int, block: int) -> tuple[int, int]:
        start = plan.origin(group) + block * plan.block_bytes[group]
        return start, start + plan.block_bytes[group]

    spans = [span(spec.index, block) for spec in specs for block in range(num_reserved(spec))]
    assert all(start >= 0 and end <= plan.reserved_bytes for start, end in spans)
    for extent in range(plan.num_extents):
        low = plan.reserved_bytes + extent * plan.extent_bytes
        for spec in specs:
            blocks = plan.blocks_of(spec.index, extent)
            assert len(blocks) >= plan.blocks_per_extent(spec.index) >= 1
            assert all(low <= span(spec.index, b)[0] for b in blocks)
            assert all(span(spec.index, b)[1] <= low + plan.extent_bytes for b in blocks)
            assert all(plan.extent_of(spec.index, b) == extent for b in blocks)
            assert all(num_reserved(spec) <= b < plan.num_ids(spec.index) for b in blocks)
            assert (len(blocks) + 2) * spec.block_bytes > plan.extent_bytes
    for spec in specs:
        assert plan.origin(spec.index) + plan.num_ids(spec.index) * spec.block_bytes <= plan.num_bytes
    ordered = sorted(spans)
    assert all(before[1] <= after[0] for before, after in pairwise(ordered))
    assert plan.extents_for(counts[: len(specs)]) == plan.num_extents


@given(SIZES, st.integers(10**5, 10**8))
def test_a_memory_budget_is_kept_and_nearly_used(sizes: list[tuple[int, bool]], memory: int) -> None:
    specs = specs_of(sizes)
    try:
        plan = plan_arena(specs, memory=memory)
    except StateError:
        assert memory < 64 * 90 * 16 * (len(specs) + 1) + 4 * 64 * 90 * 4
        return
    assert memory - plan.extent_bytes < plan.num_bytes <= memory
    for spec in specs:
        lost = 1 - plan.blocks_per_extent(spec.index) * spec.block_bytes / plan.extent_bytes
        assert 0 <= lost <= 2 / 16


def test_one_group_loses_nothing() -> None:
    plan = plan_arena(specs_of([(7, False)]), blocks=[8])
    assert (plan.extent_bytes, plan.num_extents, plan.reserved_bytes) == (448, 8, 448)
    assert plan.num_bytes == 448 * 9


def test_too_little_memory_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(StateError, match=r"1000 bytes .* too few: one block of each group takes 1024; give at least"):
        plan_arena(specs_of([(4, False), (4, False)]), memory=1000)
    assert plan_arena(specs_of([(4, False), (4, False)]), memory=1024).num_extents == 2


def test_views_are_one_tensor_over_all_ids_and_reserved_blocks_start_as_declared() -> None:
    states = StateDescriptors(
        [
            {"kv": PagedState(axes={"kv": 2, "dim": 3})},
            {"s": SlotState(axes={"dim": 5}, dtype="float32", initial=float("-inf"))},
            {"kv": PagedState(axes={"kv": 2, "dim": 3}), "t": SlotState(axes={"n": 2}, dtype="int64", initial=7)},
        ]
    )
    specs = group_states(states, cache_dtype="bfloat16")
    plan = plan_arena(specs, blocks=[6, 6])
    arena = Arena(specs, plan, torch.device("cpu"))
    first, second = (arena.view(specs[0], state) for state in specs[0].states)
    assert first.shape == (plan.num_ids(0), 16, 2, 3)
    assert first.stride() == (specs[0].block_bytes // 2, 6, 3, 1)
    s, t = (arena.view(specs[1], state) for state in specs[1].states)
    assert s[0].tolist() == [float("-inf")] * 5
    assert t[0].tolist() == [7, 7]
    block, slot = plan.blocks_of(0, 0)[0], plan.blocks_of(1, 1)[0]
    first[block], second[block], s[slot], t[slot], s[SCRATCH_SLOT] = 1.5, 2.5, 3.5, 4, 5.5
    assert [first[block].unique().item(), second[block].unique().item()] == [1.5, 2.5]
    assert [s[slot].unique().item(), t[slot].unique().item(), s[SCRATCH_SLOT].unique().item()] == [3.5, 4, 5.5]
    assert s[0].tolist() == [float("-inf")] * 5
    assert t[0].tolist() == [7, 7]


def test_an_extent_is_lent_once_and_given_back_once() -> None:
    specs = specs_of([(1, False)])
    arena = Arena(specs, plan_arena(specs, blocks=[3]), torch.device("cpu"))
    lent = [arena.borrow() for _ in range(3)]
    assert (sorted(lent), arena.num_free) == ([0, 1, 2], 0)
    arena.give_back(lent[1])
    assert arena.borrow() == lent[1]
    arena.give_back(lent[1])
    with pytest.raises(AssertionError, match="given back twice"):
        arena.give_back(lent[1])
