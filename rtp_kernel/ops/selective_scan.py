"""The selective state space of Mamba: a diagonal recurrence per channel, whose step and weights follow from the token.

Per token t and channel c, with the state h [state size]: dt = softplus(dt + bias); h = exp(dt A) h + dt x B;
y = h C + D x, times silu(gate) where there is one. The state is a `StateView` of [slots, channels, state size] in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import decode_states, prefill_states

SEGMENT = 32
"""Tokens whose decays are prepared together: bounds the memory of a long prompt."""


@dataclass(frozen=True, slots=True)
class Channels:
    """What belongs to the channels, not to tokens: A [channels, state size], D and dt_bias [channels], float32."""

    A: Tensor
    D: Tensor
    dt_bias: Tensor | float


def selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    gate: Tensor | None,
    A_log: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    dt_bias: Tensor | None,
    state: StateView,
    batch: ForwardBatch,
) -> Tensor:
    """x, dt, gate [T, channels], B, C [T, state size] -> [T, channels] in x's dtype; A = -exp(A_log).

    A_log [channels, state size], D [channels], dt_bias [channels] or None where dt has it; a gate of None gates
    nothing. All in float32 (MambaMixer, JambaMambaMixer). Decodes go token by token, all requests at once, prefill
    one request after the other; padding rows come out as zeros.
    """
    out = torch.zeros_like(x)
    fixed = Channels(-A_log.float().exp(), D.float(), 0.0 if dt_bias is None else dt_bias.float())
    given = [x, dt, B, C] if gate is None else [x, dt, B, C, gate]

    def tokens(rows: slice | Tensor) -> list[Tensor]:
        return [part[rows].float() for part in given]

    decode_states(state, batch, out, lambda rows, held: _step(tokens(rows), fixed, held))
    prefill_states(state, batch, out, lambda rows, held: scanned(tokens(rows), fixed, held), SEGMENT)
    return out


def _decays(tokens: Sequence[Tensor], fixed: Channels) -> tuple[Tensor, Tensor]:
    """What the state is multiplied by and what is added to it, both [N, channels, state size]."""
    x, dt, b = tokens[:3]
    step = functional.softplus(dt + fixed.dt_bias).unsqueeze(-1)
    return torch.exp(step * fixed.A), step * b.unsqueeze(1) * x.unsqueeze(-1)


def _outputs(tokens: Sequence[Tensor], fixed: Channels, states: Tensor) -> Tensor:
    """[N, channels] of the states [N, channels, state size] after each token."""
    x, c = tokens[0], tokens[3]
    out = torch.matmul(states, c.unsqueeze(-1)).squeeze(-1) + x * fixed.D
    return out * functional.silu(tokens[4]) if len(tokens) > 4 else out


def _step(tokens: Sequence[Tensor], fixed: Channels, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N requests, and states [N, channels, state size]."""
    decay, more = _decays(tokens, fixed)
    state = decay * state + more
    return _outputs(tokens, fixed, state), state


def scanned(tokens: Sequence[Tensor], fixed: Channels, state: Tensor) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one request, and its state [channels, state size]."""
    decay, states = _decays(tokens, fixed)
    for place, factor in enumerate(decay):
        state = states[place].addcmul_(factor, state)
    return _outputs(tokens, fixed, states), states[-1].clone()
