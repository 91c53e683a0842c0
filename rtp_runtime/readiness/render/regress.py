"""A comparison with baselines for people and as a page: what is missing first, then what is worse, then all numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rtp_runtime.readiness.metrics import METRICS
from rtp_runtime.readiness.regress.report import INCOMPLETE, OK, REGRESSION, Change, Item, RegressReport
from rtp_runtime.readiness.render.page import render_page

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {OK: "green", REGRESSION: "red", INCOMPLETE: "yellow"}


def print_regress(report: RegressReport, console: Console) -> None:
    """Verdict, completeness, then each place."""
    from rich.table import Table
    from rich.text import Text

    style = {0: "bold green", 1: "bold red", 2: "bold yellow"}[report.exit]
    console.print(Text(report.verdict, style=style), Text(f"  {report.file} on {report.hardware}", style="dim"), sep="")
    console.print(Text(report.completeness))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for head in ("case", "kind", "place", "status", ""):
        table.add_column(head, overflow="fold")
    for item in report.items:
        why = "; ".join(item.why) or better(item.changes)
        cells = (item.case, item.kind, item.place, item.status, why)
        table.add_row(*(Text(cell, style=COLOURS[item.status] if item.status != OK else "") for cell in cells))
    console.print(table)
    for problem in report.problems:
        console.print(Text(f"missing: {problem}", style="yellow"))
    for file in report.updated:
        console.print(Text(f"new baseline: {file}"))


def share(change: Change) -> str:
    """By how much a number is worse or better."""
    percent = round(100 * change.worse_by)
    return "as before" if percent == 0 else f"{abs(percent)} % {'worse' if percent > 0 else 'better'}"


def better(changes: Sequence[Change]) -> str:
    """Numbers that are better by more than their tolerance: worth a new baseline."""
    found = [change for change in changes if change.worse_by < -change.tolerance]
    return "; ".join(f"{change.metric} {-change.worse_by:.0%} better" for change in found)


def regress_html(report: RegressReport) -> str:
    """The comparison as one self-contained page."""
    return render_page(
        "regress.html.j2",
        title=f"rtp regress · {report.file} · {report.hardware}",
        report=report,
        tone={0: "good", 1: "bad", 2: "open"}[report.exit],
        tones={OK: "good", REGRESSION: "bad", INCOMPLETE: "open"},
        metrics=METRICS,
        by_metric=by_metric,
        share=share,
    )


def by_metric(item: Item) -> list[Change | None]:
    """The changes of a place in the order of the metrics."""
    found = {change.metric: change for change in item.changes}
    return [found.get(name) for name in METRICS]
