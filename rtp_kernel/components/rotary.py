"""Rotary embedding: the step's angles, computed once, and their application in each layer."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.components.base import Binding, Component
from rtp_kernel.ops.rotary import LAYOUTS, RopeParameters, rotary, rotary_angles
from rtp_kernel.registry import OpFunction

__all__ = ["RopeParameters", "Rotary", "RotaryEmbedding"]


class RotaryEmbedding(Component):
    """positions [T] -> (cos, sin), each [T, rotary_dim] in the model's dtype or a pinned one, computed in float32.

    Positions may be [3, T] (time, height, width) where the parameters have an `mrope_section`. The buffer `inv_freq` is
    float32 whatever the model's dtype, and is made again on the device when bound.
    """

    inv_freq: Tensor
    axes: Tensor | None

    def __init__(self, rotary_dim: int, rope: RopeParameters, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.rope = rope
        self._pinned = dtype
        self.dtype = dtype or torch.get_default_dtype()
        self._op: OpFunction = rotary_angles
        self._make_table(torch.get_default_device())

    def _make_table(self, device: torch.device) -> None:
        with torch.device("cpu"):  # transformers computes its table there; another device would round differently
            inv_freq, self.attention_factor = self.rope.table(self.rotary_dim)
            axes = self.rope.axes(self.rotary_dim)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)
        self.register_buffer("axes", None if axes is None else axes.to(device), persistent=False)

    def bind(self, binding: Binding) -> None:
        self.dtype = self._pinned or binding.dtype
        self._op = binding.op("rotary_angles", shapes={"rotary dim": self.rotary_dim})
        self._make_table(binding.device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._op(positions, self.inv_freq, self.attention_factor, self.dtype, self.axes)
        return cos, sin

    def extra_repr(self) -> str:
        return f"{self.rotary_dim}, {self.rope.rope_type}, theta={self.rope.theta}"


class Rotary(Component):
    """q [T, heads, dim], k [T, kv heads, dim], cos, sin -> rotated q and k; layouts as in `rtp_kernel.ops.rotary`."""

    def __init__(self, layout: str = "half") -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f'rotary layout "{layout}" is unknown; known: {", ".join(LAYOUTS)}')
        self.layout = layout
        self._op: OpFunction = rotary

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("rotary", options={"layout": self.layout})

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self._op(q, k, cos, sin, self.layout)
        return q, k

    def one(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, dim] rotated; by -sin it is turned back."""
        turned: Tensor = self._op(x, x[:, :0], cos, sin, self.layout)[0]
        return turned

    def extra_repr(self) -> str:
        return self.layout
