"""A tiny checkpoint, written once."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rtp_runtime.readiness import subject
from rtp_runtime.testing.tiny_models import write_tiny


@pytest.fixture(scope="session")
def sources_once() -> Callable[[str], subject.Code]:
    return functools.cache(subject.package_code)


@pytest.fixture(autouse=True)
def quiet_sources(sources_once: Callable[[str], subject.Code], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who edits rtp while its tests run changes what is recorded; here only what a test edits does."""
    monkeypatch.setattr(subject, "package_code", sources_once)


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
