"""Token embeddings."""

from __future__ import annotations

from torch import Tensor

from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.embedding import embedding
from rtp_kernel.registry import OpFunction


class Embedding(Component):
    """ids [T] int64 -> [T, dim]; `weight` [num, dim]."""

    def __init__(self, num: int, dim: int) -> None:
        super().__init__()
        self.num = num
        self.dim = dim
        self.weight = parameter(num, dim)
        self._op: OpFunction = embedding

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("embedding", shapes={"num": self.num, "dim": self.dim})

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self._op(ids, self.weight)
        return out
