"""Matrix products with a weight."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] @ weight [out, in]^T + bias [out] -> [..., out]."""
    return functional.linear(x, weight, bias)
