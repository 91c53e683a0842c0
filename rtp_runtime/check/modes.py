"""The execution modes: the same prompts in chunks, token by token, in company, after preemption, from kept prefixes,
from snapshots, sampled, and with every kernel that supports the model."""

from __future__ import annotations

from rtp_runtime.check.kernel_modes import run_kernel_modes
from rtp_runtime.check.logits_stage import summarise_logits
from rtp_runtime.check.mode_run import COMPANY, Mode, leave_mode_out, probe_mode, run_mode
from rtp_runtime.check.ours import Schedule
from rtp_runtime.check.report import StageResult
from rtp_runtime.check.reuse_modes import run_again, run_restored
from rtp_runtime.check.sampled_mode import SCHEDULES, run_sampled
from rtp_runtime.check.session import Session

MODES = (
    Mode("whole prefill", Schedule(), -1.0),
    Mode("chunks of 64", Schedule({"max_chunk_tokens": 64}), 1 / 64),
    Mode("chunks of 17", Schedule({"max_chunk_tokens": 17}), 1 / 17),
    Mode("chunks of 7", Schedule({"max_chunk_tokens": 7}), 1 / 7),
    Mode("one token at a time", Schedule({"max_chunk_tokens": 1}), 1.0),
    Mode("mixed batch", Schedule(COMPANY, together=True), 1 / 16),
    Mode("mixed batch, the other way round", Schedule(COMPANY, together=True, reverse=True), 1 / 16),
    Mode("preempted and recomputed", Schedule(COMPANY, together=True, preempt_after=(3, 5, 8, 11)), 1 / 8),
)

NONE_YET = {
    "captured graphs": "nothing captures graphs yet, so there is no such mode to judge",
    "parallel ranks": "a model runs on one rank so far, so there is no such mode to judge",
}
"""Modes that do not exist, and so are not required."""


def run_modes(session: Session, localise: bool = True) -> StageResult:
    """Every mode over as many prompts as the model's size allows; with `localise` the first wrong one is probed."""
    stage = StageResult("modes")
    for mode in MODES:
        session.say(f"modes: {mode.name}")
        if run_mode(session, stage, mode) and localise:
            stage.findings = [*probe_mode(session, mode), *stage.findings]
            localise = False
    session.say("modes: prefixes, snapshots and sampling")
    run_again(session, stage)
    run_restored(session, stage)
    run_sampled(session, stage)
    session.say("modes: kernels")
    run_kernel_modes(session, stage, localise)
    for mode_name, why in NONE_YET.items():
        leave_mode_out(stage, mode_name, why)
    _summarise(stage)
    return stage


def _summarise(stage: StageResult) -> None:
    """How many modes ran, and the largest difference of logits; what draws are off by is another quantity."""
    logits = [measure for measure in stage.measures if measure.column not in SCHEDULES]
    numbers = summarise_logits(StageResult("modes", measures=logits, findings=stage.findings))
    names = {cell.mode for cell in stage.cells if cell.result != "not run"}
    stage.numbers, stage.summary = numbers.numbers, f"{len(names)} execution modes; {numbers.summary}"
    stage.not_judged += numbers.not_judged
