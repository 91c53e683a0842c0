"""The gated feed-forward block, and an activation and a gate on their own."""

from __future__ import annotations

from torch import Tensor

from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.components.linear import Linear, MergedLinear
from rtp_kernel.ops.activation import OAI_ALPHA, check_activation, gated_activation, slope, xielu
from rtp_kernel.ops.activation import activation as activate
from rtp_kernel.registry import OpFunction


class GatedMLP(Component):
    """down_proj(act(gate_proj(x)) * up_proj(x)); gate and up are one product, `gate_up_proj`.

    `activation` is a Hugging Face name or "swiglu_oai", of which `alpha` is the slope; `limit` clamps gate and up as in
    `rtp_kernel.ops.activation.gated_activation`.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: str = "silu",
        bias: bool = False,
        limit: float | None = None,
        alpha: float = OAI_ALPHA,
    ) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self.limit = limit
        self._slope = slope(activation, alpha)
        self.gate_up_proj = MergedLinear(hidden, {"gate_proj": intermediate, "up_proj": intermediate}, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)
        self._op: OpFunction = gated_activation

    def bind(self, binding: Binding) -> None:
        options = {"activation": self.activation, "limit": self.limit, **self._slope}
        self._op = binding.op("gated_activation", shapes={"dim": self.down_proj.in_features}, options=options)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)
        inner = self._op(gate, up, self.activation, self.limit, **self._slope)
        out: Tensor = self.down_proj(inner)
        return out


class Activation(Component):
    """x [..., dim] -> the same shape, elementwise; `activation` is a Hugging Face name."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self._op: OpFunction = activate

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("activation", options={"activation": self.activation})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._op(x, self.activation)
        return out


class XIELU(Component):
    """x [..., dim] -> the same shape: the activation with learned curvatures `alpha_p` and `alpha_n` [1].

    `beta` and `eps` [] are constants that checkpoints hold as tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = parameter(1)
        self.alpha_n = parameter(1)
        self.beta = parameter()
        self.eps = parameter()

    def forward(self, x: Tensor) -> Tensor:
        return xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


class Gate(Component):
    """act(gate) * x: gate [T, dim] or [T, 1], x [T, dim] -> [T, dim]; `activation` is a Hugging Face name."""

    def __init__(self, activation: str = "sigmoid") -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self._op: OpFunction = gated_activation

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("gated_activation", options={"activation": self.activation, "limit": None})

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self._op(gate, x, self.activation)
        return out
