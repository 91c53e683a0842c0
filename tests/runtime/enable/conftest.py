"""What the tests of enable share: one thread, as these models are tiny, and no plugin of an earlier test."""

from __future__ import annotations

import sys

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forget_scaffolds() -> None:
    """Two tests write packages of the same name; the first one's modules must not stand for the second's."""
    for name in [name for name in sys.modules if name.startswith("rtp_plugin_")]:
        if name.split(".")[0] != "rtp_plugin_qwen":
            del sys.modules[name]
