"""The sentences and tables that the terminal and the HTML report share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rtp_runtime.check.names import ranges
from rtp_runtime.check.report import (
    DRIFT,
    INCONSISTENT,
    MATCH,
    NOT_FINITE,
    NOT_JUDGED,
    TIE_FLIP,
    Cause,
    CheckReport,
    Finding,
    ModeCell,
)

CAUSES = {
    "named": "cause",
    "closest": "closest known mistake, not proven",
    "unknown": "no known cause",
    "not judged": "cause not judged",
}
WITHOUT_WORDS = {"unknown": "none of the known mistakes explains it", "not judged": "it was not looked for"}
SIGNS = {"pass": "✓", "tie": "≈", "wrong": "✗", "not run": "–"}


def verdict_sentence(report: CheckReport) -> str:
    """Verdict, exit status and what stands behind it, in one sentence."""
    return f"{report.verdict}, exit status {report.exit}: {_lower(headline(report))}"


def headline(report: CheckReport) -> str:
    """What was found, in one sentence."""
    if report.verdict == INCONSISTENT:
        return (
            "The reference disagrees with itself, and none of its paths is confirmed by another: nothing can judge us."
        )
    first = report.first_wrong
    if first is not None:
        layer = f" (layer {first.layer})" if first.layer is not None else ""
        drift = "Rounding is worse than the reference's, first in" if report.verdict == DRIFT else "First wrong:"
        return f"{drift} {first.module}{layer}: {first.what}, {size(first)}."
    if report.verdict == MATCH:
        return f"Every sub-block, the logits and all execution modes agree with the reference.{_bridged(report)}"
    if report.verdict == TIE_FLIP:
        ties = sum(stage.num_ties for stage in report.stages)
        words = f"All agrees with the reference, but for {ties} choices among equals, which may fall either way."
        return f"{words}{_bridged(report)}"
    missing = [item.what for item in report.not_judged if item.required]
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    return f"Nothing differs, but not everything was judged: {', '.join(missing[:4])}{more}."


def _bridged(report: CheckReport) -> str:
    """What a match says of modules that are the reference's own."""
    bridged = report.conditions.get("bridged") or {}
    if not bridged:
        return ""
    names = (
        f"{next(iter(bridged))} and {len(bridged) - 1} more are" if len(bridged) > 1 else f"{next(iter(bridged))} is"
    )
    return f" {names} the same code as the reference: of that only state and scheduling were judged."


def cut_words(report: CheckReport) -> str:
    """What was cut from the model, or drawn at random; empty where it was checked whole."""
    cut = report.conditions.get("cut")
    return str(cut.get("words", "")) if isinstance(cut, Mapping) else ""


