"""The sentences that the terminal and the HTML report share."""

from __future__ import annotations

import math

from rtp_runtime.check.report import INCONSISTENT, MATCH, NOT_JUDGED, CheckReport, Finding


def headline(report: CheckReport) -> str:
    """The verdict in one sentence."""
    if report.verdict == INCONSISTENT:
        return (
            "The reference disagrees with itself, and none of its paths is confirmed by another: nothing can judge us."
        )
    first = report.first_wrong
    if first is not None:
        layer = f" (layer {first.layer})" if first.layer is not None else ""
        return f"First wrong: {first.module}{layer}: {first.what}, {size(first)}."
    if report.verdict == MATCH:
        return "Every sub-block, the logits and all execution modes agree with the reference."
    missing = [item.what for item in report.not_judged if item.required]
    return f"Nothing differs, but not everything was judged: {', '.join(missing[:4])}."


def size(finding: Finding) -> str:
    """An error in words, beside what is allowed."""
    if not math.isfinite(finding.error):
        return "not comparable"
    if finding.tolerance == 0.0:
        return f"relative error {finding.error:.1e}, none allowed"
    times = finding.error / finding.tolerance
    return f"error {finding.error:.1e}, {times:,.0f} times the {finding.tolerance:.0e} allowed"


def mode_rows(report: CheckReport) -> list[tuple[str, int, float, float]]:
    """(execution mode, prompts, worst error, tolerance), in the order in which they ran."""
    rows: dict[str, tuple[int, float, float]] = {}
    for stage in report.stages:
        if stage.name != "modes":
            continue
        for measure in stage.measures:
            number, worst, _ = rows.get(measure.column, (0, 0.0, 0.0))
            rows[measure.column] = (number + 1, max(worst, measure.error), measure.tolerance)
    return [(name, *values) for name, values in rows.items()]


def reference_rows(report: CheckReport) -> list[tuple[str, float, str]]:
    """(path of the reference, its distance from a full forward in standard deviations of the logits, what is amiss)."""
    bad = report.conditions.get("reference_inconsistent", {})
    aside = report.conditions.get("reference_set_aside", {})
    values = report.conditions.get("reference_paths", {}) | bad
    words = dict.fromkeys(aside, "chose otherwise among equals") | dict.fromkeys(bad, "inconsistent")
    return [(path, value, words.get(path, "")) for path, value in values.items()]


def coverage_rows(report: CheckReport) -> list[tuple[str, str]]:
    """What the prompts exercised, as (subject, words)."""
    coverage = report.coverage
    lengths = ", ".join(str(prompt["tokens"]) for prompt in coverage.get("prompts", ()))
    rows = [("prompts", f"{len(coverage.get('prompts', ()))}, of {lengths} tokens" if lengths else "none")]
    for entry in coverage.get("windows", ()):
        rows.append((f"window {entry['window']}", "crossed twice" if entry["crossed_twice"] else "not crossed twice"))
    for entry in coverage.get("compressed", ()):
        rows.append((f"one entry for {entry['tokens_per_entry']} tokens", f"{entry['closed']} windows closed"))
    for entry in coverage.get("selections", ()):
        what = f"{entry['selected']} of up to {entry['of']} places"
        rows.append(
            (f"selection in layer {entry['layer']}", what if entry["left_out"] else f"{what}: left nothing out")
        )
    experts = coverage.get("experts", {})
    if experts:
        full = sum(entry["visited"] == entry["of"] for entry in experts.values())
        rows.append(("experts", f"all visited in {full} of {len(experts)} routers"))
    for kind in coverage.get("layer_kinds", ()):
        rows.append((kind["kind"], f"layers {ranges(kind['layers'])}"))
    return rows


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def next_step(report: CheckReport) -> str:
    """What to do now."""
    first = report.first_wrong
    if first is not None:
        if first.stage == "audit":
            return f"Next: compare the tensors with rtp inspect {report.model} --weights"
        return f"Next: read {first.module} in the plugin beside the same class of the reference."
    if report.verdict == INCONSISTENT:
        return "Next: read the reference's two runs, and check with a version of transformers that is sound."
    if report.verdict == NOT_JUDGED:
        return "Next: run the check with all stages, or see why each item could not be judged."
    return f"Next: rtp generate {report.model}"
