"""Means over blocks of a request's tokens, taken when their last token comes; the tokens' values are a paged state."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import entries_at


def block_means(values: StateView, batch: ForwardBatch, *, size: int) -> tuple[Tensor, Tensor]:
    """(rows [C], means [C, D]): the token rows that complete a block of `size` tokens, and the blocks' means.

    `values` holds [D] of every token, this step's too. Blocks begin at multiples of `size`. Means are taken in float32
    and cast to the state's dtype.
    """
    rows = torch.nonzero((batch.index >= 0) & ((batch.index + 1) % size == 0)).squeeze(-1)
    tokens = batch.index[rows, None] - torch.arange(size - 1, -1, -1, device=rows.device)  # [C, size]
    held = entries_at(values, batch, batch.request[rows, None], tokens)  # [C, size, D]
    return rows, held.float().mean(dim=1).to(held.dtype)
