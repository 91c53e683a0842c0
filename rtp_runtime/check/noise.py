"""The reference against itself: by how much its own paths disagree, per module and in its logits.

No verdict goes below that. A path that disagrees by far more than rounding does not widen a tolerance: it is an
inconsistency of the reference, shown with the first module and token at which its two runs part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.compare import LOGITS_TOLERANCE, MODULE_TOLERANCE, RelativeError, logits_error, tolerance
from rtp_runtime.check.names import layer_of
from rtp_runtime.check.pairs import pair_tensors
from rtp_runtime.check.paths import ONE_BY_ONE, Effort, OtherPath, other_paths
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.report import Inconsistency

SOUND = 10.0
"""A path counts as noise while it disagrees by less than this many tolerances."""
MOST_NOISE = 5e-3
"""Rounding grows from layer to layer: logits of a path whose modules all agree may be this far off, and be noise."""
FULL = "one full forward"


@dataclass(slots=True)
class Noise:
    """The reference's disagreement with itself. Empty where it offers no second path."""

    logits: dict[str, float] = field(default_factory=dict)
    """Path -> max difference over the standard deviation."""
    modules: dict[str, float] = field(default_factory=dict)
    """Module -> relative error, given the same layer inputs."""
    inconsistent: dict[str, Inconsistency] = field(default_factory=dict)
    """Paths too far off to be noise."""
    set_aside: dict[str, Inconsistency] = field(default_factory=dict)
    """Paths of which every module agrees, and the logits do not: experts or keys among equals were chosen otherwise."""
    confirmed_by: set[str] = field(default_factory=set)
    """Paths through the cache that agree with a full forward."""
    tried: set[str] = field(default_factory=set)
    """Paths through the cache that were run."""

    def module_tolerance(self, module: str) -> float:
        return tolerance(MODULE_TOLERANCE, self.modules.get(module, 0.0))

    @property
    def logits_tolerance(self) -> float:
        aside = self.inconsistent.keys() | self.set_aside.keys()
        sound = [value for path, value in self.logits.items() if path not in aside]
        return tolerance(LOGITS_TOLERANCE, max(sound, default=0.0))

    @property
    def judge(self) -> str:
        """The sound path, with what confirms it; empty if no independent path agrees with it."""
        by = sorted(self.confirmed_by - self.inconsistent.keys())
        return f"{FULL} of the reference" + (f", which agrees with: {by[0]}" if by else "") if self.is_sound else ""

    @property
    def is_sound(self) -> bool:
        """Whether the path that judges, a full forward, agrees with an independent one where there is any."""
        return not self.tried or bool(self.confirmed_by - self.inconsistent.keys())

    @property
    def findings(self) -> tuple[Inconsistency, ...]:
        """What to show of the reference; what was set aside too, where nothing confirms the path that judges."""
        return (*self.inconsistent.values(), *(() if self.is_sound else self.set_aside.values()))

    def merge(self, other: Noise) -> None:
        """Take the larger of each."""
        for mine, theirs in ((self.logits, other.logits), (self.modules, other.modules)):
            for name, value in theirs.items():
                mine[name] = max(value, mine.get(name, 0.0))
        for path, found in other.inconsistent.items():
            self.inconsistent.setdefault(path, found)
        for path, found in other.set_aside.items():
            self.set_aside.setdefault(path, found)
        self.confirmed_by |= other.confirmed_by
        self.tried |= other.tried

    def worst_module(self) -> tuple[str, float] | None:
        """The module in which the reference disagrees with itself most, and by how much."""
        return max(self.modules.items(), key=lambda item: item[1], default=None)


