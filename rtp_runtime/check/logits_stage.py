"""The logits and greedy stages: the model as a whole, through the ordinary engine, with nothing put in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rtp_runtime.check.compare import LogitsError, logits_error
from rtp_runtime.check.curves import logits_curve
from rtp_runtime.check.gaps import unreached
from rtp_runtime.check.ours import ModuleError, Output, Schedule
from rtp_runtime.check.probe_stage import raised
from rtp_runtime.check.report import Finding, Measure, NotJudged, StageResult
from rtp_runtime.check.session import Case, Session
from rtp_runtime.check.undecided import settle

FLOAT32 = 2.0**-24
"""Rounding of a float32 number, relative to it."""
MIN_DISTINCT = 4
"""A continuation with fewer distinct tokens judges nothing."""


@dataclass(frozen=True, slots=True)
class TokenVerdict:
    """How our greedy tokens compare with the reference's."""

    num_equal: int
    """Leading tokens that are equal."""
    tie: bool = False
    """The first different one is as good as the reference's, within noise."""
    wrong: bool = False
    gap: float = 0.0
    """Logit of the reference's token over ours, in standard deviations, where they first differ."""


def run_logits(session: Session) -> StageResult:
    """Logits of every position of each prompt, in one prefill."""
    stage = StageResult("logits")
    stage.not_judged += unreached(session)
    allowed = session.noise.logits_tolerance
    try:
        outputs = whole_runs(session)
    except ModuleError as failure:
        stage.findings.append(raised(session, failure, "logits", "while it generated"))
        return stage
    for case in session.cases:
        error = settled_logits(session, case, outputs[case.name].logits, len(case.prompt))
        stage.measures.append(Measure(case.name, None, "logits", error.value, allowed, worst_token=error.token))
        stage.curves.append(logits_curve(session, case.name, "in one prefill", error))
        if not error.value <= allowed:
            stage.findings.append(logits_finding(session, "logits", error, f"{case.name}, in one prefill"))
    return summarise_logits(stage)


def whole_runs(session: Session) -> dict[str, Output]:
    """Each prompt in one prefill and its continuation, one after another; run once for all stages.

    Raises:
        ModuleError: the model, or what feeds it, raised.
    """
    if not session.whole:
        prompts = {case.name: case.prompt.ids for case in session.cases}
        session.whole = session.model.run(prompts, session.num_new_tokens)
    return session.whole


def run_greedy(session: Session) -> StageResult:
    """Greedy continuations, token by token, with ties recognised."""
    stage = StageResult("greedy")
    try:
        outputs = whole_runs(session)
    except ModuleError as failure:
        stage.findings.append(raised(session, failure, "greedy", "while it generated"))
        return stage
    equal, judged = 0, 0
    for case in session.cases:
        distinct = len(set(case.continuation))
        if distinct < MIN_DISTINCT:
            _judge_forced(session, stage, case, distinct)
            continue
        verdict = compare_tokens(session, case, outputs[case.name].tokens)
        judged, equal = judged + len(case.continuation), equal + verdict.num_equal
        note_tokens(session, stage, case, verdict, "greedy")
    stage.numbers = {"tokens": judged, "equal": equal}
    stage.summary = (
        f"{equal} of {judged} greedy tokens equal"
        if judged
        else "no continuation says anything; its logits were compared"
    )
    return stage


def compare_logits(session: Session, case: Case, ours: Tensor, num_tokens: int | None = None) -> LogitsError:
    """Our logits against the reference's over the first tokens, up to where experts changed by a tie."""
    end = min(len(case.logits), session.first_ties.get(case.name, len(case.logits)))
    if num_tokens is not None:
        end = min(end, num_tokens)
    return logits_error(ours[:end], case.logits[:end]) if end else LogitsError(0.0, None)


def settled_logits(
    session: Session, case: Case, ours: Tensor, num_tokens: int, schedule: Schedule | None = None
) -> LogitsError:
    """The same, where they differ only up to where our run chose otherwise among near equals."""
    error = compare_logits(session, case, ours, num_tokens)
    if error.value <= session.noise.logits_tolerance or not settle(session, case, schedule or Schedule()):
        return error
    return compare_logits(session, case, ours, num_tokens)


