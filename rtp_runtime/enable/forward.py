"""Writes a decoder layer's forward from the straight-line program that was recognised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rtp_runtime.enable.blocks.positions import Positions
from rtp_runtime.enable.code import WIDTH
from rtp_runtime.enable.findings import Decoder, Kind, Program


def layer_forward(kind: Kind, factors: Mapping[float, str], states: Sequence[str], *, wide: bool = False) -> list[str]:
    """The body: each residual sum becomes `hidden`, each value used twice a variable, the rest is nested.

    Args:
        factors: factor of a sum -> the attribute that holds it.
        states: names of states that are arguments of their own; others are found in `views`.
        wide: the residual stream is float32; norms of it are given their weight's dtype.
    """
    keep: set[str] = set()
    lines = _Writer(kind, factors, states, keep, wide).lines()
    for step in reversed(kind.steps):
        if not any(len(line) + 8 > WIDTH for line in lines):
            break
        keep = keep | {step.name}
        lines = _Writer(kind, factors, states, keep, wide).lines()
    return lines


class _Writer:
    def __init__(
        self, kind: Kind, factors: Mapping[float, str], states: Sequence[str], keep: set[str], wide: bool
    ) -> None:
        self._kind = kind
        self._wide = wide
        self._named_anyway = keep
        self._factors = factors
        self._states = states
        self._sums = [dict(step.inputs) for step in kind.steps] + [dict(kind.output)]
        self._residuals = [step.residual for step in kind.steps]
        self._shorten()
        self._body: list[str] = []
        self._code = {"hidden": "hidden"}

    def _shorten(self) -> None:
        """Replace in each sum the latest earlier sum that it contains: what was the residual stream by then."""
        stream = {"hidden": 1.0}
        for place, terms in enumerate(self._sums):
            self._sums[place] = _shortened(terms, stream)
            stream = terms if len(terms) > 1 else stream
            residual = self._residuals[place] if place < len(self._residuals) else None
            if residual is not None:
                self._residuals[place] = _shortened(residual, stream)

    def lines(self) -> list[str]:
        for place, step in enumerate(self._kind.steps):
            given = self._given(self._sums[place])
            if self._wide and given == "hidden":
                given = f"hidden.to(self.{step.name}.weight.dtype)"
            residual = self._residuals[place]
            if residual is not None:
                given = f"{given}, {self._sum(residual)}"
            arguments = [given, *map(self._argument, self._takes(step.name))]
            code = f"{self._kind.choices(step.name)[0].called(step.name)}({', '.join(arguments)})"
            self._code[step.name] = self._named(step.name, code) if self._keep(step.name, place) else code
        return [*self._body, f"hidden = {self._sum(self._sums[-1])}", "return hidden"]

    def _takes(self, name: str) -> tuple[str, ...]:
        return self._kind.choices(name)[0].takes

    def _argument(self, name: str) -> str:
        return name if name in ("position_embeddings", "batch", *self._states) else f'views["{name}"]'

    def _given(self, terms: Mapping[str, float]) -> str:
        if len(terms) > 1:
            self._body.append(f"hidden = {self._sum(terms)}")
            return "hidden"
        return self._sum(terms)

    def _sum(self, terms: Mapping[str, float]) -> str:
        order = ["hidden", *(step.name for step in self._kind.steps)]
        return " + ".join(self._term(name, terms[name]) for name in order if name in terms)

    def _term(self, name: str, factor: float) -> str:
        return self._code[name] if factor == 1.0 else f"{self._code[name]} * self.{self._factors[factor]}"

    def _keep(self, name: str, place: int) -> bool:
        """A value with several uses, and a stateful block's that is changed before it is added, are given a name."""
        later = [residual for residual in self._residuals[place + 1 :] if residual is not None]
        uses = [terms for terms in (*self._sums[place + 1 :], *later) if name in terms]
        changed = len(uses[0]) == 1 or uses[0][name] != 1.0
        return len(uses) > 1 or name in self._named_anyway or (bool(self._takes(name)) and changed)

    def _named(self, name: str, code: str) -> str:
        variable = self._kind.choices(name)[0].word
        if variable in self._code.values():
            variable = name
        self._body.append(f"{variable} = {code}")
        return variable


def _shortened(terms: Mapping[str, float], stream: Mapping[str, float]) -> dict[str, float]:
    """A sum with the residual stream in place of the terms that it stands for."""
    if len(stream) < 2 or any(terms.get(name) != factor for name, factor in stream.items()):
        return dict(terms)
    return {"hidden": 1.0} | {name: factor for name, factor in terms.items() if name not in stream}


def before_lines(d: Decoder) -> list[str]:
    """From the ids to what the first layer is given."""
    tokens = f"self.{d.embedding_name}(batch.input_ids)" + (".float()" if d.wide_stream else "")
    code = _run(d, d.before, {"tokens": tokens + (" * self.hidden_scale" if d.hidden_scale else "")})
    shape = f"  # [tokens, hidden]{', added up in float32' if d.wide_stream else ''}"
    return [f"hidden = {code}{shape if len(code) + len(shape) + 17 <= WIDTH else ''}"]


def after_lines(d: Decoder) -> list[str]:
    """From what the last layer gave to the result."""
    code = _run(d, d.after, {"hidden": "hidden"}) + (" * self.head_scale" if d.head_scale else "")
    return ["return hidden"] if code == "hidden" else [f"output: Tensor = {code}", "return output"]


def _run(d: Decoder, program: Program, codes: dict[str, str]) -> str:
    """The steps as one nested expression."""
    for step in program.steps:
        block = d.outer[step.name]
        given = block.argument if isinstance(block, Positions) else " + ".join(codes[name] for name in step.inputs)
        codes[step.name] = f"self.{step.name}({given})"
    return " + ".join(codes[name] for name in program.output)
