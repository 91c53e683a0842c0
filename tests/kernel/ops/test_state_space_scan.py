"""The state space of Mamba 2 against transformers, over packed requests and their slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from rtp_kernel.ops.state_space_scan import state_space_scan

MIXES = ("prefill", "decode", "mixture", "copies", "drafts", "padding", "empty requests", "nothing real")
SIZES = {"one group": (3, 1), "a group each": (4, 4), "shared groups": (6, 2)}
DIM, STATE = 5, 7
TOLERANCE = 3e-6


def draw(tokens: int, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dt, B, C."""
    b, c = torch.randn(2, tokens, groups, STATE)
    return torch.randn(tokens, heads, DIM), torch.randn(tokens, heads), b, c


def fixed(heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """A_log, D, dt_bias."""
    return torch.log(torch.rand(heads) * 4 + 0.5), torch.randn(heads), torch.randn(heads)


def theirs(
    parts: Sequence[Tensor], held: Sequence[Tensor], state: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """What transformers says of one request: [tokens, heads, dim], state after them."""
    (x, dt, b, c), (a_log, skip, bias) = (part[None] for part in parts), held
    out, after = mamba2_chunk_scan(
        *(x, dt, -a_log.exp(), b, c),
        chunk_size=8,
        D=skip,
        dt_bias=bias,
        initial_states=None if state is None else state[None],
        dt_softplus=True,
        return_final_states=True,
        **options,
    )
    return out[0], after[0]


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("sizes", SIZES)
def test_is_that_of_transformers(slot_mixes: Any, name: str, sizes: str) -> None:
    mix, (heads, groups) = slot_mixes[name], SIZES[sizes]
    parts, held = draw(mix.num_tokens, heads, groups), fixed(heads)
    mix.compare(
        parts,
        (heads, DIM, STATE),
        lambda view, batch: state_space_scan(*parts, *held, view, batch, chunk=16),
        lambda some, state: theirs(some, held, state),
        TOLERANCE,
        8 * TOLERANCE,
    )


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
@pytest.mark.parametrize("length", [1, 7, 65, 150])
def test_chunks_of_any_size_are_the_whole_prompt(slot_mix: Any, length: int, chunk: int) -> None:
    mix = slot_mix(lens=(length,), new=(0,))
    parts, held = draw(length, 6, 2), fixed(6)
    batch, view = mix.build(torch.zeros(1, 6, DIM, STATE))
    got = state_space_scan(*parts, *held, view, batch, chunk=chunk)
    want, state = theirs(parts, held, None)
    write = batch.groups[0].write
    assert torch.allclose(got, want, rtol=0, atol=TOLERANCE * float(want.abs().max()))
    assert write is not None
    assert torch.allclose(view.data[write[0]], state, rtol=0, atol=TOLERANCE * float(state.abs().max()))


@pytest.mark.parametrize("decodes", [0, 1])
def test_steps_are_clamped(slot_mix: Any, decodes: int) -> None:
    mix = slot_mix(lens=(1,), decodes=decodes)
    parts, held, states = draw(1, 6, 2), fixed(6), torch.randn(1, 6, DIM, STATE)
    batch, view = mix.build(states)
    got = state_space_scan(*parts, *held, view, batch, limits=(0.6, 0.7))
    want = theirs(parts, held, states[0], dt_limit=(0.6, 0.7))[0]
    assert torch.allclose(got, want, rtol=0, atol=TOLERANCE * float(want.abs().max()))
    assert not torch.allclose(got, theirs(parts, held, states[0])[0], rtol=0, atol=1e-2)


def test_a_fast_decay_over_a_long_prompt_stays_exact(slot_mix: Any) -> None:
    """Slow and fast tokens by turns: a difference of two long sums would lose the slow ones' digits."""
    mix = slot_mix(lens=(200,), new=(0,))
    parts, held = draw(200, 2, 1), fixed(2)
    parts[1][::2] += 40
    parts[1][1::2] -= 12
    batch, view = mix.build(torch.zeros(1, 2, DIM, STATE))
    got = state_space_scan(*parts, *held, view, batch)
    single = [part.double() for part in parts]
    want = theirs(single, [part.double() for part in held], None)[0]
    assert torch.allclose(got.double(), want.double(), rtol=0, atol=TOLERANCE * float(want.abs().max()))
