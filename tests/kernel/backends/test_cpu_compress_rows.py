"""Deterministic forms of DeepSeek-V4's ops: bit-equal rows whatever the company, and near the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel.compressing import Requests
from torch import Tensor

from rtp_kernel.backends.cpu.compress_rows import CompressedAttentionRows, CompressRows
from rtp_kernel.backends.cpu.hyper_rows import HyperCollapseTiles, HyperConnectionTiles, HyperExpandRows
from rtp_kernel.backends.cpu.rows import TiledGroups
from rtp_kernel.ops.attention import spans
from rtp_kernel.ops.compress import compress, compressed_attention, places
from rtp_kernel.ops.hyper_connection import hyper_collapse, hyper_connection, hyper_expand
from rtp_kernel.ops.linear import grouped_linear
from rtp_kernel.ops.state import write_state

DTYPES = [torch.float32, torch.bfloat16]
ROWS, RATIO, DIM, HEADS = 70, 4, 20, 3


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_rows_stand_alone(function: Callable[..., Any], wanted: Any, *rows: Tensor) -> None:
    """Bit-equal for any consecutive rows, and within rounding what the reference gives for all."""

    def results(part: slice, op: Callable[..., Any] = function) -> tuple[Tensor, ...]:
        out = op(*(each[part] for each in rows))
        return out if isinstance(out, tuple) else (out,)

    whole = results(slice(None))
    for size in (1, 3, 16, 17, 63, 64, ROWS - 1):
        for start in sorted({0, 1, 7, ROWS - size}):
            part = slice(start, min(start + size, ROWS))
            for ours, all_rows in zip(results(part), whole, strict=True):
                assert torch.equal(ours, all_rows[part])
    for ours, expected in zip(whole, results(slice(None), wanted), strict=True):
        assert ours.dtype == expected.dtype
        near = 2e-6 if ours.dtype == torch.float32 else 3e-2
        assert torch.allclose(ours.float(), expected.float(), rtol=near, atol=near)
    assert all(each.shape[1:] == other.shape[1:] for each, other in zip(results(slice(0, 0)), whole, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 3])
def test_groups(dtype: torch.dtype, groups: int) -> None:
    weight = (torch.randn(groups * 10, 24) / 5).to(dtype)
    x = torch.randn(ROWS, groups, 24).to(dtype)
    assert_rows_stand_alone(lambda x: TiledGroups()(x, weight), lambda x: grouped_linear(x, weight), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("streams", [1, 3, 4])
def test_hyper_connections(dtype: torch.dtype, streams: int) -> None:
    size = (2 + streams) * streams
    fn, base, scale = torch.randn(size, streams * 20) / 9, torch.randn(size), torch.randn(3)
    hidden, out = torch.randn(ROWS, streams, 20).to(dtype), torch.randn(ROWS, 20).to(dtype)
    numbers = {"eps": 1e-6, "norm_eps": 1e-5}
    assert_rows_stand_alone(
        lambda x: HyperConnectionTiles()(x, fn, base, scale, iterations=7, **numbers),
        lambda x: hyper_connection(x, fn, base, scale, iterations=7, **numbers),
        hidden,
    )
    head = fn[:streams], base[:streams], scale[:1]
    assert_rows_stand_alone(
        lambda x: HyperCollapseTiles()(x, *head, **numbers), lambda x: hyper_collapse(x, *head, **numbers), hidden
    )
    post, comb = torch.rand(ROWS, streams), torch.rand(ROWS, streams, streams)
    assert_rows_stand_alone(HyperExpandRows(), hyper_expand, post, comb, out, hidden)


class Steps:
    """Two requests, given in steps of any size to ops of either kind."""

    def __init__(self, overlap: bool, top_k: int | None, dtype: torch.dtype) -> None:
        self.overlap, self.top_k = overlap, top_k
        channels = 2 * DIM if overlap else DIM
        self.kv, self.gate = ([torch.randn(n, channels).to(dtype) for n in (41, 23)] for _ in range(2))
        self.q = [torch.randn(n, HEADS, DIM).to(dtype) for n in (41, 23)]
        self.bias, self.sinks = torch.randn(RATIO, channels), torch.randn(HEADS)
        self.chosen = [torch.stack([torch.randperm(i + 1)[:5] - 1 for i in range(9, 9 + n)]) for n in (41, 23)]

    def run(self, pool: Any, attend: Any, *steps: tuple[int, int]) -> list[Tensor]:
        """Each request's entries, then its attention over them, [tokens, heads, D]."""
        requests = Requests(2, RATIO, block_size=4 * RATIO)
        axes = places(RATIO, self.overlap), self.kv[0].shape[1]
        buffers = requests.slots(0.0, *axes), requests.slots(float("-inf"), *axes)
        entries, recent = requests.blocks(DIM, RATIO), requests.blocks(DIM)
        found: list[list[Tensor]] = [[], []]
        for lens in steps:
            batch = requests.step(lens)
            rows = (requests.rows(batch, part) for part in (self.kv, self.gate))
            made = pool(*rows, self.bias, *buffers, batch, ratio=RATIO, overlap=self.overlap)
            write_state(made, entries, batch)
            write_state(requests.rows(batch, [kv[:, :DIM] for kv in self.kv]), recent, batch)
            q, selection = requests.rows(batch, self.q), None
            if self.top_k is not None:
                parts = zip(self.chosen, batch.kv_lens, lens, strict=True)
                selection = torch.cat([part[end - n : end, None, : self.top_k] for part, end, n in parts])
            for _, span in spans(batch):
                options = {"window": 7, "scale": 0.3, "sinks": self.sinks, "selection": selection}
                out = attend(q, recent, batch, span, entries=entries, **options)
                for request, part in enumerate(out.split(list(lens))):
                    found[request].append(part)
        return [requests.entries(entries, request) for request in (0, 1)] + [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("overlap", "top_k"), [(False, None), (True, 5)])
def test_compressed_context(dtype: torch.dtype, overlap: bool, top_k: int | None) -> None:
    case = Steps(overlap, top_k, dtype)
    whole = case.run(CompressRows(), CompressedAttentionRows(), (41, 23))
    for steps in ([(41, 0), (0, 23)], [(1, 20), (17, 1), (1, 1), (22, 1)], [(3, 2)] * 11 + [(8, 1)]):
        for ours, expected in zip(case.run(CompressRows(), CompressedAttentionRows(), *steps), whole, strict=True):
            assert torch.equal(ours, expected)
    near = 2e-6 if dtype == torch.float32 else 3e-2
    for ours, expected in zip(whole, case.run(compress, compressed_attention, (41, 23)), strict=True):
        assert torch.allclose(ours.float(), expected.float(), rtol=near, atol=near)
