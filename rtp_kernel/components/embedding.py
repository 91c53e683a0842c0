"""Embeddings of tokens, and of positions that follow from a formula."""

from __future__ import annotations

import math

import torch
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


class SinusoidalEmbedding(Component):
    """positions [T] int64 -> [T, dim] in the model's dtype: sines of dim / 2 angles, then their cosines.

    Angle i is the position times 10000^(-i / (dim / 2 - `shift`)): shift 0 as CTRL has it, 1 as XGLM does.
    """

    frequencies: Tensor

    def __init__(self, dim: int, shift: int = 0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"sinusoidal positions of {dim} dimensions: sines and cosines need an even number")
        self.dim = dim
        self.shift = shift
        self.dtype = torch.get_default_dtype()
        self._make_table(torch.get_default_device())

    def _make_table(self, device: torch.device) -> None:
        half = self.dim // 2
        place = torch.arange(half, dtype=torch.float32, device=device)
        if self.shift:
            table = torch.exp(place * -(math.log(10000.0) / (half - self.shift)))
        else:
            table = 1 / torch.pow(10000.0, 2 * place / self.dim)
        self.register_buffer("frequencies", table, persistent=False)

    def bind(self, binding: Binding) -> None:
        self.dtype = binding.dtype
        self._make_table(binding.device)

    def forward(self, positions: Tensor) -> Tensor:
        angles = positions[:, None].float() * self.frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=-1).to(self.dtype)
