"""Attention with a paged cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.attention import Span, alibi_slopes, paged_attention, spans, write_kv
from rtp_kernel.registry import OpFunction, StepPlans, implementation_of

REGIMES = ("decode", "verify", "prefill")


class Attention(Component):
    """Writes the step's keys and values into the cache, then attends.

    q [T, heads, D], k and v [T, kv heads, D] -> [T, heads * D]. `scale` defaults to D^-0.5. A query sees itself and the
    `window` - 1 tokens before it, or all. `sinks` adds the parameter `sinks` [heads]. Decode and prefill rows of a step
    may be served by different implementations.

    `alibi` b gives head i of n the slope 2^(-b i / n), which times a key's index is added to its score; the product is
    rounded to `alibi_dtype` and multiplied by `alibi_scale`.

    `selects` = n > 0 says that forward is given a selection, int64 [T, groups, k], a group for heads / groups heads:
    places of n tokens each (token indices for n = 1), -1 = none. A query then sees only those of its tokens.
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
        selects: int = 0,
        alibi: float | None = None,
        alibi_scale: float = 1.0,
        alibi_dtype: torch.dtype = torch.float32,
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
        self.selects = selects
        self.sinks = parameter(num_heads) if sinks else None
        self.alibi = alibi
        self._alibi_dtype = alibi_dtype
        self._write: OpFunction = write_kv
        self._attend: dict[str, OpFunction] = dict.fromkeys(REGIMES, paged_attention)
        self._options: dict[str, Any] = {"scale": self.scale, "window": window, "soft_cap": soft_cap}
        if selects:
            self._options["tokens_per_place"] = selects
        if alibi is not None:
            self._options["slope_scale"] = alibi_scale
            self._make_slopes(torch.get_default_device())
        self._kind: tuple[Any, ...] = (window,)
        self._plans = StepPlans()

    def _make_slopes(self, device: torch.device) -> None:
        """ALiBi's slopes follow from the number of heads; they are made again on the device when bound."""
        assert self.alibi is not None
        with torch.device("cpu"):
            slopes = alibi_slopes(self.num_heads, self.alibi).to(self._alibi_dtype)
        self._options["slopes"] = slopes.to(device)

    def bind(self, binding: Binding) -> None:
        # Again, since a model that derives from another changes them after construction.
        self._options |= {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}
        if self.alibi is not None:
            self._make_slopes(binding.device)
        shapes = {"heads": self.num_heads, "kv heads": self.num_kv_heads, "head dim": self.head_dim}
        options = {
            "window": self.window,
            "sinks": self.sinks is not None,
            "soft_cap": self.soft_cap,
            "selects": self.selects,
            "alibi": self.alibi,
        }
        self._write = binding.op("write_kv", shapes=shapes)
        self._attend = {
            regime: binding.op("paged_attention", regime=regime, shapes=shapes, options=options) for regime in REGIMES
        }
        ops = (self._write, *self._attend.values())
        self._kind = (self.window, *(implementation_of(op).name for op in ops))  # layers of a kind share a step's plans
        self._plans = binding.ops.plans

    def _plan(self, batch: ForwardBatch, kv: StateView) -> tuple[Any, tuple[tuple[str, Span, Any], ...]]:
        """What the chosen implementations want to know of the step: for writing, and for each span."""

        def ask(op: OpFunction, span: Span | None) -> Any:
            make = getattr(implementation_of(op), "plan", None)
            return None if make is None else make(batch, kv, span, self.window)

        return ask(self._write, None), tuple(
            (regime, span, ask(self._attend[regime], span)) for regime, span in spans(batch)
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: StateView, selection: Tensor | None = None
    ) -> Tensor:
        if (selection is None) == (self.selects > 0):
            raise ValueError(
                f"attention that selects {self.selects} tokens per place: needs a selection if that is > 0"
            )
        key = (self._kind, kv.group, kv.tokens_per_entry, kv.data.shape, kv.data.stride())
        write_plan, parts = self._plans.get(batch, key, lambda: self._plan(batch, kv))
        self._write(k, v, kv, batch, plan=write_plan)
        if len(parts) == 1 and selection is None:
            regime, span, plan = parts[0]
            out: Tensor = self._attend[regime](q, kv, batch, span, sinks=self.sinks, plan=plan, **self._options)
            return out.flatten(1)
        outs = []
        for regime, span, plan in parts:
            rows = slice(span.rows.start, span.rows.stop)
            options = self._options if selection is None else {**self._options, "selection": selection[rows]}
            outs.append(self._attend[regime](q[rows], kv, batch, span, sinks=self.sinks, plan=plan, **options))
        return torch.cat(outs).flatten(1) if outs else q.flatten(1)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}/{self.num_kv_heads}, dim={self.head_dim}, window={self.window}"
