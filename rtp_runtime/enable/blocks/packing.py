"""Parameters that our merged projections join from the reference's tensors, whole ones and parts of fused ones."""

from __future__ import annotations

from collections.abc import Sequence

from rtp_runtime.enable.blocks.projection import Projection, stored
from rtp_runtime.enable.code import nested
from rtp_runtime.enable.declarations import Place, joined, shape


def declare_parts(
    place: Place, merged: str, parts: Sequence[Projection], axes: Sequence[str], groups: str = "1"
) -> None:
    """The weight and bias of `merged`.

    Args:
        axes: the variable with the axis of each part.
        groups: code of the number of groups, where a fused tensor deals its parts out to groups.
    """
    leaves = [("weight", ["hidden"]), *([("bias", [])] if parts[0].bias else [])]
    for leaf, more in leaves:
        sources = [_source(place, parts, axes, index, leaf, more, groups) for index in range(len(parts))]
        place.made(f"{merged}.{leaf}", joined(sources))


def _source(
    place: Place, parts: Sequence[Projection], axes: Sequence[str], index: int, leaf: str, more: list[str], groups: str
) -> str:
    projection, axis = parts[index], axes[index]
    dims = [axis, *more]
    if projection.whole:
        return stored(place, projection, leaf, dims)
    inside = [i for i, part in enumerate(parts) if part.name == projection.name]
    inside.sort(key=lambda i: parts[i].start)
    before = [axes[i] for i in inside if parts[i].start < projection.start]
    local = _whole(place, projection, [axes[i] for i in inside], leaf, more, groups)
    start = " + ".join(f"{each}.size" for each in before) or "0"
    if projection.groups == 1:
        return _cut(f"Split({local}, {start}, {axis}.size)", dims)
    share = " // groups"
    start = f"({start}){share}" if len(before) > 1 else f"{start}{share}" if before else start
    return _cut(f"Split({local}, {start}, {axis}.size{share}, dim=1)", dims)


def _cut(split: str, dims: Sequence[str]) -> str:
    return nested("Reshape(", [split, shape(dims)], indent=20)


def _whole(place: Place, part: Projection, axes: Sequence[str], leaf: str, more: list[str], groups: str) -> str:
    """A variable with the fused tensor, its groups in an axis of their own; returns its name."""
    counts = {axis: axes.count(axis) for axis in axes}
    total = " + ".join(f"{count} * {axis}.size" if count > 1 else f"{axis}.size" for axis, count in counts.items())
    name = part.name.replace(".", "_")
    name = name if leaf == "weight" else f"{name}_bias"
    if part.groups == 1:
        source = stored(place, part, leaf, [total, *more])
        head, _, inner = source.partition("(")
        return place.tensor(name, f"{head}(", [inner.removesuffix(")")])
    place.local("groups", groups)
    whole = stored(place, part, leaf, [total, *more])
    return place.tensor(name, "Reshape(", [whole, shape(["groups", f"({total}) // groups", *more])])
