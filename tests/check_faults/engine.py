"""Copies of engine parts with one fault each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch
from rtp_runtime.engine.batch import BatchBuilder
from rtp_runtime.engine.runner import Runner
from rtp_runtime.engine.sampler import Sampler
from rtp_runtime.engine.scheduler import Plan


class PositionsRestart(BatchBuilder):
    """Rotary positions that start at 0 in every chunk."""

    def build(self, plan: Plan, *rest: Any) -> ForwardBatch:
        batch = super().build(plan, *rest)
        starts = batch.query_start[:-1].long()[batch.request]
        return replace(batch, positions=torch.arange(batch.num_tokens) - starts)


class StaleAfterPreemption(BatchBuilder):
    """After a preemption the request is recomputed with a wrong first token."""

    def build(self, plan: Plan, *rest: Any) -> ForwardBatch:
        batch = super().build(plan, *rest)
        ids = batch.input_ids.clone()
        for place, chunk in enumerate(plan.chunks):
            if chunk.generation and chunk.start == 0:
                ids[int(batch.query_start[place])] = 3
        return replace(batch, input_ids=ids)


class SecondBest(Sampler):
    """Takes the token after the best one."""

    def sample(self, logits: Tensor, chunks: Any) -> Tensor:
        return logits.topk(2, dim=-1).indices[:, 1]


class ShiftedLogits(Runner):
    """Logits that leave the runner with a constant added: the same tokens, other numbers."""

    def _logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        logits = super()._logits(hidden, rows)
        return logits + 1e-3 * logits.std()
