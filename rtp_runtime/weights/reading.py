"""Reads the byte ranges of a plan, ahead of whoever uses them, in a thread of its own and bounded memory."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_runtime.errors import CheckpointError
from rtp_runtime.weights.dtypes import torch_dtype
from rtp_runtime.weights.plan import LoadPlan, Read

PIECE_BYTES = 16 << 20
NUM_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of a read, in memory."""

    read: Read
    first: int
    last: int
    data: Tensor
    """[rows, …] in the checkpoint's dtype; of a buffer that is used again, unless `placed`."""
    placed: bool = False
    """The bytes were read to where they belong."""


Place = Callable[[Read, int, int], Tensor | None]
"""Rows of a read -> contiguous CPU memory in the checkpoint's dtype where all of them belong, or None."""


def nowhere(read: Read, first: int, last: int) -> None:
    """The `Place` of whoever only looks at pieces."""


def read_ahead(plan: LoadPlan, place: Place = nowhere) -> Iterator[Piece]:
    """The pieces of a plan in order. Raises CheckpointError when a file cannot be read to its end.

    A piece is read to its place where there is one; otherwise into one of a few buffers, which is free again when the
    next piece is asked for.
    """
    reader = _Reader(plan, place)
    thread = threading.Thread(target=reader.run, name="rtp-weights", daemon=True)
    thread.start()
    try:
        while (item := reader.filled.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            piece, buffer = item
            yield piece
            if buffer is not None:
                reader.free.put(buffer)
    finally:
        reader.stopped.set()
        reader.free.put(None)
        thread.join()


class _Reader:
    def __init__(self, plan: LoadPlan, place: Place) -> None:
        self.plan = plan
        self.place = place
        self.stopped = threading.Event()
        self.filled: queue.Queue[tuple[Piece, Tensor | None] | BaseException | None] = queue.Queue()
        self.free: queue.Queue[Tensor | None] = queue.Queue()
        size = max([PIECE_BYTES, *(read.row_bytes for read in plan.reads)])
        for _ in range(NUM_BUFFERS):
            self.free.put(torch.empty(size, dtype=torch.uint8))

    def run(self) -> None:
        """Fill pieces until the plan is done or somebody stops it; what goes wrong is raised by the other thread."""
        try:
            for path, reads in self._by_file():
                with open(path, "rb", buffering=0) as file:
                    for read in reads:
                        for first, last in _row_ranges(read):
                            if not self._fill(file.fileno(), read, first, last):
                                return
            self.filled.put(None)
        except OSError as error:
            where = f"{error.filename or 'a file'}: cannot be read ({error.strerror})"
            self.filled.put(CheckpointError(f"{where}. Was it changed meanwhile?"))
        except BaseException as error:
            self.filled.put(error)

    def _by_file(self) -> Iterator[tuple[str, list[Read]]]:
        for path in self.plan.files():
            yield str(path), [read for read in self.plan.reads if read.tensor.file == path]

    def _fill(self, descriptor: int, read: Read, first: int, last: int) -> bool:
        """Read rows [first, last); False when nobody waits for them any more."""
        placed = self.place(read, first, last)
        buffer = self.free.get() if placed is None else None
        if self.stopped.is_set():
            return False
        if placed is None:
            assert buffer is not None
            flat = buffer[: (last - first) * read.row_bytes].view(torch_dtype(read.tensor.dtype))
            data = flat.view(last - first, *read.tensor.shape[1:])
        else:
            data = placed
        _read_into(descriptor, data, read, first)
        self.filled.put((Piece(read, first, last, data, placed is not None), buffer))
        return True


def _row_ranges(read: Read) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE_BYTES // max(1, read.row_bytes))
    for first in range(read.first, read.last, step):
        yield first, min(first + step, read.last)


def _read_into(descriptor: int, data: Tensor, read: Read, first: int) -> None:
    target = data.view(-1).view(torch.uint8).numpy().data
    offset = read.tensor.start + first * read.row_bytes
    filled = 0
    while filled < len(target):
        count = os.preadv(descriptor, [target[filled:]], offset + filled)
        if count == 0:
            raise CheckpointError(
                f"{read.tensor.file}: ends within {read.tensor.name}, at byte {offset + filled}. Was it changed "
                "meanwhile? Copy or download this file again."
            )
        filled += count
