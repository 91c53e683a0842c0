"""Lightning attention as a component: built on the meta device, bound, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rtp_kernel.components import LightningAttention, bind_components
from rtp_kernel.ops.lightning import decay_slopes, lightning_attention
from rtp_kernel.registry import OpTable, default_registry


def test_slopes_are_made_on_the_device_in_float32(slot_mixes: Any) -> None:
    with torch.device("meta"):
        attention = LightningAttention(3, 4, 2, 5, chunk=8)
    table = OpTable(default_registry(), device="cpu", dtype=torch.bfloat16)
    bind_components(attention, table, "cpu", torch.bfloat16)
    assert torch.equal(attention.slopes, decay_slopes(3, 2, 5)) and attention.slopes.dtype == torch.float32
    assert not attention.state_dict()
    mix = slot_mixes["mixture"]
    q, k, v = torch.randn(3, mix.num_tokens, 3, 4)
    states = torch.randn(4, 3, 4, 4)
    states[3] = 0
    batch, view = mix.build(states)
    got = attention(q, k, v, batch, view)
    batch, view = mix.build(states)
    assert torch.equal(got, lightning_attention(q, k, v, decay_slopes(3, 2, 5), view, batch, chunk=8).flatten(1))


def test_refuses_layers_that_are_not_there_and_empty_chunks() -> None:
    with pytest.raises(ValueError, match="layer 5 of 5"):
        LightningAttention(2, 4, 5, 5)
    with pytest.raises(ValueError, match="chunks of 0"):
        LightningAttention(2, 4, 0, 5, chunk=0)
