"""Streams a checkpoint into parameters: one thread reads ahead into a few buffers, the caller's copies out of them.

Memory beyond the parameters is bounded by the buffers. Every element of a parameter is counted as it is written.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rtp_runtime.errors import CheckpointError
from rtp_runtime.weights.dtypes import torch_dtype
from rtp_runtime.weights.operations import Slice, invert
from rtp_runtime.weights.plan import LoadPlan, Read

if TYPE_CHECKING:
    from rtp_runtime.weights.headers import Headers
    from rtp_runtime.weights.resolve import ResolvedLayout

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""

PIECE_BYTES = 16 << 20
NUM_BUFFERS = 3


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory for one parameter. Floats start as NaN, so that what is never written shows."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return tensor.fill_(float("nan")) if dtype.is_floating_point else tensor.zero_()


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of a read, in memory."""

    read: Read
    first: int
    last: int
    data: Tensor
    """[rows, …] in the checkpoint's dtype; a view of a buffer that is used again."""


def load_weights(
    layout: ResolvedLayout, plan: LoadPlan, parameters: Mapping[str, Tensor], progress: Progress | None = None
) -> None:
    """Fill `parameters` (by name, of the layout's shapes) from the files of `plan`.

    Raises CheckpointError when a file cannot be read to the end, when an element was not written exactly once, or
    when a tensor holds NaN.
    """
    targets = _targets(layout, parameters)
    written = dict.fromkeys(parameters, 0)
    done, total = 0, plan.num_bytes
    with torch.no_grad():
        for piece in read_ahead(plan):
            for part in piece.read.slices:
                for name, view in targets[part]:
                    written[name] += _copy(piece, part, view)
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


def _targets(layout: ResolvedLayout, parameters: Mapping[str, Tensor]) -> dict[Slice, list[tuple[str, Tensor]]]:
    targets: dict[Slice, list[tuple[str, Tensor]]] = {}
    for parameter in layout.parameters:
        for leaf, view in invert(parameter.source, parameters[parameter.name]):
            targets.setdefault(leaf, []).append((parameter.name, view))
    return targets


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


def read_ahead(plan: LoadPlan) -> Iterator[Piece]:
    """The pieces of a plan in order; a buffer is read into while the pieces before it are used."""
    size = max([PIECE_BYTES, *(read.row_bytes for read in plan.reads)])
    free: queue.Queue[Tensor | None] = queue.Queue()
    full: queue.Queue[tuple[Piece, Tensor] | BaseException | None] = queue.Queue()
    for _ in range(NUM_BUFFERS):
        free.put(torch.empty(size, dtype=torch.uint8))
    thread = threading.Thread(target=_reader, args=(plan, free, full), name="rtp-weights", daemon=True)
    thread.start()
    try:
        while (item := full.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            piece, buffer = item
            yield piece
            free.put(buffer)
    finally:
        free.put(None)
        thread.join()


def _reader(
    plan: LoadPlan, free: queue.Queue[Tensor | None], full: queue.Queue[tuple[Piece, Tensor] | BaseException | None]
) -> None:
    descriptor, path = -1, None
    try:
        for read in plan.reads:
            if read.tensor.file != path:
                if descriptor >= 0:
                    os.close(descriptor)
                path = read.tensor.file
                descriptor = os.open(path, os.O_RDONLY)
            for first, last in _row_ranges(read):
                buffer = free.get()
                if buffer is None:
                    return
                full.put((_fill(descriptor, read, first, last, buffer), buffer))
        full.put(None)
    except OSError as error:
        full.put(CheckpointError(f"{path}: cannot be read ({error.strerror}). Was it changed meanwhile?"))
    except BaseException as error:  # handed to the caller's thread, which raises it
        full.put(error)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _row_ranges(read: Read) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE_BYTES // max(1, read.row_bytes))
    for first in range(read.first, read.last, step):
        yield first, min(first + step, read.last)


def _fill(descriptor: int, read: Read, first: int, last: int, buffer: Tensor) -> Piece:
    length = (last - first) * read.row_bytes
    offset = read.tensor.start + first * read.row_bytes
    target = buffer.numpy().data[:length]
    filled = 0
    while filled < length:
        count = os.preadv(descriptor, [target[filled:]], offset + filled)
        if count == 0:
            raise CheckpointError(
                f"{read.tensor.file}: ends within {read.tensor.name}, at byte {offset + filled}. Was it changed "
                "meanwhile? Copy or download this file again."
            )
        filled += count
    rows = buffer[:length].view(torch_dtype(read.tensor.dtype)).view(last - first, *read.tensor.shape[1:])
    return Piece(read, first, last, rows)


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
