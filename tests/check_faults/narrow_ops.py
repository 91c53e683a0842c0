"""Ops that are exact in float32 and lose more than they should in a narrower dtype: each rounds to its input's dtype.

In float32 that rounding does nothing, and no comparison there can see it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from check_faults.ops import FaultyAttention
from check_faults.state_ops import FaultyOp
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops import activation as activations
from rtp_kernel.ops import delta_rule, lightning, moe
from rtp_kernel.ops.attention import Span, gather_kv, request_rows
from rtp_kernel.ops.linear import linear

PIECE = 8
"""Products that are summed before a partial sum is rounded."""


class NarrowScores(FaultyAttention):
    """Softmax in the model's dtype: exponentials, their sum and the quotient."""

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        out = torch.zeros_like(q)
        for request, rows in request_rows(batch, span):
            keys, values = gather_kv(kv, batch, request, range(batch.kv_lens[request]))
            index = batch.index[rows.start + span.rows.start : rows.stop + span.rows.start]
            visible = torch.arange(len(keys)) <= index[:, None]
            group = q.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("nhd,shd->nhs", q[rows.start : rows.stop], keys) * options["scale"]
            powers = scores.masked_fill(~visible[:, None], -math.inf)
            powers = (powers - powers.amax(dim=-1, keepdim=True)).exp()
            total = torch.zeros_like(powers[..., 0])
            for place in range(powers.shape[-1]):
                total = total + powers[..., place]
            out[rows.start : rows.stop] = torch.einsum("nhs,shd->nhd", powers / total[..., None], values)
        return out


class NarrowNorm(FaultyOp):
    """The mean of squares in the model's dtype."""

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return normed if weight is None else normed * (weight + offset).to(x.dtype)


class EarlyCast(FaultyOp):
    """The cast back before the product with 1 + w, which is made in float32 there."""

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return normed if weight is None else normed * (weight + offset).to(x.dtype)


class NarrowSums(FaultyOp):
    """Products whose partial sums are kept in the model's dtype."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype == torch.float32:
            return linear(x, weight, bias)
        out = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
        for place in range(0, x.shape[-1], PIECE):
            piece = slice(place, place + PIECE)
            out = out + functional.linear(x[..., piece], weight[:, piece].to(x.dtype))
        return out if bias is None else out + bias


class NarrowRouter(FaultyOp):
    """Scores, their sum and weights in bfloat16, of a model that runs in it: told by the weights' neighbours."""

    def __call__(self, logits: Tensor, bias: Tensor | None, **options: Any) -> Any:
        weights, ids = moe.route(logits, bias, **options)
        return weights, ids


class NarrowRotation(FaultyOp):
    """cos and sin of angles that were rounded."""

    def __call__(self, positions: Tensor, inv_freq: Tensor, **options: Any) -> Any:
        raise NotImplementedError


class NarrowState(FaultyOp):
    """The recurrent state is rounded to the model's dtype after each token."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: StateView, batch: ForwardBatch,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        return delta_rule.gated_delta_rule(q, k, v, g.to(q.dtype).float(), beta, state, batch, **options)


class NarrowGates(FaultyOp):
    """The decay computed in the model's dtype."""

    def __call__(self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        dtype = a.dtype
        g = -A_log.to(dtype).exp() * functional.softplus(a + dt_bias.to(dtype))
        return g.float(), b.sigmoid()


class NarrowLightning(FaultyOp):
    """Decayed products of lightning attention with their partial results rounded."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: StateView, batch: ForwardBatch, **options: Any
    ) -> Tensor:
        out = lightning.lightning_attention(q, k, v, slopes, state, batch, **options)
        return out


__all__ = ["activations"]
