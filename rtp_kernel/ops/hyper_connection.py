"""Manifold-constrained hyper-connections: a residual of n streams, mixed into a block and out of it again.

streams is [T, n, H]. As in transformers' DeepseekV4HyperConnection; weights are computed in float32 whatever the
streams' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def hyper_connection(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """How a block reads the streams, and how its result returns to them -> post [T, n], comb [T, n, n], x [T, H].

    fn [(2 + n) n, n H], base [(2 + n) n] and scale [3] make three sets of weights from a token's streams: `pre`, by
    which they are summed to the block's input x; `post`, by which each stream receives the block's output; and `comb`,
    by which they mix with one another: made doubly stochastic by `iterations` steps of Sinkhorn and Knopp, with `eps`
    under each division. post and comb are float32, x has the streams' dtype.
    """
    mixes = functional.linear(normed(streams, norm_eps), fn.float())  # [T, (2 + n) n]
    return mixed_in(mixes, streams, base, scale, iterations=iterations, eps=eps)


def mixed_in(
    mixes: Tensor, streams: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`hyper_connection` from the product with fn on, mixes [T, (2 + n) n]."""
    tokens, count = streams.shape[:2]
    sizes = [count, count, count * count]
    pre, post, comb = torch.split_with_sizes(mixes, sizes, dim=-1)
    pre_base, post_base, comb_base = torch.split_with_sizes(base, sizes)
    pre_scale, post_scale, comb_scale = scale.unbind()
    x = _collapse(torch.sigmoid(pre * pre_scale + pre_base) + eps, streams)
    post = 2 * torch.sigmoid(post * post_scale + post_base)
    comb = (comb * comb_scale + comb_base).view(tokens, count, count)
    return post, _doubly_stochastic(comb, iterations, eps), x


def hyper_expand(post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
    """The streams after a block: post [T, n] times its result out [T, H], plus comb^T @ streams -> [T, n, H]."""
    dtype = streams.dtype
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    return post.to(dtype).unsqueeze(-1) * out.unsqueeze(-2) + mixed


def hyper_collapse(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float) -> Tensor:
    """The weighted sum of the streams after the last layer: fn [n, n H], base [n], scale [1] -> [T, H]."""
    mixes = functional.linear(normed(streams, norm_eps), fn.float())  # [T, n]
    return collapsed(mixes, streams, base, scale, eps=eps)


def collapsed(mixes: Tensor, streams: Tensor, base: Tensor, scale: Tensor, *, eps: float) -> Tensor:
    """`hyper_collapse` from the product with fn on, mixes [T, n]."""
    return _collapse(torch.sigmoid(mixes * scale.float() + base.float()) + eps, streams)


def normed(streams: Tensor, eps: float) -> Tensor:
    """[T, n H] float32 of root mean square 1."""
    flat = streams.flatten(1).float()
    return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _collapse(pre: Tensor, streams: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)


def _doubly_stochastic(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[T, n, n]: columns (over the first n), then rows and columns `iterations` - 1 times, divided by their sums."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb.div_(comb.sum(dim=-2, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(comb.sum(dim=-1, keepdim=True).add_(eps))
        comb.div_(comb.sum(dim=-2, keepdim=True).add_(eps))
    return comb
