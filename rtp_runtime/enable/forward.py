"""Writes a decoder layer's forward from the straight-line program that was recognised."""

from __future__ import annotations

from collections.abc import Mapping

from rtp_runtime.enable.code import WIDTH
from rtp_runtime.enable.findings import Layer


def layer_forward(layer: Layer, factors: Mapping[float, str]) -> list[str]:
    """The body: each residual sum becomes `hidden`, each value used twice a variable, the rest is nested.

    `factors`: factor of a sum -> the attribute that holds it.
    """
    lines = _Writer(layer, factors, keep=set()).lines()
    if any(len(line) + 8 > WIDTH for line in lines):
        lines = _Writer(layer, factors, keep={layer.mlp_name}).lines()
    return lines


class _Writer:
    def __init__(self, layer: Layer, factors: Mapping[float, str], keep: set[str]) -> None:
        self._layer = layer
        self._named_anyway = keep
        self._factors = factors
        self._sums = [dict(step.inputs) for step in layer.steps] + [dict(layer.output)]
        self._shorten()
        self._body: list[str] = []
        self._code = {"hidden": "hidden"}

    def _shorten(self) -> None:
        """Replace in each sum the latest earlier sum that it contains: what was the residual stream by then."""
        stream = {"hidden": 1.0}
        for place, terms in enumerate(self._sums):
            whole = dict(terms)
            if len(stream) > 1 and all(terms.get(name) == factor for name, factor in stream.items()):
                self._sums[place] = {"hidden": 1.0} | {n: f for n, f in terms.items() if n not in stream}
            if len(whole) > 1:
                stream = whole

    def lines(self) -> list[str]:
        for place, step in enumerate(self._layer.steps):
            given = self._given(self._sums[place])
            if step.name == self._layer.attention_name:
                code = f"self.{step.name}({given}, position_embeddings, batch, kv)"
            else:
                code = f"self.{step.name}({given})"
            self._code[step.name] = self._named(step.name, code) if self._keep(step.name, place) else code
        return [*self._body, f"hidden = {self._sum(self._sums[-1])}", "return hidden"]

    def _given(self, terms: Mapping[str, float]) -> str:
        if len(terms) > 1:
            self._body.append(f"hidden = {self._sum(terms)}")
            return "hidden"
        return self._sum(terms)

    def _sum(self, terms: Mapping[str, float]) -> str:
        order = ["hidden", *(step.name for step in self._layer.steps)]
        return " + ".join(self._term(name, terms[name]) for name in order if name in terms)

    def _term(self, name: str, factor: float) -> str:
        return self._code[name] if factor == 1.0 else f"{self._code[name]} * self.{self._factors[factor]}"

    def _keep(self, name: str, place: int) -> bool:
        """A value with several uses, and attention that is changed before it is added, are given a name."""
        uses = [terms for terms in self._sums[place + 1 :] if name in terms]
        changed = len(uses[0]) == 1 or uses[0][name] != 1.0
        return len(uses) > 1 or name in self._named_anyway or (name == self._layer.attention_name and changed)

    def _named(self, name: str, code: str) -> str:
        kinds = {self._layer.attention_name: "attention", self._layer.mlp_name: "feed_forward"}
        variable = kinds.get(name, "normed")
        self._body.append(f"{variable} = {code}")
        return variable
