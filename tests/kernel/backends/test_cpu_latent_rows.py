"""Deterministic latent attention and index scores: a row is bit-equal whatever the company, the chunks, the threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_kernel.backends.cpu.latent_rows import IndexScoreRows, LatentRows
from rtp_kernel.batch import StateView
from rtp_kernel.ops.attention import spans
from rtp_kernel.ops.latent_attention import latent_attention
from rtp_kernel.ops.token_index import index_scores

HEADS, LATENT, NOPE, ROPE, VALUE, INDEX_HEADS, TOKENS = 3, 40, 10, 6, 24, 5, 150
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Source:
    """One request's queries, latents and selection; any step that holds a part of it can be run."""

    def __init__(self, mix: Any, dtype: torch.dtype, ratio: int = 1) -> None:
        self.mix, self.dtype, self.ratio = mix, dtype, ratio
        self.q = torch.randn(TOKENS, HEADS, NOPE + ROPE).to(dtype)
        self.weights = torch.randn(TOKENS, INDEX_HEADS)
        self.index_q = torch.randn(TOKENS, INDEX_HEADS, LATENT + ROPE).to(dtype)
        self.latents = torch.randn(TOKENS, LATENT + ROPE).to(dtype)
        self.up = (torch.randn(HEADS, NOPE + VALUE, LATENT) / 6).to(dtype)
        self.selection = torch.stack([torch.randperm(index + 9)[:9] for index in range(TOKENS)])[:, None]

    def run(self, op: str, requests: list[tuple[int, int]], row: int, padding: int = 0) -> Tensor:
        """The op's rows of request `row`, which is this source; the others' values are random."""
        step = self.mix(requests=requests, padding=padding, block_size=16)
        batch, kv = step.build()
        table = batch.groups[0].block_table
        data = torch.randn(*kv.data.shape[:2], LATENT + ROPE).to(self.dtype)
        held, new = requests[row]
        place = torch.arange(held + new)
        data[table[row, place // 16].long(), place % 16] = self.latents[: held + new]
        view = StateView(data, 0, tokens_per_entry=self.ratio)
        start = sum(n for _, n in requests[:row])

        def rows_of(part: Tensor) -> Tensor:
            whole = torch.randn(step.num_tokens, *part.shape[1:]).to(part.dtype)
            whole[start : start + new] = part[held : held + new]
            return whole

        selection = torch.zeros(step.num_tokens, 1, 9, dtype=torch.long)
        selection[start : start + new] = self.selection[held : held + new]
        parts = []
        for _, span in spans(batch):
            rows = slice(span.rows.start, span.rows.stop)
            if op == "scores":
                q, weights = rows_of(self.index_q)[rows], rows_of(self.weights)[rows]
                scores = IndexScoreRows()(q, weights, view, batch, span, scale=0.2)
                parts.append(
                    torch.nn.functional.pad(scores[..., :TOKENS], (0, TOKENS - scores.shape[-1]), value=-torch.inf)
                )
            else:
                chosen = selection[rows] if op == "selected" else None
                parts.append(
                    LatentRows()(rows_of(self.q)[rows], view, batch, span, self.up, scale=0.2, selection=chosen)
                )
        return torch.cat(parts)[start : start + new]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["all", "selected", "scores"])
def test_whole_in_chunks_alone_and_in_company(mix: Any, dtype: torch.dtype, op: str) -> None:
    source = Source(mix, dtype)
    whole = source.run(op, [(0, TOKENS)], 0)
    for cut in (1, 63, 64, 100):
        assert torch.equal(source.run(op, [(0, cut)], 0), whole[:cut])
        assert torch.equal(source.run(op, [(cut, TOKENS - cut)], 0), whole[cut:])
    for index in (0, 40, 63, 149):
        assert torch.equal(source.run(op, [(index, 1)], 0), whole[index : index + 1])
        company = [(7, 1), (90, 1), (index, 1), (3, 5)]
        assert torch.equal(source.run(op, company, 2, padding=3), whole[index : index + 1])


@pytest.mark.parametrize("ratio", [1, 4])
def test_agree_with_the_references(mix: Any, ratio: int) -> None:
    source = Source(mix, torch.float32, ratio)
    step = mix(requests=[(10, 1), (0, 1), (33, 1), (5, 6), (0, 9)], padding=2)
    batch, kv = step.build()
    data = torch.randn(*kv.data.shape[:2], LATENT + ROPE)
    for _, span in spans(batch):
        rows, view = slice(span.rows.start, span.rows.stop), StateView(data, 0)
        chosen = source.selection[rows]
        for selection in (None, chosen.masked_fill(chosen > batch.index[rows, None, None], -1)):
            args = (source.q[rows], view, batch, span, source.up)
            want = latent_attention(*args, scale=0.2, selection=selection)
            assert torch.allclose(LatentRows()(*args, scale=0.2, selection=selection), want, rtol=0, atol=3e-6)
        scored = (source.index_q[rows], source.weights[rows], StateView(data, 0, ratio), batch, span)
        want, got = index_scores(*scored, scale=0.2), IndexScoreRows()(*scored, scale=0.2)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
