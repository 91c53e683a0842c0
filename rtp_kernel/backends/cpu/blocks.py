"""Reading and writing block states by token rows, whatever the stride of the block axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_kernel.batch import StateView


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where entries lie in states of one shape and stride: rows of a flat view if they have one, else pairs."""

    rows: Tensor | slice | None
    """[N] int64; a slice when they follow each other, to be read in place; None without a flat view."""
    view: tuple[Sequence[int], Sequence[int]]
    """Size and stride of the flat view [rows, *axes]; rows between two blocks' entries belong to other states."""
    blocks: Tensor
    """[N] int64"""
    entries: Tensor
    """[N] int64"""

    @staticmethod
    def make(data: Tensor, blocks: Tensor, entries: Tensor) -> RowIndex:
        """For states like `data` [blocks, entries, *axes], of any stride on the block axis."""
        ratio, rest = divmod(data.stride(0), data.stride(1))
        view = ((data.shape[0] - 1) * ratio + data.shape[1], *data.shape[2:]), data.stride()[1:]
        if rest:
            return RowIndex(None, view, blocks, entries)
        rows = blocks * ratio + entries
        if len(rows) and int(rows[-1] - rows[0]) == len(rows) - 1 and bool((rows.diff() == 1).all()):
            return RowIndex(slice(int(rows[0]), int(rows[-1]) + 1), view, blocks, entries)
        return RowIndex(rows, view, blocks, entries)


def gather(kv: StateView, index: RowIndex) -> Tensor:
    """The entries at the index -> [N, *axes]; a view of the state where they follow each other."""
    if index.rows is None:
        return kv.data[index.blocks, index.entries]
    flat = kv.data.as_strided(*index.view)
    return flat[index.rows] if isinstance(index.rows, slice) else flat.index_select(0, index.rows)


def scatter_kv(kv: StateView, index: RowIndex, k: Tensor, v: Tensor) -> None:
    """Write k and v [N, kv heads, D] to the entries at the index."""
    if k.dtype != kv.data.dtype:
        k, v = k.to(kv.data.dtype), v.to(kv.data.dtype)
    if index.rows is None:
        kv.data[index.blocks, index.entries] = torch.stack((k, v), dim=1)
        return
    flat = kv.data.as_strided(*index.view)
    if isinstance(index.rows, slice):
        keys, values = flat[index.rows].unbind(1)
        keys.copy_(k)
        values.copy_(v)
    else:
        keys, values = flat.unbind(1)
        keys.index_copy_(0, index.rows, k)
        values.index_copy_(0, index.rows, v)
