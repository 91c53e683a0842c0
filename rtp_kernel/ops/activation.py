"""Activations by their Hugging Face names, and their gated forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

OAI_ALPHA = 1.702
"""Slope inside the sigmoid of `swiglu_oai`, unless told otherwise (gpt-oss, MiniMax-M3)."""


def relu2(x: Tensor) -> Tensor:
    """max(x, 0) squared."""
    return functional.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def laplace(x: Tensor) -> Tensor:
    """The normal distribution function around sqrt(1/2) that stands for relu2 in MEGA."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * 2.0**0.5)))


def clipped_gelu(x: Tensor) -> Tensor:
    """gelu between -10 and 10."""
    return functional.gelu(x).clamp(-10, 10)


def sqrt_softplus(x: Tensor) -> Tensor:
    """The square root of softplus."""
    return functional.softplus(x).sqrt()


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU of x (Huang, 2024): a parabola above 0, an exponential below; all others have one element.

    The curvatures are softplus(alpha_p) and beta + softplus(alpha_n); beta is the slope at 0, eps < 0 bounds expm1.
    """
    above, below = functional.softplus(alpha_p), beta + functional.softplus(alpha_n)
    negative = (torch.expm1(torch.minimum(x, eps)) - x) * below + beta * x
    return torch.where(x > 0, above * x * x + beta * x, negative)


_gelu_tanh = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "swish": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "gelu_new": _gelu_tanh,
        "gelu_python_tanh": _gelu_tanh,
        "gelu_fast": _gelu_tanh,
        "gelu_accurate": _gelu_tanh,
        "gelu_python": functional.gelu,
        "gelu_10": clipped_gelu,
        "quick_gelu": quick_gelu,
        "relu": functional.relu,
        "relu2": relu2,
        "relu6": functional.relu6,
        "leaky_relu": functional.leaky_relu,
        "hardswish": functional.hardswish,
        "mish": functional.mish,
        "laplace": laplace,
        "sqrtsoftplus": sqrt_softplus,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
    }
)

GATED = (*ACTIVATIONS, "swiglu_oai")


def check_activation(name: str) -> str:
    """The name itself. Raises ValueError naming the known ones."""
    if name not in GATED:
        raise ValueError(f'activation "{name}" is unknown; known: {", ".join(GATED)}')
    return name


def slope(name: str, alpha: float) -> Mapping[str, float]:
    """The argument `alpha` for the activations that have one, none for the others."""
    return {"alpha": alpha} if name == "swiglu_oai" else {}


def activation(x: Tensor, name: str) -> Tensor:
    """The activation `name` of x, elementwise."""
    return ACTIVATIONS[name](x)


def gated_activation(
    gate: Tensor, up: Tensor, name: str = "silu", limit: float | None = None, alpha: float = OAI_ALPHA
) -> Tensor:
    """act(gate) * up of gate and up [..., dim] -> [..., dim].

    `limit` clamps the gate from above and |up| first (DeepSeek-V4, GLM-5.3). "swiglu_oai" is
    (up + 1) * gate * sigmoid(alpha gate) (gpt-oss, MiniMax-M3).
    """
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if name == "swiglu_oai":
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    return ACTIVATIONS[name](gate) * up
