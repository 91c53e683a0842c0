"""The token indexer against those of transformers' DeepSeek-V3.2 and GLM-5, in steps of every kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from rtp_kernel.batch import StateView
from rtp_kernel.components import RopeParameters, RotaryEmbedding, TokenIndexer
from rtp_kernel.components import token_indexer as component
from rtp_kernel.ops import token_index

MIXES: dict[str, dict[str, Any]] = {
    "prefill": {"requests": [(0, 11), (0, 4), (0, 1)], "decodes": 0},
    "chunk": {"requests": [(5, 6), (8, 3)]},
    "decode": {"requests": [(10, 1), (0, 1), (3, 1)]},
    "mixture": {"requests": [(10, 1), (2, 1), (7, 5), (0, 9)]},
    "padding": {"requests": [(10, 1), (2, 3)], "padding": 4},
    "odd blocks": {"requests": [(10, 1), (2, 3)], "block_size": 3},
    "nothing real": {"requests": [], "padding": 3},
}
HIDDEN, RANK, ROPE, DIM = 24, 12, 6, 14
REFERENCES: dict[str, tuple[Any, Any, str]] = {
    "DeepSeek-V3.2": (DeepseekV32Config, DeepseekV32Indexer, "half"),
    "GLM-5": (GlmMoeDsaConfig, GlmMoeDsaIndexer, "interleaved_to_half"),
}


@dataclass
class Indexed:
    """A step of `Mix` with random hidden states, and both indexers on the same weights."""

    step: Any
    reference: str = "DeepSeek-V3.2"
    top_k: int = 4
    heads: int = 17
    """Many, so that no scores are equal: with few, relu makes many of them 0."""
    ours: TokenIndexer = field(init=False)
    theirs: Any = field(init=False)
    hidden: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        config_class, indexer_class, layout = REFERENCES[self.reference]
        config = config_class(
            hidden_size=HIDDEN, q_lora_rank=RANK, qk_rope_head_dim=ROPE, index_n_heads=self.heads, index_head_dim=DIM,
            index_topk=self.top_k, num_hidden_layers=1,
        )  # fmt: skip
        self.theirs = indexer_class(config, 0)
        self.ours = TokenIndexer(HIDDEN, RANK, self.heads, DIM, self.top_k, rope_layout=layout)
        for name, parameter in self.theirs.named_parameters():
            torch.nn.init.normal_(parameter, std=0.5)
            self.ours.get_parameter(name).copy_(parameter)
        self.rotary = RotaryEmbedding(ROPE, RopeParameters(theta=10000.0))
        self.hidden = [torch.randn(held + new, HIDDEN + RANK) for held, new in self.step.requests]

    def rotation(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(torch.arange(start, stop))
        return cos, sin

    def run(self) -> list[Tensor]:
        """Our selection, row by row, without its -1."""
        batch, kv = self.step.build()
        blocks, size = kv.data.shape[:2]
        view = StateView(torch.full((blocks, size, DIM), float("nan")), 0)
        table = batch.groups[0].block_table
        assert table is not None
        for request, (held, _) in enumerate(self.step.requests):
            place = torch.arange(held)
            keys = self.ours.k_norm(self.ours.wk(self.hidden[request][:held, :HIDDEN]))
            keys = self.ours.rotary.one(keys[:, None], *self.rotation(0, held))[:, 0]
            view.data[table[request, place // size].long(), place % size] = keys
        new = [part[held:] for part, (held, _) in zip(self.hidden, self.step.requests, strict=True)]
        rows = torch.cat([*new, torch.full((self.step.padding, HIDDEN + RANK), float("nan"))])
        chosen = self.ours(rows[:, :HIDDEN], rows[:, HIDDEN:], self.rotary(batch.positions), batch, view)
        assert chosen.dtype == torch.int64 and chosen.shape[:2] == (self.step.num_tokens, 1)
        return [row[row >= 0] for row in chosen[:, 0]]

    def dense(self) -> list[Tensor]:
        """The reference's selection of whole requests, row by row, without what the row cannot see."""
        rows = []
        for request, (held, new) in enumerate(self.step.requests):
            length, part = held + new, self.hidden[request][None]
            mask = torch.full((length, length), float("-inf")).triu(1)[None]
            rotation = tuple(table[None] for table in self.rotation(0, length))
            places = torch.arange(length)[None]
            chosen = self.theirs(part[..., :HIDDEN], part[..., HIDDEN:], rotation, mask, places)[0].long()
            rows += [row[row <= index] for index, row in enumerate(chosen)][held:]
        return rows + [torch.zeros(0, dtype=torch.long)] * self.step.padding


def assert_same_selection(case: Indexed) -> None:
    for ours, theirs in zip(case.run(), case.dense(), strict=True):
        assert ours.tolist() == theirs.tolist()  # both best first


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("reference", REFERENCES)
@torch.no_grad()
def test_selects_what_the_reference_selects(mix: Any, name: str, reference: str) -> None:
    assert_same_selection(Indexed(mix(**MIXES[name]), reference))


@pytest.mark.parametrize("top_k", [1, 3, 100])
@pytest.mark.parametrize("heads", [16, 33])
@torch.no_grad()
def test_of_one_token_and_of_more_than_there_are(mix: Any, top_k: int, heads: int) -> None:
    assert_same_selection(Indexed(mix(**MIXES["mixture"]), top_k=top_k, heads=heads))


@torch.no_grad()
def test_long_spans_are_scored_in_parts(mix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may begin inside a request; the selection is the same."""
    case = Indexed(mix(requests=[(10, 1), (2, 1), (7, 5), (0, 9)], padding=2))
    whole = [row.tolist() for row in case.run()]
    monkeypatch.setattr(component, "MAX_SCORES", 40)
    monkeypatch.setattr(token_index, "MAX_PRODUCTS", 40 * case.heads)
    assert [row.tolist() for row in case.run()] == whole
    assert_same_selection(case)


def test_must_select_something() -> None:
    with pytest.raises(ValueError, match="top_k 0"):
        TokenIndexer(HIDDEN, RANK, 4, DIM, 0)
