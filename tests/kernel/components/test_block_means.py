"""Blocks of tokens pooled over packed requests, and the choice among them, against a loop over each query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import BlockMeans, EntryIndexer

DIM, HEADS = 10, 17
MIXES: dict[str, dict[str, Any]] = {
    "prefill": {"requests": [(0, 11), (0, 4), (0, 1)], "decodes": 0},
    "chunk": {"requests": [(5, 6), (8, 3)]},
    "decode": {"requests": [(11, 1), (0, 1), (2, 1)]},
    "mixture": {"requests": [(11, 1), (2, 1), (7, 5), (0, 9)]},
    "padding": {"requests": [(10, 1), (2, 3)], "padding": 4},
    "nothing real": {"requests": [], "padding": 3},
}


class Pooled:
    """A step of `Mix` with random index keys and positions of three axes."""

    def __init__(self, step: Any, size: int) -> None:
        self.step, self.size = step, size
        self.keys = [torch.randn(held + new, DIM) for held, new in step.requests]
        self.positions = [torch.randint(0, 99, (3, held + new)) for held, new in step.requests]
        batch, kv = step.build()
        self.batch = self._with_positions(batch)
        blocks, entries = kv.data.shape[:2]
        self.held = StateView(torch.full((blocks, entries, DIM), float("nan")), 0)
        self.places = StateView(torch.full((blocks, entries, 3), -1), 0)
        self.pooled = StateView(torch.full((blocks, entries // size, DIM), float("nan")), 0, size)
        table = batch.groups[0].block_table
        assert table is not None
        for request, (held, _) in enumerate(step.requests):
            for token in range(held):
                place = (table[request, token // entries].long(), token % entries)
                self.held.data[place] = self.keys[request][token]
                self.places.data[place] = self.positions[request][:, token]
                if (token + 1) % size == 0:
                    self.pooled.data[place[0], token % entries // size] = self.block(request, token // size)

    def block(self, request: int, block: int) -> Tensor:
        mean = self.keys[request][block * self.size : (block + 1) * self.size].mean(0)
        return mean + self.positions[request][:, block * self.size].sum()

    def new(self, parts: list[Tensor], padding: float) -> Tensor:
        rows = [part[held:] for part, (held, _) in zip(parts, self.step.requests, strict=True)]
        return torch.cat([*rows, torch.full((self.step.padding, DIM), padding)])

    def _with_positions(self, batch: ForwardBatch) -> ForwardBatch:
        group, slots = batch.groups[0], batch.groups[0].slot_mapping[1]
        closes = (batch.index >= 0) & ((batch.index + 1) % self.size == 0)
        mapping = {1: slots, self.size: torch.where(closes, slots // self.size, -1)}
        new = [part[:, held:] for part, (held, _) in zip(self.positions, self.step.requests, strict=True)]
        positions = torch.cat([*new, torch.zeros(3, self.step.padding, dtype=torch.int64)], dim=1)
        return replace(batch, positions=positions, groups=(replace(group, slot_mapping=mapping),))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mix_name", MIXES)
def test_blocks_and_their_choice(mix: Any, mix_name: str, size: int) -> None:
    case = Pooled(mix(**MIXES[mix_name], block_size=4), size)
    pool, choose = BlockMeans(DIM, size), EntryIndexer(HEADS, DIM, 2)
    closed = pool(case.new(case.keys, float("nan")), case.batch, case.held, case.places)
    pool.store(closed.means + _sums(closed.positions), closed, case.batch, case.pooled)
    q = torch.randn(case.step.num_tokens, HEADS, DIM)
    chosen = choose(q, None, case.batch, case.pooled)
    row = 0
    for request, (held, new) in enumerate(case.step.requests):
        for token in range(held, held + new):
            complete = (token + 1) // size
            keys = torch.stack([case.block(request, block) for block in range(complete)]) if complete else q[:0, 0]
            scores = (q[row] @ keys.T).relu().sum(0)
            wanted = scores.topk(min(2, complete)).indices.tolist()
            assert sorted(place for place in chosen[row, 0].tolist() if place >= 0) == sorted(wanted)
            row += 1
    assert bool((chosen[row:] == -1).all())


def _sums(positions: Tensor) -> Tensor:
    return positions.sum(0)[:, None].float()
