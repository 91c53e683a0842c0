"""Index keys of pools of a request's tokens: averages by learned weights, taken when a pool's last token comes."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import entries_at


def pooled_keys(packed: StateView, ape: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """(rows [C], keys [C, D]): the token rows that complete a pool, and the pools' keys (Glm5NextTextIndexer).

    `packed` holds [key D | gate score D] of every token, this step's too; ape [size, D] has a row per place in a pool.
    Pools begin at multiples of `size`. Each channel's keys are weighted by the softmax, over the pool, of gate score +
    ape in float32; products and sum are in the state's dtype.
    """
    size, dim = ape.shape
    rows = torch.nonzero((batch.index >= 0) & ((batch.index + 1) % size == 0)).squeeze(-1)
    tokens = batch.index[rows, None] - torch.arange(size - 1, -1, -1, device=rows.device)  # [C, size]
    keys, gates = entries_at(packed, batch, batch.request[rows, None], tokens).split_with_sizes([dim, dim], dim=-1)
    shares = torch.softmax(gates.float() + ape.float(), dim=1).to(keys.dtype)  # [C, size, D]
    return rows, (shares * keys).sum(dim=1)
