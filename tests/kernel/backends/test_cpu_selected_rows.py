"""Deterministic attention to a selection and scores of runs: a row is bit-equal whatever the company and the chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_kernel.backends.cpu.rows import Activation
from rtp_kernel.backends.cpu.selected_rows import BlockIndexRows, SelectedRows
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.activation import activation
from rtp_kernel.ops.attention import paged_attention, spans, write_kv
from rtp_kernel.ops.block_index import block_index_scores
from rtp_kernel.registry import OpContext

HEADS, KV_HEADS, DIM, TOKENS, SIZE = 6, 2, 20, 150, 16
DTYPES = [torch.float32, torch.bfloat16]
COMPANY = [(7, 1), (90, 1), (40, 1), (3, 5)]


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Source:
    """One request's queries, keys and selection; any step that holds a part of it can be run."""

    def __init__(self, mix: Any, dtype: torch.dtype, groups: int = KV_HEADS) -> None:
        self.options: dict[str, Any] = {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "dim": DIM,
            "dtype": dtype,
            "block_size": 8,
        }
        self.mix, self.whole = mix, mix(requests=[(0, TOKENS)], decodes=0, **self.options)
        self.selection = torch.stack(
            [torch.rand(groups, max(4, index // SIZE + 1)).argsort(-1)[:, :4] for index in range(TOKENS)]
        )
        self.selection[self.selection * SIZE > torch.arange(TOKENS)[:, None, None]] = -1

    def run(self, op: str, requests: list[tuple[int, int]], row: int, padding: int = 0) -> Tensor:
        """The op's rows of request `row`, which is this source; the others' values are random."""
        step = self.mix(requests=requests, padding=padding, seed=3, **self.options)
        held, new = requests[row]
        start = sum(n for _, n in requests[:row])
        step.k[row], step.v[row] = self.whole.k[0][: held + new], self.whole.v[0][: held + new]
        step.q[start : start + new] = self.whole.q[held : held + new]
        batch, kv = step.build()
        write_kv(step.new(step.k).nan_to_num(), step.new(step.v).nan_to_num(), kv, batch)
        selection = torch.zeros(step.num_tokens, *self.selection.shape[1:], dtype=torch.long)
        selection[start : start + new] = self.selection[held : held + new]
        parts = [self.part(op, step, kv, batch, span, selection) for _, span in spans(batch)]
        return torch.cat(parts)[start : start + new]

    def part(self, op: str, step: Any, kv: StateView, batch: ForwardBatch, span: Any, selection: Tensor) -> Tensor:
        q = step.q[span.rows.start : span.rows.stop]
        if op == "selected":
            options: dict[str, Any] = {"scale": 0.3, "selection": selection[span.rows], "tokens_per_place": SIZE}
            return SelectedRows()(q, kv, batch, span, **options)
        view = StateView(kv.data[:, :, 0, 0], 0)
        scores = BlockIndexRows()(q, view, batch, span, size=SIZE, local=1)
        return torch.nn.functional.pad(scores, (0, TOKENS - scores.shape[-1]), value=float("-inf"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["selected", "scores"])
def test_whole_in_chunks_alone_and_in_company(mix: Any, dtype: torch.dtype, op: str) -> None:
    source = Source(mix, dtype)
    whole = source.run(op, [(0, TOKENS)], 0)
    for cut in (1, 63, 100):
        assert torch.equal(source.run(op, [(0, cut)], 0), whole[:cut])
        assert torch.equal(source.run(op, [(cut, TOKENS - cut)], 0), whole[cut:])
    for index in (0, 40, 63, 149):
        assert torch.equal(source.run(op, [(index, 1)], 0), whole[index : index + 1])
    assert torch.equal(source.run(op, COMPANY, 2, padding=3), whole[40:41])


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_agree_with_the_references(mix: Any, groups: int) -> None:
    source = Source(mix, torch.float32, groups)
    step = mix(requests=[(50, 1), (0, 1), (33, 20)], padding=2, **source.options)
    batch, kv = step.build()
    write_kv(step.new(step.k), step.new(step.v), kv, batch)
    for _, span in spans(batch):
        rows = slice(span.rows.start, span.rows.stop)
        chosen = source.selection[batch.index[rows].clamp(min=0)]
        options: dict[str, Any] = {"scale": 0.3, "selection": chosen, "tokens_per_place": SIZE}
        want = paged_attention(step.q[rows], kv, batch, span, **options)
        assert torch.allclose(SelectedRows()(step.q[rows], kv, batch, span, **options), want, rtol=0, atol=2e-6)
        args = step.q[rows], StateView(kv.data[:, :, 0, 1], 0), batch, span
        want = block_index_scores(*args, size=SIZE, local=2)
        assert torch.allclose(BlockIndexRows()(*args, size=SIZE, local=2), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_an_activation_of_rows(dtype: torch.dtype, name: str) -> None:
    x = torch.randn(37, 77).to(dtype)
    whole = Activation()(x, name)
    assert torch.allclose(whole, activation(x, name), rtol=1e-2, atol=1e-6)
    assert all(torch.equal(Activation()(x[row : row + 1], name)[0], whole[row]) for row in range(37))
    assert torch.equal(torch.cat([Activation()(x[:5], name), Activation()(x[5:], name)]), whole)


def test_says_what_it_serves() -> None:
    context = OpContext(device="cpu", dtype=torch.float32, deterministic=True, options={"selects": 4})
    assert SelectedRows().supports(context).ok
    without = OpContext(device="cpu", dtype=torch.float32, deterministic=True)
    assert SelectedRows().supports(without).reasons == ("attends to a selection only",)
