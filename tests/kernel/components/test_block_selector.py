"""Selection of runs of tokens against the indexer of transformers' MiniMax-M3, in steps of every kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLIndexer,
    MiniMaxM3VLRotaryEmbedding,
    apply_rotary_pos_emb,
)

from rtp_kernel.batch import StateView
from rtp_kernel.components import BlockSelector, bind_components
from rtp_kernel.ops import block_index
from rtp_kernel.registry import OpTable, default_registry

MIXES: dict[str, dict[str, Any]] = {
    "prefill": {"requests": [(0, 31), (0, 4), (0, 1)], "decodes": 0},
    "chunk": {"requests": [(25, 6), (8, 13)]},
    "decode": {"requests": [(30, 1), (0, 1), (3, 1)]},
    "mixture": {"requests": [(40, 1), (2, 1), (7, 25), (0, 9)]},
    "padding": {"requests": [(10, 1), (22, 3)], "padding": 4},
    "odd blocks": {"requests": [(30, 1), (12, 13)], "block_size": 7},
    "nothing real": {"requests": [], "padding": 3},
}
HIDDEN, DIM = 24, 12


@dataclass
class Indexed:
    """A step of `Mix` with random hidden states, and the reference's selection of whole requests."""

    step: Any
    heads: int = 3
    size: int = 4
    top_k: int = 3
    local: int = 1
    queries: list[Tensor] = field(init=False)
    keys: list[Tensor] = field(init=False)
    wanted: list[set[int]] = field(init=False)
    """Of each row and head, in order."""

    def __post_init__(self) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e4}
        config = MiniMaxM3VLTextConfig(
            hidden_size=HIDDEN, num_attention_heads=self.heads, num_key_value_heads=self.heads, head_dim=DIM,
            index_n_heads=self.heads, index_head_dim=DIM, index_block_size=self.size, index_topk_blocks=self.top_k,
            index_local_blocks=self.local, num_hidden_layers=1, rope_parameters=rope,
        )  # fmt: skip
        indexer, rotary = MiniMaxM3VLIndexer(config, 0), MiniMaxM3VLRotaryEmbedding(config)
        for parameter in indexer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        self.queries, self.keys, self.wanted = [], [], []
        for held, new in self.step.requests:
            hidden, places = torch.randn(1, held + new, HIDDEN), torch.arange(held + new)[None]
            rotation = rotary(hidden, places)
            chosen = indexer(hidden, rotation, None, places)[0, :, held:].transpose(0, 1)
            self.wanted += [set(row[row >= 0].tolist()) for row in chosen.flatten(0, 1)]
            q = indexer.q_norm(indexer.q_proj(hidden).unflatten(-1, (-1, DIM))).transpose(1, 2)
            k = indexer.k_norm(indexer.k_proj(hidden))[:, None]
            q, k = apply_rotary_pos_emb(q, k, *rotation)
            self.queries.append(q[0, :, held:].transpose(0, 1))
            self.keys.append(k[0, 0])

    def run(self, bind: bool = False) -> list[set[int]]:
        batch, kv = self.step.build()
        blocks, entries = kv.data.shape[:2]
        view = StateView(torch.full((blocks, entries, DIM), float("nan")), 0)
        table = batch.groups[0].block_table
        for (held, _), keys, blocks_of in zip(self.step.requests, self.keys, table, strict=True):
            place = torch.arange(held)
            view.data[blocks_of[place // entries].long(), place % entries] = keys[:held]
        nothing = torch.full((self.step.padding, DIM), float("nan"))
        q = torch.cat([*self.queries, nothing[:, None].expand(-1, self.heads, -1)])
        k = torch.cat([*(keys[held:] for (held, _), keys in zip(self.step.requests, self.keys, strict=True)), nothing])
        selector = BlockSelector(self.heads, DIM, size=self.size, top_k=self.top_k, local=self.local)
        if bind:
            bind_components(selector, OpTable(default_registry(), device="cpu", dtype=torch.float32), "cpu", q.dtype)
        chosen = selector(q, k, batch, view)
        assert chosen.dtype == torch.int64 and chosen.shape[:2] == (self.step.num_tokens, self.heads)
        rows = [row[row >= 0].tolist() for row in chosen.flatten(0, 1)]
        real = len(rows) - self.step.padding * self.heads
        assert all(len(set(row)) == len(row) for row in rows) and not any(rows[real:])
        return [set(row) for row in rows[:real]]


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("bind", [False, True])
@torch.no_grad()
def test_selects_what_the_reference_selects(mix: Any, name: str, bind: bool) -> None:
    case = Indexed(mix(**MIXES[name]))
    assert case.run(bind) == case.wanted


@pytest.mark.parametrize("options", [
    {"top_k": 1}, {"top_k": 100}, {"local": 0}, {"local": 2}, {"local": 3}, {"size": 1}, {"size": 5, "heads": 5},
    {"size": 64}, {"heads": 1, "local": 0, "top_k": 1},
])  # fmt: skip
@torch.no_grad()
def test_of_other_sizes(mix: Any, options: dict[str, int]) -> None:
    case = Indexed(mix(**MIXES["mixture"]), **options)
    assert case.run() == case.wanted


@torch.no_grad()
def test_more_runs_are_near_than_may_be_chosen(mix: Any) -> None:
    """Which of equal scores the reference takes is chance; we take the lower."""
    case = Indexed(mix(requests=[(20, 6)]), local=3, top_k=1, size=4)
    assert case.run() == [{max(0, index // 4 - 2)} for index in range(20, 26) for _ in range(3)]


@torch.no_grad()
def test_few_rows_at_a_time_choose_the_same(mix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Indexed(mix(**MIXES["mixture"], padding=2))
    monkeypatch.setattr(block_index, "MAX_PRODUCTS", 100)
    assert case.run() == case.wanted


@pytest.mark.parametrize("sizes", [{"size": 0}, {"top_k": 0}, {"local": -1}])
def test_refuses_sizes_that_select_nothing(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="selection of"):
        BlockSelector(1, 4, **{"size": 4, "top_k": 2, "local": 1, **sizes})
