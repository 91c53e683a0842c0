"""The serving stage: what the serving dtype adds to each sub-block, in units of what it adds in the reference.

Three runs with the same rounded weights, whose layers get the same inputs: the reference in float32, the reference in
the serving dtype, and ours in the serving dtype with the ops it would be served with.
"""

from __future__ import annotations

import torch

from rtp_runtime.check.loading import quiet_transformers
from rtp_runtime.check.ours import ModuleError, OurModel, load_ours
from rtp_runtime.check.pinned_stage import serving_dtype
from rtp_runtime.check.probe_stage import raised
from rtp_runtime.check.report import NotJudged, StageResult
from rtp_runtime.check.serving.judge import ServingJudge
from rtp_runtime.check.serving.narrow import narrowed, rounded
from rtp_runtime.check.session import Case, Session
from rtp_runtime.errors import RtpError

TOKENS_OF_SMALL, TOKENS_OF_LARGE = 500, 160
"""Tokens, in all prompts, that a model is run over; products in a narrow dtype are slow on most processors."""


def run_serving(session: Session) -> StageResult:
    """Compare rounding, sub-block by sub-block."""
    stage, name = StageResult("serving"), serving_dtype(session)
    stage.numbers["serving_dtype"] = name
    if name == "float32":
        stage.summary = "served in float32: nothing is rounded"
        return stage
    if session.reference.is_streamed:
        why = "the reference is streamed: there is no memory for two more models in a narrower dtype"
        stage.not_judged.append(NotJudged(f"rounding in {name}", why))
        return stage
    try:
        with quiet_transformers():
            narrow = narrowed(session.reference, getattr(torch, name))
        ours = load_ours(session.options.model, session.plugins, name)
    except (RtpError, RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        stage.not_judged.append(NotJudged(f"rounding in {name}", _first_line(error)))
        return stage
    ours.free()
    judge = ServingJudge(session, narrow, ours)
    with rounded(session.reference, narrow, _kept_exact(ours)):
        for case in chosen_cases(session):
            try:
                judge.add(case)
            except ModuleError as failure:
                stage.findings.append(raised(session, failure, "serving", f"while it ran {case.name} in {name}"))
                return stage
            except (RuntimeError, ValueError, TypeError) as error:
                stage.not_judged.append(NotJudged(f"rounding on {case.name}", _first_line(error)))
        judge.finish(stage)
    return stage


def chosen_cases(session: Session) -> list[Case]:
    """The prompts that are run: the shortest that fit, at least one."""
    left = TOKENS_OF_SMALL if session.reference.is_small else TOKENS_OF_LARGE
    chosen: list[Case] = []
    for case in sorted(session.cases, key=lambda case: (case.extra, len(case.sequence))):
        if len(case.sequence) <= left or not chosen:
            chosen.append(case)
            left -= len(case.sequence)
    return chosen


def _kept_exact(ours: OurModel) -> frozenset[str]:
    """Our parameters that stay in float32: what the reference rounds of these is its own loss."""
    layout = ours.loaded.weights.layout
    return frozenset(parameter.name for parameter in layout.parameters if parameter.dtype == "float32")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
