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
from rtp_kernel.ops import delta_rule
from rtp_kernel.ops.attention import Span, gather_kv, request_rows
from rtp_kernel.ops.linear import linear

PIECE = 8
"""Products that are summed before a partial sum is rounded."""


def running_sum(parts: Tensor) -> Tensor:
    """The sum over the last dimension, rounded after every value."""
    total = torch.zeros_like(parts[..., 0])
    for place in range(parts.shape[-1]):
        total = total + parts[..., place]
    return total


class NarrowSoftmax(FaultyAttention):
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
            scores = scores.masked_fill(~visible[:, None], -math.inf)
            powers = (scores - scores.amax(dim=-1, keepdim=True)).exp()
            weights = powers / running_sum(powers)[..., None]
            out[rows.start : rows.stop] = torch.einsum("nhs,shd->nhd", weights, values)
        return out


class NarrowNorm(FaultyOp):
    """The mean of squares, its root and the products in the model's dtype."""

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


class NarrowAngles(FaultyOp):
    """Angles, of which cos and sin are taken, in the dtype of these."""

    def __call__(
        self, positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype, axes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        freqs = (positions[:, None].float() * inv_freq).to(dtype)
        angles = torch.cat((freqs, freqs), dim=-1)
        return angles.cos() * factor, angles.sin() * factor


class NarrowActivation(FaultyOp):
    """silu from an exponential and a quotient that are both rounded."""

    def __call__(self, gate: Tensor, up: Tensor, name: str = "silu", *args: Any, **options: Any) -> Tensor:
        return gate * (1 / (1 + (-gate).exp())) * up


class NarrowState(FaultyOp):
    """The recurrent state is rounded to the model's dtype after each token."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: StateView, batch: ForwardBatch,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        out = delta_rule.gated_delta_rule(q, k, v, g, beta, state, batch, **options)
        if q.dtype == torch.float32:
            return out
        starts = batch.query_start.tolist()
        scale, eps = options["scale"], options.get("norm_eps")
        tokens = delta_rule.Tokens(q, k, v, g, beta).prepared(scale, eps)
        for request in range(batch.num_requests):
            held = torch.zeros_like(state.data[:1], dtype=torch.float32)
            for row in range(starts[request], starts[request + 1]):
                result, held = delta_rule.recurrent(tokens.rows(slice(row, row + 1)), held)
                held = held.to(q.dtype).float()
                out[row] = result[0].to(out.dtype)
        return out


class NarrowGates(FaultyOp):
    """The decay computed in the model's dtype."""

    def __call__(self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        g = -A_log.to(a.dtype).exp() * functional.softplus(a + dt_bias.to(a.dtype))
        return g.float(), b.sigmoid()


class NarrowGatedNorm(FaultyOp):
    """Norm and gate in the model's dtype."""

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype) * functional.silu(gate)


class NarrowRoute(FaultyOp):
    """A softmax over experts in the logits' dtype, and the weights' sum too."""

    def __call__(self, logits: Tensor, bias: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        powers = (logits - logits.amax(dim=-1, keepdim=True)).exp()
        weights, ids = (powers / running_sum(powers)[..., None]).topk(options["k"], dim=-1)
        if options.get("renormalize"):
            weights = weights / running_sum(weights)[..., None]
        return weights, ids
