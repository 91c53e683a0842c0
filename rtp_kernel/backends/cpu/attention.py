"""Paged attention on the CPU through `scaled_dot_product_attention`.

Decode gathers the keys of all requests of similar length at once and folds each group of query heads into rows: no
Python loop over requests or heads. Prefill takes the requests one by one, their queries at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.backends.cpu.blocks import RowIndex, gather, scatter_kv
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, request_rows
from rtp_kernel.registry import OpContext, Support

MAX_GATHERED = 1 << 16
"""Tokens whose keys one decode call gathers at most; bounds the copy."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where the step's tokens are written; `tokens` [N] selects those that write, None = all."""

    index: RowIndex
    tokens: Tensor | None


class WriteKv:
    """Writes keys and values by rows; the places are computed once per step."""

    name = "cpu_rows"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(context.device != "cpu" and "runs on the CPU only")

    def plan(self, batch: ForwardBatch, kv: StateView, span: Span | None, window: int | None) -> WritePlan:
        """The rows of the slot mapping that write, and where."""
        slots = batch.groups[kv.group].slot_mapping[kv.tokens_per_entry]
        tokens = None
        if bool((slots < 0).any()):
            tokens = torch.nonzero(slots >= 0).squeeze(-1)
            slots = slots[tokens]
        entries = kv.data.shape[1]
        return WritePlan(RowIndex.make(kv.data, slots // entries, slots % entries), tokens)

    def __call__(
        self, k: Tensor, v: Tensor, kv: StateView, batch: ForwardBatch, *, plan: WritePlan | None = None
    ) -> None:
        plan = plan or self.plan(batch, kv, None, None)
        if plan.tokens is not None:
            k, v = k[plan.tokens], v[plan.tokens]
        scatter_kv(kv, plan.index, k, v)


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """Requests of similar length that one attention call serves."""

    rows: Tensor | None
    """[n] rows of q; None = all, in order."""
    index: RowIndex
    """Of n * length entries, request by request; shorter requests repeat their last token."""
    length: int
    mask: Tensor | None
    """[n, 1, 1, length] in the state's dtype, -inf on the repeats; None when there are none."""


class DecodeAttention:
    """One new token per request: all requests at once, the group of query heads folded into rows."""

    name = "cpu_decode_sdpa"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(*_common_reasons(context), context.regime != "decode" and "serves decode only")

    def plan(self, batch: ForwardBatch, kv: StateView, span: Span, window: int | None) -> tuple[DecodeCall, ...]:
        """The calls that serve the span, split where padding to the longest request would double the work."""
        live = [row for row, request in enumerate(span.requests) if batch.query_lens[request]]
        lens = [batch.kv_lens[span.requests[row]] for row in live]
        seen = lens if window is None else [min(length, window) for length in lens]
        return decode_calls(batch, kv, span, live, lens, seen)

    def __call__(
        self,
        q: Tensor,
        kv: StateView,
        batch: ForwardBatch,
        span: Span,
        *,
        scale: float,
        window: int | None = None,
        plan: tuple[DecodeCall, ...] | None = None,
        **_: Any,
    ) -> Tensor:
        calls = self.plan(batch, kv, span, window) if plan is None else plan
        if len(calls) == 1 and calls[0].rows is None:
            return _decode(q, kv, calls[0], scale)
        out = torch.zeros_like(q)
        for call in calls:
            out[call.rows] = _decode(q[call.rows], kv, call, scale)
        return out


def decode_calls(
    batch: ForwardBatch, view: StateView, span: Span, live: Sequence[int], lens: Sequence[int], seen: Sequence[int]
) -> tuple[DecodeCall, ...]:
    """Calls for the span's rows `live`, each of which sees the last `seen` of its request's first `lens` entries."""
    table = batch.groups[view.group].block_table
    assert table is not None
    calls = []
    for bucket in _buckets(seen):
        rows = [live[place] for place in bucket]
        whole = rows == list(range(len(span.rows)))
        requests = torch.tensor([span.requests[row] for row in rows])
        ends, counts = torch.tensor([lens[place] for place in bucket]), [seen[place] for place in bucket]
        calls.append(_decode_call(view.data, table[requests], ends, counts, None if whole else torch.tensor(rows)))
    return tuple(calls)


def _buckets(lens: Sequence[int]) -> list[list[int]]:
    """Places of the lengths in buckets whose shortest is at least half the longest; a single one keeps their order."""
    if not lens:
        return []
    if min(lens) * 2 >= max(lens) and max(lens) * len(lens) <= MAX_GATHERED:
        return [list(range(len(lens)))]
    buckets: list[list[int]] = []
    for place in sorted(range(len(lens)), key=lambda place: -lens[place]):
        longest = lens[buckets[-1][0]] if buckets else 0
        if not buckets or lens[place] * 2 < longest or longest * (len(buckets[-1]) + 1) > MAX_GATHERED:
            buckets.append([])
        buckets[-1].append(place)
    return buckets


def _decode_call(data: Tensor, table: Tensor, ends: Tensor, counts: Sequence[int], rows: Tensor | None) -> DecodeCall:
    """For requests with block tables [n, blocks] and lengths `ends` [n], whose last `counts` tokens are seen."""
    length = max(counts)
    firsts = ends - torch.tensor(counts)
    place = firsts[:, None] + torch.arange(length)  # [n, length]
    mask = None
    if min(counts) < length:
        mask = torch.zeros(place.shape, dtype=data.dtype).masked_fill_(place >= ends[:, None], float("-inf"))[
            :, None, None
        ]
        place = torch.minimum(place, ends[:, None] - 1)
    entries = data.shape[1]
    blocks = table.long().gather(1, place // entries)
    return DecodeCall(rows, RowIndex.make(data, blocks.flatten(), (place % entries).flatten()), length, mask)


def _decode(q: Tensor, kv: StateView, call: DecodeCall, scale: float) -> Tensor:
    """q [n, heads, D] -> [n, heads, D]."""
    num_kv, dim = kv.data.shape[-2:]
    gathered = gather(kv, call.index).view(-1, call.length, 2, num_kv, dim)
    if gathered.dtype != q.dtype:
        gathered = gathered.to(q.dtype)
    keys, values = gathered.transpose(1, 3).unbind(2)  # each [n, kv, length, D]
    mask = None if call.mask is None else call.mask.to(q.dtype)
    grouped = q.view(q.shape[0], num_kv, -1, dim)  # [n, kv, group, D]
    out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(q.shape)


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """One request's queries."""

    rows: slice
    index: RowIndex
    causal: bool
    """Queries and keys are the same tokens, all seen causally; else `mask` [queries, keys] bool says what is seen."""
    mask: Tensor | None


class PrefillAttention:
    """Any number of new tokens per request, request by request."""

    name = "cpu_prefill_sdpa"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(*_common_reasons(context))

    def plan(self, batch: ForwardBatch, kv: StateView, span: Span, window: int | None) -> tuple[PrefillCall, ...]:
        """Each request's keys (only those that some query sees) and mask."""
        table = batch.groups[kv.group].block_table
        assert table is not None
        calls = []
        for request, rows in request_rows(batch, span):
            end = batch.kv_lens[request]
            start = end - len(rows)
            first = 0 if window is None else max(0, start - window + 1)
            place, queries = torch.arange(first, end), torch.arange(start, end)[:, None]
            causal = start == 0 and (window is None or window >= end)
            mask = None if causal else place <= queries
            if mask is not None and window is not None:
                mask &= place > queries - window
            entries = kv.data.shape[1]
            index = RowIndex.make(kv.data, table[request].long()[place // entries], place % entries)
            calls.append(PrefillCall(slice(rows.start, rows.stop), index, causal, mask))
        return tuple(calls)

    def __call__(
        self,
        q: Tensor,
        kv: StateView,
        batch: ForwardBatch,
        span: Span,
        *,
        scale: float,
        window: int | None = None,
        plan: tuple[PrefillCall, ...] | None = None,
        **_: Any,
    ) -> Tensor:
        calls = self.plan(batch, kv, span, window) if plan is None else plan
        parts = [_prefill(q[call.rows], kv, call, scale) for call in calls]
        done = calls[-1].rows.stop if calls else 0
        if done < q.shape[0]:
            parts.append(torch.zeros_like(q[done:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefill(q: Tensor, kv: StateView, call: PrefillCall, scale: float) -> Tensor:
    """q [queries, heads, D] -> [queries, heads, D]."""
    gathered = gather(kv, call.index).to(q.dtype)  # [keys, 2, kv, D]
    keys, values = gathered.permute(1, 2, 0, 3).unsqueeze(1)  # each [1, kv, keys, D]
    grouped = q.shape[1] != kv.data.shape[-2]
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=call.mask,
        is_causal=call.causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return out[0].transpose(0, 1)


def _common_reasons(context: OpContext) -> tuple[str | bool, ...]:
    return (
        context.device != "cpu" and "runs on the CPU only",
        bool(context.options.get("sinks")) and "has no sinks",
        context.options.get("soft_cap") is not None and "has no soft cap",
        context.options.get("alibi") is not None and "has no slopes",
        bool(context.options.get("selects")) and "attends to every token that is visible",
        context.deterministic and "its result for a row depends on the padding to the longest request",
    )
