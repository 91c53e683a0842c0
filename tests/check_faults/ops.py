"""Attention ops with one fault each; every one leaves the rest to the plain reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, gather_kv, paged_attention, request_rows
from rtp_kernel.registry import OpContext, Support


class FaultyAttention:
    """Serves every context; subclasses change what is passed on."""

    name = "faulty"
    regimes: tuple[str, ...] = ("decode", "verify", "prefill")

    def supports(self, context: OpContext) -> Support:
        return Support(context.regime in self.regimes)

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        options.pop("plan", None)
        return paged_attention(q, kv, batch, span, **options)


class OneMoreInDecode(FaultyAttention):
    """A window that sees one token more, in decode steps only."""

    regimes = ("decode",)

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        window = options["window"]
        return super().__call__(q, kv, batch, span, **(options | {"window": window and window - 1}))


class BlindToEarlierChunks(FaultyAttention):
    """A prefill chunk that sees itself alone."""

    regimes = ("prefill",)

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        longest = max(batch.query_lens[request] for request in span.requests)
        whole = all(batch.query_lens[request] == batch.kv_lens[request] for request in span.requests)
        window = options["window"] if whole else min(options["window"] or math.inf, longest)
        return super().__call__(q, kv, batch, span, **(options | {"window": window}))


class TiledHeads(FaultyAttention):
    """Query head h shares the keys of head h mod kv heads, not h // group."""

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        groups = q.shape[1] // kv.data.shape[3]
        order = torch.arange(q.shape[1]).view(groups, -1).T.flatten()
        output = super().__call__(q[:, order], kv, batch, span, **options)
        return output[:, order.argsort()]


class NarrowSoftmax(FaultyAttention):
    """The softmax in bfloat16."""

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        out = torch.zeros_like(q)
        for request, rows in request_rows(batch, span):
            keys, values = gather_kv(kv, batch, request, range(batch.kv_lens[request]))
            index = batch.index[rows.start + span.rows.start : rows.stop + span.rows.start]
            visible = torch.arange(len(keys)) <= index[:, None]
            group = q.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("nhd,shd->nhs", q[rows.start : rows.stop], keys) * options["scale"]
            weights = self.softmax(scores.masked_fill(~visible[:, None], -math.inf)).to(q)
            out[rows.start : rows.stop] = torch.einsum("nhs,shd->nhd", weights, values)
        return out

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.bfloat16().softmax(-1)


class BlindInCompany(FaultyAttention):
    """A decoding request does not see its latest token when a prefill chunk is in the step."""

    regimes = ("decode",)

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        if batch.num_requests > batch.num_decodes:
            batch = replace(batch, index=batch.index - 1)
        return super().__call__(q, kv, batch, span, **options)
