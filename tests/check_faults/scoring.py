"""Runs seeded faults through the checker, and says of each whether it was flagged, at the right module, and why."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import check_faults.engine
from check_faults.catalogue import Fault
from check_faults.entering import Entered, enter
from rtp_runtime.check import STAGES, CheckReport, run_check
from rtp_runtime.check.reference import Reference
from rtp_runtime.errors import RtpError

LENGTHS = (10, 14, 40)
"""The longest crosses the tiny window of 8 several times, and is in its prefill while the others decode."""
EARLIER = {
    "audit": (),
    "pinned": ("audit",),
    "probes": STAGES[: STAGES.index("probes")],
    "logits": ("audit", "probes"),
    "greedy": ("audit", "probes", "logits"),
    "modes": ("audit", "probes", "logits"),
    "serving": ("audit", "pinned", "probes", "logits"),
}
"""Stage -> those before it that could have caught the same fault."""


@dataclass(frozen=True, slots=True)
class Score:
    """What the checker said of one fault under one seed."""

    fault: Fault
    seed: int
    flagged: bool
    """It did not pass: exit status 1."""
    placed: bool
    """It names the module and layer at which the fault was put."""
    cause: str
    """The kind of mistake that was named; empty when none was."""
    named: str
    """What was accused: module, stage and error."""

    @property
    def explained(self) -> bool:
        """The right cause, or "no known cause" of a mistake that the catalogue does not hold."""
        return self.flagged and self.cause == self.fault.cause


def stages_for(fault: Fault) -> tuple[str, ...]:
    """The fault's stage, after those that could have caught it earlier."""
    return (*EARLIER[fault.stage], fault.stage)


@contextmanager
def placed(fault: Fault, checkpoint: Path, directory: Path) -> Iterator[Entered]:
    """The fault in its place, and taken out again."""
    directory.mkdir(parents=True, exist_ok=True)
    entered = enter(fault, checkpoint, directory)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    module, _, name = f"rtp_runtime.{fault.engine[0]}".rpartition(".")
    holder = _holder(module) if fault.engine[0] else None
    original = getattr(holder, name) if holder is not None else None
    if holder is not None:
        setattr(holder, name, getattr(check_faults.engine, fault.engine[1]))
    try:
        yield entered
    finally:
        if holder is not None:
            setattr(holder, name, original)
        sys.path.remove(str(directory))
        for loaded in [each for each in sys.modules if each.startswith(f"fault_{fault.name}")]:
            del sys.modules[loaded]
        shutil.rmtree(directory)


def _holder(path: str) -> object:
    """The module, or the class in one, that this dotted path names."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(_holder(module), name)


def score(fault: Fault, seed: int, checkpoint: Path, reference: Reference, directory: Path) -> Score:
    """Run the check over the fault's stage and the earlier ones."""
    try:
        with placed(fault, checkpoint, directory) as entered:
            report = run_check(entered.options(stages_for(fault), LENGTHS), reference=reference)
    except RtpError as error:
        return Score(fault, seed, False, False, "", f"{type(error).__name__}: {error}")
    return judge(fault, seed, report)


def judge(fault: Fault, seed: int, report: CheckReport) -> Score:
    """Compare a report with what it should say."""
    first = report.first_wrong
    cause = report.cause.kind if report.cause is not None and report.cause.status == "named" else ""
    if first is None:
        return Score(fault, seed, False, False, cause, report.verdict)
    right = (first.module, first.layer) == fault.place
    named = f"{first.module} ({first.stage}, {first.error:.1e})"
    return Score(fault, seed, report.exit == 1, right, cause, named)
