"""The last tokens of a request as a state, for what is computed of n-grams of token ids.

The state is a `StateView` of [slots, count] integers, the oldest token first; its initial value stands for the tokens
before a request's first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView


def previous_tokens(state: StateView, batch: ForwardBatch) -> Tensor:
    """The ids of the `count` tokens before each token, the nearest first: [T, count] int64; zeros in padding rows."""
    ids, request = batch.input_ids, batch.request
    tables, count = batch.groups[state.group], state.data.shape[1]
    if not batch.num_requests:
        return ids.new_zeros(len(ids), count)
    assert tables.read is not None and tables.write is not None
    held = state.data[tables.read].to(ids.dtype)  # [requests, count]
    row = torch.arange(len(ids), device=ids.device)[:, None]
    back = torch.arange(1, count + 1, device=ids.device)
    offset = row - batch.query_start[request].long()[:, None]  # tokens of this step before the row's
    in_step = ids[(row - back).clamp(min=0)]
    before = held[request[:, None], (count - back + offset).clamp(0, count - 1)]
    previous = torch.where(back <= offset, in_step, before).masked_fill(batch.index[:, None] < 0, 0)
    _keep(torch.cat((previous[:, : count - 1].flip(1), ids[:, None]), dim=1), state, batch)
    return previous


def _keep(after: Tensor, state: StateView, batch: ForwardBatch) -> None:
    """Store `after` [T, count], the last tokens up to each token, where requests end and where copies are due."""
    tables = batch.groups[state.group]
    assert tables.write is not None
    start, stop = batch.query_start[:-1].long(), batch.query_start[1:].long()
    requests = torch.nonzero(stop > start).squeeze(-1)
    state.data[tables.write[requests]] = after[stop[requests] - 1].to(state.data.dtype)
    if tables.snapshots is not None:
        copies = tables.snapshots[tables.snapshots[:, 0] >= 0]
        state.data[copies[:, 1]] = after[copies[:, 0]].to(state.data.dtype)
