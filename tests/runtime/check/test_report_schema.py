"""The JSON report against its published schema: every kind of verdict validates, and every key is documented."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rtp_runtime.check import CheckOptions, CheckReport, run_check
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.report import SCHEMA_VERSION, Inconsistency
from rtp_runtime.cli import main

LENGTHS = (10, 14, 40)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    text = resources.files("rtp_runtime.check").joinpath("report.schema.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(content)
    return content


@pytest.fixture(scope="module")
def clean(checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]) -> CheckReport:
    options = CheckOptions(model=checkpoint("qwen3_moe"), lengths=LENGTHS, num_new_tokens=6)
    return run_check(options, reference=reference("qwen3_moe"))


@pytest.fixture(scope="module")
def wrong(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> CheckReport:
    copy = tmp_path_factory.mktemp("wrong") / "model"
    shutil.copytree(checkpoint("qwen3"), copy)
    text = (copy / "config.json").read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.01')
    (copy / "config.json").write_text(text)
    stages = ("audit", "probes", "logits", "modes")
    options = CheckOptions(model=copy, reference=checkpoint("qwen3"), lengths=(12, 24), num_new_tokens=4, stages=stages)
    return run_check(options, reference=reference("qwen3"))


def validate(report: CheckReport, schema: dict[str, Any]) -> dict[str, Any]:
    """The report's JSON, as a reader gets it, found valid."""
    content: dict[str, Any] = json.loads(json.dumps(report.to_json(), allow_nan=False))
    jsonschema.Draft202012Validator(schema).validate(content)
    return content


def test_clean_report(clean: CheckReport, schema: dict[str, Any]) -> None:
    content = validate(clean, schema)
    assert (content["schema_version"], content["exit"]) == (SCHEMA_VERSION, 0)
    cells = [cell for stage in content["stages"] for cell in stage["cells"]]
    assert {cell["result"] for cell in cells} <= {"pass", "tie", "not run"}
    curves = [curve for stage in content["stages"] for curve in stage["curves"]]
    prompts = {prompt["name"] for prompt in content["coverage"]["prompts"]}
    assert {curve["prompt"] for curve in curves if curve["name"] == "logits"} == prompts


def test_wrong_report(wrong: CheckReport, schema: dict[str, Any]) -> None:
    content = validate(wrong, schema)
    first = content["first_wrong"]
    assert content["exit"] == 1 and first["module"].startswith("model.layers.0.")
    curves = [curve for stage in content["stages"] for curve in stage["curves"] if curve["name"] == first["module"]]
    assert curves and max(curves[0]["errors"]) > curves[0]["tolerance"]


def test_curves_are_the_modules_errors(wrong: CheckReport) -> None:
    """The root of the mean square over tokens is the error that was judged."""
    probes = next(stage for stage in wrong.stages if stage.name == "probes")
    measures = {measure.name: measure for measure in probes.measures}
    curve = next(curve for curve in probes.curves if curve.what == "output")
    mean = math.sqrt(sum(error**2 for error in curve.errors) / len(curve.errors))
    assert mean == pytest.approx(measures[curve.name].error, rel=1e-2)


def test_inconsistent_report(clean: CheckReport, schema: dict[str, Any]) -> None:
    found = Inconsistency("cache", "one full forward", "a prompt", math.inf, 3, None, math.inf, "it raises")
    content = validate(replace(clean, judged_by="", inconsistent=(found,)), schema)
    assert (content["verdict"], content["exit"]) == ("REFERENCE-INCONSISTENT", 2)


def test_report_of_stages_left_out(checkpoint: Callable[[str], Path], schema: dict[str, Any]) -> None:
    content = validate(run_check(CheckOptions(model=checkpoint("qwen3"), stages=("audit",))), schema)
    assert (content["verdict"], content["exit"]) == ("NOT-JUDGED", 2)


def test_every_key_is_documented(clean: CheckReport, wrong: CheckReport, schema: dict[str, Any]) -> None:
    undocumented = [path for report in (clean, wrong) for path in _undocumented(report.to_json(), schema, schema, "")]
    assert not undocumented
    for name, definition in schema["$defs"].items():
        assert all("description" in each or "$ref" in each for each in definition["properties"].values()), name


def _undocumented(value: Any, part: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Keys of objects that the schema does not name, maps of names apart."""
    part = part["anyOf"][-1] if "anyOf" in part else part
    part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    if isinstance(value, dict):
        known = part.get("properties")
        yield from (f"{where}.{key}" for key in value if known is not None and key not in known)
        for key, item in value.items():
            inner = (known or {}).get(key, part.get("additionalProperties"))
            yield from _undocumented(item, inner if isinstance(inner, dict) else {}, schema, f"{where}.{key}")
    if isinstance(value, list):
        for item in value:
            yield from _undocumented(item, part.get("items", {}), schema, where)


def test_the_command_prints_the_schema(schema: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["check", "--schema"])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 0
    assert json.loads(capsys.readouterr().out) == schema
