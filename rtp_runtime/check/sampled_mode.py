"""Sampled with a seed: a token is a function of (logits, seed, output position), whatever the company and the chunks.

What is drawn is compared with a draw from the reference's logits, by the documented rule: the first id at which the
cumulative probability passes the uniform number of (seed, output position).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_runtime.check.compare import LogitsError
from rtp_runtime.check.logits_stage import logits_finding
from rtp_runtime.check.mode_run import COMPANY, add_failure, add_not_run, ordinary_cases
from rtp_runtime.check.ours import ModuleError, Output, Schedule
from rtp_runtime.check.report import Measure, ModeCell, StageResult
from rtp_runtime.check.session import Case, Session

SEED, TEMPERATURE = 20240229, 0.8
MAX_PROMPT = 64
"""Longer prompts are not sampled from: what sampling adds is the same for all."""
SAMPLED_TOKENS = 7
ROUNDING = 1e-6
"""Of cumulative probabilities that are summed in another precision."""
_LIMITS = {**COMPANY, "max_chunk_tokens": 7}
ALONE = "sampled with a seed"
SCHEDULES = {
    ALONE: Schedule(temperature=TEMPERATURE, seed=SEED),
    "sampled in a batch, in another order, in chunks": Schedule(
        _LIMITS, together=True, reverse=True, temperature=TEMPERATURE, seed=SEED
    ),
    "sampled and preempted": Schedule(
        _LIMITS, together=True, preempt_after=(3, 5, 8), temperature=TEMPERATURE, seed=SEED
    ),
}


@dataclass(frozen=True, slots=True)
class Draws:
    """What the reference says of one prompt and the tokens that were sampled after it."""

    case: Case
    cumulative: Tensor
    """[tokens, vocab] float64, of the reference's probabilities at each place."""
    allowed: float
    """How far a draw may be off: what the logits' tolerance moves a cumulative probability by."""
    first_tie: int
    """The place from which the reference's logits say nothing, since experts changed by a tie."""

    def distance(self, token: int, place: int) -> float:
        """How far the uniform number is from the stretch of probabilities that belongs to the token; 0: in it."""
        from rtp_kernel.ops.sampling import uniform

        row = self.cumulative[place]
        if place >= self.first_tie:
            return 0.0
        if token >= len(row):
            return math.inf
        aim = float(uniform(torch.tensor([SEED]), torch.tensor([place]))[0]) * float(row[-1])
        low, high = float(row[token - 1]) if token else 0.0, float(row[token])
        return max(0.0, low - aim, aim - high)


def run_sampled(session: Session, stage: StageResult) -> None:
    """The same prompts with the same seed alone, in company and after preemption."""
    cases = _cases(session)
    outputs = {name: _sample(session, stage, name, cases) for name in SCHEDULES}
    alone = outputs[ALONE]
    for case in cases:
        if alone is None:
            break
        tokens = alone[case.name].tokens
        draws = _draws(session, case, tokens)
        for name, output in outputs.items():
            if output is not None:
                _judge(session, stage, name, draws, (tokens, output[case.name].tokens))
    for name in SCHEDULES:
        add_not_run(session, stage, name, cases, "sampling was judged on shorter prompts")


def _cases(session: Session) -> list[Case]:
    cases = sorted(ordinary_cases(session), key=lambda case: len(case.prompt))
    short = [case for case in cases if len(case.prompt) <= MAX_PROMPT]
    return (short or cases[:1]) if session.reference.is_small else cases[:1]


def _sample(session: Session, stage: StageResult, name: str, cases: Sequence[Case]) -> Mapping[str, Output] | None:
    prompts = {case.name: case.prompt.ids for case in cases}
    try:
        return session.model.run(
            prompts, min(SAMPLED_TOKENS, session.num_new_tokens), SCHEDULES[name], keep_logits=False
        )
    except ModuleError as failure:
        add_failure(session, stage, name, cases, failure)
        return None


def _draws(session: Session, case: Case, tokens: Sequence[int]) -> Draws:
    """One forward of the reference over the prompt and the tokens that ours drew."""
    start = len(case.prompt) - 1
    known = [min(token, session.reference.vocab_size - 1) for token in tokens]
    rows = session.reference.logits((*case.prompt.ids, *known[:-1]))[start:]
    cumulative = torch.softmax(rows.double() / TEMPERATURE, dim=-1).cumsum(dim=-1)
    allowed = 2 * session.noise.logits_tolerance * float(case.logits.std()) / TEMPERATURE + ROUNDING
    return Draws(case, cumulative, allowed, session.first_ties.get(case.name, 1 << 60) - start)


def _judge(
    session: Session, stage: StageResult, name: str, draws: Draws, tokens: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Each token, up to the first that is another than alone, must be the reference's draw, or nearly."""
    alone, ours = tokens
    apart = next((place for place, token in enumerate(ours) if token != alone[place]), len(ours) - 1)
    distances = [draws.distance(token, place) for place, token in enumerate(ours[: apart + 1])]
    worst = max(range(len(distances)), key=lambda place: (distances[place], -place))
    error, case = distances[worst], draws.case
    changed = alone != ours
    result = "wrong" if error > draws.allowed else "tie" if error > 0.0 or changed else "pass"
    why = f"new token {worst if error > 0.0 else apart} is another" if result != "pass" else ""
    stage.cells.append(ModeCell(name, case.name, result, error, draws.allowed, why))  # type: ignore[arg-type]
    stage.measures.append(Measure(case.name, None, name, error, draws.allowed, worst_token=worst))
    if result == "tie":
        stage.num_ties += 1
        stage.notes.append(f"TIE-FLIP: {case.name}, {why}: the draw is within noise of a boundary ({name})")
    if result == "wrong":
        place = LogitsError(error, len(case.prompt) + worst)
        where = f"{name}, {case.name}: new token {worst} is not what the reference's logits give for this seed"
        stage.findings.append(logits_finding(session, "modes", place, where, "sampled token"))
