"""`rtp check` as a command: exit statuses, one JSON object, a report file that stands alone, clear refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rtp_runtime.cli import main

KEYS = {"verdict", "exit", "first_wrong", "failed", "not_judged", "stages", "coverage"}
FAST = ("--stages", "audit,pinned")


def test_json_is_one_object(checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", str(checkpoint("qwen3")), "--json", *FAST])
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= KEYS
    assert (status, report["exit"], report["verdict"], report["first_wrong"]) == (2, 2, "NOT-JUDGED", None)
    assert {stage["name"]: stage["status"] for stage in report["stages"]}["pinned"] == "MATCH"


def test_failure_exits_1_and_names_the_module(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("qwen3"), copy)
    config = (copy / "config.json").read_text().replace('"rope_theta": 1000000.0', '"rope_theta": 10000.0')
    (copy / "config.json").write_text(config)
    page = tmp_path / "report.html"
    arguments = [str(copy), "--reference", str(checkpoint("qwen3")), "--json", "--html", str(page)]
    status = main(["check", *arguments, "--stages", "audit,pinned,probes"])
    report = json.loads(capsys.readouterr().out)
    assert status == 1
    assert report["first_wrong"]["module"] == "model.rotary_emb"
    assert report["first_wrong"]["layer"] == 0
    assert report["first_wrong"]["error"] > report["first_wrong"]["tolerance"]
    assert report["failed"][0]["module"] == "model.rotary_emb"
    text = page.read_text()
    assert "model.rotary_emb" in text and "<svg" in text
    assert not re.search(r"(src|href)=|@import|url\((?!#)", text)


def test_terminal_report_starts_with_the_verdict(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(checkpoint("qwen3")), *FAST]) == 2
    assert capsys.readouterr().out.startswith("NOT-JUDGED")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "no such directory"),
        (["{model}", "--stages", "probe"], "the stages are"),
        (["{model}", "--skip", "all"], "the stages are"),
        (["{model}", "--skip", "logits", "--stages", "audit"], "contradict"),
        (["{model}", "--dtype", "int3"], "give one of"),
        (["{model}", "--prompt", ""], "empty prompt"),
        (["{model}", "--prompt", "hello", "--stages", "probes"], "no tokenizer"),
        (["{model}", "--html", "/nowhere/report.html"], "there is no directory"),
        (["{model}", "--reference", "/nowhere"], "no such directory"),
    ],
)
def test_bad_input_exits_2(
    arguments: list[str], message: str, checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [argument.format(model=checkpoint("qwen3")) for argument in arguments]
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_config_without_architecture_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert main(["check", str(tmp_path)]) == 2
    assert "architecture" in capsys.readouterr().err


def test_unknown_architecture_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MadeUpForCausalLM"]}')
    assert main(["check", str(tmp_path)]) == 2
    assert "MadeUpForCausalLM" in capsys.readouterr().err
