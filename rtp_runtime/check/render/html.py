"""The report as one HTML file that needs nothing else: style and pictures are inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rtp_runtime.check.render.heatmap import Look, draw_heatmap, draw_legend
from rtp_runtime.check.render.plots import draw_curve
from rtp_runtime.check.render.words import (
    CAUSES,
    cause_numbers,
    causes_first,
    cell_words,
    coverage_rows,
    cut_words,
    headline,
    mode_matrix,
    next_step,
    reference_rows,
    size,
    value_words,
)
from rtp_runtime.check.report import NOT_FINITE, CheckReport, Curve, Measure, StageResult

MAX_FINDINGS, MAX_NOTES, MAX_CURVES = 12, 40, 15
R_EDGES = ("0.13", "0.27", "0.58", "allowed", "2.2×", "4.6×", "10×")
SHOWN_CONDITIONS = frozenset(
    {"dtype", "device", "seed", "fingerprint", "logits_tolerance", "thresholds", "reference_paths"}
    | {"reference_inconsistent", "reference_set_aside", "reference_worst_module", "cut"}
)
"""Conditions that have places of their own; all others are listed as they are."""


def render_html(report: CheckReport) -> str:
    """The whole page. Every text that comes from a checkpoint or a plugin is escaped by the template."""
    import jinja2

    loader = jinja2.PackageLoader("rtp_runtime.check.render", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"error": show_error, "size": size, "cell": cell_words}
    return environment.get_template("report.html.j2").render(_variables(report))


def show_error(value: float) -> str:
    """An error in few characters."""
    if not value < NOT_FINITE:
        return "–"
    return "0" if value == 0.0 else f"{value:.3g}" if 0.01 <= value < 1000 else f"{value:.1e}"


def _variables(report: CheckReport) -> dict[str, Any]:
    first, failed = report.first_wrong, report.failed
    probes, serving = _stage(report, "probes"), _stage(report, "serving")
    place = (first.module, first.layer) if first else None
    prompts, modes = mode_matrix(report)
    rounding = [_without_r(measure) for measure in serving.measures]
    return {
        "report": report,
        "headline": headline(report),
        "cut": cut_words(report),
        "next_step": next_step(report).removeprefix("Next: "),
        "first": first,
        "cause_label": CAUSES[report.cause.status] if report.cause else "",
        "cause_numbers": cause_numbers(report.cause) if report.cause else [],
        "failed": causes_first(failed, MAX_FINDINGS),
        "num_more": max(0, len(failed) - MAX_FINDINGS),
        "heatmap": draw_heatmap(probes.measures, place, _unjudged(probes), Look(roots=_roots(probes))),
        "legend": draw_legend(),
        "rounding": draw_heatmap(rounding, place, _unjudged(serving), Look("R", 1, _roots(serving))),
        "rounding_legend": draw_legend(R_EDGES),
        "serving": serving,
        "plots": [(curve, draw_curve(curve)) for curve in _curves(report)],
        "outside": [measure for measure in probes.measures if measure.layer is None],
        "worst": _worst(probes.measures),
        "prompts": prompts,
        "modes": modes,
        "reference_paths": reference_rows(report),
        "worst_reference": report.conditions.get("reference_worst_module"),
        "coverage": coverage_rows(report),
        "thresholds": report.conditions.get("thresholds", []),
        "notes": [note for stage in report.stages for note in stage.notes][:MAX_NOTES],
        "conditions": [
            (name.replace("_", " "), value_words(value))
            for name, value in report.conditions.items()
            if name not in SHOWN_CONDITIONS
        ],
    }


def _stage(report: CheckReport, name: str) -> StageResult:
    return next((stage for stage in report.stages if stage.name == name), StageResult(name))


def _without_r(measure: Measure) -> Measure:
    """In a map of R alone the columns need not say so."""
    return replace(measure, column=measure.column.removesuffix(" R"))


def _roots(stage: StageResult) -> frozenset[tuple[str, int | None]]:
    return frozenset((finding.module, finding.layer) for finding in stage.findings if finding.cause)


def _unjudged(stage: StageResult) -> dict[str, str]:
    return {item.what: item.why for item in stage.not_judged}


def _curves(report: CheckReport) -> Sequence[Curve]:
    """The accused module's first, then logits, modes that are wrong, and what came closest to its tolerance."""
    curves = [curve for stage in report.stages for curve in stage.curves if curve.positions]
    first = report.first_wrong
    accused = [curve for curve in curves if first is not None and curve.name == first.module]
    logits = [curve for curve in _stage(report, "logits").curves if curve.positions]
    known = {(curve.prompt, curve.errors) for curve in logits}
    modes = [curve for curve in _stage(report, "modes").curves if (curve.prompt, curve.errors) not in known]
    rest = [curve for curve in curves if curve.name != "logits" and curve not in accused]
    return [*accused[:3], *logits, *modes, *rest][:MAX_CURVES]


def _worst(probes: list[Measure]) -> list[Measure]:
    """The five quantities that come closest to their tolerance, or exceed it most."""
    return sorted(probes, key=lambda measure: -measure.error / measure.tolerance)[:5]
