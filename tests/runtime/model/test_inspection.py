"""`rtp inspect`: reads headers only, tells each part even when another is refused, prints one object with --json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.cli import main
from rtp_runtime.model.inspection import inspect_model
from rtp_runtime.plugins import Plugins, load_plugins
from rtp_runtime.testing.tiny_models import write_tiny
from rtp_runtime.weights.headers import read_file_header


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_moe")
    write_tiny("qwen3_moe", directory)
    return directory


@pytest.fixture
def headers_only(checkpoint: Path, tmp_path: Path) -> Path:
    """The same checkpoint, without one byte of data."""
    directory = tmp_path / "headers"
    shutil.copytree(checkpoint, directory)
    path = directory / "model.safetensors"
    start = min(tensor.start for tensor in read_file_header(path).tensors)
    with path.open("r+b") as file:
        file.truncate(start)
    return directory


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def test_the_report(checkpoint: Path, plugins: Plugins) -> None:
    report = inspect_model(str(checkpoint), plugins)
    assert report["problems"] == [] and report["dtype"] == "float32"
    assert report["plugin"]["distribution"] == "rtp-plugin-qwen"
    assert report["config"]["read"]["head_dim"] == 32 and "initializer_range" in report["config"]["inert"]
    assert report["config"]["unread"] == []
    weights = report["weights"]
    assert weights["clean"] and weights["layout"] == "hub"
    assert weights["plan"]["bytes_read"] == weights["plan"]["bytes_kept"]
    assert sum(read["bytes"] for read in weights["plan"]["reads"]) == weights["plan"]["bytes_read"]
    by_name = {parameter["name"]: parameter for parameter in weights["parameters"]}
    experts = by_name["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts["shape"] == [8, 64, 64] and len(experts["tensors"]) == 16
    (group,) = report["states"]
    assert group["bytes_per_token"] == 3 * 2 * 2 * 32 * 4
    assert {choice["op"] for choice in report["kernels"]} >= {"linear", "paged_attention", "experts", "route"}
    json.dumps(report, allow_nan=False)


def test_headers_are_enough(headers_only: Path, checkpoint: Path, plugins: Plugins) -> None:
    ours, whole = (inspect_model(str(directory), plugins) for directory in (headers_only, checkpoint))
    assert ours["weights"] == whole["weights"] and ours["problems"] == []
    assert [file["data"] for file in ours["files"]] == ["missing"]


def test_a_bare_config(checkpoint: Path, plugins: Plugins, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    for model in (tmp_path / "config.json", tmp_path):
        report = inspect_model(str(model), plugins)
        assert report["problems"] == [] and report["files"] == []
        assert report["weights"]["clean"] is None and report["weights"]["parameters"]
        assert report["states"] and report["kernels"]


def test_what_nobody_reads_of_a_wrapper(plugins: Plugins, tmp_path: Path) -> None:
    """Of the text part the runtime reads what it reads of any config."""
    write_tiny("qwen3_vl", tmp_path)
    unread = inspect_model(str(tmp_path), plugins)["config"]["unread"]
    assert "image_token_id" in unread and "vision_config.depth" in unread
    assert not [key for key in unread if key.startswith("text_config.") or key.endswith("model_type")]


def test_an_unclean_audit_leaves_the_other_parts(checkpoint: Path, plugins: Plugins, tmp_path: Path) -> None:
    directory = tmp_path / "edited"
    shutil.copytree(checkpoint, directory)
    raw = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 4}
    (directory / "config.json").write_text(json.dumps(raw))
    report = inspect_model(str(directory), plugins)
    assert report["weights"]["clean"] is False and report["states"] and report["kernels"]
    assert report["problems"][0]["part"] == "weights" and "model.layers.3." in report["problems"][0]["message"]


def test_numbers_that_json_forbids(checkpoint: Path, plugins: Plugins, tmp_path: Path) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": float("inf")}))
    report = inspect_model(str(tmp_path), plugins)
    assert report["config"]["read"]["rms_norm_eps"] == "inf"
    json.dumps(report, allow_nan=False)


def test_an_architecture_that_nobody_provides(plugins: Plugins, checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "other"
    shutil.copytree(checkpoint, directory)
    (directory / "config.json").write_text(json.dumps({"architectures": ["Nobody"], "model_type": "nobody"}))
    report = inspect_model(str(directory), plugins)
    assert report["plugin"] is None and report["files"][0]["tensors"] > 0
    assert "no plugin provides Nobody" in report["problems"][0]["message"]


def test_the_command(checkpoint: Path, headers_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["weights"]["clean"] and err == ""
    assert main(["inspect", str(headers_only), "--weights"]) == 0
    text = capsys.readouterr().out
    for words in (
        "headers only",
        "layout 'hub'",
        "qkv_proj.weight",
        "Plan, in file order",
        "paged_attention",
        "per token",
    ):
        assert words in text, text


def test_the_command_on_bad_input(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    directory = tmp_path / "damaged"
    shutil.copytree(checkpoint, directory)
    (directory / "model.safetensors").write_bytes(b"12345678{}")
    assert main(["inspect", str(directory), "--json"]) == 2
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert "corrupt header" in report["problems"][0]["message"]
    assert main(["inspect", str(directory)]) == 2
    assert "corrupt header" in capsys.readouterr().out


def test_names_from_a_checkpoint_are_never_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {"architectures": ["Nobody"], "model_type": "[bold]x[/bold][/nothing]", "key[red]": "[/red]"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["inspect", str(tmp_path)]) == 2
    assert "[bold]x[/bold][/nothing]" in capsys.readouterr().out
