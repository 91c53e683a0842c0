"""The pictures and pages of a report that no model had to be run for: any size, any verdict, nothing from outside."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from rtp_runtime.check.curves import MAX_POINTS, thin
from rtp_runtime.check.render.heatmap import SCALE, colour, draw_heatmap, make_grid
from rtp_runtime.check.render.html import render_html
from rtp_runtime.check.render.plots import draw_curve
from rtp_runtime.check.render.terminal import print_report
from rtp_runtime.check.render.words import headline
from rtp_runtime.check.report import (
    Cause,
    CheckReport,
    Curve,
    Finding,
    Inconsistency,
    Mark,
    Measure,
    ModeCell,
    NotJudged,
    StageResult,
)

ALLOWED = 2e-6
COLUMNS = ("input_layernorm", "self_attn", "mlp", "layer")
WRONG = Finding(
    stage="probes", module="model.layers.41.mlp", layer=41, error=3e-4, tolerance=ALLOWED, what="output",
    detail="largest at token 3 (<b>a prompt</b>)",
)  # fmt: skip


def measures(num_layers: int) -> list[Measure]:
    found = []
    for layer in range(num_layers):
        for column in COLUMNS:
            prefix = f"model.layers.{layer}"
            name = prefix if column == "layer" else f"{prefix}.{column}"
            error = 3e-4 if name == WRONG.module else math.inf if (layer, column) == (50, "mlp") else 3e-7
            found.append(Measure(name, layer, column, error, ALLOWED))
    return found


def make_report(num_layers: int) -> CheckReport:
    """A wrong report of many layers, with something in each of its parts."""
    marks = (Mark(64, "chunk of 64"), Mark(128, "chunk of 64"), Mark(8, "window 8"))
    curve = Curve(WRONG.module, "output", 41, "<b>a prompt</b>", (0, 1, 200), (0.0, 1e-7, 3e-4), ALLOWED, marks)
    probes = StageResult("probes", measures=measures(num_layers), findings=[WRONG], curves=[curve])
    probes.not_judged = [NotJudged("model.layers.3.kv_b_proj", "absorbed")]
    serving = StageResult("serving", measures=[replace(each, column=f"{each.column} R") for each in measures(2)])
    modes = StageResult("modes")
    modes.cells = [
        ModeCell("whole prefill", "a", "pass", 3e-6, 2e-5),
        ModeCell("whole prefill", "b", "tie", 3e-6, 2e-5, "new token 3 is another"),
        ModeCell("captured graphs", "", "not run", why="there are none"),
    ]
    return CheckReport(
        model="models/<script>", reference="models/<script>", stages=(probes, modes, serving), coverage={},
        conditions={"dtype": "float32", "device": "cpu", "seed": 0, "fingerprint": None, "logits_tolerance": 2e-5,
                    "cut": {"words": "layers 0-3 of 61", "notes": []}, "bridged": {}},
        versions={"torch": "2"},
        inconsistent=(Inconsistency("one run", "another", "a prompt", 2.0, 5, "model.layers.0", 0.5),),
        cause=Cause(status="closest", kind="norm-eps", words="ours adds 1e-5", fix="add 1e-6", coefficient=0.6),
    )  # fmt: skip


@pytest.mark.parametrize("num_layers", [42, 60])
def test_the_page_stands_alone_and_escapes_what_it_shows(num_layers: int) -> None:
    page = render_html(make_report(num_layers))
    assert not re.search(r"(src|href)=|@import|url\((?!#)", page)
    assert "<b>a prompt" not in page and "models/<script>" not in page
    for words in (
        "exit status 1",
        "closest known mistake",
        "norm-eps",
        "add 1e-6",
        "0.600",
        "window 8",
        "there are none",
    ):
        assert words in page, words
    assert page.count("<polyline") == 1 and len(page) < 400_000


def test_the_terminal_says_verdict_cause_and_next_step_first() -> None:
    out = io.StringIO()
    print_report(make_report(42), Console(file=out, width=200))
    first = out.getvalue().splitlines()[:4]
    assert first[0].startswith("WRONG, exit status 1: first wrong: model.layers.41.mlp (layer 41)")
    assert "layers 0-3 of 61" in out.getvalue()
    assert "ours adds 1e-5" in first[1] and "Next: add 1e-6" in first[3]


def test_a_match_with_bridged_modules_says_what_that_is() -> None:
    bridged = {"model.layers.0.mixer": "transformers.models.x:Mixer"}
    report = replace(make_report(2), stages=(), cause=None, conditions={"bridged": bridged})
    assert "model.layers.0.mixer is the same code as the reference" in headline(report)
    assert "bridged" not in headline(replace(report, conditions={})) and report.verdict == "MATCH"


def test_colours_change_at_the_tolerance() -> None:
    assert [colour(error, 1.0) for error in (0.0, 1.0, 1.01, math.inf)] == [SCALE[0], SCALE[2], SCALE[3], SCALE[5]]


def test_cells_of_modules_that_were_not_judged_are_hatched() -> None:
    unjudged = {"model.layers.1.kv_b_proj": "absorbed", "lm_head": "elsewhere"}
    grid = make_grid(measures(3), unjudged)
    assert grid.columns == (*COLUMNS, "kv_b_proj") and grid.unjudged == {(1, "kv_b_proj"): "absorbed"}
    assert draw_heatmap(measures(3), None, unjudged).count('fill="url(#hatch)"') == 1


def test_a_curve_keeps_the_worst_of_each_stretch() -> None:
    errors = {place: 1e-7 for place in range(5000)} | {3333: 0.5, 4444: math.inf}
    positions, values = thin(errors)
    assert len(positions) <= MAX_POINTS and list(positions) == sorted(positions)
    assert dict(zip(positions, values, strict=True))[3333] == 0.5 and max(values) == 1e308
    assert draw_curve(Curve("logits", "", None, "", positions, values, 1e-5)).count('class="beyond"') == 2
    assert draw_curve(Curve("logits", "", None, "", (), (), 1e-5)) == ""
