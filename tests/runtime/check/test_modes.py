"""Modes that only some faults reach: each fault shows in the rows of the matrix that can see it, and in no other.

The same rows over clean models: test_clean_runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rtp_kernel.batch import ForwardBatch
from rtp_kernel.ops import rotary
from rtp_runtime.check import CheckOptions, run_check
from rtp_runtime.check.reference import Reference
from rtp_runtime.engine.batch import BatchBuilder
from rtp_runtime.engine.sampler import Sampler
from rtp_runtime.engine.scheduler import Chunk, Plan

Wrong = Callable[[str], set[str]]


@pytest.fixture
def wrong_modes(checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]) -> Wrong:
    """Checks the modes of a tiny model; the names of those that are wrong."""

    def check(name: str) -> set[str]:
        options = CheckOptions(
            model=checkpoint(name), stages=("audit", "modes"), lengths=(14, 40), num_new_tokens=6, explain=False
        )
        report = run_check(options, reference=reference(name))
        stage = next(stage for stage in report.stages if stage.name == "modes")
        wrong = {cell.mode for cell in stage.cells if cell.result == "wrong"}
        assert bool(stage.findings) == bool(wrong)
        return wrong

    return check


class SeedOfTheRow(Sampler):
    """Draws with a number that depends on the place of the request in the batch."""

    def _choose(self, logits: Tensor, chunks: Any, params: Any) -> Tensor:
        moved = [self._moved(row, chunk) for row, chunk in enumerate(chunks)]
        return super()._choose(logits, moved, params)

    @staticmethod
    def _moved(row: int, chunk: Chunk) -> Chunk:
        return chunk._replace(output_index=chunk.output_index + 1000 * row)


def test_a_draw_that_depends_on_company(wrong_modes: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rtp_runtime.engine.runner.Sampler", SeedOfTheRow)
    wrong = wrong_modes("qwen3")
    assert "sampled in a batch, in another order, in chunks" in wrong
    assert all(name.startswith("sampled") for name in wrong) and "sampled with a seed" not in wrong


def test_a_kernel_that_does_not_serve(wrong_modes: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rotary.rotary

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs) * 1.01

    monkeypatch.setattr(rotary, "rotary", faulty)
    wrong = wrong_modes("qwen3")
    assert "kernels: plain references" in wrong
    assert all(name.startswith("kernels") for name in wrong)


class NoSnapshots(BatchBuilder):
    """Leaves no copies of slots, although requests to come are told that there are some."""

    def build(self, plan: Plan, *rest: Any) -> ForwardBatch:
        batch = super().build(plan, *rest)
        groups = (
            group if group.snapshots is None else replace(group, snapshots=group.snapshots[:0])
            for group in batch.groups
        )
        return replace(batch, groups=tuple(groups))


def test_a_snapshot_that_holds_nothing(wrong_modes: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rtp_runtime.engine.runner.BatchBuilder", NoSnapshots)
    assert wrong_modes("qwen3_next") == {"again from a cached prefix", "restored from a snapshot"}
