"""The indexer that selects tokens by pools: whole pools by one key each, and the tokens behind the last of them."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.components.linear import Linear
from rtp_kernel.components.norm import LayerNorm
from rtp_kernel.components.token_indexer import EntryIndexer
from rtp_kernel.ops.linear import linear
from rtp_kernel.ops.pooled_keys import pooled_keys
from rtp_kernel.ops.state import write_state
from rtp_kernel.registry import OpFunction


class PooledIndexer(Component):
    """hidden [T, hidden], q_resid [T, q_rank] -> selection int64 [T, 1, k] of token indices; -1 = none (GLM-5.3).

    Of the pools that a query has passed the `top_k` // `pool` best, each as its `pool` tokens; then what it sees behind
    the last pool, up to `pool` - 1 tokens. Each token's index key and gate score go into a paged state `packed`
    [2 head_dim]; the key of a complete pool goes into a compressed state `pools` [head_dim] of `pool` tokens per entry.
    Nothing is rotated.
    """

    def __init__(self, hidden: int, q_rank: int, num_heads: int, head_dim: int, top_k: int, *, pool: int) -> None:
        super().__init__()
        if pool < 1 or top_k < pool:
            raise ValueError(f"pooled indexer: {top_k} tokens in pools of {pool}; at least 1 pool must be selected")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.pool = pool
        self.wq_b = Linear(q_rank, num_heads * head_dim)
        self.wk = Linear(hidden, head_dim)
        self.k_norm = LayerNorm(head_dim, 1e-6)
        self.weights_proj = Linear(hidden, num_heads)
        self.index_kpool_compress_ape = parameter(pool, head_dim)
        self.index_kpool_compress_gate = parameter(head_dim, hidden)
        self.choose = EntryIndexer(num_heads, head_dim, top_k // pool)
        self._linear: OpFunction = linear
        self._write: OpFunction = write_state
        self._pool: OpFunction = pooled_keys

    def bind(self, binding: Binding) -> None:
        dim, hidden = self.index_kpool_compress_gate.shape
        self._linear = binding.op("linear", shapes={"in": hidden, "out": dim})
        self._write = binding.op("write_state", shapes={"width": 2 * dim})
        self._pool = binding.op("pooled_keys", shapes={"width": dim, "size": self.pool})

    def forward(
        self, hidden: Tensor, q_resid: Tensor, batch: ForwardBatch, packed: StateView, pools: StateView
    ) -> Tensor:
        q = self.wq_b(q_resid).unflatten(-1, (self.num_heads, self.head_dim))  # [T, heads, D]
        k = self.k_norm(self.wk(hidden))
        gate_scores = self._linear(hidden, self.index_kpool_compress_gate, None)
        self._write(torch.cat((k, gate_scores), dim=-1), packed, batch)
        rows, keys = self._pool(packed, self.index_kpool_compress_ape, batch)
        self._write(torch.zeros_like(k).index_copy(0, rows, keys.to(k.dtype)), pools, batch)
        chosen = self.choose(q, self.weights_proj(hidden), batch, pools)  # [T, 1, pools]
        return self._expanded(chosen, batch.index)

    def _expanded(self, chosen: Tensor, index: Tensor) -> Tensor:
        """Pools [T, 1, k] as token indices [T, 1, k * pool + pool - 1], the tail of each token behind them."""
        place = torch.arange(self.pool, device=index.device)
        tokens = torch.where(chosen[..., None] < 0, -1, chosen[..., None] * self.pool + place).flatten(-2)
        tail = ((index + 1) // self.pool * self.pool)[:, None] + place[:-1]  # [T, pool - 1]
        tail = torch.where(tail <= index[:, None], tail, -1)
        return torch.cat((tokens, tail[:, None]), dim=-1)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, dim={self.head_dim}, pool={self.pool}"
