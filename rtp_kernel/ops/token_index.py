"""Scores by which an indexer chooses what a query attends to: tokens (DeepSeek sparse attention) or windows of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, request_rows
from rtp_kernel.ops.state import gather_state

MAX_PRODUCTS = 1 << 24
"""Products of query heads and keys that are held at once: 64 MiB of float32."""


def index_scores(
    q: Tensor,
    weights: Tensor,
    view: StateView,
    batch: ForwardBatch,
    span: Span,
    *,
    scale: float,
    plan: Any = None,
) -> Tensor:
    """sum over heads of weights * relu(q . k * scale), in float32 -> [N, 1, places]; -inf where a row cannot see.

    q [N, heads, D] and weights [N, heads] float32 of the span's rows; the keys [D] of all tokens of their requests are
    in the state, already written. Places are token indices, up to the longest request with rows in the span; of a state
    with r > 1 tokens per entry they are entry indices, and a row sees the entries whose last token it has reached. Rows
    are taken few at a time, so that beside the result no more than `MAX_PRODUCTS` numbers are held.
    """
    ratio = view.tokens_per_entry
    parts = [(request, rows, batch.kv_lens[request] // ratio) for request, rows in request_rows(batch, span)]
    out = q.new_full((len(q), 1, max((length for *_, length in parts), default=0)), float("-inf"), dtype=torch.float32)
    for request, rows, length in parts:
        keys = gather_state(view, batch, request, range(length)).float()  # [S, D]
        place = torch.arange(length, device=q.device)
        step = max(1, MAX_PRODUCTS // max(1, length * q.shape[1]))
        for start in range(rows.start, rows.stop, step):
            some = slice(start, min(start + step, rows.stop))
            index = batch.index[span.rows.start + some.start : span.rows.start + some.stop, None]
            scores = token_scores(q[some], keys, weights[some], scale)
            out[some, 0, :length] = scores.masked_fill_(place >= (index + 1) // ratio, float("-inf"))
    return out


def token_scores(q: Tensor, keys: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Scores [N, S] of q [N, heads, D] on keys [S, D], or each row's own [N, S, D], float32; weights [N, heads]."""
    products = torch.matmul(q.float(), keys.transpose(-1, -2)).mul_(scale)  # [N, heads, S]
    return torch.matmul(weights[:, None], functional.relu(products, inplace=True))[:, 0]
