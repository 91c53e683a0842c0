"""What `rtp regress` found: every expected place, whether it was compared, and what is worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OK, REGRESSION, INCOMPLETE = "ok", "regression", "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One number beside its baseline."""

    metric: str
    value: float
    baseline: float
    worse_by: float
    """Share of the baseline; negative: better."""
    tolerance: float
    noise: float
    """The larger spread of the two."""
    status: str

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One place that is expected, or was covered before: a stage of a check, a point of a bench."""

    case: str
    kind: str
    place: str
    status: str
    why: tuple[str, ...] = ()
    measured: bool = True
    """Whether this run has a valid result here."""
    changes: tuple[Change, ...] = ()

    @property
    def name(self) -> str:
        return item_name(self.case, self.kind, self.place)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "kind": self.kind,
            "place": self.place,
            "status": self.status,
            "why": list(self.why),
            "measured": self.measured,
            "changes": [change.to_json() for change in self.changes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressReport:
    """All places, and everything else that keeps the run from being complete."""

    file: str
    hardware: str
    items: tuple[Item, ...]
    problems: tuple[str, ...] = ()
    """About baselines and coverage as a whole."""
    updated: tuple[str, ...] = ()
    """Files of baselines that were written."""
    seconds: float = 0.0

    @property
    def regressions(self) -> list[Item]:
        return [item for item in self.items if item.status == REGRESSION]

    @property
    def incomplete(self) -> list[Item]:
        return [item for item in self.items if item.status == INCOMPLETE]

    @property
    def complete(self) -> bool:
        return bool(self.items) and not self.incomplete and not self.problems

    @property
    def exit(self) -> int:
        """0: complete and within the tolerances; 1: something is worse; 2: something is missing."""
        return 1 if self.regressions else 0 if self.complete else 2

    @property
    def verdict(self) -> str:
        return {0: "within tolerances", 1: "regression", 2: "incomplete"}[self.exit]

    @property
    def completeness(self) -> str:
        """How much of what is expected was compared, in words."""
        compared = sum(item.status != INCOMPLETE for item in self.items)
        words = f"{compared} of {len(self.items)} expected places compared"
        return words if self.complete else f"{words}; {len(self.incomplete) + len(self.problems)} things are missing"

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "exit": self.exit,
            "file": self.file,
            "hardware": self.hardware,
            "complete": self.complete,
            "completeness": self.completeness,
            "regressions": [item.name for item in self.regressions],
            "missing": [f"{item.name}: {'; '.join(item.why)}" for item in self.incomplete],
            "problems": list(self.problems),
            "items": [item.to_json() for item in self.items],
            "updated": list(self.updated),
            "seconds": round(self.seconds, 2),
        }


def item_name(case: str, kind: str, place: str) -> str:
    """The place in one line, as coverage files hold it."""
    return f"{case} · {kind} · {place}"
