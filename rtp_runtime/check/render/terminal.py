"""The report on a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rtp_runtime.check.render.words import coverage_rows, headline, mode_rows, next_step, reference_rows
from rtp_runtime.check.report import INCONSISTENT, MATCH, NOT_FINITE, NOT_JUDGED, WRONG, CheckReport, Finding

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = {MATCH: "green", WRONG: "red", NOT_JUDGED: "yellow", INCONSISTENT: "yellow"}
MAX_FINDINGS = 12


def print_report(report: CheckReport, console: Console) -> None:
    """Print the verdict first, then what stands behind it."""
    from rich.markup import escape

    colour = COLOURS[report.verdict]
    console.print(f"[bold {colour}]{report.verdict}[/]  {escape(report.model)}", highlight=False)
    if report.reference != report.model:
        console.print(f"         against the reference's run of {escape(report.reference)}", highlight=False)
    console.print(f"{escape(headline(report))}\n", highlight=False)
    console.print(_stages(report))
    if report.failed:
        console.print(_findings(report))
    if mode_rows(report):
        console.print(_modes(report))
    console.print(_coverage(report))
    for found in report.inconsistent:
        console.print(f"[yellow]REFERENCE-INCONSISTENT[/] {escape(found.describe())}", highlight=False)
    if report.inconsistent and report.judged_by:
        console.print(f"[yellow]judged by[/] {escape(report.judged_by)}", highlight=False)
    for item in report.not_judged:
        console.print(f"[yellow]not judged[/] {escape(item.what)}: {escape(item.why)}", highlight=False)
    for note in (note for stage in report.stages for note in stage.notes):
        console.print(f"[dim]note[/] {escape(note)}", highlight=False)
    console.print(f"\n{escape(next_step(report))}", highlight=False)


def _table(*columns: str, title: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=place == 0)
    return table


def _stages(report: CheckReport) -> Table:
    table = _table("stage", "result", "", "seconds", title="Stages")
    for stage in report.stages:
        words = stage.summary or "; ".join(item.why for item in stage.not_judged)
        table.add_row(stage.name, f"[{COLOURS[stage.status]}]{stage.status}[/]", words, f"{stage.seconds:.1f}")
    return table


def _findings(report: CheckReport) -> Table:
    from rich.markup import escape

    table = _table("module", "error", "allowed", "what", title="What differs, in execution order")
    shown = [finding for finding in report.failed if finding.cause] + [f for f in report.failed if not f.cause]
    for finding in sorted(shown[:MAX_FINDINGS], key=lambda finding: finding.rank):
        mark = "bold red" if finding is report.first_wrong else "" if finding.cause else "dim"
        words = f"{finding.what}; {finding.detail}" if finding.detail else finding.what
        name = escape(finding.module)
        table.add_row(
            f"[{mark}]{name}[/]" if mark else name, _number(finding), f"{finding.tolerance:.0e}", escape(words)
        )
    left = len(report.failed) - MAX_FINDINGS
    if left > 0:
        table.add_row("…", "", "", f"and {left} more, most of them consequences")
    return table


def _modes(report: CheckReport) -> Table:
    table = _table("execution mode", "prompts", "logits error", "allowed", title="Execution modes")
    for name, number, worst, allowed in mode_rows(report):
        shown = f"{worst:.1e}" if math.isfinite(worst) else "∞"
        table.add_row(name, str(number), shown if worst <= allowed else f"[red]{shown}[/]", f"{allowed:.1e}")
    return table


def _coverage(report: CheckReport) -> Table:
    table = _table("exercised", "", title="Coverage")
    table.columns[0].no_wrap = False  # kinds of layers have long names, and what stands beside them must show
    table.columns[1].min_width = 24
    for subject, words in coverage_rows(report):
        table.add_row(subject, words)
    for path, value, amiss in reference_rows(report):
        shown = "fails" if value >= NOT_FINITE else f"{value:.1e}"
        table.add_row(f"reference: {path}", shown + (f" [red]{amiss}[/]" if amiss else ""))
    return table


def _number(finding: Finding) -> str:
    return f"{finding.error:.1e}" if math.isfinite(finding.error) else "–"
