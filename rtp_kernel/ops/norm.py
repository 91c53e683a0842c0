"""Norms over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square norm of x [..., dim]; weight [dim] or None.

    Normalised in float32. `offset` 0 casts back and then multiplies by w (LlamaRMSNorm); an offset (1.0: zero-centred
    weights), or a float32 weight of a narrower x, multiplies in float32 before the cast (Qwen3NextRMSNorm,
    DeepseekV4RMSNorm).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if offset or weight.dtype != x.dtype:
        return (normed * (weight.float() + offset)).to(x.dtype)
    return normed.to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm of x [..., dim]; weight and bias [dim] or None."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
