"""What the probes measured, and which is the first, in execution order, that differs while its inputs agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rtp_runtime.check.compare import RelativeError
from rtp_runtime.check.names import ATTENTION, layer_of, parent_of, relative_name
from rtp_runtime.check.pairs import Pairing
from rtp_runtime.check.report import Finding, Measure
from rtp_runtime.check.selections import Choices

OUTPUT, INPUT, Q, K, V, CORE, LOGITS = "output", "input", "q", "k", "v", "attention", "logits"
SELECTION, ENTRIES, FED = "selection", "entries", "given"
WHAT = {
    OUTPUT: "output",
    INPUT: "input of the layer, before it is replaced by the reference's",
    Q: "q as attention takes it (after the rotary embedding)",
    K: "k as attention takes it (after the rotary embedding)",
    V: "v as attention takes it",
    CORE: "attention itself (the output projection's input)",
    SELECTION: "the places that are selected to be attended to",
    ENTRIES: "entries of compressed tokens, as they are stored",
    FED: "what the module is given by the mixing of tokens (attention, recurrence, gate)",
    LOGITS: "logits made of the reference's last hidden state",
}
INPUT_FACTOR = 2.0
"""A layer's input, before it is replaced, is the sum of what two blocks before it gave: it may be off by both."""
Tolerance = Callable[[str], float]
"""Module -> the relative error allowed there."""


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """One quantity of one module, by the reference's dotted name."""

    module: str
    what: str = OUTPUT


@dataclass(slots=True)
class Probe:
    """One quantity over one prompt."""

    output: RelativeError = field(default_factory=lambda: RelativeError(keep_rows=True))
    inputs: RelativeError = field(default_factory=RelativeError)
    shapes: str = ""
    """How the shapes differ, where they cannot be compared."""
    num_changed: int = 0
    """Tokens for which other experts were chosen."""
    num_ties: int = 0
    routes: str = ""
    """What it chooses, if it is a choice."""

    @property
    def error(self) -> float:
        return math.inf if self.shapes else self.output.value

    def add(self, pairing: Pairing, index: Tensor, keep: Tensor) -> Tensor:
        """Add one call's outputs, of the rows `keep` [rows] bool. Returns the rows where experts changed by a tie."""
        ties = torch.zeros_like(keep)
        for pair in pairing.pairs:
            if pair.changed is not None and pair.ties is not None:
                ties |= pair.ties
                self.routes = "experts"
                self.num_changed += int(pair.changed.sum())
                self.num_ties += int(pair.ties.sum())
            rows = keep & ~ties
            self.output.add(pair.ours[rows], pair.reference[rows], index[rows])
        if pairing.unmatched:
            sides = [", ".join(str(list(t.shape[1:])) for t in side) for side in (pairing.unmatched, pairing.available)]
            self.shapes = f"shape per token {sides[0]}, the reference has {sides[1] or 'nothing like it'}"
        return ties

    def add_choices(self, choices: Choices, index: Tensor, changed: Tensor, ties: Tensor) -> None:
        """Add selections of places; `changed` and `ties`: [rows] bool."""
        self.routes = "places"
        self.num_changed += int(changed.sum())
        self.num_ties += int(ties.sum())
        one, other = (mask[~ties].float() for mask in choices.sets())
        self.output.add(one, other, index[~ties])

    @property
    def compared(self) -> bool:
        return bool(self.shapes) or self.output.num_tokens > 0 or self.num_ties > 0

    def add_inputs(self, pairing: Pairing, index: Tensor, keep: Tensor) -> None:
        """Add one call's inputs; what has no counterpart there is passed over."""
        for pair in pairing.pairs:
            rows = keep if pair.ties is None else keep & ~pair.ties
            self.inputs.add(pair.ours[rows], pair.reference[rows], index[rows])

    def describe(self, prompt: str) -> str:
        """What a reader should know of a wrong probe, in a line."""
        if self.shapes:
            return self.shapes
        changed = self.num_changed - self.num_ties
        parts = []
        if self.routes:
            parts.append(
                f"other {self.routes} for {changed} of {self.output.num_tokens} tokens"
                if changed
                else f"same {self.routes}, other weights"
            )
        parts.append(f"largest at token {self.output.worst_token} ({prompt})")
        return "; ".join(parts)


