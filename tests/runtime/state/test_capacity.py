"""Sizing and admission, in numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from rtp_runtime.errors import StateError
from rtp_runtime.state.descriptors import PagedState, SlotState, StateDescriptor, StateDescriptors, WindowState
from rtp_runtime.state.manager import StateManager
from rtp_runtime.state.requests import UNBOUNDED

KV = {"kv": 2, "kv heads": 1, "head dim": 8}  # 16 tokens of float32: 1024 bytes
PAGED = PagedState(axes=KV)


def manager(*layers: dict[str, StateDescriptor], **options: object) -> StateManager:
    defaults: dict[str, object] = {"cache_dtype": torch.float32, "max_requests": 2}
    return StateManager(StateDescriptors(layers), **(defaults | options))  # type: ignore[arg-type]


def test_blocks_are_tokens_and_the_longest_request_takes_them_all() -> None:
    state = manager({"kv": PAGED}, {"kv": PAGED}, num_blocks=5)
    assert state.max_tokens_per_request() == 80
    assert (state.fits(80), state.fits(81)) == (True, False)
    assert state.explain(81) == (
        "81 tokens take 12.0 KiB of state (6 paged blocks of 16 tokens) and there are 10.0 KiB, "
        "enough for 80 tokens of one request"
    )
    (group,) = state.describe()
    assert (group.block_bytes, group.max_blocks, group.states) == (2048, 5, ("2 x kv [16, 2, 1, 8] float32",))


def test_a_memory_budget_is_divided_by_what_a_block_takes() -> None:
    assert manager({"kv": PAGED}, memory=1024 * 11).max_tokens_per_request() == 10 * 16
    with pytest.raises(
        StateError, match="1500 bytes of memory for state are too few: one block of each group takes 2048"
    ):
        manager({"kv": PAGED}, memory=1500)


def test_a_window_bounds_what_a_request_holds_of_it_and_shares_the_rest() -> None:
    # At most ceil((32 + 16) / 16) + 1 = 4 blocks of the window, whatever the length.
    layers: list[dict[str, StateDescriptor]] = [{"kv": PAGED}, {"kv": WindowState(axes=KV, window=32)}]
    state = manager(*layers, memory=1024 * (2 + 20), max_step_tokens=16)
    assert state.max_tokens_per_request() == 16 * 16
    unbounded = manager(*layers, memory=1024 * (2 + 20))
    assert unbounded.max_tokens_per_request() == 10 * 16
    assert manager(layers[1], num_blocks=64, max_step_tokens=16).max_tokens_per_request() == UNBOUNDED


def test_slots_are_sized_for_requests_with_their_drafts_and_snapshots() -> None:
    slot = {"s": SlotState(axes={"dim": 16}, dtype="float32")}
    state = manager(slot, num_blocks=1, max_requests=3, max_drafts=2, num_snapshots=4)
    (group,) = state.describe()
    assert (group.kind, group.block_size, group.block_bytes, group.max_blocks) == ("slot", 0, 64, 3 * 3 + 4)
    assert state.max_tokens_per_request() == UNBOUNDED


@pytest.mark.parametrize("options", [{}, {"num_blocks": 4, "memory": 10**6}])
def test_exactly_one_size_is_given(options: dict[str, int]) -> None:
    with pytest.raises(StateError, match="give either num_blocks or memory"):
        manager({"kv": PAGED}, **options)


def test_sizes_that_hold_no_request_are_refused() -> None:
    with pytest.raises(StateError, match="num_blocks is 0; give at least 1"):
        manager({"kv": PAGED}, num_blocks=0)
    with pytest.raises(StateError, match=r"1 tokens take .*3 slots.* enough for 0 tokens of one request: give more"):
        manager({"s": SlotState(axes={"dim": 16}, dtype="float32")}, memory=64 * 4, max_drafts=2)


def test_a_model_without_state_holds_any_request() -> None:
    state = manager({}, num_blocks=1)
    assert state.views() == [{}]
    assert state.grow("a", 1000)
    assert state.group_batches([]) == ()
