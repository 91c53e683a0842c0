"""The residual of several streams: what stands before and after each block, and what collapses it in the end."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.hyper_connection import hyper_collapse, hyper_connection, hyper_expand
from rtp_kernel.registry import OpFunction


class HyperConnection(Component):
    """streams [T, n, H] -> post [T, n], comb [T, n, n] (both float32), and the block's input x [T, H].

    `expand` then returns the block's output to the streams. Parameters: `fn` [(2 + n) n, n H], `base` [(2 + n) n],
    `scale` [3], all float32; `fn_dtype=None` leaves `fn` in the model's dtype (GLM-5.3). `iterations` counts Sinkhorn
    steps, `eps` is their floor, `norm_eps` that of the norm over all streams.
    """

    def __init__(
        self,
        hidden: int,
        streams: int,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
        fn_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__()
        if streams < 1 or iterations < 1:
            raise ValueError(f"hyper-connection of {streams} streams with {iterations} iterations: at least 1 of each")
        self.hidden = hidden
        self.streams = streams
        size = (2 + streams) * streams
        self.fn = parameter(size, streams * hidden, dtype=fn_dtype)
        self.base = parameter(size, dtype=torch.float32)
        self.scale = parameter(3, dtype=torch.float32)
        self._options = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps}
        self._op: OpFunction = hyper_connection
        self._expand: OpFunction = hyper_expand

    def bind(self, binding: Binding) -> None:
        shapes = {"streams": self.streams, "dim": self.hidden}
        self._op = binding.op("hyper_connection", shapes=shapes, options=self._options)
        self._expand = binding.op("hyper_expand", shapes=shapes)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        post, comb, x = self._op(streams, self.fn, self.base, self.scale, **self._options)
        return post, comb, x

    def expand(self, post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
        """The block's output out [T, H] added to the mixed streams -> [T, n, H]."""
        expanded: Tensor = self._expand(post, comb, out, streams)
        return expanded

    def extra_repr(self) -> str:
        return f"{self.hidden}, streams={self.streams}, {self._options}"


class HyperHead(Component):
    """streams [T, n, H] -> [T, H] after the last layer; `hc_fn` [n, n H], `hc_base` [n], `hc_scale` [1], float32."""

    def __init__(self, hidden: int, streams: int, *, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.hidden = hidden
        self.streams = streams
        self.hc_fn = parameter(streams, streams * hidden, dtype=torch.float32)
        self.hc_base = parameter(streams, dtype=torch.float32)
        self.hc_scale = parameter(1, dtype=torch.float32)
        self._options = {"eps": eps, "norm_eps": norm_eps}
        self._op: OpFunction = hyper_collapse

    def bind(self, binding: Binding) -> None:
        shapes = {"streams": self.streams, "dim": self.hidden}
        self._op = binding.op("hyper_collapse", shapes=shapes, options=self._options)

    def forward(self, streams: Tensor) -> Tensor:
        out: Tensor = self._op(streams, self.hc_fn, self.hc_base, self.hc_scale, **self._options)
        return out
