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


_gelu_tanh = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "swish": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "gelu_new": _gelu_tanh,
        "relu": functional.relu,
        "relu2": relu2,
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
