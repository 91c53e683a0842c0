"""The ladder by hand-made records: each state's own evidence, and that nothing else ever reads as green."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from evidence import bench_numbers, package, point, record
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.ladder import STATE_OF, STATES, Available, Ladder, climb
from rtp_runtime.readiness.metrics import INVALID, NOT_RUN
from rtp_runtime.readiness.record import KINDS, RESULTS, Record
from rtp_runtime.readiness.staleness import Staleness
from rtp_runtime.readiness.store import Evidence, Stored
from rtp_runtime.readiness.targets import Hardware, Targets, Workload, read_targets

STALE = "f" * 64
"""Content of a runtime that is not the one here."""
TARGETS = Targets(
    file="t",
    hardware=Hardware(name="h", device="Chip*"),
    workloads=(Workload(name="chat", key=(8, 64, 16), limits={"throughput_tok_s": 50.0, "ttft_ms_p50": 150.0}),),
)


def old(one: Record) -> Record:
    changed = dataclasses.replace(one.conditions, runtime=package("rtp_runtime", STALE))
    return dataclasses.replace(one, conditions=changed)


def stale(one: Record) -> Staleness:
    return Staleness(("runtime content changed",) if one.conditions.runtime.content == STALE else ())


def ladder(*records: Record, targets: Targets | None = TARGETS, ok: bool = True) -> Ladder:
    stored = tuple(Stored(one, f"{number}.json") for number, one in enumerate(records))
    return climb(Available(ok, "words"), Evidence(stored), stale, targets, "MODEL")


def good(kind: str, **changes: Any) -> Record:
    return record(kind, numbers=bench_numbers(point()), **changes) if kind == "bench" else record(kind, **changes)


def status(found: Ladder, kind: str) -> str:
    return next(rung.status for rung in found.rungs if rung.state == STATE_OF[kind])


def test_all_states_with_all_evidence() -> None:
    found = ladder(*(good(kind) for kind in KINDS))
    assert [rung.state for rung in found.rungs] == list(STATES)
    assert found.reached == "production-ready"
    assert found.next == ""


def test_nothing() -> None:
    found = ladder(targets=None)
    assert found.reached == "available"
    assert found.next == "rtp check MODEL --record"
    assert [rung.status for rung in found.rungs] == ["reached", *["no evidence yet"] * 5]
    assert ladder(*(good(kind) for kind in KINDS), ok=False).reached is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_blocked_by_those_below(kind: str) -> None:
    found = ladder(*(good(each) for each in KINDS if each != kind))
    below = STATES[STATES.index(STATE_OF[kind]) - 1]
    assert found.reached == below
    assert all(rung.status == "blocked" for rung in found.rungs if STATES.index(rung.state) > STATES.index(below) + 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"settings": {"random": True, "layers": None, "experts": None, "reference": None}}, "random"),
        ({"settings": {"random": False, "layers": "4", "experts": None, "reference": None}}, "cut"),
        ({"settings": {"random": False, "layers": None, "experts": 2, "reference": None}}, "cut"),
        ({"settings": {"random": False, "layers": None, "experts": None, "reference": "x"}}, "another checkpoint"),
        ({"settings": {}}, "random"),
        ({"numbers": {}}, "stage"),
        ({"numbers": {"verdict": "MATCH", "required": ["audit"], "stages": {}}}, "audit"),
        (
            {"numbers": {"verdict": "NOT-JUDGED", "required": ["a"], "stages": {"a": {"status": "MATCH"}}}},
            "NOT-JUDGED",
        ),
    ],
)
def test_a_check_that_is_not_whole_is_partial_evidence(changes: dict[str, Any], why: str) -> None:
    found = ladder(record(**changes))
    assert status(found, "check") == "partial"
    assert any(why in words for words in found.rungs[1].why)


def test_the_newest_of_the_same_conditions_counts() -> None:
    assert status(ladder(record(result="fail", second=1), record(second=2)), "check") == "reached"
    assert status(ladder(record(second=1), record(result="fail", second=2)), "check") == "failed"
    assert status(ladder(record(second=1), record(result="partial", second=2)), "check") == "partial"


def test_a_failure_elsewhere_stands_against_a_later_pass() -> None:
    failed = record(result="fail", machine="other", second=1)
    assert status(ladder(failed, record(second=2)), "check") == "failed"
    assert status(ladder(failed, record(second=2), record(machine="other", second=3)), "check") == "reached"
    assert status(ladder(old(failed), record(second=2)), "check") == "reached"


def test_stale_evidence_says_why() -> None:
    found = ladder(old(record()))
    assert status(found, "check") == "stale"
    assert found.rungs[1].why == ("runtime content changed",)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (point(), "reached"),
        (point(metrics={"throughput_tok_s": 49.0}), "failed"),
        (point(metrics={"ttft_ms_p50": 151.0}), "failed"),
        (point(metrics={"ttft_ms_p50": 150.0, "throughput_tok_s": 50.0, "memory_mb": 1e9}), "reached"),
        (point(status=INVALID, why="noisy"), "partial"),
        (point(status=NOT_RUN, why="too large", metrics={}), "no evidence yet"),
        (point(batch=4), "no evidence yet"),
    ],
)
def test_performance_is_compared_with_targets(one: Any, expected: str) -> None:
    found = ladder(record(), record("bench", numbers=bench_numbers(one)))
    assert status(found, "bench") == expected


def test_performance_on_other_hardware_or_without_targets_counts_for_nothing() -> None:
    assert status(ladder(record(), good("bench", device="Other")), "bench") == "no evidence yet"
    found = ladder(record(), good("bench"), targets=None)
    assert status(found, "bench") == "partial"
    assert "targets" in found.next


def test_a_newer_measurement_counts_and_numbers_that_are_none_are_named() -> None:
    slow = record("bench", numbers=bench_numbers(point(metrics={"throughput_tok_s": 1.0})), second=5)
    assert status(ladder(record(), good("bench"), slow), "bench") == "failed"
    assert status(ladder(record(), good("bench", second=6), slow), "bench") == "reached"
    broken = record("bench", numbers={"points": [{"batch": 8}]}, second=9)
    found = ladder(record(), broken)
    assert status(found, "bench") == "no evidence yet"
    assert [problem.file for problem in found.problems] == ["1.json"]


KEYS = ("host a", "host b")
WHOLE = {"random": False, "layers": None, "experts": None, "reference": None}


@st.composite
def records(draw: st.DrawFn) -> Record:
    kind = draw(st.sampled_from(KINDS))
    changes: dict[str, Any] = {"machine": draw(st.sampled_from(KEYS)), "second": draw(st.integers(0, 99))}
    if kind == "bench":
        speed, state = draw(st.sampled_from([10.0, 100.0])), draw(st.sampled_from(["valid", INVALID, NOT_RUN]))
        measured = point(batch=draw(st.sampled_from([4, 8])), metrics={"throughput_tok_s": speed}, status=state)
        changes["numbers"] = bench_numbers(measured)
    elif kind == "check":
        changes["settings"] = WHOLE | draw(st.sampled_from([{}, {}, {"random": True}, {"layers": "2"}]))
    one = record(kind, draw(st.sampled_from(RESULTS)), **changes)
    return old(one) if draw(st.booleans()) else one


@given(st.lists(records(), max_size=14))
@settings(max_examples=250, deadline=None)
def test_never_green_without_fresh_whole_passes(given_records: list[Record]) -> None:
    found = ladder(*given_records)
    fresh = [one for one in given_records if not stale(one).reasons]
    for kind in KINDS[: STATES.index(found.reached or "available")]:
        mine = [one for one in fresh if one.kind == kind]
        if kind == "bench":
            points = [(one.date, one.numbers["points"][0]) for one in mine]
            here = [each for each in points if each[1]["batch"] == 8]
            newest = max(date for date, _ in here)
            last = [each for date, each in here if date == newest]
            assert any(each["status"] == "valid" and each["metrics"]["throughput_tok_s"] == 100.0 for each in last)
            continue
        whole = [one for one in mine if kind != "check" or one.conditions.settings == WHOLE]
        assert any(one.result == "pass" for one in whole)
        for digest in {one.conditions.digest for one in mine}:
            same = [one for one in mine if one.conditions.digest == digest]
            newest = max(one.date for one in same)
            # Of several of one second the store lets none through; here either may count.
            assert not all(one.result == "fail" for one in same if one.date == newest)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KNOWN = st.sampled_from(["verdict", "required", "stages", "points", "random", "layers", "reference"])


@given(st.sampled_from(KINDS), st.dictionaries(KNOWN, JSON), st.dictionaries(KNOWN, JSON))
@settings(max_examples=100, deadline=None)
def test_numbers_of_any_shape_never_stop_it(kind: str, numbers: dict[str, Any], conditions: dict[str, Any]) -> None:
    found = ladder(record(kind, numbers=numbers, settings=conditions))
    assert len(found.rungs) == 6
    assert not (kind in ("check", "bench") and found.has(STATE_OF[kind]))


@given(st.lists(records(), max_size=10), st.sampled_from([kind for kind in KINDS if kind != "bench"]))
@settings(max_examples=100, deadline=None)
def test_a_fresh_failure_takes_the_state_away(given_records: list[Record], kind: str) -> None:
    failure = record(kind, "fail", second=100)
    assert not ladder(*given_records, failure).has(STATE_OF[kind])


TOML = """\
schema = 1
[hardware]
name = "h"
device = "Chip"

