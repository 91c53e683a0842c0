"""A predictable model: its logits are a known function of the tokens, read back through the state it is given."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy.finish import finish

from rtp_runtime.engine import EngineConfig, RequestOutput, SamplingParams
from rtp_runtime.engine.engine import Engine
from rtp_runtime.state import PagedState, StateDescriptors, WindowState

VOCAB = 32
CONTEXT = 64
PRIME = 97
WINDOW = 5


class FakeModel(nn.Module):
    """Keeps each token's id in a paged and a window state; logits are a row of a table that the prefix picks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn((PRIME, VOCAB), generator=torch.Generator().manual_seed(0))
        self.num_tokens: list[int] = []
        """Of each step."""
        self.num_rows: list[int] = []
        """Of each call of the head."""
        self.fail_at: int | None = None
        self.nan_from: int | None = None
        """A token after which a request's logits are NaN."""

    def expected(self, ids: Sequence[int]) -> Tensor:
        """[V] logits after these tokens."""
        return self.table[prefix_hash(ids)]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        known = list(ids)
        for _ in range(count):
            known.append(int(self.expected(known).argmax()))
        return known[len(ids) :]

    def forward(self, batch: Any, state: Any) -> Tensor:
        self.num_tokens.append(batch.num_tokens)
        if self.fail_at == len(self.num_tokens):
            raise RuntimeError("the fake model fails")
        check_batch(batch)
        views = [state[0]["ids"], state[1]["ids"]]
        for view in views:
            group = batch.groups[view.group]
            slots = group.slot_mapping[1]
            view.data[slots // group.block_size, slots % group.block_size, 0] = batch.input_ids.float()
        hashes = [value for request in range(batch.num_requests) for value in self._hashes(batch, views, request)]
        return torch.tensor(hashes)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_rows.append(len(hidden))
        nans = hidden.isnan().any(1)
        return torch.where(nans[:, None], torch.nan, self.table[hidden.nan_to_num()[:, 0].long()])

    def _hashes(self, batch: Any, views: list[Any], request: int) -> list[float]:
        """Of each new token of a request: the hash of its prefix; NaN where a state does not hold what it should."""
        end = batch.kv_lens[request]
        start = end - batch.query_lens[request]
        ids = read(batch, views[0], request, 0, end)
        oldest = max(0, start + 1 - WINDOW)
        recent = read(batch, views[1], request, oldest, end)
        if ids.isnan().any() or self.nan_from in ids.tolist() or not torch.equal(ids[oldest:], recent):
            return [float("nan")] * (end - start)
        values = itertools.accumulate(ids.long().tolist(), next_hash, initial=1)
        return [float(value) for value in values][start + 1 :]


def read(batch: Any, view: Any, request: int, first: int, end: int) -> Tensor:
    """[end - first] what a state holds of a request's tokens."""
    group = batch.groups[view.group]
    index = torch.arange(first, end)
    blocks = group.block_table[request].long()[index // group.block_size]
    return view.data[blocks, index % group.block_size, 0]


def next_hash(value: int, token_id: int) -> int:
    return (value * 31 + token_id + 7) % PRIME


def prefix_hash(ids: Sequence[int]) -> int:
    return functools.reduce(next_hash, ids, 1)


def check_batch(batch: Any) -> None:
    """What ForwardBatch promises of itself."""
    lens = list(batch.query_lens)
    assert sum(lens) == batch.num_tokens == len(batch.index)
    assert batch.query_start.tolist() == [sum(lens[:place]) for place in range(len(lens) + 1)]
    assert batch.seq_lens.tolist() == list(batch.kv_lens)
    assert lens[: batch.num_decodes] == [1] * batch.num_decodes
    rows = [
        (request, at)
        for request, (size, end) in enumerate(zip(lens, batch.kv_lens, strict=True))
        for at in range(end - size, end)
    ]
    assert list(zip(batch.request.tolist(), batch.index.tolist(), strict=True)) == rows


@pytest.fixture
def fake() -> FakeModel:
    return FakeModel()


@pytest.fixture
def loaded(fake: FakeModel, tmp_path: Path) -> Any:
    """What load_model would return of it."""
    axes = {"id": 1}
    raw = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": None}
    return SimpleNamespace(
        module=fake,
        config=SimpleNamespace(raw=raw, hf=None),
        states=StateDescriptors([{"ids": PagedState(axes=axes)}, {"ids": WindowState(axes=axes, window=WINDOW)}]),
        dtype=torch.float32,
        device="cpu",
        path=tmp_path,
        ops=SimpleNamespace(deterministic=False),
        fingerprint="",
        state_policies={},
    )


@pytest.fixture
def run(loaded: Any) -> Any:
    """Run prompts to their end on an engine of the fake model; free memory is NaN before every step."""

    def run(
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        preempt_every: int = 0,
        return_logits: bool = False,
        **limits: Any,
    ) -> list[RequestOutput]:
        engine = Engine(loaded, EngineConfig(**({"num_blocks": 64, "block_size": 4} | limits)))
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        ids = [engine.add(prompt, one, return_logits=return_logits) for prompt, one in zip(prompts, each, strict=True)]
        return finish(engine, ids, preempt_every)

    return run
