"""A tiny checkpoint, written once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rtp_runtime.testing.tiny_models import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that nobody may change."""
    directory = tmp_path_factory.mktemp("tiny") / "qwen3"
    write_tiny("qwen3", directory)
    return directory


@pytest.fixture
def model(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in a working directory that is empty otherwise."""
    copy = tmp_path / "models" / "tiny"
    shutil.copytree(tiny, copy)
    monkeypatch.chdir(tmp_path)
    return copy
