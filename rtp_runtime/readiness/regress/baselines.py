"""What runs are compared with: records in a directory of their own, and a list of all that was ever covered there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.record import Record
from rtp_runtime.readiness.store import Evidence, EvidenceStore, Stored, write_atomically
from rtp_runtime.readiness.targets import Hardware

HEADER = "# Places that rtp regress has covered; one that is missing later is named. Only --update takes lines away."


@dataclass(frozen=True, slots=True)
class Baselines:
    """The baselines of one hardware profile, read once."""

    store: EvidenceStore
    hardware: str
    evidence: Evidence

    @classmethod
    def open(cls, directory: Path, hardware: str) -> Baselines:
        """
        Raises:
            UsageError: something that is there and is no directory.
        """
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"{directory}: is no directory: baselines are kept in a directory of their own")
        store = EvidenceStore(directory)
        return cls(store, hardware, store.read())

    @property
    def problems(self) -> list[str]:
        """Files that may be the baseline that counts, and cannot be read."""
        return [f"baseline {problem.file}: {problem.why}" for problem in self.evidence.problems]

    def find(self, case: str, kind: str) -> list[Stored]:
        """The newest baseline of a case, then those before it under the same conditions: repetitions of it."""
        found = [
            each
            for each in self.evidence.records
            if each.record.kind == kind
            and each.record.conditions.settings.get("case") == case
            and each.record.conditions.settings.get("hardware") == self.hardware
        ]
        newest = found[-1].record.conditions.digest if found else ""
        return [each for each in reversed(found) if each.record.conditions.digest == newest]

    def covered(self) -> set[str]:
        """Names of places that runs have covered since the last update.

        Raises:
            UsageError: a coverage file that cannot be read.
        """
        file = self.coverage_file
        if not file.exists():
            return set()
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}: cannot be read ({error}): restore it, or write it anew with --update") from error
        if not lines or lines[0] != HEADER or any(line.count(" · ") != 2 for line in lines[1:] if line):
            raise UsageError(f"{file}: is not a list of covered places: restore it, or write it anew with --update")
        return {line for line in lines[1:] if line}

    def write_covered(self, names: Iterable[str]) -> None:
        """
        Raises:
            UsageError: the directory cannot be written.
        """
        try:
            self.store.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.coverage_file, "\n".join([HEADER, *sorted(set(names))]) + "\n")
        except OSError as error:
            raise UsageError(f"{self.coverage_file}: cannot be written ({error.strerror})") from error

    @property
    def coverage_file(self) -> Path:
        slug = re.sub(r"[^a-z0-9]+", "-", self.hardware.lower()).strip("-")
        digest = hashlib.sha256(self.hardware.encode()).hexdigest()[:6]
        return self.store.directory / f"coverage-{slug or 'hardware'}-{digest}.txt"


def different_conditions(now: Record, base: Record, hardware: Hardware) -> list[str]:
    """Why a baseline does not apply to a run: another checkpoint, dtype or way to measure. Code may differ."""
    ours, theirs = now.conditions, base.conditions
    found = [
        f"another checkpoint ({part} differ)"
        for part in ("config", "weights")
        if getattr(ours.model, part) != getattr(theirs.model, part)
    ]
    for name in ("dtype", "layout", "seed"):
        if getattr(ours, name) != getattr(theirs, name):
            found.append(f"{name} {getattr(theirs, name)}, now {getattr(ours, name)}")
    if now.kind == "bench":
        if not hardware.matches(theirs):
            found.append(f"{theirs.device} of {theirs.machine}, which is not the hardware profile")
        names = ("deterministic", "warmup", "max_model_len", "threads")
        pairs = [(name, theirs.settings.get(name), ours.settings.get(name)) for name in names]
        found += [f"{name} {before}, now {after}" for name, before, after in pairs if before != after]
    return found
