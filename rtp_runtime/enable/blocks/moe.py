"""Mixtures of experts: a router, routed experts, and feed-forward blocks that every token passes beside them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.blocks.mlp import Mlp
from rtp_runtime.enable.code import INDENT, WIDTH, call, nested
from rtp_runtime.enable.declarations import Place, shape


@dataclass(frozen=True)
class Router:
    """Which experts serve a token, and with which weights."""

    name: str
    """Of the child that it stands for."""
    weight: str
    """Path of the gate's weight inside the block; so the others."""
    num_experts: str
    top_k: str
    options: tuple[tuple[str, str], ...]
    """Arguments of `TopKRouter`: name and code."""
    bias: str | None = None
    """Of the gate's product."""
    correction: str | None = None
    """What is added for the choice only."""
    correction_shape: tuple[str, ...] = ("experts.count",)
    pinned: bool = False
    """The product is in float32 whatever the model's dtype."""

    def make(self) -> list[str]:
        arguments = ["config.hidden_size", self.num_experts, self.top_k]
        arguments += [f"{name}={code}" for name, code in self.options]
        arguments += ["bias=True"] if self.correction else []
        arguments += ["gate_bias=True"] if self.bias else []
        arguments += ["dtype=torch.float32"] if self.pinned else []
        return call(f"self.{self.name} = TopKRouter(", arguments)

    def declare(self, place: Place, layouts: bool) -> None:
        """`layouts`: checkpoints hold experts apart or fused; where names differ too, each layout has its own."""
        pinned = "float32" if self.pinned else None
        places: list[tuple[Place, str | None]] = [(place, None)]
        tensors = (("weight", self.weight, ["experts", "hidden"]), ("bias", self.bias, ["experts"]))
        if layouts and any(place.renames.get(f"{place.name}.{inside}") for inside in self._tensors()):
            places = [(place, "per_expert"), (dataclasses.replace(place, renames={}), "fused")]
        for each, layout in places:
            for leaf, inside, dims in tensors:
                own = f"{self.name}.{leaf}"
                if inside == own and not pinned and layout is None and each.source(own) == each.leaf(own):
                    each.weight(own, *dims)
                elif inside is not None:
                    source = f"FromCheckpoint({each.source(inside)}, {shape(dims)})"
                    each.made(own, source, pinned=pinned, layout=layout)
            if self.correction:
                source = f"FromCheckpoint({each.source(self.correction)}, {shape(self.correction_shape)})"
                if len(self.correction_shape) > 1:
                    source = f"Reshape({source}, (experts.count,))"
                each.made(f"{self.name}.e_score_correction_bias", source, pinned="float32", layout=layout)

    def _tensors(self) -> list[str]:
        return [inside for inside in (self.weight, self.bias, self.correction) if inside is not None]


@dataclass(frozen=True)
class RoutedExperts:
    """Gated experts, all of one width, and how the reference holds their tensors."""

    name: str
    num_experts: str
    width: str
    activation: str
    options: tuple[tuple[str, str], ...]
    """Further arguments of `Experts`."""
    gate_up: tuple[str, ...]
    """Leaf of the fused tensor, or of gate's and up's, gate first."""
    down: str
    order: str = "halves"
    """Of a fused tensor: "halves" (gate first), "swapped" (up first), "turns" (gate and up in turns)."""
    transposed: bool = False
    """Inputs come before outputs."""
    biases: tuple[str, str] | None = None
    """Leaves of the biases of gate and up together, and of down."""
    per_expert: tuple[str, str, str] | None = None
    """Checkpoint names of each expert's gate, up and down inside a layer, with `{expert}`; None = as in the module."""

    def make(self) -> list[str]:
        arguments = [self.num_experts, "config.hidden_size", self.width, self.activation]
        arguments += [f"{name}={code}" for name, code in self.options]
        return call(f"self.{self.name} = Experts(", [*arguments, *(["bias=True"] if self.biases else [])])

    def declare(self, place: Place, intermediate: str) -> None:
        inside = place.child(self.name)
        if self.per_expert is None:
            self._declare_fused(inside, intermediate, None)
            return
        shapes = [f"({intermediate}, hidden)", f"({intermediate}, hidden)", f"(hidden, {intermediate})"]
        sources = [
            place.tensor(name, "FromCheckpoint(", [f'{place.prefix}{pattern}"', dims])
            for name, pattern, dims in zip(("gate", "up", "down"), self.per_expert, shapes, strict=True)
        ]
        both = f'Stack(Concat(({sources[0]}, {sources[1]})), "expert", experts)'
        inside.made("gate_up_proj", both, layout="per_expert")
        inside.made("down_proj", f'Stack({sources[2]}, "expert", experts)', layout="per_expert")
        self._declare_fused(inside, intermediate, "fused")

    def _declare_fused(self, inside: Place, intermediate: str, layout: str | None) -> None:
        wide = f"2 * {intermediate}.size"
        parts = [
            self._stored(inside, leaf, wide if len(self.gate_up) == 1 else intermediate, "hidden", 16)
            for leaf in self.gate_up
        ]
        fused = nested("Concat(", [f"({', '.join(parts)})", "dim=1"], indent=12) if len(parts) == 2 else parts[0]
        inside.made("gate_up_proj", self._ordered(fused, intermediate), layout=layout)
        inside.made("down_proj", self._stored(inside, self.down, "hidden", intermediate, 12), layout=layout)
        if self.biases:
            for name, leaf, dim in zip(
                ("gate_up_proj_bias", "down_proj_bias"), self.biases, (wide, "hidden"), strict=True
            ):
                stored = f"FromCheckpoint({inside.source(leaf)}, (experts, {dim}))"
                inside.made(name, self._ordered(stored, intermediate) if dim == wide else stored, layout=layout)

    def _stored(self, inside: Place, leaf: str, out: str, into: str, indent: int) -> str:
        dims = (into, out) if self.transposed else (out, into)
        source = f"FromCheckpoint({inside.source(leaf)}, {shape(['experts', *dims])})"
        if not self.transposed:
            return source
        return nested("Permute(", [source, "(0, 2, 1)"], indent=indent)

    def _ordered(self, source: str, intermediate: str) -> str:
        """Gate's rows first, then up's."""
        if self.order == "turns":
            return nested("Interleave(", [source, f"{intermediate}.size", "dim=1"], indent=12)
        if self.order == "swapped":
            halves = [
                f"Split({source}, {start}, {intermediate}.size, dim=1)" for start in (f"{intermediate}.size", "0")
            ]
            return nested("Concat(", [nested("(", halves, indent=16), "dim=1"], indent=12)
        return source


