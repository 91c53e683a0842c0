"""Runs planned steps: builds the batch, calls the model, samples, hands results back when they are collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch, Hidden
from rtp_runtime.engine.batch import BatchBuilder
from rtp_runtime.engine.drafts import num_accepted
from rtp_runtime.engine.request import Request
from rtp_runtime.engine.sampler import RowLogprobs, Sampler, row_logprobs
from rtp_runtime.engine.scheduler import Chunk, Plan
from rtp_runtime.state import StateManager, StepRow


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted step; its tensors may still be in the making on the device."""

    plan: Plan
    step: int
    """The state manager's name for it."""
    sampling: tuple[Chunk, ...]
    """The chunks that sampled, in the order of `ids`; one with drafts once for each of its rows."""
    ids: Tensor | None
    """[rows that sampled] int64."""
    logprobs: RowLogprobs | None
    prompt_logprobs: dict[int, RowLogprobs]
    """By place of the chunk in the plan."""
    logits: dict[int, Tensor]
    """By place of the chunk in the plan: [its tokens, V] float32."""


class ChunkResult(NamedTuple):
    """What a collected step says of one chunk."""

    chunk: Chunk
    num_tokens: int
    """Of the chunk, those that stand: all but rejected drafts."""
    token_ids: list[int]
    """Sampled: none, one, or one more than the drafts that were right."""
    logprobs: list[tuple[float, int, list[float], list[int]]]
    """Of each sampled token, if asked for: log probability, rank, then the most likely tokens' values and ids."""
    prompt_logprobs: RowLogprobs | None
    logits: Tensor | None


class Runner:
    """Submits plans to one model and collects them in order."""

    def __init__(
        self, model: nn.Module, state: StateManager, *, num_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        self._forward: Any = model
        self._state = state
        self._views = state.views()
        self._table = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._builder = BatchBuilder(state, self._table)
        self._sampler = Sampler(vocab_size, device)
        self._device = device

    def submit(self, plan: Plan) -> Ticket:
        """Start one step."""
        rows = [_step_row(chunk) for chunk in plan.chunks]
        with torch.inference_mode():
            batch = self._builder.build(plan, rows)
            step = self._state.begin_step(rows)
            try:
                hidden = self._forward(batch, self._views)
                return self._finish(plan, step, batch, hidden.out if isinstance(hidden, Hidden) else hidden)
            except BaseException:
                self._state.end_step(step)
                raise

    def collect(self, ticket: Ticket) -> list[ChunkResult]:
        """Wait for a step; one result per chunk of its plan."""
        ids = ticket.ids.tolist() if ticket.ids is not None else []
        self._state.end_step(ticket.step)
        logprobs = _listed(ticket.logprobs)
        results: list[ChunkResult] = []
        row = 0
        for place, chunk in enumerate(ticket.plan.chunks):
            end = row + (1 + len(chunk.drafts) if chunk.samples else 0)
            right = num_accepted(chunk.drafts, ids[row:end])
            kept = min(end, row + 1 + right)
            num_tokens = chunk.num_tokens - len(chunk.drafts) + right
            logits = ticket.logits.get(place)
            results.append(
                ChunkResult(
                    chunk,
                    num_tokens,
                    ids[row:kept],
                    list(logprobs[row:kept]),
                    ticket.prompt_logprobs.get(place),
                    None if logits is None else logits[:num_tokens],
                )
            )
            row = end
        return results

    def drop(self, ticket: Ticket) -> None:
        """Give a submitted step up."""
        self._state.end_step(ticket.step)

    def release(self, request: Request) -> None:
        """Forget what sampling keeps of a request."""
        self._sampler.release(request)

    def _finish(self, plan: Plan, step: int, batch: ForwardBatch, hidden: Tensor) -> Ticket:
        """Logits of the rows that somebody needs, and the next tokens."""
        sampling = tuple(row for chunk in plan.chunks if chunk.samples for row in _sampled_rows(chunk))
        kept, prompt = self._whole_chunks(plan)
        ids = logprobs = None
        if sampling:
            logits = self._logits(hidden, self._last_rows(plan, len(sampling)))
            ids = self._sampler.sample(logits, sampling)
            self._table[torch.tensor([chunk.request.row for chunk in sampling], device=self._device)] = ids
            asked = [chunk.request.params.logprobs for chunk in sampling if chunk.request.params.logprobs is not None]
            if asked:
                logprobs = row_logprobs(logits, ids, max(asked))
        whole: dict[int, Tensor] = {}
        scored: dict[int, RowLogprobs] = {}
        starts = batch.query_start.tolist() if kept or prompt else []
        for place in sorted(kept | prompt):
            logits = self._logits(hidden[starts[place] : starts[place + 1]], None)
            if place in kept:
                whole[place] = logits
            if place in prompt:
                scored[place] = self._score(plan.chunks[place], logits)
        return Ticket(plan, step, sampling, ids, logprobs, scored, whole)

    def _logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[rows, V] float32."""
        picked = hidden if rows is None else hidden.index_select(0, rows)
        logits: Tensor = self._forward.logits(picked)
        return logits.float()

    def _last_rows(self, plan: Plan, num_sampling: int) -> Tensor | None:
        """Token rows that are sampled from; None when they are all rows, in order."""
        if num_sampling == plan.num_tokens:
            return None
        rows: list[int] = []
        end = 0
        for chunk in plan.chunks:
            end += chunk.num_tokens
            if chunk.samples:
                rows += range(end - 1 - len(chunk.drafts), end)
        return torch.tensor(rows, device=self._device)

    def _whole_chunks(self, plan: Plan) -> tuple[set[int], set[int]]:
        """Places of the chunks whose every logit is kept, and of those whose prompt is scored."""
        kept: set[int] = set()
        prompt: set[int] = set()
        for place, chunk in enumerate(plan.chunks):
            request = chunk.request
            if request.return_logits:
                kept.add(place)
            if request.params.prompt_logprobs is not None and chunk.start + 1 < request.num_prompt:
                prompt.add(place)
        return kept, prompt

    def _score(self, chunk: Chunk, logits: Tensor) -> RowLogprobs:
        """Log probabilities of the prompt tokens that follow the chunk's tokens."""
        request = chunk.request
        following = request.prompt_ids[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
        ids = torch.from_numpy(following).to(self._device)
        return row_logprobs(logits[: len(following)], ids, request.params.prompt_logprobs or 0)


def _step_row(chunk: Chunk) -> StepRow:
    return StepRow(chunk.request.request_id, chunk.start, chunk.num_tokens, len(chunk.drafts))


def _sampled_rows(chunk: Chunk) -> Sequence[Chunk]:
    """The chunk as the sampler sees it, once for each row that is sampled from."""
    if not chunk.drafts:
        return (chunk,)
    return [chunk._replace(output_index=chunk.output_index + place) for place in range(1 + len(chunk.drafts))]


def _listed(rows: RowLogprobs | None) -> Sequence[tuple[float, int, list[float], list[int]]]:
    if rows is None:
        return ()
    return list(zip(rows.chosen.tolist(), rows.ranks.tolist(), rows.values.tolist(), rows.ids.tolist(), strict=True))