def value_words(value: Any) -> str:
    """A condition in words: mappings and lists without their brackets."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {value_words(item)}" for key, item in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_words, value)) or "–"
    return "–" if value is None else str(value)


def _lower(sentence: str) -> str:
    """A sentence that goes on after a colon."""
    return sentence if sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]


def causes_first(failed: Sequence[Finding], count: int) -> list[Finding]:
    """As many findings as are said, causes before consequences; these in execution order."""
    chosen = sorted(failed, key=lambda finding: (not finding.cause, finding.rank))[:count]
    return sorted(chosen, key=lambda finding: finding.rank)


def size(finding: Finding) -> str:
    """An error in words, beside what is allowed."""
    if finding.stage == "text":
        return "token for token it should be equal"
    if not math.isfinite(finding.error) or finding.error >= NOT_FINITE:
        return "not comparable"
    if finding.tolerance == 0.0:
        return f"relative error {finding.error:.1e}, none allowed"
    if finding.stage == "serving":
        return f"R {finding.error:.2f}, allowed {finding.tolerance:.2f}"
    times = finding.error / finding.tolerance
    return f"error {finding.error:.1e}, {times:,.0f} times the {finding.tolerance:.0e} allowed"


def cause_sentence(cause: Cause) -> str:
    """What made the difference, in a sentence."""
    words = cause.words or WITHOUT_WORDS.get(cause.status, cause.kind)
    return f"{CAUSES[cause.status]}: {words}"


def cause_numbers(cause: Cause) -> list[tuple[str, str]]:
    """The numbers behind a cause, as (name, value)."""
    named = (
        ("our error along the mistake's effect (1: it is the mistake)", cause.coefficient, ".3f"),
        ("relative error that remains if both make it", cause.remaining, ".1e"),
        ("relative size of its effect", cause.effect, ".1e"),
    )
    return [(name, format(value, form)) for name, value, form in named if value is not None]


def mode_matrix(report: CheckReport) -> tuple[list[str], list[tuple[str, dict[str, ModeCell], str]]]:
    """Prompts, and of each execution mode (name, its cells by prompt, why it was not run at all)."""
    cells = [cell for stage in report.stages for cell in stage.cells]
    prompts = list(dict.fromkeys(cell.prompt for cell in cells if cell.prompt))
    rows: dict[str, dict[str, ModeCell]] = {}
    for cell in cells:
        rows.setdefault(cell.mode, {})[cell.prompt] = cell
    found = [(mode, row, row[""].why if "" in row else "") for mode, row in rows.items()]
    return sorted(prompts, key=[cell.prompt for cell in cells].index), found


def cell_words(cell: ModeCell | None) -> str:
    """A cell of the matrix in few characters."""
    if cell is None:
        return SIGNS["not run"]
    number = cell.error is not None and cell.result != "not run"
    if not number or cell.error is None or not 0.0 < cell.error < NOT_FINITE:
        return SIGNS[cell.result]
    return f"{SIGNS[cell.result]} {cell.error:.1e}" if cell.error < 0.01 else f"{SIGNS[cell.result]} {cell.error:.2g}"


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
    rows += _position_rows(coverage)
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
        for name, entry in experts.items():
            if entry["visited"] < entry["of"]:
                rows.append((f"experts of {name}", f"{entry['visited']} of {entry['of']} visited"))
    rows += [(name, _kernel_words(ops)) for name, ops in coverage.get("kernels", {}).items()]
    for kind in coverage.get("layer_kinds", ()):
        rows.append((kind["kind"], f"layers {ranges(kind['layers'])}"))
    return rows + _cut_rows(report.conditions.get("cut"))


def _cut_rows(cut: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What of the model was checked, how its config was edited for it, and the memory that was planned for."""
    if not cut:
        return []
    edited = ", ".join(f"{key} = {value}" for key, value in cut.get("config", {}).items())
    rows = [("part of the model", cut["words"]), ("config edited", edited), ("memory", cut.get("memory", ""))]
    return [row for row in rows if row[1]] + [("cut", note) for note in cut.get("notes", ())]


def _position_rows(coverage: Mapping[str, Any]) -> list[tuple[str, str]]:
    positions = coverage.get("positions")
    if not positions:
        return []
    words = f"up to {positions['reached']} of {positions['of']}"
    if positions["original"] is not None:
        past = "past" if positions["past_original"] else "not past"
        words += f", {past} the {positions['original']} that the rotary embedding was stretched from"
    rows = [("positions", words)]
    ends = {size: number for size, number in coverage.get("chunk_ends", {}).items() if number}
    if ends:
        rows.append(("chunk ends crossed", ", ".join(f"{number} of chunks of {size}" for size, number in ends.items())))
    return rows


def _kernel_words(ops: Mapping[str, list[str]]) -> str:
    """Which ops were computed by something else than their plain reference."""
    other = [f"{op} {', '.join(names)}" for op, names in ops.items() if names != ["reference"]]
    return "; ".join(other) or "the plain reference of every op"


def next_step(report: CheckReport) -> str:
    """What to do now."""
    first, cause = report.first_wrong, report.cause
    if cause is not None and cause.fix and cause.status in ("named", "closest") and first is not None:
        return f"Next: {cause.fix}" + ("." if not cause.fix.endswith(".") else "")
    if first is not None:
        if first.stage == "audit":
            return f"Next: compare the tensors with rtp inspect {report.model} --weights"
        if report.verdict == DRIFT:
            return f"Next: see in which dtype {first.module} computes, beside the same class of the reference."
        return f"Next: read {first.module} in the plugin beside the same class of the reference."
    if report.verdict == INCONSISTENT:
        return "Next: read the reference's two runs, and check with a version of transformers that is sound."
    if report.verdict == NOT_JUDGED:
        return "Next: run the check with all stages, or see why each item could not be judged."
    return f"Next: rtp generate {report.model}"
