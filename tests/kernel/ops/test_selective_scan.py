"""The selective scan against transformers' Mamba, over packed requests and their slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update

from rtp_kernel.ops.selective_scan import selective_scan

MIXES = ("prefill", "decode", "mixture", "copies", "drafts", "padding", "empty requests", "nothing real")
CHANNELS, SIZE = 10, 4
TOLERANCE = 2e-6


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(tokens: int) -> Parts:
    """x, dt, B, C, gate."""
    x, dt, gate = torch.randn(3, tokens, CHANNELS)
    b, c = torch.randn(2, tokens, SIZE)
    return x, dt, b, c, gate


def fixed() -> tuple[Tensor, Tensor, Tensor]:
    """A_log, D, dt_bias."""
    return torch.log(torch.rand(CHANNELS, SIZE) * 4 + 0.5), torch.randn(CHANNELS), torch.randn(CHANNELS)


def theirs(parts: Sequence[Tensor], held: tuple[Tensor, Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers' decode step says of one request's tokens, one after the other."""
    a_log, skip, bias = held
    state, outs = state[None].clone(), []
    for x, dt, b, c, gate in zip(*parts, strict=True):
        out = mamba_selective_state_update(
            *(state, x[None], dt[None], -a_log.exp(), b[None], c[None], skip),
            z=gate[None],
            dt_bias=bias,
            dt_softplus=True,
        )
        outs.append(out[0])
    return torch.stack(outs), state[0]


@pytest.mark.parametrize("name", MIXES)
def test_is_that_of_transformers(slot_mixes: Any, name: str) -> None:
    mix = slot_mixes[name]
    parts, held = draw(mix.num_tokens), fixed()
    mix.compare(
        parts,
        (CHANNELS, SIZE),
        lambda view, batch: selective_scan(*parts, *held, view, batch),
        lambda some, state: theirs(some, held, state),
        TOLERANCE,
        4 * TOLERANCE,
    )


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_whole_prompts_are_those_of_transformers(slot_mix: Any, length: int) -> None:
    mix = slot_mix(lens=(length,), new=(0,))
    parts, (a_log, skip, bias) = draw(length), fixed()
    batch, view = mix.build(torch.zeros(1, CHANNELS, SIZE))
    got = selective_scan(*parts, a_log, skip, bias, view, batch)
    x, dt, b, c, gate = (part.t()[None] for part in parts)
    want, after = mamba_selective_scan(
        x, dt, -a_log.exp(), b, c, D=skip, z=gate, delta_bias=bias, delta_softplus=True, return_last_state=True
    )
    assert torch.allclose(got, want[0].t(), rtol=0, atol=TOLERANCE * float(want.abs().max()))
    write = batch.groups[0].write
    assert write is not None and torch.allclose(view.data[write[0]], after[0], rtol=0, atol=4 * TOLERANCE)


def test_bias_and_gate_may_be_elsewhere(slot_mix: Any) -> None:
    """A dt that has its bias, and a gate multiplied by whoever calls, are the same."""
    mix = slot_mix(lens=(1, 20), decodes=1)
    (x, dt, b, c, gate), (a_log, skip, bias) = draw(21), fixed()
    states = torch.randn(2, CHANNELS, SIZE)
    batch, view = mix.build(states)
    together = selective_scan(x, dt, b, c, gate, a_log, skip, bias, view, batch)
    batch, view = mix.build(states)
    apart = selective_scan(x, dt + bias, b, c, None, a_log, skip, None, view, batch) * functional.silu(gate)
    assert torch.allclose(together, apart, rtol=1e-6, atol=1e-6)


def test_state_stays_float32(slot_mix: Any) -> None:
    """In bfloat16 a state that hardly decays would stop growing."""
    mix = slot_mix(lens=(1,), decodes=1)
    batch, view = mix.build(torch.full((1, 2, 1), 1000.0))
    one = torch.ones(1, 2, dtype=torch.bfloat16)
    slow, none = torch.full((2, 1), -40.0), torch.zeros(2)
    out = selective_scan(one, one * 0.541325, one[:, :1], one[:, :1], None, slow, none, None, view, batch)
    write = batch.groups[0].write
    assert out.dtype == torch.bfloat16 and view.data.dtype == torch.float32 and write is not None
    assert torch.allclose(view.data[write[0]], torch.full((2, 1), 1001.0), rtol=0, atol=1e-2)
