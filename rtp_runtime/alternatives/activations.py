"""Activations that a modeling file may mean, each function once."""

from __future__ import annotations

from rtp_kernel.ops.activation import ACTIVATIONS

ACTIVATION_NAMES = tuple(
    dict.fromkeys(
        next(first for first, other in ACTIVATIONS.items() if other is function) for function in ACTIVATIONS.values()
    )
)
"""The first name of each function in `rtp_kernel.ops.activation`."""


def alternatives_to(name: str) -> tuple[str, ...]:
    """The other functions; all of them for a name that is not known."""
    own = ACTIVATIONS.get(name)
    return tuple(other for other in ACTIVATION_NAMES if ACTIVATIONS[other] is not own)
