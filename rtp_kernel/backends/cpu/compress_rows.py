"""Deterministic compressed context: window after window and query after query, each from what it holds or sees alone.

Every product and softmax has a shape that follows from the token's index alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.backends.cpu.rows import Deterministic
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, request_rows
from rtp_kernel.ops.compress import attend, each_window, entry_keys, pooled, recent_keys


class CompressRows(Deterministic):
    """One window at a time."""

    name = "cpu_rows"

    def __call__(
        self,
        kv: Tensor,
        gate: Tensor,
        bias: Tensor,
        kv_buffer: StateView,
        gate_buffer: StateView,
        batch: ForwardBatch,
        *,
        ratio: int,
        overlap: bool,
    ) -> Tensor:
        def pool(kvs: Tensor, gates: Tensor) -> Tensor:
            windows = zip(torch.split(kvs, 1), torch.split(gates, 1), strict=True)
            return torch.cat([pooled(one.contiguous(), other.contiguous(), bias, overlap) for one, other in windows])

        return each_window(kv, gate, kv_buffer, gate_buffer, batch, ratio, overlap, pool)


class CompressedAttentionRows(Deterministic):
    """One query at a time."""

    name = "cpu_rows"

    def __call__(
        self,
        q: Tensor,
        kv: StateView,
        batch: ForwardBatch,
        span: Span,
        *,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
        entries: StateView | None = None,
        selection: Tensor | None = None,
    ) -> Tensor:
        out = torch.zeros_like(q)
        for request, rows in request_rows(batch, span):
            for row in rows:
                one = slice(row, row + 1)
                index = batch.index[span.rows.start + row : span.rows.start + row + 1]
                seen = [recent_keys(kv, batch, request, index, window)]
                if entries is not None:
                    chosen = None if selection is None else selection[one, 0]
                    if chosen is not None:
                        closed = (int(index[0]) + 1) // entries.tokens_per_entry
                        chosen = chosen[:, (chosen[0] >= 0) & (chosen[0] < closed)]
                    seen.append(entry_keys(entries, batch, request, index, chosen))
                out[one] = attend(q[one].clone(), seen, scale, sinks)
        return out
