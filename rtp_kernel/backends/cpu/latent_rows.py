"""Deterministic latent attention and index scores: row after row, each from what it sees and nothing else.

Every product has shapes that follow from the row's index alone, and operands that begin where an allocation does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.backends.cpu.latent import absorb, mix, unabsorb
from rtp_kernel.backends.cpu.rows import Deterministic
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, request_rows
from rtp_kernel.ops.latent_attention import LatentDims
from rtp_kernel.ops.state import gather_state
from rtp_kernel.ops.token_index import token_scores


class LatentRows(Deterministic):
    """One query at a time, absorbed."""

    name = "cpu_rows"

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
        for row, latents in _rows(view, batch, span):
            if selection is not None:
                chosen = selection[row, 0]
                latents = latents[chosen[(chosen >= 0) & (chosen < len(latents))]]
            if len(latents):
                keys = absorb(q[row : row + 1].clone(), up, dims)
                out[row] = unabsorb(mix(keys, latents[None], None, scale, dims), up, dims, q.dtype)[0]
        return out


class IndexScoreRows(Deterministic):
    """One query at a time."""

    name = "cpu_rows"

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        view: StateView,
        batch: ForwardBatch,
        span: Span,
        *,
        scale: float,
        plan: Any = None,
    ) -> Tensor:
        lens = [batch.kv_lens[request] // view.tokens_per_entry for request, _ in request_rows(batch, span)]
        out = torch.full((len(q), 1, max(lens, default=0)), float("-inf"))
        for row, keys in _rows(view, batch, span):
            one = slice(row, row + 1)
            if len(keys):
                out[row, 0, : len(keys)] = token_scores(q[one].clone(), keys, weights[one].clone(), scale)[0]
        return out


def _rows(view: StateView, batch: ForwardBatch, span: Span) -> Iterator[tuple[int, Tensor]]:
    """The span's real rows, counted from its first, each with the entries that it sees, in float32."""
    for request, rows in request_rows(batch, span):
        entries = gather_state(view, batch, request, range(batch.kv_lens[request] // view.tokens_per_entry)).float()
        for row in rows:
            yield row, entries[: (int(batch.index[span.rows.start + row]) + 1) // view.tokens_per_entry]
