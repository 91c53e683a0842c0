"""Matrix products with a weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] @ weight [out, in]^T + bias [out] -> [..., out]."""
    return functional.linear(x, weight, bias)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., groups, in] times each group's rows of weight [groups * out, in], transposed -> [..., groups, out]."""
    groups, size = x.shape[-2:]
    matrices = weight.view(groups, -1, size).transpose(1, 2)
    rows = x.reshape(-1, groups, size).transpose(0, 1)  # [groups, T, in]
    return torch.bmm(rows, matrices).transpose(0, 1).reshape(*x.shape[:-1], matrices.shape[-1])
