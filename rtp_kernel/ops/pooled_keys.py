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
    ape in float32; products are in the state's dtype. A pool's key does not depend on the other pools of the step.
    """
    size, dim = ape.shape
    rows = torch.nonzero((batch.index >= 0) & ((batch.index + 1) % size == 0)).squeeze(-1)
    tokens = batch.index[rows, None] - torch.arange(size - 1, -1, -1, device=rows.device)  # [C, size]
    keys, gates = entries_at(packed, batch, batch.request[rows, None], tokens).split_with_sizes([dim, dim], dim=-1)
    logits = gates.float() + ape.float()  # [C, size, D]
    grown = (logits - logits.amax(dim=1, keepdim=True)).exp()
    shares = (grown / _total(grown)[:, None]).to(keys.dtype)
    return rows, _total((shares * keys).float()).to(keys.dtype)


def _total(parts: Tensor) -> Tensor:
    """The sum over the pool of parts [C, size, D], in order of tokens: torch's own order depends on C."""
    total = parts[:, 0]
    for place in range(1, parts.shape[1]):
        total = total + parts[:, place]
    return total
