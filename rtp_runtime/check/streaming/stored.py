"""Tensors of a checkpoint read from their files when they are asked for, whole or some rows; no page stays mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rtp_runtime.errors import CheckpointError
from rtp_runtime.weights.dtypes import torch_dtype
from rtp_runtime.weights.headers import TensorHeader, read_headers

PIECE_BYTES = 4 << 20
"""Read and widened at once, so that a tensor is never held in two dtypes, and what was read is still in the cache."""


class StoredTensors:
    """The tensors of the checkpoint in `directory`; floats are read as float32.

    Raises CheckpointError for headers that are not sound and files that end early.
    """

    def __init__(self, directory: Path) -> None:
        headers = read_headers(directory)
        headers.require_data()
        self.headers = headers.tensors

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        header = self.headers[name]
        if not header.shape:
            return widened(self.read_as_stored(name))
        return self.rows(name, 0, header.shape[0])

    def read_as_stored(self, name: str) -> Tensor:
        """The whole tensor in its own dtype."""
        header = self.headers[name]
        return _shaped(read_bytes(header.file, header.start, header.num_bytes), header, header.shape)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of the first axis."""
        header = self.headers[name]
        row = header.num_bytes // max(1, header.shape[0])
        step = max(1, PIECE_BYTES // max(1, row))
        out = torch.empty(last - first, *header.shape[1:], dtype=_read_as(header))
        buffer = torch.empty(min(step, last - first) * row, dtype=torch.uint8)
        with header.file.open("rb", buffering=0) as file:
            for start in range(first, last, step):
                stop = min(start + step, last)
                data = buffer[: (stop - start) * row]
                _fill(data, file.fileno(), header.file, header.start + start * row)
                out[start - first : stop - first] = _shaped(data, header, (stop - start, *header.shape[1:]))
        return out

    def some_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """These rows of the first axis, in this order."""
        return torch.cat([self.rows(name, row, row + 1) for row in rows])


def read_bytes(path: Path, start: int, count: int) -> Tensor:
    """`count` bytes of a file from `start` on, as [count] uint8.

    Raises CheckpointError when the file ends before.
    """
    data = torch.empty(count, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        _fill(data, file.fileno(), path, start)
    return data


def _fill(data: Tensor, file: int, path: Path, start: int) -> None:
    """Fill [bytes] uint8 from byte `start` of a file on."""
    view, filled = data.numpy().data, 0
    while filled < len(data):
        got = os.preadv(file, [view[filled:]], start + filled)
        if got == 0:
            raise CheckpointError(f"{path}: ends at byte {start + filled}. Was it changed meanwhile?")
        filled += got


def _shaped(data: Tensor, header: TensorHeader, shape: Sequence[int]) -> Tensor:
    return data.view(torch_dtype(header.dtype)).view(*shape)


def _read_as(header: TensorHeader) -> torch.dtype:
    dtype = torch_dtype(header.dtype)
    return torch.float32 if dtype.is_floating_point else dtype


def widened(tensor: Tensor) -> Tensor:
    """Floats as float32, other values as they are."""
    return tensor.float() if tensor.is_floating_point() else tensor