[[workloads]]
name = "chat"
batch = 8
prompt = 64
new_tokens = 16
limits = { throughput_tok_s = 50 }

[[workloads]]
name = "long"
batch = 1
prompt = 640
new_tokens = 16
[workloads.limits]
memory_mb = 4000.5
"""


def test_targets_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TOML)
    found = read_targets(tmp_path / "t.toml")
    assert [(each.name, each.key, each.limits) for each in found.workloads] == [
        ("chat", (8, 64, 16), {"throughput_tok_s": 50.0}),
        ("long", (1, 640, 16), {"memory_mb": 4000.5}),
    ]


@pytest.mark.parametrize(
    ("old_text", "new_text", "message"),
    [
        ("schema = 1", "schema = 2", r"t.toml:1: schema = 2 is unknown"),
        ("schema = 1", "", "schema is missing"),
        ("batch = 8", "batch = 0", r"t.toml:8: workloads\[0\].batch = 0 is out of range: give 1 or more"),
        ("batch = 1", "batch = true", r"t.toml:15: workloads\[1\].batch = True is a bool: give an integer"),
        ("batch = 8", "bacth = 8", r"workloads\[0\].batch is missing; 'bacth' is no key"),
        (
            "prompt = 640",
            "prompt = 640\npromt = 1",
            r"t.toml:17: workloads\[1\].promt is no key .* did you mean 'prompt'",
        ),
        ("memory_mb = 4000.5", "memory_mb = -1", r"t.toml:19: workloads\[1\].limits.memory_mb = -1 is out of range"),
        ("memory_mb = 4000.5", "memory_mb = nan", "out of range"),
        ("memory_mb = 4000.5", "memory = 1", r"t.toml:19: .*did you mean 'memory_mb'"),
        ("memory_mb = 4000.5", "", "limits nothing"),
        ('name = "long"', 'name = "chat"', "stands twice"),
        ("[[workloads]]", "[workloads", "not TOML"),
        ('device = "Chip"', 'device = ""', "not empty"),
    ],
)
def test_bad_targets_are_refused_with_their_place(old_text: str, new_text: str, message: str, tmp_path: Path) -> None:
    assert old_text in TOML
    (tmp_path / "t.toml").write_text(TOML.replace(old_text, new_text, 1))
    with pytest.raises(UsageError, match=message):
        read_targets(tmp_path / "t.toml")
