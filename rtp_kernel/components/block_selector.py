"""Selection of runs of tokens by their best score against a small query (MiniMax-M3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component
from rtp_kernel.ops.attention import Span, spans
from rtp_kernel.ops.block_index import block_index_scores
from rtp_kernel.ops.selection import select
from rtp_kernel.ops.state import write_state
from rtp_kernel.registry import OpFunction

REGIMES = ("decode", "verify", "prefill")


class BlockSelector(Component):
    """q [T, heads, D], k [T, D] -> selection int64 [T, heads, n], n <= `top_k`, of runs of `size` tokens; -1 = none.

    Each head, one for each kv head of the attention, selects on its own, best first. The keys go into a paged state,
    `PagedState(axes={"index": D})`. A query's own run and the `local` - 1 before it come before all others. The result
    is for an `Attention` with `selects=size`.
    """

    def __init__(self, num_heads: int, head_dim: int, *, size: int, top_k: int, local: int) -> None:
        super().__init__()
        if size < 1 or top_k < 1 or local < 0:
            raise ValueError(f"selection of {top_k} runs of {size} tokens, {local} of them near: at least 1, 1 and 0")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.size = size
        self.top_k = top_k
        self.local = local
        self._write: OpFunction = write_state
        self._score: dict[str, OpFunction] = dict.fromkeys(REGIMES, block_index_scores)
        self._select: OpFunction = select

    def bind(self, binding: Binding) -> None:
        shapes = {"heads": self.num_heads, "head dim": self.head_dim}
        options = {"size": self.size, "local": self.local}
        self._write = binding.op("write_state", shapes={"width": self.head_dim})
        self._score = {
            regime: binding.op("block_index_scores", regime=regime, shapes=shapes, options=options)
            for regime in REGIMES
        }
        self._select = binding.op("select", shapes={"k": self.top_k})

    def forward(self, q: Tensor, k: Tensor, batch: ForwardBatch, view: StateView) -> Tensor:
        self._write(k, view, batch)
        chosen = [self._chosen(self._score[regime], q, view, batch, span) for regime, span in spans(batch)]
        width = max((part.shape[-1] for part in chosen), default=0)
        padded = [functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in chosen]
        return torch.cat(padded) if padded else torch.zeros(0, self.num_heads, 0, dtype=torch.long, device=q.device)

    def _chosen(self, score: OpFunction, q: Tensor, view: StateView, batch: ForwardBatch, span: Span) -> Tensor:
        rows = slice(span.rows.start, span.rows.stop)
        scores = score(q[rows], view, batch, span, size=self.size, local=self.local)  # [rows, heads, runs]
        chosen: Tensor = self._select(scores, self.top_k)
        return chosen

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, dim={self.head_dim}, {self.top_k} runs of {self.size}, local={self.local}"
