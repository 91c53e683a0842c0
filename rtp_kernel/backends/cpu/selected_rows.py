"""Deterministic attention to a selection and scores of runs: row after row, each from what it sees and nothing else.

Every product has shapes that follow from the row's index and selection alone, and operands that begin where an
allocation does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.backends.cpu.rows import Deterministic
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, attend, gather_kv, request_rows
from rtp_kernel.ops.block_index import run_scores
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
            options.get("alibi") is not None and "has no slopes",
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
        for request, rows in request_rows(batch, span):
            keys, values = gather_kv(kv, batch, request, range(batch.kv_lens[request]))
            for row in rows:
                index = int(batch.index[span.rows.start + row])
                tokens = [_tokens(places, tokens_per_place, index) for places in selection[row]]
                out[row] = _attend(q[row], keys, values, tokens, scale)
        return out


def _tokens(places: Tensor, tokens_per_place: int, index: int) -> Tensor:
    """Token indices of the places [k], up to `index`."""
    tokens = (places[places >= 0, None] * tokens_per_place + torch.arange(tokens_per_place)).flatten()
    return tokens[tokens <= index]


def _attend(q: Tensor, keys: Tensor, values: Tensor, tokens: Sequence[Tensor], scale: float) -> Tensor:
    """q [heads, D] over keys, values [S, kv heads, D], each group of heads at its `tokens` -> [heads, D]."""
    out, (kv_heads, groups) = torch.zeros_like(q), (keys.shape[1], len(tokens))
    shares = math.lcm(groups, kv_heads)
    for share, heads in enumerate(torch.arange(len(q)).chunk(shares)):
        own = tokens[share * groups // shares]
        if len(own):
            head, seen = share * kv_heads // shares, torch.ones(1, len(own), dtype=torch.bool)
            out[heads] = attend(
                q[None, heads], keys[own, head, None], values[own, head, None], seen, scale, None, None
            )[0]
    return out


class BlockIndexRows(Deterministic):
    """One query at a time."""

    name = "cpu_rows"

    def __call__(
        self, q: Tensor, view: StateView, batch: ForwardBatch, span: Span, *, size: int, local: int, plan: Any = None
    ) -> Tensor:
        parts = [(request, rows, batch.kv_lens[request]) for request, rows in request_rows(batch, span)]
        runs = max((-(-length // size) for *_, length in parts), default=0)
        out = torch.full((*q.shape[:2], runs), float("-inf"))
        for request, rows, length in parts:
            keys = gather_state(view, batch, request, range(length)).float()  # [S, D]
            for row in rows:
                index = batch.index[span.rows.start + row, None]
                scores = run_scores(q[row : row + 1].float().clone(), keys[: int(index) + 1], index, size, local)
                out[row, :, : scores.shape[-1]] = scores[0]
        return out
