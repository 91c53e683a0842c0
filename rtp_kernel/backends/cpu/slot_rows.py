"""Ops over one state per request whose result for a token is bit-equal whatever the batch, the padding and the chunks.

Each token is a step of its own, from the slot that the one before it wrote: every call has the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.backends.cpu.rows import Deterministic, row_chunks
from rtp_kernel.batch import ForwardBatch, GroupBatch, StateView
from rtp_kernel.ops import conv, delta_rule, lightning, linear_recurrence, norm, selective_scan, state_space_scan
from rtp_kernel.ops.state import slot_runs


def token_by_token(
    op: Callable[[tuple[Tensor, ...], StateView, ForwardBatch], Tensor],
    rows: tuple[Tensor, ...],
    state: StateView,
    batch: ForwardBatch,
    out: Tensor,
) -> Tensor:
    """`op` of rows [1, ...], a view of group 0 and a batch of one decode, for every token in turn -> `out`, filled."""
    view = StateView(state.data, 0)
    for run in slot_runs(batch, state.group):
        read = run.read
        for piece, copies in run.pieces:
            for row in piece:
                due = copies if row == piece.stop - 1 else ()
                single = _single(read, run.write, due, batch.input_ids[row : row + 1])
                out[row] = op(tuple(part[row : row + 1].contiguous() for part in rows), view, single)[0]
                read = run.write
    return out


def _single(read: int, write: int, copies: tuple[int, ...], ids: Tensor) -> ForwardBatch:
    """A decode of one token that leaves copies of its state."""
    zero = torch.zeros(1, dtype=torch.int64)
    snapshots = torch.tensor([(0, slot) for slot in copies], dtype=torch.int64).view(-1, 2)
    group = GroupBatch(read=torch.tensor([read]), write=torch.tensor([write]), snapshots=snapshots)
    return ForwardBatch(
        input_ids=ids,
        index=zero,
        positions=zero,
        request=zero,
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        groups=(group,),
        num_decodes=1,
        num_decode_tokens=1,
        query_lens=(1,),
        kv_lens=(1,),
    )


class CausalConvRows(Deterministic):
    """The reference, token by token."""

    name = "cpu_token_by_token"

    def __call__(self, x: Tensor, weight: Tensor, state: StateView, batch: ForwardBatch, **options: Any) -> Tensor:
        def one(rows: tuple[Tensor, ...], view: StateView, single: ForwardBatch) -> Tensor:
            return conv.causal_conv(rows[0], weight, view, single, **options)

        return token_by_token(one, (x,), state, batch, torch.zeros_like(x))


class GatedDeltaRuleRows(Deterministic):
    """The recurrent form of the reference, token by token."""

    name = "cpu_token_by_token"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: StateView,
        batch: ForwardBatch,
        **options: Any,
    ) -> Tensor:
        def one(rows: tuple[Tensor, ...], view: StateView, single: ForwardBatch) -> Tensor:
            q, k, v, g, beta = rows
            return delta_rule.gated_delta_rule(q, k, v, g, beta, view, single, **options)

        return token_by_token(one, (q, k, v, g, beta), state, batch, q.new_zeros(v.shape))


class LightningAttentionRows(Deterministic):
    """The recurrent form of the reference, token by token."""

    name = "cpu_token_by_token"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor,
        state: StateView,
        batch: ForwardBatch,
        **options: Any,
    ) -> Tensor:
        def one(rows: tuple[Tensor, ...], view: StateView, single: ForwardBatch) -> Tensor:
            q, k, v = rows
            return lightning.lightning_attention(q, k, v, slopes, view, single, **options)

        return token_by_token(one, (q, k, v), state, batch, q.new_zeros(v.shape))


def _four(rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dt, B and C."""
    return rows[0], rows[1], rows[2], rows[3]


class SelectiveScanRows(Deterministic):
    """The recurrent form of the reference, token by token."""

    name = "cpu_token_by_token"

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        gate: Tensor | None,
        A_log: Tensor,  # noqa: N803
        D: Tensor,  # noqa: N803
        dt_bias: Tensor | None,
        state: StateView,
        batch: ForwardBatch,
    ) -> Tensor:
        def one(rows: tuple[Tensor, ...], view: StateView, single: ForwardBatch) -> Tensor:
            some = None if gate is None else rows[4]
            return selective_scan.selective_scan(*_four(rows), some, A_log, D, dt_bias, view, single)

        rows = (x, dt, B, C) if gate is None else (x, dt, B, C, gate)
        return token_by_token(one, rows, state, batch, torch.zeros_like(x))


class StateSpaceScanRows(Deterministic):
    """The recurrent form of the reference, token by token."""

    name = "cpu_token_by_token"

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        A_log: Tensor,  # noqa: N803
        D: Tensor,  # noqa: N803
        dt_bias: Tensor,
        state: StateView,
        batch: ForwardBatch,
        **options: Any,
    ) -> Tensor:
        def one(rows: tuple[Tensor, ...], view: StateView, single: ForwardBatch) -> Tensor:
            return state_space_scan.state_space_scan(*_four(rows), A_log, D, dt_bias, view, single, **options)

        return token_by_token(one, (x, dt, B, C), state, batch, torch.zeros_like(x))


class LinearRecurrenceRows(Deterministic):
    """The reference, token by token."""

    name = "cpu_token_by_token"

    def __call__(self, x: Tensor, decay: Tensor, state: StateView, batch: ForwardBatch) -> Tensor:
        def one(rows: tuple[Tensor, ...], view: StateView, single: ForwardBatch) -> Tensor:
            return linear_recurrence.linear_recurrence(rows[0], rows[1], view, single)

        return token_by_token(one, (x, decay), state, batch, torch.zeros_like(x))


class DeltaGatesRows(Deterministic):
    """The reference in chunks of rows."""

    name = "cpu_row_chunks"

    def __call__(self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        slices = list(row_chunks(*a.shape)) or [slice(0, 0)]
        parts = [delta_rule.delta_gates(a[rows].contiguous(), b[rows].contiguous(), A_log, dt_bias) for rows in slices]
        return torch.cat([g for g, _ in parts]), torch.cat([beta for _, beta in parts])


class GatedRmsNormRows(Deterministic):
    """The reference in chunks of rows."""

    name = "cpu_row_chunks"

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
        parts = [
            norm.gated_rms_norm(x[rows].contiguous(), gate[rows].contiguous(), weight, eps, **options)
            for rows in row_chunks(len(x), max(1, x[:1].numel()))
        ]
        return torch.cat(parts) if parts else torch.zeros_like(x)
