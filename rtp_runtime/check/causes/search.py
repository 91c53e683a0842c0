"""The search: kinds of mistakes from the plainest to the farthest, until one explains the error."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from rtp_runtime.check.causes.activations import activation_mistakes
from rtp_runtime.check.causes.attention import attention_mistakes, attention_numbers
from rtp_runtime.check.causes.attributes import attribute_mistakes, attribute_numbers
from rtp_runtime.check.causes.chunks import chunk_mistakes
from rtp_runtime.check.causes.files import file_mistakes
from rtp_runtime.check.causes.fitting import fitted
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.judge import Match
from rtp_runtime.check.causes.linears import linear_mistakes
from rtp_runtime.check.causes.norms import norm_mistakes, norm_numbers
from rtp_runtime.check.causes.operations import Operations
from rtp_runtime.check.causes.parameters import parameter_mistakes
from rtp_runtime.check.causes.places import place_mistakes
from rtp_runtime.check.causes.rotary import rotary_mistakes, rotary_numbers
from rtp_runtime.check.causes.routers import router_mistakes, router_numbers
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.causes.sums import logit_mistakes, sum_mistakes

SECONDS_OF_SMALL, SECONDS_OF_LARGE = 20.0, 45.0
"""A search ends after so much time of the processor."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One mistake with how it matches."""

    hypothesis: Hypothesis
    match: Match
    mended: int
    """Quantities of the layer that match with it."""


class Search:
    """Tries mistakes on one scene, and keeps those that explain the error and the one that came closest."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.named: list[Tried] = []
        self.closest: Tried | None = None
        self.too_small: Tried | None = None
        """A mistake whose effect is below the noise."""
        self.tried = 0
        small = scene.reference.is_small
        self._until = time.process_time() + (SECONDS_OF_SMALL if small else SECONDS_OF_LARGE)

    @property
    def out_of_time(self) -> bool:
        return time.process_time() > self._until

    def run(self) -> None:
        """Module by module and kind by kind, until one names a cause or time is over."""
        for name in self.scene.suspects():
            self.scene.focus = name
            for family in self._families():
                self._try_all(family)
                if any(each.match.exact for each in self.named) or self.out_of_time:
                    return

    def _try_all(self, family: Callable[[], Iterable[Hypothesis | Fit]]) -> None:
        # Foreign code may be unlike what a kind of mistakes takes it for; the others are tried all the same.
        with suppress(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, StopIteration):
            for item in family():
                for hypothesis in fitted(self.scene, item) if isinstance(item, Fit) else (item,):
                    self.judge(hypothesis)
                if self.out_of_time:
                    return

    def _families(self) -> Iterator[Callable[[], Iterable[Hypothesis | Fit]]]:
        scene, operations = self.scene, Operations(self.scene)
        yield lambda: place_mistakes(scene)
        yield lambda: chunk_mistakes(scene)
        if scene.parts:
            return
        yield lambda: file_mistakes(scene)
        yield lambda: norm_mistakes(scene)
        yield lambda: norm_numbers(scene)
        yield lambda: linear_mistakes(scene)
        yield lambda: rotary_mistakes(scene)
        yield lambda: attention_mistakes(scene)
        yield lambda: activation_mistakes(scene)
        yield lambda: router_mistakes(scene)
        yield lambda: sum_mistakes(scene, 1)
        yield lambda: logit_mistakes(scene)
        yield lambda: parameter_mistakes(scene)
        operations.listen()
        yield lambda: itertools.chain(attribute_mistakes(scene), operations.plain())
        yield lambda: rotary_numbers(scene)
        yield lambda: attention_numbers(scene)
        yield lambda: router_numbers(scene)
        yield operations.factors
        yield lambda: attribute_numbers(scene)
        yield operations.precision
        yield lambda: sum_mistakes(scene, 2)

    def judge(self, hypothesis: Hypothesis) -> None:
        """Try one mistake and keep what came of it."""
        capture = self.scene.run(hypothesis)
        self.tried += 1
        match = self.scene.match(capture) if capture is not None else None
        if capture is None or match is None or match.effect == 0.0:
            return
        if not match.judged:
            if self.too_small is None:
                self.too_small = Tried(hypothesis, match, 0)
            return
        if match.names(rounding=hypothesis.kind == "precision"):
            self.named.append(Tried(hypothesis, match, self.scene.mended(capture)))
        if self.closest is None or match.remaining < self.closest.match.remaining:
            self.closest = Tried(hypothesis, match, 0)

    def best(self) -> list[Tried]:
        """Those that explain the error: exact ones if any, of these the ones that mend most, the plainest first."""
        exact = [each for each in self.named if each.match.exact]
        if exact:
            most = max(each.mended for each in exact)
            return sorted((e for e in exact if e.mended == most), key=lambda each: each.hypothesis.cost)
        return sorted(self.named, key=lambda each: each.match.remaining)
