"""The execution modes: the same prompts in chunks, token by token, in company, after preemption, from kept prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtp_runtime.check.compare import LogitsError
from rtp_runtime.check.logits_stage import (
    compare_logits,
    compare_logprobs,
    compare_tokens,
    logits_finding,
    note_tokens,
    summarise_logits,
    whole_runs,
)
from rtp_runtime.check.ours import ModuleError, Schedule
from rtp_runtime.check.probe_stage import raised
from rtp_runtime.check.probe_table import ProbeTable
from rtp_runtime.check.probes import ProbeRun
from rtp_runtime.check.report import Finding, Measure, NotJudged, StageResult
from rtp_runtime.check.rows import RowMatcher
from rtp_runtime.check.session import Case, Session
from rtp_runtime.check.splits import FusedOutputs

CHEAP_STEPS = 70
"""Steps that a mode may take on a model of which a step costs little."""
FEW_STEPS = 16
MODE_TOKENS = 5
"""New tokens in modes that run one request after another; the ordinary run goes on longer."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run prompts."""

    name: str
    schedule: Schedule
    steps_per_token: float
    """Engine steps that prefill costs per prompt token; negative where it is known already."""


MODES = (
    Mode("whole prefill", Schedule(), -1.0),
    Mode("chunks of 64", Schedule({"max_chunk_tokens": 64}), 1 / 64),
    Mode("chunks of 17", Schedule({"max_chunk_tokens": 17}), 1 / 17),
    Mode("chunks of 7", Schedule({"max_chunk_tokens": 7}), 1 / 7),
    Mode("one token at a time", Schedule({"max_chunk_tokens": 1}), 1.0),
    Mode("mixed batch", Schedule({"max_num_batched_tokens": 45, "max_chunk_tokens": 32}, together=True), 1 / 16),
    Mode(
        "preempted and recomputed",
        Schedule({"max_num_batched_tokens": 45, "max_chunk_tokens": 32}, together=True, preempt_after=(3, 5, 8, 11)),
        1 / 8,
    ),
)

AGAIN = Mode("again from a cached prefix", Schedule(), 1 / 32)


def run_modes(session: Session, localise: bool = True) -> StageResult:
    """Every mode over as many prompts as the model's size allows; with `localise` the first wrong one is probed."""
    stage = StageResult("modes")
    for mode in MODES:
        cases = affordable(session, mode)
        if _run_mode(session, stage, mode, cases) and localise:
            stage.findings = [*probe_mode(session, mode, cases), *stage.findings]
            localise = False
    _run_again_mode(session, stage)
    summarise_logits(stage)
    names = {measure.column for measure in stage.measures}
    stage.summary = f"{len(names)} execution modes; {stage.summary}"
    return stage


def affordable(session: Session, mode: Mode) -> list[Case]:
    """The cases that a mode runs: all while steps are cheap, else the longest ones that fit, at least the shortest."""
    left = float(CHEAP_STEPS if session.reference.is_small else FEW_STEPS)
    decode = 0 if mode.schedule.together else min(MODE_TOKENS, session.num_new_tokens)
    chosen = []
    cases = [case for case in session.cases if not case.extra]
    for case in sorted(cases, key=lambda case: len(case.prompt), reverse=True):
        steps = len(case.prompt) * mode.steps_per_token + decode
        if steps <= left:
            chosen.append(case)
            left -= steps
    # The shortest first: in company they then decode while the longest is still in its prefill.
    return chosen[::-1] or [min(cases, key=lambda case: len(case.prompt))]


def new_tokens(session: Session, mode: Mode) -> int:
    """Tokens that each request of a mode goes on for."""
    return session.num_new_tokens if mode.schedule.together else min(MODE_TOKENS, session.num_new_tokens)


def _run_mode(session: Session, stage: StageResult, mode: Mode, cases: Sequence[Case]) -> bool:
    """Compare one mode; whether its numbers were wrong."""
    prompts = {case.name: case.prompt.ids for case in cases}
    try:
        ordinary = mode.schedule == Schedule()
        run, num_tokens = session.model.run, new_tokens(session, mode)
        outputs = whole_runs(session) if ordinary else run(prompts, num_tokens, mode.schedule)
    except ModuleError as failure:
        stage.findings.append(raised(session, failure, "modes", f"in mode {mode.name}"))
        return False
    allowed, num_findings = session.noise.logits_tolerance, len(stage.findings)
    for case in cases:
        output = outputs[case.name]
        verdict = compare_tokens(session, case, output.tokens)
        # After another token, ours and the reference's logits are of different texts.
        fed = min(verdict.num_equal, len(output.tokens) - 1)
        error = compare_logits(session, case, output.logits, len(case.prompt) + fed)
        stage.measures.append(Measure(case.name, None, mode.name, error.value, allowed, worst_token=error.token))
        if not error.value <= allowed:
            stage.findings.append(logits_finding(session, "modes", error, f"{case.name}, {mode.name}"))
        note_tokens(session, stage, case, verdict, mode.name)
    return len(stage.findings) > num_findings


def _run_again_mode(session: Session, stage: StageResult) -> None:
    """Each prompt a second time, from what the first run left: it must be found, and the tokens be the same."""
    cases = affordable(session, AGAIN)
    num_tokens = new_tokens(session, AGAIN)
    try:
        outputs = session.model.run_twice({case.name: case.prompt.ids for case in cases}, num_tokens)
    except ModuleError as failure:
        stage.findings.append(raised(session, failure, "modes", f"in mode {AGAIN.name}"))
        return
    if not any(again.keeps for again in outputs.values()):
        stage.not_judged.append(NotJudged(AGAIN.name, "the engine keeps nothing of this model's states"))
        return
    longest = max(cases, key=lambda case: len(case.prompt))
    for case in cases:
        again = outputs[case.name]
        if case is longest and not again.num_cached_tokens:
            missed = f"{case.name}: its second run found nothing of its first"
            stage.findings.append(
                logits_finding(session, "modes", LogitsError(math.inf, None), missed, "cached prefix")
            )
        verdict = compare_tokens(session, case, again.tokens)
        error = compare_logprobs(session, case, again.logprobs[: verdict.num_equal])
        allowed = session.noise.logits_tolerance
        stage.measures.append(Measure(case.name, None, AGAIN.name, error.value, allowed, worst_token=error.token))
        if not error.value <= allowed:
            stage.findings.append(logits_finding(session, "modes", error, f"{case.name}, {AGAIN.name}"))
        note_tokens(session, stage, case, verdict, AGAIN.name)


def probe_mode(session: Session, mode: Mode, cases: Sequence[Case]) -> list[Finding]:
    """Probe a mode that failed: the modules whose outputs differ although the reference's input was put in."""
    captures = {case.name: session.reference.capture(case.sequence)[1] for case in cases}
    model, order = session.model, session.order
    table = ProbeTable(session.reference.layers, order, session.consumers)
    fused = FusedOutputs(model.module, model.loaded.weights.layout, set(order))
    matcher = RowMatcher({case.name: case.sequence for case in cases})
    run = ProbeRun(model.module, table, captures, matcher, fused, model.ratios)
    try:
        with run.attached(model.ops):
            model.run({case.name: case.prompt.ids for case in cases}, new_tokens(session, mode), mode.schedule)
    except ModuleError:
        return []
    found = table.findings(session.noise.module_tolerance, "modes", mode.name)
    if found and not any(finding.cause for finding in found):
        found[0] = replace(
            found[0], cause=True, detail=f"{found[0].detail}; its input is wrong: look at what the engine feeds it"
        )
    return found
