"""Runs the toy model over a state manager, step by step, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rtp_kernel.batch import ForwardBatch
from rtp_runtime.state import StateManager, StepRow
from toy.model import ToyForCausalLM, state_descriptors
from toy.numbers import ToyConfig


@dataclass(frozen=True)
class Step:
    """A submitted step: its ticket, and the logits it left, by request: [new tokens][VOCAB]."""

    ticket: int
    rows: tuple[StepRow, ...]
    logits: dict[str, list[list[int]]]


class Driver:
    """`tokens` says what each request feeds; `submit` and `collect` say when."""

    def __init__(self, config: ToyConfig, *, num_blocks: int = 40, block_size: int | None = None) -> None:
        self.state = StateManager(
            state_descriptors(config), cache_dtype=torch.float32, block_size=block_size,
            num_blocks=num_blocks, max_requests=4, max_drafts=3, num_snapshots=3,
        )  # fmt: skip
        self.model = ToyForCausalLM(config)
        self.views = self.state.views()
        self.state.poison()

    def submit(self, *rows: StepRow, tokens: dict[str, list[int]], padding: int = 0) -> Step:
        for row in rows:
            more = row.start + row.num_tokens - self.state.num_tokens(row.request)
            assert self.state.grow(row.request, more, row.drafts)
        batch = self.batch(rows, tokens, padding)
        ticket = self.state.begin_step(rows)
        logits = self.model.logits(self.model(batch, self.views)).tolist()
        starts = [0, *accumulate(row.num_tokens for row in rows)]
        found = {
            str(row.request): logits[start : start + row.num_tokens] for row, start in zip(rows, starts, strict=False)
        }
        return Step(ticket, rows, found)

    def collect(self, step: Step, kept: dict[str, int] | None = None) -> None:
        """End a step; `kept` tokens of requests whose drafts were rejected."""
        self.state.end_step(step.ticket)
        for row in step.rows:
            end = row.start + row.num_tokens
            if kept and str(row.request) in kept:
                end = kept[str(row.request)]
                self.state.truncate(row.request, end)
            self.state.commit(row.request, end)

    def run(self, *rows: StepRow, tokens: dict[str, list[int]], padding: int = 0) -> dict[str, list[list[int]]]:
        """One step at depth 0, with everything that nobody owns poisoned afterwards."""
        step = self.submit(*rows, tokens=tokens, padding=padding)
        self.collect(step)
        self.state.poison()
        return step.logits

    def batch(self, rows: Sequence[StepRow], tokens: dict[str, list[int]], padding: int) -> ForwardBatch:
        ids = [token for row in rows for token in tokens[str(row.request)][row.start : row.start + row.num_tokens]]
        index = [row.start + k for row in rows for k in range(row.num_tokens)]
        lens = [row.num_tokens for row in rows] + [0] * padding
        ends = [row.start + row.num_tokens for row in rows] + [0] * padding
        owner = [place for place, row in enumerate(rows) for _ in range(row.num_tokens)]
        padded = torch.tensor(index + [-1] * padding)
        return ForwardBatch(
            input_ids=torch.tensor(ids + [0] * padding),
            index=padded,
            positions=padded.clamp_min(0),
            request=torch.tensor(owner + [0] * padding),
            query_start=torch.tensor([0, *accumulate(lens)], dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            groups=self.state.group_batches(rows, len(lens), len(ids) + padding),
            query_lens=tuple(lens),
            kv_lens=tuple(ends),
        )
