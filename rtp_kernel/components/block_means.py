"""Index keys of blocks of tokens: what a pooled indexer chooses among."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component
from rtp_kernel.ops.block_means import block_means
from rtp_kernel.ops.state import entries_at, write_state
from rtp_kernel.registry import OpFunction

AXES = 3
"""Positions of a token: time, height, width."""


@dataclass(frozen=True, slots=True)
class ClosedBlocks:
    """The blocks whose last token is in this step."""

    rows: Tensor
    """[C] int64: the token rows that complete them."""
    means: Tensor
    """[C, D]."""
    positions: Tensor
    """[3, C] int64: the positions of their first tokens."""


class BlockMeans(Component):
    """keys [T, D] -> the means of the blocks of `size` tokens that the step completes, and where these begin.

    Each token's key and positions go into two paged states: `keys` [D] and `positions` [3] (int64), so that a block may
    be spread over steps. What becomes of a mean (a norm, a rotation) goes by `store` into a compressed state with one
    entry per block.
    """

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.dim = dim
        self.size = size
        self._write: OpFunction = write_state
        self._means: OpFunction = block_means

    def bind(self, binding: Binding) -> None:
        self._write = binding.op("write_state", shapes={"width": self.dim})
        self._means = binding.op("block_means", shapes={"width": self.dim, "size": self.size})

    def forward(self, keys: Tensor, batch: ForwardBatch, held: StateView, positions: StateView) -> ClosedBlocks:
        self._write(keys, held, batch)
        self._write(batch.positions.expand(AXES, -1).T, positions, batch)
        rows, means = self._means(held, batch, size=self.size)
        first = entries_at(positions, batch, batch.request[rows], batch.index[rows] - (self.size - 1))  # [C, 3]
        return ClosedBlocks(rows, means, first.T)

    def store(self, values: Tensor, blocks: ClosedBlocks, batch: ForwardBatch, view: StateView) -> None:
        """Values [C, D] of the closed blocks, as entries of `view`."""
        by_row = torch.zeros(batch.num_tokens, *values.shape[1:], dtype=values.dtype, device=values.device)
        self._write(by_row.index_copy(0, blocks.rows, values), view, batch)

    def extra_repr(self) -> str:
        return f"{self.dim}, size={self.size}"
