"""The gated delta rule: linear attention whose state forgets by a decay and is corrected, not only added to.

Per token and value head, with the state S [key dim, value dim]: S = exp(g) S; d = beta (v - S^T k); S = S + k d^T;
o = S^T q. The decay g is one number (Gated DeltaNet: Qwen3-Next) or one per key channel (Kimi delta attention:
GLM-5.3). The state is a `StateView` of [slots, value heads, key dim, value dim] in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import decode_steps, leave_copies, prefill_runs

CHUNK = 64
"""Tokens of one parallel chunk when a head decays as a whole, as in the references."""
CHANNEL_CHUNK = 16
"""Tokens of one parallel chunk when each channel decays on its own: its pairs hold key dim numbers each."""
SEGMENT = 1024
CHANNEL_SEGMENT = 128
"""Tokens whose chunks are prepared together, likewise: bounds the memory of a long prompt."""


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
    out = q.new_zeros(v.shape)
    tables = batch.groups[state.group]
    assert tables.read is not None and tables.write is not None
    decodes, split = batch.num_decodes, batch.num_decode_tokens
    if decodes:
        parts = prepared(q[:split], k[:split], v[:split], g[:split], beta[:split], scale, norm_eps)
        held = state.data[tables.read[:decodes]].float()  # [requests, value heads, key dim, value dim]
        for requests, rows in decode_steps(batch):
            result, held[requests] = recurrent(*(part[rows] for part in parts), held[requests])
            out[rows] = result.to(out.dtype)
            leave_copies(held[requests], rows, state, batch)
        state.data[tables.write[:decodes]] = held.to(state.data.dtype)
    for run in prefill_runs(batch, state.group):
        one = state.data[run.read].float()
        for rows, copies in run.pieces:
            for part in segments(rows, SEGMENT if g.dim() == 2 else CHANNEL_SEGMENT):
                parts = prepared(q[part], k[part], v[part], g[part], beta[part], scale, norm_eps)
                result, one = advanced(*parts, one)
                out[part] = result.to(out.dtype)
            for slot in copies:
                state.data[slot] = one
        state.data[run.write] = one
    return out


def segments(rows: range, size: int) -> Iterator[slice]:
    """The rows in pieces of at most `size`."""
    return (slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size))


def prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, norm_eps: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All in float32 and per value head, g as [T, value heads, key dim or 1]; q and k normalised, q scaled."""
    q, k, v, g, beta = (part.float() for part in (q, k, v, g, beta))
    if norm_eps is not None:
        q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + norm_eps) for part in (q, k))
    share = v.shape[1] // k.shape[1]
    q, k = ((part if share == 1 else part.repeat_interleave(share, dim=1)) for part in (q * scale, k))
    return q, k, v, g if g.dim() == 3 else g.unsqueeze(-1), beta


def advanced(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """L tokens of one request in the form that suits them; arguments and results as those of `chunked`."""
    if len(q) > 1:
        return chunked(q, k, v, g, beta, state)
    out, after = recurrent(q, k, v, g, beta, state.unsqueeze(0))
    return out, after[0]


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N requests: `prepared` parts [N, heads, ...] and states [N, heads, key dim, value dim]."""
    state = state * g.exp().unsqueeze(-1)
    known = (state * k.unsqueeze(-1)).sum(-2)
    delta = (v - known) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """L tokens of one request: `prepared` parts [L, heads, ...] and its state [heads, key dim, value dim].

    Within a chunk the corrections d solve a unit triangular system (the UT transform of the DeltaNet paper), so that
    only chunks follow each other in a loop.
    """
    length, value_dim = q.shape[0], v.shape[-1]
    size = min(length, CHUNK if g.shape[-1] == 1 else CHANNEL_CHUNK)

    def chunks(part: Tensor) -> Tensor:
        padded = functional.pad(part, (0, 0, 0, 0, 0, -length % size))
        return padded.unflatten(0, (-1, size)).movedim(2, 0)  # [heads, chunks, size, dim]

    q, k, v, g, beta = (chunks(part) for part in (q, k, v, g, beta.unsqueeze(-1)))
    between = decays(g)
    start = g.cumsum(dim=2).exp()  # decay of S from the start of the chunk
    solved = torch.linalg.solve_triangular(
        decayed_products(k * beta, k, between),
        torch.cat((v * beta, k * beta * start), dim=-1),
        upper=False,
        unitriangular=True,
    )
    values, reads = solved[..., :value_dim], solved[..., value_dim:]  # corrections, and what of S they read
    inner = decayed_products(q, k, between)
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

    Summed for each pair: the difference of two sums from the start of the chunk loses what a strong decay leaves.
    """
    size = g.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1).unsqueeze(-1)  # i > j
    total = (g.unsqueeze(-2) * later).cumsum(dim=-3)
    return total.exp().masked_fill(later.transpose(0, 1), 0)


def decayed_products(a: Tensor, b: Tensor, between: Tensor) -> Tensor:
    """[..., i, j] = sum over channels of a_i b_j times their decay; a, b [..., size, dim], `between` from `decays`."""
    if between.shape[-1] == 1:
        return (a @ b.transpose(-1, -2)) * between.squeeze(-1)
    return (a.unsqueeze(-2) * b.unsqueeze(-3) * between).sum(-1)
