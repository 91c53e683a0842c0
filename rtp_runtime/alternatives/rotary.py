"""The ways in which heads are turned: which dimensions make a pair, how many of them turn, at which end."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.ops.rotary import rotary

THETAS = (1e4, 5e5, 1e6, 5e6, 1e7, 1e3, 1e5, 8e6, 1.5e5)
"""Bases of rotary tables that published models have, the commonest default first."""
SHARES = (1.0, 0.5, 0.25, 0.75)
"""Shares of a head that turn."""


def turned(x: Tensor, cos: Tensor, sin: Tensor, layout: str, at_end: bool = False) -> Tensor:
    """x [tokens, heads, dim] with its first (or last) dimensions turned.

    cos, sin: [tokens, rotary dim / 2], each angle once. `layout`: as in `rtp_kernel.ops.rotary.LAYOUTS`.
    """
    cos, sin = (torch.cat((table, table), dim=-1) for table in (cos, sin))
    width = cos.shape[-1]
    if not at_end:
        return rotary(x, x, cos, sin, layout)[0]
    out = x.clone()
    part = x[..., -width:].contiguous()
    out[..., -width:] = rotary(part, part, cos, sin, layout)[0]
    return out
