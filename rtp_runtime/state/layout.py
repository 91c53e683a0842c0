"""One group's `GroupBatch` for a step, from the manager's integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rtp_kernel.batch import NULL_BLOCK, GroupBatch
from rtp_runtime.state.arena import SCRATCH_SLOT
from rtp_runtime.state.grouping import GroupSpec
from rtp_runtime.state.requests import RequestState
from rtp_runtime.state.tables import BlockTable, Ints, StepLayout, StepRow


def block_batch(
    spec: GroupSpec,
    table: BlockTable,
    table_rows: Ints,
    states: Sequence[RequestState],
    layout: StepLayout,
    device: torch.device,
) -> GroupBatch:
    """Block table, slot mappings and, for windows, the first index held."""
    width = max((state.end[spec.index] for state in states), default=0)
    first_valid = None
    if spec.window:
        first = np.zeros(layout.padded_requests, np.int64)
        first[: len(states)] = [state.first[spec.index] * spec.block_size for state in states]
        first_valid = _tensor(first, device)
    return GroupBatch(
        block_size=spec.block_size,
        block_table=_tensor(table.batch(table_rows, layout.padded_requests, max(width, 1)), device),
        slot_mapping={each: _tensor(table.slots(table_rows, layout, each), device) for each in spec.tokens_per_entry},
        first_valid=first_valid,
    )


def slot_batch(
    spec: GroupSpec, rows: Sequence[StepRow], states: Sequence[RequestState], layout: StepLayout, device: torch.device
) -> GroupBatch:
    """Rows to read, to write, and to leave copies in: draft candidates, then the snapshots that this step passes."""
    read = np.full(layout.padded_requests, NULL_BLOCK, np.int64)
    write = np.full(layout.padded_requests, SCRATCH_SLOT, np.int64)
    copies: list[tuple[int, int]] = []
    for place, (row, state) in enumerate(zip(rows, states, strict=True)):
        slots = state.slots[spec.index]
        read[place], write[place] = slots.reading(row.start), slots.own
        # Token row whose state is the one after n tokens of the request: before_first + n.
        before_first = int(layout.first_row[place]) - row.start - 1
        kept_from = row.start + row.num_tokens - row.drafts
        copies += [(before_first + kept_from + j, slots.candidates[j]) for j in range(row.drafts)]
        for holding in state.snapshots:
            if row.start < holding.num_tokens <= row.start + row.num_tokens and not holding.released:
                copies.append((before_first + holding.num_tokens, holding.slots[spec.index]))
    snapshots = np.array(copies, np.int64).reshape(-1, 2)
    return GroupBatch(read=_tensor(read, device), write=_tensor(write, device), snapshots=_tensor(snapshots, device))


def _tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
