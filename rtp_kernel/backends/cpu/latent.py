"""Latent attention and index scores on the CPU.

Decode takes all requests at once, absorbed: no loop over requests or heads. Other spans go request by request in the
form that costs least, a share of the heads or rows at a time, so that what is held beside the result stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.backends.cpu.attention import MAX_GATHERED, DecodeAttention, DecodeCall, decode_calls
from rtp_kernel.backends.cpu.blocks import RowIndex, gather
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, request_rows
from rtp_kernel.ops.latent_attention import LatentDims, expand
from rtp_kernel.ops.selection import selected
from rtp_kernel.ops.state import gather_state
from rtp_kernel.ops.token_index import token_scores
from rtp_kernel.registry import OpContext, Support

MAX_HELD = 1 << 25
"""Elements of a temporary: 128 MiB of float32."""


class LatentDecode:
    """One new token per request: every head's query meets the latents themselves, of all requests at once."""

    name = "cpu_latent_decode"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(*_common_reasons(context), context.regime != "decode" and "serves decode only")

    def plan(self, batch: ForwardBatch, view: StateView, span: Span, window: int | None) -> tuple[DecodeCall, ...]:
        """The calls that serve the span without a selection."""
        return DecodeAttention().plan(batch, view, span, window)

    def __call__(
        self,
        q: Tensor,
        view: StateView,
        batch: ForwardBatch,
        span: Span,
        up: Tensor,
        *,
        scale: float,
        selection: Tensor | None = None,
        plan: tuple[DecodeCall, ...] | None = None,
        **_: Any,
    ) -> Tensor:
        dims = LatentDims.of(q, up, view)
        if selection is not None:
            index = batch.index[span.rows.start : span.rows.stop]
            requests = batch.request[span.rows.start : span.rows.stop]
            return _of_selection(q, view, batch, requests, index, up, selection, scale)
        keys = absorb(q, up, dims)
        mixed = torch.zeros(*keys.shape[:2], dims.latent)
        for call in self.plan(batch, view, span, None) if plan is None else plan:
            rows = slice(None) if call.rows is None else call.rows
            latents = gather(view, call.index).view(-1, call.length, view.data.shape[-1]).float()
            hidden = None if call.mask is None else call.mask[:, 0, 0] < 0  # [n, length]
            mixed[rows] = mix(keys[rows], latents, hidden, scale, dims)
        return unabsorb(mixed, up, dims, q.dtype)


