"""From what a model declares to the tree that is executed: names and stacks written out, this rank's units taken.

Sharding is stated on named axes. The node nearest to the root that names a shared axis decides, on its own output; the
shard of a fused parameter is then the fusion of its parts' shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rtp_runtime.errors import PluginError, UsageError
from rtp_runtime.weights.descriptors import (
    Axis,
    Concat,
    Dim,
    FromCheckpoint,
    Interleave,
    Permute,
    Reshape,
    Source,
    Split,
    Stack,
    sizes,
)
from rtp_runtime.weights.operations import Slice, cut, named, shape
from rtp_runtime.weights.regions import full, replaced

Units = Mapping[str, Sequence[int]]
"""Axis name -> the units that a rank holds, in order and perhaps repeated; an axis that is not there is whole."""


def share(axis: Axis, rank: int, size: int) -> range:
    """The units of `axis` that one of `size` ranks holds. Raises UsageError when they cannot be dealt out."""
    if axis.count % size == 0:
        count = axis.count // size
        return range(rank * count, (rank + 1) * count)
    if axis.replicable and size % axis.count == 0:
        unit = rank * axis.count // size
        return range(unit, unit + 1)
    fitting = [n for n in range(1, axis.count + 1) if axis.count % n == 0]
    raise UsageError(f"{axis.count} {axis.name} cannot be dealt out to {size} ranks. Sizes that fit: {fitting}.")


def axes(source: Source) -> Iterator[Axis]:
    """Every named axis in a descriptor's tree."""
    match source:
        case FromCheckpoint(dims=dims):
            yield from (dim for dim in dims if isinstance(dim, Axis))
        case Concat(parts=parts):
            for part in parts:
                yield from axes(part)
        case Stack(part=part, axis=axis):
            yield axis
            yield from axes(part)
        case Reshape(part=part, dims=dims):
            yield from (dim for dim in dims if isinstance(dim, Axis))
            yield from axes(part)
        case Split(part=part) | Permute(part=part) | Interleave(part=part):
            yield from axes(part)


def lower(source: Source, fields: Mapping[str, int] | None = None, units: Units | None = None) -> Source:
    """The tree of `Slice` leaves under Concat, Permute and Reshape that makes `source` for these name fields and units.

    Raises PluginError where the descriptor does not fit together or does not say how it is shared.
    """
    fields, units = fields or {}, units or {}
    shape(source)
    match source:
        case FromCheckpoint(name=name, dims=dims):
            whole = sizes(dims)
            return _select(Slice(named(name, fields), whole, full(whole)), dims, units)
        case Concat(parts=parts, dim=dim):
            return Concat(tuple(lower(part, fields, units) for part in parts), dim)
        case Stack(part=part, over=over, axis=axis):
            places = units.get(axis.name, range(axis.count))
            rows = (lower(part, {**fields, over: place}, units) for place in places)
            return Concat(tuple(Reshape(row, (1, *shape(row))) for row in rows))
        case Split(part=part, start=start, size=size, dim=dim):
            whole_part = _whole_along(part, dim, fields, units)
            return cut(whole_part, replaced(full(shape(whole_part)), dim, (start, start + size)))
        case Permute(part=part, order=order):
            return Permute(lower(part, fields, units), order)
        case Interleave(part=part, groups=groups, dim=dim):
            return _interleaved(_whole_along(part, dim, fields, units), groups, dim)
        case Reshape(part=part, dims=dims):
            return _reshaped(part, dims, fields, units)
    raise PluginError(f"{type(source).__name__} is not an operation of rtp_runtime.weights.")


def _select(source: Source, dims: Sequence[Dim], units: Units) -> Source:
    for index, dim in enumerate(dims):
        if not isinstance(dim, Axis) or dim.name not in units:
            continue
        region = full(shape(source))
        # Consecutive units are one slice: their place minus their number is the same.
        runs = [
            [unit for _, unit in run] for _, run in groupby(enumerate(units[dim.name]), lambda pair: pair[1] - pair[0])
        ]
        bounds = [(run[0] * dim.unit, (run[-1] + 1) * dim.unit) for run in runs]
        pieces = tuple(cut(source, replaced(region, index, bound)) for bound in bounds)
        source = pieces[0] if len(pieces) == 1 else Concat(pieces, index)
    return source


def _whole_along(part: Source, dim: int, fields: Mapping[str, int], units: Units) -> Source:
    lowered = lower(part, fields, units)
    if shape(lowered)[dim] != shape(part)[dim]:
        raise PluginError(
            f"Axis {dim} is shared among ranks below an operation that moves its elements ({[*_names(part)]}). "
            "Leave it unnamed there and name it above, in the dims of a Reshape."
        )
    return lowered


def _interleaved(part: Source, groups: int, dim: int) -> Source:
    whole = shape(part)
    runs = (*whole[:dim], groups, whole[dim] // groups, *whole[dim + 1 :])
    order = tuple(range(len(runs)))
    order = (*order[:dim], dim + 1, dim, *order[dim + 2 :])
    return Reshape(Permute(Reshape(part, runs), order), whole)


def _reshaped(part: Source, dims: Sequence[Dim], fields: Mapping[str, int], units: Units) -> Source:
    here = {dim.name for dim in dims if isinstance(dim, Axis)} & units.keys()
    lost = (_names(part) & units.keys()) - here
    if lost:
        raise PluginError(f"A Reshape to {sizes(dims)} loses the shared axes {sorted(lost)}. Name them in its dims.")
    return _select(Reshape(lower(part, fields), sizes(dims)), dims, units)


def _names(source: Source) -> set[str]:
    return {axis.name for axis in axes(source)}
