"""Writes one safetensors file tensor by tensor, in any order, with nothing held in memory but what is written now."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from rtp_runtime.errors import UsageError
from rtp_runtime.weights.dtypes import BITS, code

COPIED = 16 << 20
"""Bytes copied at once where the system cannot copy from file to file."""
ROOM = 256 << 20
"""Bytes of a disk that are left free."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to be written."""

    dtype: str
    """As descriptors name it."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


class SafetensorsFile:
    """The file at `path` with these tensors; leaving the context checks that each was written in full.

    Raises:
        UsageError: the disk has no room for it.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self.path = path
        self.entries = entries
        self._left = {name: entry.num_bytes for name, entry in entries.items()}
        # The widest first, so that each starts where its dtype may be read from memory.
        order = sorted(entries, key=lambda name: -BITS[entries[name].dtype])
        header, place = {}, 0
        self._start: dict[str, int] = {}
        for name in order:
            entry = entries[name]
            stop = place + entry.num_bytes
            header[name] = {"dtype": code(entry.dtype), "shape": list(entry.shape), "data_offsets": [place, stop]}
            self._start[name], place = place, stop
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        self.num_bytes = 8 + len(text) + place
        require_room(path.parent, self.num_bytes)
        self._base = 8 + len(text)
        self._file = path.open("wb", buffering=0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self.num_bytes)

    def write(self, name: str, tensor: Tensor) -> None:
        """A whole tensor, in its entry's dtype and shape."""
        import torch

        assert tuple(tensor.shape) == self.entries[name].shape, name
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._put(name, flat.numpy().data)

    def copy(self, name: str, source: Path, start: int, count: int, skipped: int = 0) -> None:
        """`count` bytes of another file from `start` on, to `skipped` bytes behind the tensor's first."""
        target = self._base + self._start[name] + skipped
        with source.open("rb", buffering=0) as file:
            done = 0
            while done < count:
                piece = os.pread(file.fileno(), min(COPIED, count - done), start + done)
                if not piece:
                    raise OSError(f"{source} ends at byte {start + done}")
                os.pwrite(self._file.fileno(), piece, target + done)
                done += len(piece)
        self._left[name] -= count

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            assert not any(self._left.values()), [name for name, left in self._left.items() if left][:3]

    def _put(self, name: str, data: memoryview) -> None:
        place = self._base + self._start[name]
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done : done + COPIED], place + done)
        self._left[name] -= len(data)


def require_room(directory: Path, num_bytes: int) -> None:
    """Raises UsageError when the disk of `directory` has no room for so many bytes."""
    free = shutil.disk_usage(directory).free
    if num_bytes + ROOM > free:
        raise UsageError(
            f"the cut checkpoint takes {num_bytes / 2**30:.1f} GiB, and {directory} has {free / 2**30:.1f} GiB free: "
            "set TMPDIR to a folder on a larger disk, or keep fewer layers (--layers) or experts (--experts)"
        )