@dataclass(frozen=True)
class Shared:
    """A feed-forward block beside the experts; `gate` names the linear module whose sigmoid weighs it."""

    name: str
    mlp: Mlp
    gate: str | None = None


@dataclass(frozen=True)
class MoE(Block):
    """The sum of routed experts and shared blocks, each times a factor."""

    class_name: str
    router: Router
    experts: RoutedExperts
    shared: tuple[Shared, ...]
    factors: tuple[tuple[str, str], ...] = ()
    """Name of a part -> code of its factor, where that is not 1."""
    word: ClassVar[str] = "moe"

    def source(self) -> list[str]:
        shared = [line for each in self.shared if (lines := each.mlp.source()) for line in (*lines, "", "")]
        init = [*self.router.make(), *self.experts.make()]
        for each in self.shared:
            init.append(f"self.{each.name} = {each.mlp.make()}")
            init += [f"self.{each.gate} = Linear(config.hidden_size, 1)"] if each.gate else []
        init += [f"self.{name}_factor = {code}" for name, code in self.factors]
        return [
            *shared,
            f"class {self.class_name}(nn.Module):",
            "    def __init__(self, config: Any) -> None:",
            *(f"        {line}" for line in ("super().__init__()", *init)),
            "",
            "    def forward(self, hidden: Tensor) -> Tensor:",
            f"        weights, ids = self.{self.router.name}(hidden)  # [tokens, experts per token]",
            *(f"        {line}" for line in self._sum()),
            "        return output",
        ]

    def _sum(self) -> list[str]:
        terms = [self._term(self.experts.name, "hidden, weights, ids")]
        for each in self.shared:
            gate = f"torch.sigmoid(self.{each.gate}(hidden)) * " if each.gate else ""
            terms.append(gate + self._term(each.name, "hidden"))
        whole = f"output: Tensor = {' + '.join(terms)}"
        if len(2 * INDENT + whole) <= WIDTH:
            return [whole]
        return [f"output: Tensor = {terms[0]}", *(f"output = output + {term}" for term in terms[1:])]

    def _term(self, name: str, given: str) -> str:
        return f"self.{name}({given})" + (f" * self.{name}_factor" if name in dict(self.factors) else "")

    def declare(self, place: Place) -> None:
        place.axis("experts", "experts", self.router.num_experts)
        intermediate = place.axis("moe_intermediate", "intermediate", self.experts.width)
        self.router.declare(place, self.experts.per_expert is not None)
        self.experts.declare(place, intermediate)
        for each in self.shared:
            each.mlp.declare(place.child(each.name))
            if each.gate:
                place.child(each.gate).weight("weight", "1", "hidden")

    def describe(self) -> str:
        options = ", ".join(f"{name} {code}" for name, code in self.router.options)
        parts = [f"{self.router.top_k} of {self.router.num_experts} experts by {options}"]
        parts += ["with a correction bias"] if self.router.correction else []
        parts += [f"gated by {self.experts.activation}" + (", with biases" if self.experts.biases else "")]
        parts += [f"{each.name} beside them{', gated' if each.gate else ''}" for each in self.shared]
        return ", ".join(parts)
