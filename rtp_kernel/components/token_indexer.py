"""Indexers of sparse attention: a small attention of their own that selects the tokens, or entries, worth attending."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.attention import REGIMES
from rtp_kernel.components.base import Binding, Component
from rtp_kernel.components.linear import Linear
from rtp_kernel.components.norm import LayerNorm
from rtp_kernel.components.rotary import Rotary
from rtp_kernel.ops.attention import Span, spans
from rtp_kernel.ops.selection import select
from rtp_kernel.ops.state import write_state
from rtp_kernel.ops.token_index import index_scores
from rtp_kernel.registry import OpFunction, StepPlans, implementation_of

MAX_SCORES = 1 << 26
"""Scores that are held at once: 256 MiB. Longer spans are scored and selected from in parts."""


class _Indexer(Component):
    """Scores what a request's index keys are worth to each query, and selects the best."""

    def __init__(self, num_heads: int, head_dim: int, top_k: int) -> None:
        super().__init__()
        if top_k < 1:
            raise ValueError(f"indexer: top_k {top_k}; at least 1 place must be selected")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.top_k = top_k
        self._score: dict[str, OpFunction] = dict.fromkeys(REGIMES, index_scores)
        self._select: OpFunction = select
        self._kind: tuple[Any, ...] = ("index",)
        self._plans = StepPlans()

    def bind(self, binding: Binding) -> None:
        shapes = {"heads": self.num_heads, "head dim": self.head_dim}
        self._score = {regime: binding.op("index_scores", regime=regime, shapes=shapes) for regime in REGIMES}
        self._select = binding.op("select", shapes={"k": self.top_k})
        self._kind = ("index", *(implementation_of(op).name for op in self._score.values()))
        self._plans = binding.ops.plans

    def _plan(self, batch: ForwardBatch, view: StateView) -> list[tuple[str, Span, Any]]:
        """The parts in which the step is scored, and what the chosen implementations want to know of each."""

        def ask(op: OpFunction, part: Span) -> Any:
            make = getattr(implementation_of(op), "plan", None)
            return None if make is None else make(batch, view, part, None)

        return [
            (regime, part, ask(self._score[regime], part))
            for regime, span in spans(batch)
            for part in _parts(batch, span)
        ]

    def _best(self, q: Tensor, weights: Tensor, batch: ForwardBatch, view: StateView) -> Tensor:
        """q [T, heads, D], weights [T, heads] float32 -> selection [T, 1, k] of the keys in the state."""
        key = (self._kind, view.group, view.data.shape, view.data.stride())
        chosen = []
        for regime, part, plan in self._plans.get(batch, key, lambda: self._plan(batch, view)):
            rows = slice(part.rows.start, part.rows.stop)
            score = self._score[regime]
            scores = score(q[rows], weights[rows], view, batch, part, scale=self.head_dim**-0.5, plan=plan)
            chosen.append(self._select(scores, self.top_k))  # of [rows, 1, places]
        width = max((part.shape[-1] for part in chosen), default=0)
        padded = [functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in chosen]
        return torch.cat(padded) if padded else torch.zeros(0, 1, 0, dtype=torch.long, device=q.device)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, dim={self.head_dim}, top_k={self.top_k}"


class TokenIndexer(_Indexer):
    """hidden [T, hidden], q_resid [T, q_rank], (cos, sin) -> selection int64 [T, 1, k], k <= `top_k`; -1 = none.

    Each token's index key [head_dim] goes into a paged state. The leading dimensions of query and key are rotated, as
    many as cos has, in `rope_layout` ("half" in DeepSeek-V3.2, "interleaved_to_half" in GLM-5). The head weights are
    computed in float32, as the released code of DeepSeek-V3.2 does.
    """

    def __init__(
        self, hidden: int, q_rank: int, num_heads: int, head_dim: int, top_k: int, *, rope_layout: str = "half"
    ) -> None:
        super().__init__(num_heads, head_dim, top_k)
        self.wq_b = Linear(q_rank, num_heads * head_dim)
        self.wk = Linear(hidden, head_dim)
        self.k_norm = LayerNorm(head_dim, 1e-6)
        self.weights_proj = Linear(hidden, num_heads, dtype=torch.float32)
        self.rotary = Rotary(rope_layout)
        self._write: OpFunction = write_state

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self._write = binding.op("write_state", shapes={"width": self.head_dim})

    def forward(
        self, hidden: Tensor, q_resid: Tensor, rotation: tuple[Tensor, Tensor], batch: ForwardBatch, view: StateView
    ) -> Tensor:
        q = self.wq_b(q_resid).unflatten(-1, (self.num_heads, self.head_dim))  # [T, heads, D]
        k = self.k_norm(self.wk(hidden))
        q, k = self.rotary(q, k[:, None], *rotation)
        self._write(k[:, 0], view, batch)
        weights = self.weights_proj(hidden).float() * self.num_heads**-0.5  # [T, heads]
        return self._best(q, weights, batch, view)


class EntryIndexer(_Indexer):
    """q [T, heads, D], weights [T, heads] -> selection int64 [T, 1, k] of compressed entries, k <= `top_k`; -1 = none.

    The indexer of compressed context (DeepSeek-V4): a query chooses, by the index keys [D] in a compressed state, among
    the windows that it has passed. Without weights, heads count alike (Qwen4-Exp).
    """

    def forward(self, q: Tensor, weights: Tensor | None, batch: ForwardBatch, view: StateView) -> Tensor:
        if weights is None:
            return self._best(q, q.new_ones(q.shape[:2], dtype=torch.float32), batch, view)
        return self._best(q, weights.float() * self.num_heads**-0.5, batch, view)


def _parts(batch: ForwardBatch, span: Span) -> list[Span]:
    """The span in parts whose scores are few enough to be held at once."""
    longest = max((batch.kv_lens[request] for request in span.requests), default=0)
    step = max(1, MAX_SCORES // max(1, longest))
    starts = range(span.rows.start, span.rows.stop, step)
    return [Span(span.requests, range(start, min(start + step, span.rows.stop))) for start in starts]
