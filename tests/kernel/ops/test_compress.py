"""Compressed context against the compressors, the indexer and the attention of transformers' DeepSeek-V4."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel.compressing import Requests
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as reference

from rtp_kernel.components import CompressedAttention, EntryIndexer, WindowPool, bind_components
from rtp_kernel.ops import compress as module
from rtp_kernel.registry import OpTable, default_registry

HIDDEN, DIM, HEADS, INDEX_HEADS = 24, 16, 3, 17
WINDOWS = [(1, False), (3, False), (8, False), (1, True), (2, True), (5, True)]
"""Tokens per entry, and whether windows overlap."""


def make(name: str, ratio: int, **numbers: Any) -> Any:
    """A module of transformers with random parameters."""
    rates = {"compressed_sparse_attention": ratio, "heavily_compressed_attention": ratio}
    rope = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    config = DeepseekV4Config(
        hidden_size=HIDDEN, head_dim=DIM, index_head_dim=DIM, index_n_heads=INDEX_HEADS, q_lora_rank=HIDDEN,
        compress_rates=rates, partial_rotary_factor=0.5, rope_parameters={"main": rope, "compress": rope}, **numbers,
    )  # fmt: skip
    made = getattr(reference, name)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def finish(compressor: Any, pooled: Tensor, ratio: int) -> Tensor:
    """What follows the pooling: the norm, and rotation at the window's first token."""
    positions = torch.arange(len(pooled))[None] * ratio
    rotation = compressor.rotary_emb(pooled, position_ids=positions, layer_type="compress")
    return reference.apply_rotary_pos_emb(compressor.kv_norm(pooled)[None, None], *rotation)[0, 0]


class Pooling:
    """A pool with its states, and the tokens of a few requests."""

    def __init__(self, ratio: int, overlap: bool, lengths: list[int]) -> None:
        self.pool = WindowPool(DIM, ratio, overlap=overlap)
        bind_components(self.pool, OpTable(default_registry(), device="cpu", dtype=torch.float32), "cpu", torch.float32)
        self.bias = torch.randn(ratio, self.pool.channels)
        self.kv, self.gate = ([torch.randn(n, self.pool.channels) for n in lengths] for _ in range(2))
        self.fresh()

    def fresh(self) -> None:
        self.requests = Requests(len(self.kv), self.pool.ratio, block_size=self.pool.ratio * 4)
        axes = (self.pool.places, self.pool.channels)
        self.states = self.requests.slots(0.0, *axes), self.requests.slots(float("-inf"), *axes)
        self.view = self.requests.blocks(DIM, self.pool.ratio)

    def step(self, *lens: int, **options: Any) -> Tensor:
        batch = self.requests.step(lens, **options)
        rows = self.requests.rows(batch, self.kv), self.requests.rows(batch, self.gate)
        entries = self.pool(*rows, self.bias, batch, *self.states)
        self.pool.store(entries, self.view, batch)
        return entries

    def entries(self) -> list[Tensor]:
        return [self.requests.entries(self.view, request) for request in range(len(self.kv))]

    def whole(self) -> list[Tensor]:
        self.fresh()
        self.step(*(len(each) for each in self.kv))
        return self.entries()


def chunks(lengths: list[int], seed: int) -> Iterator[list[int]]:
    """Steps in which some of the requests go on by a few tokens, until all are done."""
    draw = random.Random(seed)
    left = list(lengths)
    while any(left):
        lens = [min(n, draw.choice((0, 1, 1, 2, 3, 7, 11))) for n in left]
        left = [n - m for n, m in zip(left, lens, strict=True)]
        yield lens


