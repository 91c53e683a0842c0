"""Windows of tokens pooled to one entry each, and attention over recent tokens and those entries (DeepSeek-V4).

Entries are a compressed state of [blocks, entries, D], written by the token that closes a window. A token still in an
open window lies in the buffers, slot states of [slots, places, channels]: token t at place t modulo the number of
places. Keys are values: one vector [D] per token or entry, for all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, request_rows
from rtp_kernel.ops.state import SlotRun, gather_state, slot_runs

MAX_NUMBERS = 1 << 24
"""Scores, or gathered numbers, that attention holds at once: 64 MiB of float32."""


def places(ratio: int, overlap: bool) -> int:
    """Tokens that the buffers hold: the window of `ratio` tokens, and with `overlap` the one before it."""
    return 2 * ratio if overlap else ratio


def compress(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    kv_buffer: StateView,
    gate_buffer: StateView,
    batch: ForwardBatch,
    *,
    ratio: int,
    overlap: bool,
) -> Tensor:
    """Entries of the windows that close in this step -> [T, D]: in their closing tokens' rows, zeros in all others.

    kv and gate [T, C], bias [ratio, C] float32. A window's entry is the sum of its tokens' kv, weighted in each channel
    by the softmax of gate + bias over its tokens; C = D. With `overlap`, C = 2 D: the first D channels of the window
    before take part as further tokens, beside the last D of this one. Ahead of a request's first window the buffers
    hold what a new request reads: kv 0 and gate -inf, which is no weight.
    """
    pool = partial(pooled, bias=bias, overlap=overlap)
    return each_window(kv, gate, kv_buffer, gate_buffer, batch, ratio, overlap, pool)


def each_window(
    kv: Tensor,
    gate: Tensor,
    kv_buffer: StateView,
    gate_buffer: StateView,
    batch: ForwardBatch,
    ratio: int,
    overlap: bool,
    pool: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """`compress` with `pool`, which makes entries [windows, D] of kv and gate [windows, places, C], tokens in order."""
    out = kv.new_zeros(len(kv), kv.shape[-1] // 2 if overlap else kv.shape[-1])
    size = places(ratio, overlap)
    for run in slot_runs(batch, kv_buffer.group):
        start, stop = run.pieces[0][0].start, run.pieces[-1][0].stop
        first = batch.kv_lens[run.request] - (stop - start)
        series = [
            torch.cat((in_order(view.data[run.read], first).to(new.dtype), new[start:stop]))  # [places + new, C]
            for new, view in ((kv, kv_buffer), (gate, gate_buffer))
        ]
        to_close = ratio - 1 - first % ratio  # new tokens before the first one that closes a window
        if start + to_close < stop:
            kvs, gates = (each[to_close + 1 :].unfold(0, size, ratio).transpose(1, 2) for each in series)
            out[start + to_close : stop : ratio] = pool(kvs, gates)
        for each, view in zip(series, (kv_buffer, gate_buffer), strict=True):
            leave(each, first, view, run)
    return out


def pooled(kv: Tensor, gate: Tensor, bias: Tensor, overlap: bool) -> Tensor:
    """Entries [windows, D] of kv and gate [windows, places, C], tokens in order."""
    if overlap:
        kv, gate = (_two_series(each, each.shape[1] // 2) for each in (kv, gate))
        bias = torch.cat(bias.chunk(2, dim=-1))  # [places, D]
    weights = torch.softmax(gate + bias, dim=1, dtype=torch.float32).to(kv.dtype)
    return (kv * weights).sum(dim=1)


def _two_series(windows: Tensor, ratio: int) -> Tensor:
    """[windows, 2 ratio, 2 D] -> [windows, 2 ratio, D]: the earlier tokens' first channels, the later ones' last."""
    dim = windows.shape[-1] // 2
    return torch.cat((windows[:, :ratio, :dim], windows[:, ratio:, dim:]), dim=1)


def in_order(buffer: Tensor, first: int) -> Tensor:
    """The buffer [places, C] by rising token, the last of them token `first` - 1."""
    return buffer.roll(-(first % len(buffer)), 0)


def leave(series: Tensor, first: int, view: StateView, run: SlotRun) -> None:
    """Leave the buffers after the request's tokens where the step wants them.

    series [places + new, C]: what the buffer held, in order, and the step's tokens, of which `first` is the index of
    the first.
    """
    size, start = view.data.shape[1], run.pieces[0][0].start
    for rows, copies in run.pieces:
        done = rows.stop - start
        buffer = series[done : done + size].roll((first + done) % size, 0).to(view.data.dtype)
        slots = (*copies, run.write) if rows == run.pieces[-1][0] else copies
        for slot in slots:
            view.data[slot] = buffer


def compressed_attention(
    q: Tensor,
    kv: StateView,
    batch: ForwardBatch,
    span: Span,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
    entries: StateView | None = None,
    selection: Tensor | None = None,
) -> Tensor:
    """Attention of the span's rows q [N, heads, D] over recent tokens and compressed entries -> [N, heads, D].

    A query at index i sees the keys [D] of the last `window` tokens, itself included, and of `entries` all whose window
    is closed by then, or those of `selection` [N, 1, k] (entry indices, -1 = none). `sinks` [heads] are one more logit
    in each softmax, with no value. Scores and sums are float32. Rows are taken few at a time, so that no more than
    `MAX_NUMBERS` numbers are held.
    """
    out = torch.zeros_like(q)
    for request, rows in request_rows(batch, span):
        step = max(1, MAX_NUMBERS // _numbers(q, window + len(rows), batch.kv_lens[request], entries, selection))
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            index = batch.index[span.rows.start + part.start : span.rows.start + part.stop]
            seen = [recent_keys(kv, batch, request, index, window)]
            if entries is not None:
                chosen = None if selection is None else selection[part, 0]
                seen.append(entry_keys(entries, batch, request, index, chosen))
            out[part] = attend(q[part], seen, scale, sinks)
    return out


def _numbers(q: Tensor, recent: int, length: int, entries: StateView | None, selection: Tensor | None) -> int:
    """What one row makes attention hold: a score for each key and head, or the selected keys themselves."""
    heads, dim = q.shape[1:]
    if selection is not None:
        return recent * heads + selection.shape[-1] * max(heads, dim)
    return (recent + (0 if entries is None else length // entries.tokens_per_entry)) * heads


Keys = tuple[Tensor, Tensor]
"""Keys [S, D] for all rows, or each row's own [N, S, D]; and which of them a row sees, [N, S] bool."""


