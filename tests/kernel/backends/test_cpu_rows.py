"""Deterministic forms: a row is bit-equal whatever the company, the padding, the chunks and the threads' shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_kernel.backends.cpu.attention import WriteKv
from rtp_kernel.backends.cpu.rows import (
    GatedActivation,
    RotaryAngles,
    Route,
    TiledAttention,
    TiledExperts,
    TiledLinear,
)
from rtp_kernel.ops.embedding import embedding
from rtp_kernel.ops.linear import linear
from rtp_kernel.ops.moe import experts, route
from rtp_kernel.ops.norm import layer_norm
from rtp_kernel.ops.rotary import rotary
from rtp_kernel.registry import OpContext, default_registry

ROWS = 70
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, and three: shares of a contiguous run then end anywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _assert_rows_stand_alone(function: Callable[..., Any], *rows: Tensor) -> None:
    """`function` of any consecutive rows is bit-equal to those rows of `function` of all."""

    def results(part: slice) -> tuple[Tensor, ...]:
        out = function(*(each[part] for each in rows))
        return out if isinstance(out, tuple) else (out,)

    whole = results(slice(None))
    for size in (1, 2, 3, 5, 15, 16, 17, 33, 48, ROWS - 1):
        for start in sorted({0, 1, 7, 16, ROWS - size}):
            part = slice(start, min(start + size, ROWS))
            for ours, all_rows in zip(results(part), whole, strict=True):
                assert torch.equal(ours, all_rows[part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(48, 33), (96, 256), (1, 64)])
@pytest.mark.parametrize("packed", [False, True])
def test_linear(dtype: torch.dtype, sizes: tuple[int, int], packed: bool) -> None:
    op, bias = TiledLinear(), torch.randn(sizes[0]).to(dtype)
    logical = torch.randn(*sizes).to(dtype)
    weight = op.prepare(logical) if packed else logical
    x = torch.randn(ROWS, sizes[1]).to(dtype)
    _assert_rows_stand_alone(lambda rows: op(rows, weight, bias), x)
    want = linear(x.double(), logical.double(), bias.double())
    assert torch.allclose(op(x, weight, bias).double(), want, atol=1e-4, rtol=0 if dtype == torch.float32 else 5e-3)
    assert torch.equal(op.restore(weight, dtype), logical)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [77, 640])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("limit", [None, 2.0])
def test_gated_activation(dtype: torch.dtype, width: int, name: str, limit: float | None) -> None:
    gate_up = torch.randn(ROWS, 2 * width).to(dtype)
    _assert_rows_stand_alone(lambda rows: GatedActivation()(*rows.chunk(2, -1), name, limit), gate_up)


@pytest.mark.parametrize("dim", [12, 64])
def test_rotary_angles_and_rotation(dim: int) -> None:
    inv_freq = torch.rand(dim // 2)
    _assert_rows_stand_alone(lambda rows: RotaryAngles()(rows, inv_freq, 1.1, torch.float32), torch.arange(ROWS) * 5)
    axes, positions = torch.arange(dim // 2) % 3, torch.arange(3 * ROWS).view(ROWS, 3) * 5
    _assert_rows_stand_alone(lambda rows: RotaryAngles()(rows.T, inv_freq, 1.1, torch.float32, axes), positions)
    q, k, cos, sin = torch.randn(ROWS, 3, 77), torch.randn(ROWS, 1, 77), torch.randn(ROWS, dim), torch.randn(ROWS, dim)
    for layout in ("half", "interleaved", "interleaved_to_half"):
        _assert_rows_stand_alone(lambda *rows, layout=layout: rotary(*rows, layout), q, k, cos, sin)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("num", [60, 128])
def test_route(score: str, num: int) -> None:
    logits, bias = torch.randn(ROWS, num), torch.randn(num)
    options: dict[str, Any] = {"k": 6, "score": score, "renormalize": True, "groups": 4, "top_groups": 2}
    _assert_rows_stand_alone(lambda rows: Route()(rows, bias, **options), logits)
    assert torch.equal(Route()(logits, bias, **options)[1], route(logits, bias, **options)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype) -> None:
    gate_up, down = (torch.randn(8, 80, 32) / 5).to(dtype), (torch.randn(8, 32, 40) / 5).to(dtype)
    x, (weights, ids) = torch.randn(ROWS, 32).to(dtype), route(torch.randn(ROWS, 8).to(dtype), None, k=2)
    _assert_rows_stand_alone(lambda *rows: TiledExperts()(*rows, gate_up, down), x, weights, ids)
    want = experts(x, weights, ids, gate_up, down)
    assert torch.allclose(
        TiledExperts()(x, weights, ids, gate_up, down), want, atol=1e-5 if dtype == torch.float32 else 0.1
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64,), (577,), (3, 77)])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape[-1]).to(dtype)
    x = torch.randn(ROWS, *shape).to(dtype)
    context = OpContext(device="cpu", dtype=dtype, deterministic=True)
    chosen = default_registry().select("rms_norm", context).implementation
    _assert_rows_stand_alone(lambda rows: chosen(rows, weight, 1e-6), x)
    shifted = default_registry().reference("rms_norm")
    _assert_rows_stand_alone(lambda rows: shifted(rows, weight, 1e-6, 1.0), x)
    _assert_rows_stand_alone(lambda rows: layer_norm(rows, weight, weight, 1e-6), x)


def test_embedding() -> None:
    table = torch.randn(50, 33)
    _assert_rows_stand_alone(lambda ids: embedding(ids, table), torch.randint(0, 50, (ROWS,)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
def test_attention_whole_in_chunks_alone_and_in_company(mix: Any, dtype: torch.dtype, window: int | None) -> None:
    tokens, options = 150, {"window": window, "dtype": dtype, "heads": 6, "kv_heads": 2, "block_size": 16}

    def run(requests: list[tuple[int, int]], row: int, **more: Any) -> Tensor:
        step = mix(requests=requests, **options, **more)
        source = mix(requests=[(0, tokens)], **options)
        held, new = requests[row]
        step.k[row], step.v[row] = source.k[0][: held + new], source.v[0][: held + new]
        start = sum(n for _, n in requests[:row])
        step.q[start : start + new] = source.q[held : held + new]
        extra = {"sinks": source.sinks, "soft_cap": 5.0}
        return step.run(WriteKv(), TiledAttention(), **extra)[start : start + new]

    whole = run([(0, tokens)], 0)
    for cut in (1, 63, 64, 65, 100):
        assert torch.equal(run([(0, cut)], 0), whole[:cut])
        assert torch.equal(run([(cut, tokens - cut)], 0), whole[cut:])
    for index in (0, 40, 63, 64, 149):
        assert torch.equal(run([(index, 1)], 0), whole[index : index + 1])
        assert torch.equal(run([(7, 1), (90, 1), (index, 1), (3, 5)], 2, padding=3), whole[index : index + 1])
