"""The ladder: how far a model has come, by evidence alone.

A state is reached when its own evidence holds and every state below it is reached. Evidence holds when it is fresh,
whole and passed; a fresh failure under any conditions stands against passes under others until it is repeated there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.metrics import NOT_RUN, VALID, Point, read_points
from rtp_runtime.readiness.record import FAIL, PASS, Record
from rtp_runtime.readiness.staleness import Staleness
from rtp_runtime.readiness.store import Evidence, Problem, Stored
from rtp_runtime.readiness.targets import Targets, Workload

STATE_OF = {
    "check": "correctness-ready",
    "bench": "performance-ready",
    "serve-conformance": "integration-ready",
    "canary": "canary-ready",
    "production": "production-ready",
}
"""The state that each kind of record is evidence for."""
STATES = ("available", *STATE_OF.values())
REACHED, BLOCKED, FAILED, STALE, INCOMPLETE, NO_EVIDENCE = (
    "reached", "blocked", "failed", "stale", "partial", "no evidence yet"
)  # fmt: skip

ANY_MODEL = "MODEL"
SOUND = ("MATCH", "TIE-FLIP")
"""Verdicts of a check, and of a stage, that are a pass."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A record as the ladder shows it, with what makes it stale."""

    stored: Stored
    staleness: Staleness

    @property
    def record(self) -> Record:
        return self.stored.record

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "file": self.stored.file,
            "kind": record.kind,
            "result": record.result,
            "summary": record.summary,
            "date": record.date,
            "fresh": self.staleness.fresh,
            "stale_because": list(self.staleness.reasons),
            "notes": list(self.staleness.notes),
            "conditions": record.conditions.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Rung:
    """One state: whether its own evidence holds, on what, and what comes next."""

    state: str
    status: str
    """Of its own evidence; `Ladder` turns "reached" into "blocked" where a state below is not reached."""
    why: tuple[str, ...] = ()
    evidence: tuple[Shown, ...] = ()
    """The records that decide, the most important first."""
    next: str = ""
    """The command, or what to do."""

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "status": self.status,
            "why": list(self.why),
            "evidence": [shown.to_json() for shown in self.evidence],
            "next": self.next,
        }