@pytest.mark.parametrize("ratio", [1, 3, 8])
@torch.no_grad()
def test_separate_windows_are_those_of_hca(ratio: int) -> None:
    theirs = make("DeepseekV4HCACompressor", ratio)
    hidden = torch.randn(43, HIDDEN)
    wanted, _ = theirs(hidden[None], None, torch.arange(43)[None], None, 0)
    case = Pooling(ratio, False, [43])
    case.kv, case.gate, case.bias = [theirs.kv_proj(hidden)], [theirs.gate_proj(hidden)], theirs.position_bias
    assert torch.allclose(finish(theirs, case.whole()[0], ratio), wanted[0, 0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("ratio", [1, 2, 4, 5])
@torch.no_grad()
def test_overlapping_windows_are_those_of_csa(ratio: int) -> None:
    theirs = make("DeepseekV4CSACompressor", ratio)
    hidden = torch.randn(43, HIDDEN)
    wanted, _ = theirs(hidden[None], hidden[None], torch.arange(43)[None], None, 0)
    case = Pooling(ratio, True, [43])
    case.kv, case.gate, case.bias = [theirs.kv_proj(hidden)], [theirs.gate_proj(hidden)], theirs.position_bias
    assert torch.allclose(finish(theirs, case.whole()[0], ratio), wanted[0, 0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("ratio", "overlap"), WINDOWS)
@pytest.mark.parametrize("seed", range(4))
def test_entries_do_not_depend_on_chunks_or_company(ratio: int, overlap: bool, seed: int) -> None:
    """NaN is in every block and slot that nobody holds, and in the padding rows."""
    lengths = [29, 1, 40, 17]
    case = Pooling(ratio, overlap, lengths)
    wanted = case.whole()
    case.fresh()
    for lens in chunks(lengths, seed):
        case.step(*lens, padding=seed)
    for found, expected in zip(case.entries(), wanted, strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ratio", "overlap"), WINDOWS)
def test_a_request_goes_on_from_any_copy(ratio: int, overlap: bool) -> None:
    case = Pooling(ratio, overlap, [30, 4])
    wanted = case.whole()
    for kept in (1, 2, 9, 16, 17):
        case.fresh()
        case.step(3, 0)
        case.step(17, 4, copies=[(0, kept), (1, 1), (1, 4)])
        case.requests.slot[0] = case.requests.copied[0]
        case.requests.held[0] = 3 + kept
        case.step(27 - kept, 0)
        assert torch.allclose(case.entries()[0], wanted[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ratio", "overlap"), WINDOWS)
def test_only_closing_rows_hold_entries_and_only_told_slots_are_written(ratio: int, overlap: bool) -> None:
    case = Pooling(ratio, overlap, [20, 9])
    entries = case.step(7, 9, padding=3, copies=[(0, 5)])
    closing = [(index + 1) % ratio == 0 for index in (*range(7), *range(9))] + [False] * 3
    assert (entries != 0).any(-1).tolist() == closing
    written = {*case.requests.slot, *case.requests.copied}
    for view, initial in zip(case.states, (0.0, float("-inf")), strict=True):
        assert bool((view.data[0] == initial).all()), "the null slot was written"
        assert {slot for slot, each in enumerate(view.data) if not each.isnan().all()} == {0} | written


def test_no_tokens_give_no_entries() -> None:
    case = Pooling(4, True, [5])
    assert case.step(0).shape == (0, DIM) and bool((case.step(0, padding=2) == 0).all())


class Attending:
    """Attention with entries, some of them selected, beside the reference's attention over all keys at once."""

    def __init__(
        self, ratio: int, window: int, lengths: list[int], top_k: int | None = None, heads: int = HEADS
    ) -> None:
        self.ratio, self.window, self.top_k = ratio, window, top_k
        self.attn = CompressedAttention(heads, DIM, window=window)
        bind_components(self.attn, OpTable(default_registry(), device="cpu", dtype=torch.float32), "cpu", torch.float32)
        self.q = [torch.randn(n, heads, DIM) for n in lengths]
        self.kv = [torch.randn(n, DIM) for n in lengths]
        self.closed = [torch.randn(n // ratio, DIM) for n in lengths]
        self.chosen = [torch.stack([self._choose(i) for i in range(n)]) for n in lengths]
        self.sinks = torch.randn(heads)
        self.requests = Requests(len(lengths), ratio, block_size=4 * ratio)
        self.view, self.entries = self.requests.blocks(DIM), self.requests.blocks(DIM, ratio)

    def _choose(self, index: int) -> Tensor:
        """[1, k]: entries that the query may see, in any order, then -1."""
        order = torch.randperm((index + 1) // self.ratio)[: self.top_k]
        return torch.cat((order, torch.full(((self.top_k or 0),), -1)))[None, : self.top_k or 0]

    def step(self, *lens: int, **options: Any) -> list[Tensor]:
        """The result of each request's new tokens; the padding rows' in the end."""
        batch = self.requests.step(lens, **options)
        for request, end in enumerate(batch.kv_lens):
            place = torch.arange(end // self.ratio)
            blocks = self.requests.table[request, place // 4].long()
            self.entries.data[blocks, place % 4] = self.closed[request][: len(place)]
        selection = None if self.top_k is None else torch.cat(
            [part[end - n : end] for part, end, n in zip(self.chosen, batch.kv_lens, lens, strict=True)]
            + [torch.full((options.get("padding", 0), 1, self.top_k), -1)]
        )  # fmt: skip
        rows = self.requests.rows(batch, self.q), self.requests.rows(batch, self.kv)
        out = self.attn(*rows, self.sinks, batch, self.view, self.entries, selection)
        return list(out.split([*lens, batch.num_tokens - sum(lens)]))

    def dense(self, request: int) -> Tensor:
        """[tokens, heads * D] of the whole request."""
        q, kv, closed = self.q[request], self.kv[request], self.closed[request]
        index = torch.arange(len(q))[:, None]
        recent = (index >= index.T) & (index - index.T < self.window)
        passed = torch.arange(len(closed)) < (index + 1) // self.ratio
        if self.top_k is not None:
            passed &= (self.chosen[request][:, 0, :, None] == torch.arange(len(closed))).any(1)
        seen = torch.cat((recent, passed), dim=1)
        keys = torch.cat((kv, closed))[None, None]
        heads = SimpleNamespace(num_key_value_groups=q.shape[1], training=False, sinks=self.sinks)
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        out, _ = reference.eager_attention_forward(heads, q.transpose(0, 1)[None], keys, keys, mask, DIM**-0.5)
        return out[0].flatten(1)


@pytest.mark.parametrize("top_k", [None, 1, 3, 40])
@pytest.mark.parametrize(("ratio", "window"), [(4, 6), (3, 1), (1, 5), (8, 64)])
@pytest.mark.parametrize("heads", [HEADS, 1])
def test_attends_as_the_reference(ratio: int, window: int, top_k: int | None, heads: int) -> None:
    lengths = [31, 12, 25]
    case = Attending(ratio, window, lengths, top_k, heads)
    wanted = [case.dense(request) for request in range(3)]
    done = [0, 0, 0]
    for lens, options in [
        ((1, 5, 9), {"decodes": 1}),
        ((1, 1, 16), {"decodes": 2, "padding": 2}),
        ((20, 0, 0), {}),
        ((3, 6, 0), {"decodes": 1, "padding": 1}),
    ]:
        *found, padding = case.step(*lens, **options)
        assert bool((padding == 0).all())
        for request, n in enumerate(lens):
            expected = wanted[request][done[request] : done[request] + n]
            assert torch.allclose(found[request], expected, rtol=1e-5, atol=1e-6)
            done[request] += n


def test_rows_are_taken_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NUMBERS", 200)
    case = Attending(2, 5, [33], top_k=4)
    assert torch.allclose(case.step(33)[0], case.dense(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ratio", "top_k"), [(2, 3), (4, 1), (3, 50)])
@torch.no_grad()
def test_selects_what_the_indexer_selects(ratio: int, top_k: int) -> None:
    theirs = make("DeepseekV4Indexer", ratio, index_topk=top_k)
    hidden = torch.randn(43, HIDDEN)
    position = torch.arange(43)[None]
    wanted = theirs(hidden[None], hidden[None], position, None, 0)[0]
    case = Pooling(ratio, True, [43])
    case.kv, case.gate, case.bias = [theirs.kv_proj(hidden)], [theirs.gate_proj(hidden)], theirs.position_bias
    entries = finish(theirs, case.whole()[0], ratio)
    cos, sin = theirs.rotary_emb(hidden[None], position_ids=position, layer_type="compress")
    q = theirs.q_b_proj(hidden).view(1, 43, INDEX_HEADS, DIM).transpose(1, 2)
    q = reference.apply_rotary_pos_emb(q, cos, sin)[0].transpose(0, 1)
    requests = Requests(1, ratio, block_size=4 * ratio)
    view = requests.blocks(DIM, ratio)
    for lens in (20, 1, 22):
        batch = requests.step([lens], padding=1)
        place = torch.arange(len(entries))
        view.data[requests.table[0, place // 4].long(), place % 4] = entries
        queries, weights = requests.rows(batch, [q]), requests.rows(batch, [theirs.scorer.weights_proj(hidden)])
        found = EntryIndexer(INDEX_HEADS, DIM, top_k)(queries, weights, batch, view)[:-1, 0]
        for ours, expected in zip(found, wanted[batch.kv_lens[0] - lens :], strict=False):
            assert sorted(ours[ours >= 0].tolist()) == sorted(expected[expected >= 0].tolist())


@pytest.mark.parametrize(
    ("make_component", "problem"),
    [
        (lambda: WindowPool(8, 0), "one entry for 0 tokens"),
        (lambda: CompressedAttention(2, 8, window=0), "attention window 0"),
        (lambda: EntryIndexer(2, 8, 0), "top_k 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make_component: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_component()
