"""Modes that begin from what an earlier request left: a cached prefix, a copy of the state of a slot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rtp_runtime.check.compare import LogitsError
from rtp_runtime.check.logits_stage import TokenVerdict, compare_logprobs, compare_tokens, logits_finding
from rtp_runtime.check.mode_run import (
    Mode,
    add_failure,
    add_not_run,
    add_result,
    affordable,
    leave_mode_out,
    new_tokens,
)
from rtp_runtime.check.ours import Again, ModuleError, Schedule
from rtp_runtime.check.report import ModeCell, StageResult
from rtp_runtime.check.session import Case, Session

AGAIN = Mode("again from a cached prefix", Schedule(), 1 / 32)
RESTORED = Mode("restored from a snapshot", Schedule(), 1 / 32, longest=100)

TURN_TOKENS = 4


def run_again(session: Session, stage: StageResult) -> None:
    """Each prompt a second time, from what the first run left: it must be found, and the tokens be the same."""
    cases, num_tokens = affordable(session, AGAIN), new_tokens(session, AGAIN)
    outputs = _second_runs(session, stage, AGAIN, cases, num_tokens)
    if outputs is None:
        return
    longest = max(cases, key=lambda case: len(case.prompt))
    for case in cases:
        again = outputs[case.name]
        if case is longest and not again.num_cached_tokens:
            missed = f"{case.name}: its second run found nothing of its first"
            error = LogitsError(math.inf, None)
            stage.findings.append(logits_finding(session, "modes", error, missed, "cached prefix"))
            stage.cells.append(ModeCell(AGAIN.name, case.name, "wrong", why="nothing of the first run was found"))
        elif not again.num_cached_tokens:
            stage.cells.append(ModeCell(AGAIN.name, case.name, "not run", why="too short for a prefix to be kept"))
        else:
            verdict = compare_tokens(session, case, again.tokens)
            error = compare_logprobs(session, case, again.logprobs[: verdict.num_equal])
            add_result(session, stage, AGAIN.name, case, error, verdict)
    add_not_run(session, stage, AGAIN.name, cases)


def run_restored(session: Session, stage: StageResult) -> None:
    """A conversation's next turn, from the copy of the state that the turn before left where it ended.

    It counts only for prompts whose second run began from such a copy.
    """
    if not session.model.has_slots:
        leave_mode_out(stage, RESTORED.name, "no state of this model is kept in snapshots: it has none per request")
        return
    cases, fed = affordable(session, RESTORED), _num_fed(session)
    # The prompt and some of its continuation; then all of that again, and one token more.
    then = {case.name: case.prompt.ids + case.continuation[:fed] for case in cases}
    outputs = _second_runs(session, stage, RESTORED, cases, fed + 1, then)
    if outputs is None:
        return
    if not any(again.num_cached_tokens for again in outputs.values()):
        leave_mode_out(stage, RESTORED.name, "no second run began from a snapshot of its first", required=True)
        return
    for case in cases:
        _judge_turn(session, stage, case, outputs[case.name])
    add_not_run(session, stage, RESTORED.name, cases)


def _second_runs(
    session: Session,
    stage: StageResult,
    mode: Mode,
    cases: Sequence[Case],
    num_tokens: int,
    then: Mapping[str, Sequence[int]] | None = None,
) -> Mapping[str, Again] | None:
    """What the prompts, or `then`, give after the prompts were run; None where the stage says why not."""
    try:
        outputs = session.model.run_twice({case.name: case.prompt.ids for case in cases}, num_tokens, then)
    except ModuleError as failure:
        add_failure(session, stage, mode.name, cases, failure)
        return None
    if not any(again.keeps for again in outputs.values()):
        leave_mode_out(stage, mode.name, "the engine keeps nothing of this model's states")
        return None
    return outputs


def _num_fed(session: Session) -> int:
    """Tokens of the continuation that the second turn begins with."""
    return min(TURN_TOKENS, session.num_new_tokens - 1)


def _judge_turn(session: Session, stage: StageResult, case: Case, again: Again) -> None:
    done, tie = _num_fed(session), session.first_ties.get(case.name, 1 << 60)
    if not again.num_cached_tokens or tie < len(case.prompt) + done:
        missed = "its second run did not begin from a snapshot"
        why = f"token {tie} chose otherwise among equals" if again.num_cached_tokens else missed
        stage.cells.append(ModeCell(RESTORED.name, case.name, "not run", why=why))
        return
    last = Case(case.prompt, case.continuation[done:], case.logits[done:])
    verdict = compare_tokens(session, last, again.tokens[:1])
    error = compare_logprobs(session, last, again.logprobs[: verdict.num_equal])
    verdict = TokenVerdict(done + verdict.num_equal, verdict.tie, verdict.wrong, verdict.gap)
    add_result(session, stage, RESTORED.name, case, error, verdict)