def recent_keys(kv: StateView, batch: ForwardBatch, request: int, index: Tensor, window: int) -> Keys:
    """The tokens that queries at `index` [N], consecutive tokens of the request, see through the window."""
    last = int(index[-1])
    tokens = range(max(0, last - len(index) - window + 2), last + 1)
    place = torch.arange(tokens.start, tokens.stop, device=index.device)
    visible = (place <= index[:, None]) & (place > index[:, None] - window)
    return gather_state(kv, batch, request, tokens), visible


def entry_keys(entries: StateView, batch: ForwardBatch, request: int, index: Tensor, selection: Tensor | None) -> Keys:
    """The entries whose windows are closed at `index` [N], or of them each row's own `selection` [N, k]."""
    closed = (index[:, None] + 1) // entries.tokens_per_entry  # [N, 1]
    if selection is None:
        count = int(closed.max())
        place = torch.arange(count, device=index.device)
        return gather_state(entries, batch, request, range(count)), place < closed
    table = batch.groups[entries.group].block_table
    assert table is not None
    visible = (selection >= 0) & (selection < closed)
    place, size = torch.where(visible, selection, 0), entries.data.shape[1]
    keys = entries.data[table[request].long()[place // size], place % size]  # [N, k, D]
    return keys.masked_fill(~visible[..., None], 0), visible


def attend(q: Tensor, seen: Sequence[Keys], scale: float, sinks: Tensor | None) -> Tensor:
    """Attention of q [N, heads, D] over several sets of keys under one softmax; keys are values -> [N, heads, D]."""
    keys = [each.float() for each, _ in seen]
    scores = [
        (torch.matmul(q.float(), each.transpose(-1, -2)) * scale).masked_fill(~visible[:, None], float("-inf"))
        for each, (_, visible) in zip(keys, seen, strict=True)
    ]  # of each set, [N, heads, S]
    sizes = [each.shape[-1] for each in scores]
    if sinks is not None:
        scores.append(sinks.float().view(1, -1, 1).expand(len(q), -1, 1))
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)[..., : sum(sizes)]
    parts = torch.split_with_sizes(weights, sizes, dim=-1)
    sums = [torch.matmul(weight, each) for weight, each in zip(parts, keys, strict=True)]
    return torch.stack(sums).sum(0).to(q.dtype)
