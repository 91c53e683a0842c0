"""A run's record beside its baseline: what is missing on either side, and what is worse by more than is allowed.

Worse by more than the tolerance and by more than the noise is a regression. Worse by more than the tolerance but within
the noise cannot be told, and what cannot be told is missing, not green. Noise is the spread within either run, and what
baselines that were measured again under the same conditions, code included, differ by.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.ladder import SOUND
from rtp_runtime.readiness.metrics import METRICS, VALID, Point, point_name, read_points
from rtp_runtime.readiness.record import PASS, Record
from rtp_runtime.readiness.regress.baselines import different_conditions
from rtp_runtime.readiness.regress.cases import Case
from rtp_runtime.readiness.regress.report import INCOMPLETE, OK, REGRESSION, Change, Item
from rtp_runtime.readiness.store import Stored
from rtp_runtime.readiness.targets import Hardware

NO_BASELINE = "there is no baseline: rtp regress FILE --update writes one"


def expected_places(case: Case, kind: str) -> list[str]:
    """The places that a case promises: stages of its check, points of its bench."""
    from rtp_runtime.check.options import STAGES

    if kind == "check":
        return list(case.stages or STAGES)
    return [point_name((batch, prompt, case.bench.new_tokens)) for batch, prompt in sorted(case.bench.points)]


def not_run(case: Case, kind: str, why: str) -> list[Item]:
    """Every place of a run that failed."""
    return [
        Item(case=case.name, kind=kind, place=place, status=INCOMPLETE, why=(f"failed to run: {why}",), measured=False)
        for place in expected_places(case, kind)
    ]


def compare(case: Case, kind: str, now: Record, baselines: Sequence[Stored], hardware: Hardware) -> list[Item]:
    """Every place of a run beside its baseline: the first of `baselines`; the others are repetitions of it."""
    unusable = NO_BASELINE
    if baselines:
        newest = baselines[0]
        differences = different_conditions(now, newest.record, hardware)
        why = f"the baseline {newest.file} was made under other conditions: {'; '.join(differences)}"
        unusable = why if differences else ""
    usable = () if unusable else baselines
    if kind == "check":
        items = _check_items(case, now, usable[0].record.numbers if usable else {})
    else:
        items = _bench_items(case, now, usable)
    return [_without_baseline(item, unusable) if unusable else item for item in items]


def _without_baseline(item: Item, why: str) -> Item:
    """A place that nothing can be compared with: only what is wrong on its own remains a regression."""
    status = REGRESSION if item.status == REGRESSION else INCOMPLETE
    own = () if item.measured else item.why
    return Item(
        case=item.case,
        kind=item.kind,
        place=item.place,
        status=status,
        why=(*(item.why if status == REGRESSION else own), why),
        measured=item.measured,
    )


def _check_items(case: Case, now: Record, base: Mapping[str, Any]) -> Iterator[Item]:
    stages, before = _mapping(now.numbers.get("stages")), _mapping(base.get("stages"))
    for place in expected_places(case, "check"):
        stage = _mapping(stages.get(place))
        status, why, measured = _check_stage(stage, _mapping(before.get(place)), now)
        yield Item(case=case.name, kind="check", place=place, status=status, why=tuple(why), measured=measured)


def _check_stage(stage: Mapping[str, Any], base: Mapping[str, Any], now: Record) -> tuple[str, list[str], bool]:
    """(status, why, whether it was judged) of one stage."""
    status = stage.get("status")
    if status in ("WRONG", "DRIFT"):
        return REGRESSION, [now.summary], True
    if status not in SOUND:
        missing = ", ".join(_texts(stage.get("not_judged")) or ["the stage"])
        return INCOMPLETE, [f"not judged: {missing}"], False
    if not base:
        return INCOMPLETE, ["the baseline has no such stage"], True
    why: list[str] = []
    measures, expected = stage.get("measures"), base.get("measures")
    if not isinstance(measures, int) or not isinstance(expected, int) or measures < expected:
        why.append(f"{measures} quantities were compared, {expected} in the baseline")
    less = sorted(set(_texts(stage.get("not_judged"))) - set(_texts(base.get("not_judged"))))
    if less:
        why.append(f"not judged any more: {', '.join(less)}")
    return (INCOMPLETE if why else OK), why, True


def _bench_items(case: Case, now: Record, baselines: Sequence[Stored]) -> Iterator[Item]:
    points = {point.key: point for point in read_points(now.numbers, "this run")}
    before: dict[tuple[int, int, int], Point] = {}
    broken = ""
    try:
        before = _together([read_points(each.record.numbers, each.file) for each in baselines])
    except UsageError as error:
        broken = str(error)
    for batch, prompt in sorted(case.bench.points):
        key = (batch, prompt, case.bench.new_tokens)
        point, old = points.get(key), before.get(key)
        changes: tuple[Change, ...] = ()
        if point is None or point.status != VALID:
            status, why = INCOMPLETE, "the run has no such point" if point is None else f"{point.status}: {point.why}"
        elif broken or old is None or old.status != VALID:
            status, why = INCOMPLETE, broken or _unusable(old)
        else:
            changes = tuple(_changes(point, old, case.tolerances))
            status, why = _judge(changes)
        yield Item(
            case=case.name,
            kind="bench",
            place=point_name(key),
            status=status,
            why=(why,) if why else (),
            measured=point is not None and point.status == VALID,
            changes=changes,
        )


def _together(baselines: Sequence[Sequence[Point]]) -> dict[tuple[int, int, int], Point]:
    """The points of the newest baseline; where valid repetitions are there, their medians, and what they differ by."""
    found: dict[tuple[int, int, int], Point] = {}
    for newest in baselines[0] if baselines else ():
        same = [point for points in baselines for point in points if point.key == newest.key and point.status == VALID]
        if newest.status != VALID or len(same) < 2:
            found[newest.key] = newest
            continue
        values = {name: [point.metrics[name] for point in same] for name in METRICS}
        medians = {name: statistics.median(each) for name, each in values.items()}
        between = {name: (max(each) - min(each)) / medians[name] for name, each in values.items() if medians[name]}
        spread = {name: max(newest.spread.get(name, 0.0), between.get(name, 0.0)) for name in METRICS}
        found[newest.key] = replace(newest, metrics=medians, spread=spread)
    return found


def _unusable(old: Point | None) -> str:
    return "the baseline has no such point" if old is None else f"the baseline's measurement is {old.status}: {old.why}"


def _changes(point: Point, old: Point, tolerances: Mapping[str, float]) -> Iterator[Change]:
    for name, metric in METRICS.items():
        base, value = old.metrics[name], point.metrics[name]
        worse = metric.worse_by(value, base) if base > 0.0 else float(value != base)
        noise = max(point.spread.get(name, 0.0), old.spread.get(name, 0.0))
        allowed = tolerances[name]
        status = OK if worse <= allowed else INCOMPLETE if worse <= noise else REGRESSION
        yield Change(
            metric=name,
            value=value,
            baseline=base,
            worse_by=round(worse, 4),
            tolerance=allowed,
            noise=noise,
            status=status,
        )


def _judge(changes: tuple[Change, ...]) -> tuple[str, str]:
    """The status of a point, and the numbers that decide it."""
    worst = REGRESSION if any(change.status == REGRESSION for change in changes) else INCOMPLETE
    deciding = [change for change in changes if change.status == worst]
    if not deciding:
        return OK, ""
    words = [
        f"{change.metric} {METRICS[change.metric].show(change.value)}, baseline "
        f"{METRICS[change.metric].show(change.baseline)}: {change.worse_by:.0%} worse, allowed {change.tolerance:.0%}"
        + (f", within the noise of {change.noise:.0%}: not decided" if worst == INCOMPLETE else "")
        for change in deciding
    ]
    return worst, "; ".join(words)


def passed(record: Record, items: list[Item]) -> bool:
    """Whether a record may become a baseline: nothing in it is wrong, and every place was measured."""
    right = not any(item.status == REGRESSION and not item.changes for item in items)
    return right and all(item.measured for item in items) and (record.kind == "check" or record.result == PASS)


def _texts(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
