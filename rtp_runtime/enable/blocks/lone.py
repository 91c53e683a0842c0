"""Projections and activations that stand in a decoder layer by themselves, not inside a feed-forward module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.declarations import Place

HIDDEN = "config.hidden_size"


@dataclass(frozen=True)
class LoneLinear(Block):
    """One projection. Sizes are code over `config`."""

    projection: Projection
    inner: str
    outer: str
    sharded: bool = True
    """Its inner width is an axis; else it is a plain number."""
    class_name: str = "Linear"
    word: ClassVar[str] = "projected"

    def make(self) -> str:
        return f"Linear({self.inner}, {self.outer}{self.projection.bias_code})"

    def declare(self, place: Place) -> None:
        out, inner = (self._axis(place, code) for code in (self.outer, self.inner))
        if self.projection.transposed:
            place.made("weight", f"Permute(FromCheckpoint({place.source('weight')}, ({inner}, {out})), (1, 0))")
        else:
            place.weight("weight", out, inner)
        if self.projection.bias:
            place.weight("bias", out)

    def _axis(self, place: Place, code: str) -> str:
        if code == HIDDEN or not self.sharded:
            return "hidden" if code == HIDDEN else code
        return place.axis("intermediate", "intermediate", code)

    def describe(self) -> str:
        return f"a projection{' with bias' if self.projection.bias else ''}"


@dataclass(frozen=True)
class LoneActivation(Block):
    """An activation; `activation` is code over `config`, or a quoted name."""

    activation: str
    class_name: str = "Activation"
    word: ClassVar[str] = "inner"

    def make(self) -> str:
        return f"Activation({self.activation})"

    def declare(self, place: Place) -> None:
        """It has no weights."""

    def describe(self) -> str:
        return f"activation {self.activation}"
