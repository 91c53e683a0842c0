"""Norms: RMSNorm with w or 1 + w, LayerNorm, with or without parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.declarations import Place, shape


@dataclass(frozen=True)
class Norm(Block):
    """A norm module."""

    kind: str
    """"rms" or "layer"."""
    eps: str
    """Code over `config`, or a literal."""
    offset: bool = False
    """Multiplies by 1 + w."""
    bias: bool = False
    weight: bool = True
    per_head: bool = False
    """Each head has parameters of its own."""
    width: str = "config.hidden_size"
    wide: bool = False
    """Multiplies by w before the cast back from float32."""
    pinned: bool = False
    """The weight stays float32 whatever the model's dtype, which is wide as well."""
    class_name: str = "Norm"
    word: ClassVar[str] = "normed"

    def make(self) -> str:
        return self.over(self.width)

    def over(self, dim: str, heads: str | None = None) -> str:
        """The constructor for another width; `heads`: code of how many there are, where each has its own weight."""
        kind = "RMSNorm" if self.kind == "rms" else "LayerNorm"
        more = ", bias=False" if self.kind == "layer" and not self.bias else ""
        more += ", offset=1.0" if self.offset else ""
        more += "" if self.weight else ", weight=False"
        more += f", heads={heads}" if self.per_head else ""
        more += ", dtype=torch.float32" if self.pinned else ", wide=True" if self.wide else ""
        return f"{kind}({dim}, {self.eps}{more})"

    def declare(self, place: Place) -> None:
        self.declare_over(place, "hidden")

    def declare_over(self, place: Place, dim: str) -> None:
        """`dim`: the axis of its parameters."""
        axis = dim.removesuffix(".unit")
        for leaf in (*(["weight"] if self.weight else []), *(["bias"] if self.bias else [])):
            dims = [f"{axis}.count", f"{axis}.unit"] if self.per_head else [dim]
            if self.pinned:
                place.made(leaf, f"FromCheckpoint({place.source(leaf)}, {shape(dims)})", pinned="float32")
            else:
                place.weight(leaf, *dims)

    def describe(self) -> str:
        kind = "RMSNorm" if self.kind == "rms" else "LayerNorm"
        weight = " (1 + w)" if self.offset else "" if self.weight else " without weight"
        return f"{kind}{weight}{' with bias' if self.bias else ''}, eps {self.eps}"
