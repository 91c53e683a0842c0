"""Fitting the number in a mistake: its likely values first, then steps along the effect until nothing is gained."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.judge import Match, compare
from rtp_runtime.check.causes.scene import Scene

MAX_STEPS = 7
WORTH = 0.5
"""A number is fitted only if its effect has at least this cosine with our error."""
FARTHEST = 0.7
"""No step is longer than this (of the logarithm, where that is what is fitted)."""


def fitted(scene: Scene, fit: Fit) -> Iterator[Hypothesis]:
    """The mistake at its likely values, and at the value that fits."""
    best: tuple[float, float] | None = None  # remaining error, value
    for value in dict.fromkeys(fit.tries):
        if value == fit.right or not math.isfinite(value):
            continue
        hypothesis = fit.at(value)
        yield hypothesis
        match = _match(scene, scene.run(hypothesis))
        if match is not None and (best is None or match.remaining < best[0]):
            best = (match.remaining, value)
        if match is not None and match.exact:
            return
    start = best[1] if best is not None and best[0] < 0.7 * scene.error else fit.right
    found = _newton(scene, fit, start)
    if found is not None:
        for digits in (1, 2, 3, 4, 6):
            rounded = float(f"{found:.{digits}g}")
            if abs(rounded - found) <= 2e-3 * abs(found - fit.right) and rounded != fit.right:
                yield fit.at(rounded, cost=0.1)
                break
        yield fit.at(found, cost=0.2)


def _newton(scene: Scene, fit: Fit, start: float) -> float | None:
    """The value at which least is left, from steps along the effect's direction; None where that does not lead on."""
    value, left = start, math.inf
    for number in range(MAX_STEPS):
        here = scene.base if value == fit.right else scene.run(fit.at(value))
        there = scene.run(fit.at(_stepped(fit, value, 1.0)))
        if here is None or there is None:
            return None
        match = compare(scene.evidence, scene.key, here, there, scene.layer, scene.tolerance())
        if match is None or not match.effect or match.error >= left * 0.999:
            break
        if abs(match.cosine) < WORTH and match.error > 10 * scene.tolerance():
            return None if number == 0 else value
        left, best = match.error, value
        value = _stepped(fit, value, match.coefficient)
        if abs(value - best) <= 1e-7 * abs(best):
            break
    return None if value == fit.right else value


def _stepped(fit: Fit, value: float, steps: float) -> float:
    if fit.log:
        return value * math.exp(max(-FARTHEST, min(FARTHEST, steps * math.log1p(fit.step))))
    return value + steps * fit.step * max(abs(fit.right), 1e-6)


def _match(scene: Scene, capture: Capture | None) -> Match | None:
    return None if capture is None else scene.match(capture)