class Replay:
    """Listens to a replay of a capture and sums what differs, module by module."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._left_out = torch.zeros(capture.num_tokens, dtype=torch.bool)
        """Tokens for which other keys were selected: what follows differs by right."""
        self.errors: dict[str, RelativeError] = {}

    def __call__(self, name: str, outputs: tuple[Tensor, ...], start: int) -> None:
        """A module's outputs [rows, …] of the tokens from `start` on."""
        if not outputs:
            return
        index = torch.arange(start, start + len(outputs[0]))
        wanted = [tensor[index] for tensor in self._capture.calls[name].outputs if len(tensor) > int(index[-1])]
        pairing = pair_tensors(outputs, wanted)
        for choices in pairing.selections:
            self._left_out[index] |= choices.changed
        error = self.errors.setdefault(name, RelativeError())
        for pair in pairing.pairs:
            keep = ~self._left_out[index]
            keep = keep if pair.ties is None else keep & ~pair.ties
            error.add(pair.ours[keep], pair.reference[keep], index[keep])

    def first_apart(self) -> tuple[str | None, float]:
        """The first module, in the order of a full forward, that differs by more than noise, and by how much."""
        far = {name: e.value for name, e in self.errors.items() if not e.value <= SOUND * MODULE_TOLERANCE}
        first = next((name for name in self._capture.order if name in far), None)
        return (first, far[first]) if first is not None else (None, 0.0)


def add_noise(
    noise: Noise, reference: Reference, prompt: str, ids: Sequence[int], first: tuple[Tensor, Capture], effort: Effort
) -> None:
    """Run the reference's other paths over one prompt, of which `first` is what a full forward gave."""
    logits, capture = first
    recurrent = len({layer_of(name, reference.layers) for name in capture.attention}) < len(reference.layers)
    for path in other_paths(reference, len(ids), effort, recurrent):
        noise.tried |= {path.name} if path.independent else set()
        try:
            other = path.logits(reference, ids)
        except (RuntimeError, ValueError, IndexError) as error:
            noise.inconsistent.setdefault(path.name, _broken(path.name, prompt, error))
            continue
        _compare(noise, reference, path, Run(prompt, ids, logits[: len(other)], other, capture))


def add_continuation(noise: Noise, other: Tensor, wanted: Tensor) -> None:
    """A continuation's logits against a full forward's, both [tokens, vocab]: a path through the cache that was run."""
    error = logits_error(other, wanted).value
    noise.tried.add(ONE_BY_ONE)
    if error <= SOUND * LOGITS_TOLERANCE:
        noise.confirmed_by.add(ONE_BY_ONE)
        noise.logits[ONE_BY_ONE] = max(error, noise.logits.get(ONE_BY_ONE, 0.0))


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt by a full forward and by another path."""

    prompt: str
    ids: Sequence[int]
    wanted: Tensor
    other: Tensor
    capture: Capture


def _compare(noise: Noise, reference: Reference, path: OtherPath, run: Run) -> None:
    """Sort the other path's disagreement into noise, choices among equals, and inconsistency."""
    error = logits_error(run.other, run.wanted).value
    noise.logits[path.name] = max(error, noise.logits.get(path.name, 0.0))
    replay, near = Replay(run.capture), error <= SOUND * LOGITS_TOLERANCE
    if error > 0.0 and (path.measures_modules or not near):
        path.replay(reference, run.ids, run.capture, replay)
    module, module_error = replay.first_apart()
    if near or (module is None and error <= MOST_NOISE):
        noise.confirmed_by |= {path.name} if path.independent else set()
        _merge_modules(noise, replay)
        return
    token = _first_token(run.other, run.wanted)
    found = Inconsistency(path.name, FULL, run.prompt, error, token, module, module_error)
    (noise.set_aside if module is None else noise.inconsistent).setdefault(path.name, found)


def _broken(path: str, prompt: str, error: Exception) -> Inconsistency:
    words = f"it raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Inconsistency(path, FULL, prompt, math.inf, None, None, math.inf, words)


def _merge_modules(noise: Noise, replay: Replay) -> None:
    for name, error in replay.errors.items():
        if error.value <= SOUND * MODULE_TOLERANCE:
            noise.modules[name] = max(error.value, noise.modules.get(name, 0.0))


def _first_token(other: Tensor, wanted: Tensor) -> int | None:
    rows = (other - wanted).abs().amax(dim=-1) / wanted.std()
    apart = (~(rows <= SOUND * LOGITS_TOLERANCE)).nonzero()
    return int(apart[0]) if len(apart) else None
