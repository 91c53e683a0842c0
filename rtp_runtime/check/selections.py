"""Choices of places to attend to, as sets: two that name the same places in another order are the same.

A selection is integers [rows, k] or [rows, groups, k], -1 = none, or a mask of booleans [rows, groups, places].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TIE_UNITS = 4
"""Scores this many units in the last place apart are equal: which of them is chosen, rounding decides."""


def is_selection(tensor: Tensor) -> bool:
    """Whether a per-token tensor names places, rather than holding values or ids of the tokens themselves."""
    return tensor.ndim > 1 and not tensor.is_floating_point() and not tensor.is_complex()


@dataclass(frozen=True, slots=True)
class Choices:
    """Our choice and the reference's for the same rows."""

    ours: Tensor
    reference: Tensor

    def sets(self) -> tuple[Tensor, Tensor]:
        """Both as [rows, groups, places] bool. Where one side has a choice per head, each group's first is taken."""
        width = max(_width(self.ours), _width(self.reference))
        one, other = _as_mask(self.ours, width), _as_mask(self.reference, width)
        if other.shape[1] > one.shape[1] > 1:
            other = other[:, :: other.shape[1] // one.shape[1]]
        groups = max(one.shape[1], other.shape[1])
        return one.expand(-1, groups, -1), other.expand(-1, groups, -1)

    @property
    def of_tokens(self) -> bool:
        """Whether both are masks over tokens, which several places may have been expanded to."""
        return self.ours.dtype == self.reference.dtype == torch.bool

    def row(self, place: int) -> Choices:
        """One row alone."""
        return Choices(self.ours[place : place + 1], self.reference[place : place + 1])

    def in_places(self, tokens_per_place: int) -> Choices:
        """Masks over tokens as masks over the places that hold them."""
        if tokens_per_place == 1:
            return self
        one, other = self.sets()
        extra = -one.shape[-1] % tokens_per_place
        padded = (torch.nn.functional.pad(mask, (0, extra)) for mask in (one, other))
        return Choices(*(mask.reshape(*mask.shape[:2], -1, tokens_per_place).any(dim=-1) for mask in padded))

    @property
    def changed(self) -> Tensor:
        """[rows] bool: rows for which other places were chosen."""
        one, other = self.sets()
        return (one != other).flatten(1).any(dim=-1)


def tied(choices: Choices, scores: Tensor, k: int) -> Tensor:
    """[rows] bool: whether all that the two choose differently scores like the last of the k best, within rounding.

    Args:
        scores: ours, [rows, groups, places] float32, -inf = not visible; places as in `choices`.
    """
    one, other = choices.sets()
    groups = max(one.shape[1], scores.shape[1])
    one, other, scores = (tensor.expand(-1, groups, -1) for tensor in (one, other, scores))
    width = scores.shape[-1]
    disputed = one ^ other  # [rows, groups, places]
    if disputed[..., width:].any():
        return torch.zeros(len(one), dtype=torch.bool)
    disputed = torch.nn.functional.pad(disputed, (0, max(0, width - disputed.shape[-1])))[..., :width]
    even = (one & ~other).sum(dim=-1) == (other & ~one).sum(dim=-1)  # as many in as out
    cut = scores.topk(min(k, width), dim=-1).values[..., -1:]  # [rows, groups, 1]
    near = (scores - cut).abs() <= units(cut)
    legal = (near | ~disputed).all(dim=-1) & even & torch.isfinite(cut[..., 0])
    return (legal | ~disputed.any(dim=-1)).all(dim=-1)


def units(scores: Tensor) -> Tensor:
    """`TIE_UNITS` units in the last place of each float32 score."""
    size = scores.abs()
    return TIE_UNITS * (torch.nextafter(size, torch.full_like(size, torch.inf)) - size)


def _width(tensor: Tensor) -> int:
    if tensor.dtype == torch.bool:
        return tensor.shape[-1]
    return int(tensor.max()) + 1 if tensor.numel() else 0


def _as_mask(tensor: Tensor, width: int) -> Tensor:
    grouped = tensor if tensor.ndim == 3 else tensor[:, None]
    if tensor.dtype == torch.bool:
        return torch.nn.functional.pad(grouped, (0, width - grouped.shape[-1]))
    places = torch.where(grouped < 0, width, grouped.long())
    mask = torch.zeros(*grouped.shape[:2], width + 1, dtype=torch.bool)
    return mask.scatter_(-1, places, True)[..., :width]
