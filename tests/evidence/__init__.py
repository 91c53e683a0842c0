"""Records, points and conditions made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rtp_runtime.readiness.metrics import METRICS, Point
from rtp_runtime.readiness.record import Conditions, ModelIdentity, Package, Record

ZERO = "0" * 64


def package(name: str, content: str = ZERO) -> Package:
    return Package(name=name, version="1", content=content)


def conditions(**changes: Any) -> Conditions:
    identity = ModelIdentity(name="m", given="./m", architecture="A", config=ZERO, weights=ZERO, text="")
    base = Conditions(
        model=identity,
        plugins=(package("p"),),
        runtime=package("rtp_runtime"),
        kernel=package("rtp_kernel"),
        versions={"python": "3", "torch": "2", "transformers": "5"},
        device="Chip",
        dtype="float32",
        layout="1",
        seed=0,
        machine="host",
        settings={},
    )
    return dataclasses.replace(base, **changes)


def record(kind: str = "check", result: str = "pass", second: int = 0, **changes: Any) -> Record:
    """A record; of a check one that is whole, unless `settings` or `numbers` say otherwise."""
    defaults: dict[str, Any] = {"numbers": {}, "settings": {}}
    if kind == "check":
        stages = {name: {"status": "MATCH", "measures": 3, "not_judged": []} for name in ("audit", "probes")}
        defaults["numbers"] = {"verdict": "MATCH", "required": ["audit", "probes"], "stages": stages}
        defaults["settings"] = {"random": False, "layers": None, "experts": None, "reference": None}
    given = defaults | {key: changes.pop(key) for key in ("numbers", "settings") if key in changes}
    return Record(
        kind=kind,
        result=result,
        summary=f"{kind} {result}",
        date=f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}Z",
        conditions=conditions(settings=given["settings"], **changes),
        numbers=given["numbers"],
    )


def point(batch: int = 8, prompt: int = 64, new_tokens: int = 16, **changes: Any) -> Point:
    """A valid point whose numbers are all 100, unless `metrics` says otherwise, without spread."""
    metrics: Mapping[str, float] = dict.fromkeys(METRICS, 100.0) | changes.pop("metrics", {})
    spread = dict.fromkeys(METRICS, 0.0) | changes.pop("spread", {})
    base = Point(batch=batch, prompt=prompt, new_tokens=new_tokens, repeats=5, metrics=metrics, spread=spread)
    return dataclasses.replace(base, **changes)


def bench_numbers(*points: Point) -> dict[str, Any]:
    return {"points": [each.to_json() for each in points]}
