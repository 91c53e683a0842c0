"""Attention with a paged cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.attention import Span, paged_attention, spans, write_kv
from rtp_kernel.registry import OpFunction, StepPlans, implementation_of

REGIMES = ("decode", "verify", "prefill")


class Attention(Component):
    """Writes the step's keys and values into the cache, then attends.

    q [T, heads, D], k and v [T, kv heads, D] -> [T, heads * D]. `scale` defaults to D^-0.5. A query sees itself and the
    `window` - 1 tokens before it, or all. `sinks` adds the parameter `sinks` [heads]. Decode and prefill rows of a step
    may be served by different implementations.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key heads: no multiple")
        if window is not None and window < 1:
            raise ValueError(f"attention window {window}: at least 1 (the token itself), or None for no window")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.soft_cap = soft_cap
        self.sinks = parameter(num_heads) if sinks else None
        self._write: OpFunction = write_kv
        self._attend: dict[str, OpFunction] = dict.fromkeys(REGIMES, paged_attention)
        self._plans = StepPlans()

    def bind(self, binding: Binding) -> None:
        shapes = {"heads": self.num_heads, "kv heads": self.num_kv_heads, "head dim": self.head_dim}
        options = {"window": self.window, "sinks": self.sinks is not None, "soft_cap": self.soft_cap}
        self._write = binding.op("write_kv", shapes=shapes)
        self._attend = {
            regime: binding.op("paged_attention", regime=regime, shapes=shapes, options=options) for regime in REGIMES
        }
        self._plans = binding.ops.plans

    def _plan(self, op: OpFunction, batch: ForwardBatch, kv: StateView, regime: str, span: Span | None) -> Any:
        implementation = implementation_of(op)
        make = getattr(implementation, "plan", None)
        if make is None:
            return None
        key = (implementation.name, kv.group, kv.data.stride(0), kv.data.stride(1), regime, self.window)
        return self._plans.get(batch, key, lambda: make(batch, kv, span, self.window))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: StateView) -> Tensor:
        self._write(k, v, kv, batch, plan=self._plan(self._write, batch, kv, "write", None))
        parts = []
        for regime, span in spans(batch):
            op = self._attend[regime]
            rows = q if len(span.rows) == q.shape[0] else q[span.rows.start : span.rows.stop]
            parts.append(
                op(
                    rows,
                    kv,
                    batch,
                    span,
                    scale=self.scale,
                    window=self.window,
                    sinks=self.sinks,
                    soft_cap=self.soft_cap,
                    plan=self._plan(op, batch, kv, regime, span),
                )
            )
        if not parts:
            return q.flatten(1)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}/{self.num_kv_heads}, dim={self.head_dim}, window={self.window}"
