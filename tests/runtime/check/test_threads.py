"""How many threads a check takes: what the processors are doing decides."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from rtp_runtime.check import threads


def test_a_busy_processor_is_not_idle() -> None:
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        assert threads.idle_processors() < (os.cpu_count() or 1)


@pytest.mark.parametrize(("idle", "small", "expected"), [(0, False, 1), (8, False, 3), (2, False, 2), (8, True, 1)])
def test_threads_are_as_many_as_processors_are_idle(
    monkeypatch: pytest.MonkeyPatch, idle: int, small: bool, expected: int
) -> None:
    monkeypatch.setattr(threads, "idle_processors", lambda: idle)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads.threads_for(small=small):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_all_processors_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> list[int]:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(threads, "_times", nothing)
    assert threads.idle_processors() == os.cpu_count()
