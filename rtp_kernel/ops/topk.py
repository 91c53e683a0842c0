"""Top-k whose ties break toward the lower index, whatever the padding."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of values [..., n], descending -> values and indices [..., k]; equal values by rising index."""
    ordered, indices = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered[..., :k], indices[..., :k]
