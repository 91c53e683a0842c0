"""Attention on the CPU: every implementation against the reference over random steps, and nothing foreign read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_kernel.backends.cpu.attention import MAX_GATHERED, DecodeAttention, PrefillAttention, WriteKv, _buckets
from rtp_kernel.backends.cpu.rows import TiledAttention
from rtp_kernel.batch import StateView
from rtp_kernel.ops.attention import Span, paged_attention, spans, write_kv
from rtp_kernel.registry import OpContext

FAST = {"decode": DecodeAttention(), "verify": PrefillAttention(), "prefill": PrefillAttention()}
WAYS = {"sdpa": FAST, "prefill only": PrefillAttention(), "key tiles": TiledAttention()}

decode = st.tuples(st.integers(0, 90), st.just(1))
chunk = st.tuples(st.integers(0, 40), st.integers(2, 40))
steps = st.fixed_dictionaries(
    {
        "requests": st.tuples(st.lists(decode, max_size=5), st.lists(chunk, max_size=3)).map(
            lambda parts: [*parts[0], *parts[1]]
        ),
        "window": st.sampled_from([None, 1, 3, 16, 70]),
        "padding": st.integers(0, 3),
        "block_size": st.sampled_from([1, 4, 16]),
        "gap": st.sampled_from([0, 64, 7]),
        "heads": st.just(6),
        "kv_heads": st.sampled_from([1, 3, 6]),
        "seed": st.integers(0, 1000),
    }
)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(step=steps)
def test_agrees_with_the_reference_on_any_step(mix: Any, way: str, step: dict[str, Any]) -> None:
    step = mix(**step)
    want = step.run(write_kv, paged_attention)
    assert torch.allclose(step.run(WriteKv(), WAYS[way]), want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("gap", [0, 7])
def test_nothing_foreign_is_read(mix: Any, way: str, window: int | None, gap: int) -> None:
    requests = [(10, 1), (0, 1), (33, 1), (5, 6), (0, 9)]
    step = mix(requests=requests, window=window, padding=2, gap=gap)
    clean = step.run(WriteKv(), WAYS[way])
    assert bool(torch.isfinite(clean).all())
    assert torch.equal(step.run(WriteKv(), WAYS[way], poison=float("nan")), clean)
    assert torch.equal(step.run(WriteKv(), WAYS[way], poison=float("nan"), order=3), clean)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_the_reference_up_to_rounding(mix: Any, way: str) -> None:
    step = mix(requests=[(60, 1), (20, 1), (30, 9)], dtype=torch.bfloat16)
    got, want = step.run(WriteKv(), WAYS[way]), step.dense()
    assert float((got.float() - want).square().mean().sqrt() / want.square().mean().sqrt()) < 6e-3


def test_a_batch_of_padding_alone_is_finite(mix: Any) -> None:
    step = mix(requests=[], padding=3)
    for way in WAYS.values():
        assert torch.equal(step.run(WriteKv(), way, poison=float("nan")), torch.zeros(3, 4, 16))


def test_padding_requests_among_decodes_come_out_as_zeros(mix: Any) -> None:

    step = mix(requests=[(4, 1), (9, 1)])
    batch, kv = step.build()
    write_kv(step.new(step.k), step.new(step.v), kv, batch)

    want = DecodeAttention()(step.q, kv, batch, Span(range(2), range(2)), scale=0.25)
    group = replace(batch.groups[0], block_table=torch.cat((batch.groups[0].block_table, torch.zeros(1, 3).int())))
    padded = replace(batch, query_lens=(1, 1, 0), kv_lens=(5, 10, 0), groups=(group,))
    got = DecodeAttention()(torch.cat((step.q, step.q[:1])), kv, padded, Span(range(3), range(3)), scale=0.25)
    assert torch.equal(got[:2], want)
    assert torch.equal(got[2], torch.zeros(4, 16))


def test_very_different_lengths_are_not_padded_to_the_longest(mix: Any) -> None:
    assert _buckets([100, 60, 51, 50]) == [[0, 1, 2, 3]]
    assert _buckets([10, 100, 60, 3, 5]) == [[1, 2], [0, 4], [3]]
    assert _buckets([]) == []
    assert [len(bucket) for bucket in _buckets([MAX_GATHERED // 2] * 5)] == [2, 2, 1]
    step = mix(requests=[(3, 1), (80, 1), (1, 1), (50, 1), (9, 1)])
    assert torch.allclose(step.run(WriteKv(), FAST), step.dense(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sinks": True}, "has no sinks"),
        ({"soft_cap": 30.0}, "has no soft cap"),
        ({"alibi": 8.0}, "has no slopes"),
        ({"sinks": False, "soft_cap": None}, ""),
    ],
)
def test_what_sdpa_lacks_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    for implementation in (DecodeAttention(), PrefillAttention()):
        support = implementation.supports(
            OpContext(device="cpu", dtype=torch.float32, options=options, regime="decode")
        )
        assert support.reasons == ((reason,) if reason else ())


def test_the_key_tiles_know_sinks_and_soft_caps(mix: Any) -> None:
    step = mix(requests=[(70, 1), (5, 6)], window=20)
    options = {"sinks": step.sinks, "soft_cap": 0.7}
    want = step.run(write_kv, paged_attention, **options)
    assert torch.allclose(step.run(WriteKv(), TiledAttention(), **options), want, rtol=0, atol=2e-6)


def test_a_cache_of_another_dtype_is_converted(mix: Any) -> None:

    step = mix(requests=[(10, 1), (3, 4)])
    batch, kv = step.build()
    half = StateView(kv.data.bfloat16(), 0)
    WriteKv()(step.new(step.k), step.new(step.v), half, batch)

    for regime, span in spans(batch):
        rows = step.q[span.rows.start : span.rows.stop]
        want = paged_attention(rows, half, batch, span, scale=0.25)
        for way in (FAST[regime], TiledAttention()):
            assert torch.allclose(way(rows, half, batch, span, scale=0.25), want, rtol=0, atol=2e-6)
