"""Norms over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.ops.activation import activation as activate


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square norm of x [..., dim]; weight [dim], [groups, dim] for x [..., groups, dim], or None.

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


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: str = "silu",
    wide: bool = False,
    groups: int = 1,
    gate_first: bool = False,
) -> Tensor:
    """norm(x) * w * act(gate), or with `gate_first` norm(x * act(gate)) * w, of x and gate [..., dim], weight [dim].

    Norm and activation are in float32, over each of `groups` equal parts of dim. The product with w is in x's dtype
    (Qwen3NextRMSNormGated, MambaRMSNormGated), or with `wide` in float32 (Glm5NextTextRMSNormGated,
    FalconH1RMSNormGated).
    """
    values = x.float()
    if gate_first:
        values = values * activate(gate.float(), activation)
    parts: Tensor = values.unflatten(-1, (groups, -1))  # type: ignore[no-untyped-call]
    normed = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    weighted = normed * weight.float() if wide else normed.to(x.dtype) * weight
    return weighted.to(x.dtype) if gate_first else (weighted * activate(gate.float(), activation)).to(x.dtype)
