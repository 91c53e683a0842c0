"""The gated delta rule: linear attention whose state forgets by a decay and is corrected, not only added to.

Per token and value head, with the state S [key dim, value dim]: S = exp(g) S; d = beta (v - S^T k); S = S + k d^T;
o = S^T q. The decay g is one number (Gated DeltaNet: Qwen3-Next) or one per key channel (Kimi delta attention:
GLM-5.3). The state is a `StateView` of [slots, value heads, key dim, value dim] in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import decode_states, prefill_states

CHUNK = 64
"""Tokens of one parallel chunk, as in the references."""
SEGMENT = 1024
CHANNEL_SEGMENT = CHUNK
"""Tokens whose chunks are prepared together: bounds the memory of a long prompt. Where each channel decays on its own,
the pairs of a chunk hold key dim numbers each."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: StateView,
    batch: ForwardBatch,
    *,
    scale: float,
    norm_eps: float | None = None,
) -> Tensor:
    """q, k [T, key heads, key dim], v [T, value heads, value dim] -> [T, value heads, value dim] in q's dtype.

    g [T, value heads] or [T, value heads, key dim] is the log of the decay, at most 0; beta is [T, value heads].
    Consecutive value heads share a key head. q and k are l2-normalised with `norm_eps` under the root (None: taken as
    they are), then q is scaled. All in float32. Decodes go token by token, prefill chunk by chunk; padding rows come
    out as zeros.
    """
    out, tokens = q.new_zeros(v.shape), Tokens(q, k, v, g, beta)
    if batch.num_decodes:
        parts = tokens.rows(slice(batch.num_decode_tokens)).prepared(scale, norm_eps)
        decode_states(state, batch, out, lambda rows, held: recurrent(parts.rows(rows), held))
    prefill(tokens, state, batch, out, scale, norm_eps)
    return out


def delta_gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
    """g = -exp(A_log) softplus(a + dt_bias) in float32 and beta = sigmoid(b) in b's dtype; a, b [T, heads].

    A_log, dt_bias [heads], in whatever dtype the model holds them (Qwen3NextGatedDeltaNet).
    """
    return -A_log.float().exp() * functional.softplus(a.float() + dt_bias), b.sigmoid()


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the rule reads of N tokens, shaped as `gated_delta_rule` says."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def rows(self, rows: slice | Tensor) -> Tokens:
        return Tokens(self.q[rows], self.k[rows], self.v[rows], self.g[rows], self.beta[rows])

    def prepared(self, scale: float, norm_eps: float | None) -> Tokens:
        """In float32 and per value head, g as [N, value heads, key dim or 1]; q and k normalised, q scaled."""
        q, k, v, g = self.q.float(), self.k.float(), self.v.float(), self.g.float()
        if norm_eps is not None:
            q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + norm_eps) for part in (q, k))
        share = v.shape[1] // k.shape[1]
        q, k = ((part if share == 1 else part.repeat_interleave(share, dim=1)) for part in (q * scale, k))
        return Tokens(q, k, v, g if g.dim() == 3 else g.unsqueeze(-1), self.beta.float())


def prefill(
    tokens: Tokens, state: StateView, batch: ForwardBatch, out: Tensor, scale: float, norm_eps: float | None
) -> None:
    """The requests behind the decode part, one after the other, into their rows of `out` and their slots."""
    size = SEGMENT if tokens.g.dim() == 2 else CHANNEL_SEGMENT

    def advance(rows: slice | Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        return advanced(tokens.rows(rows).prepared(scale, norm_eps), held)

    prefill_states(state, batch, out, advance, size)


def advanced(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one request in the form that suits them; arguments and results as those of `chunked`."""
    if len(tokens.q) > 1:
        return chunked(tokens, state)
    out, after = recurrent(tokens, state.unsqueeze(0))
    return out, after[0]


def recurrent(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N requests, `prepared`, and states [N, heads, key dim, value dim]."""
    k = tokens.k.unsqueeze(-1)
    state = state * tokens.g.exp().unsqueeze(-1)
    delta = (tokens.v - (state * k).sum(-2)) * tokens.beta.unsqueeze(-1)
    state = state + k * delta.unsqueeze(-2)
    return (state * tokens.q.unsqueeze(-1)).sum(-2), state


def chunked(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """L tokens of one request, `prepared`, and its state [heads, key dim, value dim]: out [L, heads, value dim], state.

    Within a chunk the corrections d solve a unit triangular system (the UT transform of the DeltaNet paper), so that
    only chunks follow each other in a loop.
    """
    length, value_dim = tokens.q.shape[0], tokens.v.shape[-1]
    size = min(length, CHUNK)

    def chunks(part: Tensor) -> Tensor:
        padded = functional.pad(part, (0, 0, 0, 0, 0, -length % size))
        return padded.view(-1, size, *part.shape[1:]).movedim(2, 0)  # [heads, chunks, size, dim]

    q, k, v, g = (chunks(part) for part in (tokens.q, tokens.k, tokens.v, tokens.g))
    beta = chunks(tokens.beta.unsqueeze(-1))
    between = decays(g)
    start = g.cumsum(dim=2).exp()  # decay of S from the start of the chunk
    inner, system = decayed_products((q, k * beta), k, between)
    right = torch.cat((v * beta, k * beta * start), dim=-1)
    solved: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved[..., :value_dim], solved[..., value_dim:]  # corrections, and what of S they read
    q = q * start
    k = k * between[..., -1, :, :]
    decay = start[:, :, -1].unsqueeze(-1)  # [heads, chunks, key dim or 1, 1]
    outs = []
    for i in range(q.shape[1]):
        delta = values[:, i] - reads[:, i] @ state
        outs.append(q[:, i] @ state + inner[:, i] @ delta)
        state = state * decay[:, i] + k[:, i].transpose(-1, -2) @ delta
    return torch.cat(outs, dim=1).transpose(0, 1)[:length], state


def decays(g: Tensor) -> Tensor:
    """[..., i, j, dim] = exp(g_(j+1) + ... + g_i) for j <= i, else 0, of g [..., size, dim].

    By the difference of two sums from the start of the chunk, which rounds as the references do.
    """
    size = g.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)  # j > i
    total = g.cumsum(dim=-2)
    between = total.unsqueeze(-2) - total.unsqueeze(-3)
    return between.masked_fill_(later.unsqueeze(-1), float("-inf")).exp_()


def decayed_products(lefts: Sequence[Tensor], right: Tensor, between: Tensor) -> Sequence[Tensor]:
    """Of each left: [..., i, j] = sum over channels of left_i right_j and their decay; left, right [..., size, dim]."""
    if between.shape[-1] == 1:
        return [(a @ right.transpose(-1, -2)) * between.squeeze(-1) for a in lefts]
    products = (between * right.unsqueeze(-3)) @ torch.stack(tuple(lefts), dim=-1)  # [..., i, j, len(lefts)]
    return products.unbind(-1)
