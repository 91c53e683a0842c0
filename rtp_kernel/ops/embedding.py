"""Rows of a table."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids [...] int64, weight [num, dim] -> [..., dim]."""
    return functional.embedding(ids, weight)
