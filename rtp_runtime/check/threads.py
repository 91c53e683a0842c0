"""How many threads a check computes with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAMPLE_SECONDS = 0.25
"""How long the processors are watched; the load average would still count what has just ended."""


@contextmanager
def threads_for(*, small: bool) -> Iterator[None]:
    """One thread for a small model, whose products are too small to share; else as many as processors are idle.

    Threads that wait for each other on a busy machine cost several times what they give.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else max(1, min(before, idle_processors())))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def idle_processors() -> int:
    """Processors that nobody uses now, the caller's counted as idle; all of them where the system does not tell."""
    total = os.cpu_count() or 1
    try:
        before = _times()
        time.sleep(SAMPLE_SECONDS)
        passed = [late - early for early, late in zip(before, _times(), strict=True)]
    except (OSError, ValueError):
        return total
    return round(total * sum(passed[3:5]) / max(1, sum(passed)))


def _times() -> list[int]:
    """Ticks that all processors have spent so far: user, nice, system, idle, waiting for input, and others."""
    with Path("/proc/stat").open() as file:
        return [int(ticks) for ticks in file.readline().split()[1:9]]
