"""The commands, and what docs/readiness.md shows: its files are read and run as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rtp_runtime.cli import main
from rtp_runtime.readiness.ladder import STATES
from rtp_runtime.readiness.regress import run as regress_run

PAGE = (Path(__file__).parents[3] / "docs" / "readiness.md").read_text(encoding="utf-8")
Output = pytest.CaptureFixture[str]


def shown(name: str) -> str:
    """A TOML file as the page shows it."""
    [text] = [text for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if text.startswith(f"# {name}\n")]
    return text


def ask(arguments: list[str], capsys: Output) -> tuple[int, dict[str, object]]:
    status = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    found: dict[str, object] = json.loads(captured.out)
    return status, found


def states(ladder: dict[str, object]) -> dict[str, str]:
    rungs = ladder["states"]
    assert isinstance(rungs, list)
    return {rung["state"]: rung["status"] for rung in rungs}


def test_the_page_names_every_state_and_number() -> None:
    from rtp_runtime.readiness.metrics import METRICS

    assert all(f"| {state} |" in PAGE for state in STATES)
    assert all(f"`{name}`" in PAGE for name in METRICS)


def test_a_day_with_the_ladder(model: Path, tmp_path: Path, capsys: Output) -> None:
    status, ladder = ask(["readiness", str(model)], capsys)
    assert (status, ladder["reached"]) == (0, "available")
    assert not (tmp_path / ".rtp").exists()
    # A check without the stages that a pass requires is partial evidence.
    assert main(["check", str(model), "--record", "--stages", "audit,pinned"]) == 2
    assert "recorded .rtp/evidence/check-" in capsys.readouterr().err
    _, ladder = ask(["readiness", str(model)], capsys)
    assert states(ladder)["correctness-ready"] == "partial"
    # The directory exists now, so that the bench is recorded unasked.
    (tmp_path / ".rtp" / "targets.toml").write_text(shown("targets.toml"))
    points = ["--batch", "1,4", "--prompt", "32,96", "--new-tokens", "8", "--repeats", "3", "--max-spread", "1e9"]
    page = tmp_path / "bench.html"
    status, report = ask(["bench", str(model), *points, "--html", str(page)], capsys)
    assert status == 0
    assert isinstance(report["points"], list)
    assert [(each["batch"], each["prompt"]) for each in report["points"]] == [(1, 32), (1, 96), (4, 32), (4, 96)]
    assert page.read_text().count("<svg") == 4
    _, ladder = ask(["readiness", str(model), "--html", str(tmp_path / "ladder.html")], capsys)
    assert states(ladder)["performance-ready"] == "blocked"
    # One byte of the weights, and all of it is stale.
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    status, ladder = ask(["readiness", str(model), "--require", "correctness-ready"], capsys)
    assert (status, ladder["satisfied"]) == (1, False)
    assert set(states(ladder).values()) == {"reached", "stale", "no evidence yet"}
    assert "checkpoint changed: model.safetensors" in json.dumps(ladder)
    assert main(["readiness", str(model), "--require", "available"]) == 0
    for file in (page, tmp_path / "ladder.html"):
        assert not re.search(r"(src|href)=|@import|url\(", file.read_text())


def test_the_case_file_of_the_page(
    model: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process of its own costs seconds, and is tested where it dies.
    monkeypatch.setattr(regress_run, "_apart", lambda runner: runner)
    file = tmp_path / "cases.toml"
    # How quiet this machine is decides nothing here.
    file.write_text(shown("cases.toml").replace("max_spread = 0.25", "max_spread = 1e9"))
    status, report = ask(["regress", str(file)], capsys)
    assert (status, report["complete"]) == (2, False)
    assert isinstance(report["items"], list)
    places = [f"{item['kind']} {item['place']}" for item in report["items"]]
    expected = ["batch 1, prompt 32, 8 new", "batch 4, prompt 32, 8 new"]
    assert places == ["check audit", "check pinned", *(f"bench {each}" for each in expected)]
    page = tmp_path / "regress.html"
    status, report = ask(["regress", str(file), "--update", "--html", str(page)], capsys)
    assert (status, report["missing"]) == (0, [])
    assert "batch 4, prompt 32, 8 new" in page.read_text()
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "baselines").glob("*.*")) == [
        "bench", "check", "coverage"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["readiness", "/nowhere"], "no such directory"),
        (["readiness", "{model}", "--targets", "/nowhere.toml"], "cannot be read"),
        (["readiness", "{model}", "--evidence", "{model}/config.json"], "is no directory"),
        (["readiness", "{model}", "--html", "/nowhere/page.html"], "there is no directory"),
        (["bench", "{model}", "--batch", "one"], "give numbers separated by commas"),
        (["bench", "{model}", "--batch", "0"], "give one or more numbers from 1 up"),
        (["bench", "{model}", "--device", "cuda:99"], "cuda"),
        (["regress", "/nowhere.toml"], "cannot be read"),
    ],
)
def test_bad_input_exits_2(arguments: list[str], message: str, tiny: Path, capsys: Output) -> None:
    assert main([argument.format(model=tiny) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_environment_names_the_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    from rtp_runtime.readiness import record

    monkeypatch.setenv("RTP_EVIDENCE", str(tmp_path / "elsewhere"))
    path = record("production", model, result="fail", summary="rolled back", dtype="bfloat16")
    assert path.parent == tmp_path / "elsewhere"
    assert main(["readiness", str(model)]) == 0
    assert "rolled back" in capsys.readouterr().out
