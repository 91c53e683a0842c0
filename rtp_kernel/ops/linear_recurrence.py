"""A linear recurrence per channel: what is kept of the state is given with each token (RG-LRU of Griffin).

Per token and channel, with the state h: h = decay h + x, which is also the output. The state is a `StateView` of
[slots, channels] in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import decode_states, prefill_states


def linear_recurrence(x: Tensor, decay: Tensor, state: StateView, batch: ForwardBatch) -> Tensor:
    """x, decay [T, channels] -> [T, channels] in x's dtype.

    In float32 (RecurrentGemmaRglru). Decodes go token by token, all requests at once, prefill one request after the
    other; padding rows come out as zeros.
    """
    out = torch.zeros_like(x)

    def step(rows: slice | Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        after = decay[rows].float() * held + x[rows].float()
        return after, after

    def advance(rows: slice | Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        states = scanned(x[rows].float(), decay[rows].float(), held)
        return states, states[-1].clone()

    decode_states(state, batch, out, step)
    prefill_states(state, batch, out, advance)
    return out


def scanned(x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """The states [tokens, channels] after each of consecutive tokens of one request, from its state [channels]."""
    states = x.clone()
    for place, factor in enumerate(decay):
        state = states[place].addcmul_(factor, state)
    return states
