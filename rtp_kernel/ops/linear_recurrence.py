"""A linear recurrence per channel: what is kept of the state is given with each token (RG-LRU of Griffin).

Per token and channel, with the state h: h = decay h + x, which is also the output. The state is a `StateView` of
[slots, channels] in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import decode_steps, leave_copies, prefill_runs


def linear_recurrence(x: Tensor, decay: Tensor, state: StateView, batch: ForwardBatch) -> Tensor:
    """x, decay [T, channels] -> [T, channels] in x's dtype.

    In float32 (RecurrentGemmaRglru). Decodes go token by token, all requests at once, prefill one request after the
    other; padding rows come out as zeros.
    """
    out = torch.zeros_like(x)
    tables = batch.groups[state.group]
    assert tables.read is not None and tables.write is not None
    decodes = batch.num_decodes
    if decodes:
        held = state.data[tables.read[:decodes]].float()  # [requests, channels]
        for requests, rows in decode_steps(batch):
            held[requests] = decay[rows].float() * held[requests] + x[rows].float()
            out[rows] = held[requests].to(out.dtype)
            leave_copies(held[requests], rows, state, batch)
        state.data[tables.write[:decodes]] = held.to(state.data.dtype)
    for run in prefill_runs(batch, state.group):
        one = state.data[run.read].float()
        for piece, copies in run.pieces:
            part = slice(piece.start, piece.stop)
            states = scanned(x[part].float(), decay[part].float(), one)
            one = states[-1].clone()
            out[part] = states.to(out.dtype)
            for slot in copies:
                state.data[slot] = one
        state.data[run.write] = one
    return out


def scanned(x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """The states [tokens, channels] after each of consecutive tokens of one request, from its state [channels]."""
    states = x.clone()
    for place, factor in enumerate(decay):
        state = states[place].addcmul_(factor, state)
    return states
