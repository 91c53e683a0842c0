"""Tables and mappings, against the same written as loops over tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp_runtime.state.tables import BlockTable, StepLayout, StepRow

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=5)


@given(ROWS, st.integers(0, 3), st.integers(0, 9))
def test_each_token_knows_its_request_and_place(rows: list[tuple[int, int]], pad_requests: int, pad: int) -> None:
    total = sum(count for _, count in rows)
    step = [StepRow(row, start, count) for row, (start, count) in enumerate(rows)]
    layout = StepLayout.of(step, len(rows) + pad_requests, total + pad)
    expected = [(row, start + k) for row, (start, count) in enumerate(rows) for k in range(count)]
    assert list(zip(layout.request.tolist(), layout.index.tolist(), strict=True)) == expected
    assert layout.first_row.tolist() == [sum(count for _, count in rows[:row]) for row in range(len(rows))]


@given(ROWS, st.sampled_from([4, 8, 16]), st.sampled_from([1, 2, 4]))
def test_mappings_point_at_the_entry_that_a_token_writes_or_closes(
    rows: list[tuple[int, int]], size: int, ratio: int
) -> None:
    places = -(-70 // size)
    blocks = np.random.default_rng(0).permutation(np.arange(1, 1 + places * len(rows))).reshape(len(rows), places)
    table = BlockTable(size, 1)
    table_rows = np.arange(len(rows))[::-1].copy()
    for row in range(len(rows)):
        table.put(int(table_rows[row]), 0, blocks[row].tolist())
    step = [StepRow(row, start, count) for row, (start, count) in enumerate(rows)]
    layout = StepLayout.of(step, len(rows), sum(count for _, count in rows) + 3)
    expected = [
        int(blocks[row, i // size]) * (size // ratio) + (i % size) // ratio if (i + 1) % ratio == 0 else -1
        for row, (start, count) in enumerate(rows)
        for i in range(start, start + count)
    ]
    assert table.slots(table_rows, layout, ratio).tolist() == [*expected, -1, -1, -1]


def test_a_batch_of_rows_is_a_copy_with_null_blocks_where_nothing_is_held() -> None:
    table = BlockTable(16, 2)
    table.put(0, 0, [5, 6, 7])
    table.put(9, 1, list(range(20, 40)))
    batch = table.batch(np.array([9, 0]), 3, 22)
    assert batch.dtype == np.int32
    assert batch.tolist() == [[0, *range(20, 40), 0], [5, 6, 7] + [0] * 19, [0] * 22]
    assert table.take(0, 1, 3) == [6, 7]
    assert batch[1].tolist()[:3] == [5, 6, 7]
    assert table.batch(np.array([0]), 1, 3).tolist() == [[5, 0, 0]]


def test_a_token_without_a_block_is_an_error_of_the_caller() -> None:
    table = BlockTable(16, 1)
    table.put(0, 0, [3])
    with pytest.raises(AssertionError, match="grow its request first"):
        table.slots(np.array([0]), StepLayout.of([StepRow("a", 10, 10)], 1, 10), 1)
