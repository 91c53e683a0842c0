"""One check from beginning to end: load the two sides, run the stages in order, gather the report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from rtp_runtime.check.audit_stage import run_audit
from rtp_runtime.check.causes import explain
from rtp_runtime.check.coverage import describe_conditions, describe_coverage, describe_versions
from rtp_runtime.check.cut import Prepared, prepared
from rtp_runtime.check.loading import load_reference, outline_reference, quiet_transformers
from rtp_runtime.check.logits_stage import run_greedy, run_logits
from rtp_runtime.check.modes import run_modes
from rtp_runtime.check.names import find_layers, match_names
from rtp_runtime.check.options import REQUIRED, STAGES, CheckOptions
from rtp_runtime.check.ours import load_ours
from rtp_runtime.check.pinned_stage import PinnedStage
from rtp_runtime.check.probe_stage import ProbeStage
from rtp_runtime.check.reference import Defect, Reference
from rtp_runtime.check.report import CheckReport, NotJudged, StageResult
from rtp_runtime.check.serving_stage import run_serving
from rtp_runtime.check.session import Progress, Session, make_cases, measure_noise
from rtp_runtime.check.text_stage import run_text
from rtp_runtime.check.threads import threads_for
from rtp_runtime.errors import CheckpointError, RtpError


def run_check(
    options: CheckOptions, progress: Progress | None = None, reference: Reference | None = None
) -> CheckReport:
    """Check our run of a model against the reference's.

    `reference`: one that is loaded already, of `options.reference_path`, for callers that check many times.

    Raises:
        RtpError: a check that cannot be made at all.
    """
    from rtp_runtime.model import load_config
    from rtp_runtime.model.assessment import find_served
    from rtp_runtime.plugins import load_plugins

    started = time.monotonic()
    say = progress or _silent
    plugins = load_plugins(options.plugins)
    # Before the reference is loaded, which takes seconds: does any plugin serve this model at all?
    plugins.resolve(load_config(options.model).architecture)
    with quiet_transformers(), prepared(options, say, lambda config: find_served(config, plugins)) as ready:
        say("loading the reference")
        if reference is None or ready.options is not options:
            reference = _load_reference(ready)
        session = Session(ready.options, plugins, reference, say=say)
        reference.use_names(match_names(find_layers(reference.model), _our_layers(session)))
        with threads_for(small=reference.is_small):
            report = _judge(session, say, started)
    return ready.told(replace(report, seconds=time.monotonic() - started), list(reference.layers))


def _judge(session: Session, say: Progress, started: float) -> CheckReport:
    stages = _run_stages(session, say)
    report = _gather(session, stages, started)
    first = report.first_wrong
    if first is None or not session.options.explain:
        return report
    say("looking for the cause")
    return replace(report, cause=explain(session, first))


def _gather(session: Session, stages: list[StageResult], started: float) -> CheckReport:
    options = session.options
    return CheckReport(
        model=str(options.model),
        reference=str(options.reference_path),
        stages=tuple(sorted(stages, key=lambda stage: STAGES.index(stage.name))),
        coverage=describe_coverage(session),
        conditions=describe_conditions(session),
        versions=describe_versions(session),
        seconds=time.monotonic() - started,
        inconsistent=session.noise.findings,
        judged_by=session.noise.judge,
    )


def _load_reference(ready: Prepared) -> Reference:
    """The reference, or its outline where a tensor that our checkpoint has is missing or of another shape there."""
    options = ready.options
    try:
        return load_reference(options.reference_path, pool=ready.pool)
    except CheckpointError:
        defects = _missing_tensors(options)
        if not defects:
            raise
        return outline_reference(options.reference_path, defects)


def _our_layers(session: Session) -> list[str]:
    """Names of our decoder layers; none where our model cannot be built, which a stage will say."""
    from rtp_runtime.model import load_config
    from rtp_runtime.model.assessment import find_served
    from rtp_runtime.model.building import build_module

    try:
        served = find_served(load_config(session.options.model), session.plugins)
        module = build_module(served.definition, served.implementation, served.config, torch.float32)
    except RtpError:
        return []
    return list(find_layers(module))


def _missing_tensors(options: CheckOptions) -> list[Defect]:
    from rtp_runtime.weights.headers import read_headers

    if options.reference is None:
        return []
    ours, theirs = read_headers(options.model).tensors, read_headers(options.reference).tensors
    return [
        Defect(name, "missing from the reference's checkpoint" if name not in theirs else "of another shape there")
        for name, header in ours.items()
        if name not in theirs or theirs[name].shape != header.shape
    ]


def _silent(message: str) -> None:
    """Say nothing."""


def _run_stages(session: Session, say: Progress) -> list[StageResult]:
    chosen = session.options.stages
    stages = {name: StageResult(name) for name in STAGES}
    for name in STAGES:
        if name not in chosen:
            _leave_out(stages[name], "the stage was left out")
    _note_order(session)
    if "audit" in chosen:
        say("audit")
        with _timed(stages, "audit") as keep:
            keep(run_audit(session))
    if "text" in chosen:
        say("text")
        with _timed(stages, "text") as keep:
            keep(run_text(session))
    if stages["audit"].findings:
        for name in chosen:
            if name not in ("audit", "text"):
                _leave_out(stages[name], "the two sides are not made of the same tensors; see the audit")
    else:
        _compare_numbers(session, stages, say)
    return list(stages.values())


def _leave_out(stage: StageResult, why: str) -> None:
    stage.left_out = True
    stage.not_judged.append(NotJudged(stage.name, why, required=stage.name in REQUIRED))


def _note_order(session: Session) -> None:
    """In which order the reference's modules run: from a short forward, or, of an outline, as they are declared."""
    reference = session.reference
    if reference.is_outline:
        session.order = list(reference.modules)
        return
    _, capture = reference.capture(reference.few_tokens)
    session.order, session.consumers = capture.order, capture.consumers


