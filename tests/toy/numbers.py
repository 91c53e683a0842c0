"""What model and oracle agree on: sizes and coefficients. Neither shares a line of computation with the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PRIME: Final = 65521
"""Largest prime below 2^16: products are exact in int64 and float64, values in float32."""
WIDTH: Final = 3
"""Numbers of the residual stream of one token."""
VOCAB: Final = 61
WINDOW: Final = 7
TOP_K: Final = 5
SCORES: Final = 4
"""Selection scores are taken modulo this, so that most of them tie."""
BUFFER_INITIAL: Final = 5
STATE_INITIAL: Final = 3


@dataclass(frozen=True)
class ToyConfig:
    """Tokens per entry of the compressed states; 4 shares a block table with the paged states, 32 does not."""

    ratios: tuple[int, ...] = (4,)


def coefficients(layer: int, what: int) -> tuple[int, ...]:
    """[WIDTH] fixed numbers for one projection."""
    return tuple(
        (7919 * (layer + 1) + 104729 * (what + 1) + 1299709 * (place + 1) ** 2) % PRIME for place in range(WIDTH)
    )
