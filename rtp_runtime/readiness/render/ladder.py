"""The ladder for people, as a page, and for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rtp_runtime.readiness.ladder import BLOCKED, FAILED, INCOMPLETE, NO_EVIDENCE, REACHED, STALE, Ladder, Rung
from rtp_runtime.readiness.record import Conditions
from rtp_runtime.readiness.render.page import render_page

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {REACHED: "green", FAILED: "red", STALE: "yellow", INCOMPLETE: "yellow", BLOCKED: "cyan", NO_EVIDENCE: "dim"}
MARKS = {REACHED: "●", FAILED: "✕", STALE: "◌", INCOMPLETE: "◐", BLOCKED: "◍", NO_EVIDENCE: "○"}


def ladder_json(model: str, ladder: Ladder, required: str | None) -> dict[str, Any]:
    """The one object of `--json`."""
    return {
        "model": str(model),
        "reached": ladder.reached,
        "required": required,
        "satisfied": None if required is None else ladder.has(required),
        "next": ladder.next,
        "states": [rung.to_json() for rung in ladder.rungs],
        "problems": [problem.to_json() for problem in ladder.problems],
    }


def headline(ladder: Ladder, required: str | None) -> str:
    """Where the model stands, in one line."""
    words = ladder.reached or "not available"
    if required is None:
        return words
    return f"{words}; {required} is required and {'' if ladder.has(required) else 'not '}reached"


def print_ladder(model: str, ladder: Ladder, required: str | None, console: Console) -> None:
    """The ladder on a terminal, from the lowest state up."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"{headline(ladder, required)}", style="bold"), Text(f"  {model}", style="dim"), sep="")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for rung in ladder.rungs:
        style = COLOURS[rung.status]
        first, *others = [*rung.why, *evidence_lines(rung)] or [""]
        table.add_row(
            Text(f"{MARKS[rung.status]} {rung.state}", style=style), Text(rung.status, style=style), Text(first)
        )
        for line in others:
            table.add_row("", "", Text(line, style="dim"))
    console.print(table)
    if ladder.next:
        console.print(Text("next: ", style="bold"), Text(ladder.next), sep="", soft_wrap=True)
    for problem in ladder.problems:
        console.print(Text(f"not used: {problem.file}: {problem.why}", style="yellow"))


def evidence_lines(rung: Rung) -> list[str]:
    """What a state rests on: each record's date, conditions and staleness."""
    lines: list[str] = []
    for shown in rung.evidence:
        record = shown.record
        lines.append(f"{record.kind} of {record.date}: {conditions_line(record.conditions)}  [{shown.stored.file}]")
        if shown.staleness.reasons and tuple(shown.staleness.reasons) != rung.why:
            lines.append(f"stale: {'; '.join(shown.staleness.reasons)}")
        lines += [f"note: {note}" for note in shown.staleness.notes]
    return lines


def conditions_line(conditions: Conditions) -> str:
    """The conditions that a reader asks for first."""
    plugins = ", ".join(f"plugin {each.name} {each.version} ({each.content[:8]})" for each in conditions.plugins)
    layout = "" if conditions.layout == "1" else f", layout {conditions.layout}"
    return (
        f"{conditions.dtype} on {conditions.device}{layout}, {plugins or 'no plugin'}, "
        f"runtime {conditions.runtime.version} ({conditions.runtime.content[:8]}), "
        f"kernel ({conditions.kernel.content[:8]}), checkpoint {conditions.model.fingerprint[:8]}"
    )


def ladder_html(model: str, ladder: Ladder, required: str | None) -> str:
    """The ladder as one self-contained page."""
    return render_page(
        "ladder.html.j2",
        title=f"rtp readiness · {model}",
        model=str(model),
        headline=headline(ladder, required),
        satisfied=None if required is None else ladder.has(required),
        ladder=ladder,
        slug=lambda words: words.replace(" ", "-"),
        marks=MARKS,
        line=conditions_line,
    )
