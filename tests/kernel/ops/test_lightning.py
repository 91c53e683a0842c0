"""Lightning attention against transformers' MiniMax, whole, from a state, in chunks and token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from rtp_kernel.ops.lightning import chunked, decay_slopes, lightning_attention, recurrent

TOLERANCE = 4e-6
MIXES = ("prefill", "decode", "mixture", "copies", "drafts", "padding", "empty requests", "nothing real")
HEADS = {"four": (4, 16), "one": (1, 6), "three": (3, 12), "five": (5, 10)}
LAYER, LAYERS = 1, 4


class Open(nn.Module):
    """A gate that lets everything through: sigmoid(inf) = 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x[..., : x.shape[-1] // 3], float("inf"))


class Held:
    """What the reference asks of a cache."""

    def __init__(self, state: Tensor) -> None:
        self.state = state

    def get_linear_cache(self, layer: int) -> Tensor:
        return self.state

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        self.state = state


def theirs(parts: Any, heads: tuple[int, int], state: Tensor | None = None, block: int = 8) -> tuple[Tensor, Tensor]:
    """What transformers says of one request: [tokens, heads, dim], state after them; from a state token by token."""
    num, dim = heads
    config = MiniMaxConfig(
        hidden_size=3 * num * dim,
        num_attention_heads=num,
        num_key_value_heads=num,
        head_dim=dim,
        num_hidden_layers=LAYERS,
        block_size=block,
        hidden_act="linear",
        layer_types=["linear_attention"] * LAYERS,
    )
    module = MiniMaxLightningAttention(config, LAYER)
    module.qkv_proj = module.norm = module.out_proj = nn.Identity()
    module.output_gate = Open()
    joined = torch.cat(parts, dim=-1).flatten(1)  # per head [q | k | v]
    out, after = module(joined[None], None, None, cache=None if state is None else Held(state[None]))
    return out[0].unflatten(-1, heads), after[0]


def draw(tokens: int, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, tokens, *heads) * heads[1] ** -0.25
    return q, k, v


def slopes(heads: tuple[int, int]) -> Tensor:
    return decay_slopes(heads[0], LAYER, LAYERS)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("heads", HEADS)
@torch.no_grad()
def test_is_that_of_transformers(slot_mixes: Any, name: str, heads: str) -> None:
    mix, sizes = slot_mixes[name], HEADS[heads]
    parts = draw(mix.num_tokens, sizes)
    mix.compare(
        parts,
        (sizes[0], sizes[1], sizes[1]),
        lambda view, batch: lightning_attention(*parts, slopes(sizes), view, batch, chunk=16),
        lambda some, state: theirs(some, sizes, state),
        TOLERANCE,
        8 * TOLERANCE,
    )


@pytest.mark.parametrize("chunk", [1, 7, 8, 64, 256])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 100])
@torch.no_grad()
def test_chunks_of_any_size_are_the_whole_prompt_of_transformers(length: int, chunk: int) -> None:
    heads = HEADS["three"]
    parts = draw(length, heads)
    got, after = chunked(*parts, slopes(heads), torch.zeros(heads[0], heads[1], heads[1]), chunk)
    want, state = theirs(parts, heads)
    assert torch.allclose(got, want, rtol=0, atol=TOLERANCE * float(want.abs().max()))
    assert torch.allclose(after, state, rtol=0, atol=TOLERANCE * float(state.abs().max()))


@torch.no_grad()
def test_chunked_and_recurrent_forms_agree() -> None:
    heads = HEADS["five"]
    parts, before = draw(50, heads), torch.randn(heads[0], heads[1], heads[1])
    outs, state = [], before[None]
    for token in range(50):
        out, state = recurrent(
            parts[0][token, None], parts[1][token, None], parts[2][token, None], slopes(heads), state
        )
        outs.append(out)
    together, after = chunked(*parts, slopes(heads), before, 16)
    assert torch.allclose(together, torch.cat(outs), rtol=0, atol=2e-5)
    assert torch.allclose(after, state[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("heads", [1, 3, 5, 64])
@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 80), (40, 80), (79, 80)])
def test_slopes_are_those_of_transformers(heads: int, layer: int, layers: int) -> None:
    config = MiniMaxConfig(
        hidden_size=heads, num_attention_heads=heads, num_key_value_heads=heads, head_dim=2, num_hidden_layers=layers
    )
    want = MiniMaxLightningAttention(config, layer).slope_rate
    assert torch.equal(decay_slopes(heads, layer, layers), want[:, 0, 0])


@torch.no_grad()
def test_a_fast_decay_over_a_long_prompt_stays_finite() -> None:
    """exp(slope * tokens) would overflow: no factor may be taken apart."""
    parts = draw(300, (2, 4))
    fast = torch.tensor([2.0, 30.0])
    got, after = chunked(*parts, fast, torch.zeros(2, 4, 4), 256)
    assert bool(torch.isfinite(got).all()) and bool(torch.isfinite(after).all())
    last = parts[1][-1, 1, :, None] * parts[2][-1, 1]
    assert torch.allclose(after[1], last, rtol=0, atol=1e-5)


def test_state_stays_float32(slot_mix: Any) -> None:
    """In bfloat16 a state that hardly decays would stop growing."""
    mix = slot_mix(lens=(1,), decodes=1)
    heads = (2, 4)
    batch, view = mix.build(torch.full((1, 2, 4, 4), 1000.0))
    one = torch.ones(1, *heads, dtype=torch.bfloat16)
    out = lightning_attention(one, one, one, torch.zeros(2), view, batch)
    assert out.dtype == torch.bfloat16 and view.data.dtype == torch.float32
    write = batch.groups[0].write
    assert write is not None and torch.equal(view.data[write[0]], torch.full((2, 4, 4), 1001.0))
