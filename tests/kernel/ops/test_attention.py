"""The paged attention reference against transformers' dense attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.mpt import modeling_mpt

from rtp_kernel.backends.cpu.rows import TiledAttention
from rtp_kernel.ops.attention import alibi_slopes, paged_attention, spans, write_kv

MIXES: dict[str, dict[str, Any]] = {
    "prefill": {"requests": [(0, 11), (0, 4), (0, 1)], "decodes": 0},
    "chunk": {"requests": [(5, 6), (8, 3)]},
    "decode": {"requests": [(10, 1), (0, 1), (3, 1)]},
    "mixture": {"requests": [(10, 1), (2, 1), (7, 5), (0, 9)]},
    "drafts": {"requests": [(10, 3), (2, 3), (7, 5)]},
    "padding": {"requests": [(10, 1), (2, 3)], "padding": 4},
    "nothing real": {"requests": [], "padding": 3},
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("window", [None, 1, 5, 8])
def test_is_dense_attention(mix: Any, name: str, window: int | None) -> None:
    step = mix(**MIXES[name], window=window)
    got = step.run(write_kv, paged_attention, poison=float("nan"))
    assert torch.allclose(got, step.dense(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_heads_share_keys_in_groups(mix: Any, heads: tuple[int, int]) -> None:
    step = mix(requests=[(6, 1), (3, 4)], heads=heads[0], kv_heads=heads[1])
    assert torch.allclose(step.run(write_kv, paged_attention), step.dense(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_are_those_of_gpt_oss(mix: Any, window: int | None) -> None:
    step = mix(**MIXES["mixture"], window=window)
    got = step.run(write_kv, paged_attention, sinks=step.sinks)
    assert torch.allclose(got, step.dense(modeling_gpt_oss.eager_attention_forward), rtol=0, atol=2e-6)
    assert not torch.allclose(got, step.dense(), atol=1e-3)


def test_soft_cap_is_that_of_gemma2(mix: Any) -> None:
    step = mix(**MIXES["mixture"])
    got = step.run(write_kv, paged_attention, soft_cap=0.5)
    assert torch.allclose(got, step.dense(modeling_gemma2.eager_attention_forward, softcap=0.5), rtol=0, atol=2e-6)
    assert not torch.allclose(got, step.dense(), atol=1e-3)


def test_spans_are_decode_or_verify_then_prefill(mix: Any) -> None:
    batch, _ = mix(**MIXES["mixture"], padding=2).build()
    assert [(regime, len(span.requests), span.rows) for regime, span in spans(batch)] == [
        ("decode", 2, range(2)),
        ("prefill", 2, range(2, 18)),
    ]


def test_drafts_are_verified_in_one_span(mix: Any) -> None:
    batch, _ = mix(**MIXES["drafts"]).build()
    batch = replace(batch, num_decodes=2, num_decode_tokens=6)
    assert [(regime, span.rows) for regime, span in spans(batch)] == [("verify", range(6)), ("prefill", range(6, 11))]


def test_padding_writes_nothing(mix: Any) -> None:
    step = mix(**MIXES["padding"])
    batch, kv = step.build()
    before = kv.data.clone()
    write_kv(step.new(step.k), step.new(step.v), kv, batch)
    changed = (kv.data != before).flatten(2).any(-1)
    assert int(changed.sum()) == sum(new for _, new in step.requests)
    assert bool(torch.isfinite(kv.data).all())


def chosen(step: Any, groups: int, k: int, size: int) -> Tensor:
    """A selection [tokens, groups, k] of places that each query sees, with gaps of -1; NaN-free for padding rows."""
    rows = []
    for held, new in step.requests:
        for index in range(held, held + new):
            places = torch.stack([torch.randperm(index // size + 1) for _ in range(groups)])[:, :k]
            rows.append(torch.nn.functional.pad(places, (0, k - places.shape[1]), value=-1))
    rows += [torch.full((groups, k), -1)] * step.padding
    return torch.stack(rows) if rows else torch.zeros(0, groups, k, dtype=torch.long)


def dense_of_selection(step: Any, selection: Tensor, size: int) -> Tensor:
    """Attention, query by query, over the tokens that are selected and visible."""
    out, row = torch.zeros(step.num_tokens, step.heads, step.dim), 0
    for request, (held, new) in enumerate(step.requests):
        for index in range(held, held + new):
            for head in range(step.heads):
                kv_head = head * step.kv_heads // step.heads
                places = selection[row, head * selection.shape[1] // step.heads].tolist()
                tokens = [t for p in places if p >= 0 for t in range(p * size, (p + 1) * size) if t <= index]
                if tokens:
                    keys, values = step.k[request][tokens, kv_head], step.v[request][tokens, kv_head]
                    weights = torch.softmax(keys @ step.q[row, head] * step.dim**-0.5, dim=0)
                    out[row, head] = weights @ values
            row += 1
    return out


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_attends_to_the_selection_only(mix: Any, name: str, size: int, groups: int) -> None:
    step = mix(**MIXES[name], heads=6, kv_heads=3)
    selection = chosen(step, groups, 2, size)
    batch, kv = step.build(poison=float("nan"))
    write_kv(step.new(step.k), step.new(step.v), kv, batch)
    options = {"scale": step.dim**-0.5, "tokens_per_place": size}
    parts = [
        paged_attention(step.q[s.rows.start : s.rows.stop], kv, batch, s, selection=selection[s.rows], **options)
        for _, s in spans(batch)
    ]
    assert torch.allclose(torch.cat(parts), dense_of_selection(step, selection, size), rtol=0, atol=2e-6)


def test_a_selection_of_everything_changes_nothing_and_one_of_nothing_gives_zeros(mix: Any) -> None:
    step = mix(requests=[(2, 7)])
    batch, kv = step.build()
    write_kv(step.new(step.k), step.new(step.v), kv, batch)
    ((_, span),) = spans(batch)
    everything = torch.arange(9).expand(7, 1, -1)
    whole = paged_attention(step.q, kv, batch, span, scale=0.25)
    assert torch.equal(paged_attention(step.q, kv, batch, span, scale=0.25, selection=everything), whole)
    nothing = torch.full_like(everything, -1)
    assert bool((paged_attention(step.q, kv, batch, span, scale=0.25, selection=nothing) == 0).all())


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16])
def test_slopes_are_those_of_bloom_and_mpt(heads: int) -> None:
    bloom = modeling_bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi_slopes(heads), bloom, rtol=1e-6, atol=0)
    mpt = modeling_mpt.build_mpt_alibi_tensor(heads, 2, alibi_bias_max=6)[:, 0]
    assert torch.allclose(alibi_slopes(heads, 6.0), mpt[:, 1] - mpt[:, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("attend", [paged_attention, TiledAttention()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_times_the_keys_index_are_added(mix: Any, attend: Any, dtype: torch.dtype) -> None:
    step = mix(requests=[(300, 1), (2, 1), (7, 5), (0, 9)], heads=6, kv_heads=3, window=290)
    bias = (alibi_slopes(6).to(dtype)[:, None, None] * torch.arange(301)).float() * 0.5

    def with_bias(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **more: Any) -> Any:
        return eager_attention_forward(module, q, k, v, mask + bias[..., : mask.shape[-1]], **more)

    got = step.run(write_kv, attend, slopes=alibi_slopes(6).to(dtype), slope_scale=0.5)
    assert torch.allclose(got, step.dense(with_bias), rtol=0, atol=5e-6)
    assert not torch.allclose(got, step.dense(), atol=1e-3)
