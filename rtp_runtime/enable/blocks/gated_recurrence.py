"""Recurrent blocks of Griffin: a convolution and a gated linear recurrence beside a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.blocks.convolution import Conv, slot_state
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.declarations import Place


@dataclass(frozen=True)
class GatedRecurrence(Block):
    """out(act(gate) * recurrence(conv(x))), whose decay and input are gated per head (RG-LRU)."""

    class_name: str
    cell_class: str
    cell: str
    """Name of the module that recurs."""
    x_proj: Projection
    gate_proj: Projection
    conv: Conv
    out_proj: Projection
    width: str
    heads: str
    activation: str
    rate: str
    input_gate: tuple[str, str]
    """Names of weight and bias."""
    decay_gate: tuple[str, str]
    factor: str
    """What the log of the decay is multiplied by."""
    word: ClassVar[str] = "mixed"
    template: ClassVar[str | None] = "gated_recurrence.py.jinja"

    def declare(self, place: Place) -> None:
        for projection in (self.x_proj, self.gate_proj):
            projection.declare(place, self.width, "hidden")
        self.conv.declare(place, self.width)
        cell = place.child(self.cell)
        cell.weight(self.rate, self.width)
        share = place.local("head_width", f"{self.width} // {self.heads}")
        for weight, bias in (self.input_gate, self.decay_gate):
            cell.weight(weight, self.heads, share, share)
            cell.weight(bias, self.heads, share)
        self.out_proj.declare(place, "hidden", self.width)

    def states(self) -> Mapping[str, str]:
        recurrent = slot_state("recurrent", f'axes={{"channels": {self.width}}}', 'dtype="float32"')
        return {"conv": self.conv.state(self.width), "recurrent": recurrent}

    def describe(self) -> str:
        return f"gated linear recurrence of {self.width} channels (RG-LRU), {self.conv.describe()}"
