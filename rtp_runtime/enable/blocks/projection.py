"""Linear modules of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtp_runtime.enable.declarations import Place, shape


@dataclass(frozen=True)
class Projection:
    """A linear module of the reference, and which part of its output is meant."""

    name: str
    bias: bool
    start: int = 0
    size: int = 0
    whole: bool = True
    groups: int = 1
    """The part is dealt out to so many runs of the output: `start` and a share of `size` in each."""
    transposed: bool = False
    """The checkpoint holds the weight as [in, out]."""

    @property
    def bias_code(self) -> str:
        return ", bias=True" if self.bias else ""

    def declare(self, place: Place, out: str, inner: str) -> None:
        """`out` and `inner` are the axes of its weight."""
        if self.transposed:
            place.made(f"{self.name}.weight", stored(place, self, "weight", [out, inner]))
        else:
            place.weight(f"{self.name}.weight", out, inner)
        if self.bias:
            place.weight(f"{self.name}.bias", out)


def stored(place: Place, part: Projection, leaf: str, dims: Sequence[str]) -> str:
    """Code of the checkpoint's whole tensor of a projection as [out, in] or [out]."""
    name = place.source(f"{part.name}.{leaf}")
    if part.transposed and leaf == "weight":
        return f"Permute(FromCheckpoint({name}, {shape(dims[::-1])}), (1, 0))"
    return f"FromCheckpoint({name}, {shape(dims)})"
