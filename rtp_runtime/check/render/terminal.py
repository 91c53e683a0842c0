"""The report on a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rtp_runtime.check.render.words import (
    cause_numbers,
    cause_sentence,
    causes_first,
    cell_words,
    coverage_rows,
    cut_words,
    mode_matrix,
    next_step,
    reference_rows,
    verdict_sentence,
)
from rtp_runtime.check.report import (
    DRIFT,
    INCONSISTENT,
    MATCH,
    NOT_FINITE,
    NOT_JUDGED,
    TIE_FLIP,
    WRONG,
    CheckReport,
    Finding,
    ModeCell,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = {MATCH: "green", TIE_FLIP: "green", DRIFT: "red", WRONG: "red", NOT_JUDGED: "yellow", INCONSISTENT: "yellow"}
CELLS = {"pass": "green", "tie": "yellow", "wrong": "red", "not run": "dim"}
MAX_FINDINGS, MAX_NOTES = 8, 12


def print_report(report: CheckReport, console: Console) -> None:
    """Print the verdict first, then its cause and what to do, then what stands behind it."""
    _print_verdict(report, console)
    if report.failed:
        console.print(_findings(report))
    console.print(_stages(report))
    if mode_matrix(report)[1]:
        console.print(_modes(report))
    console.print(_coverage(report))
    _print_rest(report, console)


def _print_verdict(report: CheckReport, console: Console) -> None:
    from rich.markup import escape

    colour = COLOURS[report.verdict]
    sentence = verdict_sentence(report).removeprefix(report.verdict)
    console.print(f"[bold {colour}]{report.verdict}[/]{escape(sentence)}", highlight=False)
    if report.cause is not None:
        console.print(escape(_capital(cause_sentence(report.cause))), highlight=False)
        words = (f"{name} {value}" for name, value in cause_numbers(report.cause))
        numbers = "; ".join(words)
        if numbers:
            console.print(f"[dim]{escape(numbers)}[/]", highlight=False)
    console.print(escape(next_step(report)), highlight=False)
    against = f" against the reference's run of {report.reference}" if report.reference != report.model else ""
    console.print(f"[dim]{escape(report.model + against)}[/]", highlight=False)
    cut = cut_words(report)
    console.print(f"Not the whole model was checked: {escape(cut)}.\n" if cut else "", highlight=False)


def _print_rest(report: CheckReport, console: Console) -> None:
    """The reference's inconsistencies, what was not judged, and notes."""
    from rich.markup import escape

    for found in report.inconsistent:
        console.print(f"[yellow]REFERENCE-INCONSISTENT[/] {escape(found.describe())}", highlight=False)
    if report.inconsistent and report.judged_by:
        console.print(f"[yellow]judged by[/] {escape(report.judged_by)}", highlight=False)
    for item in report.not_judged:
        mark = "[yellow]not judged (required)[/]" if item.required else "[dim]not judged[/]"
        console.print(f"{mark} {escape(item.what)}: {escape(item.why)}", highlight=False)
    notes = [note for stage in report.stages for note in stage.notes]
    for note in notes[:MAX_NOTES]:
        console.print(f"[dim]note[/] {escape(note)}", highlight=False)
    if len(notes) > MAX_NOTES:
        console.print(f"[dim]and {len(notes) - MAX_NOTES} more notes: --html or --json show them[/]", highlight=False)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _table(*columns: str, title: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=place == 0)
    return table


def _stages(report: CheckReport) -> Table:
    from rich.markup import escape

    table = _table("stage", "result", "", "seconds", title="Stages")
    for stage in report.stages:
        words = stage.summary or "; ".join(item.why for item in stage.not_judged)
        table.add_row(stage.name, f"[{COLOURS[stage.status]}]{stage.status}[/]", escape(words), f"{stage.seconds:.1f}")
    return table


def _findings(report: CheckReport) -> Table:
    from rich.markup import escape

    table = _table("module", "error", "allowed", "what", title="What differs, in execution order")
    for finding in causes_first(report.failed, MAX_FINDINGS):
        mark = "bold red" if finding is report.first_wrong else "" if finding.cause else "dim"
        words = f"{finding.what}; {finding.detail}" if finding.detail else finding.what
        name = escape(finding.module)
        allowed = f"{finding.tolerance:.2f}" if finding.stage == "serving" else f"{finding.tolerance:.0e}"
        table.add_row(f"[{mark}]{name}[/]" if mark else name, _number(finding), allowed, escape(words))
    left = len(report.failed) - MAX_FINDINGS
    if left > 0:
        table.add_row("…", "", "", f"and {left} more, most of them consequences")
    return table


def _modes(report: CheckReport) -> Table:
    from rich.markup import escape

    prompts, rows = mode_matrix(report)
    table = _table("execution mode", *prompts, title="Execution modes: largest difference of logits")
    for name, cells, why in rows:
        if why:
            table.add_row(f"[dim]{escape(name)}[/]", *(["[dim]–[/]"] * len(prompts)))
        else:
            table.add_row(escape(name), *(_cell(cells.get(prompt)) for prompt in prompts))
    return table


def _cell(cell: ModeCell | None) -> str:
    return f"[{CELLS[cell.result if cell else 'not run']}]{cell_words(cell)}[/]"


def _coverage(report: CheckReport) -> Table:
    from rich.markup import escape

    table = _table("exercised", "", title="Coverage")
    table.columns[0].no_wrap = False  # kinds of layers have long names, and what stands beside them must show
    table.columns[1].min_width = 24
    for subject, words in coverage_rows(report):
        table.add_row(escape(subject), escape(words))
    for path, value, amiss in reference_rows(report):
        shown = "fails" if value >= NOT_FINITE else f"{value:.1e}"
        table.add_row(f"reference: {path}", shown + (f" [red]{amiss}[/]" if amiss else ""))
    return table


def _number(finding: Finding) -> str:
    if not math.isfinite(finding.error) or finding.error >= NOT_FINITE:
        return "–"
    return f"{finding.error:.2f}" if finding.stage == "serving" else f"{finding.error:.1e}"
