"""Attention to a selection on the CPU through `scaled_dot_product_attention`.

Decode gathers what is selected and nothing else, for all requests at once. Other spans go request by request, and there
by heads that share both keys and selection, so that a mask is never larger than queries by keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.backends.cpu.attention import MAX_GATHERED
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, chosen_tokens, gather_kv, request_rows
from rtp_kernel.registry import OpContext, Support


class SelectedDecode:
    """One new token per request."""

    name = "cpu_selected_decode"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(*_common_reasons(context), context.regime != "decode" and "serves decode only")

    def __call__(
        self,
        q: Tensor,
        kv: StateView,
        batch: ForwardBatch,
        span: Span,
        *,
        scale: float,
        selection: Tensor,
        tokens_per_place: int = 1,
        **_: Any,
    ) -> Tensor:
        rows = slice(span.rows.start, span.rows.stop)
        index, requests = batch.index[rows], batch.request[rows]
        out = torch.zeros_like(q)
        step = max(1, MAX_GATHERED // max(1, selection.shape[-1] * tokens_per_place))
        for start in range(0, len(q), step):
            some = slice(start, start + step)
            tokens = selection[some, ..., None] * tokens_per_place + torch.arange(tokens_per_place)
            seen = (selection[some, ..., None] >= 0) & (tokens <= index[some, None, None, None])
            tokens, seen = tokens.flatten(2), seen.flatten(2)  # [n, groups, tokens]
            out[some] = _decode(q[some], kv, batch, requests[some], tokens.masked_fill(~seen, 0), seen, scale)
        return out


def _decode(
    q: Tensor, kv: StateView, batch: ForwardBatch, requests: Tensor, tokens: Tensor, seen: Tensor, scale: float
) -> Tensor:
    """q [n, heads, D] over token indices [n, groups, S] of its requests [n], where `seen` -> [n, heads, D]."""
    table = batch.groups[kv.group].block_table
    assert table is not None
    entries, kv_heads = kv.data.shape[1], kv.data.shape[3]
    shares = math.lcm(tokens.shape[1], kv_heads)
    repeat = shares // tokens.shape[1]
    tokens, seen = tokens.repeat_interleave(repeat, dim=1), seen.repeat_interleave(repeat, dim=1)  # [n, shares, S]
    blocks = table[requests].long()[:, None].expand(-1, shares, -1).gather(2, tokens // entries)
    head = torch.arange(shares)[:, None] * kv_heads // shares
    keys, values = kv.data[blocks, tokens % entries, :, head].to(q.dtype).unbind(3)  # each [n, shares, S, D]
    grouped = q.view(len(q), shares, -1, q.shape[-1])
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen.unsqueeze(2), scale=scale)
    return attended.masked_fill(~seen.any(-1)[..., None, None], 0.0).view_as(q)


class SelectedPrefill:
    """Any number of new tokens per request."""

    name = "cpu_selected_prefill"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(*_common_reasons(context))

    def __call__(
        self,
        q: Tensor,
        kv: StateView,
        batch: ForwardBatch,
        span: Span,
        *,
        scale: float,
        selection: Tensor,
        tokens_per_place: int = 1,
        **_: Any,
    ) -> Tensor:
        out = torch.zeros_like(q)
        shares = math.lcm(selection.shape[1], kv.data.shape[3])
        each = q.shape[1] // shares
        for request, rows in request_rows(batch, span):
            part, length = slice(rows.start, rows.stop), batch.kv_lens[request]
            place = torch.arange(length)
            index = batch.index[span.rows.start + rows.start : span.rows.start + rows.stop]
            keys, values = (held.to(q.dtype) for held in gather_kv(kv, batch, request, range(length)))
            for share in range(shares):
                heads = slice(share * each, (share + 1) * each)
                group, head = share * selection.shape[1] // shares, share * keys.shape[1] // shares
                chosen = chosen_tokens(selection[part, group, None], place, length, tokens_per_place)[:, 0]
                seen = chosen & (place <= index[:, None])  # [queries, keys]
                out[part, heads] = _prefill(q[part, heads], keys[:, head], values[:, head], seen, scale)
        return out


def _prefill(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [queries, heads, D] over one head of keys and values [keys, D], where `seen` -> [queries, heads, D]."""
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None, None], values[None, None], attn_mask=seen, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1).masked_fill(~seen.any(-1)[:, None, None], 0.0)


def _common_reasons(context: OpContext) -> tuple[str | bool, ...]:
    return (
        context.device != "cpu" and "runs on the CPU only",
        not context.options.get("selects") and "attends to a selection only",
        bool(context.options.get("sinks")) and "has no sinks",
        context.options.get("soft_cap") is not None and "has no soft cap",
        context.options.get("alibi") is not None and "has no slopes",
        context.options.get("window") is not None and "has no window",
        context.deterministic and "its result for a row depends on the queries beside it",
    )
