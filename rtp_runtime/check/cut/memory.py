"""What a check takes of memory, against what there is: both models loaded, the reference streamed, or too much."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from rtp_kernel.memory import available
from rtp_runtime.check.streaming import POOL_BYTES

FLOAT32 = 4
READING = 1 << 30
"""Bytes of a block of an output head that is being read, and its products."""
OTHER = 1 << 30
"""Bytes of the libraries, activations, captures and states."""
SHARE = 0.9
"""Of the memory that is there, this much may be planned for."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a check of a model takes."""

    num_parameters: int
    there: int | None
    """Bytes that the system can give; None where it does not tell."""
    widest: int = 0
    """Parameters of the widest module, all of which a streamed reference holds while it runs."""

    @property
    def ours(self) -> int:
        """Our model in float32, and what else is always there."""
        return self.num_parameters * FLOAT32 + OTHER

    @property
    def both(self) -> int:
        """With the reference loaded too."""
        return self.ours + self.num_parameters * FLOAT32

    @property
    def streamed(self) -> int:
        """With the reference streamed. A fused parameter is put together in the checkpoint's dtype, then widened."""
        held = self.pool + self.widest * FLOAT32 // 2 + READING
        return self.ours + min(held, self.num_parameters * FLOAT32)

    @property
    def pool(self) -> int:
        """Bytes of weights that a streamed reference keeps. What is left holds the file itself, at half the size."""
        return max(POOL_BYTES, self.widest * FLOAT32)

    @property
    def holds_both(self) -> bool:
        return self.there is None or self.both <= SHARE * self.there

    @property
    def holds_streamed(self) -> bool:
        return self.there is None or self.streamed <= SHARE * self.there

    @property
    def num_bytes(self) -> int:
        """What the check will take."""
        return self.both if self.holds_both else self.streamed

    def describe(self) -> str:
        """The plan in words, with numbers."""
        there = "unknown memory" if self.there is None else f"{size(self.there)} of memory"
        how = "both models loaded" if self.holds_both else "the reference streamed from its files"
        return f"{self.num_parameters / 1e9:.2f} G parameters: about {size(self.num_bytes)} with {how}; {there} to take"


def estimate(num_parameters: int, widest: int = 0) -> Estimate:
    """The estimate for a model of so many parameters, its widest module's among them, on this machine."""
    return Estimate(num_parameters, there(), widest)


def there() -> int | None:
    """Bytes that this process can have: what the system has left, or less where a limit is set on it."""
    limits = [number for number in (available(), _group_room(), _address_room()) if number is not None]
    return min(limits, default=None)


def size(num_bytes: float) -> str:
    """Bytes in GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"


def _group_room() -> int | None:
    """What the control group leaves."""
    folder = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (folder / name for name in (limit, used))
            text = most.read_text().strip()
            if text.isdecimal() and int(text) < 1 << 60:
                return max(0, int(text) - int(now.read_text()) + _cached(folder))
        except OSError:
            continue
    return None


def _cached(folder: Path) -> int:
    """Bytes of files that the group's memory holds and can drop."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))


def _address_room() -> int | None:
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, most - pages * resource.getpagesize())
