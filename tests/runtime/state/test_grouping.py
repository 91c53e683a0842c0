"""Groups: which states share a block, how large it is, and who forced it."""

from __future__ import annotations

import pytest

from rtp_kernel.parallel import ParallelContext
from rtp_runtime.errors import StateError
from rtp_runtime.state.descriptors import (
    CompressedState,
    PagedState,
    SlotState,
    StateDescriptor,
    StateDescriptors,
    WindowState,
)
from rtp_runtime.state.grouping import GroupSpec, group_states

KV = {"kv": 2, "kv heads": 4, "head dim": 8}


def groups(*layers: dict[str, StateDescriptor], block_size: int | None = None) -> tuple[GroupSpec, ...]:
    return group_states(StateDescriptors(layers), cache_dtype="bfloat16", block_size=block_size)


def test_states_of_all_shapes_and_layers_share_a_group_when_they_live_by_the_same_rule() -> None:
    (group,) = groups(
        {"kv": PagedState(axes=KV), "index": PagedState(axes={"dim": 16}, dtype="float32")},
        {"kv": PagedState(axes={"latent": 72})},
        {"kv": CompressedState(axes={"dim": 8}, tokens_per_entry=4)},
    )
    assert (group.kind, group.block_size, group.forced_by) == ("paged", 16, "default")
    assert [(state.layer, state.name, state.shape) for state in group.states] == [
        (0, "kv", (16, 2, 4, 8)),
        (0, "index", (16, 16)),
        (1, "kv", (16, 72)),
        (2, "kv", (4, 8)),
    ]
    assert [state.offset for state in group.states] == [0, 2048, 2048 + 1024, 2048 + 1024 + 2304]
    assert group.block_bytes == 2048 + 1024 + 2304 + 64
    assert group.tokens_per_entry == (1, 4)


def test_windows_of_one_size_share_a_group_and_slots_share_one() -> None:
    found = groups(
        {"kv": WindowState(axes=KV, window=128), "conv": SlotState(axes={"dim": 3})},
        {"kv": WindowState(axes=KV, window=64), "gate": SlotState(axes={"dim": 5}, dtype="float32", initial=-1)},
        {"kv": WindowState(axes=KV, window=128)},
    )
    assert [(group.kind, group.window, len(group.states)) for group in found] == [
        ("window", 128, 2),
        ("slot", 0, 2),
        ("window", 64, 1),
    ]
    assert [group.index for group in found] == [0, 1, 2]
    assert [state.shape for state in found[1].states] == [(3,), (5,)]


@pytest.mark.parametrize(
    ("state", "size", "forced"),
    [
        (PagedState(axes=KV), 16, "default"),
        (PagedState(axes=KV, alignment=8), 16, "default"),
        (PagedState(axes=KV, alignment=64), 64, "state 'x' of layer 0 (aligned to 64 tokens)"),
        (PagedState(axes=KV, alignment=3), 18, "state 'x' of layer 0 (aligned to 3 tokens)"),
        (WindowState(axes=KV, window=5, alignment=32), 32, "state 'x' of layer 0 (aligned to 32 tokens)"),
        (
            CompressedState(axes=KV, tokens_per_entry=128),
            128,
            "state 'x' of layer 0 (one entry for 128 tokens, aligned to 1)",
        ),
        (
            CompressedState(axes=KV, tokens_per_entry=4, alignment=6),
            24,
            "state 'x' of layer 0 (one entry for 4 tokens, aligned to 6)",
        ),
    ],
)
def test_the_block_is_the_smallest_that_a_state_allows(state: StateDescriptor, size: int, forced: str) -> None:
    (group,) = groups({"x": state})
    assert (group.block_size, group.forced_by) == (size, forced)


def test_compressed_states_share_a_block_of_which_each_has_its_entries() -> None:
    paged, compressed = groups(
        {"kv": PagedState(axes=KV)},
        {"kv": CompressedState(axes={"dim": 8}, tokens_per_entry=4)},
        {"kv": CompressedState(axes={"dim": 8}, tokens_per_entry=128)},
    )
    assert (paged.block_size, compressed.block_size) == (16, 128)
    assert [(state.tokens_per_entry, state.shape) for state in compressed.states] == [(4, (32, 8)), (128, (1, 8))]


def test_a_block_size_that_is_asked_for_serves_all_groups_or_is_refused_with_the_state_that_minds() -> None:
    layers = {"kv": PagedState(axes=KV)}, {"kv": CompressedState(axes={"dim": 8}, tokens_per_entry=24)}
    assert [group.block_size for group in groups(*layers, block_size=48)] == [48]
    with pytest.raises(StateError, match=r"block size 16 does not suit state 'kv' of layer 1 .*multiple of 24.*=24"):
        groups(*layers, block_size=16)
    with pytest.raises(StateError, match="block size 0 does not suit state 'kv' of layer 0"):
        groups(*layers, block_size=0)


def test_a_kind_that_nobody_implements_is_refused_by_name() -> None:
    class RingState(PagedState):
        pass

    with pytest.raises(StateError, match="'kv' of layer 1 is a RingState, a kind that this runtime does not implement"):
        groups({}, {"kv": RingState(axes=KV)})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (PagedState(axes={"dim": 0}), "axis 'dim' = 0"),
        (PagedState(axes=KV, alignment=0), "alignment = 0"),
        (WindowState(axes=KV, window=-1), "window = -1"),
        (CompressedState(axes=KV, tokens_per_entry=0), "tokens_per_entry = 0"),
        (PagedState(axes=KV, dtype="float7"), "dtype 'float7'; known are 'cache' and float64"),
        (PagedState(axes=KV, shard="heads"), "sharded on 'heads', which is none of its axes"),
    ],
)
def test_numbers_that_cannot_be_are_refused(state: StateDescriptor, message: str) -> None:
    with pytest.raises(StateError, match=message):
        groups({"x": state})


def test_a_rank_holds_its_share_of_the_sharded_axis() -> None:
    states = StateDescriptors([{"kv": PagedState(axes=KV, shard="kv heads")}])

    def heads(ranks: int) -> int:
        (group,) = group_states(states, cache_dtype="float32", parallel=ParallelContext(0, ranks))
        return group.states[0].shape[2]

    assert [heads(ranks) for ranks in (1, 2, 4, 8)] == [4, 2, 1, 1]
    with pytest.raises(StateError, match="4 places, which 3 ranks can neither divide nor repeat"):
        heads(3)


def test_the_physical_order_changes_strides_and_nothing_else() -> None:
    states = StateDescriptors([{"kv": PagedState(axes=KV)}])
    (plain,) = group_states(states, cache_dtype="float32")
    (heads_first,) = group_states(
        states, cache_dtype="float32", order={"kv": ("kv", "kv heads", "entries", "head dim")}
    )
    assert plain.states[0].strides == (64, 32, 8, 1)
    assert heads_first.states[0].strides == (8, 512, 128, 1)
    assert heads_first.states[0].shape == plain.states[0].shape
    with pytest.raises(StateError, match="does not name its dimensions"):
        group_states(states, cache_dtype="float32", order={"kv": ("kv", "entries")})
