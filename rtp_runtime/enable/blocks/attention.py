"""Grouped attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rtp_runtime.enable.blocks.base import BY_LAYER, Block, ByLayer, code_of, values_of
from rtp_runtime.enable.blocks.norm import Norm
from rtp_runtime.enable.blocks.projection import Parts, Projection, declare_merged
from rtp_runtime.enable.code import call
from rtp_runtime.enable.declarations import Place
from rtp_runtime.enable.sizes import Sizes
from rtp_runtime.enable.templates import render


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
    q_norm: str | None = None
    """Attribute name of the norm."""
    k_norm: str | None = None
    norm: Norm | None = None
    norm_flat: bool = False
    """Over all heads at once, before they are split."""
    norm_after_rotary: bool = False
    rotary: str | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """`Rotary("half")`, or None where heads are not turned."""
    table: str | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """The layer type whose rotary table turns heads, "" where the model has one table for all."""
    partial: bool | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """Only the leading part of a head, `partial_rotary_factor`, is turned."""
    window: str | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """Code of how many tokens a query sees; None = all."""
    word: ClassVar[str] = "attention"

    @property
    def fused(self) -> bool:
        return self.q.name == self.k.name == self.v.name

    @property
    def merged(self) -> str:
        """What our fused q, k, v is called: as the reference's, where it fuses them too."""
        return self.q.name if self.fused else "qkv_proj"

    @property
    def takes(self) -> tuple[str, ...]:
        return ("position_embeddings", "batch", "kv") if self.rotary else ("batch", "kv")

    def by_layer(self) -> bool:
        return any(isinstance(value, ByLayer) or "layer]" in (value or "") for value in (self.rotary, self.window))

    def source(self) -> list[str]:
        text = render("attention.py.jinja", a=self, by_layer=self.by_layer(), rotary=code_of(self.rotary))
        return text.rstrip("\n").split("\n")

    def projections(self) -> list[str]:
        names = ("q_proj", "k_proj", "v_proj") if self.fused else (self.q.name, self.k.name, self.v.name)
        sizes = ("q_size", "kv_size", "kv_size")
        parts = ", ".join(f'"{name}": {size}' for name, size in zip(names, sizes, strict=True))
        biased = ["bias=True"] if self.q.bias else []
        lines = call(f"self.{self.merged} = MergedLinear(", ["config.hidden_size", f"{{{parts}}}", *biased])
        return [*lines, f"self.{self.out.name} = Linear(q_size, config.hidden_size{self.out.bias_code})"]

    def attn(self) -> list[str]:
        options = {"scale": self.scale, "window": code_of(self.window), "soft_cap": self.soft_cap}
        arguments = [self.sizes.heads, self.sizes.kv_heads, "self.head_dim"]
        arguments += [f"{name}={code}" for name, code in options.items() if code]
        arguments += ["sinks=True"] if self.sinks else []
        return call("self.attn = Attention(", arguments)

    def forward(self) -> list[str]:
        """From the rows to q, k, v as `Attention` takes them."""
        split = "(part.unflatten(-1, (-1, self.head_dim)) for part in "
        shapes = "  # [tokens, heads, dim]"
        q, k = "q", "k"
        if self.norm and self.norm_flat:
            lines = [
                f"q, k, v = self.{self.merged}(hidden)  # [tokens, heads * dim]",
                f"q, k = self.{self.q_norm}(q), self.{self.k_norm}(k)",
                f"q, k, v = {split}(q, k, v)){shapes}",
            ]
        else:
            lines = [f"q, k, v = {split}self.{self.merged}(hidden)){shapes}"]
            if self.norm and not self.norm_after_rotary:
                q, k = f"self.{self.q_norm}(q)", f"self.{self.k_norm}(k)"
        return lines + self._turn(q, k)

    def _turn(self, q: str, k: str) -> list[str]:
        lines = []
        apart = not isinstance(self.rotary, str)
        if apart and q != "q":
            lines.append(f"q, k = {q}, {k}")
        if isinstance(self.rotary, ByLayer):
            lines += ["if self.rotary is not None:", "    q, k = self.rotary(q, k, *position_embeddings)"]
        elif self.rotary:
            lines.append(f"q, k = self.rotary({q}, {k}, *position_embeddings)")
        if self.norm and self.norm_after_rotary:
            lines.append(f"q, k = self.{self.q_norm}(q), self.{self.k_norm}(k)")
        return lines

    def declare(self, place: Place) -> None:
        dim = place.local("head_dim", self.sizes.head_dim) if self.sizes.local else self.sizes.name
        q_heads = place.axis("q_heads", "q heads", self.sizes.heads, dim)
        kv_heads = place.axis("kv_heads", "kv heads", self.sizes.kv_heads, dim, "replicable=True")
        parts: Parts = [(self.q, q_heads), (self.k, kv_heads), (self.v, kv_heads)]
        declare_merged(place, self.merged, parts, f"{q_heads}.size + 2 * {kv_heads}.size")
        self.out.declare(place, "hidden", q_heads)
        if self.sinks:
            place.made("attn.sinks", f"FromCheckpoint({place.source('sinks')}, ({q_heads}.count,))")
        if self.norm:
            axes = (q_heads, kv_heads) if self.norm_flat else (f"{q_heads}.unit", f"{kv_heads}.unit")
            for name, axis in zip((self.q_norm, self.k_norm), axes, strict=True):
                assert name is not None
                self.norm.declare_over(place.child(name), axis)

    def states(self) -> Mapping[str, str | ByLayer]:
        if isinstance(self.window, ByLayer):
            return {"kv": ByLayer(tuple((condition, _state(value)) for condition, value in self.window.cases))}
        return {"kv": _state(self.window)}

    def state_locals(self) -> list[str]:
        axes = ['"kv": 2', f'"kv heads": {self.sizes.kv_heads}', f'"head dim": {self.sizes.name}']
        return [*self.sizes.local, *call("axes = {", axes, "}", indent=4)]

    def describe(self) -> str:
        parts = ["grouped heads, q/k/v in one tensor" if self.fused else "grouped heads"]
        if biased := [p.name for p in (self.q, self.k, self.v, self.out) if p.bias]:
            parts.append(f"biases on {', '.join(dict.fromkeys(biased))}")
        if self.norm is not None:
            parts.append(f"{self.norm.describe()} on q and k, {'all heads at once' if self.norm_flat else 'per head'}")
        parts.append(f"scale {self.scale or 'head_dim**-0.5'}")
        if any(values_of(self.window)):
            parts.append(f"window {code_of(self.window)}")
        parts += [f"scores capped at {self.soft_cap}"] if self.soft_cap else []
        return ", ".join(parts + (["sinks"] if self.sinks else []))


def _state(window: str | None) -> str:
    if window is None:
        return 'PagedState(axes=axes, shard="kv heads")'
    return f'WindowState(axes=axes, shard="kv heads", window={window})'
