"""The matched filter: how much of our error one mistake's effect explains, and what is left of it then."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.causes.evidence import Evidence, Pairs
from rtp_runtime.check.probe_table import ProbeKey

FLOOR = 5e-7
SHARE = 0.25
"""What is left of an error that is explained is rounding: below `FLOOR`, or this share of the error."""
NEAR_ONE = 0.1
EXPLAINED = 0.05
"""A coefficient near 1 names a cause only if no more than this share of the error is left: a relative of the mistake,
as another approximation of the same function, leaves more."""
ROUNDED = 0.35
"""The share that may be left of an error of rounding, which no other program makes bit for bit."""


@dataclass(frozen=True, slots=True)
class Match:
    """One mistake's effect against our error, at the accused module."""

    coefficient: float
    remaining: float
    """rms(ours - mistaken reference) / rms(reference)"""
    effect: float
    error: float
    cosine: float
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether ours is the reference with the mistake, within rounding."""
        return self.remaining <= left_at_most(self.error, self.tolerance) and self.effect > 0.0

    def names(self, rounding: bool = False) -> bool:
        """Whether the mistake explains the error: exactly, or with a coefficient near 1 and little left.

        `rounding`: the mistake is a lower precision.
        """
        left = ROUNDED if rounding else EXPLAINED
        near = abs(self.coefficient - 1.0) <= NEAR_ONE and self.remaining <= left * self.error
        return self.exact or near

    @property
    def judged(self) -> bool:
        """Whether the effect is large enough to be told from rounding."""
        return self.effect > self.tolerance / 4


def left_at_most(error: float, tolerance: float) -> float:
    """What may be left of an error that is explained exactly."""
    return min(tolerance, max(FLOOR, SHARE * error))


def values_of(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Ours and theirs as one vector each."""
    return torch.cat([one.flatten() for one, _ in pairs]), torch.cat([other.flatten() for _, other in pairs])


def compare(
    evidence: Evidence, key: ProbeKey, base: Capture, mistaken: Capture, layer: int | None, allowed: float
) -> Match | None:
    """Project our error on the mistake's effect; None where the two cannot be compared or are not finite."""
    right, wrong = evidence.pairs(key, base, layer), evidence.pairs(key, mistaken, layer)
    if right is None or wrong is None or len(right) != len(wrong):
        return None
    dot = norm_d = norm_e = left = scale = 0.0
    for (ours, reference), (again, mutant) in zip(right, wrong, strict=True):
        ours, reference, again, mutant = _padded(ours, reference, again, mutant)
        if ours.shape != mutant.shape or reference.shape != mutant.shape:
            return None
        error, effect = (ours - reference).double(), (mutant - reference).double()
        dot += float((error * effect).sum())
        norm_d += float(effect.square().sum())
        norm_e += float(error.square().sum())
        left += float((again - mutant).double().square().sum())
        scale += float(reference.double().square().sum())
    if not math.isfinite(dot + norm_d + norm_e + left + scale) or scale == 0.0:
        return None
    size = math.sqrt(scale)
    cosine = dot / math.sqrt(norm_d * norm_e) if norm_d and norm_e else 0.0
    coefficient = dot / norm_d if norm_d else 0.0
    return Match(
        coefficient, math.sqrt(left) / size, math.sqrt(norm_d) / size, math.sqrt(norm_e) / size, cosine, allowed
    )


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Dense rows of routers are as wide as the largest expert that was chosen: all made as wide as the widest."""
    width = max(t.shape[1] for t in tensors)
    return [torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors]


def errors(evidence: Evidence, capture: Capture, layer: int | None) -> dict[ProbeKey, float]:
    """Relative error of each kept quantity against a capture; infinite where shapes differ or values are not finite."""
    found = {}
    for key in evidence.kept:
        pairs = evidence.pairs(key, capture, layer)
        if pairs is None:
            continue
        if any(one.shape != other.shape for one, other in pairs):
            found[key] = math.inf
            continue
        ours, theirs = values_of(pairs)
        gap, size = float((ours - theirs).double().norm()), float(theirs.double().norm())
        found[key] = math.inf if not math.isfinite(gap) else gap / size if size else (0.0 if not gap else math.inf)
    return found
