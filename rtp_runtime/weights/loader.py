"""Fills parameters from a checkpoint, piece by piece, and counts every element of a parameter as it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rtp_runtime.errors import CheckpointError
from rtp_runtime.weights.dtypes import torch_dtype
from rtp_runtime.weights.operations import Slice, invert
from rtp_runtime.weights.plan import LoadPlan, Read
from rtp_runtime.weights.reading import Piece, read_ahead

if TYPE_CHECKING:
    from rtp_runtime.weights.headers import Headers
    from rtp_runtime.weights.resolve import ResolvedLayout

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""

Targets = dict[Slice, list[tuple[str, Tensor]]]
"""What is read -> each parameter that holds it, and the view of that parameter where it belongs."""


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory for one parameter. Floats start as NaN, so that what is never written shows."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return tensor.fill_(float("nan")) if dtype.is_floating_point else tensor.zero_()


def load_weights(
    layout: ResolvedLayout, plan: LoadPlan, parameters: Mapping[str, Tensor], progress: Progress | None = None
) -> None:
    """Fill `parameters` (by name, of the layout's shapes) from the files of `plan`.

    Raises CheckpointError when a file cannot be read to its end, when an element was not written exactly once, or when
    a tensor holds NaN.
    """
    targets = _targets(layout, parameters)
    plan = _by_targets(plan, targets)
    written = dict.fromkeys(parameters, 0)
    done, total = 0, plan.num_bytes
    with torch.no_grad():
        for piece in read_ahead(plan, lambda read, first, last: _place(targets, read, first, last)):
            for part in piece.read.slices:
                for name, view in targets[part]:
                    written[name] += piece.data.numel() if piece.placed else _copy(piece, part, view)
            done += piece.data.nbytes
            if progress is not None:
                progress(done, total)
    _check_written(written, parameters)
    _check_finite(layout, parameters)


def verify_ties(tied: Mapping[str, str], headers: Headers, parameters: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError when a tensor whose parameter is tied differs from what it is tied to.

    `tied`: tensors that are present all the same -> the parameter that stands for them.
    """
    for name, target in tied.items():
        tensor = headers.tensors[name]
        rows = tensor.shape[0] if tensor.shape else 1
        for piece in read_ahead(LoadPlan((Read(tensor, 0, rows, ()),))):
            held = parameters[target][piece.first : piece.last]
            if not torch.equal(piece.data.to(held), held):
                raise CheckpointError(
                    f"{name} in {tensor.file.name} differs from {target}, to which the model ties it. If the head "
                    "is its own, the config must say tie_word_embeddings = false."
                )


def _targets(layout: ResolvedLayout, parameters: Mapping[str, Tensor]) -> Targets:
    targets: Targets = {}
    for parameter in layout.parameters:
        for leaf, view in invert(parameter.source, parameters[parameter.name]):
            targets.setdefault(leaf, []).append((parameter.name, view))
    return targets


def _by_targets(plan: LoadPlan, targets: Targets) -> LoadPlan:
    """The reads, each with the slices that targets hold: strides that no view can follow have cut some into rows."""
    if all(part in targets for read in plan.reads for part in read.slices):
        return plan
    by_name: dict[str, list[Slice]] = {}
    for part in targets:
        by_name.setdefault(part.name, []).append(part)

    def inside(read: Read, part: Slice) -> bool:
        return not part.region or read.first <= part.region[0][0] < read.last

    slices = (tuple(part for part in by_name[read.tensor.name] if inside(read, part)) for read in plan.reads)
    return LoadPlan(tuple(replace(read, slices=held) for read, held in zip(plan.reads, slices, strict=True)))


def _place(targets: Targets, read: Read, first: int, last: int) -> Tensor | None:
    """Where these rows can be read to at once: one parameter on the CPU holds all of them, as they are stored."""
    if len(read.slices) != 1 or len(targets[read.slices[0]]) != 1 or not read.tensor.shape:
        return None
    (part,) = read.slices
    ((_, view),) = targets[part]
    start = part.region[0][0]
    rows = view[first - start : last - start]
    whole = rows.shape[1:] == read.tensor.shape[1:]
    fits = rows.device.type == "cpu" and rows.dtype == torch_dtype(read.tensor.dtype) and rows.is_contiguous()
    return rows if whole and fits else None


def _copy(piece: Piece, part: Slice, view: Tensor) -> int:
    """Copy what a piece holds of `part` into `view`, which holds all of it; the number of elements copied."""
    if not part.region:
        view.copy_(piece.data.reshape(()))
        return 1
    (start, stop), *rest = part.region
    first, last = max(start, piece.first), min(stop, piece.last)
    if first >= last:
        return 0
    rows = piece.data[first - piece.first : last - piece.first]
    target = view[first - start : last - start]
    target.copy_(rows[(slice(None), *(slice(*bounds) for bounds in rest))])
    return target.numel()


def _check_written(written: Mapping[str, int], parameters: Mapping[str, Tensor]) -> None:
    for name, tensor in parameters.items():
        if written[name] != tensor.numel():
            raise CheckpointError(
                f"{name}: {written[name]} of {tensor.numel()} elements were written; each must be, once. "
                "Its weight descriptor is wrong."
            )


def _check_finite(layout: ResolvedLayout, parameters: Mapping[str, Tensor]) -> None:
    for parameter in layout.parameters:
        tensor = parameters[parameter.name]
        # A sum is fast and NaN survives it; opposite infinities make one too, so look again before refusing.
        if tensor.is_floating_point() and bool(tensor.sum().isnan()) and bool(tensor.isnan().any()):
            names = sorted({leaf.name for leaf, view in invert(parameter.source, tensor) if bool(view.isnan().any())})
            raise CheckpointError(f"{parameter.name}: NaN after loading; the file holds NaN in {', '.join(names[:3])}.")
