"""Mixers of Mamba and Mamba 2: a projection, a causal convolution, a state space per request, a gate, a projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.blocks.convolution import Conv, slot_state
from rtp_runtime.enable.blocks.norm import Norm
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.declarations import Place


@dataclass(frozen=True)
class GatedNorm:
    """A norm that is given a gate."""

    eps: str
    groups: str | None
    """Code of how many parts are normed each on its own; None = one."""
    gate_first: bool
    wide: bool
    activation: str = "silu"

    def make(self, dim: str) -> str:
        more = f", groups={self.groups}" if self.groups else ""
        more += ", gate_first=True" if self.gate_first else ""
        more += ", wide=True" if self.wide else ""
        activation = f', "{self.activation}"' if self.activation != "silu" else ""
        return f"GatedRMSNorm({dim}, {self.eps}{activation}{more})"

    def describe(self) -> str:
        groups = f" over {self.groups} groups" if self.groups else ""
        return f"RMSNorm{groups}, eps {self.eps}, {self.activation} gate {'before' if self.gate_first else 'after'} it"


@dataclass(frozen=True)
class StateSpace(Block):
    """Mamba 2's: heads that share groups of B and C, one decay per head."""

    class_name: str
    in_proj: Projection
    conv: Conv
    out_proj: Projection
    heads: str
    head_dim: str
    groups: str
    state_size: str
    order: tuple[str, ...]
    """The parts of the projection: "gate", "mixed" and "dt"; with scales, x, b and c in place of mixed."""
    mixed: tuple[str, ...]
    """The parts of the convolution: "x", "b" and "c"."""
    a_log: str = "A_log"
    skip: str = "D"
    dt_bias: str = "dt_bias"
    limits: str | None = None
    norm: GatedNorm | None = None
    norm_name: str = "norm"
    gate_activation: str = '"silu"'
    factor: str | None = None
    """Code of what the input is multiplied by."""
    scales: str | None = None
    """Code of what each part of the projection is multiplied by."""
    word: ClassVar[str] = "mixed"
    template: ClassVar[str | None] = "state_space.py.jinja"

    def sizes_of(self, parts: tuple[str, ...]) -> str:
        known = {"gate": "inner", "mixed": "inner + 2 * shared", "dt": "heads", "x": "inner"}
        return ", ".join(known.get(part, "shared") for part in parts)

    def declare(self, place: Place) -> None:
        inner = place.local("inner", f"{self.heads} * {self.head_dim}")
        channels = place.local("conv_dim", f"{inner} + 2 * {self.groups} * {self.state_size}")
        self.in_proj.declare(place, f"{inner} + {channels} + {self.heads}", "hidden")
        self.conv.declare(place, channels)
        for name in (self.a_log, self.skip, self.dt_bias):
            pinned(place, name, self.heads)
        if self.norm is not None:
            place.weight(f"{self.norm_name}.weight", inner)
        self.out_proj.declare(place, "hidden", inner)

    def states(self) -> Mapping[str, str]:
        axes = f'axes={{"heads": {self.heads}, "dim": {self.head_dim}, "state": {self.state_size}}}'
        return {"conv": self.conv.state("conv_dim"), "ssm": slot_state("ssm", axes, 'dtype="float32"')}

    def state_locals(self) -> list[str]:
        inner, shared = f"{self.heads} * {self.head_dim}", f"2 * {self.groups} * {self.state_size}"
        return [f"conv_dim = {inner} + {shared}"]

    def describe(self) -> str:
        parts = [f"state space of {self.heads} heads in {self.groups} groups (Mamba 2)", self.conv.describe()]
        parts.append(self.norm.describe() if self.norm else f"gated by {self.gate_activation}")
        parts += [f"steps clamped to {self.limits}"] if self.limits else []
        parts += [f"parts times {self.scales}"] if self.scales else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Selective(Block):
    """Mamba's: every channel has decays of its own, whose step comes from a low-rank projection."""

    class_name: str
    in_proj: Projection
    conv: Conv
    x_proj: Projection
    dt_proj: Projection
    out_proj: Projection
    inner: str
    rank: str
    state_size: str
    halves: tuple[str, ...]
    """ "x" and "gate" in the order in which the projection holds them."""
    order: tuple[str, ...]
    """ "dt", "b" and "c" in the order in which x_proj holds them."""
    norms: tuple[tuple[str, str, Norm], ...] = ()
    """(part, the name of its norm, the norm)"""
    a_log: str = "A_log"
    skip: str = "D"
    word: ClassVar[str] = "mixed"
    template: ClassVar[str | None] = "selective.py.jinja"

    def sizes_of(self, parts: tuple[str, ...]) -> str:
        return ", ".join("rank" if part == "dt" else "state_size" for part in parts)

    def normed(self) -> str:
        return ", ".join(f"self.{name}({part})" for part, name, _ in self.norms)

    def declare(self, place: Place) -> None:
        inner = place.local("inner", self.inner)
        self.in_proj.declare(place, f"2 * {inner}", "hidden")
        self.conv.declare(place, inner)
        self.x_proj.declare(place, f"{self.rank} + 2 * {self.state_size}", inner)
        for part, name, norm in self.norms:
            norm.declare_over(place.child(name), self.rank if part == "dt" else self.state_size)
        self.dt_proj.declare(place, inner, self.rank)
        pinned(place, self.a_log, inner, self.state_size)
        pinned(place, self.skip, inner)
        self.out_proj.declare(place, "hidden", inner)

    def states(self) -> Mapping[str, str]:
        axes = f'axes={{"channels": {self.inner}, "state": {self.state_size}}}'
        return {"conv": self.conv.state(self.inner), "ssm": slot_state("ssm", axes, 'dtype="float32"')}

    def describe(self) -> str:
        norms = [f"{norm.describe()} on {part}" for part, _, norm in self.norms]
        return ", ".join([f"selective state space of {self.inner} channels (Mamba)", self.conv.describe(), *norms])


def pinned(place: Place, name: str, *dims: str) -> None:
    """A tensor of the checkpoint that stays in float32 whatever the model's dtype."""
    dims_code = ", ".join(dims) + ("," if len(dims) == 1 else "")
    place.made(name, f"FromCheckpoint({place.source(name)}, ({dims_code}))", pinned="float32")
