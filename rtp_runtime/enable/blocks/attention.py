"""Grouped attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rtp_runtime.enable.blocks.base import BY_LAYER, Block, ByLayer, code_of, values_of
from rtp_runtime.enable.blocks.norm import Norm
from rtp_runtime.enable.blocks.packing import declare_parts
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.code import call
from rtp_runtime.enable.declarations import Place
from rtp_runtime.enable.sizes import Sizes


@dataclass(frozen=True)
class HeadNorm:
    """A norm of queries, keys or values."""

    name: str
    norm: Norm
    flat: bool = False
    """Over all heads at once, before they are split."""
    after_rotary: bool = False


@dataclass(frozen=True)
class Part:
    """A part of the merged projection."""

    name: str
    """As `MergedLinear` calls it."""
    projection: Projection
    size: str
    """Code of its output's size inside a class."""


@dataclass(frozen=True)
class OutputGate:
    """What attention's result is multiplied by, made of the same rows."""

    projection: Projection
    activation: str
    per_head: bool = False
    """One factor for each head."""


@dataclass(frozen=True)
class Attention(Block):
    """Projections of queries, keys and values, norms and rotary on the way, attention, an output projection."""

    class_name: str
    q: Projection
    k: Projection
    v: Projection
    out: Projection
    sizes: Sizes
    scale: str | None
    """Code over `config`; None = head_dim**-0.5."""
    soft_cap: str | None = None
    sinks: bool = False
    alibi: tuple[str, ...] = ()
    """Keyword arguments of `Attention` for ALiBi."""
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    gate: OutputGate | None = None
    out_norm: tuple[str, Norm] | None = None
    """Attribute name and norm of what the output projection is given."""
    rotary: str | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """`Rotary("half")`, or None where heads are not turned."""
    wide_turn: bool = False
    """Angles are float32, and what they turn is cast back."""
    inverse: bool = False
    """Heads are turned by the opposite angles."""
    table: str | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """The layer type whose rotary table turns heads, "" where the model has one table for all."""
    partial: str | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """Code of how many dimensions of a head are turned; None = all."""
    window: str | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """Code of how many tokens a query sees; None = all."""
    query_factor: str | None = None
    """Code over `config` and `positions` [tokens] of what queries are multiplied by."""
    groups: str | None = None
    """Code of how many groups a fused tensor deals its parts out to; None where each part is one run."""
    query_scale: str | None = None
    """Code of what queries are multiplied by before attention, of whose scale it is then no part."""
    residual: bool = False
    """It adds its result to a residual that it is handed."""
    inner: str | None = None
    """Name of the module inside that holds it all, in a module of the class `outer_class`."""
    outer_class: str | None = None
    word: ClassVar[str] = "attention"
    template: ClassVar[str | None] = "attention.py.jinja"

    @property
    def fused(self) -> bool:
        return self.q.name == self.k.name == self.v.name

    @property
    def parts(self) -> list[Part]:
        """What is read from the rows by one product: q, k, v, and a gate that comes from the same tensor."""
        names = ("q_proj", "k_proj", "v_proj") if self.fused else (self.q.name, self.k.name, self.v.name)
        projections = (self.q, self.k, self.v)
        sizes = ("q_size", "kv_size", "kv_size")
        found = [Part(*each) for each in zip(names, projections, sizes, strict=True)]
        if self.gate is not None and not self.gate.projection.whole:
            found.append(Part("gate_proj", self.gate.projection, "q_size"))
        return found

    @property
    def merged(self) -> str | None:
        """What our fused projection is called: as the reference's, where that has its rows in the same order."""
        if len({part.projection.bias for part in self.parts}) > 1:
            return None
        starts = [part.projection.start for part in self.parts]
        grouped = any(part.projection.groups > 1 for part in self.parts)
        if self.fused and not grouped and starts == sorted(starts):
            return self.q.name
        return "qkv_proj" if self.q.name != "qkv_proj" else "qkv"

    @property
    def takes(self) -> tuple[str, ...]:
        return ("position_embeddings", *super().takes) if self.rotary else super().takes

    @property
    def rotary_code(self) -> str | None:
        return code_of(self.rotary)

    def by_layer(self) -> bool:
        return any(isinstance(value, ByLayer) or "layer]" in (value or "") for value in (self.rotary, self.window))

    def make(self) -> str:
        return (
            super().make() if self.outer_class is None else super().make().replace(self.class_name, self.outer_class, 1)
        )

    def source(self) -> list[str]:
        return [*super().source(), *self._outer()]

    def _outer(self) -> list[str]:
        """The class around it, which hands everything on."""
        if self.outer_class is None:
            return []
        layer = ", layer" if self.by_layer() else ""
        types = {"position_embeddings": "tuple[Tensor, Tensor]", "batch": "ForwardBatch", "kv": "StateView"}
        given = ", ".join(("hidden", *self.takes))
        typed = ["self", "hidden: Tensor", *(f"{name}: {types[name]}" for name in self.takes)]
        return [
            "",
            "",
            f"class {self.outer_class}(nn.Module):",
            f"    def __init__(self, config: Any{', layer: int' if layer else ''}) -> None:",
            "        super().__init__()",
            f"        self.{self.inner} = {self.class_name}(config{layer})",
            "",
            *(f"    {line}" for line in call("def forward(", typed, ") -> Tensor:", indent=4)),
            f"        output: Tensor = self.{self.inner}({given})",
            "        return output",
        ]

    def norms(self) -> list[str]:
        """The lines that make the norms."""
        lines: dict[str, None] = {}
        for head, size in ((self.q_norm, "q_size"), (self.k_norm, "kv_size"), (self.v_norm, "kv_size")):
            if head is not None:
                heads = self.sizes.heads if size == "q_size" else self.sizes.kv_heads
                lines[f"self.{head.name} = {head.norm.over(size if head.flat else 'self.head_dim', heads)}"] = None
        if self.out_norm is not None:
            lines[f"self.{self.out_norm[0]} = {self.out_norm[1].over('q_size')}"] = None
        return list(lines)

    def projections(self) -> list[str]:
        lines = []
        if self.merged is None:
            for part in self.parts:
                bias = part.projection.bias_code
                lines.append(f"self.{part.name} = Linear(config.hidden_size, {part.size}{bias})")
        else:
            sizes = ", ".join(f'"{part.name}": {part.size}' for part in self.parts)
            biased = ["bias=True"] if self.q.bias else []
            lines += call(f"self.{self.merged} = MergedLinear(", ["config.hidden_size", f"{{{sizes}}}", *biased])
        if self.gate is not None and self.gate.projection.whole:
            size = self.sizes.heads if self.gate.per_head else "q_size"
            gate = self.gate.projection
            lines.append(f"self.{gate.name} = Linear(config.hidden_size, {size}{gate.bias_code})")
        if self.gate is not None:
            lines.append(f'self.gate = Gate("{self.gate.activation}")')
        return [*lines, f"self.{self.out.name} = Linear(q_size, config.hidden_size{self.out.bias_code})"]

    def attn(self) -> list[str]:
        options = {"scale": self.scale, "window": code_of(self.window), "soft_cap": self.soft_cap}
        arguments = [self.sizes.heads, self.sizes.kv_heads, "self.head_dim"]
        arguments += [f"{name}={code}" for name, code in options.items() if code]
        arguments += ["sinks=True"] if self.sinks else []
        return call("self.attn = Attention(", [*arguments, *self.alibi])

    def forward(self) -> list[str]:
        """From the rows to the block's output."""
        lines, q, k = self._heads()
        lines += self._turn(q, k)
        if self.v_norm is not None and not self.v_norm.flat:
            lines.append(f"v = self.{self.v_norm.name}(v)")
        if self.query_scale is not None:
            lines.append("q = q * self.scaling")
        if self.query_factor is not None:
            lines.append(f"factor = {self.query_factor}")
            lines.append("q = q * factor[:, None, None].to(q.dtype)")
        return [*lines, *self._output(), f"return {'residual + ' if self.residual else ''}output"]

    def _heads(self) -> tuple[list[str], str, str]:
        """Lines up to q, k, v [tokens, heads, dim], and what stands for q and k after them."""
        names = ["q", "k", "v", "gate"][: len(self.parts)]
        split, shapes = "(part.unflatten(-1, (-1, self.head_dim)) for part in ", "  # [tokens, heads, dim]"
        given = f"self.{self.merged}(hidden)"
        if self.merged is None:
            given = ", ".join(f"self.{part.name}(hidden)" for part in self.parts)
        flat = [
            (x, norm) for x, norm in (("q", self.q_norm), ("k", self.k_norm), ("v", self.v_norm)) if norm and norm.flat
        ]
        if flat or len(names) > 3:
            lines = [f"{', '.join(names)} = {given}  # [tokens, heads * dim]"]
            if flat:
                left, right = (
                    ", ".join(each) for each in ([x for x, _ in flat], [f"self.{n.name}({x})" for x, n in flat])
                )
                lines.append(f"{left} = {right}")
            lines.append(f"q, k, v = {split}(q, k, v)){shapes}")
        else:
            given = f"({given})" if self.merged is None else given
            lines = [f"q, k, v = {split}{given}){shapes}"]
        early = [
            norm if norm and not norm.flat and not norm.after_rotary else None for norm in (self.q_norm, self.k_norm)
        ]
        q, k = (f"self.{norm.name}({x})" if norm else x for x, norm in zip(("q", "k"), early, strict=True))
        return lines, q, k

    def _turn(self, q: str, k: str) -> list[str]:
        lines = []
        changed = [(name, code) for name, code in (("q", q), ("k", k)) if name != code]
        turned = "self.rotary({}, {}, *position_embeddings)"
        if self.inverse:
            turned = "self.rotary({}, {}, cos, -sin)"
        if not isinstance(self.rotary, str) and changed:
            lines.append(f"{', '.join(n for n, _ in changed)} = {', '.join(c for _, c in changed)}")
            q, k = "q", "k"
        apart = ["cos, sin = position_embeddings"] if self.inverse else []
        if isinstance(self.rotary, ByLayer):
            lines += [
                "if self.rotary is not None:",
                *(f"    {line}" for line in (*apart, f"q, k = {turned.format('q', 'k')}")),
            ]
        elif self.rotary:
            turned = turned.format(q, k)
            lines += [*apart, f"q, k = {f'(part.to(v.dtype) for part in {turned})' if self.wide_turn else turned}"]
        late = [(x, n.name) for x, n in (("q", self.q_norm), ("k", self.k_norm)) if n and n.after_rotary]
        if late:
            lines.append(f"{', '.join(x for x, _ in late)} = {', '.join(f'self.{n}({x})' for x, n in late)}")
        return lines

    def _output(self) -> list[str]:
        attended = "self.attn(q, k, v, batch, kv)"
        lines = []
        if self.gate is not None:
            gate = "gate" if not self.gate.projection.whole else f"self.{self.gate.projection.name}(hidden)"
            lines.append(f"attended = {attended}")
            if self.gate.per_head:
                lines.append(f"gate = {gate}.repeat_interleave(self.head_dim, dim=-1)")
                gate = "gate"
            attended = f"self.gate({gate}, attended)"
        if self.out_norm is not None:
            attended = f"self.{self.out_norm[0]}({attended})"
        return [*lines, f"output: Tensor = self.{self.out.name}({attended})"]

    def declare(self, place: Place) -> None:
        if self.inner:
            place = place.child(self.inner)
        dim = place.local("head_dim", self.sizes.head_dim) if self.sizes.local else self.sizes.name
        q_heads = place.axis("q_heads", "q heads", self.sizes.heads, dim)
        kv_heads = place.axis("kv_heads", "kv heads", self.sizes.kv_heads, dim, "replicable=True")
        axes = {"q_size": q_heads, "kv_size": kv_heads}
        self._declare_projections(place, axes)
        self.out.declare(place, "hidden", q_heads)
        if self.sinks:
            place.made("attn.sinks", f"FromCheckpoint({place.source('sinks')}, ({q_heads}.count,))")
        declared = set()
        for head, axis in ((self.q_norm, q_heads), (self.k_norm, kv_heads), (self.v_norm, kv_heads)):
            if head is not None and head.name not in declared:
                head.norm.declare_over(place.child(head.name), axis if head.flat else f"{axis}.unit")
                declared.add(head.name)
        if self.out_norm is not None:
            self.out_norm[1].declare_over(place.child(self.out_norm[0]), q_heads)

    def _declare_projections(self, place: Place, axes: Mapping[str, str]) -> None:
        if self.merged is None:
            for part in self.parts:
                part.projection.declare(place, axes[part.size], "hidden")
        else:
            projections, sizes = zip(*((part.projection, axes[part.size]) for part in self.parts), strict=True)
            declare_parts(place, self.merged, projections, sizes, self.groups or "1")
        if self.gate is not None and self.gate.projection.whole:
            size = f"{axes['q_size']}.count" if self.gate.per_head else axes["q_size"]
            self.gate.projection.declare(place, size, "hidden")

    def states(self) -> Mapping[str, str | ByLayer]:
        if isinstance(self.window, ByLayer):
            return {"kv": ByLayer(tuple((condition, _state(value)) for condition, value in self.window.cases))}
        return {"kv": _state(self.window)}

    def state_locals(self) -> list[str]:
        axes = ['"kv": 2', f'"kv heads": {self.sizes.kv_heads}', f'"head dim": {self.sizes.name}']
        return [*self.sizes.local, *call("axes = {", axes, "}", indent=4)]

    def describe(self) -> str:
        parts = ["grouped heads, q/k/v in one tensor" if self.fused else "grouped heads"]
        parts += [f"dealt out to {self.groups} groups"] if self.groups else []
        if biased := [p.name for p in (self.q, self.k, self.v, self.out) if p.bias]:
            parts.append(f"biases on {', '.join(dict.fromkeys(biased))}")
        parts += self._describe_norms()
        parts.append(f"scale {self.scale or 'head_dim**-0.5'}")
        if any(values_of(self.window)):
            parts.append(f"window {code_of(self.window)}")
        parts += [f"scores capped at {self.soft_cap}"] if self.soft_cap else []
        parts += [f"ALiBi ({', '.join(self.alibi)})"] if self.alibi else []
        parts += [f"gated by {self.gate.activation} of {self.gate.projection.name}"] if self.gate else []
        return ", ".join(parts + (["sinks"] if self.sinks else []))

    def _describe_norms(self) -> list[str]:
        found: dict[str, list[str]] = {}
        for what, head in (("q", self.q_norm), ("k", self.k_norm), ("v", self.v_norm)):
            if head is not None:
                place = "all heads at once" if head.flat else "per head"
                turned = " after they are turned" if head.after_rotary else ""
                found.setdefault(f"{head.norm.describe()} on {{}}, {place}{turned}", []).append(what)
        words = [text.format(" and ".join(which)) for text, which in found.items()]
        return words + ([f"{self.out_norm[1].describe()} before {self.out.name}"] if self.out_norm else [])


def _state(window: str | None) -> str:
    if window is None:
        return 'PagedState(axes=axes, shard="kv heads")'
    return f'WindowState(axes=axes, shard="kv heads", window={window})'
