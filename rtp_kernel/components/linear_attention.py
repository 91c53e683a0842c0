"""What layers of linear attention are made of: the short convolution, the gated delta rule, and the gated norm."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.activation import check_activation
from rtp_kernel.ops.conv import causal_conv
from rtp_kernel.ops.delta_rule import delta_gates, gated_delta_rule
from rtp_kernel.ops.norm import gated_rms_norm
from rtp_kernel.registry import OpFunction


class CausalConv(Component):
    """x [T, channels] -> like x: one causal filter per channel, then the activation; `weight` [channels, 1, kernel].

    `state` is a view of [slots, channels, taps]: `SlotState(axes={"channels": channels, "taps": taps})` with taps =
    (kernel - 1) * dilation. A `dtype` pins the weight, and then the product is computed in it. `bias` adds `bias`
    [channels] before the activation.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        activation: str | None = "silu",
        *,
        bias: bool = False,
        dilation: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dilation = dilation
        self.activation = None if activation is None else check_activation(activation)
        self.weight = parameter(channels, 1, kernel_size, dtype=dtype)
        self.bias = parameter(channels, dtype=dtype) if bias else None
        self._op: OpFunction = causal_conv

    def bind(self, binding: Binding) -> None:
        channels, _, kernel = self.weight.shape
        shapes = {"channels": channels, "kernel": kernel}
        options = {"activation": self.activation, "dilation": self.dilation, "bias": self.bias is not None}
        self._op = binding.op("causal_conv", shapes=shapes, options=options)

    def forward(self, x: Tensor, batch: ForwardBatch, state: StateView) -> Tensor:
        options = {"activation": self.activation, "dilation": self.dilation, "bias": self.bias}
        out: Tensor = self._op(x, self.weight, state, batch, **options)
        return out

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel={self.weight.shape[-1]}, activation={self.activation}"


class GatedDeltaRule(Component):
    """Linear attention with a decaying, corrected state; see `rtp_kernel.ops.delta_rule` for the rule.

    q, k [T, key heads, key dim], v [T, value heads, value dim], log decay g [T, value heads] or [T, value heads, key
    dim] float32, beta [T, value heads] -> [T, value heads, value dim]. `state` is a view of [slots, value heads, key
    dim, value dim]: `SlotState(axes={"heads": ..., "key": ..., "value": ...}, dtype="float32")`. `scale` defaults to
    key dim^-0.5; q and k are l2-normalised with `norm_eps`, or not with None.
    """

    def __init__(
        self,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        scale: float | None = None,
        norm_eps: float | None = 1e-6,
    ) -> None:
        super().__init__()
        if num_value_heads % num_key_heads:
            raise ValueError(f"{num_value_heads} value heads cannot share {num_key_heads} key heads: no multiple")
        self._shapes = {
            "key heads": num_key_heads,
            "value heads": num_value_heads,
            "key dim": key_dim,
            "value dim": value_dim,
        }
        self._options = {"scale": key_dim**-0.5 if scale is None else scale, "norm_eps": norm_eps}
        self._op: OpFunction = gated_delta_rule

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("gated_delta_rule", shapes=self._shapes, options=self._options)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: ForwardBatch, state: StateView
    ) -> Tensor:
        out: Tensor = self._op(q, k, v, g, beta, state, batch, **self._options)
        return out

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self._shapes.items())


class DeltaGates(Component):
    """a, b [T, value heads] -> log decay g (float32) and beta, like a: -exp(A_log) softplus(a + dt_bias), sigmoid(b).

    A_log and dt_bias [value heads] are arguments: the reference holds them in the layer itself.
    """

    def __init__(self, num_value_heads: int) -> None:
        super().__init__()
        self.num_value_heads = num_value_heads
        self._op: OpFunction = delta_gates

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("delta_gates", shapes={"value heads": self.num_value_heads})

    def forward(self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        g, beta = self._op(a, b, A_log, dt_bias)
        return g, beta


class GatedRMSNorm(Component):
    """norm(x) * w * act(gate) of x and gate [..., dim]; `weight` [dim].

    `wide` multiplies by the weight in float32 (GLM-5.3); else the normalised x is cast first (Qwen3-Next). With
    `gate_first` it is norm(x * act(gate)) * w, and with `groups` each of so many equal parts of dim is normed on its
    own (Mamba 2).
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        activation: str = "silu",
        *,
        wide: bool = False,
        groups: int = 1,
        gate_first: bool = False,
    ) -> None:
        super().__init__()
        if dim % groups:
            raise ValueError(f"{groups} groups cannot share {dim} channels evenly")
        self.eps = eps
        self._options = {
            "activation": check_activation(activation),
            "wide": wide,
            "groups": groups,
            "gate_first": gate_first,
        }
        self.weight = parameter(dim)
        self._op: OpFunction = gated_rms_norm

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("gated_rms_norm", shapes={"dim": self.weight.shape[0]}, options=self._options)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = self._op(x, gate, self.weight, self.eps, **self._options)
        return out

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self._options.items())
        return f"{self.weight.shape[0]}, eps={self.eps}, {options}"
