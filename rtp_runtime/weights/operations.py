"""The operations of weight descriptors: output shape and dtype, apply, invert, and what a slice of the output needs.

`lower` writes out names, stacks and shards; what is left are `Slice` leaves under `Concat`, `Permute` and `Reshape`.
The loader, the plan, the export and the checker all walk that one tree, so that they cannot disagree about a layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rtp_runtime.errors import PluginError
from rtp_runtime.weights.descriptors import (
    Concat,
    FromCheckpoint,
    Interleave,
    Permute,
    Reshape,
    Source,
    Split,
    Stack,
    sizes,
)
from rtp_runtime.weights.dtypes import promote
from rtp_runtime.weights.regions import Region, extents, full, map_region, replaced

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slice(Source):
    """`region` of the checkpoint tensor `name`, whose whole shape is `shape`: the leaf of every lowered tree."""

    name: str
    shape: tuple[int, ...]
    region: Region


def shape(source: Source) -> tuple[int, ...]:
    """Shape of what `source` makes. Raises PluginError where its parts do not fit together."""
    match source:
        case Slice(region=region):
            return extents(region)
        case FromCheckpoint(dims=dims):
            return sizes(dims)
        case Concat(parts=parts, dim=dim):
            return _joined([shape(part) for part in parts], dim)
        case Stack(part=part, axis=axis):
            return (axis.size, *shape(part))
        case Split(part=part, start=start, size=size, dim=dim):
            return _narrowed(shape(part), start, size, dim)
        case Permute(part=part, order=order):
            inner = shape(part)
            _require(
                sorted(order) == list(range(len(inner))), f"order {order} is no permutation of the axes of {inner}"
            )
            return tuple(inner[axis] for axis in order)
        case Interleave(part=part, groups=groups, dim=dim):
            inner = shape(part)
            _require(
                dim < len(inner) and inner[dim] % groups == 0, f"{groups} groups do not divide axis {dim} of {inner}"
            )
            return inner
        case Reshape(part=part, dims=dims):
            inner, outer = shape(part), sizes(dims)
            _require(
                math.prod(inner) == math.prod(outer), f"{inner} cannot be reshaped to {outer}: other element count"
            )
            return outer
    raise PluginError(f"{type(source).__name__} is not an operation of rtp_runtime.weights.")


def output(source: Source, dtypes: Mapping[str, str]) -> tuple[tuple[int, ...], str]:
    """Shape of what a lowered `source` makes, and the dtype that holds all its parts; `dtypes` by tensor name."""
    return shape(source), promote(dtypes[leaf.name] for leaf in leaves(source))


def apply(source: Source, tensors: Mapping[str, Tensor], fields: Mapping[str, int] | None = None) -> Tensor:
    """What `source` makes of whole checkpoint tensors, by the plain torch operations that define it."""
    import torch

    match source:
        case Slice(name=name, region=region):
            return tensors[name][tuple(slice(*bounds) for bounds in region)]
        case FromCheckpoint(name=name):
            return tensors[named(name, fields or {})]
        case Concat(parts=parts, dim=dim):
            return torch.cat([apply(part, tensors, fields) for part in parts], dim)
        case Stack(part=part, over=over, axis=axis):
            return torch.stack([apply(part, tensors, {**(fields or {}), over: value}) for value in range(axis.count)])
        case Split(part=part, start=start, size=size, dim=dim):
            return apply(part, tensors, fields).narrow(dim, start, size)
        case Permute(part=part, order=order):
            return apply(part, tensors, fields).permute(order)
        case Interleave(part=part, groups=groups, dim=dim):
            inner = apply(part, tensors, fields)
            runs = inner.reshape(*inner.shape[:dim], groups, -1, *inner.shape[dim + 1 :])
            return runs.transpose(dim, dim + 1).flatten(dim, dim + 1)
        case Reshape(part=part, dims=dims):
            return apply(part, tensors, fields).reshape(sizes(dims))
    raise PluginError(f"{type(source).__name__} is not an operation of rtp_runtime.weights.")


def invert(source: Source, tensor: Tensor) -> Iterator[tuple[Slice, Tensor]]:
    """The leaves of a lowered `source`, each with the view of `tensor` (what `source` makes) that holds its values.

    Writing the views is applying, reading them is inverting: no element belongs to two of them, or to none.
    """
    match source:
        case Slice():
            yield source, tensor
        case Concat(parts=parts, dim=dim):
            start = 0
            for part in parts:
                size = shape(part)[dim]
                yield from invert(part, tensor.narrow(dim, start, size))
                start += size
        case Permute(part=part, order=order):
            back = sorted(range(len(order)), key=order.__getitem__)
            yield from invert(part, tensor.permute(back))
        case Reshape(part=part):
            yield from _invert_reshape(source, part, tensor)
        case _:
            raise AssertionError(f"{type(source).__name__} in a lowered tree")


def _invert_reshape(source: Reshape, part: Source, tensor: Tensor) -> Iterator[tuple[Slice, Tensor]]:
    try:
        view = tensor.view(shape(part))
    except RuntimeError:
        # Strides that no view can follow, as inside a concat along a later axis: go on row by row.
        axis = _first_long_axis(tensor.shape)
        for index in range(tensor.shape[axis]):
            row = cut(source, replaced(full(tensor.shape), axis, (index, index + 1)))
            yield from invert(row, tensor.narrow(axis, index, 1))
    else:
        yield from invert(part, view)


def named(name: str, fields: Mapping[str, int]) -> str:
    """`name` with its fields filled in. Raises PluginError for a field that is not given."""
    try:
        return name.format_map(fields)
    except (KeyError, ValueError, IndexError) as error:
        raise PluginError(
            f"The name {name!r} holds a field that `over` does not give; given: {sorted(fields)}."
        ) from error


def needs(source: Source, region: Region) -> tuple[Slice, ...]:
    """The input slices, exactly, that `region` of what a lowered `source` makes is made of."""
    return tuple(leaves(cut(source, region)))


def leaves(source: Source) -> Iterator[Slice]:
    """The leaves of a lowered tree, in order."""
    match source:
        case Slice():
            yield source
        case Concat(parts=parts):
            for part in parts:
                yield from leaves(part)
        case Permute(part=part) | Reshape(part=part):
            yield from leaves(part)
        case _:
            raise AssertionError(f"{type(source).__name__} in a lowered tree")


def cut(source: Source, region: Region) -> Source:
    """The lowered tree that makes exactly `region` of what the lowered tree `source` makes."""
    match source:
        case Slice(name=name, shape=whole, region=base):
            moved = tuple((low + start, low + stop) for (low, _), (start, stop) in zip(base, region, strict=True))
            return Slice(name, whole, moved)
        case Concat(parts=parts, dim=dim):
            return _cut_concat(parts, dim, region)
        case Permute(part=part, order=order):
            inner = dict(zip(order, region, strict=True))
            return Permute(cut(part, tuple(inner[axis] for axis in range(len(order)))), order)
        case Reshape(part=part, dims=dims):
            mapped = map_region(sizes(dims), shape(part), region)
            if mapped is not None:
                return Reshape(cut(part, mapped), extents(region))
            axis = _first_long_axis(extents(region))
            rows = (replaced(region, axis, (row, row + 1)) for row in range(*region[axis]))
            return Concat(tuple(cut(source, row) for row in rows), axis)
    raise AssertionError(f"{type(source).__name__} in a lowered tree")


def _cut_concat(parts: Sequence[Source], dim: int, region: Region) -> Source:
    start, stop = region[dim]
    taken: list[Source] = []
    offset = 0
    for part in parts:
        size = shape(part)[dim]
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            taken.append(cut(part, replaced(region, dim, (low, high))))
        offset += size
    return taken[0] if len(taken) == 1 else Concat(tuple(taken), dim)


def _first_long_axis(dims: Sequence[int]) -> int:
    return next(axis for axis, size in enumerate(dims) if size > 1)


def _joined(shapes: Sequence[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    _require(bool(shapes), "a Concat has no parts")
    first = shapes[0]
    _require(0 <= dim < len(first), f"axis {dim} does not exist in {first}")
    fits = all(len(other) == len(first) and replaced(other, dim, 0) == replaced(first, dim, 0) for other in shapes)
    _require(fits, f"parts of shapes {list(shapes)} cannot be joined along axis {dim}")
    return replaced(first, dim, sum(other[dim] for other in shapes))


def _narrowed(inner: tuple[int, ...], start: int, size: int, dim: int) -> tuple[int, ...]:
    _require(0 <= dim < len(inner), f"axis {dim} does not exist in {inner}")
    _require(
        start >= 0 and size > 0 and start + size <= inner[dim],
        f"[{start}, {start + size}) is not in axis {dim} of {inner}",
    )
    return replaced(inner, dim, size)


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise PluginError(f"A weight descriptor does not fit together: {problem}.")
