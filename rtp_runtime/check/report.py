"""The result of a check as data: findings, stages, coverage and the verdict, and their JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MATCH, TIE_FLIP, DRIFT, WRONG = "MATCH", "TIE-FLIP", "DRIFT", "WRONG"
NOT_JUDGED, INCONSISTENT = "NOT-JUDGED", "REFERENCE-INCONSISTENT"
EXITS = {MATCH: 0, TIE_FLIP: 0, DRIFT: 1, WRONG: 1, NOT_JUDGED: 2, INCONSISTENT: 2}
SCHEMA_VERSION = "1"
"""Of the JSON form (`report.schema.json`); raised when a key changes its meaning or goes."""
TOKEN_STAGES = ("greedy", "modes")
"""Stages whose ties are tokens that came out otherwise; ties inside (experts, places) change no verdict."""
NOT_FINITE = 1e308
"""Stands in JSON for an error that is not a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What made a difference: a known mistake that explains it, the closest one, or none."""

    status: Literal["named", "closest", "unknown", "not judged"]
    kind: str = ""
    """The mistake's name in the catalogue (`rtp_runtime.check.causes`); empty when unknown."""
    words: str = ""
    """A sentence: what ours does, and what the reference does."""
    fix: str = ""
    """What to change."""
    coefficient: float | None = None
    """<our error, the mistake's effect> / <effect, effect>: 1 when the error is the mistake."""
    remaining: float | None = None
    """Relative error at the module against the reference with the same mistake."""
    effect: float | None = None
    """Relative size of the mistake's effect at the module."""

    def to_json(self) -> dict[str, Any]:
        return {name: finite(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One difference beyond its tolerance."""

    stage: str
    module: str
    """The reference's dotted name."""
    layer: int | None
    error: float
    """Relative error of the module's output, or what `what` says."""
    tolerance: float
    what: str
    """Which quantity differs, e.g. "q after the rotary embedding"."""
    detail: str = ""
    cause: bool = True
    """Whether its inputs agree: the fault is here, not upstream."""
    rank: float = 0.0
    """Place in execution order."""
    verdict: str = WRONG
    """WRONG, or DRIFT where only rounding is worse than the reference's."""

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "module": self.module,
            "layer": self.layer,
            "error": finite(self.error),
            "tolerance": self.tolerance,
            "stage": self.stage,
            "what": self.what,
            "detail": self.detail,
            "inputs_agree": self.cause,
        }


@dataclass(frozen=True, slots=True)
class Inconsistency:
    """Two runs of the reference that should agree and do not: nothing of ours is compared."""

    path: str
    against: str
    prompt: str
    logits_error: float
    """max difference of logits over their standard deviation."""
    token: int | None
    """The first token at which they differ by more than noise."""
    module: str | None
    """The first module that differs although both runs gave its layer the same input."""
    module_error: float
    raised: str = ""
    """What the first run raised, where it gave nothing to compare."""

    def to_json(self) -> dict[str, Any]:
        return {name: finite(getattr(self, name)) for name in self.__slots__} | {"words": self.describe()}

    def describe(self) -> str:
        """The two runs, where they part and how far, in a sentence."""
        if self.raised:
            return f"{self.path} fails where {self.against} does not: {self.raised} ({self.prompt})"
        where = f", first at token {self.token}" if self.token is not None else ""
        module = f", in {self.module} (relative error {self.module_error:.1e})" if self.module else ""
        return (
            f"{self.path} and {self.against} differ by {self.logits_error:.1e} standard deviations of the logits"
            f"{where}{module} ({self.prompt})"
        )


@dataclass(frozen=True, slots=True)
class NotJudged:
    """Something that could not be compared, and why. `required`: without it the check cannot pass."""

    what: str
    why: str
    required: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "why": self.why, "required": self.required}


@dataclass(frozen=True, slots=True)
class Measure:
    """One compared quantity: for the picture and the table of numbers."""

    name: str
    """The module's dotted name, or what was compared."""
    layer: int | None
    column: str
    """The name inside its layer, and the quantity where it is not the output."""
    error: float
    tolerance: float
    inputs_agree: bool = True
    worst_token: int | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layer": self.layer,
            "column": self.column,
            "error": finite(self.error),
            "tolerance": finite(self.tolerance),
            "inputs_agree": self.inputs_agree,
            "worst_token": self.worst_token,
        }


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the axis of positions: a window's length, a chunk's end, the length that a rope was stretched from."""

    position: int
    words: str

    def to_json(self) -> dict[str, Any]:
        return {"position": self.position, "words": self.words}


@dataclass(frozen=True, slots=True)
class Curve:
    """Error by token position over one prompt; of many tokens, the largest error of each stretch."""

    name: str
    """The module's dotted name, or "logits"."""
    what: str
    """Which quantity, or in which execution mode."""
    layer: int | None
    prompt: str
    positions: tuple[int, ...]
    """Rising; at most 512."""
    errors: tuple[float, ...]
    tolerance: float
    marks: tuple[Mark, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "layer": self.layer,
            "prompt": self.prompt,
            "positions": list(self.positions),
            "errors": [finite(error) for error in self.errors],
            "tolerance": self.tolerance,
            "marks": [mark.to_json() for mark in self.marks],
        }


