"""Compressed context: windows of tokens pooled to entries, and attention over recent tokens and entries."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.attention import REGIMES
from rtp_kernel.components.base import Binding, Component
from rtp_kernel.ops.attention import spans
from rtp_kernel.ops.compress import compress, compressed_attention, places
from rtp_kernel.ops.state import write_state
from rtp_kernel.registry import OpFunction


class WindowPool(Component):
    """Pools each window of `ratio` tokens to one entry, in the step that brings its last token (DeepSeek-V4).

    kv and gate [T, C], position_bias [ratio, C] float32 -> entries [T, dim]: in the rows of tokens that close a window,
    zeros in the others. C is `dim`, or 2 * `dim` with `overlap`, where an entry also draws on the window before it, by
    the first half of its channels. The two buffers are slot states of [`places`, C], initially 0 and -inf. What becomes
    of the entries (norm, rotation) is the model's; `store` then writes them.
    """

    def __init__(self, dim: int, ratio: int, *, overlap: bool = False) -> None:
        super().__init__()
        if ratio < 1:
            raise ValueError(f"one entry for {ratio} tokens: at least 1")
        self.dim = dim
        self.ratio = ratio
        self.overlap = overlap
        self.channels = 2 * dim if overlap else dim
        self.places = places(ratio, overlap)
        self._op: OpFunction = compress
        self._write: OpFunction = write_state

    def bind(self, binding: Binding) -> None:
        options = {"ratio": self.ratio, "overlap": self.overlap}
        self._op = binding.op("compress", shapes={"dim": self.dim}, options=options)
        self._write = binding.op("write_state", shapes={"width": self.dim})

    def forward(
        self,
        kv: Tensor,
        gate: Tensor,
        position_bias: Tensor,
        batch: ForwardBatch,
        kv_buffer: StateView,
        gate_buffer: StateView,
    ) -> Tensor:
        entries: Tensor = self._op(
            kv, gate, position_bias, kv_buffer, gate_buffer, batch, ratio=self.ratio, overlap=self.overlap
        )
        return entries

    def store(self, entries: Tensor, view: StateView, batch: ForwardBatch) -> None:
        """Write the closed windows' entries [T, dim] into their compressed state."""
        self._write(entries, view, batch)

    def extra_repr(self) -> str:
        return f"{self.dim}, ratio={self.ratio}, overlap={self.overlap}"


class CompressedAttention(Component):
    """Writes the step's keys, then attends to the last `window` tokens and, where there are any, to entries.

    q [T, heads, D], kv [T, D] (one vector, key and value of all heads), sinks [heads] -> [T, heads * D]. A query sees
    the `entries` whose windows it has passed, all of them or its `selection` [T, 1, k] (entry indices, -1 = none).
    `scale` defaults to D^-0.5.
    """

    def __init__(self, num_heads: int, head_dim: int, *, window: int, scale: float | None = None) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"attention window {window}: at least 1 (the token itself)")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.window = window
        self.scale = head_dim**-0.5 if scale is None else scale
        self._write: OpFunction = write_state
        self._attend: dict[str, OpFunction] = dict.fromkeys(REGIMES, compressed_attention)

    def bind(self, binding: Binding) -> None:
        shapes = {"heads": self.num_heads, "head dim": self.head_dim}
        options = {"window": self.window}
        self._write = binding.op("write_state", shapes={"width": self.head_dim})
        self._attend = {
            regime: binding.op("compressed_attention", regime=regime, shapes=shapes, options=options)
            for regime in REGIMES
        }

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor,
        batch: ForwardBatch,
        view: StateView,
        entries: StateView | None = None,
        selection: Tensor | None = None,
    ) -> Tensor:
        self._write(kv, view, batch)
        outs = []
        for regime, span in spans(batch):
            rows = slice(span.rows.start, span.rows.stop)
            chosen = None if selection is None else selection[rows]
            options = {"scale": self.scale, "window": self.window, "sinks": sinks}
            outs.append(self._attend[regime](q[rows], view, batch, span, entries=entries, selection=chosen, **options))
        return torch.cat(outs).flatten(1) if outs else q.flatten(1)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, dim={self.head_dim}, window={self.window}"
