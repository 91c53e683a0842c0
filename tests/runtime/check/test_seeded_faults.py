"""A seeded fault fails the check, at the module where it was put, through the stage that is said to catch it.

Here run the subtlest fault of each stage, way of entry and checkpoint (`check_faults.everything.PART`), and for each
stage and way of entry once more without that stage. `tools/faults` runs all, under three seeds, with their causes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from check_faults.catalogue import FAULTS, Fault
from check_faults.everything import ALL, PART, SMALL_PART
from check_faults.newer import NEWER
from check_faults.scoring import LENGTHS, placed, stages_for

from rtp_runtime.check import STAGES, CheckReport, run_check
from rtp_runtime.check.reference import Reference
from rtp_runtime.errors import RtpError

Run = Callable[[Fault, tuple[str, ...]], CheckReport]


@pytest.fixture
def run(checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path) -> Run:
    """Run a check, with a fault in its place, over some stages."""

    def run_fault(fault: Fault, stages: tuple[str, ...]) -> CheckReport:
        with placed(fault, checkpoint(fault.base), tmp_path / "fault") as entered:
            options = replace(entered.options(stages, LENGTHS), explain=False)
            return run_check(options, reference=reference(fault.base))

    return run_fault


def caught(report: CheckReport, fault: Fault) -> bool:
    """Whether the check fails as it should: exit status 1, the module and layer, by the stage that is said to."""
    first = report.first_wrong
    named = first is not None and (first.module, first.layer, first.stage) == (*fault.place, fault.stage)
    return report.exit == 1 and named


@pytest.mark.parametrize("fault", PART, ids=lambda fault: fault.name)
def test_fault_is_named(fault: Fault, run: Run) -> None:
    report = run(fault, stages_for(fault))
    first = report.first_wrong
    assert caught(report, fault), f"exit {report.exit}, first wrong {first}"
    assert first is not None
    if math.isinf(fault.effect):
        assert math.isinf(first.error)
    else:
        assert fault.effect / 1.5 < first.error < fault.effect * 1.5
    assert first.error > first.tolerance


@pytest.mark.parametrize("fault", SMALL_PART, ids=lambda fault: fault.name)
def test_without_its_stage_the_fault_is_missed(fault: Fault, run: Run) -> None:
    stages = tuple(stage for stage in stages_for(fault) if stage != fault.stage) or ("pinned",)
    try:
        report = run(fault, stages)
    except RtpError:
        return
    assert not caught(report, fault)


def test_catalogue_is_broad_and_subtle() -> None:
    effects = [fault.effect for fault in ALL if fault.stage != "serving"]  # these are ratios
    assert len(FAULTS) >= 20 and len(NEWER) >= 20
    assert len({fault.name for fault in ALL}) == len(ALL)
    assert sum(effect < 1e-2 for effect in effects) >= len(effects) / 3
    assert sum(effect < 1e-4 for effect in effects) >= 5
    assert {fault.stage for fault in ALL} | {"text"} == set(STAGES)  # faults of texts are in test_text_stage


def test_the_part_that_runs_here_is_broad() -> None:
    assert len(PART) >= 45 and len(SMALL_PART) >= 15
    assert {fault.stage for fault in PART} == {fault.stage for fault in ALL}
    assert {fault.base for fault in PART} == {fault.base for fault in ALL}
    assert {fault.entry for fault in SMALL_PART} == {"model", "weights", "op", "engine", "config", "tensors"}
