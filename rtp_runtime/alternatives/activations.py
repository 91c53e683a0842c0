"""Activations that a modeling file may mean, each once."""

from __future__ import annotations

from rtp_kernel.ops.activation import ACTIVATIONS

ACTIVATION_NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
"""One name for each of the functions in `rtp_kernel.ops.activation`."""


def alternatives_to(name: str) -> tuple[str, ...]:
    """The other functions; all of them for a name that is not known."""
    own = ACTIVATIONS.get(name)
    return tuple(other for other in ACTIVATION_NAMES if ACTIVATIONS[other] is not own)
