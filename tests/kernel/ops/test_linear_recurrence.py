"""The linear recurrence against RecurrentGemma's, over packed requests and their slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from rtp_kernel.ops.linear_recurrence import linear_recurrence

MIXES = ("prefill", "decode", "mixture", "copies", "drafts", "padding", "empty requests", "nothing real")
CHANNELS = 10


def theirs(x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    module = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=CHANNELS, num_attention_heads=2))
    never = torch.zeros(1, len(x), 1, dtype=torch.bool)
    out, after = module._rnn_scan(x[None], decay[None], never, state[None])
    return out[0], after[0]


@pytest.mark.parametrize("name", MIXES)
@torch.no_grad()
def test_is_that_of_transformers(slot_mixes: Any, name: str) -> None:
    mix = slot_mixes[name]
    x, decay = torch.randn(mix.num_tokens, CHANNELS), torch.rand(mix.num_tokens, CHANNELS)
    x[mix.num_tokens - mix.padding :] = float("nan")
    states = torch.randn(len(mix.lens), CHANNELS)
    states[list(mix.new)] = 0
    batch, view = mix.build(states)
    got = linear_recurrence(x, decay, view, batch)

    def run(request: int, length: int) -> tuple[Tensor, Tensor]:
        rows = slice(mix.rows(request).start, mix.rows(request).start + length)
        return theirs(x[rows], decay[rows], states[request])

    for request, length in enumerate(mix.lens):
        if length:
            assert torch.allclose(got[mix.rows(request)], run(request, length)[0], rtol=1e-6, atol=1e-6)
    assert bool((got[mix.num_tokens - mix.padding :] == 0).all())
    mix.check(lambda request, length: run(request, length)[1], view, batch, 2e-6)