def _compare_numbers(session: Session, stages: dict[str, StageResult], say: Progress) -> None:
    chosen = session.options.stages
    with _timed(stages, "pinned") as keep:
        result = _load(session, say, judge="pinned" in chosen)
        if result is not None:
            keep(result)
    if not {"probes", "logits", "greedy", "modes", "serving"} & set(chosen):
        return
    with _timed(stages, "probes") as keep:
        result = _probe(session, say, judge="probes" in chosen)
        if result is not None:
            keep(result)
    located = session.modules_differ = bool(stages["probes"].findings)
    later = (
        ("logits", run_logits),
        ("greedy", run_greedy),
        ("modes", functools.partial(run_modes, localise=not located)),
        ("serving", run_serving),
    )
    for name, run in later:
        if name in chosen:
            say(name)
            with _timed(stages, name) as keep:
                keep(run(session))


def _load(session: Session, say: Progress, judge: bool) -> StageResult | None:
    """Load our model; its tables are compared in the serving dtype before, and in float32 after."""
    say("pinned tensors and tables" if judge else "loading our model")
    pinned = PinnedStage(session)
    if judge:
        pinned.serving()
    session.ours = load_ours(session.options.model, session.plugins, "float32")
    if not judge:
        session.ours.free()
        return None
    pinned.loaded(session.ours)
    session.ours.free()
    return pinned.finish()


def _probe(session: Session, say: Progress, judge: bool) -> StageResult | None:
    """Make the cases, each probed while the reference's capture of it is there; then measure the reference's noise."""
    stage = ProbeStage(session)
    for case, capture in make_cases(session, _encoder(session)):
        say(f"probes: {case.name}, ours")
        if judge:
            stage.add(case, capture)
        measure_noise(session, case, capture)
        del capture
    return stage.finish() if judge else None


def _encoder(session: Session) -> Callable[[str], list[int]] | None:
    from rtp_runtime.text import load_tokenizer

    tokenizer = load_tokenizer(session.options.model)
    return tokenizer.encode if tokenizer is not None else None


@contextmanager
def _timed(stages: dict[str, StageResult], name: str) -> Iterator[Callable[[StageResult], None]]:
    started = time.monotonic()

    def keep(result: StageResult) -> None:
        stages[name] = result

    yield keep
    stages[name].seconds = time.monotonic() - started
