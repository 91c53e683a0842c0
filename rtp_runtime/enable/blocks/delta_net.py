"""Gated delta nets: a convolution over queries, keys and values, the gated delta rule, a norm with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.blocks.convolution import Conv, slot_state
from rtp_runtime.enable.blocks.packing import declare_parts
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.blocks.state_space import GatedNorm, pinned
from rtp_runtime.enable.code import call
from rtp_runtime.enable.declarations import Place, joined, shape


@dataclass(frozen=True)
class DeltaNet(Block):
    """Linear attention whose state decays by one number per head and is corrected."""

    class_name: str
    mixed: tuple[Projection, ...]
    """What is convolved: one projection of everything, or those of q, k and v in `order`."""
    order: tuple[str, ...]
    """ "q", "k" and "v" as the convolution holds them."""
    conv: Conv
    a: Projection
    b: Projection
    gate: Projection
    out: Projection
    norm: GatedNorm
    norm_name: str
    key_heads: str
    heads: str
    key_dim: str
    value_dim: str
    beta: str | None = None
    """What beta is multiplied by."""
    conv_parts: tuple[str, ...] = ()
    """What checkpoints call the taps of q, k and v in `order`, where they hold them apart."""
    a_log: str = "A_log"
    dt_bias: str = "dt_bias"
    word: ClassVar[str] = "attended"
    template: ClassVar[str | None] = "delta_net.py.jinja"

    def sizes(self) -> str:
        return ", ".join("values" if part == "v" else "keys" for part in self.order)

    def make_mixed(self) -> list[str]:
        """The construction of the projections that are convolved."""
        first = self.mixed[0]
        if len(self.mixed) == 1:
            return [f"self.{first.name} = Linear(config.hidden_size, 2 * keys + values{first.bias_code})"]
        sizes = ["values" if part == "v" else "keys" for part in self.order]
        parts = ", ".join(f'"{part.name}": {size}' for part, size in zip(self.mixed, sizes, strict=True))
        biased = ["bias=True"] if first.bias else []
        return call("self.qkv_proj = MergedLinear(", ["config.hidden_size", f"{{{parts}}}", *biased])

    def mix(self) -> str:
        if len(self.mixed) == 1:
            return f"self.{self.mixed[0].name}(hidden)"
        return "torch.cat(self.qkv_proj(hidden), dim=-1)"

    def declare(self, place: Place) -> None:
        keys = place.axis("key_heads", "key heads", self.key_heads, self.key_dim)
        values = place.axis("value_heads", "value heads", self.heads, self.value_dim)
        if len(self.mixed) == 1:
            self.mixed[0].declare(place, f"2 * {keys}.size + {values}.size", "hidden")
        else:
            declare_parts(place, "qkv_proj", self.mixed, [values if part == "v" else keys for part in self.order])
        if self.conv_parts:
            dims = [[values if part == "v" else keys, "1", self.conv.kernel] for part in self.order]
            apart = zip(self.conv_parts, dims, strict=True)
            sources = [f"FromCheckpoint({place.source(part)}, {shape(each)})" for part, each in apart]
            place.made(f"{self.conv.name}.weight", joined(sources))
        else:
            self.conv.declare(place, f"2 * {keys}.size + {values}.size")
        for projection in (self.a, self.b):
            projection.declare(place, self.heads, "hidden")
        for name in (self.a_log, self.dt_bias):
            pinned(place, name, self.heads)
        self.gate.declare(place, values, "hidden")
        place.weight(f"{self.norm_name}.weight", self.value_dim)
        self.out.declare(place, "hidden", values)

    def states(self) -> Mapping[str, str]:
        axes = f'axes={{"heads": {self.heads}, "key": {self.key_dim}, "value": {self.value_dim}}}'
        delta = slot_state("delta", axes, 'shard="heads"', 'dtype="float32"')
        return {"conv": self.conv.state("conv_dim"), "delta": delta}

    def state_locals(self) -> list[str]:
        keys, values = f"2 * {self.key_heads} * {self.key_dim}", f"{self.heads} * {self.value_dim}"
        return [f"conv_dim = {keys} + {values}"]

    def describe(self) -> str:
        names = ", ".join(part.name for part in self.mixed)
        parts = [f"gated delta rule of {self.heads} heads over {names}", self.conv.describe(), self.norm.describe()]
        return ", ".join(parts + ([f"beta times {self.beta}"] if self.beta else []))
