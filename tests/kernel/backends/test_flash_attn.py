"""flash-attn against transformers' dense attention, and when it declines."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from rtp_kernel.backends.flash_attn import FlashAttention, is_installed, page_reason
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import spans, write_kv
from rtp_kernel.registry import OpContext

MIXES: dict[str, list[tuple[int, int]]] = {
    "decode": [(130, 1), (0, 1), (63, 1)],
    "prefill and chunk": [(0, 150), (70, 33)],
    "mixture": [(100, 1), (2, 1), (70, 5), (0, 9)],
}


def context(**values: Any) -> OpContext:
    given = {"device": "cuda", "dtype": torch.bfloat16, "shapes": {"head dim": 128}, "block_size": 16} | values
    return OpContext(**given)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"device": "cpu"}, "CUDA only"),
        ({"dtype": torch.float32}, "float32"),
        ({"shapes": {"head dim": 12}}, "head dim 12"),
        ({"deterministic": True}, "depends on"),
        ({"block_size": 128}, "set block_size"),
        ({"shapes": {"head dim": 64}, "block_size": 16}, "set block_size"),
    ],
)
def test_declines_with_the_reason(values: dict[str, Any], reason: str) -> None:
    support = FlashAttention().supports(context(**values))
    assert not support.ok
    assert any(reason in given for given in support.reasons), support.reasons


def test_reads_blocks_that_are_no_whole_key_tile() -> None:
    assert page_reason(128, 16) is None and page_reason(128, 64) is None and page_reason(64, 64) is None


def on_cuda(batch: ForwardBatch) -> ForwardBatch:
    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cuda()
        return {key: moved(part) for key, part in value.items()} if isinstance(value, dict) else value

    groups = tuple(
        replace(group, **{f.name: moved(getattr(group, f.name)) for f in fields(group)}) for group in batch.groups
    )
    return replace(batch, **{f.name: moved(getattr(batch, f.name)) for f in fields(batch)} | {"groups": groups})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not is_installed(), reason="needs a CUDA device and flash-attn")
@pytest.mark.filterwarnings("ignore")  # of what flash-attn imports
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("dim", "block_size"), [(128, 16), (64, 64)])
def test_is_dense_attention(mix: Any, name: str, window: int | None, dim: int, block_size: int) -> None:
    step = mix(
        requests=MIXES[name], heads=8, kv_heads=2, dim=dim, block_size=block_size, window=window, dtype=torch.bfloat16
    )
    batch, kv = step.build(poison=float("nan"))
    kv.data[0] = 0  # stands for what has passed out of a window; loaded, though it has no weight
    write_kv(step.new(step.k), step.new(step.v), kv, batch)
    batch, kv = on_cuda(batch), StateView(kv.data.cuda(), 0)
    rows = [
        FlashAttention()(
            step.q[span.rows.start : span.rows.stop].cuda(), kv, batch, span, scale=dim**-0.5, window=window
        )
        for _, span in spans(batch)
    ]
    error = (torch.cat(rows).cpu().float() - step.dense()).norm() / step.dense().norm()
    assert error < 1e-2, f"{error:.1e}"
