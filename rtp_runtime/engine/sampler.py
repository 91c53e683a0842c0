"""Chooses the next tokens of a step from its logits, doing only what some request of the step asked for.

Holds the penalties' token counts of the requests that need them. One row's token depends on that row, its request's
parameters and (seed, output position) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rtp_kernel.ops import sampling
from rtp_runtime.engine.request import Request
from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.engine.scheduler import Chunk


class RowLogprobs(NamedTuple):
    """Log probabilities of some rows of logits."""

    chosen: Tensor
    """[R] float32."""
    ranks: Tensor
    """[R] int64, 1 = most likely."""
    values: Tensor
    """[R, k] float32, most likely first."""
    ids: Tensor
    """[R, k] int64."""


def row_logprobs(logits: Tensor, ids: Tensor, k: int) -> RowLogprobs:
    """Log probability and rank of `ids` [R] under `logits` [R, V], and the `k` most likely tokens of each row."""
    chosen, values, top = sampling.logprobs(logits, ids, k)
    ranks = (logits > logits.gather(1, ids[:, None])).sum(1) + 1
    return RowLogprobs(chosen, ranks, values, top)


class Sampler:
    """Samples one token for each row of logits."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._free: list[int] = []

    def sample(self, logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """The next token of each chunk's request.

        Args:
            logits: [R, V] float32, one row per chunk; left as it is.
            chunks: those of the step that sample, in the order of the rows.

        Returns:
            [R] int64 token ids.
        """
        params = [chunk.request.params for chunk in chunks]
        changed = self._mask_stops(logits, chunks)
        penalised = [row for row, each in enumerate(params) if each.penalised]
        if penalised:
            changed = self._penalise(logits, changed, [chunks[row].request for row in penalised], penalised)
        ids = self._choose(changed, chunks, params)
        if penalised:
            slots = self._index([chunks[row].request.penalty_slot for row in penalised])
            one = torch.ones(len(penalised), dtype=torch.int32, device=self._device)
            self._counts.index_put_((slots, ids[self._index(penalised)]), one, accumulate=True)
        return ids

    def release(self, request: Request) -> None:
        """Forget the request's counts."""
        if request.penalty_slot >= 0:
            self._free.append(request.penalty_slot)
            request.penalty_slot = -1

    def _choose(self, logits: Tensor, chunks: Sequence[Chunk], params: list[SamplingParams]) -> Tensor:
        if all(each.greedy for each in params):
            return logits.argmax(-1)
        return sampling.sample(
            logits,
            self._floats([0.0 if each.greedy else each.temperature for each in params]),
            self._index([max(each.top_k, 0) for each in params]),
            self._floats([each.top_p for each in params]),
            self._floats([each.min_p for each in params]),
            self._index([chunk.request.seed for chunk in chunks]),
            self._index([chunk.output_index for chunk in chunks]),
        )

    def _mask_stops(self, logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """`logits`, or a copy in which requests short of their `min_tokens` cannot stop."""
        rows: list[int] = []
        ids: list[int] = []
        for row, chunk in enumerate(chunks):
            if chunk.output_index < chunk.request.params.min_tokens:
                rows += [row] * len(chunk.request.stop_ids)
                ids += chunk.request.stop_ids
        if not rows:
            return logits
        return logits.clone().index_put_((self._index(rows), self._index(ids)), logits.new_tensor(float("-inf")))

    def _penalise(self, original: Tensor, logits: Tensor, requests: list[Request], rows: list[int]) -> Tensor:
        for request in requests:
            if request.penalty_slot < 0:
                self._claim(request)
        slots = self._index([request.penalty_slot for request in requests])
        index = self._index(rows)
        penalised = sampling.penalize(
            logits[index],
            self._in_prompt[slots],
            self._counts[slots],
            self._floats([request.params.repetition_penalty for request in requests]),
            self._floats([request.params.presence_penalty for request in requests]),
            self._floats([request.params.frequency_penalty for request in requests]),
        )
        if len(rows) == len(logits):
            return penalised
        changed = logits.clone() if logits is original else logits
        changed[index] = penalised
        return changed

    def _claim(self, request: Request) -> None:
        """Give the request a row of counts; nothing was sampled for it yet."""
        if not self._free:
            held = len(self._counts)
            more = max(4, held)
            self._counts = torch.cat((self._counts, self._counts.new_zeros((more, self._counts.shape[1]))))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros((more, self._counts.shape[1]))))
            self._free = list(range(held + more - 1, held - 1, -1))
        slot = request.penalty_slot = self._free.pop()
        self._counts[slot] = 0
        self._in_prompt[slot] = False
        self._in_prompt[slot, torch.from_numpy(request.prompt_ids).to(self._device)] = True

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)
