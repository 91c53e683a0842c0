"""Linear modules of the reference, and parameters joined from several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtp_runtime.enable.declarations import Place, joined, shape


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


Parts = Sequence[tuple[Projection, str]]
"""Projections and the axes of their outputs, in the order in which they are joined."""


def is_fused(parts: Parts) -> bool:
    """Whether the reference holds all of them in one module."""
    return len(parts) > 1 and len({part.name for part, _ in parts}) == 1


def declare_merged(place: Place, merged: str, parts: Parts, total: str, inner: str = "hidden") -> None:
    """The parameters of `merged`, joined from several tensors, or from runs of one, whose axes are then named.

    `total`: code of the size of the reference's one output, where it is fused.
    """
    leaves = [("weight", [inner]), *([("bias", [])] if parts[0][0].bias else [])]
    for leaf, more in leaves:
        place.made(f"{merged}.{leaf}", joined(_sources(place, parts, total, leaf, more)))


def _sources(place: Place, parts: Parts, total: str, leaf: str, more: list[str]) -> list[str]:
    first = parts[0][0].name
    if not is_fused(parts):
        return [stored(place, part, leaf, [axis, *more]) for part, axis in parts]
    head, _, inner = stored(place, parts[0][0], leaf, [total, *more]).partition("(")
    local = place.tensor(first if leaf == "weight" else f"{first}_bias", f"{head}(", [inner.removesuffix(")")])
    sources = []
    for index, (_, axis) in enumerate(parts):
        start = " + ".join(f"{before}.size" for _, before in parts[:index]) or "0"
        sources.append(f"Reshape(Split({local}, {start}, {axis}.size), {shape([axis, *more])})")
    return sources
