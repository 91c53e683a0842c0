"""Selection on the CPU: the reference's result to the last place, ties and rows that see little included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_kernel.backends.cpu.selection import Select
from rtp_kernel.ops.selection import select


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 4),
    groups=st.integers(1, 3),
    places=st.integers(0, 80),
    k=st.integers(1, 30),
    values=st.sampled_from([1, 2, 5, 1000]),
    seen=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_is_the_reference(rows: int, groups: int, places: int, k: int, values: int, seen: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, values, (rows, groups, places), generator=draw).float()
    scores[torch.rand(scores.shape, generator=draw) > seen] = float("-inf")
    assert torch.equal(Select()(scores, k), select(scores, k))


@pytest.mark.parametrize("rows", [1, 7])
def test_of_many_places(rows: int) -> None:
    scores = torch.randn(rows, 2, 5000)
    scores[..., 17:300] = scores[..., :1]
    assert torch.equal(Select()(scores, 200), select(scores, 200))


def test_nan_is_treated_as_by_the_reference() -> None:
    scores = torch.randn(3, 1, 100)
    scores[1, 0, 4:60] = float("nan")
    assert torch.equal(Select()(scores, 5), select(scores, 5))