class ProbeTable:
    """Errors by probe and prompt.

    `order`: the reference's modules and attention interfaces in order of completion. `consumers`: modules outside the
    layers whose output goes to layers -> the first of these.
    """

    def __init__(self, layers: Mapping[str, int], order: Sequence[str], consumers: Mapping[str, int]) -> None:
        self.layers = layers
        self._consumers = consumers
        self._rank = {name: float(place) for place, name in enumerate(order)}
        self._first_inside: dict[str, float] = {}
        for name, place in self._rank.items():
            layer = next((prefix for prefix in layers if name == prefix or name.startswith(f"{prefix}.")), name)
            self._first_inside.setdefault(layer, place)
        self._probes: dict[ProbeKey, dict[str, Probe]] = {}

    def probe(self, key: ProbeKey, prompt: str) -> Probe:
        return self._probes.setdefault(key, {}).setdefault(prompt, Probe())

    def keys(self) -> list[ProbeKey]:
        """All probes that compared something, in execution order."""
        compared = (key for key, probes in self._probes.items() if any(probe.compared for probe in probes.values()))
        return sorted(compared, key=self.rank)

    def judged_modules(self) -> set[str]:
        return {key.module for key in self.keys()}

    def called_modules(self) -> set[str]:
        """The reference's modules of which ours was called, whether or not that gave something to compare."""
        return {key.module for key in self._probes}

    def num_ties(self, what: str) -> int:
        """Tokens for which other "experts" or "places" were chosen among equals."""
        every = (probe for probes in self._probes.values() for probe in probes.values())
        return sum(probe.num_ties for probe in every if probe.routes == what)

    def rank(self, key: ProbeKey) -> float:
        """Place in execution order: a layer's input before all inside it, q, k and v right before their attention."""
        own = self._rank.get(key.module, math.inf)
        if key.what == INPUT:
            return self._first_inside.get(key.module, own) - 0.5
        if key.what == LOGITS:
            return own + 0.5
        if key.what in (OUTPUT, ENTRIES):
            return own
        if key.what in (FED, SELECTION):
            return own - 0.25
        return self._rank.get(key.module + ATTENTION, own) - 0.1 * (Q, K, V, CORE)[::-1].index(key.what)

    def worst(self, key: ProbeKey) -> tuple[str, Probe]:
        """The prompt on which a probe is worst, and what it measured there."""
        return max(self._probes[key].items(), key=lambda item: item[1].error)

    def measures(self, tolerance: Tolerance) -> list[Measure]:
        """Every probe with its worst prompt, in execution order."""
        return [self._measure(key, allowed(key, tolerance)) for key in self.keys()]

    def findings(self, tolerance: Tolerance, stage: str, where: str = "") -> list[Finding]:
        """Every probe beyond its tolerance, in execution order, each with whether the fault is there."""
        found: dict[ProbeKey, list[tuple[bool, str, Probe]]] = {}
        for prompt in sorted({prompt for probes in self._probes.values() for prompt in probes}):
            for key, cause in self._wrong(prompt, tolerance):
                # A layer's input that the layer before explains is no news.
                if cause or key.what != INPUT:
                    found.setdefault(key, []).append((cause, prompt, self._probes[key][prompt]))
        return [
            self._finding(key, found[key], allowed(key, tolerance), stage, where)
            for key in sorted(found, key=self.rank)
        ]

    def _wrong(self, prompt: str, tolerance: Tolerance) -> Iterator[tuple[ProbeKey, bool]]:
        """The wrong probes of one prompt in execution order, each with whether its inputs agree."""
        wrong: dict[ProbeKey, bool] = {}
        for key in self.keys():
            probe = self._probes[key].get(prompt)
            if probe is not None and not probe.error <= allowed(key, tolerance):
                wrong[key] = self._is_cause(key, prompt, wrong, allowed(key, tolerance))
                yield key, wrong[key]

    def _is_cause(self, key: ProbeKey, prompt: str, wrong: Mapping[ProbeKey, bool], allowed: float) -> bool:
        """Whether its inputs agree and no fault inside the module explains it. `wrong`: those before it."""
        if key.what == INPUT:
            return not any(self._feeds(other, key.module) for other in wrong)
        # What a module is given by the mixing of tokens is the doing of the block around it.
        module = parent_of(key.module) if key.what == FED else key.module
        own = self._probes.get(ProbeKey(module), {}).get(prompt)
        if own is not None and not own.inputs.value <= allowed:
            return False
        causes = [other for other, cause in wrong.items() if cause]
        inside = [other for other in causes if other.module == module or other.module.startswith(f"{module}.")]
        # q, k and v are made side by side: one does not explain the other.
        return not [other for other in inside if key.what not in (Q, K, V) or other.what not in (Q, K, V)]

    def _feeds(self, other: ProbeKey, layer: str) -> bool:
        """Whether `other` explains a wrong input of `layer`: it is in the layer before, or before all layers."""
        index, before = self.layers.get(layer, len(self.layers)), layer_of(other.module, self.layers)
        return before == index - 1 or (index == 0 and before is None)

    def layer(self, module: str) -> int | None:
        """The layer that the module stands in, or is the first to consume its output."""
        inside = layer_of(module, self.layers)
        return self._consumers.get(module) if inside is None else inside

    def _culprit(self, key: ProbeKey) -> str:
        """A layer's input is the doing of the module that holds the layers."""
        if key.what == FED:
            return parent_of(key.module)
        if key.what != INPUT:
            return key.module
        holder = parent_of(key.module)
        return (parent_of(holder) if key.module in self.layers else holder) or key.module

    def _measure(self, key: ProbeKey, allowed: float) -> Measure:
        probes = self._probes[key].values()
        worst = max(probes, key=lambda probe: probe.error)
        column = "layer" if key.module in self.layers else relative_name(key.module, self.layers)
        return Measure(
            name=key.module,
            layer=layer_of(key.module, self.layers),
            column=column if key.what == OUTPUT else f"{column} {key.what}",
            error=worst.error,
            tolerance=allowed,
            inputs_agree=all(probe.inputs.value <= allowed for probe in probes),
            worst_token=worst.output.worst_token,
        )

    def _finding(
        self, key: ProbeKey, wrong: Sequence[tuple[bool, str, Probe]], allowed: float, stage: str, where: str
    ) -> Finding:
        cause, prompt, probe = max(wrong, key=lambda item: (item[0], item[2].error))
        return Finding(
            stage=stage,
            module=self._culprit(key),
            layer=self.layer(key.module),
            error=probe.error,
            tolerance=allowed,
            what=WHAT[key.what],
            detail="; ".join(filter(None, (where, probe.describe(prompt)))),
            cause=cause,
            rank=self.rank(key),
        )


def allowed(key: ProbeKey, tolerance: Tolerance) -> float:
    """What a quantity may be off by: that of its module, of a layer's input `INPUT_FACTOR` times that."""
    return tolerance(key.module) * (INPUT_FACTOR if key.what == INPUT else 1.0)
