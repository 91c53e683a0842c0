"""Attention over packed tokens whose keys and values lie in blocks.

q is [N, heads, D]; a paged state is a `StateView` of [blocks, entries, 2, kv heads, D] (keys first). A query at index i
sees keys j <= i of its own request, with a window w only j > i - w. Padding rows write nothing and come out as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.selection import selected
from rtp_kernel.ops.state import gather_state, write_state


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive requests of a batch, and the token rows that an op is given for them (padding rows may follow)."""

    requests: range
    rows: range


def spans(batch: ForwardBatch) -> tuple[tuple[str, Span], ...]:
    """The regimes of a step with their spans: decode (one token each) or verify (1 + drafts), then prefill."""
    split, decodes = batch.num_decode_tokens, batch.num_decodes
    found = []
    if split:
        regime = "decode" if split == decodes else "verify"
        found.append((regime, Span(range(decodes), range(split))))
    if split < batch.num_tokens:
        found.append(("prefill", Span(range(decodes, batch.num_requests), range(split, batch.num_tokens))))
    return tuple(found)


def write_kv(k: Tensor, v: Tensor, kv: StateView, batch: ForwardBatch, *, plan: Any = None) -> None:
    """Put k and v [T, kv heads, D] where the step's slot mapping says; rows mapped to -1 write nothing."""
    write_state(torch.stack((k, v), dim=1), kv, batch)


def paged_attention(
    q: Tensor,
    kv: StateView,
    batch: ForwardBatch,
    span: Span,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    selection: Tensor | None = None,
    tokens_per_place: int = 1,
    slopes: Tensor | None = None,
    slope_scale: float = 1.0,
    plan: Any = None,
) -> Tensor:
    """Attention of the span's rows q [N, heads, D] over their requests' keys, which have been written -> [N, heads, D].

    Heads share keys in groups of heads / kv heads. `soft_cap` c bends the scores to c tanh(score / c); `sinks` [heads]
    are one more logit in each softmax, with no value. `slopes` [heads] times the key's index, in the slopes' dtype,
    times `slope_scale` is added to the scores (ALiBi). Scores and sums are float32. With a `selection` int64
    [N, groups, k] of places (heads share them in groups of heads / groups), a query sees only tokens of its places,
    each `tokens_per_place` tokens from a multiple of that on; a query that sees none comes out as zeros.
    """
    out = torch.zeros_like(q)
    for request, rows in request_rows(batch, span):
        index = batch.index[rows.start + span.rows.start : rows.stop + span.rows.start]
        first = 0 if window is None else max(0, batch.kv_lens[request] - len(rows) - window + 1)
        keys, values = gather_kv(kv, batch, request, range(first, batch.kv_lens[request]))
        place = torch.arange(first, batch.kv_lens[request], device=q.device)
        visible = place <= index[:, None]  # [rows, keys]
        if window is not None:
            visible &= place > index[:, None] - window
        part = slice(rows.start, rows.stop)
        if selection is not None:
            visible = visible[:, None] & chosen_tokens(selection[part], place, batch.kv_lens[request], tokens_per_place)
        bias = None if slopes is None else key_bias(slopes, place, slope_scale)
        out[part] = attend(q[part], keys, values, visible, scale, sinks, soft_cap, bias)
    return out


def chosen_tokens(selection: Tensor, tokens: Tensor, length: int, tokens_per_place: int) -> Tensor:
    """[N, groups, S] bool: whether the selection [N, groups, k] holds the places of tokens [S], all below `length`."""
    held = selected(selection, -(-length // tokens_per_place))  # [N, groups, places]
    return held[..., tokens // tokens_per_place]


def request_rows(batch: ForwardBatch, span: Span) -> Iterator[tuple[int, range]]:
    """Requests with rows in the span, and these rows from the span's first on; a span may begin inside a request."""
    stop = 0
    for request, length in enumerate(batch.query_lens[: span.requests.stop]):
        start, stop = stop, stop + length
        first, last = max(start, span.rows.start), min(stop, span.rows.stop)
        if first < last:
            yield request, range(first - span.rows.start, last - span.rows.start)


def gather_kv(kv: StateView, batch: ForwardBatch, request: int, tokens: range) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, kv heads, D] of the request's token indices; only the blocks that hold them are read."""
    gathered = gather_state(kv, batch, request, tokens)
    return gathered[:, 0], gathered[:, 1]


def alibi_slopes(heads: int, bias_max: float = 8.0) -> Tensor:
    """The slopes [heads] float32 of ALiBi (Press et al., 2022): 2^(-bias_max i / n) for i = 1 .. n, n a power of two.

    Other numbers of heads take the slopes of the power of two below, then every second one of the power above.
    """
    below = 2 ** math.floor(math.log2(heads))
    exponents = [bias_max * i / below for i in range(1, below + 1)]
    exponents += [bias_max * i / (2 * below) for i in range(1, 2 * (heads - below), 2)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)


def key_bias(slopes: Tensor, place: Tensor, scale: float = 1.0) -> Tensor:
    """Slopes [heads] times the index of keys [S], rounded to the slopes' dtype, times `scale` -> [heads, S] float32.

    Softmax does not see what all keys of a query share, so this is as good as the distance from the query.
    """
    return (slopes[:, None] * place.to(slopes.dtype)).float() * scale


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    sinks: Tensor | None,
    soft_cap: float | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of q [N, heads, D] over k, v [S, kv heads, D]; visible [N, S] or [N, groups, S]; bias [heads, S]."""
    grouped = q.float().view(q.shape[0], k.shape[1], -1, q.shape[-1])  # [N, kv, group, D]
    scores = torch.einsum("nkgd,skd->nkgs", grouped, k.float()) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.view(k.shape[1], -1, bias.shape[-1])
    hidden = ~_per_head(visible, q.shape[1], k.shape[1])
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, k.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    if visible.dim() == 3:
        weights = weights.masked_fill(hidden, 0.0)  # where all is hidden, the softmax has no value
    return torch.einsum("nkgs,skd->nkgd", weights, v.float()).flatten(1, 2).to(q.dtype)


def _per_head(visible: Tensor, heads: int, kv_heads: int) -> Tensor:
    """visible [N, S] or [N, groups, S] as [N, kv heads or 1, heads of a kv head or 1, S]."""
    if visible.dim() == 2:
        return visible[:, None, None]
    if visible.shape[1] in (1, kv_heads):
        return visible.unsqueeze(2)
    each = visible.repeat_interleave(heads // visible.shape[1], dim=1)  # [N, heads, S]
    return each.view(len(each), kv_heads, -1, each.shape[-1])
