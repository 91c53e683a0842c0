"""Latent attention, expanded and absorbed, against the attention of transformers' DeepSeek-V3."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, eager_attention_forward

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import LatentAttention, LatentUp

MIXES: dict[str, dict[str, Any]] = {
    "prefill": {"requests": [(0, 11), (0, 4), (0, 1)], "decodes": 0},
    "chunk": {"requests": [(5, 6), (8, 3)]},
    "decode": {"requests": [(10, 1), (0, 1), (3, 1)]},
    "mixture": {"requests": [(10, 1), (2, 1), (7, 5), (0, 9)]},
    "padding": {"requests": [(10, 1), (2, 3)], "padding": 4},
    "odd blocks": {"requests": [(10, 1), (2, 3)], "block_size": 3, "gap": 5},
    "nothing real": {"requests": [], "padding": 3},
}
HEADS: dict[str, tuple[int, int, int, int, int]] = {
    "usual": (4, 32, 16, 8, 16),
    "three heads, wide values": (3, 20, 10, 6, 24),
    "five heads, narrow values": (5, 24, 16, 2, 6),
    "no rotated part": (4, 16, 12, 0, 12),
    "one head": (1, 8, 4, 4, 4),
}
"""heads, R, Dn, Dr, Dv"""


@dataclass
class Latents:
    """Random latents for a step of `Mix`, ours and transformers' modules on the same weights."""

    step: Any
    dims: tuple[int, int, int, int, int] = HEADS["usual"]
    up: LatentUp = field(init=False)
    attention: LatentAttention = field(init=False)
    reference: Any = field(init=False)
    q: Tensor = field(init=False)
    latents: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        heads, rank, nope, rope, value = self.dims
        self.up = LatentUp(rank, heads, nope, value)
        torch.nn.init.normal_(self.up.weight, std=rank**-0.5)
        self.attention = LatentAttention(heads, rank, nope, rope, value, scale=(nope + rope) ** -0.5)
        config = DeepseekV3Config(
            num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=nope,
            qk_rope_head_dim=rope or 2, v_head_dim=value, hidden_size=8 * heads, q_lora_rank=None,
        )  # fmt: skip
        self.reference = DeepseekV3Attention(config, 0).eval()
        self.reference.qk_rope_head_dim = rope
        self.reference.kv_b_proj.weight.data.copy_(self.up.weight)
        self.q = torch.randn(self.step.num_tokens, heads, nope + rope) * 2
        self.latents = [torch.randn(held + new, rank + rope) for held, new in self.step.requests]

    def build(self, order: int = 0) -> tuple[ForwardBatch, StateView]:
        """A state with NaN wherever nothing was written."""
        batch, kv = self.step.build(order)
        blocks, size = kv.data.shape[:2]
        width = self.dims[1] + self.dims[3]
        arena = torch.full((blocks * (size * width + self.step.gap),), float("nan"))
        data = arena.as_strided((blocks, size, width), (size * width + self.step.gap, width, 1))
        table = batch.groups[0].block_table
        assert table is not None
        for request, (held, _) in enumerate(self.step.requests):
            place = torch.arange(held)
            data[table[request, place // size].long(), place % size] = self.latents[request][:held]
        return batch, StateView(data, 0)

    def run(self, order: int = 0, selection: Tensor | None = None) -> Tensor:
        batch, view = self.build(order)
        _, rank, nope, rope, _ = self.dims
        new = [part[held:] for part, (held, _) in zip(self.latents, self.step.requests, strict=True)]
        rows = torch.cat([*new, torch.full((self.step.padding, rank + rope), float("nan"))])
        q_rope, k_rope = (self.q[..., nope:], rows[:, rank:]) if rope else (None, None)
        out: Tensor = self.attention(
            self.q[..., :nope], q_rope, rows[:, :rank], k_rope, self.up, batch, view, selection
        )
        return out

    def dense(self, selection: Tensor | None = None) -> Tensor:
        """What transformers computes -> [tokens, heads * Dv]; zeros for padding."""
        parts, row = [], 0
        rank = self.dims[1]
        for request, (held, new) in enumerate(self.step.requests):
            latents = self.latents[request][None, None]
            keys, values = self.reference.expand_kv(latents[..., :rank], latents[..., rank:])
            hidden = torch.arange(held + new) > torch.arange(held, held + new)[:, None]
            if selection is not None:
                for place in range(new):
                    chosen = selection[row + place, 0]
                    kept = torch.zeros(held + new, dtype=torch.bool)
                    kept[chosen[(chosen >= 0) & (chosen < held + new)]] = True
                    hidden[place] |= ~kept
            mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
            q = self.q[row : row + new].transpose(0, 1)[None]
            scale = self.attention.scale
            out = eager_attention_forward(self.reference, q, keys, values, mask, scaling=scale)[0][0]
            parts.append(out.flatten(1))
            row += new
        return torch.cat([*parts, torch.zeros(self.step.padding, self.dims[0] * self.dims[4])])


def draw_selection(step: Any, k: int) -> Tensor:
    """Random visible tokens for each row [T, 1, k], the row's own among them; -1 where there are fewer than k."""
    rows = []
    for held, new in step.requests:
        for index in range(held, held + new):
            places = torch.cat((torch.tensor([index]), torch.randperm(index)))[:k]
            rows.append(torch.cat((places, torch.full((k - len(places),), -1))))
    rows += [torch.full((k,), -1)] * step.padding
    return torch.stack(rows)[:, None]


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("dims", HEADS)
@torch.no_grad()
def test_is_the_attention_of_deepseek(mix: Any, name: str, dims: str) -> None:
    case = Latents(mix(**MIXES[name]), HEADS[dims])
    expected = case.dense()
    for order in (0, 1):
        assert torch.allclose(case.run(order), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("k", [1, 3, 64])
@torch.no_grad()
def test_attends_to_the_selection_only(mix: Any, name: str, k: int) -> None:
    case = Latents(mix(**MIXES[name]))
    selection = draw_selection(case.step, k)
    expected = case.dense(selection)
    assert torch.allclose(case.run(0, selection), expected, rtol=0, atol=3e-6)
    assert k == 64 or not case.step.requests or not torch.allclose(expected, case.dense(), atol=1e-3)


@pytest.mark.parametrize("dims", HEADS)
@torch.no_grad()
def test_expanded_and_absorbed_agree(mix: Any, dims: str) -> None:
    """The same rows as decodes, which are absorbed, and as prefill, which is expanded."""
    requests = [(10, 1), (0, 1), (33, 1), (3, 1)]
    torch.manual_seed(1)
    absorbed = Latents(mix(requests=requests), HEADS[dims])
    torch.manual_seed(1)
    expanded = Latents(mix(requests=requests, decodes=0), HEADS[dims])
    assert torch.equal(absorbed.q, expanded.q)
    assert torch.allclose(absorbed.run(), expanded.run(), rtol=0, atol=3e-6)


@torch.no_grad()
def test_expanding_as_a_module_is_the_references_projection(mix: Any) -> None:
    case = Latents(mix(requests=[(0, 3)]))
    latents = torch.randn(7, case.dims[1])
    assert torch.equal(case.up(latents), case.reference.kv_b_proj(latents))
    case.up.prepare()
    assert case.up.up.data_ptr() == case.up.weight.data_ptr()