def compare_logprobs(session: Session, case: Case, ours: Sequence[float]) -> LogitsError:
    """Log probabilities of the continuation's first tokens, as an error of logits.

    Of a log probability, the token's own logit and the sum over all may both be off, so half its error is compared.
    """
    start, spread = len(case.prompt) - 1, float(case.logits.std())
    rows = case.logits[start : start + len(ours)].log_softmax(dim=-1)  # [tokens, vocab]
    wanted = [float(row[token]) for row, token in zip(rows, case.continuation, strict=False)]
    # Logits that spread little have log probabilities of many units in the last place of theirs.
    rounding = [8 * FLOAT32 * abs(one) for one in wanted]
    apart = [abs(one - other) for one, other in zip(ours, wanted, strict=True)]
    errors = [max(0.0, gap - unit) / spread / 2 for gap, unit in zip(apart, rounding, strict=True)]
    limit = session.first_ties.get(case.name, len(case.logits)) - start
    errors = errors[: max(0, limit)]
    worst = max(range(len(errors)), key=lambda place: errors[place], default=None)
    return LogitsError(0.0, None) if worst is None else LogitsError(errors[worst], start + worst)


def compare_tokens(session: Session, case: Case, ours: tuple[int, ...]) -> TokenVerdict:
    """Token by token up to the first difference, which is a tie if the reference's two logits are within noise."""
    spread = float(case.logits.std())
    for place, (token, wanted) in enumerate(zip(ours, case.continuation, strict=False)):
        if token != wanted:
            row = case.logits[len(case.prompt) - 1 + place]
            gap = float(row[wanted] - row[token]) / spread if token < len(row) else math.inf
            tie = gap <= 2 * session.noise.logits_tolerance or len(case.prompt) - 1 + place >= session.first_ties.get(
                case.name, 1 << 60
            )
            return TokenVerdict(place, tie=tie, wrong=not tie, gap=gap)
    return TokenVerdict(min(len(ours), len(case.continuation)))


def note_tokens(session: Session, stage: StageResult, case: Case, verdict: TokenVerdict, where: str) -> None:
    """Put a verdict on tokens into the stage."""
    if verdict.tie:
        stage.num_ties += 1
        stage.notes.append(
            f"TIE-FLIP: {case.name}, new token {verdict.num_equal}: the two best are {verdict.gap:.1e} apart ({where})"
        )
    if verdict.wrong:
        error = LogitsError(verdict.gap, len(case.prompt) - 1 + verdict.num_equal)
        what = f"new token {verdict.num_equal} of {case.name} ({where})"
        stage.findings.append(logits_finding(session, stage.name, error, what, "greedy token"))


def logits_finding(session: Session, stage: str, error: LogitsError, where: str, what: str = "logits") -> Finding:
    """A finding on the model as a whole, accusing its last module: nothing before it was found wrong on its own."""
    last = session.order[-1] if session.order else "model"
    token = f", largest at token {error.token}" if error.token is not None else ""
    return Finding(
        stage=stage,
        module=last,
        layer=None,
        error=error.value,
        tolerance=session.noise.logits_tolerance,
        what=what,
        detail=f"{where}{token}",
        cause=False,
        rank=len(session.order) + 1.0,
    )


def summarise_logits(stage: StageResult) -> StageResult:
    worst = max(stage.measures, key=lambda measure: measure.error, default=None)
    if worst is None:
        if not stage.findings:
            stage.not_judged.append(NotJudged(stage.name, "no prompt was run", required=True))
        return stage
    stage.numbers = {"worst_error": worst.error, "tolerance": worst.tolerance}
    stage.summary = f"largest difference {worst.error:.1e} standard deviations (allowed {worst.tolerance:.1e})"
    return stage


def _judge_forced(session: Session, stage: StageResult, case: Case, distinct: int) -> None:
    """A degenerate continuation: compare the logits along the reference's tokens instead."""
    output: Mapping[str, Output] = session.model.run({case.name: case.sequence}, 1)
    start = len(case.prompt) - 1
    error = logits_error(output[case.name].logits[start:], case.logits[start:])
    stage.measures.append(
        Measure(case.name, None, "logits along the reference's tokens", error.value, session.noise.logits_tolerance)
    )
    stage.notes.append(
        f"{case.name}: {distinct} distinct tokens judge nothing; logits along the reference's tokens were compared"
    )
    if not error.value <= session.noise.logits_tolerance:
        stage.findings.append(logits_finding(session, "greedy", error, f"{case.name}, along the reference's tokens"))