@dataclass(frozen=True, slots=True)
class Available:
    """Whether a plugin serves the model and the audit of its weights is clean, found out now."""

    ok: bool
    words: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class Ladder:
    """All states in order."""

    rungs: tuple[Rung, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reached(self) -> str | None:
        """The highest state that is reached; None where not even the first is."""
        states = [rung.state for rung in self.rungs if rung.status == REACHED]
        return states[-1] if states else None

    def has(self, state: str) -> bool:
        return any(rung.state == state and rung.status == REACHED for rung in self.rungs)

    @property
    def next(self) -> str:
        """What the first state that is not reached asks for."""
        return next((rung.next for rung in self.rungs if rung.status != REACHED), "")


def climb(
    available: Available,
    evidence: Evidence,
    stale: Callable[[Record], Staleness],
    targets: Targets | None,
    model: str = ANY_MODEL,
) -> Ladder:
    """The ladder of a model, from its records (`evidence` holds those that concern it) and targets."""
    newest_first = sorted(evidence.records, key=lambda each: (each.record.date, each.file), reverse=True)
    shown = [Shown(stored, stale(stored.record)) for stored in newest_first]
    problems = list(evidence.problems)
    rungs = [Rung("available", REACHED if available.ok else FAILED, (available.words,), (), available.next)]
    for kind in STATE_OF:
        mine = [each for each in shown if each.record.kind == kind]
        if kind == "bench":
            rungs.append(_performance(mine, targets, model, problems))
        else:
            rungs.append(_by_result(kind, mine, model))
    return Ladder(tuple(_in_order(rungs)), tuple(dict.fromkeys(problems)))


def _in_order(rungs: Sequence[Rung]) -> list[Rung]:
    """A state whose own evidence holds is blocked while one below it is not reached."""
    found: list[Rung] = []
    below: str | None = None
    for rung in rungs:
        if rung.status == REACHED and below is not None:
            rung = Rung(rung.state, BLOCKED, (*rung.why, f"{below} is not reached"), rung.evidence, rung.next)
        elif rung.status != REACHED and below is None:
            below = rung.state
        found.append(rung)
    return found


def newest_of_each(shown: Sequence[Shown]) -> list[Shown]:
    """Of the records under the same conditions the newest; they come, and go, newest first."""
    newest: dict[str, Shown] = {}
    for each in shown:
        newest.setdefault(each.record.conditions.digest, each)
    return list(newest.values())


def _by_result(kind: str, shown: list[Shown], model: str) -> Rung:
    state, then = STATE_OF[kind], _next_command(kind, model)
    fresh = newest_of_each([each for each in shown if each.staleness.fresh])
    failed = [each for each in fresh if each.record.result == FAIL]
    passed = [each for each in fresh if each.record.result == PASS and not shortfall(each.record)]
    if failed:
        words = tuple(f"{each.record.summary} ({_where(each.record)})" for each in failed)
        return Rung(state, FAILED, words, (*failed, *passed[:1]), f"correct it, then {then}")
    if passed:
        return Rung(state, REACHED, (passed[0].record.summary,), (passed[0],))
    if fresh:
        newest = fresh[0]
        return Rung(state, INCOMPLETE, (newest.record.summary, *shortfall(newest.record)), (newest,), then)
    if shown:
        return Rung(state, STALE, shown[0].staleness.reasons, (shown[0],), then)
    return Rung(state, NO_EVIDENCE, (), (), then)


def shortfall(record: Record) -> list[str]:
    """What keeps a check from being evidence for the whole model, however it ended."""
    if record.kind != "check":
        return []
    settings, numbers = record.conditions.settings, record.numbers
    found: list[str] = []
    if settings.get("random", True):
        found.append("its weights were random")
    if settings.get("layers") is not None or settings.get("experts") is not None:
        found.append(f"the model was cut (layers {settings.get('layers')}, experts {settings.get('experts')})")
    if settings.get("reference") is not None:
        found.append("the reference ran another checkpoint")
    stages, required = numbers.get("stages"), numbers.get("required")
    for name in map(str, required) if isinstance(required, list) and required else ("all stages",):
        stage = stages.get(name) if isinstance(stages, dict) else None
        if not isinstance(stage, dict) or str(stage.get("status")) not in SOUND:
            found.append(f"the stage {name} did not match")
    if str(numbers.get("verdict")) not in SOUND:
        found.append(f"its verdict is {numbers.get('verdict')}")
    return found


def _performance(shown: list[Shown], targets: Targets | None, model: str, problems: list[Problem]) -> Rung:
    state = STATE_OF["bench"]
    if targets is None:
        why = ("there are no targets to compare with",)
        then = "write targets (--targets FILE, or .rtp/targets.toml), then rtp bench"
        return Rung(state, INCOMPLETE if shown else NO_EVIDENCE, why, tuple(shown[:1]), then)
    here = [each for each in shown if targets.hardware.matches(each.record.conditions)]
    points = {id(each): _points(each, problems) for each in here}
    answers = [_judge(workload, here, points) for workload in targets.workloads]
    statuses = [status for status, _, _ in answers]
    status = next((each for each in (FAILED, NO_EVIDENCE, STALE, INCOMPLETE) if each in statuses), REACHED)
    if status == NO_EVIDENCE and set(statuses) != {NO_EVIDENCE}:
        status = INCOMPLETE
    used = tuple({id(each): each for _, _, each in answers if each is not None}.values())
    missing = [workload for workload, each in zip(targets.workloads, statuses, strict=True) if each != REACHED]
    then = "" if status == REACHED else _bench_command(missing, model)
    return Rung(state, status, tuple(words for _, words, _ in answers), used, then)


def _judge(workload: Workload, here: list[Shown], points: dict[int, list[Point]]) -> tuple[str, str, Shown | None]:
    """One workload against the newest fresh record that holds its point."""
    name = workload.describe()
    stale: Shown | None = None
    for each in here:
        dtype = each.record.conditions.dtype
        point = next((point for point in points[id(each)] if point.key == workload.key), None)
        if point is None or (workload.dtype and workload.dtype != dtype):
            continue
        if not each.staleness.fresh:
            stale = stale or each
        elif point.status != VALID:
            return (
                (NO_EVIDENCE if point.status == NOT_RUN else INCOMPLETE),
                f"{name}: {point.status}: {point.why}",
                each,
            )
        else:
            broken = workload.broken(point)
            return (FAILED, f"{name}: {'; '.join(broken)}", each) if broken else (REACHED, f"{name}: kept", each)
    if stale is not None:
        return STALE, f"{name}: stale", stale
    return NO_EVIDENCE, f"{name}: never measured on this hardware profile", None


def _points(shown: Shown, problems: list[Problem]) -> list[Point]:
    try:
        return read_points(shown.record.numbers, shown.stored.file)
    except UsageError as error:
        problems.append(Problem(shown.stored.file, str(error).removeprefix(f"{shown.stored.file}: ")))
        return []


def _bench_command(workloads: Sequence[Workload], model: str) -> str:
    """One command where one covers every missing point, and else the one for the first of them."""
    new_tokens = {workload.key[2] for workload in workloads}
    chosen = workloads if len(new_tokens) == 1 else workloads[:1]
    batches = ",".join(str(each) for each in sorted({workload.key[0] for workload in chosen}))
    prompts = ",".join(str(each) for each in sorted({workload.key[1] for workload in chosen}))
    dtype = f" --dtype {chosen[0].dtype}" if chosen[0].dtype else ""
    words = f"rtp bench {model} --batch {batches} --prompt {prompts} --new-tokens {chosen[0].key[2]}{dtype} --record"
    return words


def _next_command(kind: str, model: str) -> str:
    if kind == "check":
        return f"rtp check {model} --record"
    return f"record it through rtp_runtime.readiness.record({kind!r}, …); no command of rtp does yet"


def _where(record: Record) -> str:
    conditions = record.conditions
    return f"{record.date}, {conditions.device}, {conditions.dtype}, {conditions.machine}"
