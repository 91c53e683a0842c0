"""One execution mode: which prompts it can afford, how its numbers are judged, and where it goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rtp_runtime.check.compare import LogitsError
from rtp_runtime.check.curves import logits_curve
from rtp_runtime.check.logits_stage import (
    TokenVerdict,
    compare_tokens,
    logits_finding,
    note_tokens,
    settled_logits,
    whole_runs,
)
from rtp_runtime.check.ours import ModuleError, OurModel, Output, Schedule
from rtp_runtime.check.probe_stage import raised
from rtp_runtime.check.probes import ProbeRun
from rtp_runtime.check.report import Finding, Measure, ModeCell, NotJudged, StageResult
from rtp_runtime.check.session import Case, Session

CHEAP_STEPS = 70
"""Steps that a mode may take on a model of which a step costs little."""
FEW_STEPS = 16
LARGE_STEPS = 12
"""Of a large model, each step of which reads gigabytes."""
MODE_TOKENS = 5
"""New tokens in modes that run one request after another; the ordinary run goes on longer."""
LARGE_TOKENS = 2
MAX_MODE_CURVES = 4
"""Curves of logits that are kept of modes that are wrong."""

COMPANY = {"max_num_batched_tokens": 45, "max_chunk_tokens": 32}
"""Limits of steps in which prompts are prefilled while others decode."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run prompts."""

    name: str
    schedule: Schedule
    steps_per_token: float
    """Engine steps that prefill costs per prompt token; negative where it is known already."""
    longest: int | None = None
    """Longer prompts are left out where there are shorter ones."""
    num_new_tokens: int | None = None


def affordable(session: Session, mode: Mode) -> list[Case]:
    """The cases that a mode runs: all while steps are cheap, else the longest ones that fit, at least the shortest."""
    reference = session.reference
    left = float(CHEAP_STEPS if reference.is_small else LARGE_STEPS if reference.is_large else FEW_STEPS)
    decode = 0 if mode.schedule.together else _alone_tokens(session)
    chosen = []
    cases = ordinary_cases(session)
    if mode.longest is not None:
        cases = [case for case in cases if len(case.prompt) <= mode.longest] or cases
    for case in sorted(cases, key=lambda case: len(case.prompt), reverse=True):
        steps = len(case.prompt) * mode.steps_per_token + decode
        if steps <= left:
            chosen.append(case)
            left -= steps
    # The shortest first: in company they then decode while the longest is still in its prefill.
    return chosen[::-1] or [min(cases, key=lambda case: len(case.prompt))]


def ordinary_cases(session: Session) -> list[Case]:
    """The cases that modes run: all that were not drawn for experts alone."""
    return [case for case in session.cases if not case.extra]


def new_tokens(session: Session, mode: Mode) -> int:
    """Tokens that each request of a mode goes on for."""
    if mode.num_new_tokens is not None:
        return min(mode.num_new_tokens, session.num_new_tokens)
    return session.num_new_tokens if mode.schedule.together else _alone_tokens(session)


def _alone_tokens(session: Session) -> int:
    return min(LARGE_TOKENS if session.reference.is_large else MODE_TOKENS, session.num_new_tokens)


def run_mode(session: Session, stage: StageResult, mode: Mode, model: OurModel | None = None) -> bool:
    """Run and compare one mode, on `model` instead of the session's where given; whether its numbers were wrong."""
    cases, num_findings = affordable(session, mode), len(stage.findings)
    try:
        outputs = _outputs(session, mode, cases, model)
    except ModuleError as failure:
        add_failure(session, stage, mode.name, cases, failure)
        return False
    for case in cases:
        _judge(session, stage, mode, case, outputs[case.name])
    add_not_run(session, stage, mode.name, cases)
    return len(stage.findings) > num_findings


def _outputs(session: Session, mode: Mode, cases: Sequence[Case], model: OurModel | None) -> Mapping[str, Output]:
    if model is None and mode.schedule == Schedule():
        return whole_runs(session)
    prompts = {case.name: case.prompt.ids for case in cases}
    return (model or session.model).run(prompts, new_tokens(session, mode), mode.schedule)


def _judge(session: Session, stage: StageResult, mode: Mode, case: Case, output: Output) -> None:
    verdict = compare_tokens(session, case, output.tokens)
    # After another token, ours and the reference's logits are of different texts.
    fed = min(verdict.num_equal, len(output.tokens) - 1)
    error = settled_logits(session, case, output.logits, len(case.prompt) + fed, mode.schedule)
    if not error.value <= session.noise.logits_tolerance and len(stage.curves) < MAX_MODE_CURVES:
        chunk = None if mode.schedule.together else mode.schedule.limits.get("max_chunk_tokens")
        stage.curves.append(logits_curve(session, case.name, mode.name, error, chunk))
    add_result(session, stage, mode.name, case, error, verdict)


def add_result(
    session: Session, stage: StageResult, mode: str, case: Case, error: LogitsError, verdict: TokenVerdict
) -> None:
    """Put one prompt's numbers and tokens in one mode into the stage."""
    allowed = session.noise.logits_tolerance
    stage.measures.append(Measure(case.name, None, mode, error.value, allowed, worst_token=error.token))
    if not error.value <= allowed:
        stage.findings.append(logits_finding(session, "modes", error, f"{case.name}, {mode}"))
    note_tokens(session, stage, case, verdict, mode)
    wrong = verdict.wrong or not error.value <= allowed
    why = f"new token {verdict.num_equal} is another" if verdict.wrong or verdict.tie else ""
    result = "wrong" if wrong else "tie" if verdict.tie else "pass"
    stage.cells.append(ModeCell(mode, case.name, result, error.value, allowed, why))  # type: ignore[arg-type]


def add_failure(session: Session, stage: StageResult, mode: str, cases: Sequence[Case], failure: ModuleError) -> None:
    """The finding for a mode in which our model raised."""
    stage.findings.append(raised(session, failure, "modes", f"in mode {mode}"))
    stage.cells += [ModeCell(mode, case.name, "wrong", why=str(failure)) for case in cases]
    add_not_run(session, stage, mode, cases)


def add_not_run(
    session: Session, stage: StageResult, mode: str, cases: Sequence[Case], why: str = "it would take too many steps"
) -> None:
    """The prompts that a mode left out."""
    left = [case for case in ordinary_cases(session) if case not in cases]
    stage.cells += [ModeCell(mode, case.name, "not run", why=why) for case in left]


def leave_mode_out(stage: StageResult, mode: str, why: str, required: bool = False) -> None:
    """A mode that no prompt was run in."""
    stage.not_judged.append(NotJudged(mode, why, required=required))
    stage.cells.append(ModeCell(mode, "", "not run", why=why))


def probe_mode(session: Session, mode: Mode, model: OurModel | None = None) -> list[Finding]:
    """Probe a mode that failed: the modules whose outputs differ although the reference's input was put in."""
    model, cases = model or session.model, affordable(session, mode)
    captures = {case.name: session.reference.capture(case.sequence)[1] for case in cases}
    run = ProbeRun.over(session, captures, model)
    try:
        with run.attached(model.ops):
            model.run({case.name: case.prompt.ids for case in cases}, new_tokens(session, mode), mode.schedule)
    except ModuleError:
        return []
    found = run.table.findings(session.noise.module_tolerance, "modes", mode.name)
    if found and not any(finding.cause for finding in found):
        found[0] = replace(
            found[0], cause=True, detail=f"{found[0].detail}; its input is wrong: look at what the engine feeds it"
        )
    return found
