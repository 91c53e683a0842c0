"""Turns a plan into the tensors of a forward step, with a fixed number of array operations whatever the requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rtp_kernel.batch import ForwardBatch
from rtp_runtime.engine.scheduler import Chunk, Plan
from rtp_runtime.state import StateManager, StepRow


class BatchBuilder:
    """Builds `ForwardBatch`es over one state manager and one device table of sampled tokens.

    `table` is [rows] int64 on the device: the latest token sampled for the request that runs in a row.
    """

    def __init__(self, state: StateManager, table: Tensor) -> None:
        self._state = state
        self._table = table
        self._device = table.device

    def build(self, plan: Plan, rows: Sequence[StepRow]) -> ForwardBatch:
        """The step's batch, `rows` being its chunks as the state manager knows them; nothing is padded."""
        chunks = plan.chunks
        num_requests, num_tokens = len(chunks), plan.num_tokens
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, num_requests)
        lens = np.fromiter((chunk.num_tokens for chunk in chunks), np.int64, num_requests)
        ends = starts + lens
        query_start = np.zeros(num_requests + 1, np.int32)
        np.cumsum(lens, out=query_start[1:])
        if num_tokens == num_requests:
            request, index = np.arange(num_requests), starts
        else:
            request = np.repeat(np.arange(num_requests), lens)
            index = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], lens)
        device_index = self._tensor(index)
        return ForwardBatch(
            input_ids=self._input_ids(chunks, num_tokens),
            index=device_index,
            positions=device_index,
            request=self._tensor(request),
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(ends.astype(np.int32)),
            groups=self._state.group_batches(rows, num_requests, num_tokens),
            num_decodes=plan.num_decodes,
            num_decode_tokens=int(lens[: plan.num_decodes].sum()),
            query_lens=tuple(lens.tolist()),
            kv_lens=tuple(ends.tolist()),
        )

    def _input_ids(self, chunks: tuple[Chunk, ...], num_tokens: int) -> Tensor:
        """[T] int64: sampled tokens from the table, the others from the host."""
        rows = [chunk.request.row for chunk in chunks if chunk.from_table]
        known = [part for chunk in chunks[len(rows) :] for part in _known_ids(chunk)]
        if not known:
            return self._table.index_select(0, torch.tensor(rows, device=self._device))
        ids = self._tensor(np.concatenate(known))
        if not rows:
            return ids
        return torch.cat((self._table.index_select(0, torch.tensor(rows, device=self._device)), ids))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _known_ids(chunk: Chunk) -> list[NDArray[np.int64]]:
    """The chunk's tokens, none of which comes from the device table: those of its request, then drafts."""
    certain = chunk.start + chunk.num_tokens - len(chunk.drafts)
    ids = chunk.request.host_ids(chunk.start, certain)
    return [ids, np.array(chunk.drafts, np.int64)] if chunk.drafts else [ids]
