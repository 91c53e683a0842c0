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

PIECE_BYTES = 32 << 20
"""Read and widened at once, so that a tensor is never held in two dtypes."""


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
            return self._part(header, 0, 1).reshape(())
        return self.rows(name, 0, header.shape[0])

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of the first axis."""
        header = self.headers[name]
        row = header.num_bytes // max(1, header.shape[0])
        step = max(1, PIECE_BYTES // max(1, row))
        dtype = _read_as(header)
        out = torch.empty(last - first, *header.shape[1:], dtype=dtype)
        for start in range(first, last, step):
            stop = min(start + step, last)
            out[start - first : stop - first] = self._part(header, start, stop)
        return out

    def some_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """These rows of the first axis, in this order."""
        return torch.cat([self.rows(name, row, row + 1) for row in rows])

    @staticmethod
    def _part(header: TensorHeader, first: int, last: int) -> Tensor:
        row = header.num_bytes // max(1, header.shape[0]) if header.shape else header.num_bytes
        data = read_bytes(header.file, header.start + first * row, (last - first) * row)
        return data.view(torch_dtype(header.dtype)).view(last - first, *header.shape[1:])


def read_bytes(path: Path, start: int, count: int) -> Tensor:
    """`count` bytes of a file from `start` on, as [count] uint8.

    Raises CheckpointError when the file ends before.
    """
    data = torch.empty(count, dtype=torch.uint8)
    view, filled = data.numpy().data, 0
    with path.open("rb", buffering=0) as file:
        while filled < count:
            got = os.preadv(file.fileno(), [view[filled:]], start + filled)
            if got == 0:
                raise CheckpointError(f"{path}: ends at byte {start + filled}. Was it changed meanwhile?")
            filled += got
    return data


def _read_as(header: TensorHeader) -> torch.dtype:
    dtype = torch_dtype(header.dtype)
    return torch.float32 if dtype.is_floating_point else dtype