class LatentPrefill:
    """Any number of new tokens per request, request by request: expanded, absorbed, or over the selection alone."""

    name = "cpu_latent_prefill"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(*_common_reasons(context))

    def __call__(
        self,
        q: Tensor,
        view: StateView,
        batch: ForwardBatch,
        span: Span,
        up: Tensor,
        *,
        scale: float,
        selection: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        dims = LatentDims.of(q, up, view)
        out = q.new_zeros(*q.shape[:2], dims.value)
        for request, rows in request_rows(batch, span):
            part = slice(rows.start, rows.stop)
            index = batch.index[span.rows.start + rows.start : span.rows.start + rows.stop]
            chosen = None if selection is None else selection[part]
            form = cheapest(len(rows), batch.kv_lens[request], None if chosen is None else chosen.shape[-1], dims)
            if form == "selected":
                assert chosen is not None
                requests = index.new_full(index.shape, request)
                out[part] = _of_selection(q[part], view, batch, requests, index, up, chosen, scale)
                continue
            latents = gather_state(view, batch, request, range(batch.kv_lens[request]))
            attend = _expanded if form == "expanded" else _absorbed
            attend(out[part], q[part], latents, index, up, chosen, scale)
        return out


def cheapest(rows: int, places: int, chosen: int | None, dims: LatentDims) -> str:
    """The form of least multiplications for `rows` queries over `places` latents, of which each sees `chosen`, or all.

    Gathering a selection for each row costs about as much again as its products.
    """
    ends = (dims.nope + dims.value) * dims.latent
    head, latent = dims.nope + dims.rope + dims.value, 2 * dims.latent + dims.rope
    costs = {
        "expanded": places * ends + rows * places * head,
        "absorbed": rows * ends + rows * places * latent,
    }
    if chosen is not None:
        costs["selected"] = rows * ends + 2 * rows * min(chosen, places) * latent
    return min(costs, key=lambda form: costs[form])


def absorb(q: Tensor, up: Tensor, dims: LatentDims) -> Tensor:
    """Queries [N, heads, Dn + Dr] in terms of latents and shared keys: [N, heads, R + Dr] float32."""
    nope = torch.bmm(q[..., : dims.nope].transpose(0, 1), up[:, : dims.nope]).transpose(0, 1)  # [N, heads, R]
    return torch.cat((nope, q[..., dims.nope :]), dim=-1).float()


def unabsorb(mixed: Tensor, up: Tensor, dims: LatentDims, dtype: torch.dtype) -> Tensor:
    """Values [N, heads, Dv] of mixed latents [N, heads, R]."""
    values = torch.bmm(mixed.to(dtype).transpose(0, 1), up[:, dims.nope :].transpose(1, 2))
    return values.transpose(0, 1)


def mix(keys: Tensor, latents: Tensor, hidden: Tensor | None, scale: float, dims: LatentDims) -> Tensor:
    """Latents [n, heads, R] mixed by attention of keys [n, heads, R + Dr] over [n, S, R + Dr], all float32.

    `hidden` [n, S] bool; a row that sees nothing gives zeros.
    """
    scores = torch.bmm(keys, latents.transpose(1, 2)).mul_(scale)  # [n, heads, S]
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if hidden is not None:
        weights.masked_fill_(hidden.all(-1)[:, None, None], 0.0)
    return torch.bmm(weights, latents[..., : dims.latent])


def _of_selection(
    q: Tensor,
    view: StateView,
    batch: ForwardBatch,
    requests: Tensor,
    index: Tensor,
    up: Tensor,
    selection: Tensor,
    scale: float,
) -> Tensor:
    """Rows q [N, heads, Dn + Dr] of these requests over their selection alone, absorbed -> [N, heads, Dv]."""
    dims, table, size = LatentDims.of(q, up, view), batch.groups[view.group].block_table, view.data.shape[1]
    assert table is not None
    mixed = torch.zeros(*q.shape[:2], dims.latent)
    live = torch.nonzero(index >= 0)[:, 0]
    keys = absorb(q, up, dims)
    for rows in torch.split(live, max(1, MAX_GATHERED // max(1, selection.shape[-1]))):
        chosen = selection[rows, 0]  # [n, k]
        hidden = (chosen < 0) | (chosen > index[rows, None])
        places = chosen.masked_fill(hidden, 0)
        blocks = table[requests[rows]].long().gather(1, places // size)
        where = RowIndex.make(view.data, blocks.flatten(), (places % size).flatten())
        latents = gather(view, where).view(*chosen.shape, -1).float()
        mixed[rows] = mix(keys[rows], latents, hidden, scale, dims)
    return unabsorb(mixed, up, dims, q.dtype)


def _seen(index: Tensor, places: int, selection: Tensor | None) -> Tensor:
    """[n, places] bool: what rows at `index` see."""
    visible = torch.arange(places) <= index[:, None]
    return visible if selection is None else visible.logical_and_(selected(selection, places)[:, 0])


def _steps(rows: int, held: int) -> Iterator[slice]:
    """Slices of rows that hold `held` elements each, as many as may be held at once."""
    step = max(1, MAX_HELD // max(1, held))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _absorbed(
    out: Tensor, q: Tensor, latents: Tensor, index: Tensor, up: Tensor, selection: Tensor | None, scale: float
) -> None:
    dims = _dims(q, latents, up)
    latents = latents.float()[None]  # [1, S, R + Dr]
    keys, mixed = absorb(q, up, dims), torch.empty(*q.shape[:2], dims.latent)
    for rows in _steps(len(q), q.shape[1] * latents.shape[1]):
        hidden = ~_seen(index[rows], latents.shape[1], None if selection is None else selection[rows])
        flat = keys[rows].flatten(0, 1)[None]  # [1, rows * heads, R + Dr]
        by_head = hidden.repeat_interleave(q.shape[1], dim=0)
        scores = torch.bmm(flat, latents.transpose(1, 2))[0].mul_(scale).masked_fill_(by_head, float("-inf"))
        weights = torch.softmax(scores, dim=-1).masked_fill_(by_head.all(-1)[:, None], 0.0)
        mixed[rows] = torch.mm(weights, latents[0, :, : dims.latent]).view_as(mixed[rows])
    out.copy_(unabsorb(mixed, up, dims, q.dtype))


def _expanded(
    out: Tensor, q: Tensor, latents: Tensor, index: Tensor, up: Tensor, selection: Tensor | None, scale: float
) -> None:
    latents, places = latents.to(q.dtype), len(latents)
    whole = len(q) == places and selection is None  # then every row sees what stands before it
    for heads in _steps(q.shape[1], 2 * places * (q.shape[-1] + out.shape[-1])):
        keys, values = expand(latents, up[heads], q.shape[-1])
        for rows in [slice(0, len(q))] if whole else _steps(len(q), places):
            mask = None if whole else _seen(index[rows], places, None if selection is None else selection[rows])
            out[rows, heads] = _attend(q[rows, heads], keys, values, mask, scale)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [N, heads, D] over keys [S, heads, D], values [S, heads, Dv] -> [N, heads, Dv]; without a mask causally."""
    width, size = values.shape[-1], max(values.shape[-1], q.shape[-1])  # torch's fast form wants one size for all
    q, keys, values = (functional.pad(x, (0, size - x.shape[-1])).transpose(0, 1)[None] for x in (q, keys, values))
    out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)[
        0
    ]
    if mask is not None:
        out = out.masked_fill(~mask.any(-1)[:, None], 0.0)
    return out.transpose(0, 1)[..., :width]


def _dims(q: Tensor, latents: Tensor, up: Tensor) -> LatentDims:
    return LatentDims.of(q, up, StateView(latents[None], 0))


class IndexScoresDecode:
    """One new token per request: all requests at once."""

    name = "cpu_index_scores_decode"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(*_common_reasons(context), context.regime != "decode" and "serves decode only")

    def plan(self, batch: ForwardBatch, view: StateView, span: Span, window: int | None) -> tuple[DecodeCall, ...]:
        """The calls that serve the span; requests that have no entry yet are in none of them."""
        held = [batch.kv_lens[request] // view.tokens_per_entry for request in span.requests]
        live = [row for row, request in enumerate(span.requests) if batch.query_lens[request] and held[row]]
        lens = [held[row] for row in live]
        return decode_calls(batch, view, span, live, lens, lens)

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        view: StateView,
        batch: ForwardBatch,
        span: Span,
        *,
        scale: float,
        plan: tuple[DecodeCall, ...] | None = None,
    ) -> Tensor:
        calls = self.plan(batch, view, span, None) if plan is None else plan
        longest = max((call.length for call in calls), default=0)
        out = torch.full((len(q), 1, longest), float("-inf"))
        for call in calls:
            rows = slice(None) if call.rows is None else call.rows
            keys = gather(view, call.index).view(-1, call.length, view.data.shape[-1]).float()
            scores = token_scores(q[rows], keys, weights[rows], scale)
            if call.mask is not None:
                scores.masked_fill_(call.mask[:, 0, 0] < 0, float("-inf"))
            out[rows, 0, : call.length] = scores
        return out


def _common_reasons(context: OpContext) -> tuple[str | bool, ...]:
    return (
        context.device != "cpu" and "runs on the CPU only",
        context.deterministic and "its result for a row depends on the requests beside it",
    )
