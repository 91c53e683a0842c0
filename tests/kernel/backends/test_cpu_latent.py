"""Latent attention and index scores on the CPU: every form against the references over random steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rtp_kernel.backends.cpu import latent as backend
from rtp_kernel.backends.cpu.latent import IndexScoresDecode, LatentDecode, LatentPrefill, cheapest
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, spans
from rtp_kernel.ops.latent_attention import LatentDims, latent_attention
from rtp_kernel.ops.token_index import index_scores
from rtp_kernel.registry import OpContext

FAST: dict[str, Any] = {"decode": LatentDecode(), "verify": LatentPrefill(), "prefill": LatentPrefill()}
WAYS = {"decode and prefill": FAST, "prefill only": dict.fromkeys(FAST, LatentPrefill())}
FORMS = ("expanded", "absorbed", "selected")

decode = st.tuples(st.integers(0, 90), st.just(1))
chunk = st.tuples(st.integers(0, 40), st.integers(2, 40))
steps = st.fixed_dictionaries(
    {
        "requests": st.tuples(st.lists(decode, max_size=5), st.lists(chunk, max_size=3)).map(
            lambda parts: [*parts[0], *parts[1]]
        ),
        "padding": st.integers(0, 3),
        "block_size": st.sampled_from([1, 3, 16]),
        "gap": st.sampled_from([0, 64, 7]),
        "seed": st.integers(0, 1000),
    }
)
sizes = st.sampled_from([(4, 32, 16, 8, 16), (3, 20, 10, 6, 24), (5, 24, 16, 2, 6), (1, 8, 4, 0, 4)])


@dataclass(frozen=True)
class Drawn:
    """A step of `Mix` with all its latents written, the rest of the state filled with `poison`."""

    step: Any
    heads: int
    width: int
    up: Tensor
    query_dim: int
    order: int = 0
    poison: float = 0.0

    @classmethod
    def of(cls, step: Any, sizes: tuple[int, int, int, int, int], **more: Any) -> Drawn:
        heads, rank, nope, rope, value = sizes
        draw = torch.Generator().manual_seed(step.seed)
        up = torch.randn(heads, nope + value, rank, generator=draw) * rank**-0.5
        return cls(step, heads, rank + rope, up, nope + rope, **more)

    def build(self) -> tuple[ForwardBatch, StateView]:
        batch, kv = self.step.build(self.order)
        blocks, size = kv.data.shape[:2]
        stride = size * self.width + self.step.gap
        data = torch.full((blocks * stride,), self.poison).as_strided(
            (blocks, size, self.width), (stride, self.width, 1)
        )
        draw = torch.Generator().manual_seed(self.step.seed + 1)
        table = batch.groups[0].block_table
        assert table is not None
        for request, (held, new) in enumerate(self.step.requests):
            place = torch.arange(held + new)
            latents = torch.randn(held + new, self.width, generator=draw)
            data[table[request, place // size].long(), place % size] = latents
        return batch, StateView(data, 0)

    def queries(self) -> Tensor:
        draw = torch.Generator().manual_seed(self.step.seed + 2)
        return torch.randn(self.step.num_tokens, self.heads, self.query_dim, generator=draw)

    def selection(self, k: int) -> Tensor:
        """Random places [T, 1, k], some invisible, some -1; the row's own always among them."""
        batch, _ = self.build()
        draw = torch.Generator().manual_seed(self.step.seed + 3)
        rows = []
        for index in batch.index.tolist():
            places = torch.randperm(max(index, 0) + 3, generator=draw)[: max(0, k - 1)]
            rows.append([index, *(place if place <= index else -1 for place in places.tolist() if place != index)])
        width = max((len(row) for row in rows), default=1)
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.long)[:, None]

    def attend(self, ops: Any, selection: Tensor | None = None) -> Tensor:
        batch, view = self.build()
        q = self.queries()
        return self.over_spans(
            batch,
            lambda regime, span, rows: (ops[regime] if isinstance(ops, dict) else ops)(
                q[rows], view, batch, span, self.up, scale=0.2, selection=None if selection is None else selection[rows]
            ),
        )

    def over_spans(self, batch: ForwardBatch, call: Callable[[str, Span, slice], Tensor]) -> Tensor:
        parts = [call(regime, span, slice(span.rows.start, span.rows.stop)) for regime, span in spans(batch)]
        return torch.cat(parts) if parts else torch.zeros(0)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(step=steps, sizes=sizes, k=st.sampled_from([None, 1, 4, 200]))
