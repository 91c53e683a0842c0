"""The pytest plugin: a check as a fixture, readable when it fails, and nothing heavy where it is not used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rtp_runtime.testing.tiny_models import write_tiny

TESTS = """
from rtp_runtime.check.options import REQUIRED

QUICK = {"lengths": (12, 20), "num_new_tokens": 2}


def test_model(rtp_check, rtp_model):
    report = rtp_check(rtp_model, stages=REQUIRED, **QUICK)
    assert report.exit == 0


def test_other_reference(rtp_check, rtp_model):
    rtp_check(rtp_model, reference=rtp_model.parent / "other", stages=("audit", "probes"), **QUICK)
"""
UNUSED = """
def test_nothing_heavy_was_imported():
    import sys

    assert not {"torch", "transformers", "tokenizers"} & set(sys.modules)
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    plugin = ["-p", "rtp_runtime.testing.pytest_plugin"] if not _is_installed() else []
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", *plugin, *arguments]
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def _is_installed() -> bool:
    from importlib import metadata

    return any(entry.value == "rtp_runtime.testing.pytest_plugin" for entry in metadata.entry_points(group="pytest11"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint, and another whose config has a wrong eps."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny("qwen3", folder / "model", num_hidden_layers=1)
    shutil.copytree(folder / "model", folder / "other")
    config = json.loads((folder / "other/config.json").read_text()) | {"rms_norm_eps": 0.01}
    (folder / "other/config.json").write_text(json.dumps(config))
    return folder


def test_a_check_as_a_fixture(models: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    reports = tmp_path / "reports"
    done = run_pytest(tmp_path, "--rtp-model", str(models / "model"), "--rtp-report", str(reports))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "WRONG, exit status 1: first wrong: model.layers.0.input_layernorm (layer 0)" in done.stdout
    assert "Traceback" not in done.stdout and "Next: " in done.stdout
    pages = {page.name for page in reports.iterdir()}
    assert pages == {"test_model-model.html", "test_other_reference-model.html"}
    assert all("<svg" in (reports / page).read_text() for page in pages)


def test_unused_it_imports_nothing_heavy_and_models_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS + UNUSED)
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 2 skipped" in done.stdout
