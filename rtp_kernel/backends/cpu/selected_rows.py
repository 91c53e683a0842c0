"""Deterministic attention to a selection and scores of runs: row after row, each from what it sees and nothing else.

Every product has shapes that follow from the row's index and selection alone, and operands that begin where an
allocation does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.backends.cpu.rows import Deterministic
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, attend, gather_kv, request_rows
from rtp_kernel.ops.block_index import run_scores
from rtp_kernel.ops.latent_attention import row_parts
from rtp_kernel.ops.state import gather_state
from rtp_kernel.registry import OpContext, Support


class SelectedRows(Deterministic):
    """One query at a time, and there by heads that share both keys and selection."""

    name = "cpu_selected_rows"

    def supports(self, context: OpContext) -> Support:
        options = context.options
        return Support.unless(
            *super().supports(context).reasons,
            not options.get("selects") and "attends to a selection only",
            bool(options.get("sinks")) and "has no sinks",
            options.get("soft_cap") is not None and "has no soft cap",
            options.get("window") is not None and "has no window",
        )

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
        within = torch.arange(tokens_per_place)
        for request, rows in request_rows(batch, span):
            keys, values = gather_kv(kv, batch, request, range(batch.kv_lens[request]))
            for row in rows:
                index = batch.index[span.rows.start + row]
                for share in range(shares):
                    places = selection[row, share * selection.shape[1] // shares]
                    tokens = (places[places >= 0, None] * tokens_per_place + within).flatten()
                    tokens = tokens[tokens <= index]
                    head, heads = share * kv.data.shape[3] // shares, slice(share * each, (share + 1) * each)
                    if len(tokens):
                        seen = torch.ones(1, len(tokens), dtype=torch.bool)
                        own = keys[tokens, head, None], values[tokens, head, None]  # [tokens, 1, D]
                        out[row, heads] = attend(q[row : row + 1, heads].clone(), *own, seen, scale, None, None)[0]
        return out


class BlockIndexRows(Deterministic):
    """One query at a time."""

    name = "cpu_rows"

    def __call__(
        self, q: Tensor, view: StateView, batch: ForwardBatch, span: Span, *, size: int, local: int, plan: Any = None
    ) -> Tensor:
        parts = [(request, rows, batch.kv_lens[request]) for request, rows in row_parts(batch, span)]
        runs = max((-(-length // size) for *_, length in parts), default=0)
        out = torch.full((*q.shape[:2], runs), float("-inf"))
        for request, rows, length in parts:
            keys = gather_state(view, batch, request, range(length)).float()  # [S, D]
            for row in rows:
                index = batch.index[span.rows.start + row, None]
                scores = run_scores(q[row : row + 1].float().clone(), keys[: int(index) + 1], index, size, local)
                out[row, :, : scores.shape[-1]] = scores[0]
        return out
