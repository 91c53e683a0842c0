"""Lightning attention with a state per request."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component
from rtp_kernel.ops.lightning import CHUNK, decay_slopes, lightning_attention
from rtp_kernel.registry import OpFunction


class LightningAttention(Component):
    """q, k, v [T, heads, head dim] -> [T, heads * head dim]; see `rtp_kernel.ops.lightning` for the rule.

    The decay follows from the head and from the `layer` of `num_layers`. `state` is a view of [slots, heads, head dim,
    head dim]: `SlotState(axes={"heads": ..., "key": ..., "value": ...}, dtype="float32")`. `chunk` tokens of a prompt
    are computed in parallel.
    """

    slopes: Tensor

    def __init__(self, num_heads: int, head_dim: int, layer: int, num_layers: int, *, chunk: int = CHUNK) -> None:
        super().__init__()
        if not 0 <= layer < num_layers:
            raise ValueError(f"lightning attention in layer {layer} of {num_layers}")
        if chunk < 1:
            raise ValueError(f"lightning attention in chunks of {chunk} tokens; at least 1")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.layer = layer
        self.num_layers = num_layers
        self.chunk = chunk
        self._op: OpFunction = lightning_attention
        self._make_slopes(torch.get_default_device())

    def _make_slopes(self, device: torch.device) -> None:
        slopes = decay_slopes(self.num_heads, self.layer, self.num_layers)
        self.register_buffer("slopes", slopes.to(device), persistent=False)

    def bind(self, binding: Binding) -> None:
        shapes = {"heads": self.num_heads, "head dim": self.head_dim}
        self._op = binding.op("lightning_attention", shapes=shapes, options={"chunk": self.chunk})
        self._make_slopes(binding.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, state: StateView) -> Tensor:
        out: Tensor = self._op(q, k, v, self.slopes, state, batch, chunk=self.chunk)
        return out.flatten(1)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, dim={self.head_dim}, layer={self.layer} of {self.num_layers}"
