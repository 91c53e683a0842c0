"""The cache of prefixes by its promises: what is found, what goes first, and whom it leaves alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from rtp_runtime.state.descriptors import (
    CompressedState,
    PagedState,
    SlotState,
    Snapshots,
    StateDescriptor,
    StateDescriptors,
    WindowState,
)
from rtp_runtime.state.keys import ContentKeys
from rtp_runtime.state.manager import StateManager
from rtp_runtime.state.pool import Reference
from rtp_runtime.state.prefix import PrefixCache
from rtp_runtime.state.tables import StepRow

AXES = {"dim": 16}  # 16 tokens of float32: 1024 bytes
PAGED = PagedState(axes=AXES)
WINDOW = WindowState(axes=AXES, window=20)
SLOT = SlotState(axes={"dim": 256}, dtype="float32")


def manager(*states: StateDescriptor, num_blocks: int = 16, **options: Any) -> StateManager:
    defaults: dict[str, Any] = {"num_blocks": num_blocks, "max_requests": 2, "num_snapshots": 4, "prefixes": True}
    layers = [{"s": state} for state in states]
    return StateManager(StateDescriptors(layers), cache_dtype=torch.float32, **(defaults | options))


def cache(state: StateManager) -> PrefixCache:
    assert state.prefixes is not None
    return state.prefixes


def keys(state: StateManager, tokens: list[int]) -> list[bytes]:
    chain = ContentKeys(b"", cache(state).key_unit)
    chain.extend(np.array(tokens, np.int64))
    return chain.digests


def serve(state: StateManager, tokens: list[int], *, chunk: int = 1000, ends: bool = True) -> int:
    """Run a request to its end; how much of it was cached."""
    name = f"{tokens[0]} {len(tokens)}"
    hit = start = state.adopt(name, keys(state, tokens), len(tokens))
    while start < len(tokens):
        row = StepRow(name, start, min(chunk, len(tokens) - start))
        assert state.grow(name, row.num_tokens)
        state.end_step(state.begin_step([row]))
        start += row.num_tokens
        state.commit(name, start)
    if ends:
        state.release(name)
    return hit


def line(first: int, count: int) -> list[int]:
    return [first * 1000 + k for k in range(count)]


def test_the_longest_prefix_that_leaves_a_token_to_compute() -> None:
    state = manager(PAGED)
    assert [serve(state, line(1, 48)), serve(state, line(1, 48)), serve(state, line(1, 49))] == [0, 32, 48]
    assert serve(state, [*line(1, 33), 7, 8]) == 32
    assert serve(state, [*line(1, 31), 7, 8]) == 16
    assert serve(state, [7, *line(1, 48)[1:]]) == 0


def test_a_window_supplies_a_prefix_while_its_last_blocks_are_held() -> None:
    state = manager(PAGED, WINDOW)
    tokens = line(1, 100)
    serve(state, tokens, chunk=10)
    assert serve(state, tokens) == 96
    assert serve(state, [*tokens[:64], 5]) == 64
    node = cache(state).find(keys(state, tokens), 80)
    assert node is not None
    (window,) = (spec.index for spec in state.groups if spec.window)
    # The block of 64..79 goes: a prefix of 96 tokens still sees 77, one of 112 would not.
    first, blocks = node.blocks.pop(window)
    assert first == 4
    state.memory.drop(window, blocks, Reference.CACHE)
    assert serve(state, [*tokens[:96], 5]) == 64
    state.clear_prefixes()
    assert state.arena.num_free == state.arena.plan.num_extents


def test_the_least_recently_used_goes_first_and_children_before_parents() -> None:
    state = manager(PAGED, num_blocks=8)
    serve(state, line(1, 48))
    serve(state, line(2, 48))
    serve(state, [*line(1, 32), 5])
    # 6 of 8 blocks are cached. 4 more take the 2 whose use is longest ago and that nothing follows: the two ends.
    assert serve(state, line(3, 64)) == 0
    assert cache(state).num_evictions == 2
    assert serve(state, [*line(2, 48), 5]) == 32


def test_eviction_takes_nothing_from_running_requests_or_transfers() -> None:
    state = manager(PAGED, num_blocks=4)
    serve(state, line(1, 32), ends=False)
    assert not state.can_grow("other", 16 * 3)
    assert serve(state, line(2, 17)) == 0
    assert len(cache(state)) == 3
    assert state.grow("other", 32)
    state.release("other")
    assert serve(state, line(1, 33)) == 32
    state.release("1000 32")
    holding_of = state.adopt("copy", keys(state, line(1, 33)), 33)
    assert holding_of == 32
    holding = state.snapshot("copy")
    assert holding is not None
    transfer = state.transfer(holding)
    state.let_go(holding)
    state.release("copy")
    assert not state.can_grow("other", 16 * 3)
    state.let_go(transfer)
    assert state.can_grow("other", 16 * 4)


def test_evicted_blocks_are_free_at_once_unless_a_step_in_flight_may_use_them() -> None:
    state = manager(PAGED, num_blocks=4)
    serve(state, line(1, 48))
    assert state.grow("a", 16)
    ticket = state.begin_step([StepRow("a", 0, 16)])
    # The cached blocks were let go before the step began.
    assert state.grow("b", 32)
    state.release("a")
    assert (state.num_waiting, state.can_grow("b", 32)) == (1, False)
    state.end_step(ticket)
    assert state.can_grow("b", 32)


def test_what_would_not_suffice_is_not_evicted() -> None:
    state = manager(PAGED, num_blocks=4)
    serve(state, line(1, 32))
    assert state.grow("a", 32)
    assert not state.grow("b", 48)
    assert len(cache(state)) == 2
    assert state.grow("b", 32)
    assert len(cache(state)) == 0


def copies(state: StateManager) -> set[int]:
    return {node.end for node in cache(state)._nodes.values() if node.slots}


def test_slots_are_copied_where_their_policy_says() -> None:
    def ends(policy: Snapshots, *prompts: list[int], more: int = 0) -> set[int]:
        state = manager(PAGED, dataclasses.replace(SLOT, retention=policy, capacity=1.0), num_blocks=40)
        for prompt in prompts:
            serve(state, prompt, chunk=7)
        return copies(state)

    nowhere = Snapshots(prompt_end=False, branch=False, latest=False)
    assert ends(nowhere, line(1, 100)) == set()
    assert ends(dataclasses.replace(nowhere, prompt_end=True), line(1, 100)) == {96}
    assert ends(dataclasses.replace(nowhere, prompt_end=True), line(1, 96)) == {80}
    assert ends(dataclasses.replace(nowhere, every=40), line(1, 100)) == {48, 96}
    assert ends(dataclasses.replace(nowhere, branch=True), line(1, 100), [*line(1, 70), *line(2, 30)]) == {64}


def test_the_latest_copy_moves_along() -> None:
    state = manager(PAGED, SLOT, num_blocks=40)
    tokens = line(1, 80)
    known = keys(state, tokens)
    assert state.adopt("a", known, 20) == 0
    start = 0
    for size in [20] + [1] * 50:
        assert state.grow("a", size)
        state.end_step(state.begin_step([StepRow("a", start, size)]))
        start += size
        state.commit("a", start)
    assert copies(state) == {16, 64}
    assert serve(state, tokens) == 64


def test_copies_stay_within_their_share_and_the_oldest_makes_way() -> None:
    state = manager(PAGED, SLOT, num_blocks=40)
    for first in range(1, 40):
        serve(state, line(first, 33))
        slots = state.memory.pools[1]
        total = state.arena.plan.num_extents * state.arena.plan.blocks_per_extent(1)
        assert slots.num_cached <= total / 2
    assert serve(state, line(39, 33)) == 32


def test_one_state_without_reuse_keeps_the_model_from_it() -> None:
    state = manager(PAGED, dataclasses.replace(WINDOW, reuse="none"))
    assert state.prefixes is None
    assert state.adopt("a", [], 100) == 0
    assert manager(PAGED, prefixes=False).prefixes is None


def test_slots_alone_are_reused_at_multiples_of_the_default_block() -> None:
    state = manager(SLOT, num_blocks=1, max_requests=4)
    assert [serve(state, line(1, 40)), serve(state, line(1, 40))] == [0, 32]
    state.clear_prefixes()
    assert state.arena.num_free == state.arena.plan.num_extents


def test_groups_of_very_different_blocks_share_the_arena_and_prefixes() -> None:
    """A window of 128 tokens, entries for 4 and for 128 tokens with their buffers, as long-context models have."""
    wide = {"dim": 512}
    near = CompressedState(axes=wide, tokens_per_entry=4)
    buffers = {f"buffer {n}": SlotState(axes={"tokens": n, "dim": 512}, dtype="float32") for n in (8, 128)}
    layers: list[dict[str, StateDescriptor]] = [
        {"kv": WindowState(axes=wide, window=128)},
        {"near": near, "index": CompressedState(axes=AXES, tokens_per_entry=4)},
        {"far": CompressedState(axes=wide, tokens_per_entry=128)},
        {**buffers},
    ]
    options: dict[str, Any] = {"max_requests": 3, "max_step_tokens": 256, "prefixes": True, "num_snapshots": 3}
    state = StateManager(StateDescriptors(layers), cache_dtype=torch.float32, num_blocks=256, **options)
    blocks = {spec.kind + str(spec.block_size): spec.block_bytes for spec in state.groups}
    # 16 tokens of the window; of 128 tokens 32 entries of both near states and one far; 8 + 128 tokens of buffers.
    assert blocks == {"window16": 16 * 2048, "compressed128": 32 * (2048 + 64) + 2048, "slot0": 136 * 2048}
    assert (cache(state).key_unit, cache(state).unit) == (16, 128)
    # What is asked for fits, and little more is taken: 4096 tokens, 3 requests' windows, 6 slots.
    asked = 32 * 69632 + 3 * 25 * 32768 + 6 * 278528
    assert state.max_tokens_per_request() >= 4096
    assert asked <= state.arena.plan.num_bytes <= 1.35 * asked
    tokens = line(1, 900)
    assert [serve(state, tokens, chunk=100), serve(state, tokens, chunk=100)] == [0, 896]
    for first in range(2, 14):
        serve(state, line(first, 1000), chunk=256)
    assert cache(state).num_evictions > 0
    state.clear_prefixes()
    assert state.arena.num_free == state.arena.plan.num_extents
