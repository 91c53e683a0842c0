"""CPU memory in huge pages, where the system has them: weights and caches are read faster than in small pages.

Nothing here fails where huge pages cannot be had; memory is then ordinary.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

HUGE = 1 << 21
"""Bytes of a huge page."""
_COLLAPSE = 25  # MADV_COLLAPSE (Linux 6.1), which the mmap module does not name


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor; on the CPU, from 2 MiB on, in huge pages (and zeroed by the system)."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    size = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or advice is None or size < HUGE:
        return torch.empty(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE
    _advise_quietly(memory, advice)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).view(*shape)


def _advise_quietly(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:
        return  # a kernel built without huge pages


def available() -> int | None:
    """Bytes of memory that the system can still give without swapping; None where it does not tell."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    values = dict(line.split(":", 1) for line in info.read_text().splitlines())
    return int(values["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in values else None


@contextmanager
def huge_pages() -> Iterator[None]:
    """Moves memory that was mapped inside the block, by whichever library, into huge pages at its end.

    For allocations we cannot make ourselves, such as oneDNN's packed weights. Memory that an allocator took from what
    it already had stays as it is.
    """
    before = _anonymous_ranges()
    yield
    libc = ctypes.CDLL(None)
    for start, stop in _without(_anonymous_ranges(), before):
        first, last = -(-start // HUGE) * HUGE, stop // HUGE * HUGE
        if first < last:
            for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _COLLAPSE):
                if advice is not None:
                    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def _anonymous_ranges() -> list[tuple[int, int]]:
    """Address ranges of private, writable memory that is no file's, rising; none where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    ranges = []
    for line in maps.read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(None, 5)
        if access == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            start, stop = addresses.split("-")
            ranges.append((int(start, 16), int(stop, 16)))
    return ranges


def _without(ranges: list[tuple[int, int]], taken: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of `ranges` outside `taken`; both rising and free of overlaps."""
    for start, stop in ranges:
        for low, high in taken:
            if high <= start or low >= stop:
                continue
            if start < low:
                yield start, low
            start = min(high, stop)
        if start < stop:
            yield start, stop
