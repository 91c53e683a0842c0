"""Grouped experts against the looped reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_kernel.backends.cpu.moe import GroupedExperts
from rtp_kernel.ops.moe import experts
from rtp_kernel.registry import OpContext


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 20),
    num=st.integers(1, 12),
    activation=st.sampled_from([("silu", None), ("swiglu_oai", 1.0), ("gelu_tanh", None)]),
    alpha=st.sampled_from([1.702, 0.5]),
    data=st.data(),
)
def test_agrees_with_the_reference(
    tokens: int, num: int, activation: tuple[str, float | None], alpha: float, data: Any
) -> None:
    k = data.draw(st.integers(1, num))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    gate_up, down = torch.randn(num, 48, 32) / 5, torch.randn(num, 32, 24) / 5
    x, weights = torch.randn(tokens, 32), torch.rand(tokens, k)
    ids = torch.rand(tokens, num).argsort(-1)[:, :k]
    options: dict[str, Any] = {"activation": activation[0], "limit": activation[1], "alpha": alpha}
    want = experts(x, weights, ids, gate_up, down, **options)
    assert torch.allclose(GroupedExperts()(x, weights, ids, gate_up, down, **options), want, atol=2e-6)


def test_experts_that_are_not_hit_are_not_read() -> None:
    gate_up, down = torch.randn(6, 48, 32), torch.randn(6, 32, 24)
    x, weights, ids = torch.randn(3, 32), torch.rand(3, 2), torch.tensor([[1, 4], [4, 1], [1, 2]])
    want = GroupedExperts()(x, weights, ids, gate_up, down)
    gate_up[[0, 3, 5]], down[[0, 3, 5]] = float("nan"), float("nan")
    assert torch.equal(GroupedExperts()(x, weights, ids, gate_up, down), want)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"deterministic": True}, "depends on the other rows"),
        ({"shapes": {"hidden": 30, "intermediate": 32}}, "no multiples of 16"),
        ({"dtype": torch.float16}, "has no torch.float16"),
    ],
)
def test_says_what_it_serves(fields: dict[str, Any], reason: str | None) -> None:
    defaults = {"device": "cpu", "dtype": torch.float32, "shapes": {"hidden": 32, "intermediate": 32}}
    support = GroupedExperts().supports(OpContext(**{**defaults, **fields}))
    assert support.ok == (reason is None)
    assert reason is None or reason in support.reasons[0]
