"""Scores by which an indexer chooses the runs of tokens that a query attends to (MiniMax-M3).

A request's tokens fall into runs of `size`, counted from its first token; a selection's places are runs.
"""

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


def block_index_scores(
    q: Tensor, view: StateView, batch: ForwardBatch, span: Span, *, size: int, local: int, plan: Any = None
) -> Tensor:
    """The best q . k of each run, in float32 -> [N, heads, runs]; -inf where a row sees no token of the run.

    q [N, heads, D] of the span's rows; the keys [D] of all tokens of their requests are in the state, already written.
    The run of a query and the `local` - 1 runs before it have the score +inf. Runs are those of the longest request
    with rows in the span. Rows are taken few at a time, so that beside the result no more than `MAX_PRODUCTS` numbers
    are held.
    """
    parts = [(request, rows, batch.kv_lens[request]) for request, rows in request_rows(batch, span)]
    runs = max((-(-length // size) for *_, length in parts), default=0)
    out = q.new_full((*q.shape[:2], runs), float("-inf"), dtype=torch.float32)
    for request, rows, length in parts:
        keys = gather_state(view, batch, request, range(length)).float()  # [S, D]
        step = max(1, MAX_PRODUCTS // (length * q.shape[1]))
        for start in range(rows.start, rows.stop, step):
            some = slice(start, min(start + step, rows.stop))
            index = batch.index[span.rows.start + some.start : span.rows.start + some.stop]
            scores = run_scores(q[some].float(), keys, index, size, local)
            out[some, :, : scores.shape[-1]] = scores
    return out


def run_scores(q: Tensor, keys: Tensor, index: Tensor, size: int, local: int) -> Tensor:
    """Scores [N, heads, runs] of q [N, heads, D] at places index [N] over keys [S, D], all of one request."""
    length = keys.shape[0]
    place = torch.arange(length, device=q.device)
    scores = torch.matmul(q, keys.t()).masked_fill_(place > index[:, None, None], float("-inf"))  # [N, heads, S]
    whole = functional.pad(scores, (0, -length % size), value=float("-inf"))
    scores = whole.view(*scores.shape[:2], -1, size).amax(-1)
    if local:
        nearest = (index // size)[:, None] - torch.arange(local, device=q.device)
        nearest = nearest.clamp(min=0)[:, None].expand(-1, q.shape[1], -1)
        scores.scatter_(-1, nearest, float("inf"))
    return scores
