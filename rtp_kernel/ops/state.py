"""Writing and reading states through a step's tables: what every op with a state of its own shares.

A block state is a `StateView` of [blocks, entries, *axes], a slot state one of [slots, *axes].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView


def write_state(values: Tensor, view: StateView, batch: ForwardBatch, *, plan: Any = None) -> None:
    """Put values [T, *axes] where the step's slot mapping says; rows mapped to -1 write nothing.

    Of a state with r > 1 tokens per entry only the rows of closing tokens are written.
    """
    slots = batch.groups[view.group].slot_mapping[view.tokens_per_entry]
    rows = torch.nonzero(slots >= 0).squeeze(-1)
    slots, entries = slots[rows], view.data.shape[1]
    view.data[slots // entries, slots % entries] = values[rows].to(view.data.dtype)


def gather_state(view: StateView, batch: ForwardBatch, request: int, entries: range) -> Tensor:
    """The request's entries [len(entries), *axes] in token order; only the blocks that hold them are read."""
    table = batch.groups[view.group].block_table
    assert table is not None
    place = torch.arange(entries.start, entries.stop, device=view.data.device)
    size = view.data.shape[1]
    return view.data[table[request, place // size].long(), place % size]


def entries_at(view: StateView, batch: ForwardBatch, request: Tensor, entry: Tensor) -> Tensor:
    """Entries [..., *axes] of many requests at once; request and entry are int64 and broadcast to [...]."""
    table = batch.groups[view.group].block_table
    assert table is not None
    size = view.data.shape[1]
    return view.data[table[request, entry // size].long(), entry % size]


@dataclass(frozen=True, slots=True)
class SlotRun:
    """One request's tokens of a step, cut where a copy of its state is to be left."""

    request: int
    read: int
    """The slot that holds the state before the first token."""
    write: int
    """The slot that receives the state after the last token."""
    pieces: tuple[tuple[range, tuple[int, ...]], ...]
    """(token rows, slots that get a copy of the state after the last of them), in order; all rows of the request."""


def slot_runs(batch: ForwardBatch, group: int) -> Iterator[SlotRun]:
    """The requests of a step that have tokens, each with the slots of `group` that its state passes through."""
    tables = batch.groups[group]
    assert tables.read is not None and tables.write is not None
    reads, writes = tables.read.tolist(), tables.write.tolist()
    copies: dict[int, list[int]] = {}
    for row, slot in tables.snapshots.tolist() if tables.snapshots is not None else ():
        if row >= 0:
            copies.setdefault(row, []).append(slot)
    start = 0
    for request, length in enumerate(batch.query_lens):
        stop = start + length
        if length:
            ends = [row + 1 for row in range(start, stop) if row in copies] if copies else []
            if not ends or ends[-1] != stop:
                ends.append(stop)
            begins = (start, *ends[:-1])
            pieces = tuple((range(a, b), tuple(copies.get(b - 1, ()))) for a, b in zip(begins, ends, strict=True))
            yield SlotRun(request, reads[request], writes[request], pieces)
        start = stop


def prefill_runs(batch: ForwardBatch, group: int) -> Iterator[SlotRun]:
    """The `slot_runs` of requests behind the decode part; a step of decodes alone reads nothing from the device."""
    if not any(batch.query_lens[batch.num_decodes :]):
        return iter(())
    return (run for run in slot_runs(batch, group) if run.request >= batch.num_decodes)


def decode_steps(batch: ForwardBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """The decode part token by token, all requests at once: (requests [N], their token rows [N]), both int64.

    One step, or as many as the longest request with drafts has tokens; a request is in as many as it has tokens.
    """
    tokens = batch.query_lens[: batch.num_decodes]
    if tokens and set(tokens) == {1}:
        rows = torch.arange(len(tokens), device=batch.input_ids.device)
        yield rows, rows
        return
    lens = torch.tensor(tokens, dtype=torch.int64)
    first = lens.cumsum(0) - lens
    for step in range(int(lens.max()) if len(lens) else 0):
        requests = torch.nonzero(lens > step).squeeze(-1)
        device = batch.input_ids.device
        yield requests.to(device), (first[requests] + step).to(device)


def leave_copies(states: Tensor, rows: Tensor, view: StateView, batch: ForwardBatch) -> None:
    """Copy states [N, *axes], each that after the token in its row of `rows` [N], to the slots that want them."""
    wanted = batch.groups[view.group].snapshots
    if wanted is not None and len(wanted):
        place, copy = torch.nonzero(rows[:, None] == wanted[:, 0], as_tuple=True)
        view.data[wanted[copy, 1]] = states[place].to(view.data.dtype)


Advance = Callable[[slice | Tensor, Tensor], tuple[Tensor, Tensor]]
"""(token rows, state before them) -> (what they give, state after them), both in float32."""


def decode_states(state: StateView, batch: ForwardBatch, out: Tensor, step: Advance) -> None:
    """The decode part token by token, all requests at once, into `out` [T, ...] and their slots.

    `step` is given one row of each of N requests, [N] int64, and their states [N, *axes] float32.
    """
    decodes, tables = batch.num_decodes, batch.groups[state.group]
    if not decodes:
        return
    assert tables.read is not None and tables.write is not None
    held = state.data[tables.read[:decodes]].float()  # [requests, *axes]
    for requests, rows in decode_steps(batch):
        result, held[requests] = step(rows, held[requests])
        out[rows] = result.to(out.dtype)
        leave_copies(held[requests], rows, state, batch)
    state.data[tables.write[:decodes]] = held.to(state.data.dtype)


def prefill_states(
    state: StateView, batch: ForwardBatch, out: Tensor, advance: Advance, size: int | None = None
) -> None:
    """The requests behind the decode part, one after the other, into `out` [T, ...] and their slots.

    `advance` is given consecutive rows of one request, at most `size` of them, as a slice, and its state [*axes]
    float32.
    """
    for run in prefill_runs(batch, state.group):
        held = state.data[run.read].float()
        for piece, copies in run.pieces:
            for start in range(piece.start, piece.stop, size or max(1, len(piece))):
                rows = slice(start, piece.stop if size is None else min(start + size, piece.stop))
                result, held = advance(rows, held)
                out[rows] = result.to(out.dtype)
            for slot in copies:
                state.data[slot] = held
        state.data[run.write] = held