def test_agrees_with_the_reference_on_any_step(
    mix: Any, way: str, step: dict[str, Any], sizes: tuple[int, int, int, int, int], k: int | None
) -> None:
    drawn = Drawn.of(mix(**step), sizes)
    selection = None if k is None else drawn.selection(k)
    want = drawn.attend(latent_attention, selection)
    assert torch.allclose(drawn.attend(WAYS[way], selection), want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("held", [1, 50, 1 << 25])
def test_every_form_in_any_number_of_parts(
    mix: Any, monkeypatch: pytest.MonkeyPatch, form: str, k: int | None, held: int
) -> None:
    step = mix(requests=[(10, 1), (0, 1), (33, 1), (5, 6), (0, 9)], padding=2, block_size=3)
    drawn = Drawn.of(step, (3, 20, 10, 6, 24))
    selection = None if k is None else drawn.selection(k)
    monkeypatch.setattr(backend, "cheapest", lambda *_: "expanded" if form == "selected" and k is None else form)
    monkeypatch.setattr(backend, "MAX_HELD", held)
    monkeypatch.setattr(backend, "MAX_GATHERED", held)
    want = drawn.attend(latent_attention, selection)
    assert torch.allclose(drawn.attend(LatentPrefill(), selection), want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("gap", [0, 7])
def test_nothing_foreign_is_read(mix: Any, way: str, k: int | None, gap: int) -> None:
    step = mix(requests=[(10, 1), (0, 1), (33, 1), (5, 6), (0, 9)], padding=2, gap=gap)
    sizes = (3, 20, 10, 6, 24)
    clean = Drawn.of(step, sizes)
    selection = None if k is None else clean.selection(k)
    want = clean.attend(WAYS[way], selection)
    assert bool(torch.isfinite(want).all()) and not bool(want[-2:].any())
    for order in (0, 3):
        poisoned = Drawn.of(step, sizes, poison=float("nan"), order=order)
        assert torch.equal(poisoned.attend(WAYS[way], selection), want)


def test_a_row_that_may_see_nothing_gives_zeros(mix: Any) -> None:
    drawn = Drawn.of(mix(requests=[(10, 1), (5, 6)]), (3, 20, 10, 6, 24))
    selection = drawn.selection(4)
    selection[0], selection[3] = -1, -1
    got = drawn.attend(FAST, selection)
    assert torch.allclose(got, drawn.attend(latent_attention, selection), rtol=0, atol=3e-6)
    assert not bool(got[0].any()) and not bool(got[3].any())


@pytest.mark.parametrize("regime", ["decode", "prefill"])
def test_bfloat16_stays_near_the_reference(mix: Any, regime: str) -> None:
    step = mix(requests=[(40, 1), (33, 1)], decodes=None if regime == "decode" else 0)
    drawn = Drawn.of(step, (4, 32, 16, 8, 16))
    batch, view = drawn.build()
    exact = drawn.attend(latent_attention)
    half = Drawn(step, drawn.heads, drawn.width, drawn.up.bfloat16(), drawn.query_dim)
    q, narrow = half.queries().bfloat16(), StateView(view.data.bfloat16(), 0)
    span = spans(batch)[0][1]
    got = FAST[regime](q, narrow, batch, span, half.up, scale=0.2)
    assert got.dtype == torch.bfloat16
    assert (got.float() - exact).abs().max() < 0.03 * exact.abs().max()


@settings(max_examples=25, deadline=None)
@given(step=steps, sizes=sizes, ratio=st.sampled_from([1, 1, 4]))
def test_index_scores_are_the_references(
    mix: Any, step: dict[str, Any], sizes: tuple[int, int, int, int, int], ratio: int
) -> None:
    """Also of entries that stand for several tokens, of which a short request has none yet."""
    drawn = Drawn.of(mix(**step | {"requests": [request for request in step["requests"] if request[1] == 1]}), sizes)
    batch, view = drawn.build()
    view = StateView(view.data, 0, tokens_per_entry=ratio)
    q = torch.randn(drawn.step.num_tokens, 7, drawn.width)
    weights = torch.randn(drawn.step.num_tokens, 7)
    for regime, span in spans(batch):
        rows = slice(span.rows.start, span.rows.stop)
        want = index_scores(q[rows], weights[rows], view, batch, span, scale=0.3)
        if regime == "decode":
            got = IndexScoresDecode()(q[rows], weights[rows], view, batch, span, scale=0.3)
            assert got.shape == want.shape and torch.equal(got == float("-inf"), want == float("-inf"))
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_forms_are_taken_where_they_are_cheap() -> None:
    dims = LatentDims(512, 64, 128, 128)
    assert cheapest(4096, 4096, None, dims) == "expanded"
    assert cheapest(4, 4096, None, dims) == "absorbed"
    assert cheapest(1, 65536, 2048, dims) == "selected"
    assert cheapest(2048, 4096, 2048, dims) == "expanded"


def test_where_they_serve() -> None:
    def context(**more: Any) -> OpContext:
        options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "regime": "prefill"}
        return OpContext(**options | more)

    assert LatentPrefill().supports(context()).ok
    for refused in (context(device="cuda"), context(deterministic=True)):
        assert not LatentPrefill().supports(refused).ok
    for form in (LatentDecode(), IndexScoresDecode()):
        assert form.supports(context(regime="decode")).ok and not form.supports(context()).ok
