"""R, how much the serving dtype adds in ours for each unit that it adds in the reference, summed over tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDED_ONCE = 0.2
"""rms relative error of a value rounded once to a dtype, in units of its `eps`."""
SURE = 3.0
"""A ratio counts as too large when it is by this many of its own standard errors."""


def rounding_unit(dtype: torch.dtype) -> float:
    """rms relative error that one rounding to `dtype` makes."""
    return ROUNDED_ONCE * float(torch.finfo(dtype).eps)


class Ratio:
    """rms(ours - exact) / rms(reference - exact) over all tokens added so far.

    `exact` is the reference in float32 with the weights that both sides have. Where the reference's own rounding is
    less than one rounding of its result (`unit`), as where it only copies, that stands for it.
    """

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._rows: list[Tensor] = []
        self._sums: Tensor | None = None
        self.broken = False
        """Whether some value of ours is not finite where the reference's is."""
        self.worst_token: int | None = None
        self._worst = 0.0

    def add(self, ours: Tensor, narrow: Tensor, exact: Tensor, index: Tensor) -> None:
        """Add rows [rows, …] of equal size; `index` [rows] their tokens' places."""
        ours, narrow, exact = (tensor.reshape(len(index), -1).float() for tensor in (ours, narrow, exact))
        rows = torch.stack([_squares(ours - exact), _squares(narrow - exact), _squares(exact)], dim=-1)  # [rows, 3]
        sound = torch.isfinite(rows[:, 1:]).all(dim=-1)
        rows, index = rows[sound], index[sound]
        finite = torch.isfinite(rows[:, 0])
        if len(rows) and not bool(finite.all()):
            self.broken, self.worst_token = True, int(index[~finite][0])
        elif len(rows) and float(rows[:, 0].max()) > self._worst and not self.broken:
            self._worst = float(rows[:, 0].max())
            self.worst_token = int(index[rows[:, 0].argmax()])
        self._rows.append(rows[finite])
        self._sums = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._rows))

    @property
    def measured(self) -> float:
        """R; 0 where nothing differs."""
        if self.broken:
            return math.inf
        ours, narrow = self._totals()
        return math.sqrt(ours / narrow) if ours else 0.0

    @property
    def allowance(self) -> float:
        """By what factor R may exceed a threshold because few tokens say it: 1 for very many, never more than 3.2."""
        ours, narrow = self._totals()
        if not ours or self.broken:
            return 1.0
        rows = torch.cat(self._rows)
        shares = rows[:, 0] / ours - self._noise(rows) / narrow
        return 1.0 + SURE * 0.5 * float(shares.square().sum().sqrt())

    @property
    def value(self) -> float:
        """R less what the number of tokens leaves open: what is judged."""
        return self.measured / self.allowance

    @property
    def own_noise(self) -> float:
        """rms(reference - exact) / rms(exact): what the dtype adds in the reference."""
        if not self.num_tokens:
            return 0.0
        total = torch.cat(self._rows).sum(dim=0)
        return math.sqrt(float(total[1] / total[2])) if total[2] else 0.0

    def _totals(self) -> tuple[float, float]:
        if not self.num_tokens:
            return 0.0, 1.0
        if self._sums is None:
            rows = torch.cat(self._rows)
            self._sums = torch.stack([rows[:, 0].sum(), self._noise(rows).sum()])
        ours, narrow = float(self._sums[0]), float(self._sums[1])
        return ours, narrow or math.ulp(0.0)

    def _noise(self, rows: Tensor) -> Tensor:
        """The reference's share of each row: its own, or one rounding where the whole is less than that."""
        least = self._unit**2 * rows[:, 2]
        return rows[:, 1] if float(rows[:, 1].sum()) >= float(least.sum()) else least


def _squares(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=1, dtype=torch.float64).square()
