"""How far our numbers are from the reference's: relative errors summed over tokens.

Nothing here knows of modules or stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MODULE_TOLERANCE = 2e-6
"""Relative error of a sub-block fed the reference's input; the reference's own paths differ by at most 6e-7."""
LOGITS_TOLERANCE = 4e-5
"""max |ours - reference| over the reference's standard deviation. The reference's own paths differ by at most 5.5e-6,
ours from it by up to 2.3e-5 in 270 clean runs; the least fault that shows in no module is at 2e-4."""
NOISE_FACTOR = 3.0
"""A tolerance is never below this many times what the reference's own paths disagree by."""


ROWS = 64
"""Rows that are compared at a time, at least."""
VALUES = 1 << 18
"""Values that are compared at a time where rows are short."""


def tolerance(base: float, noise: float) -> float:
    """The larger of the fixed tolerance and `NOISE_FACTOR` times the reference's own disagreement."""
    return max(base, NOISE_FACTOR * noise) if math.isfinite(noise) else base


class RelativeError:
    """rms(ours - reference) / rms(reference) over all tokens added so far; infinite once a value is not finite."""

    def __init__(self, keep_rows: bool = False) -> None:
        self._rows: list[tuple[Tensor, Tensor]] | None = [] if keep_rows else None
        self._difference = 0.0
        self._reference = 0.0
        self._broken = False
        self._worst_share = -1.0
        self.num_tokens = 0
        self.worst_token: int | None = None
        """Index in its request of the token with the largest error."""

    def add(self, ours: Tensor, reference: Tensor, index: Tensor) -> None:
        """Add rows: `ours` and `reference` [rows, *any of equal size], `index` [rows] their tokens' places."""
        # In pieces: sums in float64 of a large vocabulary's logits are large.
        size = max(ROWS, VALUES // max(1, ours[:1].numel()))
        for place in range(0, len(ours), size):
            piece = slice(place, place + size)
            self._add(ours[piece], reference[piece], index[piece])

    def _add(self, ours: Tensor, reference: Tensor, index: Tensor) -> None:
        ours, reference = ours.reshape(len(ours), -1).float(), reference.reshape(len(reference), -1).float()
        rows = torch.linalg.vector_norm(ours - reference, dim=1, dtype=torch.float64)  # [rows]
        self.num_tokens += len(rows)
        if self._rows is not None:
            self._rows.append((index, rows.float()))
        broken = ~torch.isfinite(rows)
        if bool(broken.any()):
            if not self._broken:
                self.worst_token = int(index[broken][0])
            self._broken = True
            return
        self._difference += float(rows.square().sum())
        self._reference += float(torch.linalg.vector_norm(reference, dtype=torch.float64).square())
        worst = int(rows.argmax())
        if float(rows[worst]) > self._worst_share and not self._broken:
            self._worst_share, self.worst_token = float(rows[worst]), int(index[worst])

    def by_token(self) -> dict[int, float]:
        """Each token's share, in the units of `value`: the root of the mean of their squares is `value`."""
        scale = math.sqrt(self._reference / max(1, self.num_tokens))
        errors: dict[int, float] = {}
        for index, rows in self._rows or ():
            for token, norm in zip(index.tolist(), rows.tolist(), strict=True):
                error = norm / scale if scale else math.inf if norm else 0.0
                errors[token] = max(errors.get(token, 0.0), error if math.isfinite(error) else math.inf)
        return errors

    @property
    def value(self) -> float:
        if self._broken:
            return math.inf
        if self._difference == 0.0:
            return 0.0
        return math.sqrt(self._difference / self._reference) if self._reference else math.inf


@dataclass(frozen=True, slots=True)
class LogitsError:
    """One comparison of logits: the largest difference in units of the reference's standard deviation."""

    value: float
    token: int | None
    """Index of the token at which it is largest."""
    rows: Tensor | None = None
    """[tokens]: the largest difference at each token, in the same units."""


def logits_error(ours: Tensor, reference: Tensor) -> LogitsError:
    """Compare [tokens, vocab] with [tokens, vocab]. A value that is not finite, or another shape, is infinitely far."""
    if ours.shape != reference.shape or not len(ours):
        return LogitsError(0.0 if ours.shape == reference.shape else math.inf, None)
    # In pieces, as their difference would be as large once more.
    starts = range(0, len(ours), ROWS)
    pieces = [(ours[place : place + ROWS] - reference[place : place + ROWS]).abs().amax(dim=-1) for place in starts]
    rows = torch.cat(pieces) / reference.std()  # [tokens]
    if not bool(torch.isfinite(rows).all()):
        return LogitsError(math.inf, int((~torch.isfinite(rows)).nonzero()[0]), rows)
    worst = int(rows.argmax())
    return LogitsError(float(rows[worst]), worst, rows)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings, depth first; everything else is passed over."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from tensors_of(item)
