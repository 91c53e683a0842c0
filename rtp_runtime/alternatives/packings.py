"""How parts (q, k, v; gate, up) become rows of one fused tensor, as index permutations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_BLOCK = 4
"""Rows that are told as a block that moved, at least."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One order of rows. `order` [rows]: row i of the fused tensor is row `order[i]` of the parts laid end to end."""

    name: str
    words: str
    order: Tensor

    @property
    def inverse(self) -> Tensor:
        """Row j of the parts laid end to end is row `inverse[j]` of the fused tensor."""
        return self.order.argsort()


def packings(heads: int, kv_heads: int, dim: int, v_dim: int | None = None) -> Iterator[Packing]:
    """Every packing of q [heads * dim], k [kv_heads * dim], v [kv_heads * v_dim] in use, the plain one first."""
    v_dim = dim if v_dim is None else v_dim
    sizes = (heads * dim, kv_heads * dim, kv_heads * v_dim)
    q, k, v = torch.split(torch.arange(sum(sizes)), list(sizes))
    parts = {"q": q, "k": k, "v": v}
    for names in ("qkv", "qvk", "kqv", "kvq", "vqk", "vkq"):
        yield Packing(f"{names[0]},{names[1]},{names[2]}", f"{', '.join(names)} one after the other",
                      torch.cat([parts[name] for name in names]))  # fmt: skip
    if heads % kv_heads:
        return
    group = heads // kv_heads
    by_group = (q.view(kv_heads, group * dim), k.view(kv_heads, dim), v.view(kv_heads, v_dim))
    name, words = ("per-head", "each head's q, k, v together") if group == 1 else (
        "per-group", f"each group's {group} heads of q, then its k and v")  # fmt: skip
    yield Packing(name, words, torch.cat(by_group, dim=1).flatten())
    if group == 1 and v_dim == dim:
        yield Packing("per-dim", "q, k, v taking turns dimension by dimension", torch.stack((q, k, v), 1).flatten())
    for part, rows, count, width in (("q", q, heads, dim), ("k", k, kv_heads, dim), ("v", v, kv_heads, v_dim)):
        mixed = {**parts, part: rows.view(count, width).T.flatten()}
        yield Packing(f"{part}-transposed", f"{part}'s rows as [dim, heads]", torch.cat(list(mixed.values())))
    tiled = torch.cat((q.view(kv_heads, group, dim).transpose(0, 1).flatten(), k, v))
    yield Packing("q-groups-tiled", "heads of q that share a key far apart", tiled)


def pair_packings(size: int, heads: int | None = None) -> Iterator[Packing]:
    """Every packing of two parts (gate and up; q and its gate) of `size` rows each, the plain one first."""
    first, second = torch.split(torch.arange(2 * size), size)
    yield Packing("first,second", "one after the other", torch.cat((first, second)))
    yield Packing("second,first", "one after the other, exchanged", torch.cat((second, first)))
    yield Packing("interleaved", "taking turns row by row", torch.stack((first, second), 1).flatten())
    yield Packing("interleaved-exchanged", "taking turns, exchanged", torch.stack((second, first), 1).flatten())
    if heads and size % heads == 0 and heads > 1:
        rows = (first.view(heads, -1), second.view(heads, -1))
        yield Packing("per-head", "taking turns head by head", torch.cat(rows, dim=1).flatten())


def describe_order(order: Sequence[int], heads: Sequence[int] = ()) -> str:
    """Words for a permutation of rows: a roll, a reversal, exchanged halves, an interleave; "" where none fits.

    `heads`: counts of heads that the rows may be.
    """
    found, n = torch.as_tensor(order), len(order)
    plain = torch.arange(n)
    if torch.equal(found, plain.flip(0)):
        return "reversed"
    by = int((found[0] - plain[0]) % n)
    if torch.equal(found, plain.roll(-by)):
        return "halves exchanged" if 2 * by == n else f"rolled by {min(by, n - by)}"
    for parts in dict.fromkeys((2, 3, *heads)):
        if 1 < parts < n and n % parts == 0:
            rows = plain.view(parts, -1)
            if torch.equal(found, rows.T.flatten()):
                return f"{parts} parts interleaved row by row"
            if torch.equal(found, plain.view(-1, parts).T.flatten()):
                return f"{parts} interleaved parts laid end to end"
            if torch.equal(found, rows.flip(0).flatten()):
                return f"{parts} heads in reverse order"
            inner = rows.view(parts, -1, 2) if rows.shape[1] % 2 == 0 else None
            if inner is not None and torch.equal(found, inner.transpose(1, 2).flatten()):
                return f"in each of {parts} heads, even dimensions before odd ones"
            halves = rows.view(parts, 2, -1) if inner is not None else None
            if halves is not None and torch.equal(found, halves.transpose(1, 2).flatten()):
                return f"in each of {parts} heads, halves interleaved"
    moved = (found != plain).nonzero().flatten().tolist()
    if len(moved) == 2:
        return f"rows {moved[0]} and {moved[1]} exchanged"
    return _blocks(found)


def _blocks(found: Tensor) -> str:
    """Words for an order in which long runs of rows stand elsewhere as they are; "" where there are none."""
    n = len(found)
    for size in (size for size in range(n // 2, MIN_BLOCK - 1, -1) if n % size == 0):
        starts = found.view(-1, size)[:, 0]
        whole = torch.equal(found.view(-1, size), starts[:, None] + torch.arange(size))
        if whole and not bool((starts % size).any()):
            order = (starts // size).tolist()
            told = ", ".join(map(str, order[:8])) + (", …" if len(order) > 8 else "")
            return f"{len(order)} blocks of {size} rows in the order {told}"
    return ""
