"""Causal convolutions: as a part of other blocks, and as the short gated convolution that is a block of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.code import call
from rtp_runtime.enable.declarations import Place


def slot_state(name: str, *arguments: str) -> str:
    """A descriptor as the value under `name` in a dict, broken where that line would be too long."""
    head = f'"{name}": '
    return "\n".join(call(f"{head}SlotState(", arguments, "),", indent=8)).removeprefix(head).removesuffix(",")


@dataclass(frozen=True)
class Conv:
    """A depthwise convolution along a request's tokens, which the reference holds as `nn.Conv1d`."""

    name: str
    kernel: str
    """Code of its number of taps."""
    bias: bool
    activation: str | None
    """Code over `config`, or a quoted name."""

    def make(self, channels: str) -> str:
        return f"CausalConv({channels}, {self.kernel}, {self.activation}{', bias=True' if self.bias else ''})"

    def declare(self, place: Place, channels: str) -> None:
        place.weight(f"{self.name}.weight", channels, "1", self.kernel)
        if self.bias:
            place.weight(f"{self.name}.bias", channels)

    def state(self, channels: str) -> str:
        """The descriptor of its last inputs."""
        return slot_state("conv", f'axes={{"channels": {channels}, "taps": {self.kernel} - 1}}')

    def describe(self) -> str:
        after = f", then {self.activation}" if self.activation else ""
        return f"causal convolution {self.name} of {self.kernel} taps{' with bias' if self.bias else ''}{after}"


@dataclass(frozen=True)
class ShortConv(Block):
    """out(gate * conv(b * x)), of three equal parts of one projection."""

    class_name: str
    in_proj: Projection
    conv: Conv
    out_proj: Projection
    order: tuple[str, ...]
    """ "gate", "b" and "x" in the order in which the projection holds them."""
    word: ClassVar[str] = "convolved"
    template: ClassVar[str | None] = "short_conv.py.jinja"

    def declare(self, place: Place) -> None:
        self.in_proj.declare(place, "3 * hidden", "hidden")
        self.conv.declare(place, "hidden")
        self.out_proj.declare(place, "hidden", "hidden")

    def states(self) -> Mapping[str, str]:
        return {"conv": self.conv.state("config.hidden_size")}

    def describe(self) -> str:
        return f"short gated convolution: {self.conv.describe()}, parts {', '.join(self.order)}"
