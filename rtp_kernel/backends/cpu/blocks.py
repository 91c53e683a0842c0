"""Reading and writing block states by token rows, whatever the stride of the block axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_kernel.batch import StateView


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where entries lie: as rows of the state's flat view if it has one, else as (block, entry). Each [N] int64."""

    rows: Tensor | slice | None
    """A slice when the rows follow each other, so that they can be read in place."""
    blocks: Tensor
    entries: Tensor

    @staticmethod
    def make(data: Tensor, blocks: Tensor, entries: Tensor) -> RowIndex:
        """For a state `data` [blocks, entries, *axes]."""
        ratio = rows_per_block(data)
        if ratio is None:
            return RowIndex(None, blocks, entries)
        rows = blocks * ratio + entries
        if len(rows) and int(rows[-1] - rows[0]) == len(rows) - 1 and bool((rows.diff() == 1).all()):
            return RowIndex(slice(int(rows[0]), int(rows[-1]) + 1), blocks, entries)
        return RowIndex(rows, blocks, entries)


def rows_per_block(data: Tensor) -> int | None:
    """Entry strides from one block to the next, or None when that is no whole number."""
    ratio, rest = divmod(data.stride(0), data.stride(1))
    return ratio if rest == 0 else None


def flat_rows(data: Tensor) -> Tensor:
    """data [blocks, entries, *axes] as [rows, *axes]; rows between two blocks' entries belong to other states."""
    ratio = rows_per_block(data)
    assert ratio is not None
    rows = (data.shape[0] - 1) * ratio + data.shape[1]
    return data.as_strided((rows, *data.shape[2:]), data.stride()[1:])


def gather(kv: StateView, index: RowIndex) -> Tensor:
    """The entries at the index -> [N, *axes]; a view of the state where they follow each other."""
    if index.rows is None:
        return kv.data[index.blocks, index.entries]
    flat = flat_rows(kv.data)
    return flat[index.rows] if isinstance(index.rows, slice) else flat.index_select(0, index.rows)


def scatter_kv(kv: StateView, index: RowIndex, k: Tensor, v: Tensor) -> None:
    """Write k and v [N, kv heads, D] to the entries at the index."""
    k, v = k.to(kv.data.dtype), v.to(kv.data.dtype)
    if index.rows is None:
        kv.data[index.blocks, index.entries] = torch.stack((k, v), dim=1)
        return
    flat = flat_rows(kv.data)
    if isinstance(index.rows, slice):
        flat[index.rows, 0], flat[index.rows, 1] = k, v
        return
    flat.select(1, 0).index_copy_(0, index.rows, k)
    flat.select(1, 1).index_copy_(0, index.rows, v)
