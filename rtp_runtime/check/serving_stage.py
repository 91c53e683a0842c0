"""The serving stage: what the serving dtype adds to each sub-block, in units of what it adds in the reference.

Three runs with the same rounded weights, whose layers get the same inputs: the reference in float32, the reference in
the serving dtype, and ours in the serving dtype with the ops it would be served with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rtp_runtime.check.loading import quiet_transformers
from rtp_runtime.check.names import layer_of
from rtp_runtime.check.ours import ModuleError, OurModel, load_ours
from rtp_runtime.check.pinned_stage import serving_dtype
from rtp_runtime.check.probe_stage import raised
from rtp_runtime.check.prompts import PromptLimits, draw_prompt
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.report import NotJudged, StageResult
from rtp_runtime.check.serving.judge import ServingJudge
from rtp_runtime.check.serving.narrow import narrowed, rounded
from rtp_runtime.check.session import Session, common_sizes
from rtp_runtime.errors import RtpError

TOKENS_OF_SMALL, TOKENS_OF_LARGE, ENOUGH_TOKENS = 500, 160, 256
"""Tokens, in all prompts, that a model is run over; products in a narrow dtype are slow on most processors."""
DRAWN = 500
"""Added to the seed of the prompt that is drawn where the others are short."""


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
    except (RtpError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        stage.not_judged.append(NotJudged(f"rounding in {name}", _first_line(error)))
        return stage
    ours.free()
    judge = ServingJudge(session, narrow, ours)
    with rounded(session.reference, narrow, _kept_exact(session.reference, ours)):
        for prompt, ids in chosen_prompts(session).items():
            if not _added(session, stage, judge, prompt, ids):
                return stage
        judge.finish(stage)
    return stage


def _added(session: Session, stage: StageResult, judge: ServingJudge, prompt: str, ids: tuple[int, ...]) -> bool:
    """Run one prompt; whether our model could run it at all."""
    try:
        judge.add(prompt, ids)
    except ModuleError as failure:
        try:
            judge.ours.run({prompt: ids}, 1, keep_logits=False)
        except ModuleError as plain:
            where = f"while it ran {prompt} in {stage.numbers['serving_dtype']}"
            stage.findings.append(raised(session, plain, "serving", where))
            return False
        # It runs, though not with the reference's inputs put in.
        stage.not_judged.append(NotJudged(f"rounding on {prompt}", _first_line(failure)))
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        stage.not_judged.append(NotJudged(f"rounding on {prompt}", _first_line(error)))
    return True


def chosen_prompts(session: Session) -> dict[str, tuple[int, ...]]:
    """The tokens that are run, by prompt: the shortest that fit, at least one, and enough of a small model."""
    small = session.reference.is_small
    left = TOKENS_OF_SMALL if small else TOKENS_OF_LARGE
    chosen: dict[str, tuple[int, ...]] = {}
    for case in sorted(session.cases, key=lambda case: (case.extra, len(case.sequence))):
        if len(case.sequence) <= left or not chosen:
            chosen[case.name] = case.sequence
            left -= len(case.sequence)
    if small and left > TOKENS_OF_SMALL - ENOUGH_TOKENS:
        vocab_size, positions = common_sizes(session)
        limits = PromptLimits(vocab_size, min(positions, ENOUGH_TOKENS))
        drawn = draw_prompt(limits, limits.max_tokens, session.options.seed + DRAWN)
        chosen[drawn.name] = drawn.ids
    return chosen


def _kept_exact(reference: Reference, ours: OurModel) -> frozenset[str]:
    """Tensors of the reference that ours keeps in float32: what it rounds of these is its own loss.

    One that stands elsewhere in its layer on our side is told by its last name and shape.
    """
    layout, layers = ours.loaded.weights.layout, reference.layers
    tensors = {reference.naming.ours_of(name) or name: name for name in reference.model.state_dict()}
    pinned = [parameter for parameter in layout.parameters if parameter.dtype == "float32"]
    moved = {_place(p.name, tuple(p.shape), layers) for p in pinned if p.name not in tensors}
    kept = {p.name for p in pinned}
    shapes = {name: tuple(tensor.shape) for name, tensor in reference.model.state_dict().items()}
    return frozenset(
        name for as_ours, name in tensors.items() if as_ours in kept or _place(as_ours, shapes[name], layers) in moved
    )


def _place(name: str, shape: tuple[int, ...], layers: Mapping[str, int]) -> tuple[int | None, str, tuple[int, ...]]:
    return layer_of(name, layers), name.rpartition(".")[2], shape


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
