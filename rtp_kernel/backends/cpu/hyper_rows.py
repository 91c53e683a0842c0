"""Deterministic hyper-connections: tokens in tiles of one size, whose elementwise runs have no tails."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.backends.cpu.rows import LANES, Deterministic, TiledLinear
from rtp_kernel.ops.hyper_connection import collapsed, mixed_in, normed


def _tiles(streams: Tensor, function: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`function` of `LANES` tokens at a time, the last tile padded; any number of elements per token then fits."""
    padded = functional.pad(streams, (0, 0, 0, 0, 0, -len(streams) % LANES))
    parts = [function(padded[start : start + LANES]) for start in range(0, max(len(streams), 1), LANES)]
    return tuple(torch.cat(each)[: len(streams)] for each in zip(*parts, strict=True))


class HyperConnectionTiles(Deterministic):
    """The reference on tiles of tokens."""

    name = "cpu_row_tiles"

    def __call__(
        self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float, norm_eps: float
    ) -> tuple[Tensor, ...]:
        product, weight = TiledLinear(), fn.float()

        def mixed(tile: Tensor) -> tuple[Tensor, ...]:
            return mixed_in(product(normed(tile, norm_eps), weight), tile, base, scale, iterations=iterations, eps=eps)

        return _tiles(streams, mixed)


class HyperExpandRows(Deterministic):
    """Sums and products alone, which round each element by itself."""

    name = "cpu_elementwise"

    def __call__(self, post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
        dtype, wide, mixed = streams.dtype, streams.float(), torch.zeros(streams.shape)
        for stream, weights in zip(wide.unbind(1), comb.to(dtype).float().unbind(1), strict=True):
            mixed = mixed + weights.unsqueeze(-1) * stream.unsqueeze(1)  # [T, n, H]
        return post.to(dtype).unsqueeze(-1) * out.unsqueeze(-2) + mixed.to(dtype)


class HyperCollapseTiles(Deterministic):
    """The reference on tiles of tokens."""

    name = "cpu_row_tiles"

    def __call__(
        self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
    ) -> Tensor:
        product, weight = TiledLinear(), fn.float()
        return _tiles(
            streams, lambda tile: (collapsed(product(normed(tile, norm_eps), weight), tile, base, scale, eps=eps),)
        )[0]
