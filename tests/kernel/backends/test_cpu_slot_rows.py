"""Deterministic forms over states per request: bit-equal in one chunk, in chunks, among drafts, and beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_kernel.backends.cpu.slot_rows import (
    CausalConvRows,
    DeltaGatesRows,
    GatedDeltaRuleRows,
    GatedRmsNormRows,
    LightningAttentionRows,
    LinearRecurrenceRows,
    SelectiveScanRows,
    StateSpaceScanRows,
)
from rtp_kernel.ops.conv import causal_conv
from rtp_kernel.ops.delta_rule import delta_gates, gated_delta_rule
from rtp_kernel.ops.lightning import lightning_attention
from rtp_kernel.ops.linear_recurrence import linear_recurrence
from rtp_kernel.ops.norm import gated_rms_norm
from rtp_kernel.ops.selective_scan import selective_scan
from rtp_kernel.ops.state_space_scan import state_space_scan

TOTAL = 21
HEADS = (3, 6, 10, 14)


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def conv_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Any, tuple[Tensor, ...], tuple[int, ...]]:
    weight = torch.randn(37, 1, 4).to(dtype)

    def run(op: Any, rows: tuple[Tensor, ...], view: Any, batch: Any) -> Tensor:
        out: Tensor = op(rows[0], weight, view, batch, activation="silu")
        return out

    return run, (CausalConvRows(), causal_conv), (torch.randn(TOTAL, 37).to(dtype),), (37, 3)


def rule_case(
    dtype: torch.dtype, channels: bool
) -> tuple[Callable[..., Tensor], Any, tuple[Tensor, ...], tuple[int, ...]]:
    keys, values, key_dim, value_dim = HEADS
    q, k = torch.randn(2, TOTAL, keys, key_dim).to(dtype)
    g = -torch.rand(TOTAL, values, *((key_dim,) if channels else ()))
    rows = (q, k, torch.randn(TOTAL, values, value_dim).to(dtype), g, torch.rand(TOTAL, values).to(dtype))

    def run(op: Any, rows: tuple[Tensor, ...], view: Any, batch: Any) -> Tensor:
        out: Tensor = op(*rows, view, batch, scale=key_dim**-0.5, norm_eps=1e-6)
        return out

    return run, (GatedDeltaRuleRows(), gated_delta_rule), rows, (values, key_dim, value_dim)


def lightning_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Any, tuple[Tensor, ...], tuple[int, ...]]:
    slopes = torch.rand(3)

    def run(op: Any, rows: tuple[Tensor, ...], view: Any, batch: Any) -> Tensor:
        out: Tensor = op(*rows, slopes, view, batch)
        return out

    rows = tuple(torch.randn(TOTAL, 3, dim).to(dtype) for dim in (10, 10, 14))
    return run, (LightningAttentionRows(), lightning_attention), rows, (3, 10, 14)


def selective_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Any, tuple[Tensor, ...], tuple[int, ...]]:
    a_log, skip, bias = torch.rand(37, 5), torch.randn(37), torch.randn(37)

    def run(op: Any, rows: tuple[Tensor, ...], view: Any, batch: Any) -> Tensor:
        out: Tensor = op(*rows, a_log, skip, bias, view, batch)
        return out

    rows = tuple(torch.randn(TOTAL, width).to(dtype) for width in (37, 37, 5, 5, 37))
    return run, (SelectiveScanRows(), selective_scan), rows, (37, 5)


def space_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Any, tuple[Tensor, ...], tuple[int, ...]]:
    a_log, skip, bias = torch.rand(6), torch.randn(6), torch.randn(6)

    def run(op: Any, rows: tuple[Tensor, ...], view: Any, batch: Any) -> Tensor:
        out: Tensor = op(*rows, a_log, skip, bias, view, batch, limits=(0.01, 5.0))
        return out

    rows = tuple(torch.randn(TOTAL, *shape).to(dtype) for shape in ((6, 10), (6,), (2, 14), (2, 14)))
    return run, (StateSpaceScanRows(), state_space_scan), rows, (6, 10, 14)


def recurrence_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Any, tuple[Tensor, ...], tuple[int, ...]]:
    def run(op: Any, rows: tuple[Tensor, ...], view: Any, batch: Any) -> Tensor:
        out: Tensor = op(*rows, view, batch)
        return out

    rows = torch.randn(TOTAL, 37).to(dtype), torch.rand(TOTAL, 37).to(dtype)
    return run, (LinearRecurrenceRows(), linear_recurrence), rows, (37,)


CASES = {
    "conv": conv_case,
    "decay per head": partial(rule_case, channels=False),
    "decay per channel": partial(rule_case, channels=True),
    "lightning": lightning_case,
    "linear recurrence": recurrence_case,
    "selective scan": selective_case,
    "state space": space_case,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tokens_stand_alone(slot_mix: Any, case: Any, dtype: torch.dtype) -> None:
    run, (op, reference), rows, axes = case(dtype)
    state_dtype = dtype if isinstance(op, CausalConvRows) else torch.float32

    def go(mix: Any, rows: tuple[Tensor, ...], states: Tensor, form: Any = op) -> tuple[Tensor, Tensor]:
        batch, view = mix.build(states)
        out = run(form, rows, view, batch)
        return out, view.data[batch.groups[0].write]

    start, alone = torch.randn(2, *axes).to(state_dtype), slot_mix(lens=(TOTAL,))
    whole, after = go(alone, rows, start[1:])
    near = go(alone, rows, start[1:], reference)[0]
    assert torch.allclose(whole.float(), near.float(), rtol=1e-2, atol=1e-5 if dtype == torch.float32 else 1e-2)
    state, parts = start, []
    for low, high in ((0, 8), (8, 9), (9, 12), (12, TOTAL)):  # beside a request that decodes its first token anew
        both = tuple(torch.cat((part[:1], part[low:high])) for part in rows)
        out, state = go(slot_mix(lens=(1, high - low), decodes=1 + (high - low == 1)), both, state)
        parts.append(out[1:])
    assert torch.equal(torch.cat(parts), whole) and torch.equal(state[1:], after)


@pytest.mark.parametrize("heads", [5, 64])
def test_gates_and_norms_stand_alone(heads: int) -> None:
    a, b, a_log, dt_bias = torch.randn(40, heads), torch.randn(40, heads), torch.randn(heads), torch.randn(heads)
    x, gate, weight = torch.randn(40, heads, 6), torch.randn(40, heads, 6), torch.randn(6)
    g, beta = DeltaGatesRows()(a, b, a_log, dt_bias)
    normed = GatedRmsNormRows()(x, gate, weight, 1e-6, activation="silu", wide=False)
    assert torch.allclose(g, delta_gates(a, b, a_log, dt_bias)[0], rtol=1e-6, atol=0)
    assert torch.allclose(normed, gated_rms_norm(x, gate, weight, 1e-6), rtol=0, atol=1e-5)
    for low, high in ((0, 1), (3, 10), (17, 40), (5, 5)):
        rows = slice(low, high)
        part, some = DeltaGatesRows()(a[rows], b[rows], a_log, dt_bias)
        assert torch.equal(part, g[rows]) and torch.equal(some, beta[rows])
        again = GatedRmsNormRows()(x[rows], gate[rows], weight, 1e-6, activation="silu", wide=False)
        assert torch.equal(again, normed[rows])
