"""The pooled indexer against that of transformers' GLM-5.3, in steps of every kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import PooledIndexer
from rtp_kernel.ops.pooled_keys import pooled_keys

MIXES: dict[str, dict[str, Any]] = {
    "prefill": {"requests": [(0, 11), (0, 4), (0, 1)], "decodes": 0},
    "chunk": {"requests": [(5, 6), (8, 3)]},
    "decode": {"requests": [(11, 1), (0, 1), (3, 1)]},
    "mixture": {"requests": [(11, 1), (2, 1), (7, 5), (0, 19)]},
    "padding": {"requests": [(10, 1), (2, 3)], "padding": 4},
    "nothing real": {"requests": [], "padding": 3},
}
HIDDEN, RANK, DIM, HEADS = 24, 12, 14, 17


@dataclass
class Indexed:
    """A step of `Mix` with random hidden states, and both indexers on the same weights."""

    step: Any
    pool: int
    top_k: int
    ours: PooledIndexer = field(init=False)
    theirs: Any = field(init=False)
    hidden: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        config = Glm5NextTextConfig(
            hidden_size=HIDDEN, q_lora_rank=RANK, index_n_heads=HEADS, index_head_dim=DIM, index_topk=self.top_k,
            index_kpool=self.pool, num_hidden_layers=4,
        )  # fmt: skip
        self.theirs = Glm5NextTextIndexer(config, 3)
        self.ours = PooledIndexer(HIDDEN, RANK, HEADS, DIM, self.top_k, pool=self.pool)
        assert {name for name, _ in self.ours.named_parameters()} == {n for n, _ in self.theirs.named_parameters()}
        for name, parameter in self.theirs.named_parameters():
            torch.nn.init.normal_(parameter, std=0.5)
            self.ours.get_parameter(name).copy_(parameter)
        self.hidden = [torch.randn(held + new, HIDDEN + RANK) for held, new in self.step.requests]

    def run(self) -> list[list[int]]:
        """Our selection, row by row, in order and without its -1; what is held came in a step of its own."""
        batch, kv = self.step.build()
        blocks, size = kv.data.shape[:2]
        packed = StateView(torch.full((blocks, size, 2 * DIM), float("nan")), 0)
        pools = StateView(torch.full((blocks, size // self.pool, DIM), float("nan")), 0, self.pool)
        for request, (held, _) in enumerate(self.step.requests):
            if held:
                self._forward(self.hidden[request][:held], _earlier(batch, request, held, size), packed, pools)
        new = [part[held:] for part, (held, _) in zip(self.hidden, self.step.requests, strict=True)]
        rows = torch.cat([*new, torch.full((self.step.padding, HIDDEN + RANK), float("nan"))])
        chosen = self._forward(rows, batch, packed, pools)
        assert chosen.dtype == torch.int64 and chosen.shape[:2] == (self.step.num_tokens, 1)
        return [sorted(row[row >= 0].tolist()) for row in chosen[:, 0]]

    def _forward(self, rows: Tensor, batch: ForwardBatch, packed: StateView, pools: StateView) -> Tensor:
        group, slots = batch.groups[0], batch.groups[0].slot_mapping[1]
        closes = (batch.index >= 0) & ((batch.index + 1) % self.pool == 0)
        mapping = {1: slots, self.pool: torch.where(closes, slots // self.pool, -1)} if self.pool > 1 else {1: slots}
        batch = replace(batch, groups=(replace(group, slot_mapping=mapping),))
        chosen: Tensor = self.ours(rows[:, :HIDDEN], rows[:, HIDDEN:], batch, packed, pools)
        return chosen

    def dense(self) -> list[list[int]]:
        """The reference's selection of whole requests, row by row."""
        rows = []
        for part, (held, _) in zip(self.hidden, self.step.requests, strict=True):
            mask = torch.ones(1, len(part), dtype=torch.bool)
            chosen = self.theirs(part[None, :, :HIDDEN], part[None, :, HIDDEN:], mask, None)[0]
            rows += [sorted(row[row >= 0].tolist()) for row in chosen][held:]
        return rows + [[]] * self.step.padding


def _earlier(batch: ForwardBatch, request: int, held: int, size: int) -> ForwardBatch:
    """A prefill of the first tokens of one request."""
    group = batch.groups[0]
    assert group.block_table is not None
    index = torch.arange(held)
    table = group.block_table[request : request + 1]
    slots = table[0, index // size].long() * size + index % size
    return replace(
        batch,
        input_ids=torch.zeros_like(index), index=index, positions=index, request=torch.zeros_like(index),
        query_start=torch.tensor([0, held]).int(), seq_lens=torch.tensor([held]).int(),
        groups=(replace(group, block_table=table, slot_mapping={1: slots}),),
        num_decodes=0, num_decode_tokens=0, query_lens=(held,), kv_lens=(held,),
    )  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize(("pool", "top_k"), [(4, 8), (4, 4), (2, 2), (1, 3), (4, 100)])
@torch.no_grad()
def test_selects_what_the_reference_selects(mix: Any, name: str, pool: int, top_k: int) -> None:
    case = Indexed(mix(**MIXES[name], block_size=8), pool, top_k)
    assert case.run() == case.dense()


@pytest.mark.parametrize("dim", [1, 14, 64])
def test_a_key_is_the_same_whatever_else_is_pooled(mix: Any, dim: int) -> None:
    """Bit for bit, and the softmax-weighted mean of its own tokens."""
    batch, kv = mix(requests=[(0, 40), (0, 9), (0, 3), (0, 26)], decodes=0, block_size=8).build()
    packed = StateView(torch.randn(*kv.data.shape[:2], 2 * dim), 0)
    ape = torch.randn(4, dim)
    rows, keys = pooled_keys(packed, ape, batch)
    assert len(rows) == 10 + 2 + 0 + 6
    table = batch.groups[0].block_table
    assert table is not None
    for row, key in zip(rows.tolist(), keys, strict=True):
        alone = replace(batch, index=torch.where(torch.arange(batch.num_tokens) == row, batch.index, -1))
        assert torch.equal(pooled_keys(packed, ape, alone)[1][0], key)
        place = batch.index[row] - torch.arange(3, -1, -1)
        held = packed.data[table[batch.request[row], place // 8].long(), place % 8]
        torch.testing.assert_close(key, ((held[:, dim:] + ape).softmax(0) * held[:, :dim]).sum(0))


def test_fewer_tokens_than_a_pool_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 pool"):
        PooledIndexer(HIDDEN, RANK, HEADS, DIM, 3, pool=4)
