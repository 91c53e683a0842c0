"""The page that shows every seeded fault, what the checker said of it, and the clean runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = """# What the checker was tried on

`tools/faults` puts each of these faults into a copy of a tiny checkpoint, a plugin, an op or the scheduler, under
several seeds of the weights, and runs the check: is it flagged, at its module, and with its cause? "–" under cause: the
catalogue does not hold this mistake, or it shows in a narrow dtype alone, where none is searched; "no known cause" is
right then. Effects are relative errors in float32 at the module, of the stage serving R (∞: nothing to compare). The
clean runs must raise no alarm. CI runs a fixed part of this (`tests/runtime/check`).

"""
Row = Mapping[str, Any]


def page(faults: Sequence[Row], clean: Sequence[Row]) -> str:
    """docs/faults.md from the results of `tools/faults --json`."""
    names = list(dict.fromkeys(row["name"] for row in faults))
    lines = [HEAD + _counts(faults, clean), ""]
    lines += ["| fault | stands for | model | stage | module | effect | flagged | module named | cause |"]
    lines += ["| --- | --- | --- | --- | --- | ---: | ---: | ---: | --- |"]
    for name in names:
        lines.append(_row([row for row in faults if row["name"] == name]))
    if clean:
        lines += ["", "## Clean runs", "", "| what | models | runs | alarms |", "| --- | ---: | ---: | --- |"]
        for what in dict.fromkeys(row["what"] for row in clean):
            lines.append(_clean([row for row in clean if row["what"] == what]))
    return "\n".join(lines) + "\n"


def _counts(faults: Sequence[Row], clean: Sequence[Row]) -> str:
    total = len(faults)
    flagged, placed, explained = (sum(bool(row[name]) for row in faults) for name in ("flagged", "placed", "explained"))
    effects = [row["effect"] for row in faults if row["effect"] is not None]
    small, tiny = (sum(effect < least for effect in effects) for least in (1e-2, 1e-4))
    alarms = sum(bool(row["alarm"]) for row in clean)
    num = len({row["name"] for row in faults})
    if not total:
        return f"Clean runs: {len(clean)}, alarms: {alarms}."
    return (
        f"{num} faults, {total} runs: flagged {flagged} ({flagged / total:.1%}), at the right module {placed} "
        f"({placed / total:.1%}), with the right cause {explained} ({explained / total:.1%}). {small / total:.0%} of "
        f"the runs have an effect below 1e-2, {tiny / total:.0%} below 1e-4. "
        f"Clean runs: {len(clean)}, alarms: {alarms}."
    )


def _row(runs: Sequence[Row]) -> str:
    first, count = runs[0], len(runs)
    effect = "∞" if first["effect"] is None else f"{first['effect']:.1e}"
    flagged, placed, explained = (sum(bool(run[name]) for run in runs) for name in ("flagged", "placed", "explained"))
    wanted = first["expected_cause"] or "–"
    cause = wanted if explained == count else f"{wanted}: {explained} of {count}"
    cells = [first["name"], first["row"], first["base"], first["stage"], first["at"], effect]
    return f"| {' | '.join(cells)} | {flagged} of {count} | {placed} of {count} | {cause} |"


def _clean(runs: Sequence[Row]) -> str:
    alarms = [f"{run['base']}, seed {run['seed']}: {run['alarm']}" for run in runs if run["alarm"]]
    models = len({run["base"] for run in runs})
    return f"| {runs[0]['what']} | {models} | {len(runs)} | {'; '.join(alarms) or 'none'} |"
