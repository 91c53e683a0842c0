"""Ops that are exact in float32 and lose more than they should in a narrower dtype: each rounds to its input's dtype.

In float32 that rounding does nothing, and no comparison there can see it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from check_faults import ops
from check_faults.state_ops import FaultyOp
from rtp_kernel.ops.linear import linear

PIECE = 8
"""Products that are summed before a partial sum is rounded."""


def running_sum(parts: Tensor) -> Tensor:
    """The sum over the last dimension, rounded after every value."""
    total = torch.zeros_like(parts[..., 0])
    for place in range(parts.shape[-1]):
        total = total + parts[..., place]
    return total


class NarrowSoftmax(ops.NarrowSoftmax):
    """Softmax in the model's dtype: exponentials, their sum and the quotient."""

    def softmax(self, scores: Tensor) -> Tensor:
        powers = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        return powers / running_sum(powers)[..., None]


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
