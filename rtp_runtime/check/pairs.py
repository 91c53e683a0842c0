"""Which of our tensors answers to which of the reference's at one module: by kind and size of a row, without names.

A router's choice is compared as one dense row of weights per token, because the order among chosen experts means
nothing, and because two experts whose scores are equal within noise may stand for each other (a tie).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rtp_runtime.check.selections import Choices, is_selection

TIE_MARGIN = 2e-5
"""Scores closer than this share of the spread of all scores are equal within noise."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Our rows and the reference's rows of one quantity, of equal size per row."""

    ours: Tensor
    reference: Tensor
    changed: Tensor | None = None
    """Routes only: [rows] bool, tokens for which other experts were chosen."""
    ties: Tensor | None = None
    """Routes only: [rows] bool, those of `changed` whose experts the reference itself scores alike."""
    narrow: Tensor | None = None
    """The same rows of the reference in the serving dtype, where that is compared."""
    gaps: Tensor | None = None
    """Routes only: [rows, 2] between which scores of the reference the experts lie that one side chose alone."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Everything comparable at one module, and what of ours has no counterpart there."""

    pairs: tuple[Pair, ...]
    unmatched: tuple[Tensor, ...] = ()
    available: tuple[Tensor, ...] = ()
    """What was left of the reference's for the unmatched ones."""
    selections: tuple[Choices, ...] = ()
    """Places to attend to that both sides chose."""


def pair_tensors(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> Pairing:
    """Match our tensors [rows, …] with the reference's [rows, …], each of ours with the first that fits."""
    ours, left = list(ours), list(reference)
    pairs: list[Pair] = []
    routes = _pair_routes(ours, left)
    if routes:
        pairs.append(routes)
    selections = _pair_selections(ours, left)
    unmatched = []
    for tensor in ours:
        if not any(_alike(tensor, other) for other in left):
            tensor = _once(tensor)
        found = next((i for i, other in enumerate(left) if _alike(tensor, other)), None)
        if found is None:
            unmatched.append(tensor)
        else:
            pairs.append(Pair(tensor, left.pop(found)))
    whole = _joined(unmatched, left)
    if whole is not None:
        pairs.append(whole)
        unmatched = []
    return Pairing(tuple(_aligned(pair) for pair in pairs), tuple(unmatched), tuple(left), selections)


def pair_closest(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> Pairing:
    """Match what several calls of a module gave: each of ours with the closest of the reference's, one for each.

    Ours may have more, as a rotary module that makes further tables; what is left over is passed over.
    """
    best: dict[int, tuple[float, Pair]] = {}
    for tensor in map(_once, ours):
        fits = [(i, _aligned(Pair(tensor, other))) for i, other in enumerate(reference) if _alike(tensor, other)]
        if fits and len(tensor):
            apart = [float((pair.ours.flatten(1) - pair.reference.flatten(1)).abs().sum()) for _, pair in fits]
            nearest = min(range(len(fits)), key=lambda i: apart[i])
            place, pair = fits[nearest]
            if place not in best or apart[nearest] < best[place][0]:
                best[place] = (apart[nearest], pair)
    return Pairing(tuple(pair for _, pair in best.values()))


def _pair_selections(ours: list[Tensor], reference: list[Tensor]) -> tuple[Choices, ...]:
    """Take the selections out of both and pair them in their order; one without a counterpart is passed over."""
    sides = [[tensor for tensor in side if is_selection(tensor)] for side in (ours, reference)]
    for side, taken in zip((ours, reference), sides, strict=True):
        side[:] = [tensor for tensor in side if not any(tensor is other for other in taken)]
    return tuple(Choices(one, other) for one, other in zip(*sides, strict=False))


def _once(table: Tensor) -> Tensor:
    """A rotary table whose angles stand twice, as halves, with each angle once; anything else as it is."""
    half = table.shape[-1] // 2
    if table.ndim < 2 or table.shape[-1] % 2 or not torch.equal(table[..., :half], table[..., half:]):
        return table
    return table[..., :half]


def _joined(ours: Sequence[Tensor], reference: list[Tensor]) -> Pair | None:
    """Parts of ours that the reference has as one tensor (q, k, v of a fused projection), in their order."""
    if len(ours) < 2:
        return None
    whole = torch.cat([tensor.flatten(1) for tensor in ours], dim=-1)
    found = next((i for i, other in enumerate(reference) if _alike(whole, other)), None)
    return None if found is None else Pair(whole, reference.pop(found))


def _aligned(pair: Pair) -> Pair:
    """Rotary tables in one arrangement: angles that stand twice in each, as halves in ours, side by side in theirs."""
    ours, theirs = pair.ours, pair.reference
    half = ours.shape[-1] // 2
    if ours.shape != theirs.shape or ours.ndim < 2 or ours.shape[-1] % 2 or not len(ours):
        return pair
    if not torch.equal(theirs[..., 0::2], theirs[..., 1::2]) or not torch.equal(ours[..., :half], ours[..., half:]):
        return pair
    return replace(pair, ours=ours[..., :half], reference=theirs[..., 0::2])


def _alike(one: Tensor, other: Tensor) -> bool:
    return _row_size(one) == _row_size(other) and one.is_floating_point() == other.is_floating_point()


def _row_size(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:])


def _take_route(tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Remove and return (ids, weights), both [rows, experts per token], if the tensors hold such a pair."""
    ids = next((t for t in tensors if not t.is_floating_point() and t.ndim == 2), None)
    if ids is None:
        return None
    weights = next((t for t in tensors if t.is_floating_point() and t.shape == ids.shape), None)
    if weights is None:
        return None
    tensors[:] = [t for t in tensors if t is not ids and t is not weights]
    return ids.long(), weights


def _pair_routes(ours: list[Tensor], reference: list[Tensor]) -> Pair | None:
    left = list(reference)
    theirs = _take_route(left)
    mine = _take_route(ours) if theirs else None
    if mine is None or theirs is None:
        return None
    reference[:] = left
    num_experts = int(max(mine[0].max(), theirs[0].max())) + 1 if len(mine[0]) else 1
    one, other = (_dense(ids, weights, num_experts) for ids, weights in (mine, theirs))
    chosen, wanted = (_dense(ids, torch.ones_like(weights), num_experts) > 0 for ids, weights in (mine, theirs))
    changed = (chosen != wanted).any(dim=-1)  # [rows]
    scores = next((t for t in left if t.is_floating_point() and t.ndim == 2 and t.shape[1] >= num_experts), None)
    ties, gaps = torch.zeros_like(changed), None
    if scores is not None:
        exchanged = (chosen & ~wanted).any(dim=-1) & (wanted & ~chosen).any(dim=-1)
        gaps = _extremes(scores[:, :num_experts], chosen ^ wanted)
        ties = exchanged & (gaps[:, 1] - gaps[:, 0] <= TIE_MARGIN * scores.std())
    return Pair(one, other, changed, changed & ties, gaps=gaps)


def _dense(ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    return torch.zeros(len(ids), num_experts, dtype=weights.dtype).scatter_(1, ids, weights)


def _extremes(scores: Tensor, disputed: Tensor) -> Tensor:
    """[rows, 2]: the lowest and the highest score of each row's `disputed` experts."""
    highest = scores.masked_fill(~disputed, -math.inf).amax(dim=-1)
    lowest = scores.masked_fill(~disputed, math.inf).amin(dim=-1)
    return torch.stack((lowest, highest), dim=-1)
