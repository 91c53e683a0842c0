"""R, how much the serving dtype adds in ours for each unit that it adds in the reference, summed over tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDED_ONCE = 0.2
"""rms relative error of a value rounded once to a dtype, in units of its `eps`."""
SURE = 2.0
"""A ratio counts as too large when it is by this many of its own standard errors."""
LEAST = 2e-5
"""Where the reference stays in float32: sums in another order differ by a tenth of this."""
HEAVIEST = 8.0
"""How many times the middle token's rounding a token counts at most."""


def rounding_unit(dtype: torch.dtype) -> float:
    """rms relative error that one rounding to `dtype` makes."""
    return ROUNDED_ONCE * float(torch.finfo(dtype).eps)


class Ratio:
    """rms(ours - exact) / rms(reference - exact) over all tokens added so far.

    `exact` is the reference in float32 with the weights that both sides have. Where the reference's own rounding is
    less than one rounding to the dtype of its result, as where it only copies, that stands for it.

    A norm of a vector that is almost nothing multiplies both sides' rounding by what it likes: a token on which the two
    together are many times what they are on the middle one is weighed down, on both sides alike.
    """

    def __init__(self, unit: float, least: float = LEAST) -> None:
        """`unit`: what one rounding to the serving dtype adds, relatively. `least`: what is noise wherever it is."""
        self._unit, self._least = unit, least
        self._rows: list[Tensor] = []
        self._weighed: Tensor | None = None
        self.broken = False
        """Whether some value of ours is not finite where the reference's is."""
        self.worst_token: int | None = None
        self._worst = 0.0

    def add(self, ours: Tensor, narrow: Tensor, exact: Tensor, index: Tensor) -> None:
        """Add rows [rows, …] of equal size; `index` [rows] their tokens' places."""
        if not len(index) or not narrow.is_floating_point():
            return
        least = max(rounding_unit(narrow.dtype), self._least) ** 2  # of the dtype that the reference has here
        ours, narrow, exact = (tensor.reshape(len(index), -1).float() for tensor in (ours, narrow, exact))
        size = _squares(exact)
        rows = torch.stack([_squares(ours - exact), _squares(narrow - exact), size, least * size], dim=-1)  # [rows, 4]
        sound = torch.isfinite(rows[:, 1:]).all(dim=-1)
        rows, index = rows[sound], index[sound]
        finite = torch.isfinite(rows[:, 0])
        if not bool(finite.all()):
            self.broken, self.worst_token = True, int(index[~finite][0])
        elif len(rows) and float(rows[:, 0].max()) > self._worst and not self.broken:
            self._worst = float(rows[:, 0].max())
            self.worst_token = int(index[rows[:, 0].argmax()])
        self._rows.append(rows[finite])
        self._weighed = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._rows))

    @property
    def measured(self) -> float:
        """R; 0 where nothing differs."""
        if self.broken:
            return math.inf
        ours, narrow, _ = self._shares().sum(dim=0).tolist()
        return math.sqrt(ours / narrow) if ours else 0.0

    @property
    def allowance(self) -> float:
        """By what factor R may exceed a threshold because few tokens say it: 1 for very many, never more than 2.5."""
        rows = self._shares()
        ours, narrow, _ = rows.sum(dim=0).tolist()
        if not ours or self.broken:
            return 1.0
        return 1.0 + SURE * 0.5 * float((rows[:, 0] / ours - rows[:, 1] / narrow).square().sum().sqrt())

    @property
    def value(self) -> float:
        """R less what the number of tokens leaves open: what is judged."""
        return self.measured / self.allowance

    @property
    def of_serving(self) -> float:
        """R as if the reference rounded its result to the serving dtype at least: above it is more than rounding."""
        _, noise, size = self._shares().sum(dim=0).tolist()
        if self.broken or not size:
            return self.value
        return self.value * min(1.0, math.sqrt(noise / size) / self._unit)

    @property
    def own_noise(self) -> float:
        """rms(reference - exact) / rms(exact): what the dtype adds in the reference."""
        total = torch.cat([*self._rows, torch.zeros(1, 4, dtype=torch.float64)]).sum(dim=0)
        return math.sqrt(float(total[1] / total[2])) if total[2] else 0.0

    def _shares(self) -> Tensor:
        """[tokens, 3]: squares of ours, of the reference (never 0 in sum) and of the values, weighed."""
        if self._weighed is None:
            nothing = [0.0, math.ulp(0.0), 0.0, math.ulp(0.0)]
            rows = torch.cat([*self._rows, torch.tensor([nothing], dtype=torch.float64)])
            both = rows[:, 0] + torch.maximum(rows[:, 1], rows[:, 3])
            most = HEAVIEST * (both.median() or both.mean())
            rows = rows * (most / both).clamp(max=1.0)[:, None]
            # Weighed before the two are compared: one vast token would decide for all.
            narrow = rows[:, 1] if float(rows[:, 1].sum()) >= float(rows[:, 3].sum()) else rows[:, 3]
            self._weighed = torch.stack([rows[:, 0], narrow, rows[:, 2]], dim=-1)
        return self._weighed


def _squares(tensor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=1, dtype=torch.float64)
    return norms.square()
