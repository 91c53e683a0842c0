"""Kernels as execution modes: the model again with the implementations behind those that a server takes.

All that is registered for this device and dtype is forced in turn, each time for every component that it supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rtp_runtime.check.kernels import PLAIN, Kernels
from rtp_runtime.check.mode_run import COMPANY, Mode, leave_mode_out, probe_mode, run_mode
from rtp_runtime.check.ours import OurModel, Schedule, load_ours
from rtp_runtime.check.report import ModeCell, StageResult
from rtp_runtime.check.session import Session
from rtp_runtime.errors import RtpError

MAX_BYTES = 3 << 29
"""Weights beyond 1.5 GiB are not loaded a second time."""
NEXT, PLAINLY, DETERMINISTIC = "kernels: those next in line", "kernels: plain references", "kernels: deterministic"
_SCHEDULE = Schedule(COMPANY, together=True)
_NUM_TOKENS, _SHORT = 6, 100
Chosen = Mapping[tuple[str, str, str], str]
"""(component, op, regime) -> the implementation that it got."""


def run_kernel_modes(session: Session, stage: StageResult, localise: bool) -> None:
    """Prompts in company, with prefill and decode in one step, with every set of kernels."""
    size = 4 * sum(parameter.numel() for parameter in session.model.module.parameters())
    if size > MAX_BYTES:
        why = f"a second copy of {size / 2**30:.1f} GiB of weights would be needed"
        for name in (NEXT, PLAINLY, DETERMINISTIC):
            leave_mode_out(stage, name, why)
        return
    taken = {"kernels: as served": chosen(session.model)}
    for name, kernels in ((NEXT, Kernels(1)), (PLAINLY, Kernels(PLAIN)), (DETERMINISTIC, Kernels(deterministic=True))):
        try:
            model = load_ours(session.options.model, session.plugins, "float32", kernels)
        except RtpError as error:
            leave_mode_out(stage, name, str(error))
            continue
        now = chosen(model)
        same = next((other for other, before in taken.items() if before == now), None)
        if same is not None:
            leave_mode_out(stage, name, f"the same as {same.removeprefix('kernels: ')}")
            continue
        taken[name] = now
        mode = Mode(name, _SCHEDULE, 1 / 16, None if name == PLAINLY else _SHORT, _NUM_TOKENS)
        localise = _run(session, stage, mode, model, localise)
    session.kernels = {name: summary(now) for name, now in taken.items()}


def _run(session: Session, stage: StageResult, mode: Mode, model: OurModel, localise: bool) -> bool:
    """Run one set; whether the next wrong one is still to be located.

    Of places with equal scores another kernel may select others, and what follows differs by right. Such a run is
    judged by its modules, of which the probes know ties.
    """
    before = len(stage.findings)
    if not run_mode(session, stage, mode, model):
        return localise
    found = probe_mode(session, mode, model) if localise or session.selections else []
    if session.selections and not found:
        del stage.findings[before:]
        stage.cells = [_tied(cell) if cell.mode == mode.name else cell for cell in stage.cells]
        stage.num_ties += 1
        stage.notes.append(f"TIE-FLIP: {mode.name}: other places of equal scores; every module agrees")
        return localise
    if localise:
        stage.findings = [*found, *stage.findings]
    return False


def _tied(cell: ModeCell) -> ModeCell:
    """A prompt whose logits differ although every module agrees."""
    return cell if cell.result != "wrong" else replace(cell, result="tie", why="other places of equal scores")


def chosen(model: OurModel) -> Chosen:
    """What each component got."""
    return {(each.component, each.op, each.regime): each.implementation for each in model.loaded.ops.choices}


def summary(chosen: Chosen) -> dict[str, list[str]]:
    """Op -> the implementations that some component got, in alphabetical order."""
    found: dict[str, set[str]] = {}
    for (_, op, _), name in chosen.items():
        found.setdefault(op, set()).add(name)
    return {op: sorted(names) for op, names in sorted(found.items())}
