"""Short causal convolution over a request's tokens, one filter per channel; the last inputs of a request are its state.

The state is a `StateView` of [slots, channels, taps], taps = (kernel size - 1) * dilation, the oldest input first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.activation import activation as activate
from rtp_kernel.ops.state import decode_steps, leave_copies, prefill_runs


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: StateView,
    batch: ForwardBatch,
    *,
    activation: str | None = "silu",
    dilation: int = 1,
    bias: Tensor | None = None,
) -> Tensor:
    """x [T, channels] -> act(bias + sum over j of weight[:, 0, j] * x[t - taps + j * dilation]).

    weight [channels, 1, kernel], bias [channels] or None. Products are added up in float32, as torch's convolution
    does, and cast after the activation (causal_conv1d_fn of Mamba, Qwen3-Next and GLM-5.3). A request's inputs before
    this step come from its slot; padding rows come out as zeros.
    """
    out = torch.zeros_like(x)
    taps = weight[:, 0].t().float().contiguous()  # [kernel, channels]
    tables = batch.groups[state.group]
    assert tables.read is not None and tables.write is not None
    if batch.num_decodes:
        past = state.data[tables.read[: batch.num_decodes]].to(x.dtype).movedim(-1, 0).contiguous()
        for requests, rows in decode_steps(batch):
            window = torch.cat((past[:, requests], x[rows].unsqueeze(0)))  # [taps + 1, requests, channels]
            out[rows] = _filter(window.float(), taps, bias, activation, dilation)[0].to(x.dtype)
            past[:, requests] = window[1:]
            leave_copies(window[1:].movedim(0, -1), rows, state, batch)
        state.data[tables.write[: batch.num_decodes]] = past.movedim(0, -1).to(state.data.dtype)
    for run in prefill_runs(batch, state.group):
        new = range(run.pieces[0][0].start, run.pieces[-1][0].stop)
        inputs = torch.cat((state.data[run.read].t().to(x.dtype), x[new.start : new.stop]))  # [taps + L, channels]
        out[new.start : new.stop] = _filter(inputs.float(), taps, bias, activation, dilation).to(x.dtype)
        ends = [(piece.stop - new.start, slots) for piece, slots in run.pieces]
        for length, slots in (*ends, (len(new), (run.write,))):
            for slot in slots:
                state.data[slot] = inputs[length : length + state.data.shape[-1]].t().to(state.data.dtype)
    return out


def _filter(inputs: Tensor, taps: Tensor, bias: Tensor | None, activation: str | None, dilation: int) -> Tensor:
    """inputs [taps + L, ..., channels] -> [L, ..., channels], summed as torch's own depthwise convolution sums."""
    length = inputs.shape[0] - (len(taps) - 1) * dilation
    out = inputs[:length] * taps[0]
    for place, tap in enumerate(taps[1:], 1):
        out.addcmul_(inputs[place * dilation : place * dilation + length], tap)
    if bias is not None:
        out += bias
    return out if activation is None else activate(out, activation)
