"""Which bytes of a checkpoint a rank reads, in file order, and how many of them it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rtp_runtime.weights.dtypes import BITS
from rtp_runtime.weights.headers import Headers, TensorHeader
from rtp_runtime.weights.operations import Slice, leaves
from rtp_runtime.weights.regions import extents
from rtp_runtime.weights.resolve import ResolvedLayout


@dataclass(frozen=True, slots=True)
class Read:
    """Whole leading rows [first, last) of one tensor: one run of bytes."""

    tensor: TensorHeader
    first: int
    last: int
    slices: tuple[Slice, ...]
    """What is kept of it; each lies in these rows."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one leading row; a tensor without axes is one row."""
        return math.prod(self.tensor.shape[1:]) * BITS[self.tensor.dtype] // 8

    @property
    def start(self) -> int:
        return self.tensor.start + self.first * self.row_bytes

    @property
    def num_bytes(self) -> int:
        return (self.last - self.first) * self.row_bytes

    @property
    def kept_bytes(self) -> int:
        return sum(math.prod(extents(part.region)) for part in self.slices) * BITS[self.tensor.dtype] // 8


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads of one rank, file by file, in the order of their bytes."""

    reads: tuple[Read, ...]

    @property
    def num_bytes(self) -> int:
        return sum(read.num_bytes for read in self.reads)

    @property
    def kept_bytes(self) -> int:
        return sum(read.kept_bytes for read in self.reads)

    def files(self) -> dict[Path, int]:
        """Bytes read of each file, in order."""
        totals: dict[Path, int] = {}
        for read in self.reads:
            totals[read.tensor.file] = totals.get(read.tensor.file, 0) + read.num_bytes
        return totals


def plan_load(layout: ResolvedLayout, headers: Headers) -> LoadPlan:
    """The reads that make every parameter of an audited layout."""
    wanted: dict[str, set[Slice]] = {}
    for parameter in layout.parameters:
        for leaf in leaves(parameter.source):
            wanted.setdefault(leaf.name, set()).add(leaf)
    reads = [read for name, slices in wanted.items() for read in _reads(headers.tensors[name], slices)]
    order = {file.path: index for index, file in enumerate(headers.files)}
    reads.sort(key=lambda read: (order[read.tensor.file], read.start))
    return LoadPlan(tuple(reads))


def _reads(tensor: TensorHeader, slices: set[Slice]) -> Iterator[Read]:
    """One read for each run of rows that some slice touches; slices that share rows share the read."""
    pending: list[Slice] = []
    first = last = 0
    for part in sorted(slices, key=lambda part: part.region):
        start, stop = part.region[0] if part.region else (0, 1)
        if pending and start >= last:
            yield Read(tensor, first, last, tuple(pending))
            pending = []
        if not pending:
            first, last = start, stop
        pending.append(part)
        last = max(last, stop)
    yield Read(tensor, first, last, tuple(pending))
