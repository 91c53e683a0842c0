"""Tiny checkpoints and their references, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rtp_runtime.check.loading import load_reference
from rtp_runtime.check.reference import Reference
from rtp_runtime.testing.tiny_models import write_tiny

LENGTHS = (14, 40)
"""Prompts of the fault tests: the longer one crosses the tiny window of 8 several times."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny checkpoint by name."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = tmp_path_factory.mktemp("tiny") / name
            write_tiny(name, written[name])
        return written[name]

    return get


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """The loaded reference of a tiny checkpoint by name."""
    loaded: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in loaded:
            loaded[name] = load_reference(checkpoint(name))
        return loaded[name]

    return get
