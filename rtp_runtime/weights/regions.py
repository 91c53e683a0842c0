"""Boxes inside row-major arrays, and how a box of one shape lies in another shape of the same elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

Region = tuple[tuple[int, int], ...]
"""[start, stop) on each axis; never empty."""

T = TypeVar("T")


def full(shape: Sequence[int]) -> Region:
    """All of an array."""
    return tuple((0, size) for size in shape)


def extents(region: Region) -> tuple[int, ...]:
    """Shape of a region."""
    return tuple(stop - start for start, stop in region)


def replaced(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """`values` with another value at `index`."""
    return (*values[:index], value, *values[index + 1 :])


def map_region(outer: Sequence[int], inner: Sequence[int], region: Region) -> Region | None:
    """The region of an array of shape `inner` that holds the elements of `region` of its reshape to `outer`.

    None when they are not one box there.
    """
    mapped: list[tuple[int, int]] = []
    for (o_start, o_stop), (i_start, i_stop) in aligned_groups(outer, inner):
        run = _run(outer[o_start:o_stop], region[o_start:o_stop])
        box = None if run is None else _box(inner[i_start:i_stop], *run)
        if box is None:
            return None
        mapped.extend(box)
    return tuple(mapped)


def aligned_groups(outer: Sequence[int], inner: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The shortest runs of axes, (from, to) outer and (from, to) inner, that hold the same number of elements."""
    groups: list[tuple[tuple[int, int], tuple[int, int]]] = []
    o = i = 0
    while o < len(outer) or i < len(inner):
        o_start, i_start = o, i
        o, i = min(o + 1, len(outer)), min(i + 1, len(inner))
        while (o_size := math.prod(outer[o_start:o])) != (i_size := math.prod(inner[i_start:i])):
            o, i = (o + 1, i) if o_size < i_size else (o, i + 1)
        groups.append(((o_start, o), (i_start, i)))
    return groups


def _run(shape: Sequence[int], region: Region) -> tuple[int, int] | None:
    """First and last flat index of a region whose elements are contiguous, else None."""
    long = [axis for axis, (start, stop) in enumerate(region) if stop - start > 1]
    if long and any(region[axis] != (0, shape[axis]) for axis in range(long[0] + 1, len(shape))):
        return None
    first = last = 0
    for size, (start, stop) in zip(shape, region, strict=True):
        first, last = first * size + start, last * size + stop - 1
    return first, last


def _box(shape: Sequence[int], first: int, last: int) -> Region | None:
    """The box of the flat indices from first to last, else None when they are not one."""
    low, high = _coordinates(shape, first), _coordinates(shape, last)
    differing = [axis for axis in range(len(shape)) if low[axis] != high[axis]]
    if differing:
        tail = range(differing[0] + 1, len(shape))
        if any(low[axis] != 0 or high[axis] != shape[axis] - 1 for axis in tail):
            return None
    return tuple((a, b + 1) for a, b in zip(low, high, strict=True))


def _coordinates(shape: Sequence[int], index: int) -> list[int]:
    coordinates = []
    for axis in range(len(shape)):
        below = math.prod(shape[axis + 1 :])
        coordinates.append(index // below % shape[axis])
    return coordinates


def uncovered(shape: Sequence[int], regions: Sequence[Region]) -> int:
    """How many elements of an array of `shape` lie in none of `regions`."""
    regions = [region for region in regions if len(region) == len(shape)]
    if any(region == full(shape) for region in regions):
        return 0
    # Boxes between neighbouring bounds are either in a region or not.
    bounds = [sorted({0, size, *(edge for r in regions for edge in r[axis])}) for axis, size in enumerate(shape)]
    left = 0
    for corner in itertools.product(*(list(itertools.pairwise(edges)) for edges in bounds)):
        if not any(
            all(r[0] <= c[0] and c[1] <= r[1] for r, c in zip(region, corner, strict=True)) for region in regions
        ):
            left += math.prod(stop - start for start, stop in corner)
    return left
