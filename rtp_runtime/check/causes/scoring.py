"""The functions that make scores of router logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def score_of(name: str) -> Callable[[Tensor], Tensor]:
    """By its name in `rtp_kernel.ops.moe.SCORES`."""
    if name == "softmax":
        return lambda logits: logits.softmax(-1)
    return torch.sigmoid if name == "sigmoid" else lambda logits: torch.sqrt(functional.softplus(logits))
