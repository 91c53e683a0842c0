"""Targets of speed and size: a small TOML file of workloads with limits on a named hardware profile.

schema = 1

[hardware]
name = "one H200"
device = "NVIDIA H200*"

[[workloads]]
name = "chat"
batch = 8
prompt = 512
new_tokens = 128

[workloads.limits]
ttft_ms_p99 = 400
throughput_tok_s = 600
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rtp_runtime.readiness.declarative import Table, read_toml
from rtp_runtime.readiness.metrics import METRICS, Point, point_name
from rtp_runtime.readiness.record import Conditions

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A profile that measurements are compared on."""

    name: str
    device: str
    """A pattern (* and ?) of the device's own name, as `rtp bench` shows it."""
    machine: str = "*"
    """A pattern of the machine: host, processors, system."""

    def matches(self, conditions: Conditions) -> bool:
        return self.fits(conditions.device, conditions.machine)

    def fits(self, device: str, machine: str) -> bool:
        """Whether these are its device and machine, whatever the case of their letters."""
        pairs = ((device, self.device), (machine, self.machine))
        return all(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for name, pattern in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A point and what it must keep. `dtype` empty: any."""

    name: str
    key: tuple[int, int, int]
    """batch, prompt, new tokens."""
    limits: Mapping[str, float]
    dtype: str = ""

    def broken(self, point: Point) -> list[str]:
        """Limits that a valid point exceeds, in words."""
        found: list[str] = []
        for name, limit in self.limits.items():
            metric, value = METRICS[name], point.metrics[name]
            if not metric.within(value, limit):
                bound = "at least" if metric.higher_is_better else "at most"
                found.append(f"{name} {metric.show(value)}, allowed {bound} {metric.show(limit)}")
        return found

    def describe(self) -> str:
        return f"{self.name} ({point_name(self.key)}{', ' + self.dtype if self.dtype else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """All workloads of one file."""

    file: str
    hardware: Hardware
    workloads: tuple[Workload, ...]


def read_targets(file: Path) -> Targets:
    """
    Raises:
        UsageError: a file that is not one of targets; the message says where and what would be right.
    """
    top = read_toml(file, SCHEMA)
    hardware = read_hardware(top.table("hardware"))
    workloads = top.named("workloads", _workload)
    top.finish()
    return Targets(file=str(file), hardware=hardware, workloads=workloads)


def read_hardware(table: Table) -> Hardware:
    """A `[hardware]` table."""
    found = Hardware(name=table.string("name"), device=table.string("device"), machine=table.string("machine", "*"))
    table.finish()
    return found


def _workload(table: Table) -> Workload:
    name = table.string("name")
    key = (
        table.integer("batch", low=1),
        table.integer("prompt", low=1),
        table.integer("new_tokens", low=2),
    )
    limits = table.table("limits")
    values = {metric: limits.number(metric, None, open_low=True) for metric in METRICS}
    limits.finish()
    given = {metric: value for metric, value in values.items() if value is not None}
    if not given:
        raise table.refuse("limits", f"limits nothing: give at least one of {', '.join(METRICS)}")
    dtype = table.string("dtype", "")
    table.finish()
    return Workload(name=name, key=key, limits=given, dtype=dtype)