@dataclass(frozen=True, slots=True)
class ModeCell:
    """One prompt in one execution mode, or a mode that was not run (`prompt` is empty then)."""

    mode: str
    prompt: str
    result: Literal["pass", "tie", "wrong", "not run"]
    error: float | None = None
    tolerance: float | None = None
    why: str = ""
    """Why it was not run, or what was different."""

    def to_json(self) -> dict[str, Any]:
        return {name: finite(getattr(self, name)) for name in self.__slots__}


@dataclass(slots=True)
class StageResult:
    """What one stage compared and found."""

    name: str
    summary: str = ""
    findings: list[Finding] = field(default_factory=list)
    not_judged: list[NotJudged] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Ties and other observations that decide nothing."""
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    left_out: bool = False
    num_ties: int = 0
    """Tokens or choices that differ among equals."""
    curves: list[Curve] = field(default_factory=list)
    cells: list[ModeCell] = field(default_factory=list)
    """Of the stage modes: what each prompt gave in each execution mode."""

    @property
    def status(self) -> str:
        if self.findings:
            return worst_verdict(self.findings)
        return NOT_JUDGED if self.left_out or any(item.required for item in self.not_judged) else MATCH

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "summary": self.summary,
            "seconds": round(self.seconds, 3),
            "numbers": {key: finite(value) for key, value in self.numbers.items()},
            "measures": [measure.to_json() for measure in self.measures],
            "curves": [curve.to_json() for curve in self.curves],
            "cells": [cell.to_json() for cell in self.cells],
            "findings": [finding.to_json() for finding in self.findings],
            "not_judged": [item.to_json() for item in self.not_judged],
            "notes": self.notes,
            "num_ties": self.num_ties,
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything a check says. `failed` is in execution order."""

    model: str
    reference: str
    stages: tuple[StageResult, ...]
    coverage: Mapping[str, Any]
    conditions: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float = 0.0
    inconsistent: tuple[Inconsistency, ...] = ()
    """Where the reference disagrees with itself by more than noise."""
    judged_by: str = "one full forward of the reference"
    """The sound path that judged us; empty where the reference has none."""
    cause: Cause | None = None
    """Of the first wrong finding."""

    @property
    def failed(self) -> list[Finding]:
        """All findings in execution order; at one place, the earlier stage first."""
        findings = [finding for stage in self.stages for finding in stage.findings]
        return sorted(findings, key=lambda finding: finding.rank)

    @property
    def first_wrong(self) -> Finding | None:
        """The first finding whose inputs agree; where there is none, the first."""
        failed = self.failed
        return next((finding for finding in failed if finding.cause), failed[0] if failed else None)

    @property
    def not_judged(self) -> list[NotJudged]:
        return [item for stage in self.stages for item in stage.not_judged]

    @property
    def verdict(self) -> str:
        if not self.judged_by:
            return INCONSISTENT
        if self.failed:
            return worst_verdict(self.failed)
        if any(item.required for item in self.not_judged):
            return NOT_JUDGED
        return TIE_FLIP if any(stage.num_ties for stage in self.stages if stage.name in TOKEN_STAGES) else MATCH

    @property
    def exit(self) -> int:
        return EXITS[self.verdict]

    def to_json(self) -> dict[str, Any]:
        first = self.first_wrong
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "exit": self.exit,
            "model": self.model,
            "reference": self.reference,
            "first_wrong": first.to_json() if first else None,
            "cause": self.cause.to_json() if self.cause else None,
            "failed": [finding.to_json() for finding in self.failed],
            "not_judged": [item.to_json() for item in self.not_judged],
            "reference_inconsistent": [item.to_json() for item in self.inconsistent],
            "judged_by": self.judged_by,
            "stages": [stage.to_json() for stage in self.stages],
            "coverage": dict(self.coverage),
            "conditions": dict(self.conditions),
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 2),
        }


def worst_verdict(findings: Sequence[Finding]) -> str:
    """WRONG if any finding is, else DRIFT."""
    return WRONG if any(finding.verdict == WRONG for finding in findings) else DRIFT


def finite(value: Any) -> Any:
    """`value`, with numbers that JSON cannot hold replaced, inside of mappings too."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return NOT_FINITE if isinstance(value, float) and not math.isfinite(value) else value
