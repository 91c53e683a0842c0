"""Counts, from history, the lines that commits changed to enable a model, and those that added a mechanism.

A commit that enables a model carries the trailer `Enables: <model_type>`; one that adds what a new kind of model needs
(a state, an op, a component, a weight operation, a parser) carries `Mechanism: <what>`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

RECORD, FIELD = "\x1e", "\x1f"
COLUMNS = ("plugin", "plugin tests", "rtp_kernel", "tests and docs")
"""Where lines may change at no cost to the runtime; folders of rtp_runtime follow."""


@dataclass
class Row:
    """One commit, or several of one name."""

    name: str
    lines: Counter[str] = field(default_factory=Counter)
    """Place -> lines added and deleted."""

    @property
    def runtime(self) -> int:
        return sum(count for place, count in self.lines.items() if place.startswith("rtp_runtime"))


def place_of(path: str) -> str:
    """The column that a changed file belongs to."""
    parts = path.split("/")
    if parts[0] == "plugins":
        return "plugin" if "src" in parts else "plugin tests"
    if parts[0] == "rtp_runtime":
        return f"rtp_runtime/{parts[1]}" if len(parts) > 2 else "rtp_runtime"
    return "rtp_kernel" if parts[0] == "rtp_kernel" else "tests and docs"


def commits(trailer: str) -> Iterator[tuple[str, str]]:
    """(value of the trailer, numstat) of each commit that carries it, oldest first."""
    form = f"{RECORD}%(trailers:key={trailer},valueonly,separator=%x2C){FIELD}"
    command = ["git", "log", "--reverse", "--no-renames", "--numstat", f"--format={form}"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for record in log.split(RECORD)[1:]:
        value, _, changes = record.partition(FIELD)
        if value.strip():
            yield value.strip(), changes


def rows(trailer: str) -> list[Row]:
    """One row for each value of the trailer, in the order of its first commit."""
    found: dict[str, Row] = {}
    for value, changes in commits(trailer):
        row = found.setdefault(value, Row(value))
        for line in changes.strip().splitlines():
            added, deleted, path = line.split("\t")
            if added != "-":  # a binary file has no lines
                row.lines[place_of(path)] += int(added) + int(deleted)
    return list(found.values())


def table(title: str, found: Sequence[Row]) -> list[str]:
    """The rows as a Markdown table; folders of the runtime that nobody changed share one column of zeros."""
    touched = sorted({place for row in found for place in row.lines if place.startswith("rtp_runtime")})
    columns = [*COLUMNS, *(touched or ["rtp_runtime"])]
    lines = [f"| {title} | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    lines += [f"| {row.name} | {' | '.join(str(row.lines[column]) for column in columns)} |" for row in found]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/change-lines", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    try:
        models, mechanisms = rows("Enables"), rows("Mechanism")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        print(f"change-lines: git cannot tell: {reason.strip()}. Run it in a clone of the repository.", file=sys.stderr)
        return 2
    if arguments.json:
        every = {"models": models, "mechanisms": mechanisms}
        print(json.dumps({key: {row.name: row.lines for row in found} for key, found in every.items()}, indent=2))
        return 0
    print("\n".join([*table("model", models), "", *table("mechanism", mechanisms)]))
    total = sum(row.runtime for row in models)
    print(f"\n{len(models)} models enabled; lines changed for them under rtp_runtime: {total}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
