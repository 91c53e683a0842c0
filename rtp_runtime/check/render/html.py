"""The report as one HTML file that needs nothing else: style and pictures are inside."""

from __future__ import annotations

from typing import Any

from rtp_runtime.check.render.heatmap import draw_heatmap, draw_legend
from rtp_runtime.check.render.words import coverage_rows, headline, mode_rows, next_step, reference_rows, size
from rtp_runtime.check.report import NOT_FINITE, CheckReport, Finding, Measure

MAX_FINDINGS = 16


def render_html(report: CheckReport) -> str:
    """The whole page. Every text that comes from a checkpoint or a plugin is escaped by the template."""
    import jinja2

    loader = jinja2.PackageLoader("rtp_runtime.check.render", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"error": show_error, "size": size}
    return environment.get_template("report.html.j2").render(_variables(report))


def show_error(value: float) -> str:
    """An error in few characters."""
    return f"{value:.1e}" if value < NOT_FINITE else "–"


def _variables(report: CheckReport) -> dict[str, Any]:
    first = report.first_wrong
    probes = next((stage.measures for stage in report.stages if stage.name == "probes"), [])
    failed = report.failed
    return {
        "report": report,
        "headline": headline(report),
        "next_step": next_step(report),
        "first": first,
        "failed": _shown(failed),
        "num_more": max(0, len(failed) - MAX_FINDINGS),
        "heatmap": draw_heatmap(probes, (first.module, first.layer) if first else None),
        "legend": draw_legend(),
        "outside": [measure for measure in probes if measure.layer is None],
        "worst": _worst(probes),
        "modes": mode_rows(report),
        "reference_paths": reference_rows(report),
        "worst_reference": report.conditions.get("reference_worst_module"),
        "coverage": coverage_rows(report),
        "notes": [note for stage in report.stages for note in stage.notes],
    }


def _shown(failed: list[Finding]) -> list[Finding]:
    """Causes before consequences, then as many as fit, in execution order."""
    chosen = sorted(failed, key=lambda finding: (not finding.cause, finding.rank))[:MAX_FINDINGS]
    return sorted(chosen, key=lambda finding: finding.rank)


def _worst(probes: list[Measure]) -> list[Measure]:
    """The five quantities that come closest to their tolerance, or exceed it most."""
    return sorted(probes, key=lambda measure: -measure.error / measure.tolerance)[:5]
