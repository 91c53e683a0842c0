"""The manager's promises one by one: growth, release, steps in flight, windows, slots, drafts, snapshots, transfers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rtp_kernel.batch import GroupBatch
from rtp_runtime.errors import StateError
from rtp_runtime.state.arena import SCRATCH_SLOT
from rtp_runtime.state.descriptors import PagedState, SlotState, StateDescriptor, StateDescriptors, WindowState
from rtp_runtime.state.manager import StateManager
from rtp_runtime.state.tables import StepRow

AXES = {"dim": 4}
PAGED = PagedState(axes=AXES)
WINDOW = WindowState(axes=AXES, window=20)
SLOT = SlotState(axes=AXES, dtype="float32", initial=-2)


def manager(*states: StateDescriptor, num_blocks: int = 8, **options: int) -> StateManager:
    layers = [{"s": state} for state in states]
    sizes = {"num_blocks": num_blocks, "max_requests": 4} | options
    return StateManager(StateDescriptors(layers), cache_dtype=torch.float32, **sizes)  # type: ignore[arg-type]


def step(state: StateManager, *rows: StepRow, commit: bool = True) -> tuple[GroupBatch, ...]:
    """One step at depth 0, its requests grown first."""
    for row in rows:
        assert state.grow(row.request, row.start + row.num_tokens - state.num_tokens(row.request), row.drafts)
    batches = state.group_batches(rows)
    state.end_step(state.begin_step(rows))
    if commit:
        for row in rows:
            state.commit(row.request, row.start + row.num_tokens)
    return batches


def items(tensor: Tensor | None) -> list[object]:
    assert tensor is not None
    return tensor.tolist()


def test_growth_is_granted_or_refused_whole() -> None:
    state = manager(PAGED)
    assert state.can_grow("a", 128)
    assert not state.can_grow("a", 129)
    assert state.grow("a", 100)
    assert state.can_grow("a", 28) and not state.can_grow("a", 29)
    assert state.can_grow("b", 16) and not state.can_grow("b", 17)
    assert not state.grow("b", 17)
    assert (state.num_tokens("a"), state.num_tokens("b")) == (100, 0)
    assert state.grow("b", 16)
    assert state.grow("a", 12)
    assert not state.grow("a", 1)


def test_release_is_idempotent_and_of_unknown_requests_nothing() -> None:
    state = manager(PAGED)
    step(state, StepRow("a", 0, 60), StepRow("b", 0, 10))
    free = state.arena.num_free
    state.release("a")
    assert state.arena.num_free == free + 4
    state.release("a")
    state.release("never seen")
    assert state.arena.num_free == free + 4
    state.release("b")
    assert state.arena.num_free == state.arena.plan.num_extents


def test_tables_and_mappings_of_a_mixed_padded_step() -> None:
    state = manager(PAGED, SLOT)
    step(state, StepRow("a", 0, 17))
    rows = [StepRow("a", 17, 1), StepRow("b", 0, 3)]
    paged, slots = step_batches = _padded(state, rows, 4, 6)
    assert len(step_batches) == 2
    table = paged.block_table
    assert table is not None and table.dtype == torch.int32
    blocks = table.tolist()
    assert len({*blocks[0], blocks[1][0]}) == 3 and 0 not in {*blocks[0], blocks[1][0]}
    assert blocks[1][1] == 0 and blocks[2:] == [[0, 0], [0, 0]]
    assert items(paged.slot_mapping[1]) == [blocks[0][1] * 16 + 1, *(blocks[1][0] * 16 + k for k in range(3)), -1, -1]
    assert paged.slot_mapping[1].dtype == torch.int64
    read, write = items(slots.read), items(slots.write)
    assert read[0] == write[0] and read[1:] == [0, 0, 0]
    assert write[2:] == [SCRATCH_SLOT, SCRATCH_SLOT]
    assert len({0, SCRATCH_SLOT, write[0], write[1]}) == 4
    assert slots.snapshots is not None and slots.snapshots.shape == (0, 2)


def _padded(state: StateManager, rows: Sequence[StepRow], requests: int, tokens: int) -> tuple[GroupBatch, ...]:
    for row in rows:
        assert state.grow(row.request, row.num_tokens)
    return state.group_batches(rows, requests, tokens)


def test_what_a_finished_request_gives_back_waits_for_the_steps_in_flight() -> None:
    state = manager(PAGED, num_blocks=2)
    assert state.grow("a", 20)
    first = state.begin_step([StepRow("a", 0, 20)])
    assert state.grow("a", 1)
    second = state.begin_step([StepRow("a", 20, 1)])
    state.end_step(first)
    state.commit("a", 20)
    state.release("a")
    assert (state.num_waiting, state.can_grow("b", 1)) == (2, False)
    state.end_step(second)
    state.end_step(second)
    state.commit("a", 21)
    assert (state.num_waiting, state.can_grow("b", 32)) == (0, True)


def test_blocks_behind_the_window_are_let_go_at_commit() -> None:
    state = manager(WINDOW, num_blocks=4)
    (before,) = step(state, StepRow("a", 0, 35))
    assert items(before.first_valid) == [0]
    (after,) = step(state, StepRow("a", 35, 1))
    # The next query is 35 and sees 16..35: block 0 is behind it.
    assert items(after.first_valid) == [16]
    assert before.block_table is not None and after.block_table is not None
    assert after.block_table.tolist()[0] == [0, *before.block_table.tolist()[0][1:]]
    assert state.can_grow("b", 32)
    for start in range(36, 300):
        step(state, StepRow("a", start, 1))
    assert state.can_grow("b", 16), "a window holds what it sees, however long the request is"
    state.release("a")
    assert state.can_grow("b", 64)


def test_blocks_that_a_rejected_draft_falls_back_to_are_kept_while_it_is_in_flight() -> None:
    state = manager(WINDOW, max_drafts=2)
    for row in (StepRow("a", 0, 33), StepRow("a", 33, 3, drafts=2)):
        assert state.grow("a", row.num_tokens, row.drafts)
        state.end_step(state.begin_step([row]))
    state.commit("a", 33)
    # Had the drafts been right, the next query would be 36 and block 0 behind its window; 34 still sees 15.
    state.truncate("a", 34)
    state.commit("a", 34)
    (batch,) = step(state, StepRow("a", 34, 1))
    assert items(batch.first_valid) == [0]


def test_a_rejected_draft_makes_the_candidate_the_state() -> None:
    state = manager(PAGED, SLOT, max_drafts=3)
    data = state.views()[1]["s"].data
    step(state, StepRow("a", 0, 15))
    (_, slots) = step(state, StepRow("a", 15, 4, drafts=3), commit=False)
    copies = items(slots.snapshots)
    assert [row for row, _ in copies] == [0, 1, 2]  # type: ignore[misc]
    for slot, value in [
        (copies[0][1], 16.0),
        (copies[1][1], 17.0),
        (copies[2][1], 18.0),
        (items(slots.write)[0], 19.0),
    ]:  # type: ignore[index]
        data[slot] = value
    free = state.arena.num_free
    state.truncate("a", 17)
    state.commit("a", 17)
    assert (state.num_tokens("a"), state.arena.num_free) == (17, free)
    (paged, slots) = step(state, StepRow("a", 17, 4, drafts=3), commit=False)
    assert data[slots.read].unique().item() == 17.0
    assert slots.read is not None and slots.write is not None and torch.equal(slots.read, slots.write)
    assert len({*items(slots.write), *(slot for _, slot in items(slots.snapshots))}) == 4  # type: ignore[misc]
    assert items(paged.slot_mapping[1])[0] == paged.block_table[0, 1] * 16 + 1  # type: ignore[index]
    state.commit("a", 21)
    (_, slots) = step(state, StepRow("a", 21, 1))
    assert items(slots.snapshots) == []


def test_a_rewind_across_a_block_gives_the_block_back() -> None:
    state = manager(PAGED, num_blocks=2)
    step(state, StepRow("a", 0, 15))
    step(state, StepRow("a", 15, 3, drafts=2), commit=False)
    assert not state.can_grow("b", 1)
    state.truncate("a", 16)
    state.commit("a", 16)
    assert state.can_grow("b", 16)


def test_slot_state_cannot_rewind_to_where_no_copy_was_left() -> None:
    state = manager(SLOT, max_drafts=2)
    step(state, StepRow("a", 0, 5))
    step(state, StepRow("a", 5, 3), commit=False)
    with pytest.raises(StateError, match=r"cannot rewind to 6 tokens; candidates were left after: none\. Submit"):
        state.truncate("a", 6)
    state.commit("a", 8)
    step(state, StepRow("a", 8, 3, drafts=2), commit=False)
    with pytest.raises(StateError, match="cannot rewind to 8 tokens; candidates were left after: 9 to 10"):
        state.truncate("a", 8)
    with pytest.raises(AssertionError, match="cannot rewind to 7 tokens"):
        state.truncate("a", 7)


def test_growth_that_was_not_submitted_can_be_undone_on_every_kind() -> None:
    state = manager(PAGED, WINDOW, SLOT)
    step(state, StepRow("a", 0, 30))
    assert state.grow("a", 40)
    state.truncate("a", 30)
    assert state.num_tokens("a") == 30
    _, _, slots = step(state, StepRow("a", 30, 1))
    assert items(slots.read) == items(slots.write)


def test_a_snapshot_taken_now_is_restored_with_shared_blocks_and_its_own_copy_of_the_slot() -> None:
    state = manager(PAGED, WINDOW, SLOT, num_snapshots=1)
    data = state.views()[2]["s"].data
    paged, window, slots = step(state, StepRow("a", 0, 48))
    data[slots.write] = 48.0
    holding = state.snapshot("a")
    assert holding is not None and holding.complete and holding.num_tokens == 48
    data[slots.write] = 49.0
    state.release("a")
    assert state.restore("b", holding) == 48
    assert state.restore("c", holding) == 48
    rows = [StepRow("b", 48, 1), StepRow("c", 48, 2)]
    shared, shared_window, read = step(state, *rows)
    assert paged.block_table is not None and shared.block_table is not None and shared_window.block_table is not None
    for row in (0, 1):
        assert shared.block_table[row, :3].tolist() == paged.block_table[0].tolist()
        assert shared_window.block_table[row, :3].tolist() == [0, *window.block_table[0, 1:].tolist()]  # type: ignore[index]
    assert shared.block_table[0, 3] != shared.block_table[1, 3]
    assert items(shared_window.first_valid) == [16, 16]
    assert data[read.read].unique().item() == 48.0
    assert len({*items(read.read), *items(read.write)}) == 3
    _, _, own = step(state, StepRow("b", 49, 1))
    assert items(own.read) == items(own.write) == items(read.write)[:1]


def test_a_snapshot_ahead_is_left_by_the_step_that_passes_it() -> None:
    state = manager(PAGED, SLOT, num_snapshots=2)
    data = state.views()[1]["s"].data
    step(state, StepRow("a", 0, 10))
    holding, later = state.snapshot("a", 32), state.snapshot("a", 64)
    assert holding is not None and later is not None
    step(state, StepRow("b", 0, 2))
    _, slots = step(state, StepRow("b", 2, 3), StepRow("a", 10, 30), commit=False)
    ((row, slot),) = items(slots.snapshots)  # type: ignore[misc]
    assert row == 3 + 32 - 10 - 1
    data[slot] = 32.0
    assert not holding.complete
    with pytest.raises(AssertionError, match="computed, collected and kept"):
        state.restore("c", holding)
    state.commit("a", 40)
    assert (holding.complete, later.complete) == (True, False)
    state.release("a")
    assert later.released, "a snapshot that its request did not reach is dropped with it"
    state.restore("c", holding)
    _, slots = step(state, StepRow("c", 32, 5))
    assert data[slots.read].unique().item() == 32.0


def test_snapshots_only_where_blocks_of_all_groups_end_and_not_in_the_past() -> None:
    state = manager(PAGED, PagedState(axes=AXES), SLOT)
    step(state, StepRow("a", 0, 40))
    with pytest.raises(StateError, match="after 40 tokens is not at the end of a block; take a multiple of 16"):
        state.snapshot("a")
    with pytest.raises(StateError, match="submitted 40 tokens and committed 40: a snapshot after 32 comes too late"):
        state.snapshot("a", 32)
    with pytest.raises(StateError, match="after 0 tokens"):
        state.snapshot("a", 0)


def test_without_a_slot_for_the_copy_there_is_no_snapshot() -> None:
    state = manager(SLOT, num_blocks=1, max_requests=1)
    step(state, StepRow("a", 0, 16))
    assert state.snapshot("a") is None
    assert state.arena.num_free == 0


def test_letting_a_prefix_go_takes_nothing_from_who_runs_on_it() -> None:
    state = manager(PAGED, SLOT, num_blocks=4, num_snapshots=1)
    total = state.arena.num_free
    step(state, StepRow("a", 0, 32))
    holding = state.snapshot("a")
    assert holding is not None
    transfer = state.transfer(holding)
    state.release("a")
    state.restore("b", holding)
    state.let_go(holding)
    state.let_go(holding)
    with pytest.raises(AssertionError, match="computed, collected and kept"):
        state.restore("c", holding)
    assert state.arena.num_free == total - 3
    state.release("b")
    assert state.arena.num_free == total - 3, "the transfer still reads"
    state.let_go(transfer)
    state.let_go(transfer)
    assert state.arena.num_free == total


def test_poison_reaches_all_that_nobody_keeps_and_nothing_else() -> None:
    state = manager(PAGED, SLOT)
    paged, slot = (views["s"].data for views in state.views())
    tables, slots = step(state, StepRow("a", 0, 20))
    held = tables.block_table.long()[0]  # type: ignore[union-attr]
    paged[held], slot[slots.write] = 3.0, 4.0
    state.poison()
    assert paged[held].unique().tolist() == [3.0] and slot[slots.write].unique().tolist() == [4.0]
    assert slot[0].tolist() == [-2.0] * 4
    assert slot[SCRATCH_SLOT].isnan().all() and paged[0].isnan().all()
    assert state.grow("b", 20)
    other = state.group_batches([StepRow("b", 0, 20)])
    assert paged[other[0].block_table.long()].isnan().all()  # type: ignore[union-attr]
    assert slot[other[1].write].isnan().all()
    ticket = state.begin_step([StepRow("b", 0, 20)])
    with pytest.raises(AssertionError, match="in flight"):
        state.poison()
    state.end_step(ticket)
