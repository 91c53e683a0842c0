"""Norm and rotary on the CPU in fewer calls than the references."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.registry import OpContext, Support


class RmsNorm:
    """The fused float32 norm of torch; the weight is multiplied where the reference multiplies it."""

    name = "cpu_rms_norm"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(
            context.device != "cpu" and "runs on the CPU only",
            bool(context.options.get("offset")) and "multiplies by w only",
            context.options.get("groups", 1) > 1 and "has one group",
        )

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
        shape = x.shape[-1:]
        if x.dtype == torch.float32 or (weight is not None and weight.dtype == torch.float32):
            return functional.rms_norm(x.float(), shape, weight, eps).to(x.dtype)
        normed = functional.rms_norm(x.float(), shape, None, eps).to(x.dtype)
        return normed if weight is None else normed * weight


class RotaryHalf:
    """Rotation of half-split heads, queries and keys together."""

    name = "cpu_rotary_half"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(
            context.device != "cpu" and "runs on the CPU only",
            context.options.get("layout") != "half" and "rotates halves only",
            context.deterministic and "rounds differently in the tail of a vector loop",
        )

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> tuple[Tensor, Tensor]:
        heads = torch.cat((q, k), dim=1)  # [T, heads + kv heads, dim]
        dim = cos.shape[-1]
        turned = heads if dim == heads.shape[-1] else heads[..., :dim]
        first, second = turned.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        turned = (turned * cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))
        if dim != heads.shape[-1]:
            turned = torch.cat((turned, heads[..., dim:]), dim=-1)
        rotated_q, rotated_k = torch.split_with_sizes(turned, [q.shape[1], k.shape[1]], dim=1)
        return rotated_q, rotated_k
