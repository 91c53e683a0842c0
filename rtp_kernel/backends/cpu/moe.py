"""Experts on the CPU: tokens sorted by expert, each matrix product one grouped call that reads only the experts hit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.ops.activation import OAI_ALPHA, gated_activation
from rtp_kernel.registry import OpContext, Support

_ALIGNMENT = 16
"""Bytes that a row of either matrix must be a multiple of, for torch's grouped product."""


class GroupedExperts:
    """Two grouped products around one activation."""

    name = "cpu_grouped"

    def supports(self, context: OpContext) -> Support:
        rows = [context.shapes.get(name, 0) * context.dtype.itemsize for name in ("hidden", "intermediate")]
        return Support.unless(
            context.device != "cpu" and "runs on the CPU only",
            not hasattr(functional, "grouped_mm") and "this torch has no grouped_mm",
            context.dtype not in (torch.float32, torch.bfloat16) and f"has no {context.dtype}",
            any(row % _ALIGNMENT for row in rows) and f"rows of {rows} bytes are no multiples of {_ALIGNMENT}",
            context.deterministic and "its result for a row depends on the other rows of the expert",
        )

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float = OAI_ALPHA,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        pairs = ids.flatten()  # [T * k]
        order = pairs.argsort(stable=True)
        ends = torch.bincount(pairs, minlength=len(gate_up)).cumsum(0).to(torch.int32)
        rows = x[order // ids.shape[-1]]
        both = functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
        gate, up = (both if gate_up_bias is None else both + gate_up_bias[pairs[order]]).chunk(2, dim=-1)
        inner = gated_activation(gate, up, activation, limit, alpha)
        sorted_results = functional.grouped_mm(inner, down.transpose(1, 2), offs=ends)
        if down_bias is not None:
            sorted_results = sorted_results + down_bias[pairs[order]]
        results = torch.empty_like(sorted_results).index_copy_(0, order, sorted_results)
        return (results.view(*ids.shape, x.shape[-1]) * weights[..., None]).sum(dim=1).to(x.dtype)
