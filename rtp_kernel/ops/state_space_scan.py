"""The state space of Mamba 2: one decay per head, whose step and weights follow from the token; grouped B and C.

Per token and head, with the state S [dim, state size]: dt = clamp(softplus(dt + bias)); S = exp(dt A) S + dt x B^T;
y = S C + D x. Consecutive heads share a group's B and C. The state is a `StateView` of [slots, heads, dim, state size]
in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import Advance, decode_states, prefill_states

CHUNK = 64
"""Tokens of one parallel chunk; the references' own size changes only their rounding."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What the rule reads of N tokens, in float32."""

    x: Tensor
    """[N, heads, dim], unscaled."""
    dt: Tensor
    """[N, heads], after softplus and clamp."""
    decay: Tensor
    """[N, heads], the log of what is kept: at most 0."""
    B: Tensor
    """[N, groups, state size]"""
    C: Tensor
    """[N, groups, state size]"""


Form = Callable[[Scan, Tensor], tuple[Tensor, Tensor]]
"""`recurrent` or `chunked`."""


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    A_log: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    dt_bias: Tensor,
    state: StateView,
    batch: ForwardBatch,
    *,
    limits: tuple[float, float] = (0.0, float("inf")),
    chunk: int = CHUNK,
) -> Tensor:
    """x [T, heads, dim], dt [T, heads], B, C [T, groups, state size] -> [T, heads, dim] in x's dtype; A = -exp(A_log).

    A_log, D and dt_bias [heads]; the step is clamped to `limits`. All in float32 (Mamba2Mixer). Decodes go token by
    token, all requests at once, prefill by chunks of `chunk` tokens; padding rows come out as zeros.
    """
    out = torch.zeros_like(x)
    rate, skip = -A_log.float().exp(), D.float().unsqueeze(-1)

    def tokens(rows: slice | Tensor) -> Scan:
        step = functional.softplus(dt[rows].float() + dt_bias.float()).clamp(*limits)
        return Scan(x[rows].float(), step, step * rate, B[rows].float(), C[rows].float())

    def through(form: Form) -> Advance:
        def advance(rows: slice | Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
            some = tokens(rows)
            result, held = form(some, held)
            return result + some.x * skip, held

        return advance

    decode_states(state, batch, out, through(recurrent))
    prefill_states(state, batch, out, through(chunked), chunk)
    return out


def recurrent(tokens: Scan, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N requests: out [N, heads, dim] without D, and states [N, heads, dim, state size]."""
    share = tokens.x.shape[1] // tokens.B.shape[1]
    b, c = (part if share == 1 else part.repeat_interleave(share, dim=1) for part in (tokens.B, tokens.C))
    added = (tokens.x * tokens.dt.unsqueeze(-1)).unsqueeze(-1) * b.unsqueeze(-2)
    state = state * tokens.decay.exp()[..., None, None] + added
    return torch.matmul(state, c.unsqueeze(-1)).squeeze(-1), state


def chunked(tokens: Scan, state: Tensor) -> tuple[Tensor, Tensor]:
    """L tokens of one request and its state [heads, dim, state size]: out [L, heads, dim] without D, and the state.

    All pairs of tokens at once: the decay between two is summed over what lies between them, as the references sum
    it, since the difference of two sums from the start would lose digits.
    """
    length, heads = tokens.dt.shape
    share = heads // tokens.B.shape[1]
    x = (tokens.x * tokens.dt.unsqueeze(-1)).transpose(0, 1)  # [heads, L, dim]
    b, c = tokens.B.transpose(0, 1), tokens.C.transpose(0, 1)  # [groups, L, state size]
    pairs = c @ b.transpose(1, 2)  # [groups, L, L]
    decay = tokens.decay.t()  # [heads, L]
    kept = between(decay)
    wide_b, wide_c, pairs = (
        part if share == 1 else part.repeat_interleave(share, dim=0, output_size=heads) for part in (b, c, pairs)
    )
    inside = (pairs * kept) @ x  # [heads, L, dim]
    from_start = decay.cumsum(-1).exp().unsqueeze(-1)  # [heads, L, 1]
    out = inside + (wide_c @ state.transpose(1, 2)) * from_start
    to_end = kept[:, length - 1].unsqueeze(-1)  # [heads, L, 1]
    state = state * from_start[:, -1:] + x.transpose(1, 2) @ (wide_b * to_end)
    return out.transpose(0, 1), state


def between(decay: Tensor) -> Tensor:
    """[heads, i, j] = exp(decay_(j+1) + ... + decay_i) for j <= i, else 0, of decay [heads, L]."""
    length = decay.shape[-1]
    before = torch.ones(length, length, dtype=torch.bool, device=decay.device).tril(-1)  # j < i
    sums = decay.unsqueeze(-1).expand(-1, -1, length).masked_fill(~before, 0).cumsum(dim=-2)
    later = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu(1)
    return sums.masked_fill_(later, float("-inf")).exp_()
